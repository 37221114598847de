"""The shipped calibration against the shipped measurements, and the page about it."""

import importlib.util
from pathlib import Path
from types import ModuleType

import msgspec
import numpy as np
import pytest

from crosstie.catalog.calibration import MODE_LEVELS, Calibration
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.core.estimate import CONSTANTS, METRICS
from crosstie.prove.calibration.calibrate import SHIPPED_RESULTS, Inputs, read_inputs
from crosstie.prove.calibration.cases import Cases, measured_subject
from crosstie.prove.calibration.regression import Regression, gather
from crosstie.prove.calibration.results import read_results
from crosstie.prove.calibration.validate import document, validate

ROOT = Path(__file__).parents[3]
FILE = ROOT / "benchmarks" / "render_accuracy.py"


@pytest.fixture(scope="module")
def inputs(catalog: Catalog) -> Inputs:
    return read_inputs(catalog, SHIPPED_RESULTS)


@pytest.fixture(scope="module")
def rendering() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render_accuracy", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as beside:
        beside.syspath_prepend(FILE.parent)
        spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_it_was_made_from_the_shipped_files(catalog: Catalog, inputs: Inputs) -> None:
    assert inputs.files == catalog.calibration.results


def moved_by_another_round(fit: Regression, calibration: Calibration) -> float:
    """How far the predictions of all but a twentieth of the rows go at most, as logarithms."""
    parts = np.zeros((len(fit.scopes), len(CONSTANTS)))
    for scope, index in fit.scopes.items():
        parts[index] = calibration.scopes.get(scope, np.zeros(len(CONSTANTS)))
    again = fit.solve(np.ones(len(fit.evidence.logs), dtype=bool), start=parts, rounds=1)
    change = np.abs(fit.predict(fit.corrections(again)) - fit.predict(fit.corrections(parts)))
    return float(np.quantile(change, 0.95))


@pytest.mark.slow
def test_another_round_of_the_fit_leaves_its_predictions_where_they_are(catalog: Catalog, inputs: Inputs) -> None:
    """It is what `calibrate` makes of these files, up to rounding."""
    plain = [case for case in inputs.cases if not measured_subject(case).mode]
    fit = Regression(catalog, gather(catalog, plain, inputs.kernels))
    assert {scope for scope in catalog.calibration.scopes if mode_of(scope) not in MODE_LEVELS} <= set(fit.scopes)
    assert moved_by_another_round(fit, catalog.calibration) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODE_LEVELS)
def test_so_it_is_with_what_is_fitted_after_it(catalog: Catalog, inputs: Inputs, mode: str) -> None:
    """Drafts, and prefill and decode apart, are fitted in turn, each over what was found before it."""
    points = [case.point for case in inputs.cases if measured_subject(case).mode == mode]
    order = list(MODE_LEVELS)
    before = {"", *order[: order.index(mode)]}
    whole = catalog.calibration
    known = {scope: parts for scope, parts in whole.scopes.items() if mode_of(scope) in before}
    so_far = catalog.calibrated_by(msgspec.structs.replace(whole, scopes=known))
    resolve = Cases(so_far)
    cases = [resolve.of(point) for point in points]
    fit = Regression(so_far, gather(so_far, cases), MODE_LEVELS[mode], more=True)
    assert moved_by_another_round(fit, whole) < 0.06


def mode_of(scope: str) -> str:
    first = scope.partition(" / ")[0]
    return first if first in MODE_LEVELS else ""


@pytest.mark.slow
def test_it_predicts_what_it_has_seen(catalog: Catalog) -> None:
    found = document(validate(catalog, read_results(SHIPPED_RESULTS[0])))
    not_modelled = sum(count for reason, count in found["uncovered"].items() if "not modelled" in reason)
    assert found["covered"] > 0.99 * (found["rows"] - not_modelled)
    sample = found["by_source"]["aic_silicon_sample"]
    assert sample["tpot"]["median_ape"] < 0.05
    assert sample["ttft"]["median_ape"] < 0.13
    assert found["metrics"]["throughput"]["median_ape"] < 0.05
    for accelerator in ("mi300x", "mi325x", "mi355x"):
        assert found["by_accelerator"][accelerator]["throughput"]["median_ape"] < 0.12
    assert found["rank"]["correct"] > 0.96 * found["rank"]["pairs"]


