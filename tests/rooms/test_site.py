"""The site (`make docs`): links that lead nowhere are found, and what is shown live comes from commands that are there."""

import runpy
from pathlib import Path

import click
import pytest

from crosstie.cli.main import crosstie

ROOT = Path(__file__).parents[2]
BROKEN = runpy.run_path(str(ROOT / "tools" / "check_site.py"))["broken"]
LIVE = runpy.run_path(str(ROOT / "tools" / "live.py"))


def test_links_that_lead_nowhere_are_found(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="sub/page.html#there">a</a><a href="sub/page.html#nowhere">b</a><a href="missing.html">c</a>'
        '<img src="picture.svg"><a href="https://example.com/x#y">d</a><a href="#top">e</a><p id="top">'
    )
    (tmp_path / "sub" / "page.html").write_text(
        '<h2 id="there">There</h2><a href="../index.html">up</a><a href=".">x</a>'
    )
    assert BROKEN(tmp_path) == [
        "index.html: sub/page.html#nowhere",
        "index.html: missing.html",
        "index.html: picture.svg",
        "sub/page.html: .",
    ]


def test_what_pages_show_live_is_known_and_comes_from_commands_that_are() -> None:
    """The build runs them, and fails where one fails; here their marks and options are read."""
    known = {*LIVE["REPORTS"], *LIVE["CHARTS"]}
    marks = [name for page in (ROOT / "docs").rglob("*.md") for name in LIVE["_MARK"].findall(page.read_text())]
    assert sorted(marks) == sorted(known)
    for arguments in LIVE["commands"]():
        name, *rest = arguments
        command = crosstie.get_command(click.Context(crosstie), name)
        assert command is not None
        options = {one for option in command.params for one in option.opts}
        assert {one for one in rest if one.startswith("--")} <= options
    # Reports, and each chart by day and by night.
    files = [one for arguments in LIVE["commands"]() for one in arguments if one.endswith((".html", ".svg"))]
    assert len(files) == len(LIVE["REPORTS"]) + 2 * len(LIVE["CHARTS"])


def test_a_command_that_fails_fails_the_build(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="unknown model 'no-such-model'"):
        LIVE["run"](["fit", "no-such-model"], tmp_path)
    with pytest.raises(click.ClickException, match="no live 'nothing'"):
        LIVE["shown"]("nothing", "compare.md")


def test_a_report_is_framed_with_a_name_and_a_chart_is_there_by_day_and_by_night() -> None:
    framed = LIVE["shown"]("scorecard", "scorecard.md")
    assert 'src="live/scorecard.html"' in framed
    assert 'title="The scorecard' in framed
    assert "../live/" in LIVE["shown"]("scorecard", "tutorials/purchase.md")
    chart = LIVE["shown"]("tax", "tax.md")
    assert "live/tax-dark.svg#only-dark" in chart
    assert "live/tax-light.svg#only-light" in chart


def test_a_whole_site_has_none(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="/index.html">a</a><a href="index.html">b</a>')
    assert BROKEN(tmp_path) == []
