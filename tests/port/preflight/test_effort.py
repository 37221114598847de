"""Person-days: a range a remedy, guesses that say so, and the bridge to what `tco` calls engineers."""

from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.core.errors import BadData, BadInput
from crosstie.core.finding import Finding, Location, Severity
from crosstie.port.preflight.effort import as_engineers, effort_of, effort_of_files, read_effort
from crosstie.port.preflight.engine import DATA


def finding(severity: Severity, remedy: str, check: str = "kernel-moe") -> Finding:
    return Finding(
        check=check, severity=severity, what="w", where=Location(file="f"), evidence="e", grounds="read",
        remedy=remedy,
    )  # fmt: skip


def test_a_move_costs_something_with_nothing_found() -> None:
    bare = effort_of([finding("note", "")])
    assert 0 < bare.low_days < bare.likely_days < bare.high_days
    assert list(bare.parts) == ["move"]
    assert bare.basis == "assumed"
    assert "guess" in bare.source


def test_one_remedy_is_one_piece_of_work_counted_by_its_gravest_finding() -> None:
    once = effort_of([finding("setting", "set A=1")])
    twice = effort_of([finding("setting", "set A=1"), finding("setting", "set A=1", "loader")])
    assert once == twice
    graver = effort_of([finding("setting", "set A=1"), finding("error", "set A=1")])
    other = effort_of([finding("setting", "set A=1"), finding("error", "set B=1")])
    assert once.high_days < graver.high_days < other.high_days


def test_a_check_with_a_row_of_its_own() -> None:
    wide, memory = effort_of([finding("error", "r")]), effort_of([finding("error", "r", "memory")])
    assert memory.high_days < wide.high_days


def test_files_cost_by_the_kind_of_work_that_they_need() -> None:
    one, three = effort_of_files({"rewrite": 1}), effort_of_files({"rewrite": 3, "mechanical": 0})
    assert three.high_days == 3 * one.high_days
    assert list(three.parts) == ["rewrite, 3 files"]
    assert effort_of_files({"mechanical": 1}).high_days < effort_of_files({"local": 1}).high_days < one.high_days
    assert (effort_of_files({}).high_days, effort_of([], move=False).high_days) == (0, 0)


def test_person_days_are_a_share_of_an_engineer_over_the_years() -> None:
    assert as_engineers(220, 1) == 1
    assert as_engineers(33, 3) == pytest.approx(0.05)
    with pytest.raises(BadInput, match="person-days"):
        as_engineers(-1, 3)


@pytest.mark.parametrize(
    ("was", "becomes", "said"),
    [
        ("low = 2\n", "low = 6\n", "low <= likely"),
        ('basis = "assumed"', 'basis = "hoped"', "basis"),
        ("days = 220", "days = 2200", "a number from 1 to 366"),
        ('check = "move"', 'check = "shift"', "no row for move note"),
        ('check = "source-local"', 'check = "source-odd"', "no row for source-local error"),
        ('check = "memory"', 'check = "any"', "stands here twice"),
        ('source = "ours"', 'source = "theirs"', "theirs"),
    ],
)
def test_a_bad_table_is_named(tmp_path: Path, was: str, becomes: str, said: str) -> None:
    text = (DATA / "effort.toml").read_text()
    assert was in text
    file = tmp_path / "effort.toml"
    file.write_text(text.replace(was, becomes, 1) if said != "theirs" else text.replace(was, becomes))
    with pytest.raises(BadData, match=said):
        read_effort(file)


def test_preflight_says_it_and_tco_takes_it(crosstie: Command) -> None:
    said = crosstie("preflight", "deepseek-v4-flash", "--on", "mi300x").out
    assert "effort on mi300x: " in said
    assert "person-days" in said
    asked = ("tco", "llama-3.1-70b", "--on", "mi300x,h200", "--gpus", "8", "--samples", "100", "--json", "--engineers")
    assert '"engineers": 0.05' in crosstie(*asked, "mi300x=33d").out
    assert crosstie(*asked, "mi300x=xd").status == 2
