"""Reserved for the base of a day and on-demand for its peak: how many of each, and what that costs.

At every hour a pool needs the share of its replicas that traffic has of its peak, and those of the next hour, since
replicas take minutes to start. What is needed around the clock is cheapest under a contract, what is needed for an
hour is not; in between the two prices decide.
"""

from dataclasses import dataclass

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.workload import Workload
from crosstie.decide.cost.prices import Quote, quotes
from crosstie.decide.plan.answer import FleetPlan
from crosstie.decide.plan.market import Market
from crosstie.decide.plan.programme import Array

# The longest first, which is the cheapest.
CONTRACTS = ("reserved-3-years", "reserved-1-year", "reserved")
# What is counted of a mixture, and of what it is held against.
MIXTURE_COSTS = (
    "usd_per_hour", "all_reserved_usd_per_hour", "as_needed_usd_per_hour", "around_the_clock_usd_per_hour",
)  # fmt: skip
# How the names of kinds begin that are under contract.
_CONTRACT = ("reserved", "modelled")


@dataclass(frozen=True, slots=True)
class Mixed:
    """Of one accelerator: GPUs under contract, the most that are rented beside them, and USD an hour over the day."""

    reserved: int
    most_on_demand: int
    contract: Quote
    by_the_hour: Quote
    usd_per_hour: float
    # The same GPUs all under contract, and all rented, as long as they are needed or around the clock.
    all_reserved_usd_per_hour: float
    as_needed_usd_per_hour: float
    around_the_clock_usd_per_hour: float


@dataclass(frozen=True, slots=True)
class Mixture:
    accelerators: dict[str, Mixed]
    # Those of the fleet that have not both prices: which one is lacking, and the contract price below which a contract
    # for all of them would cost less than renting them as they are needed; None without a rent either.
    lacking: dict[str, tuple[str, float | None]]
    # Mean traffic over the peak.
    mean: float

    def total(self, what: str) -> float:
        return sum(float(getattr(accelerator, what)) for accelerator in self.accelerators.values())

    @property
    def saves(self) -> float:
        """Against the better of a contract for all and renting all as needed, as a share."""
        best = min(self.total("all_reserved_usd_per_hour"), self.total("as_needed_usd_per_hour"))
        return 1.0 - self.total("usd_per_hour") / best if best else 0.0


def mixture(catalog: Catalog, workload: Workload, market: Market, fleet: FleetPlan) -> Mixture | None:
    """None where the workload has no day, or nothing has to be rented."""
    if not workload.day:
        return None
    needed = {name: gpus for name, gpus in _by_hour(workload, market, fleet).items() if gpus.max() > 0}
    if not needed:
        return None
    hourly, contracts = _rents(catalog, workload, market), _contracts(catalog, workload, market)
    found: dict[str, Mixed] = {}
    lacking: dict[str, tuple[str, float | None]] = {}
    for name, gpus in needed.items():
        rent, contract = hourly.get(name), contracts.get(name)
        if rent and contract:
            found[name] = _mixed(gpus, market.items[market.index(name)].unit, rent, contract)
        else:
            level = rent.usd * float(gpus.mean() / gpus.max()) if rent else None
            lacking[name] = ("reserved" if rent else "on-demand", level)
    return Mixture(found, lacking, float(np.mean(workload.day)))


def _by_hour(workload: Workload, market: Market, fleet: FleetPlan) -> dict[str, Array]:
    """GPUs that must be rented at each hour of the day by accelerator, in whole units, beside those on hand."""
    day = np.array(workload.day)
    share = np.maximum(day, np.roll(day, -1))
    found: dict[str, Array] = {}
    for pool in fleet.pools:
        replicas = np.maximum(np.ceil(pool.replicas * share - 1e-9), 1.0)
        name = pool.deployment.accelerator.id
        found[name] = found.get(name, 0.0) + replicas * pool.deployment.gpus
    for name, gpus in found.items():
        item = market.items[market.index(name)]
        found[name] = np.ceil(np.maximum(gpus - item.on_hand, 0.0) / item.unit - 1e-9) * item.unit
    return found


def _rents(catalog: Catalog, workload: Workload, market: Market) -> dict[str, Quote]:
    """By the hour, after discounts: the user's own, else on-demand."""
    own = workload.prices.usd_per_gpu_hour
    return _discounted(quotes(catalog.prices, [item.id for item in market.items], ("on-demand",), own), market)


def _contracts(catalog: Catalog, workload: Workload, market: Market) -> dict[str, Quote]:
    """Under contract: the user's own, else the plan's price where it is one, else what a seller publishes."""
    own = workload.prices.reserved_usd_per_gpu_hour
    names = [item.id for item in market.items]
    planned = {
        item.id: item.quote for item in market.items if item.quote.kind.startswith(_CONTRACT) and item.id not in own
    }
    return _discounted(quotes(catalog.prices, names, CONTRACTS, own), market) | planned


def _discounted(found: dict[str, Quote], market: Market) -> dict[str, Quote]:
    off = {item.id: item.discount for item in market.items}
    return {name: quote.mapped(lambda usd, name=name: usd * (1.0 - off[name])) for name, quote in found.items()}  # type: ignore[misc]


def _mixed(gpus: Array, unit: int, rent: Quote, contract: Quote) -> Mixed:
    """The number under contract that costs least over the day."""
    choices = np.arange(0, gpus.max() + unit, unit)
    rented = np.maximum(gpus[None, :] - choices[:, None], 0.0)
    cost = choices * contract.usd + rented.mean(axis=1) * rent.usd
    # Of equals the fewest: what is under contract stays when traffic does not come.
    best = int(np.flatnonzero(cost <= cost.min() * (1.0 + 1e-12))[0])
    return Mixed(
        reserved=round(choices[best]),
        most_on_demand=round(rented[best].max()),
        contract=contract,
        by_the_hour=rent,
        usd_per_hour=float(cost[best]),
        all_reserved_usd_per_hour=float(gpus.max() * contract.usd),
        as_needed_usd_per_hour=float(gpus.mean() * rent.usd),
        around_the_clock_usd_per_hour=float(gpus.max() * rent.usd),
    )
