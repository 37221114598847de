"""Rows of data/python.toml: what Python code and build files say that differs on ROCm."""

import re
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.reading import Sources, only_keys, optional_text, read_toml, table, texts
from crosstie.core.errors import BadData
from crosstie.core.finding import Severity
from crosstie.port.source.rows import common, pattern

FILE = Path(__file__).parent / "data" / "python.toml"
KINDS = ("module", "attribute", "call", "string", "build")


class Phrase(msgspec.Struct, frozen=True, kw_only=True):
    kind: str
    id: str
    names: tuple[str, ...]
    pattern: re.Pattern[str] | None
    on: str
    severity: Severity
    unless: re.Pattern[str] | None
    says: str
    remedy: str
    source: str


@cache
def phrases(kind: str, file: Path = FILE) -> tuple[Phrase, ...]:
    raw = read_toml(file)
    only_keys(file, "", raw, {"sources", *KINDS})
    sources = Sources(file, raw.get("sources"))
    return tuple(
        _phrase(file, kind, f"{kind} {position}", table(file, f"{kind} {position}", entry), sources)
        for position, entry in enumerate(raw.get(kind) or [], 1)
    )


def _phrase(file: Path, kind: str, where: str, entry: dict[str, Any], sources: Sources) -> Phrase:
    only_keys(file, where, entry, {"id", "names", "pattern", "on", "severity", "unless", "says", "remedy", "source"})
    if ("names" in entry) == ("pattern" in entry):
        raise BadData(file, where, "needs either names or a pattern")
    return Phrase(
        kind=kind,
        id=optional_text(file, f"{where}.id", entry.get("id")) or "nvidia-package",
        names=texts(file, f"{where}.names", entry["names"]) if "names" in entry else (),
        pattern=pattern(file, f"{where}.pattern", entry.get("pattern")),
        **common(file, where, entry, sources),
    )
