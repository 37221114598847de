"""Requests that two readers could take for two different things: each is refused, and the connection closed."""

import pytest
from tests.wire.sockets import said, serving
from tests.wire.test_server import echo, on_loop

from crosstie_gateway.wire.parser import _FIRST_LINES, _HEADER_LINES, RequestParser
from crosstie_gateway.wire.request import BadRequest, Request, RequestLimits
from crosstie_gateway.wire.server import Reply

INNER = b"GET /inner HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\n%b\r\n"
CHUNKED = POST % b"transfer-encoding: chunked\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\n%b\r\n"


def length(value: bytes) -> bytes:
    return POST % (b"content-length: %b\r\n" % value)


def coding(value: bytes, more: bytes = b"") -> bytes:
    return POST % (b"transfer-encoding: %b\r\n" % value + more) + b"0\r\n\r\n"


REFUSED = {
    # Lengths
    "two lengths": (POST % b"content-length: 33\r\ncontent-length: 0\r\n", 400),
    "the same length twice": (POST % b"content-length: 0\r\nContent-Length: 0\r\n", 400),
    "a list of lengths": (length(b"5, 5"), 400),
    "a list without spaces": (length(b"5,5"), 400),
    "a plus": (length(b"+5"), 400),
    "a minus": (length(b"-5"), 400),
    "a space inside": (length(b"5 5"), 400),
    "hexadecimal": (length(b"0x5"), 400),
    "empty": (length(b""), 400),
    "a fraction": (length(b"5.0"), 400),
    "an underscore": (length(b"1_0"), 400),
    "another script's digit": (length("٥".encode()), 400),
    "a superscript": (length(b"\xb2"), 400),
    "more than there can be": (length(b"9" * 40), 413),
    "more digits than a number may have": (length(b"9" * 9000), 413),
    # Transfer codings
    "a length and chunks": (coding(b"chunked", b"content-length: 5\r\n"), 400),
    "chunks and a length of 0": (POST % b"content-length: 0\r\ntransfer-encoding: chunked\r\n" + b"0\r\n\r\n", 400),
    "chunked twice": (coding(b"chunked", b"transfer-encoding: chunked\r\n"), 400),
    "chunked, chunked": (coding(b"chunked, chunked"), 400),
    "chunked not last": (coding(b"chunked, identity"), 400),
    "chunked, then identity": (coding(b"chunked", b"transfer-encoding: identity\r\n"), 400),
    "xchunked": (coding(b"xchunked"), 400),
    "identity": (coding(b"identity"), 400),
    "an empty coding": (coding(b""), 400),
    "an empty one before": (coding(b", chunked"), 400),
    "with a parameter": (coding(b"chunked;q=1"), 400),
    "in quotes": (coding(b'"chunked"'), 400),
    "a vertical tab": (coding(b"\x0bchunked"), 400),
    "a coding that is not known": (coding(b"gzip, chunked"), 501),
    "chunks of HTTP/1.0": (coding(b"chunked").replace(b"HTTP/1.1", b"HTTP/1.0"), 400),
    # Chunks
    "no size": (CHUNKED + b"\r\n", 400),
    "a size with a sign": (CHUNKED + b"+5\r\nhello\r\n0\r\n\r\n", 400),
    "a size with 0x": (CHUNKED + b"0x5\r\nhello\r\n0\r\n\r\n", 400),
    "a space before the size": (CHUNKED + b" 5\r\nhello\r\n0\r\n\r\n", 400),
    "a space behind the size": (CHUNKED + b"5 \r\nhello\r\n0\r\n\r\n", 400),
    "a size beyond any": (CHUNKED + b"f" * 17 + b"\r\n", 413),
    "a size that would wrap": (CHUNKED + b"1" + b"0" * 16 + b"\r\n", 413),
    "a bare LF behind the size": (CHUNKED + b"5\nhello\r\n0\r\n\r\n", 400),
    "a bare CR behind the size": (CHUNKED + b"5\rXhello\r\n0\r\n\r\n", 400),
    "a bare LF in an extension": (CHUNKED + b"5;a\nhello\r\n0\r\n\r\n", 400),
    "quotes that do not close": (CHUNKED + b'5;a="\r\nhello\r\n0\r\n\r\n', 400),
    "a NUL in an extension": (CHUNKED + b"5;a=\0\r\nhello\r\n0\r\n\r\n", 400),
    "a chunk longer than its size": (CHUNKED + b"4\r\nhello\r\n0\r\n\r\n", 400),
    "a bare LF behind a chunk": (CHUNKED + b"5\r\nhello\n0\r\n\r\n", 400),
    "a length behind the body": (CHUNKED + b"0\r\ncontent-length: 5\r\n\r\n", 400),
    "a key behind the body": (CHUNKED + b"0\r\nauthorization: me\r\n\r\n", 400),
    "a trailer that is none": (CHUNKED + b"0\r\nwords\r\n\r\n", 400),
    "a folded trailer": (CHUNKED + b"0\r\na: b\r\n c\r\n\r\n", 400),
    # Lines
    "bare LF everywhere": (b"GET / HTTP/1.1\nhost: x\n\n", 400),
    "bare LF after the first line": (b"GET / HTTP/1.1\nhost: x\r\n\r\n", 400),
    "bare LF after a header": (b"GET / HTTP/1.1\r\nhost: x\na: b\r\n\r\n", 400),
    "bare LF as the last line": (b"GET / HTTP/1.1\r\nhost: x\r\n\n", 400),
    "bare CR in a value": (GET % b"a: b\rtransfer-encoding: chunked\r\n", 400),
    "bare CR as line end": (b"GET / HTTP/1.1\rhost: x\r\n\r\n", 400),
    "CR CR LF": (GET % b"a: b\r\r\n", 400),
    "a folded header": (GET % b"a: b\r\n c\r\n", 400),
    "a folded first header": (b"GET / HTTP/1.1\r\n host: x\r\n\r\n", 400),
    "a space before the colon": (GET % b"content-length : 5\r\n", 400),
    "a tab before the colon": (GET % b"content-length\t: 5\r\n", 400),
    "no colon": (GET % b"words\r\n", 400),
    "no name": (GET % b": b\r\n", 400),
    "NUL in a name": (GET % b"a\0: b\r\n", 400),
    "NUL in a value": (GET % b"a: b\0\r\n", 400),
    "a control character": (GET % b"a: \x01\r\n", 400),
    "DEL": (GET % b"a: \x7f\r\n", 400),
    "a name beyond ASCII": (GET % b"\xe4: b\r\n", 400),
    "a name with a bracket": (GET % b"a(b: c\r\n", 400),
    "two empty lines first": (b"\r\n\r\n" + INNER, 400),
    "a bare LF first": (b"\n" + INNER, 400),
    "a space first": (b" " + INNER, 400),
    "two spaces": (b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a tab between": (b"GET\t/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a space at the end": (b"GET / HTTP/1.1 \r\nhost: x\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00", 400),
    # Hosts and targets
    "no host": (b"GET / HTTP/1.1\r\n\r\n", 400),
    "two hosts": (GET % b"Host: y\r\n", 400),
    "a host that is none": (b"GET / HTTP/1.1\r\nhost: a b\r\n\r\n", 400),
    "a host with a path": (b"GET / HTTP/1.1\r\nhost: a/b\r\n\r\n", 400),
    "a host with a user": (b"GET / HTTP/1.1\r\nhost: me@x\r\n\r\n", 400),
    "a target of another host": (b"GET http://y/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a target with a user": (b"GET http://me@x/ HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a target without a host": (b"GET http:///a HTTP/1.1\r\nhost: \r\n\r\n", 400),
    "another scheme": (b"GET file:///etc/passwd HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "an authority": (b"GET x:80 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a tunnel": (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", 501),
    "an asterisk": (b"GET * HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a fragment": (b"GET /a#b HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "half an escape": (b"GET /%4 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a control character in the target": (b"GET /\x01 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    "a byte beyond ASCII in the target": (b"GET /\xe4 HTTP/1.1\r\nhost: x\r\n\r\n", 400),
    # Methods and versions
    "no such method": (b"BREW / HTTP/1.1\r\nhost: x\r\n\r\n", 501),
    "lower case": (b"get / HTTP/1.1\r\nhost: x\r\n\r\n", 501),
    "HTTP/0.9": (b"GET /\r\n", 400),
    "HTTP/0.9 by number": (b"GET / HTTP/0.9\r\nhost: x\r\n\r\n", 505),
    "HTTP/1.2": (b"GET / HTTP/1.2\r\nhost: x\r\n\r\n", 505),
    "HTTP/1.10": (b"GET / HTTP/1.10\r\nhost: x\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    "http/1.1": (b"GET / http/1.1\r\nhost: x\r\n\r\n", 400),
    "RTSP": (b"GET / RTSP/1.1\r\nhost: x\r\n\r\n", 400),
    # What there can be one of
    "two keys": (GET % b"authorization: a\r\nAuthorization: b\r\n", 400),
    "two other keys": (GET % b"x-api-key: a\r\nx-api-key: b\r\n", 400),
    "two types": (GET % b"content-type: a\r\ncontent-type: b\r\n", 400),
    "two ids": (GET % b"x-request-id: a\r\nx-request-id: b\r\n", 400),
    "two pools": (GET % b"x-crosstie-pool: a\r\nX-Crosstie-Pool: a\r\n", 400),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_whole_and_in_pieces_and_nothing_behind_it_is_heard(what: str) -> None:
    data, status = REFUSED[what]
    for pieces in ([data + INNER], [data[i : i + 1] for i in range(len(data))]):
        parser, seen = RequestParser(RequestLimits()), list[str]()
        with pytest.raises(BadRequest) as refused:  # noqa: PT012 (which piece it is refused at is no matter)
            for piece in pieces:
                parser.feed(piece)
                while (request := parser.next()) is not None:
                    seen.append(request.path)
            raise BadRequest(0, "it waits for more")
        assert (refused.value.status, seen) == (status, [])
        assert not set(refused.value.why) & {"\r", "\n", "\0"}


@on_loop
async def test_a_refusal_closes_the_connection_and_is_counted() -> None:
    async with serving(echo) as (server, port):
        for data in (REFUSED["two lengths"][0] + INNER, REFUSED["a tunnel"][0] + INNER):
            got = await said(port, data)
            assert got.count(b"HTTP/1.1 ") == 1
            assert b"connection: close" in got
        assert server.refused == {"http_400": 1, "http_501": 1}


def seen_of(data: bytes) -> list[Request]:
    parser, seen = RequestParser(RequestLimits()), []
    parser.feed(data)
    while (request := parser.next()) is not None:
        seen.append(request)
    return seen


def test_what_is_odd_but_clear_is_taken() -> None:
    for data, body in (
        (length(b"005") + b"hello", b"hello"),
        (length(b" 5\t") + b"hello", b"hello"),
        (b"\r\n" + length(b"5") + b"hello", b"hello"),
        (POST % b"transfer-encoding: Chunked \r\n" + b"5;a;b=\"c;d\\\"\" ; e\r\nhello\r\n00\r\na: b\r\n\r\n", b"hello"),
        (CHUNKED + b"00000000000000000005\r\nhello\r\n0\r\n\r\n", b"hello"),
        (GET % b"a:\r\nb: \xe4\r\n", b""),
        (b"GET / HTTP/1.0\r\n\r\n", b""),
        (b"OPTIONS * HTTP/1.1\r\nhost:\r\n\r\n", b""),
    ):  # fmt: skip
        first, inner = seen_of(data + INNER)
        assert (first.body, inner.path) == (body, "/inner")


def test_a_name_that_was_met_before_needs_its_colon_too() -> None:
    """Names are remembered; the rest of their line is not."""
    assert seen_of(GET % b"Met-Before: a\r\n")
    for line in (b"Met-Before\r\n", b"Met-Before \r\n", b"Met-Before : a\r\n", b"Met-Before\t: a\r\n"):
        with pytest.raises(BadRequest):
            seen_of(GET % line)


def test_an_absolute_target_is_its_path() -> None:
    (request,) = seen_of(b"GET HTTP://X:8080/a/b?c=d HTTP/1.1\r\nhost: x:8080\r\n\r\n")
    assert (request.path, request.query) == ("/a/b", "c=d")
    (request,) = seen_of(b"GET http://[::1]?c HTTP/1.1\r\nhost: [::1]\r\n\r\n")
    assert (request.path, request.query) == ("/", "c")


def test_lists_are_joined_and_what_belongs_to_the_connection_goes_no_further() -> None:
    (request,) = seen_of(
        GET % b"Accept: a\r\ncookie: a=1\r\naccept: b\r\nCookie: b=2\r\nConnection: x-hop\r\nX-Hop: y\r\n"
    )
    assert request.headers == {b"host": b"x", b"accept": b"a, b", b"cookie": b"a=1; b=2", b"connection": b"x-hop"}


@on_loop
async def test_a_body_behind_an_offer_to_upgrade_is_a_body() -> None:
    """As Java's client sends it. The offer is not taken up, so what follows is no other protocol."""
    asked: list[tuple[str, bytes]] = []

    def note(request: Request, reply: Reply) -> None:
        asked.append((request.path, request.body))
        reply.send(200, b"done")

    async with serving(note) as (_, port):
        offer = (
            b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: A\r\ncontent-length: %d\r\n"
            % len(INNER)
        )
        await said(port, POST % offer + INNER + INNER.replace(b"host", b"connection: close\r\nhost"))
        assert asked == [("/", INNER), ("/inner", b"")]


@pytest.mark.parametrize(
    ("limits", "data", "status"),
    [
        (RequestLimits(target_bytes=20), b"GET /" + b"a" * 20 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (RequestLimits(target_bytes=20), b"GET /" + b"a" * 200, 414),
        (RequestLimits(target_bytes=20), b"GET /\xff" + b"a" * 200 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (RequestLimits(header_bytes=40), GET % (b"a: " + b"b" * 40 + b"\r\n"), 431),
        (RequestLimits(headers=3), GET % b"a: b\r\nc: d\r\ne: f\r\n", 431),
        (RequestLimits(head_bytes=60), GET % (b"a: b\r\n" * 10), 431),
        (RequestLimits(head_bytes=60), (GET % (b"a: b\r\n" * 10))[:-2], 431),
        (RequestLimits(body_bytes=4), length(b"5"), 413),
        (RequestLimits(body_bytes=4), CHUNKED + b"2\r\nhe\r\n3\r\n", 413),
        (RequestLimits(chunk_line_bytes=20), CHUNKED + b"5;a=" + b"b" * 20, 400),
        (RequestLimits(chunk_line_bytes=20), CHUNKED + b"0" * 20 + b"5\r\n", 400),
        (RequestLimits(framing_bytes=100), CHUNKED + b"1\r\na\r\n" * 30, 400),
        (RequestLimits(trailer_bytes=20), CHUNKED + b"0\r\n" + b"a: b\r\n" * 5, 431),
        (RequestLimits(trailer_bytes=20), CHUNKED + b"0\r\n" + b"a" * 30, 431),
    ],
)  # fmt: skip
def test_each_limit_holds_and_it_is_the_limit_that_refuses(limits: RequestLimits, data: bytes, status: int) -> None:
    parser = RequestParser(limits)
    parser.feed(data)
    with pytest.raises(BadRequest) as refused:
        parser.next()
    assert refused.value.status == status
    generous = RequestParser(RequestLimits())
    generous.feed(data.replace(b"\xff", b""))
    generous.next()


def read(head: bytes, limits: RequestLimits | None = None) -> Request:
    parser = RequestParser(limits or RequestLimits())
    parser.feed(head)
    request = parser.next()
    assert request is not None
    return request


def test_a_line_that_comes_again_says_the_same_and_is_held_to_every_limit_again() -> None:
    head = GET.replace(b"GET /", b"GET /come-again") % b"X-Some: thing \r\n"
    first, second = read(head), read(head)
    assert first is not second
    assert (first.method, first.path, first.headers) == (second.method, second.path, second.headers)
    assert second.headers == {b"host": b"x", b"x-some": b"thing"}
    # Whoever takes one away takes it from its own request alone.
    del second.headers[b"x-some"]
    assert read(head).headers == first.headers
    for limits, status in ((RequestLimits(target_bytes=4), 414), (RequestLimits(headers=1), 431)):
        with pytest.raises(BadRequest) as refused:
            read(head, limits)
        assert refused.value.status == status
    with pytest.raises(BadRequest, match="two headers host"):
        read(GET % b"host: x\r\n")


_AGAIN = b"POST /v1/x?q=1 HTTP/1.1\r\nhost: x\r\n%bContent-Length: %b\r\naccept: a\r\n\r\n%b"


@pytest.mark.parametrize(
    "second",
    [
        *(_AGAIN % (b"", number, b"hello") for number in (b"5", b"005", b"4", b"+5", b"-5", b"5,5", b"5 ", b" 5", b"")),
        *(_AGAIN % (b"", number, b"") for number in (b"0", b"1" * 18, b"9" * 19, b"0x5", b"5\r\nx: y", b"5\nx: y")),
        *(_AGAIN % (more, b"5", b"hello") for more in (b"a: b\r\n", b"content-length: 5\r\n", b"host: y\r\n")),
        (_AGAIN % (b"", b"5", b"hello")).replace(b"accept: a", b"Content-Length: 5"),
        (_AGAIN % (b"", b"5", b"hello")).replace(b"accept: a", b"transfer-encoding: chunked"),
        (_AGAIN % (b"", b"5", b"hello")).replace(b"POST", b"PUT"),
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)  # fmt: skip
def test_after_a_head_like_it_a_request_is_read_as_on_a_connection_of_its_own(second: bytes) -> None:
    limits = RequestLimits()
    alone, after = RequestParser(limits), RequestParser(limits)
    first = _AGAIN % (b"", b"2", b"ab")
    for _ in range(2):
        after.feed(first)
        before = after.next()
        assert before is not None
        # Whoever takes one away takes it from its own request alone.
        before.headers.clear()

    def outcome(parser: RequestParser) -> tuple[object, ...]:
        parser.feed(second)
        try:
            got = parser.next()
        except BadRequest as refused:
            return (refused.status, refused.why)
        if got is None:
            return (parser.in_head, parser.held)
        return (got.method, got.path, got.query, got.headers, got.body, parser.keep_alive, parser.begun)

    assert outcome(after) == outcome(alone)


def test_a_head_that_comes_again_is_known_and_held_to_every_limit() -> None:
    for spelled in (b"Content-Length", b"content-length"):
        parser = RequestParser(RequestLimits(body_bytes=100))
        heads = []
        for number in (b"2", b"3"):
            parser.feed((_AGAIN % (b"", number, b"abc"[: int(number)])).replace(b"Content-Length", spelled))
            got = parser.next()
            assert got is not None
            assert got.headers[b"content-length"] == number
            heads.append(got.head)
        assert heads[0] is not None
        assert heads[0] is heads[1]
        parser.feed((_AGAIN % (b"", b"101", b"")).replace(b"Content-Length", spelled))
        with pytest.raises(BadRequest) as refused:
            parser.next()
        assert refused.value.status == 413


def test_lines_are_kept_up_to_a_number_and_secrets_never() -> None:
    before = len(_HEADER_LINES)
    for secret in (b"Authorization: Bearer s3", b"x-api-key: s3", b"Cookie: s3", b"Content-Length: 0"):
        assert read(GET % (secret + b"\r\n")).headers
    read(GET.replace(b"/", b"/?api-key=s3", 1) % b"")
    assert len(_HEADER_LINES) <= before + 1
    assert not any(b"s3" in line for line in (*_HEADER_LINES, *_FIRST_LINES))
    for number in range(3000):
        read(GET.replace(b"/", b"/%d" % number, 1) % (b"a: %d\r\nb: %b\r\n" % (number, b"c" * 300)))
    assert len(_HEADER_LINES) <= 1000
    assert len(_FIRST_LINES) <= 1000
    assert all(len(line) <= 256 for line in _HEADER_LINES)
