"""One attempt at a request on one backend: it listens to the upstream connection.

It ends exactly once: by `on_attempt_served` or `on_attempt_failed` of its exchange, or dropped by it.
"""

import asyncio
from math import inf
from typing import Final

from crosstie.route.decision import Decision
from crosstie.route.live import Flight, Replica
from crosstie.route.speed import Prediction
from crosstie.wire.client import Connection, Headers
from crosstie_gateway.gateway.answers import Choices, has_cut_choice, lacks_model, oddity
from crosstie_gateway.gateway.asks import HINTS
from crosstie_gateway.gateway.backend import FULL, FULL_S, Backend
from crosstie_gateway.gateway.body import with_member, with_model, with_usage_requested
from crosstie_gateway.gateway.call import BackendCall
from crosstie_gateway.gateway.errors import AttemptFailure, asked_to_wait_s
from crosstie_gateway.gateway.exchange_state import ExchangeState
from crosstie_gateway.gateway.relay import COST, StreamRelay, WholeRelay
from crosstie_gateway.gateway.roads import PASSED
from crosstie_gateway.wire.unpack import Unpacking

# Between two machines only, or the gateway's own to say.
_NOT_FORWARDED: Final = frozenset(
    b"host connection keep-alive proxy-connection te trailer transfer-encoding upgrade content-length expect "
    b"accept-encoding authorization api-key x-api-key proxy-authorization cookie http2-settings x-request-id "
    b"traceparent tracestate".split()
).union(HINTS)
# The client's own, for backends that have no key from us.
CREDENTIALS: Final[tuple[bytes, ...]] = (b"authorization", b"api-key", b"x-api-key")
# The gateway's own, in every answer and in some.
_ALWAYS: Final[tuple[bytes, ...]] = (b"x-crosstie-pool", b"x-crosstie-reason", b"x-request-id")
OWN_HEADERS: Final[tuple[bytes, ...]] = (*_ALWAYS, b"x-crosstie-fallback", COST)
# Of a backend's answer, what goes no further.
_NOT_RETURNED: Final = frozenset(
    b"connection keep-alive transfer-encoding content-length upgrade trailer server date authorization set-cookie "
    b"www-authenticate proxy-authenticate alt-svc content-encoding"
    # The gateway says which pages may read it.
    b" access-control-allow-origin access-control-allow-credentials access-control-expose-headers".split()
).union(OWN_HEADERS)

# Longer bodies are not copied behind their heads.
_LONG: Final = 65_536
# Told by the engine itself: in what it repeats of a request, the quotes would be escaped.
_NOT_LOADED: Final = b'"message":"model is not loaded"'
# 402: a provider whose account is empty.
_ABOUT_KEYS: Final[tuple[int, ...]] = (401, 402, 403)
# Of a proxy, whose credentials are the gateway's to have.
_PROXY_KEY: Final = 407
# Engines that count all along a stream, if they are asked to.
_COUNTING: Final[tuple[str, ...]] = ("vllm", "sglang", "emulated")
# Engines that take hints of sessions, and the paths on which they do.
_KEEPING: Final[tuple[str, ...]] = ("sglang", "emulated")
_SAYS: Final[tuple[str, ...]] = ("/completions", "/responses")


