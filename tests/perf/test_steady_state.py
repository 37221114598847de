"""Steady state: limits that can be worked out, and laws that any queue obeys."""

import heapq
import random
from statistics import mean

import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.perf import steady_state as module
from crosstie.perf.estimate import estimate, estimates
from crosstie.perf.hardware import Hardware
from crosstie.perf.steady_state import HOST_S_PER_CACHED_TOKEN, single_stream_ceiling, steady_state
from crosstie.perf.step import shape, step
from crosstie.sim.engine import Engine


def hardware(
    catalog: Catalog, model: str = "llama-3.1-8b", accelerator: str = "h200", stack: str | None = None, **split: int
) -> Hardware:
    one = catalog.deployment(catalog.model(model), catalog.accelerator(accelerator), Parallelism(**split), stack=stack)
    return Hardware([one])


def test_one_client_gets_a_step_a_token_and_its_own_prefill(catalog: Catalog) -> None:
    machine = hardware(catalog)
    alone = steady_state(machine, 1, 1000, 500)
    decode = step(machine, shape(1, 1250)).total_s
    prefill = step(machine, shape(prefill_tokens=1000)).total_s
    assert float(alone.tpot_s[0, 0]) == pytest.approx(float(decode[0, 0]), rel=0.02)
    assert float(alone.ttft_s[0, 0]) == pytest.approx(0.030 + float(prefill[0, 0]), rel=0.05)


def test_a_long_prompt_is_prefilled_in_chunks(catalog: Catalog) -> None:
    machine = hardware(catalog)
    chunks = [
        float(step(machine, shape(prefill_tokens=8192, prefill_start=s)).total_s[0, 0]) for s in range(0, 65536, 8192)
    ]
    got = float(steady_state(machine, 1, 65536, 2).ttft_s[0, 0])
    assert got == pytest.approx(0.030 + sum(chunks), rel=0.05)


def test_the_number_that_decode_reproduces_itself(catalog: Catalog) -> None:
    """Over loads of every kind, from idle to saturated prefill."""
    draw = np.random.default_rng(5)
    size = 2000
    clients, inputs = draw.integers(1, 800, size), np.exp(draw.uniform(3, 10, size)).round()
    outputs = np.exp(draw.uniform(0.7, 8, size)).round()
    for stack, split, worst in (
        ("vllm", Parallelism(tp=2), 0.05),
        ("tensorrt-llm", Parallelism(tp=2, pp=2), 0.05),
        ("sglang", Parallelism(tp=2), 0.5),
        ("vllm", Parallelism(tp=2, dp=4, ep=8), 0.1),
    ):
        one = catalog.deployment(catalog.model("qwen3-30b-a3b"), catalog.accelerator("h200"), split, stack=stack)
        machine = Hardware([one])
        load = module._Load(clients.astype(float), inputs, outputs - 1, inputs + outputs / 2)
        assumed = module._settle(machine, load)
        at = module._shapes(machine, assumed, load)
        times = [step(machine, shapes).total_s for shapes in (at.decode, at.mixed, at.full)]
        follows = module._cycle(machine, assumed, times[0], times[1], times[2], load).decoding
        miss = np.abs(follows / assumed - 1)
        assert float(np.median(miss)) < 0.005
        assert float(np.quantile(miss, 0.99)) < worst


def test_throughput_and_latency_grow_with_clients(catalog: Catalog) -> None:
    clients = np.arange(1, 200)
    for inputs, outputs in ((4096, 1024), (128, 2000), (20000, 4)):
        got = steady_state(hardware(catalog, "llama-3.1-8b", "mi300x"), clients, inputs, outputs)
        for rising in (got.output_tokens_per_s, got.tpot_s, got.ttft_s):
            assert float((np.diff(rising[0]) / rising[0][:-1]).min()) > -1e-3


