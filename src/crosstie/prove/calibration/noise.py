"""What a measurement is off by besides its constants: a scale by metric and mode, engine, accelerator and publisher.

The logarithm of a scale is a sum of parts, pooled as those of constants are: an engine with few rows stays near what
all have. A careless publisher has a part of its own, which no estimate has, so that it makes nobody else less sure.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.posterior import FREEDOM
from crosstie.perf.hardware import Array, Mask

Labels = NDArray[np.str_]
# Scales that are tried, from one to 150 per cent, and by how much a part may change one.
_SCALES: Array = np.linspace(np.log(0.01), np.log(1.5), 60)
_PARTS: Array = np.linspace(-1.2, 1.2, 49)
_ROUNDS = 4
# Fewer rows than this say nothing about how rows scatter around their curve.
FEWEST = 20


class Part(NamedTuple):
    """Which rows share a part of a scale, and how far that moves its logarithm before anything is measured; None for
    the scale itself. Rows named "" have none."""

    names: Labels
    width: float | None = None


@dataclass
class Noise:
    """By row: what it is off by for itself, and with all rows of its curve and metric; and what an estimate of the same
    would be off by, whose publisher nobody knows."""

    own: Array
    curve: Array
    rows_of_curve: Array
    here: Array

    @property
    def fitted(self) -> Array:
        return np.sqrt(self.own**2 + self.rows_of_curve * self.curve**2)


def log_likelihood(error: Array, sd: Array, scale: Array) -> Array:
    """Of Student's t beside what is not known of the constants."""
    square = sd**2 + scale**2
    return np.asarray(-0.5 * np.log(square) - 0.5 * (FREEDOM + 1.0) * np.log1p(error**2 / square / FREEDOM))


def likeliest_scale(error: Array, sd: Array) -> float:
    tried = log_likelihood(error[:, None], sd[:, None], np.exp(_SCALES)[None, :]).sum(axis=0)
    return float(np.exp(_SCALES[int(np.argmax(tried))]))


def pooled_scales(error: Array, sd: Array, weight: Array, parts: Sequence[Part]) -> list[Array]:
    """By part and row, the likeliest logarithm; rows without an error tell nothing and have their parts, too."""
    told = ~np.isnan(error)
    moved = [np.zeros(len(error)) for _ in parts]
    for _ in range(_ROUNDS):
        for place, part in enumerate(parts):
            steps = _SCALES if part.width is None else _PARTS
            prior = 0.0 if part.width is None else 0.5 * (steps / part.width) ** 2
            others = sum(moved) - moved[place]
            for name in sorted(set(part.names[told].tolist()) - {""}):
                every = part.names == name
                own = every & told
                scale = np.exp(others[own][:, None] + steps[None, :])
                tried = weight[own] @ log_likelihood(error[own][:, None], sd[own][:, None], scale) - prior
                moved[place][every] = steps[int(np.argmax(tried))]
    return moved


def scatter_within_curves(miss: Array, curve: NDArray[np.intp], rows: Mask) -> float | None:
    """The scatter of rows around their curve's mean, by the median."""
    places = curve[rows]
    counts = np.bincount(places)[places]
    mean = np.bincount(places, miss[rows])[places] / counts
    several = counts > 2
    if several.sum() < FEWEST:
        return None
    away = (miss[rows] - mean)[several] * np.sqrt(counts[several] / (counts[several] - 1.0))
    return float(1.4826 * np.median(np.abs(away)))
