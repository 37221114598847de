"""Words of findings as data: every row is asked for by the code, and every row that is asked for is there."""

import re
from pathlib import Path

import pytest

from crosstie.core.finding import Location
from crosstie.port.preflight import phrases as module
from crosstie.port.preflight.phrases import phrases, told

ROOMS = Path(module.__file__).parents[1]
FILES = {
    "preflight": ROOMS / "preflight" / "data" / "findings.toml",
    "doctor": ROOMS / "doctor" / "data" / "relations.toml",
}


@pytest.mark.parametrize("room", FILES)
def test_rows_and_code_go_together(room: str) -> None:
    code = "".join(file.read_text() for file in (ROOMS / room).glob("*.py"))
    named = set(re.findall(r'"([a-z0-9-]+)"', code))
    families = tuple(re.findall(r'f"([a-z-]+-)\{', code))
    rows = phrases(FILES[room])
    assert {row for row in rows if not row.startswith(families or ("-",))} <= named
    asked = set(re.findall(r'told\(\s*"([a-z0-9-]+)"', code))
    assert asked <= set(rows)
    for row in rows.values():
        assert row.remedy or row.severity == "note"


def test_facts_are_filled_in() -> None:
    finding = told("memory-ranks", Location(file="m.json"), "h200", error="7 heads")
    assert (finding.check, finding.severity, finding.evidence, finding.target) == ("memory", "error", "7 heads", "h200")
    with pytest.raises(KeyError):
        told("memory-ranks", Location(file="m.json"))