def test_more_clients_than_memory_wait_in_front(catalog: Catalog) -> None:
    got = steady_state(hardware(catalog, "llama-3.1-70b", "mi300x"), np.array([10, 100]), 8000, 192)
    assert got.capacity_binds.tolist() == [[False, True]]
    room = float(got.concurrency_that_fits[0, 0])
    # 41.2 GB of cache at 320 KiB a token and a mean length of 8,096.
    assert room == pytest.approx(41.2e9 / 327680 / 8096, rel=0.01)
    assert float(got.ttft_s[0, 1]) > 3 * float(got.ttft_s[0, 0])
    assert float(got.output_tokens_per_s[0, 1]) < 1.5 * float(got.output_tokens_per_s[0, 0])


def test_engines_that_prefill_first_stall_decode(catalog: Catalog) -> None:
    mixed, first = (
        steady_state(hardware(catalog, "llama-3.1-70b", "mi355x", stack=s), 64, 4096, 256) for s in ("vllm", "sglang")
    )
    assert float(first.tpot_s[0, 0]) > 1.02 * float(mixed.tpot_s[0, 0])


def test_saturated_prefill_sets_the_rate(catalog: Catalog) -> None:
    """Long prompts and two tokens: throughput is what prefill alone can do."""
    machine = hardware(catalog)
    got = steady_state(machine, 200, 8192, 2)
    prefill = float(step(machine, shape(prefill_tokens=8192)).total_s[0, 0])
    assert float(got.requests_per_s[0, 0]) == pytest.approx(1 / prefill, rel=0.15)
    assert float(got.ttft_s[0, 0]) > 100 * prefill


def test_a_pipeline_adds_throughput_and_not_speed(catalog: Catalog) -> None:
    one = steady_state(hardware(catalog, "llama-3.1-70b", "mi300x", tp=4), np.array([1, 256]), 512, 512)
    two = steady_state(hardware(catalog, "llama-3.1-70b", "mi300x", tp=4, pp=2), np.array([1, 256]), 512, 512)
    assert float(two.tpot_s[0, 0]) >= float(one.tpot_s[0, 0])
    assert float(two.output_tokens_per_s[0, 1]) > 1.2 * float(one.output_tokens_per_s[0, 1])


def test_arrays_and_single_points_agree(catalog: Catalog) -> None:
    machine = hardware(catalog, "deepseek-v3", "mi355x", tp=8)
    concurrency, inputs = np.array([1, 16, 300]), np.array([100, 5000, 900])
    together = steady_state(machine, concurrency, inputs, 64)
    for i in range(3):
        alone = steady_state(machine, concurrency[i], inputs[i], 64)
        assert float(alone.tpot_s[0, 0]) == pytest.approx(float(together.tpot_s[0, i]))
        assert float(alone.ttft_s[0, 0]) == pytest.approx(float(together.ttft_s[0, i]))


@pytest.mark.parametrize(
    ("concurrency", "inputs", "outputs", "name"),
    [(0, 1, 1, "concurrency"), (1, 0, 1, "input"), (1, 1, 0, "output"), (1, float("nan"), 1, "input")],
)
def test_nonsense_is_refused(catalog: Catalog, concurrency: float, inputs: float, outputs: float, name: str) -> None:
    with pytest.raises(BadInput, match=name):
        steady_state(hardware(catalog), concurrency, inputs, outputs)


def test_estimates_refuse_what_cannot_run(catalog: Catalog) -> None:
    big = catalog.deployment(catalog.model("llama-3.1-70b"), catalog.accelerator("h100-sxm"))
    with pytest.raises(BadInput, match="no room for the cache"):
        estimate(big, concurrency=1, input_tokens=10, output_tokens=10)
    small = catalog.deployment(catalog.model("qwen3-8b"), catalog.accelerator("h100-sxm"))
    with pytest.raises(BadInput, match="beyond the 40960"):
        estimate(small, concurrency=1, input_tokens=40960, output_tokens=10)


