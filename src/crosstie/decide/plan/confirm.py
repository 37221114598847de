"""The fleet that closed forms propose, simulated behind the gateway's own policy, corrected and proposed again.

Closed forms err by some tenths either way, and an optimiser picks those that err in its favour. So every fleet that is
to be the answer is simulated: at which times its traffic do the percentiles of its classes still hold? That is the
correction of its pools' capacities. Pools that were not simulated get the correction of those that were, so that the
next proposal is not made by an error that all share; where one of them might still be cheaper, it is simulated, too.
Everything is bounded by counts, of simulations and of requests, and all seeds are fixed: the same file gives the same
answer on a busy machine.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf, log

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import Workload
from crosstie.decide.plan.answer import PoolPlan, fleet_plan
from crosstie.decide.plan.candidates import Key, key_of
from crosstie.decide.plan.capacity import Tier, tier_of
from crosstie.decide.plan.optimise import Choice, simplify
from crosstie.decide.plan.programme import Mask, Solution
from crosstie.decide.plan.scaling import Reading, WorldScaling
from crosstie.decide.plan.simulated import SimulatedClass
from crosstie.decide.plan.solver import solve, tidied
from crosstie.decide.plan.survey import Column, Offers, Purpose, undominated
from crosstie.decide.plan.trials import FAR, HOLDS, FleetKey, Levels, PoolKey, Trials, fleet_key, pool_key
from crosstie.perf.hardware import Array

# The seed by which the answer is checked in a long run; not that by which it is found.
CHECK_SEED = 31
# Simulations of one model's pools to shrink what was found.
_TO_SHRINK = 6
# Of what a model's pools cost: what is larger than this is not tried without.
_SMALL_POOL = 0.4
# Up to so many pools that miss their check are enlarged one at a time.
_FEW_POOLS = 3
# The largest step of the load at which a fleet is tried; how near to one another the last that holds and the first that
# does not must be; the power of the load by which misses rise; and loads that are tried.
_STEP, _NEAR, _STEEP, _TRIES = 1.4, 1.06, 10.0, 3
# Misses over those allowed from which, by that power, the load that a fleet bears is known well enough at once.
_CLOSE = 0.45, 1.8
# Replicas are given up as far as that power, and this one of what it says, leaves hope that their pool still holds.
_DOUBT = 2.0
# Below every load that is tried; and a load at which nobody waits for others.
_NONE = 1e-9
_IDLE = 0.1
# Times that fleets are proposed; what pools that were not simulated may be better than the correction of others; and a
# saving that is worth a simulation.
_ROUNDS, _RIVAL_ROUNDS = 6, 3
# How much more than the class that bears least another is taken to bear at once.
_APART = 1.25
# The most that a correction adds at once; and of what a fleet that missed was thought to take, what it is left with.
_CHANGE, _CUT = 1.6, 0.99
# Fleets that are proposed at most for each that is simulated.
_MOST_PROPOSED = 4
_HOPE = 1.08
_WORTH_TRYING = 0.99
# Where fresh seeds miss: how often replicas are added, and how many, each time twice as many.
_GROWN, _GROWTH, _TO_GROW = 6, 0.03, 6
# The least correction of pools that an answer has, and steps of 3% by which it is raised until they carry what
# simulation has seen carried: to three times what closed forms say.
_LEAST, _TO_CARRY = 0.01, 200
# Misses over those allowed up to which a fleet may have missed by the chance of one seed; and how many cheaper fleets
# are checked beside the one that was found.
_BY_CHANCE, _SECOND_LOOKS = 1.3, 6


@dataclass(frozen=True, slots=True)
class Question:
    """What fleets are proposed for: all columns, before any was left out, the programme over them, and how estimates
    are scaled. `sure`: how sure each estimate is taken to be; `family` and `vendor`: the accelerator and stack, and the
    vendor, that it is limited to."""

    everything: Offers
    asked: Choice
    scaling: WorldScaling
    sure: float
    family: tuple[str, str] | None = None
    vendor: str | None = None


# Given a fleet with its corrected question: another question to put where it is not as sure as asked.
Reconsider = Callable[[Question, Choice, Solution], Question | None]


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The fleet that holds, the question with its capacities corrected, and the classes with fresh seeds."""

    question: Question
    asked: Choice
    answer: Solution
    classes: list[SimulatedClass]
    simulations: int
    # What was learnt of pools: how much more they take than closed forms say.
    learnt: "Learnt"

    @property
    def holds(self) -> bool:
        return all(one.holds for one in self.classes)


