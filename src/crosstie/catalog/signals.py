"""Signals to watch: what would change a decision, how it is looked at, and who says so, as rows of a file."""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from crosstie.catalog.reading import cited_tables, read_record, sourced_file, text
from crosstie.core.errors import BadData

Kind = Literal["price", "release", "kernel", "by-hand"]
# What each kind cannot be looked at without.
_NEEDS: dict[str, tuple[str, ...]] = {
    "price": ("accelerators",), "release": ("engine",), "kernel": ("engine", "rule"), "by-hand": (),
}  # fmt: skip


class Signal(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    kind: Kind
    what: str
    # What a plan would become, and how the signal is looked at.
    changes: str
    how: str
    source: str
    date: str
    # Plans that it concerns: those that weigh one of these, or have a pool under this engine; empty: every plan.
    accelerators: tuple[str, ...] = ()
    engine: str = ""
    # A row of preflight.
    rule: str = ""
    # By how much a price must have moved.
    share: Annotated[float, msgspec.Meta(ge=0.001, le=10)] = 0.1


def read_signals(file: Path) -> dict[str, Signal]:
    found: dict[str, Signal] = {}
    with sourced_file(file, ["signal"]) as (raw, sources):
        for where, entry, reference, dated in cited_tables(file, raw, "signal", sources):
            kept: dict[str, Any] = {key: value for key, value in entry.items() if key != "source"}
            one = read_record(file, where, kept, Signal, source=reference, date=dated)
            for key in _NEEDS[one.kind]:
                if not getattr(one, key):
                    raise BadData(file, f"{where}.{key}", f"missing: a signal of kind {one.kind} is looked at by it")
            if text(file, f"{where}.id", one.id) in found:
                raise BadData(file, f"{where}.id", f"'{one.id}' is there twice")
            found[one.id] = one
    return found
