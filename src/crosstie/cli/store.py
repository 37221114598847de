"""Options and words that `keys` and `usage` share: which store, and when."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import click

from crosstie.cli.options import FILE, option_group
from crosstie.core.errors import BadInput
from crosstie.run.ledger.keys import Key
from crosstie.run.ledger.places import open_store
from crosstie.run.ledger.store import Store, unknown_key

if TYPE_CHECKING:
    from crosstie.core.fleet import Fleet

VARIABLE = "CROSSTIE_STORE"
_SPAN = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)$")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
# A thousand years: beyond it a number is a slip, and the calendar ends.
_LONGEST_S = 1000 * 365.25 * 86_400
_FORMS = "%Y-%m-%d", "%Y-%m-%dT%H", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"


store_options = option_group(
    click.option("--store", metavar="FILE|URL", help=f"A SQLite file, or postgresql://... [default: ${VARIABLE}]"),
    click.option("--fleet", type=FILE, metavar="FLEET.toml", help="The store of this fleet file's [state]."),
)


@contextmanager
def opened(store: str | None, fleet: Path | None, *, create: bool = False) -> Iterator[Store]:
    made = open_store(_place(store, fleet), create=create)
    try:
        yield made
    finally:
        made.close()


def _place(store: str | None, fleet: Path | None) -> str:
    if store is not None and fleet is not None:
        raise BadInput("--store and --fleet both name a store: give one of them")
    if store is not None:
        return store
    if fleet is not None:
        found = _read(fleet).state.store
        if found is None:
            raise BadInput(f"{fleet}: state.store: missing: where keys and usage are kept")
        return found
    said = os.environ.get(VARIABLE, "").strip()
    if not said:
        raise BadInput(f"say which store: --store crosstie.db, --fleet fleet.toml or ${VARIABLE}")
    return said


def named_key(keys: list[Key], name: str) -> Key:
    """By name, or else by public id."""
    for field in ("name", "public_id"):
        for key in keys:
            if getattr(key, field) == name:
                return key
    raise unknown_key(name, [key.name for key in keys])


def names_in(fleet: Path) -> tuple[set[str], set[str]]:
    """What a fleet's models may be called, and its classes."""
    read = _read(fleet)
    served = [one for pool in read.pools for one in pool.by_model()]
    return {name for one in served for name in (one.model, one.served_as) if name}, {one.name for one in read.classes}


def _read(fleet: Path) -> "Fleet":
    # A catalog takes a moment, and only these need one.
    from crosstie.catalog.fleets import read_fleet
    from crosstie.catalog.library import Catalog

    return read_fleet(Catalog(), fleet)


def span(option: str, text: str) -> float:
    """Seconds of 90s, 30m, 1h, 7d, 2w."""
    found = _SPAN.match(text.strip().lower())
    if found is None:
        raise BadInput(f"{option}: '{text}' is no time such as 30m, 1h or 7d")
    seconds = float(found[1]) * _SECONDS[found[2]]
    if seconds > _LONGEST_S:
        raise BadInput(f"{option}: '{text}' is more than a thousand years")
    return seconds


def moment(option: str, text: str, *, after: bool = False) -> float:
    """A day or a time in UTC, as seconds since the epoch. `after`: the end of a day that is meant whole."""
    said = text.strip().removesuffix("Z").removesuffix("+00:00").replace(" ", "T")
    for form in _FORMS:
        try:
            found = datetime.strptime(said, form).replace(tzinfo=UTC)
        except ValueError:
            continue
        # The last day of the calendar has no next.
        whole_day = after and form == _FORMS[0] and found.date() < date.max
        return (found + timedelta(days=1) if whole_day else found).timestamp()
    raise BadInput(f"{option}: '{text}' is no day such as 2026-11-30, nor a time such as 2026-11-30T18:00 (UTC)")


def when(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def stamp(at: float | None) -> str | None:
    """For JSON."""
    return None if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
