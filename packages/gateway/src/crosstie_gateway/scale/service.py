"""The scaler as a service: looks, decides, acts, and answers questions. A failure leaves the fleet as it is."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from crosstie.core.errors import BadData, BadInput
from crosstie.core.histogram import Family, Samples, exposition
from crosstie_gateway.scale.act import Actor, Drainer, ScaleFailed
from crosstie_gateway.scale.observe import CounterWatch, read_gateways
from crosstie_gateway.scaler.scaler import ScaleDecision, Scaler, ScalerState
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

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
