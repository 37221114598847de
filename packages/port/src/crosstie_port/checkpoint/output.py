"""The folder that a conversion fills: one writer at a time, finished shards remembered, a model only at the very end.

The journal lists finished shards and goes away last; config.json comes last before that. A shard grows under another
name and is moved to its own when all of it has been compared.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from crosstie.core.errors import BadInput
from crosstie.port.checkpoint.fp8 import Codes
from crosstie_port.checkpoint.conversion import Conversion
from crosstie_port.checkpoint.matrix import RoundingLoss
from crosstie_port.checkpoint.shard import ShardPlan, identity_of

JOURNAL = ".crosstie-convert.json"
_LOCK = ".crosstie-convert.lock"
PART = ".part"
_SKIPPED_FOLDERS = {".git", ".cache", ".huggingface"}
# A model that was converted itself may have these left; they would take the place of those in use here.
_SKIPPED_FILES = {JOURNAL, _LOCK, JOURNAL + PART}
# Weights in other formats: copied, they would be the model in the other dialect beside the converted one.
_OTHER_WEIGHTS = re.compile(
    r"\.(safetensors|safetensors\.index\.json|gguf|pth|ckpt|h5|msgpack|onnx)$|^.*model.*\.(bin|pt)$"
)
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """A shard that is there whole: its size and time when it was finished, and what was counted in it."""

    identity: tuple[int, int]
    codes: Codes
    # Of weights whose values are not what they were.
    costs: dict[str, RoundingLoss] = {}
    # The run of the machine in which it was written; "" if it was flushed to the disk, where it outlives a restart.
    boot: str


class Journal(msgspec.Struct, kw_only=True):
    # Of the source and of everything that decides the result.
    conversion: str
    finished: dict[str, Finished]


class OutputFolder:
    def __init__(self, folder: Path, conversion: Conversion, *, flush: bool):
        self.folder, self._conversion, self._flush = folder, conversion, flush
        self._journal = Journal(conversion=_fingerprint(conversion), finished={})
        self._made, self._sealing = False, threading.Lock()
        # Whether an earlier run has done all of it, as far as headers and configs show.
        self.was_complete = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Holds the folder; whoever else wants it is told so."""
        _check_apart(self._conversion.checkpoint.folder, self.folder)
        if self.folder.exists() and not self.folder.is_dir():
            raise BadInput(f"{self.folder}: not a folder")
        self._made = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise BadInput(f"{self.folder}: another conversion is writing to it") from None
            if not (self.folder / _LOCK).exists() or not os.path.samestat(os.fstat(lock), (self.folder / _LOCK).stat()):
                raise BadInput(f"{self.folder}: another conversion has just ended there")
            self._go_on()
            yield
        finally:
            os.close(lock)

    def part(self, shard: ShardPlan) -> Path:
        return self.folder / (shard.name + PART)

    def final(self, shard: ShardPlan) -> Path:
        return self.folder / shard.name

    def finished(self, shard: ShardPlan) -> Finished | None:
        """What the journal says of a shard, if the file is still what it was, and there beyond doubt."""
        found, file = self._journal.finished.get(shard.name), self.final(shard)
        # What was not flushed may be hollow after a restart of the machine.
        if found is None or found.boot not in ("", _boot()) or not file.is_file():
            return None
        return found if identity_of(file) == found.identity and found.identity[0] == shard.size else None

    @property
    def has_finished(self) -> bool:
        return bool(self._journal.finished)

    def make_room(self, shard: ShardPlan) -> None:
        """What an earlier run has left of a shard that is made anew."""
        self.part(shard).unlink(missing_ok=True)
        self.final(shard).unlink(missing_ok=True)

    def seal(self, shard: ShardPlan, codes: Codes, costs: Mapping[str, RoundingLoss] | None = None) -> None:
        file = self.final(shard)
        os.replace(self.part(shard), file)
        boot = "" if self._flush else _boot()
        finished = Finished(identity=identity_of(file), codes=codes, costs=dict(costs or {}), boot=boot)
        with self._sealing:
            self._journal.finished[shard.name] = finished
            self._write(JOURNAL, msgspec.json.encode(self._journal))

    def complete(self) -> list[str]:
        """All that is not weights, the index and the configs last; what was left out is returned."""
        source = self._conversion.checkpoint.folder
        index = self._conversion.checkpoint.index
        copied, left_out = _other_files(source, {*self._conversion.configs, *self._conversion.dropped})
        for path in copied:
            target = self.folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            self._write(str(path), source / path)
        if index is not None and index.name not in self._conversion.configs:
            self._write(index.name, index)
        for name, text in self._conversion.configs.items():
            self._write(name, text.encode())
        # The journal is the last to go: as long as it is there, a rerun goes on.
        for name in (_LOCK, JOURNAL):
            (self.folder / name).unlink(missing_ok=True)
        if self._flush:
            flush(self.folder)
        listed = {shard.name for shard in self._conversion.shards} | ({index.name} if index else set())
        return [str(path) for path in left_out if str(path) not in listed]

    def discard(self) -> None:
        """Nothing is left of a conversion that cannot be finished."""
        for shard in self._conversion.shards:
            self.make_room(shard)
        for name in (JOURNAL + PART, _LOCK, JOURNAL):
            (self.folder / name).unlink(missing_ok=True)
        if self._made:
            self.folder.rmdir()

    def _go_on(self) -> None:
        """An empty folder, or one that the same conversion has begun to fill."""
        journal = self.folder / JOURNAL
        if journal.is_file():
            try:
                found = msgspec.json.decode(journal.read_bytes(), type=Journal)
            except (msgspec.DecodeError, UnicodeDecodeError):
                raise BadInput(f"{journal}: damaged; delete {self.folder} and start again") from None
            if found.conversion != self._journal.conversion:
                raise BadInput(
                    f"{self.folder}: holds an unfinished conversion of another model or of other options, or the model "
                    "has changed since; delete it to start again"
                )
            self._journal.finished = found.finished
            return
        if {path.name for path in self.folder.iterdir()} - {_LOCK, JOURNAL + PART}:
            (self.folder / _LOCK).unlink()
            if self._is_complete():
                self.was_complete = True
                return
            raise BadInput(f"{self.folder}: not empty, and no conversion that could be gone on with")
        self._write(JOURNAL, msgspec.json.encode(self._journal))

    def _is_complete(self) -> bool:
        """What this conversion would put there is there: the configs, which come last, and every shard's header."""
        for name, text in self._conversion.configs.items():
            if _first_bytes(self.folder / name, len(text.encode()) + 1) != text.encode():
                return False
        return all(
            _first_bytes(self.final(shard), len(shard.head)) == shard.head
            and self.final(shard).stat().st_size == shard.size
            for shard in self._conversion.shards
        )

    def _write(self, name: str, content: bytes | Path) -> None:
        """A small file, whole or not at all."""
        draft = self.folder / (name + PART)
        draft.unlink(missing_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, draft)
        else:
            draft.write_bytes(content)
        if self._flush:
            flush(draft)
        os.replace(draft, self.folder / name)


