"""How many tokens an engine drafts where nobody says it; every default has its source."""

from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from crosstie.catalog.reading import read_records, sourced_file
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
        return read_records(file, "default", raw.get("default"), DefaultDepth, sources)
