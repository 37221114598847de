"""CUDA's libraries and tools beside ROCm's: what stands for what, and what differs, as rows of one file."""

from pathlib import Path
from typing import Literal

import msgspec

from crosstie.catalog.reading import only_keys, read_record, read_toml, sourced_file, table
from crosstie.core.errors import BadData

State = Literal["same", "alike", "other", "none"]


class HipifyCoverage(msgspec.Struct, frozen=True, kw_only=True):
    """How many of a library's names HIPIFY converts, counted in its tables."""

    converted: int
    of: int
    source: str
    date: str


class Counterpart(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    cuda: str
    rocm: str
    # The names are the same; they convert, and parts are missing; an interface of its own; nothing.
    state: State
    differs: str
    source: str
    date: str
    hipify: HipifyCoverage | None = None


def read_counterparts(file: Path) -> dict[str, Counterpart]:
    names = [name for name in read_toml(file) if name != "sources"]
    found = {}
    with sourced_file(file, names) as (raw, sources):
        for name in names:
            entry = table(file, name, raw[name])
            source, day = sources.cite(name, entry.get("source"))
            counted = None
            if (said := entry.get("hipify")) is not None:
                where = f"{name}.hipify"
                only_keys(file, where, table(file, where, said), {"converted", "of", "source"})
                by, when = sources.cite(where, said.get("source"))
                counted = read_record(file, where, said, HipifyCoverage, source=by, date=when)
                if not 0 <= counted.converted <= counted.of:
                    raise BadData(file, where, f"{counted.converted} of {counted.of} names")
            found[name] = read_record(file, name, entry, Counterpart, id=name, source=source, date=day, hipify=counted)
    return found