@pytest.mark.parametrize(("left_out", "tpot", "throughput"), [("points left out", 0.06, 0.06)])
def test_its_cross_validated_errors_are_what_is_claimed(
    catalog: Catalog, left_out: str, tpot: float, throughput: float
) -> None:
    errors = catalog.calibration.errors[left_out]
    assert errors["tpot"]["median_ape"] < tpot
    assert errors["tpot"]["p90_ape"] < 0.22
    assert errors["ttft"]["median_ape"] < 0.18
    assert errors["throughput"]["median_ape"] < throughput
    for accelerator in ("mi300x", "mi325x", "mi355x"):
        own = catalog.calibration.errors[f"{left_out}: {accelerator}"]
        assert own["tpot"]["median_ape"] < 0.10
        assert own["throughput"]["median_ape"] < 0.12


@pytest.mark.parametrize("metric", METRICS)
def test_its_intervals_hold_what_they_say_near_and_far(catalog: Catalog, metric: str) -> None:
    held = {title: table[metric] for title, table in catalog.calibration.coverage.items() if ": " not in title}
    near, far = "points left out", "a model left out"
    for title, one in held.items():
        least = 0.65 if title == far else 0.7
        assert least <= one["inside"] <= 0.9, title
    # And they are wider for what is less known, not wide for all.
    assert metric == "ttft" or held["a curve left out"]["width"] <= 1.6
    assert held[near]["width"] < held["a source left out"]["width"] < held[far]["width"]


@pytest.mark.slow
def test_the_accuracy_page_is_what_the_code_renders(catalog: Catalog, rendering: ModuleType) -> None:
    page = rendering.PAGE.read_text(encoding="utf-8")
    assert rendering.fill(page, rendering.tables(catalog, rendering.PEER)) == page


def test_a_place_without_a_table_is_a_fault(rendering: ModuleType) -> None:
    with pytest.raises(BadInput, match="nonsense"):
        rendering.fill("<!-- nonsense -->\n<!-- end -->", {})
    with pytest.raises(BadInput, match="alone"):
        rendering.fill("no places", {"alone": lambda: ""})


def test_peers_are_judged_where_both_answer(tmp_path: Path, rendering: ModuleType) -> None:
    (tmp_path / "aisimulate-points.csv").write_text(
        "point,mode,vendor,ttft_s,tpot_s,tokens_per_s,left_out_ttft_s,left_out_tpot_s,left_out_tokens_per_s,reason\n"
        "0,,NVIDIA,1,0.01,100,1.2,0.011,90,\n"
        "1,,NVIDIA,1,0.01,100,1.5,0.015,50,\n"
        "2,,NVIDIA,1,0.01,100,9,9,9,\n"
        "3,apart,AMD,,0.01,,,0.02,,\n"
        "4,apart,AMD,,,,,,,the row does not say how it is laid out\n"
    )
    (tmp_path / "aisimulate-answers.csv").write_text(
        "point,ttft_s,tpot_s,tokens_per_s,attempt,reason\n"
        "0,2,0.013,120,formulas,\n1,,,,,no data\n2,,,,,no end within 60 s of CPU\n3,,,,,no data\n4,,,,,not asked\n"
    )
    beside, alone = rendering.beside(tmp_path).splitlines(), rendering.alone(tmp_path).splitlines()
    assert "| plain, NVIDIA | Crosstie | 2 of 2 | 10.0 / 10 % of 1 | 20.0 / 20 % of 1 | 10.0 / 10 % of 1 |" in beside
    assert (
        "| plain, NVIDIA | AISimulate | 1 of 2, 1 by formulas | 30.0 / 30 % of 1 | 100.0 / 100 % of 1 "
        "| 20.0 / 20 % of 1 |" in beside
    )
    assert "| all kinds, AMD | Crosstie | 1 of 2 | - | - | - |" in beside
    assert "| all kinds, AMD | AISimulate | 0 of 2 | - | - | - |" in beside
    assert "| all kinds, AMD | Crosstie | 100.0 / 100 % of 1 | - | - |" in alone
