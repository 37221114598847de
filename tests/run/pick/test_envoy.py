"""Requests through a real Envoy that asks the picker: where they go, what comes back, and what is learnt from it."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trustme
import yaml
from tests.run.gateway.fakes import CALM, MODEL, fakes, fleet_of, in_folder, pool_of, until
from tests.run.pick.envoys import Behind, address, behind_envoy, envoy, free_port, picking, said, started
from tests.waiting import LIMIT_S

from crosstie.wire.address import Address
from crosstie.wire.fetch import Answer, fetch_once
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.service.edge import Edge

pytestmark = pytest.mark.engines
# Targets that even a machine which stands still keeps: the cheaper pool is always good enough.
UNHURRIED = {"x-crosstie-ttft-ms": "600000", "x-crosstie-tpot-ms": "600000"}
DOCS = Path(__file__).parents[3] / "docs" / "pick.md"


def told(at: Behind) -> list[RequestRecord]:
    """What the picker will tell of requests that have ended."""
    records: list[RequestRecord] = []
    at.gateway.listeners.append(records.append)
    return records


def header(answer: Answer, name: bytes) -> bytes:
    return dict(answer.headers).get(name, b"")


@in_folder
async def test_requests_go_where_the_picker_says_and_are_counted(tmp_path: Path) -> None:
    async with fakes(2) as [dear, cheap]:
        # Nobody is taken for ill because this machine stood still.
        serving = msgspec.structs.replace(CALM, health_every_s=600.0)
        pools = pool_of("dear", dear.url, usd_per_gpu_hour=9.0), pool_of("cheap", cheap.url)
        async with behind_envoy(tmp_path, fleet_of(*pools, serving=serving)) as at:
            records = told(at)
            for _ in range(6):
                answer = await at.ask(headers={**UNHURRIED, "cookie": "own", "x-mine": "kept"})
                assert answer.status == 200
                assert said(answer)["served_by"] == cheap.name, header(answer, b"x-crosstie-reason")
                assert header(answer, b"x-crosstie-pool") == b"cheap"
                assert b"x-crosstie-reason" in dict(answer.headers)
            assert (len(cheap.hit), len(dear.hit)) == (6, 0)
            request, body = cheap.hit[0]
            # What is the gateway's to know goes no further, and the endpoint is told in the header as well.
            assert body["model"] == MODEL
            assert not {b"x-crosstie-ttft-ms", b"cookie"} & request.headers.keys()
            assert request.headers[b"x-mine"] == b"kept"
            endpoints = request.headers[b"x-gateway-destination-endpoint"].decode().split(",")
            assert endpoints == [f"127.0.0.1:{cheap.port}", f"127.0.0.1:{dear.port}"]
            await until(lambda: len(records) == 6)
            one = records[0]
            assert (one.how, one.status, one.pool, one.backend) == ("served", 200, "cheap", cheap.url)
            assert (one.input_tokens, one.output_tokens, one.counted) == (7, 5, True)
            assert one.charged_usd > 0.0


@in_folder
async def test_the_configuration_of_the_docs_serves(tmp_path: Path) -> None:
    shown, _ = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    async with fakes(2) as [one, two], picking(fleet_of(pool_of("p", one.url, two.url))) as picker:
        port = free_port()
        for written, found in ((8080, port), (9002, picker.port), (8001, one.port), (8002, two.port)):
            assert f"port_value: {written}}}" in shown
            shown = shown.replace(f"port_value: {written}}}", f"port_value: {found}}}")
        async with started(tmp_path, {"admin": address(admin := free_port()), **yaml.safe_load(shown)}, admin):
            at = Behind(picker, f"http://127.0.0.1:{port}/v1")
            records = told(at)
            assert (await at.ask()).status == 200
            # Who answered is believed: the first has gone by now.
            one.crash()
            for _ in range(3):
                assert said(await at.ask())["served_by"] in (one.name, two.name)
            await until(lambda: len(records) == 4)
            assert records[-1].backend == two.url
            at.origin.close()


@in_folder
async def test_a_stream_passes_event_by_event_and_teaches_what_it_took(tmp_path: Path) -> None:
    async with fakes(tokens=8) as [fake]:
        fake.pause_s = 0.02
        async with behind_envoy(tmp_path, fleet_of(pool_of("one", fake.url))) as at:
            records = told(at)
            answer = await at.ask(stream=True)
            assert answer.status == 200
            events = [line for line in answer.body.decode().split("\n\n") if line]
            # The count was the picker's wish, and is not the client's.
            assert len(events) == 10
            assert events[-1] == "data: [DONE]"
            assert "usage" not in answer.body.decode()
            assert fake.hit[0][1]["stream_options"]["include_usage"] is True
            await until(lambda: records)
            [one] = records
            assert (one.how, one.streamed, one.output_tokens) == ("served", True, 8)
            assert one.ttft_s is not None
            [replica] = at.gateway.live.replicas()
            # Its speed is learnt from what was seen to pass, and its prefix is known to be there.
            assert replica.pool.speed.idle_s(100.0, 8.0) > 0.0
            assert replica.in_flight == 0
            ask = at.gateway.read(fake.hit[0][0])[1]
            assert ask.prefix == () or replica.prefixes.match(ask.prefix) > 0


@in_folder
async def test_the_first_event_is_not_kept_until_the_last(tmp_path: Path) -> None:
    # It would go on for a day. It writes now and then, as engines do: that is how it finds out that nobody reads.
    async with fakes(tokens=10**6) as [fake], behind_envoy(tmp_path, fleet_of(pool_of("one", fake.url))) as at:
        fake.pause_s = 0.1
        reader, writer = await asyncio.open_connection("127.0.0.1", Address(at.url).port)
        body = json.dumps({"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "hi"}]}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(LIMIT_S):
            assert b"w0 " in await reader.readuntil(b"w0 ")
        assert len(at.gateway.exchanges) == 1
        # Who goes is seen to go, at the picker and at the engine.
        writer.close()
        await until(lambda: not at.gateway.exchanges and fake.gone == 1)


@in_folder
async def test_what_nobody_can_serve_is_refused_by_the_standards_rules(tmp_path: Path) -> None:
    async with fakes() as [fake]:
        serving = msgspec.structs.replace(CALM, queue_s=0.0, max_queued=0)
        fleet = fleet_of(pool_of("one", fake.url, max_in_flight=1), serving=serving)
        async with behind_envoy(tmp_path, fleet) as at:
            fake.mode = "hang"
            waiting = asyncio.ensure_future(at.ask())
            await until(lambda: fake.hit)
            full = await at.ask()
            assert (full.status, said(full)["error"]["code"]) == (429, "fleet_saturated")
            assert header(full, b"retry-after")
            unknown = await at.ask(model="nobody")
            assert (unknown.status, said(unknown)["error"]["code"]) == (404, "model_not_found")
            assert (await at.get("/v1/models")).status == 200
            assert MODEL in (await at.get("/v1/models")).body.decode()
            assert (await at.get("/metrics")).status == 404
            waiting.cancel()
            await until(lambda: not at.gateway.exchanges)
            fake.healthy, fake.mode = False, "ok"
            [replica] = at.gateway.live.replicas()
            await until(lambda: not replica.up)
            down = await at.ask()
            assert (down.status, said(down)["error"]["code"]) == (503, "no_backend")
            assert len(fake.hit) == 1


@in_folder
async def test_only_endpoints_of_the_subset_are_picked(tmp_path: Path) -> None:
    async with fakes(2) as [cheap, dear]:
        fleet = fleet_of(pool_of("cheap", cheap.url), pool_of("dear", dear.url, usd_per_gpu_hour=9.0))
        async with behind_envoy(tmp_path, fleet, subset=[f"127.0.0.1:{dear.port}"]) as at:
            assert said(await at.ask())["served_by"] == dear.name
            # Nor is anybody else a fallback.
            assert dear.hit[0][0].headers[b"x-gateway-destination-endpoint"] == b"127.0.0.1:%d" % dear.port


@pytest.mark.parametrize("subset", [[], ["10.0.0.1:8000"]])
def test_a_subset_without_anybody_is_refused(tmp_path: Path, subset: list[str]) -> None:
    @in_folder
    async def asked(folder: Path) -> None:
        async with (
            fakes() as [fake],
            behind_envoy(folder, fleet_of(pool_of("one", fake.url)), subset=subset) as at,
        ):
            assert (await at.ask()).status == 503
            assert not fake.hit

    asked(tmp_path)


@in_folder
async def test_envoy_goes_on_to_the_next_endpoint_and_the_first_is_blamed(tmp_path: Path) -> None:
    serving = msgspec.structs.replace(CALM, health_every_s=600.0)
    async with fakes(2) as [cheap, dear]:
        fleet = fleet_of(pool_of("cheap", cheap.url), pool_of("dear", dear.url, usd_per_gpu_hour=9.0), serving=serving)
        async with behind_envoy(tmp_path, fleet) as at:
            records = told(at)
            cheap.crash()
            answer = await at.ask()
            assert (answer.status, said(answer)["served_by"]) == (200, dear.name)
            assert header(answer, b"x-crosstie-pool") == b"dear"
            await until(lambda: records)
            assert (records[0].backend, records[0].attempts, records[0].output_tokens) == (dear.url, 2, 5)
            assert at.gateway.metrics.retries["cheap"] == 1
            # After a few more nobody is sent there first.
            for _ in range(5):
                assert (await at.ask()).status == 200
            assert not at.gateway.backends[cheap.url].replica.up


@pytest.mark.parametrize("attributes", [True, False])
def test_a_backend_that_refuses_connections_is_taken_out(tmp_path: Path, attributes: bool) -> None:
    """With Envoy's word for it, or by what Envoy tells the client."""

    @in_folder
    async def asked(folder: Path) -> None:
        serving = msgspec.structs.replace(CALM, health_every_s=600.0, panic_threshold=0.0)
        async with fakes() as [fake]:
            fleet = fleet_of(pool_of("one", fake.url), serving=serving)
            async with behind_envoy(folder, fleet, attributes=attributes) as at:
                fake.crash()
                answer = await at.ask()
                assert (answer.status, said(answer)["error"]["type"]) == (503, "unavailable_error")
                assert "Envoy had no answer" in said(answer)["error"]["message"]
                assert not at.gateway.backends[fake.url].replica.up
                assert said(await at.ask())["error"]["code"] == "no_backend"

    asked(tmp_path)


