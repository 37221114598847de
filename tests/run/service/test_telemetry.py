"""Spans as a collector gets them: an OTLP receiver on loopback decodes what the gateway exports."""

import asyncio
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tests.run.gateway.fakes import MODEL, fakes, fleet_of, pool_of, running, until
from tests.run.gateway.tellers import tellers
from tests.run.gateway.test_resume import fleet_over, identified
from tests.run.gateway.test_serving import CHAT
from tests.waiting import LIMIT_S

from crosstie.core.errors import BadInput
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.service import spans, telemetry
from crosstie_gateway.service.telemetry import Telemetry, wanted

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Collector:
    """Takes what is exported to it, or refuses it with `status`."""

    def __init__(self) -> None:
        collector = self
        self.got: list[ExportTraceServiceRequest] = []
        self.status = 200
        self.refused = 0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if collector.status == 200:
                    collector.got.append(ExportTraceServiceRequest.FromString(body))
                else:
                    collector.refused += 1
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.got
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in ("OTEL_TRACES_SAMPLER", "OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(name, raising=False)
    made = Collector()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{made.server.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
    monkeypatch.setattr(telemetry, "_EXPORT_EVERY_S", 0.05)
    monkeypatch.setattr(telemetry, "_LAST_S", LIMIT_S)
    yield made
    made.close()


def attributes(span: Span) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value") or "") for one in span.attributes}


def test_a_request_is_a_span_with_one_for_each_attempt_and_backends_are_told_theirs(collector: Collector) -> None:
    async def test() -> None:
        part = Telemetry()
        async with fakes(2) as [one, other]:
            one.mode = "error"
            pools = fleet_of(
                pool_of("cheap", one.url, usd_per_gpu_hour=0.1), pool_of("dear", other.url), classes=(CHAT,)
            )
            async with running(pools, components=[part]) as at:
                headers = {"traceparent": PARENT, "tracestate": "vendor=a", "x-request-id": "mine-7"}
                assert (await at.ask(stream=True, headers=headers)).status == 200
                await until(lambda: part.exported == 1)
                assert await at.metric("crosstie_traces_exported_total") == 1
                assert await at.metric("crosstie_telemetry_failed") == 0
                await part.stop()
            heard = [
                (fake.hit[0][0].headers[b"traceparent"], fake.hit[0][0].headers[b"tracestate"]) for fake in (one, other)
            ]
        # On a machine that stands still for a millisecond it has waited as well.
        request, failed, served = (span for span in collector.spans if span.name != "queue")
        assert (request.name, request.kind) == ("POST /v1/chat/completions", Span.SPAN_KIND_SERVER)
        assert request.trace_id.hex() == PARENT[3:35]
        assert request.parent_span_id.hex() == PARENT[36:52]
        assert request.trace_state == "vendor=a"
        assert request.status.code == 0
        said = attributes(request)
        expected = {
            "http.request.method": "POST", "url.path": "/v1/chat/completions", "http.response.status_code": 200,
            "gen_ai.operation.name": "chat", "gen_ai.request.model": MODEL, "gen_ai.usage.input_tokens": 7,
            "gen_ai.usage.output_tokens": 5, "gen_ai.request.stream": True, "gen_ai.provider.name": "crosstie",
            "crosstie.request_id": "mine-7", "crosstie.class": "chat", "crosstie.pool": "dear",
            "crosstie.outcome": "served", "crosstie.attempts": 2, "crosstie.resumed": 0,
        }  # fmt: skip
        assert {name: said.get(name) for name in expected} == expected
        assert said["gen_ai.response.time_to_first_chunk"] > 0
        for span, (parent, state) in zip((failed, served), heard, strict=True):
            assert (span.name, span.kind) == (f"chat {MODEL}", Span.SPAN_KIND_CLIENT)
            assert (span.trace_id, span.parent_span_id) == (request.trace_id, request.span_id)
            assert parent.decode() == f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
            assert state == b"vendor=a"
            assert request.start_time_unix_nano <= span.start_time_unix_nano + 10**9
            assert span.end_time_unix_nano <= request.end_time_unix_nano
        assert failed.status.code == 2
        assert "answered 500" in failed.status.message
        assert attributes(failed)["error.type"] == "500"
        assert "gen_ai.usage.input_tokens" not in attributes(failed)
        assert [event.name for event in served.events] == ["first_token"]
        assert served.start_time_unix_nano <= served.events[0].time_unix_nano <= served.end_time_unix_nano
        assert len({request.span_id, failed.span_id, served.span_id}) == 3
        resource = {one.key: one.value.string_value for one in collector.got[0].resource_spans[0].resource.attributes}
        assert resource["service.name"] == "crosstie"

    run_on_loop(test())


def test_a_wait_is_a_span_and_a_refusal_a_trace_of_its_own(collector: Collector) -> None:
    async def test() -> None:
        part = Telemetry()
        async with (
            fakes() as [fake],
            running(fleet_of(pool_of("one", fake.url, max_in_flight=1)), components=[part]) as at,
        ):
            fake.mode = "hang"
            both = asyncio.gather(at.ask(), at.ask())
            await until(lambda: len(at.gateway.waiting) and fake.held)
            # By the gateway's clock; a shorter wait is no span.
            since = at.gateway.now()
            await until(lambda: at.gateway.now() >= since + 2.0 * spans._LEAST_WAIT_S)
            fake.mode = "ok"
            fake.held[0].send(200, b'{"choices":[]}')
            assert [answer.status for answer in await both] == [200, 200]
            assert (await at.ask(model="unknown")).status == 404
            await until(lambda: part.exported == 3)
            await part.stop()
        by_name: dict[str, list[Span]] = {}
        for span in collector.spans:
            by_name.setdefault(span.name, []).append(span)
        (queue,) = by_name["queue"]
        assert queue.end_time_unix_nano > queue.start_time_unix_nano
        assert queue.parent_span_id in {span.span_id for span in by_name["POST /v1/chat/completions"]}
        (refused,) = [
            span
            for span in by_name["POST /v1/chat/completions"]
            if attributes(span)["http.response.status_code"] == 404
        ]
        assert not refused.parent_span_id
        assert attributes(refused)["error.type"] == "model_not_found"
        assert refused.trace_id not in {span.trace_id for span in by_name[f"chat {MODEL}"]}

    run_on_loop(test())


@pytest.mark.parametrize(
    ("sampler", "parent", "exported"),
    [
        (None, PARENT, True),
        (None, PARENT[:-2] + "00", False),
        (None, None, True),
        ("always_off", PARENT, False),
        ("parentbased_always_off", PARENT, True),
        ("parentbased_always_off", None, False),
    ],
)
def test_whoever_decides_what_is_sampled_is_heeded(
    sampler: str | None, parent: str | None, exported: bool, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        part = Telemetry()
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url)), components=[part]) as at:
            await at.ask(headers={"traceparent": parent} if parent else {})
            await part.stop()
            told = fake.hit[0][0].headers[b"traceparent"].decode()
        assert told.endswith("-01" if exported else "-00")
        assert bool(collector.spans) is exported
        if parent:
            assert told[3:35] == parent[3:35]
            assert told[36:52] != parent[36:52]

    if sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    run_on_loop(test())


