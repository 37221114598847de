"""What a fleet may turn out to cost: the same pools, with the replicas that they would need if estimates are wrong.

Errors are drawn from the intervals that calibration gives: one draw a deployment, which makes all its times
longer or shorter together, and independent between deployments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.decide.plan.candidates import key_of
from crosstie.decide.plan.capacity import EstimateScale, Levels
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.programme import Solution
from crosstie.decide.plan.survey import Column, Survey, rates_of
from crosstie.perf.hardware import Array

# Deviations at which loads are computed; between them they are interpolated.
_DEVIATIONS = np.linspace(-2.4, 2.4, 7)
_DRAWS = 2000
# A pool that would need more than so many times its replicas does not keep its targets: others would be chosen.
_MOST = 4.0


@dataclass(frozen=True, slots=True)
class Uncertainty:
    """The 80% interval of the cost; and the share of cases in which the pools cannot keep the targets."""

    low_usd_per_hour: float | None
    high_usd_per_hour: float | None
    unmet: float
    # How often the replicas of the plan are enough as they are.
    enough: float


def uncertainty(surveyed: Sequence[Survey], asked: Choice, answer: Solution) -> Uncertainty | None:
    used = np.flatnonzero(answer.replicas)
    columns = [asked.offers.columns[i] for i in used]
    if not any(column.deployment.correction.spread for column in columns):
        return None
    chance = np.random.default_rng(1)
    drawn = {key_of(column.deployment): chance.standard_normal(_DRAWS) for column in columns}
    gpus = np.zeros((_DRAWS, len(asked.problem.usd_per_hour)))
    hopeless = np.zeros(_DRAWS, bool)
    enough = np.ones(_DRAWS, bool)
    for place, column in zip(used, columns, strict=True):
        replicas = int(answer.replicas[place])
        carried = answer.share[place] * asked.problem.demand
        able = np.interp(drawn[key_of(column.deployment)], _DEVIATIONS, _ability(surveyed, column, carried, asked.peak))
        hopeless |= able * _MOST * replicas < 1.0
        enough &= able * replicas >= 1.0 - 1e-6
        needed = np.ceil(np.minimum(1.0 / np.maximum(able, 1e-9), _MOST * replicas) - 1e-6)
        gpus[:, asked.problem.accelerator[place]] += needed * asked.problem.gpus[place]
    kept = asked.problem.spent_usd_per_hour(gpus).sum(axis=1)[~hopeless]
    low, high = np.quantile(kept, (0.1, 0.9)).tolist() if len(kept) else (None, None)
    return Uncertainty(low, high, unmet=float(hopeless.mean()), enough=float(enough.mean()))


def _ability(surveyed: Sequence[Survey], column: Column, carried: Array, peak: float) -> Array:
    """By deviation: the share of what the plan gives a column that one replica carries."""
    key = key_of(column.deployment)
    one, row = next((s, i) for s in surveyed for i, d in enumerate(s.deployments) if key_of(d) == key)
    # The deployment once for each deviation.
    several = one.rows([row] * len(_DEVIATIONS))
    scale = EstimateScale.at(several.deployments, _DEVIATIONS)
    levels = Levels(several.parts, several.curves, scale)
    mine = [part for part in several.parts if carried[part.index]]
    rates = rates_of(several, levels, column, peak)
    load = np.zeros(len(_DEVIATIONS))
    for part in mine:
        rate = rates[part.index]
        load += np.divide(carried[part.index], rate, out=np.full_like(rate, np.inf), where=rate > 0)
    return np.asarray(1.0 / np.maximum(load, 1e-9))
