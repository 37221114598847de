"""Streams that break off where nobody would expect it, of requests that engines read more loosely than they should."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import HASTY, Running, fakes, fleet_of, pool_of, running, until
from tests.run.gateway.tellers import PROMPT_TOKENS, STORY, WORDS, Teller
from tests.run.gateway.test_resume import CHAT, COMPLETION, COUNTED, heard, over_two
from tests.wire.test_server import on_loop

from crosstie_gateway.gateway.handover import Handover
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.wire.server import Reply

LONG = [f"word{at} " for at in range(40)]
TOKENS = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": 8, "total_tokens": 15}


def breaking_after(*deltas: dict[str, Any], done: bool = False) -> Callable[[Teller, dict[str, Any], Reply], None]:
    """An answer that has been told as a whole, before its connection breaks; `done`: its last word, too."""

    def answer(teller: Teller, body: dict[str, Any], reply: Reply) -> None:
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        for at, delta in enumerate(deltas):
            teller._say(reply, body, delta, 0, at + 1)
        teller._say(reply, body, {}, 0, len(deltas), "stop")
        if done:
            if teller._options(body).get("include_usage"):
                teller._write(reply, {**teller._about(body), "choices": [], "usage": teller._usage(0, len(deltas))})
            reply.write(b"data: [DONE]\n\n")
        teller.loop.call_later(0.05, reply.cut)

    return answer


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("options", [None, COUNTED])
def test_an_answer_is_ended_once_though_its_connection_breaks_after_its_last_word(
    options: dict[str, bool] | None, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        one = await heard(at, path, stream_options=options)
        assert (one.text, one.finishes, one.done, one.errors) == (STORY, ["stop"], 1, [])
        assert one.usages == ([] if options is None else [TOKENS])
        assert (records[0].how, records[0].output_tokens) == ("served", 8)
        # It has been served, so it is among what was.
        assert await at.metric("crosstie_tokens_total", pool="t0", kind="output") == 8
        assert not good.hit

    words = [{"content": word} for word in WORDS]
    monkeypatch.setattr(Teller, "_whole", breaking_after(*words, done=True), raising=False)
    over_two(test, mode="whole")


@pytest.mark.parametrize(
    "delta",
    [
        {"reasoning_content": "hm"},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}}]},
    ],
)
def test_what_nobody_could_go_on_with_can_still_be_ended(
    delta: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        one = await heard(at, stream_options=COUNTED)
        assert (one.finishes, one.done, one.errors) == (["stop"], 1, [])
        assert [usage["completion_tokens"] for usage in one.usages] == [2]
        assert (records[0].how, records[0].output_tokens) == ("served", 2)

    monkeypatch.setattr(Teller, "_whole", breaking_after(delta, {"content": "x"}), raising=False)
    over_two(test, mode="whole")


def test_one_of_several_answers_that_has_ended_is_not_the_end_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(teller: Teller, body: dict[str, Any], reply: Reply) -> None:
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        for index, finish in ((0, None), (0, "stop"), (1, None), (0, "stop")):
            choice = {"index": index, "delta": {"content": "x"}, "finish_reason": finish}
            teller._write(reply, {**teller._about(body), "choices": [choice]})
        teller.loop.call_later(0.05, reply.cut)

    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        one = await heard(at, n=2)
        assert [error["code"] for error in one.errors] == ["upstream_cut"]
        assert records[0].how == "cut"

    monkeypatch.setattr(Teller, "_several", answer, raising=False)
    over_two(test, mode="several")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"stop": [None]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop": {"a": "b"}}, "stop"),
        ({"max_tokens": 5.0}, "max_tokens"),
        ({"n_predict": "5"}, "n_predict"),
        ({"min_tokens": True}, "min_tokens"),
        ({"messages": [{"role": "user", "content": "x"}, "y"]}, "messages"),
    ],
)
def test_what_an_engine_took_for_something_is_not_guessed_at(body: dict[str, Any], reason: str) -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        bad.begun = lambda body: 0  # type: ignore[method-assign]
        one = await heard(at, **body)
        assert one.text == "".join(WORDS[:3])
        assert [error["code"] for error in one.errors] == ["upstream_cut"]
        assert await at.metric("crosstie_resume_failed_total", reason=reason) == 1
        assert not good.hit
        assert [one.how for one in records] == ["cut"]

    over_two(test)


@pytest.mark.parametrize("limit", [{}, {"max_tokens": None}])
@pytest.mark.parametrize("owner", ["vllm", "sglang"])
def test_a_completion_without_a_limit_gets_no_longer_than_its_engine_makes_them(
    owner: str, limit: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        one = await heard(at, COMPLETION, **limit)
        assert good.hit[0][1]["max_tokens"] == 13
        assert (one.text, one.finishes) == ("".join(LONG[:16]), ["length"])

    monkeypatch.setattr(Teller, "owner", owner)
    over_two(test, story=LONG)


def test_a_completion_that_is_longer_than_they_usually_get_has_another_limit() -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        bad.cut_after = 20
        one = await heard(at, COMPLETION)
        assert "max_tokens" not in good.hit[0][1]
        assert one.text == "".join(LONG)

    over_two(test, story=LONG)


def test_llama_cpp_s_own_limit_is_one() -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        one = await heard(at, n_predict=3)
        assert (one.text, one.finishes, one.done) == ("".join(WORDS[:3]), ["length"], 1)
        assert not good.hit

    over_two(test)


def test_an_answer_that_the_client_has_begun_with_nothing_has_one_beginning() -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        bad.begun = good.begun = lambda body: 0  # type: ignore[method-assign]
        begun = [{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}]
        await heard(at, messages=begun, continue_final_message=True, add_generation_prompt=False)
        assert good.hit[0][1]["messages"] == [begun[0], {"role": "assistant", "content": "w0 w1 w2 "}]

    over_two(test)


def test_ids_whose_text_may_be_held_back_are_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stop strings vLLM tells ids before it tells their text."""

    def answer(teller: Teller, body: dict[str, Any], reply: Reply) -> None:
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        for text, number in (("w0 ", 0), ("w1 ", 1), ("", 2)):
            choice = {"index": 0, "text": text, "token_ids": [number], "finish_reason": None}
            teller._write(reply, {**teller._about(body), "choices": [choice]})
        teller.loop.call_later(0.05, reply.cut)

    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        one = await heard(at, COMPLETION, prompt=[5, 6], stop=["##"], return_token_ids=True)
        assert good.hit[0][1]["prompt"] == [5, 6, 0, 1]
        assert one.text == STORY

    monkeypatch.setattr(Teller, "_held_back", answer, raising=False)
    over_two(test, mode="held-back")


