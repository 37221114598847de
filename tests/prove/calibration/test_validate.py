"""`crosstie validate`: no row is lost, and errors, ranks and intervals are what they say."""

import csv
import io
import json
import math
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from tests.conftest import Command
from tests.prove.calibration.rows import row, written

from crosstie.catalog.calibration import empty
from crosstie.catalog.library import Catalog
from crosstie.prove.calibration.results import read_results
from crosstie.prove.calibration.validate import COLUMNS, Validation, document, errors, predictions, validate

CATALOG = Catalog([])
RATE = {"metric": "output_tokens_per_s_total", "unit": "tok/s"}


def found_in(tmp_path: Path, *rows: dict[str, str]) -> dict[str, object]:
    return document(validate(CATALOG, read_results(written(tmp_path / "a.csv", *rows))))


def predicted(tmp_path: Path, **changes: str) -> float:
    (outcome,) = validate(CATALOG, read_results(written(tmp_path / "p.csv", row(**changes)))).outcomes
    return outcome.predicted


def test_the_keys_that_are_promised(crosstie: Command, tmp_path: Path) -> None:
    rows = [
        row(source_id="mine"),
        row(metric="ttft_ms_mean", unit="ms", value="50"),
        row(metric="tpot_ms_p50", unit="ms", value="8"),
        row(metric="tpot_ms_p99", unit="ms", value="9"),
        row(model="nobody's"),
    ]
    got = crosstie("validate", str(written(tmp_path / "a.csv", *rows)), "--json")
    assert got.status == 0
    found = json.loads(got.out)
    assert (found["rows"], found["covered"]) == (5, 4)
    assert found["uncovered"] == {"model 'nobody's' is not in the catalog": 1}
    for metric in ("ttft", "tpot", "throughput"):
        assert set(found["metrics"][metric]) == {"n", "median_ape", "p90_ape", "bias"}
        assert found["metrics"][metric]["n"] == 1
        assert found["metrics"][metric]["median_ape"] == abs(found["metrics"][metric]["bias"])
    assert found["metrics"]["tpot_tail"]["n"] == 1
    assert found["by_accelerator"]["h200"]["tpot"]["n"] == 1
    assert found["by_engine"]["vllm"]["ttft"]["n"] == 1
    assert found["by_model"]["llama-3.1-8b"]["throughput"]["n"] == 1
    assert set(found["by_source"]) == {"mine", "unnamed"}
    assert found["rank"] == {"pairs": 0, "correct": 0, "alike": {"pairs": 0, "correct": 0}}
    # Tails are in no interval.
    assert found["interval"]["n"] == 3
    assert found["interval"]["level"] == 0.8
    assert 0 <= found["interval"]["inside"] <= 1


def test_the_keys_are_there_without_rows(tmp_path: Path) -> None:
    found = found_in(tmp_path, row())
    assert set(found["metrics"]["ttft"]) == {"n", "median_ape", "p90_ape", "bias"}  # type: ignore[index]


def test_errors_are_those_worked_by_hand(tmp_path: Path) -> None:
    """Predictions of 100 against these measurements: 25% too high, right, half, a tenth."""
    value = predicted(tmp_path)
    measured = [value / 1.25, value, value * 2, value * 10]
    rows = [row(value=repr(m), source_ref=str(i)) for i, m in enumerate(measured)]
    outcomes = validate(CATALOG, read_results(written(tmp_path / "a.csv", *rows))).outcomes
    assert [o.error for o in outcomes] == pytest.approx([0.25, 0.0, -0.5, -0.9])
    got = errors(outcomes)
    assert got["n"] == 4
    assert got["median_ape"] == pytest.approx((0.25 + 0.5) / 2)
    assert got["p90_ape"] == pytest.approx(0.5 + 0.7 * 0.4)
    assert got["bias"] == pytest.approx(-0.25)


def test_intervals_hold_what_lies_inside(tmp_path: Path) -> None:
    (outcome,) = validate(CATALOG, read_results(written(tmp_path / "a.csv", row()))).outcomes
    assert outcome.low < outcome.predicted < outcome.high
    inside, below, above = outcome.predicted, outcome.low * 0.99, outcome.high * 1.01
    rows = [row(value=repr(v), source_ref=str(i)) for i, v in enumerate((inside, below, above))]
    found = found_in(tmp_path, *rows)
    width = outcome.high / outcome.low
    assert found["interval"] == {
        "level": 0.8,
        "n": 3,
        "inside": pytest.approx(1 / 3),
        "width": pytest.approx(width),
    }


