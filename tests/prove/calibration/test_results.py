"""Files of results: every fault is named, none is a traceback, and no row is lost on the way."""

import gzip
import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from tests.conftest import Command
from tests.prove.calibration.rows import BASE, row, text, written

from crosstie.core.errors import BadData
from crosstie.prove.calibration.results import REQUIRED, Metric, metric_of, read_results


@pytest.mark.parametrize(
    ("name", "unit", "wanted"),
    [
        ("ttft_ms_mean", "ms", Metric("ttft", "mean")),
        ("ttft_ms_median", "s", Metric("ttft", "p50")),
        ("tpot_ms_p99", "us", Metric("tpot", "p99")),
        ("e2e_ms_p90", "ms", Metric("e2e", "p90")),
        ("output_tokens_per_s_total", "tok/s", Metric("throughput", "mean", False, False)),
        ("output_tokens_per_s_per_gpu", "tok/s/gpu", Metric("throughput", "mean", True, False)),
        ("total_tokens_per_s_total", "tok/s (in+out)", Metric("throughput", "mean", False, True)),
        ("total_tokens_per_s_per_gpu", "tok/s/gpu (in+out)", Metric("throughput", "mean", True, True)),
        ("batch_e2e_latency_s", "s", Metric("batch")),
        ("mean_step_ms_derived", "ms", Metric("step")),
        ("decode_step_ms", "us", Metric("decode_step")),
        ("prefill_ms", "ms", Metric("prefill")),
    ],
)
def test_names_and_units_of_metrics_are_understood(name: str, unit: str, wanted: Metric) -> None:
    assert metric_of(name, unit) == wanted


@pytest.mark.parametrize(
    ("name", "unit", "reason"),
    [
        ("ttft_ms_mean", "min", "unknown unit 'min'"),
        ("ttft_ms_mean", "", "unknown unit ''"),
        ("ttft_ms_p42", "ms", "is not predicted"),
        ("watts", "W", "is not predicted"),
        ("", "", "is not predicted"),
        ("output_tokens_per_s_total", "tok/s/gpu", "says otherwise"),
        ("output_tokens_per_s_per_gpu", "tok/s", "says otherwise"),
        ("total_tokens_per_s_total", "tok/s", "says otherwise"),
        ("output_tokens_per_s_total", "tok/s (in+out)", "says otherwise"),
        ("ttft_ms_mean\n", "ms", "is not predicted"),
    ],
)
def test_what_is_no_metric_says_why(name: str, unit: str, reason: str) -> None:
    found = metric_of(name, unit)
    assert isinstance(found, str)
    assert reason in found


@pytest.mark.parametrize(("unit", "factor"), [("ms", 1e-3), ("s", 1.0), ("us", 1e-6)])
def test_times_are_seconds(tmp_path: Path, unit: str, factor: float) -> None:
    file = written(tmp_path / "a.csv", row(metric="ttft_ms_mean", unit=unit, value="20"))
    assert read_results(file).points[0].rows[0].value == pytest.approx(20 * factor)


def test_rows_of_one_operating_point_come_together(tmp_path: Path) -> None:
    file = written(
        tmp_path / "a.csv",
        row(metric="ttft_ms_mean", unit="ms", value="20"),
        row(metric="tpot_ms_mean", unit="ms", value="9"),
        row(metric="tpot_ms_mean", unit="ms", value="9", concurrency="32"),
        row(metric="tpot_ms_mean", unit="ms", value="9", source_ref="another run"),
    )
    found = read_results(file)
    assert [len(point.rows) for point in found.points] == [2, 1, 1]
    assert (found.points[0].rows[0].file, found.points[0].rows[0].line) == (str(file), 2)
    assert found.rows == 4


@pytest.mark.parametrize("gone", REQUIRED)
def test_a_missing_column_is_named(crosstie: Command, tmp_path: Path, gone: str) -> None:
    file = tmp_path / "a.csv"
    columns = [name for name in REQUIRED if name != gone]
    file.write_text(",".join(columns) + "\n" + ",".join(BASE[name] for name in columns) + "\n")
    got = crosstie("validate", str(file))
    assert got.status == 2
    assert got.out == ""
    assert f"a.csv: lacks the column {gone}" in got.err
    assert got.err.count("\n") == 1


def broken_gzip() -> dict[str, bytes]:
    whole = gzip.compress(text([row(value=str(n)) for n in range(1, 200)]).encode())
    return {
        "cut": whole[:-20],
        "cut in the header": whole[:5],
        "other bytes in the middle": whole[:40] + b"\xff\xff\xff\xff" + whole[44:],
        "wrong checksum": whole[:-8] + b"1234" + whole[-4:],
        "only the mark": b"\x1f\x8b",
    }


