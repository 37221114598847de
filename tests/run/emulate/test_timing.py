"""Time as `perf` predicts it, memory that fills, prefixes that are known, and what the metrics say of it.

What the engine counts is exact. What a client sees runs on a real clock, so it is held to one side only.
"""

import asyncio
import json
import math
from collections.abc import Callable

import pytest
from tests.run.emulate.running import CATALOG, CHAT, LARGE, chat, emulating, fleet, pool
from tests.waiting import LIMIT_S

from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Route, ServedClass
from crosstie.perf.tabulated import StepTimes
from crosstie.sim.engine import Engine
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.emulate.fleet import deployment_of
from crosstie_gateway.emulate.replica import Emulated, EmulatedReplica, Sequence
from crosstie_gateway.emulate.requests import GenerationRequest

SPEED = 10.0


def alone(prompt: int, output: int, context: float) -> tuple[float, float]:
    """TTFT and the time of the last token that the simulator gives one request by itself."""
    engine = Engine(deployment_of(CATALOG, pool(model=LARGE)), context)
    engine.add("a", prompt, output, 0.0)
    first, last = engine.advance(math.inf)
    return first.at, last.at


def test_with_speculation_tokens_come_in_pieces_and_the_metrics_say_so() -> None:
    drafting = pool(model=LARGE, parallelism=Parallelism(tp=4), speculation="eagle3:3", acceptance=2.5)

    async def body() -> None:
        async with emulating(fleet(drafting), speed=SPEED) as (_, client):
            asked = {**chat("x" * 400, max_tokens=101, ignore_eos=True), "model": LARGE}
            events = await client.stream(asked)
            assert len(events.payloads) < 60
            metrics = await client.metrics()
            assert metrics["vllm:generation_tokens_total"] == 101
            assert metrics["vllm:spec_decode_num_drafts_total"] == 40
            assert metrics["vllm:spec_decode_num_draft_tokens_total"] == 120
            assert metrics["vllm:spec_decode_num_accepted_tokens_total"] == pytest.approx(60, abs=1)
            assert metrics["vllm:inter_token_latency_seconds_count"] == 40
            between, each = (
                metrics[f"vllm:{name}_seconds_sum"] for name in ("inter_token_latency", "request_time_per_output_token")
            )
            assert between / 40 == pytest.approx(2.5 * each, rel=1e-6)
        async with emulating(fleet(pool()), speed=SPEED) as (_, client):
            assert "spec_decode" not in (await client.get("/metrics")).body.decode()

    run_on_loop(body())


def test_a_stream_takes_the_time_that_was_predicted() -> None:
    async def body() -> None:
        async with emulating(fleet(pool(model=LARGE)), speed=SPEED) as (_, client):
            first, last = alone(8000, 150, 1024 + 128)
            began = asyncio.get_running_loop().time()
            asked = {**chat("x" * 32_000, max_tokens=150, ignore_eos=True), "model": LARGE}
            events = await client.stream(asked)
            seen_first, seen_last = ((at - began) * SPEED for at in (events.times[0], events.times[-1]))
            # Never earlier; how much later is the machine's. What the engine counts is exact.
            assert seen_first > 0.9 * first
            assert seen_last > 0.9 * last
            metrics = await client.metrics()
            assert metrics["vllm:time_to_first_token_seconds_sum"] == pytest.approx(first, rel=1e-6)
            assert metrics["vllm:e2e_request_latency_seconds_sum"] == pytest.approx(last, rel=1e-6)
            assert metrics["vllm:inter_token_latency_seconds_sum"] == pytest.approx(last - first, rel=1e-6)
            assert metrics["vllm:inter_token_latency_seconds_count"] == 149
            assert metrics["vllm:request_queue_time_seconds_sum"] < 0.1 < first

    run_on_loop(body())


class Hand:
    """A clock and a loop with one timer, which go on when they are told to."""

    def __init__(self) -> None:
        self.time = 0.0
        self.due: tuple[float, Callable[[], None]] | None = None

    def call_later(self, delay: float, callback: Callable[[], None]) -> "Hand":
        self.due = (self.time + delay, callback)
        return self

    def cancel(self) -> None:
        self.due = None

    def run(self) -> None:
        while self.due is not None:
            (self.time, callback), self.due = self.due, None
            callback()


class Heard(Sequence):
    """A stream that notes how far its answer had come each time it was told."""

    def __init__(self, output_tokens: int):
        super().__init__(GenerationRequest(b"x" * 400, 100, output_tokens, streams=True))
        self.pieces: list[int] = []

    @property
    def slow(self) -> bool:
        return False

    def on_tokens(self, tokens: int, finished: bool) -> None:
        self.pieces.append(tokens)


