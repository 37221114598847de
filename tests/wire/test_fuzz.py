"""Requests mutated in all the ways that have fooled servers, fed in pieces; an independent reading says what is right.

The server sees the same requests as the oracle or refuses more, never others; it closes after a refusal, never fails.
"""

import asyncio
import contextlib
from typing import Any

import httptools
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tests.waiting import LIMIT_S
from tests.wire import oracle
from tests.wire.sockets import serving

from crosstie.wire.loops import run_on_loop
from crosstie_gateway.wire.request import Request, RequestLimits
from crosstie_gateway.wire.server import Reply, Server, ServerConnection

CL = b"content-length"
TE = b"transfer-encoding"
# A body that is a request itself: whoever is fooled about lengths answers it.
INNER = b"GET /inner HTTP/1.1\r\nhost: x\r\n\r\n"
SPACES = st.sampled_from([b"", b" ", b" ", b" ", b"  ", b"\t", b" \t "])
ENDS = st.sampled_from([b"\r\n"] * 12 + [b"\n", b"\r", b"\r\n ", b"\r\n\t", b"\r\r\n", b"\0\r\n", b"\x0b\r\n", b""])
METHOD = st.sampled_from(
    [b"GET", b"POST", b"POST", b"HEAD", b"OPTIONS", b"CONNECT", b"get", b"PRI", b"G\0T", b"", b"POST "]
)
TARGET = st.sampled_from(
    [b"/", b"/a", b"/a?b=1", b"/%41", b"/%4", b"/a#b", b"*", b"x:80", b"http://x/a", b"HTTP://X?q", b"http://y/a", b"http:///a",
     b"/a b", b"/\x01", b"/\xff", b'/"', b"//x/a", b"", b"/../a"]
)  # fmt: skip
VERSION = st.sampled_from(
    [b"HTTP/1.1"] * 8
    + [b"HTTP/1.0", b"HTTP/1.2", b"HTTP/2.0", b"HTTP/0.9", b"http/1.1", b"HTTP/1.1 ", b"RTSP/1.0", b""]
)
LENGTH = st.sampled_from(
    [
        b"0",
        b"5",
        b"%d" % len(INNER),
        b"+5",
        b"-1",
        b"5, 5",
        b"5,5",
        b"0x5",
        b"5 5",
        b"",
        b"005",
        b"5.0",
        b"9" * 30,
        b"5_0",
        b"\xb25",
    ]
)
CODING = st.sampled_from(
    [b"chunked", b"chunked", b"Chunked", b"chunked ", b"xchunked", b"chunked, identity", b"identity", b"gzip, chunked", b",chunked",
     b"chunked,", b"chunked;q=1", b"\x0bchunked", b"chunked chunked", b"\tchunked", b"", b'"chunked"']
)  # fmt: skip
NAME = st.sampled_from(
    [
        b"a",
        b"cookie",
        b"authorization",
        b"content-type",
        b"x-crosstie-pool",
        b"x y",
        b"a ",
        b"",
        b" a",
        b"a\0",
        b"\xe4",
        b"a(b",
    ]
)
VALUE = st.sampled_from(
    [b"b", b"", b"b c", b"b\tc", b"\xff", b"b\0", b"\x7f", b"b: c", b"b\rc", b"b\nc", b"b\r\n c", b"b\r\nhost: y"]
)
SIZE = st.sampled_from(
    [
        b"5",
        b"05",
        b"0",
        b"5;a",
        b"5;a=b",
        b'5;a="b;c"',
        b"5 ;a",
        b"5;",
        b" 5",
        b"5 ",
        b"0x5",
        b"+5",
        b"-5",
        b"",
        b"g",
        b"5\0",
        b"f" * 20,
        b"5;a\nb",
    ]
)
DATA = st.sampled_from([b"hello", b"hell", b"hello!", b"0\r\n\r\n", b""])


@st.composite
def chunks(draw: st.DrawFn) -> bytes:
    made = [draw(SIZE) + draw(ENDS) + draw(DATA) + draw(ENDS) for _ in range(draw(st.integers(0, 2)))]
    trailer = draw(
        st.sampled_from([b"", b"", b"", b"a: b\r\n", b"content-length: 5\r\n", b" a: b\r\n", b"a: b\n", b"a\r\n"])
    )
    return b"".join(made) + draw(st.sampled_from([b"0", b"0", b"00", b"0;a", b""])) + draw(ENDS) + trailer + draw(ENDS)


