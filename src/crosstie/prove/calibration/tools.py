"""Result files of benchmark tools, unedited: each told by what it holds, and turned into rows of the long format.

Values are named by their paths: keys with dots between them, and several paths with spaces between them where a tool's
versions differ. The first that leads to a value counts. What a file does not say, such as the accelerator, is given
beside it; nothing is guessed.
"""

import csv
import io
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstie.catalog.models import text_config
from crosstie.core.emulated import FINGERPRINT
from crosstie.core.errors import BadData, BadInput

Cells = dict[str, str]
Document = Mapping[str, Any]
# Conditions, and metrics as (name, unit, value), of every run in a document.
Metrics = list[tuple[str, str, float]]
Runs = Iterator[tuple[Cells, Metrics]]

# Columns that may be given beside a file, and the option that gives each.
GIVEN = {
    "accelerator": "--accelerator", "model": "--model", "precision": "--precision", "engine": "--engine",
    "tp": "--tp", "num_accelerators": "--gpus", "parallelism": "--layout",
}  # fmt: skip
_NEEDED = ("accelerator", "model", "engine", "tp")
# Columns that every table of results has, though a tool may not say them.
_EMPTY = dict.fromkeys(("precision", "input_len", "output_len", "concurrency"), "")
# Ours, and the words that tools have for each.
_STATISTICS = {"mean": ("mean", "avg"), "p50": ("median", "p50"), "p90": ("p90",), "p95": ("p95",), "p99": ("p99",)}
_RATE = ("output_tokens_per_s_total", "tok/s")
_BENCH = "crosstie bench"
# In answers of emulated replicas, which some tools keep.
_EMULATED = (FINGERPRINT, "emulated by Crosstie", "emulated by crosstie")


@dataclass(frozen=True, slots=True)
class BenchmarkTool:
    name: str
    holds: Callable[[Document], bool]
    runs: Callable[[Document, str], Runs]


def is_tool_file(text: str) -> bool:
    """Whether it is anything but a table with a header."""
    start = text.lstrip()[:400]
    return start[:1] in ("{", "[") or "MLPerf Results Summary" in start


def tool_rows(path: Path, text: str, given: Mapping[str, str]) -> Iterator[Cells]:
    """Rows with the columns of `results`; raises with file and reason where the file cannot be one."""
    given = with_structure(given)
    for tool, document in _documents(path, text):
        # A benchmark of ours says it of each endpoint.
        marked = {"emulated": "yes"} if tool.name != _BENCH and says_emulated(document) else {}
        for conditions, metrics in tool.runs(document, str(path)):
            cells = _EMPTY | conditions | marked | {name: value for name, value in given.items() if value}
            if not cells.get("tp") and cells.get("parallelism"):
                cells["tp"] = cells.get("num_accelerators", "")
            lacking = [name for name in _NEEDED if not cells.get(name)]
            if lacking:
                options = ", ".join(GIVEN[name] for name in lacking)
                raise BadInput(f"{path}: {tool.name} does not say the {', '.join(lacking)}; give {options}")
            cells.setdefault("num_accelerators", cells["tp"])
            for name, unit, value in metrics:
                yield {**cells, "metric": name, "unit": unit, "value": repr(float(value))}


def with_structure(given: Mapping[str, str]) -> Mapping[str, str]:
    """A folder with a config.json is a model: what is given may name one, and rows then carry its structure."""
    folder = Path(given.get("model") or "").expanduser()
    if not given.get("model") or not (folder / "config.json" if folder.is_dir() else folder).is_file():
        return given
    config = text_config(folder)
    is_path = given["model"].startswith((".", "/", "~")) or given["model"].endswith(".json")
    # A folder does not hide a model of the catalog that has its name.
    return {**given, "model": config.name if is_path else given["model"], "model_config": config.text}


def is_emulated(path: Path, text: str) -> bool:
    """Whether results are of emulated replicas, at least in part, whoever wrote them. A file that has nothing of what
    the replicas answered, neither texts nor fingerprints, cannot tell."""
    if "MLPerf Results Summary" in text[:400]:
        return False
    if is_tool_file(text):
        return any(map(says_emulated, _decoded(path, text)))
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return "emulated" in (rows.fieldnames or ()) and any(row["emulated"] == "yes" for row in rows)


