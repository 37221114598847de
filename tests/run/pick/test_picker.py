"""The picker's protocol, message by message: what it says to whoever asks as Envoy does."""

import asyncio
import json
from pathlib import Path

import grpc
import grpc.aio
import msgspec
import pytest
import trustme
from tests.run.gateway.fakes import CALM, MODEL, Fake, fakes, fleet_of, in_folder, pool_of, until
from tests.run.pick.envoys import free_port, picking
from tests.run.pick.proxies import asked, changed, proxy
from tests.wire.test_server import on_loop

from crosstie.core.errors import BadInput
from crosstie.core.fleet import SharedState
from crosstie.wire.address import Address
from crosstie_gateway.gateway import cold_start
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.ledger.keys import Key, digest, new_public_id, new_secret, shown
from crosstie_gateway.ledger.places import open_store
from crosstie_gateway.pick import messages
from crosstie_gateway.pick.picked import check_endpoints, endpoint_of
from crosstie_gateway.pick.server import EXT_PROC
from crosstie_gateway.pick.stream import PickSettings
from crosstie_gateway.service.edge import Edge
from crosstie_gateway.service.ledger import Ledger
from crosstie_gateway.wire.request import Request

ANSWER = json.dumps(
    {"choices": [{"message": {"content": "hi"}}], "usage": {"prompt_tokens": 7, "completion_tokens": 5}}
)
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"w "},"finish_reason":null}]}\n\n'
LAST = (
    b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\n'
    b'data: {"choices":[],"usage":{"prompt_tokens":1000,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
)
DESTINATION = messages.DESTINATION.decode()


@on_loop
async def test_header_and_metadata_name_the_same_endpoints_in_order() -> None:
    async with fakes(3) as [a, b, c]:
        fleet = fleet_of(
            pool_of("dearest", a.url, usd_per_gpu_hour=9.0), pool_of("cheapest", b.url),
            pool_of("dear", c.url, usd_per_gpu_hour=3.0),
        )  # fmt: skip
        for most, expected in ((2, [b, c, a]), (1, [b, c]), (0, [b])):
            async with picking(fleet, settings=PickSettings(most)) as picker, proxy(picker.port) as envoy:
                call = envoy.call()
                await call.head()
                body = asked()
                await call.body(body[:10], ends=False)
                await call.body(body[10:])
                head = await call.says()
                endpoints = changed(head.request_headers.response.header_mutation)[DESTINATION]
                assert endpoints == ",".join(f"127.0.0.1:{one.port}" for one in expected)
                metadata = head.dynamic_metadata.fields[messages.NAMESPACE.decode()].struct_value
                assert metadata.fields[DESTINATION].string_value == endpoints
                assert head.request_headers.response.clear_route_cache
                sent = (await call.says()).request_body.response.body_mutation.streamed_response
                assert (json.loads(sent.body)["model"], sent.end_of_stream) == (MODEL, True)
                call.gone()


@on_loop
async def test_an_answer_is_looked_at_and_passed_on() -> None:
    async with (
        fakes() as [fake],
        picking(fleet_of(pool_of("one", fake.url))) as picker,
        proxy(picker.port) as envoy,
    ):
        records: list[RequestRecord] = []
        picker.gateway.listeners.append(records.append)
        call = envoy.call()
        await call.head(x_request_id="mine")
        await call.body(asked(), ends=False)
        # Trailers end a request that its body does not.
        await call.trailers()
        kinds = [(await call.says()) for _ in range(3)]
        assert kinds[0].HasField("request_headers")
        assert not kinds[1].request_body.response.body_mutation.streamed_response.end_of_stream
        assert kinds[2].HasField("request_trailers")
        await call.answer_head(200, x_engine="fake", set_cookie="engine")
        await call.answer_body(ANSWER.encode(), ends=False)
        await call.trailers("response_trailers")
        head = await call.says()
        mutation = head.response_headers.response.header_mutation
        given = changed(mutation)
        assert (given["x-crosstie-pool"], given["x-request-id"]) == ("one", "mine")
        assert "x-engine" not in given
        assert "set-cookie" in mutation.remove_headers
        body = (await call.says()).response_body.response.body_mutation.streamed_response
        assert (body.body, body.end_of_stream) == (ANSWER.encode(), False)
        assert (await call.says()).HasField("response_trailers")
        await call.done()
        assert await call.says() is None
        assert await call.status() == grpc.StatusCode.OK
        [one] = records
        assert (one.how, one.input_tokens, one.output_tokens, one.counted) == ("served", 7, 5, True)


