"""Values counted in buckets, as Prometheus takes them."""

from bisect import bisect_left
from itertools import accumulate


class Histogram:
    """`bounds`: the upper ends of the buckets, each belonging to its own; what is above the last has one more."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]):
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        # The sum of all values.
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    @property
    def count(self) -> int:
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, int]]:
        """By upper end, how many values are not above it."""
        return list(zip((*map(str, self.bounds), "+Inf"), accumulate(self.counts), strict=True))
