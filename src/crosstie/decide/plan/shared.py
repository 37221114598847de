"""Replicas that several models share: how many of which accelerator, and what loads and evictions to expect there.

A replica is sized for whatever is asked for at the peak, as if each model had no more cache than its least, and there
are as many as keep the share of cold requests within its limit. Larger memory holds more models, so that fewer are
evicted. Layouts, prices and limits are those of the other pools; why the number of replicas is not found by the
programme as well is in docs/plan.md.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData, BadInput
from crosstie.core.progress import OnProgress
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.core.workload import RequestClass, Sharing, Workload
from crosstie.decide.plan.candidates import SharedLayout, Unfit, key_of, longest_context, shared_layouts
from crosstie.decide.plan.capacity import Capacity, TrafficPart
from crosstie.decide.plan.gate import Gate
from crosstie.decide.plan.market import Market, MarketItem
from crosstie.decide.plan.optimise import programme
from crosstie.decide.plan.programme import Solution
from crosstie.decide.plan.scaling import scaling_of
from crosstie.decide.plan.survey import offers, parts_of, survey
from crosstie.host.expected import Expectation, expect
from crosstie.host.hosted import Hosted, Slot
from crosstie.host.residency import Residency
from crosstie.host.sizes import least_cache_bytes, with_cache_of
from crosstie.sim.hosting import HostedTraffic, host

_MOST_REPLICAS = 100_000
# By then percentiles of cold requests stand.
_ENOUGH_REQUESTS = 40_000


@dataclass(frozen=True, slots=True)
class SharedPoolPlan:
    layout: SharedLayout
    replicas: int
    gpus: int
    # What it takes of stock, money and power.
    fleet: Solution
    # Replicas that requests keep busy at the peak, of all.
    utilisation: float
    # What keeps it from being smaller: "compute" or "memory".
    limit: str
    # At mean traffic.
    expected: Expectation
    # The same if it had as many GPUs as the answer.
    beside: Expectation
    # Seconds that a request takes at the peak, by model.
    takes_s: dict[str, float]

    @property
    def accelerator(self) -> str:
        return self.layout.accelerator.id

    @property
    def usd_per_hour(self) -> float:
        return self.fleet.usd_per_hour

    @property
    def watts(self) -> float:
        return self.fleet.watts


@dataclass(frozen=True, slots=True)
class SimulatedSharing:
    """The same by simulation."""

    requests: int
    cold_share: float
    evictions_per_hour: float
    wait_p50_s: float
    wait_p99_s: float


@dataclass(frozen=True, slots=True)
class SharedPlan:
    # The cheapest first; empty where none will do.
    pools: list[SharedPoolPlan]
    # Accelerators that will not do, with the reason.
    left_out: dict[str, str]
    simulated: SimulatedSharing | None = None

    @property
    def answer(self) -> SharedPoolPlan | None:
        return self.pools[0] if self.pools else None


@dataclass(frozen=True, slots=True)
class _Loads:
    """What the peak asks of one layout."""

    # Replicas that are busy with each model, and seconds that its requests take.
    busy: dict[str, float]
    takes_s: dict[str, float]


def shared_plan(
    catalog: Catalog, workload: Workload, sharing: Sharing, market: Market, on_progress: OnProgress
) -> SharedPlan:
    if workload.constraints.vendor_share:
        raise BadData(
            workload.file, "constraints.vendor_share", "cannot go with [hosting]: a shared pool is of one kind"
        )
    layouts: list[SharedLayout] = []
    left_out: dict[str, str] = {}
    gate = Gate(catalog, workload)
    for item in market.items:
        try:
            layouts += shared_layouts(catalog, workload, sharing, item.accelerator, gate)
        except Unfit as reason:
            left_out[item.id] = str(reason)
    on_progress(0, 0, f"{len(layouts)} kinds of replicas that {len(sharing.models)} models could share")
    best: dict[str, SharedPoolPlan] = {}
    for layout, load in zip(layouts, _loads(layouts, workload, sharing), strict=True):
        try:
            pool = _pool(layout, load, workload, sharing, market)
        except Unfit as reason:
            left_out.setdefault(layout.accelerator.id, str(reason))
            continue
        known = best.get(pool.accelerator)
        if known is None or pool.usd_per_hour < known.usd_per_hour:
            best[pool.accelerator] = pool
    pools = sorted(best.values(), key=lambda pool: (pool.usd_per_hour, pool.gpus, pool.accelerator))
    left_out = {name: reason for name, reason in left_out.items() if name not in best}
    return SharedPlan([_beside(pool, pools[0].gpus, workload) for pool in pools], left_out)


def _loads(layouts: Sequence[SharedLayout], workload: Workload, sharing: Sharing) -> list[_Loads]:
    """Every model on all layouts at once, with no more cache than its least."""
    loadses = [_Loads({}, {}) for _ in layouts]
    if not layouts:
        return loadses
    peak = max(1.0 + workload.growth_per_year, 1.0) * (1.0 + workload.constraints.spare)
    for model in sharing.models:
        asked = [part for part in parts_of(workload) if part.request_class.model == model]
        mine = [replace(part, index=place) for place, part in enumerate(asked)]
        context = longest_context(workload, model)
        full = [layout.deployments[model] for layout in layouts]
        small = [with_cache_of(one, least_cache_bytes(one, context, sharing.sequences)) for one in full]
        offered = offers([survey(small, mine)], scaling_of(workload), own_tiers=True)
        for load, deployment in zip(loadses, small, strict=True):
            key = key_of(deployment)
            rows = np.array([i for i, column in enumerate(offered.columns) if key_of(column.deployment) == key])
            load.busy[model], load.takes_s[model] = _load(offered.capacity.rows(rows), mine, peak)
    return loadses


def _load(taken: Capacity, parts: Sequence[TrafficPart], peak: float) -> tuple[float, float]:
    """Replicas that a model's parts keep busy, each in the tier where it takes most, and seconds of a request."""
    busy = in_flight = 0.0
    for part in parts:
        place = int(np.argmax(taken.requests_per_s[:, part.index])), part.index
        rate = float(taken.requests_per_s[place])
        busy += part.requests_per_s * peak / rate if rate > 0 else math.inf
        answer_s = part.slice.output_tokens * float(taken.tpot_s[place])
        in_flight += (float(taken.ttft_s[place]) + answer_s) * part.requests_per_s
    return busy, in_flight / sum(part.requests_per_s for part in parts)


