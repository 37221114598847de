"""The fleet that closed forms propose, simulated behind the gateway's own policy, corrected and proposed again.

Closed forms err by some tenths either way, and an optimiser picks those that err in its favour. So every fleet that is
to be the answer is simulated: at which times its traffic do the percentiles of its classes still hold? That is the
correction of its pools' capacities. Pools that were not simulated get the correction of those that were, so that the
next proposal is not made by an error that all share; where one of them might still be cheaper, it is simulated, too.
Everything is bounded by counts, of simulations and of requests, and all seeds are fixed: the same file gives the same
answer on a busy machine.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.fleet import Fleet
from crosstie.core.progress import OnProgress
from crosstie.core.workload import RequestClass, Target, Workload
from crosstie.decide.plan.answer import PoolPlan, fleet_plan
from crosstie.decide.plan.candidates import Key, key_of
from crosstie.decide.plan.capacity import Tier, tier_of
from crosstie.decide.plan.optimise import Choice, simplify
from crosstie.decide.plan.pools import class_of, pool_of, routes_of
from crosstie.decide.plan.programme import Mask, Solution
from crosstie.decide.plan.reuse import encoding_tokens, hit_rate
from crosstie.decide.plan.simulated import SimulatedClass
from crosstie.decide.plan.solver import solve, tidied
from crosstie.decide.plan.survey import Column, Mixture, Offers, Scaling, undominated
from crosstie.perf.hardware import Array
from crosstie.sim.fleet import FleetSimulator, SimulatedAnswer, SimulatedRequest

# Simulations of one model's pools, for each of its classes more, and to shrink what was found; requests of each: at
# least, at most, and of the class that has fewest.
_SIMULATIONS, _FOR_A_CLASS, _TO_SHRINK = 8, 1, 6
_MANY_CLASSES = 4
_REQUESTS, _MOST_REQUESTS, _OF_A_CLASS = 1600, 4000, 150
# A run lasts so many times as long as a request is there; its first part fills the fleet, its last part empties it.
_LIFETIMES = 4.0
_FILLED, _EMPTYING = 0.3, 0.9
# Of larger fleets a part is simulated with its part of the traffic: by then replicas have pooled what they can.
_MOST_REPLICAS = 24.0
# Seeds by which fleets are found, and fresh ones by which the answer is checked.
_SEED = 11
CHECK_SEEDS = (101, 102)
# Misses over those allowed at which a fleet is taken to hold: less than one, since the next traffic is another.
_HOLDS = 0.9
# The largest step of the load at which a fleet is tried; how near to one another the last that holds and the first that
# does not must be; the power of the load by which misses rise; and loads that are tried.
_STEP, _NEAR, _STEEP, _TRIES = 1.4, 1.06, 10.0, 3
# Below every load that is tried.
_NONE = 1e-9
# Classes without targets are served, not parked: so many may wait for longer than this, or be turned away.
_IDLE_WAIT_S, _IDLE_SHARE = 60.0, 0.02
# Times that fleets are proposed; what pools that were not simulated may be better than the correction of others; and a
# saving that is worth a simulation.
_ROUNDS = 6
# How much more than the class that bears least another is taken to bear at once.
_APART = 1.25
# The most that a correction changes at once.
_CHANGE = 1.6
_HOPE = 1.08
_WORTH_TRYING = 0.99
# Where fresh seeds miss: how often replicas are added, and how many.
_GROWN, _GROWTH, _TO_GROW = 4, 1.02, 6


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The fleet that holds, the question with its capacities corrected, and the classes with fresh seeds."""

    asked: Choice
    answer: Solution
    classes: list[SimulatedClass]
    simulations: int
    seeds: tuple[int, ...]


# Which replicas under which promise, and what they are meant for: what a correction is for.
_Pool = tuple[Key, Tier]
_Meant = tuple[Key, Tier, Mixture]
# Pools with their replicas, and of a class the misses over those allowed.
_Fleet = tuple[tuple[_Pool, int], ...]
_Levels = dict[str, float]