@on_loop
async def test_who_served_is_believed_and_who_did_not_is_blamed() -> None:
    async with fakes(3) as fleet_fakes:
        pools = [pool_of(f"p{at}", one.url, usd_per_gpu_hour=1.0 + at) for at, one in enumerate(fleet_fakes)]
        async with picking(fleet_of(*pools)) as picker, proxy(picker.port) as envoy:
            records: list[RequestRecord] = []
            picker.gateway.listeners.append(records.append)
            call = envoy.call()
            await call.head()
            await call.body(asked())
            for _ in range(2):
                await call.says()
            last = fleet_fakes[2]
            await call.answer_head(200, served=f"127.0.0.1:{last.port}")
            backends = picker.gateway.backends
            await until(lambda: backends[last.url].replica.in_flight == 1)
            assert [backends[one.url].replica.in_flight for one in fleet_fakes] == [0, 0, 1]
            await call.answer_body(ANSWER.encode())
            assert changed((await call.says()).response_headers.response.header_mutation)["x-crosstie-pool"] == "p2"
            await until(lambda: records)
            assert (records[0].pool, records[0].attempts) == ("p2", 3)
            assert [backends[one.url].breaker._in_a_row for one in fleet_fakes] == [1, 1, 0]
            # Nothing is learnt of how fast it was: nobody knows when it was asked.
            replica, now = backends[last.url].replica, picker.gateway.now()
            assert (replica.ttft.factor(now), replica.tpot.factor(now)) == (1.0, 1.0)
            call.gone()


@on_loop
async def test_an_answer_corrects_predictions_and_tells_who_holds_a_prompt() -> None:
    """As in the gateway: what was seen of the answer is what was predicted the next time."""
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("p", fake.url, accelerator="mi300x", precision="fp8", stack="vllm"))
        async with picking(fleet) as picker, proxy(picker.port) as envoy:
            gateway = picker.gateway
            prompt = asked(stream=True, messages=[{"role": "user", "content": "as before " * 400}])
            ask = gateway.read(Request("POST", "/v1/chat/completions", "", {}, prompt))[1]
            [replica] = gateway.live.replicas()
            assert (replica.prefixes.match(ask.prefix), replica.ttft.factor(gateway.now())) == (0, 1.0)
            for _ in range(6):
                call = envoy.call()
                await call.head()
                await call.body(prompt)
                for _ in range(2):
                    await call.says()
                # Later than any engine of that kind would be.
                await asyncio.sleep(0.2)
                await call.answer_head(200, content_type="text/event-stream")
                await call.answer_body(EVENT, ends=False)
                await call.answer_body(LAST)
                await call.done()
                while await call.says() is not None:
                    pass
                assert await call.status() == grpc.StatusCode.OK
            assert replica.prefixes.match(ask.prefix) == len(ask.prefix) > 0
            assert replica.ttft.factor(gateway.now()) > 1.5


@on_loop
async def test_an_objective_is_the_priority_that_it_was_given() -> None:
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("one", fake.url, max_in_flight=1))
        settings = PickSettings(objectives={"critical": 10, "batch": -1, "usual": 0})
        async with picking(fleet, settings=settings) as picker, proxy(picker.port) as envoy:
            first = envoy.call()
            await first.head()
            await first.body(asked())
            assert (await first.says()).HasField("request_headers")
            waiting = picker.gateway.waiting
            calls = {}
            for name, named, own in (
                ("batch", "batch", ""), ("usual", "usual", ""), ("unknown", "nobody", ""), ("own", "critical", "low"),
            ):  # fmt: skip
                calls[name] = envoy.call()
                if own:
                    await calls[name].head(x_gateway_inference_objective=named, x_crosstie_priority=own)
                else:
                    await calls[name].head(x_gateway_inference_objective=named)
                await calls[name].body(asked())
                await until(lambda: len(waiting) == len(calls))
            calls["critical"] = envoy.call()
            await calls["critical"].head(x_llm_d_inference_objective="critical")
            await calls["critical"].body(asked())
            await until(lambda: len(waiting) == len(calls))
            first.gone()
            # One after the other gets the only place.
            for left, name in zip((4, 3, 2, 1, 0), ("critical", "usual", "unknown", "batch", "own"), strict=True):
                assert (await calls[name].says()).HasField("request_headers"), name
                assert len(waiting) == left
                calls[name].gone()


