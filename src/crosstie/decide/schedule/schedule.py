"""`schedule`: what to order now, what to rent until it comes, what to keep open, and what each quarter costs.

What it may choose from is each accelerator with the GPUs that the traffic takes, its prices and its date.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from functools import partial

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator
from crosstie.core.disaggregated import Servable
from crosstie.core.errors import BadInput
from crosstie.core.estimate import METRICS
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.schedule import ScheduleRequest, quarter_name, quarter_number, quarter_of
from crosstie.core.units import HOURS_PER_YEAR, UNITS
from crosstie.core.workload import Workload
from crosstie.core.worlds import WORLDS
from crosstie.decide.cost.ownership import Option, owned_usd, running_usd_per_hour
from crosstie.decide.cost.prices import PURCHASE, Quote, given, quote, quotes
from crosstie.decide.plan.gate import Gate
from crosstie.decide.plan.market import MarketItem, adjusted, market
from crosstie.decide.plan.optimise import choice
from crosstie.decide.plan.scaling import WorldScaling
from crosstie.decide.plan.solver import solve
from crosstie.decide.plan.survey import Offers, offers, surveys, undominated
from crosstie.decide.schedule.programme import CONTRACT, OWNED, RENTED, Acquisition, Decided, Futures, decide, rounded
from crosstie.perf.hardware import Array

ON_DEMAND = "on-demand"
# Kinds of contracts by their quarters.
CONTRACTS = {"reserved-1-year": 4, "reserved-3-years": 12}
_THROUGHPUT = METRICS.index("throughput")
# Of today's accelerators so many are weighed: the cheapest few of each vendor, bought and rented.
_OF_A_VENDOR = 2
# GPUs are counted in a fleet so many times as large: what the last replica has to spare is not what a GPU carries.
_TIMES = 8
# Worlds of the programme: every eighth of the posterior's, whose draws come in opposite pairs.
_DRAWN = 32
_SEED = 20261118
_QUARTER_HOURS = HOURS_PER_YEAR / 4.0


@dataclass(frozen=True, slots=True)
class ScheduledPart:
    """One accelerator: how many GPUs carry the whole of today's peak, in every world, and what they cost."""

    accelerator: Accelerator
    replica: Servable
    # In every world: (WORLDS,).
    gpus: Array
    # What one costs to buy: None where nobody has a price.
    purchase: Quote | None
    # USD of a GPU-hour by kind: on-demand, and contracts.
    rents: Mapping[str, Quote]

    @property
    def id(self) -> str:
        return self.accelerator.id

    @property
    def likely_gpus(self) -> float:
        return float(np.median(self.gpus))

    def option(self) -> Option:
        assert self.purchase is not None, "asked only of what has a price"
        return Option(self.accelerator, 1, self.purchase)

    @property
    def sold_by(self) -> int:
        """GPUs that are bought at once: a server, or the whole rack where that is one machine."""
        return self.accelerator.domain if self.accelerator.scale_up.node else self.accelerator.node

    @property
    def slip_months(self) -> float:
        told = self.accelerator.announced
        return 0.0 if told is None else told.slip.si / UNITS["month"].si