@pytest.mark.parametrize(("speed", "every"), [(1.0, True), (0.5, True), (50.0, False)])
def test_at_the_clocks_pace_every_token_is_told(speed: float, every: bool) -> None:
    """Where time runs faster than the clock, several come together."""
    deployment = deployment_of(CATALOG, pool())
    emulated = Emulated("a", "m", deployment, 200.0, StepTimes(deployment, 200.0), 8192, 100.0)
    hand, stream = Hand(), Heard(30)
    replica = EmulatedReplica(hand, emulated, speed=speed, clock=lambda: hand.time)  # type: ignore[arg-type]
    replica.submit(stream)
    hand.run()
    assert stream.pieces[-1] == 30
    assert (stream.pieces == list(range(1, 31))) is every


def test_many_at_once_take_longer_each_and_all_end() -> None:
    async def body() -> None:
        async with emulating(fleet(pool(model=LARGE)), speed=50.0) as (_, client):

            async def mean_gap(at_once: int) -> float:
                before = await client.metrics()
                asked = [
                    {**chat(f"{index} " + "x" * 4000, max_tokens=60, ignore_eos=True), "model": LARGE}
                    for index in range(at_once)
                ]
                for answer in await asyncio.gather(*(client.post(CHAT, one) for one in asked)):
                    assert json.loads(answer.body)["usage"]["completion_tokens"] == 60
                after = await client.metrics()
                name = "vllm:inter_token_latency_seconds"
                return (after[f"{name}_sum"] - before[f"{name}_sum"]) / (
                    after[f"{name}_count"] - before[f"{name}_count"]
                )

            assert await mean_gap(1) < 0.8 * await mean_gap(32)

    run_on_loop(body())


@pytest.mark.slow
def test_a_full_cache_makes_requests_wait() -> None:
    # What is left beside the weights holds four of these.
    tight = fleet(pool(model=LARGE, accelerator="mi300x", precision="bf16", max_context=60_000))

    async def body() -> None:
        async with emulating(tight, speed=50.0) as (_, client):

            def asked(index: int) -> dict[str, object]:
                return {**chat(f"{index} " + "x" * 120_000, max_tokens=3000, ignore_eos=True), "model": LARGE}

            answers = [asyncio.ensure_future(client.post(CHAT, asked(index))) for index in range(6)]
            seen, used = 0.0, 0.0
            while not all(answer.done() for answer in answers):
                metrics = await client.metrics()
                if metrics["vllm:num_requests_running"] >= 3:
                    seen = max(seen, metrics["vllm:num_requests_waiting"])
                    used = max(used, metrics["vllm:kv_cache_usage_perc"])
                await asyncio.sleep(0.005)
            assert seen >= 1
            assert 0.6 < used <= 1.0
            assert [answer.result().status for answer in answers] == [200] * 6

    run_on_loop(body())


def test_a_full_queue_is_a_503() -> None:
    async def body() -> None:
        async with emulating(max_waiting=3, speed=2.0) as (_, client):
            asked = [chat(f"{index} " + "x" * 4000, max_tokens=5) for index in range(12)]
            answers = await asyncio.gather(*(client.post(CHAT, one) for one in asked))
            refused = [json.loads(answer.body)["error"] for answer in answers if answer.status != 200]
            assert 0 < len(refused) < 12
            assert {(error["code"], error["type"]) for error in refused} == {(503, "ServiceUnavailableError")}

    run_on_loop(body())


def test_a_known_prefix_shortens_the_first_token() -> None:
    async def body() -> None:
        async with emulating(fleet(pool(model=LARGE)), speed=50.0) as (_, client):

            async def ttft(content: str) -> tuple[float, int]:
                before = (await client.metrics())["vllm:time_to_first_token_seconds_sum"]
                got = json.loads((await client.post(CHAT, {**chat(content, max_tokens=2), "model": LARGE})).body)
                after = (await client.metrics())["vllm:time_to_first_token_seconds_sum"]
                return after - before, got["usage"]["prompt_tokens_details"]["cached_tokens"]

            cold, none = await ttft("x" * 40_000 + "first")
            warm, cached = await ttft("x" * 40_000 + "second")
            other, miss = await ttft("y" + "x" * 40_000)
            assert (none, miss) == (0, 0)
            assert 9_900 < cached <= 10_000
            assert warm < 0.3 * cold
            assert other == pytest.approx(cold, rel=0.05)
            metrics = await client.metrics()
            assert metrics["vllm:prefix_cache_queries_total"] == metrics["vllm:prompt_tokens_total"]
            assert metrics["vllm:prefix_cache_hits_total"] == cached

    run_on_loop(body())


