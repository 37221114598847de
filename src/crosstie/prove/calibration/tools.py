"""Result files of benchmark tools, unedited: each told by what it holds, and turned into rows of the long format.

What a file does not say, such as the accelerator, is given beside it; nothing is guessed.
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
# Ours, and the words that tools have for each.
_STATISTICS = {"mean": ("mean", "avg"), "p50": ("median", "p50"), "p90": ("p90",), "p95": ("p95",), "p99": ("p99",)}
_BENCH = "crosstie bench"
# In answers of emulated replicas, which some tools keep.
_EMULATED = (FINGERPRINT, "emulated by Crosstie", "emulated by crosstie")
# Latencies, ours and as most tools call them.
_LATENCIES = (("ttft", "ttft"), ("tpot", "tpot"), ("e2e", "e2el"))


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
            cells = conditions | marked | {name: value for name, value in given.items() if value}
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
    found = text_config(folder)
    is_path = given["model"].startswith((".", "/", "~")) or given["model"].endswith(".json")
    # A folder does not hide a model of the catalog that has its name.
    return {**given, "model": found.name if is_path else given["model"], "model_config": found.text}


def is_emulated(path: Path, text: str) -> bool:
    """Whether results are of emulated replicas, at least in part, whoever wrote them. A file that has nothing of what
    the replicas answered, neither texts nor fingerprints, cannot tell."""
    if "MLPerf Results Summary" in text[:400]:
        return False
    if is_tool_file(text):
        return any(map(says_emulated, _decoded(path, text)))
    rows = csv.DictReader(io.StringIO(text, newline=""))
    return "emulated" in (rows.fieldnames or ()) and any(row["emulated"] == "yes" for row in rows)


def says_emulated(value: Any) -> bool:
    """A key `emulated` that says so, or an emulated replica's own words or fingerprint, however deep."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            if one.get("emulated"):
                return True
            left += one.values()
        elif isinstance(one, list):
            left += one
        elif isinstance(one, str) and any(mark in one for mark in _EMULATED):
            return True
    return False


def _documents(path: Path, text: str) -> Iterator[tuple[BenchmarkTool, Document]]:
    if "MLPerf Results Summary" in text[:400]:
        yield _MLPERF, _summary(text)
        return
    for document in _decoded(path, text):
        found = next((tool for tool in _TOOLS if isinstance(document, Mapping) and tool.holds(document)), None)
        if found is None:
            known = ", ".join([*(tool.name for tool in _TOOLS), _MLPERF.name])
            raise BadData(str(path), "", f"is no result file of {known}, nor a table of results")
        yield found, document


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


def _number(document: Document, *keys: str) -> float | None:
    """The first of the keys that is a positive number."""
    for key in keys:
        value = document.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
            return float(value)
    return None


def _needed(document: Document, file: str, *keys: str) -> float:
    value = _number(document, *keys)
    if value is None:
        raise BadData(file, keys[0], "is missing or no positive number")
    return value


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