@in_folder
async def test_what_an_engine_says_of_errors_is_passed_on(tmp_path: Path) -> None:
    async with fakes() as [fake], behind_envoy(tmp_path, fleet_of(pool_of("one", fake.url))) as at:
        for mode, status in (("bad", 400), ("error", 500), ("full", 503)):
            fake.mode = mode
            assert (await at.ask()).status == status, mode
        [replica] = at.gateway.live.replicas()
        assert replica.busy_until > at.gateway.now()


@in_folder
async def test_long_bodies_pass_both_ways(tmp_path: Path) -> None:
    async with fakes() as [fake]:
        pool = pool_of("one", fake.url, max_context=10**7)
        async with behind_envoy(tmp_path, fleet_of(pool)) as at:
            long = "word " * 200_000
            answer = await at.ask(messages=[{"role": "user", "content": long}])
            assert answer.status == 200
            assert fake.hit[0][1]["messages"][0]["content"] == long


@in_folder
async def test_another_name_of_a_model_and_another_path_are_the_backends(tmp_path: Path) -> None:
    async with fakes() as [fake]:
        pool = pool_of("one", f"http://127.0.0.1:{fake.port}/v1", served_as="meta/llama")
        async with behind_envoy(tmp_path, fleet_of(pool)) as at:
            assert (await at.ask()).status == 200
            assert fake.hit[0][1]["model"] == "meta/llama"
            answer = await at.ask("/v1/messages", max_tokens=16)
            assert (answer.status, said(answer)["type"]) == (200, "message")
            assert fake.hit[1][0].path == "/v1/chat/completions"


