"""What the fuzzer's clients send: good requests, damaged ones, and known ways to smuggle one inside another."""

import json
import random
from typing import NamedTuple

from upstream import mark

_PATHS = ("/v1/chat/completions", "/v1/completions")


class Planned(NamedTuple):
    """Bytes for one connection: the marks that may come back on it, and how many answers there must be (None: any)."""

    data: bytes
    own: set[bytes]
    answers: int | None
    kind: str


def good(generator: random.Random, model: str, own: bytes, *, close: bool = False) -> bytes:
    body: dict[str, object] = {"model": model, "stream": generator.random() < 0.6, "max_tokens": 8}
    path = generator.choice(_PATHS)
    text = own.decode() + " " * generator.choice([0, 0, 5, 3000, 70_000])
    body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return framed(generator, path, json.dumps(body).encode(), close=close)


def framed(generator: random.Random, path: str, body: bytes, *, close: bool = False) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: fuzz\r\ncontent-type: application/json\r\n".encode()
    head += (
        b"connection: close\r\n"
        if close
        else b"connection: upgrade\r\nupgrade: h2c\r\n"
        if generator.random() < 0.05
        else b""
    )
    if generator.random() < 0.3:
        at = generator.randrange(1, len(body)) if len(body) > 1 else 0
        chunks = b"".join(
            b"%x%b\r\n%b\r\n" % (len(one), generator.choice([b"", b"", b";a=b"]), one)
            for one in (body[:at], body[at:])
            if one
        )
        return (
            head
            + b"transfer-encoding: chunked\r\n\r\n"
            + chunks
            + b"0\r\n"
            + generator.choice([b"", b"", b"a: b\r\n"])
            + b"\r\n"
        )
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def planned(generator: random.Random, model: str, owner: int, number: int) -> Planned:
    """One connection's worth, by the toss of the generator."""
    own = mark("o", owner, number)
    toss = generator.random()
    if toss < 0.35:
        return Planned(good(generator, model, own), {own}, 1, "good")
    if toss < 0.5:
        several = [mark("o", owner, number * 10_000 + i) for i in range(1, generator.randint(2, 6))]
        data = b"".join(good(generator, model, one) for one in several)
        return Planned(data, set(several), len(several), "pipelined")
    if toss < 0.6:
        return Planned(
            generator.choice([b"GET /health", b"GET /v1/models", b"HEAD /ready", b"GET /metrics"])
            + b" HTTP/1.1\r\nhost: x\r\n\r\n",
            set(),
            1,
            "page",
        )
    whole = good(generator, model, own)
    if toss < 0.8:
        return Planned(_damaged(generator, whole + good(generator, model, own)), {own}, None, "damaged")
    if toss < 0.95:
        return Planned(_smuggling(generator, model, own, mark("i", owner, number)), {own}, None, "smuggling")
    return Planned(generator.randbytes(generator.choice([3, 100, 5000])), set(), None, "noise")


def _damaged(generator: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    # Heads are where it hurts, and long bodies would take most hits.
    reach = min(len(made), 600)
    for _ in range(generator.randint(1, 4)):
        at = generator.randrange(reach)
        made[at : at + generator.choice([0, 0, 1, 1, 1, 7])] = generator.choice(
            [
                b"",
                b"\r",
                b"\n",
                b"\r\n",
                b"\0",
                b" ",
                b":",
                b",",
                b"0",
                b"\xff",
                b"\r\n\r\n",
                bytes([generator.randrange(256)]),
            ]
        )
        reach = min(len(made), 600)
    return bytes(made)


def _smuggling(generator: random.Random, model: str, own: bytes, inner: bytes) -> bytes:
    body = b'{"model":"%b","messages":[{"role":"user","content":"%b"}]}' % (model.encode(), inner)
    hidden = b"POST /v1/chat/completions HTTP/1.1\r\nhost: fuzz\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    size, chunk = b"content-length: %d\r\n" % len(hidden), b"%x\r\n%b\r\n0\r\n\r\n" % (len(hidden), hidden)
    lines, content = generator.choice(
        [
            (b"content-length: 0\r\n" + size, hidden),
            (size + b"content-length: 0\r\n", hidden),
            (size + b"transfer-encoding: chunked\r\n", b"0\r\n\r\n" + hidden),
            (b"transfer-encoding: chunked\r\n" + size, b"0\r\n\r\n" + hidden),
            (size + b"transfer-encoding : chunked\r\n", hidden),
            (size + b"transfer-encoding: xchunked\r\n", hidden),
            (size + b" transfer-encoding: chunked\r\n", hidden),
            (size + b"x: y\rtransfer-encoding: chunked\r\n", hidden),
            (size + b"x: y\ntransfer-encoding: chunked\r\n", b"0\r\n\r\n" + hidden),
            (b"content-length: +%d\r\n" % len(hidden), hidden),
            (b"content-length: %d, %d\r\n" % (len(hidden), 0), hidden),
            (b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n", chunk),
            (b"transfer-encoding: chunked\r\n", chunk.replace(b"\r\n", b"\n", 1)),
            (b"transfer-encoding: chunked\r\n", b"0;a\n\r\n" + hidden),
            (b"transfer-encoding: chunked\r\n", b"1;a=\"\r\nx\r\n0\r\n\r\n" + hidden),
            (b"transfer-encoding: chunked\r\n", b"fffffffffffffffff\r\n" + hidden),
            (size + b"connection: upgrade\r\nupgrade: h2c\r\n", hidden),
            (b"transfer-encoding: chunked\r\nconnection: upgrade\r\nupgrade: h2c\r\n", chunk),
            (size + b"expect: 100-continue\r\n", hidden),
            (b"host: other\r\n" + size, hidden),
            (size, hidden),
        ]
    )  # fmt: skip
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: fuzz\r\n"
        + lines
        + b"\r\n"
        + content
        + good(generator, model, own)
    )
