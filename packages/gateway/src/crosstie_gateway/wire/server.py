"""The server's side of HTTP/1.1: bytes in, whole requests out to a handler, its reply back as it comes.

A handler is a function of a request and its reply, and answers at once or later from any callback: no task for a
request.
"""

import asyncio
import socket
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any, Final, Protocol, cast

from crosstie.wire.client import no_delay
from crosstie_gateway.wire.listener import Listener, listening, untaken_bytes, was_reset
from crosstie_gateway.wire.parser import RequestParser
from crosstie_gateway.wire.request import BadRequest, Request, RequestLimits
from crosstie_gateway.wire.tls import ServerTls

# How long a client that was refused may go on sending.
_LINGER_S: Final = 2.0
# How long a client whose connection was being made when the server closed may take to complete it.
_HANDSHAKE_S: Final = 0.2
# How soon a client that has gone shows it, once something is sent to it.
_PROBE_S: Final = 0.05
# After a read of this size more is likely to lie there; libuv would go on with the same connection for up to 32 reads.
_LARGE_READ: Final = 65_536
# How soon it is looked whether a client has all that was sent to it by TLS.
_CLOSE_S: Final = 0.005
# What a client of gRPC begins with, where that is spoken.
_PREFACE: Final = b"PRI * HTTP/2.0\r\n"
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_REASONS: Final = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
# The first lines of chunks up to this long, made once: a stream is made of them.
_MOST_SIZES: Final = 4096
_SIZES: Final = tuple(b"%x\r\n" % size for size in range(_MOST_SIZES))


class ClientWatcher(Protocol):
    """Answers a request later: told when its client goes, or reads more slowly than is written."""

    def on_client_gone(self) -> None: ...

    def on_client_slow(self) -> None: ...

    def on_client_ready(self) -> None: ...


class GoneWatcher:
    """Calls `gone` when its client goes. Its writer asks before whether the client is slow."""

    def __init__(self, gone: Callable[[], object]):
        self._gone = gone

    def on_client_gone(self) -> None:
        self._gone()

    def on_client_slow(self) -> None: ...
    def on_client_ready(self) -> None: ...


class Reply:
    """The answer to one request. What is written after its client has gone is dropped."""

    def __init__(self, connection: "ServerConnection"):
        self.connection = connection
        # Of the head, whatever the answer.
        self.lines = b""
        # Whether a byte of it may have left, and whether all of it has.
        self.started = self.done = False
        self.watcher: ClientWatcher | None = None

    @property
    def gone(self) -> bool:
        return self.connection.closed

    @property
    def slow(self) -> bool:
        """Whether the client has more to read than it should."""
        return self.connection.slow

    @property
    def unsent(self) -> int:
        """Bytes that its client has not taken yet."""
        return self.connection.transport.get_write_buffer_size()

    def send(self, status: int, body: bytes, headers: bytes = b"", content_type: bytes = b"application/json") -> None:
        """A whole answer; `headers` are lines with their ends."""
        if self.done:
            return
        self.started = True
        self.connection.send_whole(status, content_type, headers + self.lines, body)
        self.end_message()

    def start(self, status: int, headers: bytes, length: int | None) -> None:
        """The head of an answer whose body follows in pieces; it leaves with the first of them."""
        self.started = True
        self.connection.send_head(status, headers + self.lines, length)

    def write(self, data: bytes) -> None:
        if data and not self.done:
            self.connection.send_piece(data)

    def flush(self) -> None:
        """Sends the head before there is anything to follow it, as engines do whose first token takes a while."""
        if not self.done:
            self.connection.send_now()

    def end(self) -> None:
        if self.done:
            return
        self.connection.send_end()
        self.end_message()

    def cut(self, *, after_written: bool = False) -> None:
        """Ends an answer so that its client sees that it is incomplete; what was written may be lost, or leaves
        first."""
        self.done = True
        self.watcher = None
        self.connection.abort(after_written)

    def end_message(self) -> None:
        self.done = True
        self.watcher = None
        self.connection.next_request()