# The picker's own faults


@in_folder
async def test_without_its_picker_envoy_fails_closed_and_open_only_where_it_is_told_to(tmp_path: Path) -> None:
    """Envoy 1.40 has no way back for a body that it has begun to stream to a picker: those fail either way."""
    async with fakes() as [fake]:
        nobody, body = free_port(), json.dumps({"model": MODEL, "messages": []}).encode()
        for allow, without_body in ((False, 500), (True, 200)):
            async with envoy(tmp_path, nobody, [fake.url], filters={"failure_mode_allow": allow}) as url:
                there = Address(url)
                assert (await fetch_once(there, "GET", "/v1/models", timeout_s=60.0)).status == without_body
                assert (
                    await fetch_once(there, "POST", "/v1/chat/completions", body=body, timeout_s=60.0)
                ).status == 500
                assert not fake.hit


@in_folder
async def test_a_picker_that_dies_and_comes_back_is_asked_again(tmp_path: Path) -> None:
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("one", fake.url))
        async with picking(fleet) as first, envoy(tmp_path, first.port, [fake.url]) as url:
            at = Behind(first, url)
            assert (await at.ask()).status == 200
            port = first.port
            first.server.close()
            assert (await at.ask()).status >= 500
            async with picking(fleet, port=port):
                async with asyncio.timeout(LIMIT_S):
                    while (await at.ask()).status != 200:
                        await asyncio.sleep(0.05)
            at.origin.close()


@in_folder
async def test_a_picker_that_is_slow_is_not_waited_for_longer_than_envoy_says(tmp_path: Path) -> None:
    """Where bodies are streamed both ways Envoy does not go by `message_timeout`: its patience is that with streams."""
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("one", fake.url, max_in_flight=1))
        async with behind_envoy(tmp_path, fleet, idle="1s", filters={"message_timeout": "0.2s"}) as at:
            fake.mode = "hang"
            holding = asyncio.ensure_future(at.ask())
            await until(lambda: fake.hit)
            # It waits for room, longer than Envoy does.
            late = await at.ask()
            assert late.status in (408, 504)
            assert (await holding).status in (408, 504)
            await until(lambda: not at.gateway.exchanges)
            assert not len(at.gateway.waiting)


