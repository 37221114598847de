"""By how much the decisions of N gateways differ from those of one, on the same traffic.

    python benchmarks/sharing.py [--quick] [--gateways 2,4,8] [--json benchmarks/results/sharing.json]

In virtual time, with the real policies, boards and messages (its `share`: what is told is encoded, carried, decoded);
only what carries them is simulated: each message takes `--delay-ms` to Redis and again from there, may be lost, and a
gateway may be cut off. Engines are those of `sim.engine`; no GPU runs. The fleet is benchmarks/sharing.toml.

What "differ" means:

    decisions  at every arrival a shadow is asked too: one gateway that has seen every request start, get its first
               token and end at once, whoever had sent it. The share of arrivals that it would have sent to another
               pool, or would have kept waiting or not. The state is the same for both, so that one different decision
               does not count again in all that come after it
    pools      half the sum, over classes and pools, of the differences of their shares of requests from those of a run
               with one gateway: the least share that would have to go elsewhere to make both the same
    within     requests within their targets, in points, less those of a run with one gateway
    cost       what a served request is charged, over that of a run with one gateway

Queues are chaotic: runs of one gateway whose requests come up to 5 ms later, with another seed for whose turn it is
between equals, already differ. Those rows, "1 again", are the noise floor. `sharing none`: each gateway goes by its own
requests; `load`: without what was learnt; `all`: as gateways do.
"""

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import BLOCK_TOKENS, find_trace, read_trace
from crosstie.core.fleet import Fleet
from crosstie.prove.replay.traffic import TimedRequest, from_trace, merged
from crosstie.route.admission import WaitingRoom
from crosstie.route.ask import Ask
from crosstie.route.build import Tables, deployment_of, live_fleet, typical
from crosstie.route.corrections import Observations
from crosstie.route.decision import Decision
from crosstie.route.live import Flight
from crosstie.route.policies import make_policy
from crosstie.route.policy import predict
from crosstie.route.router import Router
from crosstie.sim.engine import Engine
from crosstie_gateway.share.board import Board
from crosstie_gateway.share.learnt import Learnt, LearntReport
from crosstie_gateway.share.peers import PeerReport, Peers
from crosstie_gateway.share.redis_share import LEARN_S, TELL_S, WHOLE_S
from queueing import QueueingGateway

TRACES = {"chat": "azure-2023-conversation", "code": "azure-2023-code", "documents": "mooncake-conversation"}
MODEL = "llama-3.3-70b"
# How often a gateway that is cut off tries again, at most.
_RETRY_S = 5.0
# What the noise floor's requests come later by, at most: nobody's clock is better.
JITTER_S = 0.005
_encode = msgspec.msgpack.Encoder().encode
_load, _learnt = msgspec.msgpack.Decoder(PeerReport).decode, msgspec.msgpack.Decoder(LearntReport).decode


@dataclass
class Weather:
    """What carries messages: seconds to Redis, the share that is lost, who is cut off when, and Redis itself away."""

    delay_s: float = 0.001
    loss: float = 0.0
    # Gateway, from, until; -1: all of them.
    cut: list[tuple[int, float, float]] = field(default_factory=list)

    def carries(self, gateway: int, now: float) -> bool:
        return not any(who in (gateway, -1) and start <= now < end for who, start, end in self.cut)


@dataclass
class Answer:
    class_name: str | None
    pool: str | None
    ttft_s: float = inf
    tpot_s: float = inf
    usd: float = 0.0