def test_a_level_holds_what_lies_inside_its_own_quantiles(tmp_path: Path) -> None:
    """At the ends of the 80% interval the levels from 80% on hold; beyond all worlds none does, at the middle all."""
    (outcome,) = validate(CATALOG, read_results(written(tmp_path / "a.csv", row()))).outcomes
    values = [outcome.low * 1.0001, outcome.low * 0.9999, outcome.high * 0.9999, outcome.high * 1.0001]
    far = outcome.high * (outcome.high / outcome.low) ** 9
    rows = [row(value=repr(value), source_ref=str(i)) for i, value in enumerate([*values, far])]
    outcomes = validate(CATALOG, read_results(written(tmp_path / "b.csv", *rows))).outcomes
    assert [one.below for one in outcomes] == pytest.approx([0.1, 0.1, 0.9, 0.9, 1.0], abs=5e-3)
    assert [one.held for one in outcomes] == [True, False, True, False, False]
    assert all(one.held == (abs(one.below - 0.5) <= 0.4) for one in outcomes)
    found = {one["level"]: one["inside"] for one in document(Validation(5, outcomes, []))["reliability"]["throughput"]}
    assert (min(found), max(found), len(found)) == (0.1, 0.95, 18)
    assert found[0.75] == 0.0
    assert found[0.8] == pytest.approx(2 / 5)
    assert found[0.95] == pytest.approx(4 / 5)


def test_sources_and_rows_far_from_their_intervals_are_odd(tmp_path: Path) -> None:
    """Ten rows of one source, eight of them far above; of the other's nothing is said."""
    (outcome,) = validate(CATALOG, read_results(written(tmp_path / "a.csv", row()))).outcomes
    inside, far = repr(outcome.predicted), repr(outcome.high * (outcome.high / outcome.low) ** 2)
    rows = [
        row(value=far if source == "odd" and i < 8 else inside, source_id=source, source_ref=str(i))
        for source in ("odd", "even")
        for i in range(10)
    ]
    found = found_in(tmp_path, *rows)
    assert found["odd"]["sources"] == {"odd": {"throughput": 0.2}}  # type: ignore[index]
    assert [one["line"] for one in found["odd"]["rows"]] == list(range(2, 10))  # type: ignore[index]
    by_source = found["intervals"]["source"]  # type: ignore[index]
    assert {name: table["throughput"]["inside"] for name, table in by_source.items()} == {"even": 1.0, "odd": 0.2}


def test_without_a_calibration_there_is_no_interval(tmp_path: Path) -> None:
    plain = Catalog([], calibration=empty())
    found = document(validate(plain, read_results(written(tmp_path / "a.csv", row()))))
    assert found["interval"] == {"level": None, "n": 0, "inside": None, "width": None}
    assert found["reliability"] == {}
    assert found["covered"] == 1


def test_per_gpu_and_total_and_with_input_are_one_measurement(tmp_path: Path) -> None:
    at = {"num_accelerators": "4", "tp": "2"}
    total = predicted(tmp_path, **at)
    each = predicted(tmp_path, **at, metric="output_tokens_per_s_per_gpu", unit="tok/s/gpu")
    both = predicted(tmp_path, **at, metric="total_tokens_per_s_total", unit="tok/s (in+out)")
    assert each == pytest.approx(total / 4)
    assert both == pytest.approx(total * (1024 + 128) / 128)


def test_a_whole_request_is_its_first_token_and_the_others(tmp_path: Path) -> None:
    whole = predicted(tmp_path, metric="e2e_ms_p50", unit="ms")
    first = predicted(tmp_path, metric="ttft_ms_p50", unit="ms")
    each = predicted(tmp_path, metric="tpot_ms_p50", unit="ms")
    assert whole == pytest.approx(first + 127 * each)


def test_the_tail_of_a_whole_request_is_no_median(tmp_path: Path) -> None:
    found = found_in(tmp_path, row(metric="e2e_ms_p99", unit="ms"))
    assert found["metrics"].get("e2e", {"n": 0})["n"] == 0  # type: ignore[attr-defined]


def pair(
    tmp_path: Path, one: float, other: float, accelerators: tuple[str, str] = ("h200", "mi300x")
) -> dict[str, int]:
    rows = [
        row(accelerator=name, value=repr(value), source_ref=str(i))
        for i, (name, value) in enumerate(zip(accelerators, (one, other), strict=True))
    ]
    return found_in(tmp_path, *rows)["rank"]  # type: ignore[return-value]


