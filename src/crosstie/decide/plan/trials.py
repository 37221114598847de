"""Fleets of one model under the traffic of its classes, behind the gateway's own policy: how many requests miss.

A run ends when all that it measures has been answered, or as soon as enough of that has missed for the verdict to be
certain; nothing that comes later can change either.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, inf

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.fleet import Fleet
from crosstie.core.workload import RequestClass, Target, Workload
from crosstie.decide.plan.answer import PoolPlan
from crosstie.decide.plan.candidates import Key, key_of
from crosstie.decide.plan.capacity import Tier
from crosstie.decide.plan.pools import class_of, pool_of, routes_of
from crosstie.decide.plan.reuse import encoding_tokens, hit_rate
from crosstie.decide.plan.scaling import Reading
from crosstie.decide.plan.simulated import MAY_BE_UNSERVED, PARKED_S, SimulatedClass
from crosstie.perf.hardware import Array
from crosstie.route.build import Tables
from crosstie.sim.fleet import FleetSimulator, SimulatedAnswer, SimulatedRequest

# Simulations of one model's pools, and for each of its classes more; requests of each: at least, at most, and of the
# class that has fewest.
_SIMULATIONS, _FOR_A_CLASS, _MANY_CLASSES = 8, 1, 4
_REQUESTS, _MOST_REQUESTS, _OF_A_CLASS = 1600, 4000, 150
# A run lasts so many times as long as a request is there; its first part fills the fleet, its last part empties it.
_LIFETIMES = 4.0
_FILLED, _EMPTYING = 0.3, 0.9
# Of larger fleets a part is simulated with its part of the traffic: by then replicas have pooled what they can.
_MOST_REPLICAS = 24.0
# A confirmation lasts so many times as long as a run (choice: 20 times as long as a request, by when a fleet at the
# edge is over it), and goes on while its looks leave a doubt, with at most so many requests of the whole fleet; in so
# many looks each time. It ends early after this many looks that each had at most that share of the misses allowed, or
# with so many times as many. Requests pile up where so many times as many are inside as at the first looks.
_TIMES_AS_LONG, _LONG, _LOOKS, _LEAST_LOOKS = 5.0, 60_000, 6, 3
_AT_EASE, _HOPELESS = 0.3, 1.5
_PILED, _FEW_INSIDE = 1.5, 20
# Standard errors of the mean look by which a class must be below what it may miss.
_ERRORS = 2.0
# The seed by which fleets are found: of usual burstiness (benchmarks/typical_seeds.py).
_SEED = 57
# Misses over those allowed up to which a fleet holds; the seed is burstier than the usual one, which is the margin for
# other traffic. A run that asks how far a fleet is from that goes on until it has this many of them.
HOLDS = 1.0
FAR = 2.0

# Which replicas under which promise; pools with their replicas; and of a class the misses over those allowed.
PoolKey = tuple[Key, Tier]
FleetKey = tuple[tuple[PoolKey, int], ...]
Levels = dict[str, float]


class _Tally:
    """The answers that are measured, by class, and how many of each class missed so far."""

    def __init__(self, classes: Sequence[RequestClass], measured: Sequence[SimulatedRequest], late: float, most: float):
        """`late`: a factor on TTFT. `most`: misses over those allowed beyond which the verdict is certain."""
        self.found: dict[str, list[SimulatedAnswer]] = {one.name: [] for one in classes}
        self.left = len(measured)
        self.certain = False
        self._since, self._until = measured[0].arrival_s, measured[-1].arrival_s
        self._classes, self._late = {one.name: one for one in classes}, late
        self._misses = {one.name: [0, 0, 0] for one in classes}
        sent: dict[str, list[SimulatedRequest]] = {one.name: [] for one in classes}
        for request in measured:
            sent[str(request.class_name)].append(request)
        self._most = {one.name: [most * allowed for allowed in _allowed(one, sent[one.name])] for one in classes}

    def add(self, answer: SimulatedAnswer) -> None:
        request = answer.request
        if not self._since <= request.arrival_s <= self._until:
            return
        name = str(request.class_name)
        self.left -= 1
        self.found[name].append(answer)
        misses, most = self._misses[name], self._most[name]
        for k, missed in enumerate(_missed(self._classes[name], answer, self._late)):
            if missed:
                misses[k] += 1
                self.certain = self.certain or misses[k] > most[k] + 1e-9


def _missed(one: RequestClass, answer: SimulatedAnswer, late: float) -> tuple[bool, bool, bool]:
    """Whether an answer misses TTFT and TPOT, or never came; without a target of TTFT it may wait, but not be
    parked."""
    first = answer.ttft_s * late > one.ttft.seconds if one.ttft else answer.ttft_s > PARKED_S
    never = answer.pool is None
    later = one.tpot is not None and answer.request.output_tokens > 1 and (never or answer.tpot_s > one.tpot.seconds)
    return first, later, never


def _allowed(one: RequestClass, requests: Sequence[SimulatedRequest]) -> tuple[float, float, float]:
    """Of how many of its requests that may be so. Of a single token there is no TPOT."""
    ttft = 1.0 - one.ttft.percentile if one.ttft else MAY_BE_UNSERVED
    tpot = 1.0 - one.tpot.percentile if one.tpot else 1.0
    several = sum(request.output_tokens > 1 for request in requests)
    return ttft * len(requests), tpot * several, MAY_BE_UNSERVED * len(requests)


def level(one: RequestClass, answers: Sequence[SimulatedAnswer], late: float = 1.0) -> float:
    """Requests that miss a target, or are turned away, over those that may: above 1 the class misses its percentiles,
    and `seen` says so, too.

    `late`: on simulated TTFT. Those turned away miss every target.
    """
    if not answers:
        return 0.0
    allowed = _allowed(one, [answer.request for answer in answers])
    missed = np.array([_missed(one, answer, late) for answer in answers]).sum(axis=0)
    over = (float(count) / most for count, most in zip(missed, allowed, strict=True) if count)
    # Two of twenty are one in ten, which 1 - 0.9 of twenty is not to the last bit.
    return round(max(over, default=0.0), 9)


class Trials:
    """Simulates the pools of one model, no more often than it may."""

    def __init__(self, catalog: Catalog, workload: Workload, model: str, scaling: Reading, peak: float):
        self.catalog, self.workload, self.scaling, self.peak = catalog, workload, scaling, peak
        self.classes = [one for one in workload.classes if one.model == model]
        self.left = _SIMULATIONS + _FOR_A_CLASS * min(len(self.classes), _MANY_CLASSES)
        self.made = 0
        # By fleet and load.
        self.seen: dict[tuple[FleetKey, float], Levels] = {}
        self._confirmed: dict[tuple[FleetKey, int], list[SimulatedClass]] = {}
        self._tables = Tables()

    def levels(self, pools: Sequence[PoolPlan], load: float = 1.0, most: float = FAR) -> Levels | None:
        """None where there is no more simulation to be had. `most`: as in `run`."""
        key = fleet_key(pools), round(load, 6)
        if key not in self.seen:
            if not self.left:
                return None
            self.left -= 1
            answers, late = self.run(pools, load, _SEED, most), self.late(pools)
            self.seen[key] = {one.name: level(one, answers[one.name], late) for one in self.classes}
        return self.seen[key]

    def holds(self, pools: Sequence[PoolPlan], most: float = HOLDS) -> bool:
        found = self.levels(pools, most=most)
        return found is not None and max(found.values()) <= HOLDS

    def has_missed(self, pools: Sequence[PoolPlan]) -> bool:
        """Whether a class missed at any load that was tried."""
        key = fleet_key(pools)
        return any(max(found.values()) > HOLDS for (fleet, _), found in self.seen.items() if fleet == key)

    def late(self, pools: Sequence[PoolPlan]) -> float:
        """On simulated TTFT, beyond what slower steps make of it, as estimates are scaled."""
        scale = self.scaling([pool.deployment for pool in pools])
        return max(float((scale.ttft / scale.tpot).max()), 1.0)

    def _more(self, pools: Sequence[PoolPlan]) -> float:
        """Traffic that stands for what replicas take less than slower steps alone would make of them."""
        scale = self.scaling([pool.deployment for pool in pools])
        usd = np.array([pool.usd_per_hour for pool in pools])
        return max(float((usd / (scale.rate * scale.tpot)).sum() / usd.sum()), 1.0)

    def run(
        self, pools: Sequence[PoolPlan], load: float, seed: int, most: float = inf
    ) -> dict[str, list[SimulatedAnswer]]:
        """By class: its requests of the time in which the fleet was full; of these, where more than `most` of what a
        class may miss has missed, those that were answered by then."""
        rates = self._rates(pools, load)
        count, scale = self._size(pools, sum(rates.values()))
        traffic, simulator = self._begun(pools, rates, count, scale, seed)
        sent = traffic(seed, 0.0)
        tally = _Tally(self.classes, sent[int(count * _FILLED) : int(count * _EMPTYING) + 1], self.late(pools), most)
        simulator.tell = tally.add
        for request in sent:
            simulator.advance(request.arrival_s)
            simulator.send(request)
            if tally.certain or not tally.left:
                return tally.found
        simulator.advance(inf)
        return tally.found

    def confirm(self, pools: Sequence[PoolPlan], seed: int) -> list[SimulatedClass]:
        """The classes in a long run, from when the fleet was full.

        A short run begins with idle replicas: of a fleet that is overwhelmed slowly it sees only the beginning. This
        one lasts for many times as long as a request does, and goes on while its looks differ too much for a verdict.
        It ends before only where all of them say the same: hardly a miss and no more inside than at first, or far more
        misses than are allowed.
        """
        key = fleet_key(pools), seed
        if key not in self._confirmed:
            self._confirmed[key] = self._in_a_long_run(pools, seed)
        return self._confirmed[key]

    def _in_a_long_run(self, pools: Sequence[PoolPlan], seed: int) -> list[SimulatedClass]:
        rates = self._rates(pools, 1.0)
        scale = _scale(pools, sum(pool.replicas for pool in pools) / _MOST_REPLICAS)
        short, most = self._wanted(pools, sum(rates.values())) / scale, max(_LONG / scale, _REQUESTS)
        count = ceil(min(_TIMES_AS_LONG * short, most))
        traffic, simulator = self._begun(pools, rates, count, scale, seed)
        late, looks = self.late(pools), list[dict[str, list[SimulatedAnswer]]]()
        # By look: the level of the class that misses most, and the requests inside at its end.
        worst, inside, clear = list[float](), list[int](), False
        begin = int(min(short * _FILLED, count / _LOOKS))
        for again in range(max(int(most / count), 1)):
            sent = traffic(seed + again, simulator.now)
            self._answers(simulator, sent[:begin])
            for place in np.array_split(np.arange(begin, count), _LOOKS):
                looks.append(self._answers(simulator, sent[place[0] : place[-1] + 1]))
                worst.append(max(level(one, looks[-1][one.name], late) for one in self.classes))
                inside.append(simulator.inside)
                clear = _is_clear(worst, inside)
                if clear:
                    break
            piles_up = inside[-1] > _PILED * max(inside[:2]) + _FEW_INSIDE
            found = [self._in_looks(one, [look[one.name] for look in looks], late, piles_up) for one in self.classes]
            begin = 0
            if clear or all(one.decided for one in found):
                break
        return found

    def _answers(self, simulator: FleetSimulator, sent: Sequence[SimulatedRequest]) -> dict[str, list[SimulatedAnswer]]:
        """By class: what is answered while these are sent."""
        found: dict[str, list[SimulatedAnswer]] = {one.name: [] for one in self.classes}
        simulator.tell = partial(_keep, found)
        for request in sent:
            simulator.advance(request.arrival_s)
            simulator.send(request)
        return found

    def _in_looks(
        self, one: RequestClass, looks: Sequence[Sequence[SimulatedAnswer]], late: float, piles_up: bool
    ) -> SimulatedClass:
        """A class over all looks: steady if it would hold in another run, too, as far as looks differ."""
        levels = np.array([level(one, look, late) for look in looks if look])
        error = _ERRORS * levels.std(ddof=1) / len(levels) ** 0.5 if len(levels) > 1 else 0.0
        mean = levels.mean() if len(levels) else 0.0
        steady, decided = not piles_up and mean + error <= HOLDS, piles_up or abs(mean - HOLDS) >= error
        found = seen(one, [answer for look in looks for answer in look], late)
        return replace(found, steady=bool(steady), decided=bool(decided))

    def _rates(self, pools: Sequence[PoolPlan], load: float) -> dict[str, float]:
        times = self.peak * load * self._more(pools)
        return {one.name: one.requests_per_s * times for one in self.classes}

    def _begun(
        self, pools: Sequence[PoolPlan], rates: Mapping[str, float], count: int, scale: float, seed: int
    ) -> tuple[Callable[[int, float], list[SimulatedRequest]], FleetSimulator]:
        """What gives so many requests by a seed from a moment on, and the fleet that they are for: that many times
        smaller, with its part of the traffic."""
        self.made += 1
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

    def _size(self, pools: Sequence[PoolPlan], rate: float) -> tuple[int, float]:
        """Requests of a run; and by how much a large fleet is made smaller, with its traffic, to be so many."""
        wanted = self._wanted(pools, rate)
        count = int(min(wanted, _MOST_REQUESTS))
        return count, _scale(pools, wanted / count, sum(pool.replicas for pool in pools) / _MOST_REPLICAS)

    def _wanted(self, pools: Sequence[PoolPlan], rate: float) -> float:
        """Requests of the whole fleet by which each class has some, and the fleet is filled and emptied."""
        stay = [
            (one.requests_per_s, pool.estimate.ttft_s + one.part.slice.output_tokens * pool.estimate.tpot_s)
            for pool in pools
            for one in pool.carried
        ]
        stay_s = sum(r * s for r, s in stay) / max(sum(r for r, _ in stay), 1e-12)
        rarest = min(one.requests_per_s for one in self.classes) / sum(one.requests_per_s for one in self.classes)
        return max(_REQUESTS, _LIFETIMES * stay_s * rate, _OF_A_CLASS / rarest)

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
            for one in self.classes
            for piece in one.slices
        ]

    def _traffic(
        self, rates: Mapping[str, float], count: int, seed: int, found: Sequence[float], encoding: Sequence[int],
        since: float = 0.0,
    ) -> Iterator[SimulatedRequest]:  # fmt: skip
        """Arrivals at random moments, with as many of every slice and length as there are on average: what differs from
        seed to seed is when they meet, not how much work there is."""
        chance = np.random.default_rng(seed)
        parts = [(one, piece) for one in self.classes for piece in one.slices]
        weight = np.array([rates[one.name] * piece.share for one, piece in parts])
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


def _scale(pools: Sequence[PoolPlan], *wanted: float) -> float:
    """By how much a fleet is made smaller, as far as its smallest pool allows."""
    return max(min(max(wanted), min(pool.replicas for pool in pools) / 2.0), 1.0)


def _is_clear(worst: Sequence[float], inside: Sequence[int]) -> bool:
    """Whether all looks say the same: hardly a miss and no more inside than at first, or far too many misses."""
    # As many as chance brings together, and no more.
    grows = inside[-1] > inside[0] + 3.0 * inside[0] ** 0.5
    at_ease = len(worst) >= _LEAST_LOOKS and max(worst) <= _AT_EASE and not grows
    return at_ease or sum(worst) / len(worst) > _HOPELESS


def _keep(into: Mapping[str, list[SimulatedAnswer]], answer: SimulatedAnswer) -> None:
    into[str(answer.request.class_name)].append(answer)


def pool_key(pool: PoolPlan) -> PoolKey:
    return key_of(pool.deployment), pool.tier


def fleet_key(pools: Sequence[PoolPlan]) -> FleetKey:
    return tuple((pool_key(pool), pool.replicas) for pool in pools)


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
