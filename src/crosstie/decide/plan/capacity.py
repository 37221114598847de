"""How many requests a second a replica takes while the percentiles of its classes hold, for every replica at once.

`perf` gives the means of a steady state; targets are percentiles of open traffic, over all requests of a class. A pool
is looked at under the mixture of requests that it is meant for, at a level of load: the time of a token, the same for
all that decode together. There, in closed form,

    what each part takes       a replica that makes a token in that time takes X(p) requests a second of part p alone,
                               and of a mixture 1 / sum of share / X: both a decode step and the time that prompts take
                               from it are sums over the requests
    TTFT of a length           its own prefill, and the wait for others': prefill is busy a share r of the time, and
                               replicas that share their traffic wait less (Sakasegawa's formula for several servers)
    TPOT of an answer          the time of a token, more for long contexts, with a spread of two parts: how many are in
                               flight, which averages out over a pool, and how often prompts stall this very answer,
                               which averages out over its tokens

and from both the share of each part's requests that keep the class's targets. The highest level at which the shares of
every class come up to its percentiles is where the pool is run. `plan.search` simulates what comes of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from crosstie.core.disaggregated import Servable
from crosstie.core.estimate import METRICS
from crosstie.core.workload import RequestClass, Slice, Target
from crosstie.decide.plan.reuse import loaded, room_beside_idle
from crosstie.perf.hardware import Array, Hardware, Mask
from crosstie.perf.memory import cache_sequences
from crosstie.perf.rounding import nine_digits
from crosstie.perf.steady_state import prefill_alone

# Mean requests in flight at which replicas are evaluated; between them logarithms are interpolated.
GRID = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0])
# Levels of load between an all but empty replica and its fullest, at which all parts are looked up once.
_LEVELS = 24
_BISECTIONS = 8
# Numbers in an array of cases, about: a megabyte of them.
_VALUES = 120_000
# What keeps a replica from taking more.
LIMITS = ("TPOT target", "TTFT target", "memory", "engine limit", "throughput")
_TPOT, _TTFT, _MEMORY, _ENGINE, _FULL = range(len(LIMITS))
# A replica that is saturated has no elasticity left; this is as little as it counts for.
_STIFFEST = 0.02
# Prompts take no more of a replica's time than this, whatever the targets: beyond, queues never end.
_BUSIEST = 0.95
# A replica that keeps its targets only while it is idle nine tenths of the time does not keep them.
_LEAST_IN_FLIGHT = 0.1
# Lengths within a slice at which its requests are looked at.
_POINTS = 4
# A request beyond its class's percentile may be late by so many times its target, or what the fastest replica needs.
LATEST = 3.0
# Of the replicas of a pool, how many count as one queue: the router sends at once, and knows loads only about.
_POOLED = 0.5
_MOST_POOLED = 64.0
# What the router leaves of the spread that independent replicas would have: it sends a request where fewest are in
# flight and prompts where they stall least. By simulation of eleven workloads, one pool each.
_CROWD = 0.5
_STALLED = 0.5
# In flight at most, over what the strictest target bears on average.
_CROWDED = 2.0
# Standard deviations of requests in flight that memory must hold.
_HELD_DEVIATIONS = 1.3


@dataclass(frozen=True, slots=True)
class Tier:
    """What a pool promises to all that it serves, in seconds; infinite where it promises nothing."""

    ttft_s: float
    tpot_s: float

    def admits(self, request_class: RequestClass) -> bool:
        wanted = tier_of(request_class)
        return wanted.ttft_s >= self.ttft_s and wanted.tpot_s >= self.tpot_s

    def is_asked_by(self, request_class: RequestClass) -> bool:
        """Whether the class is as strict as the tier in some target, or neither has any."""
        wanted = tier_of(request_class)
        strict = wanted.ttft_s <= self.ttft_s < np.inf or wanted.tpot_s <= self.tpot_s < np.inf
        return strict or wanted == self


def tier_of(one: RequestClass) -> Tier:
    return Tier(one.ttft.seconds if one.ttft else np.inf, one.tpot.seconds if one.tpot else np.inf)


@dataclass(frozen=True, slots=True)
class TrafficPart:
    """A slice of the traffic with the class it belongs to, at today's peak."""

    request_class: RequestClass
    slice: Slice
    index: int

    @property
    def requests_per_s(self) -> float:
        return self.request_class.requests_per_s * self.slice.share


