"""A figure of a plan beside the same figure of production: how far off, how sure that is, and whether it is too far.

What is seen is a sample. Its interval says where the figure lies in 95 of 100 such samples; a difference counts as
beyond its limit only where the whole interval is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Literal

import msgspec
import numpy as np

from crosstie.catalog.reading import read_record, read_toml
from crosstie.catalog.traces import Floats
from crosstie.core.errors import BadInput, did_you_mean, near_names
from crosstie.prove.bench.summary import students_quantile

_FILE = Path(__file__).parent / "data" / "thresholds.toml"
LEVEL = 0.95
_Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)
# Requests that come one after another are alike: means are taken of so many stretches, and these are compared.
_BATCHES = 20
# Fewer requests than this say little, and it is said so.
FEW = 100

Side = Literal["below", "above", "both"]
Verdict = Literal["holds", "beyond", "unsure", "told"]


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    share: Annotated[float, msgspec.Meta(ge=0, le=10)]
    side: Side
    says: str
    why: str
    in_points: bool = False

    @property
    def words(self) -> str:
        sign = {"below": "-", "above": "+", "both": "±"}[self.side]
        return f"{sign}{self.share * 100:g}{' points' if self.in_points else '%'}"


@cache
def thresholds() -> dict[str, Threshold]:
    return read_thresholds(_FILE)


def read_thresholds(file: Path) -> dict[str, Threshold]:
    return {name: read_record(file, name, entry, Threshold) for name, entry in read_toml(file).items()}


def changed(given: Mapping[str, float]) -> dict[str, Threshold]:
    """Those of the data, with these shares in their place."""
    limits = dict(thresholds())
    for name, share in given.items():
        if name not in limits:
            hint = did_you_mean(near_names(name, limits))
            raise BadInput(f"--within {name}: no such figure; there are {', '.join(limits)}.{hint}")
        limits[name] = msgspec.structs.replace(limits[name], share=share)
    return limits


@dataclass(frozen=True, slots=True)
class MeasuredValue:
    value: float
    # None: nothing says how sure it is.
    low: float | None
    high: float | None
    # Requests behind it.
    requests: int

    @property
    def few(self) -> bool:
        return self.requests < FEW


@dataclass(frozen=True, slots=True)
class ReviewFigure:
    # The threshold that it is held to; "" where it is only told.
    check: str
    # A class, a pool, or "" for all.
    of: str
    what: str
    # "1/s", "tokens", "tokens/s", "s", "share", "usd".
    unit: str
    predicted: float | None
    seen: MeasuredValue
    limit: Threshold | None = None
    # The same under the requests that came, where `predicted` is of those that were planned for.
    planned: float | None = None
    note: str = ""

    @property
    def difference(self) -> float | None:
        return self._from(self.seen.value)

    def _from(self, value: float) -> float | None:
        if self.predicted is None:
            return None
        if (self.limit is not None and self.limit.in_points) or self.unit == "share":
            return value - self.predicted
        return value / self.predicted - 1.0 if self.predicted > 0.0 else (math.inf if value > 0.0 else 0.0)

    @property
    def verdict(self) -> Verdict:
        if self.limit is None or self.difference is None:
            return "told"
        if not self._beyond(self.seen.value):
            return "holds"
        ends = (self.seen.low, self.seen.high)
        # Both ends on one side: an interval that has the predicted figure in it is no sign of anything.
        sure = all(end is not None and self._beyond(end) for end in ends)
        sides = {end is not None and (self._from(end) or 0.0) > 0.0 for end in ends}
        return "beyond" if sure and len(sides) == 1 else "unsure"

    def _beyond(self, value: float) -> bool:
        off, limit = self._from(value), self.limit
        assert off is not None
        assert limit is not None
        worse = {"below": -off, "above": off, "both": abs(off)}[limit.side]
        return worse > limit.share + 1e-9


# Intervals


def mean_seen(values: Floats, weights: Floats | None = None) -> MeasuredValue | None:
    """The mean, or with weights the ratio of two sums, of values in the order in which they came."""
    count = len(values)
    if not count:
        return None
    weights = np.ones(count) if weights is None else weights
    value = float((values * weights).sum() / max(float(weights.sum()), 1e-300))
    parts = min(_BATCHES, count // 2)
    if parts < 3:
        return MeasuredValue(value, None, None, count)
    tops = [float(part.sum()) for part in np.array_split(values * weights, parts)]
    under = [float(part.sum()) for part in np.array_split(weights, parts)]
    # Of a ratio: how far each stretch is from what it would have at the ratio of all.
    away = np.array(tops) - value * np.array(under)
    error = math.sqrt(float((away**2).sum()) / (parts * (parts - 1))) / max(sum(under) / parts, 1e-300)
    half = students_quantile(parts - 1) * error
    return MeasuredValue(value, value - half, value + half, count)


def rate_seen(arrivals: Floats, span_s: float) -> MeasuredValue | None:
    """Requests/s over a stretch that begins at 0. Burstier traffic than Poisson's makes it less sure."""
    count = len(arrivals)
    if span_s <= 0.0:
        return None
    value = count / span_s
    parts = min(_BATCHES, max(count // 5, 1))
    counts = np.histogram(arrivals, parts, (0.0, span_s))[0]
    dispersion = max(float(counts.var(ddof=1) / counts.mean()), 1.0) if parts >= 5 else 1.0
    # Poisson's own interval (Byar), which says something of a class that was not seen at all.
    low = count * max(1 - 1 / (9 * count) - _Z / (3 * math.sqrt(count)), 0.0) ** 3 if count else 0.0
    high = (count + 1) * (1 - 1 / (9 * (count + 1)) + _Z / (3 * math.sqrt(count + 1))) ** 3
    wider = math.sqrt(dispersion)
    return MeasuredValue(
        value, max(value - wider * (value - low / span_s), 0.0), value + wider * (high / span_s - value), count
    )


def share_seen(hits: float, of: float) -> MeasuredValue | None:
    """By Wilson: an interval that stays within 0 and 1, however few there are."""
    if of <= 0:
        return None
    p, z2 = hits / of, _Z * _Z
    middle = (p + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z / (1 + z2 / of) * math.sqrt(p * (1 - p) / of + z2 / (4 * of * of))
    return MeasuredValue(p, max(middle - half, 0.0), min(middle + half, 1.0), int(of))


def quantile_seen(values: Floats, share: float) -> MeasuredValue | None:
    """The value that so many do not exceed; its interval between ranks, whatever the distribution is. An end beyond
    the first or the last value is not known."""
    known = np.sort(values[~np.isnan(values)])
    count = len(known)
    if not count:
        return None
    spread = _Z * math.sqrt(count * share * (1.0 - share))
    low, high = math.floor(count * share - spread) - 1, math.ceil(count * share + spread)
    return MeasuredValue(
        at_quantile(known, share), float(known[low]) if low >= 0 else None,
        float(known[high]) if high < count else None, count,
    )  # fmt: skip


def at_quantile(known: Floats | Sequence[float], share: float) -> float:
    """Of sorted values."""
    return float(known[min(max(math.ceil(share * len(known)) - 1, 0), len(known) - 1)])
