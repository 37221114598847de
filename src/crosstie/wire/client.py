"""The client's side of HTTP/1.1: connections to one origin, kept alive, that tell a handler what arrives.

No coroutine runs per request: a connection is a Protocol, and whoever sent the request is called back.
"""

import asyncio
import select
import socket
from collections.abc import Callable
from ssl import SSLError
from typing import Any, Final, Protocol, cast

import httptools

from crosstie.wire.address import Address
from crosstie.wire.way import Way, tls_refusal, way_to

Headers = list[tuple[bytes, bytes]]
# Engines close idle connections after five seconds (uvicorn's default); one that old may be gone on arrival.
IDLE_S: Final = 4.0
_MOST_IDLE: Final = 512
_DISTRUST_S: Final = 60.0
# Bytes that may come of an answer before its body: its head, and the interim answers before it.
_MOST_HEAD: Final = 64 * 1024
_USUAL: Final = b"HTTP/1.1 200 OK\r\n"
# Of a backend, the last head of such an answer is kept, up to so many bytes: nearly all answers have the same again,
# but for the length of their body.
_LONGEST_HEAD: Final = 2048
_MOST_DIGITS: Final = 18
# By the length of a chunk with all that frames it, the line before what it holds: events of a stream come like that,
# one in a read.
_MOST_CHUNK: Final = 4096
_CHUNK_LINES: Final = [b""] * _MOST_CHUNK
for _size in range(1, _MOST_CHUNK - 7):
    _line = b"%x\r\n" % _size
    _CHUNK_LINES[len(_line) + _size + 2] = _line
_POLLS: Final = hasattr(select, "poll")
# Names of headers as servers write them, and in small letters: a few servers say the same few all the time.
_names: Final[dict[bytes, bytes]] = {}
_MOST_NAMES: Final = 512
_LONGEST_NAME: Final = 64


