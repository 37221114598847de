"""A trace that several processes append to: whole lines or none, rotated by size, put in order when it is complete.

`FILE.salt` beside it, for its owner only, has the key of its hashes, so restarts and workers number prompts alike. It
is also the writers' lock.
"""

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from errno import EINVAL, ENOSPC, EPERM
from pathlib import Path
from time import time

import msgspec

from crosstie.core.errors import BadInput

_FIRST_KEY = b'{"timestamp":'
_TAIL = 64 * 1024
KEY_BYTES = 32


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int


class _Begun(msgspec.Struct):
    """The first line of the key's file."""

    salt: str
    # Seconds since the epoch, from which the trace counts its milliseconds.
    began: float


class _Measure(msgspec.Struct):
    """Each further line of it: how long a model's blocks are."""

    model: str
    bytes_per_token: float


class TraceFile:
    def __init__(self, path: Path, most_bytes: int, keep: int):
        self.path, self.most_bytes, self.keep = path, most_bytes, keep
        self.salt_path = path.with_name(path.name + ".salt")
        self.key = b""
        self.began = 0.0
        self.measures: dict[str, float] = {}
        self._lock: int | None = None

    def check(self) -> None:
        """Refuses what is there and is no trace, before anything is written to it."""
        with contextlib.suppress(OSError):
            if not stat.S_ISREG(self.path.stat().st_mode):
                raise BadInput(f"--record {self.path}: is no file")
            with self.path.open("rb") as file:
                first = file.readline(_TAIL * 16)
            # Half a line, of a crash, begins like a whole one; of a power cut zeros may be left.
            begun = first.rstrip(b"\0")
            torn = not first.endswith(b"\n") and begun[: len(_FIRST_KEY)] == _FIRST_KEY[: len(begun)]
            if not torn and not _is_line(first):
                raise BadInput(f"--record {self.path}: its first line is not of a trace, so nothing is added to it")

    def ready(self) -> None:
        """The key is there from now on; raises OSError."""
        if not self.key:
            with self._locked():
                pass

    def append(self, lines: bytes) -> None:
        """All of these lines or none of them; raises OSError."""
        with self._locked():
            size = self._size_of_whole_lines()
            if size and size + len(lines) > self.most_bytes:
                self._rotate(self.keep)
                size = 0
            with self._opened() as file:
                try:
                    _write(file, lines)
                except OSError:
                    os.ftruncate(file, size)
                    raise

    def measure(self, model: str, ratio: float) -> float:
        """A model's bytes per token: the first value of any process is kept."""
        with self._locked() as lock:
            self._read_salt(lock)
            if model not in self.measures:
                _write(lock, msgspec.json.encode(_Measure(model, ratio)) + b"\n")
                self.measures[model] = ratio
        return self.measures[model]

    def close(self) -> None:
        """Puts it in order of arrival; lines came in order of end."""
        try:
            if self._lock is not None and self.path.exists():
                with self._locked():
                    _sort(self.path)
        finally:
            self.release()

    def release(self) -> None:
        """Closes the key; the next use opens the one that is there then."""
        if self._lock is not None:
            os.close(self._lock)
        self._lock = None
        self.key, self.measures = b"", {}

    # The lock, and the key with it

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        if self._lock is None:
            self._lock = self._open_salt()
        lock = self._lock
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            if not self.key:
                self._read_salt(lock)
            yield lock
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)

    def _open_salt(self) -> int:
        """Opens a key of our own that nobody else can read; a key that others know hides nothing."""
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        file = os.open(self.salt_path, flags, 0o600)
        if os.fstat(file).st_uid != os.geteuid():
            os.close(file)
            raise OSError(EPERM, f"{self.salt_path} belongs to another user")
        os.fchmod(file, 0o600)
        return file

    def _read_salt(self, lock: int) -> None:
        text = os.pread(lock, os.fstat(lock).st_size, 0)
        lines = text.split(b"\n")
        if len(lines) < 2 and (not text or text.startswith(b'{"salt":')):
            # A new one, or one that was cut short before anybody used it.
            os.ftruncate(lock, 0)
            if self.path.exists() and self.path.stat().st_size:
                # Of an earlier recording, with another key and another beginning; it is kept in any case.
                self._rotate(max(self.keep, 1))
            begun = _Begun(os.urandom(KEY_BYTES).hex(), time())
            _write(lock, msgspec.json.encode(begun) + b"\n")
        else:
            try:
                begun = msgspec.json.decode(lines[0], type=_Begun)
                measures = [msgspec.json.decode(line, type=_Measure) for line in lines[1:-1]]
                key = bytes.fromhex(begun.salt)
            except ValueError:
                raise OSError(EINVAL, f"{self.salt_path} is no key of a recording") from None
            if len(key) != KEY_BYTES:
                raise OSError(EINVAL, f"{self.salt_path} has a key of {len(key)} bytes, not {KEY_BYTES}")
            if lines[-1]:
                # A process was killed while it wrote.
                os.ftruncate(lock, len(text) - len(lines[-1]))
            self.measures = {measure.model: measure.bytes_per_token for measure in measures}
        self.key, self.began = bytes.fromhex(begun.salt), begun.began

    # The trace itself, while the lock is held

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Opens the file at that path; the last one may have been moved or deleted."""
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise OSError(EINVAL, f"{self.path} is no file")
            yield file
        finally:
            os.close(file)

    def _size_of_whole_lines(self) -> int:
        """A torn last line is cut off."""
        with self._opened() as file:
            size = os.fstat(file).st_size
            while size and os.pread(file, 1, size - 1) != b"\n":
                start = max(size - _TAIL, 0)
                size = start + os.pread(file, size - start, start).rfind(b"\n") + 1
                os.ftruncate(file, size)
        return size

    def _rotate(self, keep: int) -> None:
        if not keep:
            self.path.unlink()
            return
        for number in range(keep, 1, -1):
            older = self._numbered(number - 1)
            if older.exists():
                os.replace(older, self._numbered(number))
        os.replace(self.path, self._numbered(1))
        _sort(self._numbered(1))

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


def _write(file: int, text: bytes) -> None:
    if os.write(file, text) != len(text):
        raise OSError(ENOSPC, os.strerror(ENOSPC))


def _is_line(text: bytes) -> bool:
    try:
        msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


def _sort(path: Path) -> None:
    """Sorts it by arrival. Where that fails, as on a full disk, it stays as it is."""
    part = path.with_name(path.name + ".sorting")
    try:
        lines = path.read_bytes().splitlines(keepends=True)
        ordered = sorted(lines, key=_arrival_ms)
        if ordered != lines:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o640), "wb") as file:
                file.write(b"".join(ordered))
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)
    except (OSError, ValueError):
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def _arrival_ms(line: bytes) -> int:
    if not line.startswith(_FIRST_KEY):
        raise ValueError("not as it is written here")
    return int(line[len(_FIRST_KEY) : line.index(b",")])
