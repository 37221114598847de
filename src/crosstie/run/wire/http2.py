"""HTTP/2 for clients: one connection, and streams on it that are each served like a connection of HTTP/1.1.

The library `h2` knows frames, header compression, flow control and what may follow what. A stream's head and body are
written out as HTTP/1.1 has them and read by the same parser, so that what is refused there is refused here, with the
same limits. What `h2` leaves to others is here: how much of what costs a client little and a server much there may be
(pings, settings, resets, the smallest frames), and that one slow stream does not hold up the others.
"""

import asyncio
import contextlib
import struct
from typing import Final, cast

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
import h2.settings

from crosstie.run.wire.request import BadRequest
from crosstie.run.wire.server import LARGE_READ, LINGER_S, Server, ServerConnection

# What a client may have open at once; it also bounds what may be undone at once.
STREAMS: Final = 128
# After so many streams it is time for a new connection: `h2` remembers how each of them ended.
_MOST_STREAMS: Final = 10_000
# What may be under way to the server, on a stream and on all; and the largest frame.
_STREAM_WINDOW: Final = 2**18
_WINDOW: Final = 2**20
_FRAME: Final = 2**14
# What may wait for a client on a stream before its sender is told, and when it may go on.
_HIGH: Final = 2**16
_LOW: Final = 2**14
# Frames that are not requests or their bodies: so many at first and at most; and how many more are earned by a frame of
# data that was sent, by a request, by a second.
_FRAMES: Final = 2000
_FRAMES_A_SENT: Final = 4
_FRAMES_A_REQUEST: Final = 16
_FRAMES_A_SECOND: Final = 100
# Streams that a client gives up: so many more than it lets be answered, at once and a second.
_RESETS: Final = 2 * STREAMS
_RESETS_A_SECOND: Final = 10
_SMALL: Final = 256

_DATA: Final = 0
_HEADERS: Final = 1
_CONTINUATION: Final = 9
_END_STREAM: Final = 0x1
_END_HEADERS: Final = 0x4
_NEVER_SENT: Final = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_CALM: Final = int(h2.errors.ErrorCodes.ENHANCE_YOUR_CALM)
_NO_ERROR, _INTERNAL = int(h2.errors.ErrorCodes.NO_ERROR), int(h2.errors.ErrorCodes.INTERNAL_ERROR)
# Beyond every stream: those that are under way are still answered.
_ALL_STREAMS: Final = 2**31 - 1
Fields = list[tuple[bytes, bytes]]


