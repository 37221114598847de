"""How many requests a second a replica takes within latency targets, for every replica and slice at once.

`perf` gives the means of a steady state; targets are percentiles of open traffic. Between them stand three
fluctuations, all of Poisson arrivals:

    requests in flight   a replica whose rate X(n) grows with the n that it holds has n + z sqrt(n / e) of them at
                         the z-quantile, e being the elasticity of X: Poisson's where X grows in proportion, ever
                         more as it saturates. TPOT must still be kept there, and memory must suffice
    stalls               while prompts are computed, the others' tokens wait for them: over the life of a request
                         that happens a random number of times, for as long as prompts queue
    prompts that wait    prefill is one server that is busy a share r of the time; the wait for it exceeds t with
                         probability r exp(-(1 - r) t / R), R being what is left of a prompt's service on average.
                         Those that come meanwhile, r t of work, end in the same step as far as there is room in it

Open traffic that finds n requests there on average is like a closed loop of n + 1 clients, each of whom finds
the n others (the arrival theorem); so that is where `serve` is asked.

A pool may serve several classes. It then keeps the strictest target of its tier, and a prompt is admitted
only as long as the wait that it puts upon the others leaves them within theirs. `plan.simulate` simulates it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache
from statistics import NormalDist
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from crosstie.core.deployment import Deployment
from crosstie.core.workload import RequestClass, Slice, Target
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.memory import cache_sequences
from crosstie.perf.steady_state import prefill_alone, steady_state

# Mean requests in flight at which replicas are evaluated; between them logarithms are interpolated.
GRID = np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0])
# What keeps a replica from taking more of a slice.
LIMITS = ("TPOT target", "TTFT target", "memory", "engine limit", "throughput")
_FULL = len(LIMITS) - 1
# A replica that is saturated has no elasticity left; this is as little as it counts for.
_STIFFEST = 0.02
# A prefill that is never idle would stall decode for ever; this is as little as it counts for.
_LEAST_IDLE = 0.02
# From one request to a thousand: 12 halvings leave 0.2%.
_BISECTIONS = 10
# Standard deviations at which the ends of 80% intervals lie.
_END = NormalDist().inv_cdf(0.9)


@dataclass(frozen=True, slots=True)
class Tier:
    """What a pool promises to all that it serves, in seconds; infinite where it promises nothing."""

    ttft_s: float
    tpot_s: float

    def admits(self, one: RequestClass) -> bool:
        wanted = tier_of(one)
        return wanted.ttft_s >= self.ttft_s and wanted.tpot_s >= self.tpot_s

    def is_asked_by(self, one: RequestClass) -> bool:
        """Whether the class is as strict as the tier in some target."""
        wanted = tier_of(one)
        return wanted.ttft_s <= self.ttft_s < np.inf or wanted.tpot_s <= self.tpot_s < np.inf


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

    @property
    def ttft(self) -> Target | None:
        return None if self.slice.exempt else self.request_class.ttft

    @property
    def deviations(self) -> float:
        """Standard deviations of load that the replica must bear: those of the stricter target."""
        targets = [target for target in (self.request_class.ttft, self.request_class.tpot) if target]
        return max((target.load_deviations for target in targets), default=0.0)

    @property
    def wait_quantile(self) -> float:
        target = self.request_class.ttft
        return target.load_quantile if target else 0.5


class ByDeployment:
    """Arrays whose rows are deployments, in the order of the caller's list; rows may repeat."""

    __slots__ = ()

    def rows(self, index: Sequence[int] | NDArray[np.int64]) -> Self:
        return type(self)(*(getattr(self, one.name)[index] for one in fields(self)))  # type: ignore[arg-type]

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
    def none(cls, deployments: Sequence[Deployment]) -> Self:
        one = np.ones(len(deployments))
        return cls(one, one, one)

    @classmethod
    def upper_bound(cls, deployments: Sequence[Deployment]) -> Self:
        """At the slow end of the 80% intervals."""
        return cls.at(deployments, -_END)

    @classmethod
    def at(cls, deployments: Sequence[Deployment], deviations: ArrayLike) -> Self:
        """As if replicas were so many standard deviations faster than estimated, one number or one a deployment.

        Intervals hold four fifths of what was measured; their ends are 1.28 deviations away, and between and
        beyond them logarithms are taken as straight. One cause moves all three metrics.
        """
        fast = np.asarray(deviations, dtype=np.float64) * np.ones(len(deployments))

        def factor(metric: str, sign: float) -> Array:
            spreads = [d.correction.spread.get(metric) for d in deployments]
            low = np.array([0.0 if s is None else s.low for s in spreads])
            high = np.array([0.0 if s is None else s.high for s in spreads])
            end = fast * sign / _END
            return np.asarray(np.exp(np.where(end > 0, end * np.maximum(high, 0.0), -end * np.minimum(low, 0.0))))

        return cls(ttft=factor("ttft", -1.0), tpot=factor("tpot", -1.0), rate=factor("throughput", 1.0))


