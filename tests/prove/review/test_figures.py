"""Intervals hold what they say, and a verdict needs the whole of one."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from crosstie.core.errors import BadData
from crosstie.prove.review.figures import (
    MeasuredValue,
    ReviewFigure,
    Threshold,
    mean_seen,
    quantile_seen,
    rate_seen,
    read_thresholds,
    share_seen,
    thresholds,
)

LENGTHS = np.random.default_rng(11)


def _mean(chance: np.random.Generator) -> MeasuredValue | None:
    return mean_seen(chance.lognormal(0.0, 1.0, 400))


def _quantile(chance: np.random.Generator) -> MeasuredValue | None:
    return quantile_seen(chance.lognormal(0.0, 1.0, 400), 0.9)


def _rate(chance: np.random.Generator) -> MeasuredValue | None:
    return rate_seen(np.sort(chance.uniform(0.0, 100.0, chance.poisson(500))), 100.0)


def _rare(chance: np.random.Generator) -> MeasuredValue | None:
    return rate_seen(np.sort(chance.uniform(0.0, 100.0, chance.poisson(2))), 100.0)


def _share(chance: np.random.Generator) -> MeasuredValue | None:
    return share_seen(float(chance.binomial(60, 0.95)), 60.0)


@pytest.mark.parametrize(
    ("sample", "true"),
    [(_mean, np.exp(0.5)), (_quantile, np.exp(1.2815516)), (_rate, 5.0), (_rare, 0.02), (_share, 0.95)],
    ids=["mean", "quantile", "rate", "rare", "share"],
)
def test_intervals_hold_the_truth_in_about_95_of_100_samples(
    sample: Callable[[np.random.Generator], MeasuredValue | None], true: float
) -> None:
    held = 0
    for seed in range(400):
        seen = sample(np.random.default_rng(seed))
        assert seen is not None
        assert seen.low is not None
        assert seen.high is not None
        held += seen.low <= true <= seen.high
    # A binomial of 400 at 0.95 is within 0.915 and 0.98 unless the interval is wrong; heavy tails cost a mean a little.
    assert 0.9 <= held / 400 <= 0.995


def test_requests_that_are_alike_in_a_row_make_a_mean_less_sure() -> None:
    values = np.repeat(np.random.default_rng(2).normal(100.0, 20.0, 20), 50)
    alike, mixed = mean_seen(values), mean_seen(np.random.default_rng(3).permutation(values))
    assert alike is not None
    assert mixed is not None
    assert alike.value == pytest.approx(mixed.value)
    assert (alike.high or 0) - (alike.low or 0) > 3 * ((mixed.high or 0) - (mixed.low or 0))


def test_bursts_make_a_rate_less_sure() -> None:
    even = rate_seen(np.linspace(0.0, 99.9, 500), 100.0)
    bursty = rate_seen(np.sort(np.concatenate([np.linspace(t, t + 0.1, 50) for t in range(0, 100, 10)])), 100.0)
    assert even is not None
    assert bursty is not None
    assert (bursty.high or 0) - bursty.value > 1.5 * ((even.high or 0) - even.value)


def test_what_few_say_is_not_known() -> None:
    assert mean_seen(np.array([])) is None
    assert mean_seen(np.array([1.0, 2.0, 3.0])) == MeasuredValue(2.0, None, None, 3)
    # Of ten the 95th percentile may be beyond all of them.
    seen = quantile_seen(np.arange(10.0), 0.95)
    assert seen is not None
    assert (seen.value, seen.high) == (9.0, None)
    assert quantile_seen(np.array([np.nan]), 0.5) is None
    assert share_seen(0.0, 0.0) is None


def figure(
    low: float | None, value: float, high: float | None, side: str = "both", predicted: float = 100.0
) -> ReviewFigure:
    limit = Threshold(share=0.1, side=side, says="", why="")  # type: ignore[arg-type]
    return ReviewFigure("x", "", "x", "tokens", predicted, MeasuredValue(value, low, high, 500), limit)


@pytest.mark.parametrize(
    ("found", "verdict"),
    [
        (figure(95, 100, 105), "holds"),
        (figure(115, 120, 125), "beyond"),
        (figure(105, 120, 135), "unsure"),
        (figure(75, 80, 85), "beyond"),
        (figure(75, 80, 85, "above"), "holds"),
        (figure(75, 80, 85, "below"), "beyond"),
        (figure(115, 120, 125, "below"), "holds"),
        # An interval over both sides of the limit says nothing, nor does one that is not known.
        (figure(20, 120, 220), "unsure"),
        (figure(None, 120, None), "unsure"),
        (figure(115, 120, None), "unsure"),
    ],
)
def test_a_figure_is_beyond_only_with_all_of_its_interval(found: ReviewFigure, verdict: str) -> None:
    assert found.verdict == verdict


def test_what_was_not_planned_at_all_is_infinitely_off() -> None:
    assert figure(1, 2, 3, predicted=0.0).verdict == "beyond"
    assert figure(0, 0, 3, predicted=0.0).verdict == "holds"


def test_thresholds_are_data_and_each_says_why() -> None:
    assert thresholds()["throughput"].share == 0.08
    assert all(one.says and one.why for one in thresholds().values())


def test_a_slip_in_the_data_is_named(tmp_path: Path) -> None:
    file = tmp_path / "thresholds.toml"
    file.write_text('[throughput]\nshare = 0.08\nside = "sideways"\nsays = "x"\nwhy = "y"\n')
    with pytest.raises(BadData, match=r"throughput.side: 'sideways' is not one of below, above, both"):
        read_thresholds(file)
    file.write_text('[throughput]\nshare = -1\nside = "both"\nsays = "x"\nwhy = "y"\n')
    with pytest.raises(BadData, match=r"throughput.share: -1 must be a number"):
        read_thresholds(file)
