"""The highest rate within targets: doubled until they are missed, narrowed down, confirmed with fresh arrivals.

A load that only just holds holds by luck half of the time, so the answer is tried again with other arrivals, and one
that fails then is taken for too much.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from crosstie.prove.bench.summary import PointResult

# The answer is within so much of the first rate that missed.
_PRECISION = 1.05
_MOST_TRIALS = 24


@dataclass
class FoundLimit:
    """None where not even the lowest rate held; `missed`: the lowest rate that did not, None where all held."""

    requests_per_s: float | None = None
    missed: float | None = None
    # Within targets, at that rate: of the run that confirmed it.
    goodput_requests_per_s: float | None = None
    confirmed: bool = False
    trials: list[tuple[float, bool]] = field(default_factory=list)


def find_limit(
    start: float, trial: Callable[[float, int], PointResult | None], holds: Callable[[PointResult], bool],
    lowest: float = 0.0,
) -> FoundLimit:  # fmt: skip
    """`trial`: a run at a rate, with arrivals of that number; None once somebody has asked for an end. `lowest`: below
    it requests hardly ever meet, so that a lower rate changes nothing."""
    limit = FoundLimit()
    rate = start
    while len(limit.trials) < _MOST_TRIALS and rate >= lowest:
        result = trial(rate, len(limit.trials))
        if result is None:
            return limit
        held = holds(result)
        limit.trials.append((rate, held))
        again = rate == limit.requests_per_s
        if held:
            limit.requests_per_s = rate
            limit.goodput_requests_per_s = rate * (1.0 if result.kept is None else result.kept)
            limit.confirmed = again
        else:
            limit.missed = rate if limit.missed is None else min(rate, limit.missed)
            if again:
                # It held once by luck: back to what held before that, if anything did.
                limit.confirmed = False
                below = [tried for tried, well in limit.trials if well and tried < rate]
                limit.requests_per_s = max(below, default=None)
        if limit.confirmed:
            return limit
        rate = _next(limit)
    return limit


def _next(limit: FoundLimit) -> float:
    low, high = limit.requests_per_s, limit.missed
    if low is None:
        return (high or 1.0) / 2.0
    if high is None:
        return low * 2.0
    # Near enough: the same once more, which confirms it or not.
    return low if high / low <= _PRECISION else (low * high) ** 0.5
