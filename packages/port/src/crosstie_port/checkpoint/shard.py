"""One shard converted: windows of the source read, changed, written, read back and compared.

A window is 256 KiB of the file, whatever tensors lie in it, so that small tensors cost no system call each. Scales are
doubled and halved in float64 and refused where that is not exact, and what was read back is what was to be written.
Why that is enough for all dequantised values to be the same is in docs/convert.md.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec
import numpy as np

from crosstie.core.errors import BadData, BadInput
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
)

Change = Literal["none", "codes", "scale"]
Item = TypeVar("Item")
Made = TypeVar("Made")

# Two of them and a mask fit into a core's second-level cache, which is worth a third of the time.
WINDOW_BYTES = 1 << 18
# No scale is longer, so that a window never ends inside one.
_LONGEST_SCALE = 8


class ByteRange(msgspec.Struct, frozen=True):
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


class OpenFile:
    """Bytes at their places, for several threads at once."""

    def __init__(self, file: Path, flags: int = os.O_RDONLY):
        self.file = file
        self.descriptor = os.open(file, flags)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)

    def get(self, at: int, into: Bytes) -> Bytes:
        view, done = into.data, 0
        while done < into.size:
            read = os.preadv(self.descriptor, [view[done:]], at + done)
            if not read:
                raise BadData(self.file, "", "became shorter while it was read")
            done += read
        return into


class NewFile(OpenFile):
    """What a conversion makes: written and read back, or with `only_compared`, there already and read."""

    def __init__(self, file: Path, *, only_compared: bool, flushes: bool = False):
        super().__init__(file, os.O_RDONLY if only_compared else os.O_RDWR | os.O_NOFOLLOW)
        self._only_compared = only_compared
        self._flushes = flushes and hasattr(os, "posix_fadvise")

    def put(self, some: Bytes, at: int, name: str, back: Bytes | None = None) -> None:
        """`back`: room for what is read back."""
        if not self._only_compared:
            view, done = some.data, 0
            while done < some.size:
                done += os.pwrite(self.descriptor, view[done:], at + done)
        if not same(self.get(at, np.empty(some.size, np.uint8) if back is None else back), some):
            raise BadData(self.file, name, "the bytes read back are not those that belong there")
        if self._flushes:
            # Linux starts to write what is to be forgotten, and does not wait for it.
            os.posix_fadvise(self.descriptor, at, some.size, os.POSIX_FADV_DONTNEED)


def in_threads(workers: Sequence[Callable[[Item], Made]], items: Iterable[Item]) -> list[Made]:
    """What workers make of the items, each in a thread of its own and in no order; the first fault ends all of them."""
    queue, taking, stop = iter(items), threading.Lock(), threading.Event()
    made: list[Made] = []

    def go_on(work: Callable[[Item], Made]) -> None:
        try:
            while not stop.is_set():
                with taking:
                    item = next(queue, None)
                if item is None:
                    return
                made.append(work(item))
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(len(workers)) as pool:
        try:
            for future in [pool.submit(go_on, work) for work in workers]:
                future.result()
        finally:
            # An interrupt reaches this thread alone.
            stop.set()
    return made


class ShardTask(msgspec.Struct, frozen=True, kw_only=True):
    """A shard to be recoded into a file that has its header and its length, or to be compared with one that is full."""

    shard: ShardPlan
    to: Dialect
    file: Path
    only_compared: bool
    flushes: bool

    def run(self, done: Callable[[int], None]) -> Codes:
        """What was counted in it. `done` is told of bytes."""
        _prove(self.to)
        with (
            OpenFile(self.shard.source) as source,
            NewFile(self.file, only_compared=self.only_compared, flushes=self.flushes) as target,
        ):
            converter = _Converter(self.to, source, target, self.shard.shift, done)
            return sum(map(converter.pass_window, windows(self.shard.steps)), Codes())

    def run_apart(self, done: Callable[[int], None]) -> Codes:
        """The same in a process of its own: numpy's short calls let go of the interpreter's lock so often that threads
        mostly wait for it."""
        command = [sys.executable, "-P", "-m", "crosstie_port.checkpoint.shard"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin
            assert process.stdout
            try:
                process.stdin.write(pickle.dumps(self))
                process.stdin.close()
                while isinstance(told := pickle.load(process.stdout), int):
                    done(told)
            except (EOFError, BrokenPipeError):
                ended = f"a converting process ended with status {process.wait()}"
                raise BadInput(f"{ended}; run it again, and it goes on") from None
        if isinstance(told, OSError):
            raise told
        if not isinstance(told, Codes):
            raise BadData(*told)
        return told


def _serve() -> None:
    """One task from standard input; counts of bytes, and at last what came of it, to standard output."""
    # Ctrl-C ends it without a word: its parent tells what there is to say.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    task: ShardTask = pickle.load(sys.stdin.buffer)

    def tell(what: int | Codes | tuple[str, str, str] | OSError) -> None:
        sys.stdout.buffer.write(pickle.dumps(what))
        sys.stdout.buffer.flush()

    try:
        tell(task.run(tell))
    except BadData as error:
        tell((error.file, error.key, error.reason))
    except OSError as error:
        tell(error)


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


class _Converter:
    """The buffers of one process."""

    def __init__(self, to: Dialect, source: OpenFile, target: NewFile, shift: int, done: Callable[[int], None]):
        self._to, self._source, self._target, self._shift, self._done = to, source, target, shift, done
        self._recoder = Recoder(to)
        self._before, self._after = np.empty(WINDOW_BYTES, np.uint8), np.empty(WINDOW_BYTES, np.uint8)

    def pass_window(self, steps: list[ByteRange]) -> Codes:
        start, count = steps[0].start, steps[-1].stop - steps[0].start
        before, after = self._source.get(start, self._before[:count]), self._after[:count]
        codes = Codes()
        for step in steps:
            part = slice(step.start - start, step.stop - start)
            if step.change == "codes":
                codes += self._recode(step, before[part], after[part])
            elif step.change == "scale":
                after[part] = self._rescale(step, before[part])
            else:
                after[part] = before[part]
        self._target.put(after, start + self._shift, steps[0].name, back=before)
        self._done(count)
        return codes

    def _recode(self, step: ByteRange, before: Bytes, after: Bytes) -> Codes:
        codes = self._recoder.recode(before, after)
        lost = codes.lost(self._to)
        if lost:
            raise BadData(self._source.file, step.name, f"{lost:,} weights {_why_lost(codes, self._to)}")
        return codes

    def _rescale(self, step: ByteRange, before: Bytes) -> Bytes:
        try:
            return rescale(before, step.dtype, SCALE_FACTOR[self._to])
        except Inexact as error:
            raise BadData(self._source.file, step.name, str(error)) from None


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


if __name__ == "__main__":
    _serve()
