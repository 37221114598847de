"""Fleets of one model under the traffic of its classes, behind the gateway's own policy: do their percentiles hold?

There is one kind of run. It is cut off where the fleet fills, looked at piece by piece, and goes on until its looks
leave no doubt (batch means with Student's t) or its budget of requests is spent. A run that was cut short can be gone
on with. What a run has shown is shared by all questions of a plan: a fleet that misses rules out all with fewer
of its replicas.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.fleet import Fleet, Serving
from crosstie.core.workload import RequestClass, Target, Workload
from crosstie.decide.plan.answer import PoolPlan
from crosstie.decide.plan.candidates import Key, key_of
from crosstie.decide.plan.capacity import Tier
from crosstie.decide.plan.pools import class_of, pool_of, routes_of
from crosstie.decide.plan.programme import Mask
from crosstie.decide.plan.reuse import encoding_tokens, hit_rate
from crosstie.decide.plan.run_result import MAY_BE_UNSERVED, PARKED_S, SimulatedClass
from crosstie.decide.plan.scaling import Reading
from crosstie.decide.plan.survey import Column
from crosstie.perf.hardware import Array
from crosstie.route.build import Tables
from crosstie.sim.fleet import FleetSimulator, SimulatedAnswer, SimulatedRequest

# Budgets of requests: of a run that compares fleets, and of one that confirms the answer.
SHORT, LONG = 8_000, 60_000
# A look lasts for so many times as long as a request is there, so that looks know little of one another (choice), for
# as long as a gateway is patient, since who is turned away shows no sooner, and has at least so many requests; the
# first one, in which the fleet fills, does not count.
_LIFETIMES, _PATIENCE_S, _LEAST_REQUESTS = 2.0, Serving().queue_s, 200
# Traffic is drawn for so many looks at once, with as many of every length as there are on average.
_LOOKS_DRAWN = 8
# Looks before a fleet may be said to hold, in a short run and in a long one, which lasts for twenty lifetimes (choice:
# by then a fleet at the edge is over it); and misses over those allowed that no later look makes good.
_LEAST_LOOKS, _LONG_LOOKS, HOPELESS = 3, 10, 2.0
# Student's t at 97.5%, by degrees of freedom from 1 on (any table); beyond it is about 2.1.
_STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
_STUDENT_BEYOND = 2.1
# Requests after which it is asked again whether the look is lost already.
_LOOKED_AFTER = 50
# Standard deviations beyond which a difference is not taken for chance.
_BEYOND_CHANCE = 3.0
# Of larger fleets a part is simulated with its part of the traffic: by then replicas have pooled what they can.
_MOST_REPLICAS = 24.0
# Fewer of a pool are never simulated (choice): one of two has a queue that the other would have relieved, and misses
# where both hold.
_LEAST_POOLED = 4.0
# The seed of all runs, so that fleets are compared under the same arrivals.
SEED = 57
# Misses over those allowed up to which a class holds.
HOLDS = 1.0

# Which replicas under which promise; the same with how much slower than estimated they are, and their numbers.
PoolKey = tuple[Key, Tier]
RunKey = frozenset[tuple[tuple[PoolKey | None, float], int]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a fleet holds, as far as its run went, and its classes as they were served."""

    holds: bool
    # By class: misses over those allowed.
    levels: dict[str, float]
    classes: list[SimulatedClass]
    # By pool: of the requests that it was planned for, the share that miss, wherever they were sent.
    missing: dict[str, float]

    @property
    def worst(self) -> float:
        return max(self.levels.values(), default=0.0)


def _latest_s(request_class: RequestClass) -> float:
    """When its first token is late; without a target it may wait, but not be parked."""
    return float(request_class.ttft.seconds) if request_class.ttft else PARKED_S


def _missed(one: RequestClass, answer: SimulatedAnswer, late: float) -> tuple[bool, bool, bool]:
    """Whether an answer misses TTFT and TPOT, or never came."""
    first = answer.ttft_s * late > _latest_s(one)
    never = answer.pool is None
    later = one.tpot is not None and answer.request.output_tokens > 1 and (never or answer.tpot_s > one.tpot.seconds)
    return first, later, never


