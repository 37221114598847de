"""A day with traffic as a fluid, for tests of what controllers decide: seconds where requests one by one take minutes."""

from collections.abc import Mapping, Sequence

import numpy as np

from crosstie.core.scaling import ScaleRules, Supply
from crosstie.decide.scale.day import Day, Loss
from crosstie.decide.scale.forecast import DAY_S, shape_at
from crosstie.decide.scale.mixture import Choices
from crosstie.decide.scale.platform import Controller, Platform
from crosstie.decide.scale.scaler import Capacities


def fluid_day(
    rules: ScaleRules, known: Capacities, controller: Controller, peaks: Mapping[str, float], shape: tuple[float, ...],
    begin: Mapping[str, int], *, seed: int = 0, span_s: float = DAY_S, losses: Sequence[Loss] = (), begin_s: float = 0.0,
) -> Day:  # fmt: skip
    """The same with traffic as a fluid: requests of a moment are within their targets as far as what serves carries
    them. Seconds where requests one by one take minutes, and nothing of queues."""
    chance = np.random.default_rng(seed)

    def start_s(one: Supply) -> float:
        return float((one.start_s or known.start_s[one.pool]) * np.exp(0.15 * chance.standard_normal()))

    def usd(one: Supply) -> float:
        price = known.usd_per_gpu_hour[one.pool] if one.usd_per_gpu_hour is None else one.usd_per_gpu_hour
        return price * known.gpus[one.pool]

    platform = Platform(rules, known.gpus, {one.name: usd(one) for one in rules.supplies}, start_s, now=begin_s)
    platform.begin(begin)
    day, every = Day(platform.bill), controller.every_s
    rate = np.array([known.rate[one.pool] for one in rules.supplies])
    losing = sorted(losses, key=lambda one: -one.at_s)
    share = np.array([part.share for part in known.parts])
    names = [part.class_name for part in known.parts]
    for step in range(int(span_s / every)):
        at = begin_s + (step + 1) * every
        platform.advance(at)
        while losing and losing[-1].at_s <= at:
            loss = losing.pop()
            platform.lose(loss.supply, at + loss.for_s)
        level = shape_at(shape, at - 0.5 * every)
        came = {name: float(chance.poisson(peak * level * every)) for name, peak in peaks.items()}
        demand = np.array([peaks[name] * level for name in names]) * share
        there = [sum(o.state == "ready" for o in platform.there[one.name]) for one in rules.supplies]
        serving = np.array(there, np.int64)
        none = np.zeros(len(serving))
        now = Choices(rate=rate, usd_per_hour=none, floor=serving, have=serving, most=serving, starting=none)
        carried = 1.0 if now.cheapest(demand) is not None else now.carried(demand)
        hour, total = int(at // 3600.0), round(sum(came.values()))
        day.requests[hour] += total
        day.within[hour] += round(total * carried)
        platform.obey(controller.orders(platform.seen({n: c / every for n, c in came.items()}, every, {})))
        asked = {name: len(mine) for name, mine in platform.there.items()}
        day.course.append((at, asked, dict(zip(platform.there, there, strict=True))))
    return day
