"""The API as clients see it: shapes, counts, streams, and refusals in vLLM's words."""

import base64
import json
import struct
from typing import Any

import pytest
from tests.run.emulate.running import CHAT, SMALL, chat, emulating, fleet, pool

from crosstie.wire.loops import run_on_loop


def test_a_whole_answer_has_its_shape_and_says_that_it_is_emulated() -> None:
    async def body() -> None:
        async with emulating() as (_, client):
            answer = await client.post(CHAT, chat("x" * 400, max_tokens=7, ignore_eos=True))
            got = json.loads(answer.body)
            assert (answer.status, got["object"], got["model"]) == (200, "chat.completion", SMALL)
            assert got["system_fingerprint"] == "crosstie-emulated"
            assert (answer.header(b"x-crosstie-emulated") or b"").startswith(b"one/0; llama-3.1-8b on 1 x mi300x")
            (choice,) = got["choices"]
            assert choice["message"] == {"role": "assistant", "content": "This answer is emulated by C"}
            assert choice["finish_reason"] == "length"
            usage = got["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (100, 7, 107)
            listed = json.loads((await client.get("/v1/models")).body)["data"]
            assert [(one["id"], one["owned_by"], one["max_model_len"]) for one in listed] == [
                (SMALL, "crosstie-emulated", 32_000)
            ]
            assert json.loads((await client.get("/version")).body) == {"version": "crosstie-emulated"}
            assert (await client.get("/health")).status == 200

    run_on_loop(body())


def test_a_stream_is_the_same_answer_in_pieces() -> None:
    async def body() -> None:
        async with emulating(speed=50.0) as (_, client):
            asked = chat(max_tokens=150, ignore_eos=True)
            whole = json.loads((await client.post(CHAT, asked)).body)
            events = await client.stream({**asked, "stream_options": {"include_usage": True}})
            assert events.whole
            assert events.payloads[-1] == b"[DONE]"
            first, *_, last, usage = events.documents
            assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert last["choices"][0]["finish_reason"] == "length"
            assert usage["choices"] == []
            assert usage["usage"]["completion_tokens"] == 150
            assert events.text == whole["choices"][0]["message"]["content"]
            assert len(events.text) == 150 * 4
            assert len(events.documents) < 100, "several tokens to a chunk"
            plain = await client.stream(asked)
            assert all("usage" not in one for one in plain.documents)

    run_on_loop(body())


def test_completions_of_texts_and_of_token_numbers() -> None:
    async def body() -> None:
        async with emulating() as (_, client):
            for prompt, tokens in (("x" * 41, 11), (["abcd"], 1), ([1, 2, 3], 3), ([[1, 2, 3, 4]], 4)):
                answer = await client.post("/v1/completions", {"prompt": prompt, "max_tokens": 3, "ignore_eos": True})
                got = json.loads(answer.body)
                assert got["usage"]["prompt_tokens"] == tokens
                assert (got["object"], got["choices"][0]["text"]) == ("text_completion", "This answer ")
            events = await client.stream({"prompt": "x", "max_tokens": 9, "ignore_eos": True}, "/v1/completions")
            assert (
                "".join(one["choices"][0]["text"] for one in events.documents) == "This answer is emulated by Crosstie:"
            )

    run_on_loop(body())


def test_the_responses_api_in_events_and_whole() -> None:
    async def body() -> None:
        async with emulating() as (_, client):
            asked = {"model": SMALL, "input": "x" * 40, "instructions": "y" * 8, "seed": 3}
            whole = json.loads((await client.post("/v1/responses", asked)).body)
            assert (whole["object"], whole["status"]) == ("response", "completed")
            assert whole["usage"]["input_tokens"] == 12
            events = await client.stream(asked, "/v1/responses")
            kinds = [one["type"] for one in events.documents]
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
            assert [one["sequence_number"] for one in events.documents] == list(range(len(kinds)))
            deltas = "".join(one["delta"] for one in events.documents if one["type"] == "response.output_text.delta")
            last = events.documents[-1]["response"]
            assert deltas == last["output"][0]["content"][0]["text"] == whole["output"][0]["content"][0]["text"]
            assert last["usage"]["output_tokens"] == whole["usage"]["output_tokens"] == len(deltas) // 4
            short = await client.stream({**asked, "max_output_tokens": 2, "ignore_eos": True}, "/v1/responses")
            assert short.documents[-1]["type"] == "response.incomplete"
            assert short.documents[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
            turns = [
                {"role": "user", "content": [{"type": "input_text", "text": "abcd"}]},
                {"type": "function_call_output", "output": "abcd"},
            ]
            got = json.loads((await client.post("/v1/responses", {"input": turns, "max_output_tokens": 1})).body)
            assert got["usage"]["input_tokens"] == 2

    run_on_loop(body())


def test_embeddings_are_small_steady_and_of_length_one() -> None:
    async def body() -> None:
        async with emulating() as (_, client):
            asked: dict[str, Any] = {"model": SMALL, "input": ["abcd", "efgh"], "dimensions": 8}
            got = json.loads((await client.post("/v1/embeddings", asked)).body)
            again = json.loads((await client.post("/v1/embeddings", {**asked, "encoding_format": "base64"})).body)
            first, second = (one["embedding"] for one in got["data"])
            assert len(first) == 8
            assert first != second
            assert sum(x * x for x in first) == pytest.approx(1.0, abs=1e-5)
            assert list(struct.unpack("<8f", base64.b64decode(again["data"][0]["embedding"]))) == pytest.approx(first)
            assert got["usage"] == {"prompt_tokens": 2, "total_tokens": 2}

    run_on_loop(body())


def test_how_long_an_answer_gets() -> None:
    async def body() -> None:
        async with emulating(speed=500.0) as (_, client):

            async def length(content: str, **more: Any) -> tuple[int, str]:
                got = json.loads((await client.post(CHAT, chat(content, **more))).body)
                return got["usage"]["completion_tokens"], got["choices"][0]["finish_reason"]

            drawn = [await length(f"question {index}") for index in range(40)]
            assert all(ending == "stop" for _, ending in drawn)
            assert len({tokens for tokens, _ in drawn}) > 20
            assert sum(tokens for tokens, _ in drawn) / 40 == pytest.approx(256, rel=0.4)
            assert await length("question 0") == drawn[0], "the same for the same prompt"
            assert await length("question 0", seed=1) != drawn[0]
            assert await length("question 0", max_tokens=3) == (3, "length")
            assert await length("question 0", max_completion_tokens=3, max_tokens=9) == (3, "length")
            assert await length("question 0", min_tokens=2000) == (2000, "stop")
            assert await length("question 0", min_tokens=12, max_tokens=12) == (12, "length")
            assert await length("question 0", max_tokens=600, ignore_eos=True) == (600, "length")

    run_on_loop(body())


def test_what_is_counted_as_tokens() -> None:
    async def body() -> None:
        async with emulating() as (_, client):

            async def prompt_tokens(content: Any, **more: Any) -> int:
                got = json.loads((await client.post(CHAT, chat(content, max_tokens=1, **more))).body)
                return int(got["usage"]["prompt_tokens"])

            picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9000}}
            assert await prompt_tokens("é" * 4) == 2
            assert await prompt_tokens([{"type": "text", "text": "abcd"}, picture]) == 1 + 1024
            assert await prompt_tokens([{"type": "input_audio", "input_audio": {"data": "AA"}}]) == 750
            assert await prompt_tokens(None) == 1
            assert await prompt_tokens("abcd", tools=[{"type": "function"}]) == 1 + 6
            assert await prompt_tokens("abcd", tools=None) == 1

    run_on_loop(body())


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "says"),
    [
        (CHAT, b"{", 400, "BadRequestError", "truncated"),
        (CHAT, b"\xff", 400, "BadRequestError", "malformed"),
        (CHAT, {"model": SMALL}, 400, "BadRequestError", "messages"),
        (CHAT, chat(max_tokens="many"), 400, "BadRequestError", "Expected `int | null`"),
        (CHAT, {"messages": []}, 400, "BadRequestError", "messages is empty"),
        (CHAT, chat(max_tokens=0), 400, "BadRequestError", "max_tokens must be at least 1"),
        (CHAT, chat(max_tokens=5, min_tokens=6), 400, "BadRequestError", "min_tokens must be less"),
        (CHAT, chat(n=2), 400, "BadRequestError", "one choice"),
        (CHAT, chat("x" * 200_000), 400, "BadRequestError", "maximum context length is 32000 tokens"),
        (CHAT, chat(max_tokens=32_000), 400, "BadRequestError", "maximum context length is 32000 tokens"),
        (CHAT, chat([{"type": "smell"}]), 400, "BadRequestError", "'smell' is not known"),
        (CHAT, {**chat(), "model": "gpt-9"}, 404, "NotFoundError", "The model `gpt-9` does not exist."),
        ("/v1/completions", {"prompt": []}, 400, "BadRequestError", "prompt is empty"),
        ("/v1/completions", {"prompt": ["a", "b"]}, 400, "BadRequestError", "2 prompts"),
        ("/v1/completions", {"prompt": ["a", 1]}, 400, "BadRequestError", "mixes"),
        ("/v1/completions", {"prompt": [-1]}, 400, "BadRequestError", "numbers that are none"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "BadRequestError", "dimensions 0"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "smoke"}, 400, "BadRequestError", "smoke"),
        ("/v1/embeddings", {"input": "a" * 200_000}, 400, "BadRequestError", "maximum context length"),
        ("/v1/responses", {"input": "a", "previous_response_id": "resp_1"}, 404, "NotFoundError", "not kept"),
        ("/v1/responses", {"input": []}, 400, "BadRequestError", "input is empty"),
        ("/v1/audio/speech", {}, 404, "NotFoundError", "Not Found"),
        ("/health", {}, 405, "MethodNotAllowedError", "Not Allowed"),
    ],
)  # fmt: skip
def test_what_is_refused(path: str, body: Any, status: int, kind: str, says: str) -> None:
    async def ask() -> None:
        async with emulating() as (_, client):
            answer = await client.post(path, body)
            error = json.loads(answer.body)["error"]
            assert (answer.status, error["code"], error["type"]) == (status, status, kind)
            assert says in error["message"]
            assert (await client.post(CHAT, chat(max_tokens=1))).status == 200, "and goes on"

    run_on_loop(ask())


