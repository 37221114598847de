"""The front page of the docs has a row for every command, and the site a place for every page."""

import re
from collections.abc import Iterator
from pathlib import Path

import click

from crosstie.cli.main import crosstie

ROOT = Path(__file__).parents[2]
FRONT = (ROOT / "docs" / "index.md").read_text()


def commands(group: click.Group, path: str = "crosstie") -> Iterator[str]:
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        elif not command.hidden:
            yield f"{path} {name}"


def rows(page: str) -> list[str]:
    return re.findall(r"^\|[^|]+\| `(crosstie [^`]+)` \|", page, re.MULTILINE)


def test_every_command_has_exactly_one_row() -> None:
    assert sorted(rows(FRONT)) == sorted(commands(crosstie))


def test_a_missing_command_would_be_found() -> None:
    without = FRONT.replace("`crosstie admin drain`", "")
    assert set(commands(crosstie)) - set(rows(without)) == {"crosstie admin drain"}


def test_commands_are_grouped_by_the_four_verbs() -> None:
    headings = re.findall(r"^## (\w+)$", FRONT, re.MULTILINE)
    assert headings[:4] == ["Decide", "Port", "Run", "Prove"]


def test_every_page_is_in_the_navigation() -> None:
    """Strict builds fail too, but building takes a while."""
    named = set(re.findall(r"[:-] ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not re.match(r"decisions/\d", page)} <= named
