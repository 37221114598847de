"""HTTP/2: streams are served as connections are, and what costs a client little costs the server no more."""

import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import cast

import h2.settings
import pytest
from tests.run.wire.certificates import client_tls, pair
from tests.run.wire.http2_client import Client, connected
from tests.run.wire.sockets import said
from tests.run.wire.test_server import Watcher, echo, on_loop
from tests.waiting import until

from crosstie.run.wire.http2 import STREAMS, Http2Connection
from crosstie.run.wire.loops import run_on_loop
from crosstie.run.wire.request import BadRequest, Request, RequestLimits
from crosstie.run.wire.server import Reply, Server
from crosstie.run.wire.tls import ServerTls

CALM, NO_ERROR = 11, 0


@asynccontextmanager
async def serving(
    handler: Callable[[Request, Reply], None] = echo, limits: RequestLimits | None = None
) -> AsyncIterator[tuple[Server, int]]:
    server = Server(asyncio.get_running_loop(), handler, limits)
    server.http2 = True
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        server.close()
        await until(lambda: not server.connections)
        assert server.arriving == 0
        assert not server.arriving_of


def only(server: Server) -> Http2Connection:
    (connection,) = server.connections
    assert isinstance(connection, Http2Connection)
    return connection


class Kept:
    """A handler that answers when a test does."""

    def __init__(self) -> None:
        self.replies: dict[str, Reply] = {}
        self.watchers: dict[str, Watcher] = {}

    def __call__(self, request: Request, reply: Reply) -> None:
        self.replies[request.path] = reply
        self.watchers[request.path] = reply.watcher = Watcher()


# Requests and answers


