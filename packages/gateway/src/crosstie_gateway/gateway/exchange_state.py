"""What an exchange knows, and what its attempts and its handover ask of it."""

from abc import ABC, abstractmethod

from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie_gateway.gateway.body import RequestBody
from crosstie_gateway.gateway.context import Context
from crosstie_gateway.gateway.errors import AttemptFailure
from crosstie_gateway.gateway.identity import context_of
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.gateway.relay import StreamRelay, WholeRelay
from crosstie_gateway.gateway.seam import Seam
from crosstie_gateway.gateway.transcript import Transcript
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply


class ExchangeState(ABC):
    # Set by few exchanges, so it stands here: objects with more than 29 attributes of their own are slow to make. How
    # many attempts have broken their engine.
    broke: int = 0
    # Backends that were ruled out before anything was decided, whichever model answers in the end.
    ruled_out: tuple[str, ...] = ()
    # The line of the head that says why it is another model's answer.
    fallback: bytes = b""

    def __init__(
        self, context: Context, request: Request, reply: Reply, parsed: RequestBody, ask: Ask, record: RequestRecord,
    ):  # fmt: skip
        self.context, self.request, self.reply, self.parsed, self.ask = context, request, reply, parsed, ask
        self.request_id = record.request_id
        # What will be told of it when it is over.
        self.record = record
        # The lines of trace context that backends get.
        record.traceparent, self.trace_headers = context_of(request)
        if context.tracing is not None:
            record.trace = context.tracing.begin(request.path, self.trace_headers)
        self.began = context.clock
        self.arrived = context.now()
        self.closed = False
        self.attempts = 0
        # Backends that have had their turn, and those that cannot be asked.
        self.tried: tuple[str, ...] = ask.tried
        # What backends are asked: what the client asked, until one has to go on from where another broke off.
        self.path, self.body = request.path, request.body
        # What the client has of a stream, and where what comes now joins what came before.
        self.transcript: Transcript | None = None
        self.seam: Seam | None = None
        # Tokens of the prompt as far as they can be guessed, and bytes of a token of its model.
        self._given = ask.input_tokens
        self.bytes_per_token = context.router.fleet.lengths.bytes_per_token(ask.model)

    @property
    def given(self) -> int:
        return round(self._given)

    # What an attempt tells

    @abstractmethod
    def transcribed(self) -> Transcript | None:
        """Where an attempt writes down what the client gets; None: it is no text that could be resumed."""

    @abstractmethod
    def priced(self) -> float:
        """What its client pays for the whole answer of the present attempt, which is about to leave."""

    @abstractmethod
    def on_attempt_begun(self) -> None:
        """The client has got something of the present attempt."""

    @abstractmethod
    def on_attempt_served(self) -> None: ...

    @abstractmethod
    def on_attempt_failed(self, failure: AttemptFailure) -> None: ...

    # What a handover asks

    @abstractmethod
    def send(self, decision: Decision) -> None:
        """To the replica that was decided on."""

    @abstractmethod
    def wait(self, now: float) -> None:
        """For room, or for its model to be loaded."""

    @abstractmethod
    def finish(self, events: bytes) -> None:
        """Nothing but these was missing of the answer."""

    @abstractmethod
    def end_in_band(self, relay: StreamRelay | WholeRelay | None, why: str, code: str = "upstream_cut") -> None:
        """The client is told inside its answer that it is incomplete."""

    @abstractmethod
    def broke_down(self) -> None:
        """A fault of the gateway's own on its way: it must not be forgotten for that."""