class Gateway(QueueingGateway):
    """One of several: its own view of the fleet, its own queue, and what it tells and hears."""

    def __init__(self, world: "World", number: int, seed: int, share: str):
        self.world: World = world
        self.number, self.share = number, share
        self.live = live_fleet(world.catalog, world.fleet, 0.0, tables=world.tables)
        self.router = Router(self.live, make_policy(world.fleet.policy, seed))
        self.room = WaitingRoom(world.fleet.serving.max_queued)
        self.connected = True
        self.whole_at = self.learn_at = self.retry_at = 0.0
        if share == "none":
            return
        self.board = Board(1, replicas=256, keys=4)
        self.board.clock = lambda: world.now
        self.board.identity = f"gateway-{number}"
        self.peers = Peers(self.board, "", lambda: world.now, lambda: world.now)
        keys = [one.key for one in self.live.replicas()]
        self.peers.replicas(keys)
        self.router.share(dict(self.board.cells(keys, 0)))
        self.learnt = Learnt(self.board.identity, "")
        if share == "all":
            self.learnt.serve(self.live)

    def speak(self) -> list[bytes]:
        now, said = self.world.now, list[bytes]()
        whole = now >= self.whole_at
        if whole:
            self.whole_at = now + WHOLE_S
            self.peers.forget_silent(0)
        report = self.peers.news(whole, 0)
        if report is not None:
            said.append(b"p" + _encode(report))
        learnt = self.learnt.news() if now >= self.learn_at else None
        if learnt is not None:
            self.learn_at = now + LEARN_S
            said.append(b"l" + _encode(learnt))
        return said

    def hear(self, message: bytes) -> None:
        if message[:1] == b"p":
            self.peers.hear(_load(message[1:]), 0)
        else:
            self.learnt.hear(_learnt(message[1:]), self.world.now)
        self.let_in()

    # Requests

    def take(self, number: int) -> None:
        request, now = self.world.requests[number], self.world.now
        ask = self._ask(request)
        self.world.asked[ask] = self.world.shadow._ask(request)
        decision = self.router.decide(ask, now)
        self.world.compare(ask, decision, True)
        self.place(number, ask, decision, self.world.fleet.serving.queue_s)

    def decide(self, ask: Ask, now: float) -> Decision:
        decision = super().decide(ask, now)
        self.world.compare(ask, decision, False)
        return decision

    def _ask(self, request: TimedRequest) -> Ask:
        served = self.live.classes.get(request.class_name or "")
        return Ask(
            model=MODEL, class_name=request.class_name, input_tokens=float(request.input_tokens),
            output_tokens=self.live.lengths.expected_output(request.class_name, MODEL, None),
            ttft_s=served.ttft.seconds if served and served.ttft else None,
            tpot_s=served.tpot.seconds if served and served.tpot else None,
            patience_s=self.world.fleet.serving.queue_s, prefix=request.blocks,
        )  # fmt: skip


