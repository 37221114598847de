"""An exchange whose requests Envoy carries: decided, accounted and learnt from as any other.

Envoy has the connections, the patience with backends, and the retries over the ordered endpoints. A broken stream is
not resumed: its client is Envoy's.
"""

import ipaddress

from crosstie.catalog.kube import KUBE
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.live import Replica
from crosstie.route.speed import Prediction
from crosstie.wire.address import Address
from crosstie_gateway.gateway.asks import HINTS
from crosstie_gateway.gateway.attempt import CREDENTIALS, Attempt
from crosstie_gateway.gateway.backend import Backend
from crosstie_gateway.gateway.body import RequestBody
from crosstie_gateway.gateway.context import Context
from crosstie_gateway.gateway.errors import AttemptFailure
from crosstie_gateway.gateway.exchange import Exchange, ExchangeOwner
from crosstie_gateway.gateway.handover import MOST_BROKEN
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.gateway.relay import WholeRelay
from crosstie_gateway.gateway.transcript import Transcript
from crosstie_gateway.pick.stream import PickStream
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

# Of a client's, what is no business of an engine's.
_DROPPED = HINTS | {b"cookie", b"proxy-authorization"}
# How Envoy names an answer that a backend gave, and begins those that it makes up itself.
_GIVEN = "via_upstream"
_OWN_WORDS = (b"upstream connect error", b"no healthy upstream", b"upstream request timeout")
_UNCONNECTED = ("connection_failure", "connection failure", "connection_refused")
_NOBODY = ("no_healthy_upstream", "no healthy upstream")


def endpoint_of(address: Address) -> str:
    """As the standard has it: an address and a port."""
    dials = "127.0.0.1" if address.dials == "localhost" else address.dials
    return f"[{dials}]:{address.port}" if ":" in dials else f"{dials}:{address.port}"


def check_endpoints(fleet: Fleet) -> None:
    """Raises BadInput where a pool cannot be named to a proxy."""
    for pool in fleet.pools:
        if pool.led_backends:
            why = "a proxy cannot drive prefill and decode engines; crosstie serve can"
            raise BadInput(f"pool {pool.name}: is disaggregated: {why}")
        for url in (url_of for each in pool.by_model() for url_of in each.backends):
            address = Address(url)
            if address.socket:
                raise BadInput(f"pool {pool.name}: {url} is a socket of this machine; a proxy needs an address")
            if address.by_name or address.dials == "localhost" or url.startswith(KUBE):
                continue
            try:
                ipaddress.ip_address(address.dials)
            except ValueError:
                why = "is a name, and a picker names addresses: write it as"
                raise BadInput(f"pool {pool.name}: {url} {why} dns+{url}") from None


class PickedExchange(Exchange):
    def __init__(
        self, context: Context, owner: ExchangeOwner, request: Request, reply: Reply, parsed: RequestBody, ask: Ask,
        record: RequestRecord,
    ):  # fmt: skip
        super().__init__(context, owner, request, reply, parsed, ask, record)
        subset = _stream_of(self).subset
        if subset is not None:
            # Only to what the data plane has left.
            left = frozenset(subset)
            backends = context.backends.items()
            self.ruled_out = tuple(key for key, backend in backends if endpoint_of(backend.origin.address) not in left)
            ask.tried += self.ruled_out
            self.tried = ask.tried

    def _made(self, decision: Decision, replica: Replica, prediction: Prediction) -> Attempt:
        return PickedAttempt(self, decision, replica, prediction)

    def transcribed(self) -> Transcript | None:
        return None

    def check(self, now: float) -> None:
        if not (isinstance(self.attempt, PickedAttempt) and self.attempt.picked):
            super().check(now)

    def on_attempt_failed(self, failure: AttemptFailure) -> None:
        if isinstance(self.attempt, PickedAttempt) and self.attempt.picked:
            # Envoy has tried all that it was told; it cannot be told of others any more.
            self.broke = MOST_BROKEN
        super().on_attempt_failed(failure)

    def passed_over(self, backend: Backend) -> None:
        """Envoy went on to the next endpoint."""
        self.context.metrics.retries[backend.pool.name] += 1
        self.attempts += 1
        self._failed(backend, f"Envoy had no answer from the backend of pool {backend.pool.name}, and asked the next")

    def _release(self, now: float, *, completed: bool) -> bool:
        # When the one that has answered was asked is not known: nothing is to be learnt from how long it took.
        moved = isinstance(self.attempt, PickedAttempt) and self.attempt.moved
        return super()._release(now, completed=completed and not moved)


