"""Two gateways over the same shared pool, which know of each other by Redis alone: one leads, and both agree."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from redis import Redis
from tests.run.gateway.fakes import CATALOG, Running, fleet_of, running, until
from tests.run.hosting.shared import MODELS, PATIENT, SPEED, shared_pool
from tests.run.share.proxy import Proxy, proxy
from tests.run.share.redis_server import RedisServer, redis_server

from crosstie.core.fleet import SharedState
from crosstie_gateway.emulate.fleet import EmulatedFleet, start
from crosstie_gateway.emulate.hosted import HostedEngine
from crosstie_gateway.hosting.hosting import Hosting

pytestmark = pytest.mark.database

A, B, C, *_ = MODELS
# Long beside what a busy machine may take for a turn, short beside what a test may take.
HOLD_S = 2.0


class Site(NamedTuple):
    running: Running
    hosting: Hosting
    proxy: Proxy

    def states(self, *models: str) -> dict[str, str]:
        replicas = [one for one in self.running.gateway.live.replicas() if one.presence is not None]
        return {one.key: one.presence.state for one in replicas if one.presence is not None}

    async def status(self, model: str) -> int:
        return (await self.running.ask(model=model, max_tokens=4)).status


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def gateways(
    redis: RedisServer, *models: str, number: int = 2, **pool: Any
) -> AsyncIterator[tuple[EmulatedFleet, list[Site]]]:
    made = await start(CATALOG, fleet_of(shared_pool(*models, **pool), serving=PATIENT), speed=SPEED)
    try:
        async with contextlib.AsyncExitStack() as stack:
            sites = []
            for _ in range(number):
                between = await stack.enter_async_context(proxy(redis.port))
                fleet = msgspec.structs.replace(made.fleet, state=SharedState(redis=between.url))
                hosting = Hosting(every_s=0.02, verify_s=0.2, hold_s=HOLD_S)
                one = await stack.enter_async_context(running(fleet, components=[hosting], speed=SPEED))
                stack.push_async_callback(hosting.stop)
                sites.append(Site(one, hosting, between))
            yield made, sites
    finally:
        await made.close()


def leading(sites: list[Site]) -> list[Site]:
    return [one for one in sites if one.hosting.leads]


def awake(made: EmulatedFleet) -> dict[int, list[str]]:
    """By machine, the models whose engines have memory there."""
    found: dict[int, list[str]] = {}
    for one in made.replicas:
        assert isinstance(one, HostedEngine)
        if one.state != "unloaded":
            found.setdefault(one.index, []).append(one.takes.model)
    return found


def all_released(server: RedisServer) -> bool:
    with Redis(port=server.port) as client:
        claims = [client.get(key) for key in client.scan_iter("crosstie:host:*:claim:*")]
    return all(str(one).startswith("b'free") for one in claims)


def test_both_agree_on_what_is_loaded_and_one_loads(redis: RedisServer) -> None:
    async def run() -> None:
        # One machine with room for one model.
        async with gateways(redis, A, B, replicas=1, memory_gib=25.0) as (made, sites):
            await until(lambda: len(leading(sites)) == 1)
            (first,) = leading(sites)
            (second,) = [one for one in sites if one is not first]
            # Whoever is asked: it is loaded once, and both know.
            assert await second.status(A) == 200
            assert await first.status(A) == 200
            await until(lambda: first.states() == second.states())
            # Another in its place: the one that leads puts the first away after the other gateway's last request.
            answers = await asyncio.gather(*(site.status(model) for site in sites for model in (A, B, A, B)))
            assert set(answers) == {200}
            await until(lambda: first.states() == second.states())
            assert len(leading(sites)) == 1
            assert all(len(models) <= 1 for models in awake(made).values())

    asyncio.run(run())


def test_a_leader_that_is_cut_off_stops_and_the_other_goes_on(redis: RedisServer) -> None:
    async def run() -> None:
        async with gateways(redis, A, B, replicas=1, memory_gib=25.0) as (made, sites):
            await until(lambda: len(leading(sites)) == 1)
            (first,) = leading(sites)
            (second,) = [one for one in sites if one is not first]
            assert await first.status(A) == 200
            assert first.hosting.share is not None
            assert second.hosting.share is not None
            lease, told = first.hosting.share.lease, second.hosting.share.residents
            number = lease.number
            # The load has ended, and so it is known; else the other would wait until it must have.
            await until(lambda: not lease.claimed and not told.claims and all_released(redis))
            # The other model has asked for the place, and the first is about to leave it.
            slot = first.hosting.pools["shared"].slots[0]
            first.hosting.pools["shared"].residency.wanted(B, first.running.gateway.now(), lambda *_: 1)
            slot.claimed_by, slot.leaving = B, frozenset([A])
            first.proxy.cut()
            await until(lambda: not first.hosting.leads)
            # It serves what is there, by the word of the engines.
            assert await first.status(A) == 200
            await until(lambda: second.hosting.leads)
            assert second.hosting.share.lease.number > number
            assert await second.status(B) == 200
            # It finds out by asking, and does not load the other over it.
            waits = asyncio.create_task(first.status(A))
            await until(lambda: "resident" in first.states().values() and first.states() == second.states())
            assert all(len(models) <= 1 for models in awake(made).values())
            first.proxy.mend()
            # Its request is heard of now, by the one that leads.
            assert await waits == 200
            assert leading(sites) == [second]
            await until(lambda: first.states() == second.states())

    asyncio.run(run())


def test_without_redis_nothing_is_loaded_and_what_is_there_is_served(redis: RedisServer) -> None:
    async def run() -> None:
        async with gateways(redis, A, B, replicas=1, memory_gib=25.0) as (made, sites):
            await until(lambda: len(leading(sites)) == 1)
            assert await sites[0].status(A) == 200
            redis.kill()
            await until(lambda: not leading(sites))
            for one in sites:
                assert await one.status(A) == 200
                await until(lambda one=one: one.hosting.absent(B) is not None)  # type: ignore[misc]
                await until(lambda one=one: "Redis is away" in (one.hosting.absent(B) or ("",))[0])  # type: ignore[misc]
            waits = [asyncio.create_task(one.status(B)) for one in sites]
            redis.start()
            assert await asyncio.gather(*waits) == [200, 200]
            assert len(leading(sites)) == 1
            assert all(len(models) <= 1 for models in awake(made).values())

    asyncio.run(run())


def test_one_that_ends_leaves_the_lead_at_once(redis: RedisServer) -> None:
    async def run() -> None:
        async with gateways(redis, A, B, replicas=1, number=1) as (_, (first,)):
            await until(lambda: first.hosting.leads)
            await first.hosting.stop()
        async with gateways(redis, A, B, replicas=1, number=1) as (_, (second,)):
            assert second.hosting.share is not None
            await until(lambda: second.hosting.leads)
            assert second.hosting.share.lease._absent_since is None, "it did not have to watch for the other"

    asyncio.run(run())