class World:
    """Engines, gateways before them, and what carries messages between those, in one order of events."""

    def __init__(
        self, catalog: Catalog, fleet: Fleet, tables: Tables, requests: list[TimedRequest], gateways: int,
        *, share: str, seed: int = 0, weather: Weather | None = None,
        slow: tuple[str, float, float, float] | None = None,
    ):  # fmt: skip
        self.catalog, self.fleet, self.tables, self.requests = catalog, fleet, tables, requests
        self.weather, self.now = weather or Weather(), 0.0
        self.engines: dict[str, Engine] = {}
        self.answers: list[Answer] = [Answer(one.class_name, None) for one in requests]
        self.messages = self.bytes = self.lost = 0
        self._order, self._events = count(), list[tuple[float, int, Callable[[], None]]]()
        self._planned: dict[str, float] = {}
        self._flying: dict[int, tuple[Gateway, Flight]] = {}
        # Where requests come in, as a balancer would share them out, and which messages are lost.
        self._random = Random(seed + 1)
        # Another seed for each gateway: nothing has them agree whose turn it is.
        self.gateways = [Gateway(self, one, seed + one, share if gateways > 1 else "none") for one in range(gateways)]
        # One that has seen all of it at once.
        self.shadow = Gateway(self, -1, seed, "none")
        for pool in self.shadow.live.pools:
            # As one of several, that reads pools' prices when those do; it tells nobody.
            pool.observations = Observations(most=0)
        self._shadowed: dict[int, Flight] = {}
        self._replicas = {one.key: one for one in self.shadow.live.replicas()}
        self.asked: dict[Ask, Ask] = {}
        self.differing = self.decided = 0
        for pool in self.gateways[0].live.pools:
            deployment = deployment_of(catalog, pool.pool)
            assert deployment is not None
            inputs, outputs = typical(fleet, pool.pool)
            context = inputs + 0.5 * outputs
            times = tables.times(pool.pool, deployment, context)
            for replica in pool.replicas:
                self.engines[replica.key] = Engine(deployment, context, times=times, prefix_tokens=BLOCK_TOKENS)
        if slow is not None:
            key, factor, start, end = slow
            self.at(start, lambda: self._slow(key, factor))
            self.at(end, lambda: self._slow(key, 1.0))
        for number, request in enumerate(requests):
            gateway = self.gateways[self._random.randrange(gateways)]
            later_s = JITTER_S * self._random.random() if seed else 0.0
            self.at(request.arrival_s + later_s, partial(gateway.take, number))
        if gateways > 1 and share != "none":
            for one in self.gateways:
                # Not all at the same moment.
                self.at(TELL_S * self._random.random(), partial(self._speak, one))

    def compare(self, ask: Ask, decision: Decision, arrives: bool) -> None:
        """The shadow is asked whenever a gateway is, so that what either remembers is of the same moments."""
        shadowed = self.asked[ask]
        shadowed.waited_s = ask.waited_s
        one = self.shadow.router.decide(shadowed, self.now)
        if decision.outcome != "wait":
            del self.asked[ask]
        if arrives:
            self.decided += 1
            self.differing += _where(one) != _where(decision)

    def at(self, moment: float, do: Callable[[], None]) -> None:
        heappush(self._events, (moment, next(self._order), do))

    def run(self) -> "World":
        last = self.requests[-1].arrival_s
        while self._events:
            moment, _, do = heappop(self._events)
            if moment > self.now:
                self.now = moment
            for one in self.gateways:
                if len(one.room):
                    one.expire()
            do()
            if self.now > last and not self._flying and not any(len(one.room) for one in self.gateways):
                break
        return self

    def _speak(self, one: Gateway) -> None:
        self.at(self.now + TELL_S, partial(self._speak, one))
        weather, now = self.weather, self.now
        if not weather.carries(one.number, now):
            if one.connected:
                one.connected = False
                one.learnt.observations.clear()
            one.retry_at = now + _RETRY_S * self._random.random()
            one.peers.forget_silent(0)
            one.learnt.observations.clear()
            return
        if not one.connected:
            if now < one.retry_at:
                return
            one.connected, one.whole_at = True, 0.0
            one.peers.all_is_news(0)
        for message in one.speak():
            self.messages, self.bytes = self.messages + 1, self.bytes + len(message)
            if self._random.random() < weather.loss:
                self.lost += 1
                continue
            for other in self.gateways:
                self.at(now + 2.0 * weather.delay_s, partial(self._deliver, other, message))

    def _deliver(self, other: Gateway, message: bytes) -> None:
        if other.connected and self.weather.carries(other.number, self.now):
            other.hear(message)

    def _slow(self, key: str, factor: float) -> None:
        self.engines[key].advance(self.now)
        self.engines[key].slower = factor
        self._plan(key)

    def sent(self, number: int, gateway: Gateway, flight: Flight) -> None:
        self._flying[number] = gateway, flight
        request, key = self.requests[number], flight.replica.key
        replica, ask = self._replicas[key], self.shadow._ask(self.requests[number])
        self.shadow.live.advance(self.now, MODEL)
        self._shadowed[number] = replica.start(ask, predict(self.shadow.live, replica, ask), self.now)
        self.engines[key].add(number, request.input_tokens, request.output_tokens, self.now, 0, request.blocks)
        self._plan(key)

    def _plan(self, key: str) -> None:
        moment = self.engines[key].next_event_s()
        if moment is None:
            self._planned.pop(key, None)
        elif self._planned.get(key) != moment:
            self._planned[key] = moment
            self.at(moment, lambda: self._tokens(key, moment))

    def _tokens(self, key: str, moment: float) -> None:
        if self._planned.get(key) != moment:
            return
        told: set[int] = set()
        for number, tokens, finished, at, _ in self.engines[key].advance(moment):
            gateway, flight = self._flying[number]
            told.add(gateway.number)
            if tokens == 1:
                flight.first_token(at)
                self._shadowed[number].first_token(at)
            if finished:
                self._end(number, flight, at)
        self._plan(key)
        for one in told:
            self.gateways[one].let_in()

    def _end(self, number: int, flight: Flight, at: float) -> None:
        del self._flying[number]
        request = self.requests[number]
        ended = {"output_tokens": request.output_tokens, "input_tokens": request.input_tokens}
        served = flight.end(at, **ended, completed=True)
        self._shadowed.pop(number).end(at, **ended, completed=True)
        assert served is not None
        assert flight.first_at is not None
        later = request.output_tokens - 1
        self.answers[number] = Answer(
            request.class_name, flight.replica.pool.name, flight.first_at - request.arrival_s,
            (at - flight.first_at) / later if later else 0.0, served.charged_usd,
        )  # fmt: skip

    def refused(self, number: int) -> None:
        self.answers[number] = Answer(self.requests[number].class_name, None)

    # What came of it

    def kept(self, one: Answer) -> bool:
        served = self.gateways[0].live.classes.get(one.class_name or "")
        if one.pool is None or served is None:
            return False
        ttft, tpot = served.ttft, served.tpot
        return (ttft is None or one.ttft_s <= ttft.seconds) and (tpot is None or one.tpot_s <= tpot.seconds)

    def within(self) -> float:
        return sum(self.kept(one) for one in self.answers) / len(self.answers)

    def usd(self) -> float:
        served = [one.usd for one in self.answers if one.pool is not None]
        return sum(served) / max(len(served), 1)

    def hit_rate(self) -> float:
        caches = [cache for engine in self.engines.values() for cache in engine.caches]
        return sum(cache.hits for cache in caches) / max(sum(cache.queries for cache in caches), 1)


