"""What Crosstie measured itself with vLLM on an H200: the files of bench, and the table that calibration learns from."""

import csv
import io
import subprocess
import sys
from pathlib import Path

import pytest

from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.prove.calibration.cases import MeasuredCase
from crosstie.prove.calibration.validate import validate

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "examples" / "results"
FILES = sorted((RESULTS / "h200-vllm-0.24").glob("*.json"))
SMALL = sorted((RESULTS / "h200-vllm-0.24-small").rglob("*.json"))
FOURTEEN = sorted((RESULTS / "h200-vllm-0.24-14b").rglob("*[0-9].json"))
DRAFTING = sorted((RESULTS / "h200-vllm-0.24-mixture").glob("*ngram*.json"))
UNSEEN = sorted((RESULTS / "h200-vllm-0.24-24b").glob("*-*.json"))
TABLE = SHIPPED / "measured" / "h200-vllm-2026-11.csv"


def test_the_table_has_what_bench_measured() -> None:
    made = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "own_results_table.py")], capture_output=True, text=True, check=True
    ).stdout
    assert made == TABLE.read_text()
    assert len({row["source_ref"] for row in csv.DictReader(io.StringIO(made))}) == 55


def cases_of(files: list[Path]) -> list[MeasuredCase]:
    """All rows of these are predicted."""
    found = validate(Catalog([]), files)
    assert not found.missed
    return [outcome.case for outcome in found.outcomes]


def test_every_file_is_predicted_as_it_was_measured() -> None:
    assert all(case.steady for case in cases_of(FILES))


def test_small_models_are_predicted_and_conversations_left_out() -> None:
    found = validate(Catalog([]), SMALL)
    assert {outcome.case.point["model"] for outcome in found.outcomes} == {
        "qwen3-8b",
        "qwen3-30b-a3b",
    }
    assert len(found.outcomes) > 150


def test_power_of_open_arrivals_is_that_of_the_requests_that_are_there() -> None:
    """Nobody says how many: taken for none, every one of these was predicted at a third of what was drawn."""
    files = [file for file in (*SMALL, *FOURTEEN) if file.name.startswith("open-")]
    rows = [one for one in validate(Catalog([]), files).outcomes if one.row.metric.kind == "power"]
    assert len(rows) == 5
    for one in rows:
        assert one.predicted == pytest.approx(one.row.value, rel=0.25)


def test_what_a_loop_measured_of_a_folder_is_predicted() -> None:
    assert len(FOURTEEN) == 3
    assert all(case.point["engine_version"] == "0.24.0" for case in cases_of(FOURTEEN))


def test_drafts_that_were_counted_are_predicted_as_drafts() -> None:
    for case in cases_of(DRAFTING):
        assert case.deployment.speculation is not None
        assert case.deployment.speculation.acceptance_length == pytest.approx(3.83, abs=0.01)


def test_what_was_predicted_before_it_was_measured_lies_inside() -> None:
    """Six points that no calibration has learnt: throughput within a sixth, and intervals that hold."""
    predicted = validate(Catalog([]), UNSEEN).outcomes
    kinds = {"ttft", "tpot", "throughput"}
    means = [row for row in predicted if row.row.metric.kind in kinds and row.row.metric.statistic == "mean"]
    assert len(means) == 18
    assert sum(row.held for row in means) >= 0.8 * len(means)
    throughput = [row.predicted / row.row.value for row in means if row.row.metric.kind == "throughput"]
    assert throughput == pytest.approx([1.0] * 6, abs=0.16)