def parts_of(
    catalog: Catalog, workload: Workload, names: Sequence[str] = (), *, announced: bool = True,
    on_progress: OnProgress = no_progress,
) -> list[ScheduledPart]:  # fmt: skip
    """Those that are named, or the cheapest of each vendor; and those that are announced, unless they are left out."""
    wider = catalog.with_announced
    coming = [part for part in wider.accelerators.values() if part.announced]
    chosen = [wider.accelerator(name) for name in names]
    sold = quotes(catalog.prices, catalog.accelerators, (PURCHASE, ON_DEMAND), {})
    asked = chosen or [catalog.accelerators[name] for name in sold]
    asked += [part for part in coming if announced and part not in asked and not names]
    if not asked:
        raise BadInput("no accelerator has a price by the hour or to buy")
    # Every GPU at one price, so that what is offered is what serves most.
    usd = {accelerator.id: 1.0 for accelerator in asked}
    alike = adjusted(workload, accelerators=list(usd), usd_per_gpu_hour=usd, single_gpus=True, evidence="any", sure=0.5)
    scaling = WorldScaling(alike, 0.5)
    offered = undominated(offers(surveys(wider, alike, asked, on_progress, Gate(wider, alike)), scaling))
    likely = [(accelerator, gpus) for accelerator in asked if np.isfinite(gpus := _divided(offered, accelerator))]
    kept = chosen or _cheapest(catalog, likely)
    problem = choice(offered, market(wider, alike), alike)
    larger = replace(problem.problem, demand=problem.problem.demand * _TIMES)
    parts = []
    for accelerator in kept:
        on_progress(0, 0, f"how many {accelerator.id} carry it")
        fleet = solve(larger, problem.allowing(partial(_is, accelerator)), quickly=True)
        if fleet is not None:
            column = offered.columns[int((fleet.replicas * larger.gpus).argmax())]
            parts.append(_part(catalog, accelerator, column.deployment, float(fleet.gpus.sum()) / _TIMES, scaling))
    if not parts:
        raise BadInput("no accelerator that was looked at serves every class of the workload within its targets")
    return parts


def _is(accelerator: Accelerator, item: MarketItem) -> bool:
    return item.id == accelerator.id


def _part(catalog: Catalog, part: Accelerator, replica: Servable, gpus: float, scaling: WorldScaling) -> ScheduledPart:
    """`replica`: which most of the GPUs are in; its worlds stand for the fleet's."""
    told, prices = part.announced, catalog.prices
    bought = given(part.id, told.usd.value) if told else quote(prices, part.id, PURCHASE)
    rents = {kind: quoted for kind in (ON_DEMAND, *CONTRACTS) if (quoted := quote(prices, part.id, kind))}
    if told and bought and (hourly := _as_its_kin(catalog, part.vendor)):
        rents = {ON_DEMAND: replace(given(part.id, told.usd.value * hourly), kind=ON_DEMAND)}
    return ScheduledPart(part, replica, gpus * np.exp(-scaling.worlds_of(replica)[:, _THROUGHPUT]), bought, rents)


def _as_its_kin(catalog: Catalog, vendor: str) -> float | None:
    """USD of an hour over USD of a purchase, of the vendor's dearest that has both: what sellers will ask for a part
    that is not there yet is taken to be as much above its price."""
    both = [
        (bought.usd, rented.usd)
        for accelerator in catalog.accelerators.values()
        if accelerator.vendor == vendor
        and (bought := quote(catalog.prices, accelerator.id, PURCHASE))
        and (rented := quote(catalog.prices, accelerator.id, ON_DEMAND))
    ]
    return (max(both)[1] / max(both)[0]) if both else None


def _divided(offered: Offers, accelerator: Accelerator) -> float:
    """GPUs by the best replica for each part of the traffic, as if replicas could be divided: enough to rank by."""
    mine = [i for i, column in enumerate(offered.columns) if column.deployment.accelerator.id == accelerator.id]
    if not mine:
        return np.inf
    gpus = np.array([float(offered.columns[i].deployment.gpus) for i in mine])
    with np.errstate(divide="ignore"):
        takes = (gpus[:, None] / offered.requests_per_s[mine]).min(axis=0)
    return float(takes @ np.array([part.requests_per_s for part in offered.parts]))


def _cheapest(catalog: Catalog, likely: Sequence[tuple[Accelerator, float]]) -> list[Accelerator]:
    """Of each vendor the cheapest to buy and to rent for this traffic; announced ones all."""
    kept = {accelerator.id for accelerator, _ in likely if accelerator.announced}
    for vendor in sorted({accelerator.vendor for accelerator, _ in likely}):
        for kind in (PURCHASE, ON_DEMAND):
            usd = {
                accelerator.id: gpus * quoted.usd
                for accelerator, gpus in likely
                if accelerator.vendor == vendor and (quoted := quote(catalog.prices, accelerator.id, kind))
            }
            kept |= set(sorted(usd, key=lambda name: (usd[name], name))[:_OF_A_VENDOR])
    return [accelerator for accelerator, _ in likely if accelerator.id in kept]


