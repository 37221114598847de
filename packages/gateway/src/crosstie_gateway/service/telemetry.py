"""Exports a trace of each request by OpenTelemetry: a span for it, one for its wait and one for each attempt.

A thread makes spans after the end; only the numbers that backends are told are drawn before. The OTEL_* variables say
where to and how many.
"""

import asyncio
import logging
import os
from collections import deque
from time import time_ns

from crosstie.core.errors import BadInput, MissingExtra
from crosstie.core.histogram import Family
from crosstie_gateway.gateway.interfaces import Tracing
from crosstie_gateway.gateway.notices import Notice
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.service.process import BackgroundThread, Component, GatewayProcess
from crosstie_gateway.service.request_trace import RequestTrace, random_id

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


class Telemetry(Tracing, Component):
    """A component of the gateway. Raises BadInput where the libraries are missing."""

    def __init__(self) -> None:
        try:
            from crosstie_gateway.service.spans import Spans
        except ImportError:
            raise MissingExtra("traces need OpenTelemetry", "telemetry", "crosstie-gateway") from None
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
        self._thread = BackgroundThread("telemetry", self._export, _EXPORT_EVERY_S)

    async def start(self, process: GatewayProcess) -> None:
        # What the libraries have to say of a collector that is gone is said in a notice, once.
        self._logger = logging.getLogger("opentelemetry")
        self._before = (self._logger.propagate, list(self._logger.handlers))
        self._logger.propagate, self._logger.handlers = False, [logging.NullHandler()]
        self._process, gateway = process, process.gateway
        gateway.context.tracing = self
        gateway.listeners.append(self._on_record)
        self._thread.start()

    async def stop(self) -> None:
        await asyncio.to_thread(self._thread.stop, _LAST_S)
        # Ends a wait for the next try, too.
        await asyncio.to_thread(self.spans.close)
        self._logger.propagate, self._logger.handlers = self._before

    def families(self) -> list[Family]:
        lost = self._left_out + self._unsent
        return [
            ("crosstie_traces_exported_total", "counter", "Requests whose spans were exported.", [({}, self.exported)]),
            ("crosstie_traces_dropped_total", "counter", "Requests whose spans were not.", [({}, lost)]),
            ("crosstie_telemetry_failed", "gauge", "1 while spans cannot be exported.", [({}, int(self.failing))]),
        ]

    # On the loop

    def begin(self, path: str, given: bytes) -> RequestTrace:
        number, parent_id, flags, state = random_id(128), 0, None, b""
        if given:
            parent, _, rest = given.partition(b"\r\n")
            _, trace_id, span_id, said = parent.removeprefix(b"traceparent: ").split(b"-")[:4]
            number, parent_id, flags = int(trace_id, 16), int(span_id, 16), int(said, 16)
            state = rest.removeprefix(b"tracestate: ").removesuffix(b"\r\n")
        sampled = self.spans.sampled(path, number, parent_id, flags)
        return RequestTrace(number, random_id(64), parent_id, state, sampled)

    def _on_record(self, record: RequestRecord) -> None:
        trace = record.trace
        if not isinstance(trace, RequestTrace) or not trace.sampled:
            return
        if len(self._records) >= _MOST_WAITING:
            self._left_out += 1
            return
        trace.ended_ns = time_ns()
        self._records.append(record)

    # In the thread

    def _export(self) -> None:
        while self._records:
            batch = [self._records.popleft() for _ in range(min(len(self._records), _MOST_TOGETHER))]
            went = self.spans.export(batch)
            self.exported += len(batch) if went else 0
            self._unsent += 0 if went else len(batch)
            if went == self.failing:
                self.failing = not went
                lost = Notice("telemetry_failed", "warning", f"traces cannot be exported to {self.spans.where}")
                back = Notice("telemetry_resumed", "info", "traces are exported again")
                self._process.notify_from_thread(back if went else lost)
            if not went and self._thread.stopping:
                break