class Attempt(BackendCall):
    def __init__(self, exchange: ExchangeState, decision: Decision, replica: Replica, prediction: Prediction):
        context = exchange.context
        super().__init__(context, context.backends[replica.key])
        self.exchange, self.decision, self.prediction = exchange, decision, prediction
        self.flight: Flight = replica.start(exchange.ask, prediction, context.now())
        self.relay: StreamRelay | WholeRelay | None = None
        # Of an answer that comes compressed, though it was asked not to: what is counted must be read.
        self.unpacking: Unpacking | None = None
        self.status = 0
        # How long the backend asks to be left alone.
        self.asked_s = 0.0
        # Whether the engine was asked to count all along.
        self.counting = False
        # Whether something of the answer was sent on.
        self.begun = False
        self.sent_at = self.last_at = context.clock
        self.asked_at = self.flight.started
        # For a LoRA adapter, which is given to its engine again once if that has lost it.
        self.loading: asyncio.Task[str | None] | None = None
        self.loaded_again = False

    def start(self) -> None:
        adapter = self.exchange.ask.adapter
        if adapter is not None and self._loads(adapter):
            return
        self.dispatch()

    def _loads(self, adapter: str) -> bool:
        """Whether its adapter is not there yet; it then begins to load."""
        slots, loader = self.backend.replica.adapters, self.context.adapters
        if slots is None or loader is None or slots.has(adapter):
            return False
        # Nobody is waited for yet.
        self.sent_at = inf
        patience_s = self.context.serving.adapter_load_s
        self.loading = loader.load(self.backend, adapter, patience_s)
        self.loading.add_done_callback(self._adapter_loaded)
        return True

    def _adapter_loaded(self, load: "asyncio.Task[str | None]") -> None:
        if load is not self.loading or load.cancelled():
            # It was given up, or the gateway ends.
            return
        self.loading, why = None, load.result()
        self.sent_at = self.last_at = self.context.clock
        if why is not None:
            said = f"{self.who} could not load the adapter {self.exchange.ask.adapter}"
            self.failed(AttemptFailure(said, 503, fault=False, code="adapter_not_loaded", retry_after_s=FULL_S))
            return
        # The load says nothing of how fast it answers.
        self.flight.started = self.asked_at = self.context.now()
        self.start()

    def _load_again(self, relay: WholeRelay) -> bool:
        """Whether its engine has lost the adapter, as by a restart; it is then loaded once more."""
        adapter, slots = self.exchange.ask.adapter, self.backend.replica.adapters
        if adapter is None or slots is None or self.loaded_again or relay.reply.started:
            return False
        if not (self.status == 404 and lacks_model(self.exchange.path, relay.content)) and not (
            self.status == 400 and b"LoRA adapter" in relay.content
        ):
            return False
        slots.went(adapter)
        self.loaded_again, self.relay, self.status = True, None, 0
        self.start()
        return True

    def failed(self, failure: AttemptFailure) -> None:
        self.exchange.on_attempt_failed(failure)

    def go(self, connection: Connection) -> None:
        self.connection = connection
        body = self._body()
        if len(body) < _LONG:
            connection.send(self._message(self.backend, body), self)
        else:
            connection.send(self._head(self.backend, body), self, body)

    def _body(self) -> bytes:
        exchange, backend = self.exchange, self.backend
        parsed, body, path = exchange.parsed, exchange.body, exchange.path
        model, adapter = backend.model, exchange.ask.adapter
        if adapter is not None:
            model = f"{model}:{adapter}" if backend.engine == "sglang" else adapter
        if parsed.model != model:
            part = parsed.model_part
            body = part.replaced(body, model.encode()) if part is not None else with_model(body, model)
        if parsed.stream and path.endswith("/completions"):
            self.counting = backend.engine in _COUNTING and not parsed.wants_continuous
            if self.counting or not parsed.wants_usage:
                body = with_usage_requested(body, parsed.options_absent, self.counting)
        if backend.pool.keeps_sessions and backend.engine in _KEEPING and path.endswith(_SAYS):
            member = self.context.keeper.member(self.flight)
            body = with_member(body, member) if member else body
        return body

    def _target(self, backend: Backend) -> bytes:
        request, path = self.exchange.request, self.exchange.path
        target = backend.targets.get(path)
        if target is None:
            # What an engine has beside the API lies beside its /v1.
            base, rest = (backend.api, path[3:]) if path.startswith("/v1/") else (backend.beside, path)
            target = backend.targets[path] = base + rest.encode("latin-1")
        return target if not request.query else b"%b?%b" % (target, request.query.encode("latin-1"))

    def _message(self, backend: Backend, body: bytes) -> bytes:
        return self._head(backend, body) + body

    def _head(self, backend: Backend, body: bytes) -> bytes:
        exchange = self.exchange
        request = exchange.request
        headers, head = request.headers, request.head
        forwarded = head.forwarded if head is not None else None
        if forwarded is None:
            # The lines of a client's head that any backend gets.
            lines = [b"%b: %b\r\n" % (name, value) for name, value in headers.items() if name not in _NOT_FORWARDED]
            forwarded = b"".join(lines)
            if head is not None:
                head.forwarded = forwarded
        lines = [b"POST ", self._target(backend), b" HTTP/1.1\r\n", backend.host_line, forwarded]
        if backend.authorization is not None:
            lines.append(b"authorization: %b\r\n" % backend.authorization)
        else:
            for name in CREDENTIALS:
                value = headers.get(name)
                if value is not None:
                    lines.append(b"%b: %b\r\n" % (name, value))
        lines.append(
            b"accept-encoding: identity\r\n%bx-request-id: %b\r\ncontent-length: %b\r\n\r\n"
            % (exchange.trace_headers, exchange.request_id, str(len(body)).encode())
        )
        return b"".join(lines)

    # What the upstream connection tells

    def on_head(self, status: int, headers: Headers) -> None:
        self.status = status
        self.last_at = self.context.clock
        # Clients with keys are not told what is left of the gateway's own account with a backend.
        keyed = self.context.guard is not None
        known = self.connection.head if self.connection is not None else None
        passed = None if known is None else known.passed_keyed if keyed else known.passed
        if passed is not None:
            self._whole_from(status, passed)
            return
        streamed, kept = False, []
        for name, value in headers:
            if name == b"content-type" and value.startswith(b"text/event-stream"):
                streamed = True
            elif name == b"content-encoding" and value.strip().lower() != b"identity":
                self.unpacking = Unpacking(value)
            if name not in _NOT_RETURNED and not (keyed and name.startswith(b"x-ratelimit-")):
                kept.append(b"%b: %b\r\n" % (name, value))
        if status >= 300 and status in FULL:
            # Of those that are full, the client is told of the one that has room first.
            self.asked_s = asked_to_wait_s(headers)
            kept = [line for line in kept if not line.startswith(b"retry-after")]
        exchange, passed = self.exchange, b"".join(kept)
        if known is not None and not streamed and self.unpacking is None:
            if keyed:
                known.passed_keyed = passed
            else:
                known.passed = passed
        if streamed and status < 300:
            self.relay = StreamRelay(
                exchange.reply, status, passed + self.own_headers(), hide_usage=not exchange.parsed.wants_usage,
                hide_continuous=self.counting, transcript=exchange.transcribed(), seam=exchange.seam,
                choices=Choices(exchange.parsed.choices) if exchange.parsed.choices > 1 else None,
            )  # fmt: skip
        else:
            self._whole_from(status, passed)

    def _whole_from(self, status: int, passed: bytes) -> None:
        """An answer in one piece begins; `passed`: the backend's lines that go on to the client."""
        exchange = self.exchange
        if not exchange.reply.started:
            self.relay = WholeRelay(exchange.reply, status, passed + self.own_headers(), exchange.priced)

    def own_headers(self) -> bytes:
        grant, reason, ask = self.exchange.record.grant, self.decision.reason, self.exchange.ask
        if self.flight.replica.presence is not None:
            # Of a model that shares its replica.
            reason += f"; waited {ask.waited_s:.1f} s for a load" if ask.cold else "; loaded"
        return b"x-crosstie-pool: %b\r\nx-crosstie-reason: %b\r\nx-request-id: %b\r\n%b%b" % (
            self.backend.name,
            reason.encode("ascii", "replace"),
            self.exchange.request_id,
            b"" if grant is None else grant.headers,
            self.exchange.fallback,
        )

    def on_body(self, data: bytes) -> None:
        relay, context = self.relay, self.context
        if relay is None:
            return
        if self.unpacking is not None:
            data = self.unpacking.plain(data)
        if relay.body(data):
            self.last_at = context.clock
            if not self.begun:
                self.begun = True
                self.flight.first_token(context.now())
                self.exchange.on_attempt_begun()
        elif isinstance(relay, WholeRelay):
            self.last_at = context.clock
        if self.exchange.reply.slow and self.connection is not None:
            self.connection.pause()

    def on_end(self) -> None:
        self.connection = None
        relay, status = self.relay, self.status
        if isinstance(relay, WholeRelay):
            relay.whole = True
        if self.unpacking is not None and not self.unpacking.done:
            why = f"{self.who} answered in an encoding that it was not asked for and that cannot be read"
            self.failed(AttemptFailure(why, 502, passed_on=False))
        elif status >= 300 and self._turned_down(status):
            return
        elif isinstance(relay, WholeRelay) and (why := self._oddity(relay)):
            self.failed(AttemptFailure(f"{self.who} answered {why}", 502, wrong=True))
        elif isinstance(relay, WholeRelay) and status < 300 and self._cut_a_choice(relay):
            self.failed(AttemptFailure(f"{self.who} left a choice unfinished", 502, passed_on=False))
        elif isinstance(relay, WholeRelay) and status in (400, 404) and self._load_again(relay):
            return
        elif isinstance(relay, WholeRelay) and status == 404:
            self._not_there(relay)
        elif isinstance(relay, StreamRelay) and relay.client_error_status:
            # Told inside a stream, but a 4xx all the same.
            self.status = relay.client_error_status
            relay.end()
            self.exchange.on_attempt_served()
        elif relay is None:
            # It was to go on with an answer, and says something else in its place.
            self.failed(AttemptFailure(f"{self.who} did not go on ({status})", 502, fault=False))
        elif not relay.complete:
            self.failed(AttemptFailure(f"{self.who} ended its stream before it had finished", 502))
        else:
            relay.end()
            self.exchange.on_attempt_served()

    def _turned_down(self, status: int) -> bool:
        """Whether an error status is dealt with here, and so is no answer for the client."""
        if self._lost_its_model():
            if self.context.hosted is not None:
                self.context.hosted.doubted(self.backend.replica, surely=True)
            self.failed(AttemptFailure(f"{self.who} no longer has the model", 503, fault=False))
        elif status in FULL:
            self._full(status)
        elif status >= 500:
            # What an engine does not do at all, such as llama.cpp embeddings, is no fault of it; another may do it.
            self.failed(AttemptFailure(f"{self.who} answered {status}", status, fault=status != 501))
        elif status < 400:
            # Clients follow it, with the prompt: to where a backend says, around the gateway and its accounts.
            self.failed(AttemptFailure(f"{self.who} would send the client elsewhere ({status})", 502))
        elif self._is_operators(status):
            # A key that this backend does not know, or another name for its model: nothing that a client can mend.
            why = (
                f"{self.who} does not take what the gateway sends ({status}): see its key, proxy, address and served_as"
            )
            self.failed(AttemptFailure(why, 502, wrong=True))
        else:
            return False
        return True

    def _cut_a_choice(self, relay: WholeRelay) -> bool:
        return self.exchange.parsed.choices > 1 and not relay.reply.started and has_cut_choice(relay.content)

    def _full(self, status: int) -> None:
        """Full, not broken: somebody else may have room."""
        context, exchange, backend = self.context, self.exchange, self.backend
        speed = context.speed
        # A limit of the client's own key at the backend is no reason to keep others away.
        own = status == 429 and backend.authorization is None and context.guard is None
        own = own and any(name in exchange.request.headers for name in CREDENTIALS)
        backend.full(0.0 if own else self.asked_s, context.now(), speed)
        soonest_s = context.router.fleet.full_for_s(exchange.ask.model, context.now()) / speed
        after_s = self.asked_s if own and self.asked_s else max(soonest_s, FULL_S)
        self.failed(AttemptFailure(f"{self.who} is full ({status})", status, fault=False, retry_after_s=after_s))

    def _is_operators(self, status: int) -> bool:
        """Whether a refusal is about what the gateway adds: its own key, or that clients' keys go no further."""
        ours = self.backend.authorization is not None or self.context.guard is not None
        return (status in _ABOUT_KEYS and ours) or status == _PROXY_KEY

    def _not_there(self, relay: WholeRelay) -> None:
        """Its model, or the path, is not there: for the operator to mend. Another engine may have the path."""
        path = self.exchange.path
        if lacks_model(path, relay.content):
            why = f"{self.who} does not have its model (404): see what it serves, and served_as"
            self.failed(AttemptFailure(why, 502, wrong=True))
        else:
            # An engine with the model chats; other paths may exist nowhere.
            fault = path.endswith("/completions")
            why = f"{self.who} has no {path} (404): see its address"
            self.failed(AttemptFailure(why, 404, fault=fault, passed_on=relay.is_json, code="not_found"))

    def _oddity(self, relay: WholeRelay) -> str:
        """What is wrong with an answer whose status says that all is well."""
        if self.status >= 300 or relay.reply.started:
            return ""
        if not relay.is_json:
            # There, sounds, texts and lists may be asked for; a page for people is a login page or a proxy's notice
            # anywhere.
            asked_for = self.exchange.path in PASSED and b"content-type: text/html" not in relay.headers
            return "" if asked_for or relay.is_bytes else "with something else than a JSON object"
        why, status = oddity(self.exchange.path, relay.content, relay.read())
        if (why or status) and relay.is_bytes:
            return ""
        if status:
            # Told inside an answer, but a 4xx all the same.
            self.status = relay.status = status
        return why

    def _lost_its_model(self) -> bool:
        """A router of llama.cpp that was restarted knows its models, and has none of them loaded."""
        relay = self.relay
        if self.status != 400 or self.flight.replica.presence is None or not isinstance(relay, WholeRelay):
            return False
        return _NOT_LOADED in relay.content.replace(b": ", b":")

    # What its exchange asks of it

    @property
    def speaker(self) -> Backend:
        """Whose the answer or the failure is."""
        return self.backend

    def given_up(self) -> None:
        """It has failed."""

    def stuck(self, now: float) -> str:
        """Why waiting for it is useless before it is overdue; empty: it is not."""
        return ""

    @property
    def who(self) -> str:
        return f"the backend of pool {self.backend.pool.name}"

    @property
    def answering(self) -> bool:
        """Whether the answer has begun: the first event of a stream, or the first byte of anything else."""
        relay = self.relay
        return self.begun or (isinstance(relay, WholeRelay) and relay.begun)

    def pause(self) -> None:
        if self.connection is not None:
            self.connection.pause()

    def resume(self) -> None:
        self.last_at = self.context.clock
        if self.connection is not None:
            self.connection.resume()

    def drop(self) -> None:
        """Ends it upstream too: the engine sees its client go, and stops."""
        # An adapter's load goes on for others.
        self.loading = None
        self.hang_up()
