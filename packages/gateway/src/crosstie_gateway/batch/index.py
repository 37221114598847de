"""Which files and batches there are: a SQLite file that all processes over a folder share.

Each change is one transaction, so that quotas, input files and batches agree. Calls may wait for the disk.
"""

import sqlite3
from collections.abc import Iterable
from time import time
from typing import Any, NamedTuple

import msgspec

from crosstie_gateway.batch.database import Database

# Statuses after which nothing changes any more.
ENDED = frozenset(("completed", "failed", "expired", "cancelled"))


class StoredFile(msgspec.Struct, kw_only=True):
    id: str
    # Its owner; 0: of a gateway without keys.
    key_id: int
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def shown(self, keep_s: float) -> dict[str, Any]:
        kept = {name: value for name, value in msgspec.structs.asdict(self).items() if name != "key_id"}
        return {**kept, "object": "file", "status": "processed", "expires_at": self.created_at + int(keep_s)}


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
    # Of the answers so far.
    answer_bytes: int = 0
    errors: list[dict[str, Any]] = []

    def become(self, status: str) -> None:
        self.status = status
        self.times[f"{status}_at"] = int(time())

    @property
    def ended_at(self) -> int:
        """0: it has not."""
        return self.times[f"{self.status}_at"] if self.status in ENDED else 0

    def fail(self, code: str, message: str) -> None:
        """Ends the whole batch for this reason, unless it has one."""
        self.errors = self.errors or [{"code": code, "message": message, "line": None, "param": None}]

    def shown(self) -> dict[str, Any]:
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


_FILE = "id, key_id, created_at, bytes, filename, purpose"
# The first batches of each key, first ones of all keys before second ones; batches that only have to end do not wait.
_TURNS = """
SELECT id, cancelled FROM (
  SELECT id, cancelled, expires_at, row_number() OVER (PARTITION BY key_id ORDER BY created_at, id) AS place
  FROM batches WHERE ended_at = 0)
WHERE place <= ? OR cancelled OR expires_at <= ? ORDER BY place LIMIT ?
"""
_MOST_DELETED = 500
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Batch).decode


class Quota(NamedTuple):
    """What one key may have."""

    files: int
    bytes: int
    batches: int


class QuotaExceeded(Exception):
    """Says which, and nothing of anybody else's."""


class NoRoom(Exception):
    """All keys together have as much as there may be."""


