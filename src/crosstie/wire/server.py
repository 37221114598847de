"""The server's side of HTTP/1.1: bytes in, whole requests out to a handler, its reply back as it comes.

A handler is a plain function of a request and its reply. It may answer at once or keep the reply and answer
later, from any callback; nothing is awaited, so a request costs no task.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import cast

import httptools

from crosstie.wire.client import no_delay
from crosstie.wire.listener import Listener
from crosstie.wire.reply import Reply
from crosstie.wire.request import Limits, Request

_MOST_HEAD = 64 * 1024
_MOST_PIPELINED = 16
# How long a client that was refused may go on sending.
_LINGER_S = 2.0

Handler = Callable[[Request, Reply], None]


class ServerConnection:
    """One client. An asyncio protocol by its methods, not by its base, so that it can be compiled."""

    def __init__(self, server: "Server"):
        self.server = server
        self.transport = cast(asyncio.Transport, None)
        self.closed = self.slow = False
        self.keep_alive = self.http11 = True
        self.head_only = False
        # Whether nothing has been asked on it yet.
        self.fresh = True
        # When the request that is arriving began; None between requests.
        self.arriving_since: float | None = None
        self.idle_since = server.clock
        self.current: Reply | None = None
        # Requests that have arrived behind the one being answered, each with its own version and keep-alive.
        self._behind: deque[tuple[Request, bool, bool]] = deque()
        self._parser = httptools.HttpRequestParser(self)
        self._refused = self._in_head = False
        # What is said to whom nothing more is read of, once those before it have been answered; and until when what
        # it still sends is thrown away.
        self._refusal: tuple[int, str] | None = None
        self._lingers_until: float | None = None
        self._unsent = 0
        self._begin()

    def _begin(self) -> None:
        self._url = b""
        self._headers: dict[bytes, bytes] = {}
        self._head_bytes = 0
        self._pieces: list[bytes] = []
        self._body_bytes = self._unended = 0

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        no_delay(transport)
        self.server.connections.add(self)
        turns_away = self.server.turns_away
        if turns_away is not None and turns_away():
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        in_head = self._in_head
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            # An offer to change protocols (curl's h2c) that is not taken up: the request stands as it is. The parser
            # would take all that follows for the other protocol.
            self._parser = httptools.HttpRequestParser(self)
            rest = data[offer.args[0] :]
            if rest:
                self.data_received(rest)
            return
        except httptools.HttpParserError as error:
            if not self._refused:
                self._refuse(400, f"this is no HTTP request: {error}")
            return
        if in_head and self._in_head:
            # One line without an end, of which the parser says nothing before it has all of it.
            self._unended += len(data)
            if self._unended > _MOST_HEAD:
                self._refuse(431, f"headers of more than {_MOST_HEAD} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.server.connections.discard(self)
        self._behind.clear()
        # The parser and this hold each other: what has come of a body must not wait for a collector to find them.
        self._begin()
        reply, self.current = self.current, None
        if reply is not None and reply.watcher is not None:
            watcher, reply.watcher = reply.watcher, None
            watcher.client_gone()

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.slow = True
        if self.current and self.current.watcher:
            self.current.watcher.client_slow()

    def resume_writing(self) -> None:
        self.slow = False
        if self.current and self.current.watcher:
            self.current.watcher.client_ready()

    # httptools

    def on_message_begin(self) -> None:
        self.arriving_since = self.server.clock
        self.fresh = False
        self._begin()
        self._in_head = True

    def on_url(self, url: bytes) -> None:
        self._head_bytes += len(url)
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > _MOST_HEAD:
            self._refuse(431, f"headers of more than {_MOST_HEAD} bytes")
            raise ValueError("headers too large")
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        self._in_head = False
        length = self._headers.get(b"content-length")
        if length is not None and int(length) > self.server.limits.body_bytes:
            self._too_large()
        if self._headers.get(b"expect", b"").lower() == b"100-continue" and not self._busy:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > self.server.limits.body_bytes:
            self._too_large()
        self._pieces.append(body)

    def _too_large(self) -> None:
        self._refuse(413, f"body of more than {self.server.limits.body_bytes} bytes")
        raise ValueError("body too large")

    def on_message_complete(self) -> None:
        self.arriving_since = None
        parser = self._parser
        path, _, query = self._url.decode("latin-1").partition("?")
        pieces = self._pieces
        request = Request(
            parser.get_method().decode("ascii"),
            path,
            query,
            self._headers,
            pieces[0] if len(pieces) == 1 else b"".join(pieces),
        )
        self._pieces = []
        http11 = parser.get_http_version() == "1.1"
        if self._busy:
            self._behind.append((request, http11, parser.should_keep_alive()))
            if len(self._behind) >= _MOST_PIPELINED:
                self.transport.pause_reading()
        elif not self.transport.is_closing():
            self._answer(request, http11, parser.should_keep_alive())

    @property
    def _busy(self) -> bool:
        """Whether others come first; the next one's turn is not at once, see `next_request`."""
        return self.current is not None or bool(self._behind)

    # Answers

    def _answer(self, request: Request, http11: bool, keep_alive: bool) -> None:
        self.http11 = http11
        self.keep_alive = keep_alive
        self.head_only = request.method == "HEAD"
        self.current = reply = Reply(self)
        try:
            self.server.handler(request, reply)
        except Exception as error:  # noqa: BLE001 (the parser, which calls this, would take it for bad HTTP)
            self.server.loop.call_exception_handler({"message": f"{request.path}: handler failed", "exception": error})
            if reply.started:
                reply.cut()
            else:
                reply.send(500, self.server.refusal(500, "internal error"))

    def closing_line(self) -> bytes:
        if self.server.closing and not self._behind and self._refusal is None:
            # Those that have come are answered; the last of them says that there are no more.
            self.keep_alive = False
        if self.keep_alive:
            return b"" if self.http11 else b"connection: keep-alive\r\n"
        return b"connection: close\r\n"

    def write(self, data: bytes, more: bytes = b"") -> None:
        if not self.closed:
            self.transport.write(data + more if len(more) < 65536 else data)
            if len(more) >= 65536:
                self.transport.write(more)

    def next_request(self) -> None:
        self.current = None
        self.idle_since = self.server.clock
        if self.closed:
            return
        if not self.keep_alive:
            self._hang_up()
        elif self._behind:
            # Not from within the last answer: a thousand pipelined requests must not be a thousand frames deep.
            self.server.loop.call_soon(self._answer_next)
        elif self._refusal is not None:
            self._say_refusal(*self._refusal)

    def _answer_next(self) -> None:
        if self.closed or self.transport.is_closing():
            return
        request, http11, keep_alive = self._behind.popleft()
        if len(self._behind) == _MOST_PIPELINED - 1:
            self.transport.resume_reading()
        self._answer(request, http11, keep_alive)

    def _refuse(self, status: int, why: str) -> None:
        """Answers what cannot be parsed, and closes: what follows on this connection cannot be told apart."""
        self._refused = True
        self.arriving_since = None
        if self._busy:
            self._refusal = (status, why)
        elif not self.transport.is_closing():
            self._say_refusal(status, why)

    def _say_refusal(self, status: int, why: str) -> None:
        self._refusal = None
        self.keep_alive = self.head_only = False
        self.current = reply = Reply(self)
        reply.send(status, self.server.refusal(status, why))

    def _hang_up(self) -> None:
        """Closes. Whoever may still be sending is listened to for a moment: closing at once would reset the
        connection, and the answer with it."""
        if self._refused and self._lingers_until is None and self.transport.can_write_eof():
            self._lingers_until = self.server.loop.time() + _LINGER_S
            self.transport.write_eof()
            self.transport.resume_reading()
        else:
            self.transport.close()

    def abort(self, after_written: bool = False) -> None:
        if self.transport is not None:
            (self.transport.close if after_written else self.transport.abort)()

    def check(self, now: float) -> None:
        """Ends a connection whose request arrives too slowly, or that has been idle for too long."""
        limits = self.server.limits
        if self.arriving_since is not None and now - self.arriving_since > limits.request_s:
            self._refuse(408, f"the request did not arrive within {limits.request_s:g} s")
        elif self._lingers_until is not None and now > self._lingers_until:
            self.transport.close()
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:
            # It reads, be it slowly.
            self.idle_since = now
        self._unsent = unsent
        if self.idle and now - self.idle_since > limits.idle_s:
            # A close would wait for what it does not read.
            self.abort(after_written=not unsent)
        elif self.idle and self.server.closing:
            self.transport.close()

    @property
    def idle(self) -> bool:
        return self.current is None and self.arriving_since is None and not self._behind


