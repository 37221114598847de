"""As much of Envoy's external processing protocol as an endpoint picker needs: what its messages say, and replies.

Protobuf by hand: few fields count, and unknown ones are skipped. A field's key is eight times its number plus how its
value is written: 0 a number, 2 bytes after their length.
"""

from collections.abc import Iterable, Sequence
from typing import Final

# The standard's own names: gateway-api-inference-extension, docs/proposals/004-endpoint-picker-protocol, v1.0.0.
DESTINATION = b"x-gateway-destination-endpoint"
NAMESPACE = b"envoy.lb"
SERVED = b"x-gateway-destination-endpoint-served"
SUBSET_NAMESPACE, SUBSET = b"envoy.lb.subset_hint", b"x-gateway-destination-endpoint-subset"
# Attributes, where Envoy was told to send them (`response_attributes`).
_DETAILS, _UPSTREAM = b"response.code_details", b"upstream.address"
# How bodies are sent (BodySendMode).
FULL_DUPLEX_STREAMED = 4
# What a message is about.
REQUEST_HEADERS: Final = 2
RESPONSE_HEADERS: Final = 3
REQUEST_BODY: Final = 4
RESPONSE_BODY: Final = 5
REQUEST_TRAILERS: Final = 6
RESPONSE_TRAILERS: Final = 7
# Some proxies take no longer pieces of a body than 64 KiB.
_MOST_PIECE = 60_000
# Keys of fields by their numbers: with a number as value, and with bytes.
_ONE_NUMBER, _TWO_NUMBER, _THREE_NUMBER, _FIVE_NUMBER = b"\x08", b"\x10", b"\x18", b"\x28"
_ONE, _TWO, _THREE, _FOUR, _FIVE, _SIX, _SEVEN, _EIGHT = (bytes((8 * number + 2,)) for number in range(1, 9))
# Fields of what replies set: overwritten or added.
_OVERWRITE = _THREE_NUMBER + b"\x02"
Fields = Sequence[tuple[bytes, bytes]]


class Malformed(ValueError):
    """Not a message of this protocol."""


class _Reader:
    """The fields of one message, which is a part of some bytes."""

    def __init__(self, data: bytes, at: int, end: int):
        self.data, self._at, self._end = data, at, end
        # Of the field just read: its number, or where its bytes are.
        self.number = self.first = self.last = 0

    def next(self) -> int:
        """The key of the next field; 0: there are no more."""
        if self._at >= self._end:
            return 0
        key = self._varint()
        kind = key & 7
        if kind == 2:
            size = self._varint()
            self.first = self._at
            self._at = self.last = self._at + size
        elif kind == 0:
            self.number = self._varint()
        elif kind == 1:
            self._at += 8
        elif kind == 5:
            self._at += 4
        else:
            raise Malformed
        if self._at > self._end or key < 8:
            raise Malformed
        return key

    def _varint(self) -> int:
        data, at, end = self.data, self._at, self._end
        number = shift = 0
        while at < end and shift < 70:
            byte = data[at]
            at += 1
            number |= (byte & 0x7F) << shift
            if byte < 0x80:
                self._at = at
                return number
            shift += 7
        raise Malformed

    def value(self) -> bytes:
        return self.data[self.first : self.last]

    def inside(self) -> "_Reader":
        return _Reader(self.data, self.first, self.last)


# What Envoy says


class Said:
    """One message of Envoy's."""

    def __init__(self, message: bytes):
        # What it is about; 0: nothing that is known here.
        self.kind = 0
        self.fields: list[tuple[bytes, bytes]] = []
        self.body = b""
        self.ends = False
        # How bodies of requests and of answers are sent, where it says so.
        self.modes: tuple[int, int] | None = None
        # The endpoints that the request may go to; None: it says nothing.
        self.subset: tuple[str, ...] | None = None
        # The endpoint that has answered, and how Envoy came by the answer; empty: it does not say.
        self.served = self.details = ""
        upstream = ""
        reader = _Reader(message, 0, len(message))
        while key := reader.next():
            number = key >> 3
            if key & 7 != 2:
                continue
            if number in (REQUEST_HEADERS, RESPONSE_HEADERS):
                self.kind = number
                self._read_headers(reader.inside())
            elif number in (REQUEST_BODY, RESPONSE_BODY):
                self.kind = number
                self._read_body(reader.inside())
            elif number in (REQUEST_TRAILERS, RESPONSE_TRAILERS):
                self.kind = number
            elif number == 8:
                inside = reader.inside()
                while within := inside.next():
                    if within == 10:
                        self._read_metadata(inside.inside())
            elif number == 9:
                _, value = _entry(reader.inside())
                if value is not None:
                    for name, entry in _struct(value):
                        if name == _DETAILS:
                            self.details = _text(entry)
                        elif name == _UPSTREAM:
                            upstream = _text(entry)
            elif number == 11:
                self._read_modes(reader.inside())
        self.served = self.served or upstream

    def _read_headers(self, reader: _Reader) -> None:
        fields = self.fields
        while key := reader.next():
            if key == 10:
                headers = reader.inside()
                while within := headers.next():
                    if within == 10:
                        fields.append(_header(headers.inside()))
            elif key == 24:
                self.ends = reader.number != 0

    def _read_body(self, reader: _Reader) -> None:
        while key := reader.next():
            if key == 10:
                self.body = reader.value()
            elif key == 16:
                self.ends = reader.number != 0

    def _read_metadata(self, reader: _Reader) -> None:
        name, value = _entry(reader)
        if value is None:
            return
        if name == NAMESPACE:
            for key, entry in _struct(value):
                if key == SERVED:
                    self.served = _text(entry)
        elif name == SUBSET_NAMESPACE:
            for key, entry in _struct(value):
                if key == SUBSET:
                    self.subset = _texts(entry)

    def _read_modes(self, reader: _Reader) -> None:
        request = response = 0
        while key := reader.next():
            if key == 8:
                request = reader.number
            elif key == 16:
                response = reader.number
        self.modes = request, response