def test_bounds_and_fractions(catalog: Catalog) -> None:
    model = catalog.model("llama-3.1-70b")
    cases = {
        "memory bandwidth": (catalog.deployment(model, catalog.accelerator("mi300x")), 1),
        "memory capacity": (catalog.deployment(model, catalog.accelerator("mi300x")), 500),
        "host": (
            catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("b200"), Parallelism(tp=8)),
            256,
        ),
    }
    for wanted, (deployment, concurrency) in cases.items():
        got = estimate(deployment, concurrency=concurrency, input_tokens=1024, output_tokens=256)
        assert got.decode_bound == wanted
        assert 0 < got.decode_roofline_fraction <= 1
        assert 0 < got.prefill_roofline_fraction <= 1
        assert got.single_stream_tokens_per_s < got.single_stream_ceiling_tokens_per_s
    compute = estimate(cases["memory bandwidth"][0], concurrency=1, input_tokens=8192, output_tokens=16)
    assert compute.prefill_bound == "compute"
    cards = catalog.deployment(model, catalog.accelerator("l40s"), Parallelism(tp=8))
    got = estimate(cards, concurrency=1, input_tokens=8192, output_tokens=16)
    assert got.prefill_bound == "interconnect"


@pytest.mark.parametrize("stack", ["vllm", "sglang"])
@pytest.mark.parametrize(
    ("concurrency", "inputs", "outputs"),
    [(1, 4096, 100), (64, 4096, 64), (64, 1024, 1024), (256, 512, 16), (200, 8192, 200)],
)
def test_a_token_costs_what_its_parts_cost(
    catalog: Catalog, stack: str, concurrency: int, inputs: int, outputs: int
) -> None:
    """The bill of a token adds up to the GPU time that there is for it."""
    one = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("mi355x"), stack=stack)
    got = estimate(one, concurrency=concurrency, input_tokens=inputs, output_tokens=outputs)
    idle = one.stack.host.request.si / outputs if concurrency == 1 else 0.0
    assert sum(got.gpu_s_per_token.values()) == pytest.approx(1 / got.output_tokens_per_s - idle, rel=0.15)


def closed_loop(
    deployment: Deployment, clients: int, inputs: int, outputs: int, round_s: float, seconds: float = 90.0
) -> tuple[float, ...]:
    """TTFT, TPOT and output tokens/s of a simulated engine whose clients ask again as soon as they are answered.

    They begin one by one over a round, as those of `bench` do.
    """
    engine, draw = Engine(deployment, inputs + outputs / 2), random.Random(1)
    asking = [(round_s * client / clients, client) for client in range(clients)]
    asked: dict[int, tuple[float, int]] = {}
    first: dict[int, float] = {}
    waits, paces, tokens = [], [], 0
    settled = 0.4 * seconds

    def length(mean: int) -> int:
        return max(round(mean * draw.uniform(0.8, 1.2)), 1)

    def learn(now: float) -> None:
        nonlocal tokens
        for token in engine.advance(now):
            number = int(token.id)
            first.setdefault(number, token.at)
            tokens += token.tokens * (token.at > settled)
            if token.finished:
                heapq.heappush(asking, (token.at, number + clients))
                if asked[number][0] > settled:
                    waits.append(first[number] - asked[number][0])
                    paces.append((token.at - first[number]) / max(asked[number][1] - 1, 1))

    now = 0.0
    while now < seconds:
        event = engine.next_event_s()
        if asking and (event is None or asking[0][0] <= event):
            at, number = heapq.heappop(asking)
            now = max(now, at)
            learn(now)
            asked[number] = now, length(outputs)
            engine.add(number, length(inputs), asked[number][1], now)
        else:
            assert event is not None
            now = event
            learn(now)
    return mean(waits), mean(paces), tokens / (seconds - settled)


