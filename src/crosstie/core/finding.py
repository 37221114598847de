"""What a check found before anything ran: how bad, where, on what evidence, and what cures it."""

from collections.abc import Iterable
from typing import Literal, get_args

import msgspec

# From harmless to fatal. "setting": runs once the remedy's flag or variable is set; "slow": runs, on a path that
# costs much of the speed; "unknown": nobody has read or tried it; "error": does not run, or gives wrong numbers.
Severity = Literal["note", "setting", "slow", "unknown", "error"]
SEVERITIES: tuple[str, ...] = get_args(Severity)

# What a finding rests on. None of these is a run on an AMD GPU.
Grounds = Literal["computed", "compiled", "emulated", "read", "measured", "seen"]
GROUNDS: dict[str, str] = {
    "computed": "computed from the files",
    "compiled": "compiled for the target, not run on it",
    "emulated": "run on a stand-in for the device, on the CPU",
    "read": "read in the source",
    "measured": "measured on an NVIDIA GPU",
    "seen": "told by the machine",
}

VERDICTS: dict[str, str] = {
    "note": "ready",
    "setting": "ready with settings",
    "slow": "slow path",
    "unknown": "not known",
    "error": "will not run",
}


class Location(msgspec.Struct, frozen=True, kw_only=True):
    """A file, a line of it where there is one, and what in it: a key, a tensor, a function."""

    file: str
    line: int | None = None
    name: str = ""

    def __str__(self) -> str:
        at = f"{self.file}:{self.line}" if self.line else self.file
        return f"{at} {self.name}".strip()


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    # A stable name of the check, such as "fp8-dialect" or "capture-host-sync": SARIF's rule.
    check: str
    severity: Severity
    # One sentence for people.
    what: str
    where: Location
    # What was seen, precisely enough to be checked by whoever doubts it.
    evidence: str
    grounds: Grounds
    # The flag, variable, version, rewrite or command that cures it; "" only for a note.
    remedy: str
    # The accelerator or instruction set that it concerns; "" concerns all.
    target: str = ""


def rank(severity: str) -> int:
    return SEVERITIES.index(severity)


def worst(findings: Iterable[Finding]) -> Severity:
    """The gravest severity, "note" where nothing was found."""
    return max((finding.severity for finding in findings), key=rank, default="note")


def verdict(findings: Iterable[Finding]) -> str:
    return VERDICTS[worst(findings)]
