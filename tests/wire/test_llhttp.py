"""Why requests are not left to llhttp (docs/by-hand.md): what it takes that two readers may take for two things."""

import httptools
import pytest

from crosstie_gateway.wire.parser import RequestParser
from crosstie_gateway.wire.request import BadRequest, RequestLimits

HEAD = b"POST /a HTTP/1.1\r\nhost: a\r\n"


class Heard:
    def __init__(self) -> None:
        self.requests, self.body = 0, b""

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.requests += 1


def heard(request: bytes) -> Heard:
    told = Heard()
    httptools.HttpRequestParser(told).feed_data(request)
    return told


def refused(request: bytes) -> bool:
    parser = RequestParser(RequestLimits())
    parser.feed(request)
    try:
        parser.next()
    except BadRequest:
        return True
    return False


@pytest.mark.parametrize(
    "request_bytes",
    [
        HEAD + b"host: b\r\n\r\n",
        b"POST /a HTTP/1.1\r\n\r\n",
        b"POST /a HTTP/1.1\r\nhost: a/b\r\n\r\n",
        b"POST http://b/a HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST /a HTTP/1.0\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        b"POST /a HTTP/2.0\r\nhost: a\r\n\r\n",
    ],
    ids=[
        "two hosts",
        "no host",
        "no host's name",
        "another host",
        "chunks in 1.0",
        "a second coding",
        "another version",
    ],
)
def test_what_llhttp_takes_is_refused_here(request_bytes: bytes) -> None:
    assert heard(request_bytes).requests == 1
    assert refused(request_bytes)


def test_behind_an_upgrade_llhttp_leaves_the_body_to_be_read_as_the_next_request() -> None:
    body = b"GET /b HTTP/1.1\r\n\r\n"
    request = HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    told = Heard()
    with pytest.raises(httptools.HttpParserUpgrade):
        httptools.HttpRequestParser(told).feed_data(request)
    assert (told.requests, told.body) == (1, b"")
    parser = RequestParser(RequestLimits())
    parser.feed(request)
    whole = parser.next()
    assert whole is not None
    assert whole.body == body


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /a HTTP/1.1\nhost: a\n\n",
        HEAD + b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        HEAD + b"content-length: 3\r\ncontent-length: 3\r\n\r\nabc",
        b"GET /a HTTP/1.1\r\nhost : a\r\n\r\n",
        HEAD + b"x: b\r\n c\r\n\r\n",
    ],
    ids=["bare line ends", "two lengths", "a length twice", "space before a colon", "a folded line"],
)
def test_both_refuse_the_older_tricks(request_bytes: bytes) -> None:
    with pytest.raises(httptools.HttpParserError):
        heard(request_bytes)
    assert refused(request_bytes)
