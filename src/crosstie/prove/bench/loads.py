"""What is sent: clients that wait for their answers, arrivals by chance or a trace's clock, and lengths of both.

A rate may change: a ramp, a burst, a day in minutes; results are then told by phase.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from crosstie.catalog.days import HOURS, USUAL, shipped_days
from crosstie.catalog.traces import Trace
from crosstie.core.errors import BadInput, did_you_mean, near_names
from crosstie.core.figures import significant
from crosstie.perf.hardware import Array
from crosstie.prove.replay.replay import RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest, from_trace

_NUMBER = r"(\d+(?:\.\d+)?)"
_BETWEEN = re.compile(rf"(ramp|burst):{_NUMBER}-{_NUMBER}:{_NUMBER}")
_DAY = re.compile(rf"day(?:=([\w-]+))?:{_NUMBER}:{_NUMBER}")
_FORMS = "ramp:LOW-HIGH:SECONDS, burst:BASE-PEAK:SECONDS or day[=SHAPE]:PEAK:SECONDS"
# Steps that a ramp is told by, the share of the time before and after a burst, and hours of a day's phase.
_STEPS, _AROUND, _HOURS = 4, 0.4, 4


@dataclass(frozen=True)
class BenchLengths:
    """Fixed ones; evenly `vary` times these around them, or between `shortest` times these and these; a trace's where
    there is one."""

    input_tokens: int = 1024
    output_tokens: int = 128
    shortest: float = 1.0
    vary: float = 0.0
    trace: Trace | None = None
    start: int = 0
    longest: int | None = None
    # Of all of a trace's requests; None: as it says itself.
    class_name: str | None = None

    @property
    def least(self) -> float:
        """The shortest as a share of the longest."""
        return (1.0 - self.vary) / (1.0 + self.vary) if self.vary else self.shortest


@dataclass(frozen=True)
class BenchLoad:
    """Closed: so many clients. Open: so many requests a second, by chance, or at the times of the lengths' trace,
    stretched to that rate; a trace's own pace where there is neither. With turns: clients are conversations, which
    wait between their turns."""

    clients: int | None = None
    requests_per_s: float | None = None
    by_trace: bool = False
    turns: int | None = None
    pause_s: float = 0.0
    # As `phases_of` reads it: an open loop whose rate changes.
    schedule: str = ""

    @property
    def name(self) -> str:
        if self.schedule:
            return self.schedule
        if self.turns is not None:
            return f"{self.clients} sessions of {self.turns} turns"
        if self.clients is not None:
            return f"{self.clients} client{'s' * (self.clients > 1)}"
        if self.requests_per_s is None:
            return "the trace's times"
        return f"{significant(self.requests_per_s)} req/s{', as the trace' * self.by_trace}"

    def part(self, index: int, of: int) -> "BenchLoad":
        """What one of several processes sends of it; requests are dealt out apart."""
        if self.clients is None:
            return self
        return replace(self, clients=self.clients // of + (index < self.clients % of))


def made(
    load: BenchLoad, lengths: BenchLengths, count: int | None, seconds: float | None, seed: int
) -> list[TimedRequest]:
    """So many requests, or for so many seconds; of a closed loop, as many as it could take in that time at most."""
    if load.clients is not None and count is None:
        raise BadInput("a closed loop needs a number of requests")
    if load.schedule:
        times = scheduled(phases_of(load.schedule), np.random.default_rng(seed))
        alike = made(BenchLoad(clients=1), lengths, len(times), None, seed)
        return [request._replace(arrival_s=at) for request, at in zip(alike, times, strict=True)]
    if lengths.trace is not None:
        return _of_trace(load, lengths, count, seconds)
    rate = load.requests_per_s
    if count is None:
        assert rate is not None
        count = max(round(rate * (seconds or 0.0)), 1)
    draw = np.random.default_rng(seed)
    inputs, outputs = (
        np.maximum(np.rint(_shares(lengths, count, draw) * usual), 1).astype(int).tolist()
        for usual in (lengths.input_tokens, lengths.output_tokens)
    )
    arrivals = [0.0] * count if rate is None else poisson(rate, count, draw)
    return [TimedRequest(*lengths) for lengths in zip(arrivals, inputs, outputs, strict=True)]


def _shares(lengths: BenchLengths, count: int, draw: np.random.Generator) -> Array:
    """Of the usual length, for each request. What varies around it is every share alike in an order by chance: the mean
    is then just what was asked for."""
    if not lengths.vary:
        return draw.uniform(lengths.shortest, 1.0, count)
    return 1.0 - lengths.vary + 2.0 * lengths.vary * draw.permutation((np.arange(count) + 0.5) / count)


def poisson(rate: float, count: int, draw: np.random.Generator) -> list[float]:
    """Arrivals by chance, stretched a little so that just so many come in the time that they should take on average:
    or the rate itself would differ from run to run."""
    gaps = draw.exponential(1.0, count)
    times = np.cumsum(gaps) - gaps[0]
    return list((times * (count / rate) / gaps.sum()).tolist())


def _of_trace(load: BenchLoad, lengths: BenchLengths, count: int | None, seconds: float | None) -> list[TimedRequest]:
    assert lengths.trace is not None
    trace = lengths.trace
    own: dict[str, Any] = {"start": lengths.start, "longest": lengths.longest, "class_name": lengths.class_name}
    if load.clients is not None:
        # Times do not matter, and lengths may go round.
        rows = from_trace(trace, **own, requests=count, requests_per_s=1.0)
        return [rows[i % len(rows)] for i in range(count or 0)]
    requests = from_trace(
        trace, **own, requests=count, seconds=seconds,
        requests_per_s=load.requests_per_s, own_times=load.by_trace or load.requests_per_s is None,
    )  # fmt: skip
    if not requests:
        raise BadInput(f"{trace.file}: has no request in its first {seconds:g} s")
    return requests


def shares(requests: Sequence[TimedRequest], of: int, clients: int | None) -> list[list[tuple[int, TimedRequest]]]:
    """Requests dealt out to several senders, each with its number: to those of a closed loop as many as they have
    clients for, or some would have nothing more to send while others do."""
    dealt: list[list[tuple[int, TimedRequest]]] = [[] for _ in range(of)]
    for number, request in enumerate(requests):
        dealt[(number if clients is None else number % clients) % of].append((number, request))
    return dealt


def spread_note(lengths: BenchLengths) -> str:
    """As results have it where lengths vary evenly."""
    if lengths.trace is not None or lengths.least >= 1.0:
        return ""
    return f"random lengths {max(math.floor(100 * lengths.least + 0.5), 1)}-100%"


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