def _allowed(request_class: RequestClass, request: SimulatedRequest) -> tuple[float, float, float]:
    """What a request adds to the misses that its class may have. Of a single token there is no TPOT."""
    ttft = 1.0 - request_class.ttft.percentile if request_class.ttft else MAY_BE_UNSERVED
    tpot = (1.0 - request_class.tpot.percentile if request_class.tpot else 1.0) if request.output_tokens > 1 else 0.0
    return ttft, tpot, MAY_BE_UNSERVED


class Misses:
    """Answers of each class, with its misses and those allowed, look by look."""

    def __init__(self, classes: Sequence[RequestClass], late: float = 1.0):
        """`late`: a factor on TTFT."""
        self.answers: dict[str, list[SimulatedAnswer]] = {request_class.name: [] for request_class in classes}
        # By look, class and kind of miss.
        self.missed: list[list[list[float]]] = []
        self.allowed: list[list[list[float]]] = []
        # Those without a first token that is due already: late, and allowed to be.
        self._overdue = np.zeros((2, len(classes), 3))
        # By class and slice: requests that were answered or are overdue, and those of them that missed.
        self._answered = {one.name: [[0.0, 0.0] for _ in one.slices] for one in classes}
        self.by_slice = self._answered
        self._longest = {
            request_class.name: [piece.longest_input for piece in request_class.slices[:-1]]
            for request_class in classes
        }
        self._classes = {request_class.name: (place, request_class) for place, request_class in enumerate(classes)}
        self._late = late

    def begin_look(self) -> None:
        for counts in (self.missed, self.allowed):
            counts.append([[0.0, 0.0, 0.0] for _ in self._classes])

    def end_look(self, waiting: Iterable[SimulatedRequest], now: float) -> None:
        """`waiting`: who has no first token by now. A promise that is broken is so before it is answered."""
        self._overdue[:] = 0.0
        self.by_slice = {name: [list(pair) for pair in pairs] for name, pairs in self._answered.items()}
        for request in waiting:
            place, request_class = self._classes[str(request.class_name)]
            if (now - request.arrival_s) * self._late > _latest_s(request_class):
                self._overdue[0, place, 0] += 1.0
                self._overdue[1, place] += _allowed(request_class, request)
                counts = self.by_slice[request_class.name][self._slice(request)]
                counts[0] += 1.0
                counts[1] += 1.0

    def _sums(self) -> tuple[Array, Array]:
        """Misses, and those allowed."""
        return np.sum(self.missed, axis=0) + self._overdue[0], np.sum(self.allowed, axis=0) + self._overdue[1]

    def is_lost(self, sent: Array) -> bool:
        """Whether more have missed than `sent` would make hopeless, were all the rest of them answered in time."""
        missed, allowed = self._sums()
        return bool(_hopeless(missed, np.maximum(sent, allowed)).any())

    def allowed_of(self, requests: Sequence[SimulatedRequest]) -> Array:
        found = np.zeros((len(self._classes), 3))
        for request in requests:
            place, request_class = self._classes[str(request.class_name)]
            found[place] += _allowed(request_class, request)
        return found

    def add(self, answer: SimulatedAnswer) -> None:
        name = str(answer.request.class_name)
        place, request_class = self._classes[name]
        self.answers[name].append(answer)
        missed = _missed(request_class, answer, self._late)
        allowed = _allowed(request_class, answer.request)
        now_missed, now_allowed = self.missed[-1][place], self.allowed[-1][place]
        for kind in range(3):
            now_missed[kind] += missed[kind]
            now_allowed[kind] += allowed[kind]
        counts = self._answered[name][self._slice(answer.request)]
        counts[0] += 1.0
        counts[1] += any(missed)

    def _slice(self, request: SimulatedRequest) -> int:
        return bisect_left(self._longest[str(request.class_name)], request.input_tokens)

    def levels(self) -> dict[str, float]:
        """By class: requests that miss a target, or are turned away, over those that may. Above 1 the class misses its
        percentiles, and `seen` says so, too."""
        worst = _over(*self._sums()).max(axis=1)
        # Two of twenty are one in ten, which 1 - 0.9 of twenty is not to the last bit.
        return dict(zip(self._classes, np.round(worst, 9).tolist(), strict=True))

    def _bounds(self, seen_only: bool) -> tuple[Array, Array]:
        """By class and kind of miss, the least and the most that the level may be. `seen_only`: by how looks differ
        and by misses that were seen, however few those requests are."""
        looks, (total, allowed) = len(self.missed), self._sums()
        level = _over(total, allowed)
        each = _over(np.array(self.missed), np.array(self.allowed))
        spread = each.std(axis=0, ddof=1) / looks**0.5
        # Misses are counts: of none in a few requests it does not follow that there are none.
        counted = _over(np.sqrt(total + (0.0 if seen_only else 1.0)), allowed)
        student = _STUDENT[looks - 2] if looks - 2 < len(_STUDENT) else _STUDENT_BEYOND
        error = student * np.maximum(spread, counted)
        return level - error, level + error

    def verdict(self, *, at_end: bool = False) -> Array:
        """By class: 1 where it holds in another run, too, as far as its looks show, -1 where it does not, 0 where they
        leave a doubt."""
        misses = _hopeless(*self._sums()).any(axis=1)
        if len(self.missed) < _LEAST_LOOKS:
            return np.where(misses, -1, 0)
        least, most = self._bounds(at_end)
        misses |= (least > HOLDS).any(axis=1)
        return np.where(misses, -1, np.where((most <= HOLDS).all(axis=1), 1, 0))