ODD = [
    "line",
    "ends",
    "spaces",
    "colons",
    "host",
    "length",
    "coding",
    "both",
    "chunks",
    "fields",
    "connection",
    "before",
]


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """One request: good, or with one or two of its parts as they should not be."""
    odd = draw(st.sets(st.sampled_from(ODD), max_size=2)) if draw(st.booleans()) else set()
    end = ENDS if "ends" in odd else st.just(b"\r\n")
    line = [draw(METHOD), draw(TARGET), draw(VERSION)] if "line" in odd else [b"POST", b"/a", b"HTTP/1.1"]
    fields = [(b"host", b"x")] * (draw(st.sampled_from([0, 2])) if "host" in odd else 1)
    body, chunked = b"", bool(odd & {"coding", "chunks"}) or draw(st.booleans())
    if chunked:
        fields += [(TE, draw(CODING) if "coding" in odd else b"chunked")] * (
            draw(st.integers(1, 2)) if "coding" in odd else 1
        )
        body = draw(chunks()) if "chunks" in odd else b"%x\r\n%b\r\n0\r\n\r\n" % (len(INNER), INNER)
    if not chunked or "both" in odd:
        body = body or draw(st.sampled_from([INNER, b"hello", b""]))
        length = draw(LENGTH) if "length" in odd else b"%d" % len(body)
        fields += [(CL, length)] * (draw(st.integers(1, 2)) if "length" in odd else 1)
    if "fields" in odd:
        fields += draw(st.lists(st.tuples(NAME, VALUE), max_size=3))
    if "connection" in odd:
        options = draw(
            st.sampled_from([b"close", b"keep-alive", b"upgrade", b"a, Close", b"host", b"Transfer-Encoding"])
        )
        fields += [(b"connection", options), (b"upgrade", b"h2c")]
    draw(st.randoms(use_true_random=False)).shuffle(fields)
    space = SPACES if "spaces" in odd else st.just(b" ")
    colon = st.sampled_from([b":", b":", b" :", b"\t:", b""]) if "colons" in odd else st.just(b":")
    lines = [
        name + draw(colon) + draw(space) + value + draw(space if "spaces" in odd else st.just(b"")) + draw(end)
        for name, value in fields
    ]
    before = draw(st.sampled_from([b"\r\n", b"\r\n\r\n", b"\n", b"\r", b" "])) if "before" in odd else b""
    return before + b" ".join(line) + draw(end) + b"".join(lines) + draw(end) + body


