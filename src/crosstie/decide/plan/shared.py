"""Replicas that several models share: how many of which accelerator, and what loads and evictions to expect there.

A replica is sized for whatever is asked for at the peak, as if each model had no more cache than its least, and there
are as many as keep the share of cold requests within its limit. Larger memory holds more models, so that fewer are
evicted.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.loading import shipped_loading
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadData, BadInput
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.core.workload import RequestClass, Sharing, Workload
from crosstie.decide.plan.capacity import TrafficPart
from crosstie.decide.plan.market import Item, Market
from crosstie.decide.plan.survey import offers, parts_of, reading_of, survey
from crosstie.host.expected import Expectation, expect
from crosstie.host.hosted import Hosted, Slot
from crosstie.host.residency import Residency
from crosstie.host.sizes import hosted_model, least_cache_bytes, load_path, room_bytes, with_cache_of
from crosstie.perf.memory import gpu_weight_bytes
from crosstie.sim.hosting import Traffic, host

_WIDTHS = (1, 2, 4, 8)
# Layouts of an accelerator that are tried: the narrowest that holds every model, and the next.
_LAYOUTS = 2
_MOST_REPLICAS = 100_000
_USUAL_STACK = "vllm"


@dataclass(frozen=True)
class SharedLayout:
    """One kind of replica: every model on it, what each takes, and the memory there is for them."""

    item: Item
    deployments: dict[str, Deployment]
    hosted: list[Hosted]
    room_bytes: float
    # Of the host's memory, for the weights of models that are asleep; 0 where they come from a disk.
    host_bytes: float

    @property
    def parallelism(self) -> Parallelism:
        return next(iter(self.deployments.values())).parallelism


@dataclass(frozen=True)
class SharedPoolPlan:
    replica: SharedLayout
    replicas: int
    gpus: int
    usd_per_hour: float
    watts: float
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
        return self.replica.item.id


@dataclass(frozen=True)
class SimulatedSharing:
    """The same by simulation."""

    requests: int
    cold_share: float
    evictions_per_hour: float
    wait_p50_s: float
    wait_p99_s: float


@dataclass(frozen=True)
class SharedPlan:
    # The cheapest first; empty where none will do.
    pools: list[SharedPoolPlan]
    # Accelerators that will not do, with the reason.
    left_out: dict[str, str]
    simulated: SimulatedSharing | None = None

    @property
    def answer(self) -> SharedPoolPlan | None:
        return self.pools[0] if self.pools else None


@dataclass(frozen=True)
class _Loads:
    """What the peak asks of one kind of replica."""

    # Replicas that are busy with each model, and seconds that its requests take.
    busy: dict[str, float]
    takes_s: dict[str, float]


def _sharing(workload: Workload) -> Sharing:
    assert workload.sharing is not None, "asked for only where models share replicas"
    return workload.sharing


class _Unfit(Exception):
    """Why an accelerator cannot be shared by these models."""


def shared_plan(
    catalog: Catalog, workload: Workload, market: Market, tell: Callable[[str], None] = lambda _: None
) -> SharedPlan:
    sharing = _sharing(workload)
    if workload.constraints.vendor_share:
        raise BadData(
            workload.file, "constraints.vendor_share", "cannot go with [hosting]: a shared pool is of one kind"
        )
    parts = [part for part in parts_of(workload) if part.request_class.model in sharing.models]
    replicas: list[SharedLayout] = []
    left_out: dict[str, str] = {}
    for item in market.items:
        try:
            replicas += _replicas(catalog, workload, item)
        except _Unfit as reason:
            left_out[item.id] = str(reason)
    tell(f"{len(replicas)} kinds of replicas that {len(sharing.models)} models could share")
    loads = _loads(replicas, workload, parts)
    best: dict[str, SharedPoolPlan] = {}
    for replica, load in zip(replicas, loads, strict=True):
        try:
            pool = _pool(replica, load, workload)
        except _Unfit as reason:
            left_out.setdefault(replica.item.id, str(reason))
            continue
        known = best.get(pool.accelerator)
        if known is None or pool.usd_per_hour < known.usd_per_hour:
            best[pool.accelerator] = pool
    pools = sorted(best.values(), key=lambda pool: (pool.usd_per_hour, pool.gpus, pool.accelerator))
    left_out = {name: reason for name, reason in left_out.items() if name not in best}
    if not pools:
        return SharedPlan([], left_out)
    return SharedPlan([_beside(pool, pools[0].gpus, workload) for pool in pools], left_out)


def _replicas(catalog: Catalog, workload: Workload, item: Item) -> list[SharedLayout]:
    found: list[SharedLayout] = []
    reason = ""
    for width in _WIDTHS:
        if width > item.accelerator.domain or len(found) == _LAYOUTS:
            break
        try:
            found.append(_replica(catalog, workload, item, width))
        except (_Unfit, BadInput) as error:
            reason = str(error)
    if not found:
        raise _Unfit(reason)
    return found


def _replica(catalog: Catalog, workload: Workload, item: Item, width: int) -> SharedLayout:
    sharing = _sharing(workload)
    path = load_path(shipped_loading(), item.accelerator, sharing)
    deployments = {model: _deployment(catalog, workload, item, width, model) for model in sharing.models}
    hosted = [
        hosted_model(
            one,
            path,
            context=longest_context(workload, model),
            sequences=sharing.sequences,
            pinned=model in sharing.pinned,
        )
        for model, one in deployments.items()
    ]
    room = min(room_bytes(one, path, len(hosted)) for one in deployments.values())
    largest = max(hosted, key=lambda one: one.taken_bytes)
    if largest.taken_bytes > room:
        raise _Unfit(
            f"{largest.model} takes {largest.taken_bytes / 1e9:.0f} GB with a cache for {sharing.sequences} requests, "
            f"and {width} GPU{'s' if width > 1 else ''} leave {room / 1e9:.0f} GB for models that are awake"
        )
    asleep = sharing.load_from == "host"
    weights = sum(gpu_weight_bytes(one) * one.parallelism.gpus for one in deployments.values())
    return SharedLayout(item, deployments, hosted, room, weights if asleep else 0.0)


def longest_context(workload: Workload, model: str) -> int:
    """The longest request that any class asks of a model."""
    return max(piece.context for one in workload.classes if one.model == model for piece in one.slices)


def _deployment(catalog: Catalog, workload: Workload, item: Item, width: int, name: str) -> Deployment:
    """In the smallest of the precisions that it may have: a shared replica is short of memory first."""
    model, choice = catalog.model(name), workload.choice(name)
    stack = choice.stacks[0] if choice.stacks else _USUAL_STACK
    found: list[Deployment] = []
    reason = ""
    for precision in choice.precisions:
        try:
            split = Parallelism(tp=width)
            found.append(catalog.deployment(model, item.accelerator, split, precision, choice.kv_formats[0], stack))
        except BadInput as error:
            reason = str(error)
    if not found:
        raise _Unfit(reason)
    return catalog.calibrated(min(found, key=gpu_weight_bytes))


def _loads(replicas: Sequence[SharedLayout], workload: Workload, parts: Sequence[TrafficPart]) -> list[_Loads]:
    """Every model on all kinds of replicas at once, with no more cache than its least."""
    sharing = _sharing(workload)
    found = [_Loads({}, {}) for _ in replicas]
    peak = max(1.0 + workload.growth_per_year, 1.0) * (1.0 + workload.constraints.spare)
    for model in sharing.models:
        asked = [part for part in parts if part.request_class.model == model]
        mine = [replace(part, index=place) for place, part in enumerate(asked)]
        cache = [
            least_cache_bytes(r.deployments[model], longest_context(workload, model), sharing.sequences)
            for r in replicas
        ]
        small = [with_cache_of(r.deployments[model], each) for r, each in zip(replicas, cache, strict=True)]
        if not small:
            return []
        offered = offers([survey(small, mine)], reading_of(workload), own_tiers=True)
        for place, deployment in enumerate(small):
            rows = np.array([i for i, column in enumerate(offered.columns) if column.deployment is deployment])
            busy = in_flight = 0.0
            for part in mine:
                row = int(rows[np.argmax(offered.requests_per_s[rows, part.index])])
                rate = float(offered.requests_per_s[row, part.index])
                busy += part.requests_per_s * peak / rate if rate > 0 else math.inf
                answer_s = part.slice.output_tokens * float(offered.tpot_s[row, part.index])
                in_flight += (float(offered.ttft_s[row, part.index]) + answer_s) * part.requests_per_s
            found[place].busy[model] = busy
            found[place].takes_s[model] = in_flight / sum(part.requests_per_s for part in mine)
    return found


def _pool(replica: SharedLayout, load: _Loads, workload: Workload) -> SharedPoolPlan:
    sharing = _sharing(workload)
    late = next((model for model, busy in load.busy.items() if not math.isfinite(busy)), None)
    if late is not None:
        raise _Unfit(f"{late} cannot keep its targets with a cache for {sharing.sequences} requests")
    hosted, rates = _copies(replica.hosted, load, workload)
    busy = sum(load.busy.values())
    least = max(math.ceil(busy - 1e-9), 1)
    replicas = _enough(least, lambda n: _within(sharing, replica, hosted, rates, n))
    item = replica.item
    gpus = replicas * replica.parallelism.gpus
    unit = min(item.accelerator.domain, 8) if workload.constraints.whole_nodes else 1
    bought = math.ceil(max(gpus - item.on_hand, 0) / unit) * unit
    usd = bought * item.quote.usd + min(gpus, item.on_hand) * item.running_usd_per_hour
    _check_limits(workload, item, gpus, bought, usd)
    expected = expect(hosted, rates, [replica.room_bytes] * replicas)
    return SharedPoolPlan(
        replica=replica,
        replicas=replicas,
        gpus=gpus,
        usd_per_hour=usd,
        watts=gpus * item.watts,
        utilisation=busy / replicas / (1.0 + workload.constraints.spare),
        limit="compute" if replicas == least else "memory",
        expected=expected,
        beside=expected,
        takes_s=load.takes_s,
    )


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
    for one in workload.classes:
        rates[one.model] = rates.get(one.model, 0.0) + one.requests_per_s * grown
    return rates


def _within(
    sharing: Sharing, replica: SharedLayout, hosted: Sequence[Hosted], rates: Sequence[float], replicas: int
) -> bool:
    try:
        Residency(hosted, [Slot(str(n), replica.room_bytes) for n in range(replicas)], 0.0)
    except BadInput:
        # Pinned models leave some other no room.
        return False
    found = expect(hosted, rates, [replica.room_bytes] * replicas)
    return found.holds and found.cold_share <= sharing.cold_share


def _enough(least: int, will_do: Callable[[int], bool]) -> int:
    """The smallest number from `least` on that will do."""
    low, high = least - 1, least
    while not will_do(high):
        if high > _MOST_REPLICAS:
            raise _Unfit("no number of replicas keeps cold requests within hosting.cold_share")
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if will_do(middle) else (middle, high)
    return high


def _check_limits(workload: Workload, item: Item, gpus: int, bought: int, usd: float) -> None:
    limits = workload.constraints
    if bought > item.at_most:
        raise _Unfit(f"{gpus} GPUs are needed, and constraints.at_most has {item.at_most:.0f}")
    month = usd * HOURS_PER_MONTH
    if limits.budget_usd_per_month is not None and month > limits.budget_usd_per_month:
        raise _Unfit(f"costs ${month:,.0f} a month, more than constraints.budget_usd_per_month")
    if limits.power_kw is not None and gpus * item.watts > limits.power_kw * 1e3:
        raise _Unfit(f"takes {gpus * item.watts / 1e3:.1f} kW, more than constraints.power_kw")


def _beside(pool: SharedPoolPlan, gpus: int, workload: Workload) -> SharedPoolPlan:
    """With as many GPUs as the answer has, whatever that does to targets."""
    replica = pool.replica
    rates = mean_rates(workload)
    slots = [replica.room_bytes] * max(gpus // replica.parallelism.gpus, 1)
    expected = expect(replica.hosted, [rates[one.model] for one in replica.hosted], slots)
    return replace(pool, beside=expected)


def own_classes(workload: Workload) -> tuple[RequestClass, ...]:
    """Those whose models have replicas of their own."""
    shared = workload.sharing.models if workload.sharing else ()
    return tuple(one for one in workload.classes if one.model not in shared)


def beside_shared(workload: Workload, shared: SharedPlan) -> Workload | None:
    """The workload of the other models, with the limits that the shared pool leaves; None where there are none."""
    classes = own_classes(workload)
    if not classes:
        return None
    limits, pool = workload.constraints, shared.answer
    if pool is not None:
        taken = min(pool.gpus, pool.replica.item.on_hand)
        limits = msgspec.structs.replace(
            limits,
            inventory=_less(limits.inventory, pool.accelerator, taken),
            at_most=_less(limits.at_most, pool.accelerator, pool.gpus - taken),
            budget_usd_per_month=_left(limits.budget_usd_per_month, pool.usd_per_hour * HOURS_PER_MONTH),
            power_kw=_left(limits.power_kw, pool.watts / 1e3),
        )
    return msgspec.structs.replace(workload, classes=classes, constraints=limits, sharing=None)


def _less(counts: dict[str, int], name: str, taken: int) -> dict[str, int]:
    return {one: max(count - (taken if one == name else 0), 0) for one, count in counts.items()}


def _left(limit: float | None, taken: float) -> float | None:
    return None if limit is None else max(limit - taken, 0.0)


def seen(pool: SharedPoolPlan, workload: Workload, hours: float = 12.0, seed: int = 7) -> SimulatedSharing:
    """Poisson traffic at the mean, through the residency that the gateway has."""
    chance = np.random.default_rng(seed)
    rates = mean_rates(workload)
    hosted = pool.replica.hosted
    each = np.array([rates[one.model] for one in hosted])
    # So many requests at most: by then percentiles stand.
    span_s = min(hours * 3600.0, 40_000 / float(each.sum()))
    count = int(chance.poisson(each.sum() * span_s))
    kinds = chance.choice(len(each), count, p=each / each.sum())
    takes = np.array([pool.takes_s[one.model] for one in hosted])
    traffic = Traffic(np.sort(chance.uniform(0.0, span_s, count)), kinds, takes[kinds])
    found = host(hosted, [pool.replica.room_bytes] * pool.replicas, traffic, warm_up_s=span_s / 4.0)
    return SimulatedSharing(
        found.requests, found.cold_share, found.evictions_per_hour, found.wait_s(0.5), found.wait_s(0.99)
    )
