"""Which kernel does what, by its name: rows of data/kernels.toml, the first that fits."""

import re
from functools import cache
from pathlib import Path

import msgspec

from crosstie.catalog.reading import read_records, read_toml, text
from crosstie.core.errors import BadData

DATA = Path(__file__).with_name("data") / "kernels.toml"
PRODUCTS, ATTENTION, COLLECTIVES = "matrix products", "attention", "collectives"
ELEMENTWISE, BOOKKEEPING, UNKNOWN = "norms and activations", "bookkeeping", "not known"
HOST = "gaps: the host launches late"
CLASSES = (PRODUCTS, ATTENTION, ELEMENTWISE, BOOKKEEPING, COLLECTIVES, UNKNOWN)


class KernelRule(msgspec.Struct, frozen=True, kw_only=True):
    """`what`: of bookkeeping, which: routing, sorting, sampling, casts, copies, gathers, cache."""

    sort: str
    pattern: str
    examples: list[str]
    source: str
    what: str = ""


class KernelKind(msgspec.Struct, frozen=True):
    sort: str
    what: str = ""


@cache
def rows() -> tuple[tuple[KernelRule, re.Pattern[str]], ...]:
    rules = read_records(DATA, "kernel", read_toml(DATA).get("kernel"), KernelRule)
    for row in rules:
        if row.sort not in CLASSES[:-1] or not row.examples:
            raise BadData(DATA, row.pattern, "needs a known sort and an example")
    return tuple((row, re.compile(row.pattern, re.IGNORECASE)) for row in rules)


@cache
def cures() -> dict[str, str]:
    """What to look at where a class takes more than it need, by class and kind of gap."""
    return {str(name): text(DATA, f"cures.{name}", said) for name, said in read_toml(DATA)["cures"].items()}


@cache
def sorted_by_name(name: str) -> KernelKind:
    for row, pattern in rows():
        if pattern.search(name):
            return KernelKind(row.sort, row.what)
    return KernelKind(UNKNOWN)
