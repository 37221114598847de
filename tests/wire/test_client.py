import asyncio
import gc
import os

import pytest
from hypothesis import example, given, strategies as st
from tests.waiting import LIMIT_S, until
from tests.wire.sockets import origin_of, scripted, serving
from tests.wire.test_server import on_loop

from crosstie.core.errors import BadInput
from crosstie.wire.address import Address
from crosstie.wire.client import Connection, Headers, Origin
from crosstie.wire.fetch import fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.wire.request import Request
from crosstie_gateway.wire.server import Reply

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
    "answer",
    [
        b"HTTP/1.1 200 OK\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhi",
        # What the parser refuses, and what it is told to refuse.
        b"HTTP/9 what\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\n",
    ],
)
def test_what_is_closed_is_gone_before_any_collector_comes(answer: bytes) -> None:
    """With all that it has read: engines that hang up all day must not fill the memory between two collections."""

    async def ask() -> None:
        async with scripted(answer) as (port, _):
            for _ in range(5):
                await heard(port)
            # Its end is told in a later turn of the loop.
            await until(lambda: connections() <= before)

    def connections() -> set[int]:
        # By their very type: some objects of torch's complain when they are asked for their class.
        return {id(one) for one in gc.get_objects() if type(one) is Connection}

    gc.collect()
    gc.disable()
    before = connections()
    try:
        run_on_loop(ask())
    finally:
        gc.enable()


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


class Kept(asyncio.Transport):
    """A transport of no socket; `shut` once its connection was given up."""

    shut = False

    def get_extra_info(self, name: str, default: object = None) -> object:
        return None

    def write(self, data: object) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        self.shut = True


def told_of(answers: list[tuple[bytes, int]], *, remembers: bool) -> list[object]:
    """What is told of answers, one after the other on a connection as long as that is kept, each of which comes in two
    reads if it is cut; by a client that remembers the head of the last one, or does not."""
    loop = asyncio.new_event_loop()
    try:
        origin, told = Origin(loop, Address("http://h/v1")), list[object]()
        connection, transport = Connection(origin), Kept()
        connection.connection_made(transport)
        for answer, cut in answers:
            listener = Named()
            connection.send(b"", listener)
            for piece in (answer[:cut], answer[cut:]) if cut else (answer,):
                if not remembers:
                    origin.known = None
                if not transport.shut:
                    connection.data_received(piece)
            told += [*listener.told, "|"]
            if transport.shut:
                break
        return [*told, transport.shut]
    finally:
        loop.close()


class Named(Heard):
    def on_head(self, status: int, headers: Headers) -> None:
        self.told += [status, *headers]


HEADS = (
    b"content-type: application/json\r\ncontent-length: %b\r\n",
    b"Content-Length: %b\r\ndate: now\r\n",
    b"content-length: %b\r\nconnection: close\r\n",
    b"x: content-length: %b\r\ncontent-length: %b\r\n",
    b"content-length:%b\r\n",
    b"content-length: %b \r\n",
)


@st.composite
def an_answer(draw: st.DrawFn) -> tuple[bytes, int]:
    body = draw(st.sampled_from((b"", b"a", b"hi", b"{}\r\n\r\n", b"0123456789")))
    length = draw(st.sampled_from((b"%d", b"%d", b"%d", b"0%d", b"+%d", b"%d0", b"%020d"))) % len(body)
    head = draw(st.sampled_from((*HEADS[:2], *HEADS[:2], *HEADS)))
    status = draw(st.sampled_from((b"200 OK", b"200 OK", b"200 OK", b"404 Not Found")))
    after = draw(st.sampled_from((b"", b"", b"", b"!", OK)))
    answer = b"HTTP/1.1 %b\r\n%b\r\n%b%b" % (status, head.replace(b"%b", length), body, after)
    return answer, draw(st.sampled_from((0, 0, 0, 5, len(answer) - 1)))


