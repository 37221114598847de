"""gRPC's server side: calls on a connection of HTTP/2, messages in and out as bytes, nothing awaited.

As much of HTTP/2 (RFC 9113) as gRPC uses: no push, no priorities, and constant heads of answers; `hpack` decompresses
those of calls. Handlers are made by the path called.
"""

import asyncio
import struct
from collections.abc import Callable, Mapping
from typing import Final, Protocol, cast

from crosstie.core.errors import MissingExtra
from crosstie_gateway.wire.server import Server, ServerConnection

try:
    import hpack
except ImportError:
    raise MissingExtra("gRPC needs the library hpack", "kubernetes", "crosstie-gateway") from None

# Statuses of calls that are given here.
OK: Final = 0
NOT_FOUND: Final = 5
EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _PRIORITY, _RESET, _SETTINGS, _PUSH, _PING, _GOAWAY, _WINDOW_UPDATE, _CONTINUATION = range(10)
_END_STREAM: Final = 0x1
_ACK: Final = 0x1
_END_HEADERS: Final = 0x4
_PADDED: Final = 0x8
_PRIORITISED: Final = 0x20
_NO_ERROR: Final = 0
_PROTOCOL: Final = 1
_FLOW: Final = 3
_SIZE: Final = 6
_COMPRESSION: Final = 9
_CALM: Final = 11
_MOST_CALLS: Final = 3
_INITIAL_WINDOW: Final = 4
_FRAME_SIZE: Final = 5
# What a proxy may have open at once; what may be under way from it, of a call and of all; the largest frame.
_CALLS: Final = 1024
_CALL_WINDOW: Final = 2**20
_WINDOW: Final = 2**24
_FRAME: Final = 2**14
_MOST_WINDOW: Final = 2**31 - 1
# Frames that carry nothing of a call: so many at most, and how many more come with a call and with a second.
_FRAMES: Final = 10_000
_FRAMES_A_CALL: Final = 16
_FRAMES_A_SECOND: Final = 1000
# How long a message may be beyond the longest body.
_MORE_BYTES: Final = 2**20
# In HPACK, by the static table and in plain: ":status: 200", "content-type: application/grpc"; "grpc-status: ".
_HEAD: Final = b"\x88\x0f\x10\x10application/grpc"
_STATUS: Final = b"\x00\x0bgrpc-status"
_MESSAGE: Final = b"\x00\x0cgrpc-message"
_GRANT: Final = struct.Struct(">I")


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    size = len(payload)
    return struct.pack(">HBBBI", size >> 8, size & 0xFF, kind, flags, number) + payload


def _trailers(status: int, why: str) -> bytes:
    code = b"%d" % status
    made = _STATUS + bytes((len(code),)) + code
    if why:
        text = why.encode("ascii", "replace").replace(b"%", b"?")[:120]
        made += _MESSAGE + bytes((len(text),)) + text
    return made


class _Broken(Exception):
    def __init__(self, code: int):
        super().__init__(code)
        self.code = code


class CallHandler(Protocol):
    """Answers a call: told what comes on it, and saying (`say`, `end`) what is to leave."""

    def take(self, message: bytes) -> None: ...

    def on_end(self) -> None:
        """No more messages will come."""

    def on_lost(self) -> None:
        """It is over, however that came about."""

    def prepare(self) -> None:
        """Just before what it has to say is sent."""

    def busy(self) -> bool:
        """Whether somebody waits for it to be completed."""


class Call:
    """One call."""

    def __init__(self, on: "GrpcConnection", number: int):
        self.on, self.number = on, number
        self.answering: CallHandler = _UNKNOWN
        # What has come of a message that is not whole, what may come, and whether no more will.
        self._read = bytearray()
        self.window = _CALL_WINDOW
        self.ended = False
        # What waits to be sent; whether its head has left; its status once it has one.
        self.out = bytearray()
        # How much more or less of it may leave than of a new call.
        self.room = 0
        self.started = False
        self.status = -1
        self.why = ""
        # Whether it has something to say, and whether it is over.
        self.waits = self.over = False

    # By who answers it

    def say(self, message: bytes) -> None:
        self.out += b"\x00"
        self.out += _GRANT.pack(len(message))
        self.out += message
        self.wake()

    def end(self, status: int = OK, why: str = "") -> None:
        """After all that was said."""
        if self.status < 0:
            self.status, self.why = status, why
            self.wake()

    def wake(self) -> None:
        if not self.waits and not self.over:
            self.waits = True
            self.on.wake(self)

    # By its connection

    def feed(self, data: bytes) -> None:
        read = self._read
        if not read and len(data) >= 5 and data[0] == 0 and int.from_bytes(data[1:5], "big") == len(data) - 5:
            self._take(data[5:])
            return
        read += data
        while len(read) >= 5 and self.status < 0:
            size = int.from_bytes(read[1:5], "big")
            if read[0]:
                self.end(UNIMPLEMENTED, "compressed messages are not understood")
            elif size > self.on.server.limits.body_bytes + _MORE_BYTES:
                self.end(EXHAUSTED, "the message is too long")
            elif len(read) < 5 + size:
                return
            else:
                message = bytes(read[5 : 5 + size])
                del read[: 5 + size]
                self._take(message)

    def _take(self, message: bytes) -> None:
        try:
            self.answering.take(message)
        except Exception as error:  # noqa: BLE001 (one call's failure is not the connection's, nor the server's)
            self.on.failed(error)
            self.end(INTERNAL, "internal error")

    def finish(self) -> None:
        if not self.ended:
            self.ended = True
            try:
                self.answering.on_end()
            except Exception as error:  # noqa: BLE001 (as above)
                self.on.failed(error)
                self.end(INTERNAL, "internal error")


