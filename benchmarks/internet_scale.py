"""1,000 replicas in 20 pools, three regions, 10,000 requests a second: simulated behind the gateways' own policies.

    python benchmarks/internet_scale.py [--policy cheapest-meeting-target] [--seconds 40] [--scale 1.0] [--json FILE]
    python benchmarks/internet_scale.py --draw RESULT.json ... --picture docs/img/internet-scale.svg

Engines are those of `sim.engine`, decisions and corrections those of `route`, one router for each of 12 gateways, which
know of each other what the gateways' `share` would tell them: what has changed every 20 ms, through one Redis in the
first region, so that it is old by the way there and on. No GPU runs, and no network: both are data. `--scale 0.1` has
a tenth of the replicas and of the traffic. Faults come one after the other: a pool is lost for good, then a gateway,
then a region.

Under `--scope region` a gateway knows the pools of its own region only, as regional balancers do.
"""

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from heapq import heappop, heappush
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import BLOCK_TOKENS
from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Fleet, Pool, ServedClass
from crosstie.core.workload import Target
from crosstie.route.admission import WaitingRoom
from crosstie.route.ask import Ask
from crosstie.route.build import Tables, deployment_of, live_fleet
from crosstie.route.decision import Decision
from crosstie.route.live import Flight
from crosstie.route.policies import POLICIES, make_policy
from crosstie.route.router import Router
from crosstie.sim.engine import Engine
from queueing import QueueingGateway

MODEL = "llama-3.3-70b"
# East US, West Europe, Southeast Asia: round trips, 95th percentile of 30 days to 2026-07-30, seconds. Microsoft's page
# "Azure network round-trip latency statistics" (mbender-ms/azure-docs@5b3e2055, articles/networking).
REGIONS = ("us", "eu", "asia")
ROUND_TRIP_S = {("us", "eu"): 0.091, ("us", "asia"): 0.229, ("eu", "asia"): 0.181}
# Shares of the requests, and pools: accelerators of TP4 replicas, 50 a pool. Assumed.
TRAFFIC = {"us": 0.40, "eu": 0.33, "asia": 0.27}
KINDS = {
    "us": ("mi300x", "mi300x", "mi300x", "mi355x", "h100-sxm", "h100-sxm", "h200", "h200"),
    "eu": ("mi300x", "mi300x", "mi300x", "mi355x", "h100-sxm", "h100-sxm", "h200"),
    "asia": ("mi300x", "mi300x", "mi355x", "h100-sxm", "h200"),
}
# US dollars a GPU-hour, of the order of what the catalog has on demand; only their order matters here.
PRICES = {"mi300x": 2.39, "mi355x": 3.45, "h100-sxm": 2.29, "h200": 2.9}
# Requests in flight on a replica: what keeps TPOT by the model, as a plan has it.
IN_FLIGHT = {"mi300x": 90, "mi355x": 200, "h100-sxm": 150, "h200": 165}
EACH, GATEWAYS, RATE = 50, 4, 10_000.0
TTFT_S, TPOT_S = 1.0, 0.05
# Nobody's traffic comes from nothing at once.
RAMP_FROM, RAMP_S = 0.2, 12.0
TELL_S, SILENT_S, NEAR_S = 0.02, 3.0, 0.001
# Prompts and answers in tokens, and whose prompts begin alike.
INPUT, OUTPUT, TENANTS = 800.0, 200.0, 400


def way_s(one: str, other: str) -> float:
    """A round trip."""
    if one == other:
        return NEAR_S
    return ROUND_TRIP_S.get((one, other)) or ROUND_TRIP_S[other, one]


class Sent:
    """A request on its way: what it is, and through whom it went where."""

    __slots__ = ("asked_s", "extra_s", "first_s", "flight", "gateway", "made", "number", "origin", "output", "prefix",
                 "tokens")  # fmt: skip

    def __init__(self, number: int, asked_s: float, origin: str, tokens: int, output: int, prefix: tuple[int, ...]):
        self.number, self.asked_s, self.origin = number, asked_s, origin
        self.tokens, self.output, self.prefix = tokens, output, prefix
        self.made, self.first_s, self.extra_s = 0, inf, 0.0
        self.flight: Flight | None = None
        self.gateway: Gateway | None = None


