"""Rows that are left out together, to learn how wrong an estimate is of what nobody has measured."""

import hashlib
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.calibration import CalibrationSubject, points_key
from crosstie.core.estimate import METRICS
from crosstie.perf.hardware import Array, Mask
from crosstie.prove.calibration.regression import Measurements
from crosstie.prove.calibration.results import OperatingPoint

_FOLDS = 5
_METRIC_OF = {"ttft": "ttft", "throughput": "throughput"}

# What a curve is the same in: one configuration at all its concurrencies, whenever it was run.
_OF_A_CURVE = ("source_id", "accelerator", "num_accelerators", "model", "precision", "engine", "parallelism", "tp",
               "input_len", "output_len", "scenario", "spec_decode", "disagg")  # fmt: skip


def left_out_groups(evidence: Measurements) -> dict[str, NDArray[np.str_]]:
    """What is left out to learn how wrong an estimate of each nearness is; kernels go with their accelerator."""
    subjects = [evidence.subjects[i] for i in evidence.origin]
    points = [evidence.cases[i].point if i < len(evidence.cases) else None for i in evidence.origin]
    layouts: dict[str, set[str]] = {}
    for key in map(points_key, evidence.subjects[: len(evidence.cases)]):
        layouts.setdefault(_without_layout(key), set()).add(key)

    def words(of: Callable[[CalibrationSubject], str], kernels: bool) -> NDArray[np.str_]:
        return np.array([of(s) if kernels or point else "" for s, point in zip(subjects, points, strict=True)])

    def layout(subject: CalibrationSubject) -> str:
        key = points_key(subject)
        return key if len(layouts[_without_layout(key)]) > 1 else ""

    def of_points(of: Callable[[OperatingPoint], str]) -> NDArray[np.str_]:
        return np.array([of(point) if point else "" for point in points])

    return {
        "model": of_points(_fold),
        "curve": of_points(lambda point: " / ".join(point[column] for column in _OF_A_CURVE)),
        "source": of_points(lambda point: point["source_id"]),
        "layout": words(layout, kernels=False),
        "stack": words(lambda s: s.model, kernels=False),
        "accelerator": words(lambda s: f"{s.accelerator} {s.stack}", kernels=True),
        "family": words(lambda s: s.accelerator, kernels=True),
        "nothing": words(lambda s: s.family, kernels=True),
        "release": words(lambda s: f"{s.stack} {s.release}" if s.release else "", kernels=False),
    }


def _without_layout(points_key: str) -> str:
    return points_key.rsplit(" / ", 2)[0]


def _fold(point: OperatingPoint) -> str:
    """By what the point is, so that the order of rows does not matter."""
    name = repr(sorted(point.conditions.items())).encode()
    return str(int.from_bytes(hashlib.sha256(name).digest()[:4]) % _FOLDS)


def metrics_of(evidence: Measurements) -> NDArray[np.str_]:
    """Which metric's error a row's is; none for a kernel, or for a step that nobody served."""
    steps = np.array([i < len(evidence.cases) and bool(evidence.subjects[i].mode) for i in evidence.origin])
    steps &= evidence.kind == "decode_step"
    names = ["" if kind == "kernel" else _METRIC_OF.get(kind, "tpot") for kind in evidence.kind]
    return np.where(steps, "", names)


def summary(signed: Array) -> dict[str, float]:
    """Median and 90th percentile of the absolute error, and the median of the signed one, as fractions."""
    size = np.abs(signed)
    return {
        "n": len(signed),
        "median_ape": float(np.median(size)),
        "p90_ape": float(np.quantile(size, 0.9)),
        "bias": float(np.median(signed)),
    }


def by_metric(metrics: NDArray[np.str_], error: Array, rows: Mask) -> dict[str, dict[str, float]]:
    table = {}
    for metric in METRICS:
        own = rows & (metrics == metric)
        if own.any():
            table[metric] = {name: round(value, 4) for name, value in summary(np.expm1(error[own])).items()}
    return table


def points_of(evidence: Measurements) -> dict[str, int]:
    return dict(Counter(map(points_key, evidence.subjects[: len(evidence.cases)])).most_common())


def loads_of(evidence: Measurements) -> dict[str, tuple[float, float]]:
    """By what was measured, the fewest and most requests in flight a GPU."""
    by_key: dict[str, list[float]] = {}
    for case, subject in zip(evidence.cases, evidence.subjects, strict=False):
        if case.clients:
            by_key.setdefault(points_key(subject), []).append(round(case.load, 4))
    return {key: (min(loads), max(loads)) for key, loads in by_key.items()}
