"""Open traffic on one replica, against queueing theory and against the means of `perf.steady_state`."""

from dataclasses import replace

import numpy as np
import pytest
from tests.sim.open_traffic import Arrival, simulate

from crosstie.catalog.calibration import empty
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.memory import cache_sequences
from crosstie.perf.steady_state import steady_state
from crosstie.perf.step import shape, step_s
from crosstie.perf.tabulated import StepTimes

CATALOG = Catalog([], calibration=empty())


def replica(model: str, accelerator: str, stack: str, split: Parallelism | None = None) -> Deployment:
    found = CATALOG.model(model), CATALOG.accelerator(accelerator), split or Parallelism()
    return CATALOG.deployment(*found, "native", "bf16", stack)


SMALL = replica("qwen3-8b", "h200", "vllm")
SPLIT = replica("llama-3.3-70b", "mi300x", "sglang", Parallelism(tp=4))
WHOLE = replica("qwen3-8b", "rtx-4090", "tensorrt-llm")
TINY = replica("qwen3-8b", "rtx-4090", "vllm")
RANKS = replica("gpt-oss-120b", "b200", "vllm", Parallelism(dp=4, ep=4))
ALL = (SMALL, SPLIT, WHOLE, TINY, RANKS)


def name(deployment: Deployment) -> str:
    return f"{deployment.label} {deployment.stack.id}"


def chunk_of(deployment: Deployment) -> int:
    return int(Hardware([deployment]).chunk_tokens[0, 0])


def poisson(rate: float, count: int, inputs: int, outputs: int, seed: int = 5) -> list[Arrival]:
    at = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, count))
    return [Arrival(float(t), inputs, outputs) for t in at]


def traffic(rate: float, count: int = 300, seed: int = 3, longest: int = 6000) -> list[Arrival]:
    chance = np.random.default_rng(seed)
    at = np.cumsum(chance.exponential(1.0 / rate, count))
    lengths = zip(chance.integers(1, longest, count), chance.integers(1, 120, count), strict=True)
    return [Arrival(float(t), int(i), int(o)) for t, (i, o) in zip(at, lengths, strict=True)]


def at_once(first: Array, last: Array) -> int:
    """The most requests that are between their first and their last token at one moment."""
    moments = sorted([(t, 1) for t in first] + [(t, -1) for t in last], key=lambda pair: (pair[0], pair[1]))
    return int(np.max(np.cumsum([change for _, change in moments])))


def tokens_of(deployment: Deployment, requests: list[Arrival]) -> tuple[Array, Array]:
    """Moments of the first and the last token of each request."""
    got = simulate(deployment, requests)
    first = np.array([r.arrival_s for r in requests]) + got.ttft_s
    later = np.array([r.output_tokens - 1 for r in requests])
    return first, first + np.where(later > 0, np.nan_to_num(got.tpot_s) * later, 0.0)


@pytest.mark.parametrize("deployment", ALL, ids=name)
@pytest.mark.parametrize(("inputs", "outputs"), [(100, 200), (2000, 50), (7000, 300), (15_000, 100)])
def test_a_request_alone_sees_what_the_closed_form_says(deployment: Deployment, inputs: int, outputs: int) -> None:
    alone = simulate(deployment, [Arrival(3.0, inputs, outputs)])
    steady = steady_state(Hardware([deployment]), 1, inputs, outputs)
    # A prompt of one chunk and a bit: the closed form has a fraction of a step where the engine has a short one.
    tolerance = 0.02 if inputs <= chunk_of(deployment) else 0.12
    assert alone.ttft_s[0] == pytest.approx(steady.ttft_s[0, 0], rel=tolerance)
    assert alone.tpot_s[0] == pytest.approx(steady.tpot_s[0, 0], rel=0.02)
    assert alone.busy == pytest.approx(1.0)


@pytest.mark.parametrize("deployment", [SMALL, SPLIT, RANKS], ids=name)
def test_times_of_steps_are_those_of_perf(deployment: Deployment) -> None:
    """Between the points of the table, with other contexts, and with several prompts in one step."""
    context, dp = 3000.0, deployment.parallelism.dp
    times = StepTimes(deployment, context)
    hardware = Hardware([deployment])
    for sequences, length, prompts, tokens, start in [
        (3, 3000.0, 0, 0, 0.0),
        (100, 3000.0, 0, 0, 0.0),
        (40, 1500.0, 0, 0, 0.0),
        (40, 6000.0, 0, 0, 0.0),
        (0, 0.0, 1, 3000, 0.0),
        (0, 0.0, 4, 2000, 0.0),
        (0, 0.0, 8, 1000, 0.0),
        (0, 0.0, 1, 4000, 4000.0),
        (48, 3000.0, 2, 1500, 0.0),
    ]:
        # As many on every attention replica.
        total = prompts * tokens * dp
        exact = step_s(hardware, shape(sequences, length, total, start, max(tokens * prompts if dp > 1 else tokens, 1)))
        before = prompts * tokens * (start + 0.5 * tokens)
        if dp > 1 and prompts > 1:
            before = prompts * tokens * 0.5 * prompts * tokens
        got = times.seconds(sequences, sequences * length, total, prompts * tokens, before)
        assert got == pytest.approx(float(exact[0, 0]), rel=0.06), (sequences, length, prompts, tokens, start)


