"""What the plan knows of its pools, for the scaler: requests/s of a replica by kind of request, price, start."""

import math
from collections import Counter

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.loading import shipped_loading
from crosstie.core.disaggregated import Servable
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Pool
from crosstie.core.workload import Workload
from crosstie.decide.plan.candidates import key_of
from crosstie.decide.plan.programme import Array
from crosstie.decide.plan.scaling import scaling_of
from crosstie.decide.plan.subject import Subject
from crosstie.decide.plan.survey import Offers, offers, parts_of, peak_of, survey
from crosstie.decide.plan.traffic import of_means
from crosstie.route.build import deployment_of, service_of
from crosstie_gateway.scaler.learnt import start_s
from crosstie_gateway.scaler.rules import ScaleRules, Supply
from crosstie_gateway.scaler.scaler import Capacities, ClassPart

# Over what the plan has of a pool: what may be asked for where no rule says how many there can be.
_MOST_TIMES = 2


def rules_of(subject: Subject) -> ScaleRules:
    """Of a fleet without rules: each pool is one supply, at its price, up to twice the plan or what there is."""
    planned: Counter[str] = Counter()
    for pool in subject.fleet.pools:
        planned[pool.accelerator or ""] += pool.gpus
    there = _there_are(subject)

    def most(pool: Pool) -> int:
        kind = pool.accelerator or ""
        times = min(_MOST_TIMES, there.get(kind, math.inf) / max(planned[kind], 1))
        return max(math.floor(pool.replicas * times), pool.replicas)

    pools = subject.fleet.pools
    return ScaleRules(supplies=tuple(Supply(name=pool.name, pool=pool.name, most=most(pool)) for pool in pools))


def check_inventory(rules: ScaleRules, subject: Subject) -> None:
    """Raises BadInput where rules ask for more than the workload says there is."""
    pools = {pool.name: pool for pool in subject.fleet.pools}
    for accelerator, gpus in _there_are(subject).items():
        mine = [supply for supply in rules.supplies if pools[supply.pool].accelerator == accelerator]
        asked = sum(supply.most * pools[supply.pool].replica_gpus for supply in mine)
        if asked > gpus:
            raise BadInput(
                f"supply {', '.join(supply.name for supply in mine)}: `most` comes to {asked} {accelerator}, and by "
                f"constraints.at_most of the workload there are {gpus}: lower the one or raise the other"
            )


def _there_are(subject: Subject) -> dict[str, int]:
    return dict(subject.workload.constraints.at_most) if subject.workload else {}


def capacities(catalog: Catalog, subject: Subject) -> Capacities:
    """By the closed forms and the simulations that the plan rests on, at the sureness that it was made for."""
    fleet, workload = subject.fleet, subject.workload or of_means(subject.fleet)
    parts = parts_of(workload)
    offered = _offers(catalog, fleet, workload).corrected(subject.correction)
    demand = np.array([part.requests_per_s for part in parts])
    rate = {pool.name: _rates(catalog, offered, pool, fleet, demand) for pool in fleet.pools}
    unserved = [part for part in parts if not any(rates[part.index] > 0 for rates in rate.values())]
    if unserved:
        part = unserved[0]
        raise BadInput(
            f"no pool of fleet '{fleet.name}' keeps the targets of class {part.request_class.name} for prompts of up "
            f"to {part.slice.longest_input} tokens, at any load: plan the workload again"
        )
    facts, deployments = shipped_loading(), {pool.name: deployment_of(catalog, pool) for pool in fleet.pools}
    return Capacities(
        parts=[ClassPart(part.request_class.name, part.slice.share) for part in parts],
        rate=rate,
        gpus={pool.name: pool.replica_gpus for pool in fleet.pools},
        usd_per_gpu_hour={pool.name: pool.usd_per_gpu_hour for pool in fleet.pools},
        start_s={
            name: start_s(facts, deployment) for name, deployment in deployments.items() if deployment is not None
        },
    )


def _offers(catalog: Catalog, fleet: Fleet, workload: Workload) -> Offers:
    parts = parts_of(workload)
    surveyed = []
    for model in dict.fromkeys(part.request_class.model for part in parts):
        mine = [part for part in parts if part.request_class.model == model]
        served = [_servable(catalog, pool) for pool in fleet.pools if pool.model == model]
        known = {key_of(servable): servable for servable in served}
        surveyed.append(survey(list(known.values()), mine))
    return offers(surveyed, scaling_of(workload), peak=peak_of(workload))


def _servable(catalog: Catalog, pool: Pool) -> Servable:
    known = service_of(catalog, pool) or deployment_of(catalog, pool)
    if known is None:
        raise BadInput(f"pool {pool.name} names no accelerator, so nothing says what a replica carries")
    return known


def _rates(catalog: Catalog, offered: Offers, pool: Pool, fleet: Fleet, demand: Array) -> Array:
    """Of the ways to run such replicas, the one that carries most of what is routed there; the best of the others for
    the rest."""
    key = key_of(_servable(catalog, pool))
    rows = [i for i, column in enumerate(offered.columns) if key_of(column.deployment) == key]
    routed = {asks.name for asks in fleet.classes if any(route.pool == pool.name for route in asks.routes)}
    mine = np.array([part.request_class.name in routed for part in offered.parts]) if routed else demand > 0
    rate = offered.requests_per_s[rows]
    takes = np.divide(demand, rate, out=np.full_like(rate, np.inf), where=rate > 0)[:, mine]
    # More kinds of requests come first, then fewer replicas for them.
    first = min(range(len(rows)), key=lambda i: (int(np.isinf(takes[i]).sum()), takes[i][np.isfinite(takes[i])].sum()))
    best = rate[first]
    return np.asarray(np.where(best > 0, best, rate.max(axis=0)))
