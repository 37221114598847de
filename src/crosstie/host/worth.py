"""What it is worth to keep a model resident: the seconds that requests would wait for its return, by byte it takes.

Three answers to it, which the simulation compares (docs/hosting.md):

    demand      requests a second, forgotten over time, x seconds to load / bytes
    recency     when it was last asked for: plain LRU
    frequency   requests since it was loaded x seconds to load / bytes, above the worth of the last one evicted:
                greedy-dual-size-frequency (Cherkasova 1998), which ages by evictions instead of by time
"""

import math
from collections.abc import Iterable

from crosstie.core.errors import BadInput
from crosstie.host.hosted import Hosted, ResidencySettings

KINDS = ("demand", "recency", "frequency")


class Worth:
    __slots__ = ("_at", "_count", "_floor", "_hosted", "_kind", "_memory_s", "_score")

    def __init__(self, hosted: Iterable[Hosted], settings: ResidencySettings, now: float) -> None:
        if settings.worth not in KINDS:
            raise BadInput(f"worth '{settings.worth}' is not one of {', '.join(KINDS)}")
        self._kind = settings.worth
        self._memory_s = settings.demand_memory_s
        self._hosted = {one.model: one for one in hosted}
        # Of each model: requests, as far as they are remembered, and when that was.
        self._count = dict.fromkeys(self._hosted, 0.0)
        self._at = dict.fromkeys(self._hosted, now)
        self._score = dict.fromkeys(self._hosted, 0.0)
        self._floor = 0.0

    def asked(self, model: str, now: float) -> None:
        if self._kind == "frequency":
            self._count[model] += 1.0
            self._score[model] = self._floor + self._count[model] * self._reload_by_byte(model)
        else:
            self._count[model] = self._remembered(model, now) + 1.0
        self._at[model] = now

    def evicted(self, model: str, now: float) -> None:
        if self._kind == "frequency":
            self._floor = max(self._floor, self._score[model])
            self._count[model] = 0.0

    def per_byte(self, model: str, now: float) -> float:
        """By this residents are compared; the least goes first."""
        if self._kind == "recency":
            return self._at[model]
        if self._kind == "frequency":
            return self._score[model]
        return self.requests_per_s(model, now) * self._reload_by_byte(model)

    def lost(self, model: str, now: float) -> float:
        """What its eviction costs; by demand, the seconds that are waited in a second of its absence."""
        if self._kind == "demand":
            return self.requests_per_s(model, now) * self._hosted[model].load_s
        return self.per_byte(model, now)

    def combined(self, losses: Iterable[float]) -> float:
        """Seconds add up; ranks do not, there the dearest counts."""
        return sum(losses) if self._kind == "demand" else max(losses)

    def deserves(self, model: str, loss: float, margin: float, now: float) -> bool:
        """Whether a newcomer may evict without waiting. Ranks know no margin: whoever is asked for comes in."""
        return self._kind != "demand" or self.lost(model, now) >= margin * loss

    def asked_at(self, model: str) -> float:
        """When it was last asked for."""
        return self._at[model]

    def requests_per_s(self, model: str, now: float) -> float:
        return self._remembered(model, now) / self._memory_s

    def _remembered(self, model: str, now: float) -> float:
        return self._count[model] * math.exp(-max(now - self._at[model], 0.0) / self._memory_s)

    def _reload_by_byte(self, model: str) -> float:
        one = self._hosted[model]
        return one.load_s / max(one.taken_bytes, 1.0)