def _header(reader: _Reader) -> tuple[bytes, bytes]:
    """Envoy writes values as bytes; those who write text are understood too."""
    name = text = raw = b""
    while key := reader.next():
        if key == 10:
            name = reader.value()
        elif key == 18:
            text = reader.value()
        elif key == 26:
            raw = reader.value()
    return name, raw or text


def _entry(reader: _Reader) -> tuple[bytes, _Reader | None]:
    """A name and its value."""
    name, value = b"", None
    while key := reader.next():
        if key == 10:
            name = reader.value()
        elif key == 18:
            value = reader.inside()
    return name, value


def _struct(reader: _Reader) -> list[tuple[bytes, _Reader]]:
    fields = []
    while key := reader.next():
        if key == 10:
            name, value = _entry(reader.inside())
            if value is not None:
                fields.append((name, value))
    return fields


def _text(value: _Reader) -> str:
    text = b""
    while key := value.next():
        if key == 26:
            text = value.value()
    return text.decode("utf-8", "replace")


def _texts(value: _Reader) -> tuple[str, ...]:
    """A list by the standard; some write one text, as in headers."""
    said: list[str] = []
    while key := value.next():
        if key == 26:
            said += value.value().decode("utf-8", "replace").split(",")
        elif key == 50:
            inside = value.inside()
            while within := inside.next():
                if within == 10:
                    said.append(_text(inside.inside()))
    return tuple([text.strip() for text in said if text.strip()])


def service_of(message: bytes) -> str:
    """Whose health is asked for."""
    reader, name = _Reader(message, 0, len(message)), b""
    while key := reader.next():
        if key == 10:
            name = reader.value()
    return name.decode("utf-8", "replace")


# What Envoy is told


def _sized(key: bytes, value: bytes) -> bytes:
    size = len(value)
    if size < 0x80:
        return key + bytes((size,)) + value
    return key + _varint(size) + value


def _varint(number: int) -> bytes:
    varint = bytearray()
    while number > 0x7F:
        varint.append(number & 0x7F | 0x80)
        number >>= 7
    varint.append(number)
    return bytes(varint)


def _mutation(given: Fields, removed: Iterable[bytes] = ()) -> bytes:
    made = [
        _sized(_ONE, _sized(_ONE, _sized(_ONE, name) + _sized(_THREE, value)) + _OVERWRITE) for name, value in given
    ]
    made += [_sized(_TWO, name) for name in removed]
    return b"".join(made)


def _under(name: bytes, value: bytes) -> bytes:
    """A structure of one field."""
    return _sized(_ONE, _sized(_ONE, name) + _sized(_TWO, value))


def picked(endpoints: str, given: Fields, removed: Iterable[bytes]) -> bytes:
    """The head of the request goes on, to the first of these endpoints, or the next where that fails. Header and
    metadata have the same value, since proxies differ in which they go by."""
    named = endpoints.encode()
    # With the route to be looked for anew.
    common = _sized(_TWO, _mutation([(DESTINATION, named), *given], removed)) + _FIVE_NUMBER + b"\x01"
    metadata = _under(NAMESPACE, _sized(_FIVE, _under(DESTINATION, _sized(_THREE, named))))
    return _sized(_ONE, _sized(_ONE, common)) + _sized(_EIGHT, metadata)


def headed(given: Fields, removed: Sequence[bytes]) -> bytes:
    """The head of the answer goes on, with these changes."""
    common = _sized(_ONE, _sized(_TWO, _mutation(given, removed))) if given or removed else b""
    return _sized(_TWO, common)


def pieces(kind: int, body: bytes, *, ends: bool) -> list[bytes]:
    """A body, or the next of it; `kind`: REQUEST_BODY or RESPONSE_BODY; `ends`: nothing follows."""
    made, size = [], len(body)
    side = _THREE if kind == REQUEST_BODY else _FOUR
    for at in range(0, max(size, 1), _MOST_PIECE):
        streamed = _sized(_ONE, body[at : at + _MOST_PIECE])
        if ends and at + _MOST_PIECE >= size:
            streamed += _TWO_NUMBER + b"\x01"
        made.append(_sized(side, _sized(_ONE, _sized(_THREE, _sized(_THREE, streamed)))))
    return made


def trailed(kind: int) -> bytes:
    """The trailers go on as they are; `kind`: REQUEST_TRAILERS or RESPONSE_TRAILERS."""
    return _sized(_FIVE if kind == REQUEST_TRAILERS else _SIX, b"")


def answered(status: int, given: Fields, body: bytes) -> bytes:
    """The picker's own answer, in place of any other."""
    code = _sized(_ONE, _ONE_NUMBER + _varint(status))
    return _sized(
        _SEVEN, code + _sized(_TWO, _mutation(given)) + _sized(_THREE, body) + _sized(_FIVE, b"crosstie_pick")
    )


def health(status: int) -> bytes:
    return _ONE_NUMBER + _varint(status)
