"""The cheapest replicas for a load, given those that there are: the plan's programme over supplies.

A supply has up to three columns: replicas that must be there and cost nothing more, those there at their price, and new
ones, which also cost the time of their start.
"""

from dataclasses import dataclass, replace

import numpy as np

from crosstie.decide.plan.programme import Array, Indices, Programme
from crosstie.decide.plan.solver import solve

# Of requests/s, what is no traffic; programmes divide by it.
_NONE = 1e-6
# Steps in which the share of a load that can be carried is looked for: to half a percent.
_HALVINGS = 8


@dataclass(frozen=True, slots=True)
class SupplyChoices:
    """By supply: requests/s of a replica by part, USD an hour, and replicas that must be, are, and can be there."""

    rate: Array
    usd_per_hour: Array
    floor: Indices
    have: Indices
    most: Indices
    # What a new one costs over its price, as a share.
    starting: Array

    def cheapest(self, demand: Array, budget_usd_per_hour: float = np.inf) -> Indices | None:
        """Replicas by supply that carry the demand; None where there are not enough."""
        floor = np.minimum(self.floor, self.most)
        comes = demand > 0.0
        if not comes.any():
            return floor
        have = np.clip(self.have - floor, 0, self.most - floor)
        new = np.maximum(self.most - floor - have, 0)
        limited = np.isfinite(budget_usd_per_hour)
        # Under a budget what counts is what is paid; the floor is paid as well, and comes off it.
        fresh = self.usd_per_hour * (1.0 if limited else 1.0 + self.starting)
        counts = np.concatenate([floor, have, new])
        price = np.concatenate([np.zeros(len(floor)), self.usd_per_hour, fresh])
        supply = np.tile(np.arange(len(floor)), 3)
        there = np.flatnonzero(counts > 0)
        if not len(there):
            return None
        left = budget_usd_per_hour - float(floor @ self.usd_per_hour) if limited else np.inf
        if left < 0:
            return None
        # A share of what a supply costs keeps the search from taking more than it must of what costs nothing.
        price = price[there] + 1e-4 * (self.usd_per_hour[supply[there]] + _NONE)
        problem = Programme(
            rate=self.rate[supply[there]][:, comes],
            demand=np.maximum(demand[comes], _NONE),
            gpus=np.ones(len(there)),
            accelerator=np.arange(len(there)),
            usd_per_hour=price,
            running_usd_per_hour=price,
            watts=np.zeros(len(there)),
            inventory=np.zeros(len(there)),
            at_most=counts[there].astype(np.float64),
            unit=np.ones(len(there)),
            vendor=np.zeros(len(there), np.int64),
            vendor_share=np.zeros(1),
            budget_usd_per_hour=left,
        )
        solved = solve(problem)
        if solved is None:
            return None
        taken = np.bincount(supply[there], solved.replicas, minlength=len(floor)).astype(np.int64)
        return np.maximum(taken, floor)

    def load(self, demand: Array) -> float:
        """How full all that are there would be with equal shares of every kind of request; 1 is full."""
        takes = self.have @ self.rate
        return float(np.divide(demand, takes, out=np.where(demand > _NONE, np.inf, 0.0), where=takes > 0).sum())

    def carries(self, demand: Array) -> bool:
        """Whether those that are there carry it: by equal shares, else by the programme."""
        if self.load(demand) <= 1.0:
            return True
        # One kind of request, or replicas that differ in all kinds by the same factor: no other share is better.
        alike = np.linalg.matrix_rank(self.rate) <= 1
        there = replace(self, floor=np.zeros_like(self.have), most=self.have, starting=np.zeros(len(self.have)))
        return not alike and there.cheapest(demand) is not None

    def carried(self, demand: Array, budget_usd_per_hour: float = np.inf) -> float:
        """The share of the demand that can be carried, where all of it cannot."""
        low, high = 0.0, 1.0
        for _ in range(_HALVINGS):
            share = 0.5 * (low + high)
            enough = self.cheapest(demand * share, budget_usd_per_hour) is not None
            low, high = (share, high) if enough else (low, share)
        return low
