"""Requests that have ended as OpenTelemetry's spans, by its conventions for HTTP and generative AI. Imports the
`telemetry` extra; only `telemetry` imports it."""

import os
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    set_span_in_context,
)

from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.service.request_trace import RequestTrace, TracedAttempt, random_id

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v1/responses": "chat",
}
# A wait that nobody would look for is no span.
_LEAST_WAIT_S = 1e-3
_BROKEN = frozenset(("failed", "cut"))
_SCOPE = InstrumentationScope("crosstie.gateway")

Attributes = dict[str, str | int | float | bool]


class Spans:
    """Raises ValueError where the environment's variables make no sense."""

    def __init__(self) -> None:
        known = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
        self._resource = Resource.create({} if known else {"service.name": "crosstie"})
        # Reads OTEL_TRACES_SAMPLER; by default whatever a request's parent has decided, and all that have none.
        self._sampler = TracerProvider(shutdown_on_exit=False).sampler
        named = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        at = urlsplit(named or "http://localhost:4318")
        # Without what may be a secret in it.
        self.where = at.netloc.rpartition("@")[2]
        if at.scheme not in ("http", "https") or not self.where:
            raise ValueError("OTEL_EXPORTER_OTLP_ENDPOINT is no address that begins with http:// or https://")
        self._exporter = OTLPSpanExporter()

    def sampled(self, path: str, trace_id: int, parent_id: int, flags: int | None) -> bool:
        """Whether this request is to be exported; `flags`: what its parent has decided, if it has one."""
        parent = None
        if flags is not None:
            context = SpanContext(trace_id, parent_id, is_remote=True, trace_flags=TraceFlags(flags & 1))
            parent = set_span_in_context(NonRecordingSpan(context))
        decision = self._sampler.should_sample(parent, trace_id, f"POST {path}", SpanKind.SERVER)
        return decision.decision is Decision.RECORD_AND_SAMPLE

    def export(self, batch: list[RequestRecord]) -> bool:
        """Whether the collector took them; returns when it has, or after the exporter's patience."""
        spans = [span for record in batch for span in self.of(record)]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        # Which says nothing of its types.
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def of(self, record: RequestRecord) -> list[ReadableSpan]:
        trace = record.trace
        if not isinstance(trace, RequestTrace):
            return []
        began_ns = int(record.arrived_at * 1e9)
        spans = [self._request(record, trace, began_ns)]
        if record.waited_s >= _LEAST_WAIT_S:
            sent_ns = trace.attempts[0].began_ns if trace.attempts else trace.ended_ns
            spans.append(self._span(trace, "queue", random_id(64), trace.span_id, began_ns, sent_ns))
        spans += [self._attempt(record, trace, attempt) for attempt in trace.attempts]
        return spans

    def _request(self, record: RequestRecord, trace: RequestTrace, began_ns: int) -> ReadableSpan:
        attributes: Attributes = {
            "http.request.method": "POST",
            "url.path": record.path,
            "http.response.status_code": record.status,
            "crosstie.request_id": record.request_id.decode("ascii", "replace"),
            "crosstie.outcome": record.how,
            "crosstie.attempts": record.attempts,
            "crosstie.resumed": record.resumed,
            "crosstie.usd": record.charged_usd,
            **_model_attributes(record),
        }
        for name, value in (
            ("crosstie.class", record.class_name),
            ("crosstie.pool", record.pool),
            ("crosstie.key", record.key_id),
            ("error.type", record.code),
        ):
            if value:
                attributes[name] = value
        broken = record.how in _BROKEN or record.status >= 500
        status = Status(StatusCode.ERROR, record.code or record.how) if broken else Status(StatusCode.UNSET)
        return self._span(
            trace, f"POST {record.path}", trace.span_id, trace.parent_id, began_ns, trace.ended_ns,
            kind=SpanKind.SERVER, attributes=attributes, status=status,
        )  # fmt: skip

    def _attempt(self, record: RequestRecord, trace: RequestTrace, attempt: TracedAttempt) -> ReadableSpan:
        at = urlsplit(attempt.backend)
        attributes: Attributes = {
            "server.address": at.hostname or "",
            "server.port": at.port or (443 if at.scheme == "https" else 80),
            "crosstie.pool": attempt.pool,
            "crosstie.backend": attempt.backend,
            **_model_attributes(record, answered=attempt is trace.attempts[-1]),
        }
        status = Status(StatusCode.UNSET)
        if attempt.why:
            attributes["error.type"] = str(attempt.status)
            status = Status(StatusCode.ERROR, attempt.why)
        ended_ns = attempt.ended_ns or trace.ended_ns
        events = [Event("first_token", {}, attempt.first_ns)] if attempt.first_ns else []
        return self._span(
            trace, f"{_OPERATIONS.get(record.path, 'chat')} {record.model}", attempt.span_id, trace.span_id,
            attempt.began_ns, ended_ns,
            kind=SpanKind.CLIENT, attributes=attributes, status=status, events=events,
        )  # fmt: skip

    def _span(
        self, trace: RequestTrace, name: str, span_id: int, parent_id: int, began_ns: int, ended_ns: int, *,
        kind: SpanKind = SpanKind.INTERNAL, attributes: Attributes | None = None,
        status: Status | None = None, events: list[Event] | None = None,
    ) -> ReadableSpan:  # fmt: skip
        flags = TraceFlags(TraceFlags.SAMPLED)
        state = TraceState.from_header([trace.state.decode("ascii", "replace")]) if trace.state else None
        remote = parent_id == trace.parent_id
        return ReadableSpan(
            name=name,
            context=SpanContext(trace.number, span_id, is_remote=False, trace_flags=flags, trace_state=state),
            parent=SpanContext(trace.number, parent_id, is_remote=remote, trace_flags=flags) if parent_id else None,
            resource=self._resource,
            attributes=attributes or {},
            events=events or (),
            kind=kind,
            status=status or Status(StatusCode.UNSET),
            start_time=began_ns,
            # The two clocks of a machine may differ by what one was put right in between.
            end_time=max(ended_ns, began_ns),
            instrumentation_scope=_SCOPE,
        )


def _model_attributes(record: RequestRecord, *, answered: bool = True) -> Attributes:
    """`answered`: with what the answer was."""
    said: dict[str, str | int | float | bool | None] = {
        "gen_ai.operation.name": _OPERATIONS.get(record.path, "chat"),
        "gen_ai.provider.name": "crosstie",
        "gen_ai.request.stream": record.streamed,
        "gen_ai.request.model": record.model or None,
    }
    if answered:
        tokens = (record.input_tokens, record.output_tokens) if record.input_tokens else (None, None)
        said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"] = tokens
        said["gen_ai.response.time_to_first_chunk"] = record.ttft_s
    return {name: value for name, value in said.items() if value is not None}
