"""A JSON text that comes in pieces: how many values it has, and its outline, which is all of it but its long strings.

Sixty megabytes of empty objects take seconds to decode while all streams stand still. So the cost is known before:
strings, objects and lists are counted, and the bytes of numbers between them. One long string is cheap to count, but
searching it takes a tenth of a second; so only the outline is read, in which a mark says where each long string is and
how long.

Each piece is gone through a few times by functions of bytes; Python does nothing for each value.
"""

import codecs
import re
import secrets
from collections.abc import Iterator
from io import BytesIO
from typing import Final, TypeAlias

# Longer strings are left out: twice as long as what stands in their place.
LONG: Final = 128
# Where there are more quotes than one in so many bytes, strings are too short for looking at each.
_DENSE: Final = 16
# As much of a long string as stays in its place: enough to see that it is a picture.
_OPENING: Final = re.compile(rb"data:(?:image|audio|video)/")
# Nobody can send this, so that no text can claim to be longer than it is.
_SECRET: Final = secrets.token_hex(8).encode()
_MARK: Final = re.compile(rb"~%b-([0-9]{12})-([0-9]{12})-([0-9]{12})~" % _SECRET)
_MARK_START: Final = b"~%b-" % _SECRET
_MARK_BYTES: Final = len(_SECRET) + 41


# Bytes that are copied at once.
_STEP: Final = 2**22

# Steps of something long, and what came of it.
Filling: TypeAlias = Iterator["tuple[bytes, Outline] | None"]


class Outline:
    """What has come of a text: its strings, objects and lists counted, the bytes of the rest, and it without long
    strings."""

    def __init__(self, most: int, most_plain: int):
        self.most, self.most_plain = most, most_plain
        self.count = self.plain = 0
        # Whether it is UTF-8 as far as it has come.
        self._utf8 = True
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._half = False
        # Bytes that have come, and by how many more they are than what is kept.
        self._size = self._left_out = 0
        self._kept = BytesIO()
        # Of a string that has not ended: where it began; all of it while it is short, and then only its opening.
        self._in_string = self._escaped = False
        self._began = 0
        self._short = b""
        self._opening: bytes | None = None

    @property
    def utf8(self) -> bool:
        return self._utf8 and not self._half

    @property
    def is_dear(self) -> bool:
        """Whether it has more values than may be."""
        return self.count > self.most or self.plain > self.most_plain

    @property
    def text(self) -> bytes:
        return self._kept.getvalue()

    def feed(self, piece: bytes) -> bool:
        """Whether there are no more values than may be."""
        if self._half or not piece.isascii():
            self._check_utf8(piece)
        blanked = piece
        if self._escaped and piece:
            # Whatever it is, it ends no string.
            blanked = b"_" + piece[1:]
            self._escaped = False
        if blanked.find(b"\\") >= 0:
            blanked = blanked.replace(b"\\\\", b"__").replace(b'\\"', b"__")
            self._escaped = blanked.endswith(b"\\")
        # By turns outside of strings and inside.
        parts = blanked.split(b'"')
        quotes, inside = len(parts) - 1, int(self._in_string)
        outside = b"".join(parts[inside::2])
        begun = outside.count(b"{") + outside.count(b"[")
        self.count += (quotes + 1 - inside) // 2 + begun
        self.plain += len(outside) - begun - outside.count(b"}") - outside.count(b"]")
        if self.is_dear:
            return False
        self._in_string = (quotes + inside) % 2 == 1
        self._keep(piece, parts, inside)
        self._size += len(piece)
        return True

    def filled(self, text: bytes, body: bytes) -> "tuple[bytes, Outline]":
        """What a text made of this outline stands for, with the body's long strings in their places, and its own
        outline."""
        return next(one for one in self.filling(text, body) if one is not None)

    def filling(self, text: bytes, body: bytes) -> "Filling":
        """The same in steps, since a copy of thirty megabytes would keep everybody waiting: None, until it is done."""
        made, whole, at, copied = Outline(self.most, self.most_plain), BytesIO(), 0, 0
        made._utf8 = self.utf8
        for mark in _MARK.finditer(text):
            start, length = int(mark[1]), int(mark[2])
            for text_of in (made._kept, whole):
                text_of.write(text[at : mark.start()])
            made._kept.write(made._mark(whole.tell(), whole.tell() + length))
            for piece in range(start, start + length, _STEP):
                end = min(piece + _STEP, start + length)
                copied += whole.write(memoryview(body)[piece:end])
                if copied >= _STEP:
                    copied = 0
                    yield None
            at = mark.end()
        for text_of in (made._kept, whole):
            text_of.write(text[at:])
        yield whole.getvalue(), made

    def _check_utf8(self, piece: bytes) -> None:
        try:
            self._decoder.decode(piece)
        except UnicodeDecodeError:
            self._utf8 = False
            self._decoder.reset()
        self._half = bool(self._decoder.getstate()[0])

    def _keep(self, piece: bytes, parts: list[bytes], inside: int) -> None:
        start, stop = 0, len(piece)
        if inside:
            start = len(parts[0])
            self._go_on(piece[:start])
            if len(parts) == 1:
                return
            self._kept.write(self._short if self._opening is None else self._mark(self._began, self._size + start))
        if self._in_string:
            stop -= len(parts[-1])
        if len(parts) * _DENSE > len(piece):
            self._kept.write(piece[start:stop])
        else:
            self._keep_sparse(piece, parts, inside, start, stop)
        if self._in_string:
            self._began, self._short, self._opening = self._size + stop, b"", None
            self._go_on(piece[stop:])

    def _keep_sparse(self, piece: bytes, parts: list[bytes], inside: int, start: int, stop: int) -> None:
        """Between the strings in which it begins and ends, whole ones are left out where they are long."""
        at = 0
        for index, part in enumerate(parts):
            end = at + len(part)
            if len(part) > LONG and (index + inside) % 2 and at > start and end < stop:
                self._opening = _opening(piece[at : at + 32])
                self._kept.write(piece[start:at] + self._mark(self._size + at, self._size + end))
                start = end
            at = end + 1
        self._kept.write(piece[start:stop])

    def _go_on(self, part: bytes) -> None:
        """With a string that has not ended: short ones are kept whole, long ones not at all, so no character or escape
        is cut."""
        if self._opening is None:
            if len(self._short) + len(part) <= LONG:
                self._short += part
            else:
                self._opening = _opening(self._short + part[:32])

    def _mark(self, began: int, end: int) -> bytes:
        """A mark: place in the text, length, and how much longer the text before it is than the outline."""
        opening = self._opening or b""
        began += len(opening)
        mark = b"%b~%b-%012d-%012d-%012d~" % (opening, _SECRET, began, end - began, self._left_out)
        self._left_out += end - began - _MARK_BYTES
        return mark


def _opening(string: bytes) -> bytes:
    match = _OPENING.match(string)
    return b"" if match is None else match[0]


def left_out(part: bytes) -> int:
    """How many bytes longer this part of an outline is in the text."""
    first = _MARK.match(part, max(part.find(_MARK_START), 0))
    if first is None:
        return 0
    last = _MARK.match(part, part.rfind(_MARK_START))
    assert last is not None
    return int(last[3]) + int(last[2]) - _MARK_BYTES - int(first[3])


def next_left_out(part: bytes) -> tuple[int, int, int] | None:
    """The first gap in a part of an outline: its place there, in the text, and its bytes."""
    mark = _MARK.search(part)
    return None if mark is None else (mark.start(), int(mark[1]), int(mark[2]))
