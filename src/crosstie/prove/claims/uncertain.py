"""A number that is not known exactly: its value, the 80% interval, and what it is in every world, through arithmetic.

Two estimates are combined world by world, since what makes one low makes the other low too; so a ratio of them has an
interval of its own.
"""

import operator
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from crosstie.core.errors import BadInput
from crosstie.core.figures import significant
from crosstie.core.worlds import LEVEL
from crosstie.perf.hardware import Array

Number = float | int
_ENDS = (0.5 - LEVEL / 2.0, 0.5 + LEVEL / 2.0)


class Uncertain:
    """`worlds`: gives the draws, when they are asked for; None where only the ends are known."""

    def __init__(self, value: float, ends: tuple[float, float] | None, worlds: Callable[[], Array] | None = None):
        self.value, self._ends, self._worlds = value, ends, worlds

    @cached_property
    def worlds(self) -> Array:
        if self._worlds is None:
            raise BadInput("an interval without draws is not combined with another")
        return self._worlds()

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The estimate itself is never outside."""
        low, high = self._ends or np.quantile(self.worlds, _ENDS).tolist()
        return min(low, self.value), max(high, self.value)

    def _with(self, other: Any, made: Callable[[Any, Any], Any]) -> "Uncertain":
        if isinstance(other, Uncertain):
            return Uncertain(made(self.value, other.value), None, lambda: made(self.worlds, other.worlds))
        first, last = (made(end, other) for end in self.ends)
        drawn = (lambda: made(self.worlds, other)) if self._worlds else None
        return Uncertain(made(self.value, other), (min(first, last), max(first, last)), drawn)

    def __add__(self, other: Any) -> "Uncertain":
        return self._with(other, operator.add)

    def __sub__(self, other: Any) -> "Uncertain":
        return self._with(other, operator.sub)

    def __mul__(self, other: Any) -> "Uncertain":
        return self._with(other, operator.mul)

    def __truediv__(self, other: Any) -> "Uncertain":
        return self._with(other, operator.truediv)

    def __rsub__(self, other: Number) -> "Uncertain":
        return self._with(other, lambda mine, theirs: theirs - mine)

    def __rtruediv__(self, other: Number) -> "Uncertain":
        return self._with(other, lambda mine, theirs: theirs / mine)

    __radd__, __rmul__ = __add__, __mul__

    def __gt__(self, other: Number) -> bool | None:
        """None where the interval does not decide it."""
        return True if self.ends[0] > other else None if self.ends[1] > other else False

    def __lt__(self, other: Number) -> bool | None:
        return True if self.ends[1] < other else None if self.ends[0] < other else False

    def __str__(self) -> str:
        low, high = self.ends
        return f"{significant(self.value)} ({significant(low)} to {significant(high)})"


def likely(value: "Uncertain | Number") -> float:
    """Even odds: what estimates give, without their interval."""
    return value.value if isinstance(value, Uncertain) else float(value)


class Chosen(str):
    """The name of who is first, which knows how all were ranked."""

    ranking: dict[str, float]

    @classmethod
    def of(cls, ranking: dict[str, float]) -> "Chosen":
        chosen = cls(next(iter(ranking)))
        chosen.ranking = ranking
        return chosen


def written(value: object, brief: bool = False) -> str:
    """A value for people: yes and no, names with what all were ranked by unless it is to be brief, numbers."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "undecided"
    if isinstance(value, Chosen):
        ranked = [f"{called(name)} {significant(rank)}" for name, rank in value.ranking.items()]
        return called(value) if brief else ", ".join(ranked)
    if isinstance(value, list | tuple):
        return " and ".join(map(written, value))
    return significant(float(value), 4) if isinstance(value, int | float) else str(value)


def called(name: str) -> str:
    """An accelerator as articles and MLPerf write it: MI300X, H100."""
    return name.removesuffix("-sxm").upper()