def _pool_of(column: Column) -> _Pool:
    return key_of(column.deployment), column.tier


def _meant(column: Column) -> _Meant:
    return key_of(column.deployment), column.tier, column.mixture


class _Bench:
    """Simulates the pools of one model, no more often than it may."""

    def __init__(self, catalog: Catalog, workload: Workload, model: str, scaling: Scaling, peak: float):
        self.catalog, self.workload, self.scaling, self.peak = catalog, workload, scaling, peak
        self.classes = [one for one in workload.classes if one.model == model]
        self.left = _SIMULATIONS + _FOR_A_CLASS * min(len(self.classes), _MANY_CLASSES)
        self.made = 0
        # By fleet and load.
        self.seen: dict[tuple[_Fleet, float], _Levels] = {}

    def levels(self, pools: Sequence[PoolPlan], load: float = 1.0) -> _Levels | None:
        """None where there is no more simulation to be had."""
        key = tuple((_key(pool), pool.replicas) for pool in pools), round(load, 6)
        if key not in self.seen:
            if not self.left:
                return None
            self.left -= 1
            answers, late = self.run(pools, load, _SEED), self.late(pools)
            self.seen[key] = {one.name: level(one, answers[one.name], late) for one in self.classes}
        return self.seen[key]

    def holds(self, pools: Sequence[PoolPlan]) -> bool:
        found = self.levels(pools)
        return found is not None and max(found.values()) <= _HOLDS

    def late(self, pools: Sequence[PoolPlan]) -> float:
        """On simulated TTFT, beyond what slower steps make of it, as estimates are scaled."""
        scale = self.scaling([pool.deployment for pool in pools])
        return max(float((scale.ttft / scale.tpot).max()), 1.0)

    def _more(self, pools: Sequence[PoolPlan]) -> float:
        """Traffic that stands for what replicas take less than slower steps alone would make of them."""
        scale = self.scaling([pool.deployment for pool in pools])
        usd = np.array([pool.usd_per_hour for pool in pools])
        return max(float((usd / (scale.rate * scale.tpot)).sum() / usd.sum()), 1.0)

    def run(self, pools: Sequence[PoolPlan], load: float, seed: int) -> dict[str, list[SimulatedAnswer]]:
        """By class: its requests of the time in which the fleet was full."""
        self.made += 1
        times = self.peak * load * self._more(pools)
        rates = {one.name: one.requests_per_s * times for one in self.classes}
        count, scale = self._size(pools, sum(rates.values()))
        few = [replace(pool, replicas=max(round(pool.replicas / scale), 1)) for pool in pools]
        worth = [pool.usd_per_hour / pool.replicas for pool in pools]
        part = sum(w * pool.replicas for w, pool in zip(worth, few, strict=True)) / sum(
            w * pool.replicas for w, pool in zip(worth, pools, strict=True)
        )
        simulator = FleetSimulator(self.catalog, self._fleet(few), None, seed, prefixes=False)
        slower = self.scaling([pool.deployment for pool in few]).tpot
        for pool, factor in zip(few, slower, strict=True):
            for number in range(pool.replicas):
                simulator.engines[_address(pool, number)].slower = float(factor)
        fewer = {name: rate * part for name, rate in rates.items()}
        sent = list(self._traffic(fewer, count, seed, self._found(few, fewer), self._encoding(few)))
        since, until = sent[int(count * _FILLED)].arrival_s, sent[int(count * _EMPTYING)].arrival_s
        found: dict[str, list[SimulatedAnswer]] = {one.name: [] for one in self.classes}
        for answer in simulator.run(sent):
            if since <= answer.request.arrival_s <= until and answer.request.class_name is not None:
                found[answer.request.class_name].append(answer)
        return found

    def _size(self, pools: Sequence[PoolPlan], rate: float) -> tuple[int, float]:
        """Requests of a run; and by how much a large fleet is made smaller, with its traffic, to be so many."""
        stay = [
            (one.requests_per_s, pool.estimate.ttft_s + one.part.slice.output_tokens * pool.estimate.tpot_s)
            for pool in pools
            for one in pool.carried
        ]
        stay_s = sum(r * s for r, s in stay) / max(sum(r for r, _ in stay), 1e-12)
        rarest = min(one.requests_per_s for one in self.classes) / sum(one.requests_per_s for one in self.classes)
        wanted = max(_REQUESTS, _LIFETIMES * stay_s * rate, _OF_A_CLASS / rarest)
        count = int(min(wanted, _MOST_REQUESTS))
        scale = max(_LIFETIMES * stay_s * rate / count, sum(pool.replicas for pool in pools) / _MOST_REPLICAS)
        return count, max(min(scale, min(pool.replicas for pool in pools) / 2.0), 1.0)

    def _fleet(self, pools: Sequence[PoolPlan]) -> Fleet:
        made = [
            msgspec.structs.replace(
                pool_of(pool), backends=tuple(_address(pool, number) for number in range(pool.replicas))
            )
            for pool in pools
        ]
        classes = tuple(class_of(one, routes_of(one, pools)) for one in self.classes)
        name: str = self.workload.name
        return Fleet(name=name, planned="", policy="cheapest-meeting-target", pools=tuple(made), classes=classes)

    def _found(self, pools: Sequence[PoolPlan], rates: Mapping[str, float]) -> list[float]:
        """By slice: of what endless memory would have of its prompts, the share that these replicas have."""
        parts = [(one, piece) for one in self.classes for piece in one.slices]
        if all(piece.hits is None for _, piece in parts):
            return [1.0] * len(parts)
        tokens_per_s = sum(rates[one.name] * p.share * (p.input_tokens + p.output_tokens) for one, p in parts)
        usd = sum(pool.usd_per_hour for pool in pools)
        found = []
        for _, piece in parts:
            # Pools take of the traffic about what they cost; services apart are planned without hits.
            each = [
                0.0
                if isinstance(pool.deployment, Disaggregated)
                else hit_rate(pool.deployment, piece, tokens_per_s * pool.usd_per_hour / usd / pool.replicas)
                * pool.usd_per_hour
                / usd
                for pool in pools
            ]
            found.append(min(sum(each) * piece.input_tokens / max(piece.cached_tokens, 1e-9), 1.0))
        return found

    def _encoding(self, pools: Sequence[PoolPlan]) -> list[int]:
        """By slice: tokens that stand for its pictures' encoding, which engines here do not know."""
        able = [pool.deployment for pool in pools if not isinstance(pool.deployment, Disaggregated)]
        return [
            round(max((encoding_tokens(deployment, piece) for deployment in able), default=0.0))
            for one in self.classes
            for piece in one.slices
        ]

    def _traffic(
        self, rates: Mapping[str, float], count: int, seed: int, found: Sequence[float], encoding: Sequence[int]
    ) -> Iterator[SimulatedRequest]:
        """Arrivals at random moments, with as many of every slice and length as there are on average: what differs from
        seed to seed is when they meet, not how much work there is."""
        chance = np.random.default_rng(seed)
        parts = [(one, piece) for one in self.classes for piece in one.slices]
        weight = np.array([rates[one.name] * piece.share for one, piece in parts])
        times = np.sort(chance.random(count)) * count / weight.sum()
        ends = np.cumsum(weight) / weight.sum()
        # Evenly over slices and, within each, over its sample, in a random order.
        spread = chance.permutation((np.arange(count) + 0.5) / count)
        kinds = np.minimum(np.searchsorted(ends, spread, side="right"), len(parts) - 1)
        into = (spread - np.concatenate(([0.0], ends))[kinds]) / (weight / weight.sum())[kinds]
        for at, kind, u in zip(times.tolist(), kinds.tolist(), into.tolist(), strict=True):
            one, piece = parts[kind]
            place = min(int(u * len(piece.sample)), len(piece.sample) - 1)
            inputs, outputs = piece.sample[place]
            cached = min(int(found[kind] * piece.cached_sample[place]), inputs - 1) if piece.cached_sample else 0
            yield SimulatedRequest(at, one.model, inputs + encoding[kind], outputs, one.name, cached_tokens=cached)


