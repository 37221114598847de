"""What Crosstie measured itself with vLLM on an H200: the files of bench, and the table that calibration learns from."""

from pathlib import Path

import pytest

from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.prove.calibration.results import OperatingPoint, read_results
from crosstie.prove.calibration.validate import validate

FILES = sorted((Path(__file__).parents[3] / "examples" / "results" / "h200-vllm-0.24").glob("*.json"))
SMALL = sorted((Path(__file__).parents[3] / "examples" / "results" / "h200-vllm-0.24-small").rglob("*.json"))
FOURTEEN = sorted((Path(__file__).parents[3] / "examples" / "results" / "h200-vllm-0.24-14b").rglob("*[0-9].json"))
TABLE = SHIPPED / "measured" / "h200-vllm-2026-11.csv"


def key(point: OperatingPoint) -> tuple[str, ...]:
    return tuple(point[name] for name in ("model", "input_len", "output_len", "concurrency"))


def test_the_table_has_what_bench_measured() -> None:
    known = {
        (*key(point), row.metric): row.value for point in read_results(*FILES).points for row in point.rows
    }  # fmt: skip
    table = {(*key(point), row.metric): row.value for point in read_results(TABLE).points for row in point.rows}
    assert len(FILES) == 18
    assert len(table) == 162
    for name, value in table.items():
        assert value == pytest.approx(known[name], rel=1e-5), name


def test_every_file_is_predicted_as_it_was_measured() -> None:
    found = validate(Catalog([]), FILES)
    assert not found.missed
    assert all(case.steady for outcome in found.outcomes for case in outcome.cases)


def test_small_models_are_predicted_and_conversations_left_out() -> None:
    found = validate(Catalog([]), SMALL)
    assert {case.point["model"] for outcome in found.outcomes for case in outcome.cases} == {
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
    found = validate(Catalog([]), FOURTEEN)
    assert len(FOURTEEN) == 3
    assert not found.missed
    assert all(case.point["engine_version"] == "0.24.0" for outcome in found.outcomes for case in outcome.cases)
