"""Bytes of one client in, whole requests out: where each ends, by RFC 9112, and never by a guess.

What comes behind a request stays bytes until it is asked for. What two readers could take differently is refused, even
where standards are lenient.
"""

import re
from io import BytesIO
from typing import Any, Final, NoReturn

from crosstie_gateway.wire.multipart import Boundaries
from crosstie_gateway.wire.outline import Outline
from crosstie_gateway.wire.request import BadRequest, Head, Request, RequestLimits

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
_PATH: Final = rb"[A-Za-z0-9\-._~:/?@!$&'()*+,;=]*+(?:%[0-9A-Fa-f]{2}[A-Za-z0-9\-._~:/?@!$&'()*+,;=]*+)*+"
# What nearly every request begins with.
_USUAL_LINE: Final = re.compile(rb"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) (/" + _PATH + rb") HTTP/1\.([01])\r\n")
_ANY_LINE: Final = re.compile(rb"(" + _TOKEN + rb") ([!-~]++) (HTTP/[0-9]\.[0-9])\r\n")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?]*+)(" + _PATH + rb")", re.IGNORECASE)
_METHODS: Final = frozenset((b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"))
_FIELD_NAME: Final = re.compile(rb"(" + _TOKEN + rb"):")
_FIELDS: Final = re.compile(rb"(?:" + _TOKEN + rb":[\t -~\x80-\xff]*+\r\n)*+")
_PRINTABLE: Final = b"\t" + bytes(range(32, 127)) + bytes(range(128, 256))
_HOST: Final = re.compile(rb"(?:[A-Za-z0-9\-._~!$&'()*+,;=%]*+|\[[0-9A-Fa-f:.]++\])(?::[0-9]*+)?")
_BARE_LF: Final = re.compile(rb"(?<!\r)\n")

# More than a first line has beside its target.
_REST_OF_LINE: Final = 64
# Lines that repeat from request to request, and what they say. Lines that differ each time, and secrets, are not kept.
_FIRST_LINES: Final[dict[bytes, "RequestLine"]] = {}
_HEADER_LINES: Final[dict[bytes, tuple[bytes, bytes]]] = {}
# Names as they were written, and in lower case, of those lines that are not kept.
_NAMES: Final[dict[bytes, bytes]] = {}
_MOST_LINES: Final = 1000
_LONGEST_LINE: Final = 256
# The longest head that is remembered of a connection: nearly all clients repeat it, but for the body's length.
_LONGEST_HEAD: Final = 2048
# More digits of a length than that are more bytes than any limit, and slow to turn into a number.
_MOST_DIGITS: Final = 18
_LENGTH: Final = b"\r\ncontent-length: "
_NOT_KEPT: Final = frozenset(
    b"authorization proxy-authorization api-key x-api-key cookie content-length x-request-id traceparent tracestate "
    b"idempotency-key".split()
)
# Of which there can be one: taking the first or the last of two is how two readers come to differ.
_ONCE: Final = frozenset(
    b"host content-length transfer-encoding content-type authorization proxy-authorization x-api-key api-key "
    b"x-request-id".split()
)
_OWN: Final = b"x-crosstie-"
# Fields that say where a message ends or goes: too late after its body.
_NOT_TRAILERS: Final = _ONCE | {b"connection", b"te", b"trailer", b"upgrade", b"expect"}

# The size of a chunk and its extensions: names, and values that are tokens or in quotes.
_QUOTED: Final = rb'"(?:[\t !#-\[\]-~\x80-\xff]|\\[\t -~\x80-\xff])*+"'
_CHUNK: Final = re.compile(
    rb"([0-9A-Fa-f]++)(?:[ \t]*+;[ \t]*+" + _TOKEN + rb"(?:[ \t]*+=[ \t]*+(?:" + _TOKEN + rb"|" + _QUOTED + rb"))?+)*+"
)
# What lines before chunks say: those of small ones come again and again.
_SIZES: Final[dict[bytes, int]] = {}
_MOST_SIZES: Final = 4096
_LONGEST_SIZE: Final = 8
_NO_REQUEST: Final = Request("", "", "", {}, b"")
_CR: Final = 0x0D
# What is to come next of a request.
_HEAD: Final = 0
_BODY: Final = 1
_SIZE: Final = 2
_CHUNK_DATA: Final = 3
_CHUNK_END: Final = 4
_TRAILERS: Final = 5


class RequestParser:
    """`feed` it what has come, then ask for `next`."""

    def __init__(self, limits: RequestLimits):
        self._limits = limits
        self._data = b""
        self._at = 0
        # How much of an unfinished head, or of trailers, was looked at; whether an empty line before it was skipped.
        self._seen = 0
        self._blank = False
        self._state = _HEAD
        self._request = _NO_REQUEST
        # Bytes to come of the body or the chunk, and bytes so far of the frames of chunks.
        self._left = self._framing = 0
        # A body that came at once, or in parts: in a buffer, since small parts take ten times their bytes in a list.
        self._body = b""
        self._parts: BytesIO | None = None
        # Bytes so far of the body that is arriving, and its outline where it may be JSON, or a form's boundaries.
        self.held = 0
        self._reader: Outline | Boundaries | None = None
        # Bytes of it that these have seen.
        self._counted = 0
        # Of the last request: its version, whether another may follow, whether its client waits to be told to go on.
        self.http11 = self.keep_alive = True
        self.wants_continue = False
        self._last: Head | None = None

    @property
    def pending(self) -> int:
        """Bytes that were not looked at, or belong to an unfinished head."""
        return len(self._data) - self._at

    @property
    def read(self) -> bytes:
        """What it was fed last, with what was left before."""
        return self._data

    @property
    def in_head(self) -> bool:
        return self._state == _HEAD

    @property
    def request(self) -> Request:
        """The request whose body is arriving, without that."""
        return self._request

    @property
    def begun(self) -> bool:
        """Whether part of a request has come that was not given out."""
        return self._state != _HEAD or self._at < len(self._data)

    def feed(self, data: bytes) -> None:
        self._data = self._data[self._at :] + data if self._at < len(self._data) else data
        self._at = 0

    def drop(self) -> None:
        """Lets go of all that it holds."""
        self._data, self._body, self._parts, self._request = b"", b"", None, _NO_REQUEST
        self._reader = self._last = None
        self._at = self.held = 0
        self._state = _HEAD

    def next(self) -> Request | None:
        """The next request, once all of it has come. Raises BadRequest, after which nothing more may be asked."""
        if self._state == _HEAD and not self._read_head():
            return None
        is_whole = self._read_body() if self._state == _BODY else self._read_chunks()
        self._count()
        if not is_whole:
            return None
        request, self._request = self._request, _NO_REQUEST
        parts = self._parts
        if parts is None:
            request.body = self._body
        else:
            request.body = parts.getvalue()
        self._body, self._parts, self._reader = b"", None, None
        self._state, self._blank, self.wants_continue = _HEAD, False, False
        self.held = 0
        return request

    def _read_head(self) -> bool:
        data, at, limits = self._data, self._at, self._limits
        if at < len(data) and data[at] == _CR and data.startswith(b"\r\n", at) and not self._blank:
            # One empty line before a request: some send it after the last one's body (RFC 9112, 2.2).
            self._blank = True
            at += 2
            self._at = at
        last = self._last
        if last is None or not self._repeats(last):
            end = data.find(b"\r\n\r\n", at + self._seen)
            if end < 0:
                if at < len(data):
                    part = data[at:] if at else data
                    unfinished_head(part, self._seen, limits)
                    # Its end may have come in part.
                    self._seen = max(len(part) - 3, 0)
                return False
            self._at = end + 4
            self._read_new_head(data[at : end + 2])
        self._seen = 0
        fields = self._request.headers
        has_body = self._left != 0
        if self._left >= 0:
            self._state = _BODY
        else:
            self._state, self._left, self._framing = _SIZE, 0, 0
        # A client that has begun to send its body waits for nothing.
        if b"expect" in fields and has_body and self._at == len(data) and self.http11:
            self.wants_continue = fields[b"expect"].lower() == b"100-continue"
        return True

    def _repeats(self, last: Head) -> bool:
        """Whether a head has come that repeats the last but for the length; it is not even searched for its end."""
        data, at, before, after, limits = self._data, self._at, last.before, last.after, self._limits
        begin = at + len(before)
        if data[at:begin] != before:
            return False
        end = data.find(after, begin, begin + _MOST_DIGITS + len(after))
        digits = data[begin:end] if end >= 0 else b""
        size, length = end + len(after) - at, int(digits) if digits.isdigit() else -1
        if size > limits.head_bytes or size > limits.header_bytes or not 0 <= length <= limits.body_bytes:
            return False
        self._at = at + size
        fields = last.fields.copy()
        fields[b"content-length"] = digits
        self._left, self.http11, self.keep_alive = length, last.http11, last.keep_alive
        self._request = request = Request(last.method, last.path, last.query, fields, b"")
        request.head = last
        return True

    def _read_new_head(self, head: bytes) -> None:
        limits = self._limits
        line = first_line(head, limits)
        fields = header_fields(head, line, limits)
        self._left = body_length(fields, line.http11, limits)
        self.http11 = line.http11
        self.keep_alive = keeps_alive(fields, line.http11)
        self._request = request = Request(line.method, line.path, line.query, fields, b"")
        self._last = None
        length = fields.get(b"content-length")
        if length is None or len(head) > _LONGEST_HEAD:
            return
        # There is one at the most.
        before, length_line, after = head.partition(_LENGTH + length + b"\r\n")
        if not length_line:
            before, length_line, after = head.partition(b"\r\nContent-Length: " + length + b"\r\n")
        if length_line:
            start, end = before + length_line[: len(_LENGTH)], b"\r\n" + after + b"\r\n"
            # A copy, since handlers may change the request's own.
            self._last = request.head = Head(
                start, end, line.method, line.path, line.query, fields.copy(), line.http11, self.keep_alive
            )

    def _read_body(self) -> bool:
        left = self._left
        if left:
            data, at = self._data, self._at
            piece = data[at : at + left]
            if piece:
                if not self.held:
                    self._body = piece
                else:
                    parts = self._parts
                    if parts is None:
                        parts = self._begin_parts()
                    parts.write(piece)
                self._at = at + len(piece)
                self.held += len(piece)
                self._left = left - len(piece)
        return self._left == 0

    def _begin_parts(self) -> BytesIO:
        """For bodies in parts, which are read as they come."""
        first, self._body = self._body, b""
        self._parts = parts = BytesIO()
        parts.write(first)
        request, limits = self._request, self._limits
        self._counted = 0
        if request.path in limits.form_paths:
            request.boundaries = self._reader = Boundaries(request.headers.get(b"content-type", b""))
        else:
            request.outline = self._reader = Outline(limits.body_values, limits.body_plain_bytes)
        return parts

    def _count(self) -> None:
        """Reads what one read has brought, however many chunks, since each look costs."""
        parts, reader = self._parts, self._reader
        if parts is None or reader is None:
            return
        parts.seek(self._counted)
        piece = parts.read()
        self._counted += len(piece)
        if piece and not reader.feed(piece):
            limits = self._limits
            raise BadRequest(
                413,
                f"a body of more than {limits.body_values} strings, objects and lists, or of more than "
                f"{limits.body_plain_bytes} bytes of numbers",
            )

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
        size = _SIZES.get(line)
        if size is None:
            match = _CHUNK.match(line)
            if match is None or line[match.end() :] != b"\r\n":
                raise BadRequest(400, "a chunk does not begin with its size")
            size = int(match[1], 16)
            if len(_SIZES) < _MOST_SIZES and len(line) <= _LONGEST_SIZE:
                _SIZES[line] = size
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
        end = data.find(b"\r\n\r\n", at + self._seen)
        if (end if end >= 0 else len(data)) - at > limits.trailer_bytes:
            raise BadRequest(431, f"trailers of more than {limits.trailer_bytes} bytes")
        if end < 0:
            self._seen = max(len(data) - at - 3, 0)
            return False
        self._seen = 0
        check_trailers(data[at : end + 2])
        self._at = end + 4
        return True


# The grammar of a head: its first line and its header fields, by RFC 9112 and RFC 9110.


class RequestLine:
    """The first line: `host` is what an absolute target says, None for the usual kind."""

    def __init__(self, method: bytes, target: bytes, http11: bool, end: int, host: bytes | None = None):
        self.method, self.http11, self.end, self.host = method.decode("ascii"), http11, end, host
        self.path, _, self.query = target.decode("ascii").partition("?")


def first_line(head: bytes, limits: RequestLimits) -> RequestLine:
    """Of a head, or of as much of one as has come if its first line is whole. Raises BadRequest."""
    line = head[: head.find(b"\r") + 2]
    known = _FIRST_LINES.get(line)
    if known is not None and len(line) <= limits.target_bytes:
        return known
    usual = _USUAL_LINE.match(head)
    if usual is None:
        return _other_line(head, limits)
    method, target, minor = usual.groups()
    if len(target) > limits.target_bytes:
        _target_too_long(limits)
    parsed = RequestLine(method, target, minor == b"1", usual.end())
    if len(line) <= _LONGEST_LINE and not parsed.query:
        _keep(_FIRST_LINES, line, parsed)
    return parsed


def _keep(lines: dict[bytes, Any], line: bytes, value: object) -> None:
    if len(lines) >= _MOST_LINES:
        # Those that come again are soon here again.
        lines.clear()
    lines[line] = value


def _other_line(head: bytes, limits: RequestLimits) -> RequestLine:
    match = _ANY_LINE.match(head)
    if match is None:
        if head.find(b"\r\n") > limits.target_bytes:
            _target_too_long(limits)
        raise BadRequest(400, "the first line is not a method, a target and a version")
    method, target, version = match.groups()
    if len(target) > limits.target_bytes:
        _target_too_long(limits)
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadRequest(505, "only HTTP/1.1 and HTTP/1.0 are spoken here")
    http11 = version == b"HTTP/1.1"
    if method == b"CONNECT":
        raise BadRequest(501, "this is no proxy")
    if method not in _METHODS:
        raise BadRequest(501, "no such method")
    if target == b"*" and method == b"OPTIONS":
        return RequestLine(method, target, http11, match.end())
    absolute = _ABSOLUTE.fullmatch(target)
    if absolute is None:
        raise BadRequest(400, "the target is no path of this server")
    host, path = absolute.groups()
    return RequestLine(method, path if path.startswith(b"/") else b"/" + path, http11, match.end(), host)


def _target_too_long(limits: RequestLimits) -> NoReturn:
    raise BadRequest(414, f"a target of more than {limits.target_bytes} bytes")


def unfinished_head(part: bytes, seen: int, limits: RequestLimits) -> None:
    """What can be said of a head before its end has come; `seen` bytes of it were looked at before."""
    first = part[0]
    if not (65 <= first <= 90 or 97 <= first <= 122 or first == 13):
        raise BadRequest(400, "this is no HTTP request; perhaps it is TLS, which is not spoken here")
    if _BARE_LF.search(part, seen):
        raise BadRequest(400, "a line ends without a carriage return")
    end = part.find(b"\n")
    if end >= 0:
        if end >= seen:
            first_line(part, limits)
    elif len(part) > limits.target_bytes + _REST_OF_LINE:
        _target_too_long(limits)
    if len(part) > limits.head_bytes:
        _head_too_long(limits)


def _head_too_long(limits: RequestLimits) -> NoReturn:
    raise BadRequest(431, f"a head of more than {limits.head_bytes} bytes")


def header_fields(head: bytes, line: RequestLine, limits: RequestLimits) -> dict[bytes, bytes]:
    """Names in lower case, values without the space around them. Raises BadRequest."""
    if len(head) > limits.head_bytes:
        _head_too_long(limits)
    if len(head) > limits.header_bytes and max(map(len, head.split(b"\r\n")[1:])) > limits.header_bytes:
        raise BadRequest(431, f"a header of more than {limits.header_bytes} bytes")
    lines = head[line.end : -2].split(b"\r\n") if len(head) > line.end else []
    count = len(lines)
    if count > limits.headers:
        raise BadRequest(431, f"more than {limits.headers} headers")
    fields: dict[bytes, bytes] = {}
    for field in lines:
        known = _HEADER_LINES.get(field)
        name, value = known if known is not None else _field(field)
        fields[name] = value
    if len(fields) < count:
        fields = _joined(lines)
    host = fields.get(b"host")
    if host is None and line.http11:
        raise BadRequest(400, "no host")
    if line.host is not None and (not line.host or line.host.lower() != (host or b"").lower()):
        raise BadRequest(400, "the target names another host than the host header")
    return fields


def _field(line: bytes) -> tuple[bytes, bytes]:
    """Of a header that was not met before."""
    if line.translate(None, _PRINTABLE):
        raise BadRequest(400, "a header has control characters, or a line end that is not CR LF")
    given, colon, value = line.partition(b":")
    name = _NAMES.get(given) if colon else None
    if name is None:
        if _FIELD_NAME.match(line) is None:
            raise BadRequest(400, "a header is not NAME: VALUE on one line")
        name = given.lower()
        if name in _NOT_KEPT:
            _keep(_NAMES, given, name)
    # After the check above it strips spaces and tabs, which is what may stand around a value.
    value = value.strip()
    if name == b"host" and _HOST.fullmatch(value) is None:
        raise BadRequest(400, "the host is no host")
    if len(line) <= _LONGEST_LINE and name not in _NOT_KEPT:
        _keep(_HEADER_LINES, line, (name, value))
    return name, value


def _joined(lines: list[bytes]) -> dict[bytes, bytes]:
    """Joins lists whose name comes twice (RFC 9110, 5.3), and refuses other repeats."""
    fields: dict[bytes, bytes] = {}
    for line in lines:
        given, _, value = line.partition(b":")
        name, value = given.lower(), value.strip()
        if name in fields:
            if name in _ONCE or name.startswith(_OWN):
                raise BadRequest(400, f"two headers {name.decode('ascii')}")
            value = fields[name] + (b"; " if name == b"cookie" else b", ") + value
        fields[name] = value
    return fields


def check_trailers(lines: bytes) -> None:
    """Lines after the last chunk: well formed, and nothing that would change what came before them."""
    if _FIELDS.fullmatch(lines) is None:
        raise BadRequest(400, "a trailer is not NAME: VALUE, on one line that ends with CR LF")
    for trailer in lines.split(b"\r\n")[:-1]:
        name = trailer.partition(b":")[0].lower()
        if name in _NOT_TRAILERS or name.startswith(_OWN):
            raise BadRequest(400, f"{name.decode('ascii')} cannot come after the body")


def body_length(fields: dict[bytes, bytes], http11: bool, limits: RequestLimits) -> int:
    """Of what follows the head; -1 where it comes in chunks. Raises BadRequest."""
    length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
    if coding is not None:
        return _in_chunks(coding.lower(), length, http11)
    if length is None:
        return 0
    if not length.isdigit():
        raise BadRequest(400, "content-length is no number")
    digits = length if len(length) <= 18 else length.lstrip(b"0") or b"0"
    # More digits than that are more bytes than any limit, and slow to turn into a number.
    size = int(digits) if len(digits) <= 18 else -1
    if not 0 <= size <= limits.body_bytes:
        body_too_large(limits)
    return size


def _in_chunks(coding: bytes, length: bytes | None, http11: bool) -> int:
    if length is not None:
        raise BadRequest(400, "both content-length and transfer-encoding")
    if not http11:
        raise BadRequest(400, "HTTP/1.0 has no transfer-encoding")
    if coding == b"chunked":
        return -1
    codings = [option.strip(b" \t") for option in coding.split(b",")]
    if codings[-1] == b"chunked" and codings.count(b"chunked") == 1 and all(codings):
        raise BadRequest(501, "of transfer-encodings only chunked is understood")
    raise BadRequest(400, "transfer-encoding is not chunked")


def body_too_large(limits: RequestLimits) -> NoReturn:
    raise BadRequest(413, f"a body of more than {limits.body_bytes} bytes")


def keeps_alive(fields: dict[bytes, bytes], http11: bool) -> bool:
    """Whether the connection goes on after this request; drops fields of this connection alone."""
    said = fields.get(b"connection")
    if said is None:
        return http11
    if said == b"keep-alive":
        return True
    options = [option.strip(b" \t") for option in said.lower().split(b",")]
    for option in options:
        fields.pop(option, None)
    return b"close" not in options and (http11 or b"keep-alive" in options)
