"""Two endpoint pickers that know of each other by Redis alone: what one has sent is there for the other."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, fakes, fleet_of, in_folder, pool_of
from tests.run.pick.proxies import Call, Proxy, asked, proxy
from tests.run.pick.test_command import destination, endpoints, picker, port_of
from tests.run.service.processes import put
from tests.run.share.redis_server import redis_server
from tests.waiting import LIMIT_S

from crosstie.catalog.fleet_text import fleet_text
from crosstie.core.fleet import SharedState

pytestmark = pytest.mark.database


def written(folder: Path, place: str, redis: str) -> Path:
    """One place for all, and no patience."""
    serving = msgspec.structs.replace(CALM, queue_s=0.05)
    fleet = fleet_of(pool_of("amd", place, max_in_flight=1), serving=serving, state=SharedState(redis=redis))
    file = folder / "fleet.toml"
    put(file, fleet_text(fleet))
    return file


async def comes_to(port: int, there: bool) -> None:
    """Asks until it is sent somewhere, or nowhere."""
    async with asyncio.timeout(LIMIT_S):
        while bool(await destination(port)) is not there:
            await asyncio.sleep(0.05)


async def taken(envoy: Proxy) -> Call:
    """A request that has the place. Whoever had it before has gone, and Redis may not have heard of it yet."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            call = envoy.call()
            await call.head()
            await call.body(asked())
            if endpoints(await call.says()):
                return call
            call.gone()
            await asyncio.sleep(0.05)


@in_folder
async def test_the_place_that_one_has_taken_is_taken_for_the_other(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        server = await asyncio.to_thread(stack.enter_context, redis_server(tmp_path))
        async with fakes(1) as (fake,):
            file = written(tmp_path, fake.url, server.url)
            async with picker(tmp_path, file) as one, picker(tmp_path, file) as two:
                await comes_to(port_of(two), there=True)
                async with proxy(port_of(one)) as envoy:
                    call = await taken(envoy)
                    await comes_to(port_of(two), there=False)
                    call.gone()
                await comes_to(port_of(two), there=True)
                for running in (one, two):
                    assert "Traceback" not in running.errors
