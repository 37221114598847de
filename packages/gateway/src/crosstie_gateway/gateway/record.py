"""What is known of a request when it has ended: for usage, logs, traces and recordings, each told exactly once."""

from crosstie_gateway.gateway.interfaces import TracedRequest
from crosstie_gateway.gateway.limits import Grant
from crosstie_gateway.ledger.usage import Line, UsageCounts
from crosstie_gateway.wire.request import Request

# With a store that cannot be written to for days: more lines than this lose their details, and no number is lost.
_MOST_LINES = 100_000


class RequestRecord:
    """A plain class, since one is made for every request."""

    def __init__(self, request_id: bytes, path: str, arrived_at: float, how: str, status: int):
        self.request_id, self.path, self.how, self.status = request_id, path, how, status
        # Seconds since the epoch, by this machine's clock.
        self.arrived_at = arrived_at
        # The key that it was asked with; 0: none.
        self.key_id = 0
        # What it was let in for against that key's limits, until it is settled.
        self.grant: Grant | None = None
        # Of a refusal, or a failure: the error's own.
        self.code = ""
        # The address that it came from, where that is logged.
        self.client = ""
        self.model = self.class_name = self.pool = self.backend = ""
        # The backend that computed its prompt, where that was another than its own.
        self.prefill = ""
        self.streamed = False
        # As the engine counted them, or, where it could not say so any more, as far as they were seen to pass.
        self.input_tokens = self.output_tokens = 0
        # Of the prompt, what the engine said that it had in its cache; 0 also where it says nothing.
        self.cached_tokens = 0
        self.counted = False
        self.charged_usd = 0.0
        # From its arrival to its end, to its first token (None: not seen), and until it was first sent anywhere.
        self.seconds = self.waited_s = 0.0
        self.ttft_s: float | None = None
        self.attempts = self.resumed = 0
        # The client's own, where it is valid; and how it is followed, where it is.
        self.traceparent = b""
        self.trace: TracedRequest | None = None
        # As it came, only while listeners are told: a kept record keeps no prompt.
        self.request: Request | None = None

    def tpot_s(self, speed: float) -> float | None:
        """On the fleet's clock; None: nobody saw tokens come after the first."""
        more = self.output_tokens - 1
        if self.ttft_s is None or not self.streamed or more <= 0:
            return None
        return max(self.seconds - self.ttft_s, 0.0) * speed / more


class Accounts:
    """What has been used since it was last written down: a few numbers for each kind of request that there was."""

    def __init__(self) -> None:
        self.lines: dict[Line, UsageCounts] = {}
        self.requests = 0

    def add(self, record: RequestRecord) -> None:
        """Counted in the hour of its end."""
        hour = int((record.arrived_at + record.seconds) // 3600.0) * 3600
        line: Line = (hour, record.key_id, record.model, record.class_name, record.pool, record.how, record.code)
        counts = self.lines.get(line)
        if counts is None:
            if len(self.lines) >= _MOST_LINES:
                line = (hour, record.key_id, "", "", "", record.how, "")
                counts = self.lines.get(line)
            if counts is None:
                counts = self.lines[line] = UsageCounts()
        counts.requests += 1
        counts.counted += record.counted
        counts.input_tokens += record.input_tokens
        counts.output_tokens += record.output_tokens
        counts.usd += record.charged_usd
        self.requests += 1

    def take(self) -> dict[Line, UsageCounts]:
        lines, self.lines, self.requests = self.lines, {}, 0
        return lines