def shares(answers: list[Answer]) -> dict[tuple[str | None, str | None], float]:
    found = Counter((one.class_name, one.pool) for one in answers)
    return {where: number / len(answers) for where, number in found.items()}


def moved(one: list[Answer], other: list[Answer]) -> float:
    """The least share of requests that would have to go to another pool to make both the same."""
    a, b = shares(one), shares(other)
    return 0.5 * sum(abs(a.get(where, 0.0) - b.get(where, 0.0)) for where in {*a, *b})


def _where(decision: Decision) -> str:
    return decision.replica.pool.name if decision.replica is not None else decision.outcome


def row_of(world: World, one: World) -> dict[str, Any]:
    return {
        "decisions": world.differing / world.decided,
        "pools": moved(world.answers, one.answers),
        "within": world.within() - one.within(),
        "cost": world.usd() / one.usd() - 1.0,
        "within_target": world.within(),
        "usd_per_thousand": 1e3 * world.usd(),
        "hit_rate": world.hit_rate(),
        "refused": sum(a.pool is None for a in world.answers) / len(world.answers),
        "messages_per_s": world.messages / world.now / len(world.gateways),
        "bytes_per_s": world.bytes / world.now / len(world.gateways),
        "messages_lost": world.lost,
    }


def requests_of(fleet: Fleet, seconds: float, load: float, only: str | None = None) -> list[TimedRequest]:
    longest = min(pool.max_context for pool in fleet.pools)
    classes = [one for one in fleet.classes if only in (None, one.name)]
    total = sum(one.requests_per_s for one in fleet.classes)
    return merged(*(
        from_trace(
            read_trace(find_trace(TRACES[one.name], Path())), class_name=one.name, longest=longest,
            requests_per_s=load * one.requests_per_s if only is None else load * 0.3 * total, seconds=seconds,
            own_times=one.name != "code",
        )
        for one in classes
    ))  # fmt: skip


