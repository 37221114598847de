"""Requests a second within targets: laws that hold for every replica and slice, and the formulas by themselves."""

from dataclasses import replace
from statistics import NormalDist

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from crosstie.catalog.calibration import empty
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.workload import RequestClass, Slice, Target
from crosstie.decide.plan.capacity import (
    GRID,
    LIMITS,
    Capacity,
    EstimateScale,
    Promise,
    TrafficPart,
    at,
    busy_share,
    capacity,
    curves,
    largest_within,
    wait_s,
    with_headroom,
)
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.steady_state import steady_state

CATALOG = Catalog([], calibration=empty())
REPLICAS = (
    ("h200", 1, 1, "vllm"),
    ("mi300x", 2, 1, "sglang"),
    ("rtx-4090", 1, 1, "vllm"),
    ("b200", 1, 4, "tensorrt-llm"),
)


def deployments(model: str = "gpt-oss-20b") -> list[Deployment]:
    return [
        CATALOG.deployment(
            CATALOG.model(model), CATALOG.accelerator(name), Parallelism(tp=tp, dp=dp, ep=dp), "native", "bf16", stack
        )
        for name, tp, dp, stack in REPLICAS
    ]


ALL = deployments()
HARDWARE = Hardware(ALL)


def target(milliseconds: float | None, percentile: float = 0.9) -> Target | None:
    return None if milliseconds is None else Target(seconds=milliseconds / 1e3, percentile=percentile)


def part(inputs: int = 1000, outputs: int = 200, ttft: Target | None = None, tpot: Target | None = None) -> TrafficPart:
    piece = Slice(
        share=1.0, input_tokens=float(inputs), output_tokens=float(outputs), longest_input=inputs, longest_output=outputs,
        sample=((inputs, outputs),),
    )  # fmt: skip
    one = RequestClass(name="x", model="gpt-oss-20b", requests_per_s=1.0, slices=(piece,), ttft=ttft, tpot=tpot)
    return TrafficPart(one, piece, 0)


def able(one: TrafficPart, promised: Promise | None = None, scale: EstimateScale | None = None) -> Capacity:
    (curve,) = curves(HARDWARE, [one.slice])
    return capacity(curve, one, promised or Promise.none(ALL), scale or EstimateScale.none(ALL))


def promise(*, wait_s: float, quantile: float, deviations: float) -> Promise:
    """To others of the same pool, on every deployment."""
    return Promise(*(np.full(len(ALL), value) for value in (np.inf, wait_s, quantile, deviations)))


def assert_no_more(less: Array, more: Array) -> None:
    """Up to what halvings leave where TTFT limits."""
    assert np.all(less <= more * 1.003 + 1e-12), (less, more)


lengths = st.tuples(st.integers(20, 12_000), st.integers(2, 1500))
some_ttft = st.one_of(st.none(), st.floats(30.0, 20_000.0))
some_tpot = st.one_of(st.none(), st.floats(3.0, 300.0))
factors = st.floats(1.0, 5.0)
percentiles = st.sampled_from([0.5, 0.75, 0.9, 0.95, 0.99])
quick = settings(max_examples=20)


@quick
@given(lengths, some_ttft, some_tpot, factors, percentiles)
def test_looser_targets_never_lower_the_rate(
    size: tuple[int, int], ttft: float | None, tpot: float | None, factor: float, percentile: float
) -> None:
    tight = able(part(*size, target(ttft, percentile), target(tpot, percentile)))
    looser = able(part(*size, target(ttft and ttft * factor, percentile), target(tpot and tpot * factor, percentile)))
    assert_no_more(tight.requests_per_s, looser.requests_per_s)
    assert_no_more(looser.requests_per_s, able(part(*size)).requests_per_s)


@quick
@given(lengths, some_ttft, some_tpot, st.tuples(percentiles, percentiles))
def test_higher_percentiles_never_raise_it(
    size: tuple[int, int], ttft: float | None, tpot: float | None, both: tuple[float, float]
) -> None:
    low, high = min(both), max(both)
    strict = able(part(*size, target(ttft, high), target(tpot, high)))
    assert_no_more(strict.requests_per_s, able(part(*size, target(ttft, low), target(tpot, low))).requests_per_s)


