"""Exports a trace of each request by OpenTelemetry: a span for it, one for its wait and one for each attempt.

Spans are made when a request has ended, in a thread, from what was noted on its way: only the numbers that backends
are told have to be drawn before. The OTEL_* variables of the specification say where to and how many.
"""

import asyncio
import contextlib
import logging
import os
import random
import threading
from collections import deque
from time import time_ns
from typing import TYPE_CHECKING, Any

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.run.gateway.interfaces import Trace, Tracing
from crosstie.run.gateway.metrics import Family
from crosstie.run.gateway.notices import Notice
from crosstie.run.gateway.record import RequestRecord

if TYPE_CHECKING:
    from crosstie.run.service.process import Serve

INSTALL = "pip install 'crosstie[telemetry]'"
_EXPORT_EVERY_S = 1.0
# Requests that may wait to be exported, and those of one export.
_MOST_WAITING = 4096
_MOST_TOGETHER = 256
# How long the collector is waited for at the end.
_LAST_S = 3.0


def wanted() -> bool:
    """Whether the environment asks for it, as OpenTelemetry's own variables do."""
    off = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    named = any(os.environ.get(f"OTEL_EXPORTER_OTLP_{name}") for name in ("ENDPOINT", "TRACES_ENDPOINT"))
    return named and not off and os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip() == "otlp"


class Tried:
    """One attempt: on which backend, from when to when, and what became of it."""

    __slots__ = ("backend", "began_ns", "ended_ns", "first_ns", "pool", "span_id", "status", "why")

    def __init__(self, pool: str, backend: str, span_id: int):
        self.pool, self.backend, self.span_id = pool, backend, span_id
        self.began_ns, self.first_ns, self.ended_ns = time_ns(), 0, 0
        self.why, self.status = "", 0


class RequestTrace(Trace):
    def __init__(self, number: int, span_id: int, parent_id: int, state: bytes, sampled: bool):
        self.id = f"{number:032x}"
        self.number, self.span_id, self.parent_id, self.state, self.sampled = number, span_id, parent_id, state, sampled
        self.ended_ns = 0
        self.attempts: list[Tried] = []

    def attempt(self, pool: str, backend: str) -> bytes:
        tried = Tried(pool, backend, drawn(64))
        self.attempts.append(tried)
        told_on = b"tracestate: %b\r\n" % self.state if self.state else b""
        return b"traceparent: 00-%032x-%016x-%02x\r\n%b" % (self.number, tried.span_id, self.sampled, told_on)

    def first_token(self) -> None:
        self.attempts[-1].first_ns = time_ns()

    def failed(self, why: str, status: int) -> None:
        last = self.attempts[-1]
        last.why, last.status, last.ended_ns = why, status, time_ns()


class Telemetry(Tracing):
    """A part of the gateway. Raises BadInput where the libraries are missing."""

    def __init__(self) -> None:
        try:
            from crosstie.run.service.spans import Spans
        except ImportError:
            raise BadInput(f"OpenTelemetry is not installed: {INSTALL}") from None
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        if protocol not in (None, "", "http/protobuf"):
            raise BadInput(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol}; traces are exported by http/protobuf only")
        try:
            self.spans = Spans()
        except ValueError as error:
            raise BadInput(f"of the OTEL_ variables: {error}") from None
        self.exported = self._unsent = self._left_out = 0
        self.failing = False
        self._records: deque[RequestRecord] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    # A part of the gateway

    async def start(self, serve: "Serve") -> None:
        # What the libraries have to say of a collector that is gone is said in a notice, once.
        self._logger = logging.getLogger("opentelemetry")
        self._before = (self._logger.propagate, list(self._logger.handlers))
        self._logger.propagate, self._logger.handlers = False, [logging.NullHandler()]
        self._loop, self._gateway = asyncio.get_running_loop(), serve.gateway
        self._gateway.context.tracing = self
        self._gateway.listeners.append(self._hear)
        self._gateway.metrics.sources.append(self._families)
        self._thread.start()

    def reloaded(self, fleet: Fleet) -> None:
        """What is served does not matter to how it is traced."""

    async def stop(self) -> None:
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, _LAST_S)
        # Ends a wait for the next try, too.
        await asyncio.to_thread(self.spans.close)
        self._logger.propagate, self._logger.handlers = self._before

    def _families(self) -> list[Family]:
        lost = self._left_out + self._unsent
        return [
            ("crosstie_traces_exported_total", "counter", "Requests whose spans were exported.", [({}, self.exported)]),
            ("crosstie_traces_dropped_total", "counter", "Requests whose spans were not.", [({}, lost)]),
            ("crosstie_telemetry_failed", "gauge", "1 while spans cannot be exported.", [({}, int(self.failing))]),
        ]

    # On the loop

    def begin(self, path: str, given: bytes) -> RequestTrace:
        number, parent_id, flags, state = drawn(128), 0, None, b""
        if given:
            parent, _, rest = given.partition(b"\r\n")
            _, trace_id, span_id, said = parent.removeprefix(b"traceparent: ").split(b"-")[:4]
            number, parent_id, flags = int(trace_id, 16), int(span_id, 16), int(said, 16)
            state = rest.removeprefix(b"tracestate: ").removesuffix(b"\r\n")
        sampled = self.spans.sampled(path, number, parent_id, flags)
        return RequestTrace(number, drawn(64), parent_id, state, sampled)

    def _hear(self, record: RequestRecord) -> None:
        trace = record.trace
        if not isinstance(trace, RequestTrace) or not trace.sampled:
            return
        if len(self._records) >= _MOST_WAITING:
            self._left_out += 1
            return
        trace.ended_ns = time_ns()
        self._records.append(record)

    # In the thread

    def _run(self) -> None:
        while not self._stopping:
            self._wake.wait(_EXPORT_EVERY_S)
            self._export()
        self._export()

    def _export(self) -> None:
        while self._records:
            batch = [self._records.popleft() for _ in range(min(len(self._records), _MOST_TOGETHER))]
            went = self.spans.export(batch)
            self.exported += len(batch) if went else 0
            self._unsent += 0 if went else len(batch)
            if went == self.failing:
                self.failing = not went
                self._tell(went)
            if not went and self._stopping:
                break

    def _tell(self, went: bool) -> None:
        sentence = "traces are exported again" if went else f"traces cannot be exported to {self.spans.where}"
        notice: Any = Notice(
            "telemetry_resumed" if went else "telemetry_failed", "info" if went else "warning", sentence
        )
        # At the very end the loop may be gone, and nobody listens any more.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._gateway.notify, notice)


def drawn(bits: int) -> int:
    """Not zero, which stands for none."""
    return random.getrandbits(bits) or 1
