"""The gateway by HTTP/2, as clients have it: httpx and OpenAI's SDK over it, with engines behind it that are fakes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from tests.run.gateway.fakes import MODEL, Fake, Running, fakes, fleet_of, in_folder, pool_of, running
from tests.run.wire.certificates import client_tls, pair
from tests.run.wire.http2_client import connected
from tests.run.wire.test_server import on_loop
from tests.waiting import LIMIT_S, until

from crosstie.core.errors import BadInput
from crosstie.run.service import edge
from crosstie.run.service.edge import Edge
from crosstie.run.wire.http2 import Http2Connection

CHAT = "/v1/chat/completions"


def ask(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], **more}


@asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[tuple[Fake, Running, httpx2.AsyncClient]]:
    """By prior knowledge: HTTP/1.1 is not spoken."""
    async with fakes() as [fake]:
        door = Edge("127.0.0.1", 0, http2=True)
        async with running(fleet_of(pool_of("one", fake.url), **settings), components=[door]) as at:
            base = f"http://127.0.0.1:{at.port}"
            async with httpx2.AsyncClient(http1=False, http2=True, base_url=base, timeout=LIMIT_S) as client:
                yield fake, at, client
            await until(lambda: not any(isinstance(one, Http2Connection) for one in at.process.server.connections))


@on_loop
async def test_answers_come_whole_and_as_they_are_made() -> None:
    async with gateway() as (fake, _, client):
        whole = await client.post(CHAT, json=ask())
        assert (whole.http_version, whole.status_code) == ("HTTP/2", 200)
        assert whole.json()["served_by"] == fake.name
        assert whole.headers["x-crosstie-pool"] == "one"
        assert "transfer-encoding" not in whole.headers
        streamed = await client.post(CHAT, json=ask(stream=True))
        assert streamed.headers["content-type"].startswith("text/event-stream")
        assert streamed.text.count("data: ") == fake.tokens + 2
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert (await client.get("/v1/models")).status_code == 200
        assert (await client.post(CHAT, json=ask(model="none"))).status_code == 404
        assert (await client.get(CHAT)).status_code == 405


@on_loop
async def test_many_streams_go_on_at_once_on_one_connection() -> None:
    async with gateway() as (fake, at, client):
        fake.pause_s = 0.01
        answers = await asyncio.gather(*(client.post(CHAT, json=ask(stream=bool(i % 2))) for i in range(60)))
        assert {one.status_code for one in answers} == {200}
        assert all(one.text.endswith("data: [DONE]\n\n") for one in answers[1::2])
        assert len(fake.hit) == 60
        (connection,) = [one for one in at.process.server.connections if isinstance(one, Http2Connection)]
        assert not connection.streams


@on_loop
async def test_who_gives_up_in_the_middle_stops_its_engine_and_nobody_elses() -> None:
    async with gateway() as (fake, at, _):
        fake.tokens, fake.pause_s = 10_000, 0.01
        body = json.dumps(ask(stream=True)).encode()
        async with connected(at.port) as client:
            first, second = (client.ask(CHAT, body, method="POST") for _ in range(2))
            await until(lambda: client.bodies[first] and client.bodies[second])
            client.h2.reset_stream(second)
            client.flush()
            await until(lambda: fake.gone == 1)
            assert len(at.gateway.exchanges) == 1
            so_far = len(client.bodies[first])
            await until(lambda: len(client.bodies[first]) > so_far)
        await until(lambda: fake.gone == 2)


@on_loop
async def test_long_prompts_and_long_answers_pass() -> None:
    async with gateway() as (fake, _, client):
        text = "word " * 100_000
        asked = ask(messages=[{"role": "user", "content": text}])
        answer = await client.post(CHAT, json=asked)
        # More than the model's context; but all of it was read.
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        fake.tokens = 4000
        long = await client.post(CHAT, json=ask(stream=True))
        assert long.text.count("data: ") == 4002


@on_loop
async def test_a_backend_that_breaks_off_shows_as_an_answer_that_did_not_end() -> None:
    async with gateway() as (fake, _, client):
        fake.mode = "cut-mid-event"
        answer = await client.post(CHAT, json=ask(stream=True))
        events = [
            json.loads(one) for one in answer.text.removesuffix("\n\n").split("data: ")[1:] if "[DONE]" not in one
        ]
        assert "error" in events[-1]


@on_loop
async def test_messages_are_answered_in_their_own_form() -> None:
    async with gateway() as (_, _, client):
        asked = {"model": MODEL, "max_tokens": 5, "messages": [{"role": "user", "content": "hello"}], "stream": True}
        answer = await client.post("/v1/messages", json=asked)
        assert "event: message_start" in answer.text
        assert "event: message_stop" in answer.text


@in_folder
async def test_openais_sdk_agrees_on_it_by_tls(folder: Path) -> None:
    cert, key = pair(folder)
    async with fakes() as [fake]:
        door = Edge("127.0.0.1", 0, tls_cert=cert, tls_key=key)
        async with running(fleet_of(pool_of("one", fake.url)), components=[door], opened=door.listen) as at:
            async with httpx2.AsyncClient(http2=True, verify=client_tls(), timeout=LIMIT_S) as client:
                sdk = openai.AsyncOpenAI(base_url=door.url, api_key="none", max_retries=0, http_client=client)
                said = await sdk.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
                )
                words = [chunk.choices[0].delta.content async for chunk in said if chunk.choices]
                assert len([word for word in words if word]) == fake.tokens
                assert any(isinstance(one, Http2Connection) for one in at.process.server.connections)
            door = Edge("127.0.0.1", 0, tls_cert=cert, tls_key=key, http2=False)
            at.process.server.tls = door._tls
            async with httpx2.AsyncClient(http2=True, verify=client_tls(), timeout=LIMIT_S) as client:
                assert (await client.get(f"https://127.0.0.1:{at.port}/v1/models")).http_version == "HTTP/1.1"
            await at.process.server.drain(10.0, grace_s=0.05)


def test_without_its_library_it_is_not_offered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cert, key = pair(tmp_path)
    monkeypatch.setattr(edge, "_has_http2", lambda: False)
    with pytest.raises(BadInput, match=r"pip install 'crosstie\[http2\]'"):
        Edge("127.0.0.1", 0, http2=True)
    without = Edge("127.0.0.1", 0, tls_cert=cert, tls_key=key)
    assert without._tls is not None
    assert without._tls._protocols == ["http/1.1"]