def _key(pool: PoolPlan) -> _Pool:
    return key_of(pool.deployment), pool.tier


def _address(pool: PoolPlan, number: int) -> str:
    return f"http://{pool.name}-{number}"


def level(one: RequestClass, answers: Sequence[SimulatedAnswer], factor: float = 1.0) -> float:
    """Requests that miss a target over those that may: above 1 the class misses its percentiles.

    `factor`: on simulated TTFT. Those turned away miss every target.
    """
    if not answers:
        return 0.0
    count = len(answers)
    found = []
    if one.ttft:
        late = sum(answer.ttft_s * factor > one.ttft.seconds for answer in answers)
        found.append(late / count / (1.0 - one.ttft.percentile))
    if one.tpot:
        slow = sum(answer.pool is None or answer.tpot_s > one.tpot.seconds for answer in answers)
        found.append(slow / count / (1.0 - one.tpot.percentile))
    if not one.ttft:
        waits = sum(answer.ttft_s > _IDLE_WAIT_S for answer in answers)
        found.append(waits / count / _IDLE_SHARE)
    return max(found)


def bearable(bench: _Bench, pools: Sequence[PoolPlan]) -> dict[str, float]:
    """By class: the times its traffic at which it still holds, to a step or so."""
    tried: dict[float, _Levels] = {}
    load = 1.0
    while len(tried) < _TRIES and (found := bench.levels(pools, load)) is not None:
        tried[load] = found
        low, high = _ends(tried)
        if high / low <= _NEAR:
            break
        if high < inf and low > _NONE:
            load = (low * high) ** 0.5
        else:
            # Misses rise with a high power of the load.
            load *= min(max((_HOLDS / max(max(found.values()), 1e-3)) ** (1.0 / _STEEP), 1.0 / _STEP), _STEP)
            load = max(load, low * _NEAR) if high == inf else min(load, high / _NEAR)
    return {one.name: _crossing(tried, one.name) for one in bench.classes}