def arrivals(part: ScheduledPart, first: int, expected: int) -> Array:
    """The quarter from which it can be ordered in each world, counted from the first; 0 where it is sold."""
    if part.accelerator.announced is None:
        return np.zeros(WORLDS, dtype=np.int64)
    # Exponential: a delay says nothing about how much more is to come. The order of worlds is the accelerator's own.
    odds = (np.random.default_rng(sum(part.id.encode())).permutation(WORLDS) + 0.5) / WORLDS
    late = -part.slip_months / 3.0 * np.log1p(-odds)
    return np.ceil(max(expected - first, 0) + late).astype(np.int64)


@dataclass(frozen=True, slots=True)
class PurchaseOrder:
    """Decided this quarter."""

    accelerator: str
    # Owned, or by which contract.
    how: str
    gpus: int
    serves_from: str
    usd: float


@dataclass(frozen=True, slots=True)
class QuarterPlan:
    """Means over the worlds; `demand` with the ends of an 80% interval."""

    name: str
    demand: tuple[float, float, float]
    # GPUs in use by accelerator and kind.
    gpus: dict[str, dict[str, float]]
    # Shares of the peak that these carry.
    carried: dict[str, dict[str, float]]
    # GPUs that are ordered in it, by accelerator, and in which share of worlds any are.
    ordered: dict[str, float]
    ordered_in: dict[str, float]
    usd: float
    usd_80: tuple[float, float]


@dataclass(frozen=True, slots=True)
class PurchaseSchedule:
    workload: Workload
    asked: ScheduleRequest
    parts: list[ScheduledPart]
    orders: list[PurchaseOrder]
    quarters: list[QuarterPlan]
    usd: float
    usd_80: tuple[float, float]
    # Expected USD more than this schedule of others that one might follow.
    beside: dict[str, float]
    # In which share of worlds an announced part is ever ordered, and the expected saving by its coming.
    announced: dict[str, float]
    waiting_saves: float
    # Of what is sold by the rack and fills less than half of one: the share of a rack.
    only_rented: dict[str, float]
    # Paid whatever is decided, and in no other figure: contracts to their ends, and the running of GPUs on hand.
    standing_usd: float


def purchase_schedule(
    catalog: Catalog, workload: Workload, names: Sequence[str] = (), *, announced: bool = True, today: str = "",
    on_progress: OnProgress = no_progress,
) -> PurchaseSchedule:  # fmt: skip
    """The orders of least expected cost over the worlds. `names`: only these accelerators, announced or not."""
    asked = workload.schedule
    first = quarter_of(today or date.today().isoformat())
    parts = parts_of(catalog, workload, names, announced=announced, on_progress=on_progress)
    uncertain = _uncertain(workload, parts, first)
    filled = [_filled(part, uncertain, i) for i, part in enumerate(parts)]
    ways = _ways(catalog, parts, asked, [share >= 0.5 for share in filled])
    on_progress(0, 0, "orders over the worlds")
    free = decide(ways, uncertain)
    whole = rounded(free.now, lambda part: parts[part].sold_by)
    decided = decide(ways, uncertain, whole)
    on_progress(0, 0, "what others would cost")
    beside = {
        name: float(decide(kept, uncertain).usd.mean() - decided.usd.mean())
        for name, kept in _others(ways, parts).items()
        # Without renting no order need be enough.
        if any(way.kind == RENTED for way in kept)
    }
    sold = [way for way in ways if not parts[way.part].accelerator.announced]
    saves = float(decide(sold, uncertain).usd.mean() - free.usd.mean()) if len(sold) < len(ways) else 0.0
    coming = {
        part.id: float((decided.gpus[:, [w.part == i for w in ways]].sum(axis=1) > 0.5).mean())
        for i, part in enumerate(parts)
        if part.accelerator.announced
    }
    return PurchaseSchedule(
        workload=workload, asked=asked, parts=parts, orders=_orders(parts, asked, decided, first),
        quarters=[_quarter(parts, uncertain, decided, q, first) for q in range(asked.quarters)],
        usd=float(decided.usd.mean()), usd_80=_ends(decided.usd), beside=beside, announced=coming, waiting_saves=saves,
        only_rented={part.id: share for part, share in zip(parts, filled, strict=True) if share < 0.5},
        standing_usd=_standing_usd(catalog, workload, first),
    )  # fmt: skip


