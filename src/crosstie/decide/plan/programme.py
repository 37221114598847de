"""The cheapest whole numbers of replicas that carry the load: a mixed-integer programme, solved by HiGHS.

    minimise    what the GPUs cost an hour, or draw
    over        n[c] replicas of column c, whole; x[p, c] the share of part p that column c carries
    such that   every part is carried                      sum over c of x[p, c] = 1
                no column carries more than it can         sum over p of x[p, c] demand[p] / rate[c, p] <= n[c]
                every class keeps its percentiles          sum over p, c of weight[p] x[p, c] kept[c, p] >= need
                and the limits on GPUs, money, power and vendors hold

The allocation is Mélange's (arXiv 2404.14527) with the choice of layout and precision in the columns, and
with limits that it does not have. Vectors here are by column, by part or by accelerator.
"""

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Indices = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Percentile:
    """Of the requests of some parts, the share that must keep a target; `kept` as in the programme."""

    kept: int
    parts: Indices
    # By part of it, together 1.
    weight: Array
    need: float


@dataclass(frozen=True, slots=True)
class Programme:
    # (columns, parts): requests/s that one replica takes of a part alone; 0 where it may not.
    rate: Array
    # By part: requests/s to carry.
    demand: Array
    # By column.
    gpus: Array
    accelerator: Indices
    # By accelerator: USD an hour of one GPU that must be bought, and of running one on hand.
    usd_per_hour: Array
    running_usd_per_hour: Array
    watts: Array
    inventory: Array
    # GPUs on hand that are used, and those that are bought, together.
    at_most: Array
    # GPUs that are bought at once: 1, or a node.
    unit: Array
    vendor: Indices
    # By vendor: the least share of the fleet's value, each GPU at its price, on hand or not.
    vendor_share: Array
    budget_usd_per_hour: float = np.inf
    power_watts: float = np.inf
    # (targets, columns, parts): the share of a part's requests that keep their class's TTFT, and TPOT, in a column.
    kept: Array = field(default_factory=lambda: np.zeros((0, 0, 0)))
    percentiles: tuple[Percentile, ...] = ()
    # By column: those of one number are the same replicas under the same promise, meant for other requests. The gateway
    # cannot tell such pools apart, so a fleet has one of them.
    alike: Indices = field(default_factory=lambda: np.zeros(0, np.int64))
    # Whether the fleet is to draw least, to learn what that would be, and not to cost least.
    by_power: bool = False

    @property
    def price(self) -> Array:
        """By accelerator: of what is to be least."""
        return self.watts if self.by_power else self.usd_per_hour

    @property
    def is_coupled(self) -> bool:
        """Whether what one column takes can be another's loss."""
        return bool(
            np.isfinite([self.budget_usd_per_hour, self.power_watts]).any()
            or np.isfinite(self.at_most).any()
            or (self.inventory > 0).any()
            or (self.unit > 1).any()
            or (self.vendor_share > 0).any()
        )

    @property
    def replica_usd_per_hour(self) -> Array:
        """By column: one replica at its price."""
        return self.usd_per_hour[self.accelerator] * self.gpus

    def per_request(self, amount: Array) -> Array:
        """(columns, parts): what one request takes of a column's amount; infinite where it may not go there."""
        return np.divide(amount[:, None], self.rate, out=np.full_like(self.rate, np.inf), where=self.rate > 0)

    @property
    def on_hand_usd_per_hour(self) -> Array:
        """Nobody runs a GPU on hand for more than another one costs."""
        return np.minimum(self.running_usd_per_hour, self.usd_per_hour)

    def bought(self, gpus: Array) -> Array:
        """Of GPUs by accelerator those that must be bought, in whole units; the last axis is accelerators."""
        return np.asarray(np.ceil(np.maximum(gpus - self.inventory, 0.0) / self.unit - 1e-6) * self.unit)

    def spent_usd_per_hour(self, gpus: Array) -> Array:
        """The same in money, by accelerator: what is bought costs its price, used or not; the rest its running."""
        bought = self.bought(gpus)
        return bought * self.usd_per_hour + np.maximum(gpus - bought, 0.0) * self.on_hand_usd_per_hour

    def allows(self, gpus: Array) -> bool:
        """Whether so many by accelerator may be had: by what may be spent, drawn and bought, and by vendors' shares."""
        bought = self.bought(gpus)
        value = np.bincount(self.vendor, gpus * self.usd_per_hour, minlength=len(self.vendor_share))
        return bool(
            self.spent_usd_per_hour(gpus).sum() <= self.budget_usd_per_hour * (1.0 + 1e-9)
            and gpus @ self.watts <= self.power_watts * (1.0 + 1e-9)
            and np.all(bought + np.maximum(gpus - bought, 0.0) <= self.at_most + 1e-6)
            and np.all(value >= self.vendor_share * value.sum() * (1.0 - 1e-9))
        )

    def fleet(self, replicas: Indices, share: Array, bound_usd_per_hour: float = 0.0) -> "Solution":
        """So many replicas of each column, and what they cost."""
        gpus = np.bincount(self.accelerator, replicas * self.gpus, minlength=len(self.usd_per_hour)).astype(np.float64)
        cost = float(self.spent_usd_per_hour(gpus).sum())
        return Solution(
            replicas=replicas,
            share=share,
            usd_per_hour=cost,
            bound_usd_per_hour=min(bound_usd_per_hour, cost),
            gpus=gpus,
            bought=self.bought(gpus),
            watts=float(gpus @ self.watts),
        )

    def only(self, columns: Indices, parts: Indices) -> "Programme":
        return replace(
            self,
            rate=self.rate[np.ix_(columns, parts)],
            demand=self.demand[parts],
            gpus=self.gpus[columns],
            accelerator=self.accelerator[columns],
            kept=self.kept[:, columns][:, :, parts] if self.percentiles else self.kept,
            alike=self.alike[columns] if len(self.alike) else self.alike,
            percentiles=tuple(percentile for kept in self.percentiles if (percentile := _within(kept, parts))),
        )

    def keeps(self, columns: Indices) -> Array:
        """By column and percentile's part: what it keeps of it, nothing where it may not go there."""
        each = []
        for percentile in self.percentiles:
            there = np.ix_(columns, percentile.parts)
            each.append(np.where(self.rate[there] > 0, self.kept[percentile.kept][there], 0.0))
        return np.concatenate(each, axis=1) if each else np.zeros((len(columns), 0))


def _within(percentile: Percentile, parts: Indices) -> Percentile | None:
    """The same among some of the parts: all of its own, or none of them."""
    place = {int(part): index for index, part in enumerate(parts)}
    if not all(int(part) in place for part in percentile.parts):
        return None
    return replace(percentile, parts=np.array([place[int(part)] for part in percentile.parts], np.int64))


@dataclass(frozen=True, slots=True)
class Solution:
    # By column, and (columns, parts).
    replicas: Indices
    share: Array
    usd_per_hour: float
    # What no fleet can undercut, as far as the search went.
    bound_usd_per_hour: float
    # By accelerator: GPUs used, and those of them that are not on hand.
    gpus: Array
    bought: Array
    watts: float

    @property
    def pools(self) -> int:
        return int((self.replicas > 0).sum())

    @property
    def kinds(self) -> int:
        """Of accelerators."""
        return int((self.gpus > 0).sum())

    @property
    def gap(self) -> float:
        return max(0.0, 1.0 - self.bound_usd_per_hour / self.usd_per_hour) if self.usd_per_hour > 0 else 0.0