def _flat_runs(document: Document, file: str) -> Runs:
    """`vllm bench serve` and `sglang.bench_serving`, which grew out of one script."""
    completed = _needed(document, file, "completed")
    inputs = _needed(document, file, "total_input_tokens") / completed
    outputs = _needed(document, file, "total_output_tokens") / completed
    prompts = _number(document, "num_prompts") or completed
    cells = _load(document.get("request_rate"), document.get("max_concurrency"), prompts)
    cells |= {"input_len": _tokens(inputs), "output_len": _tokens(outputs), "precision": ""}
    server = document.get("server_info")
    server = server if isinstance(server, Mapping) else {}
    model = document.get("model_id") or server.get("model_path") or document.get("model")
    if isinstance(model, str):
        cells["model"] = model
    engine = str(document.get("backend") or document.get("endpoint_type") or "").partition("-")[0]
    if engine in ("vllm", "sglang", "trt", "tensorrt"):
        cells["engine"] = {"trt": "tensorrt-llm", "tensorrt": "tensorrt-llm"}.get(engine, engine)
    if _number(server, "tp_size"):
        cells["tp"] = _tokens(_needed(server, file, "tp_size"))
    ratio = document.get("random_range_ratio")
    nominal = _number(document, "random_input_len"), _number(document, "random_output_len")
    if document.get("dataset_name") in ("random", "random-ids") and isinstance(ratio, int | float) and all(nominal):
        cells |= {"input_len": _tokens(nominal[0] or 1), "output_len": _tokens(nominal[1] or 1)}
        cells["notes"] = f"random lengths {min(max(round(100 * ratio), 1), 100)}-100%"
    metrics = [("output_tokens_per_s_total", "tok/s", _needed(document, file, "output_throughput"))]
    for ours, theirs in (*_LATENCIES, ("e2e", "e2e_latency")):
        metrics += _statistics(ours, "ms", document, f"{{}}_{theirs}_ms")
    yield cells, metrics


def _aiperf_runs(document: Document, file: str) -> Runs:
    version = str(document.get("schema_version") or "1.0")
    if version.partition(".")[0] != "1":
        raise BadData(file, "schema_version", f"is {version}; AIPerf's 1.x is read")
    if document.get("is_complete") is False or document.get("was_cancelled"):
        raise BadData(file, "", "AIPerf says that the run did not finish")

    def of(name: str) -> Document:
        value = document.get(name)
        return value if isinstance(value, Mapping) else {}

    config = of("input_config")
    phases = [phase for phase in config.get("phases") or [config] if _found(phase, "kind") != "warmup"]
    if len(phases) != 1:
        raise BadData(file, "input_config.phases", f"has {len(phases)} that were measured; one can be compared")
    # A concurrency beside a rate is a limit.
    rate = _found(phases[0], "rate") or _found(phases[0], "request_rate")
    clients = None if rate else _found(phases[0], "concurrency")
    cells = _load(rate, clients, _number(of("request_count"), "avg"))
    cells |= {"input_len": _tokens(_needed(of("input_sequence_length"), file, "avg")), "precision": ""}
    cells["output_len"] = _tokens(_needed(of("output_sequence_length"), file, "avg"))
    models = _found(config, "model_names") or _found(config, "models")
    name = models[0] if isinstance(models, list) and isinstance(models[0], str) else _found(models, "name")
    if isinstance(name, str):
        cells["model"] = name
    metrics = [("output_tokens_per_s_total", "tok/s", _needed(of("output_token_throughput"), file, "avg"))]
    for ours, theirs in (("ttft", "time_to_first_token"), ("tpot", "inter_token_latency"), ("e2e", "request_latency")):
        metrics += _statistics(ours, str(of(theirs).get("unit", "ms")), of(theirs))
    yield cells, metrics


def _found(value: Any, key: str) -> Any:
    """The first value of that key that is not empty, however deep."""
    if isinstance(value, Mapping):
        if value.get(key):
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        return next((found for inner in value if (found := _found(inner, key)) is not None), None)
    return None


