"""What a schedule may choose from: each accelerator with the GPUs that the traffic takes, its prices and its date."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator
from crosstie.core.disaggregated import Servable
from crosstie.core.errors import BadInput
from crosstie.core.estimate import METRICS
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.units import UNITS
from crosstie.core.workload import Workload
from crosstie.core.worlds import WORLDS
from crosstie.decide.cost.ownership import Option
from crosstie.decide.cost.prices import PURCHASE, Quote, given, quote, quotes
from crosstie.decide.plan.gate import Gate
from crosstie.decide.plan.market import MarketItem, adjusted, market
from crosstie.decide.plan.optimise import choice
from crosstie.decide.plan.scaling import WorldScaling
from crosstie.decide.plan.solver import solve
from crosstie.decide.plan.survey import Offers, offers, surveys, undominated
from crosstie.perf.hardware import Array

ON_DEMAND = "on-demand"
# Kinds of contracts by their quarters.
CONTRACTS = {"reserved-1-year": 4, "reserved-3-years": 12}
_THROUGHPUT = METRICS.index("throughput")
# Of today's accelerators so many are weighed: the cheapest few of each vendor, bought and rented.
_OF_A_VENDOR = 2
# GPUs are counted in a fleet so many times as large: what the last replica has to spare is not what a GPU carries.
_TIMES = 8


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
