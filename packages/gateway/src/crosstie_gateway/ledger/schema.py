"""The tables of a store, made where there are none, and their format: a store of another one is refused."""

import secrets
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

SCHEMA = 5
_TABLES = (files("crosstie_gateway.ledger") / "data" / "tables.sql").read_text()


class Transaction:
    """One transaction on a connection of sqlite3's or psycopg's; `mark` is what that one puts in a value's place."""

    def __init__(self, connection: Any, mark: str = "?"):
        self._connection, self._mark = connection, mark

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = self._connection.execute(sql.replace("?", self._mark), values).fetchall()
        return rows

    def change(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Returns how many rows changed."""
        return int(self._connection.execute(sql.replace("?", self._mark), values).rowcount)

    def each(self, sql: str, values: Sequence[Sequence[Any]]) -> None:
        self._connection.cursor().executemany(sql.replace("?", self._mark), values)


def meta(session: Transaction) -> dict[str, int]:
    """What a store says of itself: its format, its own number and the version of its keys."""
    return dict(session.rows("SELECT name, value FROM crosstie_meta"))


def new_number() -> int:
    """A random number, so that a renewed or restored store does not look like the one that a gateway knew."""
    return secrets.randbits(53)


def create(session: Transaction, identity: str) -> None:
    """Tables of the present format. `identity`: how a column says that it numbers its rows."""
    for sql in _TABLES.format(identity=identity).split(";\n")[:-1]:
        session.change(sql)
    numbers = [("schema", SCHEMA), ("keys", new_number()), ("store", new_number())]
    session.each("INSERT INTO crosstie_meta VALUES (?, ?)", numbers)