class ResponseHandler(Protocol):
    """Whoever sent a request. After `on_end` or `on_lost` nothing more comes."""

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_body(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_lost(self, error: Exception | None) -> None: ...


class KnownHead:
    """A head that has been read: what comes before the length in it and after it, up to the body, and its fields, of
    which the one at this place is the length."""

    def __init__(self, before: bytes, after: bytes, headers: Headers, at: int):
        self.before, self.after, self.headers, self.at = before, after, headers, at
        # The lines that go on to a client, with keys or without, once somebody has put them together.
        self.passed: bytes | None = None
        self.passed_keyed: bytes | None = None


class Connection:
    """One connection, a request at a time. An asyncio protocol by its methods, not its base, so that it compiles."""

    def __init__(self, origin: "Origin"):
        self.origin = origin
        self.transport = cast(asyncio.Transport, None)
        self.handler: ResponseHandler | None = None
        self.uses = 0
        # Whether any byte of the present answer has come.
        self.answered = self.closed = False
        self.idle_since = 0.0
        # Asks the kernel whether anything has come that the loop has not told of yet.
        self._unread: Any = None
        # Of the present answer, if it begins with what was read before.
        self.head: KnownHead | None = None
        self._headers: Headers = []
        # What has come of the body in one read: nearly always one piece, for which no list is made.
        self._piece = b""
        self._more: list[bytes] = []
        # Of a head that comes in small pieces, those since the last that ended a line.
        self._held: list[bytes] = []
        self._reset()
        self._parser = httptools.HttpResponseParser(self)

    def _reset(self) -> None:
        # Those who were told of an answer may have its lists: only what is empty still is used again.
        if self._headers:
            self._headers = []
        if self._more:
            self._more = []
        if self._held:
            self._held = []
        self._piece = b""
        self.head = None
        self._head_bytes = self._before_head = 0
        self._complete = self._keep = self._usual = False
        self._headed = self._paused = False
        # Whether a chunk has ended, and nothing of the next has come.
        self._between = False
        # The end of an answer without a length is the end of its connection.
        self._until_close = True

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        no_delay(self.transport)
        raw = transport.get_extra_info("socket")
        if raw is not None and _POLLS:
            self._unread = select.poll()
            self._unread.register(raw.fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        handler = self.handler
        if handler is None:
            # Nobody asked: what comes after an answer cannot be trusted.
            self.origin.distrust()
            self.abort()
            return
        first, size = not self.answered, len(data)
        if self._between:
            line = _CHUNK_LINES[size] if size < _MOST_CHUNK else b""
            begin = len(line)
            # Slices are compared, since to call a method takes longer.
            if begin and data[-2:] == b"\r\n" and (data[:begin] == line or data[:begin].lower() == line):
                # Nothing but a whole chunk, which the parser need not know of.
                handler.on_body(data[begin:-2])
                return
            self._between = False
        if first:
            self.answered = True
            known = self.origin.known
            if known is not None and self._is_known(known, data, handler):
                return
            self._usual = data.startswith(_USUAL)
        elif not self._headed:
            # The parser copies what it has of a line with every piece, which is the square of the line's length.
            self._held.append(data)
            if b"\n" not in data:
                self._count_head(size)
                return
            data, self._held = b"".join(self._held), []
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # After the whole answer it is no answer's fault, but the connection's end.
            self._keep = False
            if self._complete:
                self.origin.distrust()
            else:
                switched = isinstance(error, httptools.HttpParserUpgrade)
                # Its words alone: the error knows of this frame, which would know of the error.
                why = "it changes the protocol" if switched else str(error.__context__ or error)
                self._lose(ConnectionError(f"answer is no HTTP: {why}"))
                return
        if self.handler is not handler:
            return
        if self._between and not data.endswith(b"\r\n"):
            # The first digits of the next chunk's size.
            self._between = False
        if not self._headed and not self._count_head(size):
            return
        if self._piece:
            piece, self._piece = self._piece, b""
            if self._more:
                piece, self._more = piece + b"".join(self._more), []
            handler.on_body(piece)
        if self._complete and self.handler is handler:
            if first and self._usual and self._keep:
                self._know(data)
            self._finish(self._keep)

    def _count_head(self, size: int) -> bool:
        """Whether there may be more: of a line without an end, and of interim answers, the parser says nothing."""
        self._before_head += size
        if self._before_head > _MOST_HEAD:
            self._lose(ConnectionError(f"answer has more than {_MOST_HEAD} bytes before its body"))
            return False
        return True

    def _is_known(self, known: KnownHead, data: bytes, handler: ResponseHandler) -> bool:
        """Whether it is a whole answer, and no more than that, with a head that was read before: then it is taken, and
        nothing of its head is looked at but the length."""
        if not data.startswith(known.before):
            return False
        at, after = len(known.before), known.after
        end = data.find(after, at, at + _MOST_DIGITS + len(after))
        if end < 0:
            return False
        digits, begin = data[at:end], end + len(after)
        if not digits.isdigit() or len(data) - begin != int(digits):
            return False
        headers = known.headers.copy()
        headers[known.at] = (b"content-length", digits)
        self._headed, self._until_close = True, False
        self.head = known
        handler.on_head(200, headers)
        if self.handler is handler and begin < len(data):
            handler.on_body(data[begin:])
        if self.handler is handler:
            self._finish(keep=True)
        return True

    def _know(self, data: bytes) -> None:
        """Keeps the head of a whole answer that came in one read, for those that come after it."""
        places = [at for at, (name, _) in enumerate(self._headers) if name == b"content-length"]
        begin = data.find(b"\r\n\r\n") + 4
        if len(places) != 1 or begin > _LONGEST_HEAD:
            return
        length = self._headers[places[0]][1]
        for name in (b"\r\ncontent-length: ", b"\r\nContent-Length: "):
            at = data.find(name + length + b"\r\n", 0, begin)
            if at >= 0 and length.isdigit() and len(data) - begin == int(length):
                at += len(name)
                after = data[at + len(length) : begin]
                # A list of its own: whoever has the answer may change what it was given.
                self.origin.known = KnownHead(data[:at], after, self._headers.copy(), places[0])

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.origin.forget(self)
        if self.handler is not None:
            self._lost(exc)
        # Either knows of the other: together they would stay until the collector comes, with all that they have read.
        self._parser = cast(httptools.HttpResponseParser, None)

    def _lost(self, exc: Exception | None) -> None:
        if exc is None and self._headed and self._until_close:
            self._finish(keep=False)
        elif isinstance(exc, SSLError) and not self.answered and self.uses == 1:
            # TLS 1.3 shows only now that the other side does not take this one's certificate.
            self._lose(tls_refusal(exc))
        else:
            self._lose(exc)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        """The request is held whole by its sender anyway, so there is nothing to hold back."""

    def resume_writing(self) -> None:
        pass

    # httptools

    def on_message_begin(self) -> None:
        if self._complete:
            # A second answer to one request: whoever asked must not get both.
            raise ValueError("more than was asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MOST_HEAD:
            raise ValueError("headers too large")
        if self._headed:
            # After the body: nobody waits for it any more, and whoever has the headers must not see them change.
            return
        small = _names.get(name)
        if small is None:
            small = name.lower()
            if len(_names) < _MOST_NAMES and len(name) <= _LONGEST_NAME:
                _names[name] = small
        name = small
        if name == b"content-length":
            self._until_close = False
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise ValueError("transfer-encoding is not chunked")
            self._until_close = False
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        # What nearly every answer begins with tells both, and nothing comes before it.
        status: int = 200 if self._usual else self._parser.get_status_code()
        if not self._usual and (not 100 <= status < 600 or self._parser.get_http_version() not in ("1.1", "1.0")):
            raise ValueError("no status or version of HTTP/1.1")
        if status < 200:
            self._headers = []
            self._until_close = True
            return
        self._headed = True
        if self.handler:
            self.handler.on_head(status, self._headers)

    def on_body(self, body: bytes) -> None:
        if self._piece:
            self._more.append(body)
        else:
            self._piece = body

    def on_chunk_header(self) -> None:
        self._between = False

    def on_chunk_complete(self) -> None:
        self._between = True

    def on_message_complete(self) -> None:
        self._complete, self._between = self._headed, False
        self._keep = self._parser.should_keep_alive()

    # The sender's side

    def send(self, data: bytes, handler: ResponseHandler, more: bytes = b"") -> None:
        """`more`: what is too long to be put behind the rest."""
        self.handler = handler
        self.answered = False
        self.uses += 1
        self._reset()
        self.transport.write(data)
        if more:
            self.transport.write(more)

    @property
    def silent(self) -> bool:
        """Whether nothing has come since the last answer: neither its server's end nor words that nobody asked for."""
        return self._unread is None or not self._unread.poll(0)

    def pause(self) -> None:
        self._paused = True
        self.transport.pause_reading()

    def resume(self) -> None:
        self._paused = False
        self.transport.resume_reading()

    def abort(self) -> None:
        """Drops the connection; its handler hears nothing more."""
        self.handler = None
        self.closed = True
        self.origin.forget(self)
        if self.transport is not None:
            self.transport.abort()

    def _finish(self, keep: bool) -> None:
        handler, self.handler = self.handler, None
        if self._paused:
            # Its client was slow; whoever uses it next must hear its answer.
            self.resume()
        # Where the request has not left yet nobody will read the rest of it, nor a next one.
        if keep and not self.closed and not self.transport.get_write_buffer_size():
            self.origin.keep(self)
        else:
            self.abort()
        if handler:
            handler.on_end()

    def _lose(self, error: Exception | None) -> None:
        handler = self.handler
        self.abort()
        if handler:
            handler.on_lost(error)


class Origin:
    """A server and the connections to it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, address: Address, way: Way | None = None):
        self.loop, self.address = loop, address
        self.way = way or way_to(address)
        # Before the path of a request, and after its host: for a proxy.
        self.prefix, self.lines = self.way.form(address)
        self._idle: list[Connection] = []
        self._open: set[Connection] = set()
        self._connecting: set[asyncio.Task[None]] = set()
        self._retired = False
        self._distrusted_until = 0.0
        # What its answers begin with, as far as one was read.
        self.known: KnownHead | None = None

    @property
    def connections(self) -> int:
        return len(self._open)

    def take(self) -> Connection | None:
        """The connection that was used last, if one is idle, fresh and silent: what comes on it now would be taken
        for the answer to the next request."""
        while self._idle:
            connection = self._idle.pop()
            fresh = self.loop.time() - connection.idle_since < IDLE_S and not connection.closed
            if fresh and connection.silent:
                return connection
            connection.abort()
        return None

    def connect(self, timeout_s: float, then: Callable[[Connection | Exception], None]) -> "asyncio.Task[None]":
        """Opens a connection and calls `then` with it, or with what went wrong. Cancelled, it calls nobody."""
        task = self.loop.create_task(self._connect(timeout_s, then))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    async def _connect(self, timeout_s: float, then: Callable[[Connection | Exception], None]) -> None:
        result: Connection | Exception
        try:
            result = await self.open(timeout_s)
        except OSError as error:
            result = error
        then(result)

    async def open(self, timeout_s: float) -> Connection:
        try:
            async with asyncio.timeout(timeout_s):
                connection: Connection = await self.way.connect(self.loop, self.address, lambda: Connection(self))
        except TimeoutError:
            raise ConnectionError(f"no connection within {timeout_s:g} s") from None
        except SSLError as error:
            raise tls_refusal(error) from None
        except UnicodeError as error:
            # A name that no DNS can have.
            raise ConnectionError(f"'{self.address.host}' is no host: {error}") from None
        if connection.closed:
            raise ConnectionError("closed as soon as it was open")
        self._open.add(connection)
        return connection

    def go_by(self, way: Way) -> None:
        """From the next connection on; what is under way ends as it began."""
        if way is not self.way:
            self.way = way
            self.prefix, self.lines = way.form(self.address)
            for connection in list(self._idle):
                connection.abort()

    def keep(self, connection: Connection) -> None:
        connection.idle_since = self.loop.time()
        if len(self._idle) < _MOST_IDLE and not self._retired and connection.idle_since >= self._distrusted_until:
            self._idle.append(connection)
        else:
            connection.abort()

    def forget(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def distrust(self) -> None:
        """It has said more than it was asked: had that come a little later, the next client would have got it. For a
        while every request has a connection of its own."""
        self._distrusted_until = self.loop.time() + _DISTRUST_S
        for connection in list(self._idle):
            connection.abort()

    def prune(self) -> None:
        """Closes connections that have been idle for too long to be trusted."""
        now = self.loop.time()
        for connection in [c for c in self._idle if now - c.idle_since >= IDLE_S]:
            connection.abort()

    def retire(self) -> None:
        """Connections go as they fall idle: nobody will prune them any more."""
        self._retired = True
        for connection in list(self._idle):
            connection.abort()

    def close(self) -> None:
        for task in self._connecting:
            task.cancel()
        for connection in list(self._open):
            connection.abort()


def no_delay(transport: asyncio.BaseTransport) -> None:
    """Small writes leave at once; without this a chunk can wait 40 ms for the other side's acknowledgement."""
    raw = transport.get_extra_info("socket")
    if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
