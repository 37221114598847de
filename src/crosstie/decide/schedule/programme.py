"""A purchase schedule as a linear programme in two stages.

The first stage is what must be decided this quarter: orders, and contracts that begin now. It is the same in all
worlds. What follows may differ from world to world, which by then are told apart: that is a little optimistic, since
some of it will still be unknown. A world draws what a GPU carries (the posterior of the performance model), how the
traffic grows, and when announced parts can be ordered. In every quarter of every world the traffic is carried by GPUs
that are owned, under contract, or rented by the hour: renting is the recourse, and makes every order possible.

A column is a way to have GPUs of one kind from a quarter until another; quarters are counted from this one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.core.errors import CrosstieError
from crosstie.decide.plan.programme import SparseRows
from crosstie.perf.hardware import Array

OWNED, CONTRACT, RENTED = "owned", "contract", "rented"


@dataclass(frozen=True, slots=True)
class Acquisition:
    """GPUs of one kind: decided in one quarter, there from `start` until before `end`; USD of one over that time."""

    part: int
    kind: str
    decided: int
    start: int
    end: int
    usd: float
    # Quarters of a contract's whole length, for orders that belong together; an owned GPU's end is decided later.
    name: str = ""

    @property
    def is_now(self) -> bool:
        return self.decided == 0 and self.kind != RENTED


@dataclass(frozen=True, slots=True)
class Futures:
    """Of each world: GPUs of each part that carry today's peak, the peak over today's, and who can be ordered when."""

    # (worlds, parts), (worlds, quarters), (worlds, parts)
    gpus: Array
    demand: Array
    orderable: Array
    # What is there anyway, of parts: (parts, quarters).
    there: Array


@dataclass(frozen=True, slots=True)
class Decided:
    """`gpus`: (worlds, ways); `now`: GPUs that all worlds have in common, by part, kind and name."""

    ways: Sequence[Acquisition]
    gpus: Array
    now: dict[tuple[int, str, str], float]
    # Of each world, over all quarters.
    usd: Array


class NoSchedule(CrosstieError):
    """The solver found none, which renting should have made impossible."""


def decide(
    ways: Sequence[Acquisition], uncertain: Futures, fixed: dict[tuple[int, str, str], float] | None = None
) -> Decided:
    """The least expected cost. `fixed`: GPUs that are decided now, as whole nodes; None: they are found."""
    worlds, quarters = uncertain.demand.shape
    groups = {key: place for place, key in enumerate(dict.fromkeys(map(_group, filter(lambda w: w.is_now, ways))))}
    columns = len(groups) + worlds * len(ways)
    usd = np.array([way.usd for way in ways])
    cost = np.concatenate((np.zeros(len(groups)), np.tile(usd / worlds, worlds)))
    lower, upper = np.zeros(columns), np.full(columns, np.inf)
    for key, place in groups.items() if fixed is not None else ():
        lower[place] = upper[place] = (fixed or {}).get(key, 0.0)
    rows = SparseRows()
    parts = np.array([way.part for way in ways])
    serving = [np.flatnonzero([way.start <= q < way.end for way in ways]) for q in range(quarters)]
    together = {key: np.flatnonzero([way.is_now and _group(way) == key for way in ways]) for key in groups}
    early = np.array([way.decided for way in ways])
    for world in range(worlds):
        first = len(groups) + world * len(ways)
        carries = 1.0 / uncertain.gpus[world]
        closed = early < uncertain.orderable[world][parts]
        upper[first : first + len(ways)][closed] = 0.0
        for q in range(quarters):
            left = uncertain.demand[world, q] - float(carries @ uncertain.there[:, q])
            if left > 0:
                rows.add(first + serving[q], carries[parts[serving[q]]], left, np.inf)
        for key, place in groups.items():
            mine = together[key]
            rows.add(np.append(first + mine, place), np.append(np.ones(len(mine)), -1.0), 0.0, 0.0)
    values = _solved(cost, lower, upper, rows)
    gpus = values[len(groups) :].reshape(worlds, len(ways))
    return Decided(ways, gpus, {key: float(values[place]) for key, place in groups.items()}, gpus @ usd)


def _group(way: Acquisition) -> tuple[int, str, str]:
    return way.part, way.kind, way.name


def _solved(cost: Array, lower: Array, upper: Array, rows: SparseRows) -> Array:
    import highspy

    solver = highspy.Highs()  # type: ignore[no-untyped-call]
    solver.silent()
    solver.passModel(rows.model(cost, lower, upper))
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        raise NoSchedule(f"no schedule was found: {solver.modelStatusToString(solver.getModelStatus())}")
    return np.array(solver.getSolution().col_value)


def rounded(now: dict[tuple[int, str, str], float], unit: Callable[[int], int]) -> dict[tuple[int, str, str], float]:
    """In whole nodes: the nearest number of them, so that less than half a node is rented instead."""
    return {key: float(round(gpus / unit(key[0])) * unit(key[0])) for key, gpus in now.items()}