def _ends(tried: Mapping[float, _Levels], name: str = "") -> tuple[float, float]:
    """The largest load that holds below all that do not, and the least that does not; of a class, or of all."""

    def worst(found: _Levels) -> float:
        return found[name] if name else max(found.values())

    fails = min((load for load, found in tried.items() if worst(found) > _HOLDS), default=inf)
    return max((load for load in tried if load < fails), default=_NONE), fails


def _crossing(tried: Mapping[float, _Levels], name: str) -> float:
    """Between both ends where misses, straight in logarithms, come up to those allowed."""
    if not tried:
        return 1.0
    low, high = _ends(tried, name)
    if high == inf:
        return low
    if low <= _NONE:
        return float(high * (_HOLDS / tried[high][name]) ** (1.0 / _STEEP))
    before, after = max(tried[low][name], 0.02), tried[high][name]
    into = log(_HOLDS / before) / max(log(after / before), 1e-6) if before < _HOLDS else 0.0
    return float(low * (high / low) ** min(max(into, 0.0), 1.0))


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A fleet: its pools, the columns that they are, and the capacities that it was made by."""

    pools: list[PoolPlan]
    columns: list[Column]
    usd_per_hour: float


class _Search:
    """Proposals and their corrections."""

    def __init__(
        self, catalog: Catalog, workload: Workload, everything: Offers, asked: Choice, scaling: Scaling,
        on_progress: OnProgress,
    ):  # fmt: skip
        self.workload, self.everything, self.asked, self.on_progress = workload, everything, asked, on_progress
        models = dict.fromkeys(one.model for one in workload.classes)
        self.benches = {model: _Bench(catalog, workload, model, scaling, asked.peak) for model in models}
        self.place = {id(column): index for index, column in enumerate(everything.columns)}
        # By pool: how much more it takes than its closed form says.
        self.found: dict[_Meant, float] = {}
        self.best: _Proposal | None = None

    def factors(self, hope: float = 1.0) -> Array:
        """By column; those that were not simulated as others of their model that are meant for the same."""
        usual: dict[object, list[float]] = {}
        for (key, tier, mixture), factor in self.found.items():
            usual.setdefault((key[0], tier, mixture), []).append(factor)
            usual.setdefault((key[0], mixture.is_open), []).append(factor)
            usual.setdefault(key[0], []).append(factor)
        middle = {kind: float(np.median(values)) for kind, values in usual.items()}

        def factor_of(column: Column) -> float:
            known, model = self.found.get(_meant(column)), column.deployment.model.id
            if known is not None:
                return known
            alike = middle.get((model, column.mixture.is_open), middle.get(model, 1.0))
            return hope * middle.get((model, column.tier, column.mixture), alike)

        return np.array([factor_of(column) for column in self.everything.columns])

    def corrected(self, factors: Array, keep: Sequence[int] = ()) -> Choice:
        """The question with capacities corrected, and some columns that must be in it."""
        offered = replace(self.everything, capacity=self.everything.capacity.faster(factors))
        kept = {self.place[id(column)] for column in undominated(offered).columns} | set(keep)
        return self.asked.with_offers(offered.only(np.array(sorted(kept), np.int64)))

    def proposal(self, asked: Choice, allowed: Mask | None = None) -> _Proposal | None:
        answer = solve(asked.problem, allowed)
        if answer is None:
            return None
        simple = tidied(asked.problem, simplify(asked.problem, answer, self.workload.constraints.simplicity))
        pools = fleet_plan(asked, simple, self.workload).pools
        columns = [asked.offers.columns[i] for i in np.flatnonzero(simple.replicas)]
        by_pool = {_pool_of(column): column for column in columns}
        return _Proposal(pools, [by_pool[_key(pool)] for pool in pools], simple.usd_per_hour)

    def plain(self, asked: Choice) -> _Proposal | None:
        """Of every model one pool alone: the least that a plan has to beat. None where classes ask for different
        things, since the strictest would have to be promised to all."""
        if any(len({tier_of(one) for one in bench.classes}) > 1 for bench in self.benches.values()):
            return None
        problem = asked.problem
        allowed = np.zeros(len(problem.gpus), bool)
        needed = problem.per_request(problem.replica_usd_per_hour) * problem.demand
        models = np.array([column.deployment.model.id for column in asked.offers.columns])
        for model in self.benches:
            parts = [part.index for part in asked.offers.parts if part.request_class.model == model]
            usd = np.where(models == model, needed[:, parts].sum(axis=1), np.inf)
            allowed[int(np.argmin(usd))] = True
        return self.proposal(asked, allowed)

    def run(self) -> _Proposal | None:
        """The cheapest fleet that holds; None where none was found."""
        hope = 1.0
        tried: set[_Fleet] = set()
        last: _Proposal | None = None
        for number in range(_ROUNDS):
            factors = self.factors(hope)
            asked = self.corrected(factors)
            proposed = (self.plain(asked) if self.best is None else None) or self.proposal(asked)
            if proposed is None:
                break
            fleet = tuple((_key(pool), pool.replicas) for pool in proposed.pools)
            dear = self.best is not None and proposed.usd_per_hour > self.best.usd_per_hour * _WORTH_TRYING
            if dear or fleet in tried:
                if hope > 1.0:
                    break
                hope = _HOPE
                continue
            tried.add(fleet)
            label = ", ".join(f"{pool.gpus} {pool.deployment.accelerator.id}" for pool in proposed.pools)
            self.on_progress(number, _ROUNDS, f"simulating {label}")
            last = proposed
            if self._try(proposed, factors):
                self.best = proposed
        if self.best is None and last is not None:
            self.best = self._grown(last)
        if self.best is not None:
            for bench in self.benches.values():
                bench.left += _TO_SHRINK
            self.best = self._shrunk(self.best)
        return self.best

    def _try(self, proposed: _Proposal, factors: Array) -> bool:
        """Whether the fleet holds; corrects its pools."""
        every = True
        for model, bench in self.benches.items():
            mine = [pool for pool in proposed.pools if pool.deployment.model.id == model and pool.carried]
            columns = {_key(pool): column for pool, column in zip(proposed.pools, proposed.columns, strict=True)}
            holds = bench.holds(mine)
            every &= holds
            if holds and all(_meant(columns[_key(pool)]) in self.found for pool in mine):
                continue
            bears = bearable(bench, mine)
            for pool in mine:
                column = columns[_key(pool)]
                times = min(max(self._taken(pool, bears), 1.0 / _CHANGE), _CHANGE)
                self.found[_meant(column)] = float(factors[self.place[id(column)]]) * times
        return every

    def _taken(self, pool: PoolPlan, bears: Mapping[str, float]) -> float:
        """Of what it was thought to take, what a pool takes when the first of its classes would miss."""
        load = sum(one.load for one in pool.carried)
        main = {one.part.request_class.name for one in pool.carried if one.load > 0.05 * load}
        # What bears more does so with the help of other pools, as long as these bear it.
        least = _APART * min(bears.values())
        return (
            min(min(bears[name], least) for name in main) * pool.utilisation * (1.0 + self.workload.constraints.spare)
        )

    def _grown(self, last: _Proposal) -> _Proposal | None:
        """With more replicas of whatever misses, until it holds."""
        pools = list(last.pools)
        for bench in self.benches.values():
            bench.left += _TO_GROW
        for model, bench in self.benches.items():
            for _ in range(_TO_GROW):
                mine = [pool for pool in pools if pool.deployment.model.id == model and pool.carried]
                if bench.holds(mine):
                    break
                pools = [more(pool, 1.15) if pool in mine else pool for pool in pools]
            else:
                return None
        return replace(last, pools=pools)

    def _shrunk(self, best: _Proposal) -> _Proposal:
        """With fewer replicas, as long as it holds; the dearest pools first."""
        pools = list(best.pools)
        for place in sorted(range(len(pools)), key=lambda i: -pools[i].usd_per_hour):
            model = pools[place].deployment.model.id
            step = max(pools[place].replicas // 4, 1)
            while step:
                fewer = [replace(p, replicas=p.replicas - step) if i == place else p for i, p in enumerate(pools)]
                mine = [pool for pool in fewer if pool.deployment.model.id == model and pool.carried]
                if pools[place].replicas > step and pools[place].carried and self.benches[model].holds(mine):
                    pools = fewer
                else:
                    step //= 2
        return replace(best, pools=pools)

    def checked(self, found: _Proposal) -> tuple[_Proposal, list[SimulatedClass]]:
        """The fleet with fresh seeds; where a class misses, its pools get more replicas, and it is done again."""
        pools = list(found.pools)
        for again in range(_GROWN + 1):
            classes: list[SimulatedClass] = []
            missing: set[str] = set()
            for model, bench in self.benches.items():
                mine = [pool for pool in pools if pool.deployment.model.id == model and pool.carried]
                runs = [bench.run(mine, 1.0, seed) for seed in CHECK_SEEDS]
                late = bench.late(mine)
                for one in bench.classes:
                    answers = [answer for run in runs for answer in run[one.name]]
                    classes.append(seen(one, answers, late))
                    if level(one, answers, late) > 1.0:
                        missing.add(one.name)
            if not missing or again == _GROWN:
                break
            pools = [
                more(pool, _GROWTH) if any(one.part.request_class.name in missing for one in pool.carried) else pool
                for pool in pools
            ]
        return replace(found, pools=pools), classes


def more(pool: PoolPlan, times: float) -> PoolPlan:
    replicas = max(pool.replicas + 1, ceil(pool.replicas * times))
    return replace(pool, replicas=replicas, usd_per_hour=pool.usd_per_hour * replicas / pool.replicas)


def seen(one: RequestClass, answers: Sequence[SimulatedAnswer], factor: float = 1.0) -> SimulatedClass:
    """A class as its answers were; TTFT with this factor."""
    first = np.array([answer.ttft_s * factor for answer in answers])
    later = np.array([inf if a.pool is None else a.tpot_s for a in answers if a.request.output_tokens > 1])

    def at(values: Array, target: Target | None) -> tuple[float | None, float | None]:
        if target is None or not len(values):
            return None, None
        ranked = np.sort(values)
        place = min(int(target.percentile * len(ranked)), len(ranked) - 1)
        return float(ranked[place]), float((values <= target.seconds).mean())

    ttft_s, keeps_ttft = at(first, one.ttft)
    tpot_s, keeps_tpot = at(later, one.tpot)
    refused = sum(answer.pool is None for answer in answers) / max(len(answers), 1)
    return SimulatedClass(
        name=one.name, requests=len(answers), ttft_s=ttft_s, tpot_s=tpot_s, ttft=one.ttft, tpot=one.tpot,
        keeps_ttft=keeps_ttft, keeps_tpot=keeps_tpot, refused=refused,
    )  # fmt: skip


def confirmed(
    catalog: Catalog, workload: Workload, everything: Offers, asked: Choice, scaling: Scaling, on_progress: OnProgress
) -> Confirmed | None:
    """The cheapest fleet that holds in simulation; None where none was found within the work that there is for it.

    `everything`: all columns, before any was left out; `asked`: the question that they answer.
    """
    search = _Search(catalog, workload, everything, asked, scaling, on_progress)
    found = search.run()
    if found is None:
        return None
    on_progress(0, 0, "checking the fleet with fresh seeds")
    found, classes = search.checked(found)
    corrected, answer = _as_solved(search, found)
    made = sum(bench.made for bench in search.benches.values())
    return Confirmed(corrected, answer, classes, made, CHECK_SEEDS)


def _as_solved(search: _Search, found: _Proposal) -> tuple[Choice, Solution]:
    """The fleet as an answer to the question with its capacities as simulated: what holds there can be carried."""
    used = [search.place[id(column)] for column in found.columns]
    factors = search.factors()
    while True:
        asked = search.corrected(factors, used)
        where = {id(column): index for index, column in enumerate(asked.offers.columns)}
        replicas = np.zeros(len(asked.offers.columns), np.int64)
        for column, pool in zip(found.columns, found.pools, strict=True):
            replicas[where[id(column)]] = pool.replicas
        bare = asked.problem.fleet(replicas, np.zeros_like(asked.problem.rate))
        answer = tidied(asked.problem, bare)
        if answer.share.any():
            bound = solve(asked.problem, quickly=True)
            least = min(bound.bound_usd_per_hour if bound else 0.0, answer.usd_per_hour)
            return replace(asked, correction=_by_model(found, factors, used)), replace(answer, bound_usd_per_hour=least)
        factors[used] *= 1.03


def _by_model(found: _Proposal, factors: Array, used: Sequence[int]) -> dict[str, float]:
    """By model: the correction of its pools, each by what it costs."""
    total: dict[str, tuple[float, float]] = {}
    for pool, place in zip(found.pools, used, strict=True):
        model = pool.deployment.model.id
        usd, weighted = total.get(model, (0.0, 0.0))
        total[model] = usd + pool.usd_per_hour, weighted + pool.usd_per_hour * float(factors[place])
    return {model: weighted / usd for model, (usd, weighted) in total.items()}