def _others(ways: Sequence[Acquisition], parts: Sequence[ScheduledPart]) -> dict[str, list[Acquisition]]:
    """Schedules that people follow: rent everything, order all of it now, or stay with one vendor."""
    others = {
        "rent everything by the hour": [way for way in ways if way.kind == RENTED],
        "buy nothing after this quarter": [way for way in ways if way.kind != OWNED or way.decided == 0],
    }
    for vendor in sorted({part.accelerator.vendor for part in parts}):
        others[f"{vendor} alone"] = [way for way in ways if parts[way.part].accelerator.vendor == vendor]
    return others


def _lead(part: ScheduledPart, asked: ScheduleRequest) -> int:
    """Quarters from an order to GPUs that serve."""
    return int(np.ceil(asked.lead_time_months.get(part.id, asked.lead_months) / 3.0 - 1e-9))


def _filled(part: ScheduledPart, uncertain: Futures, place: int) -> float:
    """Racks or servers of it that the traffic fills by the end, where much comes and a GPU carries little."""
    needed = uncertain.demand[:, -1] * uncertain.gpus[:, place]
    return float(np.quantile(needed, 0.9)) / part.sold_by


def _ways(
    catalog: Catalog, parts: Sequence[ScheduledPart], asked: ScheduleRequest, sold: Sequence[bool]
) -> list[Acquisition]:
    """`sold`: whether as few as are needed can be bought at all; else they can only be rented."""
    ways, end = list[Acquisition](), asked.quarters
    for place, part in enumerate(parts):
        for kind, rent in part.rents.items():
            length = CONTRACTS.get(kind, 1)
            for q in range(end):
                kept = min(q + length, end)
                # A contract is paid to its end; what is beyond the horizon serves others.
                usd = rent.usd * _QUARTER_HOURS * (kept - q)
                ways.append(Acquisition(place, RENTED if kind == ON_DEMAND else CONTRACT, q, q, kept, usd, kind))
        if part.purchase is None or not sold[place]:
            continue
        years = np.arange(1, end + 1) / 4.0
        option = part.option()
        owned = owned_usd(option, catalog.costs, years)
        book = part.purchase.usd * np.maximum(1.0 - years / catalog.costs["life_years"].likely.value, 0.0)
        for ordered in range(end):
            start = ordered + _lead(part, asked)
            for until in range(start + 1, end + 1):
                kept = until - start - 1
                lost = 0.0 if until == end else (1.0 - asked.resale) * float(book[kept])
                ways.append(Acquisition(place, OWNED, ordered, start, until, float(owned[kept]) + lost, "buy"))
    return ways


