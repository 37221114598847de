"""The cheapest fleet that holds in simulation, by a master programme and what its fleets have shown so far.

    master      the mixed-integer programme over whole purchases proposes the cheapest fleet, with the capacity of each
                pool as closed forms have it, times what simulation has learnt of it
    simulation  the fleet grows until it holds and shrinks while it does: what its pools then need is their capacity,
                and a fleet that missed rules out all with fewer of its replicas
    the end     the master's cheapest fleet costs what the cheapest that holds does, or the simulations are spent

Fleets that hold, fleets that are ruled out and learnt capacities are shared by all questions of a plan: of all
accelerators, of a vendor alone, of one family that need not be surer. The answer to each is the cheapest fleet of all
that hold and that it allows. All is bounded by counts and every seed is fixed: the same file gives the same answer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import Workload
from crosstie.decide.plan.answer import PoolPlan, pools_of
from crosstie.decide.plan.candidates import Key, key_of
from crosstie.decide.plan.capacity import Tier
from crosstie.decide.plan.optimise import Choice, least_usd_per_hour, simplify
from crosstie.decide.plan.programme import Solution
from crosstie.decide.plan.run_result import SimulatedClass
from crosstie.decide.plan.scaling import Reading, WorldScaling
from crosstie.decide.plan.solver import solve, tidied
from crosstie.decide.plan.survey import Column, Offers, Purpose, undominated
from crosstie.decide.plan.trials import HOPELESS, LONG, SHORT, FleetRun, PoolKey, RunKey, Trials, Verdict, pool_key
from crosstie.decide.plan.uncertainty import family_of
from crosstie.perf.hardware import Array

# Budgets: requests that a question's simulations send, by the end of which no other begins; and fleets of the master's
# that they are spent on.
REQUESTS, _PROPOSALS = 120_000, 12
# Tolerances: an answer, and a rival that stands beside it, may cost so much more than the master's next proposal.
TOLERANCE, RIVALS_TOLERANCE = 0.01, 0.05
# What a pool of which no smaller one was tried may be better than seen, so that others like it are looked at.
_HOPE = 1.05
# A fleet that misses grows by this share, then by twice as much each time. The last step is beyond any error of closed
# forms: what misses then, or does not miss half as often after two steps, does so however many replicas there are.
_GROWTH, _GROWN = 0.08, 5
# Misses rise with about this power of the load: by that the next number of replicas is guessed. A wrong guess costs a
# simulation, and changes no answer.
_STEEP, _LEAST_LEVEL = 10.0, 0.3
# Closed forms err by some tenths: a pool is not tried with so many times what they say that it bears.
_FAR = 1.5
# The correction of pools that miss however many replicas they have; and steps by which closed forms are raised until
# they admit what was seen to hold.
_NONE, _STEP_TO_CARRY, _STEPS_TO_CARRY = 1e-9, 1.03, 200


@dataclass(frozen=True, slots=True)
class Question:
    """What fleets are proposed for: all columns, before any was left out, the programme over them, and how sure each
    estimate is taken to be. `family` and `vendor`: the accelerator and stack, and the vendor, that it is limited to."""

    everything: Offers
    asked: Choice
    scaling: WorldScaling
    family: tuple[str, str] | None = None
    vendor: str | None = None


# Given a fleet with its question: the question with each estimate surer, where the fleet is not as sure as asked.
Surer = Callable[[Question, Choice, Solution], Question | None]

# Which replicas under which promise, and what they are meant for: what a correction is for.
_Meant = tuple[Key, Tier, Purpose]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A fleet: its pools, the columns that they are, and the question with corrected capacities that it answers."""

    question: Question
    asked: Choice
    solution: Solution
    pools: list[PoolPlan]
    columns: list[Column]

    @property
    def usd_per_hour(self) -> float:
        """What is paid for it: in whole nodes, where that is asked. Without end where limits forbid it."""
        return _usd_per_hour(self.asked, self.pools)

    @property
    def vendors(self) -> set[str]:
        return {pool.deployment.accelerator.vendor for pool in self.pools}

    @property
    def families(self) -> set[tuple[str, str]]:
        """Accelerators and stacks."""
        return {family_of(pool.deployment.decode) for pool in self.pools}

    @property
    def gpus(self) -> dict[str, int]:
        """By accelerator, that of the largest pool first."""
        found: dict[str, int] = {}
        for pool in sorted(self.pools, key=lambda plan: -plan.gpus):
            name = pool.deployment.accelerator.id
            found[name] = found.get(name, 0) + pool.gpus
        return found


