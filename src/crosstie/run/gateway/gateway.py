"""The gateway: a fleet being served. It turns each request into an exchange and keeps what exchanges share.

Times that `route` sees are `now()`, which runs `speed` times as fast as the clock where the fleet is emulated so;
patience with sockets is always in real seconds.
"""

import asyncio
import os
from collections.abc import Callable
from time import monotonic, time

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput, UnknownModel
from crosstie.core.fleet import Fleet
from crosstie.route.admission import WaitingRoom
from crosstie.route.ask import Ask
from crosstie.route.build import live_fleet
from crosstie.route.decision import Decision
from crosstie.route.hosted_sizes import check_room
from crosstie.route.live import LiveFleet
from crosstie.route.policy import make_policy
from crosstie.run.gateway.asks import PRIORITIES, ask_of
from crosstie.run.gateway.backend import Backend
from crosstie.run.gateway.body import RequestBody, read_body
from crosstie.run.gateway.errors import RequestRejected, error_body, retry_after
from crosstie.run.gateway.exchange import Exchange
from crosstie.run.gateway.guard import Grant, Guard
from crosstie.run.gateway.health import probe, watch
from crosstie.run.gateway.identity import context_of, is_id
from crosstie.run.gateway.interfaces import HostedModels, OtherWorkers, Tracing
from crosstie.run.gateway.metrics import Metrics
from crosstie.run.gateway.notices import Notice
from crosstie.run.gateway.record import RequestRecord
from crosstie.run.wire.address import Address
from crosstie.run.wire.client import Origin
from crosstie.run.wire.request import Request
from crosstie.run.wire.server import Reply

# How often timeouts, the queue's deadlines and idle connections are looked at.
_TICK_S = 0.1
# A tick that comes this long after the last one found the process halted, or the machine asleep.
_HALT_S = 0.35
_STATUS = {"unknown-model": 404, "context": 400, "modality": 400, "pin": 400, "unavailable": 503}
_CODE = {
    "unknown-model": "model_not_found",
    "context": "context_length_exceeded",
    "modality": "unsupported_modality",
    "pin": "unknown_pool",
    "unavailable": "no_backend",
}