@dataclass(frozen=True, slots=True)
class Promise(ByDeployment):
    """What a tier asks of all that share a pool with its strictest classes."""

    tpot_s: Array
    # The longest that prompts may wait before those of the strictest classes are late, at which quantile.
    wait_s: Array
    quantile: Array
    # Standard deviations of load within which the targets are kept.
    deviations: Array

    @classmethod
    def none(cls, deployments: Sequence[Deployment]) -> Self:
        count = len(deployments)
        return cls(np.full(count, np.inf), np.full(count, np.inf), np.full(count, 0.5), np.zeros(count))


@dataclass(frozen=True, slots=True)
class LoadCurve(ByDeployment):
    """One slice: arrays (deployments, GRID) under load, and what a request alone sees."""

    tpot_s: Array
    found_room_s: Array
    service_s: Array
    requests_per_s: Array
    alone_tpot_s: Array
    alone_ttft_s: Array
    # What a slice's longest prompt takes beyond its mean one.
    longest_extra_s: Array
    # Mean prompts that a full step has room for.
    prompts_a_step: Array
    room: Array
    engine_limit: Array


@dataclass(frozen=True, slots=True)
class Capacity(ByDeployment):
    """Requests/s within the targets, at how many in flight, and what limits them (an index of LIMITS)."""

    requests_per_s: Array
    in_flight: Array
    # The most at once that the promise bears.
    most_in_flight: Array
    limit: NDArray[np.int64]
    # At that load, for the slice's longest prompt and the target's percentile.
    ttft_s: Array
    tpot_s: Array
    # Share of the replica's time that prompts take; the rest goes to output.
    prompt_share: Array

    @classmethod
    def empty(cls, shape: tuple[int, int]) -> Self:
        """To be filled in: (pools that could be, parts of the traffic)."""
        return cls(*(np.zeros(shape, np.int64 if f.name == "limit" else np.float64) for f in fields(cls)))  # type: ignore[arg-type]

    def fill(self, rows: NDArray[np.int64], part: int, found: Self) -> None:
        for one in fields(self):
            getattr(self, one.name)[rows, part] = getattr(found, one.name)


def curves(hardware: Hardware, slices: Sequence[Slice]) -> list[LoadCurve]:
    """All slices of a model on deployments of one precision, in one call of `serve`."""
    clients = np.concatenate(([1.0], GRID + 1.0))
    count = len(clients)
    inputs = np.repeat([s.input_tokens for s in slices], count)
    outputs = np.repeat([s.output_tokens for s in slices], count)
    got = steady_state(hardware, np.tile(clients, len(slices)), inputs, outputs, in_step=False)
    means = np.array([s.input_tokens for s in slices])
    longest = np.array([float(s.longest_input) for s in slices])
    extra = np.maximum(_prefill_s(hardware, longest) - _prefill_s(hardware, means), 0.0)
    contexts = np.array([float(s.context) for s in slices])
    # Each attention replica holds its own requests, and a whole one at least.
    held = np.stack([cache_sequences(d, contexts) / d.parallelism.dp for d in hardware.deployments])
    found = []
    for k, one in enumerate(slices):
        alone, loaded = k * count, slice(k * count + 1, (k + 1) * count)
        tpot = got.tpot_s if one.output_tokens > 1 else np.zeros_like(got.tpot_s)
        found.append(
            LoadCurve(
                tpot_s=tpot[:, loaded],
                found_room_s=got.found_room_s[:, loaded],
                service_s=got.service_s[:, loaded],
                # Of the n + 1 clients one is oneself.
                requests_per_s=got.requests_per_s[:, loaded] * GRID / (GRID + 1.0),
                alone_tpot_s=tpot[:, alone],
                alone_ttft_s=got.found_room_s[:, alone],
                longest_extra_s=extra[:, k],
                prompts_a_step=np.maximum(hardware.chunk_tokens * hardware.dp / one.input_tokens, 1.0)[:, 0],
                # A replica that cannot hold the longest request serves none of the slice.
                room=np.where(held[:, k] >= 1.0, got.concurrency_that_fits[:, alone], 0.0),
                engine_limit=hardware.max_sequences[:, 0],
            )
        )
    return found