def test_a_collector_that_is_gone_stalls_nobody_and_fills_no_memory(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(telemetry, "_MOST_WAITING", 4)
    monkeypatch.setattr(telemetry, "_MOST_TOGETHER", 2)

    async def test() -> None:
        collector.status = 400
        part = Telemetry()
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url)), components=[part]) as at:
            assert (await at.ask()).status == 200
            await until(lambda: part.failing)
            await until(lambda: any("cannot be exported" in one for one in at.notices))
            assert await at.metric("crosstie_telemetry_failed") == 1
            for _ in range(30):
                assert (await at.ask()).status == 200
                assert len(part._records) <= 4
            assert sum("cannot be exported" in one for one in at.notices) == 1
            collector.status = 200

            async def exported() -> bool:
                await at.ask()
                return part.exported > 0

            for _ in range(2000):
                if await exported():
                    break
            await until(lambda: any("exported again" in one for one in at.notices))
            asked = len(fake.hit)
            await until(lambda: part.exported + part._unsent + part._left_out == asked)
            assert await at.metric("crosstie_traces_dropped_total") == asked - part.exported
            await part.stop()

    run_on_loop(test())


def test_without_the_libraries_it_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "crosstie_gateway.service.spans", raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(BadInput, match=r"pip install '\./packages/gateway\[telemetry\]'"):
        Telemetry()


def test_other_protocols_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
    with pytest.raises(BadInput, match="is grpc; traces are exported by http/protobuf only"):
        Telemetry()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://[collector"),
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "collector"),
    ],
)
def test_variables_that_make_no_sense_are_refused(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match="of the OTEL_ variables: "):
        Telemetry()


@pytest.mark.parametrize(
    ("variables", "asked_for"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_environment_asks_for_it(
    variables: dict[str, str], asked_for: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = (
        "OTEL_EXPORTER_OTLP_ENDPOINT",
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        "OTEL_SDK_DISABLED",
        "OTEL_TRACES_EXPORTER",
    )
    for name in names:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert wanted() is asked_for


def test_an_answer_that_goes_on_elsewhere_is_two_attempts_and_its_first_token_the_first_s(collector: Collector) -> None:
    async def test() -> None:
        part = Telemetry()
        async with tellers(2) as [bad, good]:
            bad.mode = "cut-mid-event"
            async with running(fleet_over(bad, good), components=[part]) as at:
                await identified(at)
                assert (await at.ask(stream=True)).status == 200
                await until(lambda: part.exported == 1)
                await part.stop()
            heard = good.hit[0][0].headers[b"traceparent"].decode()
        request, broken, resumed = collector.spans
        assert attributes(request)["crosstie.resumed"] == 1
        assert broken.status.code == 2
        assert [event.name for event in broken.events] == ["first_token"]
        assert not resumed.events
        assert heard[36:52] == resumed.span_id.hex()

    run_on_loop(test())