@on_loop
async def test_a_subset_is_kept_and_without_anybody_left_it_is_503() -> None:
    async with fakes(2) as [cheap, dear]:
        fleet = fleet_of(pool_of("cheap", cheap.url), pool_of("dear", dear.url, usd_per_gpu_hour=9.0))
        async with picking(fleet) as picker, proxy(picker.port) as envoy:
            for subset, expected in (([f"127.0.0.1:{dear.port}"], dear.port), ([], None), (["10.1.1.1:80"], None)):
                call = envoy.call()
                await call.head(subset=subset)
                await call.body(asked())
                message = await call.says()
                if expected is None:
                    assert message.immediate_response.status.code == 503
                else:
                    given = changed(message.request_headers.response.header_mutation)
                    assert given[DESTINATION] == f"127.0.0.1:{expected}"
                call.gone()


@on_loop
async def test_bodies_that_are_too_long_or_no_json_are_refused() -> None:
    async with fakes() as [fake]:
        serving = msgspec.structs.replace(CALM, max_body_mib=0.001)
        async with picking(fleet_of(pool_of("one", fake.url), serving=serving)) as picker, proxy(picker.port) as envoy:
            for body, status in ((b"x" * 2000, 413), (b"no json", 400), (b"{}", 400)):
                call = envoy.call()
                await call.head()
                await call.body(body)
                said = (await call.says()).immediate_response
                assert said.status.code == status
                assert "error" in json.loads(said.body)
                call.gone()
            assert picker.server.arriving == 0


@on_loop
async def test_other_modes_of_bodies_are_refused_with_what_to_set() -> None:
    async with (
        fakes() as [fake],
        picking(fleet_of(pool_of("one", fake.url))) as picker,
        proxy(picker.port) as envoy,
    ):
        for modes in ((2, 4), (4, 0)):
            call = envoy.call()
            await call.head(modes=modes)
            said = (await call.says()).immediate_response
            assert said.status.code == 500
            assert "FULL_DUPLEX_STREAMED" in said.body.decode()
            call.gone()


@on_loop
async def test_who_goes_while_waiting_leaves_nothing_behind() -> None:
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("one", fake.url, max_in_flight=1))
        async with picking(fleet) as picker, proxy(picker.port) as envoy:
            first, second, third = envoy.call(), envoy.call(), envoy.call()
            await first.head()
            await first.body(asked())
            assert (await first.says()).HasField("request_headers")
            for call in (second, third):
                await call.head()
                await call.body(asked())
            await until(lambda: len(picker.gateway.waiting) == 2)
            second.gone()
            await until(lambda: len(picker.gateway.waiting) == 1)
            # Whoever is left gets the place, though nobody has asked on its stream.
            first.gone()
            assert (await third.says()).HasField("request_headers")
            third.gone()


@on_loop
async def test_an_answer_that_envoy_gives_itself_passes_as_it_is() -> None:
    """As when it has waited for too long, and nothing was picked yet."""
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("one", fake.url, max_in_flight=1))
        async with picking(fleet) as picker, proxy(picker.port) as envoy:
            first, late = envoy.call(), envoy.call()
            await first.head()
            await first.body(asked())
            assert (await first.says()).HasField("request_headers")
            await late.head()
            await late.body(asked())
            await until(lambda: len(picker.gateway.waiting) == 1)
            await late.answer_head(504)
            await late.answer_body(b"stream timeout")
            assert not (await late.says()).response_headers.response.header_mutation.set_headers
            assert (await late.says()).response_body.response.body_mutation.streamed_response.body == b"stream timeout"
            assert not len(picker.gateway.waiting)
            first.gone()
            late.gone()