@pytest.mark.slow
@pytest.mark.parametrize(("load", "count"), [(0.5, 30_000), (0.8, 80_000)])
def test_prompts_alone_wait_as_in_a_queue_with_one_server(load: float, count: int) -> None:
    """Prompts that fill a step and ask for one token: M/D/1, whose mean wait is rho S / 2 (1 - rho)."""
    chunk = chunk_of(SMALL)
    alone = simulate(SMALL, [Arrival(0.0, chunk, 1)]).ttft_s[0]
    request_s = float(Hardware([SMALL]).host_request_s[0, 0])
    service = alone - request_s
    got = simulate(SMALL, poisson(load / service, count, chunk, 1))
    waits = got.ttft_s - alone
    assert np.mean(waits) == pytest.approx(load * service / (2 * (1 - load)), rel=0.05)
    # As many as find it idle do not wait; and it is busy as much as it is asked to be.
    assert np.mean(waits < 1e-9) == pytest.approx(1 - load, abs=0.02)
    assert got.busy == pytest.approx(load, rel=0.02)
    assert np.isnan(got.tpot_s).all()


def test_prompts_that_share_steps_wait_for_those_that_came_meanwhile() -> None:
    """Four fit into a step and end together: a wait grows by no more than the load, as `plan.capacity` counts on."""
    quarter, load = chunk_of(SMALL) // 4, 0.8
    alone = simulate(SMALL, [Arrival(0.0, quarter, 1)]).ttft_s[0]
    service = alone - float(Hardware([SMALL]).host_request_s[0, 0])
    got = simulate(SMALL, poisson(load / service, 20_000, quarter, 1))
    # P(wait > t) = load exp(-(1 - load) t / R), R half a service.
    for quantile in (0.9, 0.95, 0.99):
        one_by_one = 0.5 * service / (1 - load) * np.log(load / (1 - quantile))
        assert one_by_one < np.quantile(got.ttft_s - alone, quantile) < one_by_one * (1 + load) * 1.05


@pytest.mark.parametrize("deployment", ALL, ids=name)
@pytest.mark.parametrize("rate", [0.2, 5.0, 500.0])
def test_every_request_gets_its_tokens_in_order(deployment: Deployment, rate: float) -> None:
    requests = traffic(rate)
    got = simulate(deployment, requests)
    assert np.all(np.isfinite(got.ttft_s))
    assert np.all(got.ttft_s > 0)
    several = np.array([r.output_tokens > 1 for r in requests])
    assert np.all(got.tpot_s[several] > 0)
    assert np.isnan(got.tpot_s[~several]).all()
    assert 0 < got.busy <= 1 + 1e-9
    if deployment.parallelism.dp == 1:
        first, _ = tokens_of(deployment, requests)
        assert np.all(np.diff(first) >= -1e-9), "prompts are taken in the order of their arrival"


@pytest.mark.parametrize("deployment", ALL, ids=name)
def test_slower_steps_stretch_everything(deployment: Deployment) -> None:
    together = [replace(r, arrival_s=0.0) for r in traffic(1.0, 60)]
    once, twice = simulate(deployment, together), simulate(deployment, together, slower=2.0)
    request_s = float(Hardware([deployment]).host_request_s[0, 0])
    assert twice.ttft_s - request_s == pytest.approx(2 * (once.ttft_s - request_s))
    assert twice.tpot_s == pytest.approx(2 * once.tpot_s, nan_ok=True)


def test_more_traffic_is_slower() -> None:
    means = [np.mean(simulate(SMALL, traffic(rate, 400)).ttft_s) for rate in (0.5, 20.0, 200.0)]
    assert means[0] < means[1] < means[2]


def test_it_is_the_same_every_time_and_in_any_order() -> None:
    requests = traffic(20.0)
    once, again = simulate(SMALL, requests), simulate(SMALL, list(reversed(requests)))
    assert np.array_equal(once.ttft_s, again.ttft_s)
    assert np.array_equal(once.tpot_s, again.tpot_s, equal_nan=True)


def test_memory_keeps_requests_out() -> None:
    """Requests of equal length, all at once: no more run than the cache holds, and some must wait for that."""
    requests = [Arrival(0.0, 2000, 400)] * 60
    first, last = tokens_of(WHOLE, requests)
    holds = int(cache_sequences(WHOLE, 2400.0))
    assert 1 <= holds < 60
    assert at_once(first, last) == holds
    # An engine that lets in what fits now holds more prompts than whole requests, but no more than prompts.
    first, last = tokens_of(TINY, requests)
    assert int(cache_sequences(TINY, 2400.0)) <= at_once(first, last) <= int(cache_sequences(TINY, 2000.0))


def test_a_request_too_long_for_the_cache_is_served_alone() -> None:
    longer = int(float(cache_sequences(WHOLE, 1000.0)) * 1000) + 5000
    first, last = tokens_of(WHOLE, [Arrival(0.0, longer, 20)] * 3)
    assert at_once(first, last) == 1


def test_the_engines_own_limit_keeps_requests_out() -> None:
    requests = [Arrival(0.0, 10, 300)] * 700
    first, last = tokens_of(TINY, requests)
    assert at_once(first, last) == int(Hardware([TINY]).max_sequences[0, 0]) == 256


def test_attention_replicas_take_prompts_side_by_side() -> None:
    chunk = chunk_of(RANKS)
    one, four, eight = (simulate(RANKS, [Arrival(0.0, chunk, 1)] * n).ttft_s for n in (1, 4, 8))
    assert four.max() < 2.0 * one.max(), "one prompt for each replica goes in one step"
    assert eight.max() > 1.5 * four.max(), "a second one waits for the next"
    assert eight.min() == pytest.approx(four.min())
