"""CUDA's libraries and tools beside ROCm's: what stands for what, and what differs, as rows of one file."""

from pathlib import Path
from typing import Literal

import msgspec

from crosstie.catalog.reading import read_record, sourced_file
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
    with sourced_file(file) as (raw, sources):
        libraries = {name: read_record(file, name, entry, Counterpart, sources, id=name) for name, entry in raw.items()}
    for name, library in libraries.items():
        counted = library.hipify
        if counted and not 0 <= counted.converted <= counted.of:
            raise BadData(file, f"{name}.hipify", f"{counted.converted} of {counted.of} names")
    return libraries
