"""The gateway: a fleet being served. It turns each request into an exchange, queues and admits it.

What one exchange does is in `exchange`, and what all share in `context`.
"""

import asyncio
import os
from collections.abc import Callable
from time import monotonic, time
from typing import Final

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput, UnknownModel
from crosstie.core.fleet import Fleet, Serving
from crosstie.core.histogram import Family, Samples
from crosstie.route.admission import WaitingRoom
from crosstie.route.ask import Ask
from crosstie.route.build import Tables, live_fleet
from crosstie.route.decision import Decision
from crosstie.route.hosted_sizes import check_room
from crosstie.route.live import LiveFleet, LivePool
from crosstie.route.policies import make_policy
from crosstie.route.router import Router
from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie.wire.files import most_files
from crosstie.wire.way import Way, way_of
from crosstie_gateway.gateway.adapters import AdapterLoader
from crosstie_gateway.gateway.asks import ask_of
from crosstie_gateway.gateway.backend import Backend
from crosstie_gateway.gateway.body import RequestBody, read_body, read_form_body, with_model
from crosstie_gateway.gateway.cold_start import ColdStarts
from crosstie_gateway.gateway.context import Context
from crosstie_gateway.gateway.disaggregated import check_led
from crosstie_gateway.gateway.errors import RequestRejected, error_body, retry_after
from crosstie_gateway.gateway.exchange import Exchange
from crosstie_gateway.gateway.health import probe, watch
from crosstie_gateway.gateway.identity import Clients, context_of, is_id
from crosstie_gateway.gateway.interfaces import CountedPrompt, PluginVerdict
from crosstie_gateway.gateway.messages import error_message
from crosstie_gateway.gateway.messages_reply import MessagesReply
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.gateway.plugin_calls import question_of
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.gateway.responses import PATH
from crosstie_gateway.gateway.roads import FORMS, MESSAGES, SERVED
from crosstie_gateway.wire.outline import Filling
from crosstie_gateway.wire.request import BadRequest, Request
from crosstie_gateway.wire.server import Handler, Reply

# How often timeouts, the queue's deadlines and idle connections are looked at.
_TICK_S: Final = 0.1
# A tick that comes this long after the last one found the process halted, or the machine asleep.
_HALT_S: Final = 0.35
# How often it is said that there are no files left.
_SAY_AGAIN_S: Final = 10.0
_STATUS: Final = {"unknown-model": 404, "context": 400, "modality": 400, "pin": 400, "unavailable": 503}
_CODE: Final = {
    "unknown-model": "model_not_found",
    "context": "context_length_exceeded",
    "modality": "unsupported_modality",
    "pin": "unknown_pool",
    "unavailable": "no_backend",
}

