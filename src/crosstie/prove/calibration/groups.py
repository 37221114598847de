"""Rows that are left out together, to learn how wrong an estimate is of what nobody has measured.

Errors are told of rows, and of what a published curve offers at its best: tokens a second of a GPU, at equal tokens a
second of a user.
"""

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.calibration import CalibrationSubject, points_key
from crosstie.core.estimate import METRICS
from crosstie.perf.hardware import Array, Mask
from crosstie.prove.calibration.predict import QUANTITIES
from crosstie.prove.calibration.regression import Measurements
from crosstie.prove.calibration.results import OperatingPoint

_FOLDS = 5
_METRIC_OF = {"ttft": "ttft", "throughput": "throughput"}

# What a curve is the same in: one configuration at all its concurrencies, whenever it was run.
_OF_A_CURVE = ("source_id", "accelerator", "num_accelerators", "model", "precision", "engine", "parallelism", "tp",
               "input_len", "output_len", "scenario", "spec_decode", "disagg")  # fmt: skip
# A curve: one accelerator, model, precision and engine, at one pair of lengths, in all its layouts and concurrencies.
_SAME = ("model", "precision", "input_len", "output_len", "spec_decode", "disagg")
_CURVE = ("source_id", "accelerator", "engine", *_SAME)
# Fewer points than this are no curve.
_FEWEST = 4
# Two accelerators that differ by less than this at the same speed for the user are a tie.
_TIE = 1.15
_LEVELS = 5


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


class _Best(NamedTuple):
    """The best of a set of points: tokens a second of a user, rising, and of a GPU at that; logarithms."""

    user: Array
    gpu: Array

    def at(self, user: float) -> float:
        return float(np.interp(user, self.user, self.gpu))


def frontier(user: Array, gpu: Array) -> _Best:
    """Points that no other beats in both."""
    order = np.argsort(-user, kind="stable")
    best = np.maximum.accumulate(gpu[order])
    kept = np.flatnonzero(np.diff(best, prepend=-np.inf) > 0)
    chosen = order[kept][::-1]
    return _Best(user[chosen], gpu[chosen])


def frontier_errors(evidence: Measurements, error: Array) -> dict[str, dict[str, dict[str, float]]]:
    """Errors at the measured best of each curve, by curve its median; and pairs of accelerators in the right order.

    `error`: logarithms of predicted over measured of rows that were left out with their curve.
    """
    tpot, rate = QUANTITIES.index("tpot"), QUANTITIES.index("output_tokens_per_s")
    by_case: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
    for row in np.flatnonzero(~np.isnan(error)):
        if evidence.quantity[row] in (tpot, rate):
            log = float(evidence.logs[row] - evidence.factor[row])
            by_case[int(evidence.origin[row])][int(evidence.quantity[row])] = (log, log + float(error[row]))
    curves: dict[tuple[str, ...], list[tuple[float, float, float, float]]] = defaultdict(list)
    for origin, quantities in by_case.items():
        if len(quantities) == 2 and origin < len(evidence.cases):
            case = evidence.cases[origin]
            gpus = np.log(case.gpus)
            (slow, slow_p), (fast, fast_p) = quantities[tpot], quantities[rate]
            curves[tuple(case.point[name] for name in _CURVE)].append((-slow, fast - gpus, -slow_p, fast_p - gpus))
    pairs = {
        key: (frontier(*np.array(points).T[:2]), frontier(*np.array(points).T[2:]))
        for key, points in curves.items()
        if len(points) >= _FEWEST
    }
    if not pairs:
        return {}
    off = [
        [np.expm1(predicted.at(user) - gpu) for user, gpu in zip(*measured, strict=True)]
        for measured, predicted in pairs.values()
    ]
    medians = np.array([np.median(errors) for errors in off])
    right = _ordered(list(pairs.items()))
    return {
        "best of a curve": {"throughput": {name: round(value, 4) for name, value in summary(medians).items()}},
        "accelerators by it": {
            "pairs": {"n": float(len(right)), "right": round(float(np.mean(right)) if right else 0.0, 4)}
        },
    }


def _ordered(curves: Sequence[tuple[tuple[str, ...], tuple[_Best, _Best]]]) -> list[bool]:
    same: dict[tuple[str, ...], list[tuple[str, _Best, _Best]]] = defaultdict(list)
    for key, (measured, predicted) in curves:
        said = dict(zip(_CURVE, key, strict=True))
        same[tuple(said[name] for name in _SAME)].append((said["accelerator"], measured, predicted))
    right = []
    for group in same.values():
        for (first, m1, p1), (second, m2, p2) in combinations(group, 2):
            low, high = max(m1.user[0], m2.user[0]), min(m1.user[-1], m2.user[-1])
            if first.casefold() == second.casefold() or low >= high:
                continue
            for user in np.linspace(low, high, _LEVELS):
                apart = m1.at(user) - m2.at(user)
                if abs(apart) > np.log(_TIE):
                    right.append((apart > 0) == (p1.at(user) > p2.at(user)))
    return right
