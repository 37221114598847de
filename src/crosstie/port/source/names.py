"""Headers, namespaces, names and numbers of CUDA by what becomes of them on ROCm; the rows are data/names.toml."""

import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.reading import Sources, only_keys, read_toml, table, text, texts
from crosstie.core.finding import Severity
from crosstie.port.source.code import Code, also
from crosstie.port.source.hazard import Hazard
from crosstie.port.source.rows import common, pattern

FILE = Path(__file__).parent / "data" / "names.toml"
_KEYS = {
    "id", "on", "severity", "headers", "names", "prefixes", "qualified", "numbers", "requires", "unless", "says",
    "remedy", "source",
}  # fmt: skip


class Rule(msgspec.Struct, frozen=True, kw_only=True):
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
def rules(file: Path = FILE) -> tuple[Rule, ...]:
    raw = read_toml(file)
    only_keys(file, "", raw, {"sources", "rule"})
    sources = Sources(file, raw.get("sources"))
    return tuple(
        _rule(file, f"rule {position}", table(file, f"rule {position}", entry), sources)
        for position, entry in enumerate(raw.get("rule") or [], 1)
    )


def _rule(file: Path, where: str, entry: dict[str, Any], sources: Sources) -> Rule:
    name = text(file, f"{where}.id", entry.get("id"))
    only_keys(file, name, entry, _KEYS)

    def several(key: str) -> tuple[str, ...]:
        return texts(file, f"{name}.{key}", entry[key]) if key in entry else ()

    qualified = [one.partition("::") for one in several("qualified")]
    return Rule(
        id=name,
        headers=several("headers"),
        names=frozenset(several("names")),
        prefixes=several("prefixes"),
        qualified=frozenset((space, inside) for space, _, inside in qualified),
        numbers=frozenset(several("numbers")),
        requires=pattern(file, f"{name}.requires", entry.get("requires")),
        **common(file, name, entry, sources),
    )


@cache
def explained(name: str) -> bool:
    """Whether a row speaks of a name, so that HIPIFY's leftovers need not."""
    return any(rule.names_it(name) for rule in rules())


def name_hazards(path: str, codes: Sequence[Code]) -> Iterator[Hazard]:
    project = codes[0].project
    unit = project.units[path]
    headers = [
        (directive.header, directive.line)
        for directive in unit.directives
        if directive.header and not unit.lines.dead(directive.line)
    ]
    local = {other.rsplit("/", 1)[-1] for other in project.units}
    for rule in rules():
        if (rule.unless and rule.unless.search(unit.text)) or (rule.requires and not rule.requires.search(unit.text)):
            continue
        lines = {line: header for header, line in headers if _names_header(rule, header, local)}
        for code in codes:
            lines |= _places(rule, code)
        if lines:
            yield _hazard(rule, codes[0], lines)


def _names_header(rule: Rule, header: str, local: set[str]) -> bool:
    """A header of that name in the project itself is the project's own; one in a folder is the library's."""
    return any(header.startswith(wanted) and ("/" in wanted or header not in local) for wanted in rule.headers)


def _places(rule: Rule, code: Code) -> dict[int, str]:
    """Lines and the name seen there."""
    found: dict[int, str] = {}
    tokens = code.tokens
    for name, places in code.names.items():
        if rule.names_it(name) and name not in code.parameters and not code.provided(name):
            for at in places:
                if at == 0 or tokens[at - 1].text not in (".", "->") or name.startswith(("shared", "cuda", "__")):
                    found.setdefault(tokens[at].line, name)
    for space in {space for space, _ in rule.qualified}:
        for at in code.names.get(space, ()):
            if at + 2 >= len(tokens) or tokens[at + 1].text != "::" or (at and tokens[at - 1].text == "::"):
                continue
            inside = tokens[at + 2].text
            if (space, inside) in rule.qualified or (space, "*") in rule.qualified:
                found.setdefault(tokens[at].line, f"{space}::{inside}")
    if rule.numbers:
        for token in tokens:
            if token.kind == "number" and token.text.lower() in rule.numbers:
                found.setdefault(token.line, token.text)
    return found


def _hazard(rule: Rule, code: Code, lines: dict[int, str]) -> Hazard:
    ordered = sorted(lines)
    return Hazard(
        check=rule.id,
        severity=rule.severity,
        what=rule.says,
        file=code.path,
        line=ordered[0],
        evidence=code.line_text(ordered[0]) + also(ordered[1:]),
        remedy=rule.remedy,
        on=rule.on,
        name=lines[ordered[0]],
    )
