"""What a number of prompts can see: the formula beside draws, and in the answer."""

import numpy as np
import pytest
from tests.prove.parity.fake_engine import Engine
from tests.prove.parity.test_parity import asked, gauge

from crosstie.prove.parity.power import Needed, Power, Rows, power
from crosstie.prove.parity.verdict import interval, judged

PLACES = 12.0
QUIET: Rows = [(0.0, PLACES)] * 40


def prompts(mean: float, spread: float, count: int, seed: int) -> Rows:
    """KL by prompt: never below 0, and as widely spread as it is large."""
    shape = 1.0 / spread**2
    drawn = np.random.default_rng(seed).gamma(shape, mean / shape, size=count)
    return [(float(one) * PLACES, PLACES) for one in drawn]


def of(count: int, noise: float = 0.0002, allowed: float = 0.02, sizes: tuple[float, ...] = (0.035,)) -> Power:
    found = power(prompts(noise, 1.0, count, 1), prompts(noise, 1.0, count, 2), allowed, sizes)
    assert found is not None
    return found


def test_the_least_fault_is_called_a_difference_in_some_80_of_100_runs() -> None:
    """The bootstrap of few prompts is somewhat bolder than the formula."""
    least = of(40).differs
    assert least is not None
    assert least == pytest.approx(0.0314, rel=0.05)
    called = [interval(prompts(least, 0.82, 40, seed))[1] > 0.02 for seed in range(200)]
    assert 0.75 < np.mean(called) < 0.95


def test_so_many_prompts_as_a_fault_needs_see_it() -> None:
    (needed,) = of(40).needed
    assert needed.to_differ is not None
    assert needed.to_differ < 40

    def seen(count: int) -> float:
        return float(np.mean([interval(prompts(0.035, 0.82, count, seed))[1] > 0.02 for seed in range(200)]))

    assert seen(needed.to_differ // 4) < 0.75 < 0.8 < seen(needed.to_differ) < 0.97


def test_more_prompts_see_smaller_faults_and_a_fault_within_the_limit_is_noticed_at_most() -> None:
    few, many = of(10, sizes=(0.001,)), of(400, sizes=(0.001,))
    for one in (few, many):
        assert one.noticed is not None
        assert one.differs is not None
    assert many.noticed < few.noticed  # type: ignore[operator]
    assert 0.02 < many.differs < few.differs  # type: ignore[operator]
    assert few.needed[0].to_differ is None
    assert many.needed[0].to_notice > 2


def test_very_few_prompts_see_nothing_for_sure() -> None:
    found = power([(0.0, 1.0)] * 2, [(0.0, 1.0)] * 2, 0.02)
    assert found is not None
    assert (found.noticed, found.differs) == (None, None)
    assert power([(0.0, 1.0)], [(0.0, 1.0)], 0.02) is None


def test_the_spread_is_that_of_this_fault_where_there_is_one() -> None:
    found = power(QUIET, prompts(0.01, 1.5, 40, 3), 0.02)
    assert found is not None
    assert found.is_beyond_noise
    assert found.spread > 1.0
    same = power(QUIET, QUIET, 0.02)
    assert same is not None
    assert (same.is_beyond_noise, same.spread) == (False, 0.82)


def test_a_small_fault_is_within_the_limit_and_said_to_be_no_noise() -> None:
    """Every logit 5% larger, in a model of forty words."""
    found = judged("A", "B", asked(Engine(), Engine(sharp=1.05)), faults=(0.001, 0.5))
    assert (found.verdict, gauge(found, "forced KL").says) == ("same", "same")
    assert found.power is not None
    assert found.power.is_beyond_noise
    assert any("further from A than A from itself" in note for note in found.notes)
    assert [one.nats for one in found.power.needed] == [0.001, 0.5]
    assert isinstance(found.power.needed[1], Needed)
    equal = judged("A", "B", asked(Engine(), Engine()))
    assert not any("further from A" in note for note in equal.notes)
