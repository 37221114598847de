"""One shard converted: windows of the source read, changed, written, read back and compared.

A window is 256 KiB of the file, whatever tensors lie in it, so that small tensors cost no system call each.
What was read back is compared with what was to be written, and its scales with the source's in float64. Why that is
enough for all dequantised values to be the same is in docs/convert.md.
"""

import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from crosstie.core.errors import BadData
from crosstie.port.checkpoint.fp8 import (
    OTHER,
    SCALE_FACTOR,
    VALUES,
    Bytes,
    Codes,
    Dialect,
    Inexact,
    Recoder,
    rescale,
    same,
    scale_values,
)

Change = Literal["none", "codes", "scale"]
# The bytes of a file from one offset to another.
Read = Callable[[int, int], Bytes]

# Two of them and a mask fit into a core's second-level cache, which is worth a third of the time.
WINDOW_BYTES = 1 << 18
# No scale is longer, so that a window never ends inside one.
_LONGEST_SCALE = 8
_SHORTER = "became shorter while it was read"


class ByteRange(msgspec.Struct, frozen=True, array_like=True):
    """A run of the source's bytes that is treated in one way: a tensor, several that stay as they are, or a part."""

    change: Change
    name: str
    dtype: str
    start: int
    stop: int


class ShardPlan(msgspec.Struct, frozen=True, kw_only=True):
    source: Path
    # Of the source when it was planned: (bytes, modification time in ns).
    identity: tuple[int, int]
    # The new file's first bytes: its header, which may be longer or shorter than the source's.
    head: bytes
    data_start: int
    steps: tuple[ByteRange, ...]
    # Of the new file's tensors, where they are not as long as the source's.
    new_data_bytes: int | None = None

    @property
    def name(self) -> str:
        return self.source.name

    @property
    def shift(self) -> int:
        """From an offset in the source to the same byte's offset in the new file."""
        return len(self.head) - self.data_start

    @property
    def size(self) -> int:
        return len(self.head) + (self.data_bytes if self.new_data_bytes is None else self.new_data_bytes)

    @property
    def data_bytes(self) -> int:
        return self.identity[0] - self.data_start

    def unchanged(self) -> bool:
        return identity_of(self.source) == self.identity


def identity_of(file: Path) -> tuple[int, int]:
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns


class Stretch(msgspec.Struct, frozen=True, kw_only=True):
    """Some windows of a shard, with all that is needed to convert them: work for one process."""

    to: Dialect
    source: str
    target: str
    # From an offset in the source to the same byte's offset in the target.
    shift: int
    # Whether the shard will be flushed: the disk may as well begin.
    flush: bool
    windows: list[list[ByteRange]]
    # The target is there already: it is read, not written.
    only_compared: bool = False

    @property
    def nbytes(self) -> int:
        return sum(step.stop - step.start for window in self.windows for step in window)


def windows(steps: Iterable[ByteRange]) -> Iterator[list[ByteRange]]:
    """The steps cut into windows, no scale cut in two."""
    window: list[ByteRange] = []
    room = WINDOW_BYTES
    for step in steps:
        at = step.start
        while at < step.stop:
            take = min(room, step.stop - at)
            if step.change == "scale" and take < step.stop - at:
                take -= take % _LONGEST_SCALE
            if take:
                window.append(msgspec.structs.replace(step, start=at, stop=at + take))
                at += take
                room -= take
            if room < _LONGEST_SCALE or not take:
                yield window
                window, room = [], WINDOW_BYTES
    if window:
        yield window


