"""Anthropic's own client over engines that only chat: nothing that it says or hears may tell it so."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
from tests.lazily import Lazily
from tests.run.gateway.fakes import MODEL, Fake, Running, fakes, fleet_of, pool_of, running, until
from tests.run.gateway.tellers import STORY, tellers
from tests.run.gateway.test_resume import fleet_over, identified
from tests.waiting import LIMIT_S
from tests.wire.test_server import on_loop

from crosstie.core.errors import BadInput
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.gateway import messages
from crosstie_gateway.gateway.messages import chat_of, decode_chat, error_message, message_of
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.wire import outline
from crosstie_gateway.wire.server import Reply

if TYPE_CHECKING:
    import anthropic
else:
    anthropic = Lazily("anthropic")

WEATHER = {"name": "weather", "description": "Today's.", "input_schema": {"type": "object", "properties": {}}}


class Scripted(Fake):
    """Says what it is given: a whole answer, or the events of a stream."""

    answer: Any = None
    status = 200

    def _ok(self, body: dict[str, Any], reply: Reply) -> None:
        if body.get("stream") and self.status == 200:
            reply.start(200, b"content-type: text/event-stream\r\n", None)
            for event in self.answer:
                reply.write(b"data: " + json.dumps({"id": "c1", "model": MODEL, **event}).encode() + b"\n\n")
            reply.write(b"data: [DONE]\n\n")
            reply.end()
        else:
            reply.send(self.status, json.dumps(self.answer).encode())


@asynccontextmanager
async def scripted(
    answer: Any, status: int = 200, **pool: Any
) -> AsyncIterator[tuple[Scripted, anthropic.AsyncAnthropic, Running]]:
    fake = Scripted("scripted")
    fake.answer, fake.status = answer, status
    await fake.start()
    try:
        async with running(fleet_of(pool_of("one", fake.url, **pool))) as at, client(at) as ours:
            yield fake, ours, at
    finally:
        fake.crash()


def client(at: Running) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=f"http://127.0.0.1:{at.port}", api_key="not-needed", max_retries=0, timeout=LIMIT_S
    )


def delta(finish: str | None = None, **said: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": said, "finish_reason": finish}]}


def call(index: int = 0, arguments: str = "", **named: Any) -> dict[str, Any]:
    name = named.pop("name", None)
    function = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    return {"index": index, "type": "function", **named, "function": function}


USAGE = {"prompt_tokens": 12, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 8}}
COUNTED = {"choices": [], "usage": USAGE}


@on_loop
async def test_a_whole_message() -> None:
    said = {
        "id": "c1", "model": MODEL, "usage": USAGE,
        "choices": [{"message": {"role": "assistant", "content": "Hi.", "reasoning": "hm"}, "finish_reason": "length"}],
    }  # fmt: skip
    async with scripted(said) as (fake, ours, _):
        got = await ours.messages.create(
            model=MODEL, max_tokens=9, system="Be brief.", messages=[{"role": "user", "content": "hello"}],
            stop_sequences=["##"], extra_body={"temperature": 0.5, "top_k": 3},
        )  # fmt: skip
    assert [block.type for block in got.content] == ["thinking", "text"]
    assert (got.content[1].text, got.stop_reason, got.model) == ("Hi.", "max_tokens", MODEL)  # type: ignore[union-attr]
    assert (got.usage.input_tokens, got.usage.output_tokens, got.usage.cache_read_input_tokens) == (4, 4, 8)
    heard = fake.hit[0][1]
    assert fake.hit[0][0].path == "/v1/chat/completions"
    assert heard["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]
    assert (heard["max_tokens"], heard["stop"], heard["top_k"], heard["temperature"]) == (9, ["##"], 3, 0.5)


@pytest.mark.parametrize("step", [2**22, 1000])
def test_a_long_message_arrives_as_a_short_one_would(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in pieces, and its long strings go over as they were written, at once or step by step."""
    monkeypatch.setattr(outline, "_STEP", step)
    text, picture = 'said "so"\\ \n é' * 40_000, "iVBORw0KGgo" + "A" * 300_001
    source = {"type": "base64", "media_type": "image/png", "data": picture}
    given: list[Any] = [
        {"role": "user", "content": text},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "write", "input": {"text": text}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": text}]},
        {"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": text}]},
    ]
    said = {"id": "c1", "model": MODEL, "usage": USAGE, "choices": [{"message": {"content": "Hi."}}]}
    hit = run_on_loop(_heard(said, {"max_tokens": 9, "system": text, "messages": given}))
    whole = chat_of(json.dumps({"model": MODEL, "max_tokens": 9, "system": text, "messages": given}).encode())
    assert hit["messages"] == whole["messages"]


async def _heard(said: dict[str, Any], given: dict[str, Any]) -> Any:
    async with scripted(said, max_context=2**22) as (fake, ours, _):
        await ours.messages.create(model=MODEL, **given)
    return fake.hit[0][1]


