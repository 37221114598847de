"""A store in a file: who may read it, and what may happen to it."""

import os
import sqlite3
import stat
from pathlib import Path

import pytest
from tests.run.ledger.test_store import batch, key, line, one

from crosstie.core.errors import BadData, BadInput, CrosstieError, StoreFailed
from crosstie.core.usage import total
from crosstie.wire.variables import filled
from crosstie_gateway.ledger import sqlite
from crosstie_gateway.ledger.places import open_store
from crosstie_gateway.ledger.sqlite import SqliteStore


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = SqliteStore(tmp_path / "s.db", create=True)
        store.add_key(key())
        found = {file.name: stat.S_IMODE(file.stat().st_mode) for file in tmp_path.iterdir()}
        store.close()
    finally:
        os.umask(before)
    assert set(found) >= {"s.db", "s.db-wal"}
    assert set(found.values()) == {0o600}


def test_what_was_committed_outlives_the_power(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db", create=True)
    with store.session(writes=False) as session:
        assert session.rows("PRAGMA journal_mode") == [("wal",)]
        # 2: FULL.
        assert session.rows("PRAGMA synchronous") == [(2,)]
    store.close()


@pytest.mark.parametrize(
    ("content", "why"), [(b"not a database, but long enough to look at" * 100, "is no SQLite file"), (None, "another")]
)
def test_other_files_are_left_alone(tmp_path: Path, content: bytes | None, why: str) -> None:
    file = tmp_path / "s.db"
    if content is None:
        with sqlite3.connect(file) as connection:
            connection.execute("CREATE TABLE recipes (x)")
        connection.close()
    else:
        file.write_bytes(content)
    before = file.read_bytes()
    with pytest.raises(BadData, match=why):
        SqliteStore(file, create=True)
    assert content is None or file.read_bytes() == before
    with sqlite3.connect(file) as connection:
        if content is None:
            assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("recipes",)]
    connection.close()


def test_places_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "none.db"
    with pytest.raises(BadInput, match="there is no store"):
        open_store(str(missing))
    assert not missing.exists()
    with pytest.raises(BadData, match="cannot be created: No such file"):
        open_store(str(tmp_path / "folder" / "s.db"), create=True)
    with pytest.raises(BadInput, match="neither a file") as told:
        open_store("mysql://me:hunter2@host/db", create=True)
    assert "hunter2" not in str(told.value)
    with pytest.raises(CrosstieError):
        open_store(str(tmp_path), create=True)
    monkeypatch.delenv("WHERE_IS_IT", raising=False)
    with pytest.raises(BadInput, match=r"\$\{WHERE_IS_IT\}: no such variable"):
        open_store("${WHERE_IS_IT}")
    monkeypatch.setenv("WHERE_IS_IT", f"{tmp_path}\n")
    assert filled("${WHERE_IS_IT}/s.db") == f"{tmp_path}/s.db"
    open_store("sqlite://${WHERE_IS_IT}/s.db", create=True).close()
    assert (tmp_path / "s.db").exists()


def test_a_file_that_is_removed_is_missed_and_one_that_is_put_back_is_used(tmp_path: Path) -> None:
    """An open connection would go on writing to what nobody can read any more."""
    file = tmp_path / "s.db"
    store = SqliteStore(file, create=True)
    store.write(batch(1, (line(), one())))
    store.close()
    backup = file.read_bytes()
    store.write(batch(2, (line(), one())))
    for one_file in tmp_path.iterdir():
        one_file.unlink()
    with pytest.raises(StoreFailed, match="No such file"):
        store.write(batch(3, (line(), one())))
    file.write_bytes(backup)
    assert store.write(batch(3, (line(), one())))
    assert total(store.used(["key"])).requests == 2
    # Replaced under an open connection.
    other = tmp_path / "other.db"
    other.write_bytes(backup)
    other.replace(file)
    for beside in ("s.db-wal", "s.db-shm"):
        (tmp_path / beside).unlink(missing_ok=True)
    assert total(store.used(["key"])).requests == 1
    store.close()


def test_one_that_is_made_anew_is_not_taken_for_the_old(tmp_path: Path) -> None:
    """Its first key would be charged with what the first key of the old one has used."""
    file = tmp_path / "s.db"
    store = SqliteStore(file, create=True)
    store.add_key(key())
    version = store.news(-1, 0.0).version
    for one_file in tmp_path.iterdir():
        one_file.unlink()
    other = SqliteStore(file, create=True)
    other.add_key(key("bob"))
    assert other.news(-1, 0.0).version != version
    for asked in (lambda: store.write(batch(1, (line(), one()))), lambda: store.news(version, 0.0)):
        with pytest.raises(StoreFailed, match="another store is in the place"):
            asked()
    assert other.used(["key"]) == []
    other.close()
    store.close()


def test_a_full_disk_fails_one_write_and_loses_nothing(tmp_path: Path) -> None:
    store = SqliteStore(tmp_path / "s.db", create=True)
    store.write(batch(1, (line(), one())))
    connection = store._connected()
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")
    many = batch(2, *((line(pool=f"a pool with a long name {i:09}"), one()) for i in range(2000)))
    with pytest.raises(StoreFailed, match="full"):
        store.write(many)
    assert total(store.used(["key"])).requests == 1
    # It has connected anew, and there is room again.
    assert store.write(many)
    assert total(store.used(["key"])).requests == 2001
    store.close()


def test_one_that_is_locked_is_waited_for_and_then_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "_BUSY_S", 0.05)
    store = SqliteStore(tmp_path / "s.db", create=True)
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreFailed, match="locked"):
        store.write(batch(1, (line(), one())))
    # Readers do not wait for writers.
    assert store.all_keys() == []
    other.execute("ROLLBACK")
    assert store.write(batch(1, (line(), one())))
    other.close()
    store.close()


def test_one_that_somebody_makes_just_now_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it keeps a log of its own, SQLite refuses at once, whatever patience it was given."""
    SqliteStore(tmp_path / "s.db", create=True).close()
    other = sqlite3.connect(tmp_path / "s.db", isolation_level=None)
    other.execute("PRAGMA journal_mode=DELETE")
    other.execute("BEGIN IMMEDIATE")
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        if other.in_transaction:
            other.execute("ROLLBACK")
            other.close()

    monkeypatch.setattr(sqlite, "sleep", wait)
    store = SqliteStore(tmp_path / "s.db")
    assert len(waited) == 1
    with store.session(writes=False) as session:
        assert session.rows("PRAGMA journal_mode") == [("wal",)]
    store.close()
