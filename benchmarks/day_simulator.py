"""A day in virtual time: a platform on which replicas are asked for, start, serve, are emptied and go, what they cost,
and what a controller would do there with traffic as a fluid, or request by request through the gateway's policy.

Beside the scaler there are a fleet that stays as it is, and Kubernetes' horizontal autoscaler as documented: every 15 s
replicas in proportion to the metric over its target, nothing within 10%, starting replicas counted as idle on the way
up and full on the way down, at most four or twice as many more in 15 s, and down to the highest of the last five
minutes. It knows neither prices nor other pools.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.fleet import Fleet
from crosstie.core.workload import Workload
from crosstie.decide.plan.programme import Array, Indices
from crosstie.decide.plan.traffic import Traffic, drawn
from crosstie.route.live import Replica
from crosstie.sim.fleet import FleetSimulator, SimulatedAnswer
from crosstie_gateway.scaler.learnt import DAY_S, shape_at
from crosstie_gateway.scaler.mixture import SupplyChoices
from crosstie_gateway.scaler.rules import ScaleRules, Supply
from crosstie_gateway.scaler.scaler import Capacities, FleetObservation, Order, Scaler

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


# Controllers


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


# Traffic as a fluid: what serves at a moment carries its requests within their targets or not; queues are unknown.

# How far starts scatter, as a logarithm's deviation; and windows of a day for what would be the least.
_SCATTER, _WINDOWS = 0.15, 144

# By class, requests/s where its day is 1, and that day.
DayTraffic = Mapping[str, tuple[float, tuple[float, ...]]]


@dataclass(frozen=True, slots=True)
class Loss:
    """A supply that is gone from a moment on for so long."""

    supply: str
    at_s: float
    for_s: float


@dataclass(slots=True)
class Day:
    """What a controller gave: requests and those within their targets by hour, and what the replicas cost."""

    bill: Bill
    requests: Counter[int] = field(default_factory=Counter)
    within: Counter[int] = field(default_factory=Counter)
    refused: int = 0
    # Moments, and replicas asked for and serving by supply.
    course: list[tuple[float, dict[str, int], dict[str, int]]] = field(default_factory=list)

    @property
    def share(self) -> float:
        return self.within.total() / max(self.requests.total(), 1)

    @property
    def worst_hour(self) -> tuple[int, float]:
        return min(((hour, self.within[hour] / n) for hour, n in self.requests.items()), key=lambda hour: hour[1])

    @property
    def gpu_hours(self) -> float:
        return self.bill.gpu_s / 3600.0


def fluid_day(
    rules: ScaleRules, known: Capacities, controller: Controller, traffic: DayTraffic, begin: Mapping[str, int],
    losses: Sequence[Loss] = (),
) -> Day:  # fmt: skip
    """`begin`: replicas that serve at the start."""
    chance = np.random.default_rng(0)

    def start_s(supply: Supply) -> float:
        return float((supply.start_s or known.start_s[supply.pool]) * np.exp(_SCATTER * chance.standard_normal()))

    price = {supply.name: known.usd_per_hour(supply) for supply in rules.supplies}
    platform = Platform(rules, known.gpus, price, start_s)
    platform.begin(begin)
    day, every = Day(platform.bill), controller.every_s
    losing = sorted(losses, key=lambda loss: -loss.at_s)
    for step in range(int(DAY_S / every)):
        at = (step + 1) * every
        platform.advance(at)
        while losing and losing[-1].at_s <= at:
            loss = losing.pop()
            platform.lose(loss.supply, at + loss.for_s)
        middle = at - 0.5 * every
        came = {name: float(chance.poisson(x * shape_at(d, middle) * every)) for name, (x, d) in traffic.items()}
        demand = _demand(known, traffic, middle)
        there = np.array([sum(o.state == "ready" for o in platform.there[supply.name]) for supply in rules.supplies])
        serving = _choices(rules, known, there)
        carried = 1.0 if serving.carries(demand) else serving.carried(demand)
        hour, total = int(at // 3600.0), round(sum(came.values()))
        day.requests[hour] += total
        day.within[hour] += round(total * carried)
        busy = dict.fromkeys(price, min(serving.load(demand), 1.0))
        platform.obey(controller.orders(platform.seen({n: c / every for n, c in came.items()}, every, busy)))
        asked = {name: len(mine) for name, mine in platform.there.items()}
        day.course.append((at, asked, dict(zip(platform.there, map(int, there), strict=True))))
    return day


def fewest_gpus(rules: ScaleRules, known: Capacities, traffic: DayTraffic) -> list[float]:
    """The fewest GPUs that carry each ten minutes, had and given back at once, by someone who knows the day."""
    gpus = np.array([float(known.gpus[supply.pool]) for supply in rules.supplies])
    moments = [(window + 0.5) * DAY_S / _WINDOWS for window in range(_WINDOWS)]
    return [float(_for(rules, known, _demand(known, traffic, at), gpus) @ gpus) for at in moments]


def replicas_for(rules: ScaleRules, known: Capacities, traffic: DayTraffic, at_s: float) -> dict[str, int]:
    """By supply, the cheapest that carry what comes then; all that can be had where they do not."""
    price = np.array([known.usd_per_hour(supply) for supply in rules.supplies])
    counts = _for(rules, known, _demand(known, traffic, at_s), price)
    return dict(zip((supply.name for supply in rules.supplies), map(int, counts), strict=True))


def _for(rules: ScaleRules, known: Capacities, demand: Array, price: Array) -> Indices:
    most = np.array([supply.most for supply in rules.supplies], np.int64)
    fewest = _choices(rules, known, most, price).cheapest(demand)
    return most if fewest is None else fewest


def _demand(known: Capacities, traffic: DayTraffic, at_s: float) -> Array:
    now = {name: peak * shape_at(day, at_s) for name, (peak, day) in traffic.items()}
    return np.array([now[part.class_name] * part.share for part in known.parts])


def _choices(rules: ScaleRules, known: Capacities, most: Indices, price: Array | None = None) -> SupplyChoices:
    none = np.zeros(len(most))
    return SupplyChoices(
        rate=np.array([known.rate[supply.pool] for supply in rules.supplies]),
        usd_per_hour=none if price is None else price, floor=none.astype(np.int64), have=most, most=most, starting=none,
    )  # fmt: skip


# Request by request

_MINUTE_S = 60.0


def day_traffic(
    workload: Workload, shape: tuple[float, ...], span_s: float, seed: int, begin_s: float = 0.0
) -> Traffic:
    """Requests of a workload's classes, at their peak rates times the shape of the day, at random moments."""
    chance = np.random.default_rng(seed)
    parts = [(number, one, piece) for number, one in enumerate(workload.classes) for piece in one.slices]
    rates = np.array([one.requests_per_s * piece.share for _, one, piece in parts])
    minutes = np.arange(begin_s, begin_s + span_s, _MINUTE_S)
    level = np.array([shape_at(shape, minute + 0.5 * _MINUTE_S) for minute in minutes])
    counts = chance.poisson(level * rates.sum() * _MINUTE_S)
    at = np.sort(np.repeat(minutes, counts) + chance.random(int(counts.sum())) * _MINUTE_S)
    _, kinds, inputs, outputs, cached = drawn(rates, [piece for _, _, piece in parts], len(at), chance)
    return Traffic(
        tuple((one.name, one.model) for one in workload.classes),
        at,
        np.array([number for number, _, _ in parts])[kinds],
        inputs,
        outputs,
        cached.astype(np.int64) if cached.any() else None,
        steady=False,
    )


