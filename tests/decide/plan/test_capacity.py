"""Requests a second within targets: laws that hold for every replica and mixture, and the formulas by themselves."""

from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from crosstie.catalog.calibration import empty
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.workload import RequestClass, Slice, Target
from crosstie.decide.plan.capacity import (
    GRID,
    LATEST,
    LIMITS,
    Capacity,
    EstimateScale,
    Levels,
    Meant,
    TrafficPart,
    _largest_within,
    _normal,
    at_or_first,
    curves,
    late_share,
    operating_points,
    own_ttft_s,
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
ALL: list[Deployment] = [
    CATALOG.deployment(
        CATALOG.model("gpt-oss-20b"), CATALOG.accelerator(name), Parallelism(tp=tp, dp=dp, ep=dp), "native", "bf16", stack
    )
    for name, tp, dp, stack in REPLICAS
]  # fmt: skip
HARDWARE = Hardware(ALL)


def target(milliseconds: float | None, percentile: float = 0.9) -> Target | None:
    return None if milliseconds is None else Target(seconds=milliseconds / 1e3, percentile=percentile)


def parts(
    *lengths: tuple[int, int], ttft: Target | None = None, tpot: Target | None = None, shares: tuple[float, ...] = ()
) -> list[TrafficPart]:
    """One class: a slice for each pair of lengths."""
    slices = tuple(
        Slice(
            share=share, input_tokens=float(inputs), output_tokens=float(outputs), longest_input=inputs,
            longest_output=outputs, sample=((inputs, outputs),),
        )
        for (inputs, outputs), share in zip(lengths, shares or [1 / len(lengths)] * len(lengths), strict=True)
    )  # fmt: skip
    one = RequestClass(name="x", model="gpt-oss-20b", requests_per_s=1.0, slices=slices, ttft=ttft, tpot=tpot)
    return [TrafficPart(one, piece, index) for index, piece in enumerate(slices)]


def able(
    several: list[TrafficPart], scale: EstimateScale | None = None, demand: float = 1e-3, allowance: float = 1.0
) -> Capacity:
    found = curves(HARDWARE, [one.slice for one in several])
    share = np.array([one.slice.share for one in several])
    levels = Levels(several, found, scale or EstimateScale.none(ALL))
    return operating_points(levels, [Meant(levels.targets, share, demand, allowance)])[0]


def together(several: list[TrafficPart], **options: float) -> Array:
    """Requests a second of the whole mixture."""
    got = able(several, **options)  # type: ignore[arg-type]
    share = np.array([one.slice.share for one in several])
    with np.errstate(divide="ignore"):
        return np.asarray(1.0 / (share / got.requests_per_s).sum(axis=1))


def assert_no_more(less: Array, more: Array) -> None:
    """Up to what halvings and levels leave."""
    assert np.all(less <= more * 1.02 + 1e-12), (less, more)


lengths = st.tuples(st.integers(20, 12_000), st.integers(2, 1500))
some_ttft = st.one_of(st.none(), st.floats(30.0, 20_000.0))
some_tpot = st.one_of(st.none(), st.floats(3.0, 300.0))
factors = st.floats(1.0, 5.0)
percentiles = st.sampled_from([0.5, 0.75, 0.9, 0.95, 0.99])
quick = settings(max_examples=20)


@settings(max_examples=8)
@given(lengths, some_ttft, some_tpot, factors, percentiles)
def test_looser_targets_never_lower_the_rate(
    size: tuple[int, int], ttft: float | None, tpot: float | None, factor: float, percentile: float
) -> None:
    tight = together(parts(size, ttft=target(ttft, percentile), tpot=target(tpot, percentile)))
    looser = together(
        parts(size, ttft=target(ttft and ttft * factor, percentile), tpot=target(tpot and tpot * factor, percentile))
    )
    assert_no_more(tight, looser)
    assert_no_more(looser, together(parts(size)))


@pytest.mark.slow
@quick
@given(lengths, some_ttft, some_tpot, st.tuples(percentiles, percentiles))
def test_higher_percentiles_never_raise_it(
    size: tuple[int, int], ttft: float | None, tpot: float | None, both: tuple[float, float]
) -> None:
    low, high = min(both), max(both)
    strict = together(parts(size, ttft=target(ttft, high), tpot=target(tpot, high)))
    assert_no_more(strict, together(parts(size, ttft=target(ttft, low), tpot=target(tpot, low))))


@pytest.mark.slow
@quick
@given(lengths, some_ttft, some_tpot, st.floats(1.0, 2.0))
def test_faster_replicas_never_take_less(
    size: tuple[int, int], ttft: float | None, tpot: float | None, factor: float
) -> None:
    one, ones = parts(size, ttft=target(ttft), tpot=target(tpot)), np.ones(len(ALL))
    faster = able(one, EstimateScale(ones / factor, ones / factor, ones * factor)).requests_per_s
    assert_no_more(able(one).requests_per_s, faster)


@pytest.mark.slow
@quick
@given(lengths, some_ttft, some_tpot, st.floats(1.0, 50.0))
def test_replicas_that_share_their_traffic_never_take_less_each(
    size: tuple[int, int], ttft: float | None, tpot: float | None, demand: float
) -> None:
    one = parts(size, ttft=target(ttft), tpot=target(tpot))
    assert_no_more(together(one), together(one, demand=demand))


@pytest.mark.slow
@quick
@given(lengths, some_ttft, some_tpot, st.floats(1.0, 3.0))
def test_what_another_pool_leaves_of_the_misses_never_lowers_it(
    size: tuple[int, int], ttft: float | None, tpot: float | None, allowance: float
) -> None:
    one = parts(size, ttft=target(ttft), tpot=target(tpot))
    assert_no_more(together(one), together(one, allowance=allowance))


def test_the_percentile_is_that_of_the_class() -> None:
    """Prompts that no replica keeps the target for, beyond the percentile, do not forbid the others; one more does."""
    few = parts((500, 100), (60_000, 100), shares=(0.97, 0.03), ttft=target(1500, 0.95))
    many = parts((500, 100), (60_000, 100), shares=(0.9, 0.1), ttft=target(1500, 0.95))
    got = able(few)
    assert got.requests_per_s[0].all()
    assert got.keeps_ttft[0, 1] == 0.0
    assert got.keeps_ttft[0] @ [0.97, 0.03] >= 0.95
    assert not able(many).requests_per_s[0].any()


def test_nobody_is_sent_where_it_is_late_beyond_measure() -> None:
    several = parts((500, 100), (100_000, 100), shares=(0.97, 0.03), ttft=target(300, 0.95))
    found = curves(HARDWARE, [one.slice for one in several])
    idle = own_ttft_s(found[1], EstimateScale.none(ALL))
    levels = Levels(several, found, EstimateScale.none(ALL))
    held = levels.room[:, 1] > 0
    late = idle > LATEST * max(0.3, idle[held].min())
    assert not able(several).requests_per_s[late & held].any()
    assert levels.able(levels.targets)[held & ~late, 1].all()


def test_a_mixture_takes_what_its_parts_take() -> None:
    got = able(parts((500, 100), (4000, 300), shares=(0.7, 0.3), tpot=target(40)))
    mixed = 1.0 / (np.array([0.7, 0.3]) / got.requests_per_s).sum(axis=1)
    assert np.all(mixed < got.requests_per_s.max(axis=1))
    assert np.all(mixed > got.requests_per_s.min(axis=1))


def test_what_no_replica_keeps_is_not_taken() -> None:
    assert not able(parts((1000, 200), tpot=target(0.01))).requests_per_s.any()
    assert not able(parts((1000, 200), ttft=target(1.0))).requests_per_s.any()
    # 24 GB do not hold the weights and so long a context; the others do.
    rates = able(parts((500_000, 200))).requests_per_s[:, 0]
    assert rates[2] == 0
    assert np.all(rates[[0, 1]] > 0)


def test_what_a_replica_takes_is_within_what_it_can() -> None:
    """In a closed loop with as many clients as it bears, `steady_state` gives at least as much."""
    got = able(parts((1000, 200), ttft=target(2000), tpot=target(40)))
    for index, _ in enumerate(ALL):
        if got.requests_per_s[index, 0] > 0:
            most = steady_state(
                HARDWARE, max(got.most_in_flight[index, 0], 1.0) + 1, 1000, 200, in_step=False
            ).requests_per_s
            assert got.requests_per_s[index, 0] <= most[index, 0] * 1.01
            assert got.in_flight[index, 0] <= got.most_in_flight[index, 0] * (1 + 1e-9)
            assert got.tpot_s[index, 0] <= 0.040
            assert got.keeps_ttft[index, 0] >= 0.9
            assert got.keeps_tpot[index, 0] >= 0.9


def test_limits_are_named_after_what_binds() -> None:
    def named(one: list[TrafficPart]) -> list[str]:
        return [LIMITS[int(index)] for index in able(one).limit[:, 0]]

    assert named(parts((1000, 200), tpot=target(15)))[0] == "TPOT target"
    assert named(parts((8000, 4), ttft=target(400)))[0] == "TTFT target"
    assert named(parts((8000, 1000)))[2] == "memory"


def test_open_traffic_reaches_attention_replicas_one_by_one() -> None:
    """A closed loop makes prompts of attention replicas coincide; open traffic stalls decode more often."""
    waves = steady_state(HARDWARE, 65, 4000, 200).tpot_s
    (curve,) = curves(HARDWARE, [parts((4000, 200))[0].slice])
    opened = curve.tpot_s[:, list(GRID).index(64.0)]
    assert opened[3] > 1.2 * waves[3, 0]
    assert opened[:3] == pytest.approx(waves[:3, 0])


@given(st.lists(st.floats(0.001, 2.0), min_size=len(GRID), max_size=len(GRID)), st.floats(0.0005, 30.0))
def test_largest_within_is_the_crossing(steps: list[float], limit: float) -> None:
    """Checked by going along the broken line in logarithms with numpy's own interpolation."""
    values = np.cumsum(steps)
    (found,) = _largest_within(values[None, :], np.array([limit]), np.array([0.0]))
    if limit >= values[-1]:
        assert found == GRID[-1]
    elif limit >= values[0]:
        there = np.interp(np.log(found), np.log(GRID), np.log(values))
        assert np.exp(there) == pytest.approx(limit, rel=1e-6)
    else:
        assert found == pytest.approx(limit / values[0])


def test_rates_between_the_grid_are_between_its_own() -> None:
    rates = np.array([GRID**0.7])
    assert at_or_first(rates, np.array([4.0])) == pytest.approx([4.0**0.7])
    assert at_or_first(rates, np.array([0.25])) == pytest.approx([1.0])
    assert 4.0**0.7 < at_or_first(rates, np.array([5.0]))[0] < 8.0**0.7


@given(st.floats(0.01, 0.99), st.floats(0.001, 10.0), st.floats(0.0, 30.0), st.floats(1.0, 60.0))
def test_waits_of_one_queue_and_of_several(busy: float, residual: float, wait: float, pooled: float) -> None:
    """Of one server M/G/1's exponential tail; of more, fewer wait, and for less long."""

    def late(servers: float, seconds: float) -> float:
        return float(late_share(*(np.array([v]) for v in (busy, residual, servers, seconds)))[0])

    assert late(1.0, wait) == pytest.approx(busy * np.exp(-(1 - busy) * wait / (0.5 * residual)))
    assert late(pooled, wait) <= late(1.0, wait) * (1 + 1e-9)
    assert late(pooled, 0.0) <= busy * (1 + 1e-9)
    assert late(pooled, wait + 1.0) <= late(pooled, wait)


def test_the_curve_for_the_normal_distribution() -> None:
    for z in np.linspace(-4, 4, 41):
        assert _normal(np.array([z]))[0] == pytest.approx(NormalDist().cdf(z), abs=2e-4)
