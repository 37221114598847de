"""Options and words that `keys` and `usage` share: which store."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from crosstie.cli.options import FILE, option_group
from crosstie.core.errors import BadInput
from crosstie_gateway.ledger.keys import Key
from crosstie_gateway.ledger.places import open_store
from crosstie_gateway.ledger.store import Store, unknown_key

if TYPE_CHECKING:
    from crosstie.core.fleet import Fleet

VARIABLE = "CROSSTIE_STORE"

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
        place = _read(fleet).state.store
        if place is None:
            raise BadInput(f"{fleet}: state.store: missing: where keys and usage are kept")
        return place
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
    served = [part for pool in read.pools for part in pool.by_model()]
    models = {name for part in served for name in (part.model, part.served_as) if name}
    return models, {each.name for each in read.classes}


def _read(fleet: Path) -> "Fleet":
    # A catalog takes a moment, and only these need one.
    from crosstie.catalog.fleets import read_fleet
    from crosstie.catalog.library import Catalog

    return read_fleet(Catalog(), fleet)