class LateCell:
    """A replica as one gateway tells of it, and as it hears of it from the others: `route.load.Cell`."""

    __slots__ = ("_gateway", "_index", "_seen", "busy_until")

    def __init__(self, gateway: "Gateway", index: int):
        self._gateway, self._index, self._seen, self.busy_until = gateway, index, 0, -inf

    def write(
        self, in_flight: int, waiting: int, waiting_tokens: float, held_tokens: float, decoding_tokens: float,
        prompt_rate: float, rate_at: float, ttft_urgency: float, tpot_urgency: float, head_at: float,
        head_tokens: float, first_at: float,
    ) -> None:  # fmt: skip
        self._gateway.news[self._index] = (
            in_flight, waiting, waiting_tokens, held_tokens, decoding_tokens, prompt_rate
        )  # fmt: skip

    @property
    def changed(self) -> bool:
        return self._gateway.heard.stamps[self._index] != self._seen

    def in_flight_elsewhere(self) -> int:
        gateway, index = self._gateway, self._index
        own = gateway.heard.by_gateway[gateway.number].get(index)
        return max(int(gateway.heard.sums[index][0] - (own[0] if own else 0)), 0)

    def read(self) -> list[tuple[float, ...]]:
        gateway, index = self._gateway, self._index
        heard = gateway.heard
        self._seen = heard.stamps[index]
        total, own = heard.sums[index], heard.by_gateway[gateway.number].get(index)
        left = [max(a - b, 0.0) for a, b in zip(total, own, strict=True)] if own else total
        if left[0] < 0.5:
            return []
        # All requests have the same targets; nothing is told here of the prompts that are being computed.
        return [(*left, heard.at[index], 1.0 / TTFT_S, 1.0 / TPOT_S, inf, 0.0, -inf)]

    def tell(self, **common: float) -> None:
        """Nobody is full by its word here."""


class Heard:
    """What one region knows of all gateways by now."""

    def __init__(self, replicas: int, gateways: int):
        self.sums = [[0.0] * 6 for _ in range(replicas)]
        self.stamps, self.at = [0] * replicas, [0.0] * replicas
        self.by_gateway: list[dict[int, tuple[float, ...]]] = [{} for _ in range(gateways)]

    def hear(self, gateway: int, news: dict[int, tuple[float, ...]], now: float) -> None:
        known = self.by_gateway[gateway]
        for index, told in news.items():
            before, total = known.get(index), self.sums[index]
            for field in range(6):
                total[field] += told[field] - (before[field] if before else 0.0)
            known[index] = told
            self.stamps[index] += 1
            self.at[index] = now

    def forget(self, gateway: int, now: float) -> None:
        self.hear(gateway, dict.fromkeys(self.by_gateway[gateway], (0.0,) * 6), now)


class Gateway(QueueingGateway):
    def __init__(self, world: "World", number: int, region: str):
        self.world: World = world
        self.number, self.region = number, region
        self.heard = world.heard[region]
        self.news: dict[int, tuple[float, ...]] = {}
        self.alive = True
        pools = [
            msgspec.structs.replace(one, network_s=way_s(region, world.region_of[one.name]))
            for one in world.pools
            if world.scope == "all" or world.region_of[one.name] == region
        ]
        fleet = Fleet(name=region, planned="", policy="cheapest-meeting-target", pools=tuple(pools), classes=(CHAT,))
        self.live = live_fleet(world.catalog, fleet, 0.0, tables=world.tables)
        self.router = Router(self.live, make_policy(world.policy, number))  # type: ignore[arg-type]
        self.queue_s = fleet.serving.queue_s
        self.room = WaitingRoom(fleet.serving.max_queued)
        if world.shares:
            cells: dict[str, Any] = {one.key: LateCell(self, world.index[one.key]) for one in self.live.replicas()}
            self.router.share(cells)
        self.news.clear()
        self.by_pool = {pool.name: pool for pool in self.live.pools}

    def take(self, sent: Sent) -> None:
        now = self.world.now
        ask = Ask(
            model=MODEL, class_name="chat", input_tokens=float(sent.tokens + sent.made),
            output_tokens=self.live.lengths.expected_output("chat", MODEL, None), ttft_s=TTFT_S, tpot_s=TPOT_S,
            prefix=sent.prefix, patience_s=self.queue_s, waited_s=now - sent.asked_s,
        )  # fmt: skip
        sent.gateway = self
        self.place(sent, ask, self.decide(ask, now), self.queue_s)

    def decide(self, ask: Ask, now: float) -> Decision:
        began = time.process_time_ns()
        decision = super().decide(ask, now)
        self.world.spent_ns += time.process_time_ns() - began
        self.world.decisions += 1
        return decision


