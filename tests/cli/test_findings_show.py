"""How findings are told: gravest first, together over accelerators, and counted where they are many."""

import json
from pathlib import Path

import pytest

from crosstie.cli.findings_show import report
from crosstie.core.finding import Finding, Location, Severity


def finding(number: int, severity: Severity = "error", target: str = "") -> Finding:
    return Finding(
        check="mask", severity=severity, what=f"mask {number}", where=Location(file="a.cu", line=number),
        evidence="0xffffffff", grounds="read", remedy="64 bits" if severity != "note" else "", target=target,
    )  # fmt: skip


def told(capsys: pytest.CaptureFixture[str], findings: list[Finding], verbose: bool = False) -> str:
    report(
        "title", findings, {"mi300x": "will not run"}, as_json=False, sarif_file=None, fail_on="error", verbose=verbose
    )
    return capsys.readouterr().out


def test_the_gravest_comes_first_and_a_note_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(capsys, [finding(1, "note"), finding(2)]).splitlines()
    assert lines[1] == "mi300x  will not run"
    assert lines[2].startswith("error   mask 2")
    assert lines[6] == "note    mask 1"
    assert "evidence" not in lines[7]


def test_the_same_on_two_accelerators_is_one_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, [finding(1, target="mi300x"), finding(1, target="mi325x")])
    assert "[mi300x, mi325x]" in out
    assert out.count("mask 1") == 1


def test_hundreds_are_counted_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    many = [finding(number) for number in range(1, 101)]
    short, whole = told(capsys, many), told(capsys, many, verbose=True)
    assert "and 40 more" in short
    assert "mask: 40 in 1 file" in short
    assert short.count("where ") == 60
    assert whole.count("where ") == 100
    assert "more, which" not in whole


def test_json_and_sarif_have_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    many = [finding(number) for number in range(1, 101)]
    sarif = tmp_path / "out.sarif"
    status = report("title", many, {}, as_json=True, sarif_file=str(sarif), fail_on="error")
    assert status == 1
    assert len(json.loads(capsys.readouterr().out)["findings"]) == 100
    assert len(json.loads(sarif.read_text())["runs"][0]["results"]) == 100
