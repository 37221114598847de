"""An answer that came compressed, in plain bytes as they come: gzip and deflate, and nothing else."""

import zlib
from typing import Final

# By what servers call them: how zlib is told that they are theirs.
_WINDOWS: Final = {b"gzip": 31, b"x-gzip": 31, b"deflate": 15}
# What one read of 256 KiB may become: more is meant to harm, and so much takes a tenth of a second to look through.
_MOST: Final = 8 * 2**20


class Unpacking:
    def __init__(self, coding: bytes):
        window = _WINDOWS.get(coding.strip().lower())
        self._inner = zlib.decompressobj(window) if window is not None else None
        # Whether all of it has come, whole.
        self.done = False

    def plain(self, data: bytes) -> bytes:
        """Nothing, from where it cannot be read on."""
        inner = self._inner
        if inner is None or not data:
            return b""
        try:
            plain = inner.decompress(data, _MOST)
        except zlib.error:
            self._inner, self.done = None, False
            return b""
        self.done = inner.eof and not inner.unused_data
        if inner.unconsumed_tail or inner.unused_data:
            self._inner, self.done = None, False
        return plain
