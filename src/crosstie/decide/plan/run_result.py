"""What one run of a simulation is asked, and what it gives: plain data, the same from any process or machine; runs that
differ by their seed alone as one; and what the simulation of a plan says of a class.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, TypeVar

import msgspec

from crosstie.core.fleet import Fleet, Policy
from crosstie.core.workload import Target


class Outage(msgspec.Struct, frozen=True):
    """A pool that is gone from a moment on, for so long or for good."""

    pool: str
    at_s: float
    for_s: float | None = None

    @property
    def until_s(self) -> float:
        return math.inf if self.for_s is None else self.at_s + self.for_s


class SimulatedCase(msgspec.Struct, frozen=True, kw_only=True):
    """What one run simulates, beside its traffic."""

    label: str
    fleet: Fleet
    policy: Policy
    load: float = 1.0
    seed: int = 0
    outages: tuple[Outage, ...] = ()
    # Whether the router is told how long each answer will be, which no router knows.
    knows_lengths: bool = False
    # How sure its steps are to be no slower than simulated; None: they take what is estimated.
    sure: float | None = None


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds; None: so many were turned away that the percentile has no end."""

    mean: float | None
    p50: float | None
    p90: float | None
    p95: float | None
    p99: float | None
    target: Target | None = None
    # At the target's own percentile, and whether that keeps it.
    at_target: float | None = None
    holds: bool | None = None


class ClassResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None
    requests: int
    refused: int
    ttft_s: Latency
    tpot_s: Latency
    finish_s: Latency
    # Share of its requests that kept both targets.
    within: float

    @property
    def holds(self) -> bool | None:
        """None: it has no targets, or sent nothing."""
        said = [latency.holds for latency in (self.ttft_s, self.tpot_s) if latency.holds is not None]
        return all(said) if said else None