def test_a_replica_answers_to_the_name_that_its_pool_serves_it_as() -> None:
    async def body() -> None:
        async with emulating(fleet(pool(served_as="meta/llama"))) as (_, client):
            assert (await client.post(CHAT, {**chat(max_tokens=1), "model": "meta/llama"})).status == 200
            assert (await client.post(CHAT, chat(max_tokens=1))).status == 404

    run_on_loop(body())


def test_the_openai_client_takes_it_for_real() -> None:
    openai = pytest.importorskip("openai")

    async def body() -> None:
        async with (
            emulating() as (made, _),
            openai.AsyncOpenAI(base_url=made.fleet.pools[0].backends[0], api_key="none") as client,
        ):
            assert [one.owned_by async for one in client.models.list()] == ["crosstie-emulated"]
            got = await client.chat.completions.create(**chat(max_tokens=5))
            assert got.usage.completion_tokens == 5
            stream = await client.chat.completions.create(
                **chat(max_tokens=50), stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            assert chunks[-1].usage.completion_tokens == 50
            vectors = await client.embeddings.create(model=SMALL, input=["a", "b"])
            assert [len(one.embedding) for one in vectors.data] == [16, 16]
            response = await client.responses.create(model=SMALL, input="hello")
            assert response.output_text.startswith("This")
            events = [e async for e in await client.responses.create(model=SMALL, input="hello", stream=True)]
            assert events[-1].response.output_text == response.output_text
            with pytest.raises(openai.NotFoundError, match="does not exist"):
                await client.chat.completions.create(**{**chat(), "model": "gpt-9"})

    run_on_loop(body())