def _first_bytes(file: Path, count: int) -> bytes:
    try:
        with file.open("rb") as opened:
            return opened.read(count)
    except OSError:
        return b""


def flush(file: Path) -> None:
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fingerprint(conversion: Conversion) -> str:
    shards = [[shard.name, *shard.identity, hashlib.sha256(shard.head).hexdigest()] for shard in conversion.shards]
    said: Mapping[str, Any] = {"to": conversion.to, "rescaled": sorted(conversion.rescaled), "shards": shards}
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def _boot() -> str:
    """Changes when the machine restarts; where nothing says so, no two runs of it are the same."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return f"process {os.getpid()} at {time.time_ns()}"


def _check_apart(source: Path, out: Path) -> None:
    inner, outer = out.resolve(), source.resolve()
    if inner == outer or outer in inner.parents:
        raise BadInput(f"{out}: lies in the model's own folder, which is never written to")
    if inner in outer.parents:
        raise BadInput(f"{out}: the model's folder lies in it; choose a folder of its own")


def _other_files(source: Path, rewritten: set[str]) -> tuple[list[Path], list[Path]]:
    """What is copied as it is, and what is not because it holds weights or leads elsewhere; relative paths."""
    copied, left_out = [], []
    for at, folders, files in os.walk(source):
        folders[:] = sorted(set(folders) - _SKIPPED_FOLDERS)
        here = Path(at).relative_to(source)
        left_out += [here / name for name in folders if (Path(at) / name).is_symlink()]
        for name in sorted(set(files) - _SKIPPED_FILES):
            if not (Path(at) / name).is_file() or _OTHER_WEIGHTS.search(name):
                left_out.append(here / name)
            elif str(here / name) not in rewritten:
                copied.append(here / name)
    return copied, left_out