def test_a_pair_is_ranked_right_or_wrong(tmp_path: Path) -> None:
    h200, mi300x = (predicted(tmp_path, accelerator=name) for name in ("h200", "mi300x"))
    assert h200 != mi300x
    better, worse = (3000.0, 2000.0) if h200 > mi300x else (2000.0, 3000.0)
    assert pair(tmp_path, better, worse) == {"pairs": 1, "correct": 1, "alike": {"pairs": 1, "correct": 1}}
    assert pair(tmp_path, worse, better) == {"pairs": 1, "correct": 0, "alike": {"pairs": 1, "correct": 0}}
    # Within a tenth nobody won.
    assert pair(tmp_path, 2000.0, 2190.0)["pairs"] == 0
    assert pair(tmp_path, 2000.0, 2210.0)["pairs"] == 1
    assert pair(tmp_path, 3000.0, 2000.0, ("h200", "h200"))["pairs"] == 0
    assert pair(tmp_path, 3000.0, 2000.0, ("h200", "H200"))["pairs"] == 0


def test_rank_is_per_gpu_and_from_latencies_where_no_rate_is_given(tmp_path: Path) -> None:
    rows = [
        row(accelerator="h200", num_accelerators="2", tp="1", concurrency="32", value="4000"),
        row(accelerator="mi300x", value="3000"),
    ]
    # 2,000 a GPU against 3,000: ranked at different loads, so not alike.
    found = found_in(tmp_path, *rows)["rank"]
    assert found["pairs"] == 1  # type: ignore[index]
    one, other = (predicted(tmp_path, accelerator=name) for name in ("h200", "mi300x"))
    assert found["correct"] == int(one < other)  # type: ignore[index]
    # 3,500 a GPU against 3,000 is the other way round.
    rows[0]["value"] = "7000"
    assert found_in(tmp_path, *rows)["rank"]["correct"] == int(one > other)  # type: ignore[index]
    assert found["alike"]["pairs"] == 0  # type: ignore[index]
    latencies = [
        row(accelerator=name, metric=metric, unit="ms", value=value)
        for name, values in (("h200", ("100", "8")), ("mi300x", ("100", "16")))
        for metric, value in zip(("ttft_ms_mean", "tpot_ms_mean"), values, strict=True)
    ]
    assert found_in(tmp_path, *latencies)["rank"]["pairs"] == 1  # type: ignore[index]
    # Other lengths are another question.
    apart = [row(accelerator="h200"), row(accelerator="mi300x", value="9000", input_len="512")]
    assert found_in(tmp_path, *apart)["rank"]["pairs"] == 0  # type: ignore[index]


CELLS = {
    "accelerator": ["h200", "MI300X", "tpu", "", "8xH200+8xMI350X", "+", "h200+h200"],
    "model": ["llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-405b", "", "nothing"],
    "precision": ["bf16", "fp8", "fp4", "", "fp7", "q4_k_m"],
    "engine": ["vllm", "sglang", "tensorrt-llm", "", "x"],
    "input_len": ["1", "1024", "0", "-1", "nan", "x", "", "1e12", "a mean 33.5", "a mean ."],
    "output_len": ["1", "64", "0", "-1", "inf", "x", "", "1e12", "2.5"],
    "concurrency": ["1", "7", "0", "-1", "nan", "x", "", "rate 3 req/s", "rate 0 req/s", "rate . req/s", "max load",
                    "max_num_seqs 4", "1.5"],
    "metric": ["ttft_ms_mean", "tpot_ms_p99", "output_tokens_per_s_total", "output_tokens_per_s_per_gpu", "e2e_ms_mean",
               "batch_e2e_latency_s", "mean_step_ms_derived", "decode_step_ms", "prefill_ms", "watts", ""],
    "unit": ["ms", "s", "us", "tok/s", "tok/s/gpu", "", "kg"],
    "value": ["1", "2000", "0", "-1", "nan", "inf", "x", "", "1e-300", "1e300"],
    "num_accelerators": ["", "1", "2", "8", "0", "x", "6"],
    "parallelism": ["", "tp1", "tp2", "TP8EP1", "DEP2", "TEP2", "pp2", "tp0", "DEP2,PP2", "ep2", "attention_dp2"],
    "tp": ["", "1", "2", "0", "x"],
    "scenario": ["", "Offline", "Server", "Interactive", "batch", "x"],
    "notes": ["", "random lengths 50-100%", "random lengths 0-100%", "p99 limits TTFT 5 ms TPOT 5 ms", "p99 limits TTFT 0 ms TPOT 0 ms"],
    "num_prompts": ["", "1", "20", "0", "-1", "x", "inf"],
    "spec_decode": ["", "mtp", "none"],
    "disagg": ["", "true", "false"],
    "kv_format": ["", "fp8", "x"],
    "chunk_tokens": ["", "1", "0", "-1", "300", "x"],
    "max_sequences": ["", "1", "0", "-1", "x"],
    "accelerator_raw": ["", "8xH200 2FP8", "8xH200 0FP8", "2xH200 8FP8"],
    "engine_version": ["", "0.9.1", "x"],
    "source_id": ["", "mlperf_v5.0", "aic_silicon_sample"],
}  # fmt: skip