def _prefill_s(hardware: Hardware, tokens: Array) -> Array:
    """A prompt's chunks one after the other, with nothing else in the steps; (deployments, tokens)."""
    chunks = np.maximum(tokens / hardware.chunk_tokens, 1.0)
    return np.asarray(chunks * prefill_alone(hardware, tokens).total_s)


def own_ttft_s(curve: LoadCurve, scale: EstimateScale) -> Array:
    """TTFT of the slice's longest prompt on a replica that is otherwise idle; a row a deployment."""
    return (curve.alone_ttft_s + curve.longest_extra_s) * scale.ttft


def capacity(curve: LoadCurve, part: TrafficPart, promise: Promise, scale: EstimateScale) -> Capacity:
    """What each deployment takes of a part in a pool that keeps a promise."""
    rates = curve.requests_per_s * scale.rate[:, None]
    services = curve.service_s / scale.rate[:, None]
    dispersion = part.slice.input_dispersion
    tpot = curve.tpot_s * scale.tpot[:, None]
    idle = np.maximum(1.0 - rates * services, _LEAST_IDLE)
    stalls = services / idle * np.sqrt(dispersion * rates * tpot / max(part.slice.output_tokens - 1.0, 1.0))
    deviations = np.maximum(part.deviations, promise.deviations)
    felt = tpot + deviations[:, None] * stalls
    limit_s = np.minimum(promise.tpot_s, tier_of(part.request_class).tpot_s)
    kept = largest_within(felt, limit_s, curve.alone_tpot_s * scale.tpot)
    most = np.minimum(kept, curve.room)
    roomy = with_headroom(rates, most, deviations)
    engine = curve.room >= curve.engine_limit - 1e-9
    full = np.where(engine, LIMITS.index("engine limit"), LIMITS.index("memory"))
    limit = np.where(kept < curve.room, LIMITS.index("TPOT target"), full)
    limit = np.where((limit != 0) & (most >= GRID[-1]), _FULL, limit)

    quantile = part.wait_quantile
    ttft_s = part.ttft.seconds if part.ttft else np.inf

    def own(in_flight: Array) -> Array:
        return np.asarray((at_or_first(curve.found_room_s, in_flight) + curve.longest_extra_s) * scale.ttft)

    def most_by_prefill(in_flight: Array) -> Array:
        service, slack = at_or_first(services, in_flight), ttft_s - own(in_flight)
        residual = 0.5 * service * dispersion
        mates = (curve.prompts_a_step - 1.0) * service
        for_others = _busy_with_mates(promise.wait_s, residual, mates, promise.quantile)
        busy = np.minimum(_busy_with_mates(slack, residual, mates, quantile), for_others)
        return np.where((slack > 0) & (promise.wait_s > 0), busy / service, 0.0)

    in_flight = _largest_kept(rates, roomy, most_by_prefill)
    limit = np.where(in_flight < roomy, LIMITS.index("TTFT target"), limit)
    rate = at(rates, in_flight)
    service = at_or_first(services, in_flight)
    busy = np.clip(rate * service, 0.0, 0.999)
    waited = wait_s(busy, 0.5 * service * dispersion, quantile)
    waited = waited + np.minimum(busy * waited, (curve.prompts_a_step - 1.0) * service)
    return Capacity(
        requests_per_s=rate,
        in_flight=in_flight,
        most_in_flight=np.minimum(most, GRID[-1]),
        limit=limit,
        ttft_s=own(in_flight) + waited,
        tpot_s=at_or_first(felt, most),
        prompt_share=np.clip(rate * service, 0.0, 1.0),
    )


def _largest_kept(rates: Array, most: Array, bearable: Callable[[Array], Array]) -> Array:
    """The most in flight, up to `most`, at which the rate is no more than what is bearable there.

    Both change with the load: prompts take longer in fuller steps. Below one request only the rate does.
    """
    low = np.minimum(most, 1.0)
    first = np.minimum(low, bearable(low) / np.maximum(rates[:, 0], 1e-12))
    high = most
    for _ in range(_BISECTIONS):
        middle = np.sqrt(low * high)
        keeps = at(rates, middle) <= bearable(middle)
        low, high = np.where(keeps, middle, low), np.where(keeps, high, middle)
    between = np.where(first < np.minimum(most, 1.0), first, low)
    return np.where(at(rates, most) <= bearable(most), most, between)


