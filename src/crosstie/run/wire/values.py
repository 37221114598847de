"""How many values a JSON text has, counted while it arrives: what it will cost to read is known before it is read.

Sixty megabytes of empty objects take seconds to decode, and everybody else's streams stand still meanwhile; the same
bytes in a few long strings take milliseconds. So not all bytes are limited here but strings, objects and lists, and the
bytes of numbers and the like between them. Each piece is gone through a few times, in the time that it takes to look
at its bytes.
"""

import re

# The rest of a string, with its end or that of the piece; the last byte may be half of an escape.
_INSIDE = rb'[^"\\]*+(?:\\.[^"\\]*+)*+'
_IN_STRING = re.compile(_INSIDE + rb'(?:(")|(\\)?\Z)', re.DOTALL)
_STRING = re.compile(rb'"' + _INSIDE + rb'"', re.DOTALL)
# Up to a string that does not end here.
_WHOLE = re.compile(rb'(?:[^"]++|"' + _INSIDE + rb'")*+', re.DOTALL)
# Quotes that are looked for one by one, which in a long text is far quicker than matching its every byte.
_FEW = 8
_BACKSLASH = 92


class ValueCounter:
    """Of a text that comes in pieces, what has come: strings, objects and lists by their number, and the bytes of all
    that is none of them. Nothing is done for each value in Python: that would cost more than what is kept away."""

    def __init__(self, most: int, most_plain: int):
        self.most, self.most_plain = most, most_plain
        self.count = self.plain = 0
        # Where the last piece ended.
        self._in_string = self._escaped = False

    def feed(self, piece: bytes) -> bool:
        """Whether there is no more than may be."""
        at = 0
        if self._in_string and piece:
            at = self._go_on(piece, 1 if self._escaped else 0)
        if not self._in_string:
            self._count(piece, at)
        return self.count <= self.most and self.plain <= self.most_plain

    def _count(self, piece: bytes, at: int) -> None:
        # Past the last quote nothing has to be matched: most of a long prompt lies there.
        last = piece.rfind(b'"', at) + 1
        whole = _WHOLE.match(piece, at, last or at)
        assert whole is not None
        end = whole.end()
        between, strings = _STRING.subn(b"", piece[at:end])
        if end < last:
            strings += 1
            self._go_on(piece, end + 1)
        if not self._in_string:
            between += piece[max(at, last) :]
        begun = between.count(b"{") + between.count(b"[")
        self.count += strings + begun
        self.plain += len(between) - begun - between.count(b"}") - between.count(b"]")

    def _go_on(self, piece: bytes, at: int) -> int:
        """Where the string ends in which this is, or the piece."""
        self._escaped = False
        begun = at
        for _ in range(_FEW):
            quote = piece.find(b'"', at)
            self._in_string = quote < 0 or _is_escaped(piece, begun, quote)
            if not self._in_string:
                return quote + 1
            if quote < 0:
                self._escaped = _is_escaped(piece, begun, len(piece))
                return len(piece)
            at = begun = quote + 1
        found = _IN_STRING.match(piece, at)
        assert found is not None
        self._in_string, self._escaped = found[1] is None, found[2] is not None
        return found.end()


def _is_escaped(piece: bytes, start: int, end: int) -> bool:
    """Whether what stands there is, by an odd number of backslashes before it."""
    if end <= start or piece[end - 1] != _BACKSLASH:
        return False
    before = piece[start:end]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1