def simulated(given: argparse.Namespace) -> list[dict[str, Any]]:
    catalog, tables = Catalog([]), Tables()
    fleet = read_fleet(catalog, Path(__file__).with_name("sharing.toml"))
    keys = [one.key for one in live_fleet(catalog, fleet, 0.0, tables=tables).replicas()]
    seconds = given.seconds or (60.0 if given.quick else 120.0)
    third = seconds / 3.0
    scenes: dict[str, tuple[list[TimedRequest], dict[str, Any]]] = {
        "load 0.5": (requests_of(fleet, seconds, 0.5), {}),
        "load 0.8": (requests_of(fleet, seconds, 0.8), {}),
        "a slow replica": (requests_of(fleet, seconds, 0.7), {"slow": (keys[0], 3.0, third, 2.0 * third)}),
        "shared beginnings": (requests_of(fleet, seconds, 0.4, "documents"), {}),
    }
    weathers = {
        "": Weather(given.delay_ms / 1e3),
        ", 50 ms to Redis": Weather(0.05),
        ", a fifth lost": Weather(given.delay_ms / 1e3, loss=0.2),
        ", one cut off": Weather(given.delay_ms / 1e3, cut=[(0, third, 2.0 * third)]),
        ", Redis away": Weather(given.delay_ms / 1e3, cut=[(-1, third, 2.0 * third)]),
    }
    rows: list[dict[str, Any]] = []
    print(f"{len(keys)} replicas in {len(fleet.pools)} pools", flush=True)
    for scene, (requests, more) in scenes.items():
        if given.only and given.only != scene:
            continue
        began = time.monotonic()
        one = World(catalog, fleet, tables, requests, 1, share="none", **more).run()
        print(f"\n{scene}: {len(requests)} requests, {time.monotonic() - began:.1f} s to simulate", flush=True)
        tell(add(rows, scene, "1", one, one))
        for seed in (100, 200):
            again = World(catalog, fleet, tables, requests, 1, share="none", seed=seed, **more).run()
            tell(add(rows, scene, "1 again", again, one))
        for number in given.gateways:
            for share in ("none", "load", "all") if number == max(given.gateways) else ("none", "all"):
                world = World(catalog, fleet, tables, requests, number, share=share, **more).run()
                tell(add(rows, scene, f"{number}, sharing {share}", world, one))
        if scene == "load 0.8":
            for name, weather in list(weathers.items())[1:]:
                number = max(given.gateways)
                world = World(catalog, fleet, tables, requests, number, share="all", weather=weather, **more).run()
                tell(add(rows, scene, f"{number}, sharing all{name}", world, one))
    return rows


def add(rows: list[dict[str, Any]], scene: str, gateways: str, world: World, one: World) -> dict[str, Any]:
    rows.append({"scene": scene, "gateways": gateways, **row_of(world, one)})
    return rows[-1]


def tell(row: dict[str, Any]) -> None:
    print(
        f"  {row['gateways']:30} decisions {row['decisions']:6.2%}  pools {row['pools']:6.2%}"
        f"  within {row['within']:+6.2%}  cost {row['cost']:+6.2%}"
        f"   {row['within_target']:.2%} within, ${row['usd_per_thousand']:.3f}/1000,"
        f" {row['hit_rate']:.1%} of prompts held, {row['messages_per_s']:.0f} messages/s, {row['bytes_per_s']:.0f} B/s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute of traffic instead of two")
    parser.add_argument("--gateways", type=lambda text: [int(one) for one in text.split(",")], default=[2, 4, 8])
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--delay-ms", type=float, default=1.0)
    parser.add_argument("--only", default="", help="one scene, such as 'load 0.8'")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    found: dict[str, Any] = {
        "simulated": "no GPU ran", "made": time.strftime("%Y-%m-%d"), "python": sys.version.split()[0],
        "delay_ms": given.delay_ms, "rows": simulated(given),
    }  # fmt: skip
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
