"""Samples of slices: the requests that stand for them have their means, whatever the distribution."""

from pathlib import Path

import numpy as np
import pytest

from crosstie.catalog.lengths import Lengths, cut, read_lengths


def means(sample: tuple[tuple[int, int], ...]) -> tuple[float, float]:
    inputs, outputs = np.mean(np.array(sample), axis=0)
    return float(inputs), float(outputs)


def lengths(raw: object) -> Lengths:
    return read_lengths(Path("test"), "input", raw)


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        (1000, 200),
        ({"median": 300, "p95": 1200}, 200),
        (1000, {"mean": 200, "p95": 500}),
        ({"median": 2000, "p99": 30_000}, {"mean": 300, "p90": 600}),
        ({"histogram": [[10, 100, 1], [100, 9000, 2]]}, {"mean": 50, "p95": 150}),
    ],
)
def test_samples_have_the_means_of_their_slices(inputs: object, outputs: object) -> None:
    """Ends of a distribution that counted like its middle made simulated answers 7% longer than planned ones."""
    slices = cut(lengths(inputs), lengths(outputs), paired=False, exempt=0.05, context=131_072)
    assert sum(one.share for one in slices) == pytest.approx(1.0)
    for one in slices:
        assert means(one.sample) == pytest.approx((one.input_tokens, one.output_tokens), rel=0.015)
        assert max(i for i, _ in one.sample) <= one.longest_input
        assert max(o for _, o in one.sample) <= one.longest_output


@pytest.mark.parametrize("count", [3, 40, 500, 20_000])
def test_samples_of_a_trace_are_its_own_requests(count: int) -> None:
    """Long prompts with short answers stay so; and means are kept though answers have a long tail."""
    chance = np.random.default_rng(4)
    inputs = np.ceil(np.exp(chance.normal(7.0, 1.0, count)))
    outputs = np.ceil(np.exp(chance.normal(5.0, 1.2, count)) * 1000.0 / (1000.0 + inputs))
    everything = set(zip(inputs.astype(int).tolist(), outputs.astype(int).tolist(), strict=True))
    slices = cut(inputs, outputs, paired=True, exempt=0.05, context=131_072)
    for one in slices:
        assert set(one.sample) <= everything
        if count >= 20_000:
            assert means(one.sample) == pytest.approx((one.input_tokens, one.output_tokens), rel=0.05)
    if count >= 500:
        correlation = np.corrcoef(np.log(np.array([pair for one in slices for pair in one.sample])).T)[0, 1]
        assert correlation < -0.2


def test_prompts_and_answers_that_are_not_paired_are_dealt_at_random() -> None:
    one, *_ = cut(
        lengths({"median": 1000, "p95": 4000}), lengths({"mean": 200, "p95": 500}), paired=False, exempt=0.0, context=131_072
    )  # fmt: skip
    correlation = np.corrcoef(np.array(one.sample).T)[0, 1]
    assert abs(correlation) < 0.15
    assert len(set(one.sample)) > 0.9 * len(one.sample)
