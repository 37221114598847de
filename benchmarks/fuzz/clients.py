"""What the fuzzer's clients send: good requests, damaged ones, and known ways to smuggle one inside another."""

import json
import random
from collections.abc import Sequence
from typing import NamedTuple

from upstream import mark

_FORM = "/v1/audio/transcriptions"
_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/chat/completions", "/v1/completions", _FORM)


class Planned(NamedTuple):
    """Bytes for one connection: the marks that may come back on it, and how many answers there must be (None: any).
    What is `forged` must be answered 401."""

    data: bytes
    own: set[bytes]
    answers: int | None
    kind: str


def good(generator: random.Random, model: str, own: bytes, let_in: Sequence[bytes] = ()) -> bytes:
    """`let_in`: keys and tokens, any of which is good."""
    body: dict[str, object] = {"model": model, "stream": generator.random() < 0.6, "max_tokens": 8}
    path = generator.choice(_PATHS)
    if path == _FORM:
        boundary, fields = form(generator, model, own)
        return framed(generator, path, fields, let_in, b"multipart/form-data; boundary=" + boundary)
    text = own.decode() + " " * generator.choice([0, 0, 5, 3000, 70_000])
    body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return framed(generator, path, json.dumps(body).encode(), let_in)


def form(generator: random.Random, model: str, own: bytes) -> tuple[bytes, bytes]:
    """Its boundary and a form whose file is full of what nearly is one."""
    boundary = generator.choice([b"x", b"-----", b"a1b2c3d4e5f6a7b8c9d0"])
    near = generator.choice(
        [b"\r\n--", b"\r\n--" + boundary[:-1], b"--" + boundary, b"\r\n\r\n", generator.randbytes(7)]
    )
    file = b"RIFF" + near * generator.choice([0, 1, 50, 20_000]) + b"\n"
    parts = [
        b'name="model"\r\n\r\n' + model.encode(),
        b'name="prompt"\r\n\r\n' + own,
        b'name="file"; filename="a.wav"\r\n\r\n' + file,
    ]
    generator.shuffle(parts)
    said = b"".join(b"--%b\r\ncontent-disposition: form-data; %b\r\n" % (boundary, part) for part in parts)
    return boundary, said + b"--%b--\r\n" % boundary


def credential(generator: random.Random, let_in: Sequence[bytes]) -> bytes:
    """Its line in a head; none, where nobody asks for it."""
    return b"authorization: Bearer %b\r\n" % generator.choice(let_in) if let_in else b""


def framed(
    generator: random.Random, path: str, body: bytes, let_in: Sequence[bytes], kind: bytes = b"application/json"
) -> bytes:
    head = b"POST %b HTTP/1.1\r\nhost: fuzz\r\ncontent-type: %b\r\n" % (path.encode(), kind)
    head += credential(generator, let_in) + (
        b"connection: upgrade\r\nupgrade: h2c\r\n" if generator.random() < 0.05 else b""
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


def planned(
    generator: random.Random, model: str, owner: int, number: int, let_in: Sequence[bytes] = (),
    forged: Sequence[bytes] = (),
) -> Planned:  # fmt: skip
    """One connection's worth, by the toss of the generator."""
    own = mark("o", owner, number)
    toss = generator.random()
    if forged and toss < 0.05:
        return Planned(good(generator, model, mark("i", owner, number), forged), set(), 1, "forged")
    if toss < 0.35:
        return Planned(good(generator, model, own, let_in), {own}, 1, "good")
    if toss < 0.5:
        several = [mark("o", owner, number * 10_000 + i) for i in range(1, generator.randint(2, 6))]
        data = b"".join(good(generator, model, one, let_in) for one in several)
        return Planned(data, set(several), len(several), "pipelined")
    if toss < 0.6:
        return Planned(
            generator.choice([b"GET /health", b"GET /v1/models", b"HEAD /ready", b"GET /metrics"])
            + b" HTTP/1.1\r\nhost: x\r\n%b\r\n" % credential(generator, let_in),
            set(),
            1,
            "page",
        )
    whole = good(generator, model, own, let_in)
    if toss < 0.8:
        return Planned(_damaged(generator, whole + good(generator, model, own, let_in)), {own}, None, "damaged")
    if toss < 0.95:
        data = _smuggling(generator, model, own, mark("i", owner, number), let_in)
        return Planned(data, {own}, None, "smuggling")
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


def _smuggling(generator: random.Random, model: str, own: bytes, inner: bytes, let_in: Sequence[bytes]) -> bytes:
    body = b'{"model":"%b","messages":[{"role":"user","content":"%b"}]}' % (model.encode(), inner)
    who = credential(generator, let_in)
    hidden = b"POST /v1/chat/completions HTTP/1.1\r\nhost: fuzz\r\n%bcontent-length: %d\r\n\r\n%b" % (
        who,
        len(body),
        body,
    )
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
        + who
        + lines
        + b"\r\n"
        + content
        + good(generator, model, own, let_in)
    )