class _Unknown:
    """For calls of what there is not: nobody is interested in them."""

    def take(self, message: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_lost(self) -> None: ...
    def prepare(self) -> None: ...
    def busy(self) -> bool:
        return False


_UNKNOWN: Final = _Unknown()
# What answers a call of a path.
Methods = Mapping[bytes, Callable[[Call], CallHandler]]


class GrpcConnection(ServerConnection):
    """One client with its calls."""

    def __init__(self, server: Server, methods: Methods):
        super().__init__(server)
        self._methods = methods
        self.calls: dict[int, Call] = {}
        self._decoder = hpack.Decoder(max_header_list_size=server.limits.head_bytes)
        # The head of the last call, and the path in it, while the same bytes mean the same.
        self._known, self._known_path = b"", b""
        # Of a head in several frames: its call, whether that ends with it, and what has come.
        self._head_of, self._head_ends, self._head_block = 0, False, b""
        self._rest = b""
        self._prefaced = False
        self._last = 0
        # What may come on all calls together, and what may leave; on a new call; in a frame.
        self._window, self._room, self._first_room, self._most = _WINDOW, 65_535, 65_535, _FRAME
        self._frames = _FRAMES
        # Frames to be sent with what calls have to say, and who those are.
        self._own: list[bytes] = []
        self._waiting: list[Call] = []
        # Whether what is said now leaves at the end of a read, or in a moment.
        self._reading = self._soon = False
        self._leaves = self._over = self._has_room = False

    def begin(self, before: ServerConnection, data: bytes) -> None:
        """In the place of the connection that it was taken for."""
        self.transport, self.address, self.handshake = before.transport, before.address, before.handshake
        self.transport.set_protocol(cast(asyncio.BaseProtocol, self))
        self.fresh = False
        settings = ((_MOST_CALLS, _CALLS), (_INITIAL_WINDOW, _CALL_WINDOW))
        self._own.append(_frame(_SETTINGS, 0, 0, b"".join(struct.pack(">HI", *setting) for setting in settings)))
        self._own.append(_frame(_WINDOW_UPDATE, 0, 0, _GRANT.pack(_WINDOW - 65_535)))
        self._flush()
        if data:
            self.data_received(data)

    def failed(self, error: Exception) -> None:
        self.server.loop.call_exception_handler({"message": "a call failed", "exception": error})

    # asyncio

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        if self._rest:
            data, self._rest = self._rest + data, b""
        self._reading = True
        try:
            self._rest = data[self._go_through(data) :]
        except _Broken as broken:
            self._break(broken.code)
            return
        finally:
            self._reading = False
        self._flush()

    def _go_through(self, data: bytes) -> int:
        """How much of it has been dealt with."""
        at, end = 0, len(data)
        if not self._prefaced:
            if end < len(_PREFACE):
                if not _PREFACE.startswith(data):
                    raise _Broken(_PROTOCOL)
                return 0
            if not data.startswith(_PREFACE):
                raise _Broken(_PROTOCOL)
            self._prefaced = True
            at = len(_PREFACE)
        while end - at >= 9 and not self._over:
            size = (data[at] << 16) | (data[at + 1] << 8) | data[at + 2]
            if size > _FRAME:
                raise _Broken(_SIZE)
            after = at + 9 + size
            if after > end:
                break
            number = int.from_bytes(data[at + 5 : at + 9], "big") & 0x7FFFFFFF
            self._on_frame(data[at + 3], data[at + 4], number, data[at + 9 : after])
            at = after
        return at

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_calls()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self.slow = True

    def resume_writing(self) -> None:
        self.slow = False
        self._go_on_sending()

    # Frames

    def _on_frame(self, kind: int, flags: int, number: int, payload: bytes) -> None:
        if self._head_of and kind != _CONTINUATION:
            raise _Broken(_PROTOCOL)
        if kind == _DATA:
            self._on_data(flags, number, payload)
        elif kind == _HEADERS:
            self._on_headers(flags, number, payload)
        else:
            self._frames -= 1
            if self._frames < 0:
                raise _Broken(_CALM)
            if kind == _WINDOW_UPDATE:
                self._on_room(number, payload)
            elif kind == _RESET:
                call = self.calls.get(number)
                if call is not None:
                    self._drop(call)
            elif kind == _SETTINGS:
                self._on_settings(flags, payload)
            elif kind == _PING:
                if len(payload) != 8:
                    raise _Broken(_SIZE)
                if not flags & _ACK:
                    self._own.append(_frame(_PING, _ACK, 0, payload))
            elif kind == _CONTINUATION:
                if not self._head_of or number != self._head_of:
                    raise _Broken(_PROTOCOL)
                self._on_head(flags, payload)
            elif kind == _PUSH:
                raise _Broken(_PROTOCOL)

    def _on_data(self, flags: int, number: int, payload: bytes) -> None:
        size = len(payload)
        self._window -= size
        if number == 0 or number > self._last:
            raise _Broken(_PROTOCOL)
        if self._window < _WINDOW // 2:
            self._own.append(_frame(_WINDOW_UPDATE, 0, 0, _GRANT.pack(_WINDOW - self._window)))
            self._window = _WINDOW
        call = self.calls.get(number)
        if call is None or call.ended:
            # It was given up here, and its client has yet to hear of it.
            return
        call.window -= size
        if flags & _PADDED:
            payload = _unpadded(payload)
        if payload:
            call.feed(payload)
        elif not flags & _END_STREAM:
            self._frames -= 1
            if self._frames < 0:
                raise _Broken(_CALM)
        if flags & _END_STREAM:
            call.finish()
        elif call.window < _CALL_WINDOW // 2:
            self._own.append(_frame(_WINDOW_UPDATE, 0, number, _GRANT.pack(_CALL_WINDOW - call.window)))
            call.window = _CALL_WINDOW

    def _on_headers(self, flags: int, number: int, payload: bytes) -> None:
        if flags & _PADDED:
            payload = _unpadded(payload)
        if flags & _PRIORITISED:
            payload = payload[5:]
        if not number & 1:
            raise _Broken(_PROTOCOL)
        self._head_of, self._head_ends, self._head_block = number, bool(flags & _END_STREAM), b""
        self._on_head(flags, payload)

    def _on_head(self, flags: int, payload: bytes) -> None:
        self._head_block += payload
        if len(self._head_block) > self.server.limits.head_bytes:
            raise _Broken(_CALM)
        if not flags & _END_HEADERS:
            return
        number, self._head_of = self._head_of, 0
        path = self._path(self._head_block)
        call = self.calls.get(number)
        if call is not None:
            # Trailers, which end it.
            if not self._head_ends:
                raise _Broken(_PROTOCOL)
            call.finish()
        elif number > self._last:
            self._last = number
            self._open(number, path)

    def _path(self, block: bytes) -> bytes:
        if block == self._known:
            return self._known_path
        self._known = b""
        table = self._decoder.header_table
        entries = table.dynamic_entries
        newest, number, most = entries[0] if entries else None, len(entries), table.maxsize
        try:
            fields = self._decoder.decode(block, raw=True)
        except hpack.HPACKError:
            raise _Broken(_COMPRESSION) from None
        path = b""
        for name, value in fields:
            if name == b":path":
                path = bytes(value)
        if (entries[0] if entries else None) is newest and (len(entries), table.maxsize) == (number, most):
            # It has left the table as it was: it means the same until something enters the table.
            self._known, self._known_path = block, path
        return path

    def _open(self, number: int, path: bytes) -> None:
        self._frames = min(self._frames + _FRAMES_A_CALL, _FRAMES)
        if len(self.calls) >= _CALLS:
            # It knows that it may not.
            raise _Broken(_CALM)
        self.calls[number] = call = Call(self, number)
        made = self._methods.get(path)
        if made is not None:
            call.answering = made(call)
        else:
            call.end(UNIMPLEMENTED, "no such method")
        if self._head_ends:
            call.finish()

    def _on_settings(self, flags: int, payload: bytes) -> None:
        if flags & _ACK:
            return
        if len(payload) % 6:
            raise _Broken(_SIZE)
        for name, value in struct.iter_unpack(">HI", payload):
            if name == _INITIAL_WINDOW:
                if value > _MOST_WINDOW:
                    raise _Broken(_FLOW)
                # It holds for all calls: nothing is done for each of them.
                self._first_room = value
            elif name == _FRAME_SIZE:
                if not _FRAME <= value < 2**24:
                    raise _Broken(_PROTOCOL)
                self._most = min(value, 2**16)
        self._own.append(_frame(_SETTINGS, _ACK, 0, b""))
        self._go_on_sending()

    def _on_room(self, number: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise _Broken(_SIZE)
        more = int.from_bytes(payload, "big") & 0x7FFFFFFF
        call = self.calls.get(number)
        if number == 0:
            self._room += more
            if not more or self._room > _MOST_WINDOW:
                raise _Broken(_FLOW if more else _PROTOCOL)
            self._go_on_sending()
        elif call is not None:
            call.room += more
            if not more or call.room + self._first_room > _MOST_WINDOW:
                raise _Broken(_FLOW if more else _PROTOCOL)
            call.wake()

    # What leaves

    def wake(self, call: Call) -> None:
        self._waiting.append(call)
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._reading and not self._soon:
            self._soon = True
            self.server.loop.call_soon(self._flush)

    def _go_on_sending(self) -> None:
        """Sends what had no room, once for all that has come at once."""
        self._has_room = True
        self._flush_soon()

    def _flush(self) -> None:
        self._soon = False
        if self.closed or (self.slow and not self._own):
            return
        frames, self._own = self._own, []
        if not self.slow:
            if self._has_room:
                self._has_room = False
                for call in self.calls.values():
                    if call.out:
                        call.wake()
            waiting, self._waiting = self._waiting, []
            for call in waiting:
                if not call.over:
                    call.answering.prepare()
                    call.waits = False
                    self._send(call, frames)
        if frames:
            self.transport.write(b"".join(frames))

    def _send(self, call: Call, frames: list[bytes]) -> None:
        out, number = call.out, call.number
        if out and not call.started:
            call.started = True
            frames.append(_frame(_HEADERS, _END_HEADERS, number, _HEAD))
        while out:
            size = min(len(out), self._most, call.room + self._first_room, self._room)
            if size <= 0:
                return
            frames.append(_frame(_DATA, 0, number, bytes(out[:size])))
            del out[:size]
            call.room -= size
            self._room -= size
        if call.status >= 0:
            head = b"" if call.started else _HEAD
            block = head + _trailers(call.status, call.why)
            frames.append(_frame(_HEADERS, _END_HEADERS | _END_STREAM, number, block))
            if not call.ended:
                # Nothing that it still sends is wanted.
                frames.append(_frame(_RESET, 0, number, _GRANT.pack(_NO_ERROR)))
            self._drop(call)

    def _drop(self, call: Call) -> None:
        del self.calls[call.number]
        call.over = True
        # It knows the call as well: neither keeps the other.
        answering, call.answering = call.answering, _UNKNOWN
        answering.on_lost()
        if self._leaves and self.idle:
            self.server.loop.call_soon(self.close)

    def _forget_calls(self) -> None:
        for call in list(self.calls.values()):
            self._drop(call)

    # The end

    def leave(self) -> None:
        """Tells its client to call elsewhere from now on; what is under way is still answered."""
        if not self._leaves and not self.closed:
            self._leaves = True
            self._own.append(self._goodbye(_MOST_WINDOW, _NO_ERROR))
            self._flush_soon()

    def _goodbye(self, last: int, code: int) -> bytes:
        return _frame(_GOAWAY, 0, 0, struct.pack(">II", last, code))

    def close(self) -> None:
        if not self._over and not self.closed:
            self._over = True
            self._own.append(self._goodbye(self._last, _NO_ERROR))
            self._flush()
            self._forget_calls()
        super().close()

    def _break(self, code: int) -> None:
        """For what it has done."""
        self.server.count("http2")
        self._over = True
        self._own.append(self._goodbye(self._last, code))
        self._flush()
        self._forget_calls()
        super().close()

    # The clock

    def check(self, now: float) -> None:
        """An idle connection is kept: a call that is on its way when it closes would be lost."""
        self._frames = min(self._frames + _FRAMES_A_SECOND, _FRAMES)

    def busy(self) -> int:
        return sum(call.answering.busy() for call in self.calls.values())

    @property
    def idle(self) -> bool:
        return not self.busy()


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise _Broken(_PROTOCOL)
    return payload[1 : len(payload) - payload[0]]
