"""Requests sent at their times, whether or not the earlier ones have been answered: an open loop, as a replay is.

With `clients` the loop is closed: so many at a time, the next one when one has ended; times are then not looked at.

Latencies count from the moment at which a request was due, not from when it left: a server that stalls, or a client
that falls behind, cannot hide the requests that waited for it (no coordinated omission). Where the server is emulated
at `speed` times the clock, requests go out so much faster and every second told is one of the emulated clock.

TTFT is the time to the first piece of an answer with text in it; TPOT the time from there to the last such piece, over
the tokens after the first, as the server's usage counts them.
"""

import asyncio
import contextlib
import heapq
import math
import re
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.progress import OnProgress, no_progress
from crosstie.prove.replay.prompts import Wording
from crosstie.prove.replay.traffic import TimedRequest
from crosstie.wire.address import Address
from crosstie.wire.client import Connection, Headers, Origin
from crosstie.wire.sse import Events, payloads

# Timers of event loops count whole milliseconds: what is due within half of one may as well go now.
_TIMER_S = 0.001
# How often progress is told and silence is noticed.
_WATCH_S = 0.1
_CONNECT_S = 10.0
_MOST_ERROR = 300
_TEXT = re.compile(rb'"(?:content|reasoning_content|reasoning|text)": ?"(?!")')
_USAGE = re.compile(rb'"usage": ?\{')
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The error of requests that were under way when a run was ended.
NOT_AWAITED = "not waited for"
_PREDICTED = re.compile(rb"TTFT ([0-9.]+)(?: of [0-9.]+)? ms, TPOT ([0-9.]+)")


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int = 0