@on_loop
async def test_requests_of_both_kinds_are_answered_on_a_port() -> None:
    async with serving() as (_, port), connected(port) as client:
        numbers = [client.ask(f"/{i}?q", b"x" * i, method="POST") for i in range(1, 20)]
        for i, number in enumerate(numbers, start=1):
            assert await client.answered(number) == (b"200", f"POST /{i}?q {i}".encode())
            assert client.heads[number][0][b"content-length"] == b"%d" % len(client.bodies[number])
        assert await client.answered(client.ask("/a", method="HEAD")) == (b"200", b"")
        got = await said(port, b"GET /old HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert got.endswith(b"GET /old? 0")


@on_loop
async def test_where_it_is_not_asked_for_it_is_refused_as_ever() -> None:
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    async with serving() as (server, port):
        server.http2 = False
        assert (await said(port, preface)).startswith(b"HTTP/1.1 505 ")
        server.http2 = True
        # Nor behind a request: what follows that is the next one.
        got = await said(port, b"GET /old HTTP/1.1\r\nhost: x\r\n\r\n" + preface)
        assert got.count(b"HTTP/1.1 200 ") == got.count(b"HTTP/1.1 505 ") == 1


def test_by_tls_both_sides_agree_on_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving() as (server, port):
            server.tls = ServerTls(*pair(tmp_path), None, ("h2", "http/1.1"))
            context = client_tls()
            context.set_alpn_protocols(["h2"])
            async with connected(port, context) as client:
                assert client.writer.get_extra_info("ssl_object").selected_alpn_protocol() == "h2"
                assert await client.answered(client.ask("/a")) == (b"200", b"GET /a? 0")
                big = client.ask("/b", b"x" * 16_000, method="POST")
                assert await client.answered(big) == (b"200", b"POST /b? 16000")
            await until(lambda: not server.connections)
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client_tls())
            writer.write(b"GET /old HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert (await reader.read(-1)).endswith(b"GET /old? 0")
            writer.close()

    run_on_loop(test())


@on_loop
async def test_headers_of_connections_are_never_sent_and_names_are_in_lower_case() -> None:
    def answer(request: Request, reply: Reply) -> None:
        lines = b"Connection: close\r\nKeep-Alive: 5\r\nTransfer-Encoding: chunked\r\nUpgrade: x\r\nX-One: 1\r\n"
        reply.lines = b"x-two: 2\r\n"
        if request.path == "/whole":
            reply.send(200, b"{}", lines)
        else:
            reply.start(200, lines, None)
            reply.flush()
            reply.write(b"ab")
            reply.write(b"c")
            reply.end()

    async with serving(answer) as (_, port), connected(port) as client:
        for path, body in (("/whole", b"{}"), ("/pieces", b"abc")):
            number = client.ask(path)
            assert await client.answered(number) == (b"200", body)
            (head,) = client.heads[number]
            assert set(head) - {b"content-type", b"content-length"} == {b":status", b"x-one", b"x-two"}


@on_loop
async def test_a_request_reads_as_by_http_1() -> None:
    seen: list[Request] = []

    def keep(request: Request, reply: Reply) -> None:
        seen.append(request)
        reply.send(200, b"")

    async with serving(keep) as (server, port), connected(port) as client:
        server.tells_peers = True
        more = (("authorization", "Bearer sk"), ("cookie", "a=1"), ("cookie", "b=2"), ("te", "trailers"))
        await client.answered(client.ask("/v1/x?y=1", b"abc", method="POST", more=more))
        (request,) = seen
        assert (request.method, request.path, request.query, request.body) == ("POST", "/v1/x", "y=1", b"abc")
        assert request.headers[b"host"] == b"x"
        assert request.headers[b"authorization"] == b"Bearer sk"
        assert request.headers[b"cookie"] == b"a=1; b=2"
        assert request.peer == "127.0.0.1"


@pytest.mark.parametrize(
    ("method", "path", "more", "status"),
    [
        ("get", "/a", (), b"501"),
        ("GET", "nowhere", (), b"400"),
        ("GET", "/" + "x" * 9000, (), b"414"),
        ("GET", "/a", (("authorization", "1"), ("authorization", "2")), b"400"),
        ("GET", "/a", (("x-crosstie-pool", "1"), ("x-crosstie-pool", "2")), b"400"),
        ("GET", "/a", tuple((f"x-{i}", "1") for i in range(101)), b"431"),
        ("GET", "/a", (("x-long", "y" * 20_000),), b"431"),
        ("POST", "/a", (("content-length", "99999999999"),), b"413"),
    ],
)
def test_what_is_refused_by_http_1_is_refused_here_and_the_connection_goes_on(
    method: str, path: str, more: tuple[tuple[str, str], ...], status: bytes
) -> None:
    async def test() -> None:
        async with serving() as (_, port), connected(port) as client:
            number = client.ask(path, method=method, more=more, end=method != "POST")
            await until(lambda: client.status(number) or client.over)
            assert client.status(number) == status
            assert await client.answered(client.ask("/b")) == (b"200", b"GET /b? 0")

    run_on_loop(test())


@on_loop
async def test_a_failing_handler_is_one_streams_failure() -> None:
    def fail(request: Request, reply: Reply) -> None:
        if request.path == "/late":
            reply.start(200, b"", None)
            reply.write(b"x")
        if request.path != "/good":
            raise RuntimeError
        echo(request, reply)

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    async with serving(fail) as (_, port), connected(port) as client:
        assert (await client.answered(client.ask("/early")))[0] == b"500"
        late = client.ask("/late")
        await client.answered(late)
        assert late in client.reset
        assert (await client.answered(client.ask("/good")))[0] == b"200"


# Bodies


@on_loop
async def test_bodies_come_in_pieces_with_a_length_or_without() -> None:
    async with serving() as (_, port), connected(port) as client:
        for more in ((), (("content-length", "300000"),)):
            number = client.ask("/big", method="POST", end=False, more=more)
            left = 300_000
            while left:
                await until(lambda number=number: client.h2.local_flow_control_window(number) > 0)  # type: ignore[misc]
                size = min(left, client.h2.local_flow_control_window(number), 10_000)
                client.h2.send_data(number, b"x" * size, end_stream=size == left)
                client.flush()
                left -= size
            assert await client.answered(number) == (b"200", b"POST /big? 300000")


@on_loop
async def test_nobody_sends_a_body_before_it_is_let_in() -> None:
    asked: list[str] = []

    def opens(request: Request) -> int:
        asked.append(request.path)
        if request.path == "/no":
            raise BadRequest(401, "no key", b"go away", b"x-why: key\r\n")
        return 7

    async with serving(limits=RequestLimits(arriving_bytes_of_one=30_000)) as (server, port):
        server.opens = opens
        async with connected(port) as client:
            refused = client.ask("/no", method="POST", end=False)
            assert await client.answered(refused) == (b"401", b"go away")
            assert client.heads[refused][0][b"x-why"] == b"key"
            waits = client.ask("/yes", method="POST", end=False, more=(("expect", "100-continue"),))
            await until(lambda: client.status(waits) == b"100")
            client.h2.send_data(waits, b"x" * 10_000)
            client.flush()
            await until(lambda: server.arriving_of == {7: 10_000})
            # The account has more room, but not for this.
            other = client.ask("/yes", b"x" * 16_000, method="POST", end=False)
            client.h2.send_data(other, b"x" * 16_000)
            client.flush()
            assert (await client.answered(other))[0] == b"503"
            client.h2.send_data(waits, b"x", end_stream=True)
            client.flush()
            assert await client.answered(waits) == (b"200", b"POST /yes? 10001")
            assert server.arriving == 0
            begun = client.ask("/yes", b"x" * 500, method="POST", end=False)
            await until(lambda: server.arriving == 500)
            client.h2.reset_stream(begun)
            client.flush()
            await until(lambda: server.arriving == 0)
        assert asked == ["/no", "/yes", "/yes", "/yes"]


@on_loop
async def test_a_body_that_does_not_come_is_given_up_and_one_that_is_too_long_refused() -> None:
    limits = RequestLimits(body_bytes=20_000, request_s=10.0)
    async with serving(limits=limits) as (server, port), connected(port) as client:
        slow = client.ask("/slow", b"x", method="POST", end=False)
        await until(lambda: server.arriving == 1)
        only(server).check(server.clock + 9.0)
        assert not client.heads[slow]
        only(server).check(server.clock + 20.0)
        assert (await client.answered(slow))[0] == b"408"
        long = client.ask("/long", b"x" * 15_000, method="POST", end=False)
        client.h2.send_data(long, b"x" * 15_000)
        client.flush()
        assert (await client.answered(long))[0] == b"413"
        # It may send on for a moment, and is then told to stop.
        client.h2.send_data(long, b"x" * 10_000)
        client.flush()
        assert (await client.answered(client.ask("/b")))[0] == b"200"
        only(server).check(asyncio.get_running_loop().time() + 5.0)
        await until(lambda: client.reset == {slow: NO_ERROR, long: NO_ERROR})


# Slow clients


@on_loop
async def test_a_slow_stream_holds_up_no_other() -> None:
    kept = Kept()
    async with serving(kept) as (_, port), connected(port) as client:
        client.h2.update_settings({h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: 1000})
        client.takes = False
        slow = client.ask("/slow")
        await until(lambda: "/slow" in kept.replies)
        reply, watcher = kept.replies["/slow"], kept.watchers["/slow"]
        reply.start(200, b"", None)
        reply.write(b"x" * 50_000)
        await until(lambda: len(client.bodies[slow]) == 1000)
        assert watcher.told == []
        assert reply.unsent >= 49_000
        reply.write(b"x" * 50_000)
        assert watcher.told == ["slow"]
        assert reply.slow
        quick = client.ask("/quick")
        await until(lambda: "/quick" in kept.replies)
        kept.replies["/quick"].send(200, b"y" * 500)
        assert await client.answered(quick) == (b"200", b"y" * 500)
        client.h2.increment_flow_control_window(90_000, slow)
        client.h2.increment_flow_control_window(90_000)
        client.flush()
        await until(lambda: watcher.told == ["slow", "ready"])
        reply.end()
        client.h2.increment_flow_control_window(90_000, slow)
        client.h2.increment_flow_control_window(90_000)
        client.flush()
        assert await client.answered(slow) == (b"200", b"x" * 100_000)


@on_loop
async def test_an_answer_that_nobody_takes_is_given_up() -> None:
    def long(request: Request, reply: Reply) -> None:
        reply.send(200, b"x" * 100_000)

    async with serving(long) as (server, port), connected(port) as client:
        client.takes = False
        number = client.ask()
        await until(lambda: len(client.bodies[number]) == 65_535)
        only(server).check(server.clock + 70.0)
        assert number not in client.reset
        only(server).check(server.clock + 80.0)
        # And so is the connection, on which nobody has asked for as long.
        await until(lambda: client.over)
        assert number in client.reset


@on_loop
async def test_who_asks_on_and_on_and_reads_nothing_is_not_heard_on() -> None:
    async with serving(lambda request, reply: reply.send(200, b"", b"x-long: %b\r\n" % (b"y" * 8000))) as (
        server,
        port,
    ):
        with socket.socket() as narrow:
            # On both sides, that it takes no megabytes until nothing more fits between them.
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            narrow.connect(("127.0.0.1", port))
            reader, writer = await asyncio.open_connection(sock=narrow.dup())
        client = Client(reader, writer)
        client.begin()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: server.connections)
        only(server).transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for _ in range(200):
            if only(server)._held_back:
                break
            # As if each had been answered, which it has.
            for _ in range(10):
                client.h2.send_headers(
                    number := client.h2.get_next_available_stream_id(),
                    [(":method", "HEAD"), (":path", "/"), (":scheme", "http"), (":authority", "x")],
                    end_stream=True,
                )
                client.h2.streams.pop(number)
            client.flush()
            await asyncio.sleep(0.001)
        await until(lambda: only(server)._held_back)
        writer.transport.abort()
        await until(lambda: not server.connections)


