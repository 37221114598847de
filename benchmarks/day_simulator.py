"""A day of requests through a fleet that is scaled, in virtual time: the gateway's policy, engines in steps, and
whatever controller says how many replicas there are."""

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.fleet import Fleet
from crosstie.core.workload import Workload
from crosstie.decide.plan.traffic import Traffic, drawn
from crosstie.route.live import Replica
from crosstie.sim.fleet import FleetSimulator, SimulatedAnswer
from crosstie_gateway.scaler.forecast import shape_at
from crosstie_gateway.scaler.rules import ScaleRules, Supply
from crosstie_gateway.scaler.scaler import Capacities
from virtual_day import Controller, Day, Instance, Loss, Platform

_MINUTE_S = 60.0
# How far starts scatter, as a logarithm's deviation.
_SCATTER = 0.15


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