class ByDeployment:
    """Arrays whose rows are deployments, in the order of the caller's list; rows may repeat."""

    __slots__ = ()

    def rows(self, index: Sequence[int] | NDArray[np.int64] | slice) -> Self:
        return type(self)(*(getattr(self, field.name)[index] for field in fields(self)))  # type: ignore[arg-type]

    @classmethod
    def stacked(cls, several: Sequence[Self]) -> Self:
        """The rows of one after those of the other."""
        return cls(*(np.concatenate([getattr(one, f.name) for one in several]) for f in fields(cls)))  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class EstimateScale(ByDeployment):
    """Factors on what the model says: on its times and rates, 1 for the estimates as they are."""

    ttft: Array
    tpot: Array
    rate: Array

    @classmethod
    def none(cls, deployments: Sequence[Servable]) -> Self:
        one = np.ones(len(deployments))
        return cls(one, one, one)

    @classmethod
    def of_logs(cls, logs: Array) -> Self:
        """From (deployments, METRICS) logarithms."""
        found = dict(zip(METRICS, np.exp(logs).T, strict=True))
        return cls(ttft=found["ttft"], tpot=found["tpot"], rate=found["throughput"])


@dataclass(frozen=True, slots=True)
class LoadCurve(ByDeployment):
    """One slice: arrays (deployments, GRID) under load, and what a request alone sees."""

    tpot_s: Array
    found_room_s: Array
    service_s: Array
    requests_per_s: Array
    alone_tpot_s: Array
    alone_ttft_s: Array
    # (deployments, _POINTS): what prompts of the slice take beyond its mean one, from the shortest to the longest.
    extra_s: Array
    # Mean prompts that a full step has room for.
    prompts_a_step: Array
    room: Array
    engine_limit: Array
    # Whether prompts stall those that decode: 1, or 0 where they are computed elsewhere.
    stalls: Array