class DaySimulator:
    def __init__(
        self, catalog: Catalog, fleet: Fleet, rules: ScaleRules, known: Capacities, controller: Controller, *,
        starts_s: Mapping[str, float] | None = None, seed: int = 0,
    ):  # fmt: skip
        """`starts_s`: by supply, how long starts really take, where the catalog's word is not to be kept."""
        chance = np.random.default_rng(seed + 1)
        self.rules, self.controller = rules, controller

        def start_s(one: Supply) -> float:
            usual = (starts_s or {}).get(one.name) or one.start_s or known.start_s[one.pool]
            return float(usual * np.exp(_SCATTER * chance.standard_normal()))

        self.platform = Platform(
            rules, known.gpus, {one.name: known.usd_per_hour(one) for one in rules.supplies}, start_s,
            came=self._came, drains=self._drains, goes=self._goes, is_empty=self._is_empty,
        )  # fmt: skip
        self.day = Day(self.platform.bill)
        # Since the last decision, by class.
        self.ended: Counter[str] = Counter()
        self.kept: Counter[str] = Counter()
        pools = tuple(
            msgspec.structs.replace(
                pool,
                backends=tuple(
                    _address(one.name, number)
                    for one in rules.supplies
                    if one.pool == pool.name
                    for number in range(one.most)
                ),
            )
            for pool in fleet.pools
            if any(one.pool == pool.name for one in rules.supplies)
        )
        scaled = msgspec.structs.replace(fleet, pools=pools)
        self.simulator = FleetSimulator(catalog, scaled, seed=seed, prefixes=False, tell=self._tell)
        self.replicas: dict[str, Replica] = {one.key: one for one in self.simulator.live.replicas()}
        for replica in self.replicas.values():
            replica.went_down("not there")

    def run(self, traffic: Traffic, begin: Mapping[str, int], losses: Sequence[Loss] = ()) -> Day:
        simulator, platform = self.simulator, self.platform
        simulator.now = platform.now = float(traffic.arrival_s[0] // _MINUTE_S * _MINUTE_S)
        platform.begin(begin)
        came: Counter[str] = Counter()
        last, decides = platform.now, platform.now + self.controller.every_s
        losing = sorted(losses, key=lambda one: -one.at_s)
        for request in traffic.requests():
            while (at := min(decides, platform.next_s, losing[-1].at_s if losing else np.inf)) <= request.arrival_s:
                simulator.advance(at)
                platform.advance(at)
                if losing and at >= losing[-1].at_s:
                    loss = losing.pop()
                    platform.lose(loss.supply, at + loss.for_s)
                if at >= decides:
                    rates = {name or "": count / (at - last) for name, count in came.items()}
                    ended = {name: (n, self.kept[name] / n) for name, n in self.ended.items()}
                    orders = self.controller.orders(platform.seen(rates, at - last, self._busy(), ended))
                    platform.obey(orders)
                    self._note(at)
                    for counted in (came, self.ended, self.kept):
                        counted.clear()
                    last, decides = at, at + self.controller.every_s
            simulator.advance(request.arrival_s)
            simulator.send(request)
            came[request.class_name or ""] += 1
        platform.advance(float(traffic.arrival_s[-1]))
        simulator.advance(np.inf)
        return self.day

    def _note(self, at: float) -> None:
        there = self.platform.there
        serving = {name: sum(one.state == "ready" for one in mine) for name, mine in there.items()}
        self.day.course.append((at, {name: len(mine) for name, mine in there.items()}, serving))

    def _tell(self, answer: SimulatedAnswer) -> None:
        hour = int(answer.request.arrival_s // 3600.0)
        name = answer.request.class_name or ""
        self.day.requests[hour] += 1
        self.ended[name] += 1
        if answer.pool is None:
            self.day.refused += 1
            return
        served = self.simulator.live.classes.get(name)
        ttft, tpot = (served.ttft, served.tpot) if served else (None, None)
        kept = (ttft is None or answer.ttft_s <= ttft.seconds) and (tpot is None or answer.tpot_s <= tpot.seconds)
        self.day.within[hour] += kept
        self.kept[name] += kept

    def _replica(self, one: Instance) -> Replica:
        return self.replicas[_address(one.supply, one.number)]

    def _came(self, one: Instance) -> None:
        self._replica(one).draining = False
        self.simulator.restore([self._replica(one)])

    def _drains(self, one: Instance, on: bool) -> None:
        replica = self._replica(one)
        replica.draining = on
        replica.touch()

    def _goes(self, one: Instance) -> None:
        self.simulator.fail([self._replica(one)], "not there")

    def _is_empty(self, one: Instance) -> bool:
        return self._replica(one).in_flight == 0

    def _busy(self) -> dict[str, float]:
        """By supply, of the KV caches of those that serve, the share that is taken: what people scale engines by."""
        found = {}
        for one in self.rules.supplies:
            ready = [other for other in self.platform.there[one.name] if other.state == "ready"]
            engines = [self.simulator.engines[_address(one.name, other.number)] for other in ready]
            found[one.name] = sum(engine.kv_used_fraction for engine in engines) / max(len(engines), 1)
        return found


def _address(supply: str, number: int) -> str:
    return f"http://{supply}-{number}"