class Http2Stream(ServerConnection):
    """One request and its answer."""

    def __init__(self, connection: "Http2Connection", number: int):
        super().__init__(connection.server)
        self.on, self.number = connection, number
        self.transport = cast(asyncio.Transport, _StreamTransport(self))
        # Whether its body comes in chunks of no announced length, whether all of it has come, and whether its client
        # wants the head alone.
        self.chunked = self.ended = self.is_head = False
        # What waits to be sent, whether nothing will follow, and whether that has been said; or whether it is to be
        # reset after all of it.
        self.out = bytearray()
        self.ending = self.finished = self.cutting = False
        self.moved_at = connection.server.clock
        # Until when what it still sends is thrown away, once it has its answer.
        self.lingers_until: float | None = None

    # Its answer

    def send_whole(self, status: int, content_type: bytes, lines: bytes, body: bytes) -> None:
        length = b"%d" % len(body)
        fields = [(b":status", b"%d" % status), (b"content-type", content_type), (b"content-length", length)]
        self.ending = True
        if self.is_head or not body:
            self.on.send_headers(self, fields + _fields(lines), True)
        else:
            self.on.send_headers(self, fields + _fields(lines), False)
            self.out += body
        self.on.pump(self)

    def send_head(self, status: int, lines: bytes, length: int | None) -> None:
        fields = [(b":status", b"%d" % status), *_fields(lines)]
        if length is not None:
            fields.append((b"content-length", b"%d" % length))
        # It leaves with what follows it.
        self.on.send_headers(self, fields, False)

    def send_piece(self, data: bytes) -> None:
        if self.closed or self.is_head:
            return
        self.out += data
        self.on.pump(self)

    def send_now(self) -> None:
        self.on.flush()

    def send_end(self) -> None:
        self.ending = True
        self.on.pump(self)

    def next_request(self) -> None:
        self.current = None
        self.moved_at = self.server.clock
        self.on.settle(self)

    def abort(self, after_written: bool = False) -> None:
        if after_written and self.out and not self.closed:
            self.cutting = True
        else:
            self.on.reset(self, _INTERNAL)

    def close(self) -> None:
        self.abort(after_written=True)

    def _hang_up(self) -> None:
        """The connection goes on."""

    def go_on(self) -> None:
        """To be told to send the body."""
        self.on.send_headers(self, [(b":status", b"100")], False)
        self.on.flush()

    def take(self, data: bytes) -> None:
        """A piece of its body."""
        self.data_received(b"%x\r\n%b\r\n" % (len(data), data) if self.chunked else data)

    def end_body(self) -> None:
        self.ended = True
        if self.chunked:
            self.data_received(b"0\r\n\r\n")
        self.check_whole()

    def check_whole(self) -> None:
        if self.is_arriving() and not self.slow:
            self.refuse(BadRequest(400, "the body is shorter than its content-length"))

    def is_arriving(self) -> bool:
        return self.arriving_since is not None

    def note_speed(self) -> None:
        """Tells whoever answers when its client is slow, and when it no longer is."""
        held_up = len(self.out) > (_LOW if self.slow else _HIGH) or self.on.is_slow()
        if held_up and not self.slow:
            self.pause_writing()
        elif self.slow and not held_up:
            self.resume_writing()


class _StreamTransport:
    """What a stream has in the place of a socket."""

    def __init__(self, stream: Http2Stream):
        self._stream = stream

    def is_closing(self) -> bool:
        return self._stream.closed

    def get_write_buffer_size(self) -> int:
        return len(self._stream.out) + self._stream.on.transport.get_write_buffer_size()

    def get_extra_info(self, name: str) -> object:
        return self._stream.on.transport.get_extra_info(name)

    def write(self, data: bytes) -> None:
        # Only ever that it should go on.
        self._stream.go_on()

    def pause_reading(self) -> None:
        """Its window is small, and the connection is others' as well."""

    def resume_reading(self) -> None:
        """See above."""

    def can_write_eof(self) -> bool:
        return False

    def close(self) -> None:
        self._stream.close()

    def abort(self) -> None:
        self._stream.abort()


def _fields(lines: bytes) -> Fields:
    """Header lines of HTTP/1.1, less those that are about its connections (RFC 9113, 8.2.2)."""
    found: Fields = []
    for line in lines.split(b"\r\n"):
        name, colon, value = line.partition(b":")
        name = name.lower()
        if colon and name not in _NEVER_SENT:
            found.append((name, value.strip()))
    return found


def _head(fields: Fields, ended: bool) -> tuple[bytes, bool]:
    """A stream's head as HTTP/1.1 has it, and whether its body is to follow in chunks. Raises BadRequest."""
    method = path = authority = None
    lines: list[bytes] = []
    has_host = has_length = False
    for name, value in fields:
        if b"\r" in value or b"\n" in value or b"\r" in name or b"\n" in name:
            raise BadRequest(400, "a header has a line end in it")
        if name == b":method":
            method = value
        elif name == b":path":
            path = value
        elif name == b":authority":
            authority = value
        elif not name.startswith(b":"):
            if name == b"transfer-encoding" or name == b"connection" or b":" in name:
                raise BadRequest(400, "HTTP/2 has no such header")
            has_host = has_host or name == b"host"
            has_length = has_length or name == b"content-length"
            lines.append(b"%b: %b\r\n" % (name, value))
    if method is None or path is None or b" " in method or b" " in path:
        raise BadRequest(400, "no method, or no path")
    if authority is not None:
        # The authority is what counts, and a host beside it must say the same.
        lines = [line for line in lines if line.lower() != b"host: %b\r\n" % authority.lower()]
        lines.insert(0, b"host: %b\r\n" % authority)
    elif not has_host:
        raise BadRequest(400, "no host")
    chunked = not ended and not has_length
    if chunked:
        lines.append(b"transfer-encoding: chunked\r\n")
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, path, b"".join(lines)), chunked


