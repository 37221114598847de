"""How sure a fleet is, and what it may turn out to cost: by the worlds (core.worlds) in which its replicas suffice."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.core.worlds import WORLDS
from crosstie.decide.plan.candidates import key_of
from crosstie.decide.plan.capacity import Levels
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.programme import Indices, Solution
from crosstie.decide.plan.scaling import WorldScaling
from crosstie.decide.plan.survey import Column, Survey, rates_of
from crosstie.perf.hardware import Array

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


class JointErrors:
    """What fleets of one question would need, world by world; what a column can do is worked out once.

    `scaling`: by which the question was put. What simulation has corrected of its rates then holds of all draws.
    """

    def __init__(self, surveyed: Sequence[Survey], asked: Choice, scaling: WorldScaling):
        self._surveyed, self._asked, self._scaling = surveyed, asked, scaling
        self._able: dict[tuple[int, bytes], Array] = {}

    def uncertainty(self, fleet: Solution) -> Uncertainty | None:
        used = np.flatnonzero(fleet.replicas)
        if not any(self._column(int(place)).deployment.correction.worlds for place in used):
            return None
        needs = self._needs(fleet, used)
        problem = self._asked.problem
        hopeless = ~np.isfinite(needs).all(axis=1)
        gpus = np.zeros((WORLDS, len(problem.usd_per_hour)))
        for k, place in enumerate(used):
            gpus[:, problem.accelerator[place]] += np.where(hopeless, 0.0, needs[:, k]) * problem.gpus[place]
        kept = problem.spent_usd_per_hour(gpus).sum(axis=1)[~hopeless]
        low, high = np.quantile(kept, (0.1, 0.9)).tolist() if len(kept) else (None, None)
        enough = _enough(needs, fleet.replicas[used])
        return Uncertainty(low, high, unmet=float(hopeless.mean()), enough=enough)

    def enough(self, fleet: Solution) -> float:
        """How often the replicas of a fleet are enough."""
        used = np.flatnonzero(fleet.replicas)
        return _enough(self._needs(fleet, used), fleet.replicas[used])

    def each_sure(self, fleet: Solution, sure: float) -> float:
        """How sure of each pool one must be for a fleet to be as sure as is asked, if what is wrong with one says
        nothing of the others; even odds are the estimates."""
        pools = int(np.count_nonzero(fleet.replicas))
        return sure if sure <= 0.5 else sure ** (1.0 / max(pools, 1))

    def _needs(self, fleet: Solution, used: Indices) -> Array:
        """(worlds, pools): replicas that each pool needs for what it carries; infinite where no number will do."""
        found = np.zeros((WORLDS, len(used)))
        for k, place in enumerate(used):
            carried = fleet.share[place] * self._asked.problem.demand
            able = self._ability(int(place), carried)
            # A fleet that was simulated may be smaller than its rates say: there it holds, so rates are short by that.
            able = able * max(self._replicas(int(place), carried) / float(fleet.replicas[place]), 1.0)
            most = _MOST * float(fleet.replicas[place])
            found[:, k] = np.where(able * most < 1.0, np.inf, np.ceil(1.0 / np.maximum(able, 1e-9) - 1e-6))
        return found

    def _column(self, place: int) -> Column:
        return self._asked.offers.columns[place]

    def _replicas(self, place: int, carried: Array) -> float:
        """What a column would need for that by the rates of the question."""
        rate = self._asked.problem.rate[place]
        needed = np.divide(carried, rate, out=np.zeros_like(carried), where=(carried > 0) & (rate > 0))
        return float(needed.sum())

    def _ability(self, place: int, carried: Array) -> Array:
        """By world: the share of what a fleet gives a column that one replica carries."""
        key = place, carried.tobytes()
        if key not in self._able:
            self._able[key] = self._computed_ability(place, carried)
        return self._able[key]

    def _computed_ability(self, place: int, carried: Array) -> Array:
        column = self._column(place)
        key = key_of(column.deployment)
        survey, row = next((s, i) for s in self._surveyed for i, d in enumerate(s.deployments) if key_of(d) == key)
        # The deployment once for each world.
        several = survey.rows([row] * WORLDS)
        levels = Levels(several.parts, several.curves, self._scaling.in_worlds(column.deployment))
        rates = rates_of(several, levels, column, self._asked.peak)
        alone = survey.rows([row])
        put = rates_of(
            alone, Levels(alone.parts, alone.curves, self._scaling(alone.deployments)), column, self._asked.peak
        )
        load = np.zeros(WORLDS)
        for part in several.parts:
            if carried[part.index]:
                closed, said = float(put[part.index][0]), float(self._asked.problem.rate[place, part.index])
                rate = rates[part.index] * (said / closed if closed > 0 else 1.0)
                load += np.divide(carried[part.index], rate, out=np.full_like(rate, np.inf), where=rate > 0)
        return np.asarray(1.0 / np.maximum(load, 1e-9))


def family_of(deployment: Deployment) -> tuple[str, str]:
    """Whose errors go together."""
    return deployment.accelerator.id, deployment.stack.id


def _enough(needs: Array, replicas: Array | Indices) -> float:
    return float((needs <= np.asarray(replicas) + 1e-6).all(axis=1).mean())
