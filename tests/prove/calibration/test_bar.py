"""The bar of intervals, over the shipped calibration; and that a posterior which is wrong does not pass it."""

from dataclasses import replace

import pytest
from benchmarks.interval_bar import FEWEST, LEAST, MOST, judged
from tests.prove.calibration.test_sureness import CELLS, LOADS, cases, made, sure

from crosstie.catalog.library import Catalog
from crosstie.prove.calibration.calibrate import SHIPPED_RESULTS, read_inputs
from crosstie.prove.calibration.sureness import LearntSureness

__all__ = ["cases", "made", "sure"]


def test_groups_that_are_large_enough_are_judged_the_worst_first() -> None:
    def group(inside: float, rows: int = FEWEST) -> dict[str, dict[str, float]]:
        return {"tpot": {"n": rows, "inside": inside, "width": 1.5, "least": 0.6, "most": 0.9}}

    found = judged({"good": group(0.8), "narrow": group(0.5), "wide": group(0.99), "small": group(0.1, FEWEST - 1)})
    assert [one.title for one in found] == ["narrow", "wide", "good"]
    assert [one.within for one in found] == [False, False, True]
    assert [one.likely for one in found] == [False, False, True]
    assert [one.within for one in judged({"low": group(LEAST), "high": group(MOST)})] == [True, True]


@pytest.mark.parametrize("times", [0.3, 3.0])
@pytest.mark.slow
def test_a_posterior_that_is_wrong_does_not_pass(sure: LearntSureness, times: float) -> None:
    """It takes its rows for less noisy, or noisier, than they are."""
    assert len(CELLS) * len(LOADS) < FEWEST
    title = {"model": "points left out"}
    right, noise = sure.coverage(title)["points left out"], sure.noise
    sure.noise = replace(noise, own=times * noise.own, curve=times * noise.curve, here=times * noise.here)
    wrong = sure.coverage(title)["points left out"]
    sure.noise = noise
    for metric, held in right.items():
        assert held["least"] - 0.05 <= held["inside"] <= held["most"] + 0.05
        assert not wrong[metric]["least"] <= wrong[metric]["inside"] <= wrong[metric]["most"]


def test_the_shipped_intervals_pass(catalog: Catalog) -> None:
    groups = judged(catalog.calibration.coverage)
    assert len(groups) > 600
    beyond = [group for group in groups if not group.within and not group.likely]
    print(len(groups), sum(group.within for group in groups), *beyond, sep="\n")
    # One in a hundred is unlikely by chance; and groups overlap, so that what is unlikely comes several times.
    assert len(beyond) <= 0.03 * len(groups)
    assert sum(group.within for group in groups) >= 0.9 * len(groups)


@pytest.mark.slow
def test_they_pass_where_a_part_is_worked_out_again(catalog: Catalog) -> None:
    """One campaign's rows around the shipped corrections: widths and scales are learnt from these alone."""
    inputs = read_inputs(catalog.calibrated_by(catalog.calibration), SHIPPED_RESULTS[1:2])
    own = [case for case in inputs.cases if case.point["source_id"] == "inferencemax_runs_mantile"]
    part = LearntSureness(catalog, catalog.calibration, own, [])
    groups = judged(part.coverage({"model": "points left out", "curve": "a curve left out"}))
    assert len(groups) > 5
    assert [group for group in groups if not group.within and not group.likely] == []