def _uncertain(workload: Workload, parts: Sequence[ScheduledPart], first: int) -> Futures:
    asked = workload.schedule
    chosen = np.arange(_DRAWN) * (WORLDS // _DRAWN)
    expected = [quarter_of(part.accelerator.announced.expected.value) if part.accelerator.announced else first
                for part in parts]  # fmt: skip
    orderable = np.stack([arrivals(part, first, at)[chosen] for part, at in zip(parts, expected, strict=True)], axis=1)
    return Futures(
        gpus=np.stack([part.gpus[chosen] for part in parts], axis=1),
        demand=_demand(workload, asked),
        orderable=orderable,
        there=_there(workload, parts, asked, first),
    )


def _demand(workload: Workload, asked: ScheduleRequest) -> Array:
    """The peak over today's by world and quarter; the first quarter's is known."""
    usual = (1.0 + workload.growth_per_year) ** 0.25
    steps = [*asked.growth[: asked.quarters - 1]]
    steps += [asked.growth[-1] if asked.growth else usual] * (asked.quarters - 1 - len(steps))
    middle = np.concatenate(([0.0], np.cumsum(np.log(steps))))
    half = np.random.default_rng(_SEED).standard_normal((_DRAWN // 2, asked.quarters - 1)) * asked.spread_per_year / 2.0
    # In opposite pairs, so that the middle is what was asked for.
    walks = np.cumsum(np.concatenate((half, -half)), axis=1)
    return np.asarray(np.exp(middle + np.concatenate((np.zeros((_DRAWN, 1)), walks), axis=1)))


def _there(workload: Workload, parts: Sequence[ScheduledPart], asked: ScheduleRequest, first: int) -> Array:
    """GPUs that are owned, on their way or under contract already."""
    there = np.zeros((len(parts), asked.quarters))
    place = {part.id: i for i, part in enumerate(parts)}
    for name, gpus in workload.constraints.inventory.items():
        if name in place:
            there[place[name]] += gpus
    for delivery in asked.deliveries:
        at = (quarter_number(delivery.quarter) or first) - first
        if delivery.accelerator in place:
            there[place[delivery.accelerator], max(at, 0) :] += delivery.gpus
    for other in asked.contracts:
        at = (quarter_number(other.until) or first) - first
        if other.accelerator in place:
            there[place[other.accelerator], : max(at + 1, 0)] += other.gpus
    return there


def _standing_usd(catalog: Catalog, workload: Workload, first: int) -> float:
    asked = workload.schedule
    total = 0.0
    for contract in asked.contracts:
        left = min((quarter_number(contract.until) or first) - first + 1, asked.quarters)
        total += max(left, 0) * _QUARTER_HOURS * contract.gpus * contract.usd_per_gpu_hour
    for name, gpus in workload.constraints.inventory.items():
        hourly = running_usd_per_hour(catalog.accelerator(name), catalog.costs)
        total += asked.quarters * _QUARTER_HOURS * gpus * hourly
    return total


def _orders(parts: Sequence[ScheduledPart], asked: ScheduleRequest, chosen: Decided, first: int) -> list[PurchaseOrder]:
    orders = []
    for (place, kind, name), gpus in chosen.now.items():
        if gpus < 0.5:
            continue
        part = parts[place]
        start = _lead(part, asked) if kind == OWNED else 0
        price = part.purchase.usd if kind == OWNED and part.purchase else part.rents[name].usd * _QUARTER_HOURS
        usd = gpus * price * (1 if kind == OWNED else CONTRACTS[name])
        orders.append(PurchaseOrder(part.id, name, round(gpus), quarter_name(first + start), usd))
    return sorted(orders, key=lambda order: -order.usd)


def _quarter(parts: Sequence[ScheduledPart], uncertain: Futures, chosen: Decided, q: int, first: int) -> QuarterPlan:
    ways, gpus = chosen.ways, chosen.gpus
    used: dict[str, dict[str, float]] = {}
    carried: dict[str, dict[str, float]] = {}
    paid = np.zeros(len(gpus))
    for i, way in enumerate(ways):
        if not way.start <= q < way.end:
            continue
        paid += gpus[:, i] * way.usd / (way.end - way.start)
        mean = float(gpus[:, i].mean())
        if mean > 1e-6:
            name = parts[way.part].id
            share = float((gpus[:, i] / uncertain.gpus[:, way.part]).mean())
            for table, value in ((used, mean), (carried, share)):
                row = table.setdefault(name, {})
                row[way.kind] = row.get(way.kind, 0.0) + value
    for place, part in enumerate(parts):
        if there := float(uncertain.there[place, q]):
            used.setdefault(part.id, {})["there"] = there
            carried.setdefault(part.id, {})["there"] = float((there / uncertain.gpus[:, place]).mean())
    ordered = {
        part.id: gpus[:, [w.part == place and w.kind == OWNED and w.decided == q for w in ways]].sum(axis=1)
        for place, part in enumerate(parts)
    }
    peak = uncertain.demand[:, q]
    return QuarterPlan(
        name=quarter_name(first + q),
        demand=(float(np.median(peak)), *_ends(peak)),
        gpus=used,
        carried=carried,
        ordered={name: float(some.mean()) for name, some in ordered.items() if some.mean() > 1e-6},
        ordered_in={name: float((some > 0.5).mean()) for name, some in ordered.items() if some.mean() > 1e-6},
        usd=float(paid.mean()),
        usd_80=_ends(paid),
    )


def _ends(drawn: Array) -> tuple[float, float]:
    low, high = np.quantile(drawn, [0.1, 0.9]).tolist()
    return float(low), float(high)
