"""How sure a calibration is, on evidence that the model made itself under widths and noise that are known."""

from dataclasses import replace

import numpy as np
import pytest
from tests.prove.calibration.test_calibrate import cases_at, measure

from crosstie.catalog.calibration import Calibration
from crosstie.catalog.library import Catalog
from crosstie.core.estimate import METRICS
from crosstie.prove.calibration.calibrate import Inputs, learn
from crosstie.prove.calibration.cases import MeasuredCase
from crosstie.prove.calibration.sureness import LearntSureness, half_width

NOISE = 0.06
LOADS = [(n, i, 128) for n in (1, 4, 16, 64) for i in (256, 2048)]
CELLS = [
    {"accelerator": accelerator, "model": model, "engine": engine, "source_id": f"{engine} people"}
    for accelerator in ("h200", "h100-sxm")
    for model in ("llama-3.1-8b", "qwen3-8b")
    for engine in ("vllm", "sglang")
]


@pytest.fixture(scope="module")
def cases(uncalibrated: Catalog) -> list[MeasuredCase]:
    """Every accelerator, model and engine is off in its own way, and each row by noise."""
    draw = np.random.default_rng(11)
    off = {
        word: draw.normal(0.0, 0.15, 3) for word in ("h200", "h100-sxm", "llama-3.1-8b", "qwen3-8b", "vllm", "sglang")
    }
    found = []
    for cell in CELLS:
        logs = sum(off[cell[word]] for word in ("accelerator", "model", "engine"))
        truth = dict(zip(("weights", "kernel", "cache"), np.exp(logs).tolist(), strict=True))
        own = measure(cases_at(uncalibrated, LOADS, **cell), truth)
        for case in own:
            case.point.rows = [
                replace(row, value=row.value * float(np.exp(draw.normal(0.0, NOISE)))) for row in case.point.rows
            ]
        found += own
    return found


@pytest.fixture(scope="module")
def made(uncalibrated: Catalog, cases: list[MeasuredCase]) -> Calibration:
    return learn(uncalibrated, Inputs(cases=cases))


@pytest.fixture(scope="module")
def sure(uncalibrated: Catalog, made: Calibration, cases: list[MeasuredCase]) -> LearntSureness:
    return LearntSureness(uncalibrated, made, cases, [])


@pytest.mark.parametrize("grouping", ["model", "curve"])
def test_intervals_hold_four_fifths_of_what_was_left_out(sure: LearntSureness, grouping: str) -> None:
    error, sd = sure.left_out(sure.groups[grouping])
    rows = ~np.isnan(error)
    assert rows.sum() > 150
    inside = float((np.abs(error) <= half_width(sd, sure.noise.here))[rows].mean())
    assert 0.68 <= inside <= 0.92


def test_its_scales_are_about_the_noise(sure: LearntSureness) -> None:
    """Rows are off by normal noise; what is found is a scale of Student's t."""
    for metric in METRICS:
        assert 0.5 * NOISE < sure.scales()[""][metric] < 2.0 * NOISE


def test_leaving_more_out_is_less_sure(sure: LearntSureness) -> None:
    by_point, by_curve = (np.nanmedian(sure.left_out(sure.groups[one])[1]) for one in ("model", "curve"))
    by_source = np.nanmedian(sure.left_out(sure.groups["source"])[1])
    assert by_point < by_curve < by_source


def test_what_is_left_out_is_what_the_others_say(uncalibrated: Catalog, sure: LearntSureness) -> None:
    """By one inverse, and by solving the linear problem without those rows."""
    grouping = sure.groups["source"]
    name = "vllm people"
    error, sd = sure.left_out(grouping)
    rest = np.flatnonzero(grouping != name)
    linear = sure.fit.linear(sure.tangent, rest, sure.noise.fitted, sure.variance, 0.02)
    pull = np.linalg.solve(linear.covariance, linear.target)
    gathered = np.zeros((len(sure.fit.belongs), sure.tangent.slopes.shape[1]))
    np.add.at(gathered, linear.owners, linear.entries * pull[:, None])
    parts = sure.variance * (sure.fit.belongs.T @ gathered)
    out = grouping == name
    moved = (sure.fit.corrections(parts) - sure.tangent.cells)[sure.fit.row_cell]
    predicted = sure.tangent.base + (sure.tangent.slopes * moved).sum(axis=1)
    assert error[out] == pytest.approx((predicted - sure.evidence.logs)[out], abs=0.03)
    assert (sd[out] > 0.0).all()


def test_the_posterior_is_of_the_scopes_that_were_measured(made: Calibration, sure: LearntSureness) -> None:
    assert made.posterior is not None
    assert set(made.posterior.cells.scopes) == set(sure.fit.scopes)
    assert set(made.posterior.scales) == set(sure.scales())
    assert made.coverage["points left out"]["tpot"]["n"] == len(CELLS) * len(LOADS)
