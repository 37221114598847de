"""Traces of several profilers as one: what ran on each GPU and when, who launched it, and where steps begin.

Told apart by what is in the file, never by its name. Times are seconds from the first event.
"""

import csv
import gzip
import io
import json
import re
import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from crosstie.core.errors import BadData

# Larger than any trace of a few steps, and what fits in memory several times.
LARGEST_BYTES = 4 * 1024**3


class GpuEvent(msgspec.Struct, frozen=True, kw_only=True):
    """Something that ran on a GPU."""

    name: str
    start_s: float
    end_s: float
    device: str = "0"
    # "kernel" or "copy", which is a copy or a fill that no kernel does.
    kind: str = "kernel"
    # When the host's call that launched it was over, where the trace says so.
    launched_s: float | None = None


class StepMark(msgspec.Struct, frozen=True, kw_only=True):
    """A step that the trace itself marks: the profiler's, or an engine's with what the step carries."""

    start_s: float
    end_s: float
    # None: the host's own time, in which it launched the step.
    device: str | None = None
    sequences: int | None = None
    prompt_tokens: int | None = None


class ProfilerTrace(msgspec.Struct, frozen=True, kw_only=True):
    file: str
    # The program that wrote it, such as "torch.profiler".
    made_by: str
    # In the order of their start.
    events: list[GpuEvent]
    # In the order of their start; on the GPU where the trace has them there.
    marks: list[StepMark] = []
    # Whether Python's calls were recorded, which slows the host several times.
    has_stacks: bool = False
    # Without times of their own: (name, calls, seconds); then there are no events.
    totals: list[tuple[str, int, float]] = []


def read_trace(path: Path) -> ProfilerTrace:
    try:
        if not path.exists():
            raise BadData(path, "", "no such file")
        if path.is_dir():
            raise BadData(path, "", "a folder; name the trace in it")
        if path.stat().st_size > LARGEST_BYTES:
            raise BadData(path, "", "larger than 4 GiB; profile a few steps")
        with path.open("rb") as opened:
            begin = opened.read(16)
        if begin.startswith(b"SQLite format 3\0"):
            return _sqlite(path)
        raw = path.read_bytes()
        if begin.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise BadData(path, "", f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        hint = "; of rocprofv3, take --output-format csv or json" if raw[:1] == b"\n" else ""
        raise BadData(path, "", f"neither JSON, CSV nor SQLite: not a trace that is known{hint}") from None
    trace = _json(path, text) if text.lstrip()[:1] in ("{", "[") else _csv(path, text)
    if not trace.events and not trace.totals:
        raise BadData(path, "", f"{trace.made_by}: nothing in it ran on a GPU")
    return trace


def _made(
    path: Path, made_by: str, events: Iterable[GpuEvent], marks: Iterable[StepMark] = (), has_stacks: bool = False
) -> ProfilerTrace:
    ordered = sorted(events, key=lambda event: (event.start_s, event.end_s))
    begin = ordered[0].start_s if ordered else 0.0
    steps = [
        msgspec.structs.replace(step_mark, start_s=step_mark.start_s - begin, end_s=step_mark.end_s - begin)
        for step_mark in sorted(marks, key=lambda mark: mark.start_s)
    ]
    moved = [
        msgspec.structs.replace(
            gpu_event, start_s=gpu_event.start_s - begin, end_s=gpu_event.end_s - begin,
            launched_s=None if gpu_event.launched_s is None else gpu_event.launched_s - begin,
        )
        for gpu_event in ordered
    ]  # fmt: skip
    return ProfilerTrace(file=str(path), made_by=made_by, events=moved, marks=steps, has_stacks=has_stacks)


# --- Chrome traces of torch.profiler, on CUDA and ROCm alike

_ON_GPU = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "copy"}
_CALLS = ("cuda_runtime", "cuda_driver", "hip_runtime", "hip_driver")
# The profiler's own steps, and vLLM's: prompts and their tokens, sequences and theirs. Seen as `context_1(1050)` in
# vLLM 0.24.0, as `1(888_788544)` and `9(sq8155sk8430sqsq...)` in AMD-AGI/TraceLens' traces.
_STEP = re.compile(
    r"ProfilerStep#\d+|"
    r"execute_(?:\d+_)?context_\d+\((?:sq)?(?P<prompt>\d+)\w*\)_generation_(?P<sequences>\d+)\(\w*\)"
)


def _json(path: Path, text: str) -> ProfilerTrace:
    try:
        document = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadData(path, "", f"not valid JSON: {error}") from None
    if isinstance(document, dict) and "rocprofiler-sdk-tool" in document:
        return _rocprofv3(path, document["rocprofiler-sdk-tool"])
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise BadData(path, "traceEvents", "missing: neither a Chrome trace nor rocprofv3's JSON")
    try:
        return _chrome(path, events)
    except (KeyError, TypeError, ValueError) as error:
        raise BadData(path, "traceEvents", f"an event that cannot be read: {error!r}") from None