@dataclass(frozen=True, slots=True)
class Capacity(ByDeployment):
    """Requests/s within the targets, at how many in flight, and what limits them (an index of LIMITS)."""

    requests_per_s: Array
    in_flight: Array
    # The most at once that the promise bears.
    most_in_flight: Array
    limit: NDArray[np.int64]
    # Means at that load.
    ttft_s: Array
    tpot_s: Array
    # Shares of the part's requests that keep the TTFT and the TPOT of their class.
    keeps_ttft: Array
    keeps_tpot: Array

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> Self:
        """To be filled in: (pools that could be, parts of the traffic)."""
        return cls(*(np.zeros(shape, np.int64 if f.name == "limit" else np.float64) for f in fields(cls)))  # type: ignore[arg-type]

    def fill(self, rows: slice | NDArray[np.int64], parts: Sequence[int] | slice, found: Self) -> None:
        for field in fields(self):
            getattr(self, field.name)[rows, parts] = getattr(found, field.name)

    def of_parts(self, parts: Sequence[int]) -> Self:
        return type(self)(*(getattr(self, f.name)[:, parts] for f in fields(self)))

    def faster(self, factor: Array) -> Self:
        """With so many times the requests a second, by row; all else as it is."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{**values, "requests_per_s": nine_digits(self.requests_per_s * factor[:, None])})


def curves(hardware: Hardware, slices: Sequence[Slice]) -> list[LoadCurve]:
    """All slices of a model on deployments of one precision.

    Open traffic that finds n requests there on average is like a closed loop of n + 1 clients, each of whom finds the
    n others (the arrival theorem).
    """
    clients = np.concatenate(([1.0], GRID + 1.0))
    count = len(clients)
    under = loaded(hardware, slices, clients)
    got = under.steady
    # What is cached at a middling load, and of the prompts of the sample as much of what each could have.
    cached = under.cached_tokens.reshape(len(hardware.deployments), len(slices), count)[:, :, count // 2]
    extra = extra_prefill_s(hardware, slices, cached)
    contexts = np.array([float(s.context) for s in slices])
    # Each attention replica holds its own requests, and a whole one at least.
    whole = np.stack([cache_sequences(d, contexts) / d.parallelism.dp for d in hardware.deployments])
    load_curves = []
    for k, one in enumerate(slices):
        alone, filled = k * count, slice(k * count + 1, (k + 1) * count)
        # Of the n + 1 clients one is oneself. What is loaded from other memory comes one after the other.
        most_loaded = hardware.dp / np.maximum(under.load_s[:, filled], 1e-12)
        rates = np.minimum(got.requests_per_s[:, filled] * GRID / (GRID + 1.0), most_loaded)
        room = room_beside_idle(hardware, one, got.concurrency_that_fits[:, alone], GRID, rates)
        load_curves.append(
            LoadCurve(
                tpot_s=got.tpot_s[:, filled],
                found_room_s=got.found_room_s[:, filled] + under.load_s[:, filled],
                service_s=got.service_s[:, filled],
                requests_per_s=rates,
                alone_tpot_s=got.tpot_s[:, alone],
                alone_ttft_s=got.found_room_s[:, alone] + under.load_s[:, alone],
                extra_s=extra[:, k],
                prompts_a_step=np.maximum(
                    (hardware.chunk_tokens * hardware.dp)[:, 0] / np.maximum(one.input_tokens - cached[:, k], 1.0), 1.0
                ),
                # A replica that cannot hold the longest request serves none of the slice.
                room=np.where(whole[:, k] >= 1.0, room, 0.0),
                engine_limit=hardware.max_sequences[:, 0],
                stalls=np.ones(len(hardware.deployments)),
            )
        )
    return load_curves


def _prompts(one: Slice) -> tuple[Array, Array]:
    """Prompts of a slice from those with least to compute to those with most, and what could be cached of them."""
    inputs = np.array([float(tokens) for tokens, _ in one.sample])
    cached = np.array(one.cached_sample) if one.cached_sample else np.zeros_like(inputs)
    order = np.argsort(inputs - cached, kind="stable")
    places = order[((np.arange(_POINTS) + 0.5) * len(order) / _POINTS).astype(int)]
    return inputs[places], cached[places]


def extra_prefill_s(hardware: Hardware, slices: Sequence[Slice], cached: Array) -> Array:
    """(deployments, slices, _POINTS): what a slice's prompts take beyond its mean one, of which `cached` tokens are."""
    means = np.array([s.input_tokens for s in slices])
    most = np.array([max(s.cached_tokens, 1e-9) for s in slices])
    points, held = (np.array(every) for every in zip(*(_prompts(s) for s in slices), strict=True))
    fresh = np.maximum(points - held * (cached / most)[:, :, None], 1.0)
    flat = fresh.reshape(len(fresh), -1)
    extra = _prefill_s(hardware, flat, points.ravel() - flat).reshape(fresh.shape)
    return np.asarray(extra - _prefill_s(hardware, np.maximum(means - cached, 1.0), cached)[:, :, None])


def _points(values: Sequence[float]) -> Array:
    """The middles of as many equal parts of a sample."""
    ranked = np.sort(np.asarray(values, np.float64))
    return np.asarray(ranked[((np.arange(_POINTS) + 0.5) * len(ranked) / _POINTS).astype(int)])


def _prefill_s(hardware: Hardware, fresh: Array, cached: Array) -> Array:
    """A prompt's chunks one after the other, with nothing else in the steps; (deployments, prompts)."""
    chunks = np.maximum(fresh / hardware.chunk_tokens, 1.0)
    return np.asarray(chunks * prefill_alone(hardware, fresh + cached, cached).total_s)


