"""Bounded loads on an OpenAI endpoint, from raw connections, and what came back.

Every load ends by count or by clock, whichever comes first, and says what failed instead of leaving it out. The
caller may pass `cpu`, the processor time of the server under test; it is read when a load is in full swing and
again at its end, so that start-up and the last stragglers are not charged.
"""

import asyncio
import gc
import json
import math
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter  # uvloop's own clock counts in milliseconds
from typing import TypeVar, cast

import httptools

HOST = "127.0.0.1"
MAX_REQUESTS = 1_000_000
GRACE_S = 20.0
_GAPS = 10_000  # histogram of gaps between chunks, in milliseconds

Clock = Callable[[], float]


@dataclass
class Outcome:
    """What one load saw. `cpu_s` is the server's own, over `units` requests or chunks."""

    requests: int = 0
    errors: int = 0
    incomplete: int = 0
    units: int = 0
    cpu_s: float = 0.0
    seconds: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    gaps_ms: list[int] = field(default_factory=lambda: [0] * _GAPS)
    reasons: dict[str, int] = field(default_factory=dict)

    def failed(self, reason: str) -> None:
        self.errors += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    @property
    def cpu_us_per_unit(self) -> float:
        return self.cpu_s / self.units * 1e6 if self.units else math.nan

    @property
    def units_per_s(self) -> float:
        return self.units / self.seconds if self.seconds else math.nan

    def gap_s(self, share: float) -> float:
        """The gap between chunks that a share of them stays under, to a millisecond."""
        wanted, seen = share * sum(self.gaps_ms), 0
        for gap, count in enumerate(self.gaps_ms):
            seen += count
            if count and seen >= wanted:
                return gap / 1e3
        return math.nan


def percentile(values: Sequence[float], share: float) -> float:
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]


@dataclass(frozen=True)
class Door:
    """Where a server is met: its port, by TLS or plainly, and the key that it asks for."""

    port: int
    tls: ssl.SSLContext | None = None
    key: str = "none"


def chat(
    model: str, prompt: str = "Say something short.", *, tokens: int = 16, stream: bool = False, key: str = "none"
) -> bytes:
    """A whole HTTP request, ready to be written any number of times."""
    body: dict[str, object] = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    payload = json.dumps(body).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nhost: {HOST}\r\ncontent-type: application/json\r\n"
        f"accept: */*\r\nauthorization: Bearer {key}\r\ncontent-length: {len(payload)}\r\n\r\n"
    )
    return head.encode() + payload


class Client(asyncio.Protocol):
    """A connection that asks the same thing again and again until told otherwise."""

    def __init__(self, outcome: Outcome, request: bytes, until: float, count: int) -> None:
        self.outcome, self.request, self.until, self.left = outcome, request, until, count
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self.parser = httptools.HttpResponseParser(self)
        self.sent = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if not self.done.done():
            self.outcome.failed("connection lost")
            self.done.set_result(None)

    def ask(self) -> None:
        assert self.transport is not None
        self.sent = perf_counter()
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as fault:
            self.outcome.failed(f"not HTTP: {fault}")
            self.finish()

    def on_message_complete(self) -> None:
        status = self.parser.get_status_code()
        if status < 200:
            return
        now = perf_counter()
        if status == 200:
            self.answered(now)
        else:
            self.outcome.failed(f"status {status}")
        self.left -= 1
        if self.left <= 0 or now >= self.until:
            self.finish()
        elif not self.parser.should_keep_alive():
            self.outcome.failed("connection not kept alive")
            self.finish()
        else:
            self.ask()

    def answered(self, now: float) -> None:
        self.outcome.requests += 1
        self.outcome.latencies_s.append(now - self.sent)

    def finish(self) -> None:
        if not self.done.done():
            self.done.set_result(None)
        if self.transport is not None:
            self.transport.close()


class StreamClient(Client):
    """Counts events as they come; a stream is whole if all of its chunks, its usage and its end arrived."""

    def __init__(self, outcome: Outcome, request: bytes, until: float, count: int, chunks: int) -> None:
        super().__init__(outcome, request, until, count)
        self.chunks = chunks
        self._start()

    def _start(self) -> None:
        self.events, self.rest, self.ended, self.last = 0, b"", False, 0.0

    def on_body(self, body: bytes) -> None:
        now = perf_counter()
        text = self.rest + body if self.rest else body
        events = text.count(b"\n\n")
        if not events:
            self.rest = text
            return
        cut = text.rfind(b"\n\n") + 2
        self.rest = text[cut:]
        if not self.events:
            self.outcome.first_s.append(now - self.sent)
        else:
            self.outcome.gaps_ms[min(_GAPS - 1, int((now - self.last) * 1e3))] += 1
        self.last = now
        if b"data: [DONE]" in text:
            self.ended = True
            self.outcome.units -= 2  # usage and [DONE] are no chunks
        self.events += events
        self.outcome.units += events

    def answered(self, now: float) -> None:
        self.outcome.requests += 1
        # The chunks, then usage, then [DONE].
        if not self.ended or self.events != self.chunks + 2:
            self.outcome.incomplete += 1
            reason = f"{self.events} events of {self.chunks + 2}, {'ended' if self.ended else 'no [DONE]'}"
            self.outcome.reasons[reason] = self.outcome.reasons.get(reason, 0) + 1
        self._start()