def test_nonsense_of_the_next_engine_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(body: dict[str, Any], reply: Reply, teller: Teller) -> None:
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        reply.write(b'data: {"choices":[null]}\n\ndata: {"choices":[5]}\n\n')
        teller._stream(body, reply, 0)

    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        monkeypatch.setattr(good, "_ok", lambda body, reply: answer(body, reply, good))
        one = await heard(at)
        assert (one.text, one.errors) == (STORY, [])

    over_two(test)


def test_who_was_to_go_on_and_did_not_has_no_part_in_it() -> None:
    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        good.mode = "error"
        await heard(at)
        assert (records[0].how, records[0].pool, records[0].backend) == ("cut", "t0", bad.url)
        assert await at.metric("crosstie_requests_total", pool="t0", outcome="cut") == 1

    over_two(test)


@on_loop
async def test_each_worker_finds_out_which_engine_a_backend_is() -> None:
    """Though another has just read its load."""
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        backend = at.gateway.backends[fake.url]
        await until(lambda: backend.identified)
        at.gateway.context.workers = SimpleNamespace(
            takes_probe=lambda backend: False, takes_load=lambda backend: False,
            probed=lambda *told, **more: None, changed=lambda backend: None,
        )  # fmt: skip
        backend.identified = False
        await until(lambda: backend.identified)
        at.gateway.context.workers = None


def test_a_stream_that_breaks_the_clock_is_ended_and_costs_nobody_else_their_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def breaking(self: Handover) -> bool:
        raise TypeError("no")

    async def test(at: Running, bad: Teller, good: Teller, records: list[RequestRecord]) -> None:
        told: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))
        good.mode = "hang"
        stream = asyncio.create_task(at.ask(stream=True))
        await until(lambda: any(exchange.reply.started for exchange in at.gateway.exchanges))
        bad.healthy = False
        await until(lambda: not at.gateway.backends[bad.url].replica.up)
        assert (await at.ask()).status == 504
        with pytest.raises(ConnectionError):
            await stream
        assert [type(context["exception"]) for context in told] == [TypeError]
        assert sorted(one.how for one in records) == ["failed", "failed"]

    # Compiled modules cannot be changed from outside, and this one is not.
    monkeypatch.setattr(Handover, "would_succeed", breaking)
    serving = msgspec.structs.replace(HASTY, idle_timeout_s=4.0, retries=0)
    over_two(test, mode="half-then-silent", serving=serving)
