"""Another model in the place of the one that was asked for: when, for whom, and how the client is told."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, HASTY, MODEL, Fake, Running, fakes, fleet_of, pool_of, running, until
from tests.wire.test_server import on_loop

from crosstie.core.fleet import Serving

SMALL = "small"


@asynccontextmanager
async def over_two(serving: Serving = HASTY, **changes: Any) -> AsyncIterator[tuple[Running, Fake, Fake]]:
    """A large model, and a small one that takes its requests."""
    async with fakes(2) as [large, small]:
        pools = (pool_of("large", large.url, **changes), pool_of("small", small.url, model=SMALL))
        fleet = fleet_of(*pools, serving=serving, fallbacks={MODEL: (SMALL,)})
        async with running(fleet) as at:
            yield at, large, small


@pytest.mark.parametrize("mode", ["error", "cut", "hang", "full", "login-page"])
@pytest.mark.parametrize("stream", [True, False])
def test_while_nobody_who_has_it_answers_another_model_does(mode: str, stream: bool) -> None:
    @on_loop
    async def test() -> None:
        async with over_two() as (at, large, small):
            large.mode = mode
            answer = await at.ask(stream=stream, max_tokens=2)
            assert (answer.status, answer.header(b"x-crosstie-pool")) == (200, b"small")
            said = answer.header(b"x-crosstie-fallback") or b""
            assert said.startswith(f"{MODEL}: ".encode())
            assert b"the backend of pool large" in said
            assert small.hit[-1][1]["model"] == SMALL
            assert await at.metric("crosstie_requests_total", model=SMALL, outcome="served") == 1

    test()


@on_loop
async def test_while_it_is_down_another_model_answers_and_then_it_does_again() -> None:
    async with over_two() as (at, large, _):
        large.healthy = False
        await until(lambda: not at.gateway.backends[large.url].replica.up)
        answer = await at.ask()
        assert (
            answer.header(b"x-crosstie-fallback") == f"{MODEL}: no replica is up: 1 down or draining, 0 tried".encode()
        )
        large.healthy = True
        await until(lambda: at.gateway.backends[large.url].replica.up)
        answer = await at.ask()
        assert (answer.header(b"x-crosstie-pool"), answer.header(b"x-crosstie-fallback")) == (b"large", None)


@on_loop
async def test_who_has_waited_in_vain_gets_another_model() -> None:
    async with over_two(msgspec.structs.replace(CALM, queue_s=0.5), max_in_flight=1) as (at, large, _):
        large.mode = "hang"
        first = asyncio.create_task(at.ask(stream=True))
        await until(lambda: large.held)
        answer = await at.ask()
        assert (answer.status, answer.header(b"x-crosstie-pool")) == (200, b"small")
        assert (answer.header(b"x-crosstie-fallback") or b"").startswith(f"{MODEL}: it waited".encode())
        first.cancel()


@on_loop
async def test_nobody_who_asks_for_what_no_model_does_gets_another() -> None:
    async with over_two() as (at, large, small):
        large.mode = "bad"
        answer = await at.ask()
        assert (answer.status, answer.header(b"x-crosstie-fallback")) == (400, None)
        assert not small.hit
        # And where that one has nobody either, the answer is the first one's.
        large.mode = small.mode = "error"
        answer = await at.ask()
        assert (answer.status, json.loads(answer.body)["error"]["message"]) == (500, "engine broke")
        small.crash()
        await until(lambda: not at.gateway.backends[small.url].replica.up)
        assert (await at.ask()).status == 500
        assert large.hit[-1][1]["model"] == MODEL
