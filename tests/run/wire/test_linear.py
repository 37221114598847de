"""Whatever clients and backends send, four times as much of it takes some four times the work, not sixteen times.

Every parser on a request's way reads what is meant to harm it, at two sizes, of which the larger is about what its
limits allow. CPU is compared and not time, and again if the machine was too busy to tell.
"""

import asyncio
import contextlib
import gc
import importlib
import itertools
import pkgutil
import re
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from re import _parser as patterns  # type: ignore[attr-defined]
from typing import Any, cast

import pytest
from tests.run.wire.test_grpc import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    SETTINGS,
    WINDOW_UPDATE,
    Client as GrpcClient,
    frame,
    message,
)

from crosstie.core.errors import BadInput
from crosstie.core.fleet import JwtIdentity
from crosstie.wire.address import Address
from crosstie.wire.client import Connection, Origin
from crosstie.wire.proxy import Proxy, _Opening
from crosstie.wire.sse import Events, payloads
from crosstie_gateway.gateway.answers import Choices, lacks_model, oddity
from crosstie_gateway.gateway.backend import engine_load
from crosstie_gateway.gateway.body import read_answer, read_body, read_form_body, with_model
from crosstie_gateway.gateway.errors import RequestRejected
from crosstie_gateway.gateway.identity import trace_context
from crosstie_gateway.gateway.messages import chat_for
from crosstie_gateway.gateway.relay import StreamRelay, WholeRelay
from crosstie_gateway.gateway.roads import tidy_path
from crosstie_gateway.gateway.tokens import TokenRefused, TokenVerifier
from crosstie_gateway.gateway.transcript import Transcript
from crosstie_gateway.pick.messages import Malformed, Said
from crosstie_gateway.service.door_keys import COOKIE, Sessions
from crosstie_gateway.wire.outline import Outline
from crosstie_gateway.wire.parser import RequestParser
from crosstie_gateway.wire.request import BadRequest, Request, RequestLimits
from crosstie_gateway.wire.server import Reply, Server, ServerConnection
from crosstie_gateway.wire.unpack import Unpacking

Work = Callable[[], object]
TIMES, MOST_RATIO, LEAST_S = 4, 8.0, 2e-3
KIB, MIB = 2**10, 2**20
REFUSALS = (BadInput, BadRequest, RequestRejected, TokenRefused, Malformed)
NO_LIMITS = RequestLimits(body_values=10**9, body_plain_bytes=2**30)


def cpu_s(work: Work, times: int) -> float:
    begun = time.process_time()
    for _ in range(times):
        with contextlib.suppress(*REFUSALS):
            work()
    return time.process_time() - begun


