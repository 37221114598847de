"""Where a store is, as people write it: a SQLite file, postgresql://..., with ${VARIABLE} for what is secret."""

from pathlib import Path

from crosstie.core.errors import BadInput
from crosstie.core.usage import Used
from crosstie.wire.variables import filled
from crosstie_gateway.ledger.sqlite import SqliteStore
from crosstie_gateway.ledger.store import Store

_POSTGRES = ("postgresql://", "postgres://")


def open_store(place: str, *, create: bool = False) -> Store:
    """`create`: a SQLite file that is not there yet is made; tables are, in any case."""
    place = filled(place)
    if place.startswith(_POSTGRES):
        from crosstie_gateway.ledger.postgres import PostgresStore

        return PostgresStore(place)
    name = place.removeprefix("sqlite://")
    if "://" in name or not name.strip():
        # Not repeated: it may hold a password.
        raise BadInput("store: is neither a file's name nor postgresql://...")
    file = Path(name).expanduser()
    if not create and not file.exists():
        raise BadInput(f"{file}: there is no store; `crosstie keys create` makes one, and so does `crosstie serve`")
    return SqliteStore(file, create=create)


def usage_by_hour(place: str, since: int | None) -> list[Used]:
    """What was used from an hour on, for `crosstie review`, which finds this by its entry point."""
    store = open_store(place)
    try:
        return store.used(["hour"], since=since)
    finally:
        store.close()
