"""Where a store is, as people write it: a SQLite file, postgresql://..., with ${VARIABLE} for what is secret."""

from pathlib import Path

from crosstie.core.errors import BadInput
from crosstie.run.ledger.sqlite import SqliteStore
from crosstie.run.ledger.store import Store
from crosstie.wire.variables import filled

_POSTGRES = ("postgresql://", "postgres://")


def open_store(place: str, *, create: bool = False) -> Store:
    """`create`: a SQLite file that is not there yet is made; tables are, in any case."""
    place = filled(place)
    if place.startswith(_POSTGRES):
        from crosstie.run.ledger.postgres import PostgresStore

        return PostgresStore(place)
    name = place.removeprefix("sqlite://")
    if "://" in name or not name.strip():
        # Not repeated: it may hold a password.
        raise BadInput("store: is neither a file's name nor postgresql://...")
    file = Path(name).expanduser()
    if not create and not file.exists():
        raise BadInput(f"{file}: there is no store; `crosstie keys create` makes one, and so does `crosstie serve`")
    return SqliteStore(file, create=create)