def says_emulated(document: Any) -> bool:
    """A key `emulated` that says so, or an emulated replica's own words or fingerprint, however deep."""
    left = [document]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            if value.get("emulated"):
                return True
            left += value.values()
        elif isinstance(value, list):
            left += value
        elif isinstance(value, str) and any(mark in value for mark in _EMULATED):
            return True
    return False


def _documents(path: Path, text: str) -> Iterator[tuple[BenchmarkTool, Document]]:
    if "MLPerf Results Summary" in text[:400]:
        yield _MLPERF, {key.casefold(): value for key, value in _LINE.findall(text)}
        return
    for document in _decoded(path, text):
        tool = next((tool for tool in _TOOLS if isinstance(document, Mapping) and tool.holds(document)), None)
        if tool is None:
            known = ", ".join([*(tool.name for tool in _TOOLS), _MLPERF.name])
            raise BadData(str(path), "", f"is no result file of {known}, nor a table of results")
        yield tool, document


def _decoded(path: Path, text: str) -> Sequence[Any]:
    """One document, a list of them, or one a line."""
    try:
        whole = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            return [json.loads(line) for line in lines]
        except (json.JSONDecodeError, RecursionError):
            raise BadData(str(path), "", f"is neither JSON nor JSON by lines: {error}") from None
    return whole if isinstance(whole, list) else [whole]


def _values(document: Any, paths: str) -> Iterator[Any]:
    """What the paths lead to, without what is empty."""
    for path in paths.split():
        value = document
        for key in path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if value not in (None, "", {}, []):
            yield value


def _at(document: Any, paths: str) -> Any:
    return next(_values(document, paths), None)


def _number(document: Any, paths: str) -> float | None:
    """The first that is a positive number."""
    for value in _values(document, paths):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
            return float(value)
    return None


def _needed(document: Any, file: str, paths: str) -> float:
    value = _number(document, paths)
    if value is None:
        raise BadData(file, paths.split()[0], "is missing or no positive number")
    return value


def _deep(value: Any, key: str) -> Any:
    """The first value of that key that is not empty, however deep."""
    if isinstance(value, Mapping):
        if value.get(key):
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        return next((known for inner in value if (known := _deep(inner, key)) is not None), None)
    return None


def _is_true(value: Any) -> bool:
    """A flag that some write as a word."""
    return str(value).casefold() == "true"


def _tokens(value: float) -> str:
    return str(max(round(value), 1))


def _load(rate: Any, concurrency: Any, prompts: float | None) -> Cells:
    """A closed loop of clients, arrivals by the clock, or all at once."""
    clients = concurrency if isinstance(concurrency, int | float) and concurrency and concurrency > 0 else None
    by_clock = isinstance(rate, int | float) and math.isfinite(rate) and rate > 0
    cells = {"num_prompts": _tokens(prompts)} if prompts else {}
    if clients is None and by_clock:
        return cells | {"concurrency": f"rate {float(rate):g} req/s"}
    return cells | {"concurrency": _tokens(clients if clients is not None else prompts or 0)}


def _lengths(document: Any, file: str, inputs: str, outputs: str, requests: float = 1.0) -> Cells:
    """Means, or the sums over so many requests."""
    return {
        "input_len": _tokens(_needed(document, file, inputs) / requests),
        "output_len": _tokens(_needed(document, file, outputs) / requests),
    }


def _model(name: Any) -> Cells:
    return {"model": name} if isinstance(name, str) else {}


def _latencies(document: Any, unit: str, **paths: str) -> Metrics:
    """Each statistic that is there of each latency; braces in its paths stand for the tool's word for the statistic."""
    values = [
        (f"{latency}_ms_{statistic}", _number(document, " ".join(own.replace("{}", word) for word in words)))
        for latency, own in paths.items()
        for statistic, words in _STATISTICS.items()
    ]
    return [(name, unit, value) for name, value in values if value is not None]