def _busy_with_mates(wait: Array, residual: Array, mates_s: Array, quantile: float | Array) -> Array:
    """How busy prefill may be if a wait must also bear the prompts that come meanwhile and share one's step.

    They are a share of it, the busy one, until the step is full; `mates_s` is what then fits beside oneself.
    """
    alone = busy_share(wait / residual, quantile)
    return busy_share(np.maximum(wait / (1.0 + alone), wait - mates_s) / residual, quantile)


def largest_within(values: Array, limit: float | Array, alone: Array | float = 0.0) -> Array:
    """The most in flight at which a rising curve keeps the limit; `alone` is its value with none.

    Between none and one the curve is taken as straight; 0 where even a request alone breaks the limit.
    """
    rising = np.maximum.accumulate(np.maximum(values, 1e-12), axis=1)
    logs = np.log(rising)
    wanted = np.log(np.maximum(limit, 1e-12)) * np.ones(len(values))
    above = logs > wanted[:, None]
    first = np.argmax(above, axis=1)
    rows = np.arange(len(values))
    before = np.maximum(first - 1, 0)
    step = np.maximum(logs[rows, first] - logs[rows, before], 1e-12)
    into = np.clip((wanted - logs[rows, before]) / step, 0.0, 1.0)
    grid = np.log(GRID)
    between = np.exp(grid[before] + into * (grid[first] - grid[before]))
    below_one = np.clip((np.exp(wanted) - alone) / np.maximum(rising[:, 0] - alone, 1e-12), 0.0, 1.0)
    return np.where(above[:, 0], below_one, np.where(above.any(axis=1), between, np.inf))


def with_headroom(rates: Array, most: Array, deviations: float | Array) -> Array:
    """The mean n of requests in flight for which n + z sqrt(n / e) is `most`, e being the elasticity of the rate."""
    steps = np.diff(np.log(rates), axis=1) / np.diff(np.log(GRID))
    elasticity = np.clip(np.concatenate((steps, steps[:, -1:]), axis=1), _STIFFEST, 1.0)
    z = deviations * np.ones(len(rates))
    peak = GRID + z[:, None] * np.sqrt(GRID / elasticity)
    # Below one request the rate is in proportion, and so the fluctuation is Poisson's.
    root = 0.5 * (np.sqrt(z**2 + 4.0 * np.minimum(most, 1e9)) - z)
    few = np.minimum(root**2, 1.0)
    return np.asarray(np.minimum(np.where(peak[:, 0] > most, few, largest_within(peak, most)), GRID[-1]))


def at(values: Array, in_flight: Array) -> Array:
    """A rate at a load between the grid's; below one request it falls to nothing in proportion."""
    return at_or_first(values, in_flight) * np.minimum(in_flight, 1.0)


def at_or_first(values: Array, in_flight: Array) -> Array:
    place = np.clip(np.log2(np.maximum(in_flight, 1.0)), 0.0, len(GRID) - 1.0)
    low = np.minimum(place.astype(int), len(GRID) - 2)
    rows = np.arange(len(values))
    share = place - low
    left, right = values[rows, low], values[rows, low + 1]
    return np.asarray(left * (1.0 - share) + right * share)


def wait_s(busy: Array, residual: Array, quantile: float) -> Array:
    """The quantile of the wait for prefill; nothing while it is idle more often than the quantile asks."""
    beyond = np.maximum(np.log(np.maximum(busy, 1e-12) / (1.0 - quantile)), 0.0)
    return np.asarray(residual / (1.0 - busy) * beyond)


@cache
def _waits(quantile: float) -> tuple[Array, Array]:
    busy = 1.0 - np.geomspace(quantile, 1e-3, 400)
    return wait_s(busy, np.ones_like(busy), quantile), busy


def busy_share(wait_over_residual: Array, quantile: float | Array) -> Array:
    """How busy prefill may be for the quantile of its wait to stay within so many residual services."""
    waits = np.maximum(wait_over_residual, 0.0)
    least, most = float(np.min(quantile)), float(np.max(quantile))
    found = np.interp(waits, *_waits(least))
    if most > least:
        # Rows of several tiers, which have as many percentiles as the workload: one or two.
        for one in np.unique(quantile)[1:]:
            found = np.where(quantile == one, np.interp(waits, *_waits(float(one))), found)
    return np.asarray(found)