class Server:
    """Listens, and keeps its connections within their limits."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Handler,
        limits: Limits | None = None,
        refusal: Callable[[int, str], bytes] = lambda status, why: why.encode(),
        turns_away: Callable[[], bool] | None = None,
    ):
        self.loop, self.handler, self.limits, self.refusal = loop, handler, limits or Limits(), refusal
        # Asked for each new connection, which is closed at once if so.
        self.turns_away = turns_away
        self.connections: set[ServerConnection] = set()
        self.closing = False
        # Requests that were being answered when it closed.
        self.cut_off = 0
        # The loop's time as of the last sweep: patience with clients needs no better.
        self.clock = loop.time()
        self._listener = Listener(loop, self.accept)
        self._sweep: asyncio.TimerHandle | None = None

    async def listen(self, host: str, port: int) -> int:
        """Port 0 takes a free one; returns the port. Raises OSError."""
        found = await self._listener.open(host, port)
        self._sweep = self.loop.call_later(1.0, self._check)
        return found

    def accept(self) -> ServerConnection:
        """What a new connection is served by."""
        return ServerConnection(self)

    def _check(self) -> None:
        self._sweep = self.loop.call_later(1.0, self._check)
        self.clock = now = self.loop.time()
        for connection in list(self.connections):
            connection.check(now)

    async def drain(self, within_s: float, grace_s: float = 0.3, give_up: Callable[[], None] = lambda: None) -> bool:
        """Answers what has come and what is on its way, then closes; whether all of it was answered in time.

        `give_up` is called when it was not: the last chance to say so to those who wait.
        """
        self.closing = True
        # Requests that raced with the signal: connections in the backlog, bytes under way.
        await asyncio.sleep(grace := min(grace_s, within_s))
        await self._listener.close_after_queue()
        patience = self.loop.time() + grace
        await self._all_gone(self.loop.time() + within_s, patience)
        if self.connections:
            self.cut_off += sum(connection.current is not None for connection in self.connections)
            give_up()
            await self._all_gone(self.loop.time() + grace_s, patience)
        self.close()
        return not self.cut_off

    async def _all_gone(self, deadline: float, patience: float) -> None:
        """Closes what is idle until nothing is left, or the time is over."""
        while self.connections and (now := self.loop.time()) < deadline:
            for connection in [c for c in self.connections if c.idle]:
                # Who was let in last has yet to say what it wants.
                if not (now < patience and connection.fresh):
                    connection.transport.close()
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self.closing = True
        self._listener.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self.connections):
            self.cut_off += connection.current is not None
            connection.abort()
