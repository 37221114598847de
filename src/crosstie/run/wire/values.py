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
        whole = _WHOLE.match(piece, at)
        assert whole is not None
        end = whole.end()
        between, strings = _STRING.subn(b"", piece[at:end])
        begun = between.count(b"{") + between.count(b"[")
        self.count += strings + begun
        self.plain += len(between) - begun - between.count(b"}") - between.count(b"]")
        if end < len(piece):
            self.count += 1
            self._go_on(piece, end + 1)
        return self.count <= self.most and self.plain <= self.most_plain

    def _go_on(self, piece: bytes, at: int) -> int:
        """Where the string ends in which this is, or the piece."""
        found = _IN_STRING.match(piece, at)
        assert found is not None
        self._in_string, self._escaped = found[1] is None, found[2] is not None
        return found.end()
