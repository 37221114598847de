"""Rows of data/*.toml: what names, PTX, Python code and build files say that differs on ROCm, and what cures it."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.reading import Sources, only_keys, optional_text, read_toml, table, text, texts
from crosstie.core.errors import BadData
from crosstie.core.finding import SEVERITIES, Severity
from crosstie.port.source.hazard import CONDITIONS

PYTHON_FILE = Path(__file__).parent / "data" / "python.toml"
KINDS = ("module", "attribute", "call", "string", "build")
NAMES_FILE = Path(__file__).parent / "data" / "names.toml"
_NAME_KEYS = {
    "id", "on", "severity", "headers", "names", "prefixes", "qualified", "numbers", "requires", "unless", "says",
    "remedy", "source",
}  # fmt: skip
PTX_FILE = Path(__file__).parent / "data" / "ptx.toml"


def _rows(file: Path, kind: str, kinds: tuple[str, ...] = ()) -> Iterator[tuple[str, dict[str, Any], Sources]]:
    """The tables [[kind]] of a file, each with its name for faults; `kinds`: all that the file may have."""
    raw = read_toml(file)
    only_keys(file, "", raw, {"sources", kind, *kinds})
    sources = Sources(file, raw.get("sources"))
    for position, entry in enumerate(raw.get(kind) or [], 1):
        yield f"{kind} {position}", table(file, f"{kind} {position}", entry), sources


def _common(file: Path, where: str, entry: dict[str, Any], sources: Sources) -> dict[str, Any]:
    """The fields `on`, `severity`, `unless`, `says`, `remedy` and `source` of a row."""
    severity, on = entry.get("severity"), entry.get("on", "rocm")
    if severity not in SEVERITIES:
        raise BadData(file, f"{where}.severity", f"{severity!r} is not one of {', '.join(SEVERITIES)}")
    if on not in CONDITIONS:
        raise BadData(file, f"{where}.on", f"{on!r} is not one of {', '.join(CONDITIONS)}")
    remedy = optional_text(file, f"{where}.remedy", entry.get("remedy"))
    if severity != "note" and not remedy:
        raise BadData(file, f"{where}.remedy", "missing: only a note may do without")
    return {
        "on": str(on),
        "severity": severity,
        "unless": _pattern(file, f"{where}.unless", entry.get("unless")),
        "says": text(file, f"{where}.says", entry.get("says")),
        "remedy": remedy,
        "source": sources.cite(where, entry.get("source"))[0],
    }


def _pattern(file: Path, where: str, value: object) -> re.Pattern[str] | None:
    if value is None:
        return None
    try:
        return re.compile(text(file, where, value))
    except re.error as error:
        raise BadData(file, where, f"no regular expression: {error}") from None


class PythonRule(msgspec.Struct, frozen=True, kw_only=True):
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
def python_rules(kind: str, file: Path = PYTHON_FILE) -> tuple[PythonRule, ...]:
    return tuple(_python_rule(file, kind, *row) for row in _rows(file, kind, KINDS))


def _python_rule(file: Path, kind: str, where: str, entry: dict[str, Any], sources: Sources) -> PythonRule:
    only_keys(file, where, entry, {"id", "names", "pattern", "on", "severity", "unless", "says", "remedy", "source"})
    if ("names" in entry) == ("pattern" in entry):
        raise BadData(file, where, "needs either names or a pattern")
    return PythonRule(
        kind=kind,
        id=optional_text(file, f"{where}.id", entry.get("id")) or "nvidia-package",
        names=texts(file, f"{where}.names", entry["names"]) if "names" in entry else (),
        pattern=_pattern(file, f"{where}.pattern", entry.get("pattern")),
        **_common(file, where, entry, sources),
    )


class NameRule(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    on: str
    severity: Severity
    headers: tuple[str, ...]
    names: frozenset[str]
    prefixes: tuple[str, ...]
    # Namespace and name; a star for any name of that namespace.
    qualified: frozenset[tuple[str, str]]
    numbers: frozenset[str]
    requires: re.Pattern[str] | None
    unless: re.Pattern[str] | None
    says: str
    remedy: str
    source: str

    def names_it(self, name: str) -> bool:
        return name in self.names or (bool(self.prefixes) and name.startswith(self.prefixes))


@cache
def name_rules(file: Path = NAMES_FILE) -> tuple[NameRule, ...]:
    return tuple(_name_rule(file, *row) for row in _rows(file, "rule"))


def _name_rule(file: Path, where: str, entry: dict[str, Any], sources: Sources) -> NameRule:
    name = text(file, f"{where}.id", entry.get("id"))
    only_keys(file, name, entry, _NAME_KEYS)

    def several(key: str) -> tuple[str, ...]:
        return texts(file, f"{name}.{key}", entry[key]) if key in entry else ()

    qualified = [one.partition("::") for one in several("qualified")]
    return NameRule(
        id=name,
        headers=several("headers"),
        names=frozenset(several("names")),
        prefixes=several("prefixes"),
        qualified=frozenset((space, inside) for space, _, inside in qualified),
        numbers=frozenset(several("numbers")),
        requires=_pattern(file, f"{name}.requires", entry.get("requires")),
        **_common(file, name, entry, sources),
    )


@cache
def explained(name: str) -> bool:
    """Whether a row speaks of a name, so that HIPIFY's leftovers need not."""
    return any(rule.names_it(name) for rule in name_rules())


class PtxRule(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    opcodes: tuple[str, ...]
    says: str
    remedy: str
    source: str


@cache
def ptx_rules(file: Path = PTX_FILE) -> tuple[PtxRule, ...]:
    found: list[PtxRule] = []
    for where, row, sources in _rows(file, "class"):
        name = text(file, f"{where}.id", row.get("id"))
        only_keys(file, name, row, {"id", "opcodes", "says", "remedy", "source"})
        if any(name == other.id for other in found):
            raise BadData(file, name, "this id stands here twice")
        found.append(
            PtxRule(
                id=name,
                opcodes=texts(file, f"{name}.opcodes", row.get("opcodes")),
                says=text(file, f"{name}.says", row.get("says")),
                remedy=text(file, f"{name}.remedy", row.get("remedy")),
                source=sources.cite(name, row.get("source"))[0],
            )
        )
    return tuple(found)


@cache
def ptx_rule(opcode: str) -> PtxRule | None:
    """By the longest prefix that ends where a part of the opcode ends."""
    best: tuple[int, PtxRule | None] = (0, None)
    plain = opcode.replace("::", ".")
    for one in ptx_rules():
        for prefix in one.opcodes:
            if (plain == prefix or plain.startswith(prefix + ".")) and len(prefix) > best[0]:
                best = (len(prefix), one)
    return best[1]