def _stream_of(exchange: Exchange) -> PickStream:
    stream = exchange.reply.connection
    if not isinstance(stream, PickStream):
        raise ValueError("not a request of a proxy")
    return stream


class PickedAttempt(Attempt):
    def __init__(self, exchange: PickedExchange, decision: Decision, replica: Replica, prediction: Prediction):
        super().__init__(exchange, decision, replica, prediction)
        self.picks_for = exchange
        # Whether Envoy was told the endpoint; and the others, in order.
        self.picked = False
        self.others: list[tuple[str, Decision]] = []
        # Whether another than the first has answered.
        self.moved = False
        # How Envoy came by the answer, where it says so.
        self.details = ""

    def dispatch(self) -> None:
        self.picked = True
        stream, first = _stream_of(self.picks_for), endpoint_of(self.backend.origin.address)
        given, removed = self._changes(stream)
        body = self._body()
        self._find_others(stream.settings.fallbacks)
        endpoints = ",".join((first, *(endpoint for endpoint, _ in self.others)))
        stream.pick(endpoints, given, removed, body, self)

    def _find_others(self, most: int) -> None:
        """Where it would be sent if the first failed: backends that can be asked the same, by name, key and path."""
        exchange, context, own = self.picks_for, self.context, self.backend
        tried = exchange.tried
        while len(self.others) < most:
            decision = context.router.decide(exchange.ask, context.now(), exclude=tried)
            replica = decision.replica
            if replica is None:
                return
            tried += (replica.key,)
            other = context.backends[replica.key]
            same = (other.model, other.api, other.beside, other.authorization, other.engine)
            if same != (own.model, own.api, own.beside, own.authorization, own.engine):
                continue
            slots, adapter = replica.adapters, exchange.ask.adapter
            if adapter is None or (slots is not None and slots.has(adapter)):
                self.others.append((endpoint_of(other.origin.address), decision))

    def _changes(self, stream: PickStream) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """Headers to change, and headers to drop, for the backend."""
        exchange, backend, headers = self.exchange, self.backend, self.exchange.request.headers
        given = [(b"accept-encoding", b"identity"), (b"x-request-id", exchange.request_id)]
        target = self._target(backend)
        if target != stream.target:
            given.append((b":path", target))
        if backend.authorization is not None:
            given.append((b"authorization", backend.authorization))
        for line in exchange.trace_headers.split(b"\r\n"):
            if line:
                name, _, value = line.partition(b": ")
                given.append((name, value))
        # Of keys, those that the gateway has taken for its own, and all where the backend has one.
        keeps = headers if backend.authorization is None else {}
        dropped = {name for name in stream.names if name in _DROPPED or (name in CREDENTIALS and name not in keeps)}
        return given, sorted(dropped.difference([name for name, _ in given]))

    # What Envoy tells

    def on_served(self, endpoint: str, details: str) -> None:
        self.details = details
        names = [name for name, _ in self.others]
        if endpoint not in names:
            return
        now, exchange = self.context.now(), self.picks_for
        at, backends = names.index(endpoint), self.context.backends
        decision = self.others[at][1]
        replica, prediction = decision.replica, decision.prediction
        backend = backends.get(replica.key) if replica is not None else None
        if replica is None or prediction is None or backend is None:
            # The fleet has been read again since.
            return
        keys = [other.replica.key for _, other in self.others[:at] if other.replica is not None]
        passed_over = [self.backend, *(backends[key] for key in keys if key in backends)]
        self.flight.end(now, output_tokens=None, input_tokens=None, completed=False)
        self.moved, self.decision, self.prediction, self.backend = True, decision, prediction, backend
        self.flight = replica.start(exchange.ask, prediction, now)
        # It is under way already, since nobody knows when.
        self.flight.decode_from(now)
        self.flight.seen = True
        for passed in passed_over:
            exchange.passed_over(passed)

    def on_end(self) -> None:
        said = self._envoys_own()
        if not said:
            super().on_end()
            return
        nobody = any(word in said for word in _NOBODY)
        refused = any(word in said for word in _UNCONNECTED)
        why = f"Envoy had no answer from {self.who}: {said}"
        self.failed(AttemptFailure(why, self.status, fault=not nobody, refused=refused, passed_on=False))

    def _envoys_own(self) -> str:
        """Envoy's words for having no answer of a backend; empty: it has one."""
        relay = self.relay
        if self.status < 500 or not isinstance(relay, WholeRelay):
            return ""
        if self.details:
            return "" if self.details.startswith(_GIVEN) else self.details
        words = relay.content[:300]
        return words.decode("latin-1") if words.startswith(_OWN_WORDS) else ""