@on_loop
async def test_a_stream_that_breaks_off_is_told_inside_it() -> None:
    async with (
        fakes() as [fake],
        picking(fleet_of(pool_of("one", fake.url))) as picker,
        proxy(picker.port) as envoy,
    ):
        call = envoy.call()
        await call.head()
        await call.body(asked(stream=True))
        for _ in range(2):
            await call.says()
        await call.answer_head(200, content_type="text/event-stream")
        event = b'data: {"choices":[{"index":0,"delta":{"content":"w "},"finish_reason":null}]}\n\n'
        await call.answer_body(event, ends=False)
        assert (await call.says()).HasField("response_headers")
        assert (await call.says()).response_body.response.body_mutation.streamed_response.body == EVENT
        # The engine ends as if it had finished.
        await call.answer_body(b"")
        end = (await call.says()).response_body.response.body_mutation.streamed_response
        assert b"upstream_cut" in end.body
        assert end.end_of_stream
        call.gone()


# Health


@on_loop
async def test_health_is_told_by_the_standards_names() -> None:
    async with (
        fakes() as [fake],
        picking(fleet_of(pool_of("one", fake.url))) as picker,
        proxy(picker.port) as envoy,
    ):
        names = ("", "readiness", EXT_PROC)
        assert [await envoy.health(name) for name in ("liveness", *names)] == [1, 1, 1, 1]
        fake.healthy = False
        while await envoy.health("readiness") != 2:
            await asyncio.sleep(0.01)
        assert [await envoy.health(name) for name in ("liveness", *names)] == [1, 2, 2, 2]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await envoy.health("nobody")
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND


@on_loop
async def test_it_leaves_without_losing_a_request() -> None:
    async with (
        fakes() as [fake],
        picking(fleet_of(pool_of("one", fake.url))) as picker,
        proxy(picker.port) as envoy,
    ):
        call = envoy.call()
        await call.head()
        await call.body(asked())
        for _ in range(2):
            await call.says()
        stopping = asyncio.ensure_future(picker.stop())
        await until(lambda: picker.gateway.draining)
        await call.answer_head(200)
        await call.answer_body(ANSWER.encode())
        assert (await call.says()).HasField("response_headers")
        assert (await call.says()).HasField("response_body")
        await call.done()
        assert await stopping is True


# Keys and TLS


@in_folder
async def test_keys_are_asked_for_before_any_body_and_go_no_further(tmp_path: Path) -> None:
    async with fakes() as [fake]:
        place = str(tmp_path / "store.db")
        store = open_store(place, create=True)
        public_id, secret = new_public_id(), new_secret()
        store.add_key(Key(name="alice", public_id=public_id, digest=digest(secret), created_at=1.0))
        fleet = fleet_of(pool_of("one", fake.url), state=SharedState(keys=True, store=place))
        ledger = Ledger()
        async with picking(fleet, components=[ledger]) as picker, proxy(picker.port) as envoy:
            for key, code in (("", "missing_api_key"), ("Bearer ct-no-no", "invalid_api_key")):
                call = envoy.call()
                await call.head(authorization=key)
                said = (await call.says()).immediate_response
                assert (said.status.code, json.loads(said.body)["error"]["code"]) == (401, code)
                call.gone()
            call = envoy.call()
            await call.head(authorization=f"Bearer {shown(public_id, secret)}")
            await call.body(asked())
            head = await call.says()
            assert "authorization" in head.request_headers.response.header_mutation.remove_headers
            await call.answer_head(200)
            await call.answer_body(ANSWER.encode())
            await call.done()
            while await call.says() is not None:
                pass
            await until(lambda: not picker.gateway.exchanges)
            # What was seen of the answer is its key's usage.
            await ledger.stop()
            used = [(one.requests, one.input_tokens, one.output_tokens) for one in store.used(("key",))]
            assert (1, 7, 5) in used
        store.close()


def _pair(folder: Path, authority: trustme.CA) -> tuple[Path, Path]:
    pair = authority.issue_cert("localhost", "127.0.0.1")
    cert, key = folder / "cert.pem", folder / "key.pem"
    cert.write_bytes(b"".join(one.bytes() for one in pair.cert_chain_pems))
    key.write_bytes(pair.private_key_pem.bytes())
    return cert, key