class _Piece(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class _Choice(msgspec.Struct):
    delta: _Piece | None = None
    text: str | None = None


class _Chunk(msgspec.Struct):
    usage: _Usage | None = None
    choices: list[_Choice] | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


def _chunks(events: bytes) -> Iterator[_Chunk]:
    for payload in payloads(events):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            yield _decode_chunk(payload)


def _text_in(events: bytes) -> str:
    """What a stream says, as one text."""
    said: list[str] = []
    for choice in (choice for chunk in _chunks(events) for choice in chunk.choices or ()):
        piece = choice.delta or _Piece()
        said += filter(None, (piece.reasoning_content or piece.reasoning, piece.content, choice.text))
    return "".join(said)


class RequestOutcome(msgspec.Struct):
    """One request as it ended, in seconds of the server's clock; what never came is not a number."""

    request: TimedRequest
    # As the gateway says: where it went, and what was predicted of it.
    pool: str = ""
    predicted_ttft_s: float = math.nan
    predicted_tpot_s: float = math.nan
    # 0: no answer.
    status: int = 0
    # Empty: it was answered whole.
    error: str = ""
    ttft_s: float = math.nan
    tpot_s: float = math.nan
    input_tokens: int = 0
    output_tokens: int = 0
    # How long after its time it left.
    late_s: float = 0.0
    # When it was due, from the start of the run; from then to its last token; the longest that a token let wait.
    due_s: float = math.nan
    e2e_s: float = math.nan
    longest_gap_s: float = math.nan

    @property
    def served(self) -> bool:
        return not self.error


class _Call:
    """One request under way. It ends exactly once, in `_end`."""

    __slots__ = (
        "_connecting", "_connection", "_data", "_done", "_error", "_events", "_gap", "_kept", "_replay", "_usage",
        "due", "first_at", "heard_at", "last_at", "outcome",
    )  # fmt: skip

    def __init__(self, replay: "Replay", outcome: RequestOutcome, due: float, data: bytes):
        self._replay, self.outcome, self.due, self._data = replay, outcome, due, data
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.first_at = self.last_at = math.nan
        self.heard_at = perf_counter()
        self._events = Events()
        self._usage = self._error = b""
        self._done, self._gap = False, 0.0
        # The whole stream, where nobody else counts its tokens.
        self._kept: list[bytes] = []

    def start(self) -> None:
        connection = self._replay.origin.take()
        if connection is not None:
            self._send(connection)
        else:
            self._connect()

    def _connect(self) -> None:
        self._connecting = self._replay.origin.connect(_CONNECT_S, self._connected)

    def _connected(self, result: Connection | Exception) -> None:
        self._connecting = None
        if isinstance(result, Connection):
            self._send(result)
        else:
            self._end(f"no connection: {result}")

    def _send(self, connection: Connection) -> None:
        self._connection = connection
        connection.send(self._data, self)

    # What the connection tells

    def on_head(self, status: int, headers: Headers) -> None:
        outcome = self.outcome
        outcome.status = status
        for name, value in headers:
            if name == b"x-crosstie-pool":
                outcome.pool = value.decode("latin-1")
            elif name == b"x-crosstie-reason":
                match = _PREDICTED.search(value)
                if match:
                    outcome.predicted_ttft_s, outcome.predicted_tpot_s = float(match[1]) * 1e-3, float(match[2]) * 1e-3

    def on_body(self, data: bytes) -> None:
        self.heard_at = now = perf_counter()
        if self.outcome.status >= 300:
            self._error += data[:_MOST_ERROR]
            return
        data = self._events.whole(data)
        if _TEXT.search(data):
            if self.first_at != self.first_at:
                self.first_at = now
            elif now - self.last_at > self._gap:
                self._gap = now - self.last_at
            self.last_at = now
            if self._replay.count is not None or self._replay.on_answer is not None:
                self._kept.append(data)
        elif b'"error"' in data:
            self._error = data[:_MOST_ERROR]
        if _USAGE.search(data):
            self._usage = data
        if b"[DONE]" in data:
            self._done = True

    def on_end(self) -> None:
        self._connection = None
        self._end(self._fault() or self._measured())

    def on_lost(self, error: Exception | None) -> None:
        connection, self._connection = self._connection, None
        if connection is not None and connection.uses > 1 and not connection.answered:
            # Kept open, and closed by the server just then: once more, on a new one.
            self._connect()
            return
        self._end(f"connection lost: {error or 'closed before the answer ended'}")

    # Ends

    def _fault(self) -> str:
        if self._error or self.outcome.status >= 300:
            said = self._error.decode("utf-8", "replace")
            return f"status {self.outcome.status}: {' '.join(said.split())}"[:_MOST_ERROR]
        if not self._done:
            return "the answer ended before it was whole"
        return "" if self.first_at == self.first_at else "no token came"

    def _measured(self) -> str:
        outcome, speed = self.outcome, self._replay.speed
        usage = next((chunk.usage for chunk in _chunks(self._usage) if chunk.usage), None)
        if usage is None and self._replay.count is not None:
            usage = _Usage(outcome.request.input_tokens, self._replay.count(_text_in(b"".join(self._kept))))
        if usage is None:
            return "the server did not say how many tokens it used"
        if self._replay.on_answer is not None:
            self._replay.on_answer(_text_in(b"".join(self._kept)))
        outcome.e2e_s = (self.last_at - self.due) * speed
        outcome.longest_gap_s = self._gap * speed
        outcome.input_tokens, outcome.output_tokens = usage.prompt_tokens, usage.completion_tokens
        outcome.ttft_s = (self.first_at - self.due) * speed
        if usage.completion_tokens > 1:
            outcome.tpot_s = (self.last_at - self.first_at) * speed / (usage.completion_tokens - 1)
        return ""

    def give_up(self, why: str) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.abort()
        self._end(why)

    def _end(self, error: str) -> None:
        self.outcome.error = error
        self._replay.ended(self)


class Replay:
    """One run of requests against one address."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        url: str,
        model: str,
        *,
        speed: float = 1.0,
        most_in_flight: int = 10_000,
        silence_s: float = 120.0,
        api_key: str | None = None,
        clients: int | None = None,
        starts_s: Sequence[float] = (),
        until_s: float = math.inf,
        path: str = CHAT,
        body: Callable[[TimedRequest, int], bytes] | None = None,
        count: Callable[[str], int] | None = None,
        goes_on: Callable[[Sequence[RequestOutcome]], bool] | None = None,
        on_answer: Callable[[str], object] | None = None,
        on_progress: OnProgress = no_progress,
    ):
        """`silence_s`: real seconds without a byte after which a request is given up. `starts_s`: when each client of a
        closed loop sends its first request; by default all at once. `until_s`: clients of a closed
        loop send nothing after that. `body`: that of each request and its number; by default a chat with filler.
        `count`: tokens of an answer whose server does not say. `goes_on`: asked now and then with what was sent so
        far; once it says no, the run ends and what is under way is given up. `on_answer`: told the text of each."""
        if not (speed > 0 and most_in_flight >= 1 and silence_s > 0):
            raise BadInput("speed, requests in flight and patience must be above zero")
        self.loop, self.speed, self.on_progress = loop, speed, on_progress
        self.most_in_flight, self.silence_s = most_in_flight, silence_s
        self.clients, self.until_s, self.count, self.on_answer = clients, until_s, count, on_answer
        self._starts_s = sorted(starts_s) or [0.0] * (clients or 0)
        # How late the loop itself came to what it had to do at a time: whatever it sees, it may see so late.
        self.lags_s: list[float] = []
        self.origin = Origin(loop, Address(url))
        self._path, self._body, self._goes_on = path, body or Wording(model).body, goes_on
        self._api_key = api_key
        self._heads: dict[str | None, bytes] = {}
        self._requests: Sequence[TimedRequest] = ()
        self._calls: set[_Call] = set()
        self._outcomes: list[RequestOutcome] = []
        self._ended = self._failed = 0

    async def run(self, requests: Sequence[TimedRequest]) -> list[RequestOutcome]:
        """In the order of `requests`, which are in the order of their times; every one of them ends."""
        self._heads = {name: self._head(name) for name in {request.class_name for request in requests}}
        self._requests, self._outcomes = requests, []
        self._ended = self._failed = 0
        self._stopped = False
        self._finished = self.loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        # Of an open loop a little later than now, so that the first request is no later than the others.
        self._began = perf_counter() + (0.01 if self.clients is None else 0.0)
        # From when on each client that is free has been, a heap.
        self._free = [self._began + start_s / self.speed for start_s in self._starts_s]
        watching = self.loop.create_task(self._watch())
        try:
            self._send_due()
            if requests:
                await self._finished
        finally:
            watching.cancel()
            if self._timer is not None:
                self._timer.cancel()
            self.origin.close()
        self._report()
        return self._outcomes

    def _send_due(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while len(self._outcomes) < len(self._requests) and not self._stopped:
            number = len(self._outcomes)
            request = self._requests[number]
            now = perf_counter()
            if self.clients is None:
                due = self._began + request.arrival_s / self.speed
            elif (now - self._began) * self.speed > self.until_s:
                self._requests = self._requests[:number]
                if not self._calls:
                    self._finish()
                return
            elif self._free:
                due = self._free[0]
            else:
                return
            if due - now > 0.5 * _TIMER_S:
                ticks = max(round((due - now) / _TIMER_S), 1)
                self._timer = self.loop.call_later(ticks * _TIMER_S, self._send_due)
                return
            if len(self._calls) >= self.most_in_flight:
                # Whoever ends next lets it go, late; its latency counts from its time all the same.
                return
            if self.clients is not None:
                heapq.heappop(self._free)
            late_s, due_s = max(now - due, 0.0) * self.speed, (due - self._began) * self.speed
            outcome = RequestOutcome(request, late_s=late_s, due_s=due_s)
            self._outcomes.append(outcome)
            body = self._body(request, number)
            data = b"%bcontent-length: %d\r\n\r\n%b" % (self._heads[request.class_name], len(body), body)
            call = _Call(self, outcome, due, data)
            self._calls.add(call)
            call.start()

    def _head(self, class_name: str | None) -> bytes:
        at = self.origin.address
        lines = [f"POST {at.root}{self._path} HTTP/1.1", f"host: {at.authority.decode()}"]
        lines.append("content-type: application/json")
        if class_name is not None:
            lines.append(f"x-crosstie-class: {class_name}")
        if self._api_key:
            lines.append(f"authorization: Bearer {self._api_key}")
        if not all(line.isprintable() for line in lines):
            raise BadInput("a class or a key has signs that no header can carry")
        return "".join(f"{line}\r\n" for line in lines).encode()

    def ended(self, call: _Call) -> None:
        self._calls.discard(call)
        self._ended += 1
        self._failed += not call.outcome.served
        if self.clients is not None:
            heapq.heappush(self._free, perf_counter())
        if not self._calls and (self._stopped or self._ended == len(self._requests)):
            self._finish()
        elif self._timer is None or self.clients is not None:
            # The next one waited for room, or for its client.
            self.loop.call_soon(self._send_due)

    def stop(self) -> None:
        """No further request is sent, and what is under way ends with NOT_AWAITED."""
        self._stopped = True
        for call in list(self._calls):
            call.give_up(NOT_AWAITED)
        self._finish()

    def _finish(self) -> None:
        if not self._finished.done():
            self._finished.set_result(None)

    def _report(self) -> None:
        failed = f", {self._failed:,} failed" if self._failed else ""
        self.on_progress(self._ended, len(self._requests), f"replaying{failed}")

    async def _watch(self) -> None:
        while True:
            self._report()
            silent_since = perf_counter() - self.silence_s
            for call in [call for call in self._calls if call.heard_at < silent_since]:
                call.give_up(f"silent for {self.silence_s:g} s")
            if self._goes_on is not None and not self._goes_on(self._outcomes):
                self.stop()
            asleep = perf_counter()
            await asyncio.sleep(_WATCH_S)
            self.lags_s.append(max(perf_counter() - asleep - _WATCH_S, 0.0))