def _guidellm_runs(document: Document, file: str) -> Runs:
    about = document.get("metadata")
    version = about.get("version", 1) if isinstance(about, Mapping) else 1
    if version not in (1, 2):
        raise BadData(file, "metadata.version", f"is {version}; guidellm's reports of version 1 and 2 are read")
    for benchmark in document["benchmarks"]:
        every = benchmark.get("metrics") if isinstance(benchmark, Mapping) else None
        if not isinstance(every, Mapping):
            raise BadData(file, "benchmarks", "has one without metrics")

        def of(name: str, every: Document = every) -> Document:
            value = every.get(name)
            value = value.get("successful") if isinstance(value, Mapping) else None
            return value if isinstance(value, Mapping) else {}

        strategy = _found(benchmark.get("config") or benchmark.get("args"), "strategy")
        strategy = strategy if isinstance(strategy, Mapping) else {}
        kind = str(strategy.get("type_", ""))
        if kind in ("constant", "poisson", "async"):
            cells = {"concurrency": f"rate {_needed(strategy, file, 'rate'):g} req/s"}
        else:
            clients = 1.0 if kind == "synchronous" else _number(strategy, "streams", "max_concurrency")
            cells = {"concurrency": _tokens(clients or _needed(of("request_concurrency"), file, "mean"))}
        cells |= {"input_len": _tokens(_needed(of("prompt_token_count"), file, "mean")), "precision": ""}
        cells["output_len"] = _tokens(_needed(of("output_token_count"), file, "mean"))
        prompts = _number(every.get("request_totals") or {}, "successful")
        cells |= {"num_prompts": _tokens(prompts)} if prompts else {}
        model = _found(document.get("config") or document.get("args") or {}, "model") or _found(benchmark, "model")
        if isinstance(model, str):
            cells["model"] = model
        metrics = [("output_tokens_per_s_total", "tok/s", _needed(of("output_tokens_per_second"), file, "mean"))]
        # Its "time per output token" holds the first one; the time between tokens is what others call TPOT.
        for ours, theirs in (("ttft", "time_to_first_token_ms"), ("tpot", "inter_token_latency_ms")):
            percentiles = of(theirs).get("percentiles")
            values = {**(percentiles if isinstance(percentiles, Mapping) else {}), **of(theirs)}
            metrics += _statistics(ours, "ms", values)
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
    """Seconds, and lengths of 80 to 100% of the nominal ones; sessions have the means over their turns."""
    document = _of_sessions(_of_the_api(document))
    model = str(document.get("model", ""))
    model = model.rpartition("/")[2] if model.startswith("/") else model
    sessions = "agentic" in str(document.get("scenario_type") or document.get("benchmark_type") or "")
    lengths = {ours: _number(document, theirs) for ours, theirs in (("input_len", "isl"), ("output_len", "osl"))}
    cells = {
        "accelerator": str(document["hw"]).partition("-")[0],
        "engine": str(document.get("framework", "")),
        "engine_version": str(document.get("image") or "").replace("#", "/"),
        "precision": str(document.get("precision", "")),
        "model": _INFERENCEX_MODELS.get(str(document.get("infmax_model_prefix")), model),
        # Rows of the API have none where sessions were replayed.
        **{name: _tokens(length) if length else "" for name, length in lengths.items()},
        "concurrency": _tokens(_needed(document, file, "conc")),
        "spec_decode": str(document.get("spec_decoding") or "none"),
        "disagg": str(document.get("disagg", False)),
        "scenario": "agentic sessions, closed loop" if sessions else "",
        "notes": "" if sessions else "random lengths 80-100%",
        "date": str(document.get("date") or ""),
        "source_ref": str(document.get("run_url") or ""),
        # Its client and recipes are those of the nightly runs.
        "protocol": "inferencemax_runs_mantile",
    }
    cells |= _inferencex_layout(document, file, cells["notes"])
    # A run without a rate is no result; as zero it is counted among the rows that cannot be used.
    rate = _number(document, "tput_per_gpu") or 0.0
    metrics = [("total_tokens_per_s_per_gpu", "tok/s/gpu (in+out)", rate)]
    energy = _number(document, "joules_per_output_token")
    if energy is not None and document.get("power_valid", 1):
        metrics.append(("joules_per_output_token", "J/tok", energy))
    for ours, theirs in _LATENCIES:
        metrics += _statistics(ours, "s", document, f"{{}}_{theirs}")
    yield cells, metrics


def _of_the_api(document: Document) -> Document:
    """A row of the app's API under the keys that a run's own file has."""
    if "hardware" not in document:
        return document
    own = {"hw": document["hardware"], "spec_decoding": document.get("spec_method")}
    own["infmax_model_prefix"] = document.get("model")
    if not _is_true(document.get("disagg")):
        # Both sides stand there as one, and its counts of GPUs are products of widths that overlap.
        own |= {name: document.get(f"decode_{name}") for name in ("tp", "ep", "dp_attention")}
    return {**document["metrics"], **document, **own}