@pytest.mark.parametrize(
    ("model", "stack", "clients", "inputs", "outputs"),
    [
        ("llama-3.1-8b", "vllm", 32, 1024, 256),
        ("llama-3.1-8b", "vllm", 64, 4096, 64),
        ("llama-3.1-8b", "sglang", 16, 4096, 128),
        ("qwen3-32b", "vllm", 128, 1024, 256),
        ("qwen3-32b", "tensorrt-llm", 64, 256, 512),
    ],
)
def test_the_closed_form_agrees_with_the_simulated_engine(
    catalog: Catalog, model: str, stack: str, clients: int, inputs: int, outputs: int
) -> None:
    """The same clients, counted one by one: `compare` and `simulate` say the same."""
    deployment = catalog.deployment(catalog.model(model), catalog.accelerator("h200"), precision="fp8", stack=stack)
    got = steady_state(Hardware([deployment]), clients, inputs, outputs)
    round_s = clients / float(got.requests_per_s[0, 0])
    ttft, tpot, rate = closed_loop(deployment, clients, inputs, outputs, round_s)
    assert float(got.output_tokens_per_s[0, 0]) == pytest.approx(rate, rel=0.08)
    assert float(got.tpot_s[0, 0]) == pytest.approx(tpot, rel=0.08)
    assert float(got.ttft_s[0, 0]) == pytest.approx(ttft, rel=0.25)


