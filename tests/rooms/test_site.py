"""The check that follows the links of the built site (`make docs`) finds those that lead nowhere."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]
BROKEN = runpy.run_path(str(ROOT / "tools" / "check_site.py"))["broken"]


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


def test_a_whole_site_has_none(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text('<a href="/index.html">a</a><a href="index.html">b</a>')
    assert BROKEN(tmp_path) == []
