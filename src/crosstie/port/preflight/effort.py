"""What findings cost in person-days: a range for each remedy, and what every move costs; all guesses, and marked so.

Findings of one remedy are one piece of work, counted by the gravest of them. The ends of the range are sums of the
rows' ends, as if everything went well, or badly, together.
"""

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from crosstie.catalog.reading import Sources, only_keys, read_record, read_records, read_toml
from crosstie.catalog.releases import newest_file
from crosstie.core.errors import BadData, BadInput
from crosstie.core.fact import Basis
from crosstie.core.figures import plural
from crosstie.core.finding import Finding, Severity, rank
from crosstie.port.preflight.engine import DATA

ANY, MOVE, SOURCE = "any", "move", "source-"
KINDS = ("rewrite", "local", "mechanical")


class EffortRow(msgspec.Struct, frozen=True, kw_only=True):
    # A check of preflight, "any" of them, "move": what moving costs with nothing found, or "source-" and the kind of
    # work that a source file needs.
    check: str
    severity: Severity
    # Person-days.
    low: float
    likely: float
    high: float
    basis: Basis
    source: str
    date: str
    note: str = ""


class _WorkingDays(msgspec.Struct, frozen=True, kw_only=True):
    """Of a year."""

    days: Annotated[float, msgspec.Meta(ge=1, le=366)]
    basis: Basis
    source: str
    date: str
    note: str = ""


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """Person-days, and what they rest on."""

    low_days: float
    likely_days: float
    high_days: float
    basis: str
    source: str
    # By remedy; what every move costs stands under "move".
    parts: dict[str, tuple[float, float, float]]

    def __str__(self) -> str:
        return f"{self.low_days:g} to {self.high_days:g} person-days, likely {self.likely_days:g}"


class _Table(msgspec.Struct, frozen=True, kw_only=True):
    rows: dict[tuple[str, str], EffortRow]
    working_days: float


@cache
def _table() -> _Table:
    return read_effort(newest_file(DATA / "effort.toml", "preflight/effort.toml"))


def read_effort(file: Path) -> _Table:
    raw = read_toml(file)
    only_keys(file, "", raw, {"sources", "working_days", "effort"})
    sources = Sources(file, raw.get("sources"))
    year = read_record(file, "working_days", raw.get("working_days"), _WorkingDays, sources)
    rows: dict[tuple[str, str], EffortRow] = {}
    for index, row in enumerate(read_records(file, "effort", raw.get("effort"), EffortRow, sources)):
        if not 0 <= row.low <= row.likely <= row.high:
            raise BadData(file, f"effort[{index}]", "must have 0 <= low <= likely <= high")
        if (row.check, row.severity) in rows:
            raise BadData(file, f"effort[{index}]", f"{row.check} {row.severity} stands here twice")
        rows[row.check, row.severity] = row
    kinds = ((f"{SOURCE}{kind}", "error") for kind in KINDS)
    for key in ((MOVE, "note"), *((ANY, severity) for severity in ("setting", "slow", "unknown", "error")), *kinds):
        if key not in rows:
            raise BadData(file, "effort", f"has no row for {' '.join(key)}")
    return _Table(rows=rows, working_days=year.days)


def effort_of(findings: Iterable[Finding], *, move: bool = True) -> Effort:
    """Of the findings on one accelerator; notes cost nothing. `move`: with what every move costs."""
    known = _table().rows
    asked: dict[str, EffortRow] = {}
    for finding in sorted(findings, key=lambda finding: rank(finding.severity)):
        if finding.severity != "note":
            asked[finding.remedy] = known.get((finding.check, finding.severity)) or known[ANY, finding.severity]
    rows = {MOVE: known[MOVE, "note"], **asked} if move else asked
    return _summed({remedy: (row, 1) for remedy, row in rows.items()})


def effort_of_files(counts: Mapping[str, int]) -> Effort:
    """Of sources: how many files need each kind of work at most (rewrite, local, mechanical)."""
    known = _table().rows
    rows = {kind: known[f"{SOURCE}{kind}", "error"] for kind, count in counts.items() if count}
    return _summed({f"{kind}, {plural(counts[kind], 'file')}": (row, counts[kind]) for kind, row in rows.items()})


def _summed(rows: Mapping[str, tuple[EffortRow, int]]) -> Effort:
    """Each row so many times."""
    parts = {
        what: (row.low * times, row.likely * times, row.high * times) for what, (row, times) in rows.items() if row.high
    }
    low, likely, high = (round(sum(days[end] for days in parts.values()), 1) for end in range(3))
    return Effort(
        low_days=low, likely_days=likely, high_days=high, parts=parts,
        basis=", ".join(dict.fromkeys(row.basis for row, _ in rows.values())),
        source=", ".join(dict.fromkeys(f"{row.source}, {row.date}" for row, _ in rows.values())),
    )  # fmt: skip


def as_engineers(person_days: float, years: float) -> float:
    """How many engineers, over that many years, so many person-days are."""
    if not person_days >= 0 or years <= 0:
        raise BadInput(f"{person_days:g} person-days over {years:g} years: days from 0, over some time")
    return person_days / (_table().working_days * years)
