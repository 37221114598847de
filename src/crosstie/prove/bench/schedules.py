"""Arrivals whose rate changes: a ramp, a burst, a day in minutes; and the phases that results are told by."""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from crosstie.catalog.days import HOURS, USUAL, shipped_days
from crosstie.core.errors import BadInput, did_you_mean, near_names
from crosstie.core.figures import significant
from crosstie.prove.replay.replay import RequestOutcome

_NUMBER = r"(\d+(?:\.\d+)?)"
_BETWEEN = re.compile(rf"(ramp|burst):{_NUMBER}-{_NUMBER}:{_NUMBER}")
_DAY = re.compile(rf"day(?:=([\w-]+))?:{_NUMBER}:{_NUMBER}")
_FORMS = "ramp:LOW-HIGH:SECONDS, burst:BASE-PEAK:SECONDS or day[=SHAPE]:PEAK:SECONDS"
# Steps that a ramp is told by, the share of the time before and after a burst, and hours of a day's phase.
_STEPS, _AROUND, _HOURS = 4, 0.4, 4


class Phase(NamedTuple):
    """Requests a second go evenly from one rate to another."""

    name: str
    seconds: float
    first: float
    last: float

    @property
    def requests(self) -> float:
        return 0.5 * (self.first + self.last) * self.seconds


def phases_of(schedule: str) -> list[Phase]:
    """Raises BadInput where it is none."""
    if match := _BETWEEN.fullmatch(schedule):
        low, high, seconds = (float(number) for number in match.groups()[1:])
        made = _ramp(low, high, seconds) if match[1] == "ramp" else _burst(low, high, seconds)
    elif match := _DAY.fullmatch(schedule):
        made = _day(match[1] or USUAL, float(match[2]), float(match[3]))
    else:
        raise BadInput(f"--schedule {schedule}: write {_FORMS}")
    if not sum(phase.requests for phase in made) >= 1.0:
        raise BadInput(f"--schedule {schedule}: no request comes in that time")
    return made


def _ramp(low: float, high: float, seconds: float) -> list[Phase]:
    ends = np.linspace(low, high, _STEPS + 1).tolist()
    return [
        Phase(f"{significant(first)} to {significant(last)} req/s", seconds / _STEPS, first, last)
        for first, last in pairwise(ends)
    ]


def _burst(base: float, peak: float, seconds: float) -> list[Phase]:
    around, within = _AROUND * seconds, (1.0 - 2.0 * _AROUND) * seconds
    return [
        Phase(f"before, {significant(base)} req/s", around, base, base),
        Phase(f"burst, {significant(peak)} req/s", within, peak, peak),
        Phase(f"after, {significant(base)} req/s", around, base, base),
    ]


def _day(shape: str, peak: float, seconds: float) -> list[Phase]:
    """Hour by hour, each at its own rate."""
    known = shipped_days()
    if shape not in known:
        hint = did_you_mean(near_names(shape, known)) or f" Known: {', '.join(known)}."
        raise BadInput(f"--schedule day={shape}: is no shape of a day.{hint}")
    return [
        Phase(f"{hour // _HOURS * _HOURS:02d} to {hour // _HOURS * _HOURS + _HOURS:02d} h", seconds / HOURS,
              peak * share, peak * share)
        for hour, share in enumerate(known[shape])
    ]  # fmt: skip


def scheduled(phases: Sequence[Phase], draw: np.random.Generator) -> list[float]:
    """By chance within each phase, just as many as it should have on average."""
    due_s: list[float] = []
    begin = carried = 0.0
    for phase in phases:
        # What is less than a request goes to the next phase.
        carried += phase.requests
        count = int(carried + 1e-9)
        carried -= count
        drawn = np.sort(draw.uniform(0.0, 1.0, count)) * phase.requests
        slope = (phase.last - phase.first) / phase.seconds
        if slope:
            times = (np.sqrt(phase.first**2 + 2.0 * slope * drawn) - phase.first) / slope
        else:
            times = drawn / phase.first if count else drawn
        due_s += (begin + times).tolist()
        begin += phase.seconds
    return due_s


def by_phase(phases: Sequence[Phase], outcomes: Sequence[RequestOutcome]) -> dict[str, list[RequestOutcome]]:
    """Requests by when they were due; phases of one name together."""
    ends = np.cumsum([phase.seconds for phase in phases])
    by_phase: dict[str, list[RequestOutcome]] = {phase.name: [] for phase in phases}
    for outcome in outcomes:
        place = min(int(np.searchsorted(ends, outcome.request.arrival_s, side="right")), len(phases) - 1)
        by_phase[phases[place].name].append(outcome)
    return by_phase
