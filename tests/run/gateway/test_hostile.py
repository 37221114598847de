"""Clients and backends that mean harm, or might as well: one's behaviour is never another's trouble."""

import asyncio
import gc
import json
import socket
import time
from typing import Any

import msgspec
import pytest
from tests.run.gateway.fakes import CALM, HASTY, MODEL, Fake, fakes, fleet_of, pool_of, running, until
from tests.run.gateway.test_faults import STREAM
from tests.wire.test_server import on_loop

from crosstie.core.errors import BadInput
from crosstie.wire.fetch import fetch
from crosstie.wire.loops import run_on_loop
from crosstie.wire.sse import payloads
from crosstie_gateway.gateway.body import read_body
from crosstie_gateway.gateway.exchange import Exchange
from crosstie_gateway.wire.server import Reply


@pytest.fixture(autouse=True)
def _no_traceback(caplog: pytest.LogCaptureFixture) -> Any:
    yield
    assert not caplog.records


class Raw(Fake):
    """A backend that answers with these bytes, whatever they are, and then closes if told so."""

    answer, close = b"", False

    def _raw(self, body: dict[str, Any], reply: Reply) -> None:
        reply.connection.transport.write(self.answer)
        if self.close:
            reply.connection.transport.close()
        else:
            reply.end_message()


async def raw_one(answer: bytes, *, close: bool = False) -> Raw:
    made = Raw("raw")
    made.mode, made.answer, made.close = "raw", answer, close
    await made.start()
    return made


@pytest.mark.parametrize("hint", ["ttft-ms", "tpot-ms"])
def test_a_target_of_nothing_is_refused_and_harms_nobody(hint: str) -> None:
    async def test() -> None:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
            first = asyncio.create_task(at.ask(stream=True, headers={f"x-crosstie-{hint}": "1e-322"}))
            assert (await at.ask(headers={"x-crosstie-ttft-ms": "5000"})).status == 200
            assert (await first).status == 400

    run_on_loop(test())


@pytest.mark.parametrize(
    "body",
    [
        b'{"model":"%b","stream":true,"messages":[],"x":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"model":"%b","stream":true,"messages":[],"\xff":1}',
        b'{"model":"%b","stream":true,"stream_options":{"include_usage":false,"x":"\xff"}}',
        b'{"model":"%b","max_tokens":' + b"9" * 400 + b"}",
    ],
)
def test_a_body_that_cannot_be_is_a_clear_error(body: bytes) -> None:
    async def test() -> None:
        async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url, served_as="other"))) as at:
            reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
            said = body % MODEL.encode()
            writer.write(STREAM.partition(b"content-length")[0] + b"content-length: %d\r\n\r\n%b" % (len(said), said))
            assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
            assert not at.gateway.exchanges
            assert not fake.hit
            writer.close()

    run_on_loop(test())


@on_loop
async def test_an_engine_that_reports_an_endless_load_is_still_asked() -> None:
    async with fakes() as [fake]:
        fake.metrics = b"vllm:num_requests_running 1e999\nvllm:num_requests_waiting 1e999\nsglang:token_usage 1e999\n"
        pool = pool_of("one", fake.url, accelerator="h100-sxm", precision="fp8", stack="vllm")
        async with running(fleet_of(pool)) as at:
            # The second time it is asked, the gateway has read what it said the first time.
            await until(lambda: fake.scrapes >= 2)
            assert (await at.ask(stream=True)).status == 200


@on_loop
async def test_usage_beyond_reckoning_is_passed_on_and_counted_as_nothing() -> None:
    content = b'{"choices":[],"usage":{"prompt_tokens":%b,"completion_tokens":5}}' % (b"9" * 400)
    raw = await raw_one(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(content), content))
    async with running(fleet_of(pool_of("one", raw.url))) as at:
        assert (await at.ask()).body == content
        assert not at.gateway.exchanges
    raw.crash()


@on_loop
async def test_a_client_s_error_inside_a_stream_is_passed_on_and_counts_against_nobody() -> None:
    event = b'data: {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}\n\ndata: [DONE]\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
    raw = await raw_one(head % len(event) + event)
    async with fakes() as [other]:
        fleet = fleet_of(pool_of("raw", raw.url, usd_per_gpu_hour=0.1), pool_of("other", other.url))
        async with running(fleet) as at:
            for _ in range(7):
                assert (await at.ask(stream=True)).body == event
            assert not other.hit
            assert await at.metric("crosstie_backend_faults_total") == 0
            assert await at.metric("crosstie_requests_total", outcome="client error", status="400") == 7
    raw.crash()


