import asyncio
import os

import pytest
from tests.run.wire.sockets import origin_of, scripted, serving
from tests.run.wire.test_server import on_loop
from tests.waiting import LIMIT_S

from crosstie.core.errors import BadInput
from crosstie.run.wire.address import Address
from crosstie.run.wire.client import Headers
from crosstie.run.wire.fetch import fetch
from crosstie.run.wire.loops import run_on_loop
from crosstie.run.wire.request import Request
from crosstie.run.wire.server import Reply

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


class Heard:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.over = asyncio.Event()

    def on_head(self, status: int, headers: Headers) -> None:
        self.told.append(status)

    def on_body(self, data: bytes) -> None:
        self.told.append(data)

    def on_end(self) -> None:
        self.told.append("ended")
        self.over.set()

    def on_lost(self, error: Exception | None) -> None:
        self.told.append("lost")
        self.over.set()


async def heard(port: int) -> list[object]:
    async with origin_of(port) as origin:
        connection = await origin.open(LIMIT_S)
        listener = Heard()
        connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", listener)
        async with asyncio.timeout(LIMIT_S):
            await listener.over.wait()
        kept = origin.take()
        assert origin.connections == (1 if kept else 0)
        return listener.told


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (OK, [200, b"hi", "ended"]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", [200, b"hi", "ended"]),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n2\r\nbc\r\n1\r\nd\r\n0\r\n\r\n",
            [200, b"abcd", "ended"],
        ),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, [200, b"hi", "ended"]),
        # Without a length, the connection's end is the answer's.
        (b"HTTP/1.1 200 OK\r\n\r\nhi", [200, b"hi", "ended"]),
        # With one, an early end is a loss.
        (b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi", [200, b"hi", "lost"]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n", [200, b"hi", "lost"]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhi", [200, b"hi", "lost"]),
        (b"", ["lost"]),
        (b"garbage\r\n\r\n", ["lost"]),
        (b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * 70000 + b"\r\n\r\n", ["lost"]),
        # What could be read in two ways is no answer.
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\nhi!", ["lost"]),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-length: 2\r\n\r\nhi", ["lost"]),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2, 2\r\n\r\nhi", ["lost"]),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", ["lost"]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked, identity\r\n\r\n2\r\nhi\r\n0\r\n\r\n", ["lost"]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: xchunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", ["lost"]),
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n", ["lost"]),
        (b"HTTP/1.1 200 OK\r\na: b\rset-cookie: c\r\ncontent-length: 2\r\n\r\nhi", ["lost"]),
        (b"HTTP/1.1 200 OK\r\na: b\nset-cookie: c\r\ncontent-length: 2\r\n\r\nhi", ["lost"]),
        (b"HTTP/1.1 200 OK\r\na: b\r\n c\r\ncontent-length: 2\r\n\r\nhi", ["lost"]),
        (b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\nhi", ["lost"]),
        (b"HTTP/1.1 099 Odd\r\ncontent-length: 2\r\n\r\nhi", ["lost"]),
        (b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\nhi", ["lost"]),
        # Endless, with and without a line end.
        (b"HTTP/1.1 100 Continue\r\n\r\n" * 9000 + OK, ["lost"]),
        (b"HTTP/1.1 200 OK\r\na: " + b"b" * 200_000, ["lost"]),
        (b"HTTP/1.1 200 " + b"b" * 200_000, ["lost"]),
    ],
)
def test_an_answer_ends_once_and_a_cut_one_is_told_from_a_whole(answer: bytes, told: list[object]) -> None:
    async def test() -> None:
        async with scripted(answer) as (port, _):
            assert await heard(port) == told

    run_on_loop(test())


@on_loop
async def test_a_connection_is_used_again() -> None:
    async with scripted(OK, OK, then_close=False) as (port, asked), origin_of(port) as origin:
        for _ in range(2):
            assert (await fetch(origin, "GET", "/")).body == b"hi"
        assert len(asked) == 2
        assert origin.connections == 1


