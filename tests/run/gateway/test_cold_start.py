"""Requests for a model that no replica serves: held until one does, told that they wait, or refused with when to come."""

import asyncio
import json
import re

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, MODEL, Fake, Running, fleet_of, pool_of, running, until
from tests.run.pick.envoys import free_port

from crosstie.core.fleet import Fleet, Serving
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.gateway import cold_start

HOLDS = msgspec.structs.replace(CALM, hold_s=100.0, start_s=60.0, health_every_s=0.05)


def fleet_at(port: int, serving: Serving = HOLDS) -> Fleet:
    return fleet_of(pool_of("p", f"http://127.0.0.1:{port}/v1"), serving=serving)


async def begun(port: int) -> Fake:
    fake = Fake("late")
    await fake.start(port)
    return fake


async def held(at: Running, count: int) -> None:
    await until(lambda: sum(len(one.held) for one in at.gateway._cold_starts._starts.values()) == count)


def test_requests_wait_for_the_first_replica_and_are_answered() -> None:
    async def main() -> None:
        port = free_port()
        async with running(fleet_at(port)) as at:
            asked = [asyncio.ensure_future(at.ask(stream=stream)) for stream in (False, True)]
            await held(at, 2)
            assert await at.metric("crosstie_held", model=MODEL) == 2
            assert await at.metric("crosstie_cold_starts_total", outcome="held") == 2
            fake = await begun(port)
            whole, streamed = [await one for one in asked]
            assert (whole.status, streamed.status) == (200, 200)
            assert b"x-crosstie-pool" in dict(streamed.headers)
            assert await at.metric("crosstie_held", model=MODEL) == 0
            assert await at.metric("crosstie_requests_total", outcome="served") == 2
            fake.crash()

    run_on_loop(main())


def test_a_stream_is_told_that_it_waits_and_goes_on_as_the_same_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "_COMMENT_EVERY_S", 0.0)

    async def main() -> None:
        port = free_port()
        async with running(fleet_at(port)) as at:
            asked = asyncio.ensure_future(at.ask(stream=True))
            await until(lambda: any(one.reply.__class__.__name__ == "ProgressReply" for one in at.gateway.exchanges))
            await asyncio.sleep(0.3)
            fake = await begun(port)
            answer = await asked
            assert answer.status == 200
            comments, first, rest = answer.body.partition(b"data: ")
            told = rf"(: crosstie: a replica of {MODEL} is starting, expected in \d+ s\n\n)+"
            assert re.fullmatch(told, comments.decode())
            assert first + rest == (await at.ask(stream=True)).body
            fake.crash()

    run_on_loop(main())


def test_after_a_comment_an_error_is_told_inside_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold_start, "_COMMENT_EVERY_S", 0.0)

    async def main() -> None:
        async with running(fleet_at(free_port(), msgspec.structs.replace(HOLDS, hold_s=0.6, start_s=0.5))) as at:
            answer = await at.ask(stream=True)
            assert answer.status == 200
            said = json.loads(answer.body.rpartition(b"data: {")[2].partition(b"\n\n")[0].join([b"{", b""]))
            assert said["error"]["code"] == "model_starting"
            assert answer.body.endswith(b"data: [DONE]\n\n")
            assert await at.metric("crosstie_cold_starts_total", outcome="expired") == 1

    run_on_loop(main())


@pytest.mark.parametrize(
    ("serving", "headers", "after"),
    [
        # Longer than any request may wait; longer than this one may, by its own word.
        (msgspec.structs.replace(HOLDS, hold_s=10.0), {}, "60"),
        (HOLDS, {"x-crosstie-ttft-ms": "2000"}, "60"),
    ],
)
def test_who_would_wait_too_long_is_refused_at_once_with_when_to_come(
    serving: Serving, headers: dict[str, str], after: str
) -> None:
    async def main() -> None:
        async with running(fleet_at(free_port(), serving)) as at:
            answer = await at.ask(headers=headers)
            error = json.loads(answer.body)["error"]
            assert (answer.status, error["code"]) == (503, "model_starting")
            assert error["message"].startswith(f"{MODEL} has no replica now: one is expected in about 60 s")
            assert dict(answer.headers)[b"retry-after"] == after.encode()
            assert await at.metric("crosstie_cold_starts_total", outcome="refused") == 1

    run_on_loop(main())


def test_no_more_than_so_many_are_held_and_who_leaves_makes_room() -> None:
    async def main() -> None:
        async with running(fleet_at(free_port(), msgspec.structs.replace(HOLDS, max_held=1))) as at:
            first = asyncio.ensure_future(at.ask())
            await held(at, 1)
            refused = await at.ask()
            assert (refused.status, b"serve.max_held" in refused.body) == (503, True)
            first.cancel()
            await held(at, 0)
            second = asyncio.ensure_future(at.ask())
            await held(at, 1)
            second.cancel()

    run_on_loop(main())


def test_without_the_setting_nothing_is_held() -> None:
    async def main() -> None:
        async with running(fleet_at(free_port(), CALM)) as at:
            answer = await at.ask()
            assert (answer.status, json.loads(answer.body)["error"]["code"]) == (503, "no_backend")

    run_on_loop(main())


def test_a_start_teaches_how_long_the_next_takes() -> None:
    async def main() -> None:
        port = free_port()
        async with running(fleet_at(port)) as at:
            asked = asyncio.ensure_future(at.ask())
            await held(at, 1)
            fake = await begun(port)
            assert (await asked).status == 200
            assert at.gateway._cold_starts._expected_s(MODEL) < HOLDS.start_s
            fake.crash()

    run_on_loop(main())
