"""An attempt of two engines: one computes the prompt, the other decodes. The gateway hands the cache over as the
engine's own proxy would.

vLLM (NixlConnector; `toy_proxy_server.py`, read at vllm@a014e35f, 2026-08-22): the prefill engine is asked for one
token with `do_remote_decode`; its `kv_transfer_params` go with the request to the decode engine. SGLang
(`pd_router.rs`, `io_struct.py`, read at sglang@cce0a124, 2026-08-23): both get the request at once, with the address
where the prefill engine meets the other, and a room of their own.
"""

from secrets import randbits
from typing import Final

import msgspec

from crosstie.core.fleet import HANDING
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.disaggregated import choose_prefill
from crosstie.route.live import Flight, LiveFleet, LivePool, Replica
from crosstie.route.speed import Prediction
from crosstie.wire.client import Connection, Headers
from crosstie_gateway.gateway.attempt import Attempt
from crosstie_gateway.gateway.backend import FULL, FULL_S, Backend
from crosstie_gateway.gateway.body import RequestBody
from crosstie_gateway.gateway.call import BackendCall
from crosstie_gateway.gateway.errors import AttemptFailure, RequestRejected, asked_to_wait_s
from crosstie_gateway.gateway.exchange_state import ExchangeState
from crosstie_gateway.gateway.fields import decode_parts, decode_prefilled, readable
from crosstie_gateway.gateway.relay import WholeRelay
from crosstie_gateway.gateway.roads import SERVED
from crosstie_gateway.wire.request import Request

# What only the gateway may say: with it a client could read other people's caches off any engine.
RESERVED: Final[tuple[str, ...]] = (
    "kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "bootstrap_pair_key", "disagg_prefill_dp_rank",
)  # fmt: skip
_NIXL: Final = "kv_transfer_params"
# A client's way to vLLM's arguments of the same names.
_EXTRA: Final = "vllm_xargs"
_REMOTE_DECODE: Final = msgspec.Raw(
    b'{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,'
    b'"remote_host":null,"remote_port":null}'
)
_ONE, _NO = msgspec.Raw(b"1"), msgspec.Raw(b"false")
# One token, and what is needed to fetch the blocks of the longest prompt.
_MOST_ANSWER: Final = 64 * 2**20
_ROOM_BITS: Final = 62
_encode: Final = msgspec.json.Encoder().encode


def scores_prompt(parts: dict[str, msgspec.Raw]) -> bool:
    """Whether it asks for what only the engine that computes the prompt knows."""
    echoes = "echo" in parts and bool(msgspec.json.decode(parts["echo"]))
    return (echoes and "logprobs" in parts) or "prompt_logprobs" in parts


def check_led(live: LiveFleet, request: Request, parsed: RequestBody, ask: Ask) -> None:
    """Checks a request for a model that the gateway leads engines for. Raises RequestRejected.

    vLLM's decode engine computes itself what cannot be handed over. SGLang's does not: such requests go to another
    pool; samples (n) would share a room.
    """
    pools = live.led.get(ask.model)
    if pools is None:
        return
    parts = {} if parsed.is_form else decode_parts(request.body)
    extra = bytes(parts[_EXTRA]) if _EXTRA in parts else b""
    for key in RESERVED:
        if key in parts or (extra and key in str(msgspec.json.decode(extra))):
            raise RequestRejected(400, f"{key} is the gateway's to say, not a client's", "bad_request", param=key)
    strict = [pool for pool in pools if _handing(pool) == "bootstrap"]
    if not strict:
        return
    name: str | None = None
    # Pages that only tell of a request have paths of their own.
    if request.path in SERVED and not request.path.endswith("/completions"):
        why = f"takes no {request.path}"
    elif parsed.copies > parsed.prompts:
        why, name = "gives one answer to a prompt", "n"
    elif scores_prompt(parts):
        why, name = "gives no log probabilities of prompts", "echo"
    else:
        return
    if len(strict) == len(live.by_model[ask.model]):
        sentence = f"{ask.model}, which SGLang serves with prefill and decode disaggregated, {why}"
        raise RequestRejected(400, sentence, "unsupported", param=name)
    ask.tried += tuple(replica.key for pool in strict for replica in pool.replicas)


def _handing(pool: LivePool) -> str:
    service = pool.pool.apart
    return HANDING[service.connector] if service is not None else ""