def grows(small: Work, large: Work) -> float:
    """How many times the CPU of the one the other takes.

    Too long a time of the smaller would hide growth, so it is the best of five; too long a time of the larger hides
    nothing, and is looked at again.
    """
    gc.disable()
    try:
        cpu_s(small, 1)
        times = int(LEAST_S / max(cpu_s(small, 1), 1e-7)) + 1
        once_s = min(cpu_s(small, times) for _ in range(5)) / times
        fewer = -(-times // TIMES)
        return cpu_s(large, fewer) / fewer / once_s
    finally:
        gc.enable()


def check(make: Callable[[int], Work], size: int) -> None:
    small, large = make(size // TIMES), make(size)
    ratios: list[float] = []
    # On a busy machine several in a row may be off; what grows too fast does so every time.
    while len(ratios) < 10:
        ratios.append(grows(small, large))
        if ratios[-1] < MOST_RATIO:
            return
    pytest.fail(f"{TIMES} times the input takes {min(ratios):.1f} times the CPU")


def filled(unit: bytes, size: int, before: bytes = b"", after: bytes = b"") -> bytes:
    return before + unit * (size // len(unit)) + after


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


# Requests


def reads(data: bytes, piece: int = MIB) -> Work:
    """A connection that sends this."""
    parts = pieces(data, piece)

    def work() -> None:
        parser = RequestParser(NO_LIMITS)
        for part in parts:
            parser.feed(part)
            while parser.next() is not None:
                pass

    return work


def head(*lines: bytes, body: bytes = b"") -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n" + b"".join(one + b"\r\n" for one in lines) + b"\r\n" + body


HEADERS_OF_REQUESTS: dict[str, tuple[int, Callable[[int], Work]]] = {
    "many headers": (60 * KIB, lambda n: reads(head(*(b"x-%d: %b" % (at, b"v" * (n // 90)) for at in range(90))))),
    "one name, many times": (60 * KIB, lambda n: reads(head(*[b"cookie: " + b"a" * (n // 90)] * 90))),
    "a head by bytes": (16 * KIB, lambda n: reads(head(*[b"x: " + b"a" * 600] * (n // 600)), 1)),
    "blank space in a header": (15 * KIB, lambda n: reads(head(filled(b" ", n, b"x:", b"a")))),
    "options of a connection": (15 * KIB, lambda n: reads(head(filled(b"a,", n, b"connection: ")))),
    "codings": (15 * KIB, lambda n: reads(head(filled(b"chunked,", n, b"transfer-encoding: ")))),
    "a long length": (15 * KIB, lambda n: reads(head(filled(b"0", n, b"content-length: ", b"1"), body=b"a"))),
    "a host": (15 * KIB, lambda n: reads(b"GET / HTTP/1.1\r\nhost: [" + b":" * n + b"\r\n\r\n")),
    "an escaped path": (7 * KIB, lambda n: reads(b"GET /" + filled(b"%41", n) + b"% HTTP/1.1\r\nhost: x\r\n\r\n")),
    "another server's": (7 * KIB, lambda n: reads(b"GET http://" + b"a" * n + b"/ HTTP/1.1\r\nhost: x\r\n\r\n")),
    "no first line": (7 * KIB, lambda n: reads(filled(b"A ", n, b"", b"\r\n\r\n"))),
    "requests in a row": (128 * KIB, lambda n: reads(filled(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", n), 64 * KIB)),
    "chunks of a byte": (15 * KIB, lambda n: reads(head(b"transfer-encoding: chunked", body=filled(b"1\r\na\r\n", n)))),
    "chunks by bytes": (
        16 * KIB,
        lambda n: reads(head(b"transfer-encoding: chunked", body=filled(b"20\r\n%b\r\n" % (b"a" * 32), n)), 1),
    ),
    "extensions": (15 * KIB, lambda n: reads(head(b"transfer-encoding: chunked", body=b"1" + b';a="\\""' * (n // 16)))),
    "extensions of many chunks": (
        15 * KIB,
        lambda n: reads(head(b"transfer-encoding: chunked", body=filled(b"1;" + b"a;" * 500 + b"b\r\na\r\n", n))),
    ),
    "trailers": (
        7 * KIB,
        lambda n: reads(head(b"transfer-encoding: chunked", body=filled(b"a:\r\n", n, b"0\r\n", b"\r\n"))),
    ),
    "trailers by bytes": (
        7 * KIB,
        lambda n: reads(head(b"transfer-encoding: chunked", body=filled(b"a:\r\n", n, b"0\r\n", b"\r\n")), 1),
    ),
    "a body by bytes": (16 * KIB, lambda n: reads(head(b"content-length: %d" % n, body=b'"\\' * (n // 2)), 1)),
}


# What requests say


def answered(read: Callable[[Request], object], body: bytes, outlined: bool = False, kind: bytes = b"") -> Work:
    request = Request("POST", "/v1/chat/completions", "", {b"content-type": kind}, body)
    if outlined:
        request.outline = Outline(10**9, 2**30)
        for piece in pieces(body, 64 * KIB):
            request.outline.feed(piece)
    return lambda: read(request)


def json_body(body: bytes, outlined: bool = False) -> Work:
    def read(request: Request) -> None:
        read_body(request.body, request.outline)
        with_model(request.body, "other")

    return answered(read, body, outlined)


def form(*heads: bytes, text: bytes = b"") -> Work:
    body = b"".join(b"--x\r\n%b\r\n\r\n%b\r\n" % (one, text) for one in heads) + b"--x--\r\n"

    def read(request: Request) -> None:
        found = read_form_body(request)
        if found.model_part is not None:
            found.model_part.replaced(request.body, b"other")

    return answered(read, body, kind=b"multipart/form-data; boundary=x")


def outline(unit: bytes, size: int, piece: int) -> Work:
    parts = pieces(filled(unit, size), piece)

    def work() -> None:
        made = Outline(10**9, 2**30)
        for part in parts:
            made.feed(part)

    return work


MODEL = b'content-disposition: form-data; name="model"'
FILE = b'content-disposition: form-data; name="file"; filename="a"'
BODIES: dict[str, tuple[int, Callable[[int], Work]]] = {
    "a form whose file is heads": (16 * KIB, lambda n: form(FILE, MODEL, text=filled(b'name="model"\r\n', n, b"", b"\r"))),
    "a form of boundaries": (MIB, lambda n: form(MODEL, text=filled(b"\r\n--", n))),
    "a form of many parts": (64 * KIB, lambda n: form(*[MODEL.replace(b"model", b"m")] * (n // 65))),
    "parameters of a form": (60 * KIB, lambda n: form(MODEL + filled(b';a="\\"', n))),
    "nothing in a form": (60 * KIB, lambda n: form(MODEL + filled(b" ;\t", n))),
    "a text in a form": (MIB, lambda n: form(MODEL.replace(b"model", b"prompt"), text=b"\xff" * n)),
    "lines of a form": (60 * KIB, lambda n: form(MODEL + filled(b"\r\na:", n))),
    "types of a form": (
        15 * KIB,
        lambda n: answered(read_form_body, b"--x--", kind=filled(b"; a=b", n, b"multipart/form-data")),
    ),
    "keys": (512 * KIB, lambda n: json_body(b'{"model":"a",' + b",".join(b'"%d":1' % at for at in range(n // 8)) + b"}")),
    "brackets": (MIB, lambda n: json_body(filled(b"[", n, b'{"messages":'))),
    "digits": (MIB, lambda n: json_body(filled(b"9", n, b'{"model":"a","max_tokens":', b"}"))),
    "digits in quotes": (MIB, lambda n: json_body(filled(b"9", n, b'{"model":"a","max_tokens":"0.', b'"}'))),
    "a choice of many": (MIB, lambda n: json_body(filled(b"1,", n, b'{"model":1.0,"n":[', b"1]}"))),
    "escapes": (MIB, lambda n: json_body(filled(b"\\u00e9", n, b'{"model":"', b'"}'))),
    "pictures": (
        128 * KIB,
        lambda n: json_body(
            filled(b'{"type":"image_url","image_url":{"url":"data:image/png;base64,AA"}},', n, b'{"messages":[', b"1]}")
        ),
    ),
    "addresses without an end": (
        MIB,
        lambda n: json_body(filled(b'{"image_url"  :  ', n, b'{"messages":["image_url",', b"1]}")),
    ),
    "prompts": (MIB, lambda n: json_body(filled(b'"a",', n, b'{"model":"a","prompt":[', b'"a"]}'))),
    "token ids": (MIB, lambda n: json_body(filled(b"1,", n, b'{"model":"a","prompt":[', b"1]}"))),
    "an outline": (
        4 * MIB,
        lambda n: json_body(filled(b'"' + b"a" * 200 + b'",', n, b'{"model":"a","prompt":[', b'"a"]}'), True),
    ),
    "quotes, in pieces": (16 * KIB, lambda n: outline(b'"', n, 3)),
    "escapes, in pieces": (32 * KIB, lambda n: outline(b'"\\\\\\"', n, 3)),
    "long strings, in pieces": (MIB, lambda n: outline(b'"%b"' % (b"a" * 500), n, 100)),
    "letters in two halves": (32 * KIB, lambda n: outline("\u00e9".encode(), n, 3)),
    "messages of Anthropic's": (
        256 * KIB,
        lambda n: answered(
            chat_for,
            filled(
                b'{"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},', n,
                b'{"max_tokens":1,"model":"a","messages":[', b'{"role":"user","content":"a"}]}',
            ),
        ),
    ),
    "results of tools": (
        256 * KIB,
        lambda n: answered(
            chat_for,
            filled(
                b'{"type":"tool_result","tool_use_id":"a","content":"b"},', n,
                b'{"max_tokens":1,"model":"a","messages":[{"role":"user","content":[', b'{"type":"text","text":"a"}]}]}',
            ),
        ),
    ),
}  # fmt: skip


# What stands in heads: paths, queries, cookies, tokens, traces


def tidied(path: str, query: str) -> Work:
    return lambda: tidy_path(Request("POST", path, query, {}, b""))


def token(data: bytes) -> Work:
    verifier = TokenVerifier(JwtIdentity(issuer="https://a", audience=("b",)))

    def work() -> None:
        verifier.verified(data)

    return work


WORDS: dict[str, tuple[int, Callable[[int], Work]]] = {
    "slashes": (7 * KIB, lambda n: tidied("/a//" * (n // 4), "")),
    "a model in a path": (7 * KIB, lambda n: tidied(f"/openai/deployments/{'%41' * (n // 3)}/a", "a")),
    "a query": (7 * KIB, lambda n: tidied("/openai/deployments/a/chat", "api-version=&" * (n // 13))),
    "cookies": (48 * KIB, lambda n: lambda: Sessions(b"").find(b";" * n)),
    "cookies of ours": (48 * KIB, lambda n: lambda: Sessions(b"").find(filled(b"%b=a.b;" % COOKIE.encode(), n))),
    "a trace": (15 * KIB, lambda n: lambda: trace_context(b"00-" + b"0" * n, None)),
    "members of a trace": (
        15 * KIB,
        lambda n: lambda: trace_context(b"00-%b-%b-00" % (b"1" * 32, b"1" * 16), filled(b"a=b ,", n)),
    ),
    "a member of a trace": (
        15 * KIB,
        lambda n: lambda: trace_context(b"00-%b-%b-00" % (b"1" * 32, b"1" * 16), filled(b"a@", n)),
    ),
    "dots of a token": (15 * KIB, lambda n: token(b"." * n)),
    "a token's head": (15 * KIB, lambda n: token(b"W1tb" * (n // 4) + b".a.b")),
    "keys of a token's head": (15 * KIB, lambda n: token(b"eyJhIjox" + b"LCJhIjox" * (n // 8) + b".a.b")),
}


# What backends answer


LOOP = asyncio.new_event_loop()
LOOP.close()
SERVER = Server(LOOP, lambda request, reply: None)


class Silent:
    """In the place of everybody who is told something, or asked whether it may be."""

    started = done = False

    def __init__(self) -> None:
        self.size = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *given, **named: None

    def start(self, *given: object) -> None:
        self.started = True

    def get_write_buffer_size(self) -> int:
        return 0


class Discarding(asyncio.Transport):
    """A client's side that takes everything at once and keeps nothing."""

    def write(self, data: bytes | bytearray | memoryview) -> None: ...

    def writelines(self, pieces: object) -> None: ...

    def get_write_buffer_size(self) -> int:
        return 0


def reply_to_nobody() -> Reply:
    """A real one, since compiled modules take no other."""
    connection = ServerConnection(SERVER)
    connection.transport = Discarding()
    connection.current = Reply(connection)
    return connection.current


def upstream(data: bytes, piece: int = MIB) -> Work:
    parts, loop = pieces(data, piece), asyncio.new_event_loop()
    loop.close()

    def work() -> None:
        connection = Connection(Origin(loop, Address("http://127.0.0.1/v1")))
        connection.transport = cast(Any, Silent())
        connection.send(b"", cast(Any, Silent()))
        for part in parts:
            if connection.handler is None:
                break
            connection.data_received(part)

    return work


def through_proxy(data: bytes) -> Work:
    loop = asyncio.new_event_loop()
    loop.close()

    def work() -> None:
        opening = _Opening(loop, Proxy("http://a:1"), Address("http://127.0.0.1/v1"))
        for at in range(len(data)):
            opening.data_received(data[at : at + 1])

    return work


def streamed(data: bytes, piece: int, **given: Any) -> Work:
    parts = pieces(data, piece)

    def work() -> None:
        relay = StreamRelay(reply_to_nobody(), 200, b"", hide_usage=True, **given)
        for part in parts:
            relay.body(part)
        relay.complete  # noqa: B018 (asked for)

    return work


def whole(data: bytes, piece: int) -> Work:
    parts = pieces(data, piece)

    def work() -> None:
        relay = WholeRelay(reply_to_nobody(), 200, b"")
        for part in parts:
            relay.body(part)
        oddity("/v1/completions", relay.content, relay.read())
        relay.seen_tokens(4.0)
        relay.end()

    return work


def events(data: bytes, piece: int) -> Work:
    parts = pieces(data, piece)

    def work() -> None:
        held = Events()
        for part in parts:
            payloads(held.whole(part))

    return work


def unpacked(data: bytes, piece: int) -> Work:
    made = zlib.compressobj(wbits=31)
    parts = pieces(made.compress(data) + made.flush(), piece)

    def work() -> None:
        inner = Unpacking(b"gzip")
        for part in parts:
            inner.plain(part)

    return work


OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"
OPENING = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
USAGE = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":1,"completion_tokens":1}}\n\n'
ANSWERS: dict[str, tuple[int, Callable[[int], Work]]] = {
    "headers of an answer": (60 * KIB, lambda n: upstream(OK + filled(b"a: b\r\n", n, b"", b"\r\n"))),
    "an answer by bytes": (60 * KIB, lambda n: upstream(OK + filled(b"a: b\r\n", n, b"", b"\r\n"), 1)),
    "a header by bytes": (60 * KIB, lambda n: upstream(OK + filled(b"a", n, b"a: ", b"\r\n\r\n"), 1)),
    "interim answers": (60 * KIB, lambda n: upstream(filled(b"HTTP/1.1 100 Continue\r\n\r\n", n))),
    "chunks of an answer": (MIB, lambda n: upstream(CHUNKED + filled(b"1\r\na\r\n", n))),
    "chunks of an answer by bytes": (32 * KIB, lambda n: upstream(CHUNKED + filled(b"1\r\na\r\n", n), 1)),
    "what a proxy says": (15 * KIB, lambda n: through_proxy(b"a" * n)),
    "an event without an end": (MIB, lambda n: events(filled(b"a", n, b"data: "), 256)),
    "lines of an event": (MIB, lambda n: events(filled(b"data: a\r\n", n), 256)),
    "empty lines": (128 * KIB, lambda n: events(filled(b"\r\n", n), 256)),
    "tokens": (256 * KIB, lambda n: streamed(OPENING + filled(TOKEN, n), 200)),
    "tokens and counts": (256 * KIB, lambda n: streamed(OPENING + filled(USAGE, n), 200, hide_continuous=True)),
    "counts without an end": (
        256 * KIB,
        lambda n: streamed(filled(b',"usage":{{},"usage":', n, TOKEN + b"data: ", b"\n\n"), MIB, hide_continuous=True),
    ),
    "tokens that are kept": (256 * KIB, lambda n: streamed(OPENING + filled(TOKEN, n), 200, transcript=Transcript())),
    "choices": (256 * KIB, lambda n: streamed(OPENING + filled(TOKEN, n), 200, choices=Choices(3))),
    "openings": (60 * KIB, lambda n: streamed(filled(OPENING, n), len(OPENING))),
    "comments": (64 * KIB, lambda n: streamed(filled(b": a\n\n", n), 5)),
    "errors": (256 * KIB, lambda n: streamed(filled(b'data: {"error":{"code":500}}\n\n', n), 30)),
    "errors after tokens": (
        128 * KIB,
        lambda n: streamed(TOKEN + filled(b'data: {"error":{}}\n\n', n), 20, transcript=Transcript()),
    ),
    "aborts": (256 * KIB, lambda n: streamed(filled(b'data: {"choices":[{"finish_reason":"abort"}]}\n\n', n), 48)),
    "deltas without an end": (
        256 * KIB,
        lambda n: streamed(TOKEN + filled(b'"delta":"\\', n, b"data: ", b"\n\n"), MIB),
    ),
    "an answer in pieces": (MIB, lambda n: whole(filled(b'"content":"a\\"', n, b"{"), 256)),
    "blank space before an answer": (4 * MIB, lambda n: whole(b" " * n, 256)),
    "an answer of errors": (MIB, lambda n: whole(filled(b'"error"  :  null,', n, b"{"), MIB)),
    "an answer of brackets": (MIB, lambda n: lambda: read_answer(filled(b"[", n, b'{"choices":'))),
    "no such model": (60 * KIB, lambda n: lambda: lacks_model("/v1/completions", filled(b"model", n))),
    "metrics": (256 * KIB, lambda n: lambda: engine_load(filled(b"vllm:num_requests_running{} {}\n", n))),
    "metrics on a line": (MIB, lambda n: lambda: engine_load(filled(b"}", n, b"vllm:num_requests_running{"))),
    "gzip": (16 * MIB, lambda n: unpacked(b"a" * n, 64)),
}


# gRPC, for the picker


def calls(*frames: bytes, piece: int = MIB, open_calls: int = 0) -> Work:
    """On a connection that has calls open which wait to be let go on."""
    parts = pieces(b"".join(frames), piece)

    def work() -> None:
        client = GrpcClient()
        try:
            client.send(frame(SETTINGS, 0, 0, b"\0\4\0\0\0\0"))
            for at in range(open_calls):
                number = 2 * at + 1
                client.send(frame(HEADERS, END_HEADERS, number, client.head()), frame(DATA, 0, number, message(b"a")))
            for part in parts:
                client.on.data_received(part)
        finally:
            client.loop.close()

    return work


def long_head(block: bytes, piece: int) -> Work:
    first, *more = pieces(block, piece)
    rest = [frame(CONTINUATION, 0, 1, one) for one in more]
    return calls(frame(HEADERS, 0, 1, first), *rest, frame(CONTINUATION, END_HEADERS, 1))


INDEXED = b"\x82"
FRAMES: dict[str, tuple[int, Callable[[int], Work]]] = {
    "pings": (128 * KIB, lambda n: calls(*[frame(PING, 0, 0, b"\0" * 8)] * (n // 17))),
    "frames by bytes": (16 * KIB, lambda n: calls(frame(PING, 0, 0, b"\0" * 8) * (n // 17), piece=1)),
    "a head in many frames": (32 * KIB, lambda n: long_head(b"\x40\x01a\x01b" * (n // 5), 5)),
    "a head of numbers": (60 * KIB, lambda n: long_head(b"\xff" * n, 16 * KIB)),
    "a head that was packed": (60 * KIB, lambda n: long_head(INDEXED * n, 16 * KIB)),
    "sizes of its table": (15 * KIB, lambda n: long_head(b"\x20" * n, 16 * KIB)),
    "settings of many calls": (
        32 * KIB,
        lambda n: calls(frame(SETTINGS, 0, 0, b"\0\4\0\0\0\0" * (n // 12)), open_calls=n // 32),
    ),
    "settings one by one": (
        32 * KIB,
        lambda n: calls(*[frame(SETTINGS, 0, 0, b"\0\4\0\0\0\0")] * (n // 16), open_calls=n // 32),
    ),
    "room for many calls": (
        32 * KIB,
        lambda n: calls(*[frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1")] * (n // 13), open_calls=n // 32),
    ),
    "what Envoy says": (64 * KIB, lambda n: lambda: Said(filled(b"\x2a\0", n))),
    "numbers of Envoy's": (MIB, lambda n: lambda: Said(filled(b"\x80", n))),
    "headers of Envoy's": (64 * KIB, lambda n: lambda: Said(filled(b"\x12\x06\x0a\x04\x0a\x02\x0a\x00", n))),
}

CASES = HEADERS_OF_REQUESTS | BODIES | WORDS | ANSWERS | FRAMES


@pytest.mark.parametrize("name", CASES)
def test_more_input_takes_as_much_more_work(name: str) -> None:
    size, make = CASES[name]
    check(make, size)


def test_work_that_grows_with_the_square_is_found() -> None:
    check(lambda n: lambda: sum(1 for _ in range(n)), 200_000)
    with pytest.raises(pytest.fail.Exception, match="4 times the input takes"):
        check(lambda n: lambda: sum(1 for _ in range(n * n)), 800)


# Whatever else there is of regular expressions


def patterns_of() -> Iterator[tuple[str, str, "re.Pattern[Any]"]]:
    """Each that a module on a request's way keeps, by its name and how it is asked there."""
    rooms = ("crosstie.wire", *(f"crosstie_gateway.{room}" for room in ("wire", "gateway", "batch", "pick")))
    for module in [
        one for room in rooms for one in pkgutil.iter_modules(importlib.import_module(room).__path__, f"{room}.")
    ]:
        made = importlib.import_module(module.name)
        source = Path(str(made.__file__)).with_suffix("").with_suffix(".py").read_text()
        for name, one in vars(made).items():
            if isinstance(one, re.Pattern):
                asked = set(re.findall(rf"\b{name}\.(search|match|fullmatch|finditer|findall|sub)\(", source))
                for method in sorted(asked):
                    yield f"{module.name.partition('.')[2]}.{name}", method, one


def literals(parsed: Any) -> Iterator[int]:
    """The characters that a pattern names, in their order, with one for each set of them."""
    for kind, given in parsed:
        if kind is patterns.LITERAL:
            yield given
        elif kind is patterns.IN:
            found = next((one for what, one in given if what in (patterns.LITERAL, patterns.RANGE)), 97)
            yield found[0] if isinstance(found, tuple) else found
        elif kind is patterns.ANY:
            yield 97
        elif isinstance(given, tuple | list):
            for one in given:
                if isinstance(one, patterns.SubPattern):
                    yield from literals(one)
                elif isinstance(one, list):
                    for branch in one:
                        yield from literals(branch)


def asks(pattern: "re.Pattern[Any]", method: str, text: str) -> Work:
    given: Any = text.encode("latin-1") if isinstance(pattern.pattern, bytes) else text
    asked = getattr(pattern, method)
    if method == "sub":
        return lambda: asked(given[:0], given)
    return (lambda: list(asked(given))) if method == "finditer" else lambda: asked(given)


def test_no_expression_goes_over_a_text_again_and_again() -> None:
    size, found = 8 * KIB, []
    for name, method, pattern in patterns_of():
        text = "".join(map(chr, literals(patterns.parse(pattern.pattern, pattern.flags))))
        parts = {text[:at] for at in range(1, len(text))} | {text[at:] for at in range(len(text))} | {*text, " ", "a"}
        found.append(name)
        for unit, before in itertools.product(sorted(parts), ("", text)):
            long = before + unit * (size // len(unit))
            # Going over it once takes a hundredth of that.
            if cpu_s(asks(pattern, method, long), 1) > 8e-3:
                ratio = grows(asks(pattern, method, long[: size // TIMES]), asks(pattern, method, long))
                assert ratio < MOST_RATIO, f"{name}.{method} of {before!r} and {unit!r} again and again"
    assert {"wire.variables._VARIABLE", "wire.multipart._PARAMETER", "gateway.relay._DELTA"} <= set(found)
