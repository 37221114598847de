"""One client's request from its decision to its end: attempted, attempted elsewhere, timed and accounted for.

Whatever happens, it ends exactly once, in `_close`. As long as nothing has been sent to the client another backend
may try; from then on a failure is told inside the answer.
"""

from typing import TYPE_CHECKING

from crosstie.gateway.attempt import Attempt
from crosstie.gateway.body import Asked
from crosstie.gateway.errors import error_body, error_event
from crosstie.gateway.relay import StreamRelay, WholeRelay
from crosstie.route.admission import Ticket
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.wire.reply import Reply
from crosstie.wire.request import Request

if TYPE_CHECKING:
    from crosstie.gateway.gateway import Gateway

# After an engine broke while it was working on a request, one more gets to try it: a request that breaks engines
# must not be carried through the whole fleet.
_MOST_BROKEN = 2
_GENEROUS = 4.0
_CODES = {504: "upstream_timeout", 503: "upstream_full", 429: "upstream_full"}


class Exchange:
    __slots__ = (
        "arrived", "ask", "asked", "attempt", "attempts", "began", "broke", "closed", "gateway", "reply",
        "request", "request_id", "status", "ticket", "tried", "unsent",
    )  # fmt: skip

    def __init__(self, gateway: "Gateway", request: Request, reply: Reply, asked: Asked, ask: Ask, request_id: bytes):
        self.gateway, self.request, self.reply, self.asked, self.ask = gateway, request, reply, asked, ask
        self.request_id = request_id
        self.began = gateway.clock
        self.arrived = gateway.now()
        self.closed = False
        # Its place in the queue, if it had to wait for room.
        self.ticket: Ticket | None = None
        # Bytes that its client had not read when it was last looked at.
        self.attempts = self.broke = self.status = self.unsent = 0
        self.tried: tuple[str, ...] = ()
        self.attempt: Attempt | None = None
        reply.watcher = self

    def send(self, decision: Decision) -> None:
        """To the replica that was decided on."""
        replica, prediction = decision.replica, decision.prediction
        if replica is None or prediction is None:
            raise ValueError(f"decided to {decision.outcome}, not to send")
        self.attempts += 1
        self.tried += (replica.key,)
        self.attempt = Attempt(self, decision, replica, prediction)
        self.attempt.start()

    # What an attempt tells

    def served(self, attempt: Attempt) -> None:
        self.status = attempt.status
        attempt.backend.succeeded()
        self._close("served" if attempt.status < 400 else "client error")

    def failed(self, attempt: Attempt, why: str, status: int, *, fault: bool = True, refused: bool = False) -> None:
        """Try another backend while the client has seen nothing, else say so."""
        gateway, pool = self.gateway, attempt.backend.pool.name
        now = gateway.now()
        self._release(completed=False)
        if fault:
            was = attempt.backend.replica.up
            attempt.backend.failed(why, now, refused=refused)
            if attempt.backend.replica.up != was:
                gateway.changed(attempt.backend)
            gateway.metrics.faults[pool] += 1
            self.broke += not refused
        if self.reply.started:
            self._end_in_band(attempt, why)
            return
        if self.attempts <= gateway.serving.retries and self.broke < _MOST_BROKEN:
            decision = gateway.policy.choose(gateway.live, self.ask, now, exclude=self.tried)
            if decision.outcome == "send":
                gateway.metrics.retries[pool] += 1
                self.send(decision)
                return
        self.status = status
        relay = attempt.relay
        if isinstance(relay, WholeRelay) and relay.whole and attempt.status >= 400:
            # What the last engine said, in its own words.
            relay.end()
        else:
            self._answer(status, why, _CODES.get(status, "upstream_failed"), attempt.own_headers())
        self._close("failed")

    def give_up(self, why: str) -> None:
        """The gateway ends before the answer does."""
        attempt = self.attempt
        if attempt is not None:
            attempt.drop()
        if attempt is not None and self.reply.started:
            self._end_in_band(attempt, why, "gateway_ended")
        else:
            self.refuse(503, why, "gateway_ended")

    def _end_in_band(self, attempt: Attempt, why: str, code: str = "upstream_cut") -> None:
        self.status = attempt.status
        if isinstance(attempt.relay, StreamRelay):
            if not attempt.relay.told_error:
                self.reply.write(error_event(self.request.path, 502, f"{why}; the answer is incomplete", code))
            self.reply.end()
        else:
            self.reply.cut()
        self._close("cut")

    # What the client's connection tells

    def client_gone(self) -> None:
        if self.attempt is not None:
            self.attempt.drop()
        self._close("client gone")

    def client_slow(self) -> None:
        if self.attempt is not None:
            self.attempt.pause()

    def client_ready(self) -> None:
        if self.attempt is not None:
            self.attempt.resume()

    # The clock

    def check(self, now: float) -> None:
        """Asked a few times a second: is anything overdue?"""
        attempt, patience = self.attempt, self.gateway.serving
        if self.closed or attempt is None:
            return
        if now - self.began > patience.total_timeout_s:
            self.attempts = 1 + patience.retries
            # Its queue and its client may have taken most of it, so it is not held against the backend.
            self._overdue(attempt, f"not answered within {patience.total_timeout_s:g} s", fault=False)
        elif self.reply.slow:
            if self.reply.unsent != self.unsent:
                # It reads, be it slowly.
                self.unsent, attempt.last_at = self.reply.unsent, now
            elif now - attempt.last_at > patience.idle_timeout_s:
                # It reads nothing and keeps a replica waiting.
                attempt.drop()
                self.reply.cut()
                self._close("client stalled")
        elif not attempt.answering:
            allowed = patience.first_byte_timeout_s + self._generation_s(attempt)
            if now - attempt.sent_at > allowed:
                self._overdue(attempt, f"no answer from {attempt.who} within {allowed:.3g} s")
        elif now - attempt.last_at > patience.idle_timeout_s:
            self._overdue(attempt, f"{attempt.who} fell silent for {patience.idle_timeout_s:g} s")

    def _generation_s(self, attempt: Attempt) -> float:
        """An answer that is not streamed begins when all of it is there: what that may take, generously."""
        if self.asked.stream:
            return 0.0
        tokens = self.ask.most_output or self.ask.output_tokens
        return _GENEROUS * tokens * attempt.prediction.tpot_s / self.gateway.speed

    def _overdue(self, attempt: Attempt, why: str, *, fault: bool = True) -> None:
        attempt.drop()
        self.failed(attempt, why, 504, fault=fault)

    # Ends

    def refuse(self, status: int, why: str, code: str, *, retry_after_s: float = 0.0) -> None:
        headers = b"x-request-id: %b\r\n" % self.request_id
        if retry_after_s > 0:
            headers += b"retry-after: %d\r\n" % max(round(retry_after_s + 0.5), 1)
        self.status = status
        self._answer(status, why, code, headers)
        self._close("refused")

    def broke_down(self) -> None:
        """A fault of the gateway's own on its way: it must not be forgotten for that."""
        if self.attempt is not None:
            self.attempt.drop()
        if self.reply.started:
            self.reply.cut()
        else:
            self._answer(500, "internal error", "internal_error", b"x-request-id: %b\r\n" % self.request_id)
        self.status = 500
        self._close("failed")

    def _answer(self, status: int, why: str, code: str, headers: bytes) -> None:
        self.reply.send(status, error_body(status, why, code), headers)

    def _release(self, *, completed: bool) -> None:
        attempt = self.attempt
        if attempt is None:
            return
        usage = attempt.relay.usage if attempt.relay is not None else None
        served = attempt.flight.end(
            self.gateway.now(),
            input_tokens=usage.input_tokens if usage else None,
            output_tokens=usage.output_tokens if usage else None,
            completed=completed,
        )
        if served is not None:
            # What the client waited before: in the queue, and for backends that failed.
            waited = attempt.flight.started - self.arrived
            self.gateway.metrics.observe(attempt.backend.pool.name, self.ask, served, waited)

    def _close(self, how: str) -> None:
        if self.closed:
            return
        self.closed = True
        self.reply.watcher = None
        self._release(completed=how == "served")
        self.gateway.ended(self, how)
        # Each holds the other: let go, so that no collector has to find them, and the request's body with them.
        self.attempt = self.ticket = None