class PrefillLeg(BackendCall):
    """A prompt at a prefill engine. It tells its attempt the result once, unless dropped before."""

    def __init__(self, attempt: "LedAttempt", backend: Backend, flight: Flight):
        super().__init__(attempt.context, backend)
        self.attempt, self.flight = attempt, flight
        self.message = b""
        self.status = 0
        self.headers: Headers = []
        self._pieces: list[bytes] = []
        self._size = 0
        self.over = False

    @property
    def content(self) -> bytes:
        return b"".join(self._pieces)

    def start(self, message: bytes) -> None:
        self.message, self.asked_at = message, self.context.now()
        self.dispatch()

    @property
    def who(self) -> str:
        return self.attempt.who

    def failed(self, failure: AttemptFailure) -> None:
        self._end()
        self.attempt.on_prefill_failed(failure)

    def go(self, connection: Connection) -> None:
        self.connection = connection
        connection.send(self.message, self)

    # What its connection tells

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > _MOST_ANSWER:
            self.drop()
            self.attempt.on_prefill_failed(AttemptFailure(f"{self.who} answered with more than anybody asked for", 502))
            return
        self._pieces.append(data)

    def on_end(self) -> None:
        self.connection = None
        self._end()
        self.attempt.on_prefill_answered(self)

    def drop(self) -> None:
        self.hang_up()
        self._end()

    def _end(self) -> None:
        if not self.over:
            self.over = True
            self.flight.end(self.context.now(), input_tokens=None, output_tokens=None, completed=False)
            self.attempt.touch()