def own_ttft_s(curve: LoadCurve, scale: EstimateScale) -> Array:
    """TTFT of a mean prompt of the slice on a replica that is otherwise idle; a row a deployment."""
    return curve.alone_ttft_s * scale.ttft


class PartTargets:
    """What the classes of a model's parts ask; by part, infinite where a class asks nothing."""

    def __init__(self, parts: Sequence[TrafficPart]):
        classes = [part.request_class for part in parts]
        self.ttft_s = np.array([one.ttft.seconds if one.ttft else np.inf for one in classes])
        self.tpot_s = np.array([one.tpot.seconds if one.tpot else np.inf for one in classes])
        self.classes = list({id(request_class): request_class for request_class in classes}.values())
        self.class_of = np.array([[id(c) for c in self.classes].index(id(request_class)) for request_class in classes])


@dataclass(frozen=True, slots=True)
class Meant:
    """What a pool is meant for: `share` by part, nil where a part is not meant.

    `requests_per_s`: of all of it, for as many replicas as that takes share their traffic. `allowance`: times the
    share of requests that may miss; what one pool takes more of it another has to leave.
    """

    targets: PartTargets
    share: Array
    requests_per_s: float
    allowance: float = 1.0


class Levels:
    """All parts of a model at levels of load: (deployments, levels, parts).

    A level is the time of a token, from that of an all but empty replica to its fullest, in equal steps of its
    logarithm; what a replica takes of each part alone at that time is looked up once and interpolated from then on.
    """

    def __init__(self, parts: Sequence[TrafficPart], load_curves: Sequence[LoadCurve], scale: EstimateScale):
        self.targets = PartTargets(parts)
        tpot = np.stack([c.tpot_s for c in load_curves], axis=1) * scale.tpot[:, None, None]
        alone = np.stack([c.alone_tpot_s for c in load_curves], axis=1) * scale.tpot[:, None]
        first = np.maximum(tpot[:, :, 0], alone * (1.0 + 1e-9))
        # What a token takes before anybody's own context and prompts.
        empty = np.maximum(2.0 * alone - first, 0.5 * alone)
        low, high = empty.min(axis=1) * 1.001, np.maximum(tpot.max(axis=(1, 2)), empty.min(axis=1) * 1.01)
        steps = np.linspace(0.0, 1.0, _LEVELS)
        self.tpot_s = low[:, None] * (high / low)[:, None] ** steps
        in_flight = _largest_within(tpot[:, None], self.tpot_s[:, :, None], empty[:, None])

        def at_level(name: str) -> Array:
            return at_or_first(np.stack([getattr(c, name) for c in load_curves], axis=1)[:, None], in_flight)

        self.in_flight = in_flight
        self.requests_per_s = at_level("requests_per_s") * np.minimum(in_flight, 1.0) * scale.rate[:, None, None]
        self.service_s = at_level("service_s") / scale.rate[:, None, None]
        self.own_s = at_level("found_room_s") * scale.ttft[:, None, None]
        # One table, since they are looked up together.
        self.table = np.stack((self.requests_per_s, self.service_s, self.own_s, in_flight), axis=-1)
        self.extra_s = np.stack([c.extra_s for c in load_curves], axis=1) * scale.ttft[:, None, None]
        self.room = np.stack([c.room for c in load_curves], axis=1)
        self.prompts_a_step = np.stack([c.prompts_a_step for c in load_curves], axis=1)
        self.engine_limit, self.stalls = load_curves[0].engine_limit, load_curves[0].stalls
        # A long context makes one's own tokens slower than those of the others.
        self.slower_s = alone
        self.later = np.array([_points([max(o - 1.0, 0.0) for _, o in p.slice.sample]) for p in parts])
        self.spread = np.array([p.slice.input_dispersion for p in parts])
        self._idle_s = np.stack([c.alone_ttft_s for c in load_curves], axis=1) * scale.ttft[:, None]

    def able(self, targets: PartTargets) -> Mask:
        """(deployments, parts): nobody is sent where it takes far longer than it may, or has to."""
        fastest = np.where(self.room > 0, self._idle_s, np.inf).min(axis=0, initial=np.inf)
        return np.asarray((self.room > 0) & (self._idle_s <= LATEST * np.maximum(targets.ttft_s, fastest)))