_C = TypeVar("_C", bound=Client)


async def _gather(clients: Sequence[Client], outcome: Outcome, limit_s: float) -> None:
    """Waits for every client, no longer than the limit; whoever is not back by then has stalled."""
    waiting = [client.done for client in clients]
    if not waiting:
        return
    _, pending = await asyncio.wait(waiting, timeout=limit_s)
    for client in clients:
        if client.done in pending:
            outcome.failed("stalled")
        client.finish()
    await asyncio.sleep(0)


async def _connect(door: Door, make: Callable[[], _C], outcome: Outcome) -> _C | None:
    try:
        async with asyncio.timeout(10):
            _, client = await asyncio.get_running_loop().create_connection(make, HOST, door.port, ssl=door.tls)
    except (OSError, TimeoutError) as fault:  # ssl.SSLError is an OSError
        outcome.failed(f"no connection: {type(fault).__name__}")
        return None
    return client


async def closed_loop(
    door: Door, request: bytes, connections: int, seconds: float, count: int = MAX_REQUESTS, cpu: Clock | None = None
) -> Outcome:
    """Connections that ask anew as soon as they are answered: small requests, one connection, long prompts."""
    outcome = Outcome()
    until = perf_counter() + seconds
    share = max(1, count // connections)
    found = [await _connect(door, lambda: Client(outcome, request, until, share), outcome) for _ in range(connections)]
    clients = [client for client in found if client is not None]
    gc.disable()
    try:
        started, spent = perf_counter(), cpu() if cpu else 0.0
        for client in clients:
            client.ask()
        await _gather(clients, outcome, seconds + GRACE_S)
        outcome.seconds = perf_counter() - started
        outcome.cpu_s = (cpu() - spent) if cpu else 0.0
    finally:
        gc.enable()
    outcome.units = outcome.requests
    return outcome


async def paced_streams(
    door: Door, model: str, streams: int, interval_s: float, seconds: float, cpu: Clock, settle_s: float = 0.5
) -> Outcome:
    """Streams that all run throughout a window; CPU and chunks are counted inside it alone."""
    outcome = Outcome()
    chunks = math.ceil((seconds + 2 * settle_s) / interval_s)
    request = chat(model, tokens=chunks, stream=True, key=door.key)
    found = [
        await _connect(door, lambda: StreamClient(outcome, request, 0.0, 1, chunks), outcome) for _ in range(streams)
    ]
    clients = [client for client in found if client is not None]
    gc.disable()
    try:
        for client in clients:
            client.ask()
            await asyncio.sleep(interval_s / streams)  # out of phase with each other
        await asyncio.sleep(settle_s)
        started, spent, before = perf_counter(), cpu(), outcome.units
        await asyncio.sleep(seconds)
        outcome.cpu_s, outcome.seconds = cpu() - spent, perf_counter() - started
        counted = outcome.units - before
        await _gather(clients, outcome, 2 * settle_s + GRACE_S)
    finally:
        gc.enable()
    outcome.units = counted
    return outcome


async def soak(
    door: Door, model: str, streams: int, interval_s: float, chunks: int, seconds: float, cpu: Clock
) -> Outcome:
    """So many streams at once, each followed by the next, and the faults among them."""
    outcome = Outcome()
    request = chat(model, tokens=chunks, stream=True, key=door.key)
    ramp_s = min(5.0, seconds / 4)
    until = perf_counter() + ramp_s + seconds
    clients: list[StreamClient] = []
    gc.disable()
    try:
        began = perf_counter()
        for index in range(streams):
            # By the clock, not by sleeps: a slow answer must not stretch the ramp.
            await asyncio.sleep(max(0.0, began + ramp_s * index / streams - perf_counter()))
            client = await _connect(door, lambda: StreamClient(outcome, request, until, MAX_REQUESTS, chunks), outcome)
            if client is not None:
                clients.append(client)
                client.ask()
        started, spent, before = perf_counter(), cpu(), outcome.units
        await asyncio.sleep(max(0.0, until - perf_counter()))
        outcome.cpu_s, outcome.seconds = cpu() - spent, perf_counter() - started
        counted = outcome.units - before
        await _gather(clients, outcome, chunks * interval_s + GRACE_S)
    finally:
        gc.enable()
    outcome.units = counted
    return outcome