class LedAttempt(Attempt):
    """Its own backend decodes; the prompt's is chosen here. The client gets the decode engine's answer, or the prefill
    engine's refusal."""

    def __init__(self, exchange: ExchangeState, decision: Decision, replica: Replica, prediction: Prediction):
        super().__init__(exchange, decision, replica, prediction)
        self.pool: LivePool = replica.pool
        self.at_once = _handing(replica.pool) == "bootstrap"
        # The prompt's part, as long as it has not come to a good end.
        self.leg: PrefillLeg | None = None
        # What the decode engine is told beside the request.
        self.told: dict[str, msgspec.Raw] = {}
        # Whether the decode engine has ended it, for good or ill.
        self.decode_ended = False

    def start(self) -> None:
        exchange, context = self.exchange, self.context
        parts = {} if exchange.parsed.is_form else decode_parts(super()._body())
        if not self.at_once and not self._can_hand_over(parts):
            # vLLM's decode engine does all of it.
            super().start()
            return
        now, tokens = context.now(), context.router.fleet.lengths.tokens_a_block(exchange.ask)
        side = self.pool.prefill
        choice = choose_prefill(side, exchange.ask, now, tokens, exchange.tried) if side is not None else None
        if choice is None:
            exchange.tried += tuple(replica.key for replica in self.pool.replicas)
            why = f"no prefill backend of pool {self.backend.pool.name} is left to ask"
            self.failed(AttemptFailure(why, 503, fault=False))
            return
        replica, cached = choice
        backend = context.backends[replica.key]
        flight = replica.start(exchange.ask, _holding(self.prediction, cached), now)
        self.leg = leg = PrefillLeg(self, backend, flight)
        self.touch()
        if self.at_once:
            self.told = self._meeting(backend)
            leg.start(self._message(backend, self._prompt(parts, self.told)))
            if not leg.over and not exchange.closed:
                super().start()
        else:
            leg.start(self._message(backend, self._prompt(parts, {_NIXL: _REMOTE_DECODE})))

    def _can_hand_over(self, parts: dict[str, msgspec.Raw]) -> bool:
        """vLLM gives one handle to a request: blocks of one prompt, that are fetched once."""
        exchange = self.exchange
        alone = exchange.path.endswith("/completions") and exchange.parsed.copies == 1
        return alone and not scores_prompt(parts)

    def _meeting(self, prefill: Backend) -> dict[str, msgspec.Raw]:
        """A room for both. SGLang gives each of several prompts the next one."""
        service = self.backend.pool.apart
        port = None
        if service is not None:
            ports = dict(zip(service.prefill.backends, service.prefill.bootstrap_ports, strict=True))
            port = ports.get(prefill.replica.key)
        host = prefill.origin.address.dials
        # As it stands in a URL.
        host = f"[{host}]" if ":" in host else host
        room = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": randbits(_ROOM_BITS)}
        return {name: msgspec.Raw(_encode(value)) for name, value in room.items()}

    def _prompt(self, parts: dict[str, msgspec.Raw], extra: dict[str, msgspec.Raw]) -> bytes:
        """What the prefill engine is asked: the prompt, one token and no stream."""
        asked = dict(parts)
        for name in (*RESERVED, "stream_options"):
            asked.pop(name, None)
        asked["stream"] = _NO
        if not self.at_once:
            # SGLang's makes one in any case, and its answer may depend on how long it was to be.
            asked["max_tokens"] = _ONE
            if "max_completion_tokens" in asked:
                asked["max_completion_tokens"] = _ONE
            for name in ("min_tokens", "min_completion_tokens"):
                asked.pop(name, None)
        asked.update(extra)
        return _encode(asked)

    def _body(self) -> bytes:
        body = super()._body()
        if self.exchange.parsed.is_form:
            return body
        parts = decode_parts(body)
        for name in RESERVED:
            parts.pop(name, None)
        parts.update(self.told)
        return _encode(parts)

    # What the prompt's part tells

    def on_prefill_answered(self, leg: PrefillLeg) -> None:
        if self.begun:
            # The cache has come over: what else is said of it is late.
            self.leg = None
        elif leg.status in FULL:
            asked_s = asked_to_wait_s(leg.headers)
            leg.backend.full(asked_s, self.context.now(), self.context.speed)
            why = f"{self.who} is full ({leg.status})"
            self.on_prefill_failed(AttemptFailure(why, leg.status, fault=False, retry_after_s=asked_s or FULL_S))
        elif leg.status >= 300:
            # To be told like the answer of any backend.
            super().drop()
            self.on_head(leg.status, leg.headers)
            self.on_body(leg.content)
            super().on_end()
        else:
            self._prefilled(leg)

    def _prefilled(self, leg: PrefillLeg) -> None:
        answer = readable(decode_prefilled, leg.content)
        if answer is None:
            self.on_prefill_failed(
                AttemptFailure(f"{self.who} answered with something else than a JSON object", 502, wrong=True)
            )
            return
        if not self.at_once:
            if bytes(answer.kv_transfer_params)[:1] != b"{":
                why = f"{self.who} hands no cache over (no {_NIXL}): see its --kv-transfer-config"
                self.on_prefill_failed(AttemptFailure(why, 502, wrong=True))
                return
            self.told = {_NIXL: answer.kv_transfer_params}
        leg.backend.succeeded()
        self.exchange.record.prefill = leg.backend.replica.key
        self.leg = None
        details = answer.usage.prompt_tokens_details if answer.usage is not None else None
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        if type(cached) is int:
            # What it was really spared: so much less is charged.
            self.flight.prediction = _holding(self.flight.prediction, float(max(cached, 0)))
        if not self.at_once:
            self.sent_at, self.asked_at = self.context.clock, self.context.now()
            super().start()

    def on_prefill_failed(self, failure: AttemptFailure) -> None:
        """Stops the decode backend from waiting; where it decodes already nothing fails."""
        if self.begun:
            self.leg = None
            return
        super().drop()
        self.relay = None
        # A prefill engine's own words are not about the answer that the client waits for.
        failure.passed_on = False
        self.failed(failure)

    # What the connection to the decode engine tells

    def connected(self, result: Connection | Exception) -> None:
        self.decode_ended = not isinstance(result, Connection)
        super().connected(result)

    def go(self, connection: Connection) -> None:
        self.decode_ended = False
        super().go(connection)

    def on_end(self) -> None:
        self.decode_ended = True
        if self.leg is not None:
            self.leg.drop()
        relay = self.relay
        if isinstance(relay, WholeRelay) and not relay.reply.started and _NIXL.encode() in relay.content:
            relay.say(_without_handover(relay.content))
        super().on_end()

    def on_lost(self, error: Exception | None) -> None:
        self.decode_ended = True
        super().on_lost(error)

    # What its exchange asks of it

    @property
    def _prompts(self) -> bool:
        """Whether it waits for the prefill engine, or failed there."""
        return self.leg is not None and not self.decode_ended and not self.begun

    @property
    def speaker(self) -> Backend:
        return self.leg.backend if self.leg is not None and self._prompts else self.backend

    @property
    def who(self) -> str:
        kind = "prefill" if self._prompts else "decode"
        return f"the {kind} backend of pool {self.backend.pool.name}"

    def given_up(self) -> None:
        leg, exchange = self.leg, self.exchange
        if leg is None:
            return
        by_prefill, tried = self._prompts, (*exchange.tried, leg.backend.replica.key)
        leg.drop()
        side, now = self.pool.prefill, self.context.now()
        if side is not None and choose_prefill(side, exchange.ask, now, 1.0, tried) is not None:
            # The decode backend has not failed; or it lacked the prompt, and the next try has neither of them.
            own = self.backend.replica.key
            exchange.tried = tuple(key for key in tried if key != own) if by_prefill else tried
        elif by_prefill:
            exchange.tried = (*tried, *(replica.key for replica in self.pool.replicas))

    def stuck(self, now: float) -> str:
        """Why: its engine is down and another of its side is up."""
        backend = self.speaker
        if backend.healthy is not False or now - self.sent_at <= self.context.serving.health_every_s:
            return ""
        side = self.pool.prefill if self._prompts else self.pool
        others = side is not None and any(replica.up for replica in side.replicas if replica is not backend.replica)
        return f"{self.who} is down ({backend.why})" if others else ""

    def touch(self) -> None:
        """The prefill side's queue has changed, and with it the predictions for the whole pool."""
        for replica in self.pool.replicas:
            replica.touch()

    def drop(self) -> None:
        super().drop()
        if self.leg is not None:
            self.leg.drop()


def _without_handover(content: bytes) -> bytes:
    parts = readable(decode_parts, content)
    if parts is None:
        return content
    parts.pop(_NIXL, None)
    return _encode(parts)


def _holding(prediction: Prediction, cached_tokens: float) -> Prediction:
    return Prediction(
        ttft_s=prediction.ttft_s, tpot_s=prediction.tpot_s, predicted_usd=prediction.predicted_usd,
        cached_tokens=cached_tokens, raw_ttft_s=prediction.raw_ttft_s, raw_tpot_s=prediction.raw_tpot_s,
    )  # fmt: skip