@quick
@given(lengths, some_ttft, some_tpot, st.floats(1.0, 2.0))
def test_faster_replicas_never_take_less(
    size: tuple[int, int], ttft: float | None, tpot: float | None, factor: float
) -> None:
    one, ones = part(*size, target(ttft), target(tpot)), np.ones(len(ALL))
    faster = able(one, scale=EstimateScale(ones / factor, ones / factor, ones * factor))
    assert_no_more(able(one).requests_per_s, faster.requests_per_s)


@quick
@given(st.integers(20, 6000), st.integers(2, 1000), factors, some_ttft, some_tpot)
def test_longer_prompts_never_raise_it(
    inputs: int, outputs: int, factor: float, ttft: float | None, tpot: float | None
) -> None:
    # Rates are interpolated between numbers of requests in flight, and `serve` finds its own to 0.2%.
    longer = able(part(int(inputs * factor), outputs, target(ttft), target(tpot)))
    shorter = able(part(inputs, outputs, target(ttft), target(tpot)))
    assert np.all(longer.requests_per_s <= shorter.requests_per_s * 1.02), (longer, shorter)


@quick
@given(lengths, some_ttft, some_tpot, st.floats(0.0, 3.0), st.floats(0.5, 0.999), st.floats(-0.1, 3.0))
def test_a_promise_to_others_never_raises_it(
    size: tuple[int, int], ttft: float | None, tpot: float | None, deviations: float, quantile: float, wait: float
) -> None:
    one = part(*size, target(ttft), target(tpot))
    promised = able(one, promise(wait_s=wait, quantile=quantile, deviations=deviations))
    assert_no_more(promised.requests_per_s, able(one).requests_per_s)
    if wait <= 0:
        assert not promised.requests_per_s.any()


def test_what_no_replica_keeps_is_not_taken() -> None:
    assert not able(part(tpot=target(0.01))).requests_per_s.any()
    assert not able(part(ttft=target(1.0))).requests_per_s.any()
    # 24 GB do not hold the weights and so long a context; the others do.
    rates = able(part(inputs=500_000)).requests_per_s
    assert rates[2] == 0
    assert np.all(rates[[0, 1]] > 0)


def test_what_a_replica_takes_is_within_what_it_can() -> None:
    """In a closed loop with as many clients as it bears, `serve` gives at least as much."""
    one = part(ttft=target(2000), tpot=target(40))
    got = able(one)
    for index, _ in enumerate(ALL):
        if got.requests_per_s[index] > 0:
            most = steady_state(
                HARDWARE, max(got.most_in_flight[index], 1.0) + 1, 1000, 200, in_step=False
            ).requests_per_s
            assert got.requests_per_s[index] <= most[index, 0] * 1.01
            assert got.in_flight[index] <= got.most_in_flight[index]
            assert got.tpot_s[index] <= 0.040 * 1.05
            assert got.ttft_s[index] <= 2.0 * 1.001


def test_limits_are_named_after_what_binds() -> None:
    def named(one: TrafficPart) -> list[str]:
        return [LIMITS[int(index)] for index in able(one).limit]

    assert named(part(tpot=target(15)))[0] == "TPOT target"
    assert named(part(8000, 4, ttft=target(400)))[0] == "TTFT target"
    assert named(part(8000, 1000))[2] == "memory"


def test_open_traffic_reaches_attention_replicas_one_by_one() -> None:
    """A closed loop makes prompts of attention replicas coincide; open traffic stalls decode more often."""
    waves = steady_state(HARDWARE, 65, 4000, 200).tpot_s
    (curve,) = curves(HARDWARE, [part(4000, 200).slice])
    opened = curve.tpot_s[:, list(GRID).index(64.0)]
    assert opened[3] > 1.2 * waves[3, 0]
    assert opened[:3] == pytest.approx(waves[:3, 0])


@given(st.lists(st.floats(0.001, 2.0), min_size=len(GRID), max_size=len(GRID)), st.floats(0.0005, 30.0))
def test_largest_within_is_the_crossing(steps: list[float], limit: float) -> None:
    """Checked by going along the broken line in logarithms with numpy's own interpolation."""
    values = np.cumsum(steps)
    (found,) = largest_within(values[None, :], limit, np.array([0.0]))
    if limit >= values[-1]:
        assert found == np.inf
    elif limit >= values[0]:
        there = np.interp(np.log(found), np.log(GRID), np.log(values))
        assert np.exp(there) == pytest.approx(limit, rel=1e-6)
    else:
        assert found == pytest.approx(limit / values[0])


