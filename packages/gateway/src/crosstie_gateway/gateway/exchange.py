"""One client's request from its decision to its end: attempted, attempted elsewhere, timed and accounted for.

It ends exactly once, in `_close`. Until the client has been sent something another backend may try; from then on one
may go on where the last broke off, or the failure is told inside the answer.
"""

from typing import Final, Protocol

from crosstie.route.admission import Ticket
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.live import Flight, Replica
from crosstie.route.speed import Prediction
from crosstie_gateway.gateway.attempt import Attempt
from crosstie_gateway.gateway.backend import Backend
from crosstie_gateway.gateway.body import RequestBody
from crosstie_gateway.gateway.context import Context
from crosstie_gateway.gateway.disaggregated import LedAttempt
from crosstie_gateway.gateway.errors import AttemptFailure, error_body, error_event, retry_after
from crosstie_gateway.gateway.exchange_state import ExchangeState
from crosstie_gateway.gateway.handover import MOST_BROKEN, Handover
from crosstie_gateway.gateway.passed import Passed, plainly_counted
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.gateway.relay import StreamRelay, WholeRelay
from crosstie_gateway.gateway.responses import PATH
from crosstie_gateway.gateway.transcript import Transcript
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

_GENEROUS: Final = 4.0
_CODES: Final = {504: "upstream_timeout", 503: "upstream_full", 429: "upstream_full"}


class ExchangeOwner(Protocol):
    """The side that has begun an exchange."""

    def queue(self, exchange: "Exchange", now: float) -> None:
        """It waits for room, or for its model to be loaded."""

    def fall_back(self, exchange: "Exchange", why: str) -> bool:
        """Whether another model takes it, as the fleet file says."""

    def on_exchange_closed(self, exchange: "Exchange") -> None:
        """Its record is complete."""


