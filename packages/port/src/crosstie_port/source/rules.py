"""Rows of data/*.toml: what names, PTX, Python code and build files say that differs on ROCm, and what cures it."""

import re
from functools import cache
from pathlib import Path
from typing import TypeVar

import msgspec

from crosstie.catalog.counterparts import read_counterparts
from crosstie.catalog.library import SHIPPED
from crosstie.catalog.reading import Sources, only_keys, read_record, read_toml, table, text
from crosstie.core.errors import BadData
from crosstie.core.finding import Severity
from crosstie_port.source.hazard import Condition
from crosstie_port.source.lexer import COMPARES

_DATA = Path(__file__).parent / "data"
KINDS = ("module", "attribute", "string", "build")


class _Row(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    says: str
    remedy: str
    source: str
    date: str


class PtxRule(_Row, frozen=True, kw_only=True):
    opcodes: tuple[str, ...]


class _Rule(_Row, frozen=True, kw_only=True):
    severity: Severity
    on: Condition = "rocm"
    unless: re.Pattern[str] | None = None
    # Only a note may do without.
    remedy: str = ""


class PythonRule(_Rule, frozen=True, kw_only=True):
    id: str = "nvidia-package"
    names: tuple[str, ...] = ()
    pattern: re.Pattern[str] | None = None


class NameRule(_Rule, frozen=True, kw_only=True):
    headers: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    prefixes: tuple[str, ...] = ()
    # Words that a capital follows in the library's names: cudnnCreate, where cudnn_handle is anybody's variable.
    before_capital: tuple[str, ...] = ()
    # Namespace::name; a star for any name of that namespace.
    qualified: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()
    # Only behind a dot or an arrow.
    members: frozenset[str] = frozenset()
    # Of the code with one space between its tokens.
    pattern: re.Pattern[str] | None = None
    # Whether the pattern counts on sides for AMD alone too.
    for_amd: bool = False
    requires: re.Pattern[str] | None = None
    # No finding behind a condition that matches: a release of HIP that is asked for there.
    unless_asked: re.Pattern[str] | None = None
    # A row of the catalog's libraries, to which the remedy sends for the rest.
    library: str = ""
    # No finding in the tree of the library itself, which has its namespaces.
    unless_own: bool = False

    def names_it(self, name: str) -> bool:
        if name in self.names or (self.prefixes and name.startswith(self.prefixes)):
            return True
        return any(name.startswith(word) and name[len(word) :][:1].isupper() for word in self.before_capital)


_AnyRow = TypeVar("_AnyRow", bound=_Row)


def _rows(file: Path, kind: str, record: type[_AnyRow], kinds: tuple[str, ...] = ()) -> dict[str, _AnyRow]:
    """The tables [[kind]] of a file, each by its name for faults; `kinds`: all that the file may have."""
    raw = read_toml(file)
    only_keys(file, "", raw, {"sources", kind, *kinds})
    sources = Sources(file, raw.get("sources"))
    found: dict[str, _AnyRow] = {}
    for position, entry in enumerate(raw.get(kind) or [], 1):
        where = f"{kind} {position}"
        keys = table(file, where, entry).keys() & {"pattern", "requires", "unless", "unless_asked"}
        patterns = {key: _pattern(file, f"{where}.{key}", entry[key]) for key in keys}
        row = found[where] = read_record(file, where, entry, record, sources, **patterns)
        if isinstance(row, _Rule) and row.severity != "note" and not row.remedy:
            raise BadData(file, f"{where}.remedy", "missing: only a note may do without")
    return found


def _pattern(file: Path, where: str, value: object) -> re.Pattern[str]:
    try:
        return re.compile(text(file, where, value))
    except re.error as error:
        raise BadData(file, where, f"no regular expression: {error}") from None


@cache
def python_rules(kind: str, file: Path = _DATA / "python.toml") -> tuple[PythonRule, ...]:
    rules = _rows(file, kind, PythonRule, KINDS)
    for where, rule in rules.items():
        if bool(rule.names) == (rule.pattern is not None):
            raise BadData(file, where, "needs either names or a pattern")
    return tuple(rules.values())


@cache
def name_rules(file: Path = _DATA / "names.toml") -> tuple[NameRule, ...]:
    libraries = read_counterparts(SHIPPED / "libraries.toml")
    rules = []
    for where, row in _rows(file, "rule", NameRule).items():
        if row.library and row.library not in libraries:
            raise BadData(file, f"{where}.library", f"'{row.library}' is in no row of libraries.toml")
        more = f"; {libraries[row.library].rocm}: crosstie catalog show libraries {row.library}" if row.library else ""
        rules.append(msgspec.structs.replace(row, remedy=row.remedy + more))
    return tuple(rules)


@cache
def explained(name: str) -> bool:
    """Whether a row speaks of a name, so that HIPIFY's leftovers need not."""
    return any(rule.names_it(name) for rule in name_rules())


@cache
def ptx_rules(file: Path = _DATA / "ptx.toml") -> tuple[PtxRule, ...]:
    rules = _rows(file, "class", PtxRule)
    by_id: dict[str, str] = {}
    for where, rule in rules.items():
        if by_id.setdefault(rule.id, where) != where:
            raise BadData(file, where, f"the id {rule.id} stands here twice")
    return tuple(rules.values())


@cache
def ptx_rule(opcode: str) -> PtxRule | None:
    """By the longest prefix that ends where a part of the opcode ends."""
    plain = opcode.replace("::", ".") + "."
    matches = [(len(prefix), rule) for rule in ptx_rules() for prefix in rule.opcodes if plain.startswith(prefix + ".")]
    return max(matches, key=lambda match: match[0], default=(0, None))[1]


def passes_for_hopper(sign: str, major: int) -> bool:
    """Whether `9 sign major` tells gfx9, which answers 9, from Ampere, which answers 8."""
    return COMPARES[sign](8, major) != COMPARES[sign](9, major)
