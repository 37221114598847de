"""Bytes of one client in, whole requests out: where each ends, by RFC 9112, and never by a guess.

Nothing is read of a request before its turn: what has come behind it stays bytes until it is asked for.
"""

import re

from crosstie.run.wire.fields import (
    body_length,
    body_too_large,
    check_trailers,
    first_line,
    header_fields,
    keeps_alive,
    unfinished_head,
)
from crosstie.run.wire.request import BadRequest, Limits, Request

# The size of a chunk and its extensions: names, and values that are tokens or in quotes.
_TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_QUOTED = rb'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*+"'
_CHUNK = re.compile(
    rb"([0-9A-Fa-f]++)(?:[ \t]*+;[ \t]*+" + _TOKEN + rb"(?:[ \t]*+=[ \t]*+(?:" + _TOKEN + rb"|" + _QUOTED + rb"))?+)*+"
)
_NO_REQUEST = Request("", "", "", {}, b"")
# What is to come next of a request.
_HEAD, _BODY, _SIZE, _CHUNK_DATA, _CHUNK_END, _TRAILERS = 0, 1, 2, 3, 4, 5


class RequestParser:
    """`feed` it what has come, then ask for `next`."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._data = b""
        self._at = 0
        # How much of an unfinished head was looked at, and whether an empty line before it was passed over.
        self._seen = 0
        self._blank = False
        self._state = _HEAD
        self._request = _NO_REQUEST
        # Bytes to come of the body or the chunk, and bytes so far of the frames of chunks.
        self._left = self._framing = 0
        # A body that came at once, or what has come of one in parts: not as a list of them, since the smallest parts
        # take ten times their bytes there.
        self._body = b""
        self._parts: bytearray | None = None
        # Bytes so far of the body that is arriving.
        self.held = 0
        # Of the last request: its version, whether another may follow, whether its client waits to be told to go on.
        self.http11 = self.keep_alive = True
        self.wants_continue = False

    @property
    def pending(self) -> int:
        """Bytes that have come and were not looked at, or belong to an unfinished head."""
        return len(self._data) - self._at

    @property
    def in_head(self) -> bool:
        return self._state == _HEAD

    @property
    def begun(self) -> bool:
        """Whether something of a request has come that has not been given out."""
        return self._state != _HEAD or self._at < len(self._data)

    def feed(self, data: bytes) -> None:
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def drop(self) -> None:
        """Lets go of all that it holds."""
        self._data, self._body, self._parts, self._request = b"", b"", None, _NO_REQUEST
        self._at = self.held = 0
        self._state = _HEAD

    def next(self) -> Request | None:
        """The next request, once all of it has come. Raises BadRequest, after which nothing more may be asked."""
        if self._state == _HEAD and not self._read_head():
            return None
        if self._state == _BODY:
            if not self._read_body():
                return None
        elif not self._read_chunks():
            return None
        request, self._request = self._request, _NO_REQUEST
        parts = self._parts
        request.body = self._body if parts is None else bytes(parts)
        self._body, self._parts = b"", None
        self._state, self._blank, self.wants_continue = _HEAD, False, False
        self.held = 0
        return request

    def _read_head(self) -> bool:
        data, at, limits = self._data, self._at, self._limits
        if data.startswith(b"\r\n", at) and not self._blank:
            # One empty line before a request: some send it after the last one's body (RFC 9112, 2.2).
            self._blank = True
            at += 2
            self._at = at
        end = data.find(b"\r\n\r\n", at + self._seen)
        if end < 0:
            if at < len(data):
                part = data[at:] if at else data
                unfinished_head(part, self._seen, limits)
                # Its end may have come in part.
                self._seen = max(len(part) - 3, 0)
            return False
        self._seen = 0
        head = data[at : end + 2]
        self._at = end + 4
        line = first_line(head, limits)
        fields = header_fields(head, line, limits)
        self._left = body_length(fields, line.http11, limits)
        self.http11 = line.http11
        self.keep_alive = keeps_alive(fields, line.http11)
        path, _, query = line.target.decode("ascii").partition("?")
        self._request = Request(line.method.decode("ascii"), path, query, fields, b"")
        if self._left >= 0:
            self._state = _BODY
        else:
            self._state, self._left, self._framing = _SIZE, 0, 0
        # Who has begun to send its body waits for nothing.
        if b"expect" in fields and self._left and self._at == len(data) and line.http11:
            self.wants_continue = fields[b"expect"].lower() == b"100-continue"
        return True

    def _read_body(self) -> bool:
        left = self._left
        if left:
            data, at = self._data, self._at
            piece = data[at : at + left]
            if piece:
                if not self.held:
                    self._body = piece
                else:
                    if self._parts is None:
                        self._parts = bytearray(self._body)
                        self._body = b""
                    self._parts += piece
                self._at = at + len(piece)
                self.held += len(piece)
                self._left = left - len(piece)
        return self._left == 0

    def _read_chunks(self) -> bool:
        """Whether the last of them has come, with the lines behind it."""
        limits = self._limits
        while True:
            data, at, state = self._data, self._at, self._state
            if state == _CHUNK_DATA:
                if not self._read_body():
                    return False
                self._state = _CHUNK_END
            elif state == _CHUNK_END:
                if len(data) - at < 2:
                    if at < len(data) and data[at] != 13:
                        raise BadRequest(400, "a chunk is longer than its size")
                    return False
                if not data.startswith(b"\r\n", at):
                    raise BadRequest(400, "a chunk is longer than its size")
                self._at = at + 2
                self._state = _SIZE
            elif state == _SIZE:
                end = data.find(b"\n", at)
                if (end if end >= 0 else len(data)) - at > limits.chunk_line_bytes:
                    raise BadRequest(400, f"the line of a chunk has more than {limits.chunk_line_bytes} bytes")
                if end < 0:
                    return False
                self._begin_chunk(data[at : end + 1])
                self._at = end + 1
            else:
                return self._read_trailers()

    def _begin_chunk(self, line: bytes) -> None:
        limits = self._limits
        found = _CHUNK.match(line)
        if found is None or line[found.end() :] != b"\r\n":
            raise BadRequest(400, "a chunk does not begin with its size")
        size = int(found[1], 16)
        # Its line and the line end behind it.
        self._framing += len(line) + 2
        if self._framing > limits.framing_bytes + self.held:
            raise BadRequest(400, "more bytes frame the chunks than are in them")
        if self.held + size > limits.body_bytes:
            body_too_large(limits)
        self._left = size
        self._state = _CHUNK_DATA if size else _TRAILERS

    def _read_trailers(self) -> bool:
        data, at, limits = self._data, self._at, self._limits
        if data.startswith(b"\r\n", at):
            self._at = at + 2
            return True
        end = data.find(b"\r\n\r\n", at)
        if (end if end >= 0 else len(data)) - at > limits.trailer_bytes:
            raise BadRequest(431, f"trailers of more than {limits.trailer_bytes} bytes")
        if end < 0:
            return False
        check_trailers(data[at : end + 2])
        self._at = end + 4
        return True
