"""An engine that misbehaves at random on the wire, and repeats in its answers the marks that it was sent.

Marks carry a check sum, so that one which a fuzzer has damaged is no mark any more, and nobody is blamed for it.
"""

import asyncio
import hashlib
import json
import random
import re
from collections import Counter

MARK = re.compile(rb"([oi])(\d+)-(\d+)-([0-9a-f]{8})")


def mark(kind: str, owner: int, number: int) -> bytes:
    """`o`: of a request; `i`: inside another's body, where no request is."""
    return b"%b-%b" % (name := b"%b%d-%d" % (kind.encode(), owner, number), _sum(name))


def _sum(name: bytes) -> bytes:
    return hashlib.blake2s(name, digest_size=4).hexdigest().encode()


def marks(data: bytes) -> set[bytes]:
    """All whole marks in there."""
    return {
        found[0] for found in MARK.finditer(data) if found[0].rpartition(b"-")[2] == _sum(found[0].rpartition(b"-")[0])
    }


class Upstream:
    """`calm` answers as it should; `faults` is how often it does not."""

    def __init__(self, seed: str, faults: float):
        self.random, self.faults = random.Random(seed), faults
        self.asked: Counter[str] = Counter()
        # Marks that no request can have had, unless one was smuggled.
        self.smuggled: list[bytes] = []
        self.malformed: list[bytes] = []
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = re.findall(rb"\r\ncontent-length: (\d+)(?=\r\n)", head)
                if (
                    not head.startswith((b"GET /", b"POST /v1/"))
                    or len(length) > 1
                    or b"\n" in head.replace(b"\r\n", b"")
                ):
                    self.malformed.append(head)
                body = await reader.readexactly(int(length[0])) if length else b""
                if head.startswith(b"GET"):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
                elif not await self._answer(body, writer):
                    break
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            if self.random.random() < 0.5:
                writer.transport.abort()
            writer.close()

    async def _answer(self, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Whether the connection goes on."""
        own = b",".join(sorted(marks(body)))
        self.smuggled += [one for one in marks(body) if one.startswith(b"i") and b"HTTP/1.1" not in body]
        how = self.random.choice(FAULTS) if self.random.random() < self.faults else "calm"
        self.asked[how] += 1
        whole = b'{"choices":[{"message":{"content":"%b"}}],"usage":{"prompt_tokens":3,"completion_tokens":4}}' % own
        plain = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
            len(whole),
            whole,
        )
        if how in ANSWERS:
            writer.write(ANSWERS[how] % {b"plain": plain, b"own": own})
            await writer.drain()
            return how in ("interim", "full")
        if how == "silent":
            await asyncio.sleep(self.random.uniform(0.5, 2.5))
            return False
        try:
            streamed = bool(json.loads(body).get("stream"))
        except (ValueError, AttributeError):
            streamed = False
        if not streamed:
            await self._pieces(writer, plain, how)
            return how == "calm"
        events = b"".join(
            b'data: {"choices":[{"delta":{"content":"%b %d"},"finish_reason":null}]}\n\n' % (own, i)
            for i in range(self.random.randint(1, 6))
        )
        events += b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
        if b"include_usage" in body:
            events += b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4}}\n\n'
        events += b"data: [DONE]\n\n"
        stream = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        for piece in self._cut(events):
            stream += b"%x\r\n%b\r\n" % (len(piece), piece)
        stream += b"0\r\n\r\n"
        await self._pieces(writer, stream, how)
        return how == "calm"

    def _cut(self, data: bytes) -> list[bytes]:
        if len(data) < 2:
            return [data]
        cuts = sorted({self.random.randrange(1, len(data)) for _ in range(self.random.randint(0, 5))})
        return [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]

    async def _pieces(self, writer: asyncio.StreamWriter, data: bytes, how: str) -> None:
        # Surplus comes together with the end: HTTP/1.1 cannot tell a later one from the next request's answer.
        surplus = data if how == "twice" else b"more" if how == "beyond" else b""
        if how == "cut":
            data = data[: self.random.randrange(len(data))]
        pieces = self._cut(data)
        pieces[-1] += surplus
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(self.random.choice([0, 0, 0.001, 0.01]))


_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
ANSWERS = {
    "lengths": _HEAD + b"content-length: 2\r\ncontent-length: 9\r\n\r\n%(own)b",
    "both": _HEAD + b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "coding": _HEAD + b"transfer-encoding: chunked, identity\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "injected": _HEAD + b"a: b\rset-cookie: %(own)b\r\ncontent-length: 2\r\n\r\n{}",
    "folded": _HEAD + b"a: b\r\n c\r\ncontent-length: 2\r\n\r\n{}",
    "chunk": _HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "garbage": b"\0\1\2 %(own)b",
    "version": b"HTTP/2.0 200 OK\r\ncontent-length: 2\r\n\r\n{}",
    "switch": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\n%(own)b",
    "interim": b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" * 3 + b"%(plain)b",
    "flood": b"HTTP/1.1 100 Continue\r\n\r\n" * 9000,
    "endless": _HEAD + b"a: " + b"b" * 300_000,
    "broken": b"HTTP/1.1 500 Internal Server Error\r\ncontent-length: 2\r\n\r\n{}",
    "full": b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 2\r\n\r\n{}",
    "nothing": b"",
}  # fmt: skip
FAULTS = [*ANSWERS, "cut", "cut", "cut", "twice", "twice", "beyond", "beyond", "silent"]
