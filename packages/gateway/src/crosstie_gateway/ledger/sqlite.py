"""Keys and usage in a SQLite file: for the processes of one machine.

WAL: readers and the writer do not wait for each other. `synchronous=FULL`: commits outlive a power cut, at two syncs a
second in a thread. WAL fails on network disks: several machines take PostgreSQL.
"""

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

from crosstie.core.errors import BadData, StoreFailed
from crosstie_gateway.ledger.schema import Transaction
from crosstie_gateway.ledger.store import Store, failed

_BUSY_S = 10.0
_LOOK_S = 0.02


class SqliteStore(Store):
    identity = "INTEGER PRIMARY KEY AUTOINCREMENT"

    def __init__(self, file: Path, *, create: bool = False):
        self.file = file
        if create:
            _create(file)
        self._connection: sqlite3.Connection | None = None
        self._opened: tuple[int, int] | None = None
        self.prepare()

    def made(self, session: Transaction) -> bool:
        tables = [name for (name,) in session.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if tables and "crosstie_meta" not in tables:
            raise BadData(self.file, "", f"is another program's: it has a table '{tables[0]}' and none of Crosstie's")
        return bool(tables)

    @contextlib.contextmanager
    def session(self, *, writes: bool) -> Iterator[Transaction]:
        try:
            connection = self._connected()
            # At once, not when it first writes: it would then have to fail if somebody else had written since.
            connection.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        except sqlite3.DatabaseError as error:
            self.close()
            if "not a database" in str(error):
                raise BadData(self.file, "", "is no SQLite file") from None
            raise failed(str(self.file), error) from None
        try:
            yield Transaction(connection)
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            # Whatever state it is in; what was not committed is undone.
            self.close()
            raise failed(str(self.file), error) from None
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    def _connected(self) -> sqlite3.Connection:
        try:
            stat = self.file.stat()
        except OSError as error:
            # Its inode may live on under an open connection, and all that is written there would be lost.
            self.close()
            raise StoreFailed(f"{self.file}: cannot be opened: {error.strerror}") from None
        at = (stat.st_dev, stat.st_ino)
        if self._connection is not None and at != self._opened:
            # Replaced, as by a backup that was put back.
            self.close()
        if self._connection is None:
            made = sqlite3.connect(self.file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            self._connection, self._opened = made, at
            _write_ahead(made)
            made.execute("PRAGMA synchronous=FULL")
        return self._connection

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(sqlite3.Error):
                connection.close()


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Changes to WAL, which takes the whole file; SQLite does not wait for others here, so this does."""
    deadline = monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            return
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or monotonic() > deadline:
                raise
        sleep(_LOOK_S)


def _create(file: Path) -> None:
    """An empty file that only its owner may read; SQLite gives the files beside it the same rights."""
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return
    except OSError as error:
        raise BadData(file, "", f"cannot be created: {error.strerror}") from None