def test_the_next_turn_of_a_conversation_knows_the_last_answer() -> None:
    async def body() -> None:
        async with emulating(speed=200.0) as (_, client):
            turns = [{"role": "user", "content": "x" * 1000}]
            first = json.loads(
                (await client.post(CHAT, {"messages": turns, "max_tokens": 500, "ignore_eos": True})).body
            )
            turns += [first["choices"][0]["message"], {"role": "user", "content": "And then?"}]
            second = json.loads((await client.post(CHAT, {"messages": turns, "max_tokens": 1})).body)
            assert second["usage"]["prompt_tokens"] == 250 + 500 + 3
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 650

    run_on_loop(body())


def test_whoever_leaves_frees_what_was_held() -> None:
    async def body() -> None:
        async with emulating(speed=2.0) as (_, client):
            connection, reader = await client.begin(CHAT, chat(max_tokens=20_000, ignore_eos=True))
            async with asyncio.timeout(LIMIT_S):
                await reader.headed.wait()
                while not reader.pieces:
                    await asyncio.sleep(0.01)
            busy = await client.metrics()
            assert busy["vllm:num_requests_running"] == 1
            assert busy["vllm:kv_cache_usage_perc"] > 0
            assert busy["vllm:generation_tokens_total"] > 0
            connection.abort()
            async with asyncio.timeout(LIMIT_S):
                while (await client.metrics())["vllm:num_requests_running"]:
                    await asyncio.sleep(0.01)
            idle = await client.metrics()
            assert idle["vllm:kv_cache_usage_perc"] == 0
            assert idle["vllm:generation_tokens_total"] >= busy["vllm:generation_tokens_total"]
            raw = (await client.get("/metrics")).body.decode()
            assert 'finished_reason="abort"} 1' in raw

    run_on_loop(body())


def test_the_head_comes_before_the_first_token() -> None:
    async def body() -> None:
        async with emulating(fleet(pool(model=LARGE)), speed=1.0) as (_, client):
            asked = {**chat("x" * 60_000, max_tokens=5), "model": LARGE}
            connection, reader = await client.begin(CHAT, asked)
            async with asyncio.timeout(LIMIT_S):
                await reader.headed.wait()
            assert reader.status == 200
            assert not reader.pieces
            connection.abort()

    run_on_loop(body())


NAMES = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info", "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total", "request_success_total", "engine_sleep_state"]  # fmt: skip
HISTOGRAMS = ["time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"]  # fmt: skip


def test_every_metric_is_there_under_vllms_name() -> None:
    async def body() -> None:
        async with emulating() as (_, client):
            await client.post(CHAT, chat(max_tokens=5, ignore_eos=True))
            answer = await client.get("/metrics")
            lines = answer.body.decode().splitlines()
            assert lines[0].startswith("# emulated by crosstie: one/0, llama-3.1-8b on 1 x mi300x")
            assert (answer.header(b"content-type") or b"").startswith(b"text/plain")
            metrics = await client.metrics()
            assert all(f"vllm:{name}" in metrics for name in NAMES)
            for name in HISTOGRAMS:
                buckets = [int(line.rpartition(" ")[2]) for line in lines if line.startswith(f"vllm:{name}_bucket")]
                assert buckets == sorted(buckets)
                assert buckets[-1] == metrics[f"vllm:{name}_count"] == (4 if name.startswith("inter") else 1)
            assert metrics["vllm:generation_tokens_total"] == 5
            assert (
                'vllm:request_success_total{engine="0",model_name="llama-3.1-8b",finished_reason="length"} 1' in lines
            )

    run_on_loop(body())


def test_answers_are_as_long_as_the_classes_of_a_pool_say() -> None:
    def served(name: str, model: str, rate: float, inputs: float, outputs: float, to: str, share: float) -> ServedClass:
        return ServedClass(
            name=name, model=model, requests_per_s=rate, input_tokens=inputs, output_tokens=outputs, ttft=None,
            tpot=None, routes=(Route(pool=to, share=share),),
        )  # fmt: skip

    classes = (
        served("a", "llama-3.1-8b", 3, 100, 40, "one", 1.0),
        served("b", "llama-3.1-8b", 2, 400, 240, "one", 0.5),
    )

    async def body() -> None:
        async with emulating(fleet(pool(), pool("two"), classes=classes)) as (made, _):
            one, two = (server.replica.emulated for server in made.replicas)
            assert one.mean_output_tokens == pytest.approx(90)
            assert one.context == pytest.approx(175 + 45)
            assert two.mean_output_tokens == 256

    run_on_loop(body())
