"""What a backend says of itself, taken for what it is: keep-alives, choices that were cut, when to come back."""

import json
from email.utils import formatdate
from time import time

import pytest
from tests.run.gateway.fakes import HASTY, Running, fakes, fleet_of, pool_of, running, until
from tests.wire.test_server import on_loop

from crosstie_gateway.gateway.errors import asked_to_wait_s

# Keep-alives


@on_loop
async def test_a_stream_that_only_pings_on_has_fallen_silent() -> None:
    async with fakes() as [fake]:
        fake.mode = "half-then-pings"
        async with running(fleet_of(pool_of("one", fake.url), serving=HASTY)) as at:
            answer = await at.ask(stream=True)
            assert b"fell silent" in answer.body
            assert answer.body.count(b'"content"') == 2
            # What comes once the stream is the client's is passed on: proxies before it wait for it.
            assert b"\n: ping\n\n" in answer.body
            assert await at.metric("crosstie_requests_total", outcome="cut") == 1


@on_loop
async def test_a_ping_is_no_first_token() -> None:
    async with fakes() as [fake]:
        fake.mode = "pings"
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            asked = at.gateway.loop.create_task(at.ask(stream=True))
            await until(lambda: fake.pings > 3)
            (exchange,) = at.gateway.exchanges
            assert not exchange.reply.started
            assert exchange.record.ttft_s is None
            assert exchange.attempt is not None
            assert exchange.attempt.flight.first_at is None
            (reply,) = fake.held
            reply.write(b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n')
            await until(lambda: exchange.record.ttft_s is not None)
            reply.end()
            assert b'"content":"a"' in (await asked).body
            assert await at.metric("crosstie_ttft_seconds_count") == 1


# When to come back


def left_alone_s(at: Running, pool: str) -> float:
    (found,) = [one for one in at.gateway.live.pools if one.name == pool]
    return found.replicas[0].busy_until - at.gateway.now()


@on_loop
async def test_a_backend_that_says_when_it_has_room_is_left_alone_until_then() -> None:
    async with fakes(2) as [full, other]:
        full.mode, full.full_headers = "full", b"retry-after: 50\r\n"
        fleet = fleet_of(pool_of("full", full.url, usd_per_gpu_hour=0.1), pool_of("other", other.url))
        async with running(fleet) as at:
            assert (await at.ask()).header(b"x-crosstie-pool") == b"other"
            assert 1.0 < left_alone_s(at, "full") <= 50.0
            # Nobody may keep itself out of the fleet for days.
            full.full_headers = b"retry-after: 86400\r\n"
            at.gateway.live.pools[0].replicas[0].busy_until = 0.0
            assert (await at.ask()).header(b"x-crosstie-pool") == b"other"
            assert 1.0 < left_alone_s(at, "full") <= 60.0
            assert len(full.hit) == 2


@pytest.mark.parametrize("mode", ["full", "limited"])
def test_of_those_that_are_full_the_client_is_told_of_the_first_to_have_room(mode: str) -> None:
    @on_loop
    async def test() -> None:
        async with fakes(2) as [late, soon]:
            late.mode = soon.mode = mode
            late.full_headers, soon.full_headers = b"retry-after: 55\r\n", b"retry-after: 25\r\n"
            # Whoever is asked last is not the one whose word counts.
            fleet = fleet_of(pool_of("late", late.url), pool_of("soon", soon.url, usd_per_gpu_hour=0.1), serving=HASTY)
            async with running(fleet) as at:
                answer = await at.ask()
                assert answer.status == (503 if mode == "full" else 429)
                assert [value for name, value in answer.headers if name == b"retry-after"] != [b"55"]
                assert 1 < int(answer.header(b"retry-after") or 0) <= 26
                # And so is who waits in vain.
                answer = await at.ask()
                assert (answer.status, b"fleet_saturated" in answer.body) == (429, True)
                assert 1 < int(answer.header(b"retry-after") or 0) <= 26
                assert (len(late.hit), len(soon.hit)) == (1, 1)

    test()


@on_loop
async def test_the_limit_of_a_key_that_is_passed_on_keeps_nobody_else_away() -> None:
    async with fakes() as [fake]:
        fake.mode, fake.full_headers = "limited", b"retry-after: 50\r\n"
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            answer = await at.ask(headers={"authorization": "Bearer sk-mine"})
            assert (answer.status, answer.header(b"retry-after")) == (429, b"50")
            assert left_alone_s(at, "one") <= 1.0


@pytest.mark.parametrize(
    ("name", "value", "least", "most"),
    [
        (b"retry-after", b"7", 7.0, 7.0),
        (b"retry-after-ms", b"1500", 1.5, 1.5),
        (b"retry-after", b"soon", 0.0, 0.0),
        (b"retry-after", b"-5", 0.0, 0.0),
        (b"retry-after", b"9" * 400, 1e9, 1e9),
        (b"retry-after", b"Mon, 16 Nov 99999 12:00:00 GMT", 0.0, 0.0),
        (b"x-other", b"7", 0.0, 0.0),
    ],
)
def test_retry_after_is_read_in_all_of_its_forms(name: bytes, value: bytes, least: float, most: float) -> None:
    assert least <= asked_to_wait_s([(b"server", b"x"), (name, value)]) <= most


def test_retry_after_may_be_a_date() -> None:
    # Not a parameter: a test's name that holds the time differs between the processes that collect it.
    ahead, gone = (formatdate(time() + s, usegmt=True).encode() for s in (3600, -3600))
    assert 1.0 <= asked_to_wait_s([(b"retry-after", ahead)]) <= 3600.0
    assert asked_to_wait_s([(b"retry-after", gone)]) == 0.0


# Choices

BOTH = [(0, None), (1, None), (0, "stop"), (1, "length")]
ONE = [(0, None), (1, None), (0, "stop")]
# Its second choice has not even begun.
FIRST = [(0, None), (0, "stop")]


@pytest.mark.parametrize(
    ("script", "ending", "whole"),
    [
        (BOTH, ("done",), True),
        (BOTH, (), True),
        # All is said but the last word.
        (BOTH, ("cut",), True),
        # Of an engine that knows only one and ends in order.
        (FIRST, ("done",), True),
        (ONE, ("done",), False),
        (ONE, (), False),
        (ONE, ("cut",), False),
        (ONE, ("done", "cut"), False),
        (FIRST, (), False),
        (FIRST, ("cut",), False),
    ],
)
@pytest.mark.parametrize("asked", ["n", "prompts"])
def test_a_stream_of_several_choices_is_served_when_all_of_them_are(
    asked: str, script: list[tuple[int, str | None]], ending: tuple[str, ...], whole: bool
) -> None:
    @on_loop
    async def test() -> None:
        async with fakes() as [fake]:
            fake.mode, fake.script, fake.ending = "choices", script, ending
            async with running(fleet_of(pool_of("one", fake.url))) as at:
                body = {"n": 2} if asked == "n" else {"prompt": ["a", "b"], "messages": []}
                path = "/v1/chat/completions" if asked == "n" else "/v1/completions"
                answer = await at.ask(path, stream=True, **body)
                assert answer.body.count(b'"index"') == len(script)
                assert (b"upstream_cut" in answer.body) == (not whole)
                # Who reads up to there believes that it has all.
                assert not (b"[DONE]" in answer.body and not whole)
                assert await at.metric("crosstie_requests_total", outcome="served" if whole else "cut") == 1

    test()


@pytest.mark.parametrize("finish", [None, "abort"])
def test_a_whole_answer_with_an_unfinished_choice_is_asked_for_elsewhere(finish: str | None) -> None:
    @on_loop
    async def test() -> None:
        async with fakes(2) as [bad, good]:
            bad.mode, bad.script = "choices", [(0, "stop"), (1, finish)]
            good.mode, good.script = "choices", [(0, "stop"), (1, "length")]
            fleet = fleet_of(pool_of("bad", bad.url, usd_per_gpu_hour=0.1), pool_of("good", good.url))
            async with running(fleet) as at:
                answer = await at.ask(n=2)
                assert (answer.status, json.loads(answer.body)["served_by"]) == (200, good.name)
                assert await at.metric("crosstie_backend_faults_total", pool="bad") == 1

    test()
