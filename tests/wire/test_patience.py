"""Clients that are slow, too many, half gone or gone: who is waited for, and who is not."""

import asyncio
import socket
import sys
from typing import Any

import pytest
from tests.waiting import LIMIT_S, until
from tests.wire.sockets import said, serving
from tests.wire.test_server import Watcher, echo, on_loop

from crosstie.wire.loops import run_on_loop
from crosstie_gateway.wire.listener import hear_no_more
from crosstie_gateway.wire.request import Request, RequestLimits
from crosstie_gateway.wire.server import Reply

ASK = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello"


@pytest.fixture(autouse=True)
def _no_traceback(caplog: pytest.LogCaptureFixture) -> Any:
    yield
    assert not caplog.records


@on_loop
async def test_a_head_that_does_not_end_is_given_up_sooner_than_a_body() -> None:
    async with serving(echo, RequestLimits(head_s=0.5, request_s=600)) as (server, port):
        assert (await said(port, ASK[:20])).startswith(b"HTTP/1.1 408 ")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK[:-2])
        await until(lambda: any(one._parser.held for one in server.connections))
        (connection,) = (one for one in server.connections if one._parser.held)
        assert connection.arriving_since is not None
        connection.check(connection.arriving_since + 599)
        writer.write(ASK[-2:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()


@on_loop
async def test_a_body_may_take_as_long_as_its_bytes_do_at_the_least_rate() -> None:
    async with serving(echo, RequestLimits(request_s=10, body_bytes_per_s=1000)) as (server, port):
        for wait_s, status in ((14.9, b"200"), (15.1, b"408")):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 6000\r\n\r\n" + b"x" * 5000)
            await until(lambda: any(one._parser.held == 5000 for one in server.connections))
            (connection,) = (one for one in server.connections if one._parser.held == 5000)
            assert connection.arriving_since is not None
            connection.check(connection.arriving_since + wait_s)
            writer.write(b"x" * 1000)
            assert status in await reader.readline()
            writer.close()


@on_loop
async def test_bodies_that_arrive_have_room_together() -> None:
    begun = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9000\r\n\r\n" + b"x" * 4000
    async with serving(echo, RequestLimits(arriving_bytes=10_000)) as (server, port):
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in held:
            writer.write(begun)
        await until(lambda: server.arriving == 8000)
        assert (await said(port, begun)).startswith(b"HTTP/1.1 503 ")
        assert server.arriving == 8000
        held[0][1].write(b"x" * 5000)
        assert (await held[0][0].readline()).startswith(b"HTTP/1.1 200 ")
        held[1][1].transport.abort()
        await until(lambda: server.arriving == 0)
        held[0][1].close()


@on_loop
async def test_there_are_so_many_connections_and_no_more() -> None:
    for limits in (RequestLimits(connections=2), RequestLimits(connections_per_address=2)):
        async with serving(echo, limits) as (server, port):
            two = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            await until(lambda: len(server.connections) == 2)
            assert await said(port, b"") == b""
            assert server.refused == {"connections": 1}
            two[0][1].close()
            await until(lambda: len(server.connections) == 1)
            assert (await said(port, ASK, until=b"5")).startswith(b"HTTP/1.1 200 ")
            two[1][1].close()


@on_loop
async def test_little_is_read_behind_a_request_that_is_being_answered() -> None:
    held: list[Reply] = []
    async with serving(lambda request, reply: held.append(reply), RequestLimits(pipelined_bytes=10_000)) as (
        server,
        port,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        many = 200_000
        writer.write(ASK * many)
        await until(lambda: held)
        (connection,) = server.connections
        await until(lambda: connection._held_back)
        # One read of the loop's may be on top.
        assert connection._parser.pending < 600_000 < many * len(ASK)
        held[0].send(200, b"one")
        await until(lambda: len(held) == 2)
        held[1].send(200, b"two")
        assert await reader.readuntil(b"two")
        writer.transport.abort()


def later(request: Request, reply: Reply) -> None:
    asyncio.get_running_loop().call_later(0.2, echo, request, reply)


@on_loop
async def test_who_has_closed_its_sending_side_gets_its_answers() -> None:
    for handler in (echo, later):
        async with serving(handler) as (server, port):
            for count in (1, 3):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(ASK * count)
                writer.write_eof()
                got = await asyncio.wait_for(reader.read(-1), 5)
                assert got.count(b" 200 OK") == got.count(b"POST /? 5") == count
                assert handler is echo or got.count(b"connection: close") == 1
                writer.close()
            await until(lambda: not server.connections)


@on_loop
async def test_half_a_request_and_an_end_is_an_end() -> None:
    async with serving(echo) as (server, port):
        for part in (ASK[:30], ASK[:-1], b""):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(part)
            writer.write_eof()
            assert await asyncio.wait_for(reader.read(-1), 5) == b""
            writer.close()
        await until(lambda: not server.connections)


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_who_has_gone_is_told_from_who_waits(version: bytes) -> None:
    async def test() -> None:
        watcher, replies = Watcher(), list[Reply]()

        def keep(request: Request, reply: Reply) -> None:
            reply.watcher = watcher
            replies.append(reply)

        async with serving(keep) as (server, port):
            with socket.create_connection(("127.0.0.1", port)) as raw:
                raw.sendall(ASK.replace(b"HTTP/1.1", version))
                await until(lambda: replies)
            # It closes in full, with nothing unread: only a FIN comes.
            await until(lambda: watcher.told == ["gone"])
            assert not server.connections

    run_on_loop(test())


@on_loop
async def test_a_stream_ends_for_who_waits_and_is_dropped_for_who_has_gone() -> None:
    watcher, replies = Watcher(), list[Reply]()

    def stream(request: Request, reply: Reply) -> None:
        reply.watcher = watcher
        reply.start(200, b"", None)
        reply.write(b"one")
        replies.append(reply)

    async with serving(stream) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK)
        await reader.readuntil(b"one\r\n")
        writer.write_eof()
        await until(lambda: any(one._eof for one in server.connections))
        replies[0].write(b"two")
        replies[0].end()
        assert (await reader.read(-1)).endswith(b"two\r\n0\r\n\r\n")
        writer.close()
        with socket.create_connection(("127.0.0.1", port)) as raw:
            raw.sendall(ASK)
            await asyncio.to_thread(raw.recv, 65536)
            await until(lambda: len(replies) == 2)
        async with asyncio.timeout(LIMIT_S):
            while "gone" not in watcher.told:
                replies[1].write(b"more")
                await asyncio.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's filter is Linux's")
def test_nobody_new_can_knock_and_who_has_knocked_is_heard() -> None:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(5)
        with socket.create_connection(listening.getsockname()) as before:
            hear_no_more(listening)
            with pytest.raises(TimeoutError):
                socket.create_connection(listening.getsockname(), timeout=0.3)
            accepted, _ = listening.accept()
            with accepted:
                before.sendall(b"hello")
                assert accepted.recv(9) == b"hello"
                accepted.sendall(b"yes")
                assert before.recv(9) == b"yes"


@on_loop
async def test_connections_of_vanished_clients_are_asked_after() -> None:
    async with serving(echo) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: server.connections)
        (connection,) = server.connections
        raw = connection.transport.get_extra_info("socket")
        assert raw.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        writer.close()


@on_loop
async def test_who_asks_and_asks_and_reads_nothing_is_answered_no_further_and_then_closed() -> None:
    answered = 0

    def long_answer(request: Request, reply: Reply) -> None:
        nonlocal answered
        answered += 1
        reply.send(200, b"x" * 100_000)

    many = 2000
    async with serving(long_answer) as (server, port):
        asking = socket.create_connection(("127.0.0.1", port))
        asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        asking.sendall(ASK * many)
        await until(lambda: any(one.slow and one._held_back for one in server.connections))
        (connection,) = server.connections
        before = connection.transport.get_write_buffer_size()
        # Time for all that it would go on with.
        for _ in range(100):
            await asyncio.sleep(0)
        assert answered < many
        assert before < 1_000_000
        # Once it reads, it gets more of what it asked for.
        read = await asyncio.to_thread(lambda: sum(len(asking.recv(2**20)) for _ in range(20)))
        assert read
        await until(lambda: connection.slow)
        connection.check(server.loop.time())
        connection.check(server.loop.time() + server.limits.idle_s + 1)
        await until(lambda: not server.connections)
        asking.close()


@on_loop
async def test_pipelined_answers_that_are_read_late_all_come() -> None:
    many = 300
    async with serving(lambda request, reply: reply.send(200, b"x" * 100_000)) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**16)
        writer.write(ASK * many)
        writer.write_eof()
        await until(lambda: any(one.slow for one in server.connections))
        got = await asyncio.wait_for(reader.read(-1), 30)
        assert got.count(b"HTTP/1.1 200 OK") == many
        writer.close()


@pytest.mark.slow
@on_loop
async def test_little_is_read_behind_requests_that_are_answered_at_once() -> None:
    most = 0

    def quick(request: Request, reply: Reply) -> None:
        nonlocal most
        (connection,) = server.connections
        most = max(most, connection._parser.pending)
        reply.send(200, b"")

    many = 100_000
    async with serving(quick, RequestLimits(pipelined_bytes=10_000)) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(ASK * many)
        writer.write_eof()
        got = 0
        while piece := await reader.read(2**20):
            got += piece.count(b" 200 OK")
        # Less where an answer's first line is cut in two by a read.
        assert got > many * 0.9
        # One read of the loop's may be on top.
        assert most < 600_000 < many * len(ASK)
        writer.close()
