"""Streams gone on with by real engines: llama.cpp killed in the middle of an answer, and emulated replicas cut short."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
from tests.lazily import Lazily
from tests.run.emulate.running import fleet as emulated_fleet, pool as emulated_pool
from tests.run.gateway.fakes import CALM, CATALOG, Running, fleet_of, pool_of, running, until
from tests.run.gateway.tellers import Heard
from tests.run.start.test_local import real
from tests.wire.test_server import on_loop

from crosstie.core.fleet import Serving
from crosstie.wire.client import Headers
from crosstie.wire.fetch import fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.emulate.faults import Fault
from crosstie_gateway.emulate.fleet import start
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.start.local import LocalEngine, start_local

if TYPE_CHECKING:
    import openai
else:
    openai = Lazily("openai")

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
# Whose answers have line ends that are made one by one and read as one, and characters of several tokens.
QUESTIONS: dict[str, dict[str, Any]] = {
    "code": {"messages": [{"role": "user", "content": "Write a Python function that reverses a list, with comments."}]},
    "pictures": {"messages": [{"role": "user", "content": "Tell me a short story about a fox, with emoji 🦊."}]},
    "lines": {"prompt": "def fibonacci(n):\n"},
}

# With a target that everybody keeps, price alone decides. Without any, whoever would take twice as long as the fastest
# is passed over, and on a busy machine a replica seems so after one answer that came late.
ANY_TIME: Headers = [(b"x-crosstie-ttft-ms", b"1e8")]


async def heard(at: Running, body: dict[str, Any], headers: Headers | None = None, **more: Any) -> Heard:
    path = CHAT if "messages" in body else COMPLETION
    said = {"model": "m", "stream": True, "temperature": 0, "stream_options": {"include_usage": True}, **body, **more}
    answer = await fetch(at.origin, "POST", path, headers=headers, body=json.dumps(said).encode(), timeout_s=300)
    return Heard(answer)


@contextlib.asynccontextmanager
async def two_engines(serving: Serving = CALM) -> AsyncIterator[tuple[Running, dict[str, LocalEngine]]]:
    with start_local(threads=1, wait_s=120) as one, start_local(threads=1, wait_s=120) as other:
        engines = {engine.url: engine for engine in (one, other)}
        pools = [pool_of(f"p{at}", url, model="m", served_as=one.model) for at, url in enumerate(engines)]
        async with running(fleet_of(*pools, serving=serving)) as at:
            await until(lambda: all(backend.identified for backend in at.gateway.backends.values()))
            yield at, engines


async def kill_while_answering(at: Running, engines: dict[str, LocalEngine], events: int) -> None:
    """With SIGKILL, when about so many events have passed."""

    def sent() -> bool:
        return any(
            e.attempt is not None and getattr(e.attempt.relay, "events", 0) >= events for e in at.gateway.exchanges
        )

    await until(sent)
    [exchange] = at.gateway.exchanges
    assert exchange.attempt is not None
    engine = engines[exchange.attempt.backend.replica.key]
    os.kill(engine.pid, signal.SIGKILL)


@real
@pytest.mark.parametrize(("name", "after"), [("code", 9), ("code", 36), ("pictures", 7), ("lines", 1), ("lines", 20)])
def test_an_engine_that_is_killed_costs_nothing_of_a_greedy_answer(name: str, after: int) -> None:
    async def main() -> None:
        async with two_engines() as (at, engines):
            records: list[RequestRecord] = []
            at.gateway.listeners.append(records.append)
            undisturbed = await heard(at, QUESTIONS[name], max_tokens=44)
            assert undisturbed.comments == []
            asked = asyncio.create_task(heard(at, QUESTIONS[name], max_tokens=44))
            await kill_while_answering(at, engines, after)
            one = await asked
            assert one.comments[-1].startswith(": crosstie resumed on pool p")
            assert one.text == undisturbed.text
            assert one.finishes == undisturbed.finishes
            assert (one.done, one.errors) == (1, [])
            # Not the time as well: llama.cpp's own goes on with the events.
            assert len({(event["id"], event["model"], event["object"]) for event in one.events}) == 1
            assert one.roles == undisturbed.roles
            counts = ("prompt_tokens", "completion_tokens", "total_tokens")
            assert [[usage[key] for key in counts] for usage in one.usages] == [
                [usage[key] for key in counts] for usage in undisturbed.usages
            ]
            assert [(told.how, told.resumed) for told in records] == [("served", 0), ("served", 1)]
            assert (records[0].input_tokens, records[0].output_tokens) == (
                records[1].input_tokens,
                records[1].output_tokens,
            )

    run_on_loop(main())


@real
@on_loop
async def test_openai_s_own_client_reads_a_resumed_stream_as_one() -> None:
    async with two_engines() as (at, engines):

        async def read() -> list[Any]:
            client = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{at.port}/v1", api_key="x", max_retries=0)
            async with client:
                stream = await client.chat.completions.create(
                    model="m", temperature=0, max_tokens=32, stream=True, stream_options={"include_usage": True},
                    messages=[{"role": "user", "content": "List five fruits as a numbered list, with comments."}],
                )  # fmt: skip
                return [chunk async for chunk in stream]

        undisturbed = await read()
        asked = asyncio.create_task(read())
        await kill_while_answering(at, engines, 8)
        resumed = await asked

        def told(chunks: list[Any]) -> tuple[Any, ...]:
            choices = [choice for chunk in chunks for choice in chunk.choices]
            return (
                "".join(choice.delta.content or "" for choice in choices),
                [choice.finish_reason for choice in choices if choice.finish_reason],
                [choice.delta.role for choice in choices if choice.delta.role],
                chunks[-1].usage.total_tokens,
                len({chunk.id for chunk in chunks}),
            )

        assert told(resumed) == told(undisturbed)
        assert await at.metric("crosstie_resumed_total") == 1


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("after", [1, 7, 40, 80])
def test_emulated_replicas_go_on_where_others_were_cut(path: str, after: int) -> None:
    async def main() -> None:
        pools = [emulated_pool(name, usd_per_gpu_hour=usd) for name, usd in (("one", 1.0), ("two", 1000.0))]
        emulated = await start(
            CATALOG, emulated_fleet(*pools, policy="cheapest-meeting-target", serving=CALM), speed=50.0
        )
        try:
            async with running(emulated.fleet, speed=50.0) as at:
                records: list[RequestRecord] = []
                at.gateway.listeners.append(records.append)
                asked: dict[str, Any] = {"model": pools[0].model, "max_tokens": 80}
                said = "tell me more"
                asked.update({"messages": [{"role": "user", "content": said}]} if path == CHAT else {"prompt": said})
                undisturbed = await heard(at, asked, ANY_TIME)
                emulated.replica("one", 0).inject(Fault(kind="cut", after_tokens=after))
                one = await heard(at, asked, ANY_TIME)
                assert undisturbed.text
                assert one.text == undisturbed.text
                assert (one.finishes, one.errors, one.done) == (undisturbed.finishes, [], 1)
                counts = ("prompt_tokens", "completion_tokens")
                assert [one.usages[-1][key] for key in counts] == [undisturbed.usages[-1][key] for key in counts]
                first, second = records
                assert first.pool == "one"
                assert (first.input_tokens, first.output_tokens) == (second.input_tokens, second.output_tokens)
                length = undisturbed.usages[-1]["completion_tokens"]
                # Whoever has said all that was asked for needs nobody to go on.
                assert second.resumed == int(after < length)
        finally:
            await emulated.close()

    run_on_loop(main())