def _chrome(path: Path, events: list[dict[str, Any]]) -> ProfilerTrace:
    calls: dict[Any, float] = {}
    on_gpu: list[StepMark] = []
    on_host: list[StepMark] = []
    has_stacks = False
    for event in events:
        if event.get("ph") != "X":
            continue
        category = event.get("cat", "")
        if category in _CALLS and "correlation" in event.get("args", {}):
            calls[event["args"]["correlation"]] = (float(event["ts"]) + float(event["dur"])) * 1e-6
        elif category == "python_function":
            has_stacks = True
        elif category == "gpu_user_annotation" and (step := _STEP.fullmatch(event.get("name", ""))):
            on_gpu.append(_mark(event, step, str(event.get("args", {}).get("device", event.get("pid", 0)))))
        elif category == "user_annotation" and (step := _STEP.fullmatch(event.get("name", ""))):
            on_host.append(_mark(event, step, None))
    gpu_events = [
        GpuEvent(
            name=str(event["name"]), start_s=float(event["ts"]) * 1e-6,
            end_s=(float(event["ts"]) + float(event["dur"])) * 1e-6,
            device=str(event.get("args", {}).get("device", event.get("pid", 0))), kind=_ON_GPU[event["cat"]],
            launched_s=calls.get(event.get("args", {}).get("correlation")),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in _ON_GPU
    ]  # fmt: skip
    return _made(path, "torch.profiler", gpu_events, on_gpu or on_host, has_stacks)


def _mark(event: Mapping[str, Any], step: re.Match[str], device: str | None) -> StepMark:
    start_us, sequences, prompt = float(event["ts"]), step["sequences"], step["prompt"]
    return StepMark(
        start_s=start_us * 1e-6,
        end_s=(start_us + float(event["dur"])) * 1e-6,
        device=device,
        sequences=None if sequences is None else int(sequences),
        prompt_tokens=None if prompt is None else int(prompt),
    )


# --- rocprofv3: JSON, CSV and its SQLite (rocpd)


def _rocprofv3(path: Path, runs: Any) -> ProfilerTrace:
    """One object a process, in a list; kernels by the number of their symbol."""
    try:
        events = [event for run in (runs if isinstance(runs, list) else [runs]) for event in _of_process(run)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadData(path, "buffer_records", f"not as rocprofv3 writes it: {error!r}") from None
    return _made(path, "rocprofv3", events)


def _of_process(run: Mapping[str, Any]) -> Iterable[GpuEvent]:
    symbols = {one["kernel_id"]: _symbol(one) for one in run.get("kernel_symbols", [])}
    records = run["buffer_records"]
    calls = {_correlation(one): float(one["end_timestamp"]) * 1e-9 for one in records.get("hip_api", [])}
    for one in records.get("kernel_dispatch", []):
        about = one["dispatch_info"]
        yield GpuEvent(
            name=symbols.get(about["kernel_id"], f"kernel {about['kernel_id']}"),
            start_s=float(one["start_timestamp"]) * 1e-9, end_s=float(one["end_timestamp"]) * 1e-9,
            device=str(about.get("agent_id", {}).get("handle", 0)), launched_s=calls.get(_correlation(one)),
        )  # fmt: skip
    for one in records.get("memory_copy", []):
        yield GpuEvent(
            name="memory copy", kind="copy", start_s=float(one["start_timestamp"]) * 1e-9,
            end_s=float(one["end_timestamp"]) * 1e-9, device=str(one.get("dst_agent_id", {}).get("handle", 0)),
        )  # fmt: skip


def _symbol(one: Mapping[str, Any]) -> str:
    names = ("truncated_kernel_name", "formatted_kernel_name", "demangled_kernel_name", "kernel_name")
    # The longest says most: a truncated name has lost its template's arguments.
    return max((str(one.get(name) or "") for name in names), key=len) or f"kernel {one['kernel_id']}"


def _correlation(one: Mapping[str, Any]) -> Any:
    return one.get("correlation_id", {}).get("internal")


def _csv(path: Path, text: str) -> ProfilerTrace:
    """rocprofv3's kernel_trace, memory_copy_trace and kernel_stats, and what `nsys stats --format csv` prints."""
    lines = text.splitlines()
    # nsys prints a line or two about itself before the table.
    start = next((i for i, line in enumerate(lines) if any(mark in line for mark in _MARKS)), None)
    if start is None:
        raise BadData(path, "", "no table of a profiler that is known: rocprofv3's or nsys' CSV, by their columns")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[start:]))))
    columns = set(rows[0]) if rows else set()
    try:
        if "Start_Timestamp" in columns:
            return _made(path, "rocprofv3", [_rocprofv3_row(row) for row in rows])
        if "Start (ns)" in columns:
            return _made(path, "Nsight Systems", [_nsys_row(row) for row in rows if row["Duration (ns)"]])
        for name, calls, total, made_by in _TOTALS:
            if {name, calls, total} <= columns:
                totals = [(row[name], int(row[calls]), float(row[total]) * 1e-9) for row in rows if row[name]]
                return ProfilerTrace(file=str(path), made_by=made_by, events=[], totals=totals)
    except (KeyError, TypeError, ValueError) as error:
        raise BadData(path, "", f"a row that cannot be read: {error!r}") from None
    raise BadData(path, "", f"columns that are not known: {', '.join(sorted(map(str, columns)))[:80]}")