# Which replicas under which promise, and what they are meant for: what a correction is for.
_Meant = tuple[Key, Tier, Purpose]
Learnt = dict[_Meant, float]


def _pool_of(column: Column) -> PoolKey:
    return key_of(column.deployment), column.tier


def _meant(column: Column) -> _Meant:
    return key_of(column.deployment), column.tier, column.purpose


def bearable(trials: Trials, pools: Sequence[PoolPlan]) -> dict[str, float]:
    """By class: the times its traffic at which it still holds, to a step or so, or the largest that was tried."""
    tried: dict[float, Levels] = {}
    load = 1.0
    while len(tried) < _TRIES and (found := trials.levels(pools, load)) is not None:
        tried[load] = found
        low, high = _ends(tried)
        worst = max(found.values())
        if high / low <= _NEAR or (len(tried) == 1 and _CLOSE[0] <= worst <= _CLOSE[1]):
            break
        if high < inf and low > _NONE:
            load = (low * high) ** 0.5
        else:
            # Misses rise with a high power of the load.
            load *= min(max((HOLDS / max(worst, 1e-3)) ** (1.0 / _STEEP), 1.0 / _STEP), _STEP)
            load = max(load, low * _NEAR) if high == inf else min(load, high / _NEAR)
    return {one.name: _crossing(tried, one.name) for one in trials.classes}


def times_borne(
    catalog: Catalog, workload: Workload, model: str, pools: Sequence[PoolPlan], scaling: Reading, peak: float
) -> float:
    """The times its traffic at which all classes of a model still hold on these pools."""
    return min(bearable(Trials(catalog, workload, model, scaling, peak), pools).values())


def _misses_idle(trials: Trials, pools: Sequence[PoolPlan]) -> bool:
    """Whether a class misses its targets though replicas have next to nothing to do."""
    found = trials.levels(pools, _IDLE)
    return found is not None and max(found.values()) > HOLDS


def _ends(tried: Mapping[float, Levels], name: str = "") -> tuple[float, float]:
    """The largest load that holds below all that do not, and the least that does not; of a class, or of all."""

    def worst(found: Levels) -> float:
        return found[name] if name else max(found.values())

    fails = min((load for load, found in tried.items() if worst(found) > HOLDS), default=inf)
    return max((load for load in tried if load < fails), default=_NONE), fails


def _crossing(tried: Mapping[float, Levels], name: str) -> float:
    """Between both ends where misses, straight in logarithms, come up to those allowed."""
    if not tried:
        return 1.0
    low, high = _ends(tried, name)
    if len(tried) == 1 or low <= _NONE:
        (load,) = tried if len(tried) == 1 else (high,)
        return float(load * (HOLDS / max(tried[load][name], _CLOSE[0])) ** (1.0 / _STEEP))
    if high == inf:
        return low
    before, after = max(tried[low][name], 0.02), tried[high][name]
    into = log(HOLDS / before) / max(log(after / before), 1e-6) if before < HOLDS else 0.0
    return float(low * (high / low) ** min(max(into, 0.0), 1.0))


class _Put:
    """A question as it is put to simulation: trials of each model, and the places of its columns."""

    def __init__(self, catalog: Catalog, workload: Workload, question: Question):
        self.question = question
        models, peak = dict.fromkeys(one.model for one in workload.classes), question.asked.peak
        self.trials_of = {model: Trials(catalog, workload, model, question.scaling, peak) for model in models}
        self.place = {id(column): index for index, column in enumerate(question.everything.columns)}