@on_loop
async def test_half_of_an_engine_s_refusal_is_not_passed_on_as_all_of_it() -> None:
    raw = await raw_one(b'HTTP/1.1 400 Bad Request\r\ncontent-length: 100\r\n\r\n{"error', close=True)
    async with running(fleet_of(pool_of("one", raw.url))) as at:
        answer = await at.ask()
        assert answer.status == 502
        assert json.loads(answer.body)["error"]["code"] == "upstream_failed"
    raw.crash()


@on_loop
async def test_a_model_that_writes_about_errors_is_not_taken_for_one_that_has_them() -> None:
    said = [
        {"choices": [{"delta": {"content": "the line event: error or data: [DONE]"}, "finish_reason": None}]},
        {"choices": [{"delta": {"content": "event: error"}, "finish_reason": "stop"}]},
    ]
    events = b"".join(b"data: " + json.dumps(one).encode() + b"\n\n" for one in said)
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: %d\r\n\r\n"
    raw = await raw_one(head % len(events) + events)
    async with running(fleet_of(pool_of("one", raw.url))) as at:
        assert (await at.ask(stream=True)).body == events
        assert await at.metric("crosstie_backend_faults_total") == 0
        # Without its finish it is a cut, whatever the text says.
        cut = events[: events.index(b"\n\n") + 2]
        raw.answer = head % len(cut) + cut
        assert b"upstream_cut" in payloads((await at.ask(stream=True)).body)[-1]
    raw.crash()


@on_loop
async def test_two_answers_to_one_request_reach_nobody_twice() -> None:
    mine = b'HTTP/1.1 200 OK\r\ncontent-length: 18\r\n\r\n{"choices":"mine"}'
    raw = await raw_one(mine + mine.replace(b"mine", b"evil"))
    async with running(fleet_of(pool_of("one", raw.url))) as at:
        for _ in range(4):
            assert (await at.ask()).body == b'{"choices":"mine"}'
    raw.crash()


@on_loop
async def test_a_backend_that_left_the_fleet_keeps_no_connection() -> None:
    async with fakes(2) as [gone, stays], running(fleet_of(pool_of("a", gone.url), pool_of("b", stays.url))) as at:
        gone.pause_s = 0.05
        asked = asyncio.create_task(at.ask(stream=True, headers={"x-crosstie-pool": "a"}))
        await until(lambda: gone.hit)
        origin = at.gateway.backends[gone.url].origin
        at.gateway.load(fleet_of(pool_of("b", stays.url)))
        assert payloads((await asked).body)[-1] == b"[DONE]"
        assert origin.connections == 0
        await until(lambda: not gone.server.connections)


@on_loop
async def test_a_bad_reload_changes_nothing() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("a", fake.url))) as at:
        with pytest.raises(Exception, match="no name of a host"):
            at.gateway.load(fleet_of(pool_of("b", "http://ä..b/v1")))
        assert (await at.ask()).header(b"x-crosstie-pool") == b"a"


