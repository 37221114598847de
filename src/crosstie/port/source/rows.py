"""What every row of data/*.toml says alike: where it holds, how grave it is, what it says, what cures it."""

import re
from pathlib import Path
from typing import Any

from crosstie.catalog.reading import Sources, optional_text, text
from crosstie.core.errors import BadData
from crosstie.core.finding import SEVERITIES
from crosstie.port.source.hazard import CONDITIONS


def common(file: Path, where: str, entry: dict[str, Any], sources: Sources) -> dict[str, Any]:
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
        "unless": pattern(file, f"{where}.unless", entry.get("unless")),
        "says": text(file, f"{where}.says", entry.get("says")),
        "remedy": remedy,
        "source": sources.cite(where, entry.get("source"))[0],
    }


def pattern(file: Path, where: str, value: object) -> re.Pattern[str] | None:
    if value is None:
        return None
    try:
        return re.compile(text(file, where, value))
    except re.error as error:
        raise BadData(file, where, f"no regular expression: {error}") from None
