"""A shared pool by the clock: requests for many models, a residency that decides, loads that take their time.

What is simulated is who waits for a model to be loaded, and how often models are evicted. A request takes its
replica for a given time, however many others are there: speeds are `sim.engine`'s matter.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

import numpy as np
from numpy.typing import NDArray

from crosstie.host.hosted import Hosted, ModelCounts, Move, ResidencySettings, Slot
from crosstie.host.residency import Residency

Array = NDArray[np.float64]

# How often it is looked for loads that nobody waits for.
_AHEAD_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class HostedTraffic:
    """Requests in order of time: when, which model (by its place among the hosted), and how long each takes."""

    at_s: Array
    model: NDArray[np.int64]
    takes_s: Array

    @property
    def span_s(self) -> float:
        return float(self.at_s[-1]) if len(self.at_s) else 0.0


@dataclass(frozen=True, slots=True)
class HostingResult:
    """What came of it, after the warm-up."""

    requests: int
    # Requests that found their model absent, and how long each of these waited for it.
    cold: int
    cold_wait_s: Array
    loads: int
    evictions: int
    hours: float
    # The fullest that any replica was, as a share of its memory.
    fullest: float
    # From the first moment on.
    counts: dict[str, ModelCounts]

    @property
    def cold_share(self) -> float:
        return self.cold / self.requests if self.requests else 0.0

    @property
    def evictions_per_hour(self) -> float:
        return self.evictions / self.hours if self.hours else 0.0

    def wait_s(self, quantile: float) -> float:
        return float(np.quantile(self.cold_wait_s, quantile)) if len(self.cold_wait_s) else 0.0


def host(
    hosted: Sequence[Hosted],
    capacity_bytes: Sequence[float],
    traffic: HostedTraffic,
    settings: ResidencySettings | None = None,
    *,
    warm_up_s: float = 0.0,
    ahead: bool = True,
) -> HostingResult:
    """`ahead`: whether models are also loaded that nobody waits for."""
    slots = [Slot(f"replica-{place}", size) for place, size in enumerate(capacity_bytes)]
    return _Run(Residency(hosted, slots, 0.0, settings), traffic, warm_up_s, ahead).result()


class _Run:
    def __init__(self, residency: Residency, traffic: HostedTraffic, warm_up_s: float, ahead: bool) -> None:
        self.residency = residency
        self.names = list(residency.hosted)
        self.traffic, self.warm_up_s = traffic, warm_up_s
        self.in_flight: dict[tuple[str, str], int] = {}
        # Of each model: the requests that wait for it; and when it is asked for next.
        self.waiting: dict[str, list[int]] = {}
        self.retry_at: dict[str, float] = {}
        self.wait_s = np.zeros(len(traffic.at_s))
        self.was_cold = np.zeros(len(traffic.at_s), bool)
        # When, in which order, and what then to do.
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.order = count()
        self.loads = self.evictions = 0
        self.fullest = 0.0
        self.ahead = ahead

    def busy(self, slot: str, model: str) -> int:
        return self.in_flight.get((slot, model), 0)

    def later(self, at: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self.events, (at, next(self.order), do))

    def result(self) -> HostingResult:
        arrivals = self.traffic.at_s
        if self.ahead:
            self.later(_AHEAD_EVERY_S, self._load_ahead)
        arrived = 0
        # After the last arrival only requests and loads are left to end; one event is the next look ahead.
        while arrived < len(arrivals) or len(self.events) > self.ahead:
            if arrived < len(arrivals) and (not self.events or arrivals[arrived] <= self.events[0][0]):
                self._arrive(arrived, float(arrivals[arrived]))
                arrived += 1
                continue
            now, _, do = heapq.heappop(self.events)
            do(now)
        counted = arrivals >= self.warm_up_s
        return HostingResult(
            requests=int(counted.sum()),
            cold=int((self.was_cold & counted).sum()),
            cold_wait_s=self.wait_s[self.was_cold & counted],
            loads=self.loads,
            evictions=self.evictions,
            hours=max(self.traffic.span_s - self.warm_up_s, 0.0) / 3600.0,
            fullest=self.fullest,
            counts=self.residency.counts,
        )

    def _arrive(self, request: int, now: float) -> None:
        model = self.names[int(self.traffic.model[request])]
        self.residency.asked(model, now)
        if self._served(request, model, now):
            return
        self.was_cold[request] = True
        self.waiting.setdefault(model, []).append(request)
        self._try(model, now)

    def _served(self, request: int, model: str, now: float) -> bool:
        on = self.residency.resident(model)
        if not on:
            return False
        slot = min(on, key=lambda one: self.busy(one.key, model))
        self.in_flight[slot.key, model] = self.busy(slot.key, model) + 1
        self.wait_s[request] = now - float(self.traffic.at_s[request])
        self.later(now + float(self.traffic.takes_s[request]), partial(self._end, slot.key, model))
        return True

    def _try(self, model: str, now: float) -> None:
        """Serves whoever waits for a model, or asks for it to be loaded."""
        left = [request for request in self.waiting.get(model, ()) if not self._served(request, model, now)]
        if not left:
            self.waiting.pop(model, None)
            return
        self.waiting[model] = left
        move = self.residency.wanted(model, now, self.busy)
        if move is not None:
            self._make(move, now)
            return
        at = now + self.residency.why_waiting(model).retry_s
        if not now < self.retry_at.get(model, 0.0) <= at:
            self.retry_at[model] = at
            self.later(at, partial(self._try, model))

    def _make(self, move: Move, now: float) -> None:
        self.residency.began(move, now)
        if now >= self.warm_up_s:
            self.loads += 1
            self.evictions += len(move.evict)
        used = move.slot.used_bytes(self.residency.hosted)
        self.fullest = max(self.fullest, used / move.slot.capacity_bytes)
        # Unloading takes no time: vLLM's sleep discards the cache, and weights are on the host already.
        self.later(now + move.load.load_s, partial(self._loaded, move))

    def _end(self, slot: str, model: str, now: float) -> None:
        self.in_flight[slot, model] -= 1
        if not self.in_flight[slot, model]:
            self._try_all(now)

    def _loaded(self, move: Move, now: float) -> None:
        self.residency.loaded(move, now)
        self._try_all(now)

    def _try_all(self, now: float) -> None:
        """A replica is idle of a model, or has ended a load: that is what others may have waited for."""
        for model in list(self.waiting):
            self._try(model, now)

    def _load_ahead(self, now: float) -> None:
        move = self.residency.ahead(now, self.busy)
        if move is not None:
            self._make(move, now)
        self.later(now + _AHEAD_EVERY_S, self._load_ahead)
