"""Which fault so many prompts can see, and how many prompts a fault needs: the arithmetic of a test of a mean.

KL is never below 0 and spreads as widely as it is large, so a prompt's share of a fault of `m` nats has a standard
deviation of sqrt(noise^2 + (spread x m)^2). A fault is seen, with a power of 80% and an interval of 95%, where its mean
stands (1.96 + 0.84) standard errors above what it is held against.
"""

import math

import msgspec
import numpy as np

Rows = list[tuple[float, float]]
# Quantiles of the normal distribution: 97.5%, one end of the interval, and 80%, the power.
_STANDS = 1.96 + 0.84
# How far prompts differ, over their mean: the widest of seven faults of docs/parity.md (SmolLM2-135M), 0.32 to 0.82.
_SPREAD = 0.82
# Sizes of a fault, in nats a token, for which the answer says how many prompts they need. One matrix of 210 with 5%
# more of its scale is 0.003 (docs/parity.md).
SIZES = (0.0003, 0.003, 0.03)


class Needed(msgspec.Struct, frozen=True, kw_only=True):
    nats: float
    # To tell it from noise, and to call it a difference; None: no number of prompts does, it is within what is allowed.
    to_notice: int
    to_differ: int | None


class Power(msgspec.Struct, frozen=True, kw_only=True):
    """Of forced KL, in nats a token. None: so few prompts see no fault, however large."""

    prompts: int
    # Per prompt: what A differs from itself by spreads so far, and a fault so many times as far as it is large.
    noise: float
    spread: float
    # The least fault that is told from noise, and the least that is called a difference.
    noticed: float | None
    differs: float | None
    # Whether B is further from A than A from itself, for sure; by so much.
    is_beyond_noise: bool
    beyond_noise: float
    needed: tuple[Needed, ...]


def power(noise: Rows, others: Rows, allowed: float, sizes: tuple[float, ...] = SIZES) -> Power | None:
    """`noise`, `others`: a sum and a count of each prompt, of A against itself and of B. None below two prompts."""
    if len(others) < 2 or len(noise) < 2:
        return None
    floor, of_noise = _mean_and_deviation(noise)
    value, of_others = _mean_and_deviation(others)
    beyond, error = value - floor, math.hypot(of_noise, of_others) / math.sqrt(len(others))
    is_beyond = beyond > 0.0 and beyond > 1.96 * error
    spread = max(_SPREAD, of_others / beyond) if is_beyond else _SPREAD
    # B has its own noise, as A has.
    own = math.sqrt(2.0) * of_noise
    needed = [
        Needed(
            nats=size, to_notice=_prompts(size, own, spread, 0.0) or 2, to_differ=_prompts(size, own, spread, allowed)
        )
        for size in sizes
    ]
    return Power(
        prompts=len(others), noise=own, spread=spread, noticed=_least(len(others), own, spread, 0.0),
        differs=_least(len(others), own, spread, allowed), is_beyond_noise=is_beyond, beyond_noise=beyond,
        needed=tuple(needed),
    )  # fmt: skip


def _mean_and_deviation(rows: Rows) -> tuple[float, float]:
    """A ratio of sums over prompts, and by how much one prompt moves it."""
    sums, counts = np.array(rows, dtype=float).T
    mean = float(sums.sum() / counts.sum())
    return mean, float(np.std((sums - mean * counts) / counts.mean(), ddof=1))


def _prompts(size: float, noise: float, spread: float, against: float) -> int | None:
    if size <= against:
        return None
    return max(math.ceil(_STANDS**2 * (noise**2 + (spread * size) ** 2) / (size - against) ** 2), 2)


def _least(prompts: int, noise: float, spread: float, against: float) -> float | None:
    """The larger root of (m - against)^2 n = stands^2 (noise^2 + spread^2 m^2)."""
    share = _STANDS**2 / prompts
    square = 1.0 - share * spread**2
    if square <= 0.0:
        return None
    root = math.sqrt(against**2 - square * (against**2 - share * noise**2))
    return (against + root) / square