# Clients that go


@on_loop
async def test_a_reset_is_a_client_that_has_gone() -> None:
    kept = Kept()
    async with serving(kept) as (server, port), connected(port) as client:
        number, other = client.ask("/a"), client.ask("/b")
        await until(lambda: len(kept.replies) == 2)
        kept.replies["/a"].start(200, b"", None)
        kept.replies["/a"].write(b"x")
        client.h2.reset_stream(number, 8)
        client.flush()
        await until(lambda: kept.watchers["/a"].told == ["gone"])
        assert kept.replies["/a"].gone
        kept.replies["/a"].write(b"into the void")
        kept.replies["/a"].end()
        assert kept.watchers["/b"].told == []
        kept.replies["/b"].send(200, b"b")
        assert await client.answered(other) == (b"200", b"b")
        third = client.ask("/c")
        await until(lambda: "/c" in kept.replies)
        client.writer.transport.abort()
        await until(lambda: kept.watchers["/c"].told == ["gone"])
        assert third
        assert not server.connections


@on_loop
async def test_an_answer_that_is_cut_is_a_reset() -> None:
    kept = Kept()
    async with serving(kept) as (_, port), connected(port) as client:
        for after_written in (False, True):
            number = client.ask("/a")
            await until(lambda: "/a" in kept.replies)
            kept.replies["/a"].start(200, b"", None)
            kept.replies["/a"].write(b"x" * 70_000)
            kept.replies.pop("/a").cut(after_written=after_written)
            await until(lambda number=number: number in client.reset)  # type: ignore[misc]
            assert number not in client.ended
            assert not after_written or len(client.bodies[number]) == 70_000