def _hopeless(missed: Array, allowed: Array) -> Mask:
    """So many more than allowed, beyond the chance of counts, that no later look makes it good."""
    return np.asarray((missed > HOPELESS * allowed) & (missed > allowed + _BEYOND_CHANCE * np.sqrt(allowed)))


def _over(count: Array, allowed: Array) -> Array:
    """Nothing where there is none of either."""
    return np.divide(count, allowed, out=np.where(count > 0.0, inf, 0.0), where=allowed > 0.0)


def piles_up(inside: Sequence[int]) -> bool:
    """Whether more requests are inside in the second half of the looks than in the first, beyond chance. `inside`: at
    the end of each look."""
    half = len(inside) // 2
    if half < 2:
        return False
    before, after = np.array(inside[:half], float), np.array(inside[-half:], float)
    # Where steps take longer the more are inside, their number varies by more than arrivals do.
    spread = max(before.var(ddof=1) + after.var(ddof=1), 2.0 * float(before.mean()), 2.0)
    return bool(after.mean() - before.mean() > _BEYOND_CHANCE * (spread / half) ** 0.5)


class FleetRun:
    """One fleet under its traffic. It can be gone on with."""

    def __init__(self, trials: "Trials", pools: Sequence[PoolPlan], seed: int):
        rates = {one.name: one.requests_per_s * trials.peak * trials.more(pools) for one in trials.classes}
        self._scale = 1.0 if trials.whole else _scale(pools)
        self._look_of = ceil(max(_look_requests(pools) / self._scale, _LEAST_REQUESTS))
        self._pools = pools
        self._traffic, self._simulator = trials.begun(pools, rates, self._look_of * _LOOKS_DRAWN, self._scale, seed)
        self._classes, self._late, self._seed = trials.classes, trials.late(pools), seed
        self._tally = Misses(trials.classes, self._late)
        self._inside: list[int] = []
        self._verdicts = np.zeros(len(trials.classes))
        self._drawn: list[SimulatedRequest] = []
        self.sent = self._budget = 0
        self._allowed = np.zeros((len(trials.classes), 3))
        self.verdict = Verdict(False, {}, [], {})

    def go_on(self, budget: int) -> Verdict:
        """Until its looks leave no doubt, or so many requests are sent."""
        if budget <= self._budget or (self._budget and (self._verdicts < 0).any()):
            return self.verdict
        self._budget = budget
        least = _LEAST_LOOKS if budget < LONG else _LONG_LOOKS
        most = max(budget, (least + 1) * self._look_of)
        while not self._is_decided and self.sent + self._look_of <= most:
            self._look()
        self.verdict = self._as_seen(budget)
        return self.verdict

    def _as_seen(self, budget: int) -> Verdict:
        levels = self._tally.levels()
        verdicts, grows = self._tally.verdict(at_end=True), piles_up(self._inside)
        if budget < LONG:
            # Where a short run leaves a doubt, the likelier of both; it may still be filling the fleet.
            verdicts = np.where(verdicts == 0, np.where(np.array(list(levels.values())) <= HOLDS, 1, -1), verdicts)
            grows = False
        classes = [
            replace(
                seen(request_class, self._tally.answers[request_class.name], self._late),
                steady=bool(verdict > 0 and not grows),
                decided=self._is_decided,
            )
            for request_class, verdict in zip(self._classes, verdicts, strict=True)
        ]
        missing = {pool.name: _blamed(pool, self._tally.by_slice) for pool in self._pools}
        return Verdict(all(simulated_class.holds for simulated_class in classes), levels, classes, missing)

    @property
    def _is_decided(self) -> bool:
        misses, holds = bool((self._verdicts < 0).any()), bool((self._verdicts > 0).all())
        long_enough = self._budget < LONG or len(self._inside) >= _LONG_LOOKS
        return misses or (holds and long_enough and not piles_up(self._inside))

    def _look(self) -> None:
        if not self._drawn:
            self._drawn = self._traffic(self._seed + self.sent // self._look_of, self._simulator.now)
        now, self._drawn = self._drawn[: self._look_of], self._drawn[self._look_of :]
        self._simulator.tell = _ignore
        if self.sent:
            self._tally.begin_look()
            self._simulator.tell = self._tally.add
        sent = self._allowed + self._tally.allowed_of(now) if self.sent else self._allowed
        for number, request in enumerate(now):
            self._simulator.advance(request.arrival_s)
            self._simulator.send(request)
            if self.sent and number % _LOOKED_AFTER == 0 and self._tally.is_lost(sent):
                break
        self._allowed = sent
        self.sent += len(now)
        if self._tally.missed:
            self._tally.end_look(self._simulator.without_first_token, self._simulator.now)
            self._inside.append(self._simulator.inside)
            self._verdicts = self._tally.verdict()


def _ignore(answer: SimulatedAnswer) -> None:
    """Answers while the fleet fills."""


def _look_requests(pools: Sequence[PoolPlan]) -> float:
    """Requests of a look: of some lifetimes, so many being there at once on average, or while a gateway is patient."""
    inside = sum(pool.in_flight * min(pool.utilisation, 1.0) * pool.replicas for pool in pools)
    per_s = sum(carried.requests_per_s for pool in pools for carried in pool.carried)
    return max(_LIFETIMES * inside, _PATIENCE_S * per_s)


def _blamed(pool: PoolPlan, by_slice: Mapping[str, list[list[float]]]) -> float:
    """Of the requests that a pool was planned for, the share that miss: the router sends them where there is room, and
    who helps out is not to blame."""
    count = missed = 0.0
    for carried in pool.carried:
        request_class = carried.part.request_class
        place = next(i for i, piece in enumerate(request_class.slices) if piece is carried.part.slice)
        of_slice = by_slice[request_class.name][place]
        count, missed = count + carried.share * of_slice[0], missed + carried.share * of_slice[1]
    return missed / count if count else 0.0


class Trials:
    """Simulates fleets of one model's pools. `runs`: those of all questions of a plan, which share them. `whole`: large
    fleets, too, with all of their replicas."""

    def __init__(
        self, catalog: Catalog, workload: Workload, model: str, scaling: Reading, peak: float,
        runs: dict[RunKey, FleetRun] | None = None, *, whole: bool = False,
    ):  # fmt: skip
        self.whole = whole
        self.catalog, self.workload, self.scaling, self.peak = catalog, workload, scaling, peak
        self.model = model
        self.classes = [request_class for request_class in workload.classes if request_class.model == model]
        self.runs: dict[RunKey, FleetRun] = {} if runs is None else runs
        self._tables = Tables()

    def verdict(self, pools: Sequence[PoolPlan], budget: int = SHORT, seed: int = SEED) -> Verdict:
        mine = self._carrying(pools)
        key = self._key(mine, seed)
        if key not in self.runs:
            self.runs[key] = FleetRun(self, mine, seed)
        return self.runs[key].go_on(budget)

    def is_ruled_out(self, pools: Sequence[PoolPlan], seed: int = SEED) -> bool:
        """Whether a fleet that has no fewer of any of its replicas was seen to miss."""
        mine = dict(self._key(self._carrying(pools), seed))
        return any(
            not run.verdict.holds and all(dict(key).get(pool, 0) >= number for pool, number in mine.items())
            for key, run in self.runs.items()
        )

    def _carrying(self, pools: Sequence[PoolPlan]) -> list[PoolPlan]:
        """Of a fleet the pools of this model that carry anything."""
        return [pool for pool in pools if pool.deployment.model.id == self.model and pool.carried and pool.replicas]

    def _key(self, pools: Sequence[PoolPlan], seed: int) -> RunKey:
        slower = self.scaling([pool.deployment for pool in pools]).tpot
        replicas: dict[tuple[PoolKey | None, float], int] = {(None, float(seed)): 1}
        for pool, factor in zip(pools, slower, strict=True):
            replicas[pool_key(pool), round(float(factor), 6)] = pool.replicas
        return frozenset(replicas.items())

    def late(self, pools: Sequence[PoolPlan]) -> float:
        """On simulated TTFT, beyond what slower steps make of it, as estimates are scaled."""
        scale = self.scaling([pool.deployment for pool in pools])
        return max(float((scale.ttft / scale.tpot).max()), 1.0)

    def more(self, pools: Sequence[PoolPlan]) -> float:
        """Traffic that stands for what replicas take less than slower steps alone would make of them."""
        scale = self.scaling([pool.deployment for pool in pools])
        usd = np.array([pool.usd_per_hour for pool in pools])
        return max(float((usd / (scale.rate * scale.tpot)).sum() / usd.sum()), 1.0)

    def begun(
        self, pools: Sequence[PoolPlan], rates: Mapping[str, float], count: int, scale: float, seed: int
    ) -> tuple[Callable[[int, float], list[SimulatedRequest]], FleetSimulator]:
        """What gives so many requests by a seed from a moment on, and the fleet that they are for: that many times
        smaller, with its part of the traffic."""
        few = [replace(pool, replicas=max(round(pool.replicas / scale), 1)) for pool in pools]
        worth = [pool.usd_per_hour / pool.replicas for pool in pools]
        part = sum(w * pool.replicas for w, pool in zip(worth, few, strict=True)) / sum(
            w * pool.replicas for w, pool in zip(worth, pools, strict=True)
        )
        fewer = {name: rate * part for name, rate in rates.items()}
        found, encoding = self._found(few, fewer), self._encoding(few)

        def traffic(seed: int, since: float) -> list[SimulatedRequest]:
            return list(self._traffic(fewer, count, seed, found, encoding, since))

        simulator = FleetSimulator(self.catalog, self._fleet(few), None, seed, prefixes=False, tables=self._tables)
        slower = self.scaling([pool.deployment for pool in few]).tpot
        for pool, live, factor in zip(few, simulator.live.pools, slower, strict=True):
            # A gateway that has run for longer than this knows it.
            live.start_at(float(factor), 0.0)
            for number in range(pool.replicas):
                simulator.engines[_address(pool, number)].slower = float(factor)
        return traffic, simulator

    def _fleet(self, pools: Sequence[PoolPlan]) -> Fleet:
        made = [
            msgspec.structs.replace(
                pool_of(pool), backends=tuple(_address(pool, number) for number in range(pool.replicas))
            )
            for pool in pools
        ]
        # A gateway that has run for longer than this knows how late first tokens are: it promises that much less.
        late = self.late(pools)
        classes = tuple(
            msgspec.structs.replace(
                class_of(request_class, routes_of(request_class, pools)), ttft=_sooner(request_class.ttft, late)
            )
            for request_class in self.classes
        )
        name: str = self.workload.name
        return Fleet(name=name, planned="", policy="cheapest-meeting-target", pools=tuple(made), classes=classes)

    def _found(self, pools: Sequence[PoolPlan], rates: Mapping[str, float]) -> list[float]:
        """By slice: of what endless memory would have of its prompts, the share that these replicas have."""
        parts = [(request_class, piece) for request_class in self.classes for piece in request_class.slices]
        if all(piece.hits is None for _, piece in parts):
            return [1.0] * len(parts)
        tokens_per_s = sum(rates[one.name] * p.share * (p.input_tokens + p.output_tokens) for one, p in parts)
        usd = sum(pool.usd_per_hour for pool in pools)
        found = []
        for _, piece in parts:
            # Pools take of the traffic about what they cost.
            each = [
                hit_rate(pool.deployment, piece, tokens_per_s * pool.usd_per_hour / usd / pool.replicas)
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
            for request_class in self.classes
            for piece in request_class.slices
        ]

    def _traffic(
        self, rates: Mapping[str, float], count: int, seed: int, found: Sequence[float], encoding: Sequence[int],
        since: float = 0.0,
    ) -> Iterator[SimulatedRequest]:  # fmt: skip
        """Arrivals at random moments, with as many of every slice and length as there are on average: what differs from
        seed to seed is when they meet, not how much work there is."""
        chance = np.random.default_rng(seed)
        parts = [(request_class, piece) for request_class in self.classes for piece in request_class.slices]
        weight = np.array([rates[request_class.name] * piece.share for request_class, piece in parts])
        times = since + np.sort(chance.random(count)) * count / weight.sum()
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


def _scale(pools: Sequence[PoolPlan]) -> float:
    """By how much a fleet is made smaller, so that a short run has its looks; as far as its smallest pool allows.

    What fewer replicas hold with their part of the traffic, more of them do: they share what comes unevenly.
    """
    looks = (_LEAST_LOOKS + 1) * _look_requests(pools) / SHORT
    replicas = [pool.replicas for pool in pools]
    return max(min(max(looks, sum(replicas) / _MOST_REPLICAS), min(replicas) / _LEAST_POOLED), 1.0)


def _sooner(target: Target | None, late: float) -> Target | None:
    return target and msgspec.structs.replace(target, seconds=target.seconds / late)


def pool_key(pool: PoolPlan | Column) -> PoolKey:
    return key_of(pool.deployment), pool.tier


def _address(pool: PoolPlan, number: int) -> str:
    return f"http://{pool.name}-{number}"


def seen(one: RequestClass, answers: Sequence[SimulatedAnswer], factor: float = 1.0) -> SimulatedClass:
    """A class as its answers were; TTFT with this factor."""
    first = np.array([answer.ttft_s * factor for answer in answers])
    later = np.array([inf if a.pool is None else a.tpot_s for a in answers if a.request.output_tokens > 1])

    def at(values: Array, target: Target | None) -> tuple[float | None, float | None]:
        if target is None or not len(values):
            return None, None
        # The least that so many keep, as misses are counted: with one in ten allowed, the ninth of ten.
        place = max(ceil(target.percentile * len(values) - 1e-9) - 1, 0)
        return float(np.sort(values)[place]), float((values <= target.seconds).mean())

    ttft_s, keeps_ttft = at(first, one.ttft)
    tpot_s, keeps_tpot = at(later, one.tpot)
    refused = sum(answer.pool is None for answer in answers) / max(len(answers), 1)
    parked = float((first > PARKED_S).mean()) if len(first) and one.ttft is None else 0.0
    return SimulatedClass(
        name=one.name, requests=len(answers), ttft_s=ttft_s, tpot_s=tpot_s, ttft=one.ttft, tpot=one.tpot,
        keeps_ttft=keeps_ttft, keeps_tpot=keeps_tpot, refused=refused, parked=parked,
    )  # fmt: skip
