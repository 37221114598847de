"""`schedule`: what to order now, what to rent until it comes, what to keep open, and what each quarter costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.schedule import ScheduleRequest, quarter_name, quarter_number, quarter_of
from crosstie.core.units import HOURS_PER_YEAR
from crosstie.core.workload import Workload
from crosstie.core.worlds import WORLDS
from crosstie.decide.cost.ownership import owned_usd, running_usd_per_hour
from crosstie.decide.schedule.parts import CONTRACTS, ON_DEMAND, ScheduledPart, arrivals, parts_of
from crosstie.decide.schedule.programme import CONTRACT, OWNED, RENTED, Acquisition, Decided, Futures, decide, rounded
from crosstie.perf.hardware import Array

# Worlds of the programme: every eighth of the posterior's, whose draws come in opposite pairs.
_DRAWN = 32
_SEED = 20261118
_QUARTER_HOURS = HOURS_PER_YEAR / 4.0


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
        for kind, quote in part.rents.items():
            length = CONTRACTS.get(kind, 1)
            for q in range(end):
                kept = min(q + length, end)
                # A contract is paid to its end; what is beyond the horizon serves others.
                usd = quote.usd * _QUARTER_HOURS * (kept - q)
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
