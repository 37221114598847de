"""A number between a low and a high end, and how samples are drawn from it."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from crosstie.core.errors import BadInput
from crosstie.perf.hardware import Array
from crosstie.perf.worlds import END

# The normal distribution up to 5 standard deviations: trapezoids over the density are good to six digits, which samples
# never show.
_GRID: Array = np.linspace(-5.0, 5.0, 4001)
_DENSITY: Array = np.exp(-0.5 * _GRID**2)
_AREA: Array = np.concatenate([[0.0], np.cumsum(0.5 * (_DENSITY[1:] + _DENSITY[:-1]))])
_CDF: Array = _AREA / _AREA[-1]


@dataclass(frozen=True, slots=True)
class ValueRange:
    """`interval`: the ends hold 80% of what may come, as an estimate's do; else they are the least and the most.
    `worlds`: what an estimate is in each world (core.worlds), in place of any other distribution."""

    low: float
    likely: float
    high: float
    interval: bool = False
    worlds: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.low <= self.likely <= self.high:
            raise BadInput(f"{self.likely:g} is not between its low {self.low:g} and its high {self.high:g}")

    @property
    def is_exact(self) -> bool:
        return self.low == self.high

    def draw(self, uniform: Array) -> Array:
        """Samples from numbers spread evenly over 0 to 1."""
        if self.is_exact:
            return np.full_like(uniform, self.likely)
        if self.worlds:
            return np.array(self.worlds)[(uniform * len(self.worlds)).astype(np.intp)]
        return self._two_piece_lognormal(uniform) if self.interval else self._triangular(uniform)

    def _triangular(self, uniform: Array) -> Array:
        width, left, right = self.high - self.low, self.likely - self.low, self.high - self.likely
        rising = self.low + np.sqrt(uniform * width * left)
        falling = self.high - np.sqrt((1.0 - uniform) * width * right)
        return np.where(uniform * width < left, rising, falling)

    def _two_piece_lognormal(self, uniform: Array) -> Array:
        """Half of the samples on each side of the likely value, a tenth beyond each end."""
        down, up = np.log(self.likely / self.low) / END, np.log(self.high / self.likely) / END
        z = np.interp(uniform, _CDF, _GRID)
        return np.asarray(self.likely * np.exp(np.where(z < 0.0, z * down, z * up)))

    def scaled(self, share: float) -> "ValueRange":
        """The same number with ends `share` of it below and above."""
        ends = sorted((self.likely * (1.0 - share), self.likely * (1.0 + share)))
        return ValueRange(ends[0], self.likely, ends[1])


def exactly(value: float) -> ValueRange:
    return ValueRange(value, value, value)


def likely(spans: Mapping[str, ValueRange]) -> dict[str, Array]:
    """Every input at its likely value."""
    return {name: np.asarray(span.likely) for name, span in spans.items()}