class _Cases:
    """Deployments that are each meant for something: a row a pair of both, and in it some parts of the traffic."""

    def __init__(self, levels: Levels, meant: Sequence[Meant], pair: NDArray[np.int64], *, all_parts: bool):
        """`pair`: places of what is meant, times deployments, plus those of deployments."""
        self.levels = levels
        rows = len(levels.room)
        share = np.stack([one.share for one in meant])
        every = share.shape[1]
        # Parts that are meant come first, and of others as many as make the rows equally long; they weigh nothing.
        width = every if all_parts else int((share > 0).sum(axis=1).max())
        parts = np.argsort(share <= 0, axis=1, kind="stable")[:, :width]
        parts = np.tile(np.arange(every), (len(meant), 1)) if all_parts else parts
        which = np.arange(len(meant))[:, None]
        weights = share / share.sum(axis=1, keepdims=True)
        ttft_s, tpot_s = (np.stack([getattr(one.targets, of) for one in meant]) for of in ("ttft_s", "tpot_s"))
        needs, within = _needs(meant, weights)
        tokens = weights * np.maximum(levels.later.mean(axis=1), 1e-9)
        usual = levels.slower_s @ (tokens / tokens.sum(axis=1, keepdims=True)).T
        self.pair, self.m, self.d = pair, pair // rows, pair % rows
        self.parts, self.weight = parts[self.m], weights[which, parts][self.m]
        self.demand = np.array([one.requests_per_s for one in meant])[self.m]
        self.ttft_s, self.tpot_s = ttft_s[which, parts][self.m], tpot_s[which, parts][self.m]
        self.needs, self.within = (
            needs[self.m],
            within[which[:, :, None], np.arange(within.shape[1])[:, None], parts[:, None]][self.m],
        )
        here = self.d[:, None], self.parts
        self.room, self.prompts_a_step = levels.room[here], levels.prompts_a_step[here]
        self.extra_s, self.later, self.spread = (
            levels.extra_s[here],
            levels.later[self.parts],
            levels.spread[self.parts],
        )
        self.slower_s = levels.slower_s[here] - usual[self.d, self.m][:, None]
        self.stalls = levels.stalls[self.d]
        # In flight of the mixture, as if each part had all of it.
        self.crowd = np.moveaxis(levels.in_flight @ weights.T, 2, 0)[self.m, self.d]

    def state(self, level: Array) -> "_State":
        levels, weight = self.levels, self.weight
        low = np.minimum(level.astype(int), _LEVELS - 2)
        into = level - low
        rest = 1.0 - into
        before = levels.table[self.d[:, None], low[:, None], self.parts]
        after = levels.table[self.d[:, None], low[:, None] + 1, self.parts]
        rate, service, own, each = np.moveaxis(before * rest[:, None, None] + after * into[:, None, None], 2, 0)
        tpot = levels.tpot_s[self.d, low] * rest + levels.tpot_s[self.d, low + 1] * into
        rate = np.maximum(rate, 1e-12)
        taken = weight / rate
        together = 1.0 / taken.sum(axis=1)
        part_of = taken * together[:, None]
        in_flight = (part_of * each).sum(axis=1)
        mean_s = (weight * service).sum(axis=1)
        busy = np.minimum(together * mean_s, 0.999)
        # Twice what is left of a prompt's service when another comes.
        residual = (weight * service**2 * self.spread).sum(axis=1) / np.maximum(mean_s, 1e-12)
        replicas = np.clip(self.demand / together, 1.0, _MOST_POOLED)
        pooled = 1.0 + _POOLED * (replicas - 1.0)
        return _State(
            busy=busy,
            in_flight=in_flight,
            rate=rate,
            service_s=service,
            own_s=own,
            tpot_s=tpot,
            keeps_ttft=self._keeps_ttft(own, service, busy, residual, pooled),
            keeps_tpot=self._keeps_tpot(level, tpot, in_flight, busy, residual, pooled),
            held=(part_of * each / np.maximum(self.room, 1e-9)).sum(axis=1)
            * (1.0 + _HELD_DEVIATIONS / np.sqrt(np.maximum(in_flight * replicas, 1.0))),
        )

    def holds(self, state: "_State") -> tuple[Mask, NDArray[np.int64]]:
        """Whether the percentiles of all classes hold, and else what breaks first."""

        def broken(keeps: Array, target: int) -> Mask:
            return np.asarray(((self.within @ keeps[:, :, None])[:, :, 0] < self.needs[:, :, target]).any(axis=1))

        why = np.where(state.held > 1.0, _MEMORY, _FULL)
        why = np.where(broken(state.keeps_ttft, 0), _TTFT, why)
        why = np.where(broken(state.keeps_tpot, 1), _TPOT, why)
        return (why == _FULL) & (state.busy <= _BUSIEST), why

    def _keeps_ttft(self, own: Array, service: Array, busy: Array, residual: Array, pooled: Array) -> Array:
        if not np.isfinite(self.ttft_s).any():
            return np.ones_like(own)
        slack = (self.ttft_s - own)[:, :, None] - self.extra_s
        # Prompts that come meanwhile and share one's step end with it: a share of the wait, until the step is full.
        mates = ((self.prompts_a_step - 1.0) * service)[:, :, None]
        wait = np.maximum(slack / (1.0 + busy)[:, None, None], slack - mates)
        late = late_share(busy[:, None, None], residual[:, None, None], pooled[:, None, None], np.maximum(wait, 0.0))
        return np.asarray(np.where(slack > 0, 1.0 - late, 0.0).mean(axis=2))

    def _keeps_tpot(
        self, level: Array, tpot: Array, in_flight: Array, busy: Array, residual: Array, pooled: Array
    ) -> Array:
        if not np.isfinite(self.tpot_s).any():
            return np.ones_like(self.tpot_s)
        levels, rows = self.levels, np.arange(len(level))

        def crowd_at(level: Array) -> Array:
            low = np.minimum(level.astype(int), _LEVELS - 2)
            into = level - low
            found = self.crowd[rows, low] * (1.0 - into) + self.crowd[rows, low + 1] * into
            return np.asarray(np.maximum(found, 1e-9))

        mean = tpot[:, None] + self.slower_s
        # How the time of a token answers to more requests in flight, and these to the traffic.
        step = np.log(levels.tpot_s[:, 1] / levels.tpot_s[:, 0])[self.d]
        ahead = np.minimum(level + 0.5, _LEVELS - 1.0)
        per_request = 0.5 * step / np.maximum(np.log(crowd_at(ahead) / crowd_at(ahead - 0.5)), 1e-3)
        elasticity = np.clip(1.0 - per_request, _STIFFEST, 1.0)
        crowd = tpot * np.minimum(per_request, 1.0) / np.sqrt(np.maximum(in_flight * elasticity * pooled, 1e-6))
        crowd = _CROWD * np.minimum(crowd, tpot)
        stalls = self.stalls * _STALLED * busy * residual * tpot / (1.0 - np.minimum(busy, _BUSIEST)) ** 2
        spread = np.sqrt((crowd**2)[:, None, None] + stalls[:, None, None] / np.maximum(self.later, 1.0))
        above = (self.tpot_s - mean)[:, :, None] / np.maximum(spread, 1e-12)
        kept = np.where(self.later > 0, _normal(above), 1.0)
        return np.asarray(kept.mean(axis=2))


