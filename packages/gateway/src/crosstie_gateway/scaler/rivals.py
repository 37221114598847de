"""What the scaler is held against: a fleet that stays as it is, and Kubernetes' horizontal autoscaler by utilisation.

The autoscaler as documented: every 15 s replicas in proportion to the metric over its target, nothing within 10%,
starting replicas counted as idle on the way up and full on the way down, at most four or twice as many more in 15 s,
and down to the highest of the last five minutes. It knows neither prices nor other pools.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from crosstie_gateway.scaler.rules import ScaleRules
from crosstie_gateway.scaler.scaler import FleetObservation, Order, Scaler


@dataclass(slots=True)
class ByScaler:
    scaler: Scaler
    # Every reason that something was short, once.
    shorts: list[str] = field(default_factory=list)

    @property
    def every_s(self) -> float:
        return self.scaler.rules.every_s

    def orders(self, seen: FleetObservation) -> Mapping[str, Order]:
        decision = self.scaler.decide(seen)
        if decision.short and decision.short not in self.shorts:
            self.shorts.append(decision.short)
        return decision.orders


@dataclass(slots=True)
class Fixed:
    replicas: Mapping[str, int]
    every_s: float = 60.0

    def orders(self, seen: FleetObservation) -> Mapping[str, Order]:
        return {name: Order(replicas=count, draining=0, why="fixed") for name, count in self.replicas.items()}


@dataclass(slots=True)
class Hpa:
    """`target`: of the requests that a replica may have in flight, the share to hold."""

    rules: ScaleRules
    target: float = 0.7
    tolerance: float = 0.1
    every_s: float = 15.0
    down_s: float = 300.0
    _lately: dict[str, list[tuple[float, int]]] = field(default_factory=dict)

    def orders(self, seen: FleetObservation) -> Mapping[str, Order]:
        orders = {}
        for supply in self.rules.supplies:
            ready, wanted = seen.ready.get(supply.name, 0), seen.wanted.get(supply.name, 0)
            proposed = self._proposed(ready, wanted, seen.busy.get(supply.name, 0.0))
            lately = [past for past in self._lately.get(supply.name, []) if past[0] > seen.at_s - self.down_s]
            self._lately[supply.name] = [*lately, (seen.at_s, proposed)]
            if proposed > wanted:
                proposed = min(proposed, max(wanted + 4, 2 * wanted))
            else:
                proposed = min(max(proposed, *(past for _, past in lately), 0), wanted) if lately else proposed
            count = min(max(proposed, supply.least, 1), supply.most)
            orders[supply.name] = Order(replicas=count, draining=0, why="utilisation")
        return orders

    def _proposed(self, ready: int, wanted: int, busy: float) -> int:
        if not ready:
            return wanted
        ratio, missing = busy / self.target, max(wanted - ready, 0)
        if not missing:
            return wanted if abs(ratio - 1.0) <= self.tolerance else math.ceil(ready * ratio - 1e-9)
        # Those that do not serve yet: idle if it would go up, at the target if it would go down.
        full = ready * busy + (missing * self.target if ratio < 1.0 else 0.0)
        again = full / (wanted * self.target)
        if abs(again - 1.0) <= self.tolerance or (again < 1.0) != (ratio < 1.0):
            return wanted
        return math.ceil(wanted * again - 1e-9)
