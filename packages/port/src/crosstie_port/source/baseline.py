"""Findings that are known already, for a check that is to complain about new ones alone.

A finding is known by what it says of which line's text in which file and function: lines may move.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.finding import Finding

_OTHERS = re.compile(r" \(and [\d,]+ more lines?: [^)]*\)$")
FORMAT = 1


class Baseline(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: int
    # How often each is there.
    findings: dict[str, int]


def fingerprint(finding: Finding) -> str:
    evidence = _OTHERS.sub("", finding.evidence).partition(" -- ")[0]
    parts = (finding.check, finding.where.file, finding.where.name, " ".join(evidence.split()))
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def baseline_of(findings: Sequence[Finding]) -> bytes:
    counts = Counter(map(fingerprint, findings))
    made = Baseline(format=FORMAT, findings=dict(sorted(counts.items())))
    return msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n"


def new_findings(findings: Sequence[Finding], file: Path) -> list[Finding]:
    """Those that the file does not have, or has fewer times."""
    try:
        known = msgspec.json.decode(file.read_bytes(), type=Baseline)
    except OSError as error:
        raise BadInput(f"{file}: {error.strerror}; --write-baseline makes one") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadInput(f"{file}: no baseline of preflight source: {error}") from None
    if known.format != FORMAT:
        raise BadInput(f"{file}: a baseline of format {known.format}, and {FORMAT} is read: write it anew")
    left, new = Counter(known.findings), []
    for finding in findings:
        mark = fingerprint(finding)
        if left[mark] > 0:
            left[mark] -= 1
        else:
            new.append(finding)
    return new
