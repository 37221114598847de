"""How many replicas of each supply there should be, decided again and again from what is seen.

Up: the cheapest that carry the highest forecast until new ones would serve. Down: those that neither the last nor the
next needs want; they are emptied before they go. No clock, no I/O, and plain data as its state.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from crosstie.core.errors import BadInput
from crosstie.decide.plan.programme import Array, Indices
from crosstie_gateway.scaler.learnt import DAY_S, Forecast, LearntReach, StartTime
from crosstie_gateway.scaler.mixture import SupplyChoices
from crosstie_gateway.scaler.rules import ScaleRules, Supply

# Over which time a start's cost is spread; less where replicas are short, to prefer quick starts.
_BOUGHT_S, _SHORT_S = 3600.0, 600.0
# A supply that loses half its replicas at once, or delivers none in three times the usual time, is not counted on for
# so long; twice as long each time, up to an hour.
_HALF, _OVERDUE = 0.5, 3.0
_CLOSED_S, _LONGEST_CLOSED_S = 600.0, 3600.0
# A supply that has just grown gives nothing back for so long.
_STAYS_S = 1800.0
# The part of the forecast's margin that may be used up before more are bought; all of it soon after giving some back.
_USED = 0.5
# Requests/s above nothing: a class that expects it keeps a replica.
_LITTLE = 1e-9
# Replicas are not exchanged for others that would save less than this share of what all cost.
_SWAP = 0.1


@dataclass(frozen=True, slots=True)
class ClassPart:
    """Requests of a class that are alike: their share of it."""

    class_name: str
    share: float


@dataclass(frozen=True, slots=True)
class Capacities:
    """What one replica of each pool takes of each part, in requests/s; its GPUs, price and usual start."""

    parts: Sequence[ClassPart]
    rate: Mapping[str, Array]
    gpus: Mapping[str, int]
    usd_per_gpu_hour: Mapping[str, float]
    start_s: Mapping[str, float]

    def usd_per_hour(self, supply: Supply) -> float:
        """Of a replica, as it is paid."""
        price = self.usd_per_gpu_hour[supply.pool] if supply.usd_per_gpu_hour is None else supply.usd_per_gpu_hour
        return price * self.gpus[supply.pool]


class FleetObservation(msgspec.Struct, frozen=True, kw_only=True):
    """What there is. By class: requests/s of the last `over_s`; by supply: replicas that serve, that were asked for,
    that are emptied, and how busy they are, 1 being full."""

    at_s: float
    requests_per_s: dict[str, float]
    over_s: float
    ready: dict[str, int]
    wanted: dict[str, int]
    empty: dict[str, int] = {}
    busy: dict[str, float] = {}
    # By class, of the requests that ended meanwhile: how many, and the share that kept its targets.
    ended: dict[str, tuple[int, float]] = {}


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """Of one supply: replicas to have, those of them to be emptied, and why."""

    replicas: int
    draining: int
    why: str


class Need(msgspec.Struct, frozen=True, kw_only=True):
    """Of one class, requests/s: now, the most until `until_s`, and what is provided for."""

    now: float
    peak: float
    until_s: float
    margin: float
    provided: float


class ScaleDecision(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    orders: dict[str, Order]
    needs: dict[str, Need]
    usd_per_hour: float
    # What could not be done, in words; empty: nothing.
    short: str = ""


class SupplyState(msgspec.Struct, kw_only=True):
    start: StartTime
    ready: int = 0
    # When each that is not there yet was asked for, and when each that goes began to be emptied.
    pending: list[float] = []
    drains: list[float] = []
    # When it last grew, and when it last gave something back.
    grew_s: float = -1e18
    shrank_s: float = -1e18
    closed_until_s: float = -1.0
    closed_for_s: float = 0.0
    closed_why: str = ""
    # What was asked for until then teaches nothing of how long starts take.
    doubted_until_s: float = -1.0
    lost: int = 0
    replica_s: float = 0.0


class ScalerState(msgspec.Struct, kw_only=True):
    """All that a scaler remembers; kept in a file, it outlives a restart."""

    supplies: dict[str, SupplyState] = {}
    forecasts: dict[str, Forecast] = {}
    reach: dict[str, LearntReach] = {}
    # What was provided for lately, by class: moments and requests/s.
    lately: list[tuple[float, dict[str, float]]] = []
    at_s: float | None = None
    # Since midnight.
    spent_usd: float = 0.0


@dataclass(slots=True)
class Scaler:
    rules: ScaleRules
    known: Capacities
    # By class: the shape of its day.
    days: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    state: ScalerState = field(default_factory=ScalerState)

    def __post_init__(self) -> None:
        for supply in self.rules.supplies:
            if supply.pool not in self.known.rate:
                raise BadInput(f"supply {supply.name}: no pool '{supply.pool}'; there are {', '.join(self.known.rate)}")
            if supply.least > supply.most:
                raise BadInput(f"supply {supply.name}: least {supply.least} is more than most {supply.most}")
            start = StartTime.of(supply.start_s or self.known.start_s[supply.pool])
            self.state.supplies.setdefault(supply.name, SupplyState(start=start))
        for name in dict.fromkeys(part.class_name for part in self.known.parts):
            self.state.reach.setdefault(name, LearntReach())
            known = self.state.forecasts.setdefault(name, Forecast())
            known.shape, known.offset_s = self.days.get(name, ()), 3600.0 * self.rules.utc_offset_hours

    def decide(self, seen: FleetObservation) -> ScaleDecision:
        now, supplies = seen.at_s, self.rules.supplies
        self._learn(seen)
        lead_s = max(self._start_s(supply) for supply in supplies) + self.rules.every_s
        needs = self._needs(now, lead_s)
        provided = {name: need.provided for name, need in needs.items()}
        keep = self._keep(now, lead_s, provided)
        up, down = self._choices(seen), self._serving(seen)
        demand = self._by_part(provided)
        # Whether those that serve cannot carry what comes now.
        short_now = not down.carries(self._by_part(self._now(seen)))
        cheapest, short = self._target(up, demand, now, short_now)
        target = self._settled(up, cheapest, demand, needs, now)
        stays = down.cheapest(self._by_part(keep))
        orders = {
            # What would soon be bought again does not go, even where something dearer cannot go yet.
            supply.name: self._order(
                supply, seen, int(target[i]), None if stays is None else int(max(stays[i], cheapest[i]))
            )
            for i, supply in enumerate(supplies)
        }
        paid = sum(orders[supply.name].replicas * self.known.usd_per_hour(supply) for supply in supplies)
        return ScaleDecision(at_s=now, orders=orders, needs=needs, usd_per_hour=paid, short=short)

    # What is seen

    def _learn(self, seen: FleetObservation) -> None:
        now, state = seen.at_s, self.state
        passed = 0.0 if state.at_s is None else max(now - state.at_s, 0.0)
        for name, forecast in state.forecasts.items():
            forecast.see(now, seen.requests_per_s.get(name, 0.0), seen.over_s)
        for supply in self.rules.supplies:
            mine, ready = state.supplies[supply.name], seen.ready.get(supply.name, 0)
            wanted = seen.wanted.get(supply.name, 0)
            mine.replica_s += passed * ready
            state.spent_usd += passed / 3600.0 * self.known.usd_per_hour(supply) * max(ready, wanted)
            if state.at_s is None:
                mine.pending = [now] * max(wanted - ready, 0)
            else:
                self._changed(mine, ready, wanted, now)
            mine.ready = ready
        if state.at_s is not None and self._day(now) != self._day(state.at_s):
            state.spent_usd = 0.0
        state.at_s = now
        self._judge(seen)

    def _judge(self, seen: FleetObservation) -> None:
        if not seen.ended:
            return
        load = self._serving(seen).load(self._by_part(self._now(seen)))
        for name, (ended, within) in seen.ended.items():
            if name in self.state.reach:
                self.state.reach[name].see(ended, within, seen.over_s, load, self.rules.within)

    def _now(self, seen: FleetObservation) -> dict[str, float]:
        return {name: forecast.now_per_s(seen.at_s) for name, forecast in self.state.forecasts.items()}

    def _changed(self, mine: SupplyState, ready: int, wanted: int, now: float) -> None:
        came, lost = ready - mine.ready, min(mine.ready, wanted) - ready
        if came > 0:
            for asked in mine.pending[:came]:
                if asked > mine.doubted_until_s and now > asked:
                    mine.start.see(now - asked)
            del mine.pending[:came]
            mine.closed_until_s, mine.closed_for_s = min(mine.closed_until_s, now), 0.0
        if lost > 0:
            mine.lost += lost
            mine.pending += [now] * lost
            if ready == 0 or (lost > 1 and lost >= _HALF * mine.ready):
                self._close(mine, now, f"lost {lost} of {mine.ready} at once")
            del mine.drains[max(ready, 0) :]
        missing = max(wanted - ready, 0)
        # The platform, or a person, may have asked for others.
        mine.pending = [*mine.pending, *[now] * (missing - len(mine.pending))][:missing]
        if mine.pending and now >= mine.closed_until_s and now - mine.pending[0] > _OVERDUE * mine.start.late_s:
            waited = now - mine.pending[0]
            self._close(mine, now, f"{missing} asked for {waited / 60:.0f} min ago have not come")
            mine.pending = [mine.closed_until_s] * missing

    def _close(self, mine: SupplyState, now: float, why: str) -> None:
        mine.closed_for_s = min(2.0 * mine.closed_for_s, _LONGEST_CLOSED_S) if mine.closed_for_s else _CLOSED_S
        mine.closed_until_s = mine.doubted_until_s = now + mine.closed_for_s
        mine.closed_why = why

    def _is_closed(self, name: str) -> bool:
        return (self.state.at_s or 0.0) < self.state.supplies[name].closed_until_s

    def _start_s(self, supply: Supply) -> float:
        return self.state.supplies[supply.name].start.late_s

    # What is needed

    def _day(self, at_s: float) -> int:
        return int((at_s + 3600.0 * self.rules.utc_offset_hours) // DAY_S)

    def _needs(self, now: float, lead_s: float) -> dict[str, Need]:
        needs, until = {}, now + lead_s
        for name, forecast in self.state.forecasts.items():
            peak = self._worth_having(forecast.peak(now, until))
            needs[name] = Need(
                now=forecast.now_per_s(now), peak=peak, until_s=until, margin=forecast.margin,
                provided=peak * forecast.margin * (1.0 + self.rules.spare),
            )  # fmt: skip
            forecast.promise(now, until)
        return needs

    def _worth_having(self, per_s: float) -> float:
        """Nothing, where a pool may go to zero and so little is expected; else at least a little, so that one replica
        stays."""
        if self.rules.to_zero:
            return per_s if per_s * max(self.rules.settle_s, _STAYS_S) >= 1.0 else 0.0
        return max(per_s, _LITTLE)

    def _keep(self, now: float, lead_s: float, provided: dict[str, float]) -> dict[str, float]:
        """The most that was provided for lately, or will be when what goes now could be back: below it nothing goes."""
        state = self.state
        state.lately = [moment for moment in state.lately if moment[0] > now - self.rules.settle_s]
        state.lately.append((now, provided))
        kept = {}
        for name, forecast in state.forecasts.items():
            later = self._worth_having(forecast.peak(now, now + lead_s + max(self.rules.settle_s, _STAYS_S)))
            later *= 1.0 + self.rules.spare
            # What chance gives back it soon wants again.
            later *= forecast.margin * (1.0 + forecast.chance(now))
            kept[name] = max(later, *(past.get(name, 0.0) for _, past in state.lately))
        return kept

    def _by_part(self, by_class: Mapping[str, float]) -> Array:
        """Requests/s by part, divided by what replicas have shown to take over the plan."""
        reach = {name: reach_of.factor for name, reach_of in self.state.reach.items()}
        return np.array([by_class[p.class_name] * p.share / reach[p.class_name] for p in self.known.parts])

    # What there is to choose from

    def _choices(self, seen: FleetObservation) -> SupplyChoices:
        supplies = self.rules.supplies
        ready = np.array([seen.ready.get(supply.name, 0) for supply in supplies], np.int64)
        wanted = np.array([seen.wanted.get(supply.name, 0) for supply in supplies], np.int64)
        closed = np.array([self._is_closed(supply.name) for supply in supplies])
        most = np.array([supply.most for supply in supplies], np.int64)
        return SupplyChoices(
            rate=np.array([self.known.rate[supply.pool] for supply in supplies]),
            usd_per_hour=np.array([self._weighed_usd(supply) for supply in supplies]),
            floor=np.array([supply.least for supply in supplies], np.int64),
            have=np.where(closed, ready, np.maximum(ready, wanted)),
            most=np.where(closed, np.minimum(ready, most), most),
            starting=np.array([self._start_s(supply) / _BOUGHT_S for supply in supplies]),
        )

    def _weighed_usd(self, supply: Supply) -> float:
        """What a replica costs more than not having it: nothing where it is paid anyway; with its losses where it may
        be taken."""
        if supply.kind == "reserved":
            return 0.0
        mine = self.state.supplies[supply.name]
        hours = mine.replica_s / 3600.0
        # Its own losses count for more the longer it was watched: a day of one replica as much as what the rules say.
        lost = (supply.lost_per_hour * 24.0 + mine.lost) / (24.0 + hours)
        return self.known.usd_per_hour(supply) * (1.0 + lost * self._start_s(supply) / 3600.0)

    def _serving(self, seen: FleetObservation) -> SupplyChoices:
        """Only those that serve now."""
        supplies, state = self.rules.supplies, self.state.supplies
        there = [max(seen.ready.get(supply.name, 0) - len(state[supply.name].drains), 0) for supply in supplies]
        serving, every = np.array(there, np.int64), self._choices(seen)
        floor, starting = np.minimum(every.floor, serving), np.zeros(len(supplies))
        return replace(every, floor=floor, have=serving, most=serving, starting=starting)

    # What to have

    def _target(self, up: SupplyChoices, demand: Array, now: float, short_now: bool) -> tuple[Indices, str]:
        supplies = self.rules.supplies
        if short_now:
            up = replace(up, starting=up.starting * (_BOUGHT_S / _SHORT_S))
        steady = np.array([supply.kind != "spot" for supply in supplies])
        if not steady.all():
            # What must not depend on spot replicas is found first, and is there in any case.
            alone = replace(up, most=np.where(steady, up.most, 0), have=np.where(steady, up.have, 0))
            base = alone.cheapest(demand * (1.0 - self.rules.spot_share))
            up = replace(up, floor=np.maximum(up.floor, np.where(steady, up.most, 0) if base is None else base))
        chosen, whys = up.cheapest(demand), []
        limit = self._budget(now)
        if chosen is None:
            share = up.carried(demand)
            chosen = up.cheapest(demand * share)
            full = [supply.name for supply, most in zip(supplies, up.most, strict=True) if most >= supply.most]
            out = [supply.name for supply in supplies if self._is_closed(supply.name)]
            whys.append(
                f"all replicas that can be had carry {share:.0%} of what is needed"
                + (f"; raise `most` of {', '.join(full)}" if full else "")
                + (f"; not counted on: {', '.join(out)}" if out else "")
            )
        if chosen is None:
            chosen = up.have
        if limit is not None and float(chosen @ self._paid()) > limit * (1.0 + 1e-9):
            paid = replace(up, usd_per_hour=self._paid())
            within = paid.cheapest(demand, limit)
            if within is None:
                share = paid.carried(demand, limit)
                within = paid.cheapest(demand * share, limit)
                whys.append(f"the budget ({limit:.2f} USD/h now) carries {share:.0%} of what is needed")
            chosen = np.minimum(up.floor, up.most) if within is None else within
        return chosen, "; ".join(whys)

    def _settled(
        self, up: SupplyChoices, target: Indices, demand: Array, needs: Mapping[str, Need], now: float
    ) -> Indices:  # fmt: skip
        """Buys nothing while what there is carries the forecast: the margin may be used, or replicas would come and go.
        Nor does it swap replicas unless that saves much."""
        supplies, mine = self.rules.supplies, self.state.supplies
        there = replace(up, have=np.maximum(up.have - [len(mine[supply.name].drains) for supply in supplies], 0))
        if not (target > there.have).any() or (there.have < np.minimum(up.floor, up.most)).any():
            return target
        steady = np.array([supply.kind != "spot" for supply in supplies])
        paid, limit = up.usd_per_hour, self._budget(now)
        if limit is not None and float(there.have @ self._paid()) > limit:
            return target
        lately = any(now - state.shrank_s < _STAYS_S for state in mine.values())
        if (target < there.have).any():
            # What must not depend on spot replicas stays in it.
            least = up.floor if steady.all() else np.maximum(up.floor, np.where(steady, target, 0))
            beside = replace(up, floor=np.maximum(least, there.have)).cheapest(demand)
            if beside is None or (not lately and float(beside @ paid) > (1.0 + _SWAP) * float(target @ paid)):
                return target
            if limit is not None and float(beside @ self._paid()) > limit:
                return target
            target = beside
        used = 1.0 if lately else _USED
        needed = self._by_part(
            {
                name: need.peak * (1.0 + self.rules.spare) * (1.0 + (need.margin - 1.0) * (1.0 - used))
                for name, need in needs.items()
            }
        )
        alone = replace(there, have=np.where(steady, there.have, 0))
        enough = there.carries(needed) and (steady.all() or alone.carries(needed * (1.0 - self.rules.spot_share)))
        return there.have if enough else target

    def _paid(self) -> Array:
        return np.array([self.known.usd_per_hour(supply) for supply in self.rules.supplies])

    def _budget(self, now: float) -> float | None:
        """USD an hour that may be spent now; a day's rest is spread as traffic goes."""
        limits = [] if self.rules.budget_usd_per_hour is None else [self.rules.budget_usd_per_hour]
        if self.rules.budget_usd_per_day is not None:
            left = max(self.rules.budget_usd_per_day - self.state.spent_usd, 0.0)
            rest_s = DAY_S - (now + 3600.0 * self.rules.utc_offset_hours) % DAY_S
            moments = [now + rest_s * step / 24 for step in range(24)]
            traffic = [sum(forecast.at(now, at) for forecast in self.state.forecasts.values()) for at in moments]
            mean = sum(traffic) / len(traffic)
            limits.append(left / (rest_s / 3600.0) * (traffic[0] / mean if mean else 1.0))
        return min(limits) if limits else None

    def _order(self, supply: Supply, seen: FleetObservation, target: int, stays: int | None) -> Order:
        """`target`: replicas to have; `stays`: how many of those that serve must stay."""
        now, mine = seen.at_s, self.state.supplies[supply.name]
        ready, wanted = seen.ready.get(supply.name, 0), seen.wanted.get(supply.name, 0)
        closed = self._is_closed(supply.name)
        said = []
        if stays is None and mine.drains:
            # The others no longer carry what was and will be needed: these would soon be bought again.
            said.append(f"{len(mine.drains)} kept that were being emptied")
            mine.drains.clear()
        over = len([since for since in mine.drains if now - since >= self.rules.drain_s])
        gone = min(max(over, seen.empty.get(supply.name, 0)), len(mine.drains))
        del mine.drains[:gone]
        if gone:
            mine.shrank_s = now
        wanted -= gone
        counted = (ready - gone if closed else max(wanted, ready - gone)) - len(mine.drains)
        if gone:
            said.append(f"{gone} emptied and given back")
        if target > counted:
            kept = min(len(mine.drains), target - counted)
            if kept:
                del mine.drains[len(mine.drains) - kept :]
                said.append(f"{kept} kept that were being emptied")
            new = 0 if closed else max(min(target - counted - kept, supply.most - wanted), 0)
            if new:
                mine.pending += [now] * new
                mine.grew_s = now
                wanted += new
                said.append(f"{new} more: serving in about {mine.start.likely_s / 60:.0f} min")
        elif stays is not None and now - mine.grew_s >= _STAYS_S:
            free = ready - gone - len(mine.drains) - max(stays, supply.least)
            if free > 0:
                mine.drains += [now] * free
                mine.shrank_s = now
                said.append(f"{free} to be emptied: the others carry what was and will be needed")
        if closed:
            said.append(f"not counted on until {clock(mine.closed_until_s, self.rules)}: {mine.closed_why}")
        # What is over the floor, where somebody has set fewer.
        if wanted < supply.least:
            mine.pending += [now] * (supply.least - wanted)
            said.append(f"floor of {supply.least}")
            wanted = supply.least
        return Order(replicas=wanted, draining=len(mine.drains), why="; ".join(said) or "as it is")


def clock(at_s: float, rules: ScaleRules) -> str:
    """The time of day, as rules have it."""
    minutes = int((at_s + 3600.0 * rules.utc_offset_hours) % DAY_S // 60)
    return f"{minutes // 60:02d}:{minutes % 60:02d}"
