"""A plan against a simulation of its pools: do the percentiles come out as promised?

The plan is made with closed forms; here every pool gets Poisson traffic of the requests that the plan sends
it, and an engine that works in steps answers them. What is checked is the arithmetic between means and
percentiles and the mixing of classes, not the estimates of step times, which both share.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import RequestClass, Target
from crosstie.decide.plan.answer import FleetPlan, PoolPlan
from crosstie.sim.arrivals import Arrival, simulate

# Requests that a replica of each pool is sent; the first part only fills it. Long prompts come rarely and are felt
# for long: with a thousand requests their percentiles scatter by half.
_REQUESTS = 6000
_WARM_UP = 0.2
_LONGEST_RUN_TOKENS = 1_500_000

# TTFT, TPOT and weight of a request.
Row = tuple[float, float, float]


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


def check(
    fleet: FleetPlan,
    classes: tuple[RequestClass, ...],
    requests: int = _REQUESTS,
    on_progress: OnProgress = no_progress,
) -> list[SimulatedClass]:
    """Every pool by one of its replicas; requests of a class count by the traffic that a pool takes of it."""
    rows: dict[str, list[Row]] = {one.name: [] for one in classes}
    for done, pool in enumerate(fleet.pools):
        on_progress(done, len(fleet.pools), f"simulating {pool.name}")
        if pool.deployment.parallelism.pp == 1 and pool.carried:
            for name, row in _simulated(pool, requests):
                rows[name].append(row)
    return [
        SimulatedClass(
            name=one.name,
            requests=len(rows[one.name]),
            ttft_s=_quantile([(ttft_s, weight) for ttft_s, _, weight in rows[one.name]], one.ttft),
            tpot_s=_quantile([(tpot_s, weight) for _, tpot_s, weight in rows[one.name]], one.tpot),
            ttft=one.ttft,
            tpot=one.tpot,
        )
        for one in classes
    ]


def _simulated(pool: PoolPlan, count: int) -> Iterator[tuple[str, Row]]:
    """By request after the warm-up: its class, its latencies and what it counts for."""
    chance = np.random.default_rng(7)
    rates = np.array([one.requests_per_s for one in pool.carried]) / pool.replicas
    mean_tokens = fmean([one.part.slice.output_tokens for one in pool.carried])
    # Long answers on busy replicas make many steps: a bound on the work, not on the accuracy of the rare.
    count = max(min(count, int(_LONGEST_RUN_TOKENS / mean_tokens)), 200)
    arrivals = np.cumsum(chance.exponential(1.0 / rates.sum(), count))
    kinds = chance.choice(len(rates), count, p=rates / rates.sum())
    samples = [one.part.slice.sample for one in pool.carried]
    drawn = [samples[kind][int(u * len(samples[kind]))] for kind, u in zip(kinds, chance.random(count), strict=True)]
    served = simulate(pool.deployment, [Arrival(float(at), *each) for at, each in zip(arrivals, drawn, strict=True)])
    started = int(count * _WARM_UP)
    seen = np.bincount(kinds[started:], minlength=len(rates))
    for index in range(started, count):
        carried = pool.carried[int(kinds[index])]
        weight = carried.requests_per_s / seen[kinds[index]]
        yield carried.part.request_class.name, (float(served.ttft_s[index]), float(served.tpot_s[index]), weight)


def _quantile(values: Sequence[tuple[float, float]], target: Target | None) -> float | None:
    """Of values with weights; those that are no number, as the TPOT of one token, are left out."""
    kept = np.array([pair for pair in values if not math.isnan(pair[0])])
    if not len(kept) or target is None:
        return None
    seconds, weight = kept[np.argsort(kept[:, 0])].T
    reached = np.cumsum(weight) / weight.sum()
    return float(seconds[min(int(np.searchsorted(reached, target.percentile)), len(seconds) - 1)])
