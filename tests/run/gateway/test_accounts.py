"""What a request is charged for: what its client got, whatever its engine says or does not say of it."""

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, strategies as st
from tests.run.gateway.fakes import MODEL, Fake, fakes, fleet_of, pool_of, running, until
from tests.waiting import LIMIT_S

from crosstie.route.ask import Ask
from crosstie.wire.fetch import fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.gateway.passed import Passed, plainly_counted
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.gateway.relay import WholeRelay
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply, Server, ServerConnection

TEXT = "word " * 400
BEYOND = 65 * 2**20


class Odd(Fake):
    """Answers as the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = "odd"
        self.answer: Callable[[Reply], None] = lambda reply: None

    def _odd(self, body: dict[str, Any], reply: Reply) -> None:
        self.answer(reply)


def charged(answer: Callable[[Reply], None], path: str = "/v1/chat/completions", **body: Any) -> list[RequestRecord]:
    """The records of one request that is answered so."""
    ended: list[RequestRecord] = []

    async def test() -> None:
        fake = Odd()
        fake.answer = answer
        await fake.start()
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            at.gateway.listeners.append(ended.append)
            got = await at.ask(path, **body)
            assert got.status == 200, got.body[:200]
            await until(lambda: ended)
            cost = got.header(b"x-crosstie-cost-usd")
            assert cost is None if body.get("stream") else cost == b"%.9f" % ended[0].charged_usd
            request, _ = fake.hit[-1]
            assert request.headers[b"accept-encoding"] == b"identity"
            # One account for all: what the record says is what the metrics add up.
            assert await at.metric("crosstie_usd_total") == pytest.approx(ended[0].charged_usd)
            assert await at.metric("crosstie_tokens_total", kind="output") == ended[0].output_tokens
        fake.crash()

    run_on_loop(test())
    return ended


def whole(
    said: dict[str, Any], headers: bytes = b"", pack: Callable[[bytes], bytes] = bytes
) -> Callable[[Reply], None]:
    def answer(reply: Reply) -> None:
        reply.send(200, pack(json.dumps(said).encode()), headers)

    return answer


def streamed(events: list[dict[str, Any]], end: bytes = b"\n\n", pack: Any = None) -> Callable[[Reply], None]:
    def answer(reply: Reply) -> None:
        said = b"".join(b"data: " + json.dumps(one).encode() + end for one in events) + b"data: [DONE]" + end
        coding = b"content-encoding: gzip\r\n" if pack is not None else b""
        reply.start(200, b"content-type: text/event-stream\r\n" + coding, None)
        reply.write(said if pack is None else pack(said))
        reply.end()

    return answer


def message(**said: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", **said}, "finish_reason": "stop"}]}


def deltas(*said: dict[str, Any], usage: Any = None) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": one, "finish_reason": None}]} for one in said]
    events.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    return [*events, {"choices": [], "usage": usage}] if usage is not None else events


INCREDIBLE: list[dict[str, Any]] = [
    {},
    {"usage": None},
    {"usage": "many"},
    {"usage": {"prompt_tokens": 7, "completion_tokens": -500}},
    {"usage": {"prompt_tokens": -7, "completion_tokens": 500}},
    {"usage": {"prompt_tokens": "7", "completion_tokens": "500"}},
    {"usage": {"prompt_tokens": 7, "completion_tokens": 0}},
    {"usage": {"prompt_tokens": 7}},
    {"usage": {"prompt_tokens": 7, "completion_tokens": 900_000_000}},
    {"usage": {"prompt_tokens": 900_000_000, "completion_tokens": 500}},
]


@pytest.mark.parametrize("usage", INCREDIBLE)
def test_a_whole_answer_whose_usage_cannot_be_is_charged_by_its_text(usage: dict[str, Any]) -> None:
    (record,) = charged(whole({**message(content=TEXT), **usage}))
    # Four bytes a token, as long as nothing was learnt of the model.
    assert (record.output_tokens, record.counted) == (500, False)
    assert 1 <= record.input_tokens < 100
    assert record.charged_usd > 0


@pytest.mark.parametrize("usage", INCREDIBLE[3:])
def test_a_stream_whose_usage_cannot_be_is_charged_by_what_passed(usage: dict[str, Any]) -> None:
    events = deltas({"content": TEXT[:1000]}, {"content": TEXT[1000:]}, usage=usage["usage"])
    (record,) = charged(streamed(events), stream=True)
    assert (record.output_tokens, record.counted) == (500, False)


def test_usage_that_can_be_is_taken() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 321}
    (record,) = charged(whole({**message(content=TEXT), "usage": usage}))
    assert (record.input_tokens, record.output_tokens, record.counted) == (7, 321, True)
    # Reasoning that the client does not get to see.
    (record,) = charged(whole({**message(content="42"), "usage": {"prompt_tokens": 7, "completion_tokens": 4000}}))
    assert (record.output_tokens, record.counted) == (4000, True)
    # Nothing was made of nothing.
    (record,) = charged(whole({**message(content=""), "usage": {"prompt_tokens": 7, "completion_tokens": 0}}))
    assert (record.output_tokens, record.counted) == (0, True)


@pytest.mark.parametrize(
    "said",
    [
        {"reasoning_content": TEXT},
        {"reasoning": TEXT, "content": ""},
        {"refusal": TEXT},
        {"tool_calls": [{"index": 0, "id": "x", "function": {"name": "f", "arguments": TEXT}}]},
        {"function_call": {"name": "f", "arguments": TEXT}},
    ],
)
def test_all_that_an_answer_says_is_counted(said: dict[str, Any]) -> None:
    (record,) = charged(whole(message(**said)))
    assert record.output_tokens in (500, 501)
    (record,) = charged(streamed(deltas(said)), stream=True)
    assert record.output_tokens in (500, 501)


def test_several_answers_at_once_are_all_counted() -> None:
    events = [{"choices": [{"index": at, "delta": {"content": TEXT}, "finish_reason": "stop"}]} for at in range(3)]
    (record,) = charged(streamed(events), stream=True, n=3)
    assert (record.output_tokens, record.counted) == (1500, False)


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_streams_of_responses_and_messages_are_counted_by_what_they_add(end: bytes) -> None:
    response: list[dict[str, Any]] = [
        {"type": "response.output_text.delta", "delta": TEXT},
        {"type": "response.function_call_arguments.delta", "delta": TEXT},
        # The same again is not counted again.
        {"type": "response.output_text.done", "text": TEXT},
        {"type": "response.completed", "response": {"output": [{"text": TEXT}]}},
    ]
    (record,) = charged(streamed(response, end), "/v1/responses", stream=True, input="hello")
    assert (record.output_tokens, record.counted) == (1000, False)


@pytest.mark.parametrize(
    ("asked", "usage", "tokens"),
    [
        ({}, None, 1000),
        ({"n": 3}, None, 3000),
        ({}, {"input_tokens": 4, "output_tokens": 0}, 1000),
        ({"n": 2}, {"input_tokens": 4, "output_tokens": 512}, 512),
    ],
)
def test_a_picture_is_never_free(asked: dict[str, Any], usage: Any, tokens: int) -> None:
    said = {"data": [{"b64_json": "AAAA"}], **({"usage": usage} if usage else {})}
    (record,) = charged(whole(said), "/v1/images/generations", prompt="a bridge", **asked)
    assert (record.output_tokens, record.counted) == (tokens, tokens == 512)


def test_embeddings_are_no_answer_in_tokens() -> None:
    said: dict[str, Any] = {"data": [{"embedding": [0.5] * 2000}], "usage": {"prompt_tokens": 9, "total_tokens": 9}}
    (record,) = charged(whole(said), "/v1/embeddings", input="hello")
    assert (record.input_tokens, record.output_tokens, record.counted) == (9, 0, True)
    del said["usage"]
    (record,) = charged(whole(said), "/v1/embeddings", input="hello")
    assert (record.output_tokens, record.counted) == (0, False)
    assert record.charged_usd > 0


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress])
def test_a_compressed_answer_is_read_and_counted(pack: Callable[[bytes], bytes]) -> None:
    coding = b"content-encoding: %b\r\n" % (b"gzip" if pack is gzip.compress else b"deflate")
    usage = {"prompt_tokens": 7, "completion_tokens": 321}
    (record,) = charged(whole({**message(content=TEXT), "usage": usage}, coding, pack))
    assert (record.output_tokens, record.counted) == (321, True)
    (record,) = charged(whole(message(content=TEXT), coding, pack))
    assert (record.output_tokens, record.counted) == (500, False)


def test_a_compressed_stream_is_read_and_counted() -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 321}
    (record,) = charged(streamed(deltas({"content": TEXT}, usage=usage), pack=gzip.compress), stream=True)
    assert (record.output_tokens, record.counted) == (321, True)


@pytest.mark.parametrize(
    "body",
    [b"\x1f\x8b not gzip", gzip.compress(b"{}")[:-9], gzip.compress(b"{}") + b"more", gzip.compress(b" " * (9 << 20))],
    ids=["no", "half", "more", "bomb"],
)
@pytest.mark.parametrize("coding", [b"gzip", b"br"])
def test_what_cannot_be_unpacked_is_not_passed_on(coding: bytes, body: bytes) -> None:
    async def test() -> None:
        fake = Odd()
        fake.answer = lambda reply: reply.send(200, body, b"content-encoding: %b\r\n" % coding)
        await fake.start()
        async with running(fleet_of(pool_of("one", fake.url))) as at:
            got = await at.ask()
            assert (got.status, got.header(b"content-encoding")) == (502, None)
            assert b"cannot be read" in got.body
        fake.crash()

    run_on_loop(test())


async def _pour(reply: Reply, pieces: list[bytes]) -> None:
    for piece in pieces:
        while reply.slow and not reply.gone:
            await asyncio.sleep(0.001)
        reply.write(piece)
        await asyncio.sleep(0)
    reply.end()


@pytest.mark.parametrize("last", [b'"}}]}', b'"}}],"usage":{"prompt_tokens":7,"completion_tokens":4321}}'])
def test_an_answer_beyond_what_is_kept_is_charged(last: bytes) -> None:
    async def test() -> None:
        fake = Odd()
        tasks: list[asyncio.Task[None]] = []

        def answer(reply: Reply) -> None:
            piece = b"x" * 2**20
            pieces = [b'{"choices":[{"message":{"content":"', *[piece] * (BEYOND // len(piece)), last]
            reply.start(200, b"content-type: application/json\r\n", sum(map(len, pieces)))
            tasks.append(asyncio.create_task(_pour(reply, pieces)))

        fake.answer = answer
        await fake.start()
        async with running(fleet_of(pool_of("one", fake.url, max_context=2**20))) as at:
            ended: list[RequestRecord] = []
            at.gateway.listeners.append(ended.append)
            asked = json.dumps({"model": MODEL, "messages": []}).encode()
            path = "/v1/chat/completions"
            got = await fetch(at.origin, "POST", path, body=asked, timeout_s=LIMIT_S, most_bytes=2 * BEYOND)
            assert len(got.body) > BEYOND
            await until(lambda: ended)
        fake.crash()
        # 4,321 tokens of 65 MiB would be fifteen thousand bytes each: such a count is no better than none.
        assert ended[0].output_tokens == pytest.approx(BEYOND / 4, rel=0.01)
        assert not ended[0].counted

    run_on_loop(test())


def test_what_a_refusal_costs_is_not_told() -> None:
    async def test() -> None:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
            ended: list[RequestRecord] = []
            at.gateway.listeners.append(ended.append)
            fake.mode = "bad"
            got = await at.ask()
            assert (got.status, got.header(b"x-crosstie-cost-usd")) == (400, None)
            await until(lambda: ended)
            assert (ended[0].charged_usd, ended[0].output_tokens) == (0.0, 0)

    run_on_loop(test())


def test_a_client_that_hangs_up_pays_for_what_it_got() -> None:
    """Events that hold many tokens each, of an engine that has not counted yet, and goes on to say something: who has
    gone is known by what is written to them."""

    async def test() -> None:
        async with fakes() as [fake]:
            fake.tokens, fake.mode = 50, "half-then-pings"
            async with running(fleet_of(pool_of("one", fake.url))) as at:
                ended: list[RequestRecord] = []
                at.gateway.listeners.append(ended.append)
                pending = asyncio.create_task(at.ask(stream=True))
                await until(lambda: any(one.reply.started for one in at.gateway.exchanges))
                pending.cancel()
                await until(lambda: ended)
                assert ended[0].how == "client gone"
                assert ended[0].output_tokens >= 1

    run_on_loop(test())


# Before the answer


@pytest.mark.parametrize("field", ["instructions", "functions", "documents", "response_format", "tools"])
def test_no_field_hides_a_prompt_that_is_too_long(field: str) -> None:
    async def test() -> None:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url, max_context=8192))) as at:
            long: Any = [{"name": "f", "description": "word " * 20_000}]
            asked: dict[str, Any] = {field: long}
            got = await at.ask(**asked)
            assert (got.status, json.loads(got.body)["error"]["code"]) == (400, "context_length_exceeded")
            got = await at.ask(messages=[{"role": "assistant", "tool_calls": long}])
            assert (got.status, json.loads(got.body)["error"]["code"]) == (400, "context_length_exceeded")
            assert not fake.hit

    run_on_loop(test())


def test_many_prompts_are_as_long_as_each_of_them_and_as_dear_as_all() -> None:
    async def test() -> None:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url, max_context=8192))) as at:
            ended: list[RequestRecord] = []
            at.gateway.listeners.append(ended.append)
            prompts = ["word " * 4000] * 10
            request = Request(
                "POST", "/v1/completions", "", {}, json.dumps({"model": MODEL, "prompt": prompts}).encode()
            )
            _, ask = at.gateway.read(request)
            assert ask.input_tokens == pytest.approx(50_000, rel=0.01)
            assert (ask.prompts, ask.copies) == (10, 10)
            assert (await at.ask("/v1/completions", prompt=prompts)).status == 200
            # Embeddings of many texts have no answer in tokens.
            request = Request("POST", "/v1/embeddings", "", {}, json.dumps({"model": MODEL, "input": prompts}).encode())
            _, ask = at.gateway.read(request)
            assert (ask.prompts, ask.copies, ask.output_tokens) == (10, 1, 1.0)

    run_on_loop(test())


@given(
    st.integers(0, 300), st.integers(0, 300), st.integers(0, 10**6), st.integers(1, 3), st.integers(1, 3),
    st.sampled_from(("/v1/chat/completions", "/v1/embeddings")),
)  # fmt: skip
def test_what_is_plainly_counted_passes_a_closer_look(
    given_tokens: int, made: int, passed: int, copies: int, prompts: int, path: str
) -> None:
    loop = asyncio.new_event_loop()
    relay = WholeRelay(Reply(ServerConnection(Server(loop, lambda request, reply: None))), 200, b"")
    loop.close()
    relay.usage, relay.passed = (given_tokens, made, 0), passed
    ask = Ask(model="m", class_name=None, input_tokens=10.0, output_tokens=10.0, copies=copies, prompts=prompts)
    plain = plainly_counted(relay, ask, 50)
    closer = Passed(relay, None, ask, path, context=50, bytes_per_token=4.0, before=0).usage()
    assert plain is None or plain == closer
    # Of an ordinary answer no closer look is taken.
    if 0 < made <= 100 and given_tokens <= 100 and passed <= 1000 * made:
        assert plain == (given_tokens, made, 0)
