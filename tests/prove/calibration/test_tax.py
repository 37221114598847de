"""The software tax: fractions of the roofline, trends on common points only, and one line for each mistake."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.conftest import Command

from crosstie.catalog.library import Catalog
from crosstie.perf.hardware import Hardware
from crosstie.perf.steady_state import steady_state
from crosstie.perf.step import shape, step
from crosstie.prove.calibration.cases import Cases
from crosstie.prove.calibration.predict import Predictor, _most_clients
from crosstie.prove.calibration.results import REQUIRED, read_results
from crosstie.prove.calibration.tax import Tax, shipped_results, tax

OPTIONAL = ("source_id", "source_ref", "publisher", "date", "trust", "accelerator_raw", "num_accelerators", "nodes",
            "engine_version", "parallelism", "tp", "num_prompts", "scenario", "spec_decode", "disagg",
            "qc_littles_law_ratio", "notes")  # fmt: skip

PLAIN = {
    "accelerator": "h100-sxm", "model": "llama-3.1-8b", "precision": "bf16", "engine": "vllm", "engine_version": "0.6.0",
    "num_accelerators": "1", "tp": "1", "input_len": "1000", "output_len": "100", "concurrency": "8",
    "metric": "tpot_ms_mean", "unit": "ms", "value": "20", "date": "2025-01-01",
}  # fmt: skip
LATER = {"engine_version": "0.9.0", "date": "2025-06-01"}


def results(folder: Path, *rows: dict[str, str]) -> Path:
    """A file of rows, each told by what differs from PLAIN."""
    file = folder / "results.csv"
    with file.open("w", newline="") as text:
        writer = csv.DictWriter(text, [*REQUIRED, *OPTIONAL])
        writer.writeheader()
        writer.writerows(PLAIN | row for row in rows)
    return file


def taxed(catalog: Catalog, folder: Path, *rows: dict[str, str]) -> Tax:
    return tax(catalog, read_results(results(folder, *rows)))


@pytest.fixture(scope="module")
def shipped(catalog: Catalog) -> Tax:
    return tax(catalog, read_results(shipped_results()))


@pytest.mark.slow
def test_shipped_fractions_are_possible_or_listed(shipped: Tax) -> None:
    readings = [reading for group in shipped.groups for reading in group.readings]
    assert len(readings) == shipped.points > 2500
    above = [reading for reading in readings if reading.fraction > 1.0]
    assert sorted(above, key=id) == sorted(shipped.above_roofline, key=id)
    # Few, and of a kind: batches that the memory model holds to be too large, latencies of rows that hide a saving.
    assert len(above) <= 0.015 * len(readings)
    sources = {
        (r.case.deployment.accelerator.id, r.case.deployment.model.id) for r in above if r.case.method != "limits"
    }
    assert sources <= {
        ("h100-sxm", "llama-3.1-70b"), ("h100-sxm", "llama-3.3-70b"), ("a100-80gb", "llama-3.1-70b"),
        ("rtx-pro-6000", "qwen3-235b-a22b"), ("h100-sxm", "qwen3-32b"), ("h200", "llama-3.1-8b"),
    }  # fmt: skip
    for group in shipped.groups:
        assert group.median is None or 0.0 < group.median <= 1.0
        assert group.points + group.above_roofline == len(group.readings)


@pytest.mark.slow
def test_shipped_rows_are_sorted_and_the_undated_come_last(shipped: Tax) -> None:
    order = [(group.series.accelerator, group.date or "9999") for group in shipped.groups]
    assert order == sorted(order)
    undated = [group for group in shipped.groups if not group.date]
    # MLPerf v6.1 says in words when it was due, which is no date.
    assert {"v6.1", "1.0.0"} <= {group.release for group in undated}
    assert all(trend.first.date <= trend.last.date for trend in shipped.trends if trend.first.date)
    assert all(trend.first.date for trend in shipped.trends)


@pytest.mark.slow
def test_shipped_names_blame_nobody_wrongly(shipped: Tax) -> None:
    releases = {group.release for group in shipped.groups if group.series.engine == "atom"}
    assert releases == {"0.1.1", "unstated"}
    assert any(group.series.engine == "unstated" for group in shipped.groups)


def test_a_decode_step_by_hand(catalog: Catalog, tmp_path: Path) -> None:
    """One sequence reads every weight but the input embedding once, at 3.35 TB/s; its cache is 131 kB."""
    weights = 8_030_261_248 - 128_256 * 4096
    least_ms = weights * 2 / 3.35e12 * 1e3
    row = {"metric": "decode_step_ms", "input_len": "1", "concurrency": "1", "value": f"{2 * least_ms}"}
    (group,) = taxed(catalog, tmp_path, row).groups
    assert group.median == pytest.approx(0.5, rel=1e-3)
    assert group.tax == pytest.approx(0.5, rel=1e-3)
    assert (group.points, group.above_roofline, group.models) == (1, 0, ("llama-3.1-8b",))


def test_one_client_by_hand(catalog: Catalog, tmp_path: Path) -> None:
    """TTFT and TPOT make one request: a prompt at 989 TFLOP/s, then 99 tokens that each read the weights."""
    rows = [{"metric": "ttft_ms_mean", "value": "30"}, {"metric": "tpot_ms_mean", "value": "9"}]
    found = taxed(catalog, tmp_path, *({"concurrency": "1"} | row for row in rows))
    (reading,) = found.groups[0].readings
    assert reading.kind == "request"
    assert reading.measured_s == pytest.approx(0.030 + 99 * 0.009)
    inner = 8_030_261_248 - 2 * 128_256 * 4096
    prompt = 2 * inner * 1000 / 989e12
    token = (inner + 128_256 * 4096) * 2 / 3.35e12
    assert reading.ideal_s == pytest.approx(prompt + 99 * token, rel=0.05)


def test_a_full_load_by_its_formula(catalog: Catalog, tmp_path: Path) -> None:
    """Ideal GPU time of a request: its share of full prefill steps, and of each decode step of the batch."""
    row = {"concurrency": "max load", "metric": "output_tokens_per_s_total", "unit": "tok/s", "value": "5000"}
    (point,) = read_results(results(tmp_path, row)).points
    case = Cases(catalog).of(point)
    hardware = Hardware([case.deployment])
    steady = steady_state(hardware, _most_clients(case), 1000, 100)
    chunk = float(hardware.chunk_tokens[0, 0])
    prefill = step(hardware, shape(prefill_tokens=chunk, prefill_span=1000.0)).ideal_s[0, 0] * 1000 / chunk
    decode = steady.decode.ideal_s[0, 0] / steady.decoding[0, 0]
    rate = Predictor([case]).ideal()["output_tokens_per_s"][0]
    assert rate == pytest.approx(100 / (prefill + 99 * decode))
    assert taxed(catalog, tmp_path, row).groups[0].median == pytest.approx(5000 / rate)


def test_half_the_time_is_twice_the_fraction(catalog: Catalog, tmp_path: Path) -> None:
    fractions = [taxed(catalog, tmp_path, {"value": value}).groups[0].median for value in ("20", "40")]
    assert fractions[0] == pytest.approx(2 * (fractions[1] or 0.0))


def test_the_impossible_is_listed_and_in_no_median(catalog: Catalog, tmp_path: Path) -> None:
    found = taxed(catalog, tmp_path, {"value": "0.01"}, {"value": "20", "concurrency": "4"})
    (group,) = found.groups
    assert (group.points, group.above_roofline) == (1, 1)
    assert group.median is not None
    assert group.median < 1.0
    (reading,) = found.above_roofline
    assert reading.fraction > 100
    assert "prefix cache" in reading.likely


def test_tails_and_arrivals_that_leave_idle_have_no_fraction(catalog: Catalog, tmp_path: Path) -> None:
    tail = {"metric": "tpot_ms_p99", "concurrency": "2"}
    slow = {
        "metric": "output_tokens_per_s_total",
        "unit": "tok/s",
        "concurrency": "rate 0.1 req/s",
        "num_prompts": "50",
    }
    found = taxed(catalog, tmp_path, tail, slow)
    assert found.groups == []
    (reason,) = found.left_out
    assert found.left_out[reason] == 2
    assert "idling is no tax" in reason


def test_a_trend_is_of_common_points(catalog: Catalog, tmp_path: Path) -> None:
    before = [{"value": "20"}, {"value": "20", "concurrency": "16"}]
    after = [LATER | {"value": "10"}, LATER | {"value": "40", "concurrency": "64"}]
    (trend,) = taxed(catalog, tmp_path, *before, *after).trends
    assert (trend.first.release, trend.last.release, trend.common_points) == ("0.6.0", "0.9.0", 1)
    assert trend.ratio == pytest.approx(2.0)


@pytest.mark.parametrize(
    "change",
    [{"model": "llama-3.1-70b", "tp": "4", "num_accelerators": "4", "value": "40"}, {"precision": "fp8"}, {"num_accelerators": "2"},
     {"input_len": "2000"}, {"output_len": "200"}, {"concurrency": "16"}, {"metric": "ttft_ms_mean", "value": "900"}],
    ids=lambda change: next(iter(change)),
)  # fmt: skip
def test_any_other_condition_is_another_point(catalog: Catalog, tmp_path: Path, change: dict[str, str]) -> None:
    (trend,) = taxed(catalog, tmp_path, {}, LATER | {"value": "10"} | change).trends
    assert trend.common_points == 0


def test_where_the_ends_share_nothing_the_widest_pair_that_does_is_added(catalog: Catalog, tmp_path: Path) -> None:
    last = {"engine_version": "0.12.0", "date": "2025-12-01", "concurrency": "64"}
    whole, shared = taxed(catalog, tmp_path, {}, LATER | {"value": "16"}, last).trends
    assert (whole.last.release, whole.common_points) == ("0.12.0", 0)
    assert (shared.last.release, shared.common_points) == ("0.9.0", 1)
    assert shared.ratio == pytest.approx(1.25)


def test_undated_or_unstated_releases_are_in_no_trend(catalog: Catalog, tmp_path: Path) -> None:
    rows = [{}, LATER | {"date": "soon"}, LATER | {"engine_version": "nightly"}]
    found = taxed(catalog, tmp_path, *rows)
    assert found.trends == []
    assert [(group.release, group.date) for group in found.groups] == [
        ("0.6.0", "2025-01-01"), ("unstated", "2025-06-01"), ("0.9.0", ""),
    ]  # fmt: skip


def test_mlperf_is_a_line_of_its_own(catalog: Catalog, tmp_path: Path) -> None:
    contest = {"source_id": "mlperf_v5.1", "concurrency": "", "scenario": "Offline", "date": "2025-09-09",
               "metric": "output_tokens_per_s_total", "unit": "tok/s", "value": "5000"}  # fmt: skip
    found = taxed(catalog, tmp_path, {}, contest)
    assert [(str(g.series), g.release) for g in found.groups] == [
        ("h100-sxm vllm", "0.6.0"), ("h100-sxm vllm MLPerf", "v5.1"),
    ]  # fmt: skip
    assert found.trends == []


def test_tax_prints_its_trend(crosstie: Command, tmp_path: Path) -> None:
    file = str(results(tmp_path, {}, LATER | {"value": "10"}, LATER | {"concurrency": "64"}))
    got = crosstie("tax", file, "-v")
    assert (got.status, got.err) == (0, "")
    assert "h100-sxm vllm 0.6.0  2025-01-01" in got.out
    assert "0.6.0 to 0.9.0     2.00x" in crosstie("tax", file).out
    assert "0.6.0 (2025-01-01) to 0.9.0 (2025-06-01): 2.00x, on 1 operating point that both have" in got.out
    assert "Crosstie has run nothing on AMD" in got.out
    other = str(results(tmp_path, {}, LATER | {"concurrency": "64"}))
    assert "on different operating points, so no speed-up" in crosstie("tax", other, "-v").out


def test_tax_as_json_has_its_keys(crosstie: Command, tmp_path: Path) -> None:
    file = str(results(tmp_path, {}, LATER, {"value": "0.01", "concurrency": "2"}, {"value": "none"}))
    found: dict[str, Any] = json.loads(crosstie("tax", file, "--json").out)
    assert set(found) == {"rows", "points", "groups", "trends", "above_roofline", "left_out"}
    assert (found["rows"], found["points"]) == (4, 3)
    assert set(found["groups"][0]) == {
        "accelerator", "engine", "campaign", "release", "date", "points", "median", "tax", "p10", "p90",
        "above_roofline", "models",
    }  # fmt: skip
    assert set(found["trends"][0]) == {
        "accelerator", "engine", "campaign", "first", "last", "first_date", "last_date", "same_operating_points",
        "common_points", "ratio",
    }  # fmt: skip
    assert found["trends"][0]["same_operating_points"] is True
    assert found["above_roofline"]["count"] == 1
    assert found["above_roofline"]["points"][0]["line"] == 4
    assert found["left_out"] == {"value is no number": 1}


FILTERS: list[tuple[Sequence[str], int]] = [
    (("--accelerator", "h200"), 1), (("--accelerator", "H100-SXM,h200"), 2), (("--model", "llama-3.1-70b"), 1),
    (("--engine", "sglang"), 1), (("--accelerator", "h200", "--model", "llama-3.1-8b"), 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "points"), FILTERS, ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_options_choose_the_points(crosstie: Command, tmp_path: Path, options: Sequence[str], points: int) -> None:
    large = {"model": "llama-3.1-70b", "tp": "4", "num_accelerators": "4", "accelerator": "mi300x", "value": "60"}
    unnamed = {"accelerator": "b200", "engine": ""}
    file = str(
        results(tmp_path, {}, {"accelerator": "h200"}, large, {"engine": "sglang", "accelerator": "mi325x"}, unnamed)
    )
    assert json.loads(crosstie("tax", file, "--json", *options).out)["points"] == points


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--accelerator", "mi300xx"), "unknown accelerator 'mi300xx'. Did you mean mi300x"),
        (("--accelerator", ","), "--accelerator is empty"),
        (("--model", "llama-9"), "llama-9"),
        (("--engine", "vlm"), "unknown stack 'vlm'. Did you mean vllm"),
        (("nowhere.csv",), "nowhere.csv: cannot be read: No such file or directory"),
        (("--plot", "tax.gif"), "--plot tax.gif: the name must end in .svg, .png, .pdf"),
    ],
)
def test_bad_input_is_one_line(crosstie: Command, arguments: Sequence[str], said: str) -> None:
    got = crosstie("tax", *arguments)
    assert (got.status, got.out, got.err.count("\n")) == (2, "", 1)
    assert said in got.err


def test_a_file_that_is_no_table_is_refused(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "other.csv"
    file.write_text("a,b\n1,2\n")
    got = crosstie("tax", str(file))
    assert got.status == 2
    assert "lacks the columns accelerator" in got.err


def test_nothing_left_is_status_1(crosstie: Command, tmp_path: Path) -> None:
    file = str(results(tmp_path, {}))
    got = crosstie("tax", file, "--accelerator", "mi300x")
    assert (got.status, got.out) == (1, "")
    assert got.err.startswith("none of the 1 results is left: the options ask for")
    assert (
        crosstie("tax", str(results(tmp_path)), "--plot", "x.svg").err
        == "none of the 0 results is left: the files have no rows\n"
    )
    spoilt = crosstie("tax", str(results(tmp_path, {"value": "none"})), "--json")
    assert (spoilt.status, spoilt.err) == (1, "none of the 1 results is left: value is no number (1)\n")
    assert json.loads(spoilt.out)["groups"] == []


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_tax_draws_its_picture_in_every_format(crosstie: Command, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    file = results(tmp_path, {}, LATER | {"value": "10"}, LATER | {"accelerator": "mi300x", "date": "2025-07"})
    picture = tmp_path / f"tax.{ending}"
    got = crosstie("tax", str(file), "--plot", str(picture))
    assert (got.status, got.err) == (0, f"drawn as {picture}\n")
    assert picture.stat().st_size > 5000


def test_the_picture_says_who_ran_what(crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    picture = tmp_path / "tax.svg"
    crosstie("tax", str(results(tmp_path, {}, LATER)), "--plot", str(picture))
    text = picture.read_text()
    assert "Crosstie has run nothing on AMD" in text
    assert "h100-sxm vllm" in text


def test_a_picture_of_nothing_dated_is_refused(crosstie: Command, tmp_path: Path) -> None:
    picture = tmp_path / "tax.svg"
    got = crosstie("tax", str(results(tmp_path, {"date": ""})), "--plot", str(picture))
    assert got.status == 2
    assert "no result left has both a date and a release" in got.err
    assert not picture.exists()


def test_ideal_is_never_slower_than_predicted(catalog: Catalog, tmp_path: Path) -> None:
    rows = [{"concurrency": n, "output_len": m} for n in ("1", "8", "64") for m in ("1", "500")]
    cases = [Cases(catalog).of(point) for point in read_results(results(tmp_path, *rows)).points]
    predictor = Predictor(cases)
    predicted, ideal = predictor.predict(), predictor.ideal()
    for name in ("ttft_mean", "tpot", "run"):
        assert np.all(ideal[name] <= predicted[name])
    assert np.all(ideal["output_tokens_per_s"] >= predicted["output_tokens_per_s"])
