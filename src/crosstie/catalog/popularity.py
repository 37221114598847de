"""Adapters by how often they are asked for: how many are not there, and how many requests a few of them serve."""

import math
from collections.abc import Sequence

_BISECTIONS = 60


def shares(popularity: Sequence[float]) -> list[float]:
    total = math.fsum(popularity)
    return [share / total for share in popularity]


def zipf(count: int, exponent: float) -> list[float]:
    """Shares of requests by adapter, the n-th in proportion to n^-exponent."""
    return shares([n**-exponent for n in range(1, count + 1)])


def missing_share(popularity: Sequence[float], slots: int) -> float:
    """Share of requests whose adapter is not among those used last, as many as there are slots.

    Che's approximation: an adapter stays for as many requests after its last as fill the slots, the same for all.
    """
    if slots >= sum(share > 0 for share in popularity):
        return 0.0
    low, high = 0.0, 1.0
    while _present(popularity, high) < slots:
        high *= 2.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _present(popularity, middle) < slots else (low, middle)
    return math.fsum(share * math.exp(-share * high) for share in popularity)


def _present(popularity: Sequence[float], lasts: float) -> float:
    return math.fsum(-math.expm1(-share * lasts) for share in popularity)


def most_in_flight(popularity: Sequence[float], slots: int) -> float:
    """Requests that run at once with no more than that many adapters among them, on average; infinite: any number."""
    if slots >= sum(share > 0 for share in popularity):
        return math.inf
    low, high = float(slots), float(slots)
    while _distinct(popularity, high) <= slots:
        high *= 2.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _distinct(popularity, middle) <= slots else (low, middle)
    return low


def _distinct(popularity: Sequence[float], requests: float) -> float:
    return math.fsum(-math.expm1(requests * math.log1p(-min(share, 1.0 - 1e-12))) for share in popularity)