@on_loop
async def test_a_drain_says_goodbye_answers_what_has_come_and_closes() -> None:
    kept = Kept()
    async with serving(kept) as (server, port), connected(port) as client, connected(port) as idle:
        number = client.ask("/a")
        await until(lambda: "/a" in kept.replies and len(server.connections) == 2)
        draining = asyncio.create_task(server.drain(600.0, grace_s=0.2))
        await until(lambda: client.goodbyes == [(NO_ERROR, 2**31 - 1)])
        # It had not heard of that.
        late = client.ask("/late")
        await until(lambda: "/late" in kept.replies)
        await until(lambda: idle.over)
        assert idle.goodbyes[-1] == (NO_ERROR, 0)
        kept.replies["/a"].send(200, b"a")
        kept.replies["/late"].send(200, b"late")
        assert await client.answered(number) == (b"200", b"a")
        assert await client.answered(late) == (b"200", b"late")
        assert await draining
        await until(lambda: client.over)
        assert client.goodbyes[-1] == (NO_ERROR, late)


@on_loop
async def test_who_is_cut_off_by_a_drain_is_counted() -> None:
    kept = Kept()
    async with serving(kept) as (server, port), connected(port) as client:
        for path in ("/a", "/b"):
            client.ask(path)
        await until(lambda: len(kept.replies) == 2)
        assert not await server.drain(0.05, grace_s=0.01)
        assert server.cut_off >= 2


