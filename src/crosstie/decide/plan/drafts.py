"""What speculation does to a plan: its worth on each pool, up to which load, and the bill if fewer drafts are kept."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.core.disaggregated import Disaggregated
from crosstie.core.speculation import Speculation
from crosstie.decide.compare.payoff import FEWER, Payoff, payoff_of
from crosstie.decide.plan.answer import PoolPlan
from crosstie.decide.plan.candidates import key_of
from crosstie.decide.plan.capacity import Levels
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.programme import Solution
from crosstie.decide.plan.scaling import Reading
from crosstie.decide.plan.survey import Column, Survey, rates_of, survey
from crosstie.perf.hardware import Array


@dataclass(frozen=True, slots=True)
class DraftingPool:
    """A pool that speculates: what that is worth at its own load, and what it would take if fewer drafts were kept."""

    pool: str
    speculation: Speculation
    payoff: Payoff
    # Replicas, and dollars an hour more; None: no number of them would keep the targets.
    replicas_if_fewer: int | None
    more_usd_per_hour: float | None


def drafting_pools(
    surveyed: Sequence[Survey], asked: Choice, answer: Solution, pools: Sequence[PoolPlan], scaling: Reading
) -> list[DraftingPool]:
    """`pools`: of the answer, as it names them."""
    columns = {
        (key_of(column.deployment), column.tier, int(answer.replicas[place])): int(place)
        for place in np.flatnonzero(answer.replicas)
        for column in [asked.offers.columns[place]]
    }
    found = []
    for pool in pools:
        drafts = pool.deployment.speculation
        if drafts is None or not pool.carried:
            continue
        place = columns[key_of(pool.deployment), pool.tier, pool.replicas]
        mean = max(pool.carried, key=lambda one: one.load).part.slice
        one = pool.deployment
        in_flight = pool.in_flight / (one.decode_replicas if isinstance(one, Disaggregated) else 1)
        payoff = payoff_of(one.decode, max(round(in_flight), 1), round(mean.input_tokens), round(mean.output_tokens))
        assert payoff is not None
        column = asked.offers.columns[place]
        needed = _replicas(surveyed, column, answer.share[place] * asked.problem.demand, asked.peak, scaling)
        # What rounding up to whole replicas has left over is used first.
        replicas = None if needed is None else max(math.ceil(needed - 1e-6), pool.replicas)
        each = pool.usd_per_hour / pool.replicas
        more = None if replicas is None else (replicas - pool.replicas) * each
        found.append(DraftingPool(pool.name, drafts, payoff, replicas, more))
    return found


def _replicas(
    surveyed: Sequence[Survey], column: Column, carried: Array, peak: float, scaling: Reading
) -> float | None:
    """That a column would take for what it carries, with so many fewer drafts kept."""
    drafts = column.deployment.speculation
    assert drafts is not None
    fewer = column.deployment.drafting(drafts.keeping(1.0 - FEWER))
    one = next(s for s in surveyed if any(d.model.id == fewer.model.id for d in s.deployments))
    again = survey([fewer], one.parts)
    rates = rates_of(again, Levels(again.parts, again.curves, scaling(again.deployments)), column, peak)
    load = 0.0
    for part in again.parts:
        if carried[part.index]:
            rate = float(rates[part.index][0])
            if rate <= 0.0:
                return None
            load += float(carried[part.index]) / rate
    return load
