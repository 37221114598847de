"""How many tokens an engine drafts where nobody says it; every default has its source."""

from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from crosstie.catalog.reading import cited_tables, read_record, sourced_file
from crosstie.core.fact import Basis
from crosstie.core.speculation import DEEPEST, Method

_FILE = Path(__file__).parent / "data" / "drafts.toml"
_ANY = "*"


class DefaultDepth(msgspec.Struct, frozen=True, kw_only=True):
    # Ids of stacks, or "*".
    engines: tuple[str, ...]
    methods: tuple[Method, ...]
    depth: Annotated[int, msgspec.Meta(ge=1, le=DEEPEST)]
    basis: Basis
    source: str
    date: str
    note: str = ""


@cache
def shipped_depths() -> tuple[DefaultDepth, ...]:
    return read_depths(_FILE)


def default_depth(engine: str, method: str) -> DefaultDepth | None:
    """Of an engine's id; None: neither the engine nor its documentation has one."""
    fitting = (one for one in shipped_depths() if method in one.methods and {engine, _ANY} & set(one.engines))
    return next(fitting, None)


def read_depths(file: Path) -> tuple[DefaultDepth, ...]:
    with sourced_file(file, ["default"]) as (raw, sources):
        return tuple(
            read_record(
                file, where, {key: said for key, said in entry.items() if key != "source"}, DefaultDepth,
                source=reference, date=dated,
            )
            for where, entry, reference, dated in cited_tables(file, raw, "default", sources)
        )  # fmt: skip