class Gateway:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        catalog: Catalog,
        fleet: Fleet,
        *,
        speed: float = 1.0,
        notify: Callable[[str], None] = lambda line: None,
    ):
        self.loop, self.catalog, self.speed, self.notify = loop, catalog, speed, notify
        self.backends: dict[str, Backend] = {}
        self.exchanges: set[Exchange] = set()
        self.metrics = Metrics()
        self.waiting = WaitingRoom(fleet.serving.max_queued)
        # Who may ask, and how much; None: everyone, anything. Who follows requests while they go on; None: nobody.
        # Whoever wants to know of requests that have ended.
        self.guard: Guard | None = None
        self.tracing: Tracing | None = None
        # Who loads the models of shared pools; None: there are no such pools.
        self.hosted: HostedModels | None = None
        self.listeners: list[Callable[[RequestRecord], None]] = []
        # Other workers of this gateway, who find out what this one does; None: there are none.
        self.workers: OtherWorkers | None = None
        # Whoever follows decisions is called with each; `explaining`: the pools that were not chosen come with it.
        self.on_decision: Callable[[Exchange, Decision], None] | None = None
        self.explaining = False
        self.draining = self._halted = False
        # The loop's time as of the last tick: patience needs no better, and streams ask at every event.
        self.clock = loop.time()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._live: LiveFleet | None = None
        self._counter = 0
        self._run = os.urandom(6).hex().encode()
        self.load(fleet)
        self._ticking = loop.call_later(_TICK_S, self._tick)

    def now(self) -> float:
        # Not the loop's time, which uvloop counts in whole milliseconds.
        return monotonic() * self.speed

    @property
    def live(self) -> LiveFleet:
        if self._live is None:
            raise ValueError("no fleet is loaded")
        return self._live

    # The fleet

    def load(self, fleet: Fleet) -> None:
        """Serves this fleet from now on. Raises before anything has changed if it cannot be served."""
        for pool in fleet.pools:
            if not all(one.backends for one in pool.by_model()):
                raise BadInput(f"pool {pool.name} has no backends: add their addresses, or use --emulate")
            if pool.api_key_env and not os.environ.get(pool.api_key_env):
                raise BadInput(f"pool {pool.name}: api_key_env names {pool.api_key_env}, which is not set")
            if pool.hosts:
                check_room(self.catalog, pool)
        served = [one for pool in fleet.pools for one in pool.by_model()]
        addresses = {url: Address(url) for pool in served for url in pool.backends}
        live = live_fleet(self.catalog, fleet, self.now(), self._live)
        policy = make_policy(fleet.policy)
        self._live, self.policy, self.serving = live, policy, fleet.serving
        self.names = {name: pool.model for pool in served for name in (pool.model, pool.served_as) if name}
        self.waiting.most = fleet.serving.max_queued
        kept: dict[str, Backend] = {}
        for replica in live.replicas():
            backend = self.backends.get(replica.key)
            if backend is None:
                backend = Backend(Origin(self.loop, addresses[replica.key]), replica, replica.pool.pool)
            else:
                backend.replica = replica
                backend.configure(replica.pool.pool)
            kept[replica.key] = backend
            backend.judge(self.now())
        for key in self.backends.keys() - kept.keys():
            self._retire(key, self.backends[key])
        self.backends = kept
        for key, backend in kept.items():
            if key not in self._watches:
                self._watches[key] = self.loop.create_task(watch(self, backend))

    def _retire(self, key: str, backend: Backend) -> None:
        """No longer asked after. What it is answering now it may finish: exchanges hold on to it themselves."""
        backend.origin.retire()
        task = self._watches.pop(key, None)
        if task is not None:
            task.cancel()
        self.backends[key].origin.retire()

    async def probe_all(self) -> None:
        """Asks all backends once, so that the first request does not have to find out."""
        await asyncio.gather(*(probe(self, backend) for backend in self.backends.values()))

    def changed(self, backend: Backend) -> None:
        """A backend came up or went down."""
        at = backend.origin.address.url
        pool, why = backend.pool.name, backend.replica.why_down
        if backend.replica.up:
            self.notify(Notice("backend_up", "info", f"pool {pool}: {at} is up", pool=pool, backend=at))
        else:
            self.notify(
                Notice("backend_down", "warning", f"pool {pool}: {at} is down: {why}", pool=pool, backend=at, why=why)
            )
        if self.workers is not None:
            self.workers.changed(backend)
        self._admit()

    def room_made(self) -> None:
        """Another gateway has told that something of it has ended."""
        if len(self.waiting):
            self._admit()

    @property
    def ready(self) -> bool:
        return not self.draining and any(backend.replica.up for backend in self.backends.values())

    # Requests

    def serve(self, request: Request, reply: Reply) -> None:
        """A request of the API, from its first look to an attempt, a place in the queue or a refusal."""
        request_id = request.headers.get(b"x-request-id")
        if request_id is None or not is_id(request_id):
            request_id = self._next_id()
        guard, key_id, grant = self.guard, 0, None
        try:
            if guard is not None:
                key_id = guard.known(request)
            asked, ask = self.read(request, key_id)
            if guard is not None:
                grant = guard.admit(key_id, ask)
        except RequestRejected as refused:
            self._refuse_early(request, reply, refused, request_id, key_id)
            return
        self._begin(request, reply, asked, ask, request_id, key_id, grant)

    def read(self, request: Request, key_id: int = 0) -> tuple[RequestBody, Ask]:
        """What a request asks for, and what that means to the router. Raises RequestRejected."""
        guard, model = self.guard, None
        names = self.names if guard is None else guard.names_for(key_id, request)
        try:
            asked = read_body(request.body)
            model = asked.model
            ask = ask_of(self.live, names, request, asked)
        except UnknownModel as error:
            if guard is not None and names is not self.names:
                raise guard.not_allowed(key_id, model) from None
            raise RequestRejected(404, str(error), "model_not_found") from None
        except BadInput as error:
            raise RequestRejected(400, str(error), "bad_request") from None
        ask.patience_s = self.serving.queue_s * self.speed
        return asked, ask

    def _begin(
        self,
        request: Request,
        reply: Reply,
        asked: RequestBody,
        ask: Ask,
        request_id: bytes,
        key_id: int,
        grant: Grant | None,
    ) -> None:
        exchange = Exchange(self, request, reply, asked, ask, request_id, key_id)
        exchange.record.grant = grant
        self.exchanges.add(exchange)
        now = self.now()
        try:
            cold = self.hosted.asked(ask) if self.hosted is not None else None
            if cold is not None:
                exchange.refuse(503, cold[0], "model_not_loaded", retry_after_s=cold[1])
            elif len(self.waiting):
                # Nobody overtakes those who wait already, unless by priority.
                self.queue(exchange, now)
                self._admit()
            else:
                decision = self.policy.choose(self.live, ask, now, explain=self.explaining)
                self._follow(exchange, decision, now)
        except Exception:
            exchange.broke_down()
            raise

    def _follow(self, exchange: Exchange, decision: Decision, now: float) -> None:
        if decision.outcome == "send":
            exchange.send(decision)
            return
        if self.on_decision is not None:
            self.on_decision(exchange, decision)
        if decision.outcome == "wait":
            self.queue(exchange, now)
        else:
            kind = decision.refusal or "unavailable"
            after = self.serving.health_every_s if kind == "unavailable" else 0.0
            exchange.refuse(_STATUS[kind], decision.reason, _CODE[kind], retry_after_s=after)

    def queue(self, exchange: Exchange, now: float) -> None:
        """It waits for room, or for its model to be loaded."""
        exchange.ticket, shed = self.waiting.add(exchange.ask, now, now + exchange.ask.patience_s, exchange)
        if shed is not None:
            self._turn_away(shed.item, "the queue is full")

    def _expire(self, exchange: Exchange, ask: Ask) -> None:
        """The urgent are sent wherever there is room, target or not; the others have waited for nothing."""
        if ask.priority >= PRIORITIES["high"]:
            patience_s, ask.patience_s = ask.patience_s, 0.0
            decision = self._choose(self.live, ask, self.now())
            if decision.outcome == "send":
                exchange.send(decision)
                return
            ask.patience_s = patience_s
        self._turn_away(exchange, f"it waited {ask.patience_s / self.speed:.1f} s")

    def _turn_away(self, exchange: Exchange, why: str) -> None:
        cold = self.hosted.absent(exchange.ask.model) if self.hosted is not None else None
        if cold is not None:
            exchange.refuse(503, f"{cold[0]}; {why}", "model_not_loaded", retry_after_s=cold[1])
            return
        after = self.waiting.retry_after_s(self.now()) / self.speed
        exchange.refuse(
            429, f"no pool has room for this request: {why}", "fleet_saturated", retry_after_s=max(after, 1)
        )

    def _choose(self, live: LiveFleet, ask: Ask, now: float) -> Decision:
        """For one who has waited, and may have been elsewhere before."""
        return self.policy.choose(live, ask, now, exclude=ask.tried)

    def _admit(self) -> None:
        """Lets in whoever can be sent now, in the order of priority and arrival."""
        now = self.now()
        while (found := self.waiting.take(self._choose, self.live, now)) is not None:
            ticket, decision = found
            try:
                self._follow(ticket.item, decision, now)
            except Exception:
                ticket.item.broke_down()
                raise

    def finished(self, exchange: Exchange, how: str) -> None:
        self.exchanges.discard(exchange)
        if exchange.ticket is not None:
            self.waiting.leave(exchange.ticket)
        self.metrics.count_request(exchange.record.pool, exchange.ask, how, exchange.status)
        self._tell(exchange.record, exchange.request)
        if len(self.waiting):
            self.loop.call_soon(self._admit)

    def _refuse_early(
        self, request: Request, reply: Reply, refused: RequestRejected, request_id: bytes, key_id: int
    ) -> None:
        status, code = refused.status, refused.code
        self.metrics.refused[code] += 1
        headers = b"x-request-id: %b\r\n%b" % (request_id, refused.headers) + retry_after(refused.retry_after_s)
        reply.send(status, error_body(status, str(refused), code), headers)
        record = RequestRecord(request_id, request.path, time(), "refused", status)
        record.code, record.key_id = code, key_id
        record.traceparent, context = context_of(request)
        if self.tracing is not None:
            record.trace = self.tracing.begin(record.path, context)
        self._tell(record, request)

    def _tell(self, record: RequestRecord, request: Request) -> None:
        record.request = request
        for listener in self.listeners:
            listener(record)
        record.request = None

    def _next_id(self) -> bytes:
        self._counter += 1
        return b"req-%b-%x" % (self._run, self._counter)

    # The clock

    def _tick(self) -> None:
        # First of all, so that whatever goes wrong below is not the end of all timeouts.
        self._ticking = self.loop.call_later(_TICK_S, self._tick)
        now = self.loop.time()
        # After a halt of the whole process the sockets have not been looked at yet: what came in the meantime counts.
        self._halted = now - self.clock > _HALT_S and not self._halted
        self.clock = now
        if not self._halted:
            for exchange in list(self.exchanges):
                try:
                    exchange.check(now)
                except Exception:
                    # Only this once: nobody else's patience shall depend on it.
                    exchange.broke_down()
                    raise
        for ticket in self.waiting.expired(self.now()):
            self._expire(ticket.item, ticket.ask)
        if len(self.waiting):
            self._admit()
        for backend in self.backends.values():
            backend.origin.prune()

    def give_up(self) -> None:
        """Tells all who still wait that they do so in vain."""
        for exchange in list(self.exchanges):
            exchange.give_up("the gateway was told to end")

    def close(self) -> None:
        self._ticking.cancel()
        for task in self._watches.values():
            task.cancel()
        for backend in self.backends.values():
            backend.origin.close()
