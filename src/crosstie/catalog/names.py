"""Names of checkpoints: which ends of a name leave the model's shape as it is, and what they say of its weights."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

from crosstie.catalog.reading import read_toml

_FILE = Path(__file__).parent / "data" / "names.toml"


class Suffixes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    trained: tuple[str, ...]
    # A pattern.
    dated: str
    # The precision that each stands for.
    stored: dict[str, str]
    # Names that end like others and are models of their own, and why.
    apart: dict[str, str]


@cache
def shipped_suffixes() -> Suffixes:
    return msgspec.convert(read_toml(_FILE), Suffixes)


def shorter_names(name: str) -> Iterator[tuple[str, str]]:
    """The name with ever more of its ends taken off, without its owner, and the precision that these named."""
    known = shipped_suffixes()
    left, precision = name.rpartition("/")[2].casefold(), ""
    # Longer ends first: -fp8-kv is one, not -kv behind -fp8.
    plain = sorted((*known.trained, *known.stored), key=len, reverse=True)
    while left not in known.apart:
        dated = re.search(rf"{known.dated}$", left)
        end = next((suffix for suffix in plain if left.endswith(suffix)), dated[0] if dated else "")
        if not end or len(end) == len(left):
            return
        left, precision = left[: -len(end)], known.stored.get(end, precision)
        yield left, precision
