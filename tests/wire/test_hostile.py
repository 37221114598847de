"""What a client or a server does that nobody should, and what happens by bad luck: each made to happen."""

import asyncio
import socket
import tracemalloc
from typing import Any

import pytest
from tests.waiting import LIMIT_S, until
from tests.wire.sockets import origin_of, said, scripted, serving
from tests.wire.test_client import OK, Heard, heard
from tests.wire.test_server import echo, on_loop

from crosstie.core.errors import BadInput
from crosstie.wire.address import Address
from crosstie.wire.fetch import fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.wire.outline import Outline
from crosstie_gateway.wire.parser import RequestParser
from crosstie_gateway.wire.request import BadRequest, Request, RequestLimits
from crosstie_gateway.wire.server import Reply

GET = b"GET /%b HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture(autouse=True)
def _no_traceback(caplog: pytest.LogCaptureFixture) -> Any:
    """Whatever the other side does, no exception reaches the loop."""
    yield
    assert not caplog.records


def test_a_connection_that_was_paused_when_its_answer_ended_is_heard_again() -> None:
    async def test() -> None:
        async with serving(echo) as (_, port), origin_of(port) as origin:
            connection = await origin.open(LIMIT_S)

            class Slow(Heard):
                def on_body(self, data: bytes) -> None:
                    super().on_body(data)
                    connection.pause()

            listener = Slow()
            connection.send(GET % b"one", listener)
            async with asyncio.timeout(LIMIT_S):
                await listener.over.wait()
            answer = await fetch(origin, "GET", "/two", timeout_s=LIMIT_S)
            assert answer.body.startswith(b"GET /two")
            assert connection.uses == 2

    run_on_loop(test())