@in_folder
async def test_tls_with_certificates_that_are_read_again_and_asked_for(tmp_path: Path) -> None:
    first, second, other = trustme.CA(), trustme.CA(), trustme.CA()
    cert, key = _pair(tmp_path, first)
    clients = tmp_path / "clients.pem"
    clients.write_bytes(first.cert_pem.bytes())
    own = first.issue_cert("envoy")
    shown_by = {
        "private_key": own.private_key_pem.bytes(),
        "certificate_chain": b"".join(one.bytes() for one in own.cert_chain_pems),
    }

    def trusting(authority: trustme.CA, **pair: bytes) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(root_certificates=authority.cert_pem.bytes(), **pair)

    async with fakes() as [fake]:
        edge = Edge("127.0.0.1", 0, grpc=True, tls_cert=cert, tls_key=key, tls_client_ca=clients)
        async with picking(fleet_of(pool_of("one", fake.url)), components=[edge]) as picker:
            async with proxy(picker.port, trusting(first, **shown_by)) as envoy:
                assert await envoy.health("liveness") == 1
            for credentials in (trusting(first), trusting(other, **shown_by)):
                async with proxy(picker.port, credentials) as stranger:
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await stranger.health("liveness")
                    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
            _pair(tmp_path, second)
            picker.reload()
            async with proxy(picker.port, trusting(second, **shown_by)) as envoy:
                assert await envoy.health("liveness") == 1
            await edge.stop()


# Bad input


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://vllm-0.default.svc:8000/v1", "write it as dns[+]http://vllm-0.default.svc:8000/v1"),
        ("unix:/run/engine.sock", "a proxy needs an address"),
    ],
)
def test_backends_that_a_proxy_cannot_be_told_of_are_refused(url: str, why: str) -> None:
    with pytest.raises(BadInput, match=f"pool one: .*{why}"):
        check_endpoints(fleet_of(pool_of("one", url)))


def test_endpoints_are_addresses_and_ports() -> None:
    for url, expected in (
        ("http://10.0.0.1:8000/v1", "10.0.0.1:8000"),
        ("http://[fd00::1]:8000/v1", "[fd00::1]:8000"),
        ("http://localhost:8000", "127.0.0.1:8000"),
        ("dns+http://vllm:8000/v1#10.0.0.7", "10.0.0.7:8000"),
    ):
        check_endpoints(fleet_of(pool_of("one", url)))
        assert endpoint_of(Address(url)) == expected


def test_pods_that_are_yet_to_be_found_are_no_names() -> None:
    check_endpoints(fleet_of(pool_of("one", "kube://default/services/vllm")))
    endpoint_of(Address("kube://default/services/vllm#one"))


@on_loop
async def test_a_port_that_is_taken_is_named() -> None:
    async with fakes() as [fake]:
        fleet = fleet_of(pool_of("one", fake.url))
        with pytest.raises(BadInput, match=f"cannot listen on 127.0.0.1:{fake.port}"):
            async with picking(fleet, port=fake.port):
                pass


@on_loop
async def test_a_fleet_that_is_read_again_is_picked_from() -> None:
    async with (
        fakes(2) as [one, two],
        picking(fleet_of(pool_of("one", one.url))) as picker,
        proxy(picker.port) as envoy,
    ):
        with pytest.raises(BadInput, match="is a name"):
            picker.load(fleet_of(pool_of("one", "http://name:80/v1")))
        picker.load(fleet_of(pool_of("two", two.url)))
        await picker.gateway.probe_all()
        call = envoy.call()
        await call.head()
        await call.body(asked())
        given = changed((await call.says()).request_headers.response.header_mutation)
        assert given[DESTINATION] == f"127.0.0.1:{two.port}"
        call.gone()


@on_loop
async def test_what_is_held_for_a_first_replica_is_told_nothing_until_it_is_picked() -> None:
    port, serving = free_port(), msgspec.structs.replace(CALM, hold_s=100.0, start_s=60.0, health_every_s=0.05)
    fleet = fleet_of(pool_of("p", f"http://127.0.0.1:{port}/v1"), serving=serving)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cold_start, "_COMMENT_EVERY_S", 0.0)
        async with picking(fleet) as picker, proxy(picker.port) as envoy:
            call = envoy.call()
            await call.head()
            await call.body(asked(stream=True))
            await until(lambda: picker.gateway.exchanges)
            # As long as comments to clients take.
            await asyncio.sleep(0.3)
            fake = Fake("late")
            await fake.start(port)
            head = await call.says()
            assert changed(head.request_headers.response.header_mutation)[DESTINATION] == f"127.0.0.1:{port}"
            call.gone()
            fake.crash()
