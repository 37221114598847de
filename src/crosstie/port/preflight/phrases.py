"""Findings whose words are rows of data: what is said, on which evidence and with which remedy, facts in braces."""

from functools import cache
from pathlib import Path

import msgspec

from crosstie.catalog.reading import read_record, read_toml
from crosstie.core.finding import Finding, Grounds, Location, Severity

_FILE = Path(__file__).parent / "data" / "findings.toml"


class Phrase(msgspec.Struct, frozen=True, kw_only=True):
    severity: Severity
    grounds: Grounds
    what: str
    evidence: str
    remedy: str = ""
    # Of the finding, where it is not the row's name.
    check: str = ""
    # The file, tool or kind of setting that it is about, where the code names none.
    where: str = ""


@cache
def phrases(file: Path) -> dict[str, Phrase]:
    return {name: read_record(file, name, row, Phrase) for name, row in read_toml(file).items()}


def told(
    row: str, where: Location | None = None, target: str = "", /, *, by: Path = _FILE, **facts: object
) -> Finding:  # fmt: skip
    phrase = phrases(by)[row]
    return Finding(
        check=phrase.check or row, severity=phrase.severity, what=phrase.what.format(**facts),
        where=where or Location(file=phrase.where.format(**facts)), evidence=phrase.evidence.format(**facts),
        grounds=phrase.grounds, remedy=phrase.remedy.format(**facts), target=target,
    )  # fmt: skip