@on_loop
async def test_a_second_answer_to_one_request_is_nobody_s() -> None:
    for more in (OK.replace(b"hi", b"no"), b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", b"\0\0"):
        async with scripted(OK + more, then_close=False) as (port, _):
            assert await heard(port) == [200, b"hi", "ended"]
        async with scripted(OK + more, OK, then_close=False) as (port, _), origin_of(port) as origin:
            assert (await fetch(origin, "GET", "/")).body == b"hi"
            assert origin.take() is None


@on_loop
async def test_another_protocol_is_no_answer() -> None:
    switching = b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nxyz"
    async with scripted(switching, then_close=False) as (port, _):
        assert await heard(port) == ["lost"]


@on_loop
async def test_a_connection_whose_request_has_not_left_is_not_used_again() -> None:
    async with scripted(OK, then_close=False) as (port, _), origin_of(port) as origin:
        connection = await origin.open(LIMIT_S)
        listener = Heard()
        connection.send(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999\r\n\r\n" + b"x" * 99999999, listener)
        async with asyncio.timeout(LIMIT_S):
            await listener.over.wait()
        assert listener.told == [200, b"hi", "ended"]
        assert origin.connections == 0


@on_loop
async def test_an_origin_that_is_given_up_keeps_nothing() -> None:
    async with serving(echo) as (_, port), origin_of(port) as origin:
        await fetch(origin, "GET", "/")
        busy = await origin.open(LIMIT_S)
        assert origin.connections == 2
        origin.retire()
        assert origin.connections == 1
        listener = Heard()
        busy.send(GET % b"", listener)
        await listener.over.wait()
        assert listener.told[-1] == "ended"
        assert origin.connections == 0


def test_names_that_no_host_has() -> None:
    with pytest.raises(BadInput):
        Address("http://ä..b/v1")
    assert Address("http://bücher.example:8000/v1").authority == b"xn--bcher-kva.example:8000"
    assert Address("http://[::1]:8000").authority == b"[::1]:8000"

    async def test() -> None:
        async with origin_of(1) as origin:
            origin.address = Address(f"http://{'a' * 70}.example/v1")
            with pytest.raises(OSError, match="no host"):
                await fetch(origin, "GET", "/")

    run_on_loop(test())


@on_loop
async def test_a_request_that_comes_just_before_the_next_one_s_turn_waits_for_its_own() -> None:
    held: list[tuple[Request, Reply]] = []
    async with serving(lambda request, reply: held.append((request, reply))) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(GET % b"1" + GET % b"2")
        await until(lambda: held)
        [connection] = server.connections
        held[0][1].send(200, b"one")
        assert not connection.idle
        # In the same turn of the loop, as when both sockets were ready at once.
        connection.data_received(GET % b"3")
        for at in (1, 2):
            await until(lambda at=at: len(held) > at)  # type: ignore[misc]
            assert len(held) == at + 1
            held[at][1].send(200, [b"two", b"three"][at - 1])
        got = b""
        while b"three" not in got:
            got += await reader.read(65536)
        assert got.index(b"one") < got.index(b"two") < got.index(b"three")
        assert [request.path for request, _ in held] == ["/1", "/2", "/3"]
        writer.close()


@on_loop
async def test_an_offer_to_upgrade_swallows_nothing_that_follows() -> None:
    offer = b"GET /one HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"
    async with serving(echo) as (_, port):
        for apart in (False, True):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(offer)
            if apart:
                await asyncio.sleep(0.05)
            writer.write(GET % b"two")
            got = b""
            async with asyncio.timeout(LIMIT_S):
                while b"/two" not in got:
                    got += await reader.read(65536)
            assert got.index(b"/one") < got.index(b"/two")
            writer.close()


@on_loop
async def test_what_came_before_garbage_is_answered_and_then_the_garbage() -> None:
    def later(request: Request, reply: Reply) -> None:
        asyncio.get_running_loop().call_later(0.02, echo, request, reply)

    for handler in (echo, later):
        async with serving(handler) as (_, port):
            got = await said(port, GET % b"1" + GET % b"2" + GET % b"3" + b"\0garbage\r\n\r\n")
            assert got.count(b"200 OK") == 3
            assert got.count(b"400 Bad Request") == 1
            assert got.index(b"/1") < got.index(b"/2") < got.index(b"/3") < got.index(b"400 Bad")


@on_loop
async def test_a_drain_answers_what_was_pipelined() -> None:
    def later(request: Request, reply: Reply) -> None:
        asyncio.get_running_loop().call_later(0.05, echo, request, reply)

    async with serving(later) as (server, port):
        asked = asyncio.create_task(said(port, b"".join(GET % (b"%d" % i) for i in range(5))))
        await until(lambda: any(not one.idle for one in server.connections))
        assert await server.drain(LIMIT_S, grace_s=0.0)
        got = await asked
        assert got.count(b"200 OK") == 5
        assert got.count(b"connection: close") == 1


@on_loop
async def test_a_drain_that_is_cut_short_says_so() -> None:
    async with serving(lambda request, reply: None) as (server, port):
        asked = asyncio.create_task(said(port, GET % b""))
        await until(lambda: any(not one.idle for one in server.connections))
        draining = asyncio.create_task(server.drain(LIMIT_S, grace_s=0.0))
        await asyncio.sleep(0.05)
        server.close()
        assert not await draining
        assert await asked == b""


@on_loop
async def test_who_sends_too_much_can_read_why_it_was_refused() -> None:
    async with serving(echo, RequestLimits(body_bytes=1000)) as (_, port):

        def send() -> bytes:
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n" + b"x" * 8000000)
                got = b""
                while piece := raw.recv(65536):
                    got += piece
                return got

        got = await asyncio.to_thread(send)
        assert got.startswith(b"HTTP/1.1 413 ")
        assert b"connection: close" in got


@on_loop
async def test_a_line_without_an_end_is_not_collected_forever() -> None:
    for start, status in ((b"GET / HTTP/1.1\r\nx: ", 431), (b"GET /", 414), (b"GET / HTTP/1.1\r\nx", 431)):
        async with serving(echo) as (_, port):
            got = await said(port, start + b"y" * 500_000)
            assert got.startswith(b"HTTP/1.1 %d " % status)


@on_loop
async def test_a_refusal_after_a_head_has_its_body() -> None:
    async with serving(echo) as (_, port):
        got = await said(port, b"HEAD / HTTP/1.1\r\nhost: x\r\n\r\n\0\r\n\r\n")
        assert got.endswith(b"\r\n\r\nthe first line is not a method, a target and a version")


@pytest.mark.slow
@pytest.mark.parametrize("close", [b"connection: close\r\n", b""])
def test_who_never_reads_its_answer_is_given_up_and_who_reads_slowly_is_not(close: bytes) -> None:
    async def test() -> None:
        async with serving(lambda _, reply: reply.send(200, b"x" * 20_000_000), RequestLimits(idle_s=3.0)) as (
            server,
            port,
        ):
            raw = socket.create_connection(("127.0.0.1", port))
            raw.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n%b\r\n" % close)
            got = 0
            for _ in range(20):
                await asyncio.sleep(0.25)
                assert len(server.connections) == 1
                got += len(await asyncio.to_thread(raw.recv, 500_000))
            assert got < 20_000_000
            await until(lambda: not server.connections)
            raw.close()

    run_on_loop(test())


@pytest.mark.slow
def test_a_body_of_the_smallest_chunks_takes_little_more_room_than_another() -> None:
    parser = RequestParser(RequestLimits())
    parser.feed(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    assert parser.next() is None
    number, times = 1000, 100
    tracemalloc.start()
    try:
        for _ in range(times):
            parser.feed(b"8\r\nabcdefgh\r\n" * number)
            assert parser.next() is None
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parser.held == 8 * number * times
    # Its outline, of which nothing is left out here, is as long.
    assert taken < 2.5 * parser.held
    parser.feed(b"0\r\n\r\n")
    request = parser.next()
    assert request is not None
    assert request.body == b"abcdefgh" * number * times


POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n%b\r\n"


@pytest.mark.parametrize("framing", ["length", "chunks"])
def test_a_body_of_too_many_values_is_refused_before_all_of_it_has_come(framing: str) -> None:
    body = b'{"messages":[' + b"{}," * 400_000

    async def test() -> None:
        async with serving(echo) as (server, port):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            if framing == "length":
                writer.write(POST % (30 * 2**20, b"") + body)
            else:
                head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
                writer.write(head + b"%x\r\n" % len(body) + body)
            async with asyncio.timeout(LIMIT_S):
                answer = await reader.read(65536)
            assert answer.startswith(b"HTTP/1.1 413")
            assert b"strings, objects and lists" in answer
            assert server.arriving == 0
            writer.close()

    run_on_loop(test())


@on_loop
async def test_as_many_bytes_in_a_few_strings_are_taken_and_so_is_a_file() -> None:
    """Not whatever says that it is a form: on other paths it would be read as JSON all the same."""
    text, many = b'{"prompt":"' + b'{},[],\\"' * 150_000 + b'"}', b'{"' * 150_000
    form = b"content-type: multipart/form-data; boundary=x\r\nconnection: close\r\n"
    to_files = POST.replace(b"/", b"/v1/files", 1)
    async with serving(echo) as (server, port):
        server.limits.form_paths = frozenset(("/v1/files",))
        for post, body, status in ((POST, text, b"200"), (to_files, many, b"200"), (POST, many, b"413")):
            answer = await said(port, post % (len(body), form) + body)
            assert answer.startswith(b"HTTP/1.1 " + status)


@on_loop
async def test_who_is_not_let_in_need_not_send_its_body() -> None:
    """And is not told to go on; whoever is let in is asked once."""
    asked: list[str] = []

    def opens(request: Request) -> int:
        asked.append(request.path)
        if request.path == "/no":
            raise BadRequest(401, "", b"who are you?", b"x-why: no key\r\n")
        return 7

    async with serving(echo) as (server, port):
        server.opens = opens
        for more in (b"", b"expect: 100-continue\r\n"):
            answer = await said(port, (POST % (1000, more)).replace(b"/", b"/no", 1) + (b"" if more else b"x"))
            assert answer.startswith(b"HTTP/1.1 401")
            assert b"x-why: no key" in answer
            assert answer.endswith(b"who are you?")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST % (300_000, b"expect: 100-continue\r\n"))
        async with asyncio.timeout(LIMIT_S):
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(b"x" * 100_000)
            await until(lambda: server.arriving_of == {7: 100_000})
            writer.write(b"x" * 200_000)
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        assert server.arriving_of == {}
        writer.close()
        assert asked == ["/no", "/no", "/"]
        # What came at once was let in by its handler.
        assert (await said(port, POST % (1, b"connection: close\r\n") + b"x")).startswith(b"HTTP/1.1 200")
        assert len(asked) == 3


@on_loop
async def test_one_account_s_bodies_leave_room_for_others() -> None:
    limits = RequestLimits(arriving_bytes=10**6, arriving_bytes_of_one=150_000)
    async with serving(echo, limits) as (server, port):
        server.opens = lambda request: int(request.headers[b"x-account"])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(POST % (140_000, b"x-account: 1\r\n") + b"x" * 100_000)
        await until(lambda: server.arriving_of == {1: 100_000})
        second = await said(port, POST % (200_000, b"x-account: 1\r\n") + b"x" * 100_000)
        assert second.startswith(b"HTTP/1.1 503")
        body = b"x" * 140_000
        other = await said(port, POST % (len(body), b"x-account: 2\r\nconnection: close\r\n") + body)
        assert other.startswith(b"HTTP/1.1 200")
        writer.write(b"x" * 40_000)
        async with asyncio.timeout(LIMIT_S):
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


def test_the_chunks_of_one_read_are_looked_at_together() -> None:
    """Each look has its price, and eight bytes may be a chunk: a client who sends such keeps the loop from others."""
    looks = list[int]()

    class Counting(Outline):
        def feed(self, piece: bytes) -> bool:
            looks.append(len(piece))
            return super().feed(piece)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("crosstie_gateway.wire.parser.Outline", Counting)
        parser = RequestParser(RequestLimits())
        parser.feed(b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n1\r\n[\r\n")
        assert parser.next() is None
        parser.feed(b"8\r\n1234567,\r\n" * 1000)
        assert parser.next() is None
        parser.feed(b"2\r\n1]\r\n0\r\n\r\n")
        request = parser.next()
    assert request is not None
    assert request.body == b"[" + b"1234567," * 1000 + b"1]"
    assert looks == [8001, 2]
    assert request.outline is not None
    assert request.outline.plain >= 8000


def test_few_bytes_may_frame_chunks_that_are_hardly_any() -> None:
    parser = RequestParser(RequestLimits())
    parser.feed(b"POST /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 1030)
    with pytest.raises(BadRequest, match="more bytes frame the chunks"):
        parser.next()
