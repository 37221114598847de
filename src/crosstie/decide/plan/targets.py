"""What targets cost: each moved by a quarter and a half both ways, the price beside it, and the knee named.

By closed forms with the capacities as simulation has corrected them, of the accelerators of the fleets known by then.
A fleet that keeps a stricter target keeps the looser one, so a looser one never costs more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from crosstie.core.workload import RequestClass, Target
from crosstie.decide.plan.infeasible import alone_s, with_class
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.programme import Solution
from crosstie.decide.plan.run_result import SimulatedClass
from crosstie.decide.plan.scaling import Reading
from crosstie.decide.plan.solver import MANY_PARTS, solve
from crosstie.decide.plan.survey import Offers, Survey, offers, offers_of_each

FACTORS = (0.5, 0.75, 1.0, 1.25, 1.5)
_MOVES = tuple(factor for factor in FACTORS if factor != 1.0)
# Of many classes, those that the fleet is mostly for.
_MOST_CLASSES = 6
# A step that makes the fleet dearer by more than this share is a knee; and a target within this of what a request sees
# by itself is at the floor.
_KNEE = 0.3
_AT_FLOOR = 1.1
_SAME_PRICE = 1.001


@dataclass(frozen=True, slots=True)
class TargetStep:
    """The target so many times as long, and what the fleet then costs; None: no fleet keeps it."""

    factor: float
    seconds: float
    usd_per_hour: float | None
    # That price is what closed forms say, and the answer, which costs no less, misses the target when simulated.
    at_least: bool = False


@dataclass(frozen=True, slots=True)
class TargetPrice:
    class_name: str
    # "ttft" or "tpot".
    metric: str
    percentile: float
    seconds: float
    # From the strictest to the loosest; the target itself is among them.
    steps: list[TargetStep]
    # What a request at the percentile sees by itself on the fastest replica that may be used.
    floor_s: float
    # The target below which the next step is far dearer, or kept by no fleet; None: the price has no knee here.
    knee_s: float | None

    @property
    def at_floor(self) -> bool:
        return self.seconds <= _AT_FLOOR * self.floor_s


def target_prices(
    surveyed: Sequence[Survey], asked: Choice, answer: Solution, scaling: Reading, simulated: Sequence[SimulatedClass]
) -> list[TargetPrice]:
    """`surveyed`: of the accelerators of the fleets known by then. `simulated`: the answer's classes. None of workloads
    with many kinds of requests: nobody waits for all."""
    if len(asked.offers.parts) > MANY_PARTS:
        return []
    now = _least(offers(surveyed, scaling, peak=asked.peak), asked)
    if not np.isfinite(now):
        return []
    # Closed forms say how prices change; the answer says what they are.
    times = answer.usd_per_hour / now
    classes = {id(part.request_class): part.request_class for part in asked.offers.parts}
    by_traffic = sorted(classes.values(), key=lambda one: -one.requests_per_s * (one.input_tokens + one.output_tokens))
    every = [
        (kind, metric, target, _survey_of(surveyed, kind))
        for kind in by_traffic[:_MOST_CLASSES]
        for metric, target in (("ttft", kind.ttft), ("tpot", kind.tpot))
        if target is not None
    ]
    moved = [
        with_class(one, kind, _moved(kind, metric, target, f)) for kind, metric, target, one in every for f in _MOVES
    ]
    offered = iter(offers_of_each(surveyed, moved, scaling, peak=asked.peak))
    prices = [
        _price(survey, [next(offered) for _ in _MOVES], asked, scaling, kind, metric, target, now, times)
        for kind, metric, target, survey in every
    ]
    return [_as_simulated(price, simulated, answer.usd_per_hour) for price in prices]


def _as_simulated(price: TargetPrice, simulated: Sequence[SimulatedClass], usd_per_hour: float) -> TargetPrice:
    """Closed forms count TTFT with mean queues, so they may say that a stricter one costs nothing."""
    one = next((one for one in simulated if one.name == price.class_name), None)
    seen_s = None if one is None else one.ttft_s if price.metric == "ttft" else one.tpot_s
    if seen_s is None:
        return price
    steps = [
        replace(step, at_least=step.usd_per_hour <= usd_per_hour * _SAME_PRICE and step.seconds < seen_s)
        if step.usd_per_hour is not None and step.factor < 1.0
        else step
        for step in price.steps
    ]
    return replace(price, steps=steps)


def _survey_of(surveyed: Sequence[Survey], kind: RequestClass) -> Survey:
    return next(survey for survey in surveyed if any(part.request_class is kind for part in survey.parts))


def _moved(kind: RequestClass, metric: str, target: Target, factor: float) -> RequestClass:
    return msgspec.structs.replace(kind, **{metric: msgspec.structs.replace(target, seconds=target.seconds * factor)})


def _price(
    survey: Survey, moved: Sequence[Offers], asked: Choice, scaling: Reading, kind: RequestClass, metric: str,
    target: Target, now: float, times: float,
) -> TargetPrice:  # fmt: skip
    strictest, strict, loose, loosest = moved
    least, most = _least(loosest, asked), _least(strictest, asked)
    # Between two targets of one price there is no other.
    less = now if least >= now else _least(loose, asked)
    more = now if most <= now else _least(strict, asked)
    costs = [most, more, now, less, least]
    # From the strictest on, none is dearer than the one before; and the target's own price is what it is.
    place = FACTORS.index(1.0)
    kept = np.minimum.accumulate(costs)
    kept[:place] = np.maximum(kept[:place], now)
    kept[place:] = np.minimum(kept[place:], now)
    steps = [
        TargetStep(factor, target.seconds * factor, float(usd * times) if np.isfinite(usd) else None)
        for factor, usd in zip(FACTORS, kept, strict=True)
    ]
    floor_s = alone_s(survey, kind, scaling(survey.deployments))[metric][0]
    knee = next(
        (steps[k].seconds for k in range(len(steps) - 1, 0, -1) if kept[k - 1] > kept[k] * (1.0 + _KNEE)), None
    )  # fmt: skip
    return TargetPrice(kind.name, metric, target.percentile, target.seconds, steps, floor_s, knee)


def _least(offered: Offers, asked: Choice) -> float:
    """Infinite where no fleet will do."""
    solution = solve(asked.by(offered).problem, quickly=True)
    return np.inf if solution is None else solution.usd_per_hour