class PoolResult(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    replicas: int
    usd_per_hour: float
    # Requests by class, in all, and the share of the time in which its replicas had anything to do.
    requests: dict[str, int]
    utilisation: float
    mean_in_flight: float
    mean_waiting: float
    most_waiting: int
    preemptions: int


class PoolCourse(msgspec.Struct, frozen=True, kw_only=True):
    """By moment: busy share of the time since the last, requests that run, and those that wait for the engine."""

    busy: list[float]
    running: list[int]
    waiting: list[int]


class Course(msgspec.Struct, frozen=True, kw_only=True):
    at_s: list[float]
    # Waiting at the gateway.
    queued: list[int]
    pools: dict[str, PoolCourse]


class OutageResult(msgspec.Struct, frozen=True, kw_only=True):
    """Shares within targets of the requests that came before, while the pool was gone, and after."""

    pool: str
    at_s: float
    until_s: float | None
    handed_over: int
    refused: int
    before: float | None
    during: float | None
    after: float | None


class TurnResult(msgspec.Struct, frozen=True, kw_only=True):
    """Turns of sessions from one of them to another, both counted from 1."""

    first: int
    last: int | None
    turns: int
    ttft_p50_s: float
    ttft_p95_s: float
    hit_rate: float


class SessionsResult(msgspec.Struct, frozen=True, kw_only=True):
    """Sessions of a class that were at work at once."""

    name: str | None
    live: int
    turns_per_s: float
    # From when a turn is first asked to its answer's end: the mean by Little's law, those that still wait among them,
    # and percentiles of those that ended.
    mean_turn_s: float
    turn_s: Latency
    # Of prompt tokens, those found in a cache; of turns that went on with an earlier one, those that found less than
    # half of it; and turns that wait for an answer at a time, on average.
    hit_rate: float
    evicted: float
    waiting: float
    # The class's part of the fleet's bill over its sessions, and over those that solve their task.
    usd_per_session: float | None
    usd_per_solved: float | None
    by_turn: list[TurnResult]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    label: str
    policy: Policy
    load: float
    seed: int
    knows_lengths: bool
    requests: int
    refused: int
    measured_s: float
    # Before it is measured the fleet fills for so long; None: the rate is not steady, and all of it is measured.
    filled_s: float | None
    requests_per_s: float
    usd_per_hour: float
    # The fleet's whole bill over the tokens that it served, and over those within their targets.
    usd_per_million_tokens: float | None
    usd_per_million_good_tokens: float | None
    within: float
    good_requests_per_s: float
    good_output_tokens_per_s: float
    prefix_hit_rate: float
    # Of them, those that memory beside the GPU's had, by its name.
    loaded_shares: dict[str, float]
    classes: list[ClassResult]
    pools: list[PoolResult]
    course: Course
    outages: list[OutageResult]
    # Why the fleet never came to rest, in words; None: it did.
    unsteady: str | None
    sessions: list[SessionsResult] = []

    @property
    def holds(self) -> bool:
        return self.unsteady is None and all(class_result.holds is not False for class_result in self.classes)


T = TypeVar("T")
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class SeedSpread:
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class OverSeeds(Generic[T]):
    """A run, or a part of it, as each seed has it."""

    each: Sequence[T]

    @property
    def first(self) -> T:
        """For what no seed changes."""
        return self.each[0]

    def part(self, of: Callable[[T], Part]) -> "OverSeeds[Part]":
        return OverSeeds([of(one) for one in self.each])

    def mean(self, of: Callable[[T], float]) -> float:
        return fmean(map(of, self.each))

    def total(self, of: Callable[[T], int]) -> int:
        return sum(map(of, self.each))

    def spread(self, of: Callable[[T], float | None]) -> SeedSpread | None:
        """None: in at least one seed there is no such number."""
        values = [value for value in map(of, self.each) if value is not None]
        return SeedSpread(fmean(values), min(values), max(values)) if len(values) == len(self.each) else None


def over_seeds(runs: Sequence[Run]) -> list[OverSeeds[Run]]:
    """Those of one fleet under one policy and load together, in the order in which the first of each came."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.label, run.load, run.policy, run.knows_lengths), []).append(run)
    return [OverSeeds(group) for group in groups.values()]


def classes_of(runs: OverSeeds[Run]) -> list[OverSeeds[ClassResult]]:
    return [OverSeeds(classes) for classes in zip(*(run.classes for run in runs.each), strict=True)]


def holding(runs: OverSeeds[Run] | OverSeeds[ClassResult]) -> int:
    """In how many of the seeds the targets hold."""
    return sum(bool(one.holds) for one in runs.each)


def at_target(latency: OverSeeds[Latency]) -> SeedSpread | None:
    return latency.spread(lambda one: one.at_target)


def worst(runs: OverSeeds[Run]) -> float | None:
    """The farthest that any class is over a target, at its percentile; below 1 all hold. None: no end."""
    ratios = [0.0]
    for kind in classes_of(runs):
        for latency in (kind.part(lambda one: one.ttft_s), kind.part(lambda class_result: class_result.tpot_s)):
            target = latency.first.target
            if target is not None and kind.total(lambda class_result: class_result.requests):
                reached = at_target(latency)
                if reached is None:
                    return None
                ratios.append(reached.mean / target.seconds)
    return max(ratios)


# Whatever percentile a class asks for, a fleet that is bought for this traffic turns away no more than so many. Classes
# without a target of TTFT are served, not parked: no more than that may wait for longer than this.
MAY_BE_UNSERVED, PARKED_S = 0.02, 60.0


@dataclass(frozen=True, slots=True)
class SimulatedClass:
    """A class as simulated: its latencies at the percentiles of its targets, None where it has none."""

    name: str
    requests: int
    ttft_s: float | None
    tpot_s: float | None
    ttft: Target | None
    tpot: Target | None
    # Shares of its requests that keep each target: as simulated, and as the closed form has them at this load.
    keeps_ttft: float | None = None
    keeps_tpot: float | None = None
    predicted_ttft: float | None = None
    predicted_tpot: float | None = None
    # Of those sent, turned away because no replica had room in time; they count as late.
    refused: float = 0.0
    # Without a target of TTFT, those that waited for longer than `PARKED_S`, or were turned away.
    parked: float = 0.0
    # Whether it would hold in another run, too: misses are below those allowed by more than chance, and no requests
    # pile up.
    steady: bool = True
    # Whether its looks leave no doubt of that.
    decided: bool = True

    @property
    def holds(self) -> bool:
        pairs = ((self.ttft_s, self.ttft), (self.tpot_s, self.tpot))
        served = max(self.refused, self.parked) <= MAY_BE_UNSERVED
        return (
            self.steady
            and served
            and all(seen <= target.seconds for seen, target in pairs if seen is not None and target is not None)
        )
