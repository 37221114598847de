"""Rows of results as a user would write them, one plausible row to change things of."""

import csv
import io
from collections.abc import Iterable
from pathlib import Path

from crosstie.prove.calibration.results import REQUIRED, MeasuredRow, Metric, OperatingPoint, metric_of

BASE = {
    "accelerator": "h200",
    "model": "llama-3.1-8b",
    "precision": "bf16",
    "engine": "vllm",
    "input_len": "1024",
    "output_len": "128",
    "concurrency": "16",
    "metric": "output_tokens_per_s_total",
    "unit": "tok/s",
    "value": "2000",
}


def row(**changes: str) -> dict[str, str]:
    return {**BASE, **changes}


def text(rows: Iterable[dict[str, str]]) -> str:
    listed = list(rows)
    columns = list(dict.fromkeys([*REQUIRED, *(name for one in listed for name in one)]))
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, columns, restval="")
    writer.writeheader()
    writer.writerows(listed)
    return out.getvalue()


def written(path: Path, *rows: dict[str, str]) -> Path:
    path.write_text(text(rows), encoding="utf-8", newline="")
    return path


def point(**changes: str) -> OperatingPoint:
    """One operating point, without a file."""
    fields = row(**changes)
    metric = metric_of(fields["metric"], fields["unit"])
    assert isinstance(metric, Metric)
    return OperatingPoint(fields, [MeasuredRow("here.csv", 2, metric, float(fields["value"]))])