BROKEN = {
    "empty": (b"", "lacks the columns accelerator, model"),
    "blank": (b"\n\n\n", "lacks the column"),
    "not UTF-8": (text([row(model="caf\u00e9")]).encode("latin-1"), "is not UTF-8 text (byte"),
    "UTF-16": (text([row()]).encode("utf-16"), "is not UTF-8 text"),
    "a column twice": (text([row()]).replace("unit", "metric", 1).encode(), "lacks the column unit"),
    "another column twice": (text([row(tp="1", pp="1")]).replace("pp", "tp", 1).encode(), "has the column tp twice"),
    "an open quote": (text([row()]).encode() + b'"h200,llama', "line"),
    "a field without end": (text([row(notes="x" * 200_000)]).encode(), "field larger than field limit"),
    "a picture": (b"\x89PNG\r\n\x1a\n\x00\x00", "is not UTF-8 text"),
    **{name: (raw, "cannot be read") for name, raw in broken_gzip().items()},
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_one_line(crosstie: Command, tmp_path: Path, case: str) -> None:
    raw, reason = BROKEN[case]
    file, target = tmp_path / "a.csv", tmp_path / "out.csv"
    file.write_bytes(raw)
    got = crosstie("validate", str(file), "--predictions", str(target))
    assert got.status == 2
    assert got.out == ""
    assert "a.csv" in got.err
    assert reason in got.err
    assert got.err.count("\n") == 1
    assert not target.exists()


def test_files_that_are_not_there(crosstie: Command, tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        got = crosstie("validate", str(path))
        assert got.status == 2
        assert "cannot be read" in got.err
        assert got.err.count("\n") == 1
    with pytest.raises(BadData, match=r"none\.csv"):
        read_results(tmp_path / "none.csv")


def test_good_files_of_every_dress(tmp_path: Path) -> None:
    """Plain, with a byte order mark, gzipped, Windows and old Mac line ends, padded cells: the same rows."""
    plain = text([row(), row(concurrency="32")])
    dresses = {
        "plain": plain.encode(),
        "bom": plain.encode("utf-8-sig"),
        "gzip": gzip.compress(plain.encode()),
        "unix": plain.replace("\r\n", "\n").encode(),
        "no last line end": plain.rstrip().encode(),
        "blank lines": plain.replace("\r\n", "\r\n\r\n").encode(),
        "padded": plain.replace(",", " , ").encode(),
    }
    for name, raw in dresses.items():
        file = tmp_path / name
        file.write_bytes(raw)
        found = read_results(file)
        assert [(dict(point.conditions), point.rows[0].value) for point in found.points] == [
            (
                {k: v for k, v in row(concurrency=n).items() if k not in ("metric", "unit", "value")},
                2000.0,
            )
            for n in ("16", "32")
        ], name
        assert found.unusable == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("0", "zero, negative or not finite"),
        ("-3", "zero, negative or not finite"),
        ("nan", "zero, negative or not finite"),
        ("inf", "zero, negative or not finite"),
        ("1e999", "zero, negative or not finite"),
        ("fast", "value is no number"),
        ("1,5", "value is no number"),
        ("", "value is missing"),
        ("  ", "value is missing"),
    ],
)
def test_a_value_that_is_none_is_counted(crosstie: Command, tmp_path: Path, value: str, reason: str) -> None:
    file = written(tmp_path / "a.csv", row(value=value), row())
    got = crosstie("validate", str(file), "--json")
    assert got.status == 0
    found = json.loads(got.out)
    assert (found["rows"], found["covered"]) == (2, 1)
    assert list(found["uncovered"].values()) == [1]
    assert reason in next(iter(found["uncovered"]))


def test_only_bad_rows_are_an_answer_of_no(crosstie: Command, tmp_path: Path) -> None:
    got = crosstie("validate", str(written(tmp_path / "a.csv", row(value="0"), row(metric="watts", unit="W"))))
    assert got.status == 1
    assert "2 rows, 0 predicted" in got.out
    assert "1 not: metric watts is not predicted" in got.out


def test_ragged_lines_are_counted_by_what_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    head, good, _ = text([row()]).split("\r\n")
    file.write_text("\n".join([head, good, good + ",more,and more", "h200,llama-3.1-8b", good]) + "\n")
    found = read_results(file)
    assert found.rows == 4
    assert [(refused.line, refused.reason) for refused in found.unusable] == [
        (3, "has more cells than the header"),
        (4, "metric  is not predicted"),
    ]


@given(
    st.lists(st.dictionaries(st.sampled_from([*REQUIRED, "notes", "tp"]), st.text(max_size=12), max_size=4), max_size=5)
)
def test_any_text_in_any_cell_is_read_or_counted(changes: list[dict[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = written(Path(folder) / "a.csv", *(row(**change) for change in changes))
        found = read_results(file)
    assert found.rows == len(changes)
    assert all(refused.reason for refused in found.unusable)


def test_notes_that_change_the_load_keep_points_apart(tmp_path: Path) -> None:
    file = written(
        tmp_path / "a.csv",
        row(scenario="Server", concurrency="", notes="p99 limits TTFT 2000 ms TPOT 200 ms"),
        row(scenario="Server", concurrency="", notes="p99 limits TTFT 450 ms TPOT 20 ms"),
    )
    assert len(read_results(file).points) == 2