def _pool(layout: SharedLayout, load: _Loads, workload: Workload, sharing: Sharing, market: Market) -> SharedPoolPlan:
    late = next((model for model, busy in load.busy.items() if not math.isfinite(busy)), None)
    if late is not None:
        raise Unfit(f"{late} cannot keep its targets with a cache for {sharing.sequences} requests")
    hosted, rates = _copies(layout.hosted, load, workload)
    busy = sum(load.busy.values())
    least = max(math.ceil(busy - 1e-9), 1)
    replicas = _enough(least, lambda n: _is_within(sharing, layout, hosted, rates, n))
    gpus = replicas * layout.parallelism.gpus
    expected = expect(hosted, rates, [layout.room_bytes] * replicas)
    return SharedPoolPlan(
        layout=layout,
        replicas=replicas,
        gpus=gpus,
        fleet=_priced(layout, gpus, workload, market),
        utilisation=busy / replicas / (1.0 + workload.constraints.spare),
        limit="compute" if replicas == least else "memory",
        expected=expected,
        beside=expected,
        takes_s=load.takes_s,
    )


def _priced(layout: SharedLayout, gpus: int, workload: Workload, market: Market) -> Solution:
    """The pool as a programme's only column, which carries the only part; within the limits."""
    place = market.index(layout.accelerator.id)
    one = np.ones((1, 1))
    problem = programme(
        market, workload, demand=np.ones(1), rate=one, gpus=np.array([float(gpus)]), accelerator=np.array([place])
    )
    fleet = problem.fleet(np.array([1]), one)
    _check_limits(workload, market.items[place], fleet, max(gpus, round(fleet.bought[place])))
    return fleet


def _copies(hosted: Sequence[Hosted], load: _Loads, workload: Workload) -> tuple[list[Hosted], list[float]]:
    """Models that one copy cannot serve are there several times, each with its part of the mean traffic."""
    rates = mean_rates(workload)
    found: list[Hosted] = []
    each: list[float] = []
    for one in hosted:
        copies = max(math.ceil(load.busy[one.model] - 1e-9), 1)
        for copy in range(copies):
            name = one.model if not copy else f"{one.model} ({copy + 1})"
            pinned = one.pinned and not copy
            found.append(Hosted(name, one.bytes, one.load_s, min_kv_bytes=one.min_kv_bytes, pinned=pinned))
            each.append(rates[one.model] / copies)
    return found, each


def mean_rates(workload: Workload) -> dict[str, float]:
    """Requests a second by model, at mean traffic and by the end of the first year."""
    grown = workload.mean_over_peak * max(1.0 + workload.growth_per_year, 1.0)
    rates: dict[str, float] = {}
    for request_class in workload.classes:
        rates[request_class.model] = rates.get(request_class.model, 0.0) + request_class.requests_per_s * grown
    return rates