class Index(Database):
    what = "the index of batches"
    schema = "index.sql"

    # Files

    def add_file(self, file: StoredFile, quota: Quota, most_bytes: int) -> None:
        """Raises QuotaExceeded and NoRoom."""
        with self.session() as connection:
            _check_files(connection, file.key_id, quota, file.bytes)
            if _sum(connection, "") + file.bytes > most_bytes:
                raise NoRoom
            _insert_file(connection, file)

    def file(self, key_id: int, name: str) -> StoredFile | None:
        rows = self.rows(f"SELECT {_FILE} FROM files WHERE id = ? AND key_id = ?", name, key_id)
        return _file(rows[0]) if rows else None

    def files(self, key_id: int, after: str, limit: int) -> list[StoredFile]:
        """The latest first."""
        return [_file(row) for row in self._page("files", _FILE, key_id, after, limit)]

    def delete_file(self, key_id: int, name: str) -> bool:
        """False where a batch that has not ended needs it."""
        with self.session() as connection:
            used = "SELECT 1 FROM batches WHERE input_file_id = ? AND ended_at = 0"
            if connection.execute(used, (name,)).fetchone() is not None:
                return False
            connection.execute("DELETE FROM files WHERE id = ? AND key_id = ?", (name, key_id))
        return True

    def take_old(self, before: int) -> list[str]:
        """Forgets files and ended batches from before then, some at a time; returns the files' ids."""
        with self.session() as connection:
            old = (
                "SELECT id FROM files WHERE created_at < ? AND id NOT IN"
                " (SELECT input_file_id FROM batches WHERE ended_at = 0) LIMIT ?"
            )
            names = [name for (name,) in connection.execute(old, (before, _MOST_DELETED))]
            connection.executemany("DELETE FROM files WHERE id = ?", [(name,) for name in names])
            old = "SELECT id FROM batches WHERE ended_at > 0 AND ended_at < ? LIMIT ?"
            connection.execute(f"DELETE FROM batches WHERE id IN ({old})", (before, _MOST_DELETED))
        return names

    def known(self) -> tuple[set[str], set[str]]:
        """The ids of all files, and of the batches that have not ended."""
        with self.session("BEGIN") as connection:
            files = {name for (name,) in connection.execute("SELECT id FROM files")}
            return files, {name for (name,) in connection.execute("SELECT id FROM batches WHERE ended_at = 0")}

    # Batches

    def add_batch(self, batch: Batch, quota: Quota) -> bool:
        """False where its key has no such input file. Raises QuotaExceeded."""
        with self.session() as connection:
            asked = (batch.input_file_id, batch.key_id)
            if connection.execute("SELECT 1 FROM files WHERE id = ? AND key_id = ?", asked).fetchone() is None:
                return False
            count = "SELECT count(*) FROM batches WHERE key_id = ? AND ended_at = 0"
            (running,) = connection.execute(count, (batch.key_id,)).fetchone()
            if running >= quota.batches:
                said = f"{running:,} batches of yours have not ended, and {quota.batches:,} may be at once"
                raise QuotaExceeded(f"{said} (serve.max_batches_per_key)")
            _check_files(connection, batch.key_id, quota, 0)
            row = (batch.id, batch.key_id, batch.created_at, batch.expires_at, batch.input_file_id, _encode(batch))
            connection.execute(
                "INSERT INTO batches (id, key_id, created_at, expires_at, input_file_id, record)"
                " VALUES (?, ?, ?, ?, ?, ?)",
                row,
            )
        return True

    def save(self, batches: Iterable[Batch], adopted: Iterable[StoredFile] = ()) -> None:
        """Writes batches as they are now, and the files that they have become."""
        with self.session() as connection:
            for file in adopted:
                _insert_file(connection, file)
            connection.executemany(
                "UPDATE batches SET ended_at = ?, answer_bytes = ?, record = ? WHERE id = ?",
                [
                    (made.ended_at, 0 if made.ended_at else made.answer_bytes, _encode(made), made.id)
                    for made in batches
                ],
            )

    def batch(self, key_id: int, name: str) -> Batch | None:
        """None where that key has no such batch."""
        rows = self.rows("SELECT cancelled, record FROM batches WHERE id = ? AND key_id = ?", name, key_id)
        return _batch(*rows[0]) if rows else None

    def record(self, name: str) -> Batch | None:
        """As it was saved, of any key."""
        rows = self.rows("SELECT 0, record FROM batches WHERE id = ?", name)
        return _batch(*rows[0]) if rows else None

    def batches(self, key_id: int, after: str, limit: int) -> list[Batch]:
        return [_batch(*row) for row in self._page("batches", "cancelled, record", key_id, after, limit)]

    def cancel(self, key_id: int, name: str) -> None:
        """Asks the runner to stop it, in a column of its own, since the runner alone writes the record."""
        with self.session() as connection:
            wish = "UPDATE batches SET cancelled = 1 WHERE id = ? AND key_id = ? AND ended_at = 0"
            connection.execute(wish, (name, key_id))

    def turns(self, now: float, of_one: int, of_all: int) -> list[tuple[str, bool]]:
        """The batches that should be run now, and whether somebody wants them to stop."""
        return [(name, bool(cancelled)) for name, cancelled in self.rows(_TURNS, of_one, now, of_all)]

    def _page(self, table: str, columns: str, key_id: int, after: str, limit: int) -> list[Any]:
        with self.session("BEGIN") as connection:
            where, values = "key_id = ?", list[int | str]((key_id,))
            if after:
                at = f"SELECT created_at FROM {table} WHERE id = ? AND key_id = ?"
                place = connection.execute(at, (after, key_id)).fetchone()
                if place is None:
                    return []
                where += " AND (created_at < ? OR created_at = ? AND id > ?)"
                values += [place[0], place[0], after]
            query = f"SELECT {columns} FROM {table} WHERE {where} ORDER BY created_at DESC, id LIMIT ?"
            return connection.execute(query, (*values, limit)).fetchall()


def _check_files(connection: sqlite3.Connection, key_id: int, quota: Quota, more: int) -> None:
    """Raises QuotaExceeded where a key may not have a file of so many bytes more; 0: no file is added."""
    count = "SELECT count(*) FROM files WHERE key_id = ?"
    (number,) = connection.execute(count, (key_id,)).fetchone()
    if more and number >= quota.files:
        said = f"you have {number:,} files, and may have {quota.files:,} (serve.max_files_per_key)"
        raise QuotaExceeded(f"{said}: delete some")
    used = _sum(connection, "WHERE key_id = ?", key_id)
    if used + more > quota.bytes:
        said = f"your files take {used:,} bytes, and may take {quota.bytes:,} (serve.max_file_gib_per_key)"
        raise QuotaExceeded(f"{said}: delete some, or send less")


def _sum(connection: sqlite3.Connection, where: str, *values: int) -> int:
    (files,) = connection.execute(f"SELECT coalesce(sum(bytes), 0) FROM files {where}", values).fetchone()
    more = f"{where or 'WHERE true'} AND ended_at = 0"
    (answers,) = connection.execute(f"SELECT coalesce(sum(answer_bytes), 0) FROM batches {more}", values).fetchone()
    return int(files + answers)


def _insert_file(connection: sqlite3.Connection, file: StoredFile) -> None:
    row = (file.id, file.key_id, file.created_at, file.bytes, file.filename, file.purpose)
    connection.execute(f"INSERT OR REPLACE INTO files ({_FILE}) VALUES (?, ?, ?, ?, ?, ?)", row)


def _file(row: tuple[Any, ...]) -> StoredFile:
    return StoredFile(**dict(zip(_FILE.split(", "), row, strict=True)))


def _batch(cancelled: int, record: bytes) -> Batch:
    batch = _decode(record)
    if cancelled and batch.status not in ENDED and batch.status != "finalizing":
        batch.status = "cancelling"
    return batch