async def with_little_room(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client for whom the kernel holds little; else it may hold megabytes, and hide whether the client reads."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**18)
    raw.connect(("127.0.0.1", port))
    return await asyncio.open_connection(sock=raw, limit=65536)


@on_loop
async def test_a_slow_reader_s_connection_upstream_serves_the_next_client() -> None:
    """The last piece of a stream finds its client slow, and the connection is kept."""
    async with fakes() as [fake]:
        # No other request shall take the connection that is kept.
        serving = msgspec.structs.replace(CALM, health_every_s=600.0, metrics_every_s=600.0)
        async with running(fleet_of(pool_of("one", fake.url), serving=serving)) as at:
            finish = b'data: {"choices":[{"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
            big = b'data: "' + b"x" * 8_000_000 + b'"\n\n'

            def huge(body: dict[str, Any], reply: Reply) -> None:
                reply.start(200, b"content-type: text/event-stream\r\n", None)
                reply.write(big + finish)
                reply.end()

            fake._huge = huge  # type: ignore[attr-defined]
            fake.mode = "huge"
            reader, writer = await with_little_room(at.port)
            writer.write(STREAM)

            def finds_it_slow() -> bool:
                # On a busy machine the last piece is the second, and with it the exchange ends.
                open_ones = at.gateway.exchanges
                return bool(fake.hit) and (not open_ones or any(exchange.reply.slow for exchange in open_ones))

            await until(finds_it_slow)
            while at.gateway.exchanges:
                await reader.read(65536)
            fake.mode = "ok"
            answer = await at.ask(stream=True)
            assert payloads(answer.body)[-1] == b"[DONE]"
            assert await at.metric("crosstie_backend_faults_total") == 0
            writer.transport.abort()


@pytest.mark.slow
@on_loop
async def test_a_client_that_reads_slowly_but_reads_is_not_cut_off() -> None:
    async with fakes() as [fake]:

        def huge(body: dict[str, Any], reply: Reply) -> None:
            reply.start(200, b"content-type: text/event-stream\r\n", None)
            reply.write(b'data: "' + b"x" * 40_000_000 + b'"\n\ndata: "y"\n\n')

        fake._huge = huge  # type: ignore[attr-defined]
        fake.mode = "huge"
        serving = msgspec.structs.replace(CALM, idle_timeout_s=2.0)
        async with running(fleet_of(pool_of("one", fake.url), serving=serving)) as at:
            reader, writer = await with_little_room(at.port)
            writer.write(STREAM)
            # Longer than who reads nothing is borne with.
            end = at.gateway.loop.time() + 3.0
            while at.gateway.loop.time() < end:
                await asyncio.sleep(0.02)
                await reader.read(2**18)
            still = len(at.gateway.exchanges)
            writer.transport.abort()
            assert still


@on_loop
async def test_a_halt_of_the_gateway_is_not_taken_for_its_backends_silence() -> None:
    async with fakes() as [fake]:
        fake.pause_s, fake.tokens = 0.02, 40
        async with running(fleet_of(pool_of("one", fake.url), serving=HASTY)) as at:
            asked = asyncio.create_task(at.ask(stream=True))
            await until(lambda: any(exchange.reply.started for exchange in at.gateway.exchanges))
            # Longer than the patience with backends.
            time.sleep(HASTY.idle_timeout_s + 0.3)
            assert payloads((await asked).body)[-1] == b"[DONE]"
            assert await at.metric("crosstie_backend_faults_total") == 0


@on_loop
async def test_who_has_waited_is_forgotten_without_a_collector() -> None:
    async with fakes() as [fake]:
        fake.pause_s = 0.02
        async with running(fleet_of(pool_of("one", fake.url, max_in_flight=1))) as at:
            gc.collect()
            gc.disable()
            try:
                answers = await asyncio.gather(*(at.ask(stream=True) for _ in range(6)))
                assert all(answer.status in (200, 429) for answer in answers)
                await until(lambda: not at.gateway.exchanges)
                assert not [one for one in gc.get_objects() if type(one) is Exchange]
            finally:
                gc.enable()


SECRET, PROMPT, OTHERS = "sk-upstream-4b1d", "the patient's name is", "sk-client-77aa"


@on_loop
async def test_neither_keys_nor_prompts_are_told_to_anyone() -> None:
    """Whatever goes wrong upstream, and whoever asks afterwards."""
    faults = [
        b"garbage",
        b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 401 No\r\ncontent-length: 0\r\n\r\n",
        b"",
    ]
    raw, seen = await raw_one(b""), list[str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UPSTREAM_KEY", SECRET + "\n")
        async with running(fleet_of(pool_of("one", raw.url, api_key_env="UPSTREAM_KEY"), serving=HASTY)) as at:
            said = [{"role": "user", "content": PROMPT}]
            for fault in (*faults, None):
                raw.answer, raw.close = fault or b"", fault == b""
                raw.mode = "raw" if fault is not None else "hang"
                for stream in (True, False):
                    answer = await at.ask(stream=stream, messages=said, headers={"authorization": f"Bearer {OTHERS}"})
                    assert answer.status >= 400
                    seen.append(str(answer))
            raw.crash()
            seen.append(str(await at.ask(messages=said)))
            for path in ("/metrics", "/ready", "/v1/models", "/health"):
                seen.append(str(await at.get(path)))
            seen.append(str(await at.ask("/crosstie/explain", messages=said)))
            seen += at.notices
        sent = [request.headers.get(b"authorization") for request, _ in raw.hit]
    assert sent
    assert set(sent) == {b"Bearer " + SECRET.encode()}, "the pool's own key, never its client's"
    assert len(at.notices) > 0
    for text in seen:
        assert not any(word in text for word in (SECRET, PROMPT, OTHERS)), text


@on_loop
async def test_a_body_that_is_wrong_in_two_ways_is_a_clear_error() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        for body in (b'{"model":"m","stream":"yes","x":}', b'{"stream":1,"messages":[' + b"[" * 5000):
            answer = await fetch(at.origin, "POST", "/v1/chat/completions", body=body)
            assert answer.status == 400


@on_loop
async def test_cookies_and_what_concerns_the_gateway_s_own_key_go_no_further() -> None:
    lines = b"set-cookie: a=1\r\nwww-authenticate: Bearer\r\nauthorization: x\r\nx-kept: yes\r\n"
    lines += b"proxy-authenticate: Basic\r\nalt-svc: h3=a.example\r\n"
    raw = await raw_one(b"HTTP/1.1 200 OK\r\n" + lines + b'content-length: 14\r\n\r\n{"choices":[]}')
    async with running(fleet_of(pool_of("one", raw.url))) as at:
        answer = await at.ask(headers={"cookie": "b=2", "proxy-authorization": "Basic x", "x-mine": "yes"})
        assert answer.header(b"x-kept") == b"yes"
        kept_back = {b"set-cookie", b"www-authenticate", b"authorization", b"proxy-authenticate", b"alt-svc"}
        assert not kept_back & {name for name, _ in answer.headers}
        (request, _) = raw.hit[0]
        assert request.headers[b"x-mine"] == b"yes"
        assert not {b"cookie", b"proxy-authorization"} & request.headers.keys()
    raw.crash()


@on_loop
async def test_a_cache_s_salt_is_the_client_s_to_give() -> None:
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url))) as at:
        await at.ask(cache_salt="secret")
        await at.ask()
        assert [body.get("cache_salt") for _, body in fake.hit] == ["secret", None]


