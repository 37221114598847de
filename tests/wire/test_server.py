import asyncio
import socket
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.waiting import LIMIT_S, until
from tests.wire.sockets import said, serving

from crosstie.wire.loops import run_on_loop
from crosstie_gateway.wire.request import Request, RequestLimits
from crosstie_gateway.wire.server import Reply


def echo(request: Request, reply: Reply) -> None:
    reply.send(200, f"{request.method} {request.path}?{request.query} {len(request.body)}".encode())


def on_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def runs() -> None:
        run_on_loop(test())

    runs.__name__ = test.__name__
    return runs


@on_loop
async def test_a_request_is_answered_and_the_connection_kept() -> None:
    async with serving(echo) as (_, port):
        one = b"POST /a?b=1 HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc"
        got = await said(port, one + one.replace(b"host: x", b"host: x\r\nconnection: close"))
        assert got.count(b"HTTP/1.1 200 OK") == 2
        assert got.count(b"POST /a?b=1 3") == 2
        assert got.count(b"connection: close") == 1


@on_loop
async def test_pipelined_requests_are_answered_in_their_order_even_if_the_first_takes_longer() -> None:
    def slow_first(request: Request, reply: Reply) -> None:
        delay = 0.05 if request.path == "/first" else 0.0
        asyncio.get_running_loop().call_later(delay, reply.send, 200, request.path.encode())

    async with serving(slow_first) as (_, port):
        data = b"GET /first HTTP/1.1\r\nhost: x\r\n\r\n" + b"".join(
            b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % i for i in range(40)
        )
        got = await said(port, data + b"GET /last HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        order = [line.split(b"\r\n\r\n")[1].split(b"HTTP")[0] for line in got.split(b"HTTP/1.1 200 OK")[1:]]
        assert order == [b"/first", *(b"/%d" % i for i in range(40)), b"/last"]


@on_loop
async def test_a_stream_is_chunked_for_http11_and_closed_for_http10() -> None:
    def stream(request: Request, reply: Reply) -> None:
        reply.start(200, b"content-type: text/event-stream\r\n", None)
        reply.write(b"abc")
        reply.write(b"")
        reply.write(b"de")
        reply.end()

    async with serving(stream) as (_, port):
        got = await said(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", until=b"0\r\n\r\n")
        assert got.endswith(b"\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
        old = await said(port, b"GET / HTTP/1.0\r\n\r\n")
        assert old.endswith(b"\r\n\r\nabcde")
        assert b"chunked" not in old


@on_loop
async def test_head_is_answered_without_a_body_and_a_waiting_client_is_told_to_go_on() -> None:
    async with serving(echo) as (_, port):
        got = await said(port, b"HEAD /a HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert b"content-length: 10" in got
        assert got.endswith(b"\r\n\r\n")
        ask = b"POST / HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"
        assert await said(port, ask, until=b"100 Continue\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"


@on_loop
async def test_an_offer_to_upgrade_is_passed_over() -> None:
    async with serving(echo) as (_, port):
        ask = b"GET /a HTTP/1.1\r\nhost: x\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n\r\n"
        assert b"200 OK" in await said(port, ask, until=b"GET /a? 0")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n", 400),
        (b"GET / HTTP/1.1\r\nbad header\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: " + b"b" * 70000 + b"\r\n\r\n", 431),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n", 413),
        (
            b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"400\r\n"
            + b"x" * 1024
            + b"\r\n"
            + b"400\r\n"
            + b"x" * 1024
            + b"\r\n0\r\n\r\n",
            413,
        ),
    ],
)
def test_what_cannot_be_read_is_refused_and_the_connection_closed(data: bytes, status: int) -> None:
    async def test() -> None:
        async with serving(echo, RequestLimits(body_bytes=1500)) as (_, port):
            got = await said(port, data)
            assert got.startswith(b"HTTP/1.1 %d " % status)
            assert got.count(b"HTTP/1.1") == 1
            assert b"connection: close" in got

    run_on_loop(test())


@on_loop
async def test_a_request_that_arrives_too_slowly_is_ended() -> None:
    async with serving(echo, RequestLimits(request_s=0.5)) as (_, port):
        assert b"408" in await said(port, b"GET / HTTP/1.1\r\nhost:")


@on_loop
async def test_idle_connections_are_closed() -> None:
    async with serving(echo, RequestLimits(idle_s=0.2)) as (server, port):
        assert await said(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n") != b""
        assert not server.connections


class Watcher:
    def __init__(self) -> None:
        self.told: list[str] = []

    def on_client_gone(self) -> None:
        self.told.append("gone")

    def on_client_slow(self) -> None:
        self.told.append("slow")

    def on_client_ready(self) -> None:
        self.told.append("ready")


@on_loop
async def test_whoever_answers_is_told_of_a_slow_client_and_of_one_that_goes() -> None:
    watcher, replies = Watcher(), []

    def flood(request: Request, reply: Reply) -> None:
        reply.watcher = watcher
        reply.start(200, b"", None)
        replies.append(reply)
        for _ in range(200):
            reply.write(b"x" * 65536)

    async with serving(flood) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: watcher.told)
        assert watcher.told == ["slow"]
        assert replies[0].slow
        async with asyncio.timeout(LIMIT_S):
            while watcher.told == ["slow"]:
                await reader.read(2**20)
        assert watcher.told == ["slow", "ready"]
        writer.transport.abort()
        await until(lambda: len(watcher.told) == 3)
        assert watcher.told == ["slow", "ready", "gone"]
        replies[0].write(b"into the void")
        replies[0].end()


@on_loop
async def test_draining_answers_what_has_come_and_then_closes() -> None:
    replies: list[Reply] = []
    async with serving(lambda request, reply: replies.append(reply)) as (server, port):
        waiting = asyncio.create_task(said(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"))
        await until(lambda: replies)
        asyncio.get_running_loop().call_later(0.5, replies[0].send, 200, b"late")
        assert await server.drain(within_s=LIMIT_S)
        got = await waiting
        assert got.endswith(b"late")
        assert b"connection: close" in got
        with pytest.raises(ConnectionRefusedError):
            await said(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")


@on_loop
async def test_draining_says_so_when_a_request_was_not_answered_in_time() -> None:
    replies: list[Reply] = []
    async with serving(lambda request, reply: replies.append(reply)) as (server, port):
        waiting = asyncio.create_task(said(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"))
        await until(lambda: replies)
        assert not await server.drain(within_s=0.2)
        assert await waiting == b""


@on_loop
async def test_a_request_that_comes_between_two_answers_does_not_overtake() -> None:
    """The loop may read more from a client in the very moment between an answer and the next request's turn."""
    asked: list[tuple[str, Reply]] = []
    async with serving(lambda request, reply: asked.append((request.path, reply))) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /1 HTTP/1.1\r\nhost: x\r\n\r\nGET /2 HTTP/1.1\r\nhost: x\r\n\r\n")
        await until(lambda: asked)
        (connection,) = server.connections
        asked[0][1].send(200, b"one")
        connection.data_received(b"GET /3 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert not connection.idle
        await until(lambda: len(asked) > 1)
        assert [path for path, _ in asked] == ["/1", "/2"]
        asked[1][1].send(200, b"two")
        await until(lambda: len(asked) > 2)
        assert [path for path, _ in asked] == ["/1", "/2", "/3"]
        asked[2][1].send(200, b"three")
        got = await reader.readuntil(b"three")
        assert got.index(b"one") < got.index(b"two") < got.index(b"three")
        writer.close()


@on_loop
async def test_nobody_who_was_connected_is_lost_when_it_stops_to_listen() -> None:
    """Connections that the kernel has completed and nobody has accepted, and those that have yet to say something."""

    async with serving(lambda request, reply: reply.send(200, b"here")) as (server, port):
        clients = [socket.socket() for _ in range(10)]
        draining = asyncio.create_task(server.drain(within_s=LIMIT_S, grace_s=1.0))
        await asyncio.sleep(0.1)
        # The loop stands still, as under load: when it goes on the time to close has come, and these are queued.
        for client in clients:
            client.connect(("127.0.0.1", port))
        time.sleep(1.0)
        await asyncio.sleep(0.02)
        for client in clients:
            client.settimeout(LIMIT_S)
            client.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        for client in clients:
            with client:
                assert (await asyncio.to_thread(client.recv, 65536)).endswith(b"here")
        with pytest.raises(ConnectionRefusedError):
            await asyncio.to_thread(socket.create_connection, ("127.0.0.1", port))
        assert await draining


@on_loop
async def test_draining_that_is_cut_short_says_so() -> None:
    replies: list[Reply] = []
    async with serving(lambda request, reply: replies.append(reply)) as (server, port):
        waiting = asyncio.create_task(said(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"))
        await until(lambda: replies)
        draining = asyncio.create_task(server.drain(within_s=30.0))
        await asyncio.sleep(0.1)
        server.close()
        assert not await draining
        assert await waiting == b""


@on_loop
async def test_who_sends_a_long_body_does_not_have_the_loop_to_itself() -> None:
    """Or libuv would read it up to 32 times before it looks at the next connection."""
    async with serving(echo) as (server, port):
        with socket.create_connection(("127.0.0.1", port)) as line:
            line.sendall(b"POST /long HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n")
            await until(lambda: any(one._parser.begun for one in server.connections))
            (connection,) = server.connections
            connection.data_received(b"x" * 100_000)
            assert not connection.transport.is_reading()
            await until(connection.transport.is_reading)
            connection.data_received(b"x" * 100)
            assert connection.transport.is_reading(), "what comes slowly is nobody's burden"
            line.sendall(b"x" * 99_900)
            line.setblocking(False)
            loop = asyncio.get_running_loop()
            assert (await loop.sock_recv(line, 65536)).endswith(b"POST /long? 200000")
