"""The best of a curve: what nothing beats in both, and errors there."""

import numpy as np
import pytest
from tests.prove.calibration.test_calibrate import cases_at, measure

from crosstie.catalog.calibration import empty
from crosstie.catalog.library import Catalog
from crosstie.prove.calibration.groups import frontier, frontier_errors
from crosstie.prove.calibration.regression import gather


def test_a_frontier_has_what_nothing_beats_in_both() -> None:
    best = frontier(np.array([1.0, 3.0, 2.0, 2.5]), np.array([9.0, 1.0, 4.0, 3.0]))
    assert best.user.tolist() == [1.0, 2.0, 2.5, 3.0]
    beaten = frontier(np.array([1.0, 3.0, 2.0]), np.array([2.0, 3.0, 1.0]))
    assert (beaten.user.tolist(), beaten.gpu.tolist()) == ([3.0], [3.0])
    assert best.at(2.25) == pytest.approx(3.5)


def test_errors_at_the_best_and_the_order_of_accelerators() -> None:
    catalog = Catalog([], calibration=empty())
    loads = [(n, 1024, 128) for n in (1, 4, 16, 64, 256)]
    cases = [case for name in ("h200", "mi300x") for case in measure(cases_at(catalog, loads, accelerator=name))]
    evidence = gather(catalog, cases)
    exact = frontier_errors(evidence, np.zeros(len(evidence.logs)))
    assert exact["best of a curve"]["throughput"]["median_ape"] == 0
    assert exact["best of a curve"]["throughput"]["n"] == 2
    assert exact["accelerators by it"]["pairs"]["right"] == 1.0
    # Every rate half: half of the best, and the order stays; of one accelerator alone, and it turns round.
    rates = evidence.kind == "throughput"
    half = frontier_errors(evidence, np.where(rates, np.log(0.5), 0.0))
    assert half["best of a curve"]["throughput"]["bias"] == pytest.approx(-0.5, abs=0.01)
    assert half["accelerators by it"]["pairs"]["right"] == 1.0
    faster = np.array([evidence.subjects[i].accelerator == "h200" for i in evidence.origin])
    turned = frontier_errors(evidence, np.where(rates & faster, np.log(0.05), 0.0))
    assert turned["accelerators by it"]["pairs"]["right"] < 0.5
    assert frontier_errors(evidence, np.full(len(evidence.logs), np.nan)) == {}
