"""The scaler as a service: looks at the gateway's metrics, decides, acts, and answers questions. A failure leaves the
fleet as it is."""

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from crosstie.core.errors import BadData, BadInput
from crosstie.core.histogram import Family, Samples, exposition, samples_of
from crosstie.wire.address import Address
from crosstie.wire.fetch import fetch_once
from crosstie_gateway.scale.act import Actor, Drainer, ScaleFailed
from crosstie_gateway.scaler.rules import ScaleRules
from crosstie_gateway.scaler.scaler import FleetObservation, ScaleDecision, Scaler, ScalerState
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply


@dataclass(slots=True)
class GatewayCounts:
    """Totals since the gateways began, and backends that are up now."""

    # Those that are held until a first replica serves have not ended, and count already: somebody must bring one up.
    requests: Counter[str] = field(default_factory=Counter)
    held: int = 0
    # By class and target.
    kept: Counter[tuple[str, str]] = field(default_factory=Counter)
    judged: Counter[tuple[str, str]] = field(default_factory=Counter)
    up: Counter[str] = field(default_factory=Counter)
    in_flight: Counter[str] = field(default_factory=Counter)

    def add(self, page: str) -> None:
        for name, labels, value in samples_of(page):
            kind, pool = labels.get("class", ""), labels.get("pool", "")
            if name == "crosstie_requests_total":
                self.requests[kind] += value  # type: ignore[assignment]
            elif name == "crosstie_held":
                self.requests[kind] += value  # type: ignore[assignment]
                self.held += int(value)
            elif name == "crosstie_targets_total":
                key = kind, labels.get("target", "")
                self.judged[key] += value  # type: ignore[assignment]
                self.kept[key] += value * (labels.get("kept") == "yes")  # type: ignore[assignment]
            elif name == "crosstie_backend_up":
                self.up[pool] = max(self.up[pool], 0) + int(value)
            elif name == "crosstie_in_flight":
                self.in_flight[pool] += value  # type: ignore[assignment]


async def read_gateways(urls: Sequence[str]) -> GatewayCounts:
    """Of all gateways together; raises OSError where one does not answer."""
    counts, up = GatewayCounts(), Counter[str]()
    for url in urls:
        at = Address(url)
        answer = await fetch_once(at, "GET", f"{at.root}/metrics", timeout_s=5.0)
        if answer.status != 200:
            keyed = "where clients have keys, give the address of its --ops-port"
            why = keyed if answer.status == 401 else "is it a gateway of crosstie's?"
            raise BadInput(f"{url}/metrics: status {answer.status}; {why}")
        counts.up = Counter()
        counts.add(answer.body.decode("utf-8", "replace"))
        # Each gateway sees all backends: the one that sees fewest may be cut off from some.
        up |= counts.up
    counts.up = up
    return counts


@dataclass(slots=True)
class CounterWatch:
    """Turns totals into what came since the last look. A gateway that began anew counts from nothing."""

    rules: ScaleRules
    before: GatewayCounts | None = None
    at_s: float = 0.0

    def observe(
        self, now_s: float, counts: GatewayCounts, wanted: Mapping[str, int], empty: Mapping[str, int] | None = None
    ) -> FleetObservation | None:
        """None the first time. `empty`: by supply, emptied replicas. A pool's backends that are up serve its supplies
        in order."""
        before, since = self.before, now_s - self.at_s
        self.before, self.at_s = counts, now_s
        if before is None or since <= 0:
            return None
        came = {name: _grown(counts.requests[name], before.requests[name]) for name in counts.requests}
        return FleetObservation(
            at_s=now_s, over_s=since,
            requests_per_s={name: count / since for name, count in came.items()},
            ready=self._ready(counts, wanted),
            wanted=dict(wanted),
            empty=dict(empty or {}),
            ended=_ended(counts, before, came),
        )  # fmt: skip

    def _ready(self, counts: GatewayCounts, wanted: Mapping[str, int]) -> dict[str, int]:
        left, ready = Counter(counts.up), {}
        for supply in self.rules.supplies:
            ready[supply.name] = min(wanted.get(supply.name, 0), left[supply.pool])
            left[supply.pool] -= ready[supply.name]
        return ready


