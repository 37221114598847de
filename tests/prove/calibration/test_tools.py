"""Result files of benchmark tools, as the tools write them: read whole, or refused in one line."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData, BadInput
from crosstie.prove.calibration.cases import Cases
from crosstie.prove.calibration.results import OperatingPoint, read_results
from crosstie.prove.calibration.tools import is_emulated

GIVEN = {"accelerator": "h200", "model": "llama-3.1-8b", "engine": "vllm", "tp": "1"}

FILES = Path(__file__).parent / "tool_files"


def written(name: str) -> str:
    """A file as its tool wrote it; tool_files/README.md says which and when."""
    return (FILES / name).read_text(encoding="utf-8")


VLLM: dict[str, Any] = json.loads(written("vllm-bench-serve.json"))
SGLANG: dict[str, Any] = json.loads(written("sglang-bench_serving.jsonl"))
AIPERF: dict[str, Any] = json.loads(written("aiperf-profile_export_aiperf.json"))
GUIDELLM: dict[str, Any] = json.loads(written("guidellm-benchmarks.json"))
INFERENCEX: list[dict[str, Any]] = json.loads(written("inferencex-agg_bmk.json"))
API: list[dict[str, Any]] = json.loads(written("inferencex-api-benchmarks.json"))
SESSIONS: list[dict[str, Any]] = json.loads(written("inferencex-agentic-agg.json"))
MLPERF = written("mlperf-offline-mlperf_log_summary.txt")


def read(tmp_path: Path, content: Any, name: str = "bench.json", **given: str) -> list[OperatingPoint]:
    file = tmp_path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    results = read_results(file, given=given or GIVEN)
    assert results.unusable == []
    return results.points


def values(point: OperatingPoint) -> dict[str, float]:
    return {f"{row.metric.kind} {row.metric.statistic}": row.value for row in point.rows}


def test_vllm_bench_serve(tmp_path: Path) -> None:
    (point,) = read(tmp_path, VLLM, accelerator="h200", tp="1")
    assert (point["engine"], point["model"]) == ("vllm", "llama-3.1-8b")
    assert (point["concurrency"], point["num_prompts"]) == ("4", "16")
    assert (point["input_len"], point["output_len"]) == ("219", "40")
    assert values(point)["ttft mean"] == pytest.approx(0.0251548, rel=1e-4)
    assert values(point)["tpot p50"] == pytest.approx(0.0013239, rel=1e-4)
    assert values(point)["throughput mean"] == pytest.approx(1990.33, rel=1e-4)


def test_arrivals_by_the_clock_and_all_at_once(tmp_path: Path) -> None:
    (by_clock,) = read(tmp_path, VLLM | {"request_rate": 4.0, "max_concurrency": None})
    assert by_clock["concurrency"] == "rate 4 req/s"
    (at_once,) = read(tmp_path, VLLM | {"max_concurrency": None})
    assert at_once["concurrency"] == "16"


def test_sglang_bench_serving_by_lines(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(SGLANG | {"max_concurrency": n}) for n in (4, 32))
    one, other = read(tmp_path, text, "out.jsonl", accelerator="h200", model="llama-3.1-8b", tp="2")
    assert (one["concurrency"], other["concurrency"], one["engine"]) == ("4", "32", "sglang")
    # The lengths asked for, with how far they vary, rather than the mean of what came out.
    assert (one["input_len"], one["output_len"], one["notes"]) == ("200", "40", "random lengths 80-100%")
    assert values(one)["e2e mean"] == pytest.approx(0.110655, rel=1e-4)
    # A real SGLang server says what it is.
    said = SGLANG | {"server_info": {"model_path": "meta-llama/Llama-3.1-8B-Instruct", "tp_size": 2}}
    (told,) = read(tmp_path, said, accelerator="h200")
    assert (told["tp"], told["num_accelerators"], told["model"]) == ("2", "2", "meta-llama/Llama-3.1-8B-Instruct")


def test_aiperf(tmp_path: Path) -> None:
    (point,) = read(tmp_path, AIPERF, accelerator="h200", engine="vllm", tp="1")
    assert (point["model"], point["num_prompts"]) == ("llama-3.1-8b", "24")
    assert (point["concurrency"], point["input_len"], point["output_len"]) == ("4", "200", "39")
    assert values(point)["tpot mean"] == pytest.approx(0.0011739, rel=1e-4)
    assert values(point)["ttft p99"] == pytest.approx(0.144834, rel=1e-4)
    assert values(point)["throughput mean"] == pytest.approx(983.271, rel=1e-4)


def test_of_aiperfs_phases_the_measured_one_counts(tmp_path: Path) -> None:
    def run(*phases: dict[str, Any]) -> Any:
        return AIPERF | {"input_config": AIPERF["input_config"] | {"phases": list(phases)}}

    warm = {"name": "warmup", "kind": "warmup", "type": "concurrency", "concurrency": 1}
    rate = {"name": "profiling", "kind": "profiling", "type": "poisson", "rate": 2.5, "concurrency": 64}
    (by_clock,) = read(tmp_path, run(warm, rate))
    assert by_clock["concurrency"] == "rate 2.5 req/s"
    with pytest.raises(BadData, match="has 2 that were measured"):
        read(tmp_path, run(rate, rate))
    old = {"endpoint": {"model_names": ["llama-3.1-8b"]}, "loadgen": {"concurrency": 16}}
    (before,) = read(tmp_path, AIPERF | {"input_config": old}, accelerator="h200", engine="vllm", tp="1")
    assert (before["model"], before["concurrency"]) == ("llama-3.1-8b", "16")


def test_guidellm_has_a_benchmark_a_load(tmp_path: Path) -> None:
    points = read(tmp_path, GUIDELLM, accelerator="h200", engine="vllm", tp="1")
    assert [point["concurrency"] for point in points] == ["1", "2"]
    assert {(point["model"], point["num_prompts"], point["output_len"]) for point in points} == {
        ("llama-3.1-8b", "6", "40")
    }
    # Its time per output token counts the first one in.
    assert values(points[0])["tpot mean"] == pytest.approx(0.0011671, rel=1e-4)
    assert values(points[0])["ttft p50"] == pytest.approx(0.016985, rel=1e-4)


def test_inferencex(tmp_path: Path, catalog: Catalog) -> None:
    points = read(tmp_path, INFERENCEX, unused="")
    assert [(point["accelerator"], point["model"], point["parallelism"]) for point in points] == [
        ("mi355x", "deepseek-r1", "TP4EP1"),
        ("b200", "gpt-oss-120b", "TP2EP2DPA"),
        ("gb200", "gpt-oss-120b", "P:2xTP1EP1 D:1xTP2EP1"),
        ("mi355x", "deepseek-r1", "P:1xTP1EP8 D:2xTP1EP8"),
    ]
    assert values(points[0])["tpot mean"] == pytest.approx(0.086492, rel=1e-4)
    # Every one of them can be predicted, with what its recipes set.
    cases = [Cases(catalog).of(point) for point in points]
    assert [case.gpus for case in cases] == [4, 2, 4, 24]
    assert [case.deployment.parallelism.dp for case in cases] == [1, 2, 1, 8]
    assert str(cases[3].deployment.speculation) == "mtp:3"
    # What is given wins over what the file says.
    (given,) = read(tmp_path, INFERENCEX[:1])
    assert given["accelerator"] == "h200"


def test_rows_of_inferencexs_api(tmp_path: Path, catalog: Catalog) -> None:
    one, apart, sessions = read(tmp_path, API, unused="")
    # Its counts of GPUs are 64 a side here, eight times eight; the run had eight.
    assert (one["parallelism"], one["num_accelerators"], one["date"]) == ("TP8EP8DPA", "8", "2026-09-03")
    assert (one["model"], one["input_len"], one["engine_version"]) == (
        "deepseek-v4-pro",
        "8192",
        "vllm/vllm-openai:v0.23.0",
    )
    assert values(one)["throughput mean"] == 1400.0
    assert values(one)["ttft p90"] == pytest.approx(1.2)
    assert values(one)["energy mean"] == 4.0
    case = Cases(catalog).of(one)
    assert (case.gpus, case.deployment.parallelism.dp) == (8, 8)
    assert (apart["parallelism"], apart["num_accelerators"]) == ("P:1xTP1EP8 D:2xTP1EP8", "24")
    case = Cases(catalog).of(apart)
    assert (case.gpus, str(case.deployment.speculation)) == (24, "mtp:3")
    # Sessions have no lengths there, and power that was not valid is none.
    assert (sessions["input_len"], sessions["scenario"]) == ("", "agentic sessions, closed loop")
    assert "energy mean" not in values(sessions)


def test_an_aggregate_of_agents_sessions(tmp_path: Path) -> None:
    (point,) = read(tmp_path, [*SESSIONS], unused="")
    assert (point["accelerator"], point["model"], point["parallelism"]) == ("b300", "deepseek-v4-pro", "TP8EP8")
    assert (point["input_len"], point["output_len"], point["concurrency"]) == ("61000", "640", "32")
    assert values(point)["throughput mean"] == 10737.5
    assert values(point)["ttft p50"] == pytest.approx(1.35)
    assert values(point)["tpot p90"] == pytest.approx(0.03)
    # It stands among the other runs of agg_bmk.json.
    assert len(read(tmp_path, [*INFERENCEX, *SESSIONS], unused="")) == len(INFERENCEX) + 1


def test_a_run_without_a_rate_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "agg.json"
    file.write_text(json.dumps([SESSIONS[0] | {"request_metrics": {"latency": {}}}]))
    (unusable,) = read_results(file).unusable
    assert unusable.reason == "value is zero, negative or not finite"


@pytest.mark.parametrize(("scenario", "rate"), [("Offline", 23514.8), ("Server", 21028.23)])
def test_mlperf_summaries_have_the_lengths_of_their_data_set(tmp_path: Path, scenario: str, rate: float) -> None:
    text = written(f"mlperf-{scenario.casefold()}-mlperf_log_summary.txt")
    (point,) = read(tmp_path, text, "mlperf_log_summary.txt", **{**GIVEN, "model": "llama-2-70b"})
    assert point["scenario"] == scenario
    assert values(point)["throughput mean"] == rate


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
        ({"crosstie_bench": 2}, "crosstie_bench: is 2; this version reads 1"),
        ({"crosstie_bench": 1, "endpoints": [{"points": [{}]}]}, "are not as crosstie bench writes them"),
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


TOLD = "This answer is emulated by Crosstie: it keeps the time"


def with_request(document: dict[str, Any], **request: str) -> dict[str, Any]:
    """As guidellm has it where its requests are not left out."""
    first, *others = document["benchmarks"]
    return document | {"benchmarks": [first | {"requests": {"successful": [request]}}, *others]}


@pytest.mark.parametrize(
    ("content", "marked"),
    [
        (VLLM, False),
        (VLLM | {"generated_texts": ["Well, ", TOLD]}, True),
        (SGLANG | {"generated_texts": [TOLD]}, True),
        (AIPERF, False),
        (AIPERF | {"responses": [{"system_fingerprint": "crosstie-emulated"}]}, True),
        (GUIDELLM, False),
        (with_request(GUIDELLM, output=TOLD), True),
        (VLLM | {"emulated": True}, True),
        # Somebody's prompt that speaks of it is no mark.
        (VLLM | {"label": '"emulated": true'}, False),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_results_of_emulated_replicas_are_marked_whoever_wrote_them(
    crosstie: Command, tmp_path: Path, content: dict[str, Any], marked: bool, separators: tuple[str, str]
) -> None:
    text = json.dumps(content, separators=separators)
    assert {point["emulated"] for point in read(tmp_path, text)} == {"yes" if marked else ""}
    file = tmp_path / "bench.json"
    assert is_emulated(file, text) == marked
    rows = ["accelerator,emulated", f"h200,{'yes' if marked else ''}"]
    assert is_emulated(tmp_path / "rows.csv", "\n".join(rows)) == marked
    options = [f"--{name}={value}" for name, value in GIVEN.items()]
    seen = crosstie("validate", str(file), *options)
    assert ("of emulated replicas" in seen.out) == marked
    assert bool(json.loads(crosstie("validate", str(file), *options, "--json").out)["emulated"]) == marked


def test_of_a_benchmark_with_two_endpoints_the_emulated_one_is_marked(tmp_path: Path) -> None:
    point = {"complete": True, "columns": {"concurrency": "2", "input_len": "9", "output_len": "9"},
             "metrics": {"ttft_s_p50": {"value": 1.0}}}  # fmt: skip
    ends = [
        {"emulated": emulated, "conditions": GIVEN | {"accelerator": name}, "points": [point]}
        for name, emulated in (("mi300x", True), ("h200", False))
    ]
    found = read(tmp_path, {"crosstie_bench": 1, "endpoints": ends}, nothing="")
    assert {one["accelerator"]: one["emulated"] for one in found} == {"mi300x": "yes", "h200": ""}


def test_what_a_client_has_bent_and_what_nothing_predicts_is_left_out(tmp_path: Path) -> None:
    plain = {"complete": True, "columns": {"concurrency": "2", "input_len": "9", "output_len": "9"},
             "metrics": {"ttft_s_p50": {"value": 1.0}, "tpot_s_p50": {"value": 0.1}}}  # fmt: skip

    def kinds(point: dict[str, Any]) -> set[str]:
        ends = [{"conditions": GIVEN, "points": [point]}]
        return {row.metric.kind for one in read(tmp_path, {"crosstie_bench": 1, "endpoints": ends}) for row in one.rows}

    assert kinds(plain | {"arrivals": "steady", "bent": False}) == {"ttft", "tpot"}
    assert kinds(plain | {"arrivals": "steady", "bent": True}) == {"tpot"}
    for arrivals in ("sessions", "schedule", "unsettled"):
        assert kinds(plain | {"arrivals": arrivals}) == set()


@pytest.mark.slow
def test_calibrate_marks_them_too(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(VLLM | {"generated_texts": [TOLD]}, separators=(",", ":")))
    options = [f"--{name}={value}" for name, value in GIVEN.items()]
    seen = crosstie("calibrate", "--add", str(file), *options)
    assert "of emulated replicas" in seen.out, seen.err
    # As a table of what was added, too.
    again = crosstie("calibrate", "--add", str(file), *options)
    assert "of emulated replicas" in again.out


@pytest.mark.slow
def test_what_was_added_is_learnt_from_again(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "user-catalog"
    beside = ("--alone", "--accelerator", "h200", "--tp", "1", "--json")
    for name, slower in (("one", 1.0), ("two", 1.1)):
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(VLLM | {"mean_tpot_ms": 5.0 * slower, "num_prompts": 16 + int(slower)}))
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
