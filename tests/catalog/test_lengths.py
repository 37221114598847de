"""Lengths of requests: distributions through what was given, and slices that lose nothing of the whole."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from crosstie.catalog.lengths import Lengths, cut, read_lengths
from crosstie.catalog.traces import find_trace, read_trace
from crosstie.core.errors import BadData
from crosstie.core.workload import Slice, Target

FILE, KEY = Path("w.toml"), "class[0].input"
QUANTILES = {"median": 0.5, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def lengths(raw: object) -> Lengths:
    return read_lengths(FILE, KEY, raw)


def test_a_number_is_everybodys_length() -> None:
    assert lengths(1000).tolist() == [1000.0]
    assert lengths({"mean": 1000}).tolist() == [1000.0]
    assert lengths({"median": 800}).tolist() == [800.0]


def quantile(of: Lengths, share: float) -> float:
    """The k-th of n stands at (k + 1/2) / n."""
    return float(np.quantile(of, share, method="hazen"))


def test_a_lognormal_worked_by_hand() -> None:
    """Width 1 around a median of 1000: p90 is e^1.2815515655 of it, the mean the root of e."""
    p90, mean = 1000 * np.exp(1.2815515655446004), 1000 * np.sqrt(np.e)
    for raw in ({"median": 1000, "p90": p90}, {"mean": mean, "p90": p90}, {"mean": mean, "median": 1000}):
        got = lengths(raw)
        assert got.mean() == pytest.approx(1648.7212707, rel=1e-6)
        assert quantile(got, 0.5) == pytest.approx(1000, rel=1e-3)
        assert quantile(got, 0.9) == pytest.approx(3602.2247, rel=1e-3)
        # Of all tokens, the half of shorter prompts has Phi(-1).
        assert got[:256].sum() / got.sum() == pytest.approx(0.15865525, rel=1e-6)


@pytest.mark.parametrize(
    "given",
    [
        {"median": 1500, "p95": 6000},
        {"p50": 300, "p99": 4000},
        {"p75": 900, "p90": 2000},
        {"mean": 400, "p95": 1000},
        {"mean": 1000, "p99": 5000},
        {"mean": 1000, "median": 500},
        {"mean": 1000, "p75": 950},
    ],
    ids=lambda given: " and ".join(f"{key} {value}" for key, value in given.items()),
)
def test_lognormals_go_through_what_was_given(given: dict[str, float]) -> None:
    got = lengths(given)
    for key, value in given.items():
        # The long tail keeps its weight, however few stand for it: the mean is exact.
        seen, within = (got.mean(), 1e-6) if key == "mean" else (quantile(got, QUANTILES[key]), 5e-3)
        assert seen == pytest.approx(value, rel=within)
    # The logarithms are normal: read off at two quantiles, they foretell the others and the mean.
    low, high = np.log([quantile(got, 0.25), quantile(got, 0.75)])
    location, width = (low + high) / 2, (high - low) / (2 * 0.6744897501960817)
    for share, z in ((0.05, -1.6448536), (0.5, 0.0), (0.9, 1.2815516), (0.97, 1.8807936)):
        assert quantile(got, share) == pytest.approx(np.exp(location + z * width), rel=0.01)
    assert got.mean() == pytest.approx(np.exp(location + width**2 / 2), rel=0.01)
    assert np.all(np.diff(got) >= 0)


def test_nobody_sends_less_than_a_token() -> None:
    assert lengths({"median": 2, "p99": 200}).min() == 1.0


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, "missing"),
        (True, "number of tokens"),
        ("many", "number of tokens"),
        (0, "from 1 to"),
        (float("nan"), "number of tokens"),
        ([], "number of tokens"),
        ({}, "give two of"),
        ({"mean": 5, "median": 2, "p90": 30}, "give two of"),
        ({"median": 100, "p50": 100}, "give two of"),
        ({"p90": 100}, "p90 alone"),
        ({"p90": 100, "p99": 90}, "p99 90 must exceed p90 100"),
        ({"mean": 100, "p90": 50}, "p90 50 must exceed mean 100"),
        ({"mean": 100, "median": 150}, "no lognormal has a mean of 100"),
        ({"mean": 50, "p90": 1e7}, "no lognormal has a mean of 50"),
        ({"median": 1, "p75": 1e8}, "further apart"),
        ({"median": float("inf"), "p90": 5}, "number of tokens"),
        ({"histogram": []}, "list of"),
        ({"histogram": 1}, "list of"),
        ({"histogram": [[1, 2]]}, r"\[from, to, weight\]"),
        ({"histogram": [[2, 1, 1]]}, "from <= to"),
        ({"histogram": [[1, 2, -1]]}, "a weight from 0"),
        ({"histogram": [[1, 2, float("nan")]]}, "a weight from 0"),
        ({"histogram": [[1, 2, 1e308], [2, 3, 1e308]]}, "a weight from 0"),
        ({"histogram": [[1, 2, 0]]}, "add up to nothing"),
    ],
)
def test_lengths_that_make_no_sense(raw: object, words: str) -> None:
    with pytest.raises(BadData, match=words) as caught:
        lengths(raw)
    assert caught.value.key.startswith(KEY)


def test_histograms_are_flat_within_their_bins() -> None:
    got = lengths({"histogram": [[1000, 2000, 1], [100, 200, 3]]})
    assert np.mean(got <= 200) == pytest.approx(0.75, abs=0.003)
    assert not np.any((got > 200) & (got < 1000))
    assert got.mean() == pytest.approx(0.75 * 150 + 0.25 * 1500, rel=0.005)
    assert np.quantile(got, 0.375) == pytest.approx(150, rel=0.01)
    assert np.quantile(got, 0.875) == pytest.approx(1500, rel=0.01)
    assert lengths({"histogram": [[7, 7, 2]]}).mean() == 7


def check_slices(found: tuple[Slice, ...], inputs: Lengths, outputs: Lengths, exempt: float) -> None:
    assert sum(one.share for one in found) == pytest.approx(1.0)
    assert sum(one.share * one.input_tokens for one in found) == pytest.approx(inputs.mean())
    assert sum(one.share * one.output_tokens for one in found) == pytest.approx(max(outputs.mean(), 1.0))
    assert sum(one.share for one in found if one.exempt) <= exempt + 1e-9
    longest = [one.longest_input for one in found]
    assert longest == sorted(set(longest))
    assert longest[-1] == np.ceil(inputs.max())
    # Who is exempt has the longest prompts.
    assert [one.exempt for one in found] == sorted(one.exempt for one in found)
    for one in found:
        assert one.sample
        assert all(1 <= i <= one.longest_input and 1 <= o <= one.longest_output for i, o in one.sample)
        assert one.input_tokens <= one.longest_input
        assert one.input_dispersion >= 1.0 - 1e-9


@pytest.mark.parametrize("percentile", [0.5, 0.9, 0.95, 0.99])
@pytest.mark.parametrize("name", ["azure-2023-code", "mooncake-conversation"])
def test_slices_of_traces(name: str, percentile: float) -> None:
    trace = read_trace(find_trace(name, Path()))
    inputs, outputs = trace.input_tokens.astype(float), trace.output_tokens.astype(float)
    exempt = Target(seconds=1.0, percentile=percentile).longest_exempt
    assert exempt == pytest.approx((1 - percentile) / 2)
    found = cut(inputs, outputs, paired=True, exempt=exempt, context=10**8)
    check_slices(found, inputs, outputs, exempt)
    # Long prompts have answers of their own, so pairs are those of real requests.
    real = set(zip(trace.input_tokens.tolist(), trace.output_tokens.tolist(), strict=True))
    assert all(pair in real for one in found for pair in one.sample)


def test_exemption_ends_where_the_longest_prompts_begin() -> None:
    inputs = np.array([100.0] * 95 + [10_000.0] * 5)
    found = cut(inputs, np.array([10.0]), paired=False, exempt=0.05, context=10**6)
    assert [(one.share, one.longest_input, one.exempt) for one in found] == [(0.95, 100, False), (0.05, 10_000, True)]
    # One more long prompt than may be late: then the late ones are not told from the others, and nobody is exempt.
    strict = cut(inputs, np.array([10.0]), paired=False, exempt=0.04, context=10**6)
    assert not any(one.exempt for one in strict)


def test_prompts_alike_are_one_slice() -> None:
    (one,) = cut(np.linspace(1000, 1100, 50), np.array([10.0]), paired=False, exempt=0.05, context=10**6)
    assert one.share == 1.0
    assert not one.exempt


def test_a_request_ends_with_the_context() -> None:
    found = cut(np.array([900.0]), np.array([50.0, 500.0]), paired=False, exempt=0.0, context=1000)
    assert [one.context for one in found] == [1000]


@given(
    raw=st.one_of(
        st.builds(
            lambda median, times: {"median": median, "p95": median * times}, st.floats(1, 1e5), st.floats(1.01, 20)
        ),
        st.builds(lambda mean, times: {"mean": mean, "p90": mean * times}, st.floats(1, 1e5), st.floats(1.01, 2.2)),
        st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 1000), st.integers(0, 9)), min_size=1, max_size=5).map(
            lambda bins: {"histogram": [[low, low + more, weight + 1] for low, more, weight in bins]}
        ),
    ),
    exempt=st.sampled_from([0.0, 0.005, 0.025, 0.05, 0.25]),
)
def test_slices_of_any_distribution(raw: dict[str, Any], exempt: float) -> None:
    inputs, outputs = lengths(raw), lengths({"median": 100, "p95": 400})
    check_slices(cut(inputs, outputs, paired=False, exempt=exempt, context=10**9), inputs, outputs, exempt)