class Converter:
    """The buffers of one process. `pass_window` is all that is ever done to the bytes of a checkpoint.

    The new file is read back through a map, which spares a copy of every byte. `watched`: so is the source; where
    that becomes shorter meanwhile, or its disk fails, the process ends, and another one has to tell.
    """

    def __init__(self, to: Dialect, *, watched: bool = False):
        self.to, self._watched, self._factor = to, watched, SCALE_FACTOR[to]
        self._recoder = Recoder(to)
        self._source, self._target = np.empty(WINDOW_BYTES, np.uint8), np.empty(WINDOW_BYTES, np.uint8)
        _prove(to)

    def pass_stretch(self, stretch: Stretch) -> Codes:
        if not stretch.windows:
            return Codes()
        start, stop, shift = stretch.windows[0][0].start, stretch.windows[-1][-1].stop, stretch.shift
        with (
            self._opened(stretch.source, start, stop, mapped=self._watched) as (_, read),
            self._opened(stretch.target, start + shift, stop + shift, write=not stretch.only_compared) as (
                target,
                read_back,
            ),
        ):
            codes = sum((self.pass_window(stretch, each, read, target, read_back) for each in stretch.windows), Codes())
            if stretch.flush and hasattr(os, "posix_fadvise"):
                # Linux starts to write what is to be forgotten, and does not wait for it.
                os.posix_fadvise(target, start + shift, stop - start, os.POSIX_FADV_DONTNEED)
            return codes

    def pass_window(
        self, stretch: Stretch, steps: Sequence[ByteRange], read: Read, target: int, read_back: Read
    ) -> Codes:
        """From the source to the file descriptor `target`."""
        start, stop, shift = steps[0].start, steps[-1].stop, stretch.shift
        before, after = read(start, stop), self._target[: stop - start]
        codes, scales = Codes(), []
        for step in steps:
            part = slice(step.start - start, step.stop - start)
            if step.change == "codes":
                codes += self._recode(stretch, step, before[part], after[part])
            elif step.change == "scale":
                after[part] = self._rescale(stretch, step, before[part])
                scales.append((step, part, self._factor * scale_values(before[part], step.dtype)))
            else:
                after[part] = before[part]
        if not stretch.only_compared:
            drain(after, target, start + shift)
        # From here on `before` may be gone: files without maps are read into the same buffer.
        back = read_back(start + shift, stop + shift)
        if not same(back, after):
            raise BadData(stretch.target, steps[0].name, "the bytes read back are not those that belong there")
        for step, part, wanted in scales:
            if not np.array_equal(scale_values(back[part], step.dtype), wanted):
                raise BadData(stretch.target, step.name, f"a scale is not {self._factor:g} times the source's")
        return codes

    @contextmanager
    def _opened(
        self, file: str, start: int, stop: int, *, mapped: bool = True, write: bool = False
    ) -> Iterator[tuple[int, Read]]:
        """A file, and how to read what lies between `start` and `stop` of it."""
        descriptor = os.open(file, os.O_RDWR | os.O_NOFOLLOW if write else os.O_RDONLY)
        try:
            if os.fstat(descriptor).st_size < stop:
                raise BadData(file, "", _SHORTER)
            map_start = start - start % mmap.ALLOCATIONGRANULARITY
            if mapped and (whole := _mapped(descriptor, map_start, stop)) is not None:
                yield descriptor, lambda begin, end: whole[begin - map_start : end - map_start]
            else:
                yield descriptor, lambda begin, end: fill(self._source[: end - begin], descriptor, begin, file)
        finally:
            os.close(descriptor)

    def _recode(self, stretch: Stretch, step: ByteRange, before: Bytes, after: Bytes) -> Codes:
        codes = self._recoder.recode(before, after)
        lost = codes.lost(self.to)
        if lost:
            raise BadData(stretch.source, step.name, f"{lost:,} weights {_why_lost(codes, self.to)}")
        return codes

    def _rescale(self, stretch: Stretch, step: ByteRange, before: Bytes) -> Bytes:
        try:
            return rescale(before, step.dtype, self._factor)
        except Inexact as error:
            raise BadData(stretch.source, step.name, str(error)) from None


@cache
def _prove(to: Dialect) -> None:
    """Every byte that has a counterpart keeps its value in float64, on this machine, in whole and in short blocks, with
    minus zero everywhere and in one place."""
    recoder = Recoder(to)
    everywhere = np.tile(np.arange(256, dtype=np.uint8), 1 << 11)[:-7]
    once = np.where(everywhere == 0x80, 0, everywhere)
    once[300] = 0x80
    for codes in (everywhere, once):
        out = np.empty_like(codes)
        recoder.recode(codes, out)
        kept = (codes & 0x7F != 0x7F) & ((codes != 0x80) | (to == "e4m3fnuz"))
        before, after = VALUES[OTHER[to]][codes[kept]], SCALE_FACTOR[to] * VALUES[to][out[kept]]
        if not np.array_equal(before, after):
            raise AssertionError("FP8 codes do not keep their values: this build of numpy cannot be trusted")


def _why_lost(codes: Codes, to: Dialect) -> str:
    if to == "e4m3fnuz":
        return "are NaN (0x7F or 0xFF): the checkpoint is damaged, and no engine would give sense"
    if codes.sign_only:
        return "are NaN (0x80) or +-240 (0x7F, 0xFF), which e4m3fn would need as +-480 and does not have"
    return "are +-240 (0x7F, 0xFF), which e4m3fn would need as +-480 and does not have: no exact conversion exists"


def _mapped(descriptor: int, start: int, stop: int) -> Bytes | None:
    """Until nobody holds it any more; None where the file system has no maps."""
    try:
        return np.frombuffer(mmap.mmap(descriptor, stop - start, prot=mmap.PROT_READ, offset=start), np.uint8)
    except OSError:
        return None


def fill(buffer: Bytes, descriptor: int, offset: int, file: str) -> Bytes:
    view, done = buffer.data, 0
    while done < buffer.size:
        read = os.preadv(descriptor, [view[done:]], offset + done)
        if not read:
            raise BadData(file, "", _SHORTER)
        done += read
    return buffer


def drain(buffer: Bytes, descriptor: int, offset: int) -> None:
    view, done = buffer.data, 0
    while done < buffer.size:
        done += os.pwrite(descriptor, view[done:], offset + done)
