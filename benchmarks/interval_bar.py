"""The bar of intervals: of every group of rows that were left out, an 80% interval holds about as many as it says.

Between LEAST and MOST of a group's rows should be inside. Rows that are left out together share what is not known of
them, and an accelerator that was left out is one draw, however many rows it has: of such draws some must lie outside.
So the calibration says of each group between which shares it would be in 99 of 100 cases if the posterior were right.
A group that is outside of both makes the posterior wrong.
"""

from collections.abc import Mapping
from typing import NamedTuple

LEAST, MOST = 0.68, 0.92
# Rows of the smallest group that is judged.
FEWEST = 100


class LeftOutGroup(NamedTuple):
    title: str
    metric: str
    rows: int
    inside: float
    # High over low of the middle interval.
    width: float
    # By chance, were the posterior right.
    least: float
    most: float

    @property
    def within(self) -> bool:
        return LEAST <= self.inside <= MOST

    @property
    def likely(self) -> bool:
        return self.least <= self.inside <= self.most

    @property
    def off_by(self) -> float:
        return max(LEAST - self.inside, self.inside - MOST, 0.0)


def judged(coverage: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[LeftOutGroup]:
    """All groups that are large enough, the worst first."""
    found = [
        LeftOutGroup(title, metric, int(one["n"]), one["inside"], one["width"], one["least"], one["most"])
        for title, table in coverage.items()
        for metric, one in table.items()
        if one["n"] >= FEWEST
    ]
    return sorted(found, key=lambda group: -group.off_by)