mutilated = st.dictionaries(st.sampled_from(sorted(CELLS)), st.integers(0, 100), max_size=6).map(
    lambda picks: row(**{name: CELLS[name][index % len(CELLS[name])] for name, index in picks.items()})
)


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(mutilated, min_size=1, max_size=5))
def test_every_row_is_covered_or_counted(rows: list[dict[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = read_results(written(Path(folder) / "a.csv", *rows))
    found = validate(CATALOG, results)
    made = document(found)
    assert made["rows"] == len(rows)
    assert made["covered"] + sum(made["uncovered"].values()) == len(rows)
    json.dumps(made, allow_nan=False)
    for outcome in found.outcomes:
        assert 0 < outcome.predicted < math.inf
        assert outcome.low <= outcome.predicted * 1.5
        assert outcome.high >= outcome.predicted / 1.5
    lines = list(csv.DictReader(io.StringIO(predictions(found))))
    assert [int(line["line"]) for line in lines] == list(range(2, len(rows) + 2))
    assert all(bool(line["reason"]) != bool(line["predicted"]) for line in lines)


def test_predictions_have_every_row_in_order(crosstie: Command, tmp_path: Path) -> None:
    rows = [row(), row(model="none"), row(value="0"), row(concurrency="2", notes='a, "quoted"\nline')]
    target = tmp_path / "out.csv"
    got = crosstie("validate", str(written(tmp_path / "a.csv", *rows)), "--predictions", str(target))
    assert got.status == 0
    assert f"predictions written to {target}" in got.err
    lines = list(csv.DictReader(io.StringIO(target.read_text(), newline="")))
    assert tuple(lines[0]) == COLUMNS
    assert [line["reason"] for line in lines] == ["", "model 'none' is not in the catalog",
                                                  "value is zero, negative or not finite", ""]  # fmt: skip
    first = lines[0]
    assert float(first["low"]) < float(first["predicted"]) < float(first["high"])
    assert float(first["error"]) == pytest.approx(float(first["predicted"]) / float(first["measured"]) - 1, abs=1e-3)
    assert lines[1]["model"] == "none"


@pytest.mark.parametrize("target", ["none/out.csv", "folder", "file/out.csv", "a.csv", ""])
def test_predictions_that_cannot_be_written(crosstie: Command, tmp_path: Path, target: str) -> None:
    """One line, and nothing in the way afterwards; the results themselves are never the target."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("x")
    file = written(tmp_path / "a.csv", row())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    got = crosstie("validate", str(file), "--predictions", str(tmp_path / target) if target else "")
    assert got.status == 2
    assert got.out == ""
    assert got.err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_full_disk_leaves_what_was_there(crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out.csv"
    target.write_text("old")

    def refuse(*names: object) -> None:
        raise PermissionError(13, "Permission denied")

    file = written(tmp_path / "a.csv", row())
    monkeypatch.setattr(os, "replace", refuse)
    got = crosstie("validate", str(file), "--predictions", str(target))
    assert got.status == 2
    assert "cannot be written: Permission denied" in got.err
    assert target.read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "out.csv"]


def test_two_files_are_one_validation(crosstie: Command, tmp_path: Path) -> None:
    files = [written(tmp_path / name, row(value=value)) for name, value in (("a.csv", "1000"), ("b.csv", "4000"))]
    found = json.loads(crosstie("validate", *map(str, files), "--json").out)
    assert (found["rows"], found["covered"], found["metrics"]["throughput"]["n"]) == (2, 2, 2)


def test_what_people_read(crosstie: Command, tmp_path: Path) -> None:
    got = crosstie("validate", str(written(tmp_path / "a.csv", row(), row(model="none"))))
    assert "2 rows, 1 predicted (50%)" in got.out
    assert "1 not: model 'none' is not in the catalog" in got.out
    assert "tokens per second" in got.out
    assert "intervals meant to hold 80% hold" in got.out


def test_no_files_is_a_question_wrongly_put(crosstie: Command) -> None:
    got = crosstie("validate")
    assert got.status == 2
    assert "RESULTS" in got.err