def _reason(status: int) -> bytes:
    return _REASONS.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


Handler = Callable[[Request, Reply], None]


class ServerConnection:
    """One client. An asyncio protocol by its methods, not by its base, so that it can be compiled."""

    def __init__(self, server: "Server"):
        self.server = server
        self.transport = cast(asyncio.Transport, None)
        self.address = ""
        # What secures it, and whether that has yet to be done; None: it is plain.
        self.handshake: asyncio.Future[Any] | None = None
        self.shaking = False
        self.closed = self.slow = False
        self.keep_alive = self.http11 = True
        self.head_only = False
        # Whether nothing has been asked on it yet.
        self.fresh = True
        # When the request that is arriving began; None between requests.
        self.arriving_since: float | None = None
        self.idle_since = server.clock
        self.current: Reply | None = None
        # Of the answer: its head while that has not left, and whether its body goes in chunks.
        self._head = b""
        self._chunked = False
        # Whether anything was asked on it.
        self._asked = False
        self._parser = RequestParser(server.limits)
        # Whether it is refused, has sent its last byte, or more than is read before its turn.
        self._refused = self._eof = self._held_back = False
        # Whether it goes on to the next request in a moment.
        self._goes_on = False
        # Until when what it still sends is thrown away.
        self._lingers_until: float | None = None
        # Whether it closes as soon as all has left.
        self._closes = False
        # Bytes that it had not read, and those of its body that had arrived, when that was last looked at.
        self._unsent = self._arrived = 0
        # The account of the arriving body, once its head was let in; 0: none.
        self._account = 0
        self._let_in = False

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        no_delay(transport)
        if self.shaking:
            # It was let in before.
            self.shaking = False
            secured = transport.get_extra_info("ssl_object")
            if secured is not None and secured.selected_alpn_protocol() == "h2":
                self.server.speak_grpc(self, b"")
        elif not self.server.lets_in(self):
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        parser = self._parser
        parser.feed(data)
        if self.current is None and not self._goes_on:
            self._go_on()
            if len(data) >= _LARGE_READ and self._still_arrives():
                self._let_others_go_first()
        elif parser.pending > self.server.limits.pipelined_bytes:
            self._hold_back()

    def _still_arrives(self) -> bool:
        # A call, since compiled code would go by the answer that it looked up before.
        return self.current is None and not self._refused

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self.server.lets_go(self)
        self._parser.drop()
        self.tell_gone()

    def tell_gone(self) -> None:
        """Tells whoever answers that there is no client any more."""
        self._hold(0)
        reply, self.current = self.current, None
        if reply is not None and reply.watcher is not None:
            watcher, reply.watcher = reply.watcher, None
            watcher.on_client_gone()

    def eof_received(self) -> bool:
        """The client sends no more: it has gone, or waits for its answer, which look the same."""
        if self.handshake is not None:
            # TLS says goodbye for both sides.
            return False
        self._eof = True
        reply = self.current
        if reply is None:
            if not self._parser.begun:
                return False
            # What it had sent before comes to its turn; if that is half a request, there it ends.
            self._go_on_soon()
        elif not reply.started:
            if not self.http11:
                return False
            # A client that has gone answers this with a reset, before an engine has done much for nobody.
            self.transport.write(_CONTINUE)
            self.server.loop.call_later(_PROBE_S, self._abort_if_gone)
        return True

    def pause_writing(self) -> None:
        self.slow = True
        if self.current and self.current.watcher:
            self.current.watcher.on_client_slow()

    def resume_writing(self) -> None:
        self.slow = False
        if self.current and self.current.watcher:
            self.current.watcher.on_client_ready()
        elif self.current is None and (self._parser.begun or self._eof):
            self._go_on_soon()

    def peer(self) -> str:
        """The address of the other side."""
        peer = self.transport.get_extra_info("peername")
        return str(peer[0]) if isinstance(peer, tuple) else ""

    # Requests

    def _go_on(self) -> None:
        """To the next request, if all of it has come."""
        self._goes_on = False
        if self.current is not None or self._refused or self.closed or self.transport.is_closing():
            return
        if self.slow:
            # A client that asks on and on and reads no answer would have them all kept for it here.
            self._hold_back()
            return
        parser = self._parser
        try:
            request = parser.next()
        except BadRequest as refused:
            if self.server.speaker is not None and not self._asked and parser.read.startswith(_PREFACE):
                self.server.speak_grpc(self, parser.read)
            else:
                self.refuse(refused)
            return
        if self._held_back and (request is None or parser.pending <= self.server.limits.pipelined_bytes):
            self._held_back = False
            self.transport.resume_reading()
        if request is not None:
            if self._arrived:
                self._hold(0)
            self._let_in = False
            self.arriving_since = None
            self.fresh = False
            self._answer(request)
        elif self._eof:
            self._hang_up()
        elif parser.begun:
            self._wait_for_rest()

    def _go_on_soon(self) -> None:
        """Not from within the last answer: a thousand pipelined requests must not be a thousand frames deep."""
        self._goes_on = True
        self.server.loop.call_soon(self._go_on)

    def _hold_back(self) -> None:
        if not self._held_back:
            self._held_back = True
            self.transport.pause_reading()

    def _let_others_go_first(self) -> None:
        """Lets others go first after one read of a long body: a fast sender does not get the loop to itself."""
        if not (self._held_back or self.closed or self.transport.is_closing()):
            self._hold_back()
            self.server.loop.call_soon(self._take_turn)

    def _take_turn(self) -> None:
        if self._held_back and self.current is None and not (self.closed or self.transport.is_closing()):
            self._held_back = False
            self.transport.resume_reading()

    def _wait_for_rest(self) -> None:
        parser, limits = self._parser, self.server.limits
        if self.arriving_since is None:
            self.arriving_since = self.server.clock
            self.fresh = False
        if not parser.in_head and not self._let_in:
            # Before it is told to go on: nobody who may not ask gets to send a body.
            if self.server.tells_peers:
                parser.request.peer = self.peer()
            try:
                self._account = self.server.opens(parser.request) if self.server.opens is not None else 0
            except BadRequest as refused:
                self.refuse(refused)
                return
            self._let_in = True
        if parser.wants_continue:
            parser.wants_continue = False
            self.transport.write(_CONTINUE)
        self._hold(parser.held)
        if self.server.arriving > limits.arriving_bytes:
            self.refuse(BadRequest(503, "more is arriving than there is room for; try again later"))
        elif self.server.arriving_of.get(self._account, 0) > limits.arriving_bytes_of_one:
            why = f"more than {limits.arriving_bytes_of_one} bytes of this account are arriving; try again later"
            self.refuse(BadRequest(503, why))

    def _hold(self, held: int) -> None:
        more, of = held - self._arrived, self.server.arriving_of
        self.server.arriving += more
        self._arrived = held
        if self._account:
            left = of.get(self._account, 0) + more
            if left > 0:
                of[self._account] = left
            else:
                of.pop(self._account, None)

    def _answer(self, request: Request) -> None:
        parser = self._parser
        self._asked = True
        self.http11, self.keep_alive = parser.http11, parser.keep_alive
        self.head_only = request.method == "HEAD"
        self.current = reply = Reply(self)
        if self.server.tells_peers:
            request.peer = self.peer()
        try:
            self.server.handler(request, reply)
        except Exception as error:  # noqa: BLE001 (one request's failure is not the connection's, nor the server's)
            self.server.loop.call_exception_handler({"message": f"{request.path}: handler failed", "exception": error})
            if reply.started:
                reply.cut()
            else:
                reply.send(500, self.server.refusal(500, "internal error"))

    # Answers

    def closing_line(self) -> bytes:
        if (self.server.closing or self._eof) and not self._parser.begun:
            # Those that have come are answered; the last of them says that there are no more.
            self.keep_alive = False
        if self.keep_alive:
            return b"" if self.http11 else b"connection: keep-alive\r\n"
        return b"connection: close\r\n"

    def send_whole(self, status: int, content_type: bytes, lines: bytes, body: bytes) -> None:
        self._head = b""
        head = b"%bcontent-type: %b\r\ncontent-length: %d\r\n%b%b\r\n" % (
            _reason(status), content_type, len(body), lines, self.closing_line(),
        )  # fmt: skip
        if self.closed:
            return
        if self.head_only:
            self.transport.write(head)
        elif len(body) < 65536:
            self.transport.write(head + body)
        else:
            self.transport.write(head)
            self.transport.write(body)

    def send_head(self, status: int, lines: bytes, length: int | None) -> None:
        self._chunked = False
        if length is None:
            self._chunked = self.http11
            framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
            if not self._chunked:
                self.keep_alive = False
        else:
            framing = b"content-length: %b\r\n" % str(length).encode()
        self._head = b"%b%b%b%b\r\n" % (_reason(status), lines, framing, self.closing_line())

    def send_piece(self, data: bytes) -> None:
        if self._chunked:
            size = len(data)
            data = (_SIZES[size] if size < _MOST_SIZES else b"%x\r\n" % size) + data + b"\r\n"
        if self._head:
            data, self._head = self._head + data, b""
        if not self.closed:
            self.transport.write(data)

    def send_now(self) -> None:
        """The head, if it has not left."""
        head, self._head = self._head, b""
        if head and not self.closed:
            self.transport.write(head)

    def send_end(self) -> None:
        last = self._head + (b"0\r\n\r\n" if self._chunked else b"")
        self._head = b""
        if last and not self.closed:
            self.transport.write(last)

    def next_request(self) -> None:
        self.current = None
        self.idle_since = self.server.clock
        if self.closed:
            return
        if not self.keep_alive:
            self._hang_up()
        elif self._parser.begun or self._eof:
            self._go_on_soon()

    def refuse(self, refused: BadRequest) -> None:
        """Answers what cannot be read, and closes: what follows on this connection cannot be told apart."""
        status = refused.status
        self._refused = True
        self.arriving_since = None
        self._hold(0)
        self._parser.drop()
        if not refused.body:
            # What made the body has counted it.
            self.server.count(f"http_{status}")
        self.keep_alive = self.head_only = False
        self.current = reply = Reply(self)
        reply.send(status, refused.body or self.server.refusal(status, refused.why), refused.headers)

    def _hang_up(self) -> None:
        """Closes. Who may still be sending is listened to for a moment: closing at once would reset connection and
        answer."""
        sends_on = (self._refused or self._parser.begun) and not self._eof
        is_plain = self.handshake is None
        if sends_on and self._lingers_until is None and not (is_plain and not self.transport.can_write_eof()):
            self._refused = True
            self._parser.drop()
            self._lingers_until = self.server.loop.time() + _LINGER_S
            # TLS has no half of a connection: by the length of its answer the client knows that this was all.
            if is_plain:
                self.transport.write_eof()
            self.transport.resume_reading()
        else:
            self.close()

    def close(self) -> None:
        """Once all that was written has left."""
        if self.handshake is None:
            self.transport.close()
        elif self.shaking:
            self.handshake.cancel()
        elif not self._closes:
            self._refused = self._closes = True
            self._close_when_taken(_CLOSE_S)

    def _close_when_taken(self, again_s: float) -> None:
        """TLS waits for the client's goodbye, and then silently drops what has not left. So everything leaves before;
        and a client that has all and says no goodbye is not waited for."""
        if self.closed:
            return
        transport = self.transport
        left = transport.get_write_buffer_size() or untaken_bytes(transport)
        if transport.is_closing():
            if left == 0:
                transport.abort()
        elif not left:
            transport.close()
        self.server.loop.call_later(again_s, self._close_when_taken, min(2.0 * again_s, 1.0))

    def abort(self, after_written: bool = False) -> None:
        if after_written:
            self.close()
        elif self.shaking and self.handshake is not None:
            self.handshake.cancel()
        elif self.transport is not None:
            self.transport.abort()

    # The clock

    def check(self, now: float) -> None:
        """Ends a connection whose request arrives too slowly, or that has been idle for too long."""
        limits = self.server.limits
        if self.shaking:
            # Its handshake has a limit of its own.
            return
        if self.arriving_since is not None:
            self.check_arrival(now)
        elif self._lingers_until is not None and now > self._lingers_until:
            self.close()
        elif self._eof:
            self._abort_if_gone()
        unsent = self.transport.get_write_buffer_size()
        if self._closes and not unsent:
            unsent = untaken_bytes(self.transport) or 0
        if unsent and unsent != self._unsent:
            # It reads, be it slowly.
            self.idle_since = now
        self._unsent = unsent
        waits_for_it = self.idle or (self.slow and self.current is None)
        if waits_for_it and now - self.idle_since > limits.idle_s:
            # A close would wait for what it does not read.
            self.abort(after_written=not unsent)
        elif self.idle and self.server.closing:
            self.close()

    def check_arrival(self, now: float) -> None:
        limits = self.server.limits
        if self.arriving_since is None:
            return
        allowed = min(limits.head_s, limits.request_s)
        if not self._parser.in_head:
            allowed = limits.request_s + self._parser.held / limits.body_bytes_per_s
        if now - self.arriving_since > allowed:
            self.refuse(BadRequest(408, f"the request did not arrive within {allowed:.3g} s"))

    def leave(self) -> None:
        """No more should be asked on it. (By HTTP/1.1 the next answer says so.)"""

    def busy(self) -> int:
        """Requests that are being answered."""
        return 1 if self.current is not None else 0

    def _abort_if_gone(self) -> None:
        if not self.closed and was_reset(self.transport):
            self.transport.abort()

    @property
    def idle(self) -> bool:
        return self.current is None and not self._parser.begun