@dataclass(frozen=True, slots=True)
class Confirmed:
    """The fleet that holds, the question with its capacities corrected, and its classes in a long run."""

    question: Question
    asked: Choice
    answer: Solution
    classes: list[SimulatedClass]
    simulations: int

    @property
    def vendors(self) -> set[str]:
        market = self.asked.market
        return {market.items[market.index(name)].vendor for name in self.asked.gpus(self.answer)}


@dataclass(slots=True)
class Shown:
    """What simulation has shown, for all questions of a plan."""

    catalog: Catalog
    workload: Workload
    peak: float
    runs: dict[RunKey, FleetRun] = field(default_factory=dict)
    # By pool: how much more it takes than its closed form says; at the least, and at most.
    capacity: dict[_Meant, tuple[float, float]] = field(default_factory=dict)
    holding: list[Proposal] = field(default_factory=list)

    @property
    def sent(self) -> int:
        """Requests of all simulations."""
        return sum(run.sent for run in self.runs.values())

    def trials(self, model: str, scaling: Reading) -> Trials:
        return Trials(self.catalog, self.workload, model, scaling, self.peak, self.runs)

    def answering(self, question: Question) -> Proposal | None:
        """The cheapest that holds of those that a question allows, under its shares of vendors."""
        allowed = [
            replace(proposal, asked=proposal.asked.with_vendor_share(question.asked.problem.vendor_share))
            for proposal in self.holding
            if (question.family is None or proposal.families == {question.family})
            and proposal.question.scaling.sure >= self._sure_enough(proposal, question)
            and (question.vendor is None or proposal.vendors == {question.vendor})
        ]
        best = min(allowed, key=lambda proposal: proposal.usd_per_hour, default=None)
        return best if best is not None and best.usd_per_hour < inf else None

    def _sure_enough(self, fleet: Proposal, question: Question) -> float:
        """How sure its estimates must be: of one accelerator and stack alone they go wrong together, and need be no
        surer than the fleet is to be."""
        sure: float = question.scaling.sure
        return min(sure, self.workload.sureness) if len(fleet.families) == 1 else sure