class Exchange(ExchangeState):
    # Bytes that its client had not read when it was last looked at.
    unsent: int = 0
    # By the loop's clock, until when it is held if no replica serves its model; 0: not decided yet; below 0: never.
    held_until: float = 0.0

    def __init__(
        self, context: Context, owner: ExchangeOwner, request: Request, reply: Reply, parsed: RequestBody, ask: Ask,
        record: RequestRecord,
    ):  # fmt: skip
        super().__init__(context, request, reply, parsed, ask, record)
        self.owner = owner
        self.code = ""
        self.status = 0
        # Its place in the queue, if it had to wait for room.
        self.ticket: Ticket | None = None
        self.attempt: Attempt | None = None
        # Looks for another backend to go on with a stream that broke off.
        self.handover: Handover | None = None
        # Backends that failed this before the client had anything: at fault if another serves it; if no other does, the
        # request is.
        self._suspects: list[tuple[Backend, str, bool]] = []
        # The parts of the answer: the flight that made each, and its tokens.
        self.legs: list[tuple[Flight, int]] = []
        # The flight whose part has been added up.
        self._accounted: Flight | None = None
        reply.watcher = self

    def send(self, decision: Decision) -> None:
        replica, prediction = decision.replica, decision.prediction
        if replica is None or prediction is None:
            raise ValueError(f"decided to {decision.outcome}, not to send")
        context = self.context
        if context.on_decision is not None:
            context.on_decision(self.request_id, self.attempts, self.ask, decision)
        if self.handover is not None and self.handover.continuation is not None:
            self.handover.send(decision)
            return
        if decision.panic:
            context.metrics.panics[replica.pool.pool.name] += 1
            context.on_panic(self.ask.model)
        self.attempts += 1
        self.tried += (replica.key,)
        self.attempt = attempt = self._made(decision, replica, prediction)
        if self.attempts == 1:
            self.record.waited_s = (attempt.flight.started - self.arrived) / context.speed
        if self.record.trace is not None:
            self.trace_headers = self.record.trace.attempt(attempt.backend.pool.name, replica.key)
        attempt.start()

    def _made(self, decision: Decision, replica: Replica, prediction: Prediction) -> Attempt:
        if replica.pool.prefill is None:
            return Attempt(self, decision, replica, prediction)
        return LedAttempt(self, decision, replica, prediction)

    def take_model(self, ask: Ask, parsed: RequestBody, body: bytes, why: str) -> None:
        """Goes over to another model; the first has answered nothing."""
        said = " ".join(f"{self.ask.model}: {why}".split()).encode("ascii", "replace")
        self.fallback = b"x-crosstie-fallback: %b\r\n" % said
        self.ask, self.parsed, self.tried = ask, parsed, ask.tried
        self.request.body = self.body = body

    def take_body(self, ask: Ask, parsed: RequestBody) -> None:
        """Goes over to another body than its client's, before anything was asked."""
        self.ask, self.parsed, self.tried, self.body = ask, parsed, ask.tried, self.request.body

    def rule_out(self, keys: tuple[str, ...]) -> None:
        """Keeps these backends out, whichever model answers."""
        self.ruled_out += keys
        self.ask.tried += keys
        self.tried = self.ask.tried

    # What an attempt tells

    def transcribed(self) -> Transcript | None:
        if not self.reply.started:
            # What came before has left no trace with the client.
            is_text = self.request.path.endswith("/completions")
            self.transcript = Transcript(self.bytes_per_token) if is_text else None
        return self.transcript

    def wait(self, now: float) -> None:
        self.owner.queue(self, now)

    def on_attempt_begun(self) -> None:
        attempt, context = self._present(), self.context
        if self._suspects:
            self._blame()
        first_at = attempt.flight.first_at
        if self.seam is not None:
            self.record.resumed += 1
            context.metrics.resumed[attempt.backend.pool.name] += 1
        elif first_at is not None:
            self.record.ttft_s = (first_at - self.arrived) / context.speed
            if self.record.trace is not None:
                self.record.trace.first_token()

    def _present(self) -> Attempt:
        """The attempt that speaks."""
        if self.attempt is None:
            raise ValueError("no attempt is under way")
        return self.attempt

    def on_attempt_served(self) -> None:
        attempt = self._present()
        self.status = attempt.status
        attempt.speaker.succeeded()
        if self._suspects:
            self._blame()
        if self.path == PATH and attempt.status < 300:
            self.context.responses.keep(self.request, self.ask.tenant, attempt.relay, attempt.backend.replica.key)
        self._close("served" if attempt.status < 400 else "client error")

    def _blame(self) -> None:
        """Another backend did what these failed at, or none could be asked. Who is set up wrongly fails at everything:
        one request that another served is proof."""
        served = self.attempt is not None
        for backend, why, wrong in self._suspects:
            self._failed(backend, why, wrong=wrong, surely=wrong and served)
        self._suspects.clear()

    def _failed(
        self, backend: Backend, why: str, *, refused: bool = False, wrong: bool = False, surely: bool = False
    ) -> None:
        if backend.failed(why, self.context.now(), refused=refused, wrong=wrong, surely=surely):
            self.context.on_backend_changed(backend)

    def on_attempt_failed(self, failure: AttemptFailure) -> None:
        """Tries another backend while the client has seen nothing, else says so."""
        attempt, context = self._present(), self.context
        why, status, fault, refused = failure.why, failure.status, failure.fault, failure.refused
        pool, relay, now = attempt.backend.pool.name, attempt.relay, context.now()
        if refused:
            attempt.flight.billed_usd = 0.0
        blamed = attempt.speaker
        attempt.given_up()
        self._release(now, completed=False)
        if self.record.trace is not None:
            self.record.trace.failed(why, attempt.status or status)
        # What only an operator can mend breaks no engine, and is told to nobody else.
        passed_on, wrong = failure.passed_on and not failure.wrong, failure.wrong or status == 404
        if fault:
            if not refused and not self.reply.started:
                self._suspects.append((blamed, why, wrong))
            else:
                self._failed(blamed, why, refused=refused)
            context.metrics.faults[pool] += status != 404
            if context.hosted is not None and attempt.flight.replica.presence is not None:
                context.hosted.doubted(attempt.flight.replica)
            # A backend that ends in order, as on a restart, was not broken by this request.
            self.broke += not (refused or wrong) and not (isinstance(relay, StreamRelay) and relay.aborted)
        if self.reply.started:
            self._go_on(attempt, why)
            return
        self.code = failure.code or _CODES.get(status, "upstream_failed")
        if self.attempts <= context.serving.retries and self.broke < MOST_BROKEN:
            decision = context.router.decide(self.ask, now, exclude=self.tried)
            if decision.outcome == "send":
                context.metrics.retries[pool] += 1
                self.send(decision)
                return
            cold = decision.refusal == "cold"
            if decision.outcome == "wait" and (cold or attempt.flight.spending is not None):
                # Its model was only there, and is loaded elsewhere; or it was to be bought only because the fleet is
                # full. It waits for that like any other.
                context.metrics.retries[pool] += 1
                if cold:
                    self.ask.cold = True
                else:
                    self.ask.tried = self.tried
                    if wrong:
                        self._blame()
                self.attempt = None
                self.wait(now)
                return
        able = not failure.code and (fault or status in (429, 503)) and self.broke < MOST_BROKEN
        if able and self.owner.fall_back(self, why):
            return
        self.status = status
        if len(self._suspects) < MOST_BROKEN and status != 404:
            # Nobody else could be asked.
            self._blame()
        if passed_on and isinstance(relay, WholeRelay) and relay.whole and attempt.status >= 400:
            # What the last engine said, in its own words.
            relay.headers += retry_after(failure.retry_after_s)
            relay.end()
        else:
            self._answer(status, why, self.code, attempt.own_headers() + retry_after(failure.retry_after_s))
        self._close("failed" if status != 404 else "client error")

    def give_up(self, why: str) -> None:
        """The gateway ends before the answer does."""
        attempt = self.attempt
        if attempt is not None:
            attempt.drop()
        if self.reply.started:
            if attempt is not None and self.seam is None:
                self.status = attempt.status
            self.end_in_band(attempt.relay if attempt is not None else None, why, "gateway_ended")
        else:
            self.refuse(503, why, "gateway_ended")

    def end_in_band(self, relay: StreamRelay | WholeRelay | None, why: str, code: str = "upstream_cut") -> None:
        self.code = code
        if isinstance(relay, StreamRelay) or self.transcript is not None:
            said = relay.error if isinstance(relay, StreamRelay) else b""
            if not (isinstance(relay, StreamRelay) and relay.has_error):
                # In the engine's own words, if it had any.
                path = self.request.path
                self.reply.write(said or error_event(path, 502, f"{why}; the answer is incomplete", code))
            self.reply.end()
        else:
            self.reply.cut()
        self._close("cut")

    def _go_on(self, attempt: Attempt, why: str) -> None:
        """Resumes on another backend, or tells the client that nobody can."""
        if self.seam is None:
            self.status = attempt.status
        if self.handover is None and self.transcript is not None:
            self.handover = Handover(self, self.transcript, attempt.backend.engine)
        if self.handover is None:
            self.end_in_band(attempt.relay, why)
        else:
            self.handover.start(attempt.relay, why)

    def finish(self, events: bytes) -> None:
        self.reply.write(events)
        self.reply.end()
        self._close("served")

    # What the client's connection tells

    def on_client_gone(self) -> None:
        if self.attempt is not None:
            self.attempt.drop()
        self._close("client gone")

    def on_client_slow(self) -> None:
        if self.attempt is not None:
            self.attempt.pause()

    def on_client_ready(self) -> None:
        if self.attempt is not None:
            self.attempt.resume()

    # The clock

    def check(self, now: float) -> None:
        """Asked a few times a second: is anything overdue?"""
        attempt, patience = self.attempt, self.context.serving
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
            elif why := attempt.stuck(now):
                self._overdue(attempt, why)
        elif now - attempt.last_at > patience.idle_timeout_s:
            self._overdue(attempt, f"{attempt.who} fell silent for {patience.idle_timeout_s:g} s")
        elif (
            attempt.backend.healthy is False
            and now - attempt.last_at > patience.health_every_s
            and self._can_go_on(attempt)
        ):
            self._overdue(attempt, f"{attempt.who} fell silent and is down ({attempt.backend.why})")

    def _can_go_on(self, attempt: Attempt) -> bool:
        """Whether somebody else would take over, were this attempt given up."""
        if self.handover is None and self.transcript is not None:
            self.handover = Handover(self, self.transcript, attempt.backend.engine)
        return self.handover is not None and self.handover.would_succeed()

    def _generation_s(self, attempt: Attempt) -> float:
        """How long generation may take: an answer that is not streamed begins when it is complete."""
        if self.parsed.stream:
            return 0.0
        tokens = self.ask.most_output or self.ask.output_tokens
        return _GENEROUS * tokens * attempt.prediction.tpot_s / self.context.speed

    def _overdue(self, attempt: Attempt, why: str, *, fault: bool = True) -> None:
        attempt.drop()
        self.on_attempt_failed(AttemptFailure(why, 504, fault=fault))

    # Ends

    def refuse(self, status: int, why: str, code: str, *, retry_after_s: float = 0.0) -> None:
        if self.reply.started:
            # It waited for somebody to go on with it.
            if self.handover is not None:
                self.handover.give_up("room" if status == 429 else "backend", why)
            return
        headers = b"x-request-id: %b\r\n" % self.request_id + retry_after(retry_after_s)
        self.status, self.code = status, code
        self._answer(status, why, code, headers)
        self._close("refused")

    def broke_down(self) -> None:
        if self.attempt is not None:
            self.attempt.drop()
        if self.reply.started:
            self.reply.cut()
        else:
            self._answer(500, "internal error", "internal_error", b"x-request-id: %b\r\n" % self.request_id)
        self.status, self.code = 500, "internal_error"
        self._close("failed")

    def _answer(self, status: int, why: str, code: str, headers: bytes) -> None:
        self.reply.send(status, error_body(status, why, code), headers)

    def _release(self, now: float, *, completed: bool) -> bool:
        """Ends the attempt and accounts for it; whether it gave a whole answer."""
        attempt, self.attempt = self.attempt, None
        if attempt is None:
            return False
        self._account(attempt)
        if attempt.status >= 400:
            attempt.flight.billed_usd = 0.0
        record = self.record
        served = attempt.flight.end(
            now,
            input_tokens=record.input_tokens if record.counted else None,
            output_tokens=record.output_tokens if record.counted else None,
            # Of a part of an answer nothing is to be learnt: neither how long they get nor what they take.
            completed=completed and self.seam is None,
        )
        if served is not None:
            # What the client waited before: in the queue, and for backends that failed.
            waited = attempt.flight.started - self.arrived
            self.context.metrics.observe(record, self.ask, served, waited, attempt.flight.prediction)
        return served is not None

    def priced(self) -> float:
        attempt = self._present()
        self._account(attempt, leaves=True)
        self._accounted = attempt.flight
        return self.record.charged_usd

    def _account(self, attempt: Attempt, *, leaves: bool = False) -> None:
        """Charges what its client got: the prompt once, whoever read it again, and each part of the answer at its
        maker's price; nothing where nothing reached the client."""
        record, relay, transcript = self.record, attempt.relay, self.transcript
        if not self.legs:
            record.pool, record.backend = attempt.backend.pool.name, attempt.backend.replica.key
        if not (self.reply.started or leaves) or relay is None or attempt.status >= 400:
            return
        if self._accounted is attempt.flight:
            return
        context = attempt.flight.replica.pool.max_context
        usage = plainly_counted(relay, self.ask, context)
        if usage is None:
            passed = Passed(
                relay, transcript, self.ask, self.request.path, context=context,
                bytes_per_token=self.bytes_per_token, before=record.output_tokens,
            )  # fmt: skip
            usage = passed.usage()
            record.counted = usage is not None
            given, made, cached = usage or passed.estimate(self.given)
        else:
            record.counted = True
            given, made, cached = usage
        attempt.flight.told_cached = float(cached)
        part = max(made - record.output_tokens, 0)
        self.legs.append((attempt.flight, part))
        if part:
            # A backend that was to go on and did not has no part in it.
            record.pool, record.backend = attempt.backend.pool.name, attempt.backend.replica.key
        record.input_tokens, record.output_tokens, record.cached_tokens = given, made, cached
        record.charged_usd = 0.0
        for index, (flight, tokens) in enumerate(self.legs):
            record.charged_usd += flight.charge_usd(0.0 if index else float(given), float(tokens))

    def _close(self, how: str) -> None:
        if self.closed:
            return
        self.closed = True
        self.reply.watcher = None
        if self.handover is not None:
            self.handover.cancel()
            self.handover = None
        # It also lets go of the attempt: each holds the other, and no collector shall have to find them.
        now = self.context.now()
        observed = self._release(now, completed=how == "served")
        self._fill(how, now)
        if how == "served" and not observed:
            # Of several backends, or ended by the gateway itself.
            for index, (flight, tokens) in enumerate(self.legs):
                self.context.metrics.part(flight, 0 if index else self.record.input_tokens, tokens)
        self.owner.on_exchange_closed(self)
        self.ticket = None

    def _fill(self, how: str, now: float) -> None:
        record, ask = self.record, self.ask
        record.how, record.status = how, self.status
        record.code = "" if how == "served" else self.code
        record.model, record.class_name = ask.adapter or ask.model, ask.class_name or ""
        record.streamed, record.attempts = self.parsed.stream, self.attempts
        record.seconds = (now - self.arrived) / self.context.speed