@given(st.lists(an_answer(), min_size=1, max_size=5))
def test_a_head_that_comes_again_is_told_as_one_that_was_read(answers: list[tuple[bytes, int]]) -> None:
    assert told_of(answers, remembers=True) == told_of(answers, remembers=False)


def test_a_head_that_comes_again_but_for_its_length_is_not_read_again() -> None:
    loop = asyncio.new_event_loop()
    origin = Origin(loop, Address("http://h/v1"))
    connection, listener = Connection(origin), Named()
    connection.connection_made(Kept())
    for length in (2, 0, 10):
        connection.send(b"", listener)
        connection.data_received(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (length, b"x" * length))
        known = origin.known
        assert known is not None
        # Kept of the first, and of none that it was enough for.
        assert known.headers == [(b"content-length", b"2")]
    loop.close()
    assert [one for one in listener.told if isinstance(one, tuple)] == [
        (b"content-length", b"2"), (b"content-length", b"0"), (b"content-length", b"10"),
    ]  # fmt: skip


class Quiet:
    """A transport that takes everything and is asked nothing."""

    def write(self, data: bytes) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("length", "piece", "taken"), [(40_000, 3, True), (40_000, 17_000, True), (70_000, 1000, False)]
)
def test_a_head_in_small_pieces_is_the_same_head(length: int, piece: int, taken: bool) -> None:
    """Pieces without the end of a line are held until there is one, and counted once against the limit."""
    loop = asyncio.new_event_loop()
    loop.close()
    connection, listener = Connection(Origin(loop, Address("http://127.0.0.1/v1"))), Heard()
    connection.transport = Quiet()  # type: ignore[assignment]
    connection.send(b"", listener)
    answer = b"HTTP/1.1 200 OK\r\na: " + b"x" * length + b"\r\ncontent-length: 2\r\n\r\nhi"
    for at in range(0, len(answer), piece):
        if connection.handler is not None:
            connection.data_received(answer[at : at + piece])
    whole = b"".join(one for one in listener.told if isinstance(one, bytes))
    assert (listener.told[0], whole, listener.told[-1]) == ((200, b"hi", "ended") if taken else ("lost", b"", "lost"))


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
LONG = b"x" * 26 + b"\r\n"
CHUNKS = st.sampled_from(
    [
        b"2\r\nhi\r\n",
        b"1A\r\n" + LONG,
        b"1a\r\n" + LONG,
        b"2;a=b\r\nhi\r\n",
        b"02\r\nhi\r\n",
        b"7\r\n\r\n2\r\nhi\r\n",
        b"3\r\nhi\r\n",
        b"2",
        b"\r\n",
        b"1\r\n",
        b"+2\r\nhi\r\n",
        b"0\r\n",
        b"0\r\n\r\n",
        b"a: b\r\n",
    ]
)


@given(st.lists(CHUNKS, max_size=8), st.sets(st.integers(1, 120), max_size=3), st.booleans())
@example([b"2\r\nhi\r\n1", b"2\r\nhi\r\n"], set(), True)
@example([b"2\r\nhi\r\n9\r\n", b"2\r\nhi\r\n"], set(), True)
def test_whole_chunks_say_the_same_around_the_parser(chunks: list[bytes], cuts: set[int], alone: bool) -> None:
    reads = chunks
    if not alone:
        whole = b"".join(chunks)
        reads = [whole[a:b] for a, b in zip([0, *sorted(cuts)], [*sorted(cuts), len(whole)], strict=True)]

    def told(around: bool) -> list[object]:
        loop = asyncio.new_event_loop()
        loop.close()
        connection, listener = Connection(Origin(loop, Address("http://h/v1"))), Heard()
        connection.transport = Quiet()  # type: ignore[assignment]
        connection.send(b"", listener)
        for read in (CHUNKED, *reads):
            connection._between = connection._between and around
            if read and connection.handler is not None:
                connection.data_received(read)
        said = [one for one in listener.told if not isinstance(one, bytes)]
        return [*said, b"".join(one for one in listener.told if isinstance(one, bytes))]

    assert told(around=True) == told(around=False)
