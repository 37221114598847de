"""How many values a JSON text has, counted while it arrives: what it will cost to read is known before it is read.

Sixty megabytes of empty objects take seconds to decode, and everybody else's streams stand still meanwhile; the same
bytes in a few long strings take milliseconds. So not all bytes are limited here but strings, objects and lists, and the
bytes of numbers and the like between them. Each piece is gone through once, in the time that it takes to look at its
bytes, and no further than to the limit.
"""

import re

# The rest of a string, with its end or that of the piece; the last byte may be half of an escape.
_REST = rb'[^"\\]*+(?:\\.[^"\\]*+)*+(?:(")|(\\)?\Z)'
_IN_STRING = re.compile(_REST, re.DOTALL)
_VALUE = re.compile(rb'"' + _REST + rb'|[\[{]|[^"\[\]{}]++', re.DOTALL)
_BEGINS = frozenset(b'"[{')


class ValueCounter:
    """Of a text that comes in pieces, what has come: strings, objects and lists by their number, and the bytes of all
    that is none of them."""

    def __init__(self, most: int, most_plain: int):
        self.most, self.most_plain = most, most_plain
        self.count = self.plain = 0
        # Where the last piece ended.
        self._in_string = self._escaped = False

    def feed(self, piece: bytes) -> bool:
        """Whether there is no more than may be."""
        at = 0
        if self._in_string and piece:
            found = _IN_STRING.match(piece, 1 if self._escaped else 0)
            assert found is not None
            self._ended_with(found)
            at = found.end()
        for value in _VALUE.finditer(piece, at):
            first = piece[value.start()]
            if first not in _BEGINS:
                self.plain += value.end() - value.start()
                if self.plain > self.most_plain:
                    return False
                continue
            self.count += 1
            if self.count > self.most:
                return False
            if first == 34:
                self._ended_with(value)
        return True

    def _ended_with(self, string: re.Match[bytes]) -> None:
        self._in_string = string[1] is None
        self._escaped = string[2] is not None
