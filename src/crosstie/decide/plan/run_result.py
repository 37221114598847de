"""What one run of a simulation is asked, and what it gives: plain data, the same from any process or machine."""

import math

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