@st.composite
def pieces(draw: st.DrawFn) -> list[bytes]:
    """A few requests on one connection, perhaps with a byte changed, in the reads that they come in."""
    whole = b"".join(draw(st.lists(requests(), min_size=1, max_size=3)))
    if draw(st.integers(0, 3)) == 3 and whole:
        at = draw(st.integers(0, len(whole) - 1))
        whole = (
            whole[:at]
            + draw(st.sampled_from([b"", b"\r", b"\n", b"\0", b" ", b":", b",", b"\r\n", b"0"]))
            + whole[at + 1 :]
        )
    cuts = sorted(draw(st.sets(st.integers(1, max(len(whole) - 1, 1)), max_size=6)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]


class Taken(asyncio.Transport):
    """A client's side that keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent, self.ended = b"", False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.ended = True

    def is_closing(self) -> bool:
        return self.ended

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class Feeding:
    """A server that takes down what it is asked, and a connection to it that is fed by hand."""

    def __init__(self, limits: RequestLimits | None = None):
        self.seen: list[oracle.Seen] = []
        self.waiting: list[Any] = []
        self.failed: list[Any] = []
        loop: Any = self
        self.connection = ServerConnection(Server(loop, self._handle, limits))
        self.taken = Taken()
        self.connection.connection_made(self.taken)

    def time(self) -> float:
        return 0.0

    def call_soon(self, call: Any, *arguments: Any) -> None:
        self.waiting.append(call)

    def call_exception_handler(self, context: Any) -> None:
        self.failed.append(context)

    def _handle(self, request: Request, reply: Reply) -> None:
        target = request.path + ("?" + request.query if request.query else "")
        self.seen.append(oracle.Seen(request.method, target, request.body))
        reply.send(200, b"ok")

    def feed(self, data: bytes) -> None:
        if not self.taken.ended:
            self.connection.data_received(data)
        while self.waiting:
            self.waiting.pop(0)()

    @property
    def refused(self) -> bool:
        return bool(self.connection.server.refused)


def agree(reads: list[bytes], feeding: Feeding) -> None:
    whole = b"".join(reads)
    right, end = oracle.read(whole)
    for read in reads:
        feeding.feed(read)
    seen = feeding.seen
    told = [one._replace(target=one.target.rstrip("?")) for one in right]
    assert seen == told[: len(seen)], f"{whole!r}: sees what is not there"
    assert not feeding.failed
    assert feeding.refused or len(seen) == len(right), f"{whole!r}: waits, or has lost a request"
    if end == "bad" and not feeding.refused:
        # It may be waiting for the end of what cannot become right any more; the clock ends that.
        assert feeding.connection.arriving_since is not None, f"{whole!r}: takes it for good"
    assert feeding.taken.ended == (feeding.refused or (end == "close" and len(seen) == len(right)))


@settings(max_examples=max(250, settings().max_examples), deadline=None, suppress_health_check=list(HealthCheck))
@given(pieces())
@pytest.mark.slow
def test_the_server_reads_what_the_standard_says_or_refuses(reads: list[bytes]) -> None:
    agree(reads, Feeding())


class Llhttp:
    """What the parser of Node and of uvicorn makes of the same bytes."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._body = b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.bodies.append(self._body)
        self._body = b""


@settings(max_examples=max(150, settings().max_examples), deadline=None, suppress_health_check=list(HealthCheck))
@given(requests().filter(lambda whole: b"upgrade" not in whole.lower()))
@pytest.mark.slow
def test_what_the_server_takes_is_what_another_parser_takes(whole: bytes) -> None:
    """Of a single request: where both take it, they see the same body and nothing behind it."""
    feeding, other = Feeding(), Llhttp()
    feeding.feed(whole)
    with contextlib.suppress(httptools.HttpParserError, httptools.HttpParserUpgrade):
        httptools.HttpRequestParser(other).feed_data(whole)
    if feeding.seen and other.bodies:
        assert [one.body for one in feeding.seen] == other.bodies


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(pieces(), min_size=1, max_size=8))
def test_over_sockets_it_answers_each_and_closes(several: list[list[bytes]]) -> None:
    """Several clients at a time: each gets answers to its own requests, in number and order, and the end."""

    def echo(request: Request, reply: Reply) -> None:
        asyncio.get_running_loop().call_soon(reply.send, 200, b"<%b>" % request.headers.get(b"mark", b"none"))

    async def one(port: int, number: int, reads: list[bytes]) -> None:
        mark = b"mark%d" % number
        marked = [read.replace(b"host: x", b"host: x\r\nmark: " + mark) for read in reads]
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for read in marked:
            writer.write(read)
            await asyncio.sleep(0)
        writer.write_eof()
        got = b""
        while piece := await reader.read(65536):
            got += piece
        writer.close()
        right, _ = oracle.read(b"".join(marked))
        answers = got.count(b"<%b>" % mark) + got.count(b"<none>")
        assert answers <= len(right)
        assert got.count(b"<") == answers, "another's answer"

    async def test() -> None:
        async with serving(echo) as (server, port), asyncio.timeout(LIMIT_S):
            await asyncio.gather(
                *(one(port, number, reads) for number, reads in enumerate(several)), return_exceptions=False
            )
            while server.connections:
                await asyncio.sleep(0.01)

    run_on_loop(test())


def test_the_oracle_and_the_comparison_can_fail() -> None:
    assert oracle.read(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi" + INNER) == (
        [oracle.Seen("POST", "/", b"hi"), oracle.Seen("GET", "/inner", b"")], "more",
    )  # fmt: skip
    assert oracle.read(INNER.replace(b"\r\nhost", b"\nhost"))[1] == "bad"
    fooled = Feeding()
    fooled.seen.append(oracle.Seen("GET", "/inner", b""))
    with pytest.raises(AssertionError, match="not there"):
        agree([b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi"], fooled)
    deaf = Feeding()
    deaf.connection._refused = True
    with pytest.raises(AssertionError, match="lost"):
        agree([INNER], deaf)