def test_many_points_are_the_same_as_few(catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large calls are split over two threads."""
    machine = hardware(catalog, "deepseek-v3", "mi355x", tp=8)
    clients = np.arange(1, 300)
    whole = steady_state(machine, clients, 2000, 100)
    monkeypatch.setattr(module, "_WORTH_SPLITTING", 10)
    split = steady_state(machine, clients, 2000, 100)
    for name in (
        "ttft_s",
        "ttft_burst_s",
        "tpot_s",
        "output_tokens_per_s",
        "decoding",
        "concurrency_that_fits",
        "chunks",
    ):
        np.testing.assert_allclose(getattr(whole, name), getattr(split, name), err_msg=name)
    np.testing.assert_allclose(whole.mixed.total_s, split.mixed.total_s)
    np.testing.assert_allclose(whole.decode.ideal_s, split.decode.ideal_s)


def test_points_broadcast_against_deployments(catalog: Catalog) -> None:
    model = catalog.model("llama-3.1-8b")
    machine = Hardware([catalog.deployment(model, catalog.accelerator(name)) for name in ("h200", "mi300x")])
    each = steady_state(machine, 1000, np.array([[1000.0], [20000.0]]), 100)
    assert each.tpot_s.shape == (2, 1)
    grid = steady_state(machine, 1000, np.array([1000.0, 20000.0]), 100)
    assert grid.tpot_s.shape == (2, 2)
    assert float(each.concurrency_that_fits[1, 0]) == pytest.approx(float(grid.concurrency_that_fits[1, 1]))


def test_cached_tokens_are_read_and_not_computed(catalog: Catalog) -> None:
    """Prefill is a step over the rest of the prompt that begins behind the cached part; decode sees no difference."""
    machine = hardware(catalog)
    whole, rest, short = (
        steady_state(machine, 1, inputs, 100, cached_tokens=cached)
        for inputs, cached in ((8000, 0), (8000, 6000), (2000, 0))
    )
    behind = step(machine, shape(prefill_tokens=2000, prefill_start=6000)).total_s
    # What the host takes for a cached token comes to 30 ms for 6,000.
    host = 6000 * HOST_S_PER_CACHED_TOKEN
    assert host == pytest.approx(0.030)
    assert float(rest.ttft_s[0, 0]) == pytest.approx(0.030 + host + float(behind[0, 0]), rel=0.05)
    assert float(short.ttft_s[0, 0]) < float(rest.ttft_s[0, 0]) < 0.5 * float(whole.ttft_s[0, 0])
    assert float(rest.tpot_s[0, 0]) == pytest.approx(float(whole.tpot_s[0, 0]), rel=1e-3)
    assert float(rest.concurrency_that_fits[0, 0]) == float(whole.concurrency_that_fits[0, 0])


def test_a_prompt_that_is_cached_whole_still_computes_its_last_token(catalog: Catalog) -> None:
    machine = hardware(catalog)
    one, all_but_one = (steady_state(machine, 16, 4000, 50, cached_tokens=cached) for cached in (4000, 3999))
    np.testing.assert_array_equal(one.ttft_s, all_but_one.ttft_s)
    assert float(one.service_s[0, 0]) > 0


def test_more_of_a_prompt_in_the_cache_never_costs(catalog: Catalog) -> None:
    machine = hardware(catalog, "llama-3.1-70b", "mi300x")
    got = steady_state(machine, 20, 8000, 200, cached_tokens=np.linspace(0, 8000, 30))
    assert float(np.diff(got.requests_per_s[0]).min()) > -1e-9
    assert float(np.diff(got.ttft_s[0]).max()) < 1e-9
    assert float(got.requests_per_s[0, -1]) > 1.5 * float(got.requests_per_s[0, 0])


def test_a_shared_prefix_is_held_once(catalog: Catalog) -> None:
    """41.2 GB of cache at 320 KiB a token: 15 requests of 8,096 tokens, or 58 of which 6,000 are the same."""
    machine = hardware(catalog, "llama-3.1-70b", "mi300x")
    own, shared = (
        float(steady_state(machine, 100, 8000, 192, cached_tokens=6000, shared_tokens=n).concurrency_that_fits[0, 0])
        for n in (0, 6000)
    )
    assert own == pytest.approx(41.2e9 / 327680 / 8096, rel=0.01)
    assert shared == pytest.approx((41.2e9 / 327680 - 6000) / 2096, rel=0.01)


@pytest.mark.parametrize(("cached", "shared"), [(-1, 0), (1001, 0), (float("nan"), 0), (500, 501), (500, -1)])
def test_cached_tokens_are_part_of_the_prompt(catalog: Catalog, cached: float, shared: float) -> None:
    with pytest.raises(BadInput, match="cached tokens must be 0 to the input"):
        steady_state(hardware(catalog), 4, 1000, 10, cached_tokens=cached, shared_tokens=shared)


def test_a_prompt_is_not_split_over_attention_replicas(catalog: Catalog) -> None:
    model, h200 = catalog.model("deepseek-v3"), catalog.accelerator("h200")
    tp, dp = (
        Hardware([catalog.deployment(model, h200, split)]) for split in (Parallelism(tp=8), Parallelism(dp=8, ep=8))
    )
    alone = shape(1, 32768)
    assert float(step(dp, alone).memory_s[0, 0]) > float(step(tp, alone).memory_s[0, 0])
    assert float(steady_state(dp, 1, 8192, 2).ttft_s[0, 0]) > float(steady_state(tp, 1, 8192, 2).ttft_s[0, 0])
    # Enough sequences for all replicas are shared out.
    one, eight = (float(step(dp, shape(n, 32768)).total_s[0, 0]) for n in (1, 8))
    assert eight < 3 * one


def test_stages_overlap_prompts_but_not_one_prompt(catalog: Catalog) -> None:
    """Short prompts: twice the stages, twice the prompts a second, and no sooner an answer."""
    one, two = (
        steady_state(hardware(catalog, "llama-3.1-70b", "mi355x", tp=2, pp=n), np.array([1, 300]), 512, 1)
        for n in (1, 2)
    )
    assert float(two.ttft_s[0, 0]) >= float(one.ttft_s[0, 0])
    assert float(two.requests_per_s[0, 1]) == pytest.approx(2 * float(one.requests_per_s[0, 1]), rel=0.15)


def test_several_estimates_are_those_of_each(catalog: Catalog) -> None:
    model = catalog.model("llama-3.1-8b")
    deployments = [catalog.deployment(model, catalog.accelerator(name)) for name in ("h200", "mi300x")]
    together = estimates(deployments, concurrency=16, input_tokens=512, output_tokens=64)
    for one, got in zip(deployments, together, strict=True):
        assert estimate(one, concurrency=16, input_tokens=512, output_tokens=64).tpot_s == pytest.approx(got.tpot_s)


def test_one_stream_is_no_faster_than_memory_allows() -> None:
    assert single_stream_ceiling(10e9, 1e12) == 100
    assert single_stream_ceiling(10e9, 1e12, gpus=4) == 400