def _needs(meant: Sequence[Meant], weights: Array) -> tuple[Array, Array]:
    """By class of what is meant: the shares that must keep TTFT and TPOT, and what its parts weigh within it."""
    kinds = [np.unique(one.targets.class_of[weight > 0]) for one, weight in zip(meant, weights, strict=True)]
    most = max(map(len, kinds))
    needs, within = np.zeros((len(meant), most, 2)), np.zeros((len(meant), most, weights.shape[1]))
    for place, (one, weight) in enumerate(zip(meant, weights, strict=True)):
        for k, number in enumerate(kinds[place]):
            kind, mine = one.targets.classes[number], np.where(one.targets.class_of == number, weight, 0.0)
            within[place, k] = mine / mine.sum()
            needs[place, k] = _share(kind.ttft, one.allowance), _share(kind.tpot, one.allowance)
    return needs, within


@dataclass(frozen=True, slots=True)
class _State:
    """Cases at levels of load: by case, and by case and part."""

    busy: Array
    in_flight: Array
    rate: Array
    service_s: Array
    own_s: Array
    tpot_s: Array
    keeps_ttft: Array
    keeps_tpot: Array
    # Of memory or the engine's limit.
    held: Array


def operating_points(levels: Levels, meant: Sequence[Meant]) -> list[Capacity]:
    """Where each deployment runs if it is meant for each of these; what cannot serve one at all takes nothing of it.

    Many small arrays cost more than one large, and one that no cache holds more than several that fit.
    """
    rows, parts = levels.room.shape
    at_once = max(_VALUES // max(rows * parts * _POINTS, 1), 1)
    # Those of about as many parts together.
    order = sorted(range(len(meant)), key=lambda place: np.count_nonzero(meant[place].share))
    capacities: dict[int, Capacity] = {}
    for start in range(0, len(order), at_once):
        some = order[start : start + at_once]
        capacities.update(zip(some, _operating_points(levels, [meant[place] for place in some]), strict=True))
    return [capacities[place] for place in range(len(meant))]


def _operating_points(levels: Levels, meant: Sequence[Meant]) -> list[Capacity]:
    rows, parts = levels.room.shape
    able = np.stack([levels.able(one.targets) for one in meant])
    mine = np.stack([one.share > 0 for one in meant])
    serving = np.flatnonzero((able | ~mine[:, None, :]).all(axis=2))
    capacity = Capacity.empty((len(meant) * rows, parts))
    if len(serving):
        point = _found_points(levels, meant, serving)
        point.requests_per_s[~able.reshape(-1, parts)[serving]] = 0.0
        capacity.fill(serving, slice(None), point)
    return [capacity.rows(slice(start, start + rows)) for start in range(0, len(meant) * rows, rows)]


def _found_points(levels: Levels, meant: Sequence[Meant], pair: NDArray[np.int64]) -> Capacity:
    cases = _Cases(levels, meant, pair, all_parts=False)
    top = np.full(len(pair), _LEVELS - 1.0)
    whole, why = cases.holds(cases.state(top))
    why = np.where(whole, _FULL, why)
    level = top
    if not whole.all():
        left = np.flatnonzero(~whole)
        fewer = _Cases(levels, meant, pair[left], all_parts=False)
        low, high, reason = np.zeros(len(left)), top[left], why[left]
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            keeps, broke = fewer.holds(fewer.state(middle))
            low, high = np.where(keeps, middle, low), np.where(keeps, high, middle)
            reason = np.where(keeps, reason, broke)
        level[left], why[left] = low, reason
    cases = _Cases(levels, meant, pair, all_parts=True)
    state = cases.state(level)
    served = cases.holds(state)[0] & (state.in_flight >= _LEAST_IN_FLIGHT)
    # Where prompts are computed elsewhere, no part may keep that side busier than the mixture does.
    by_prefill = np.where(cases.stalls > 0, np.inf, state.busy)[:, None] / np.maximum(state.service_s, 1e-12)
    rate = np.where(served[:, None], np.minimum(state.rate, by_prefill), 0.0)
    engine = levels.engine_limit[cases.d]
    limit = np.where((why == _MEMORY) & (levels.room.max(axis=1)[cases.d] >= engine - 1e-9), _ENGINE, why)
    # What the strictest target bears if all are like the mixture; the gateway predicts each request, and short ones may
    # be more.
    promised = np.where(cases.weight > 0, cases.tpot_s, np.inf).min(axis=1)
    least = levels.tpot_s[cases.d, 0]
    step = np.log(levels.tpot_s[cases.d, 1] / least)
    worst = np.clip(np.log(np.minimum(promised, 1e6) / least) / step, level, _LEVELS - 1.0)
    most = np.clip(_CROWDED * cases.state(worst).in_flight, 1.0, np.minimum(engine, GRID[-1]))

    def by_part(values: Array) -> Array:
        return np.broadcast_to(values[:, None], rate.shape)

    return Capacity(
        requests_per_s=nine_digits(rate),
        in_flight=by_part(nine_digits(state.in_flight)),
        most_in_flight=by_part(nine_digits(most)),
        limit=np.broadcast_to(limit[:, None], rate.shape),
        ttft_s=nine_digits(state.own_s),
        tpot_s=by_part(nine_digits(state.tpot_s)),
        keeps_ttft=nine_digits(state.keeps_ttft),
        keeps_tpot=nine_digits(state.keeps_tpot),
    )


def _share(target: Target | None, allowance: float) -> float:
    return 1.0 - (1.0 - target.percentile) * allowance if target else 0.0


def late_share(busy: Array, residual: Array, pooled: Array, wait: Array) -> Array:
    """Of prompts, how many wait longer for prefill: Sakasegawa's formula for several servers, exact for one."""
    waits = busy ** (np.sqrt(2.0 * (pooled + 1.0)) - 1.0)
    return np.asarray(waits * np.exp(-(1.0 - busy) * pooled * wait / np.maximum(0.5 * residual, 1e-12)))


def _normal(deviations: Array) -> Array:
    """The normal distribution's share below, to three digits: a logistic curve."""
    z = np.clip(deviations, -8.0, 8.0)
    return np.asarray(1.0 / (1.0 + np.exp(-z * (1.5976 + 0.07056 * z * z))))


def _largest_within(values: Array, limit: Array, empty: Array) -> Array:
    """The most in flight at which a rising curve keeps the limit; `empty` is its value with none.

    Curves lie on the last axis of `values`. Between none and one the curve is taken as straight; 0 where even an empty
    replica breaks the limit.
    """
    rising = np.maximum.accumulate(np.maximum(values, 1e-12), axis=-1)
    logs = np.log(rising)
    # Points of the curve that keep the limit: as many as lie before the first that breaks it.
    first = (rising <= limit[..., None]).sum(axis=-1)
    last = rising.shape[-1] - 1
    shape = (*first.shape, last + 1)
    before, after = np.maximum(first - 1, 0), np.minimum(first, last)
    left, right = (
        np.take_along_axis(np.broadcast_to(logs, shape), place[..., None], axis=-1)[..., 0] for place in (before, after)
    )
    into = np.clip((np.log(limit) - left) / np.maximum(right - left, 1e-12), 0.0, 1.0)
    between = np.exp2(before + into * (after - before))
    below_one = np.clip((limit - empty) / np.maximum(rising[..., 0] - empty, 1e-12), 0.0, 1.0)
    return np.where(first == 0, below_one, np.where(first <= last, between, GRID[-1]))


def at_or_first(values: Array, in_flight: Array) -> Array:
    """Values over the grid, on the last axis, at a load between the grid's; below one request as at one."""
    place = np.clip(np.log2(np.maximum(in_flight, 1.0)), 0.0, len(GRID) - 1.0)
    low = np.minimum(place.astype(int), len(GRID) - 2)
    share = place - low
    wide = np.broadcast_to(values, (*in_flight.shape, len(GRID)))
    left = np.take_along_axis(wide, low[..., None], axis=-1)[..., 0]
    right = np.take_along_axis(wide, low[..., None] + 1, axis=-1)[..., 0]
    return np.asarray(left * (1.0 - share) + right * share)
