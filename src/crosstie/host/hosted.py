"""The nouns of a shared pool: models that it hosts, replicas with their memory, moves, and what is counted."""

from collections.abc import Mapping, Sequence
from typing import Final

# Upper ends of the buckets that loads and waits are counted in, in seconds; whatever is longer is counted after them.
BUCKETS_S: Final = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Hosted:
    """One model of a shared pool: what it takes of a replica's memory while it is resident, and how long it loads."""

    __slots__ = ("bytes", "load_s", "min_kv_bytes", "model", "pinned")

    def __init__(
        self, model: str, bytes: float, load_s: float, *, min_kv_bytes: float = 0.0, pinned: bool = False
    ) -> None:
        self.model = model
        # Weights and what the engine keeps beside them; the least cache that it may run with comes on top.
        self.bytes = bytes
        self.load_s = load_s
        self.min_kv_bytes = min_kv_bytes
        self.pinned = pinned

    @property
    def taken_bytes(self) -> float:
        return self.bytes + self.min_kv_bytes


class Slot:
    """One replica's memory, and what is on it."""

    __slots__ = (
        "capacity_bytes", "claimed_by", "key", "leaving", "loading", "loading_since", "resident", "unable", "usable",
    )  # fmt: skip

    def __init__(self, key: str, capacity_bytes: float) -> None:
        self.key = key
        # Memory that models may take: weights and their least cache.
        self.capacity_bytes = capacity_bytes
        # Model, and since when.
        self.resident: dict[str, float] = {}
        # One at a time: they share the link, so that two at once are both late.
        self.loading: str | None = None
        self.loading_since = 0.0
        # The model that is to come next, and those that finish what they have so that it can.
        self.claimed_by: str | None = None
        self.leaving: frozenset[str] = frozenset()
        # False while the replica does not answer; then nothing is served or loaded there.
        self.usable = True
        # Models that cannot be loaded there for now: their server is down, or has just failed to.
        self.unable: set[str] = set()

    def serves(self, model: str) -> bool:
        return self.usable and model in self.resident and model not in self.leaving

    def used_bytes(self, hosted: Mapping[str, Hosted]) -> float:
        taken = sum(hosted[model].taken_bytes for model in self.resident)
        return taken + (hosted[self.loading].taken_bytes if self.loading is not None else 0.0)


class Move:
    """Load one model on a replica, after those in its way have been unloaded."""

    __slots__ = ("evict", "load", "slot", "why")

    def __init__(self, slot: Slot, load: Hosted, evict: tuple[str, ...], why: str) -> None:
        self.slot = slot
        self.load = load
        self.evict = evict
        self.why = why


class Wait:
    """Why a model is not loaded yet, and in how many seconds to ask again at the latest."""

    __slots__ = ("retry_s", "why")

    def __init__(self, why: str, retry_s: float) -> None:
        self.why = why
        self.retry_s = retry_s


class WaitingModel:
    """A model that was asked for where it is not: since when, and what its clients were told."""

    __slots__ = ("asked_at", "counted", "since", "there", "told")

    def __init__(self, now: float) -> None:
        self.since = now
        self.asked_at = now
        self.told = Wait("", 0.0)
        self.counted = False
        # Whether anybody waits at present, or has only not been gone for long.
        self.there = True


class ResidencySettings:
    """How much is kept, and for how long; docs/hosting.md has what each was chosen by."""

    __slots__ = (
        "backoff_s", "copy_at_in_flight", "demand_memory_s", "drain_s", "margin", "min_residence_s", "most_backoff_s",
        "patience_loads", "residence_loads", "short_load_s", "worth",
    )  # fmt: skip

    def __init__(
        self,
        *,
        worth: str = "demand",
        demand_memory_s: float = 1800.0,
        min_residence_s: float = 5.0,
        residence_loads: float = 2.0,
        margin: float = 0.5,
        drain_s: float = 10.0,
        patience_loads: float = 1.0,
        short_load_s: float = 3.0,
        copy_at_in_flight: float = 16.0,
        backoff_s: float = 5.0,
        most_backoff_s: float = 300.0,
    ) -> None:
        # How models are valued against each other: "demand", "recency" or "frequency" (host/worth.py).
        self.worth = worth
        # Over how long demand is forgotten: a request counts for 1/e of itself after this time.
        self.demand_memory_s = demand_memory_s
        # A model that was loaded stays for so many seconds in any case, and for so many times its own load while it is
        # asked for.
        self.min_residence_s = min_residence_s
        self.residence_loads = residence_loads
        # A newcomer's worth must be so many times that of whom it evicts, or it waits so many times its own load; then
        # it gets its turn whatever it is worth.
        self.margin = margin
        self.patience_loads = patience_loads
        # Loads no longer than this are not waited for: patience would cost more than they do.
        self.short_load_s = short_load_s
        # What is expected until a busy model has finished its requests.
        self.drain_s = drain_s
        # Requests in flight on each of a model's replicas from which another copy is worth its memory.
        self.copy_at_in_flight = copy_at_in_flight
        # After a failed load, doubled with each further one.
        self.backoff_s = backoff_s
        self.most_backoff_s = most_backoff_s

    def residence_s(self, hosted: Hosted) -> float:
        return max(self.min_residence_s, self.residence_loads * hosted.load_s)

    def waits_s(self, hosted: Hosted) -> float:
        return self.patience_loads * hosted.load_s if hosted.load_s > self.short_load_s else 0.0


class Histogram:
    """Durations in buckets, with their sum: what Prometheus takes."""

    __slots__ = ("buckets", "count", "total_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BUCKETS_S) + 1)
        self.count = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        place = 0
        while place < len(BUCKETS_S) and seconds > BUCKETS_S[place]:
            place += 1
        self.buckets[place] += 1
        self.count += 1
        self.total_s += seconds


class ModelCounts:
    """What happened to one model, or to all of them."""

    __slots__ = ("asked", "cold_waits", "evictions", "failed", "load_s", "loads", "refused_thrash", "wait_s")

    def __init__(self) -> None:
        # Requests, and those of them that came while the model was nowhere resident.
        self.asked = 0
        self.cold_waits = 0
        self.loads = 0
        self.evictions = 0
        self.failed = 0
        # Times that a model had to wait although others could have been evicted for it.
        self.refused_thrash = 0
        # How long loads took, and how long from the first request that found the model absent to its being there.
        self.load_s = Histogram()
        self.wait_s = Histogram()


class PoolCounts(ModelCounts):
    """Of the whole pool, and by model."""

    __slots__ = ("by_model",)

    def __init__(self, models: Sequence[str]) -> None:
        super().__init__()
        self.by_model = {model: ModelCounts() for model in models}
