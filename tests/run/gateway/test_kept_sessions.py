"""Engines that keep the caches of sessions, over emulated ones: what is kept, for whom, and until when."""

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.run.gateway.fakes import CALM, CATALOG, Running, fakes, fleet_of, pool_of, running, until
from tests.wire.test_server import on_loop

from crosstie_gateway.emulate.fleet import start
from crosstie_gateway.emulate.kv_events import TellingCache

SPEED = 20.0
FLAG = ("--enable-session-radix-cache",)
# Bytes of a prompt, four to a token, and tokens that the cache has room for: three prompts and a half.
PROMPT, ROOM = 8000, 7000


@contextlib.asynccontextmanager
async def kept(settings: tuple[str, ...], stack: str = "sglang") -> AsyncIterator[tuple[Running, TellingCache]]:
    pool = pool_of(
        "one", accelerator="mi300x", precision="fp8", stack=stack, replicas=1, usd_per_gpu_hour=1.3, settings=settings,
    )  # fmt: skip
    emulated = await start(CATALOG, fleet_of(pool, serving=CALM), speed=SPEED)
    try:
        cache = emulated.replica("one", 0).replica.cache
        cache.blocks.capacity_tokens = ROOM
        async with running(emulated.fleet, speed=SPEED) as at:
            yield at, cache
    finally:
        await emulated.close()


async def turn(at: Running, text: str, session: str | None = None, **hints: str) -> int:
    """Tokens of its prompt that were in the engine's cache."""
    headers = {} if session is None else {"x-crosstie-session": session}
    headers |= {f"x-crosstie-{name.replace('_', '-')}": value for name, value in hints.items()}
    answer = await at.ask("/v1/completions", headers=headers, prompt=text, max_tokens=4)
    assert answer.status == 200, answer.body
    usage: Any = json.loads(answer.body)["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize(("settings", "found"), [(FLAG, True), ((), False)])
def test_who_comes_back_finds_its_cache_after_a_flood_of_others(settings: tuple[str, ...], found: bool) -> None:
    @on_loop
    async def test() -> None:
        async with kept(settings) as (at, cache):
            assert await turn(at, "a" * PROMPT, "a", pause_ms="60000") == 0
            for letter in "bcdefg":
                await turn(at, letter * PROMPT)
            cached = await turn(at, "a" * (PROMPT + 400), "a", pause_ms="60000")
            assert (cached > 1900) is found
            assert len(cache.sessions) == found

    test()


@on_loop
async def test_who_does_not_come_back_is_kept_by_nobody() -> None:
    async with kept(FLAG) as (at, cache):
        await turn(at, "a" * PROMPT, "a")
        assert cache.sessions == {}, "after a first turn nobody knows that another comes"
        await turn(at, "a" * (PROMPT + 400), "a")
        (name,) = cache.sessions
        await turn(at, "a" * (PROMPT + 800), "a", last_turn="true")
        await until(lambda: not cache.sessions)
        # By the same name it is another session, and kept by another number: the engine takes none that was closed.
        await turn(at, "a" * PROMPT, "a", pause_ms="60000")
        assert cache.sessions.keys().isdisjoint({name, ""})
        assert len(cache.sessions) == 1


@on_loop
async def test_a_session_that_is_not_waited_for_any_more_is_let_go() -> None:
    async with kept(FLAG) as (at, cache):
        await turn(at, "a" * PROMPT, "a", pause_ms="50")
        assert len(cache.sessions) == 1
        # Twice the pause that it said, at the fleet's pace; looked at whenever a request comes.
        for _ in range(100):
            await turn(at, "b" * 400)
            if not cache.sessions:
                break
        assert cache.sessions == {}


@on_loop
async def test_engines_of_others_are_told_nothing() -> None:
    async with fakes(2) as (sglang, vllm):
        for fake, stack, says in ((sglang, "sglang", True), (vllm, "vllm", False)):
            pool = pool_of("one", fake.url, accelerator="mi300x", precision="fp8", stack=stack, settings=FLAG)
            async with running(fleet_of(pool)) as at:
                await at.ask(headers={"x-crosstie-session": "a", "x-crosstie-pause-ms": "9000"})
            body = json.loads(fake.hit[0][0].body)
            assert ("session_id" in body) is says
            assert body["messages"] == [{"role": "user", "content": "hello"}]
