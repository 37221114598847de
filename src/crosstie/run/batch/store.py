"""Files and batches on disk: plain files in one folder, each change of a record replaced at once.

Whatever dies, nothing is half-written: content first, then its record. What a running batch has answered so far lies
beside it, a line a request, so that whoever goes on with it knows what is left.
"""

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from time import time
from typing import Any

import msgspec

from crosstie.catalog.writing import in_words
from crosstie.core.errors import BadInput

_ID = re.compile(r"(?:file|batch)-[0-9a-f]{24}")
# Statuses after which nothing changes any more.
ENDED = frozenset(("completed", "failed", "expired", "cancelled"))


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    # Whose it is; 0: of a gateway without keys.
    key_id: int
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def shown(self) -> dict[str, Any]:
        kept = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "key_id"}
        return {**kept, "object": "file", "status": "processed"}


class Batch(msgspec.Struct, kw_only=True):
    id: str
    key_id: int
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    # Of the fleet's classes, for what an answer's length is like; empty: as the gateway finds it.
    class_name: str = ""
    status: str = "validating"
    # What it will be when its files are in their place.
    outcome: str = ""
    # When it came to be in one of the other statuses.
    times: dict[str, int] = {}
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    errors: list[dict[str, Any]] = []

    def become(self, status: str) -> None:
        self.status = status
        self.times[f"{status}_at"] = int(time())

    def shown(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id, "object": "batch", "endpoint": self.endpoint, "status": self.status,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id, "completion_window": self.completion_window,
            "output_file_id": self.output_file_id, "error_file_id": self.error_file_id,
            "created_at": self.created_at, "expires_at": self.expires_at, "metadata": self.metadata,
            **{f"{name}_at": self.times.get(f"{name}_at") for name in names},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
        }  # fmt: skip


_encode = msgspec.json.Encoder().encode


class BatchStore:
    """`most_bytes`: of all files together, after which no more are taken."""

    def __init__(self, folder: Path, most_bytes: int):
        self.folder, self.most_bytes = folder, most_bytes
        with in_words(f"--batches {folder}"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            (folder / ".writable").write_bytes(b"")

    # Files

    def add(self, key_id: int, filename: str, purpose: str, content: bytes) -> StoredFile:
        """Raises BadInput where there is no more room."""
        used = sum(path.stat().st_size for path in self.folder.iterdir() if path.is_file())
        if used + len(content) > self.most_bytes:
            raise BadInput(f"files here may take {self.most_bytes} bytes in all, and {used} are taken: delete some")
        made = f"file-{secrets.token_hex(12)}"
        self._write(self.content_of(made), content)
        return self._record(made, key_id, filename, purpose)

    def adopt(self, batch: Batch, kind: str) -> str | None:
        """What a batch has answered becomes a file of its owner's; None where there is nothing. Done twice, it is the
        same file."""
        made = f"file-{batch.id.removeprefix('batch-')[:-1]}{'0' if kind == 'output' else '1'}"
        beside = self.answers_of(batch, kind)
        if beside.exists():
            os.replace(beside, self.content_of(made))
        elif not self.content_of(made).exists():
            return None
        return self._record(made, batch.key_id, f"{batch.id}_{kind}.jsonl", "batch_output").id

    def _record(self, made: str, key_id: int, filename: str, purpose: str) -> StoredFile:
        size = self.content_of(made).stat().st_size
        found = StoredFile(
            id=made, key_id=key_id, filename=filename, purpose=purpose, bytes=size, created_at=int(time())
        )
        self._write(self.folder / f"{made}.json", _encode(found))
        return found

    def file(self, key_id: int, name: str) -> StoredFile | None:
        """None where there is none of that key's."""
        found = self._read(name, StoredFile) if name.startswith("file-") else None
        return found if found is not None and found.key_id == key_id else None

    def files(self, key_id: int) -> list[StoredFile]:
        """The latest first."""
        found = [one for one in self._all("file-*.json", StoredFile) if one.key_id == key_id]
        return sorted(found, key=lambda one: (-one.created_at, one.id))

    def delete(self, file: StoredFile) -> None:
        # The record first: without it there is no such file.
        (self.folder / f"{file.id}.json").unlink(missing_ok=True)
        self.content_of(file.id).unlink(missing_ok=True)

    def content_of(self, name: str) -> Path:
        return self.folder / f"{name}.content"

    # Batches

    def save(self, batch: Batch) -> None:
        self._write(self.folder / f"{batch.id}.json", _encode(batch))

    def batch(self, key_id: int, name: str) -> Batch | None:
        found = self._read(name, Batch) if name.startswith("batch-") else None
        return found if found is not None and found.key_id == key_id else None

    def batches(self, key_id: int) -> list[Batch]:
        found = [one for one in self._all("batch-*.json", Batch) if one.key_id == key_id]
        return sorted(found, key=lambda one: (-one.created_at, one.id))

    def unfinished(self) -> list[Batch]:
        """In the order in which they came."""
        found = [one for one in self._all("batch-*.json", Batch) if one.status not in ENDED]
        return sorted(found, key=lambda one: (one.created_at, one.id))

    def answers_of(self, batch: Batch, kind: str) -> Path:
        """Where its answers (`output`) and failures (`error`) are written while it runs."""
        return self.folder / f"{batch.id}.{kind}"

    def cancel(self, batch: Batch) -> None:
        """Asks whoever runs it to stop: in a file of its own, since the record is the runner's to write."""
        self._write(self._cancel_mark(batch), b"")

    def is_cancelled(self, batch: Batch) -> bool:
        return self._cancel_mark(batch).exists()

    def _cancel_mark(self, batch: Batch) -> Path:
        return self.folder / f"{batch.id}.cancel"

    def answered(self, batch: Batch) -> tuple[set[str], set[str]]:
        """The requests of a batch that have their answer, and those that have failed; half a line is cut off."""
        found = []
        for kind in ("output", "error"):
            path, ids = self.answers_of(batch, kind), set()
            if path.exists():
                content = path.read_bytes()
                whole = content.rfind(b"\n") + 1
                if whole < len(content):
                    os.truncate(path, whole)
                ids = {msgspec.json.decode(line)["custom_id"] for line in content[:whole].splitlines()}
            found.append(ids)
        return found[0], found[1]

    # The folder

    def _read(self, name: str, kind: "type[Any]") -> Any:
        if _ID.fullmatch(name) is None:
            return None
        try:
            return msgspec.json.decode((self.folder / f"{name}.json").read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError):
            return None

    def _all(self, pattern: str, kind: "type[Any]") -> Iterator[Any]:
        for path in self.folder.glob(pattern):
            found = self._read(path.stem, kind)
            if found is not None:
                yield found

    def _write(self, path: Path, content: bytes) -> None:
        fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with fresh.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
