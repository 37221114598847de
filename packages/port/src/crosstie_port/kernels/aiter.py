"""What AITER's hand-written kernels cover, by operation, types, shape and instruction set, read in its sources.

Rows of data/aiter.csv count the assembly kernels in its folder hsa/; those of Composable Kernel and FlyDSL are not
counted. Where there are none, an engine that calls AITER takes another path: `instead` is AITER's own Triton kernel of
that operation.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import msgspec

from crosstie.catalog.reading import read_rows
from crosstie.core.errors import BadData, BadInput

_FILE = Path(__file__).parent / "data" / "aiter.csv"
_COLUMNS = ("operation", "types", "shape", "isa", "kernels", "instead", "basis", "source", "date")


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """One operation on one instruction set. `source`: the first of its kernels, owner/name@commit path:line."""

    operation: str
    types: str
    shape: str
    isa: str
    kernels: int
    source: str
    # AITER's Triton kernel of that operation, path:line and name; or why there is none.
    instead: str
    date: str

    @property
    def triton(self) -> str:
        return "" if self.instead.startswith("none") else self.instead.rpartition(" ")[2]

    @property
    def otherwise(self) -> str:
        """In place of a number where it is 0."""
        return "Triton" if self.triton else "none"


@cache
def coverage(file: Path = _FILE) -> tuple[Coverage, ...]:
    coverages: dict[tuple[str, ...], Coverage] = {}
    for where, row in read_rows(file, _COLUMNS):
        key = (row["operation"], row["types"], row["shape"], row["isa"])
        if key in coverages:
            raise BadData(file, where, f"{', '.join(key)} stands here twice")
        if not row["kernels"].isdecimal():
            raise BadData(file, where, f"kernels '{row['kernels']}' must be a whole number")
        if not row["instead"]:
            raise BadData(file, where, "instead is empty")
        coverages[key] = msgspec.convert(row, Coverage, strict=False)
    return tuple(coverages.values())


def aiter_coverage(isas: Sequence[str], about: str = "") -> list[Coverage]:
    """For these instruction sets; `about`: words that a row must have, such as "MLA fp8"."""
    rows = coverage()
    known = dict.fromkeys(row.isa for row in rows)
    strangers = [isa for isa in isas if isa not in known]
    if strangers:
        raise BadInput(f"AITER has no assembly kernels for {', '.join(strangers)}; it has for {', '.join(known)}")
    words = about.lower().split()
    chosen = [
        row
        for row in rows
        if row.isa in isas and all(word in f"{row.operation} {row.types} {row.shape}".lower() for word in words)
    ]
    if not chosen:
        raise BadInput(f"AITER's table has nothing about '{about}'; operations: {'; '.join(operations())}")
    return chosen


def operations() -> list[str]:
    return list(dict.fromkeys(row.operation for row in coverage()))