def _grown(now: float, before: float) -> float:
    return now - before if now >= before else now


def _ended(counts: GatewayCounts, before: GatewayCounts, came: Mapping[str, float]) -> dict[str, tuple[int, float]]:
    """By class, requests and the least share that can have kept both targets, which are counted apart."""
    ended = {}
    for name, count in came.items():
        shares = [
            _grown(counts.kept[key], before.kept[key]) / judged
            for key in counts.judged
            if key[0] == name and (judged := _grown(counts.judged[key], before.judged[key])) > 0
        ]
        if shares and count > 0:
            ended[name] = (int(count), max(sum(shares) - len(shares) + 1.0, 0.0))
    return ended


# A decision that is older than so many intervals is told to nobody: what it was made from is gone.
_STALE = 5.0
# How often it is looked whether gateways hold requests for a first replica, where a pool may have none.
_PEEK_S = 1.0


@dataclass
class ScaleService:
    scaler: Scaler
    gateways: Sequence[str]
    clock: Callable[[], float]
    say: Callable[[str], object]
    actors: Sequence[Actor] = ()
    # What there was asked for before anything was decided, where no actor knows.
    wanted: dict[str, int] = field(default_factory=dict)
    state_file: Path | None = None
    # None: replicas are given so long to finish, and nobody is told to send them nothing new.
    drainer: Drainer | None = None
    decision: ScaleDecision | None = None
    # What stands in the way, until it no longer does.
    trouble: str = ""
    failures: int = 0

    def __post_init__(self) -> None:
        self.watch = CounterWatch(self.scaler.rules)
        self.decided = asyncio.Condition()
        # Requests that gateways held at the last step.
        self._held = 0

    async def run(self, speed: float = 1.0) -> None:
        """Until it is cancelled. `speed`: seconds of its clock to each that passes."""
        while True:
            await self.step()
            await self._rest(self.scaler.rules.every_s / speed)

    async def _rest(self, seconds: float) -> None:
        """Waits for the next step, or until more requests are held for a first replica."""
        now = asyncio.get_running_loop().time
        ends = now() + seconds
        while (left_s := ends - now()) > 0.0:
            if not self.scaler.rules.to_zero:
                await asyncio.sleep(left_s)
                return
            await asyncio.sleep(min(_PEEK_S, left_s))
            with contextlib.suppress(OSError, BadInput):
                if (await read_gateways(self.gateways)).held > self._held:
                    return

    async def step(self) -> ScaleDecision | None:
        """Looks, decides and acts; None: nothing could be decided, and nothing was done."""
        try:
            counts = await read_gateways(self.gateways)
            self._held = counts.held
            asked, hosts = await self._asked(), await self._hosts()
            if self.drainer is not None:
                await self.drainer.refresh()
        except (OSError, BadInput, ScaleFailed) as error:
            self._stand(f"nothing is decided and nothing changed: {error}")
            return None
        empty = self.drainer.empty(self.scaler.rules.supplies, hosts) if self.drainer is not None else {}
        seen = self.watch.observe(self.clock(), counts, asked, empty)
        if seen is None:
            # The first look: nothing to hold it against yet.
            self._stand("")
            return None
        decision = self.scaler.decide(seen)
        problems = await self._obey(decision, asked, hosts)
        self._keep_state()
        self._stand("; ".join([*problems, *([decision.short] if decision.short else [])]))
        async with self.decided:
            self.decision = decision
            self.decided.notify_all()
        return decision

    async def _asked(self) -> dict[str, int]:
        asked = dict(self.wanted)
        for actor in self.actors:
            for supply in self.scaler.rules.supplies:
                there = await actor.there(supply)
                if there is not None:
                    asked[supply.name] = there
        return asked

    async def _hosts(self) -> dict[str, set[str]]:
        """The hosts of each supply's replicas, where a platform knows them."""
        by_supply = {}
        for actor in self.actors if self.drainer is not None else ():
            for supply in self.scaler.rules.supplies:
                hosts = await actor.hosts(supply)
                if hosts is not None:
                    by_supply[supply.name] = hosts
        return by_supply

    async def _obey(
        self, decision: ScaleDecision, asked: Mapping[str, int], hosts: Mapping[str, set[str]]
    ) -> list[str]:  # fmt: skip
        problems = []
        for supply in self.scaler.rules.supplies:
            order, before = decision.orders[supply.name], asked.get(supply.name, 0)
            if order.replicas != before:
                self.say(f"{supply.name}: {before} -> {order.replicas}: {order.why}")
            try:
                moves = None
                if self.drainer is not None:
                    moves = await self.drainer.obey(supply, order, before, hosts.get(supply.name))
                for actor in self.actors:
                    await actor.obey(supply, order, before, moves)
                self.wanted[supply.name] = order.replicas
            except (OSError, ScaleFailed) as error:
                # It is as it was, and is tried again.
                self.wanted[supply.name] = before
                problems.append(str(error))
        return problems

    def _stand(self, trouble: str) -> None:
        self.failures += bool(trouble)
        if trouble != self.trouble:
            self.say(trouble or "all is well again")
        self.trouble = trouble

    def _keep_state(self) -> None:
        if self.state_file is None:
            return
        written = self.state_file.with_name(f".{self.state_file.name}.{os.getpid()}")
        try:
            written.write_bytes(msgspec.json.encode(self.scaler.state))
            written.replace(self.state_file)
        except OSError as error:
            self._stand(f"{self.state_file}: what was learnt cannot be kept: {error.strerror}")

    def current(self) -> ScaleDecision | None:
        """The last decision, unless it is too old."""
        made = self.decision
        stale = made is None or self.clock() - made.at_s > _STALE * self.scaler.rules.every_s
        return None if stale else made

    def page(self) -> str:
        made, state = self.current(), self.scaler.state
        supplies = self.scaler.rules.supplies
        families: list[Family] = [
            ("crosstie_scale_up", "gauge", "1 where there is a decision.", [({}, int(made is not None))]),
            ("crosstie_scale_failures_total", "counter", "Looks that were hindered.", [({}, self.failures)]),
        ]
        if made is not None:
            orders = [({"supply": supply.name, "pool": supply.pool}, made.orders[supply.name]) for supply in supplies]
            desired: Samples = [(labels, order.replicas) for labels, order in orders]
            draining: Samples = [(dict(labels), order.draining) for labels, order in orders]
            traffic = [
                ({"class": name, "what": kind}, value)
                for name, need in made.needs.items()
                for kind, value in (("now", need.now), ("forecast", need.peak), ("provided", need.provided))
            ]
            reach = [({"class": name}, reach.factor) for name, reach in state.reach.items()]
            starts = [({"supply": name}, supply.start.likely_s) for name, supply in state.supplies.items()]
            families += [
                ("crosstie_scale_desired_replicas", "gauge", "Replicas to have.", desired),
                ("crosstie_scale_draining_replicas", "gauge", "Of these, those to be emptied.", draining),
                ("crosstie_scale_requests_per_second", "gauge", "Traffic: now, forecast, and provided for.", traffic),
                ("crosstie_scale_reach", "gauge", "What replicas take over what the plan says, as learnt.", reach),
                ("crosstie_scale_start_seconds", "gauge", "What a start is expected to take, as learnt.", starts),
                ("crosstie_scale_usd_per_hour", "gauge", "What the replicas to have cost.", [({}, made.usd_per_hour)]),
            ]
        return exposition(families)

    def answer(self, request: Request, reply: Reply) -> None:
        """`/metrics`, `/healthz`, and `/decision`, which says why."""
        if request.path == "/metrics":
            reply.send(200, self.page().encode(), content_type=b"text/plain; version=0.0.4; charset=utf-8")
        elif request.path == "/healthz":
            reply.send(200, b'{"status":"ok"}')
        elif request.path == "/decision":
            made = self.current()
            body = {"decision": made, "trouble": self.trouble}
            reply.send(200 if made else 503, msgspec.json.encode(body))
        else:
            reply.send(404, b'{"error":"there are /metrics, /healthz and /decision"}')


def read_state(file: Path) -> ScalerState:
    """What an earlier scaler has learnt; nothing where there is no file yet."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return ScalerState()
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from None
    try:
        return msgspec.json.decode(content, type=ScalerState)
    except msgspec.MsgspecError as error:
        raise BadData(file, "", f"is no state of a scaler: {error}; without it learning begins anew") from None