@dataclass(frozen=True, slots=True)
class _Proposal:
    """A fleet: its pools, the columns that they are, and the question that it answers."""

    of: _Put
    pools: list[PoolPlan]
    columns: list[Column]
    usd_per_hour: float
    # The question with its capacities corrected, and the fleet as the answer to that.
    asked: Choice
    solution: Solution


class _Search:
    """Proposals and their corrections."""

    def __init__(
        self, catalog: Catalog, workload: Workload, question: Question, reconsider: Reconsider, on_progress: OnProgress,
        learnt: Learnt,
    ):  # fmt: skip
        self.catalog, self.workload, self.reconsider, self.on_progress = catalog, workload, reconsider, on_progress
        self.every = [_Put(catalog, workload, question)]
        # By pool: how much more it takes than its closed form says.
        self.found: Learnt = learnt
        self.best: _Proposal | None = None
        # To check beside the answer: those that hardly missed, since one seed says little of a fleet that is near.
        self.near: list[_Proposal] = []

    @property
    def put(self) -> _Put:
        return self.every[-1]

    @property
    def simulations(self) -> int:
        return sum(trials.made for put in self.every for trials in put.trials_of.values())

    def factors(self, put: _Put, hope: float = 1.0) -> Array:
        """By column; those that were not simulated as others of their model that are meant for the same."""
        usual: dict[object, list[float]] = {}
        for (key, tier, purpose), factor in self.found.items():
            if factor <= _NONE:
                continue
            usual.setdefault((key[0], tier, purpose), []).append(factor)
            usual.setdefault((key[0], purpose.is_open), []).append(factor)
            usual.setdefault(key[0], []).append(factor)
        middle = {kind: float(np.median(values)) for kind, values in usual.items()}

        def factor_of(column: Column) -> float:
            known, model = self.found.get(_meant(column)), column.deployment.model.id
            if known is not None:
                return known
            alike = middle.get((model, column.purpose.is_open), middle.get(model, 1.0))
            return hope * middle.get((model, column.tier, column.purpose), alike)

        return np.array([factor_of(column) for column in put.question.everything.columns])

    def corrected(self, put: _Put, factors: Array, keep: Sequence[int] = ()) -> Choice:
        """The question with capacities corrected, and some columns that must be in it. Those that take nothing are not
        offered: billions of them would."""
        everything = put.question.everything
        offered = replace(everything, capacity=everything.capacity.faster(factors))
        kept = {put.place[id(column)] for column in undominated(offered).columns}
        kept = {place for place in kept if factors[place] > _NONE} | set(keep)
        return put.question.asked.with_offers(offered.only(np.array(sorted(kept), np.int64)))

    def proposal(self, put: _Put, asked: Choice, allowed: Mask | None = None) -> _Proposal | None:
        answer = solve(asked.problem, allowed, quickly=self.put.question.vendor is not None)
        if answer is None:
            return None
        simple = tidied(asked.problem, simplify(asked.problem, answer, self.workload.constraints.simplicity))
        pools = fleet_plan(asked, simple, self.workload).pools
        columns = [asked.offers.columns[i] for i in np.flatnonzero(simple.replicas)]
        by_pool = {_pool_of(column): column for column in columns}
        return _Proposal(put, pools, [by_pool[pool_key(pool)] for pool in pools], simple.usd_per_hour, asked, simple)

    def plain(self, put: _Put, asked: Choice) -> _Proposal | None:
        """Of every model one pool alone: the least that a plan has to beat. None where classes ask for different
        things, since the strictest would have to be promised to all."""
        if any(len({tier_of(one) for one in trials.classes}) > 1 for trials in put.trials_of.values()):
            return None
        problem = asked.problem
        allowed = np.zeros(len(problem.gpus), bool)
        needed = problem.per_request(problem.replica_usd_per_hour) * problem.demand
        models = np.array([column.deployment.model.id for column in asked.offers.columns])
        for model in put.trials_of:
            parts = [part.index for part in asked.offers.parts if part.request_class.model == model]
            usd = np.where(models == model, needed[:, parts].sum(axis=1), np.inf)
            if not np.isfinite(usd).any():
                return None
            allowed[int(np.argmin(usd))] = True
        return self.proposal(put, asked, allowed)

    def _next(self, hope: float) -> tuple[_Proposal | None, Array]:
        """The fleet to simulate next, and the corrections that it was made by."""
        factors = self.factors(self.put, hope)
        asked = self.corrected(self.put, factors)
        proposed = (self.plain(self.put, asked) if self.best is None else None) or self.proposal(self.put, asked)
        return proposed, factors

    def run(self, rounds: int = _ROUNDS) -> _Proposal | None:
        """The cheapest fleet that holds; None where none was found."""
        hope, number = 1.0, 0
        tries: dict[tuple[int, FleetKey], _Proposal] = {}
        for _ in range(_MOST_PROPOSED * rounds):
            proposed, factors = self._next(hope)
            if proposed is not None and len(self.every) == 1:
                other = self.reconsider(self.put.question, _known(proposed, factors), proposed.solution)
                if other is not None:
                    self.every.append(_Put(self.catalog, self.workload, other))
                    proposed, factors = self._next(hope)
            if proposed is None or number == rounds:
                break
            fleet = len(self.every), fleet_key(proposed.pools)
            if self.best is not None and proposed.usd_per_hour > self.best.usd_per_hour * _WORTH_TRYING:
                if hope > 1.0:
                    break
                hope = _HOPE
                continue
            if fleet in tries:
                self._cut(proposed, factors)
                continue
            tries[fleet] = proposed
            label = ", ".join(f"{pool.gpus} {pool.deployment.accelerator.id}" for pool in proposed.pools)
            self.on_progress(number, rounds, f"simulating {label}")
            number += 1
            if self._try(proposed, factors, number < rounds):
                self.best = proposed
                if rounds == _RIVAL_ROUNDS:
                    break
            elif self._is_near(proposed):
                self.near.append(proposed)
        if self.best is not None or not tries:
            return self.best
        # What misses least needs least.
        return self._grown(min(tries.values(), key=_worst))

    def _cut(self, missed: _Proposal, factors: Array) -> None:
        """A fleet that was seen to miss is not proposed again, nor any with fewer of its replicas."""
        for pool, column in zip(missed.pools, missed.columns, strict=True):
            busy = min(pool.utilisation * (1.0 + self.workload.constraints.spare), 1.0)
            self.found[_meant(column)] = float(factors[missed.of.place[id(column)]]) * busy * _CUT

    def _try(self, proposed: _Proposal, factors: Array, corrects: bool) -> bool:
        """Whether the fleet holds; corrects its pools, where another is still to be proposed by that."""
        every = True
        for model, trials in proposed.of.trials_of.items():
            mine = _of(model, proposed.pools)
            columns = {pool_key(pool): column for pool, column in zip(proposed.pools, proposed.columns, strict=True)}
            holds = trials.holds(mine, FAR)
            every &= holds
            known = all(_meant(columns[pool_key(pool)]) in self.found for pool in mine)
            if not corrects or (holds and known):
                continue
            if known and len(mine) == 1 and _misses_idle(trials, mine):
                # More replicas do not help, and it says nothing of others.
                self.found[_meant(columns[pool_key(mine[0])])] = _NONE
                continue
            bears = bearable(trials, mine)
            for pool in mine:
                column = columns[pool_key(pool)]
                times = min(self._taken(pool, bears), _CHANGE)
                if not trials.has_missed(mine):
                    # It may take far more than it was tried with.
                    times = max(times, 1.0)
                self.found[_meant(column)] = float(factors[proposed.of.place[id(column)]]) * times
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
        for trials in last.of.trials_of.values():
            trials.left += _TO_GROW
        for model, trials in last.of.trials_of.items():
            for _ in range(_TO_GROW):
                mine = _of(model, pools)
                if trials.holds(mine):
                    break
                pools = [more(pool, 1.15) if pool in mine else pool for pool in pools]
                if _usd_per_hour(last.asked, pools) == inf:
                    return None
            else:
                return None
        return replace(last, pools=pools)

    def shrunk(self, best: _Proposal, kept: Collection[PoolKey] = ()) -> _Proposal:
        """With fewer replicas, as long as it holds; the dearest pools first, in steps that save money. `kept`: pools
        that need as many as they have."""
        for trials in best.of.trials_of.values():
            trials.left += _TO_SHRINK
        best = self._with_fewer_pools(best)
        pools = list(best.pools)
        for place in sorted(range(len(pools)), key=lambda i: -pools[i].usd_per_hour):
            if pool_key(pools[place]) in kept:
                continue
            model = pools[place].deployment.model.id
            trials = best.of.trials_of[model]
            most = max(pools[place].replicas // 4, 1) if pools[place].carried else 0
            while most:
                pool, usd = pools[place], _usd_per_hour(best.asked, pools)
                saving = [
                    step
                    for step in range(1, pool.replicas)
                    if _usd_per_hour(best.asked, _without(pools, place, step)) < usd - 1e-9
                ]
                if not saving:
                    break
                # The least that saves is always tried: near the floor of a latency misses hardly follow the load.
                mine = _of(model, pools)
                steps = [saving[0]] + [step for step in saving[1:] if _may_hold(trials, mine, pool, step)]
                step = max((one for one in steps if one <= most), default=steps[0])
                if trials.holds(_of(model, _without(pools, place, step))):
                    pools = _without(pools, place, step)
                else:
                    most = step // 2 if step > saving[0] else 0
        return replace(best, pools=pools)

    def _with_fewer_pools(self, best: _Proposal) -> _Proposal:
        """Without small pools that the others of their model can do without: the closed forms give lengths and classes
        pools of their own which the router shares out better."""
        for pool in sorted(best.pools, key=lambda one: one.usd_per_hour):
            model = pool.deployment.model.id
            mine = _of(model, best.pools)
            if pool.usd_per_hour > _SMALL_POOL * sum(one.usd_per_hour for one in mine):
                continue
            kept = [(one, column) for one, column in zip(best.pools, best.columns, strict=True) if one is not pool]
            fewer = replace(best, pools=[one for one, _ in kept], columns=[column for _, column in kept])
            saves = _usd_per_hour(best.asked, fewer.pools) < _usd_per_hour(best.asked, best.pools) - 1e-9
            if saves and _can_carry_all(fewer) and best.of.trials_of[model].holds(_of(model, fewer.pools)):
                best = fewer
        return best

    def checked(self, found: _Proposal) -> tuple[_Proposal, list[SimulatedClass]]:
        """The fleet with fresh seeds, or a cheaper one that holds with these: of those that hardly missed with the
        search's, of those next to it, and the one that is proposed by what fresh seeds have taught."""
        answer, classes, holds = self._checked(found)
        self.near += self._proposed_again(found, answer, holds)
        looked, tried = 0, {fleet_key(answer.pools)}
        while looked < _SECOND_LOOKS:
            others = list(self.near)
            if holds:
                paid = _usd_per_hour(answer.asked, answer.pools) * _WORTH_TRYING
                others = [one for one in others if _usd_per_hour(one.asked, one.pools) < paid]
                others += _next_to(answer, paid)
            others = [one for one in others if fleet_key(one.pools) not in tried]
            looked += 1
            if others:
                other = min(others, key=lambda one: _usd_per_hour(one.asked, one.pools))
                tried.add(fleet_key(other.pools))
                if self._is_near(other):
                    missing, then = _missing(other.of, other.pools)
                    if not missing:
                        answer, classes, holds = other, then, True
            elif holds:
                break
            else:
                # Limits keep it from growing; others may hold within them.
                self.near += self._proposed_again(found, answer, holds)
        return answer, classes

    def _proposed_again(self, found: _Proposal, answer: _Proposal, holds: bool) -> list[_Proposal]:
        """Where pools had to grow they take less than was thought, less still where they miss as they are, and others
        may be cheaper."""
        after = {pool_key(pool): pool.replicas for pool in answer.pools}
        most = 1.0 if holds else 1.0 / _NEAR
        less = [min(pool.replicas / after.get(pool_key(pool), 1), most) for pool in found.pools]
        if min(less) == 1.0:
            return []
        factors = self.factors(found.of)
        for column, times in zip(found.columns, less, strict=True):
            self.found[_meant(column)] = float(factors[found.of.place[id(column)]]) * times
        proposed = self.proposal(found.of, self.corrected(found.of, self.factors(found.of)))
        return [proposed] if proposed else []

    def _is_near(self, fleet: _Proposal) -> bool:
        """Whether a fleet holds, or hardly misses, with the search's seed."""
        for model, trials in fleet.of.trials_of.items():
            trials.left += 1
            found = trials.levels(_of(model, fleet.pools), most=_BY_CHANCE)
            if found is None or max(found.values()) > _BY_CHANCE:
                return False
        return True

    def _checked(self, found: _Proposal) -> tuple[_Proposal, list[SimulatedClass], bool]:
        """Where a class misses, its pools get more replicas, no more than that takes and than the limits allow; and
        whether none misses then."""
        pools, classes = enlarged(
            found.pools,
            lambda pools: _missing(found.of, pools),
            lambda pools: _usd_per_hour(found.asked, pools) < inf,
        )
        larger = replace(found, pools=pools)
        if classes is None:
            _, classes = _missing(found.of, pools)
            return larger, classes, False
        if fleet_key(pools) == fleet_key(found.pools):
            return larger, classes, True
        # A pool that is larger may do the work of others.
        grown = {
            pool_key(after)
            for before, after in zip(found.pools, pools, strict=True)
            if after.replicas > before.replicas
        }
        smaller = self.shrunk(larger, grown)
        if _usd_per_hour(smaller.asked, smaller.pools) < _usd_per_hour(larger.asked, larger.pools) - 1e-9:
            missing, then = _missing(smaller.of, smaller.pools)
            if not missing:
                return smaller, then, True
        return larger, classes, True


Check = Callable[[Sequence[PoolPlan]], tuple[set[str], list[SimulatedClass]]]


def enlarged(
    pools: Sequence[PoolPlan], check: Check, allowed: Callable[[Sequence[PoolPlan]], bool]
) -> tuple[list[PoolPlan], list[SimulatedClass] | None]:
    """With more replicas of pools whose classes miss, until none does, and the classes as they are then served; None
    where some miss still. `check`: classes that miss, and all; `allowed`: whether a fleet keeps to its limits."""
    before = after = list(pools)
    missing, classes = check(after)
    for again in range(_GROWN):
        if not missing:
            break
        before = after
        short = [pool for pool in before if any(one.part.request_class.name in missing for one in pool.carried)]
        larger = {id(pool): more(pool, 1.0 + _GROWTH * 2**again) for pool in short}
        # One of a few pools may do for all of them; the cheapest step first.
        alone = sorted(short, key=lambda one: larger[id(one)].usd_per_hour - one.usd_per_hour)
        for growing in ([[one] for one in alone] if 1 < len(alone) <= _FEW_POOLS else []) + [short]:
            grown = [larger[id(pool)] if any(pool is one for one in growing) else pool for pool in before]
            if not allowed(grown):
                continue
            after = grown
            missing, classes = check(after)
            if not missing:
                break
    if missing:
        return after, None
    while True:
        halfway = [
            resized(most, (most.replicas + least.replicas) // 2) for most, least in zip(after, before, strict=True)
        ]
        if fleet_key(halfway) in (fleet_key(after), fleet_key(before)):
            return after, classes
        if allowed(halfway):
            missing, then = check(halfway)
            if not missing:
                after, classes = halfway, then
                continue
        before = halfway


def _missing(of: _Put, pools: Sequence[PoolPlan]) -> tuple[set[str], list[SimulatedClass]]:
    """Classes that miss in a long run with a fresh seed, and all of them as they were served."""
    classes = [one for model, trials in of.trials_of.items() for one in trials.confirm(_of(model, pools), CHECK_SEED)]
    return {one.name for one in classes if not one.holds}, classes


def _of(model: str, pools: Sequence[PoolPlan]) -> list[PoolPlan]:
    """Those of a model that carry anything."""
    return [pool for pool in pools if pool.deployment.model.id == model and pool.carried]


def _worst(fleet: _Proposal) -> float:
    """Of all classes, misses over those allowed; without end where nobody looked."""
    found = [trials.levels(_of(model, fleet.pools)) for model, trials in fleet.of.trials_of.items()]
    return max((max(levels.values()) if levels else inf for levels in found), default=inf)


def _without(pools: Sequence[PoolPlan], place: int, step: int) -> list[PoolPlan]:
    """With so many replicas less of one pool."""
    return [resized(one, one.replicas - step) if i == place else one for i, one in enumerate(pools)]


def _next_to(fleet: _Proposal, below: float) -> list[_Proposal]:
    """Fleets below a price with fewer replicas of one of a model's pools, and with as many more of its others as come
    with the nodes. Of a pool that is alone `shrunk` knows what it bears."""
    found = []
    for place, pool in enumerate(fleet.pools):
        others = [
            i for i, one in enumerate(fleet.pools) if one.deployment.model is pool.deployment.model and i != place
        ]
        for step in range(1, pool.replicas if others else 0):
            fewer = _without(fleet.pools, place, step)
            usd = _usd_per_hour(fleet.asked, fewer)
            if usd < below:
                break
        else:
            continue
        # No more GPUs than it had: there may be no others.
        free = step * pool.deployment.gpus
        for other in others:
            one = fewer[other].deployment
            while one.accelerator is pool.deployment.accelerator and one.gpus <= free:
                larger = _without(fewer, other, -1)
                if _usd_per_hour(fleet.asked, larger) > usd:
                    break
                fewer, free = larger, free - one.gpus
        found.append(replace(fleet, pools=fewer))
    return found


def _can_carry_all(fleet: _Proposal) -> bool:
    """Whether every part of the traffic has a pool that may take it, by the closed forms and in whatever numbers."""
    problem, where = fleet.asked.problem, {id(one): index for index, one in enumerate(fleet.asked.offers.columns)}
    best = problem.rate[[where[id(column)] for column in fleet.columns]].max(axis=0)
    return bool(np.all((best > 0.0) | (problem.demand <= 0.0)))


def _usd_per_hour(asked: Choice, pools: Sequence[PoolPlan]) -> float:
    """What is paid for them: in whole nodes, where that is asked, a replica less may save nothing. Without end where
    limits forbid them."""
    gpus = np.zeros(len(asked.market.items))
    for pool in pools:
        gpus[asked.market.index(pool.deployment.accelerator.id)] += pool.gpus
    return float(asked.problem.spent_usd_per_hour(gpus).sum()) if asked.problem.allows(gpus) else inf


def _may_hold(trials: Trials, mine: Sequence[PoolPlan], pool: PoolPlan, step: int) -> bool:
    """Whether a pool may do with so many replicas less, by what its classes miss as it is."""
    known = trials.levels(mine)
    if known is None or pool.replicas <= step:
        return False
    worst = max(known[name] for name in {one.part.request_class.name for one in pool.carried})
    bears = float((HOLDS / max(worst, 1e-3)) ** (_DOUBT / _STEEP))
    return pool.replicas / (pool.replicas - step) <= bears


def more(pool: PoolPlan, times: float) -> PoolPlan:
    return resized(pool, max(pool.replicas + 1, ceil(pool.replicas * times)))


def resized(pool: PoolPlan, replicas: int) -> PoolPlan:
    return replace(pool, replicas=replicas, usd_per_hour=pool.usd_per_hour * replicas / pool.replicas)


def confirmed(
    catalog: Catalog, workload: Workload, question: Question, reconsider: Reconsider, on_progress: OnProgress
) -> Confirmed | None:
    """The cheapest fleet that holds in simulation; None where none was found within the work that there is for it.

    `reconsider` is asked of every fleet before it is simulated, until it has another question.
    """
    search = _Search(catalog, workload, question, reconsider, on_progress, {})
    found = search.run()
    if found is None:
        return None
    found = search.shrunk(found)
    on_progress(0, 0, "confirming the fleet in a long run")
    found, classes = search.checked(found)
    corrected, answer = _as_solved(search, found)
    return Confirmed(found.of.question, corrected, answer, classes, search.simulations, search.found)


def confirmed_rival(
    catalog: Catalog, workload: Workload, question: Question, reconsider: Reconsider, learnt: Learnt
) -> tuple[dict[str, int], float] | None:
    """GPUs and price of a fleet beside the answer that holds in simulation, too; None where none was found.

    It is found with what was learnt of the answer's pools, in fewer rounds, and not checked with fresh seeds.
    """
    search = _Search(catalog, workload, question, reconsider, no_progress, dict(learnt))
    found = search.run(_RIVAL_ROUNDS)
    if found is None:
        return None
    found = search.shrunk(found)
    gpus: dict[str, int] = {}
    for pool in sorted(found.pools, key=lambda one: -one.gpus):
        name = pool.deployment.accelerator.id
        gpus[name] = gpus.get(name, 0) + pool.gpus
    return gpus, _usd_per_hour(found.asked, found.pools)


def _as_solved(search: _Search, found: _Proposal) -> tuple[Choice, Solution]:
    """The fleet as an answer to the question with its capacities as simulated: what holds there can be carried."""
    used = [found.of.place[id(column)] for column in found.columns]
    # Closed forms may deny a percentile that simulation has seen hold.
    for with_percentiles in (True, False):
        factors = search.factors(found.of)
        factors[used] = np.maximum(factors[used], _LEAST)
        for _ in range(_TO_CARRY):
            asked = search.corrected(found.of, factors, used)
            where = {id(column): index for index, column in enumerate(asked.offers.columns)}
            replicas = np.zeros(len(asked.offers.columns), np.int64)
            for column, pool in zip(found.columns, found.pools, strict=True):
                replicas[where[id(column)]] = pool.replicas
            bare = asked.problem.fleet(replicas, np.zeros_like(asked.problem.rate))
            answer = tidied(asked.problem if with_percentiles else replace(asked.problem, percentiles=()), bare)
            if answer.share.any():
                bound = solve(asked.problem, quickly=True)
                least = min(bound.bound_usd_per_hour if bound else 0.0, answer.usd_per_hour)
                return replace(asked, correction=_by_model(found, factors)), replace(answer, bound_usd_per_hour=least)
            factors[used] *= 1.03
    raise AssertionError("a fleet that holds can be carried")


def _known(proposed: _Proposal, factors: Array) -> Choice:
    """The question that a fleet answers, with what is known of its models' corrections."""
    return replace(proposed.asked, correction=_by_model(proposed, factors))


def _by_model(found: _Proposal, factors: Array) -> dict[str, float]:
    """By model: the correction of its pools, each by what it costs."""
    total: dict[str, tuple[float, float]] = {}
    for pool, column in zip(found.pools, found.columns, strict=True):
        model, factor = pool.deployment.model.id, float(factors[found.of.place[id(column)]])
        usd, weighted = total.get(model, (0.0, 0.0))
        total[model] = usd + pool.usd_per_hour, weighted + pool.usd_per_hour * factor
    return {model: weighted / usd for model, (usd, weighted) in total.items()}