def _flat_runs(document: Document, file: str) -> Runs:
    """`vllm bench serve` and `sglang.bench_serving`, which grew out of one script."""
    completed = _needed(document, file, "completed")
    prompts = _number(document, "num_prompts") or completed
    cells = _load(document.get("request_rate"), document.get("max_concurrency"), prompts)
    cells |= _lengths(document, file, "total_input_tokens", "total_output_tokens", completed)
    cells |= _model(_at(document, "model_id server_info.model_path model"))
    engine = str(_at(document, "backend endpoint_type")).partition("-")[0]
    if engine in ("vllm", "sglang", "trt", "tensorrt"):
        cells["engine"] = "tensorrt-llm" if engine in ("trt", "tensorrt") else engine
    if width := _number(document, "server_info.tp_size"):
        cells["tp"] = _tokens(width)
    ratio = document.get("random_range_ratio")
    inputs, outputs = _number(document, "random_input_len"), _number(document, "random_output_len")
    is_random = document.get("dataset_name") in ("random", "random-ids")
    if is_random and isinstance(ratio, int | float) and inputs and outputs:
        cells |= {"input_len": _tokens(inputs), "output_len": _tokens(outputs)}
        cells["notes"] = f"random lengths {min(max(round(100 * ratio), 1), 100)}-100%"
    rate = (*_RATE, _needed(document, file, "output_throughput"))
    paths = {"ttft": "{}_ttft_ms", "tpot": "{}_tpot_ms", "e2e": "{}_e2el_ms {}_e2e_latency_ms"}
    yield cells, [rate, *_latencies(document, "ms", **paths)]


def _aiperf_runs(document: Document, file: str) -> Runs:
    version = str(_at(document, "schema_version") or "1.0")
    if version.partition(".")[0] != "1":
        raise BadData(file, "schema_version", f"is {version}; AIPerf's 1.x is read")
    if document.get("is_complete") is False or document.get("was_cancelled"):
        raise BadData(file, "", "AIPerf says that the run did not finish")
    config = _at(document, "input_config")
    phases = [phase for phase in _at(config, "phases") or [config] if _deep(phase, "kind") != "warmup"]
    if len(phases) != 1:
        raise BadData(file, "input_config.phases", f"has {len(phases)} that were measured; one can be compared")
    # A concurrency beside a rate is a limit.
    rate = _deep(phases[0], "rate") or _deep(phases[0], "request_rate")
    clients = None if rate else _deep(phases[0], "concurrency")
    cells = _load(rate, clients, _number(document, "request_count.avg"))
    cells |= _lengths(document, file, "input_sequence_length.avg", "output_sequence_length.avg")
    models = _deep(config, "model_names") or _deep(config, "models")
    cells |= _model(models[0] if isinstance(models, list) and isinstance(models[0], str) else _deep(models, "name"))
    metrics = [(*_RATE, _needed(document, file, "output_token_throughput.avg"))]
    for ours, theirs in (("ttft", "time_to_first_token"), ("tpot", "inter_token_latency"), ("e2e", "request_latency")):
        unit = str(_at(document, f"{theirs}.unit") or "ms")
        metrics += _latencies(document, unit, **{ours: f"{theirs}.{{}}"})
    yield cells, metrics


def _guidellm_runs(document: Document, file: str) -> Runs:
    version = _at(document, "metadata.version")
    if version not in (None, 1, 2):
        raise BadData(file, "metadata.version", f"is {version}; guidellm's reports of version 1 and 2 are read")
    for benchmark in document["benchmarks"]:
        if not isinstance(_at(benchmark, "metrics"), Mapping):
            raise BadData(file, "benchmarks", "has one without metrics")
        strategy = _deep(_at(benchmark, "config args"), "strategy")
        kind = _at(strategy, "type_")
        if kind in ("constant", "poisson", "async"):
            cells = {"concurrency": f"rate {_needed(strategy, file, 'rate'):g} req/s"}
        else:
            clients = 1.0 if kind == "synchronous" else _number(strategy, "streams max_concurrency")
            clients = clients or _needed(benchmark, file, "metrics.request_concurrency.successful.mean")
            cells = {"concurrency": _tokens(clients)}
        counts = "metrics.prompt_token_count.successful.mean", "metrics.output_token_count.successful.mean"
        cells |= _lengths(benchmark, file, *counts)
        if prompts := _number(benchmark, "metrics.request_totals.successful"):
            cells["num_prompts"] = _tokens(prompts)
        cells |= _model(_deep(_at(document, "config args"), "model") or _deep(benchmark, "model"))
        metrics = [(*_RATE, _needed(benchmark, file, "metrics.output_tokens_per_second.successful.mean"))]
        # Its "time per output token" holds the first one; the time between tokens is what others call TPOT.
        for ours, theirs in (("ttft", "time_to_first_token_ms"), ("tpot", "inter_token_latency_ms")):
            own = f"metrics.{theirs}.successful"
            metrics += _latencies(benchmark, "ms", **{ours: f"{own}.{{}} {own}.percentiles.{{}}"})
        yield cells, metrics