class Http2Connection(ServerConnection):
    """One client with its streams."""

    def __init__(self, server: Server):
        super().__init__(server)
        limits = server.limits
        codes = h2.settings.SettingCodes
        config = h2.config.H2Configuration(
            client_side=False, header_encoding=None, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self._h2 = h2.connection.H2Connection(config)
        self._h2.local_settings = h2.settings.Settings(
            client=False,
            initial_values={
                codes.MAX_CONCURRENT_STREAMS: STREAMS,
                codes.MAX_HEADER_LIST_SIZE: limits.head_bytes,
                codes.INITIAL_WINDOW_SIZE: _STREAM_WINDOW,
            },
        )
        self._h2.decoder.max_header_list_size = limits.head_bytes
        self.streams: dict[int, Http2Stream] = {}
        # How many frames and resets it has left.
        self._frames, self._resets = _FRAMES, _RESETS
        # Of the frames: how much of the preface is to come, and of the frame that is arriving; its first bytes.
        self._preface_left, self._frame_left = 24, 0
        self._frame_head = b""
        # Bytes of the head that is arriving, and since when; None: none is.
        self._head_bytes = 0
        self._head_since: float | None = None
        # Whether it was told that there will be no more streams, and that this is the end.
        self._leaves = self._over = False

    def begin(self, before: ServerConnection, data: bytes) -> None:
        """In the place of the connection that it was taken for."""
        self.transport, self.address, self.handshake = before.transport, before.address, before.handshake
        self.transport.set_protocol(cast(asyncio.BaseProtocol, self))
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_WINDOW - 65_535)
        self.flush()
        if data:
            self.data_received(data)

    # asyncio

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if not self._affords(data):
            self._end(_CALM)
            return
        try:
            events = self._h2.receive_data(data)
        except h2.exceptions.ProtocolError:
            # It has prepared its goodbye.
            self._end(None)
            return
        for event in events:
            if self._refused:
                return
            self._on_event(event)
        self.flush()
        if self.is_slow():
            # Who asks on and on and reads nothing.
            self._hold_back()
        elif len(data) >= LARGE_READ:
            self._let_others_go_first()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            stream.connection_lost(exc)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        self.slow = True
        for stream in list(self.streams.values()):
            stream.note_speed()

    def resume_writing(self) -> None:
        self.slow = False
        if self._held_back:
            self._held_back = False
            self.transport.resume_reading()
        self._pump_all()

    def is_slow(self) -> bool:
        return self.slow

    # What it may cost

    def _affords(self, data: bytes) -> bool:
        """Goes by the heads of frames, before any of them is looked into; whether there are no more than may be."""
        at, end = 0, len(data)
        if self._preface_left:
            at = min(self._preface_left, end)
            self._preface_left -= at
        while at < end:
            if self._frame_left:
                step = min(self._frame_left, end - at)
                self._frame_left -= step
                at += step
                continue
            need = 9 - len(self._frame_head)
            self._frame_head += data[at : at + need]
            at += need
            if len(self._frame_head) == 9:
                head, self._frame_head = self._frame_head, b""
                self._frame_left = int.from_bytes(head[:3], "big")
                if self._frame_left > _FRAME or not self._affords_frame(head[3], head[4], self._frame_left):
                    return False
        return self._frames >= 0

    def _affords_frame(self, kind: int, flags: int, length: int) -> bool:
        if kind in (_HEADERS, _CONTINUATION):
            if kind == _HEADERS:
                self._head_bytes, self._head_since = 0, self.server.clock
                self._frames = min(self._frames + _FRAMES_A_REQUEST, _FRAMES)
            else:
                self._frames -= 1
            self._head_bytes += length
            if flags & _END_HEADERS:
                self._head_since = None
            # Compressed, it is no longer than in full.
            return self._head_bytes <= self.server.limits.head_bytes
        if kind != _DATA or (length < _SMALL and not flags & _END_STREAM):
            self._frames -= 1
        return True

    # Streams

    def _on_event(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            self._open(event.stream_id, event.headers, event.stream_ended is not None)
        elif isinstance(event, h2.events.DataReceived):
            self._take(event.stream_id, event.data, event.flow_controlled_length)
        elif isinstance(event, h2.events.StreamEnded):
            stream = self.streams.get(event.stream_id)
            if stream is not None and not stream.ended:
                stream.end_body()
                self.settle(stream)
        elif isinstance(event, h2.events.StreamReset):
            self._dropped(event.stream_id)
        elif isinstance(event, h2.events.WindowUpdated):
            stream = self.streams.get(event.stream_id)
            if stream is not None:
                self.pump(stream)
            elif not event.stream_id:
                self._pump_all()
        elif isinstance(event, h2.events.RemoteSettingsChanged):
            self._pump_all()
        elif isinstance(event, h2.events.ConnectionTerminated):
            # The library sends no more from now on.
            self._forget()

    def _open(self, number: int, fields: Fields, ended: bool) -> None:
        stream = Http2Stream(self, number)
        self.streams[number] = stream
        self.fresh = False
        if number > 2 * _MOST_STREAMS:
            self.leave()
        stream.ended, stream.is_head = ended, (b":method", b"HEAD") in fields
        try:
            head, stream.chunked = _head(fields, ended)
        except BadRequest as refused:
            stream.refuse(refused)
        else:
            stream.data_received(head)
            if ended:
                stream.check_whole()

    def _take(self, number: int, data: bytes, counted: int) -> None:
        stream = self.streams.get(number)
        if stream is not None and data:
            stream.take(data)
        if counted:
            try:
                self._h2.acknowledge_received_data(counted, number)
            except h2.exceptions.ProtocolError:
                self._end(None)

    def _dropped(self, number: int) -> None:
        """Its client wants no more of it; or did what the library takes for the end of it."""
        stream = self.streams.pop(number, None)
        if stream is not None:
            stream.connection_lost(None)
            self._rest()
            self._resets -= 1
            if self._resets < 0:
                self._end(_CALM)

    def send_headers(self, stream: Http2Stream, fields: Fields, end: bool) -> None:
        if stream.closed or stream.finished:
            return
        try:
            self._h2.send_headers(stream.number, fields, end_stream=end)
            stream.finished = end
        except (h2.exceptions.ProtocolError, KeyError):
            # Given up by its client in the same breath; that comes next.
            stream.out.clear()

    def pump(self, stream: Http2Stream) -> None:
        """Sends what the windows have room for."""
        self._pump(stream)
        self.flush()
        stream.note_speed()

    def _pump(self, stream: Http2Stream) -> None:
        h2_, number, out = self._h2, stream.number, stream.out
        try:
            while out and not stream.closed and not self.is_slow():
                room = min(h2_.local_flow_control_window(number), h2_.max_outbound_frame_size, _FRAME)
                if room <= 0:
                    return
                piece = bytes(out[:room])
                del out[:room]
                stream.finished = stream.ending and not out
                h2_.send_data(number, piece, end_stream=stream.finished)
                stream.moved_at = self.server.clock
                self._frames = min(self._frames + _FRAMES_A_SENT, _FRAMES)
                self.flush()
            if out or stream.closed:
                return
            if stream.cutting:
                self.reset(stream, _INTERNAL)
            elif stream.ending and not stream.finished:
                stream.finished = True
                h2_.end_stream(number)
        except (h2.exceptions.ProtocolError, KeyError):
            out.clear()
        self.settle(stream)

    def _pump_all(self) -> None:
        for stream in list(self.streams.values()):
            if stream.out:
                self._pump(stream)
            stream.note_speed()
        self.flush()

    def settle(self, stream: Http2Stream) -> None:
        """Lets go of a stream whose answer has left."""
        if not stream.finished or stream.current is not None or stream.number not in self.streams:
            return
        if not stream.ended:
            # Whoever is cut off while it sends may never read its answer.
            if stream.lingers_until is None:
                stream.lingers_until = self.server.loop.time() + LINGER_S
            return
        del self.streams[stream.number]
        self._resets = min(self._resets + 1, _RESETS)
        stream.connection_lost(None)
        self._rest()

    def reset(self, stream: Http2Stream, code: int) -> None:
        # It may have ended on its own.
        with contextlib.suppress(h2.exceptions.ProtocolError, KeyError):
            self._h2.reset_stream(stream.number, code)
        self.flush()
        if self.streams.pop(stream.number, None) is not None:
            stream.connection_lost(None)
            self._rest()

    def _rest(self) -> None:
        if not self.streams:
            self.idle_since = self.server.clock
            if self._leaves:
                self.close()

    def flush(self) -> None:
        if not self.closed:
            data = self._h2.data_to_send()
            if data:
                self.transport.write(data)

    # The end

    def leave(self) -> None:
        """Tells its client to ask elsewhere from now on; what is under way is still answered."""
        if not self._leaves and not self.closed:
            self._leaves = True
            self._say_goodbye(_ALL_STREAMS, _NO_ERROR)

    def close(self) -> None:
        if not self._over and not self.shaking and not self.closed:
            self._over = True
            self._say_goodbye(self._h2.highest_inbound_stream_id, _NO_ERROR)
        super().close()

    def _say_goodbye(self, last: int, code: int) -> None:
        # By hand: the library takes it for the end of everything, also of what it has still to answer.
        self.flush()
        self.transport.write(struct.pack(">HBBBIII", 0, 8, 7, 0, 0, last, code))

    def _end(self, code: int | None) -> None:
        """For what it does: `code`, or what the library has to say."""
        self.server.count("http2")
        if code is not None:
            self._say_goodbye(self._h2.highest_inbound_stream_id, code)
        else:
            self.flush()
        self._forget()

    def _forget(self) -> None:
        self._refused = self._over = True
        streams, self.streams = list(self.streams.values()), {}
        for stream in streams:
            stream.connection_lost(None)
        super().close()

    # The clock

    def check(self, now: float) -> None:
        limits = self.server.limits
        self._frames = min(self._frames + _FRAMES_A_SECOND, _FRAMES)
        self._resets = min(self._resets + _RESETS_A_SECOND, _RESETS)
        for stream in list(self.streams.values()):
            stream.check_arrival(now)
            waits = stream.current is None and stream.out and now - stream.moved_at > limits.idle_s
            if waits or (stream.lingers_until is not None and now > stream.lingers_until):
                # Nobody takes the rest of its answer, or it sends on.
                self.reset(stream, _NO_ERROR)
        if self._head_since is not None and now - self._head_since > min(limits.head_s, limits.request_s):
            self._end(_CALM)
            return
        unsent = self.transport.get_write_buffer_size()
        if unsent and unsent != self._unsent:
            self.idle_since = now
        self._unsent = unsent
        if not self.streams and now - self.idle_since > limits.idle_s:
            self.abort(after_written=not unsent)
        elif self.server.closing:
            if self.streams:
                self.leave()
            else:
                self.close()

    def busy(self) -> int:
        return sum(stream.current is not None for stream in self.streams.values())

    @property
    def idle(self) -> bool:
        return not self.streams
