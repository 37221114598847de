"""Plans and fleets by simulation: each pool by itself, or the whole fleet behind the gateway's own routing policy."""

import math
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Policy
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import Workload
from crosstie.decide.plan.check import check
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.shared import SharedPoolPlan, SimulatedSharing, mean_rates, own_classes
from crosstie.sim.fleet import FleetSimulator, Score, SimulatedAnswer, SimulatedRequest, score
from crosstie.sim.hosting import Traffic, host

# Of the requests, so many only fill the fleet before it is measured.
_WARM_UP = 0.2
# By then percentiles of cold requests stand.
_ENOUGH_REQUESTS = 40_000


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
    arrivals = np.cumsum(chance.exponential(1.0 / rates.sum(), count))
    found = []
    for at, kind, u in zip(
        arrivals, chance.choice(len(parts), count, p=rates / rates.sum()), chance.random(count), strict=True
    ):
        one, piece = parts[kind]
        inputs, outputs = piece.sample[int(u * len(piece.sample))]
        found.append(SimulatedRequest(float(at), one.model, inputs, outputs, one.name))
    return found


def simulate_pools(plan: Plan, on_progress: OnProgress = no_progress) -> Plan:
    """The plan with its promises checked: each pool under the traffic that the plan sends it."""
    if plan.fleet:
        plan = replace(plan, simulated=check(plan.fleet, own_classes(plan.workload), on_progress=on_progress))
    if plan.shared and plan.shared.answer:
        on_progress(0, 0, "simulating shared replicas")
        found = simulate_sharing(plan.shared.answer, plan.workload)
        plan = replace(plan, shared=replace(plan.shared, simulated=found))
    return plan


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
