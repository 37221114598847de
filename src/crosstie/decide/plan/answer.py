"""A solved fleet in words and money: pools, who goes where and why, what a million tokens costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from math import inf

import numpy as np

from crosstie.catalog.benchmarks import at_length
from crosstie.catalog.library import Catalog
from crosstie.catalog.measured import measured_with
from crosstie.core.disaggregated import Disaggregated, Servable
from crosstie.core.estimate import Estimate
from crosstie.core.figures import seconds, significant
from crosstie.core.units import HOURS_PER_MONTH, SECONDS_PER_HOUR
from crosstie.core.workload import RequestClass, Slice, Workload
from crosstie.decide.cost.prices import BUY
from crosstie.decide.plan.capacity import LIMITS, Tier, TrafficPart
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.programme import Array, Mask, Programme, Solution
from crosstie.decide.plan.reuse import hit_rate
from crosstie.decide.plan.solver import solve
from crosstie.perf.estimate import estimate
from crosstie.perf.memory import memory_plan

_MILLION = 1e6
# The price, over the answer's, beyond which a fleet is no alternative.
MOST_TIMES = 5.0


@dataclass(frozen=True)
class Carried:
    """What a pool takes of one slice of a class. What only an answer shows is worked out when it is asked for."""

    part: TrafficPart
    # Of the slice.
    share: float
    requests_per_s: float
    # Replicas that it keeps busy at the peak.
    load: float
    usd_per_hour: float
    # Of one replica.
    deployment: Servable
    in_flight: float
    limit: str
    why: str
    # Share of its prompt tokens that the replicas have in their caches, at the peak.
    hit_rate: float = 0.0

    @cached_property
    def prompt_share(self) -> float:
        """What prompts take of a busy replica's time, by what the steps of such requests spend."""
        spent = _estimate(self.deployment, self.part.slice, self.in_flight).gpu_s_per_token
        return sum(s for key, s in spent.items() if key.startswith("prefill")) / sum(spent.values())


@dataclass(frozen=True)
class PoolPlan:
    name: str
    deployment: Servable
    tier: Tier
    replicas: int
    usd_per_gpu_hour: float
    usd_per_hour: float
    # At the peak: load over replicas. The rest is spare, or what whole replicas leave.
    utilisation: float
    # Of one replica, for the slice that loads the pool most.
    in_flight: float
    most_in_flight: float
    limit: str
    main: Slice
    carried: list[Carried]
    # Of the price, what buying takes: paid once, whoever is served.
    sunk_usd_per_gpu_hour: float = 0.0

    @cached_property
    def estimate(self) -> Estimate:
        """Means at the peak, for the slice that loads it most."""
        found = next((one.hit_rate for one in self.carried if one.part.slice is self.main), 0.0)
        in_flight = self.in_flight * min(self.utilisation, 1.0)
        return _estimate(self.deployment, self.main, in_flight, round(self.main.input_tokens * found))

    @property
    def gpus(self) -> int:
        return self.replicas * self.deployment.gpus

    @property
    def usd_per_gb_month(self) -> float:
        """Of memory."""
        return self.usd_per_gpu_hour * HOURS_PER_MONTH / (self.deployment.accelerator.memory_bytes / 1e9)

    @property
    def usd_per_cache_gb_month(self) -> float | None:
        """Of what weights and engine leave for the KV cache of its replicas; None where prefill is apart."""
        if isinstance(self.deployment, Disaggregated):
            return None
        return self.usd_per_hour * HOURS_PER_MONTH / (memory_plan(self.deployment).cache_bytes * self.gpus / 1e9)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """USD per million tokens and per thousand requests, at the mean of today's traffic."""

    # By what prompts and answers use of replicas while they are busy; and what stands idle, over all tokens.
    usd_per_million_input: float
    usd_per_million_output: float
    usd_per_million_idle: float
    # All of it.
    usd_per_million: float
    usd_per_thousand_requests: float


@dataclass(frozen=True, slots=True)
class FleetPlan:
    pools: list[PoolPlan]
    usd_per_hour: float
    watts: float
    # GPUs that run, those of them that are on hand, and those that must be bought, in whole nodes where that is asked.
    gpus: dict[str, int]
    on_hand: dict[str, int]
    bought: dict[str, int]
    # How far from the cheapest it may be, as far as the search went.
    gap: float
    by_class: dict[str, TokenCost]
    cost: TokenCost