class Server:
    """Listens, and keeps its connections within their limits."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handler: Handler,
        limits: RequestLimits | None = None,
        refusal: Callable[[int, str], bytes] = lambda status, why: why.encode(),
        turns_away: Callable[[], bool] | None = None,
        refused: dict[str, int] | None = None,
        opens: Callable[[Request], int] | None = None,
    ):
        self.loop, self.handler, self.limits, self.refusal = loop, handler, limits or RequestLimits(), refusal
        # Asked for each new connection, which is closed at once if so.
        self.turns_away = turns_away
        self.connections: set[ServerConnection] = set()
        # By address, where their number is limited.
        self._of_address: dict[str, int] = {}
        # What was refused here and how often: requests by `http_` and their status, and `connections` too many.
        self.refused: dict[str, int] = {} if refused is None else refused
        # Asked of a request before its body: whose account it is on. Raises BadRequest.
        self.opens = opens
        # Bytes of bodies that have arrived in part, in all and by account.
        self.arriving = 0
        self.arriving_of: dict[int, int] = {}
        # What speaks gRPC with those who begin with HTTP/2, or have agreed on it by TLS; None: nothing does.
        self.speaker: Callable[[Server], Any] | None = None
        self.closing = False
        # Requests that were being answered when it closed.
        self.cut_off = 0
        # The loop's time as of the last sweep: patience with clients needs no better.
        self.clock = loop.time()
        # Whether requests tell where they came from.
        self.tells_peers = False
        # What connections are secured with that are accepted from now on; None: they are plain.
        self.tls: ServerTls | None = None
        # Told that there are no files left for clients at the door.
        self.on_exhausted: Callable[[], None] = lambda: None
        self._listener: Listener | None = None
        self._sweep: asyncio.TimerHandle | None = None

    async def listen(self, host: str, port: int) -> int:
        """Port 0 takes a free one; returns the port. Raises OSError."""
        return self.join(listening(host, port))

    def join(self, sockets: Sequence[socket.socket], goes_first: Callable[[], bool] | None = None) -> int:
        """Accepts from these; where processes share them, only when it `goes_first`."""
        self._listener = Listener(self.loop, self, sockets, goes_first)
        self._sweep = self.loop.call_later(1.0, self._check)
        return self._listener.open()

    def accept(self) -> ServerConnection:
        """What a new connection is served by."""
        return ServerConnection(self)

    def admit(self, address: str) -> ServerConnection | None:
        """What serves a client once its connection is secured. It counts from now on, handshake or not. None: no
        room."""
        connection = self.accept()
        connection.address, connection.shaking = address, True
        if self.lets_in(connection):
            return connection
        self.lets_go(connection)
        return None

    def turn_out(self, connection: ServerConnection) -> None:
        """Its handshake has failed, or took too long."""
        if connection.shaking:
            self.count("tls")
            self.lets_go(connection)

    def lets_in(self, connection: ServerConnection) -> bool:
        self.connections.add(connection)
        limits = self.limits
        full = len(self.connections) > limits.connections
        if limits.connections_per_address:
            connection.address = connection.address or connection.peer()
        if limits.connections_per_address and connection.address:
            count = self._of_address.get(connection.address, 0) + 1
            self._of_address[connection.address] = count
            full = full or count > limits.connections_per_address
        if full:
            self.count("connections")
        return not full and not (self.turns_away is not None and self.turns_away())

    def speak_grpc(self, connection: ServerConnection, data: bytes) -> None:
        """With a client that does so; `data` is what it has sent."""
        if self.speaker is not None:
            other = self.speaker(self)
            self.connections.discard(connection)
            self.connections.add(other)
            other.begin(connection, data)

    def count(self, refused: str) -> None:
        self.refused[refused] = self.refused.get(refused, 0) + 1

    def lets_go(self, connection: ServerConnection) -> None:
        self.connections.discard(connection)
        left = self._of_address.get(connection.address, 0) - 1
        if left > 0:
            self._of_address[connection.address] = left
        else:
            self._of_address.pop(connection.address, None)

    def _check(self) -> None:
        self._sweep = self.loop.call_later(1.0, self._check)
        self.clock = now = self.loop.time()
        for connection in list(self.connections):
            connection.check(now)

    async def drain(self, within_s: float, grace_s: float = 0.3, give_up: Callable[[], None] = lambda: None) -> bool:
        """Answers what has come and is on its way, then closes; whether all was answered in time. `give_up` is called
        if not, to tell those who wait."""
        self.closing = True
        for connection in list(self.connections):
            connection.leave()
        # Requests that raced with the signal: connections in the backlog, bytes under way.
        await asyncio.sleep(grace := min(grace_s, within_s))
        if self._listener is not None:
            await self._listener.close_after_queue(min(grace, _HANDSHAKE_S))
        patience = self.loop.time() + grace
        await self._all_gone(self.loop.time() + within_s, patience)
        if self.connections:
            self.cut_off += sum(connection.busy() for connection in self.connections)
            give_up()
            await self._all_gone(self.loop.time() + grace_s, patience)
        self.close()
        return not self.cut_off

    async def _all_gone(self, deadline: float, patience: float) -> None:
        """Closes what is idle until nothing is left, or the time is over."""
        while self.connections and (now := self.loop.time()) < deadline:
            for connection in [c for c in self.connections if c.idle]:
                # The client that was let in last has yet to say what it wants.
                if not (now < patience and connection.fresh):
                    connection.close()
            await asyncio.sleep(0.02)

    def close(self) -> None:
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self.connections):
            self.cut_off += connection.busy()
            connection.abort()
