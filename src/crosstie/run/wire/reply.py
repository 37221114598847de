"""The answer to a request, written as it comes, and who is told how its client takes it."""

from http import HTTPStatus
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from crosstie.run.wire.server import ServerConnection

_REASONS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
# The first lines of chunks up to this long, made once: a stream is made of them.
_MOST_SIZES = 4096
_SIZES = tuple(b"%x\r\n" % size for size in range(_MOST_SIZES))


class Watcher(Protocol):
    """Who answers a request later: told when its client goes, or reads more slowly than is written."""

    def client_gone(self) -> None: ...

    def client_slow(self) -> None: ...

    def client_ready(self) -> None: ...


class Reply:
    """The answer to one request. What is written after its client has gone is dropped."""

    __slots__ = ("_chunked", "_connection", "_head", "done", "started", "watcher")

    def __init__(self, connection: "ServerConnection"):
        self._connection = connection
        self._head = b""
        self._chunked = False
        # Whether a byte of it may have left, and whether all of it has.
        self.started = self.done = False
        self.watcher: Watcher | None = None

    @property
    def gone(self) -> bool:
        return self._connection.closed

    @property
    def slow(self) -> bool:
        """Whether the client has more to read than it should."""
        return self._connection.slow

    @property
    def unsent(self) -> int:
        """Bytes that its client has not taken yet."""
        return self._connection.transport.get_write_buffer_size()

    def send(self, status: int, body: bytes, headers: bytes = b"", content_type: bytes = b"application/json") -> None:
        """A whole answer; `headers` are lines with their ends."""
        if self.done:
            return
        connection = self._connection
        self.started = True
        connection.write(
            b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n"
            % (_reason(status), content_type, len(body), headers, connection.closing_line()),
            b"" if connection.head_only else body,
        )
        self.end_message()

    def start(self, status: int, headers: bytes, length: int | None) -> None:
        """The head of an answer whose body follows in pieces; it leaves with the first of them."""
        connection = self._connection
        self.started = True
        if length is None:
            self._chunked = connection.http11
            framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
            if not self._chunked:
                connection.keep_alive = False
        else:
            framing = b"content-length: %d\r\n" % length
        self._head = b"%b%b%b%b\r\n" % (_reason(status), headers, framing, connection.closing_line())

    def write(self, data: bytes) -> None:
        if not data or self.done:
            return
        if self._chunked:
            size = len(data)
            data = (_SIZES[size] if size < _MOST_SIZES else b"%x\r\n" % size) + data + b"\r\n"
        if self._head:
            data, self._head = self._head + data, b""
        self._connection.write(data)

    def flush(self) -> None:
        """Sends the head before there is anything to follow it, as engines do whose first token takes a while."""
        if self._head and not self.done:
            head, self._head = self._head, b""
            self._connection.write(head)

    def end(self) -> None:
        if self.done:
            return
        last = self._head + (b"0\r\n\r\n" if self._chunked else b"")
        if last:
            self._head = b""
            self._connection.write(last)
        self.end_message()

    def cut(self, *, after_written: bool = False) -> None:
        """Ends an answer that cannot be completed, so that its client sees that it was not; what was written
        may be lost, or leaves first."""
        self.done = True
        self.watcher = None
        self._connection.abort(after_written)

    def end_message(self) -> None:
        self.done = True
        self.watcher = None
        self._connection.next_request()


def _reason(status: int) -> bytes:
    return _REASONS.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status