@dataclass(frozen=True, slots=True)
class Alternative:
    """A fleet beside the answer: what it is made of and what it costs."""

    gpus: dict[str, int]
    usd_per_hour: float
    # Over the answer's, less one; where it is by closed forms, over what the answer's accelerators cost by them.
    dearer: float
    # Whether simulation has confirmed it, as it has the answer.
    confirmed: bool = False
    # What holds its replicas back: said where it is many times as dear.
    limit: str = ""

    @property
    def is_absurd(self) -> bool:
        """So much dearer that nobody would buy it, so that why matters and how much does not."""
        return self.dearer > MOST_TIMES - 1.0

    @property
    def label(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in self.gpus.items())


# Where none keeps the targets.
NO_FLEET = Alternative(gpus={}, usd_per_hour=inf, dearer=inf)


def measured_words(catalog: Catalog, pool: PoolPlan) -> str:
    """What stands behind a pool's estimate: layouts, lengths and loads that were measured, and what goes beyond."""
    one = pool.deployment.decode
    found = measured_with(catalog, one)
    main = pool.carried[0].part.slice.input_tokens if pool.carried else 1.0
    known = at_length(one.accelerator.id, main)
    slower = f"; {known}" if known else ""
    if found is None:
        return (
            f"no published result of {one.model.id} in {one.weight_width}-bit weights on {one.accelerator.id} "
            f"with {one.stack.name}{slower}"
        )
    beyond = found.misses(str(one.parallelism), main, pool.in_flight)
    return f"measured with {found.words}{f'; not with {_listed(beyond)}' if beyond else ''}{slower}"


def _listed(words: Sequence[str]) -> str:
    return " or ".join(words)


def alternative(asked: Choice, solution: Solution | None, answer: float) -> Alternative | None:
    if solution is None:
        return None
    dearer = solution.usd_per_hour / answer - 1.0 if answer else 0.0
    found = Alternative(asked.gpus(solution), solution.usd_per_hour, dearer)
    return replace(found, limit=_held_back(asked, solution)) if found.is_absurd else found


def cheapest(asked: Choice, answer: float, allowed: Mask | None = None) -> Alternative | None:
    """The best fleet for a question beside another, whose answer costs so much."""
    return alternative(asked, solve(asked.problem, allowed, quickly=True), answer)


def _held_back(asked: Choice, solution: Solution) -> str:
    """What keeps the replicas that cost most from taking more."""
    problem, offered = asked.problem, asked.offers
    load = np.divide(
        solution.share * problem.demand, problem.rate, out=np.zeros_like(problem.rate), where=problem.rate > 0
    )
    column, place = np.unravel_index(int(np.argmax(load * problem.replica_usd_per_hour[:, None])), load.shape)
    limit, kind = LIMITS[int(offered.capacity.limit[column, place])], offered.parts[int(place)].request_class
    targets = {"TPOT target": ("TPOT", kind.tpot), "TTFT target": ("TTFT", kind.ttft)}
    name, target = targets.get(limit, ("", None))
    return f"{kind.name}'s {name} p{target.percentile * 100:g} of {seconds(target.seconds)}" if target else limit


def found_share(fleet: FleetPlan, request_class: RequestClass) -> float:
    """Of a class's prompt tokens, those that its replicas have in a cache."""
    mine = [c for pool in fleet.pools for c in pool.carried if c.part.request_class.name == request_class.name]
    asked = sum(c.requests_per_s * c.part.slice.input_tokens for c in mine)
    return sum(c.requests_per_s * c.part.slice.input_tokens * c.hit_rate for c in mine) / asked if asked else 0.0


def fleet_plan(asked: Choice, solution: Solution, workload: Workload) -> FleetPlan:
    pools, items = pools_of(asked, solution, workload), asked.market.items
    return FleetPlan(
        pools=pools,
        usd_per_hour=solution.usd_per_hour,
        watts=solution.watts,
        gpus=asked.gpus(solution),
        on_hand={
            item.id: round(min(solution.gpus[i], item.on_hand)) for i, item in enumerate(items) if item.on_hand
        },
        bought={item.id: round(solution.bought[i]) for i, item in enumerate(items) if solution.bought[i] > 0},
        gap=solution.gap,
        by_class={one.name: _cost(pools, workload, [one.name]) for one in workload.classes},
        cost=_cost(pools, workload, [request_class.name for request_class in workload.classes]),
    )  # fmt: skip