@in_folder
async def test_an_envoy_that_is_set_up_wrongly_is_told_what_to_set(tmp_path: Path) -> None:
    async with fakes() as [fake]:
        modes = {"request_header_mode": "SEND", "request_body_mode": "BUFFERED", "response_body_mode": "NONE"}
        async with behind_envoy(tmp_path, fleet_of(pool_of("one", fake.url)), modes=modes) as at:
            answer = await at.ask()
            assert answer.status == 500
            assert "FULL_DUPLEX_STREAMED" in said(answer)["error"]["message"]
            assert not fake.hit


@in_folder
async def test_an_endpoint_that_envoy_does_not_know_costs_its_request_and_nobody_elses(tmp_path: Path) -> None:
    """A fleet file and a cluster that disagree."""
    async with fakes(2) as [known, unknown]:
        fleet = fleet_of(pool_of("unknown", unknown.url), pool_of("known", known.url, usd_per_gpu_hour=9.0))
        async with picking(fleet) as process, envoy(tmp_path, process.port, [known.url]) as url:
            at = Behind(process, url)
            records = told(at)
            answer = await at.ask()
            assert (answer.status, said(answer)["served_by"]) == (200, known.name)
            await until(lambda: records)
            assert records[0].backend == known.url
            at.origin.close()


# Several pickers, and TLS


READINESS = {
    "timeout": "60s", "interval": "0.1s", "no_traffic_interval": "0.1s", "unhealthy_threshold": 1,
    "healthy_threshold": 1, "grpc_health_check": {"service_name": "readiness"},
}  # fmt: skip


@in_folder
async def test_of_two_pickers_one_may_leave_and_no_request_is_lost(tmp_path: Path) -> None:
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("one", fake.url))
        async with (
            picking(fleet) as staying, picking(fleet) as leaving,
            envoy(tmp_path, (staying.port, leaving.port), [fake.url], pickers={"health_checks": [READINESS]}) as url,
        ):  # fmt: skip
            at = Behind(leaving, url)
            by_one: list[RequestRecord] = []
            by_other: list[RequestRecord] = []
            staying.gateway.listeners.append(by_one.append)
            leaving.gateway.listeners.append(by_other.append)
            async with asyncio.timeout(LIMIT_S):
                while not (by_one and by_other):
                    assert (await at.ask()).status == 200
            # Told by its health that it leaves, Envoy asks the other alone.
            leaving.gateway.draining = True
            async with asyncio.timeout(LIMIT_S):
                asked_of_it = -1
                while len(by_other) != asked_of_it:
                    asked_of_it = len(by_other)
                    for _ in range(6):
                        assert (await at.ask()).status == 200
            assert await leaving.stop() is True
            assert (await at.ask()).status == 200
            at.origin.close()


@in_folder
async def test_envoy_asks_by_tls_with_a_certificate_of_its_own(tmp_path: Path) -> None:
    authority = trustme.CA()
    files = {}
    for name in ("picker", "envoy"):
        pair = authority.issue_cert("picker.test")
        files[name] = tmp_path / f"{name}.pem", tmp_path / f"{name}.key"
        files[name][0].write_bytes(b"".join(one.bytes() for one in pair.cert_chain_pems))
        files[name][1].write_bytes(pair.private_key_pem.bytes())
    ca = tmp_path / "ca.pem"
    ca.write_bytes(authority.cert_pem.bytes())
    chain, key = ({"filename": str(file)} for file in files["envoy"])
    tls: dict[str, Any] = {
        "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
        "sni": "picker.test",
        "common_tls_context": {
            "alpn_protocols": ["h2"],
            "tls_certificates": [{"certificate_chain": chain, "private_key": key}],
            "validation_context": {"trusted_ca": {"filename": str(ca)}},
        },
    }
    secured = {"transport_socket": {"name": "envoy.transport_sockets.tls", "typed_config": tls}}
    cert, own_key = files["picker"]
    edge = Edge("127.0.0.1", 0, grpc=True, tls_cert=cert, tls_key=own_key, tls_client_ca=ca)
    async with fakes() as [fake]:
        settings = {"components": [edge]}
        async with behind_envoy(tmp_path, fleet_of(pool_of("one", fake.url)), settings=settings, pickers=secured) as at:
            for _ in range(3):
                assert (await at.ask()).status == 200
            assert len(fake.hit) == 3
            await edge.stop()
        # Without the certificate that it is asked for it gets no further.
        del tls["common_tls_context"]["tls_certificates"]
        edge = Edge("127.0.0.1", 0, grpc=True, tls_cert=cert, tls_key=own_key, tls_client_ca=ca)
        settings = {"components": [edge]}
        async with behind_envoy(tmp_path, fleet_of(pool_of("one", fake.url)), settings=settings, pickers=secured) as at:
            assert (await at.ask()).status == 500
            assert len(fake.hit) == 3
            await edge.stop()