_MARKS = ("Start_Timestamp", "Start (ns)", "Total Time (ns)", "TotalDurationNs")
_TOTALS = (
    ("Name", "Instances", "Total Time (ns)", "Nsight Systems"),
    ("Name", "Calls", "TotalDurationNs", "rocprofv3"),
)


def _rocprofv3_row(row: Mapping[str, str]) -> GpuEvent:
    copies = "Direction" in row or "Kernel_Name" not in row
    return GpuEvent(
        name=row["Direction"] if "Direction" in row else row["Kernel_Name"], kind="copy" if copies else "kernel",
        start_s=int(row["Start_Timestamp"]) * 1e-9, end_s=int(row["End_Timestamp"]) * 1e-9,
        device=row.get("Agent_Id") or row.get("Destination_Agent_Id") or "0",
    )  # fmt: skip


def _nsys_row(row: Mapping[str, str]) -> GpuEvent:
    start = int(row["Start (ns)"]) * 1e-9
    copies = row["Name"].startswith(("[CUDA mem", "[CUDA Unified"))
    return GpuEvent(
        name=row["Name"], kind="copy" if copies else "kernel", start_s=start,
        end_s=start + int(row["Duration (ns)"]) * 1e-9, device=row.get("Device") or "0",
    )  # fmt: skip


# --- SQLite: `nsys export --type sqlite`, and rocprofv3's own database

_NSYS = (
    ('SELECT s.value, k.start, k."end", k.deviceId, k.correlationId FROM CUPTI_ACTIVITY_KIND_KERNEL k '
     "JOIN StringIds s ON s.id = k.demangledName", "kernel", "CUPTI_ACTIVITY_KIND_KERNEL"),
    ("SELECT 'memory copy', start, \"end\", deviceId, correlationId FROM CUPTI_ACTIVITY_KIND_MEMCPY", "copy",
     "CUPTI_ACTIVITY_KIND_MEMCPY"),
    ("SELECT 'memory fill', start, \"end\", deviceId, correlationId FROM CUPTI_ACTIVITY_KIND_MEMSET", "copy",
     "CUPTI_ACTIVITY_KIND_MEMSET"),
)  # fmt: skip
_ROCPD = (
    ('SELECT s.display_name, k.start, k."end", k.agent_id, NULL FROM rocpd_kernel_dispatch k '
     "JOIN rocpd_info_kernel_symbol s ON s.id = k.kernel_id", "kernel", "rocpd_kernel_dispatch"),
    ("SELECT 'memory copy', start, \"end\", dst_agent_id, NULL FROM rocpd_memory_copy", "copy", "rocpd_memory_copy"),
)  # fmt: skip


def _sqlite(path: Path) -> ProfilerTrace:
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as opened:
            named = {name for (name,) in opened.execute("SELECT name FROM sqlite_master")}
            if "CUPTI_ACTIVITY_KIND_KERNEL" in named:
                made_by, queries = "Nsight Systems", list(_NSYS)
            elif "rocpd_kernel_dispatch" in named:
                made_by, queries = "rocprofv3", list(_ROCPD)
            else:
                raise BadData(path, "", "a database without kernels: neither nsys' export nor rocprofv3's")
            calls: dict[Any, float] = {}
            if "CUPTI_ACTIVITY_KIND_RUNTIME" in named:
                asked = opened.execute('SELECT correlationId, "end" FROM CUPTI_ACTIVITY_KIND_RUNTIME')
                calls = {number: float(end) * 1e-9 for number, end in asked}
            events = [
                GpuEvent(
                    name=str(name), kind=kind, start_s=start * 1e-9, end_s=end * 1e-9, device=str(device),
                    launched_s=calls.get(number),
                )
                for query, kind, table in queries
                if table in named
                for name, start, end, device, number in opened.execute(query)
            ]  # fmt: skip
    except sqlite3.Error as error:
        raise BadData(path, "", f"not as its profiler writes it: {error}") from None
    return _made(path, made_by, events)
