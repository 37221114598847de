"""A platform in virtual time: replicas that are asked for, start, serve, are emptied and go; and what they cost."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from crosstie_gateway.scaler.rules import ScaleRules, Supply
from crosstie_gateway.scaler.scaler import FleetObservation, Order

# A supply that goes back on what it did within so long flaps.
FLAP_S = 1800.0


class Controller(Protocol):
    """Whatever says how many there should be."""

    @property
    def every_s(self) -> float: ...

    def orders(self, seen: FleetObservation) -> Mapping[str, Order]: ...


@dataclass(slots=True, eq=False)
class Instance:
    """One replica of a supply, by its number among all that the supply can have."""

    supply: str
    number: int
    ready_s: float
    state: Literal["starting", "ready", "draining"] = "starting"


@dataclass(slots=True)
class Bill:
    gpu_s: float = 0.0
    usd: float = 0.0
    moves: int = 0
    flaps: int = 0
    most: int = 0


@dataclass(slots=True)
class Platform:
    """`start_s` says how long a replica takes; the hooks are told what becomes of each."""

    rules: ScaleRules
    gpus: Mapping[str, int]
    usd_per_hour: Mapping[str, float]
    start_s: Callable[[Supply], float]
    came: Callable[[Instance], None] = lambda instance: None
    drains: Callable[[Instance, bool], None] = lambda instance, on: None
    goes: Callable[[Instance], None] = lambda instance: None
    is_empty: Callable[[Instance], bool] = lambda instance: True
    now: float = 0.0
    bill: Bill = field(default_factory=Bill)
    there: dict[str, list[Instance]] = field(default_factory=dict)
    # By supply: until when nothing starts there.
    out_until: dict[str, float] = field(default_factory=dict)
    _turned: dict[str, tuple[float, int]] = field(default_factory=dict)

    def begin(self, replicas: Mapping[str, int]) -> None:
        """With so many that serve already."""
        for supply in self.rules.supplies:
            self.there[supply.name] = []
            for _ in range(replicas.get(supply.name, 0)):
                self._serves(self._add(supply, self.now))

    def advance(self, until: float) -> None:
        """Replicas that come by then, in order."""
        while True:
            coming = [instance for mine in self.there.values() for instance in mine if instance.state == "starting"]
            soonest = min(coming, key=lambda comes: (comes.ready_s, comes.supply, comes.number), default=None)
            if soonest is None or soonest.ready_s > until:
                break
            self._pass(soonest.ready_s)
            self._serves(soonest)
        self._pass(until)

    @property
    def next_s(self) -> float:
        """When the next replica comes."""
        return min((o.ready_s for mine in self.there.values() for o in mine if o.state == "starting"), default=np.inf)

    def _pass(self, until: float) -> None:
        passed = max(until - self.now, 0.0)
        for supply in self.rules.supplies:
            # Nobody pays for what a supply that is out does not have.
            counted = 0 if self.out_until.get(supply.name, 0.0) > self.now else len(self.there[supply.name])
            self.bill.gpu_s += passed * counted * self.gpus[supply.pool]
            self.bill.usd += passed / 3600.0 * counted * self.usd_per_hour[supply.name]
        self.now = max(self.now, until)

    def _add(self, supply: Supply, ready_s: float) -> Instance:
        mine = self.there[supply.name]
        taken = {instance.number for instance in mine}
        number = next(number for number in range(supply.most) if number not in taken)
        instance = Instance(supply.name, number, ready_s)
        mine.append(instance)
        self.bill.most = max(self.bill.most, sum(map(len, self.there.values())))
        return instance

    def _serves(self, instance: Instance) -> None:
        instance.state = "ready"
        self.came(instance)

    def seen(
        self, requests_per_s: dict[str, float], over_s: float, busy: dict[str, float],
        ended: dict[str, tuple[int, float]] | None = None,
    ) -> FleetObservation:  # fmt: skip
        def count(name: str, *states: str) -> int:
            return sum(instance.state in states for instance in self.there[name])

        names = [supply.name for supply in self.rules.supplies]
        draining = {name: [going for going in self.there[name] if going.state == "draining"] for name in names}
        emptied = {name: sum(map(self.is_empty, mine)) for name, mine in draining.items()}
        return FleetObservation(
            at_s=self.now, requests_per_s=requests_per_s, over_s=over_s, busy=busy, empty=emptied, ended=ended or {},
            ready={name: count(name, "ready", "draining") for name in names},
            wanted={name: len(self.there[name]) for name in names},
        )  # fmt: skip

    def obey(self, orders: Mapping[str, Order]) -> None:
        for supply in self.rules.supplies:
            order, mine = orders[supply.name], self.there[supply.name]
            asked = min(order.replicas, supply.most)
            self._count(supply.name, asked - len(mine))
            while len(mine) < asked:
                begun = max(self.now, self.out_until.get(supply.name, 0.0))
                self._add(supply, begun + self.start_s(supply))
            for instance in self._last(mine, len(mine) - asked):
                mine.remove(instance)
                self.goes(instance)
            serving = [instance for instance in mine if instance.state != "starting"]
            for place, instance in enumerate(sorted(serving, key=lambda instance: instance.number)):
                leaves = place >= len(serving) - order.draining
                if leaves != (instance.state == "draining"):
                    instance.state = "draining" if leaves else "ready"
                    self.drains(instance, leaves)

    def _last(self, mine: list[Instance], count: int) -> list[Instance]:
        """Those that go: emptied ones first, then those being emptied, starting ones, and the newest."""
        ranks = {"draining": 0, "starting": 1, "ready": 2}
        order = sorted(mine, key=lambda goes: (ranks[goes.state], not self.is_empty(goes), -goes.number))
        return order[: max(count, 0)]

    def _count(self, name: str, change: int) -> None:
        if not change:
            return
        self.bill.moves += abs(change)
        before = self._turned.get(name)
        if before is not None and before[1] * change < 0 and self.now - before[0] < FLAP_S:
            self.bill.flaps += 1
        self._turned[name] = (self.now, change)

    def lose(self, supply: str, until: float) -> None:
        """Loses all of a supply until then; what was asked for starts again after that."""
        lost = next(known for known in self.rules.supplies if known.name == supply)
        self.out_until[supply] = until
        for instance in self.there[supply]:
            if instance.state != "starting":
                self.goes(instance)
            instance.state, instance.ready_s = "starting", until + self.start_s(lost)
