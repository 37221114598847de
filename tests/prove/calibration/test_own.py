"""Learning from a few results beside the shipped calibration: they are met, and the rest of the world stays."""

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.conftest import Command
from tests.prove.calibration.rows import row, written
from tests.prove.calibration.test_calibrate import LOADS, SLOW, cases_at, measure, results

from crosstie.catalog.calibration import read_calibration
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.core.estimate import CONSTANTS
from crosstie.prove.calibration.calibrate import BESIDE, Inputs, learn_beside
from crosstie.prove.calibration.kernels import KernelPredictor, MeasuredKernel
from crosstie.prove.calibration.predict import Predictor
from crosstie.prove.calibration.regression import Regression, gather


@pytest.fixture(scope="module")
def shipped() -> Catalog:
    return Catalog([])


def tpot(catalog: Catalog, **of: str) -> float:
    return float(Predictor(cases_at(catalog, [(16, 1024, 128)], **of)).predict()["tpot"][0])


def slow_rows(shipped: Catalog) -> Inputs:
    """Of a machine on which everything takes longer than the uncalibrated model has it."""
    return Inputs(cases=measure(cases_at(shipped, LOADS, accelerator="mi300x"), SLOW))


def test_own_rows_are_met_and_others_stay(shipped: Catalog) -> None:
    made = learn_beside(shipped, slow_rows(shipped))
    before, after = (made.errors[BESIDE[one]]["tpot"]["median_ape"] for one in ("before", "model"))
    assert after < 0.6 * before
    learnt = Catalog([], calibration=made)
    moved = tpot(learnt, accelerator="mi300x") / tpot(shipped, accelerator="mi300x")
    assert abs(moved - 1.0) > 0.03
    # Another accelerator, with the same engine and the same model, is predicted as before.
    assert tpot(learnt, accelerator="h200") == pytest.approx(tpot(shipped, accelerator="h200"))
    known = shipped.calibration
    for scope, parts in known.scopes.items():
        if "mi300x" not in scope:
            assert made.scopes[scope] == parts
    assert made.spreads == known.spreads
    assert sum(made.points.values()) == sum(known.points.values()) + len(LOADS)
    assert len(made.results) == len(known.results)
    assert "beside" in made.made


def test_what_agrees_with_the_calibration_moves_nothing(shipped: Catalog) -> None:
    cases = cases_at(shipped, LOADS[:6], accelerator="mi300x")
    fit = Regression(shipped, gather(shipped, measure(cases)), more=True)
    predicted = fit.predict(np.zeros((len(fit.belongs), len(CONSTANTS))))
    for log, origin, kind in zip(predicted, fit.evidence.origin, fit.evidence.kind, strict=True):
        rows = cases[origin].point.rows
        index = next(i for i, one in enumerate(rows) if one.metric.kind == kind)
        rows[index] = replace(rows[index], value=float(np.exp(log)))
    made = learn_beside(shipped, Inputs(cases=cases))
    assert made.scopes == shipped.calibration.scopes


def test_kernels_start_from_what_is_known_of_them(shipped: Catalog) -> None:
    shapes = [
        MeasuredKernel(
            accelerator="h200", stack="pytorch", kind="gemm", format="bf16", seconds=1.0, m=m, n=4096.0, k=4096.0
        )
        for m in (1.0, 64.0, 4096.0)
    ]
    fit = Regression(shipped, gather(shipped, [], shapes), more=True)
    seconds = np.exp(fit.predict(np.zeros((len(fit.belongs), len(CONSTANTS)))))
    # The calibration has parts for them, so that this is not what the catalog alone would say.
    assert seconds != pytest.approx(KernelPredictor(shipped, shapes).predict(), rel=1e-3)
    told = [msgspec.structs.replace(one, seconds=float(s)) for one, s in zip(shapes, seconds, strict=True)]
    assert learn_beside(shipped, Inputs(kernels=told)).scopes == shipped.calibration.scopes
    slower = [msgspec.structs.replace(one, seconds=1.5 * one.seconds) for one in told]
    made = learn_beside(shipped, Inputs(kernels=slower))
    changed = [scope for scope, parts in made.scopes.items() if shipped.calibration.scopes.get(scope) != parts]
    assert changed
    assert all("h200" in scope for scope in changed)


def test_rows_that_say_nothing_are_refused(shipped: Catalog) -> None:
    with pytest.raises(BadInput, match="no row says anything"):
        learn_beside(shipped, Inputs())


def test_the_command_learns_quickly_and_starts_from_the_shipped_one_each_time(
    crosstie: Command, tmp_path: Path, uncalibrated: Catalog
) -> None:
    file = results(tmp_path / "mine.csv", uncalibrated)
    got = crosstie("calibrate", str(file))
    assert got.status == 0, got.err
    assert "mine.csv: 4 operating points" in got.out
    assert "as predicted before" in got.out
    assert "learnt, points left out" in got.out
    assert "--full fits everything again" in got.out
    own = tmp_path / "user-catalog" / "calibration.json"
    first = read_calibration(own)
    before = json.loads(crosstie("validate", str(file), "--json").out)["metrics"]["tpot"]["median_ape"]
    assert crosstie("calibrate", str(file)).status == 0
    again = read_calibration(own)
    assert again.scopes == first.scopes
    assert again.points == first.points
    assert json.loads(crosstie("validate", str(file), "--json").out)["metrics"]["tpot"]["median_ape"] == before
    refused = crosstie("calibrate", str(file), "--full", "--alone")
    assert refused.status == 2
    assert "give one of them" in refused.err
    tails = written(tmp_path / "tails.csv", row(metric="ttft_ms_p99", unit="ms"), row(concurrency="rate 2 req/s"))
    assert "no row says anything" in crosstie("calibrate", str(tails)).err