# Found without a look at the modules that have them.
_time: Final = time
_FORMS: Final = FORMS
_SERVED: Final = SERVED
_MESSAGES: Final = MESSAGES
_PATH: Final = PATH


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
        self.catalog, self.notify = catalog, notify
        # By pool, how its backends are reached.
        self._ways: dict[str, Way] = {}
        self._ways = self._check(fleet)
        # Kept, so that a fleet which only has other addresses takes no time to load.
        self._tables = Tables()
        live = live_fleet(catalog, fleet, monotonic() * speed, tables=self._tables)
        router = Router(live, make_policy(fleet.policy), speed)
        self.context = context = Context(loop, router, fleet.serving, speed)
        context.on_backend_changed = self.backend_changed
        context.on_exhausted, context.on_panic = self.exhausted, self.panicked
        # What is of the context and stays.
        self.loop, self.speed, self.router = loop, speed, router
        self.backends, self.metrics = context.backends, context.metrics
        self.exchanges: set[Exchange] = set()
        # What a request becomes; None: a plain exchange, which is made faster by its own name.
        self.exchange: type[Exchange] | None = None
        self._clients = Clients(fleet.serving.trusted_proxies)
        self.waiting = WaitingRoom(fleet.serving.max_queued)
        self._cold_starts = ColdStarts(context, self._enter)
        self.metrics.sources.append(self._cold_starts.families)
        # Called with the record of each request that is over.
        self.listeners: list[Callable[[RequestRecord], None]] = []
        # Whether the pools that were not chosen come with each decision.
        self.explaining = False
        self.draining = self._halted = False
        # Whether health, readiness and metrics have a port of their own.
        self.ops_apart = False
        self._exhausted_at = -_SAY_AGAIN_S
        # Models of which too few replicas are in service.
        self._panicking: set[str] = set()
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._counter = 0
        self._run = os.urandom(6).hex().encode()
        self._connect()
        self._ticking = loop.call_later(_TICK_S, self._tick)

    def now(self) -> float:
        return self.context.now()

    @property
    def live(self) -> LiveFleet:
        return self.router.fleet

    @property
    def serving(self) -> Serving:
        return self.context.serving

    # The fleet

    def load(self, fleet: Fleet) -> None:
        """Serves this fleet from now on. Raises before anything has changed if it cannot be served."""
        ways = self._check(fleet)
        policy = make_policy(fleet.policy)
        self.router.load(live_fleet(self.catalog, fleet, self.now(), self.live, self._tables), policy)
        self._ways = ways
        self.context.serving, self._clients = fleet.serving, Clients(fleet.serving.trusted_proxies)
        self.waiting.most = fleet.serving.max_queued
        self._connect()

    def _check(self, fleet: Fleet) -> dict[str, Way]:
        ways = {}
        for pool in fleet.pools:
            if not all(part.backends for part in pool.by_model()):
                raise BadInput(f"pool {pool.name} has no backends: add their addresses, or use --emulate")
            if pool.api_key_env and not os.environ.get(pool.api_key_env):
                raise BadInput(f"pool {pool.name}: api_key_env names {pool.api_key_env}, which is not set")
            urls = [url for part in pool.by_model() for url in part.backends]
            addresses = [Address(url) for url in (*urls, *pool.led_backends)]
            ways[pool.name] = way_of(pool, addresses, self._ways.get(pool.name))
            if pool.hosts:
                check_room(self.catalog, pool)
        return ways

    def _connect(self) -> None:
        """A backend for each replica, those that were there before as they are."""
        self.metrics.expect(self.live.fleet)
        if self.live.adapters and self.context.adapters is None:
            self.context.adapters = loader = AdapterLoader(self.loop, self.now, self.speed, self.notify)
            self.metrics.sources.append(loader.families)
        self.live.sessions.let_go = self.context.keeper.let_go
        now, kept = self.now(), set()
        for replica in self.live.replicas():
            backend, way = self.backends.get(replica.key), self._ways[replica.pool.name]
            if backend is None:
                backend = Backend(Origin(self.loop, Address(replica.key), way), replica, replica.pool.pool)
                self.backends[replica.key] = backend
            else:
                backend.replica = replica
                backend.origin.go_by(way)
                backend.configure(replica.pool.pool)
            kept.add(replica.key)
            backend.judge(now)
        for key in [key for key in self.backends if key not in kept]:
            self._retire(key)
        for key, backend in self.backends.items():
            if key not in self._watches:
                self._watches[key] = self.loop.create_task(watch(self.context, backend))

    def _retire(self, key: str) -> None:
        """Stops probing it. It may finish its requests: exchanges keep it themselves."""
        self.backends.pop(key).origin.retire()
        task = self._watches.pop(key, None)
        if task is not None:
            task.cancel()

    async def probe_all(self) -> None:
        """Asks all backends once, so that the first request does not have to find out."""
        await asyncio.gather(*(probe(self.context, backend) for backend in self.backends.values()))

    def backend_changed(self, backend: Backend) -> None:
        """A backend came up or went down."""
        at, pool, why = backend.origin.address.url, backend.pool.name, backend.replica.why_down
        if backend.replica.up:
            self.notify(Notice("backend_up", "info", f"pool {pool}: {at} is up", pool=pool, backend=at))
        else:
            said = f"pool {pool}: {backend.origin.way.where(backend.origin.address)} is down: {why}"
            self.notify(Notice("backend_down", "warning", said, pool=pool, backend=at, why=why))
        if self.context.workers is not None:
            self.context.workers.changed(backend)
        if backend.replica.pool.side == "prefill":
            self._judge_decode(backend.replica.pool)
        self._admit()

    def _judge_decode(self, prefill: LivePool) -> None:
        """A decode side is down while its prefill side is down."""
        now = self.now()
        for pool in self.live.pools:
            if pool.prefill is prefill:
                for replica in pool.replicas:
                    if self.backends[replica.key].judge(now):
                        self.backend_changed(self.backends[replica.key])

    def exhausted(self) -> None:
        """This process could open no more files: said now and then, however often it happens."""
        self.metrics.refused["files"] += 1
        if self.loop.time() - self._exhausted_at < _SAY_AGAIN_S:
            return
        self._exhausted_at = self.loop.time()
        files = most_files()
        sentence = f"out of files: this process may open {files:g}; raise that (ulimit -n, LimitNOFILE), or lower "
        self.notify(Notice("out_of_files", "error", f"{sentence}serve.max_connections", files=files))

    def panicked(self, model: str) -> None:
        """A request went to a backend that was taken out of service; told once, until it is over."""
        if model in self._panicking:
            return
        self._panicking.add(model)
        up, there = self.live.in_service(model)
        said = f"{model}: {up} of {there} replicas are in service; those taken out are sent what they have no room for"
        self.notify(Notice("panic", "warning", said, model=model, up=up, of=there))

    def room_made(self) -> None:
        """Another gateway has told that something of it has ended."""
        if len(self.waiting):
            self._admit()

    @property
    def ready(self) -> bool:
        if self.draining:
            return False
        replicas = [replica for pool in self.live.pools for replica in pool.replicas]
        return any(replica.up for replica in replicas) or any(
            replica.suspected and self.live.panics(replica.pool.pool.model) for replica in replicas
        )

    # Requests

    def front(self, otherwise: Handler) -> Handler:
        """Serves usual requests from compiled code at once; `otherwise` takes all others."""

        def take(request: Request, reply: Reply) -> None:
            if request.method == "POST" and request.path in _SERVED and not self.context.serving.cors_origins:
                self.serve(request, reply)
            else:
                otherwise(request, reply)

        return take

    def serve(self, request: Request, reply: Reply) -> None:
        """A request of the API, from its first look to an attempt, a place in the queue or a refusal."""
        record, path, guard = self._record(request), request.path, self.context.guard
        filling: Filling | None = None
        if path == _MESSAGES:
            reply = MessagesReply(reply)
        try:
            if guard is not None:
                record.key_id = guard.known(request)
            if isinstance(reply, MessagesReply):
                request, filling = reply.chat_for(request)
            stored = path == _PATH and self.context.responses.is_stored
            if guard is not None and (stored or self.context.tokenizing is not None):
                # Before its prompt is read.
                guard.check_open(record.key_id)
        except RequestRejected as refused:
            self._refuse(request, reply, record, refused)
            return
        if stored:
            go_on = lambda refused: self._prepared(request, reply, record, refused)  # noqa: E731
            self.context.responses.prepare(request, reply, record.key_id, go_on)
        elif filling is not None:
            self._fill(request, filling, lambda: self._prepared(request, reply, record, None))
        else:
            self._prepared(request, reply, record, None)

    def _fill(self, request: Request, filling: Filling, then: Callable[[], None]) -> None:
        """Step by step: others have their turns between."""
        filled = next(filling)
        if filled is None:
            self.loop.call_soon(self._fill, request, filling, then)
        else:
            request.body, request.outline = filled
            then()

    def _prepared(self, request: Request, reply: Reply, record: RequestRecord, refused: RequestRejected | None) -> None:
        if refused is not None:
            self._refuse(request, reply, record, refused)
        elif self.context.tokenizing is None:
            self._serve(request, reply, record, None)
        else:
            self.context.tokenizing.read(request, reply, lambda prompt: self._serve(request, reply, record, prompt))

    def _serve(self, request: Request, reply: Reply, record: RequestRecord, prompt: CountedPrompt | None) -> None:
        """`prompt`: as far as it is known. Its client may have gone."""
        guard = self.context.guard
        try:
            parsed, ask = self.read(request, record.key_id, prompt)
            if guard is not None:
                record.grant = guard.admit(record.key_id, ask, self.context.serving.max_open_per_key)
        except RequestRejected as refused:
            self._refuse(request, reply, record, refused)
            return
        if self.exchange is None:
            exchange = Exchange(self.context, self, request, reply, parsed, ask, record)
        else:
            exchange = self.exchange(self.context, self, request, reply, parsed, ask, record)
        if reply.gone:
            self.exchanges.add(exchange)
            exchange.on_client_gone()
        else:
            self._begin(exchange)

    def serve_batched(self, request: Request, reply: Reply, key_id: int) -> None:
        """A request of a key's batch: at low priority and without targets, so the cheapest pool gets it."""
        record, guard = self._record(request, key_id), self.context.guard
        try:
            if guard is not None:
                guard.check_key(key_id)
            parsed, ask = self.read(request, key_id)
            if guard is not None:
                record.grant = guard.admit_batched(key_id, ask, self.context.serving.max_open_per_key)
        except RequestRejected as refused:
            self._refuse(request, reply, record, refused)
            return
        ask.priority, ask.ttft_s, ask.tpot_s = 0, None, None
        exchange = Exchange(self.context, self, request, reply, parsed, ask, record)
        # The next try of a batch costs nothing.
        exchange.held_until = -1.0
        self._begin(exchange)

    def opens(self, request: Request) -> int:
        """The key's id of a request whose body is still to come, 0 without keys. Raises BadRequest."""
        guard, key_id, own = self.context.guard, 0, self.context.own_pages
        if own is not None and request.path in own.paths:
            own.opens(request)
            return 0
        if guard is None:
            return 0
        try:
            key_id = guard.key_of(request)
            guard.check_open(key_id)
        except RequestRejected as refused:
            body, headers = self._refused(request, self._record(request, key_id), refused)
            raise BadRequest(refused.status, str(refused), body, headers) from None
        return key_id

    def read(self, request: Request, key_id: int = 0, prompt: CountedPrompt | None = None) -> tuple[RequestBody, Ask]:
        """What a request asks for, and what that means to the router. Raises RequestRejected."""
        guard, model, live, serving = self.context.guard, None, self.router.fleet, self.context.serving
        names = live.names if guard is None else guard.names_for(key_id, request)
        try:
            if b"content-encoding" in request.headers:
                _check_encoding(request)
            parsed = read_form_body(request) if request.path in _FORMS else read_body(request.body, request.outline)
            if request.model is not None and request.model != parsed.model and not parsed.is_form:
                request.body, request.outline = with_model(request.body, request.model), None
                parsed.model = request.model
                parsed.find_prompt(request.body)
            model = parsed.model
            ask = ask_of(live, names, request, parsed, 0 if serving.share_prefixes else key_id, prompt)
        except UnknownModel as error:
            if guard is not None and names is not live.names:
                raise guard.not_allowed(key_id, model) from None
            raise RequestRejected(404, str(error), "model_not_found") from None
        except BadInput as error:
            raise RequestRejected(400, str(error), "bad_request") from None
        # Its key, 0 without keys: for turns in the queue, and for responses to go on from.
        ask.patience_s, ask.tenant = serving.queue_s * self.speed, key_id
        if live.led:
            check_led(live, request, parsed, ask)
        if parsed.previous is not None and request.path == _PATH:
            self._send_home(ask, parsed.previous)
        return parsed, ask

    def _send_home(self, ask: Ask, previous: str) -> None:
        """Lets it go only where its previous response lives. Raises RequestRejected."""
        keys = [replica.key for pool in self.live.by_model.get(ask.model, ()) for replica in pool.replicas]
        home = self.context.responses.home(ask.tenant, previous)
        if home is None and len(keys) == 1 and self.context.guard is None:
            # The only one there is knows better.
            return
        if home is None or home not in keys:
            why = f"Previous response with id '{previous}' not found."
            raise RequestRejected(400, why, "previous_response_not_found", param="previous_response_id")
        ask.tried = tuple(key for key in keys if key != home)

    def _begin(self, exchange: Exchange) -> None:
        self.exchanges.add(exchange)
        if self.context.plugins is not None:
            question = question_of(self.context, exchange)
            self.context.plugins.consult(question, lambda verdict: self._obey(exchange, verdict))
            return
        # It has just been made.
        self._decide_on(exchange, exchange.arrived)

    def _obey(self, exchange: Exchange, verdict: PluginVerdict) -> None:
        """What plugins say of a request; its client may have gone meanwhile."""
        if exchange.closed:
            return
        try:
            if verdict.body is not None and not verdict.refusal:
                request = exchange.request
                request.body, request.outline, request.boundaries = verdict.body, None, None
                parsed, ask = self.read(request, exchange.record.key_id)
                ask.priority, ask.ttft_s, ask.tpot_s = exchange.ask.priority, exchange.ask.ttft_s, exchange.ask.tpot_s
                exchange.take_body(ask, parsed)
            if verdict.pools is not None:
                pools = self.live.by_model.get(exchange.ask.model, ())
                others = [pool for pool in pools if pool.name not in verdict.pools]
                exchange.rule_out(tuple(replica.key for pool in others for replica in pool.replicas))
        except RequestRejected as refused:
            exchange.refuse(refused.status, str(refused), refused.code)
        else:
            if verdict.refusal:
                status, code = (503, "plugin_failed") if verdict.failed else (400, "plugin_refused")
                exchange.refuse(status, verdict.refusal, code, retry_after_s=1.0 if verdict.failed else 0.0)
            elif verdict.pools == ():
                exchange.refuse(400, "no pool may have this request", "plugin_refused")
            else:
                self._decide_on(exchange, self.now())

    def _enter(self, exchange: Exchange) -> None:
        """A request that was held."""
        self._decide_on(exchange, self.now())

    def _decide_on(self, exchange: Exchange, now: float) -> None:
        hosted, ask = self.context.hosted, exchange.ask
        try:
            avoided: tuple[str, ...] = ()
            if self.context.trials is not None:
                never, avoided = self.context.trials.steer(ask)
                if never:
                    exchange.rule_out(never)
            cold = hosted.asked(ask) if hosted is not None else None
            if cold is not None:
                exchange.refuse(503, cold[0], "model_not_loaded", retry_after_s=cold[1])
            elif self.waiting.count:
                # Nobody overtakes those who wait already, unless by priority.
                self.queue(exchange, now)
                self._admit()
            else:
                decision = self.router.decide(ask, now, exclude=ask.tried + avoided, explain=self.explaining)
                if avoided and decision.outcome != "send":
                    decision = self.router.decide(ask, now, exclude=ask.tried, explain=self.explaining)
                self._follow(exchange, decision, now)
        except Exception:
            exchange.broke_down()
            raise

    def _follow(self, exchange: Exchange, decision: Decision, now: float) -> None:
        if decision.outcome == "send":
            exchange.send(decision)
            return
        if self.context.on_decision is not None:
            self.context.on_decision(exchange.request_id, exchange.attempts, exchange.ask, decision)
        if decision.outcome == "wait":
            self.queue(exchange, now)
        else:
            kind = decision.refusal or "unavailable"
            if kind == "unavailable" and (
                self.fall_back(exchange, decision.reason) or self._cold_starts.take(exchange)
            ):
                return
            after = self.serving.health_every_s if kind == "unavailable" else 0.0
            exchange.refuse(_STATUS[kind], decision.reason, _CODE[kind], retry_after_s=after)

    def queue(self, exchange: Exchange, now: float) -> None:
        """It waits for room, or for its model to be loaded."""
        exchange.ticket, shed = self.waiting.add(exchange.ask, now, now + exchange.ask.patience_s, exchange)
        if shed is not None:
            self._turn_away(shed.item, "the queue is full")

    def _expire(self, exchange: Exchange, ask: Ask) -> None:
        decision = self.router.last_chance(ask, self.now())
        if decision is not None:
            exchange.send(decision)
        else:
            self._turn_away(exchange, f"it waited {ask.patience_s / self.speed:.1f} s")

    def fall_back(self, exchange: Exchange, why: str) -> bool:
        others = self.live.fleet.fallbacks.get(exchange.ask.model, ())
        if not others or exchange.reply.started or exchange.fallback or exchange.parsed.previous is not None:
            return False
        guard, key_id, request = self.context.guard, exchange.record.key_id, exchange.request
        names, before, now = self.live.names if guard is None else guard.names(key_id), request.body, self.now()
        for model in others:
            if names.get(model) != model:
                # Not for this key.
                continue
            request.body = with_model(before, model)
            parsed = read_body(request.body)
            try:
                ask = ask_of(self.live, names, request, parsed, exchange.ask.tenant)
                check_led(self.live, request, parsed, ask)
            except (BadInput, RequestRejected):
                continue
            ask.patience_s, ask.tenant, ask.priority = 0.0, exchange.ask.tenant, exchange.ask.priority
            ask.tried += exchange.ruled_out
            decision = self.router.decide(ask, now, exclude=ask.tried)
            if decision.outcome == "send":
                exchange.take_model(ask, parsed, request.body, why)
                exchange.send(decision)
                return True
        request.body = before
        return False

    def _turn_away(self, exchange: Exchange, why: str) -> None:
        bought = self.router.bought(exchange.ask, self.now()) if not exchange.reply.started else None
        if bought is not None:
            exchange.send(bought)
            return
        if self.fall_back(exchange, why):
            return
        hosted = self.context.hosted
        cold = hosted.absent(exchange.ask.model) if hosted is not None else None
        if cold is not None:
            exchange.refuse(503, f"{cold[0]}; {why}", "model_not_loaded", retry_after_s=cold[1])
            return
        now = self.now()
        after = max(self.waiting.retry_after_s(now), self.live.full_for_s(exchange.ask.model, now)) / self.speed
        exchange.refuse(
            429, f"no pool has room for this request: {why}", "fleet_saturated", retry_after_s=max(after, 1)
        )

    def _decide(self, ask: Ask, now: float) -> Decision:
        """For a request that has waited, and may have been sent elsewhere before."""
        return self.router.decide(ask, now, exclude=ask.tried)

    def _admit(self) -> None:
        """Lets in waiting requests that can be sent now, in order."""
        now = self.now()
        while (let_in := self.waiting.take(self._decide, now)) is not None:
            ticket, decision = let_in
            try:
                self._follow(ticket.item, decision, now)
            except Exception:
                ticket.item.broke_down()
                raise

    def on_exchange_closed(self, exchange: Exchange) -> None:
        self.exchanges.discard(exchange)
        if exchange.ticket is not None:
            self.waiting.leave(exchange.ticket)
        if exchange.held_until > 0.0:
            self._cold_starts.leave(exchange)
        self.metrics.count_request(exchange.record)
        self._tell(exchange.record, exchange.request)
        if self.waiting.count:
            self.loop.call_soon(self._admit)

    def _record(self, request: Request, key_id: int = 0) -> RequestRecord:
        record = RequestRecord(self._request_id(request), request.path, _time(), "", 0)
        record.key_id = key_id
        return record

    def _refuse(self, request: Request, reply: Reply, record: RequestRecord, refused: RequestRejected) -> None:
        reply.send(refused.status, *self._refused(request, record, refused))

    def _refused(self, request: Request, record: RequestRecord, refused: RequestRejected) -> tuple[bytes, bytes]:
        """Counts and tells a request that no exchange was made of; its answer's body, and lines of its head."""
        self.metrics.refused[refused.code] += 1
        record.how, record.status, record.code = "refused", refused.status, refused.code
        record.traceparent, context = context_of(request)
        if self.context.tracing is not None:
            record.trace = self.context.tracing.begin(record.path, context)
        self._tell(record, request)
        headers = b"x-request-id: %b\r\n%b" % (record.request_id, refused.headers) + retry_after(refused.retry_after_s)
        body = error_body(refused.status, str(refused), refused.code, refused.param)
        return error_message(refused.status, body) if request.path == _MESSAGES else body, headers

    def _tell(self, record: RequestRecord, request: Request) -> None:
        record.request = request
        if request.peer:
            record.client = self._clients.address(request)
        for listener in self.listeners:
            listener(record)
        record.request = None

    def _request_id(self, request: Request) -> bytes:
        given = request.headers.get(b"x-request-id")
        if given is not None and is_id(given):
            return given
        self._counter += 1
        return b"req-%b-%x" % (self._run, self._counter)

    # The clock

    def _tick(self) -> None:
        # First of all, so that whatever goes wrong below is not the end of all timeouts.
        self._ticking = self.loop.call_later(_TICK_S, self._tick)
        now = self.loop.time()
        # After a halt of the whole process the sockets have not been looked at yet: what came in the meantime counts.
        self._halted = now - self.context.clock > _HALT_S and not self._halted
        self.context.clock = now
        if not self._halted:
            for exchange in list(self.exchanges):
                try:
                    exchange.check(now)
                except Exception:
                    # Only this once: nobody else's patience shall depend on it.
                    exchange.broke_down()
                    raise
        self._cold_starts.tick()
        for ticket in self.waiting.expired(self.now()):
            self._expire(ticket.item, ticket.ask)
        if len(self.waiting):
            self._admit()
        for model in list(self._panicking):
            if not self.live.panics(model):
                self._panicking.discard(model)
                self.notify(Notice("panic_over", "info", f"{model}: enough replicas are in service again", model=model))
        for backend in self.backends.values():
            backend.origin.prune()

    def metrics_page(self) -> str:
        return self.metrics.page(self._gauges())

    def _gauges(self) -> list[Family]:
        now = self.now()
        backends = [(_labels(key, backend), backend) for key, backend in self.backends.items()]
        reported = [(at, backend.replica.reported) for at, backend in backends if backend.replica.reported is not None]
        promised: Samples = [
            ({"class": served.name, "target": name}, target.percentile)
            for served in self.live.fleet.classes
            for name, target in (("ttft", served.ttft), ("tpot", served.tpot))
            if target is not None
        ]

        kinds, by_state = self.live.sessions.counts().values(), self.live.sessions.by_state().values()
        states: Samples = [
            ({"state": state}, sum(counts[state] for counts in by_state)) for state in ("answered", "warm")
        ]
        turns: Samples = [
            ({"found": where}, sum(kind.turns[where] for kind in kinds)) for where in ("home", "moved", "evicted")
        ]

        def gauge(name: str, meaning: str, samples: Samples) -> Family:
            return f"crosstie_{name}", "gauge", meaning, samples

        def of_each(name: str, meaning: str, value: Callable[[Backend], float]) -> Family:
            return gauge(name, meaning, [(at, value(backend)) for at, backend in backends])

        return [
            of_each("backend_up", "1 where a backend may be chosen.", lambda backend: int(backend.replica.up)),
            of_each("in_flight", "Requests of this gateway in flight.", lambda backend: backend.replica.in_flight),
            of_each("connections", "Open connections to backends.", lambda backend: backend.origin.connections),
            of_each("breaker_open", "1 where a backend's circuit breaker keeps requests away.",
                    lambda backend: int(backend.breaker.state == "open")),
            of_each("ttft_correction", "What a backend's TTFT is over the model's prediction.",
                    lambda backend: backend.replica.ttft.factor(now)),
            of_each("tpot_correction", "What a backend's TPOT is over the model's prediction.",
                    lambda backend: backend.replica.tpot.factor(now)),
            gauge("engine_running", "Requests that an engine says it runs, others' included.",
                  [(at, load.running) for at, load in reported]),
            gauge("engine_waiting", "Requests that an engine says wait for it, others' included.",
                  [(at, load.waiting) for at, load in reported]),
            gauge("target_promised", "The share of a class's requests that are to keep its target.", promised),
            gauge("queued", "Requests that wait for room.", [({}, len(self.waiting))]),
            gauge("exchanges", "Requests that are being answered or wait.", [({}, len(self.exchanges))]),
            gauge("sessions", "Sessions: answered now, or warm, that is likely to come back.", states),
            ("crosstie_session_turns_total", "counter",
             "Turns of sessions that went on, by what was known of their cache when they were sent.", turns),
            ("crosstie_session_usd_total", "counter", "What sessions that went on have cost.",
             [({}, sum(kind.usd for kind in kinds))]),
            ("crosstie_sessions_begun_total", "counter", "Sessions that went on with a second turn.",
             [({}, sum(kind.begun for kind in kinds))]),
        ]  # fmt: skip

    def give_up(self) -> None:
        """Tells all waiting clients that they wait in vain."""
        for exchange in list(self.exchanges):
            exchange.give_up("the gateway was told to end")

    def close(self) -> None:
        self._ticking.cancel()
        self.context.keeper.close()
        if self.context.adapters is not None:
            self.context.adapters.close()
        for task in self._watches.values():
            task.cancel()
        for backend in self.backends.values():
            backend.origin.close()


def _labels(key: str, backend: Backend) -> dict[str, str]:
    side = backend.replica.pool.side
    return {"pool": backend.pool.name, "backend": key} | ({"side": side} if side else {})


def _check_encoding(request: Request) -> None:
    """Raises RequestRejected for compressed bodies: they may be huge when read."""
    coding = request.headers[b"content-encoding"].strip().lower()
    if coding not in (b"", b"identity"):
        why = f"the body is compressed ({coding.decode('latin-1')[:32]}): send it as it is"
        raise RequestRejected(415, why, "unsupported_encoding", headers=b"accept-encoding: identity\r\n")
