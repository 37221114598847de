"""The cheapest fleet for offers and prices, and the fleets that stand beside it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from crosstie.core.units import HOURS_PER_MONTH
from crosstie.core.workload import Workload
from crosstie.decide.plan.candidates import key_of
from crosstie.decide.plan.capacity import TrafficPart
from crosstie.decide.plan.market import Market, MarketItem
from crosstie.decide.plan.programme import Indices, Mask, Percentile, Programme, Solution
from crosstie.decide.plan.solver import MANY_PARTS, solve
from crosstie.decide.plan.survey import Offers, peak_of, undominated
from crosstie.perf.hardware import Array

# Pools that are tried to do without, the smallest first: of fifty nobody waits for all.
_MERGED_AT_MOST = 8


@dataclass(frozen=True, slots=True)
class Choice:
    """A question ready to be solved: what is available, at which price, under which limits."""

    offers: Offers
    market: Market
    problem: Programme
    # What the fleet is sized for, over today's peak.
    peak: float = 1.0
    # By model: what replicas take in simulation over what closed forms say; these offers are corrected already.
    correction: Mapping[str, float] = field(default_factory=dict)

    def allowing(self, accept: Callable[[MarketItem], bool]) -> Mask:
        """Columns whose accelerator is accepted."""
        return np.array([accept(item) for item in self.market.items])[self.problem.accelerator]

    def with_offers(self, offered: Offers) -> "Choice":
        """The same demand, prices and limits for other offers."""
        return replace(self, offers=offered, problem=replace(self.problem, **_columns(offered, self.market)))

    def by(self, offered: Offers) -> "Choice":
        """The same question by other estimates, corrected as these are, without columns that others replace."""
        return self.with_offers(undominated(offered.corrected(self.correction)))

    def with_vendor_share(self, share: Array) -> "Choice":
        return replace(self, problem=replace(self.problem, vendor_share=share))

    def gpus(self, solution: Solution) -> dict[str, int]:
        """Of a fleet by accelerator, those with most first."""
        order = np.argsort(-solution.gpus, kind="stable")
        return {self.market.items[i].id: round(solution.gpus[i]) for i in order if solution.gpus[i] > 0}


def _columns(offered: Offers, market: Market) -> dict[str, Any]:
    """What a programme knows of its columns."""
    place = {item.id: index for index, item in enumerate(market.items)}
    deployments = [column.deployment for column in offered.columns]
    return {
        "rate": offered.requests_per_s,
        "gpus": np.array([float(d.gpus) for d in deployments]),
        "accelerator": np.array([place[d.accelerator.id] for d in deployments], np.int64),
        "kept": np.stack((offered.capacity.keeps_ttft, offered.capacity.keeps_tpot)),
        "percentiles": percentiles(offered.parts),
        "alike": _alike(offered),
    }


def _alike(offered: Offers) -> Indices:
    places: dict[tuple[object, ...], int] = {}
    return np.array([places.setdefault((key_of(c.deployment), c.tier), len(places)) for c in offered.columns], np.int64)


def percentiles(parts: Sequence[TrafficPart]) -> tuple[Percentile, ...]:
    """What the classes of some parts ask, target by target."""
    found = []
    by_class = {id(part.request_class): part.request_class for part in parts}
    for request_class in by_class.values():
        mine = [part for part in parts if part.request_class is request_class]
        indices, share = np.array([p.index for p in mine], np.int64), np.array([p.slice.share for p in mine])
        for kept, target in enumerate((request_class.ttft, request_class.tpot)):
            if target is not None:
                found.append(Percentile(kept, indices, share / share.sum(), target.percentile))
    return tuple(found)


def choice(offered: Offers, market: Market, workload: Workload) -> Choice:
    today = np.array([part.requests_per_s for part in offered.parts])
    peak = peak_of(workload)
    problem = programme(market, workload, demand=today * peak, **_columns(offered, market))
    return Choice(offered, market, problem, peak)


def programme(
    market: Market,
    workload: Workload,
    *,
    demand: Array,
    rate: Array,
    gpus: Array,
    accelerator: Indices,
    kept: Array | None = None,
    percentiles: tuple[Percentile, ...] = (),
    alike: Indices | None = None,
) -> Programme:
    """Columns and demand under the prices of the market and the limits of the workload."""
    limits = workload.constraints
    items, vendors = market.items, market.vendors
    budget, power = limits.budget_usd_per_month, limits.power_kw

    def by_item(of: Callable[[MarketItem], float]) -> Array:
        return np.array([of(item) for item in items], dtype=np.float64)

    return Programme(
        rate=rate,
        demand=demand,
        gpus=gpus,
        accelerator=accelerator,
        usd_per_hour=by_item(lambda item: item.quote.usd),
        running_usd_per_hour=by_item(lambda item: item.running_usd_per_hour),
        watts=by_item(lambda item: item.watts),
        inventory=by_item(lambda item: item.on_hand),
        at_most=by_item(lambda item: item.at_most),
        unit=by_item(lambda item: item.unit),
        vendor=np.array([vendors.index(item.vendor) for item in items], np.int64),
        vendor_share=np.array([limits.vendor_share.get(vendor, 0.0) for vendor in vendors]),
        budget_usd_per_hour=np.inf if budget is None else budget / HOURS_PER_MONTH,
        power_watts=np.inf if power is None else power * 1e3,
        kept=np.zeros((2, *rate.shape)) if kept is None else kept,
        percentiles=percentiles,
        alike=np.arange(len(gpus)) if alike is None else alike,
    )


def simplify(problem: Programme, solution: Solution, simplicity: float) -> Solution:
    """Gives up pools, the smallest first, as long as the fleet gets no dearer than that share."""
    current = solution
    most = solution.usd_per_hour * (1.0 + simplicity)
    cost = problem.replica_usd_per_hour * solution.replicas
    for column in sorted(np.flatnonzero(solution.replicas), key=lambda c: cost[c])[:_MERGED_AT_MOST]:
        others = current.replicas > 0
        others[column] = False
        if least_usd_per_hour(problem, others) > most:
            continue
        fewer = solve(problem, others, quickly=True)
        if fewer is not None and fewer.usd_per_hour <= most:
            current = replace(fewer, bound_usd_per_hour=solution.bound_usd_per_hour)
    return current


def least_usd_per_hour(problem: Programme, columns: Mask) -> float:
    """What the columns would cost if replicas could be divided: no fleet of them is cheaper."""
    if not columns.any():
        return np.inf
    rent = np.where(problem.inventory > 0, 0.0, problem.usd_per_hour)[problem.accelerator] * problem.gpus
    return float(problem.per_request(rent)[columns].min(axis=0) @ problem.demand)


def near_ones_simplified(
    problem: Programme, fleets: Mapping[str, Solution | None], simplicity: float
) -> dict[str, Solution | None]:
    """Fleets that cost nearly as little as the least of them, with fewer pools; the others as they are.

    Of programmes with many parts, only the least itself: nobody waits for all.
    """
    least = min((fleet.usd_per_hour for fleet in fleets.values() if fleet), default=0.0)
    most = least * (1.0 + simplicity)
    near = most if len(problem.demand) <= MANY_PARTS else least

    def simpler(one: Solution | None) -> Solution | None:
        return simplify(problem, one, most / one.usd_per_hour - 1.0) if one and one.usd_per_hour <= near else one

    return {name: simpler(solution) for name, solution in fleets.items()}


def simplest(
    fleets: Mapping[str, Solution | None], simplicity: float, undercutting: Iterable[Solution | None]
) -> tuple[Solution, Solution]:
    """The cheapest, and of those that cost nearly as little the one with the fewest accelerators and pools.

    None of the fleets that are `undercutting` may be cheaper than it.
    """
    solutions = [fleet for fleet in fleets.values() if fleet]
    cheapest = min(solutions, key=lambda solution: solution.usd_per_hour)
    most = cheapest.usd_per_hour * (1.0 + simplicity)
    most = min([most, *(solution.usd_per_hour for solution in undercutting if solution)])
    near = [solution for solution in solutions if solution.usd_per_hour <= most + 1e-9]
    return cheapest, min(near, key=lambda solution: (solution.kinds, solution.pools, solution.usd_per_hour))


def single_vendor(asked: Choice) -> dict[str, Solution | None]:
    """The best fleet of each vendor alone, whatever share a policy asks for others."""
    free = asked.with_vendor_share(np.zeros_like(asked.problem.vendor_share)).problem
    solutions: dict[str, Solution | None] = {}
    for vendor in asked.market.vendors:
        allowed = asked.allowing(lambda item, vendor=vendor: item.vendor == vendor)  # type: ignore[misc]
        solutions[vendor] = solve(free, allowed, quickly=True)
    return solutions


def without_each(
    asked: Choice, solution: Solution, known: Mapping[str, Solution | None] | None = None
) -> dict[str, Solution | None]:
    """For each accelerator of a fleet, the best fleet that does without it; `known` are found already."""
    solutions = dict(known or {})
    for name in asked.gpus(solution):
        if name not in solutions:
            allowed = asked.allowing(lambda item, name=name: item.id != name)  # type: ignore[misc]
            solutions[name] = solve(asked.problem, allowed, quickly=True)
    return {name: solutions[name] for name in asked.gpus(solution)}