def _of_sessions(document: Document) -> Document:
    """An aggregate of agents' sessions with its nested figures at the top, as other runs have them."""
    nested = document.get("request_metrics")
    if not isinstance(nested, Mapping):
        return document

    def of(*path: str) -> Document:
        found: Any = nested
        for key in path:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    flat = {f"{said}_{name}": v for _, name in _LATENCIES for said, v in of("latency", name).items()}
    flat |= {"isl": of("tokens", "input").get("mean"), "osl": of("tokens", "output_actual").get("mean")}
    flat["tput_per_gpu"] = of("throughput", "per_gpu").get("total_tput_tps")
    return {**document, **flat}


def _inferencex_layout(document: Document, file: str, notes: str) -> Cells:
    if not _is_true(document.get("disagg")):
        width, stages = _needed(document, file, "tp"), int(_number(document, "pp") or 1)
        layout = f"TP{int(width)}EP{int(_number(document, 'ep') or 1)}" + f"PP{stages}" * (stages > 1)
        attention = "DPA" * _is_true(document.get("dp_attention"))
        return {"tp": _tokens(width), "num_accelerators": _tokens(width * stages), "parallelism": layout + attention}
    sides = [
        f"{side[0].upper()}:{int(_number(document, f'{side}_num_workers') or 1)}"
        f"xTP{int(_number(document, f'{side}_tp') or 1)}EP{int(_number(document, f'{side}_ep') or 1)}"
        for side in ("prefill", "decode")
    ]
    counts = [_needed(document, file, f"num_{side}_gpu") for side in ("prefill", "decode")]
    said = ", ".join(
        f"{side} {int(count)} GPUs dp_attention={_is_true(document.get(f'{side}_dp_attention'))}"
        for side, count in zip(("prefill", "decode"), counts, strict=True)
    )
    gpus = _tokens(sum(counts))
    return {"parallelism": " ".join(sides), "num_accelerators": gpus, "tp": gpus, "notes": f"{said}; {notes}"}


def _statistics(ours: str, unit: str, values: Document, named: str = "{}") -> Metrics:
    """Each statistic of one latency that is there, under the name that the tool gives it."""
    found = {
        statistic: _number(values, *(named.format(one) for one in said)) for statistic, said in _STATISTICS.items()
    }
    return [(f"{ours}_ms_{statistic}", unit, value) for statistic, value in found.items() if value is not None]


def _replay_runs(document: Document, file: str) -> Runs:
    pools = document["pools"]
    if len(pools) != 1:
        names = ", ".join(str(pool.get("name", "")) for pool in pools)
        raise BadData(file, "pools", f"are {names or 'none'}: a replay against one pool can be compared")
    (pool,) = pools
    requests = _needed(pool, file, "requests")
    rate = requests / _needed(document, file, "seconds")
    cells = {
        "concurrency": f"rate {rate:g} req/s",
        "num_prompts": _tokens(requests),
        "input_len": _tokens(_needed(pool, file, "input_tokens") / requests),
        "output_len": _tokens(_needed(pool, file, "output_tokens") / requests),
        "precision": "",
    }
    yield cells, [row for name in ("ttft", "tpot") for row in _statistics(name, "s", pool.get(f"{name}_s") or {})]


def _marked(endpoint: Document) -> Cells:
    return {"emulated": "yes"} if endpoint.get("emulated") else {}


