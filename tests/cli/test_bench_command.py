"""`crosstie bench` as a user runs it: refusals in one line, an answer, a file that the next command reads."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.conftest import Command
from tests.run.emulate.running import CATALOG, SMALL, emulated_beside
from tests.small_workload import small_text

NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def replica() -> Iterator[str]:
    with emulated_beside() as made:
        yield made.fleet.pools[0].backends[0]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Missing argument"),
        ([NOBODY], "127.0.0.1:9"),
        (["ftp://x"], "no http or https address"),
        ([NOBODY, "--concurrency", "0"], "--concurrency 0"),
        ([NOBODY, "--concurrency", "1.5"], "whole numbers"),
        ([NOBODY, "--concurrency", "a,b"], "numbers with commas"),
        ([NOBODY, "--concurrency", "4", "--rate", "2"], "give one of them"),
        ([NOBODY, "--rate", "nan"], "--rate nan"),
        ([NOBODY, "--rate", "2", "--poisson"], "--poisson is for --trace"),
        ([NOBODY, "--find-limit", "--concurrency", "4"], "--find-limit looks for a rate"),
        ([NOBODY, "--ttft-ms", "fast"], "--ttft-ms fast"),
        ([NOBODY, "--tpot-ms", "p0=50"], "--tpot-ms p0=50"),
        ([NOBODY, "--trace", "azure-2023-conversatio"], "Did you mean azure-2023-conversation"),
        ([NOBODY, "--field", "temperature"], "--field temperature"),
        ([NOBODY, "--field", "temperature=x"], "--field temperature=x"),
        ([NOBODY, "--gpu-metrics", "rocm-smi"], "neither nvidia-smi, amd-smi"),
        ([NOBODY, "--tokenizer", "none.json"], "none.json"),
        ([NOBODY, "--vary", "0.2", "--shortest", "0.5"], "give one of them"),
        ([NOBODY, "-o", "."], "no file that can be written"),
        ([NOBODY, "-o", "nowhere/x.json"], "no file that can be written"),
    ],
)
def test_refusals_are_one_line(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    seen = crosstie("bench", *arguments)
    assert seen.status == 2
    assert said in seen.err
    assert seen.err.count("\n") == 1
    assert not (tmp_path / "bench.json").exists()


def test_an_answer_and_a_file_that_validate_reads(crosstie: Command, replica: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    asked = ["bench", f"mi300x={replica}", "--speed", "20", "--concurrency", "1,3", "--requests", "6", "--warmup", "1"]
    asked += ["--input", "300", "--output", "10", "--tp", "1", "--engine", "vllm", "--precision", "fp8"]
    seen = crosstie(*asked, "--ttft-ms", "p50=100000", "-o", str(file), "-v")
    assert seen.status == 0, seen.err
    assert "EMULATED" in seen.out
    assert "300 tokens in and 10 out" in seen.out
    assert "3 clients" in seen.out
    assert "100.0%" in seen.out
    assert "longest gap" in seen.out
    assert f"written to {file}" in seen.err
    said = json.loads(crosstie(*asked, "--json", "-o", str(file)).out)
    assert said == json.loads(file.read_text())
    (one,) = said["endpoints"]
    assert (one["model"], one["emulated"], one["conditions"]["accelerator"]) == (SMALL, True, "mi300x")
    found = json.loads(crosstie("validate", str(file), "--json").out)
    assert found["coverage"] == 1.0
    assert list(found["by_accelerator"]) == ["mi300x"]


@pytest.mark.slow
def test_bench_calibrate_and_plan_are_three_commands(
    crosstie: Command, replica: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = ["--speed", "20", "--concurrency", "1,4", "--requests", "6", "--input", "300", "--output", "16"]
    told = crosstie("bench", f"mi300x={replica}", *asked, "--tp", "1", "--engine", "vllm", "--precision", "fp8")
    assert told.status == 0, told.err
    learnt = crosstie("calibrate", "bench.json")
    assert learnt.status == 0, learnt.err
    assert "bench.json: 2 operating points" in learnt.out
    assert "of emulated replicas" in learnt.out
    file = tmp_path / "workload.toml"
    file.write_text(small_text())
    planned = crosstie("plan", str(file), "--quick", "--json")
    assert planned.status == 0, planned.err
    # What was learnt is what the plan rests on.
    points = json.loads((tmp_path / "user-catalog" / "calibration.json").read_text())["points"]
    mine = [count for key, count in points.items() if " mi300x / vllm / 8-bit " in f" {key} "]
    shipped = [count for key, count in CATALOG.calibration.points.items() if " mi300x / vllm / 8-bit " in f" {key} "]
    assert sum(mine) == sum(shipped) + 2


def test_a_limit_that_nothing_keeps_is_no(crosstie: Command, replica: str, tmp_path: Path) -> None:
    seen = crosstie(
        "bench", replica, "--find-limit", "--ttft-ms", "p50=0.001", "--speed", "20", "--input", "50", "--output", "4",
        "-o", str(tmp_path / "run.json"),
    )  # fmt: skip
    assert seen.status == 1
    assert "no rate keeps TTFT p50" in seen.out
    assert "one by one miss" in seen.out