def test_largest_within_starts_where_a_request_alone_is() -> None:
    rising = np.array([np.linspace(2.0, 12.0, len(GRID))])
    assert largest_within(rising, 1.0, np.array([1.5])) == pytest.approx([0.0])
    assert largest_within(rising, 1.75, np.array([1.5])) == pytest.approx([0.5])


@given(st.floats(0.01, 900.0), st.floats(0.0, 3.0))
def test_headroom_of_a_rate_in_proportion_is_poissons(most: float, deviations: float) -> None:
    """n + z sqrt(n) = most, solved for n; the grid's straight lines in logarithms are within 4% of the curve."""
    (found,) = with_headroom(GRID[None, :] * 3.0, np.array([most]), deviations)
    root = (-deviations + np.sqrt(deviations**2 + 4 * most)) / 2
    assert found == pytest.approx(root**2, rel=0.04)


@given(st.floats(0.05, 1.0), st.floats(4.0, 900.0), st.floats(0.0, 3.0))
def test_headroom_grows_as_a_replica_saturates(elasticity: float, most: float, deviations: float) -> None:
    (found,) = with_headroom(GRID[None, :] ** elasticity, np.array([most]), deviations)
    spread = deviations / np.sqrt(elasticity)
    root = (-spread + np.sqrt(spread**2 + 4 * most)) / 2
    assert found == pytest.approx(min(max(root**2, 0.0), most), rel=0.05, abs=1.0)
    assert found <= most * (1 + 1e-9)


def test_rates_between_the_grid_are_between_its_own() -> None:
    rates = np.array([GRID**0.7])
    assert at(rates, np.array([4.0])) == pytest.approx([4.0**0.7])
    assert at(rates, np.array([0.25])) == pytest.approx([0.25])
    assert 4.0**0.7 < at(rates, np.array([5.0]))[0] < 8.0**0.7


@given(st.floats(0.0, 0.998), st.floats(0.001, 10.0), st.sampled_from([0.5, 0.75, 0.9, 0.95, 0.975, 0.995]))
def test_busy_share_inverts_the_wait(busy: float, residual: float, quantile: float) -> None:
    waited = wait_s(np.array([busy]), np.array([residual]), quantile)
    # P(wait > t) = busy exp(-(1 - busy) t / residual), so at the quantile it is what is left.
    if waited[0] > 0:
        assert busy * np.exp(-(1 - busy) * waited[0] / residual) == pytest.approx(1 - quantile)
        assert busy_share(waited / residual, quantile) == pytest.approx([busy], abs=3e-3)
    else:
        assert busy <= 1 - quantile + 1e-12
        assert busy_share(waited, quantile) == pytest.approx([1 - quantile])


def test_the_scale_is_exact_at_the_ends_of_the_intervals(catalog: Catalog) -> None:
    calibrated = Catalog([])
    model, gpu = calibrated.model("llama-3.3-70b"), calibrated.accelerator("mi300x")
    one = calibrated.calibrated(calibrated.deployment(model, gpu, Parallelism(tp=1), "fp8", "bf16", "vllm"))
    spread = one.correction.spread
    end = NormalDist().inv_cdf(0.9)
    slow, fast, middle = (EstimateScale.at([one], z) for z in (-end, end, 0.0))
    assert slow.tpot == pytest.approx([np.exp(max(spread["tpot"].high, 0.0))])
    assert fast.ttft == pytest.approx([np.exp(min(spread["ttft"].low, 0.0))])
    assert slow.rate == pytest.approx([np.exp(min(spread["throughput"].low, 0.0))])
    assert all(factor == [1.0] for factor in (middle.ttft, middle.tpot, middle.rate))
    # Without calibration nothing is known, and nothing is scaled.
    bare = catalog.deployment(model, gpu, Parallelism(tp=1), "fp8", "bf16", "vllm")
    assert EstimateScale.at([bare], -end).tpot == [1.0]


def test_exempt_slices_answer_to_the_others_alone() -> None:
    """Their own TTFT may be missed; the wait that they cause may not."""
    strict = part(8000, 50, ttft=target(40))
    assert not able(strict).requests_per_s.any()
    exempt = replace(strict, slice=msgspec.structs.replace(strict.slice, exempt=True))
    assert able(exempt).requests_per_s[0] > 0
    assert not able(exempt, promise(wait_s=-1.0, quantile=0.95, deviations=1.6)).requests_per_s.any()