CHAT = ServedClass(
    name="chat", model=MODEL, requests_per_s=RATE, input_tokens=INPUT, output_tokens=OUTPUT,
    ttft=Target(seconds=TTFT_S, percentile=0.95), tpot=Target(seconds=TPOT_S, percentile=0.95), routes=(),
)  # fmt: skip


class World:
    def __init__(self, policy: str, scale: float, scope: str, seed: int, shares: bool, load: float):
        self.policy, self.scope, self.shares, self.rate = policy, scope, shares, RATE * scale * load
        self.catalog, self.tables, self.random = Catalog([]), Tables(), Random(seed)
        self.now, self.decisions, self.spent_ns, self.told, self.messages = 0.0, 0, 0, 0, 0
        each = max(int(EACH * scale), 1)
        self.pools, self.region_of = [], {}
        for region in REGIONS:
            for n, kind in enumerate(KINDS[region]):
                name = f"{region}-{kind}-{n}"
                self.region_of[name] = region
                self.pools.append(Pool(
                    name=name, model=MODEL, accelerator=kind, parallelism=Parallelism(tp=4), precision="fp8",
                    kv_format="bf16", stack="vllm", replicas=each, usd_per_gpu_hour=PRICES[kind],
                    max_in_flight=IN_FLIGHT[kind],
                    max_context=32_768, backends=tuple(f"http://{name}-{i}.internal:8000/v1" for i in range(each)),
                ))  # fmt: skip
        keys = [key for pool in self.pools for key in pool.backends]
        self.index = {key: n for n, key in enumerate(keys)}
        self.heard = {region: Heard(len(keys), GATEWAYS * len(REGIONS)) for region in REGIONS}
        self.gateways = [Gateway(self, n, REGIONS[n // GATEWAYS]) for n in range(GATEWAYS * len(REGIONS))]
        self.engines: dict[str, Engine] = {}
        for pool in self.pools:
            deployment = deployment_of(self.catalog, pool)
            assert deployment is not None
            times = self.tables.times(pool, deployment, INPUT + 0.5 * OUTPUT)
            for key in pool.backends:
                self.engines[key] = Engine(
                    deployment, INPUT + 0.5 * OUTPUT, times=times, prefix_tokens=BLOCK_TOKENS
                )  # fmt: skip
        self.planned: dict[str, float] = {}
        self.events: list[tuple[float, int, str, Any]] = []
        self.order = 0
        self.flying: dict[int, Sent] = {}
        self.lost_regions: set[str] = set()
        self.lost_pools: set[str] = set()
        # Of every request: the second it came in, seconds to its first token and per token, dollars, and how it ended.
        self.ended: list[tuple[float, float, float, float, str, str, str]] = []

    def at(self, moment: float, kind: str, what: Any) -> None:
        self.order += 1
        heappush(self.events, (moment, self.order, kind, what))

    # Traffic

    def arrivals(self, seconds: float) -> Iterator[Sent]:
        random, at, number = self.random, 0.0, 0
        regions, weights = list(TRAFFIC), list(TRAFFIC.values())
        while True:
            at += random.expovariate(self.rate * min(RAMP_FROM + (1.0 - RAMP_FROM) * at / RAMP_S, 1.0))
            if at > seconds:
                return
            number += 1
            tokens = min(max(int(random.lognormvariate(6.4, 0.75)), 20), 16_000)
            output = min(max(int(random.lognormvariate(5.05, 0.7)), 16), 2000)
            prefix = (random.randrange(TENANTS) + 1,) if tokens > BLOCK_TOKENS and random.random() < 0.5 else ()
            yield Sent(number, at, random.choices(regions, weights)[0], tokens, output, prefix)

    def receive(self, sent: Sent) -> None:
        """A balancer of its region has it; with that lost, the nearest other one."""
        there = [one for one in REGIONS if one not in self.lost_regions]
        region = min(there, key=lambda one: way_s(sent.origin, one))
        sent.extra_s = way_s(sent.origin, region) if region != sent.origin else 0.0
        alive = [one for one in self.gateways if one.region == region and one.alive]
        alive[self.random.randrange(len(alive))].take(sent)

    def sent(self, sent: Sent, gateway: Gateway, flight: Flight) -> None:
        sent.flight = flight
        self.flying[sent.number] = sent
        key = flight.replica.key
        # It is there after half the way.
        arrives = self.now + 0.5 * flight.replica.pool.network_s
        self.engines[key].add(
            sent.number, sent.tokens + sent.made, sent.output - sent.made, arrives, 0, sent.prefix
        )  # fmt: skip
        self.plan(key)

    def plan(self, key: str) -> None:
        moment = self.engines[key].next_event_s()
        if moment is None:
            self.planned.pop(key, None)
        elif self.planned.get(key) != moment:
            self.planned[key] = moment
            self.at(moment, "engine", (key, moment))

    def step(self, key: str, moment: float) -> None:
        if self.planned.get(key) != moment:
            return
        for number, tokens, finished, at, _ in self.engines[key].advance(moment):
            sent = self.flying.get(number)
            if sent is None or sent.flight is None:
                continue
            back = 0.5 * sent.flight.replica.pool.network_s
            if back > NEAR_S:
                self.at(at + back, "token", (sent, sent.flight, tokens == 1, finished, at + back))
            else:
                self.token(sent, sent.flight, tokens == 1, finished, at + back)
        self.plan(key)

    def token(self, sent: Sent, flight: Flight, first: bool, finished: bool, at: float) -> None:
        if sent.flight is not flight:
            return
        if first and not sent.made:
            flight.first_token(at)
            sent.first_s = at
        elif first:
            flight.decode_from(at)
        if not finished:
            return
        del self.flying[sent.number]
        whole = not sent.made
        flight.end(at, output_tokens=sent.output if whole else None, input_tokens=sent.tokens, completed=whole)
        usd = flight.charge_usd(float(sent.tokens), float(sent.output))
        ttft_s = sent.first_s - sent.asked_s + sent.extra_s
        tpot_s = (at - sent.first_s) / (sent.output - 1)
        self.end(sent, ttft_s, tpot_s, usd, flight.replica.pool.name, "done" if whole else "resumed")
        assert sent.gateway is not None
        if len(sent.gateway.room):
            sent.gateway.let_in()

    def end(self, sent: Sent, ttft_s: float, tpot_s: float, usd: float, pool: str, how: str) -> None:
        self.ended.append((sent.asked_s, ttft_s, tpot_s, usd, sent.origin, pool, how))

    def refused(self, sent: Sent) -> None:
        self.end(sent, inf, inf, 0.0, "", "refused")

    # What gateways tell each other

    def tell(self, gateway: Gateway) -> None:
        if not gateway.alive:
            return
        self.at(self.now + TELL_S, "tell", gateway)
        news, gateway.news = gateway.news, {}
        gateway.expire()
        if not news or not self.shares:
            return
        self.told, self.messages = self.told + len(news), self.messages + 1
        for region in REGIONS:
            through = 0.5 * (way_s(gateway.region, "us") + way_s("us", region))
            self.at(self.now + through, "hear", (region, gateway.number, news))

    # Faults

    def lose_pools(self, names: set[str]) -> int:
        """Connections break, and what was begun goes on elsewhere, where its gateway lives."""
        self.lost_pools |= names
        for gateway in self.gateways:
            for name in names:
                pool = gateway.by_pool.get(name)
                for replica in pool.replicas if pool is not None else ():
                    replica.went_down("lost")
        cut = [one for one in self.flying.values() if one.flight and one.flight.replica.pool.name in names]
        for sent in cut:
            flight = sent.flight
            assert flight is not None
            engine = self.engines[flight.replica.key]
            made = engine.made(sent.number)
            engine.cancel(sent.number)
            flight.end(self.now, output_tokens=None, input_tokens=None, completed=False)
            del self.flying[sent.number]
            sent.flight, sent.made = None, min(sent.made + made, sent.output - 2) if made else sent.made
            if sent.gateway is not None and sent.gateway.alive:
                sent.gateway.take(sent)
            else:
                self.end(sent, inf, inf, 0.0, "", "broken")
        for gone in self.pools:
            for key in gone.backends if gone.name in names else ():
                self.plan(key)
        return len(cut)

    def lose_gateways(self, lost: list[Gateway]) -> int:
        """Their clients are cut off, and engines stop what nobody waits for."""
        for gateway in lost:
            gateway.alive = False
            self.at(self.now + SILENT_S, "forget", gateway.number)
            for ticket in gateway.room.expired(inf):
                self.end(ticket.item, inf, inf, 0.0, "", "broken")
        cut = [one for one in self.flying.values() if one.gateway in lost]
        for sent in cut:
            assert sent.flight is not None
            key = sent.flight.replica.key
            self.engines[key].cancel(sent.number)
            del self.flying[sent.number]
            sent.flight = None
            self.end(sent, inf, inf, 0.0, "", "broken")
            self.plan(key)
        return len(cut)

    def fault(self, what: str) -> None:
        cut = 0
        if what == "pool":
            cut = self.lose_pools({self.pools[5].name})
        elif what == "gateway":
            cut = self.lose_gateways([self.gateways[GATEWAYS]])
        elif what == "region":
            self.lost_regions.add("asia")
            cut = self.lose_gateways([one for one in self.gateways if one.region == "asia" and one.alive])
            cut += self.lose_pools({name for name, region in self.region_of.items() if region == "asia"})
        print(f"  {self.now:.1f} s: {what} lost, {cut} requests cut off", flush=True)

    # The run

    def run(self, seconds: float, faults: list[tuple[float, str]]) -> None:
        for moment, what in faults:
            self.at(moment, "fault", what)
        for n, gateway in enumerate(self.gateways):
            self.at(TELL_S * n / len(self.gateways), "tell", gateway)
        coming = self.arrivals(seconds)
        following = next(coming, None)
        events, shown = self.events, 0.0
        while following is not None or self.flying or any(len(one.room) for one in self.gateways):
            if following is not None and (not events or following.asked_s <= events[0][0]):
                self.now = max(self.now, following.asked_s)
                self.receive(following)
                following = next(coming, None)
                continue
            moment, _, kind, what = heappop(events)
            self.now = max(self.now, moment)
            if kind == "engine":
                self.step(*what)
            elif kind == "token":
                self.token(*what)
            elif kind == "tell":
                self.tell(what)
            elif kind == "hear":
                region, number, news = what
                self.heard[region].hear(number, news, self.now)
            elif kind == "forget":
                for heard in self.heard.values():
                    heard.forget(what, self.now)
            else:
                self.fault(what)
            if self.now - shown >= 5.0:
                shown = self.now
                us = self.spent_ns / 1e3 / max(self.decisions, 1)
                waits = sum(len(one.room) for one in self.gateways)
                print(f"  {self.now:.0f} s: {len(self.ended)} ended, {len(self.flying)} in flight, {waits} wait, "
                      f"{us:.0f} us a decision, CPU {time.process_time():.0f} s", flush=True)  # fmt: skip


def _percentile(values: list[float], share: float) -> float | None:
    return values[int(share * len(values))] if values else None


def scored(world: World, start: float, end: float) -> dict[str, Any]:
    rows = [one for one in world.ended if start <= one[0] < end]
    done = [one for one in rows if one[6] in ("done", "resumed")]
    ttft, tpot = sorted(one[1] for one in done), sorted(one[2] for one in done)
    ways = Counter(one[6] for one in rows)
    far = sum(world.region_of[one[5]] != one[4] for one in done)
    amd = sum("-mi" in one[5] for one in done)
    kept = sum(one[1] <= TTFT_S and one[2] <= TPOT_S for one in done)
    number = max(len(rows), 1)
    return {
        "from_s": start, "to_s": end, "requests": len(rows), "within": kept / number,
        "refused": ways["refused"] / number, "broken": ways["broken"] / number, "resumed": ways["resumed"] / number,
        "ttft_p50_s": _percentile(ttft, 0.5), "ttft_p95_s": _percentile(ttft, 0.95),
        "tpot_p50_s": _percentile(tpot, 0.5), "tpot_p90_s": _percentile(tpot, 0.9),
        "elsewhere": far / max(len(done), 1), "amd": amd / max(len(done), 1),
        "usd_per_thousand": 1e3 * sum(one[3] for one in done) / max(len(done), 1),
    }  # fmt: skip


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """By the second of their arrival, how many kept both targets, of those that no fault cut off."""
    from crosstie.web.chart import colours, new_figure, save

    figure = new_figure(8.0, 3.4)
    axes = figure.subplots()
    for result, colour in zip(results, colours(), strict=False):
        rows = [one for one in result["by_second"] if one["from_s"] >= RAMP_S and one["requests"]]
        shares = [100.0 * one["within"] / max(1.0 - one["broken"], 1e-9) for one in rows]
        where = "all regions" if result["scope"] == "all" else "own region"
        axes.plot([one["from_s"] + 0.5 for one in rows], shares, color=colour, label=f"{result['policy']}, {where}")
    for name, phase in results[0]["phases"].items():
        if name != "before":
            axes.axvline(phase["from_s"], color="0.5", linewidth=0.8, linestyle=":")
            axes.annotate(f" {name} lost", (phase["from_s"], 3.0), fontsize=8, color="0.3")
    axes.set_xlabel("second")
    axes.set_ylabel("within both targets, %")
    axes.set_ylim(0.0, 101.0)
    axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0.0, 0.1))
    save(figure, file, "simulated: 1,000 replicas, 10,000 requests/s, 12 gateways; no GPU ran")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="cheapest-meeting-target")
    parser.add_argument("--scope", choices=("all", "region"), default="all")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--alone", action="store_true", help="gateways tell each other nothing")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--draw", type=Path, nargs="+", help="results to draw, instead of a run")
    parser.add_argument("--picture", type=Path, default=Path("internet-scale.svg"))
    given = parser.parse_args()
    if given.draw:
        draw([json.loads(file.read_text()) for file in given.draw], given.picture)
        return
    world = World(given.policy, given.scale, given.scope, given.seed, not given.alone, given.load)
    warm, later = RAMP_S + 1.0, given.seconds - RAMP_S - 1.0
    faults = [(warm + 0.2 * later, "pool"), (warm + 0.45 * later, "gateway"), (warm + 0.65 * later, "region")]
    faults = [] if given.no_faults else faults
    began = time.process_time()
    world.run(given.seconds, faults)
    marks = [warm, *(at for at, _ in faults), given.seconds]
    names = ["before", *(what for _, what in faults)]
    phases = {name: scored(world, a, b) for name, a, b in zip(names, marks[:-1], marks[1:], strict=True)}
    found = {
        "policy": given.policy, "scope": given.scope, "seconds": given.seconds, "scale": given.scale,
        "load": given.load, "seed": given.seed, "shared": world.shares, "replicas": len(world.engines),
        "pools": len(world.pools),
        "gateways": len(world.gateways), "phases": phases,
        "decision_us": world.spent_ns / 1e3 / max(world.decisions, 1), "decisions": world.decisions,
        "messages_per_s_each": world.messages / given.seconds / len(world.gateways),
        "entries_per_s_each": world.told / given.seconds / len(world.gateways),
        "cpu_s": time.process_time() - began,
        "by_second": [scored(world, float(n), n + 1.0) for n in range(int(given.seconds))],
    }  # fmt: skip
    for name, one in phases.items():
        print(name, json.dumps({key: round(value, 4) if value is not None else None for key, value in one.items()}))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
