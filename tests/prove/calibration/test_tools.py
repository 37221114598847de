"""Result files of benchmark tools, as the tools write them: read whole, or refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command

from crosstie.core.errors import BadData, BadInput
from crosstie.prove.calibration.results import Point, read_results

GIVEN = {"accelerator": "h200", "model": "llama-3.1-8b", "engine": "vllm", "tp": "1"}

# vllm bench serve 0.11 --save-result.
VLLM: dict[str, Any] = {
    "date": "20261101-101500", "endpoint_type": "vllm", "backend": "vllm", "label": None,
    "model_id": "meta-llama/Llama-3.1-8B-Instruct", "tokenizer_id": "meta-llama/Llama-3.1-8B-Instruct",
    "num_prompts": 160, "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 16, "duration": 21.3,
    "completed": 160, "total_input_tokens": 163840, "total_output_tokens": 20480, "request_throughput": 7.5,
    "request_goodput": None, "output_throughput": 961.5, "total_token_throughput": 8653.5,
    "mean_ttft_ms": 140.2, "median_ttft_ms": 95.1, "std_ttft_ms": 80.0, "p99_ttft_ms": 420.0,
    "mean_tpot_ms": 15.2, "median_tpot_ms": 15.1, "std_tpot_ms": 0.9, "p99_tpot_ms": 18.0,
    "mean_itl_ms": 15.2, "median_itl_ms": 14.0, "std_itl_ms": 3.0, "p99_itl_ms": 40.0,
}  # fmt: skip
# sglang.bench_serving, one line a run.
SGLANG: dict[str, Any] = {
    "backend": "sglang", "dataset_name": "random", "request_rate": "inf", "max_concurrency": 32,
    "sharegpt_output_len": None, "random_input_len": 1024, "random_output_len": 256, "random_range_ratio": 0.5,
    "duration": 30.0, "completed": 320, "total_input_tokens": 245000, "total_output_tokens": 61000,
    "total_output_tokens_retokenized": 60900, "request_throughput": 10.6, "input_throughput": 8166.0,
    "output_throughput": 2033.0, "mean_e2e_latency_ms": 2900.0, "median_e2e_latency_ms": 2880.0,
    "mean_ttft_ms": 120.0, "median_ttft_ms": 90.0, "p99_ttft_ms": 600.0, "mean_tpot_ms": 14.4,
    "median_tpot_ms": 14.3, "p99_tpot_ms": 17.0, "mean_itl_ms": 14.4, "concurrency": 30.7, "accept_length": None,
    "server_info": {"model_path": "meta-llama/Llama-3.1-8B-Instruct", "tp_size": 2},
}  # fmt: skip


def _metric(unit: str, avg: float) -> dict[str, Any]:
    return {
        "unit": unit,
        "avg": avg,
        "p50": avg * 0.9,
        "p90": avg * 1.3,
        "p95": avg * 1.4,
        "p99": avg * 2,
        "count": 100,
    }


# profile_export_aiperf.json, schema 1.4.
AIPERF: dict[str, Any] = {
    "schema_version": "1.4", "aiperf_version": "0.13.0", "is_complete": True, "was_cancelled": False,
    "request_throughput": {"unit": "requests/sec", "avg": 8.1}, "request_count": {"unit": "requests", "avg": 160.0},
    "time_to_first_token": _metric("ms", 110.0), "inter_token_latency": _metric("ms", 13.0),
    "request_latency": _metric("ms", 1760.0), "output_token_throughput": {"unit": "tokens/sec", "avg": 1036.0},
    "input_sequence_length": _metric("tokens", 1024.0), "output_sequence_length": _metric("tokens", 128.0),
    "input_config": {"endpoint": {"model_names": ["meta-llama/Llama-3.1-8B-Instruct"]}, "loadgen": {"concurrency": 16}},
}  # fmt: skip


def _status(mean: float) -> dict[str, Any]:
    return {"successful": {"mean": mean, "median": mean, "percentiles": {"p90": mean, "p95": mean, "p99": 2 * mean}}}


# benchmarks.json of guidellm, version 2, one benchmark a load.
GUIDELLM: dict[str, Any] = {
    "metadata": {"version": 2, "guidellm_version": "0.8.1"},
    "config": {"backend": {"model": "meta-llama/Llama-3.1-8B-Instruct"}},
    "benchmarks": [
        {
            "type_": "generative_benchmark", "config": {"strategy": {"type_": "concurrent", "streams": streams}},
            "metrics": {
                "time_to_first_token_ms": _status(80.0), "inter_token_latency_ms": _status(11.0),
                "time_per_output_token_ms": _status(11.6), "output_tokens_per_second": _status(1200.0),
                "prompt_token_count": _status(512.0), "output_token_count": _status(128.0),
                "request_concurrency": _status(streams - 0.3),
            },
        }
        for streams in (8, 16)
    ],
}  # fmt: skip
# agg_bmk.json of InferenceX: seconds.
INFERENCEX: list[dict[str, Any]] = [
    {
        "hw": "mi355x", "conc": 64, "image": "rocm/atom:x", "model": "deepseek-ai/DeepSeek-R1", "framework": "atom",
        "precision": "fp8", "spec_decoding": "none", "disagg": False, "isl": 1024, "osl": 1024, "tp": 8, "ep": 1,
        "dp_attention": "false", "tput_per_gpu": 560.0, "output_tput_per_gpu": 280.0, "mean_ttft": 0.6,
        "median_ttft": 0.4, "p99_ttft": 2.0, "mean_tpot": 0.026, "median_tpot": 0.026, "p99_tpot": 0.03,
        "mean_intvty": 38.4,
    }
]  # fmt: skip
MLPERF = """================================================
MLPerf Results Summary
================================================
SUT name : PySUT
Scenario : Offline
Mode     : PerformanceOnly
Samples per second: 110.2
Tokens per second: 31540.5
Result is : VALID
"""
_LATENCY = {"mean": 0.2, "p50": 0.18, "p90": 0.3, "p95": 0.35, "p99": 0.5}
REPLAY: dict[str, Any] = {
    "latencies": "seconds of the server's clock", "requests": 300, "failed": 0, "seconds": 60.0, "late_s": _LATENCY,
    "pools": [{"name": "a", "requests": 300, "input_tokens": 300_000, "output_tokens": 30_000, "ttft_s": _LATENCY,
               "tpot_s": {key: value / 10 for key, value in _LATENCY.items()}}],
}  # fmt: skip


def read(tmp_path: Path, content: Any, name: str = "bench.json", **given: str) -> list[Point]:
    file = tmp_path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    results = read_results(file, given=given or GIVEN)
    assert results.unusable == []
    return results.points


def values(point: Point) -> dict[str, float]:
    return {f"{row.metric.kind} {row.metric.statistic}": row.value for row in point.rows}


def test_vllm_bench_serve(tmp_path: Path) -> None:
    (point,) = read(tmp_path, VLLM, accelerator="h200", tp="1")
    assert (point["engine"], point["model"]) == ("vllm", "meta-llama/Llama-3.1-8B-Instruct")
    assert (point["concurrency"], point["num_prompts"]) == ("16", "160")
    assert (point["input_len"], point["output_len"]) == ("1024", "128")
    assert values(point)["ttft mean"] == pytest.approx(0.1402)
    assert values(point)["tpot p50"] == pytest.approx(0.0151)
    assert values(point)["throughput mean"] == 961.5


def test_arrivals_by_the_clock_and_all_at_once(tmp_path: Path) -> None:
    (by_clock,) = read(tmp_path, VLLM | {"request_rate": 4.0, "max_concurrency": None})
    assert by_clock["concurrency"] == "rate 4 req/s"
    (at_once,) = read(tmp_path, VLLM | {"max_concurrency": None})
    assert at_once["concurrency"] == "160"


def test_sglang_bench_serving_by_lines(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(SGLANG | {"max_concurrency": n}) for n in (8, 32))
    one, other = read(tmp_path, text, "out.jsonl", accelerator="h200")
    assert (one["concurrency"], other["concurrency"]) == ("8", "32")
    assert (one["tp"], one["num_accelerators"]) == ("2", "2")
    assert (one["input_len"], one["notes"]) == ("1024", "random lengths 50-100%")
    assert values(one)["e2e mean"] == pytest.approx(2.9)


def test_aiperf(tmp_path: Path) -> None:
    (point,) = read(tmp_path, AIPERF, accelerator="h200", engine="vllm", tp="1")
    assert (point["concurrency"], point["input_len"], point["output_len"]) == ("16", "1024", "128")
    assert values(point)["tpot mean"] == pytest.approx(0.013)
    assert values(point)["ttft p99"] == pytest.approx(0.22)


def test_guidellm_has_a_benchmark_a_load(tmp_path: Path) -> None:
    points = read(tmp_path, GUIDELLM, accelerator="h200", engine="vllm", tp="1")
    assert [point["concurrency"] for point in points] == ["8", "16"]
    # Its time per output token counts the first one in.
    assert values(points[0])["tpot mean"] == pytest.approx(0.011)


def test_inferencex(tmp_path: Path) -> None:
    (point,) = read(tmp_path, INFERENCEX)
    (own,) = read(tmp_path, INFERENCEX, unused="")
    assert (own["accelerator"], own["parallelism"], own["tp"]) == ("mi355x", "TP8EP1", "8")
    assert values(own)["tpot mean"] == pytest.approx(0.026)
    # What is given wins over what the file says.
    assert point["accelerator"] == "h200"


def test_mlperf_summaries_have_the_lengths_of_their_data_set(tmp_path: Path) -> None:
    (point,) = read(tmp_path, MLPERF, "mlperf_log_summary.txt", **{**GIVEN, "model": "llama-2-70b"})
    assert point["scenario"] == "Offline"
    assert values(point)["throughput mean"] == 31540.5


def test_a_replay(tmp_path: Path) -> None:
    (point,) = read(tmp_path, REPLAY)
    assert (point["concurrency"], point["input_len"], point["output_len"]) == ("rate 5 req/s", "1000", "100")
    assert values(point)["ttft mean"] == 0.2


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"hello": 1}, "is no result file of guidellm, InferenceX, AIPerf"),
        ("{nonsense", "is neither JSON nor JSON by lines"),
        (AIPERF | {"schema_version": "2.0"}, "schema_version: is 2.0; AIPerf's 1.x is read"),
        (AIPERF | {"is_complete": False}, "did not finish"),
        (GUIDELLM | {"metadata": {"version": 3}}, "metadata.version: is 3"),
        (VLLM | {"completed": 0}, "completed: is missing or no positive number"),
        (MLPERF.replace("VALID", "INVALID"), "INVALID by MLPerf's own rules"),
        (MLPERF.replace("Performance", "Accuracy"), "a performance run is read"),
        (REPLAY | {"pools": REPLAY["pools"] * 2}, "a replay against one pool can be compared"),
    ],
)
def test_what_is_not_understood_is_refused_whole(tmp_path: Path, content: Any, reason: str) -> None:
    with pytest.raises(BadData, match=reason.replace(".", r"\.")):
        read(tmp_path, content)


def test_what_a_file_does_not_say_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="vllm bench serve does not say the accelerator, tp; give --accelerator, --tp"):
        read(tmp_path, VLLM, precision="bf16")


def test_validate_reads_them_and_asks_in_one_line(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(VLLM))
    asked = crosstie("validate", str(file))
    assert (asked.status, asked.out, asked.err.count("\n")) == (2, "", 1)
    assert "give --accelerator, --tp" in asked.err
    got = crosstie("validate", str(file), "--accelerator", "h200", "--tp", "1", "--json")
    assert got.status == 0, got.err
    said = json.loads(got.out)
    assert said["metrics"]["tpot"]["n"] == 2
    assert said["uncovered"] == {}


def test_what_was_added_is_learnt_from_again(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "user-catalog"
    beside = ("--alone", "--accelerator", "h200", "--tp", "1", "--json")
    for name, slower in (("one", 1.0), ("two", 1.1)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(VLLM | {"mean_tpot_ms": 15.2 * slower, "num_prompts": 160 + int(slower)}))
        got = crosstie("calibrate", "--add", str(file), *beside)
        assert got.status == 0, got.err
    assert [one["file"] for one in json.loads(got.out)["results"]] == ["one.csv", "two.json"]
    assert sorted(path.name for path in (folder / "measured").iterdir()) == ["one.csv", "two.csv"]
    found = json.loads(crosstie("validate", str(tmp_path / "one.json"), *beside[1:]).out)
    assert found["by_nearness"].keys() == {"model"}
    # A file that cannot be learnt from leaves everything as it was.
    before = (folder / "calibration.json").read_bytes()
    (tmp_path / "bad.json").write_text('{"hello": 1}')
    refused = crosstie("calibrate", "--add", str(tmp_path / "bad.json"), *beside)
    assert refused.status == 2
    assert (folder / "calibration.json").read_bytes() == before
    assert sorted(path.name for path in (folder / "measured").iterdir()) == ["one.csv", "two.csv"]
