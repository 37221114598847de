"""A day with traffic as a fluid: what a controller would do, in seconds. What serves at a moment carries its requests
within their targets or not; queues are unknown."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from crosstie.decide.plan.programme import Array, Indices
from crosstie_gateway.scaler.forecast import DAY_S, shape_at
from crosstie_gateway.scaler.mixture import SupplyChoices
from crosstie_gateway.scaler.platform import Bill, Controller, Platform
from crosstie_gateway.scaler.rules import ScaleRules, Supply
from crosstie_gateway.scaler.scaler import Capacities

# How far starts scatter, as a logarithm's deviation; and windows of a day for what would be the least.
_SCATTER, _WINDOWS = 0.15, 144

# By class, requests/s where its day is 1, and that day.
Traffic = Mapping[str, tuple[float, tuple[float, ...]]]


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
    rules: ScaleRules, known: Capacities, controller: Controller, traffic: Traffic, begin: Mapping[str, int],
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


def fewest_gpus(rules: ScaleRules, known: Capacities, traffic: Traffic) -> list[float]:
    """The fewest GPUs that carry each ten minutes, had and given back at once, by someone who knows the day."""
    gpus = np.array([float(known.gpus[supply.pool]) for supply in rules.supplies])
    moments = [(window + 0.5) * DAY_S / _WINDOWS for window in range(_WINDOWS)]
    return [float(_for(rules, known, _demand(known, traffic, at), gpus) @ gpus) for at in moments]


def replicas_for(rules: ScaleRules, known: Capacities, traffic: Traffic, at_s: float) -> dict[str, int]:
    """By supply, the cheapest that carry what comes then; all that can be had where they do not."""
    price = np.array([known.usd_per_hour(supply) for supply in rules.supplies])
    counts = _for(rules, known, _demand(known, traffic, at_s), price)
    return dict(zip((supply.name for supply in rules.supplies), map(int, counts), strict=True))


def _for(rules: ScaleRules, known: Capacities, demand: Array, price: Array) -> Indices:
    most = np.array([supply.most for supply in rules.supplies], np.int64)
    fewest = _choices(rules, known, most, price).cheapest(demand)
    return most if fewest is None else fewest


def _demand(known: Capacities, traffic: Traffic, at_s: float) -> Array:
    now = {name: peak * shape_at(day, at_s) for name, (peak, day) in traffic.items()}
    return np.array([now[part.class_name] * part.share for part in known.parts])


def _choices(rules: ScaleRules, known: Capacities, most: Indices, price: Array | None = None) -> SupplyChoices:
    none = np.zeros(len(most))
    return SupplyChoices(
        rate=np.array([known.rate[supply.pool] for supply in rules.supplies]),
        usd_per_hour=none if price is None else price, floor=none.astype(np.int64), have=most, most=most, starting=none,
    )  # fmt: skip
