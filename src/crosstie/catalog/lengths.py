"""Lengths of requests, from a number, a distribution or a trace, as slices of a class."""

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.reading import only_keys
from crosstie.core.errors import BadData
from crosstie.core.workload import Slice

Lengths = NDArray[np.float64]

# A distribution is carried as this many requests, evenly spaced in probability.
_SAMPLE = 512
# Slices whose longest prompt is not this much longer than the previous one's are not worth a route.
_WORTH_A_SLICE = 1.5
_MIDDLE = 0.5
# Of the logarithm: one request in six is then fifty times as long as the median. Traces have 0.5 to 2.
_WIDEST = 4.0
# Requests of a slice that are kept, and a step that has no factor in common with their number; of a trace this many
# ranges of prompts, and as many requests of each.
_KEPT = 144
_STRIDE = 89
_ROWS = 12
_QUANTILES = {"median": 0.5, "p50": 0.5, "p75": 0.75, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def read_lengths(file: Path, where: str, raw: object, unit: str = "tokens") -> Lengths:
    """One number, `{ mean, p90, ... }` as a lognormal, or `{ histogram = [[from, to, weight], ...] }`."""
    if raw is None:
        other = ", a distribution, or a trace for the class" if unit == "tokens" else " or a distribution"
        raise BadData(file, where, f"missing: a number of {unit}{other}")
    if isinstance(raw, dict):
        return _histogram(file, where, raw, unit) if "histogram" in raw else _lognormal(file, where, raw, unit)
    return np.array([_value(file, where, raw, unit)])


def _value(file: Path, where: str, raw: object, unit: str) -> float:
    least = 0.001 if unit == "seconds" else 1
    if isinstance(raw, bool) or not isinstance(raw, int | float) or not least <= raw <= 1e8:
        raise BadData(file, where, f"{raw!r} must be a number of {unit}, from {least} to 100,000,000")
    return float(raw)


def _lognormal(file: Path, where: str, raw: dict[str, Any], unit: str) -> Lengths:
    """Two of mean, median and quantiles fix it; a mean alone is everybody's length."""
    only_keys(file, where, raw, {"mean", "histogram", *_QUANTILES})
    known = {key: _value(file, f"{where}.{key}", value, unit) for key, value in raw.items()}
    if len(known) > 2 or not known or ("median" in known and "p50" in known):
        raise BadData(file, where, "give two of mean, median, p75, p90, p95, p99 (or one, for a fixed length)")
    if len(known) == 1:
        if "mean" not in known and "median" not in known:
            raise BadData(file, where, f"{next(iter(known))} alone says nothing of the rest: give mean or median too")
        return np.array(list(known.values()))
    location, width = _fitted(file, where, known)
    if width > _WIDEST:
        raise BadData(file, where, f"{' and '.join(known)} are further apart than lengths of requests can be")
    # Each is the mean of its share of the probability, not its middle, so that the long tail keeps its weight:
    # the part of a lognormal's mean below a quantile z is normal, too, at z - width.
    normal = NormalDist()
    inner = [normal.cdf(normal.inv_cdf(k / _SAMPLE) - width) for k in range(1, _SAMPLE)]
    below = np.array([0.0, *inner, 1.0])
    mean = math.exp(location + width * width / 2.0)
    drawn = mean * _SAMPLE * np.diff(below)
    return np.asarray(drawn if unit == "seconds" else np.maximum(drawn, 1.0))


def _fitted(file: Path, where: str, known: dict[str, float]) -> tuple[float, float]:
    """Location and width of the lognormal's logarithm."""
    (low, low_value), (high, high_value) = sorted(known.items(), key=lambda item: _QUANTILES.get(item[0], -1.0))
    z = NormalDist().inv_cdf(_QUANTILES[high])
    # Means above p75 are those of a long tail; above p90 it would be a slip.
    if high_value <= low_value and (low != "mean" or z > 1.0):
        raise BadData(file, where, f"{high} {high_value:g} must exceed {low} {low_value:g}")
    if low != "mean":
        width = math.log(high_value / low_value) / (z - NormalDist().inv_cdf(_QUANTILES[low]))
        return math.log(high_value) - z * width, width
    # mean = exp(location + width^2 / 2), quantile = exp(location + z width): the smaller root of a square, or
    # the positive one where the mean exceeds the quantile.
    gap = z * z - 2.0 * math.log(high_value / low_value)
    if gap < 0:
        raise BadData(file, where, f"no lognormal has a mean of {low_value:g} and {high} at {high_value:g}")
    width = z - math.sqrt(gap) if high_value > low_value else z + math.sqrt(gap)
    return math.log(high_value) - z * width, width


def _histogram(file: Path, where: str, raw: dict[str, Any], unit: str) -> Lengths:
    only_keys(file, where, raw, {"histogram"})
    bins = raw["histogram"]
    if not isinstance(bins, list) or not bins:
        raise BadData(file, f"{where}.histogram", "must be a list of [from, to, weight]")
    edges, weights = [], []
    for index, entry in enumerate(bins):
        at = f"{where}.histogram[{index}]"
        if not isinstance(entry, list) or len(entry) != 3:
            raise BadData(file, at, "must be [from, to, weight]")
        low, high = _value(file, at, entry[0], unit), _value(file, at, entry[1], unit)
        weight = entry[2]
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight <= 1e15 or low > high:
            raise BadData(file, at, "must be [from, to, weight] with from <= to and a weight from 0 to 1e15")
        edges.append((low, high))
        weights.append(float(weight))
    total = math.fsum(weights)
    if total <= 0:
        raise BadData(file, f"{where}.histogram", "the weights add up to nothing")
    ends = np.concatenate(([0.0], np.cumsum(np.array(weights) / total)))
    middles = (np.arange(_SAMPLE) + 0.5) / _SAMPLE
    inside = np.clip(np.searchsorted(ends, middles, side="right") - 1, 0, len(edges) - 1)
    low, high = np.array(edges)[inside].T
    into = (middles - ends[inside]) / np.maximum(ends[inside + 1] - ends[inside], 1e-12)
    return np.sort(low + np.clip(into, 0.0, 1.0) * (high - low))


def cut(
    inputs: Lengths, outputs: Lengths, *, paired: bool, exempt: float, context: int, halved: bool = True
) -> tuple[Slice, ...]:
    """Slices by the length of the prompt; `halved` at the median too.

    `paired`: whether inputs and outputs are those of the same requests, as a trace has them; otherwise
    outputs are the same whatever the prompt. `exempt`: the share of requests, those with the longest
    prompts, that may miss the TTFT target.
    """
    order = np.argsort(inputs, kind="stable")
    ranked = inputs[order]
    slices: list[Slice] = []
    start = 0
    for end, late in _edges(ranked, exempt, halved):
        part = outputs[order[start:end]] if paired else outputs
        slices.append(
            Slice(
                share=(end - start) / len(ranked),
                input_tokens=float(ranked[start:end].mean()),
                output_tokens=max(float(part.mean()), 1.0),
                longest_input=min(math.ceil(ranked[end - 1]), context - 1),
                longest_output=max(min(math.ceil(part.max()), context - math.ceil(ranked[end - 1])), 1),
                sample=_sample(ranked[start:end], part, paired),
                exempt=late,
            )
        )
        start = end
    return tuple(slices)


def _sample(inputs: Lengths, outputs: Lengths, paired: bool) -> tuple[tuple[int, int], ...]:
    """Requests that stand for equally many each, so that their means are those of all.

    Of a trace, requests in the middle of a range of outputs within a range of prompts; outputs that do not belong to
    their prompts are dealt out in a fixed disorder.
    """
    if paired:
        ranges = [block[np.argsort(outputs[block], kind="stable")] for block in _split(np.arange(len(inputs)))]
        groups = [group for span in ranges for group in _split(span)]
        pairs = [(inputs[i], outputs[i]) for i in (_most_average(group, outputs) for group in groups)]
    else:
        count = min(_KEPT, max(len(inputs), len(outputs)))
        dealt = np.arange(count) * _STRIDE % count
        some, others = inputs[_middles(len(inputs), count)], np.sort(outputs)[_middles(len(outputs), count)]
        pairs = list(zip(some, others[dealt], strict=True))
    return tuple((max(round(float(a)), 1), max(round(float(b)), 1)) for a, b in pairs)


def _split(places: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    return np.array_split(places, min(_ROWS, len(places)))


def _most_average(group: NDArray[np.int64], outputs: Lengths) -> int:
    """The request of a group whose output is nearest to its mean; of several the one in the middle."""
    away = np.abs(outputs[group] - outputs[group].mean())
    nearest = np.flatnonzero(away == away.min())
    return int(group[nearest[len(nearest) // 2]])


def _middles(length: int, count: int) -> NDArray[np.int64]:
    """Of a row of so many the middles of equal parts; some more than once where the row is shorter."""
    return ((np.arange(count) + 0.5) * length / count).astype(np.int64)


def _edges(ranked: Lengths, exempt: float, halved: bool) -> Sequence[tuple[int, bool]]:
    """Where slices end: at the middle, where the target's exemption begins, and at the end."""
    count = len(ranked)
    last = count - math.floor(exempt * count + 1e-9)
    middle = round(_MIDDLE * count)
    edges: list[tuple[int, bool]] = []
    if halved and 0 < middle < last and ranked[last - 1] > _WORTH_A_SLICE * ranked[middle - 1]:
        # Prompts are whole tokens: a slice that ends at 1.2 of them and one that ends at 1.9 are the same.
        edges += [(middle, False)] if math.ceil(ranked[middle - 1]) < math.ceil(ranked[last - 1]) else []
    if last < count and ranked[-1] > _WORTH_A_SLICE * ranked[last - 1]:
        return [*edges, (last, False), (count, True)]
    return [*edges, (count, False)]