def pools_of(asked: Choice, solution: Solution, workload: Workload) -> list[PoolPlan]:
    effective = _effective_usd_per_gpu_hour(asked, solution)
    used = np.flatnonzero(solution.replicas)
    return _named([_pool(asked, solution, int(column), effective, workload) for column in used])


def _effective_usd_per_gpu_hour(asked: Choice, solution: Solution) -> Array:
    """By accelerator: what its GPUs cost on average, those on hand and those that are bought."""
    problem = asked.problem
    spent = problem.spent_usd_per_hour(solution.gpus)
    return np.divide(spent, solution.gpus, out=problem.usd_per_hour.copy(), where=solution.gpus > 0)


def _pool(asked: Choice, solution: Solution, column: int, effective: Array, workload: Workload) -> PoolPlan:
    offered, problem = asked.offers, asked.problem
    kind = int(problem.accelerator[column])
    item = asked.market.items[kind]
    replicas = int(solution.replicas[column])
    usd = float(effective[kind])
    total = replicas * float(problem.gpus[column]) * usd
    parts = np.flatnonzero(solution.share[column])
    spare = 1.0 + workload.constraints.spare
    loads = {
        int(p): float(solution.share[column, p] * problem.demand[p] / spare / problem.rate[column, p]) for p in parts
    }
    busy = sum(loads.values())
    deployment = offered.columns[column].deployment
    rates = {p: float(solution.share[column, p] * problem.demand[p] / spare) for p in loads}
    pieces = {p: offered.parts[p].slice for p in loads}
    tokens_per_s = sum(rate * (pieces[p].input_tokens + pieces[p].output_tokens) for p, rate in rates.items())
    carried = [
        Carried(
            part=offered.parts[p],
            share=float(solution.share[column, p]),
            requests_per_s=rates[p],
            load=load,
            # Idle capacity is paid for by those who use the pool.
            usd_per_hour=total * load / busy,
            deployment=deployment,
            in_flight=float(offered.capacity.in_flight[column, p]),
            limit=LIMITS[int(offered.capacity.limit[column, p])],
            why=_why(asked, solution, column, p, effective),
            hit_rate=hit_rate(deployment, pieces[p], tokens_per_s / max(replicas, 1)),
        )
        for p, load in loads.items()
    ]
    main = max(loads, key=lambda p: (not offered.parts[p].slice.exempt, loads[p]), default=0)
    return PoolPlan(
        name="",
        deployment=deployment,
        tier=offered.columns[column].tier,
        replicas=replicas,
        usd_per_gpu_hour=usd,
        usd_per_hour=total,
        utilisation=busy / replicas,
        in_flight=float(offered.capacity.in_flight[column, main]),
        most_in_flight=float(offered.capacity.most_in_flight[column, main]),
        limit=LIMITS[int(offered.capacity.limit[column, main])],
        main=offered.parts[main].slice,
        carried=sorted(carried, key=lambda one: -one.load),
        sunk_usd_per_gpu_hour=max(usd - item.running_usd_per_hour, 0.0) if item.quote.kind == BUY else 0.0,
    )


def _estimate(one: Servable, piece: Slice, in_flight: float, cached_tokens: int = 0) -> Estimate:
    load = {
        "concurrency": max(round(in_flight), 1),
        "input_tokens": max(round(piece.input_tokens), 1),
        "output_tokens": max(round(piece.output_tokens), 1),
        "cached_tokens": cached_tokens,
    }
    return estimate(one, **load)


def _named(pools: list[PoolPlan]) -> list[PoolPlan]:
    """Pools by the class that loads them most and their accelerator, the dearest first."""
    plans: list[PoolPlan] = []
    for pool in sorted(pools, key=lambda plan: -plan.usd_per_hour):
        main = pool.carried[0].part.request_class.name if pool.carried else "idle"
        stem = _slug(f"{main}-{pool.deployment.accelerator.id}")
        plans.append(replace(pool, name=unused_name(stem, {plan.name for plan in plans})))
    return plans


def unused_name(stem: str, taken: set[str]) -> str:
    """The stem, with a number behind it where another pool has it."""
    numbered = (f"{stem}-{number}" for number in count(2))
    return stem if stem not in taken else next(name for name in numbered if name not in taken)


