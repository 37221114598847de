"""Measured results in the long format: one metric a row, read with nothing dropped in silence."""

import csv
import io
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from crosstie.catalog.reading import text_of
from crosstie.core.errors import BadData
from crosstie.prove.calibration.tools import is_tool_file, tool_rows

REQUIRED = ("accelerator", "model", "precision", "engine", "input_len", "output_len", "concurrency",
            "metric", "unit", "value")  # fmt: skip
# What may differ between rows of one operating point.
_OF_THE_ROW = frozenset(("metric", "unit", "value", "source_ref", "qc_littles_law_ratio"))
# Measured, and no prediction: what one starts from.
_STARTED_FROM = ("spec_accept_len",)

_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}


@dataclass(frozen=True, slots=True)
class Metric:
    """What a row's number is: `kind` of ttft, tpot, e2e, throughput, batch, step, decode_step, prefill, energy or
    power."""

    kind: str
    statistic: str = "mean"
    per_gpu: bool = False
    with_input: bool = False


_TIMES = tuple(_SECONDS)
# Units of throughput: whether they are per GPU, and whether prompts count.
_RATES = {"tok/s": (False, False), "tok/s/gpu": (True, False), "tok/s (in+out)": (False, True),
          "tok/s/gpu (in+out)": (True, True)}  # fmt: skip
# What is predicted: the metric of a name, and the units that it may have.
_METRICS = {
    f"{kind}_ms_{said}": (Metric(kind, "p50" if said == "median" else said), _TIMES)
    for kind in ("ttft", "tpot", "e2e")
    for said in ("mean", "median", "p50", "p90", "p95", "p99")
}
for _unit, (_per_gpu, _total) in _RATES.items():
    _name = f"{'total' if _total else 'output'}_tokens_per_s_{'per_gpu' if _per_gpu else 'total'}"
    _METRICS[_name] = Metric("throughput", "mean", _per_gpu, _total), (_unit,)
_METRICS["batch_e2e_latency_s"] = Metric("batch"), ("s", "ms")
_METRICS["prefix_cache_hit_rate"] = Metric("hit"), ("share", "fraction", "ratio", "1", "")
_METRICS["mean_step_ms_derived"] = Metric("step"), _TIMES
_METRICS["joules_per_output_token"] = Metric("energy"), ("J/tok",)
_METRICS["gpu_power_w_avg"] = Metric("power"), ("W",)
_METRICS |= {f"{alone}_ms": (Metric(alone), _TIMES) for alone in ("decode_step", "prefill")}


def metric_of(name: str, unit: str) -> Metric | str:
    """The metric, or why a row of that name and unit cannot be used."""
    if name not in _METRICS:
        return f"metric {name} is not predicted"
    metric, units = _METRICS[name]
    if metric.kind == "throughput" and unit in _RATES and unit not in units:
        return f"metric {name}: its unit '{unit}' says otherwise"
    return metric if unit in units else f"metric {name}: unknown unit '{unit}'"


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    file: str
    line: int
    metric: Metric
    # Seconds, tokens per second, joules or watts.
    value: float


@dataclass(frozen=True, slots=True)
class UnusableRow:
    file: str
    line: int
    reason: str


@dataclass
class OperatingPoint:
    """One operating point: its conditions as written, and the rows measured there."""

    conditions: dict[str, str]
    rows: list[MeasuredRow] = field(default_factory=list)

    def __getitem__(self, column: str) -> str:
        return self.conditions.get(column, "")


@dataclass
class Results:
    points: list[OperatingPoint]
    unusable: list[UnusableRow]

    @property
    def rows(self) -> int:
        return sum(len(point.rows) for point in self.points) + len(self.unusable)


def read_results(*paths: str | Path, given: Mapping[str, str] | None = None) -> Results:
    """All rows of the files as operating points; rows that cannot be used, each with its reason.

    `given`: columns that files of benchmark tools do not have (tools.GIVEN).
    """
    points: dict[tuple[tuple[str, str], ...], OperatingPoint] = {}
    unusable: list[UnusableRow] = []
    # What was measured of a point that a prediction of it starts from.
    started: dict[tuple[tuple[str, str], ...], dict[str, str]] = {}
    for path in paths:
        for line, fields, ragged in _lines(Path(path), given or {}):
            row = (
                UnusableRow(str(path), line, "has more cells than the header")
                if ragged
                else _row(str(path), line, fields)
            )
            conditions = {name: value for name, value in fields.items() if value and name not in _OF_THE_ROW}
            # The run that a row is from tells repeated measurements apart.
            key = (*conditions.items(), ("source_ref", fields.get("source_ref", "")))
            if isinstance(row, UnusableRow):
                unusable.append(row)
                if fields.get("metric") in _STARTED_FROM:
                    started.setdefault(key, {})[fields["metric"]] = fields["value"]
                continue
            point = points.setdefault(key, OperatingPoint(conditions))
            point.rows.append(row)
    for key, measured in started.items():
        if key in points:
            points[key].conditions.update(measured)
    return Results(list(points.values()), unusable)


def _lines(path: Path, given: Mapping[str, str]) -> Iterator[tuple[int, dict[str, str], bool]]:
    """Line number, cells by column, and whether there were more of them than columns."""
    text = text_of(path)
    if is_tool_file(text):
        for number, cells in enumerate(tool_rows(path, text, given), start=1):
            yield number, cells, False
        return
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        columns = [name.strip() for name in reader.fieldnames or ()]
        reader.fieldnames = columns
        missing = [name for name in REQUIRED if name not in columns]
        if missing:
            raise BadData(str(path), "", f"lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}")
        repeated = sorted({name for name in columns if columns.count(name) > 1})
        if repeated:
            raise BadData(str(path), "", f"has the column {repeated[0]} twice")
        for fields in reader:
            extra = fields.pop(None, None)
            yield reader.line_num, {name: (value or "").strip() for name, value in fields.items()}, bool(extra)
    except csv.Error as error:
        raise BadData(str(path), f"line {reader.line_num}", str(error)) from None


def _row(file: str, line: int, fields: dict[str, str]) -> MeasuredRow | UnusableRow:
    metric = metric_of(fields["metric"], fields["unit"])
    if isinstance(metric, str):
        return UnusableRow(file, line, metric)
    try:
        value = float(fields["value"])
    except ValueError:
        return UnusableRow(file, line, "value is no number" if fields["value"] else "value is missing")
    if not math.isfinite(value) or value <= 0:
        return UnusableRow(file, line, "value is zero, negative or not finite")
    return MeasuredRow(file, line, metric, value * _SECONDS.get(fields["unit"], 1.0))