@on_loop
async def test_what_the_wire_refuses_is_counted_and_connections_are_limited() -> None:
    serving = msgspec.structs.replace(CALM, max_connections=3)
    async with fakes() as [fake], running(fleet_of(pool_of("one", fake.url), serving=serving)) as at:
        for data in (b"GET / HTTP/3.0\r\n\r\n", b"\0"):
            reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
            writer.write(data)
            assert b'"error"' in await reader.read(-1)
            writer.close()
        await until(lambda: not at.process.server.connections)
        four = [await asyncio.open_connection("127.0.0.1", at.port) for _ in range(4)]
        await until(lambda: at.gateway.metrics.refused["connections"] == 1)
        for _, writer in four:
            writer.close()
        await until(lambda: not at.process.server.connections)
        assert await at.metric("crosstie_refused_total", code="http_505") == 1
        assert await at.metric("crosstie_refused_total", code="http_400") == 1
        assert await at.metric("crosstie_refused_total", code="connections") == 1


@on_loop
async def test_a_backend_cannot_send_clients_elsewhere() -> None:
    answer = b"HTTP/1.1 307 Temporary Redirect\r\nlocation: http://elsewhere/v1\r\ncontent-length: 0\r\n\r\n"
    raw = await raw_one(answer)
    async with running(fleet_of(pool_of("one", raw.url))) as at:
        got = await at.ask()
        assert got.status == 502
        assert got.header(b"location") is None
        assert b"elsewhere" in got.body
        assert b"http://" not in got.body
    raw.crash()


@on_loop
async def test_openings_without_end_are_not_kept() -> None:
    opening = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
    raw = await raw_one(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + opening * 3000, close=True)
    async with running(fleet_of(pool_of("one", raw.url))) as at:
        got = await at.ask(stream=True)
        # They reached the client, and then it was told that there was no end.
        assert got.status == 200
        assert got.body.count(opening) == 3000
        assert b"upstream_cut" in got.body
    raw.crash()


@pytest.mark.parametrize(
    "odd", [{"max_tokens": 5.0}, {"max_tokens": "5"}, {"user": 7}, {"stream": "true"}, {"stream": 1}]
)
def test_a_field_of_the_wrong_kind_hides_no_usage(odd: dict[str, Any]) -> None:
    """Engines take such fields for what they mean, so the gateway has to."""

    async def test() -> None:
        async with fakes() as [fake]:
            fake.tokens = 5
            async with running(fleet_of(pool_of("one", fake.url))) as at:
                ended: list[Any] = []
                at.gateway.listeners.append(ended.append)
                got = await at.ask(**{"stream": True, "max_tokens": 5, **odd})
                assert got.status == 200
                _, body = fake.hit[-1]
                assert body["stream_options"]["include_usage"] is True
                assert b'"usage"' not in got.body
                assert [(one.input_tokens, one.output_tokens, one.counted) for one in ended] == [(7, 5, True)]

    run_on_loop(test())


def test_a_prompt_is_measured_beside_a_field_of_the_wrong_kind() -> None:
    odd = read_body(b'{"model":"m","prompt":"' + b"x" * 4000 + b'","max_tokens":"7"}')
    assert (odd.prompt_bytes, odd.most_output) == (4002, 7)
    odd = read_body(b'{"model":"m","messages":[{"content":"' + b"x" * 4000 + b'"}],"max_tokens":7.0}')
    assert (odd.prompt_bytes, odd.most_output) == (4016, 7)
    # What neither is nor means a number, a yes or options is refused, by its name.
    for wrong in (b'"stream_options":[1]', b'"max_tokens":"many"', b'"stream":"no"'):
        with pytest.raises(BadInput, match=wrong[1:].partition(b'"')[0].decode()):
            read_body(b'{"model":"m",%b}' % wrong)