class Search:
    """For the cheapest fleet that holds and answers a question."""

    def __init__(
        self, shown: Shown, question: Question, *, surer: Surer | None = None, on_progress: OnProgress = no_progress,
        left: int = REQUESTS,
    ):  # fmt: skip
        """`left`: requests that its simulations may send."""
        self.shown, self.question, self.on_progress = shown, question, on_progress
        self._surer, self.left = surer, left
        # What no fleet costs less than, as far as capacities are known.
        self.bound_usd_per_hour = 0.0

    def run(self, below: float = inf, tolerance: float = TOLERANCE) -> Proposal | None:
        """`below`: only fleets of a lower price are looked for."""
        for number in range(_PROPOSALS + 1):
            proposed = self._proposed()
            best = self.shown.answering(self.question)
            least = min(below, best.usd_per_hour if best else inf)
            self.bound_usd_per_hour = proposed.solution.bound_usd_per_hour if proposed else least
            if proposed is None or proposed.usd_per_hour > least * (1.0 - tolerance):
                break
            if number == _PROPOSALS or self.left <= 0:
                break
            label = ", ".join(f"{pool.gpus} {pool.deployment.accelerator.id}" for pool in proposed.pools)
            self.on_progress(number, _PROPOSALS, f"simulating {label}")
            self.size(proposed)
        return self.shown.answering(self.question)

    def _proposed(self) -> Proposal | None:
        proposed = self._master()
        surer = self._surer(self.question, proposed.asked, proposed.solution) if proposed and self._surer else None
        if surer is None:
            return proposed
        # Once: a fleet of yet more pools is as sure as it is.
        self.question, self._surer = surer, None
        return self._master()

    def _master(self) -> Proposal | None:
        asked = corrected(self.question, self.factors())
        answer = solve(asked.problem, quickly=self.question.vendor is not None, bounded=True)
        if answer is None:
            return None
        simple = tidied(asked.problem, simplify(asked.problem, answer, self.shown.workload.constraints.simplicity))
        pools = pools_of(asked, simple, self.shown.workload)
        used = [asked.offers.columns[place] for place in np.flatnonzero(simple.replicas)]
        by_pool = {pool_key(column): column for column in used}
        return Proposal(self.question, asked, simple, pools, [by_pool[pool_key(pool)] for pool in pools])

    def factors(self) -> Array:
        """By column; those that were not simulated as the best that others of their model, meant for the same, may
        be."""
        usual: dict[object, list[float]] = {}
        for (key, tier, purpose), (_, most) in self.shown.capacity.items():
            if most > _NONE:
                for kind in ((key[0], tier, purpose), (key[0], purpose.is_open), key[0]):
                    usual.setdefault(kind, []).append(most)
        middle = {kind: float(np.median(values)) for kind, values in usual.items()}

        def factor_of(column: Column) -> float:
            known, model = self.shown.capacity.get(_meant(column)), column.deployment.model.id
            if known is not None:
                return known[0]
            alike = middle.get((model, column.purpose.is_open), middle.get(model, 1.0))
            return middle.get((model, column.tier, column.purpose), alike)

        return np.array([factor_of(column) for column in self.question.everything.columns])

    def size(self, proposed: Proposal, budget: int = SHORT) -> Proposal | None:
        """With as many replicas as it takes to hold, which teaches what its pools bear; None where no number does."""
        pools = list(proposed.pools)
        for trials in self._trials(proposed):
            grown = self._grown(trials, proposed, pools, budget)
            if grown is None:
                return None
            pools = grown
        missed = [0] * len(pools)
        for trials in self._trials(proposed):
            pools = self._fewest(trials, proposed, pools, missed, budget)
        for place, pool in enumerate(pools):
            if pool.replicas:
                self._set(proposed, place, pool.replicas, missed[place])
        kept = [(pool, column) for pool, column in zip(pools, proposed.columns, strict=True) if pool.replicas]
        sized = replace(proposed, pools=[pool for pool, _ in kept], columns=[column for _, column in kept])
        self.shown.holding.append(sized)
        return sized

    def _trials(self, proposed: Proposal) -> Iterator[Trials]:
        for model in dict.fromkeys(request_class.model for request_class in self.shown.workload.classes):
            yield self.shown.trials(model, proposed.question.scaling)

    def verdict(self, trials: Trials, pools: Sequence[PoolPlan], budget: int = SHORT) -> Verdict:
        before = self.shown.sent
        verdict = trials.verdict(pools, budget)
        self.left -= self.shown.sent - before
        return verdict

    def _grown(self, trials: Trials, proposed: Proposal, pools: list[PoolPlan], budget: int) -> list[PoolPlan] | None:
        """With more replicas of the pools whose classes miss, until none does."""
        mine = {place for place, pool in enumerate(pools) if pool.deployment.model.id == trials.model}
        tried, short, carrying, levels, times = pools, set[int](), set[int](), list[float](), 1.0
        for again in range(_GROWN + 1):
            if not trials.is_ruled_out(tried):
                verdict = self.verdict(trials, tried, budget)
                if verdict.holds:
                    return tried
                levels.append(verdict.worst)
                missing = {simulated_class.name for simulated_class in verdict.classes if not simulated_class.holds}
                carrying = {place for place in mine if _serves(pools[place], missing)}
                short = carrying or mine
                # How much an overloaded fleet misses says little, and closed forms may be so far off.
                comparable = levels[-1] <= HOPELESS or times > _FAR
                if len(levels) > 2 and levels[-1] > levels[-3] / 2.0 and comparable:
                    if short == mine:
                        break
                    # Others may let them have less to do.
                    short, levels = mine, levels[-1:]
            times = 1.0 + _GROWTH * 2**again
            # What has grown stays so: it may be why what missed then does no more.
            larger = [
                max(tried[place], more(pool, times), key=_replicas) if place in (short or mine) else tried[place]
                for place, pool in enumerate(pools)
            ]
            if _usd_per_hour(proposed.asked, larger) == inf:
                # Limits keep it from growing: it takes more than it was thought to.
                for place in short or mine:
                    self._set(proposed, place, tried[place].replicas + 1, tried[place].replicas)
                return None
            tried = larger
        # More replicas do not help: of those meant for what misses, the ones that miss most are not offered again.
        late = {place: verdict.missing.get(pools[place].name, 0.0) for place in carrying or mine} if levels else {}
        for place in carrying or mine:
            if not late or late[place] >= max(late.values()):
                self.shown.capacity[_meant(proposed.columns[place])] = _NONE, _NONE
        return None

    def _fewest(
        self, trials: Trials, proposed: Proposal, pools: list[PoolPlan], missed: list[int], budget: int
    ) -> list[PoolPlan]:
        """With as few replicas as hold: small pools that the others can do without go first, then replicas of the
        dearest. `missed`: by pool the most replicas with which it missed."""
        mine = [place for place, pool in enumerate(pools) if pool.deployment.model.id == trials.model]
        for place in sorted(mine, key=lambda i: pools[i].usd_per_hour)[:-1]:
            without = _with(pools, place, 0)
            free = sum(_free_usd(pools[i]) for i in mine if i != place)
            may = pools[place].utilisation * pools[place].usd_per_hour <= _FAR * free
            if may and self._saves(proposed, without, pools) and self._holds(trials, proposed, without, budget):
                pools = without
        for place in sorted(mine, key=lambda i: -pools[i].usd_per_hour):
            while True:
                now = pools[place].replicas
                least = max(missed[place] + 1, ceil(pools[place].utilisation * now / _FAR))
                fewer = [n for n in range(least, now) if self._saves(proposed, _with(pools, place, n), pools)]
                if not fewer:
                    break
                worst = max(self.verdict(trials, pools, budget).worst, _LEAST_LEVEL)
                guess = min(now * worst ** (1.0 / _STEEP), fewer[-1])
                number = max(min(fewer, key=lambda n: abs(n - guess)), fewer[0])
                if self._holds(trials, proposed, _with(pools, place, number), budget):
                    pools = _with(pools, place, number)
                else:
                    missed[place] = number
        return pools

    def _saves(self, proposed: Proposal, fewer: Sequence[PoolPlan], pools: Sequence[PoolPlan]) -> bool:
        return _usd_per_hour(proposed.asked, fewer) < _usd_per_hour(proposed.asked, pools) - 1e-9

    def _holds(self, trials: Trials, proposed: Proposal, pools: list[PoolPlan], budget: int) -> bool:
        if not _can_carry_all(proposed, pools) or trials.is_ruled_out(pools):
            return False
        return self.left > 0 and self.verdict(trials, pools, budget).holds

    def _set(self, proposed: Proposal, place: int, replicas: int, missed: int) -> None:
        """What a pool takes, by what it was thought to carry and the replicas that it needed: at least what so many
        carry, at most what those would have that missed. One alone may bear more than it was given."""
        pool, column = proposed.pools[place], proposed.columns[place]
        used = _factor_used(proposed, column)
        needed = pool.utilisation * pool.replicas * (1.0 + self.shown.workload.constraints.spare) * (1.0 + 1e-6)
        least = max(needed / replicas, 1.0 if replicas == 1 else 0.0)
        most = needed / missed if missed else max(least, 1.0) * _HOPE
        self.shown.capacity[_meant(column)] = used * least, used * max(most, least)

    def confirmed(self, best: Proposal) -> Confirmed:
        """In a long run. Where it does not hold there it grows; the cheapest of all that hold is the answer."""
        for _ in range(_PROPOSALS):
            self.on_progress(0, 0, "confirming the fleet in a long run")
            verdicts = self._in_a_long_run(best)
            if all(one.holds for one in verdicts):
                break
            self.shown.holding = [proposal for proposal in self.shown.holding if _numbers(proposal) != _numbers(best)]
            self.left = max(self.left, REQUESTS // 2)
            larger = self._one_more(best)
            if larger is not None:
                self.shown.holding.append(larger)
            else:
                self.size(best, LONG)
            answering = self.shown.answering(self.question)
            if answering is None:
                break
            best = answering
        classes = [simulated_class for verdict in verdicts for simulated_class in verdict.classes]
        asked, answer = self._as_solved(best)
        return Confirmed(best.question, asked, answer, classes, len(self.shown.runs))

    def _in_a_long_run(self, fleet: Proposal) -> list[Verdict]:
        return [self.verdict(trials, fleet.pools, LONG) for trials in self._trials(fleet)]

    def _one_more(self, missed: Proposal) -> Proposal | None:
        """With one replica more of a pool that it takes to hold, the cheapest; as long as no other fleet is cheaper."""
        answering = self.shown.answering(self.question)
        most = answering.usd_per_hour if answering else inf
        larger = [
            replace(missed, pools=_with(missed.pools, place, pool.replicas + 1))
            for place, pool in enumerate(missed.pools)
        ]
        for fleet in sorted(larger, key=lambda proposal: proposal.usd_per_hour):
            if fleet.usd_per_hour < most and all(one.holds for one in self._in_a_long_run(fleet)):
                return fleet
        return None

    def _as_solved(self, best: Proposal) -> tuple[Choice, Solution]:
        """The fleet as an answer to its question with capacities as simulated: what holds there can be carried."""
        used = [_place_of(best.question, column) for column in best.columns]
        search = Search(self.shown, best.question)
        # Closed forms may deny a percentile that simulation has seen hold.
        for with_percentiles in (True, False):
            factors = search.factors()
            factors[used] = np.maximum(factors[used], 0.01)
            for _ in range(_STEPS_TO_CARRY):
                asked = corrected(best.question, factors, used)
                where = {id(column): index for index, column in enumerate(asked.offers.columns)}
                replicas = np.zeros(len(asked.offers.columns), np.int64)
                for column, pool in zip(best.columns, best.pools, strict=True):
                    replicas[where[id(column)]] = pool.replicas
                bare = asked.problem.fleet(replicas, np.zeros_like(asked.problem.rate), self.bound_usd_per_hour)
                answer = tidied(asked.problem if with_percentiles else replace(asked.problem, percentiles=()), bare)
                if answer.share.any():
                    return replace(asked, correction=_by_model(best, factors)), answer
                factors[used] *= _STEP_TO_CARRY
        raise AssertionError("a fleet that holds can be carried")


def corrected(question: Question, factors: Array, keep: Sequence[int] = ()) -> Choice:
    """The question with capacities corrected, and some columns that must be in it. Those that take nothing are not
    offered: billions of them would."""
    offered = replace(question.everything, capacity=question.everything.capacity.faster(factors))
    place = {id(column): index for index, column in enumerate(question.everything.columns)}
    kept = {place[id(column)] for column in undominated(offered).columns}
    kept = {index for index in kept if factors[index] > _NONE} | set(keep)
    return question.asked.with_offers(offered.only(np.array(sorted(kept), np.int64)))


def family_bounds(search: Search, wide: Question) -> list[tuple[tuple[str, str], float]]:
    """Accelerators and stacks with what no fleet of one alone costs less than, as far as capacities are known; the
    cheapest first."""
    alike = Search(search.shown, wide)
    asked = corrected(wide, alike.factors())
    families = [family_of(column.deployment.decode) for column in asked.offers.columns]
    bounds = {
        family: least_usd_per_hour(asked.problem, np.array([one == family for one in families])) for family in families
    }
    return sorted(bounds.items(), key=lambda pair: (pair[1], pair[0]))


def times_borne(
    catalog: Catalog, workload: Workload, model: str, pools: Sequence[PoolPlan], scaling: Reading, peak: float
) -> float:
    """How many times the price of some pools of a model is that of as many as hold, turned round; nothing where no
    number does."""
    trials = Trials(catalog, workload, model, scaling, peak)
    for again in range(-1, _GROWN):
        times = 1.0 + (_GROWTH * 2**again if again >= 0 else 0.0)
        grown = [more(pool, times) if again >= 0 else pool for pool in pools]
        if trials.verdict(grown).holds:
            return sum(plan.usd_per_hour for plan in pools) / sum(plan.usd_per_hour for plan in grown)
    return 0.0


def _meant(column: Column) -> _Meant:
    return key_of(column.deployment), column.tier, column.purpose


def _place_of(question: Question, column: Column) -> int:
    return next(index for index, one in enumerate(question.everything.columns) if one is column)


def _factor_used(proposed: Proposal, column: Column) -> float:
    """The correction by which a fleet was proposed."""
    offered, everything = proposed.asked.offers, proposed.question.everything
    row = next(index for index, one in enumerate(offered.columns) if one is column)
    rate = everything.requests_per_s[_place_of(proposed.question, column)]
    most = int(np.argmax(rate))
    return float(offered.requests_per_s[row, most] / rate[most])


def _replicas(pool: PoolPlan) -> int:
    return pool.replicas


def _free_usd(pool: PoolPlan) -> float:
    return max(1.0 - pool.utilisation, 0.0) * pool.usd_per_hour


def _serves(pool: PoolPlan, names: set[str]) -> bool:
    return any(one.part.request_class.name in names for one in pool.carried)


def _numbers(fleet: Proposal) -> Mapping[PoolKey, int]:
    return {pool_key(pool): pool.replicas for pool in fleet.pools}


def _with(pools: Sequence[PoolPlan], place: int, replicas: int) -> list[PoolPlan]:
    return [resized(pool, replicas) if index == place else pool for index, pool in enumerate(pools)]


def _can_carry_all(fleet: Proposal, pools: Sequence[PoolPlan]) -> bool:
    """Whether every part of the traffic has a pool that may take it, by the closed forms and in whatever numbers."""
    problem, where = fleet.asked.problem, {id(one): index for index, one in enumerate(fleet.asked.offers.columns)}
    there = [where[id(column)] for column, pool in zip(fleet.columns, pools, strict=True) if pool.replicas]
    return bool(np.all((problem.rate[there].max(axis=0, initial=0.0) > 0.0) | (problem.demand <= 0.0)))


def _usd_per_hour(asked: Choice, pools: Sequence[PoolPlan]) -> float:
    """What is paid for them: in whole nodes, where that is asked, a replica less may save nothing. Without end where
    limits forbid them."""
    gpus = np.zeros(len(asked.market.items))
    for pool in pools:
        gpus[asked.market.index(pool.deployment.accelerator.id)] += pool.gpus
    return float(asked.problem.spent_usd_per_hour(gpus).sum()) if asked.problem.allows(gpus) else inf


def more(pool: PoolPlan, times: float) -> PoolPlan:
    return resized(pool, max(pool.replicas + 1, ceil(pool.replicas * times)))


def resized(pool: PoolPlan, replicas: int) -> PoolPlan:
    usd, load = pool.usd_per_gpu_hour * pool.deployment.gpus, pool.utilisation * pool.replicas
    return replace(pool, replicas=replicas, usd_per_hour=usd * replicas, utilisation=load / max(replicas, 1))


def _by_model(proposal: Proposal, factors: Array) -> dict[str, float]:
    """By model: the correction of its pools, each by what it costs."""
    total: dict[str, tuple[float, float]] = {}
    for pool, column in zip(proposal.pools, proposal.columns, strict=True):
        model, factor = pool.deployment.model.id, float(factors[_place_of(proposal.question, column)])
        usd, weighted = total.get(model, (0.0, 0.0))
        total[model] = usd + pool.usd_per_hour, weighted + pool.usd_per_hour * factor
    return {model: weighted / usd for model, (usd, weighted) in total.items()}
