"""A plan against a simulation of its pools: do the percentiles come out as promised?

The plan is made with closed forms; here every pool gets Poisson traffic of the requests that the plan sends
it, and an engine that works in steps answers them. What is checked is the arithmetic between means and
percentiles and the mixing of classes, not the estimates of step times, which both share.
"""

import math
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from crosstie.core.workload import RequestClass, Target
from crosstie.decide.plan.answer import FleetPlan, PoolPlan
from crosstie.sim.arrivals import Arrival, simulate

# Requests that a replica of each pool is sent; the first part only fills it. Long prompts come rarely and are felt
# for long: with a thousand requests their percentiles scatter by half.
_REQUESTS = 6000
_WARM_UP = 0.2
_LONGEST_RUN_TOKENS = 1_500_000


@dataclass(frozen=True, slots=True)
class SimulatedClass:
    """A class as simulated: its latencies at the percentiles of its targets, None where it has none."""

    name: str
    requests: int
    ttft_s: float | None
    tpot_s: float | None
    ttft: Target | None
    tpot: Target | None

    @property
    def holds(self) -> bool:
        pairs = ((self.ttft_s, self.ttft), (self.tpot_s, self.tpot))
        return all(seen <= target.seconds for seen, target in pairs if seen is not None and target is not None)


def check(fleet: FleetPlan, classes: tuple[RequestClass, ...], requests: int = _REQUESTS) -> list[SimulatedClass]:
    """Every pool by one of its replicas; requests of a class count by the traffic that a pool takes of it."""
    ttfts: dict[str, list[tuple[float, float]]] = {one.name: [] for one in classes}
    tpots: dict[str, list[tuple[float, float]]] = {one.name: [] for one in classes}
    for pool in fleet.pools:
        if pool.deployment.parallelism.pp > 1 or not pool.carried:
            continue
        _simulate_pool(pool, requests, ttfts, tpots)
    return [
        SimulatedClass(
            name=one.name,
            requests=len(ttfts[one.name]),
            ttft_s=_quantile(ttfts[one.name], one.ttft),
            tpot_s=_quantile(tpots[one.name], one.tpot),
            ttft=one.ttft,
            tpot=one.tpot,
        )
        for one in classes
    ]


def _simulate_pool(
    pool: PoolPlan, count: int, ttfts: dict[str, list[tuple[float, float]]], tpots: dict[str, list[tuple[float, float]]]
) -> None:
    chance = np.random.default_rng(7)
    rates = np.array([one.requests_per_s for one in pool.carried]) / pool.replicas
    mean_tokens = fmean([one.part.slice.output_tokens for one in pool.carried])
    # Long answers on busy replicas make many steps: a bound on the work, not on the accuracy of the rare.
    count = max(min(count, int(_LONGEST_RUN_TOKENS / mean_tokens)), 200)
    arrivals = np.cumsum(chance.exponential(1.0 / rates.sum(), count))
    kinds = chance.choice(len(rates), count, p=rates / rates.sum())
    samples = [one.part.slice.sample for one in pool.carried]
    drawn = [samples[kind][int(u * len(samples[kind]))] for kind, u in zip(kinds, chance.random(count), strict=True)]
    sent = [Arrival(float(at), *lengths) for at, lengths in zip(arrivals, drawn, strict=True)]
    served = simulate(pool.deployment, sent)
    started = int(count * _WARM_UP)
    seen = np.bincount(kinds[started:], minlength=len(rates))
    for index in range(started, count):
        carried = pool.carried[int(kinds[index])]
        name = carried.part.request_class.name
        weight = carried.requests_per_s / seen[kinds[index]]
        ttfts[name].append((float(served.ttft_s[index]), weight))
        if not math.isnan(served.tpot_s[index]):
            tpots[name].append((float(served.tpot_s[index]), weight))


def _quantile(values: list[tuple[float, float]], target: Target | None) -> float | None:
    if not values or target is None:
        return None
    seconds = np.array([value for value, _ in values])
    weight = np.array([weight for _, weight in values])
    order = np.argsort(seconds)
    reached = np.cumsum(weight[order]) / weight.sum()
    return float(seconds[order][min(int(np.searchsorted(reached, target.percentile)), len(order) - 1)])
