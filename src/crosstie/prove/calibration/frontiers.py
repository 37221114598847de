"""What a published curve offers at its best: tokens a second of a GPU, at equal tokens a second of a user."""

from collections import defaultdict
from collections.abc import Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np

from crosstie.perf.hardware import Array
from crosstie.prove.calibration.groups import summary
from crosstie.prove.calibration.predict import QUANTITIES
from crosstie.prove.calibration.regression import Measurements

# A curve: one accelerator, model, precision and engine, at one pair of lengths, in all its layouts and concurrencies.
_SAME = ("model", "precision", "input_len", "output_len", "spec_decode", "disagg")
_CURVE = ("source_id", "accelerator", "engine", *_SAME)
# Fewer points than this are no curve.
_FEWEST = 4
# Two accelerators that differ by less than this at the same speed for the user are a tie.
_TIE = 1.15
_LEVELS = 5


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
