"""Plans and fleets by simulation: each pool by itself, or the whole fleet behind the gateway's own routing policy.

The plan is made with closed forms; here every pool gets Poisson traffic of the requests that the plan sends it, and an
engine that works in steps answers them. What is checked is the arithmetic between means and percentiles and the mixing
of classes, not the estimates of step times, which both share.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Policy
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import RequestClass, Slice, Target, Workload
from crosstie.decide.plan.answer import FleetPlan, PoolPlan
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.plan import Plan, SimulatedClass
from crosstie.decide.plan.shared import SharedPoolPlan, SimulatedSharing, mean_rates, own_classes
from crosstie.perf.hardware import Array
from crosstie.sim import arrivals
from crosstie.sim.disaggregated import simulate_apart
from crosstie.sim.fleet import FleetSimulator, Score, SimulatedAnswer, SimulatedRequest, score
from crosstie.sim.hosting import Traffic, host

# Of the requests, so many only fill the fleet before it is measured.
_WARM_UP = 0.2
# Requests that a replica of each pool is sent. Long prompts come rarely and are felt for long: with a thousand requests
# their percentiles scatter by half.
_REQUESTS = 6000
_LONGEST_RUN_TOKENS = 1_500_000
# By then percentiles of cold requests stand.
_ENOUGH_REQUESTS = 40_000

# TTFT, TPOT and weight of a request.
_Row = tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Simulation:
    """How the fleet served its traffic, after the warm-up."""

    policy: Policy
    # Of all requests, and by class; a class that sent none is left out.
    score: Score
    by_class: dict[str, Score]
    answers: list[SimulatedAnswer]


def simulate(
    catalog: Catalog, fleet: Fleet | Plan, workload: Workload, *, policy: Policy | None = None,
    requests: int = 5000, load: float = 1.0, seed: int = 7,
) -> Simulation:  # fmt: skip
    """Poisson traffic of the workload's classes through the routing policy to engines that work in steps.

    `fleet`: a fleet file's, or the plan whose fleet it is; replicas without an address get one. `policy`: another than
    the fleet's. `load`: times the workload's peak. Models that share replicas are simulated by `simulate_pools`.
    """
    if requests < 100:
        raise BadInput(f"{requests} requests: at least 100, or no percentile means anything")
    if not (load > 0 and math.isfinite(load)):
        raise BadInput(f"a load of {load:g} times the peak: must be above 0")
    asked = _addressed(fleet_of(fleet) if isinstance(fleet, Plan) else fleet)
    served = {pool.model for pool in asked.pools}
    missing = sorted({one.model for one in workload.classes} - served)
    if missing:
        raise BadInput(f"no pool of fleet '{asked.name}' serves {', '.join(missing)}")
    simulator = FleetSimulator(catalog, asked, policy, seed)
    sent = _traffic(workload, requests, load, np.random.default_rng(seed))
    since = sent[int(len(sent) * _WARM_UP)].arrival_s
    answers = [one for one in simulator.run(sent) if one.request.arrival_s >= since]
    by_class = {
        one.name: score(simulator.live, mine)
        for one in workload.classes
        if (mine := [answer for answer in answers if answer.request.class_name == one.name])
    }
    return Simulation(policy or asked.policy, score(simulator.live, answers), by_class, answers)


def _addressed(fleet: Fleet) -> Fleet:
    """Replicas are told apart by their addresses; those of a plan have none yet."""
    if any(pool.hosts for pool in fleet.pools):
        raise BadInput(f"fleet '{fleet.name}': pools that host several models are not simulated behind a policy")
    pools = tuple(
        pool
        if pool.backends
        else msgspec.structs.replace(
            pool, backends=tuple(f"http://{pool.name}-{number}" for number in range(pool.replicas))
        )
        for pool in fleet.pools
    )
    return msgspec.structs.replace(fleet, pools=pools)


def _traffic(workload: Workload, count: int, load: float, chance: np.random.Generator) -> list[SimulatedRequest]:
    parts = [(one, piece) for one in workload.classes for piece in one.slices]
    rates = np.array([one.requests_per_s * piece.share for one, piece in parts]) * load
    return [
        SimulatedRequest(at, parts[kind][0].model, inputs, outputs, parts[kind][0].name)
        for at, kind, inputs, outputs in _drawn(rates, [piece for _, piece in parts], count, chance)
    ]


def _drawn(
    rates: Array, slices: Sequence[Slice], count: int, chance: np.random.Generator
) -> Iterator[tuple[float, int, int, int]]:
    """Poisson traffic: when, of which slice, and with which of its lengths."""
    arrivals = np.cumsum(chance.exponential(1.0 / rates.sum(), count))
    kinds = chance.choice(len(rates), count, p=rates / rates.sum())
    for at, kind, u in zip(arrivals, kinds, chance.random(count), strict=True):
        sample = slices[kind].sample
        yield float(at), int(kind), *sample[int(u * len(sample))]


def simulate_pools(plan: Plan, on_progress: OnProgress = no_progress) -> Plan:
    """The plan with its promises checked: each pool under the traffic that the plan sends it."""
    if plan.fleet:
        plan = replace(
            plan, simulated=simulate_classes(plan.fleet, own_classes(plan.workload), on_progress=on_progress)
        )
    if plan.shared and plan.shared.answer:
        on_progress(0, 0, "simulating shared replicas")
        found = simulate_sharing(plan.shared.answer, plan.workload)
        plan = replace(plan, shared=replace(plan.shared, simulated=found))
    return plan


def simulate_classes(
    fleet: FleetPlan,
    classes: tuple[RequestClass, ...],
    requests: int = _REQUESTS,
    on_progress: OnProgress = no_progress,
) -> list[SimulatedClass]:
    """Every pool by one of its replicas; requests of a class count by the traffic that a pool takes of it."""
    rows: dict[str, list[_Row]] = {one.name: [] for one in classes}
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


def _simulated(pool: PoolPlan, count: int) -> Iterator[tuple[str, _Row]]:
    """By request after the warm-up: its class, its latencies and what it counts for."""
    rates = np.array([one.requests_per_s for one in pool.carried]) / pool.replicas
    slices = [one.part.slice for one in pool.carried]
    # Long answers on busy replicas make many steps: a bound on the work, not on the accuracy of the rare.
    longest = int(_LONGEST_RUN_TOKENS / fmean([piece.output_tokens for piece in slices]))
    drawn = list(_drawn(rates, slices, max(min(count, longest), 200), np.random.default_rng(7)))
    sent = [arrivals.Arrival(at, inputs, outputs) for at, _, inputs, outputs in drawn]
    one = pool.deployment
    served = simulate_apart(one, sent) if isinstance(one, Disaggregated) else arrivals.simulate(one, sent)
    started = int(len(drawn) * _WARM_UP)
    kinds = [kind for _, kind, _, _ in drawn]
    seen = np.bincount(kinds[started:], minlength=len(rates))
    for index in range(started, len(drawn)):
        carried = pool.carried[kinds[index]]
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
    traffic = Traffic(np.sort(chance.uniform(0.0, span_s, count)), kinds, takes[kinds])
    found = host(hosted, [pool.layout.room_bytes] * pool.replicas, traffic, warm_up_s=span_s / 4.0)
    return SimulatedSharing(
        found.requests, found.cold_share, found.evictions_per_hour, found.wait_s(0.5), found.wait_s(0.99)
    )
