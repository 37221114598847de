"""Streams that a backend breaks off, and who goes on with them: each way of breaking off, each thing that stands against
going on, and what the client, its key and the metrics see of it."""

import asyncio
import json
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from tests.run.gateway.fakes import CALM, HASTY, MODEL, Running, fleet_of, pool_of, running, until
from tests.run.gateway.tellers import PROMPT_TOKENS, STORY, WORDS, Heard, Teller, tellers
from tests.waiting import LIMIT_S

from crosstie.core.fleet import Fleet, Serving
from crosstie.wire.fetch import fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.gateway.record import RequestRecord

_ASKED = json.dumps({"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "x"}]})
STREAM = f"content-length: {len(_ASKED)}\r\n\r\n{_ASKED}"
CUTS = ["cut-mid-event", "polite-cut", "half-then-silent", "aborted", "error-later"]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
COUNTED = {"include_usage": True}


def fleet_over(*made: Teller, serving: Serving = CALM, **changes: Any) -> Fleet:
    """The first is the cheapest, so it is asked first."""
    pools = [pool_of(one.name, one.url, usd_per_gpu_hour=1.0 + at, **changes) for at, one in enumerate(made)]
    return fleet_of(*pools, serving=serving)


async def identified(at: Running) -> None:
    await until(lambda: all(backend.identified for backend in at.gateway.backends.values()))


def reset(writer: asyncio.StreamWriter) -> None:
    """Leaves so that the other side notices at once: who only says no more may still want to listen."""
    raw = writer.get_extra_info("socket")
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def heard(at: Running, path: str = CHAT, headers: dict[str, str] | None = None, **body: Any) -> Heard:
    if path == CHAT:
        return Heard(await at.ask(path, headers, stream=True, **body))
    said = {"model": MODEL, "prompt": "once", "stream": True, **body}
    return Heard(await fetch(at.origin, "POST", path, body=json.dumps(said).encode(), timeout_s=LIMIT_S))


def over_two(
    test: Callable[[Running, Teller, Teller, list[RequestRecord]], Awaitable[None]], *, mode: str = "cut-mid-event",
    story: list[str] | None = None, **changes: Any,
) -> None:  # fmt: skip
    """Two tellers, of which the first breaks off, and the gateway over them."""

    async def main() -> None:
        async with tellers(2, story) as [bad, good]:
            bad.mode = mode
            patience = HASTY if mode == "half-then-silent" else CALM
            async with running(fleet_over(bad, good, **{"serving": patience, **changes})) as at:
                await identified(at)
                records: list[RequestRecord] = []
                at.gateway.listeners.append(records.append)
                await test(at, bad, good, records)

    run_on_loop(main())


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("mode", CUTS)
def test_a_stream_that_breaks_off_goes_on_elsewhere_as_one(mode: str, path: str) -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        one = await heard(at, path, stream_options=COUNTED)
        assert one.text == STORY
        assert one.errors == []
        assert one.finishes == ["stop"]
        assert one.done == 1
        assert one.ends_in_done
        assert len(one.names) == 1
        assert one.roles == (["assistant"] if path == CHAT else [])
        assert one.usages == [{"prompt_tokens": PROMPT_TOKENS, "total_tokens": 15, "completion_tokens": 8}]
        assert one.comments == [": crosstie resumed on pool t1"]
        assert (len(bad.hit), len(good.hit)) == (1, 1)
        assert await at.metric("crosstie_resumed_total", pool="t1") == 1
        assert await at.metric("crosstie_resume_failed_total") == 0
        assert await at.metric("crosstie_requests_total", outcome="served", pool="t1") == 1
        [told] = records
        assert (told.how, told.resumed, told.attempts, told.status) == ("served", 1, 2, 200)
        assert (told.input_tokens, told.output_tokens, told.counted) == (PROMPT_TOKENS, 8, True)
        assert (told.pool, told.code) == ("t1", "")

    over_two(test, mode=mode)


def test_a_client_that_did_not_ask_for_usage_gets_none() -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        one = await heard(at)
        assert (one.text, one.usages) == (STORY, [])
        assert b"usage" not in one.body
        # The gateway did, and has counted.
        assert bad.hit[0][1]["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
        assert (records[0].input_tokens, records[0].output_tokens) == (PROMPT_TOKENS, 8)

    over_two(test)


def test_a_client_that_wants_to_be_counted_to_is_so_across_the_seam() -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        one = await heard(at, stream_options={**COUNTED, "continuous_usage_stats": True})
        made = [usage["completion_tokens"] for usage in one.usages]
        assert made == sorted(made)
        assert made[-1] == 8
        assert {usage["prompt_tokens"] for usage in one.usages} == {PROMPT_TOKENS}

    over_two(test)


def test_an_engine_that_does_not_count_all_along_is_counted_by_its_events() -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        one = await heard(at, COMPLETION, stream_options=COUNTED)
        assert bad.hit[0][1]["stream_options"] == COUNTED
        # What the second one read beyond the first one's words was the prompt.
        assert one.usages == [{"prompt_tokens": PROMPT_TOKENS, "total_tokens": 15, "completion_tokens": 8}]
        assert (records[0].input_tokens, records[0].output_tokens) == (PROMPT_TOKENS, 8)

    Teller.owner = "somebody"
    try:
        over_two(test)
    finally:
        Teller.owner = "vllm"


def test_what_was_made_counts_towards_the_limit() -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        for key in ("max_tokens", "max_completion_tokens"):
            limits: dict[str, Any] = {key: 5, "min_tokens": 4}
            one = await heard(at, **limits)
            assert (one.text, one.finishes) == ("".join(WORDS[:5]), ["length"])
            assert good.hit[-1][1][key] == 2
            assert good.hit[-1][1]["min_tokens"] == 1
            await until(lambda: at.gateway.backends[bad.url].replica.up)

    over_two(test)


def test_an_answer_that_has_reached_its_limit_is_ended_without_asking_anybody() -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        one = await heard(at, max_tokens=3, stream_options=COUNTED)
        assert (one.text, one.finishes, one.done) == ("".join(WORDS[:3]), ["length"], 1)
        assert one.usages == [{"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 3, "total_tokens": 10}]
        assert len(one.names) == 1
        assert not good.hit
        assert (records[0].how, records[0].output_tokens) == ("served", 3)

    over_two(test)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_an_answer_of_which_only_the_end_of_its_connection_is_missing_ends_once(path: str) -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        asked: dict[str, Any] = {"prompt": "once"} if path == COMPLETION else {}
        answer = await at.ask(path, stream=True, **asked)
        assert Heard(answer).text == STORY
        assert answer.body.count(b"[DONE]") == 1
        assert not good.hit
        assert [one.how for one in records] == ["served"]

    over_two(test, mode="loses-its-connection")