def test_of_the_inputs_of_tools_there_is_not_as_much_as_of_other_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are encoded once more, while everybody waits."""
    monkeypatch.setattr(messages, "_MOST_TOOL_INPUT", 2**20)
    text = "so " * 150_000

    def used(times: int) -> list[Any]:
        one = {"type": "tool_use", "id": "t", "name": "write", "input": {"text": text}}
        return [{"role": "user", "content": text * 5}, {"role": "assistant", "content": [one] * times}]

    async def ask() -> None:
        said = {"id": "c1", "model": MODEL, "usage": USAGE, "choices": [{"message": {"content": "Hi."}}]}
        async with scripted(said, max_context=2**22) as (_, ours, _):
            assert (await ours.messages.create(model=MODEL, max_tokens=9, messages=used(2))).stop_reason
            with pytest.raises(anthropic.BadRequestError, match="inputs of tools have more than 1 MiB"):
                await ours.messages.create(model=MODEL, max_tokens=9, messages=used(3))

    run_on_loop(ask())


@on_loop
async def test_a_stream_of_thoughts_text_and_calls() -> None:
    events = [
        delta(role="assistant", content=""), delta(reasoning_content="h"), delta(reasoning_content="m"),
        delta(content="Let "), delta(content="me see."),
        delta(tool_calls=[call(0, id="a", name="weather")]), delta(tool_calls=[call(0, '{"in": ')]),
        delta(tool_calls=[call(0, '"Ulm"}')]), delta(tool_calls=[call(1, "{}", id="b", name="weather")]),
        delta("tool_calls"), COUNTED,
    ]  # fmt: skip
    async with scripted(events) as (fake, ours, _), ours.messages.stream(
        model=MODEL, max_tokens=50, tools=[WEATHER], tool_choice={"type": "any"},  # type: ignore[list-item]
        messages=[{"role": "user", "content": "weather?"}],
    ) as stream:  # fmt: skip
        kinds = [event.type async for event in stream]
        got = await stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    blocks = [block.to_dict() for block in got.content]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "tool_use"]
    assert (blocks[0]["thinking"], blocks[1]["text"]) == ("hm", "Let me see.")
    assert [(block["id"], block["name"], block["input"]) for block in blocks[2:]] == [
        ("a", "weather", {"in": "Ulm"}), ("b", "weather", {})
    ]  # fmt: skip
    assert got.stop_reason == "tool_use"
    assert (got.usage.input_tokens, got.usage.output_tokens) == (4, 4)
    heard = fake.hit[0][1]
    assert heard["tool_choice"] == "required"
    assert heard["tools"][0]["function"] == {
        "name": "weather", "description": "Today's.", "parameters": WEATHER["input_schema"]
    }  # fmt: skip


@on_loop
async def test_errors_of_engine_and_gateway_are_the_client_s_own_kind() -> None:
    refused = {"object": "error", "message": "too hot", "code": 400}
    async with scripted(refused, status=400) as (_, ours, at):
        asked: Any = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
        for stream in (False, True):
            with pytest.raises(anthropic.BadRequestError) as caught:
                await ours.messages.create(**asked, stream=stream)
            assert caught.value.body == {
                "type": "error",
                "error": {"type": "invalid_request_error", "message": "too hot"},
            }
        with pytest.raises(anthropic.APIStatusError) as missing:
            await ours.messages.create(**{**asked, "model": "no-such-model"})
        assert missing.value.status_code == 404
        assert missing.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
        document = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
        with pytest.raises(
            anthropic.BadRequestError, match=r"messages\.0\.content\.0\.source\.type: 'base64' of a document"
        ):
            await ours.messages.create(**{**asked, "messages": [{"role": "user", "content": [document]}]})
        assert await at.metric("crosstie_refused_total", code="bad_request") == 1


@on_loop
async def test_a_stream_that_breaks_off_goes_on_elsewhere_and_is_recorded_as_what_was_asked() -> None:
    async with tellers(2) as [bad, good]:
        bad.mode = "cut-mid-event"
        async with running(fleet_over(bad, good)) as at, client(at) as ours:
            await identified(at)
            records: list[RequestRecord] = []
            at.gateway.listeners.append(records.append)
            async with ours.messages.stream(
                model=MODEL, max_tokens=50, messages=[{"role": "user", "content": "once"}]
            ) as stream:
                text = "".join([piece async for piece in stream.text_stream])
            await until(lambda: records)
    assert text == STORY
    assert [(one.path, one.how, one.resumed) for one in records] == [("/v1/messages", "served", 1)]


@on_loop
async def test_an_answer_that_nobody_can_go_on_with_ends_in_an_error_of_the_stream() -> None:
    async with tellers(1) as [bad]:
        bad.mode = "cut-mid-event"
        async with (
            running(fleet_over(bad)) as at,
            client(at) as ours,
            ours.messages.stream(model=MODEL, max_tokens=50, messages=[{"role": "user", "content": "once"}]) as stream,
        ):
            with pytest.raises(anthropic.APIStatusError, match="incomplete"):
                await stream.until_done()


@on_loop
async def test_tokens_are_estimated_as_they_are_for_routing() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at, client(at) as ours:
        short = await ours.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "x" * 400}])
        long = await ours.messages.count_tokens(model=MODEL, messages=[{"role": "user", "content": "x" * 4000}])
        assert 90 <= short.input_tokens <= 130
        assert 900 <= long.input_tokens <= 1100
        assert not fake.hit
        with pytest.raises(anthropic.BadRequestError, match="messages: a list"):
            await ours.messages.count_tokens(model=MODEL, messages=5)  # type: ignore[arg-type]


@on_loop
async def test_an_answer_that_is_no_chat_s_is_said_to_be_none() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        fake._ok = lambda body, reply: reply.send(200, b'{"choices": 5}')  # type: ignore[method-assign]
        answer = await at.ask("/v1/messages", max_tokens=5)
        assert answer.status == 502
        assert json.loads(answer.body)["type"] == "error"


def asked(**more: Any) -> dict[str, Any]:
    return chat_of(json.dumps({"model": "m", "max_tokens": 5, "messages": [], **more}).encode())


def test_blocks_of_a_conversation_with_tools_and_pictures() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    linked = {"type": "image", "source": {"type": "url", "url": "https://a.b/c.png"}}
    got = asked(
        system=[{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "look"}, picture, linked]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "redacted_thinking", "data": "?"},
                {"type": "text", "text": "so"}, {"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "42"}, picture]},
                {"type": "text", "text": "well?"},
            ]},
            {"role": "user", "content": [{"type": "document", "source": {"type": "text", "data": "plain"}}]},
        ],
        metadata={"user_id": "u7"}, thinking={"type": "enabled", "budget_tokens": 100},
        tool_choice={"type": "tool", "name": "f", "disable_parallel_tool_use": True}, stream=True,
        output_config={"effort": "max", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )  # fmt: skip
    assert got["messages"] == [
        {"role": "system", "content": "One.\nTwo."},
        {"role": "user", "content": [
            {"type": "text", "text": "look"}, shown,
            {"type": "image_url", "image_url": {"url": "https://a.b/c.png"}},
        ]},
        {"role": "assistant", "content": "so", "reasoning_content": "hm", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}
        ]},
        {"role": "tool", "tool_call_id": "a", "content": "42"},
        {"role": "user", "content": [shown, {"type": "text", "text": "well?"}]},
        {"role": "user", "content": "plain"},
    ]  # fmt: skip
    assert got["user"] == "u7"
    assert got["chat_template_kwargs"] == {"enable_thinking": True}
    assert got["tool_choice"] == {"type": "function", "function": {"name": "f"}}
    assert got["parallel_tool_calls"] is False
    assert got["reasoning_effort"] == "high"
    assert got["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert got["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"max_tokens": None}, "max_tokens: a whole number"),
        ({"messages": {}}, "messages: a list"),
        ({"messages": [5]}, "messages.0: an object"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: a list"),
        ({"messages": [{"role": "user", "content": [{"type": "sound"}]}]}, "messages.0.content.0.type: 'sound'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}]}, "an assistant's 'image'"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "tools.0: 'web_search_20250305'"),
        ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"system": 5}, "system: a text"),
        ({"output_config": {"effort": "little"}}, "output_config.effort"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
    ],
)
def test_what_a_chat_cannot_say_is_refused_by_its_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as refused:
        asked(**change)
    assert said in str(refused.value)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff", b"[" * 100_000])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadInput):
        chat_of(body)


def test_a_stop_sequence_and_arguments_that_are_no_json() -> None:
    stopped = {"choices": [{"message": {"content": "a"}, "finish_reason": "stop", "stop_reason": "##"}]}
    got = json.loads(message_of(decode_chat(json.dumps(stopped).encode())))
    assert (got["stop_reason"], got["stop_sequence"]) == ("stop_sequence", "##")
    called = {"choices": [{"message": {"tool_calls": [call(0, '{"x": ', id="a", name="f")]}, "finish_reason": "stop"}]}
    got = json.loads(message_of(decode_chat(json.dumps(called).encode())))
    assert got["content"] == [{"type": "tool_use", "id": "a", "name": "f", "input": {"arguments": '{"x": '}}]


def test_an_error_stays_the_same_when_it_is_told_twice() -> None:
    once = error_message(429, b'{"error": {"message": "slow down"}}')
    assert error_message(429, once) == once
    assert json.loads(error_message(500, b"<html>"))["error"] == {"type": "api_error", "message": "<html>"}
