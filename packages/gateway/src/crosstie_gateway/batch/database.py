"""A SQLite file of one owner that threads and processes share. Each call is one transaction, and may wait for the
disk."""

import contextlib
import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

from crosstie.core.errors import BadInput

_DATA = files("crosstie_gateway.batch") / "data"
_BUSY_S = 10.0


class Database:
    # What it is called where it fails, and the file of its tables.
    what = ""
    schema = ""

    def __init__(self, file: Path):
        self._file, self._lock = file, threading.Lock()
        self._opened: sqlite3.Connection | None = None

    def _connection(self) -> sqlite3.Connection:
        if self._opened is None:
            # SQLite would make it as the umask says; its journal has the mode of the file.
            os.close(os.open(self._file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            opened = sqlite3.connect(self._file, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
            try:
                # The journal stays: making and deleting it takes longer than a change.
                opened.execute("PRAGMA journal_mode = PERSIST")
                opened.executescript((_DATA / self.schema).read_text())
            except sqlite3.DatabaseError as error:
                opened.close()
                if isinstance(error, sqlite3.OperationalError):
                    raise
                raise BadInput(f"{self._file}: {error}") from None
            self._opened = opened
        return self._opened

    @contextlib.contextmanager
    def session(self, begin: str = "BEGIN IMMEDIATE") -> Iterator[sqlite3.Connection]:
        """Raises OSError where the file cannot be read or written."""
        with self._lock:
            try:
                connection = self._connection()
                connection.execute(begin)
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    with contextlib.suppress(sqlite3.Error):
                        connection.execute("ROLLBACK")
                    raise
            except sqlite3.Error as error:
                number = errno.ENOSPC if "full" in str(error) else errno.EIO
                raise OSError(number, f"{self.what}: {error}") from None

    def rows(self, query: str, *values: Any) -> list[Any]:
        with self.session("BEGIN") as connection:
            return connection.execute(query, values).fetchall()

    def close(self) -> None:
        with self._lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None