def _bench_runs(document: Document, file: str) -> Runs:
    """`crosstie bench`: every load on every endpoint that was measured to its end."""
    if document["crosstie_bench"] != 1:
        raise BadData(file, "crosstie_bench", f"is {document['crosstie_bench']}; this version reads 1")
    try:
        found = [
            (endpoint["conditions"] | _marked(endpoint), point["columns"], _the_servers(point))
            for endpoint in document["endpoints"]
            for point in endpoint["points"]
            if point["complete"] and point["metrics"] and point.get("arrivals") not in _NOT_COMPARED
        ]
    except (KeyError, TypeError) as error:
        raise BadData(file, "endpoints", f"are not as crosstie bench writes them: {error}") from None
    for conditions, columns, measured in found:
        cells = {"precision": "", "date": str(document.get("date", ""))} | {**conditions, **columns}
        numbers = {named: _number(measured.get(theirs) or {}, "value") for named, theirs in _BENCH_METRICS.items()}
        yield cells, [(name, unit, value) for (name, unit), value in numbers.items() if value is not None]


# Points of `crosstie bench` that no prediction is of: clients that were never all at work, conversations, whose prompts
# a cache serves in part, and rates that change.
_NOT_COMPARED = ("unsettled", "sessions", "schedule")


def _the_servers(point: Document) -> Document:
    """Without what the client itself has bent: it saw first tokens late."""
    bent = point.get("bent")
    return {name: one for name, one in point["metrics"].items() if not (bent and name.startswith(("ttft", "e2e")))}


_BENCH_METRICS = {
    (f"{name}_ms_{statistic}", "s"): f"{name}_s_{statistic}"
    for name in ("ttft", "tpot", "e2e")
    for statistic in _STATISTICS
} | {
    ("output_tokens_per_s_total", "tok/s"): "output_tokens_per_s",
    ("gpu_power_w_avg", "W"): "power_w_per_gpu",
    ("joules_per_output_token", "J/tok"): "joules_per_output_token",
}

_LINE = re.compile(r"^\s*(.+?)\s*:\s*(.*?)\s*$", re.MULTILINE)


def _summary(text: str) -> Document:
    return {key.casefold(): value for key, value in _LINE.findall(text)}


def _mlperf_runs(document: Document, file: str) -> Runs:
    """mlperf_log_summary.txt: lengths and limits are those of the model's data set."""
    scenario = str(document.get("scenario", ""))
    if str(document.get("mode", "")) not in ("PerformanceOnly", "Performance"):
        raise BadData(file, "Mode", f"is '{document.get('mode', '')}'; a performance run is read")
    if "INVALID" in str(document.get("result is", "")):
        raise BadData(file, "Result is", "INVALID by MLPerf's own rules")
    said = document.get("completed tokens per second") or document.get("tokens per second")
    try:
        rate = float(str(said))
    except ValueError:
        raise BadData(file, "Tokens per second", "is missing: is it a language model's log?") from None
    cells = {"scenario": scenario, "input_len": "", "output_len": "", "concurrency": "", "precision": ""}
    yield cells, [("output_tokens_per_s_total", "tok/s", rate)]


_MLPERF = BenchmarkTool("MLPerf's mlperf_log_summary.txt", lambda document: False, _mlperf_runs)
_TOOLS = (
    BenchmarkTool(
        "guidellm", lambda d: isinstance(d.get("benchmarks"), list) and bool(d["benchmarks"]), _guidellm_runs
    ),
    BenchmarkTool("InferenceX", _is_inferencex, _inferencex_runs),
    BenchmarkTool("AIPerf", lambda d: "aiperf_version" in d or "time_to_first_token" in d, _aiperf_runs),
    BenchmarkTool("crosstie replay", lambda d: isinstance(d.get("pools"), list) and "late_s" in d, _replay_runs),
    BenchmarkTool(_BENCH, lambda d: "crosstie_bench" in d, _bench_runs),
    BenchmarkTool("sglang.bench_serving", lambda d: "output_throughput" in d and "dataset_name" in d, _flat_runs),
    BenchmarkTool("vllm bench serve", lambda d: "output_throughput" in d and "model_id" in d, _flat_runs),
)