def _slug(text: str) -> str:
    """Names of pools end up in headers and on command lines: plain letters, digits, dots and dashes."""
    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-.") else "-" for c in text.lower())
    return "-".join(part for part in kept.split("-") if part)


def _why(asked: Choice, solution: Solution, column: int, part: int, effective: Array) -> str:
    """Why a slice goes where it goes: the cost of a request there against the best of other accelerators."""
    problem = asked.problem
    rate = problem.rate[:, part]
    usd = effective[problem.accelerator] * problem.gpus
    per_thousand = np.divide(usd, rate, out=np.full_like(rate, np.inf), where=rate > 0) / 3.6
    items = asked.market.items
    own = items[int(problem.accelerator[column])].id
    able = {
        item.id: (float(per_thousand[mine].min()), int(mine[np.argmin(per_thousand[mine])]))
        for i, item in enumerate(items)
        if len(mine := np.flatnonzero((problem.accelerator == i) & (rate > 0)))
    }
    if set(able) == {own}:
        return f"only {own} keeps its targets"
    here = float(per_thousand[column])
    other, (cost, instead) = min(((n, c) for n, c in able.items() if n != own), key=lambda pair: pair[1])
    few = "" if len(able) > 3 else f"; only {', '.join(sorted(able))} keep its targets"
    if here <= cost * 1.0005:
        return f"{_usd(here)} a thousand requests against {_usd(cost)} on {other}, the next best{few}"
    whole = _in_whole_replicas(problem, solution, column, instead)
    paid = float(usd[column] * solution.replicas[column])
    if whole is not None and whole * usd[instead] >= paid * (1.0 - 1e-9):
        return (
            f"in whole replicas: {_usd(paid)} an hour for the pool against {_usd(whole * usd[instead])} on {other}{few}"
        )
    return (
        f"fills replicas that are there anyway: {_usd(here)} a thousand requests against {_usd(cost)} on {other}{few}"
    )


def _in_whole_replicas(problem: Programme, solution: Solution, column: int, instead: int) -> int | None:
    """Replicas of another column that would carry all that this one does; None where it cannot."""
    carried = solution.share[column] * problem.demand
    parts = carried > 0
    if np.any(problem.rate[instead, parts] <= 0):
        return None
    return int(np.ceil((carried[parts] / problem.rate[instead, parts]).sum() - 1e-9))


def _usd(value: float) -> str:
    return f"${value:,.2f}" if value >= 0.1 else f"${significant(value)}"


def _cost(pools: Sequence[PoolPlan], workload: Workload, names: Sequence[str]) -> TokenCost:
    """At the mean of today's traffic: the fleet, which is for the peak by the end of its first year, runs around the
    clock.

    Pools that carry nothing, as a policy on vendors may ask for, are paid for by all in proportion.
    """
    kept = [(pool, one) for pool in pools for one in pool.carried if one.part.request_class.name in names]
    carried = [one for _, one in kept]
    # Of the load that the pools are sized for.
    today = workload.mean_over_peak / max(1.0 + workload.growth_per_year, 1.0)
    mean = today * SECONDS_PER_HOUR
    requests = sum(one.requests_per_s for one in carried) * mean
    inputs = sum(one.requests_per_s * one.part.slice.input_tokens for one in carried) * mean
    outputs = sum(one.requests_per_s * one.part.slice.output_tokens for one in carried) * mean
    working = sum(pool.usd_per_hour for pool in pools if pool.carried)
    over = sum(pool.usd_per_hour for pool in pools) / working
    spent = sum(one.usd_per_hour for one in carried) * over
    # A replica is busy for its share of the peak, and for the mean's share of that.
    busy = [(one, one.usd_per_hour * min(pool.utilisation, 1.0) * today) for pool, one in kept]
    on_prompts = sum(usd * one.prompt_share for one, usd in busy)
    used = sum(usd for _, usd in busy)
    return TokenCost(
        usd_per_million_input=on_prompts / inputs * _MILLION,
        usd_per_million_output=(used - on_prompts) / outputs * _MILLION,
        usd_per_million_idle=(spent - used) / (inputs + outputs) * _MILLION,
        usd_per_million=spent / (inputs + outputs) * _MILLION,
        usd_per_thousand_requests=spent / requests * 1e3,
    )