# Floods


def frame(kind: int, flags: int = 0, stream: int = 0, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + struct.pack(">I", stream) + payload


PING, SETTINGS, PRIORITY, UNKNOWN = frame(6, payload=b"12345678"), frame(4), frame(2, 0, 1, b"\0\0\0\0\1"), frame(99)


@pytest.mark.parametrize("flood", [PING, SETTINGS, PRIORITY, UNKNOWN], ids=["ping", "settings", "priority", "unknown"])
def test_frames_that_ask_for_nothing_are_so_many_and_no_more(flood: bytes) -> None:
    async def test() -> None:
        async with serving() as (server, port), connected(port) as client:
            for _ in range(100):
                client.writer.write(flood)
            assert (await client.answered(client.ask()))[0] == b"200"
            for _ in range(40):
                client.writer.write(flood * 100)
            await until(lambda: client.over)
            assert client.goodbyes == [(CALM, 1)] or not client.goodbyes
            assert server.refused == {"http2": 1}

    run_on_loop(test())


@on_loop
async def test_streams_opened_and_reset_at_once_end_the_connection() -> None:
    kept = Kept()
    async with serving(kept) as (server, port), connected(port) as client:
        opened = 0
        while not client.writer.is_closing() and opened < 5_000:
            for _ in range(50):
                fields = [(":method", "GET"), (":path", f"/{opened}"), (":scheme", "http"), (":authority", "x")]
                client.h2.send_headers(number := 2 * opened + 1, fields, end_stream=True)
                client.h2.reset_stream(number)
                opened += 1
            client.flush()
            await asyncio.sleep(0)
        await until(lambda: client.over)
        assert server.refused == {"http2": 1}
        # As many as a client could have had open, and those that came with them; each told that nobody waits.
        assert len(kept.replies) < 5 * STREAMS
        assert all(one.told == ["gone"] for one in kept.watchers.values())


@on_loop
async def test_who_lets_most_of_its_requests_be_answered_may_give_up_others() -> None:
    kept = Kept()
    async with serving(kept) as (server, port), connected(port) as client:
        for first in range(0, 300, 10):
            asked = {i: (client.ask(f"/no/{i}"), client.ask(f"/yes/{i}")) for i in range(first, first + 10)}
            await until(lambda last=first + 9: f"/yes/{last}" in kept.replies)  # type: ignore[misc]
            for i, (given_up, _) in asked.items():
                client.h2.reset_stream(given_up)
                client.flush()
                kept.replies[f"/yes/{i}"].send(200, b"")
            for _, answered in asked.values():
                assert (await client.answered(answered))[0] == b"200"
        assert not client.over
        assert not server.refused


@on_loop
async def test_there_are_so_many_streams_at_once() -> None:
    kept = Kept()
    async with serving(kept) as (server, port), connected(port) as client:
        await until(lambda: client.h2.remote_settings.max_concurrent_streams == STREAMS)
        for i in range(STREAMS):
            client.ask(f"/{i}")
        await until(lambda: len(kept.replies) == STREAMS)
        assert len(only(server).streams) == STREAMS
        client.h2.remote_settings[h2.settings.SettingCodes.MAX_CONCURRENT_STREAMS] = 2 * STREAMS
        client.h2.remote_settings.acknowledge()
        client.ask("/more")
        await until(lambda: client.over)
        assert len(kept.replies) == STREAMS
        await until(lambda: all(one.told == ["gone"] for one in kept.watchers.values()))


@pytest.mark.parametrize("size", [0, 1000])
def test_a_head_that_goes_on_and_on_ends_the_connection(size: int) -> None:
    async def test() -> None:
        async with serving() as (server, port), connected(port) as client:
            assert (await client.answered(client.ask()))[0] == b"200"
            client.writer.write(frame(1, 0, 3, b"\x82"))
            for _ in range(200):
                client.writer.write(frame(9, 0, 3, b"\0" * size))
            await until(lambda: client.over)
            assert server.refused == {"http2": 1}

    run_on_loop(test())


@on_loop
async def test_a_head_that_does_not_end_is_given_up_in_time() -> None:
    async with serving() as (server, port), connected(port) as client:
        assert (await client.answered(client.ask()))[0] == b"200"
        client.writer.write(frame(1, 0, 3, b"\x82"))
        await until(lambda: any(isinstance(one, Http2Connection) and one._head_since for one in server.connections))
        only(server).check(server.clock + 9.0)
        assert not client.over
        only(server).check(server.clock + 30.0)
        await until(lambda: client.over)


@on_loop
async def test_headers_that_unpack_to_more_than_may_be_end_the_connection() -> None:
    async with serving() as (server, port), connected(port) as client:
        # One long value, and then only its number in the table.
        fields = [(":method", "GET"), (":path", "/"), (":scheme", "http"), (":authority", "x")]
        client.h2.send_headers(1, [*fields, *([("x-long", "y" * 3000)] * 500)], end_stream=True)
        client.flush()
        await until(lambda: client.over)
        assert server.refused == {"http2": 1}


@on_loop
async def test_a_frame_longer_than_agreed_is_not_waited_for() -> None:
    async with serving() as (server, port), connected(port) as client:
        client.writer.write((2**20).to_bytes(3, "big") + bytes((0, 0)) + struct.pack(">I", 1))
        await until(lambda: client.over)
        assert server.refused == {"http2": 1}


@on_loop
async def test_what_is_no_http_2_ends_the_connection() -> None:
    async with serving() as (server, port):
        got = await said(port, b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n" + b"\0" * 100)
        assert b"HTTP/1.1" not in got
        assert server.refused == {"http2": 1}


@on_loop
async def test_damaged_connections_end_and_nobody_else_is_harmed() -> None:
    broke: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: broke.append(context))
    chance = random.Random(0)
    async with serving() as (server, port):
        for _ in range(150):
            sent = Client(asyncio.StreamReader(), cast(asyncio.StreamWriter, Written()))
            sent.begin()
            for i in range(3):
                sent.ask(f"/{i}", b"x" * chance.randrange(2000), method="POST", end=chance.random() < 0.7)
            data = bytearray(sent.writer.data)  # type: ignore[attr-defined]
            for _ in range(chance.randrange(1, 6)):
                at = chance.randrange(24, len(data))
                if chance.random() < 0.6:
                    data[at] = chance.randrange(256)
                else:
                    del data[at : at + chance.randrange(1, 30)]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            cut = chance.randrange(len(data))
            # It may be closed by any of them.
            with suppress(OSError, RuntimeError):
                writer.write(bytes(data[:cut]))
                await asyncio.sleep(0)
                writer.write(bytes(data[cut:]))
                writer.write_eof()
                await reader.read(-1)
            writer.close()
        await until(lambda: not server.connections)
        assert not broke
        async with connected(port) as client:
            assert (await client.answered(client.ask()))[0] == b"200"


class Written:
    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


@on_loop
async def test_a_connection_is_used_for_so_many_streams() -> None:
    async with serving() as (server, port), connected(port) as client:
        client.h2.highest_outbound_stream_id = 20_001
        number = client.ask()
        assert (await client.answered(number))[0] == b"200"
        await until(lambda: client.over)
        assert client.goodbyes[0] == (NO_ERROR, 2**31 - 1)
        assert not server.refused
