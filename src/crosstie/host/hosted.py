"""The nouns of a shared pool: models and their worth, replicas with their memory, moves, and what is counted."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from crosstie.core.histogram import Histogram

# Upper ends of the buckets that loads are counted in, in seconds; whatever is longer is counted after them.
BUCKETS_S: Final = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(slots=True, eq=False)
class Hosted:
    """One model of a shared pool: what it takes of a replica's memory while it is resident, and how long it loads."""

    model: str
    # Weights and what the engine keeps beside them; the least cache that it may run with comes on top.
    bytes: float
    # Learnt anew from loads where they are timed.
    load_s: float
    min_kv_bytes: float = 0.0
    pinned: bool = False

    @property
    def taken_bytes(self) -> float:
        return self.bytes + self.min_kv_bytes


@dataclass(slots=True, eq=False)
class Slot:
    """One replica's memory, and what is on it."""

    key: str
    # Memory that models may take: weights and their least cache.
    capacity_bytes: float
    # Model, and since when.
    resident: dict[str, float] = field(default_factory=dict)
    # One at a time: they share the link, so that two at once are both late.
    loading: str | None = None
    loading_since: float = 0.0
    # The model that is to come next, and those that finish what they have so that it can.
    claimed_by: str | None = None
    leaving: frozenset[str] = frozenset()
    # False while the replica does not answer; then nothing is served or loaded there.
    usable: bool = True
    # Models that cannot be loaded there for now: their server is down, or has just failed to.
    unable: set[str] = field(default_factory=set)

    def serves(self, model: str) -> bool:
        return self.usable and model in self.resident and model not in self.leaving

    def used_bytes(self, hosted: Mapping[str, Hosted]) -> float:
        taken = sum(hosted[model].taken_bytes for model in self.resident)
        return taken + (hosted[self.loading].taken_bytes if self.loading is not None else 0.0)


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Load one model on a replica, after those in its way have been unloaded."""

    slot: Slot
    load: Hosted
    evict: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Why a model is not loaded yet, and in how many seconds to ask again at the latest."""

    why: str
    retry_s: float


@dataclass(slots=True, eq=False)
class WaitingModel:
    """A model that was asked for where it is not: since when, and what its clients wait for."""

    since: float
    asked_at: float
    wait: Wait = Wait("", 0.0)
    # Whether anybody waits at present, or has only not been gone for long.
    is_awaited: bool = True


class KeepingWorth:
    """What it is worth to keep a model resident: the seconds that requests would wait for its return, by byte it takes.

    That is requests a second, forgotten over time, x seconds to load / bytes. benchmarks/hosting.py has other answers
    and compares them (docs/hosting.md).
    """

    def __init__(self, hosted: Iterable[Hosted], memory_s: float, now: float) -> None:
        self.memory_s = memory_s
        self.hosted = {one.model: one for one in hosted}
        # Of each model: requests, as far as they are remembered, and when it was last asked for.
        self.count = dict.fromkeys(self.hosted, 0.0)
        self.asked_at = dict.fromkeys(self.hosted, now)

    def asked(self, model: str, now: float) -> None:
        self.count[model] = self._remembered(model, now) + 1.0
        self.asked_at[model] = now

    def evicted(self, model: str) -> None:
        """Changes nothing here: demand is forgotten by the clock."""

    def per_byte(self, model: str, now: float) -> float:
        """By this residents are compared; the least goes first."""
        return self.requests_per_s(model, now) * self.reload_by_byte(model)

    def lost(self, model: str, now: float) -> float:
        """What its eviction costs: the seconds that are waited in a second of its absence."""
        return self.requests_per_s(model, now) * self.hosted[model].load_s

    def combined(self, losses: Iterable[float]) -> float:
        return sum(losses)

    def deserves(self, model: str, loss: float, margin: float, now: float) -> bool:
        """Whether a newcomer may evict without waiting."""
        return self.lost(model, now) >= margin * loss

    def requests_per_s(self, model: str, now: float) -> float:
        return self._remembered(model, now) / self.memory_s

    def reload_by_byte(self, model: str) -> float:
        one = self.hosted[model]
        return one.load_s / max(one.taken_bytes, 1.0)

    def _remembered(self, model: str, now: float) -> float:
        return self.count[model] * math.exp(-max(now - self.asked_at[model], 0.0) / self.memory_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidencySettings:
    """How much is kept, and for how long; docs/hosting.md has what each was chosen by."""

    # How models are valued against each other.
    worth: type[KeepingWorth] = KeepingWorth
    # Over how long demand is forgotten: a request counts for 1/e of itself after this time.
    demand_memory_s: float = 1800.0
    # A model that was loaded stays for so many seconds in any case, and for so many times its own load while it is
    # asked for.
    min_residence_s: float = 5.0
    residence_loads: float = 2.0
    # A newcomer's worth must be so many times that of whom it evicts, or it waits so many times its own load; then
    # it gets its turn whatever it is worth.
    margin: float = 0.5
    patience_loads: float = 1.0
    # Loads no longer than this are not waited for: patience would cost more than they do.
    short_load_s: float = 3.0
    # What is expected until a busy model has finished its requests.
    drain_s: float = 10.0
    # Requests in flight on each of a model's replicas from which another copy is worth its memory.
    copy_at_in_flight: float = 16.0
    # After a failed load, doubled with each further one.
    backoff_s: float = 5.0
    most_backoff_s: float = 300.0

    def residence_s(self, hosted: Hosted) -> float:
        return max(self.min_residence_s, self.residence_loads * hosted.load_s)

    def waits_s(self, hosted: Hosted) -> float:
        return self.patience_loads * hosted.load_s if hosted.load_s > self.short_load_s else 0.0


@dataclass(slots=True, eq=False)
class ModelCounts:
    """What happened to one model."""

    # Requests, and those of them that came while the model was nowhere resident.
    asked: int = 0
    cold_waits: int = 0
    loads: int = 0
    evictions: int = 0
    failed: int = 0
    # How long loads took.
    load_s: Histogram = field(default_factory=lambda: Histogram(BUCKETS_S))