@on_loop
async def test_what_comes_after_an_answer_is_no_part_of_it_nor_of_the_next() -> None:
    """Trailers do not become headers; and words that nobody asked for end the connection before it is used again."""
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\nset-cookie: a\r\n\r\n"
    async with scripted(chunked, then_close=False) as (port, _), origin_of(port) as origin:
        answer = await fetch(origin, "GET", "/")
        assert (answer.headers, answer.body) == ([(b"transfer-encoding", b"chunked")], b"hi")
        assert origin.take() is not None
    speaking: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        speaking.append(writer)
        while await reader.read(65536):
            writer.write(OK)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with origin_of(server.sockets[0].getsockname()[1]) as origin:
        assert (await fetch(origin, "GET", "/")).body == b"hi"
        (connection,) = origin._open
        assert connection.silent
        # Straight to the kernel, so that the loop has had no occasion to tell of it.
        os.write(speaking[0].get_extra_info("socket").fileno(), OK.replace(b"hi", b"no"))
        assert not connection.silent
        assert origin.take() is None
        assert (await fetch(origin, "GET", "/")).body == b"hi"
    for writer in speaking:
        writer.close()
    server.close()


@on_loop
async def test_a_server_that_says_more_than_it_was_asked_gets_a_connection_for_each_request() -> None:
    async with scripted(OK + OK, OK, OK, then_close=False) as (port, _), origin_of(port) as origin:
        for _ in range(2):
            assert (await fetch(origin, "GET", "/")).body == b"hi"
            assert origin.connections == 0
        origin._distrusted_until = 0.0
        assert (await fetch(origin, "GET", "/")).body == b"hi"
        assert origin.connections == 1


@on_loop
async def test_a_kept_connection_that_was_closed_is_replaced() -> None:
    def answer(request: Request, reply: Reply) -> None:
        reply.send(200, b"hi")

    async with serving(answer) as (server, port), origin_of(port) as origin:
        assert (await fetch(origin, "GET", "/")).body == b"hi"
        for connection in list(server.connections):
            connection.abort()
        assert (await fetch(origin, "GET", "/")).body == b"hi"


@on_loop
async def test_an_old_idle_connection_is_not_trusted() -> None:
    async with scripted(OK, OK, then_close=False) as (port, _), origin_of(port) as origin:
        await fetch(origin, "GET", "/")
        kept = origin.take()
        assert kept is not None
        origin.keep(kept)
        kept.idle_since -= 60
        origin.prune()
        assert origin.take() is None
        assert origin.connections == 0


@on_loop
async def test_no_answer_in_time_is_an_error_and_leaves_no_connection() -> None:
    async with serving(lambda request, reply: None) as (_, port), origin_of(port) as origin:
        with pytest.raises(ConnectionError, match=r"within 0\.2 s"):
            await fetch(origin, "GET", "/", timeout_s=0.2)
        assert origin.connections == 0


@on_loop
async def test_giving_up_in_the_moment_of_an_answer_harms_nobody_else() -> None:
    """The connection is free again, and another's, before whoever asked first has come to see its answer."""
    replies: list[Reply] = []
    async with serving(lambda request, reply: replies.append(reply)) as (_, port), origin_of(port) as origin:
        asking = asyncio.create_task(fetch(origin, "GET", "/"))
        while not replies:
            await asyncio.sleep(0.01)
        (connection,) = origin._open
        connection.data_received(OK)
        taken, other = origin.take(), Heard()
        assert taken is connection
        taken.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", other)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert connection.handler is other
        replies[0].send(200, b"yo")
        await asyncio.wait_for(other.over.wait(), LIMIT_S)
        assert other.told == [200, b"yo", "ended"]


@on_loop
async def test_an_answer_that_is_too_large_is_an_error() -> None:
    async with (
        scripted(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n123456789") as (port, _),
        origin_of(port) as origin,
    ):
        with pytest.raises(ConnectionError, match="more than 5 bytes"):
            await fetch(origin, "GET", "/", most_bytes=5)


@pytest.mark.parametrize(
    ("url", "base", "root", "port"),
    [
        ("http://a:8000/v1", "/v1", "", 8000),
        ("http://a/v1/", "/v1", "", 80),
        ("https://a/x/v1", "/x/v1", "/x", 443),
        ("http://[::1]:5", "", "", 5),
    ],
)
def test_an_address_taken_apart(url: str, base: str, root: str, port: int) -> None:
    at = Address(url)
    assert (at.base, at.root, at.port) == (base, root, port)


@pytest.mark.parametrize("url", ["ftp://a", "a:80", "http://", "http://a:99999"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(BadInput):
        Address(url)
