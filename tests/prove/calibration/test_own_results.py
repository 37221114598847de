"""What Crosstie measured itself with vLLM on an H200: the files of bench, and the table that calibration learns from."""

from pathlib import Path

import pytest

from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.prove.calibration.results import OperatingPoint, read_results
from crosstie.prove.calibration.validate import validate

FILES = sorted((Path(__file__).parents[3] / "examples" / "results" / "h200-vllm-0.24").glob("*.json"))
SMALL = sorted((Path(__file__).parents[3] / "examples" / "results" / "h200-vllm-0.24-small").rglob("*.json"))
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