# Models by the name that InferenceX has for them; beside it stands a checkpoint, or a path on the cluster of the run.
_INFERENCEX_MODELS = {
    "dsr1": "deepseek-r1", "dsv4": "deepseek-v4-pro", "gptoss": "gpt-oss-120b", "gptoss120b": "gpt-oss-120b",
    "llama70b": "llama-3.3-70b", "qwen3.5": "qwen3.5-397b-a17b", "kimik2.5": "kimi-k2.5", "kimik2.6": "kimi-k2.6",
    "kimik3": "kimi-k3", "minimaxm2.5": "minimax-m2.5", "minimaxm2.7": "minimax-m2.7", "minimaxm3": "minimax-m3",
    "glm5": "glm-5", "glm5.1": "glm-5.1", "glm5.2": "glm-5.2",
}  # fmt: skip


def _is_inferencex(document: Document) -> bool:
    """An entry of agg_bmk.json, one of agents' sessions among them, or a row of the app's API."""
    of_a_run = "hw" in document and ("tput_per_gpu" in document or "request_metrics" in document)
    return of_a_run or ("hardware" in document and isinstance(document.get("metrics"), Mapping))


def _inferencex_runs(document: Document, file: str) -> Runs:
    """Seconds, and lengths of 80 to 100% of the nominal ones; sessions have the means over their turns.

    A run's own file has its figures at the top, the app's API in `metrics`, an aggregate of sessions in
    `request_metrics`.
    """
    model = str(_at(document, "model") or "")
    model = model.rpartition("/")[2] if model.startswith("/") else model
    sessions = "agentic" in str(_at(document, "scenario_type benchmark_type"))
    inputs = _number(document, "request_metrics.tokens.input.mean isl")
    outputs = _number(document, "request_metrics.tokens.output_actual.mean osl")
    cells = {
        "accelerator": str(_at(document, "hw hardware")).partition("-")[0],
        "engine": str(_at(document, "framework") or ""),
        "engine_version": str(_at(document, "image") or "").replace("#", "/"),
        "precision": str(_at(document, "precision") or ""),
        "model": _INFERENCEX_MODELS.get(str(_at(document, "infmax_model_prefix model")), model),
        # Rows of the API have none where sessions were replayed.
        "input_len": _tokens(inputs) if inputs else "",
        "output_len": _tokens(outputs) if outputs else "",
        "concurrency": _tokens(_needed(document, file, "conc")),
        "spec_decode": str(_at(document, "spec_decoding spec_method") or "none"),
        "disagg": str(document.get("disagg", False)),
        "scenario": "agentic sessions, closed loop" if sessions else "",
        "notes": "" if sessions else "random lengths 80-100%",
        "date": str(_at(document, "date") or ""),
        "source_ref": str(_at(document, "run_url") or ""),
        # Its client and recipes are those of the nightly runs.
        "protocol": "inferencemax_runs_mantile",
    }
    cells |= _inferencex_layout(document, file, cells["notes"])
    # A run without a rate is no result; as zero it is counted among the rows that cannot be used.
    rate = _number(document, "request_metrics.throughput.per_gpu.total_tput_tps tput_per_gpu metrics.tput_per_gpu")
    metrics = [("total_tokens_per_s_per_gpu", "tok/s/gpu (in+out)", rate or 0.0)]
    joules = _number(document, "joules_per_output_token metrics.joules_per_output_token")
    if joules is not None and _at(document, "power_valid metrics.power_valid") != 0:
        metrics.append(("joules_per_output_token", "J/tok", joules))
    for ours, theirs in (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el")):
        paths = f"request_metrics.latency.{theirs}.{{}} {{}}_{theirs} metrics.{{}}_{theirs}"
        metrics += _latencies(document, "s", **{ours: paths})
    yield cells, metrics


def _inferencex_layout(document: Document, file: str, notes: str) -> Cells:
    """Rows of the API have both sides' layout, which are one where nothing is apart, and their counts of GPUs are then
    products of widths that overlap."""
    if not _is_true(document.get("disagg")):
        width = _needed(document, file, "tp decode_tp")
        spread, stages = (int(_number(document, paths) or 1) for paths in ("ep decode_ep", "pp metrics.pp"))
        layout = f"TP{int(width)}EP{spread}" + f"PP{stages}" * (stages > 1)
        attention = "DPA" * _is_true(_at(document, "dp_attention decode_dp_attention"))
        return {"tp": _tokens(width), "num_accelerators": _tokens(width * stages), "parallelism": layout + attention}
    layouts, counted, gpus = [], [], 0.0
    for side in ("prefill", "decode"):
        workers, width, spread = (int(_number(document, f"{side}_{name}") or 1) for name in ("num_workers", "tp", "ep"))
        layouts.append(f"{side[0].upper()}:{workers}xTP{width}EP{spread}")
        count = _needed(document, file, f"num_{side}_gpu")
        counted.append(f"{side} {int(count)} GPUs dp_attention={_is_true(document.get(f'{side}_dp_attention'))}")
        gpus += count
    return {
        "parallelism": " ".join(layouts), "num_accelerators": _tokens(gpus), "tp": _tokens(gpus),
        "notes": f"{', '.join(counted)}; {notes}",
    }  # fmt: skip


# Points of `crosstie bench` that no prediction is of: clients that were never all at work, conversations, whose prompts
# a cache serves in part, and rates that change.
_NOT_COMPARED = ("unsettled", "sessions", "schedule")
_BENCH_RATES = (
    (*_RATE, "metrics.output_tokens_per_s.value"),
    ("gpu_power_w_avg", "W", "metrics.power_w_per_gpu.value"),
    ("joules_per_output_token", "J/tok", "metrics.joules_per_output_token.value"),
)


def _bench_runs(document: Document, file: str) -> Runs:
    """`crosstie bench`: every load on every endpoint that was measured to its end."""
    if document["crosstie_bench"] != 1:
        raise BadData(file, "crosstie_bench", f"is {document['crosstie_bench']}; this version reads 1")
    date = {"date": str(document.get("date", ""))}
    try:
        points = [
            (point, date | endpoint["conditions"] | _marked(endpoint) | point["columns"])
            for endpoint in document["endpoints"]
            for point in endpoint["points"]
            if point["complete"] and point["metrics"] and point.get("arrivals") not in _NOT_COMPARED
        ]
    except (KeyError, TypeError) as error:
        raise BadData(file, "endpoints", f"are not as crosstie bench writes them: {error}") from None
    for point, cells in points:
        rates = [(name, unit, _number(point, path)) for name, unit, path in _BENCH_RATES]
        # A client that was slow saw first tokens late.
        seen = ("tpot",) if point.get("bent") else ("ttft", "tpot", "e2e")
        latencies = _latencies(point, "s", **{name: f"metrics.{name}_s_{{}}.value" for name in seen})
        yield cells, latencies + [(name, unit, value) for name, unit, value in rates if value is not None]


def _marked(endpoint: Document) -> Cells:
    return {"emulated": "yes"} if endpoint.get("emulated") else {}


_LINE = re.compile(r"^\s*(.+?)\s*:\s*(.*?)\s*$", re.MULTILINE)


def _mlperf_runs(document: Document, file: str) -> Runs:
    """mlperf_log_summary.txt: lengths and limits are those of the model's data set."""
    mode = str(document.get("mode", ""))
    if mode not in ("PerformanceOnly", "Performance"):
        raise BadData(file, "Mode", f"is '{mode}'; a performance run is read")
    if "INVALID" in str(document.get("result is", "")):
        raise BadData(file, "Result is", "INVALID by MLPerf's own rules")
    try:
        rate = float(str(document.get("completed tokens per second") or document.get("tokens per second")))
    except ValueError:
        raise BadData(file, "Tokens per second", "is missing: is it a language model's log?") from None
    yield {"scenario": str(document.get("scenario", ""))}, [(*_RATE, rate)]


_MLPERF = BenchmarkTool("MLPerf's mlperf_log_summary.txt", lambda document: False, _mlperf_runs)
_TOOLS = (
    BenchmarkTool(
        "guidellm", lambda d: isinstance(d.get("benchmarks"), list) and bool(d["benchmarks"]), _guidellm_runs
    ),
    BenchmarkTool("InferenceX", _is_inferencex, _inferencex_runs),
    BenchmarkTool("AIPerf", lambda d: "aiperf_version" in d or "time_to_first_token" in d, _aiperf_runs),
    BenchmarkTool(_BENCH, lambda d: "crosstie_bench" in d, _bench_runs),
    BenchmarkTool("sglang.bench_serving", lambda d: "output_throughput" in d and "dataset_name" in d, _flat_runs),
    BenchmarkTool("vllm bench serve", lambda d: "output_throughput" in d and "model_id" in d, _flat_runs),
)
