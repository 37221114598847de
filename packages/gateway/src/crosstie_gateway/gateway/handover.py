"""One answer's way from a backend that broke it off to another that goes on with it.

Made at the first break. A backend is decided on, asked what is needed, and sent the rest; or the reason is counted.
"""

import asyncio
from collections.abc import Callable
from functools import partial

from crosstie.route.decision import Decision
from crosstie_gateway.gateway.exchange_state import ExchangeState
from crosstie_gateway.gateway.relay import StreamRelay, WholeRelay
from crosstie_gateway.gateway.resume import CannotResume, Continuation, Prepared
from crosstie_gateway.gateway.seam import Seam, ending
from crosstie_gateway.gateway.transcript import Transcript

# How many engines a request may break: it must not be carried through the whole fleet.
MOST_BROKEN = 2
# How often it is looked whether somebody has come (back) up, while nobody is.
_AGAIN_S = 0.25
# Clients skip comments; whatever lies between, a proxy sees that the stream is not dead.
_WAITING = b": crosstie waits for a backend\n\n"


class Handover:
    """`began_on`: the engine that began the answer."""

    def __init__(self, exchange: ExchangeState, transcript: Transcript, began_on: str):
        self.exchange, self.context, self.transcript, self.began_on = exchange, exchange.context, transcript, began_on
        # What the last backend has said, why it broke off, and when.
        self._relay: StreamRelay | WholeRelay | None = None
        self.why = ""
        self._since = 0.0
        # Whether the client has been told that nobody could go on at once.
        self._waits = False
        # It has turned out that nobody can go on with this.
        self._hopeless = False
        # What is to be gone on with, from the break until somebody has been asked; meanwhile, what is asked before.
        self.continuation: Continuation | None = None
        self._preparing: asyncio.Task[Prepared] | None = None
        self._again: asyncio.TimerHandle | None = None

    def start(self, relay: StreamRelay | WholeRelay | None, why: str) -> None:
        self._waits = False
        self._relay, self.why, self._since = relay, why, self.context.now()
        self._in_time(self._start)

    def _start(self) -> None:
        """Raises CannotResume."""
        relay, transcript = self._relay, self.transcript
        transcript.read()
        several = relay.choices if isinstance(relay, StreamRelay) else None
        if several.all_ended if several is not None else transcript.finish or transcript.done:
            # All of it has come but the end.
            self._finish("", count=several is None and (relay is None or relay.usage is None))
            return
        if not self.context.serving.resume:
            raise CannotResume("off")
        self.continuation = self._continuation()
        self._find_backend(self.continuation)

    def would_succeed(self) -> bool:
        """Whether another backend could go on now; else a silent one may still come back."""
        exchange, context = self.exchange, self.context
        if self._hopeless or not context.serving.resume:
            return False
        decision = context.router.decide(exchange.ask, context.now(), exclude=exchange.tried)
        if decision.replica is None:
            # Asked many times a second while nobody is up: nothing is read for that.
            return False
        try:
            possible = self._continuation()
        except CannotResume:
            self._hopeless = True
            return False
        return possible.possible_on(context.backends[decision.replica.key].engine)

    def _continuation(self) -> Continuation:
        exchange = self.exchange
        if exchange.attempts > self.context.serving.retries or exchange.broke >= MOST_BROKEN:
            raise CannotResume("attempts")
        request = exchange.request
        return Continuation(request.path, request.body, exchange.parsed, self.transcript, self.began_on)

    def _find_backend(self, continuation: Continuation) -> None:
        exchange, exclude = self.exchange, self._tried()
        context, ask = self.context, exchange.ask
        now = context.now()
        # It has waited its turn already: wherever there is room.
        ask.patience_s = 0.0
        while True:
            decision = context.router.decide(ask, now, exclude=exclude)
            replica = decision.replica
            if decision.outcome != "send" or replica is None:
                break
            if continuation.possible_on(context.backends[replica.key].engine):
                self.send(decision)
                return
            exclude = (*exclude, replica.key)
        left_s = self._since + context.serving.queue_s * context.speed - now
        if left_s <= 0.0 or not (decision.outcome == "wait" or self._somebody_may_come()):
            raise CannotResume("backend")
        if not self._waits:
            self._waits = True
            exchange.reply.write(_WAITING)
        if decision.outcome == "wait":
            ask.patience_s, ask.tried = left_s, exclude
            exchange.wait(now)
        else:
            look = partial(self._in_time, lambda: self._find_backend(continuation))
            self._again = context.loop.call_later(_AGAIN_S, look)

    def _somebody_may_come(self) -> bool:
        pools = self.context.router.fleet.by_model.get(self.exchange.ask.model, [])
        return any(not replica.up for pool in pools for replica in pool.replicas)

    def _tried(self) -> tuple[str, ...]:
        """Backends that have had their turn, without those that have restarted since."""
        known, tried = self.context.backends, self.exchange.tried
        return tuple(key for key in tried if key not in known or known[key].replica.since <= self._since)

    def _in_time(self, step: Callable[[], None]) -> None:
        """Runs a step, and tells the client of any failure."""
        exchange = self.exchange
        if exchange.closed:
            return
        try:
            step()
        except CannotResume as error:
            self.give_up(str(error))
        except Exception:
            exchange.broke_down()
            raise

    def send(self, decision: Decision) -> None:
        """To the replica that was decided on, as soon as it is known what to ask it."""
        continuation, replica, context = self.continuation, decision.replica, self.context
        if continuation is None or replica is None:
            raise ValueError("nothing to go on with, or nowhere")
        backend = context.backends[replica.key]
        if not continuation.possible_on(backend.engine):
            self.give_up("backend")
            return
        patience_s = context.serving.connect_timeout_s + context.serving.health_every_s
        self._preparing = context.loop.create_task(continuation.prepared(backend, patience_s))
        self._preparing.add_done_callback(lambda task: self._prepared(task, continuation, decision))

    def give_up(self, reason: str, more: str = "") -> None:
        """Nobody goes on with it."""
        self.context.metrics.not_resumed[reason] += 1
        self.exchange.end_in_band(self._relay, f"{self.why}; {more}" if more else self.why)

    def cancel(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
        if self._again is not None:
            self._again.cancel()

    def _prepared(self, task: "asyncio.Task[Prepared]", continuation: Continuation, decision: Decision) -> None:
        self._preparing = None
        if not task.cancelled():
            self._in_time(lambda: self._ask(task.result(), continuation, decision))

    def _ask(self, prepared: Prepared, continuation: Continuation, decision: Decision) -> None:
        exchange, transcript, replica = self.exchange, self.transcript, decision.replica
        transcript.counted(prepared.made)
        if prepared.left == 0:
            self._finish("length", count=True)
            return
        backend = self.context.backends.get(replica.key) if replica is not None else None
        if backend is None:
            # The fleet has changed in the meantime.
            self._find_backend(continuation)
            return
        self.continuation = None
        exchange.path, exchange.body = prepared.path, prepared.body
        exchange.seam = Seam(
            backend.pool.name, transcript.first, made=prepared.made, given=transcript.given, raw=prepared.raw,
            trimmed=continuation.trimmed_by(backend.engine, prepared),
        )  # fmt: skip
        # The next engine reads what was made as well, and has so much less to make.
        ask = exchange.ask
        ask.input_tokens = float(exchange.given + prepared.made)
        ask.output_tokens = max(ask.output_tokens - prepared.made, 1.0)
        ask.most_output = prepared.left
        exchange.send(decision)

    def _finish(self, finish: str, *, count: bool) -> None:
        """Nothing is missing of an answer but its last events."""
        exchange, transcript = self.exchange, self.transcript
        given = transcript.given if transcript.given is not None else exchange.given
        usage = (given, transcript.tokens, 0) if count and exchange.parsed.wants_usage else None
        chat = exchange.request.path.endswith("/chat/completions")
        exchange.finish(b"" if transcript.done else ending(transcript.first, chat, finish, usage))
