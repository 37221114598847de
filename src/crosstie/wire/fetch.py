"""One request and its whole answer, for whoever is not in a hurry: probes, metrics, `explain`, tests."""

import asyncio
import json
from typing import Any, NamedTuple

from crosstie.wire.address import Address
from crosstie.wire.client import Headers, Origin
from crosstie.wire.way import TlsRefused


class Answer(NamedTuple):
    status: int
    headers: Headers
    body: bytes

    def header(self, name: bytes) -> bytes | None:
        return next((value for key, value in self.headers if key == name), None)

    @property
    def said(self) -> Any:
        """What its JSON says; None where it is none."""
        try:
            return json.loads(self.body)
        except (ValueError, RecursionError):
            return None

    def words(self, most: int) -> str:
        """So many bytes of it on one line, for people."""
        return " ".join(self.body[:most].decode("utf-8", "replace").split())

    @property
    def record(self) -> dict[str, Any]:
        """The object of a good answer; empty for any other."""
        said = self.said if self.status == 200 else None
        return said if isinstance(said, dict) else {}


class _Collector:
    def __init__(self, future: "asyncio.Future[Answer]", most_bytes: int):
        self.future, self.most_bytes = future, most_bytes
        self.status, self.headers = 0, Headers()
        self.pieces: list[bytes] = []
        self.size = 0

    def on_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers

    def on_body(self, data: bytes) -> None:
        self.size += len(data)
        if self.size > self.most_bytes:
            self._fail(ConnectionError(f"answer of more than {self.most_bytes} bytes"))
        self.pieces.append(data)

    def on_end(self) -> None:
        if not self.future.done():
            self.future.set_result(Answer(self.status, self.headers, b"".join(self.pieces)))

    def on_lost(self, error: Exception | None) -> None:
        lost = ConnectionError(f"connection lost: {error or 'closed before the answer ended'}")
        self._fail(error if isinstance(error, TlsRefused) else lost)

    def _fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


def request_bytes(
    origin: Origin, method: str, path: str, headers: Headers | None = None, body: bytes | None = None
) -> bytes:
    target = origin.prefix + path.encode()
    lines = [method.encode(), b" ", target, b" HTTP/1.1\r\nhost: ", origin.address.authority, b"\r\n", origin.lines]
    for name, value in headers or []:
        lines += [name, b": ", value, b"\r\n"]
    if body is not None:
        lines.append(b"content-length: %d\r\n" % len(body))
    return b"".join([*lines, b"\r\n", body or b""])


async def ask(
    at: Address | Origin, method: str, path: str, *, key: str | None = None, body: object = None,
    kind: bytes = b"application/json", **how: Any,
) -> Answer:  # fmt: skip
    """`fetch` with a key and a body as JSON; of an address, on a connection of its own."""
    headers: Headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    if body is not None:
        headers.append((b"content-type", kind))
        how["body"] = json.dumps(body).encode()
    if isinstance(at, Origin):
        return await fetch(at, method, path, headers=headers, **how)
    return await fetch_once(at, method, path, headers=headers, **how)


async def fetch_once(address: Address, method: str, path: str, **how: Any) -> Answer:
    """`fetch` on a connection of its own."""
    origin = Origin(asyncio.get_running_loop(), address)
    try:
        return await fetch(origin, method, path, **how)
    finally:
        origin.close()


async def fetch(
    origin: Origin,
    method: str,
    path: str,
    *,
    headers: Headers | None = None,
    body: bytes | None = None,
    timeout_s: float = 5.0,
    most_bytes: int = 16 * 2**20,
) -> Answer:
    """Raises OSError where no whole answer comes in time."""
    data = request_bytes(origin, method, path, headers, body)
    connection = asking = None
    try:
        async with asyncio.timeout(timeout_s):
            kept = connection = origin.take()
            connection = connection or await origin.open(timeout_s)
            while True:
                asking = _Collector(origin.loop.create_future(), most_bytes)
                connection.send(data, asking)
                try:
                    return await asking.future
                except ConnectionError:
                    if kept is None or connection.answered:
                        raise
                # It was closed while it lay idle: once more, on a new one.
                kept, connection = None, await origin.open(timeout_s)
    except BaseException as error:
        # Unless the answer has come in the same moment: then the connection may be another's already.
        if connection is not None and connection.handler is asking:
            connection.abort()
        if isinstance(error, TimeoutError):
            raise ConnectionError(f"no answer within {timeout_s:g} s") from None
        raise
