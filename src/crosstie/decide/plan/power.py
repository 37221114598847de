"""What a fleet draws: its pools as predicted at the load that they serve."""

from collections.abc import Callable
from dataclasses import dataclass

from crosstie.catalog.costs import costs_for
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.workload import Workload
from crosstie.decide.cost.energy import Draw, draw_of, mean_share
from crosstie.decide.plan.answer import FleetPlan, PoolPlan


@dataclass(frozen=True, slots=True)
class FleetPower:
    """IT power in watts, server and network included; cooling only in the kWh."""

    rated: float
    # By pool, at the peak.
    pools: dict[str, float]
    # Of all GPUs, those that nodes have beyond the pools too; and at today's mean traffic, with its 80% interval.
    at_peak: float
    mean: float
    mean_80: tuple[float, float]
    kwh_per_million_output_tokens: float
    # Pools whose power nobody has measured: a share of the rated power.
    not_predicted: tuple[str, ...]


def fleet_power(catalog: Catalog, workload: Workload, fleet: FleetPlan) -> FleetPower:
    costs, today = catalog.costs, mean_share(workload)
    typical = costs["mean_power_fraction"].likely.value

    def server(accelerator: Accelerator) -> float:
        return costs_for(accelerator, costs)["server_watts_per_gpu"].likely.value * typical

    draws = {pool.name: _draw(catalog, pool) for pool in fleet.pools}

    def of(pool: PoolPlan, share: float, end: int | None = None) -> float:
        draw = draws[pool.name]
        if draw is None:
            one = pool.deployment.accelerator.chip.tdp.si * typical
        else:
            one = draw.watts(share) if end is None else draw.interval(share)[end]
        return pool.gpus * (one + server(pool.deployment.accelerator))

    def total(share: float, end: int | None = None) -> float:
        return sum(of(pool, share, end) for pool in fleet.pools) + _unused(catalog, fleet, server)

    outputs = sum(one.requests_per_s * one.part.slice.output_tokens for pool in fleet.pools for one in pool.carried)
    mean = total(today)
    kwh = mean / 1e3 * costs["pue"].likely.value
    return FleetPower(
        rated=fleet.watts,
        pools={pool.name: of(pool, 1.0) for pool in fleet.pools},
        at_peak=total(1.0),
        mean=mean,
        mean_80=(total(today, 0), total(today, 1)),
        kwh_per_million_output_tokens=kwh / (outputs * today * 3600.0) * 1e6 if outputs else 0.0,
        not_predicted=tuple(name for name, draw in draws.items() if draw is None),
    )


def _draw(catalog: Catalog, pool: PoolPlan) -> Draw | None:
    """At the peak's load; pools with prefill apart were measured too seldom."""
    if isinstance(pool.deployment, Disaggregated) or not pool.carried:
        return None
    piece = max(pool.carried, key=lambda one: (not one.part.slice.exempt, one.load)).part.slice
    lengths = (max(round(piece.input_tokens), 1), max(round(piece.output_tokens), 1))
    return draw_of(catalog, pool.deployment, pool.estimate, *lengths)


def _unused(catalog: Catalog, fleet: FleetPlan, server: Callable[[Accelerator], float]) -> float:
    """Of GPUs that whole nodes bring and that hold no replica."""
    watts = 0.0
    for name, bought in fleet.bought.items():
        left = bought + fleet.on_hand.get(name, 0) - fleet.gpus.get(name, 0)
        accelerator = catalog.accelerator(name)
        watts += max(left, 0) * (catalog.power.idle_watts(accelerator) + server(accelerator))
    return watts
