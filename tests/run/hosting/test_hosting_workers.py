"""Several workers over the same shared pool: one leads, the others report to it and do as it says."""

import asyncio
import json
from pathlib import Path
from typing import Any

from tests.run.gateway.fakes import CATALOG, Running, fleet_of, running, until
from tests.run.hosting.shared import MODELS, PATIENT, SPEED, shared_pool, with_hosts

from crosstie_gateway.emulate.fleet import start
from crosstie_gateway.hosting.hosting import Hosting
from crosstie_gateway.service.process import Component, GatewayProcess
from crosstie_gateway.service.worker_link import (
    FollowerReport,
    WorkerAnswer,
    WorkerLink,
    WorkerRequest,
    decode_answer,
    decode_request,
)
from crosstie_gateway.wire.frames import encode

A, B, *_ = MODELS


class Linked(WorkerLink, Component):
    """Workers that hear each other as over a socket. Those in `lost` do not answer."""

    def __init__(self, folder: Path, linked: list[GatewayProcess], lost: list[GatewayProcess]):
        super().__init__(folder, 0, 2, {})
        self._linked, self._lost = linked, lost

    async def start(self, process: GatewayProcess) -> None:
        self._own, process.link = process, self
        self._linked.append(process)

    async def ask(self, request: WorkerRequest) -> list[WorkerAnswer]:
        await asyncio.sleep(0)
        heard = decode_request(encode(request))
        others = [one for one in self._linked if one is not self._own and one not in self._lost]
        handlers = [one.handlers.get(type(heard)) for one in others]
        return [decode_answer(encode(handler(heard))) for handler in handlers if handler is not None]


async def asked(one: Running, model: str, **more: Any) -> tuple[int, str]:
    answer = await one.ask(model=model, **{"max_tokens": 4, **more})
    return answer.status, (answer.header(b"x-crosstie-reason") or b"").decode()


def test_a_model_that_a_follower_still_waits_for_after_the_file_has_lost_it(tmp_path: Path) -> None:
    async def run() -> None:
        made = await start(CATALOG, fleet_of(shared_pool(A, B, replicas=1), serving=PATIENT), speed=SPEED)
        hosting = Hosting(every_s=0.02, verify_s=0.2)
        async with running(made.fleet, components=[Linked(tmp_path, [], []), hosting], speed=SPEED) as one:
            one.process.handlers[FollowerReport](FollowerReport(1, {B: 1}, [B]))
            fleet = with_hosts(made.fleet, A)
            one.gateway.load(fleet)
            hosting.reloaded(fleet)
            await until(lambda: not hosting._again.is_set())
            assert (await asked(one, A))[0] == 200
            assert not [line for line in one.notices if "shared pools" in line]
            await hosting.stop()
        await made.close()

    asyncio.run(run())


def test_whatever_goes_wrong_once_models_are_loaded_afterwards(tmp_path: Path) -> None:
    async def run() -> None:
        made = await start(CATALOG, fleet_of(shared_pool(A, B, replicas=1), serving=PATIENT), speed=SPEED)
        hosting = Hosting(every_s=0.02, verify_s=0.2)
        async with running(made.fleet, components=[Linked(tmp_path, [], []), hosting], speed=SPEED) as one:
            pool, begins = hosting.pools["shared"], hosting.pools["shared"].begin_loads
            failed = 0

            def fails_twice(waiting: Any) -> None:
                nonlocal failed
                failed += 1
                if failed <= 2:
                    raise ZeroDivisionError("once")
                begins(waiting)

            pool.begin_loads = fails_twice  # type: ignore[method-assign]
            assert (await asked(one, A))[0] == 200
            assert [line for line in one.notices if "shared pools" in line] == [
                "shared pools: ZeroDivisionError('once')"
            ]
            await hosting.stop()
        await made.close()

    asyncio.run(run())


def test_one_of_them_leads(tmp_path: Path) -> None:
    async def run() -> None:
        fleet = fleet_of(shared_pool(A, B, replicas=1, memory_gib=25.0), serving=PATIENT)
        made = await start(CATALOG, fleet, speed=SPEED)
        linked, lost = list[GatewayProcess](), list[GatewayProcess]()
        first, second = Hosting(every_s=0.02, verify_s=0.2), Hosting(every_s=0.02, verify_s=0.2)
        async with (
            running(made.fleet, components=[Linked(tmp_path, linked, lost), first], speed=SPEED) as leader,
            running(made.fleet, components=[Linked(tmp_path, linked, lost), second], speed=SPEED) as follower,
        ):
            assert (first.speaks, second.speaks) == (True, False)
            # Asked of the one that does not decide: it is loaded for it, and known to both.
            status, why = await asked(follower, A)
            assert (status, "for a load" in why) == (200, True)
            assert (await asked(leader, A))[1].endswith("; loaded")
            assert sum(each.asked for each in first.pools["shared"].residency.counts.values()) == 2
            assert await leader.metric("crosstie_model_loads_total") == 1
            assert "crosstie_model_loads_total" not in (await follower.get("/metrics")).body.decode()
            # What the other has in flight is not put away.
            made.replica("shared", 0, A).replica.pace(slower=1000.0)
            long = asyncio.create_task(follower.ask(model=A, max_tokens=400, ignore_eos=True))
            await until(lambda: sum(one.in_flight for one in second.gateway.live.replicas()) == 1)
            other = asyncio.create_task(asked(leader, B))
            await until(lambda: leader.gateway.waiting)
            made.replica("shared", 0, A).replica.pace(slower=1.0)
            answer = await long
            assert answer.status == 200
            assert json.loads(answer.body)["usage"]["completion_tokens"] == 400
            assert (await other)[0] == 200
            assert sum(each.evictions for each in first.pools["shared"].residency.counts.values()) == 1
            # The one that decides goes, and the other takes over, knowing what is there.
            await until(lambda: second.is_loaded(B))
            lost.append(leader.process)
            await first.stop()
            await until(lambda: second.speaks)
            assert (await asked(follower, B))[1].endswith("; loaded")
            assert (await asked(follower, A))[0] == 200
            await second.stop()
        await made.close()

    asyncio.run(run())