def _is_within(
    sharing: Sharing, layout: SharedLayout, hosted: Sequence[Hosted], rates: Sequence[float], replicas: int
) -> bool:
    try:
        Residency(hosted, [Slot(str(n), layout.room_bytes) for n in range(replicas)], 0.0)
    except BadInput:
        # Pinned models leave some other no room.
        return False
    expectation = expect(hosted, rates, [layout.room_bytes] * replicas)
    return expectation.holds and expectation.cold_share <= sharing.cold_share


def _enough(least: int, will_do: Callable[[int], bool]) -> int:
    """The smallest number from `least` on that will do."""
    low, high = least - 1, least
    while not will_do(high):
        if high > _MOST_REPLICAS:
            raise Unfit("no number of replicas keeps cold requests within hosting.cold_share")
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if will_do(middle) else (middle, high)
    return high


def _check_limits(workload: Workload, item: MarketItem, fleet: Solution, gpus: int) -> None:
    limits = workload.constraints
    if gpus > item.at_most:
        raise Unfit(f"{gpus} GPUs are needed, and constraints.at_most has {item.at_most:.0f}")
    month = fleet.usd_per_hour * HOURS_PER_MONTH
    if limits.budget_usd_per_month is not None and month > limits.budget_usd_per_month:
        raise Unfit(f"costs ${month:,.0f} a month, more than constraints.budget_usd_per_month")
    if limits.power_kw is not None and fleet.watts > limits.power_kw * 1e3:
        raise Unfit(f"takes {fleet.watts / 1e3:.1f} kW, more than constraints.power_kw")


def _beside(pool: SharedPoolPlan, gpus: int, workload: Workload) -> SharedPoolPlan:
    """With as many GPUs as the answer has, whatever that does to targets."""
    layout, rates = pool.layout, mean_rates(workload)
    slots = [layout.room_bytes] * max(gpus // layout.parallelism.gpus, 1)
    expected = expect(layout.hosted, [rates[one.model] for one in layout.hosted], slots)
    return replace(pool, beside=expected)


def simulate_sharing(pool: SharedPoolPlan, workload: Workload, hours: float = 12.0, seed: int = 7) -> SimulatedSharing:
    """Poisson traffic at the mean, through the residency that the gateway has."""
    chance = np.random.default_rng(seed)
    rates = mean_rates(workload)
    hosted = pool.layout.hosted
    each = np.array([rates[one.model] for one in hosted])
    span_s = min(hours * 3600.0, _ENOUGH_REQUESTS / float(each.sum()))
    count = int(chance.poisson(each.sum() * span_s))
    kinds = chance.choice(len(each), count, p=each / each.sum())
    takes = np.array([pool.takes_s[one.model] for one in hosted])
    traffic = HostedTraffic(np.sort(chance.uniform(0.0, span_s, count)), kinds, takes[kinds])
    found = host(hosted, [pool.layout.room_bytes] * pool.replicas, traffic, warm_up_s=span_s / 4.0)
    return SimulatedSharing(
        found.requests, found.cold_share, found.evictions_per_hour, found.wait_s(0.5), found.wait_s(0.99)
    )


def own_classes(workload: Workload) -> tuple[RequestClass, ...]:
    """Those whose models have replicas of their own."""
    shared = workload.sharing.models if workload.sharing else ()
    return tuple(request_class for request_class in workload.classes if request_class.model not in shared)


def beside_shared(workload: Workload, shared: SharedPlan) -> Workload | None:
    """The workload of the other models, with the limits that the shared pool leaves; None where there are none."""
    classes = own_classes(workload)
    if not classes:
        return None
    limits, pool = workload.constraints, shared.answer
    if pool is not None:
        bought = round(pool.fleet.bought.sum())
        limits = msgspec.structs.replace(
            limits,
            inventory=_less(limits.inventory, pool.accelerator, max(pool.gpus - bought, 0)),
            at_most=_less(limits.at_most, pool.accelerator, max(pool.gpus, bought)),
            budget_usd_per_month=_left(limits.budget_usd_per_month, pool.usd_per_hour * HOURS_PER_MONTH),
            power_kw=_left(limits.power_kw, pool.watts / 1e3),
        )
    return msgspec.structs.replace(workload, classes=classes, constraints=limits, sharing=None)


def _less(counts: dict[str, int], name: str, taken: int) -> dict[str, int]:
    return {one: max(count - (taken if one == name else 0), 0) for one, count in counts.items()}


def _left(limit: float | None, taken: float) -> float | None:
    return None if limit is None else max(limit - taken, 0.0)
