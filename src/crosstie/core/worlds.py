"""Worlds: what the constants of the performance model may truly be, in draws that every answer shares.

A world is one draw from the posterior of the calibration. Whatever is asked, world number 17 is the same one: there
every deployment's constants are off by what they are off by in that draw. So the TTFT, TPOT, throughput and cost of a
world belong together, two accelerators are compared world by world, and "80% sure" is the share of worlds in which
something holds.
"""

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Draws = NDArray[np.float64]

# Draws come in pairs of opposite sign, so that their mean is the estimate. With so many, the width of an interval is
# known to about 6%.
WORLDS = 256
# An interval holds this share of the worlds.
LEVEL = 0.8


class Worlds:
    """What the worlds make of one deployment, in logarithms; worked out when somebody asks.

    constants    (WORLDS, constants): over the corrected ones
    metrics      (WORLDS, metrics): what a measurement of such a deployment is off by besides
    acceptance   (WORLDS,): standard deviations by which more drafts are kept than estimated
    """

    def __init__(self, make: Callable[[], tuple["Draws", "Draws", "Draws"]]):
        self._make = make

    @cached_property
    def _made(self) -> tuple["Draws", "Draws", "Draws"]:
        return self._make()

    @property
    def constants(self) -> "Draws":
        return self._made[0]

    @property
    def metrics(self) -> "Draws":
        return self._made[1]

    @property
    def acceptance(self) -> "Draws":
        return self._made[2]

    def __reduce__(self) -> tuple[Callable[..., "Worlds"], tuple["Draws", "Draws", "Draws"]]:
        """Between processes go the draws themselves: what they are made from is large, and stays where it is."""
        return _drawn, self._made

    def off_by(self, more: "Draws") -> "Worlds":
        """The same with something more that is not known of the metrics."""
        return Worlds(lambda: (self.constants, self.metrics + more, self.acceptance))


def _drawn(constants: "Draws", metrics: "Draws", acceptance: "Draws") -> Worlds:
    return Worlds(lambda: (constants, metrics, acceptance))
