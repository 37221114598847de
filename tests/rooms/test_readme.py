"""The README is short and in order, and what it and the docs show is what the commands print."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "library").glob("*.md"))]


def blocks(language: str) -> list[tuple[str, str]]:
    found = []
    for page in PAGES:
        for body in re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL):
            found.append((page.name, body))
    return found


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines() if line.strip())


README = (ROOT / "README.md").read_text()
CONSOLE = blocks("console")
PYTHON = blocks("python")


def test_there_are_snippets() -> None:
    assert len(CONSOLE) >= 3
    assert len(PYTHON) >= 1


def test_the_readme_is_short() -> None:
    assert len(README.split()) <= 900


def test_the_readme_keeps_its_order() -> None:
    headings = re.findall(r"^## (.+)$", README, re.MULTILINE)
    assert headings == ["Install", "Ten lines of a plan", "Four ways on", "How far to trust it", "Licence"]
    assert re.findall(r"^- \*\*(\w+)\*\*", README, re.MULTILINE) == ["Decide", "Port", "Run", "Prove"]


def test_the_readme_names_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = [re.split(r"[^\w.-]", each)[0] for each in project["dependencies"]]
    (said,) = re.findall(r"It needs ([^.]*), nothing else\.", README)
    assert re.split(r", | and ", said) == needs


def test_the_readme_shows_ten_lines_of_a_plan() -> None:
    (shown,) = re.findall(r"```console\n\$ crosstie plan assistant\n(.*?)```", README, re.DOTALL)
    assert len([line for line in shown.splitlines() if line != "..."]) == 10


def test_the_readme_s_blocks_fit_80_columns() -> None:
    shown = [line for body in re.findall(r"```\w+\n(.*?)```", README, re.DOTALL) for line in body.splitlines()]
    assert [line for line in shown if len(line) > 80] == []


@cache
def printed_by(command: str) -> str:
    """Run once, though several pages show it."""
    words = shlex.split(command)
    assert words[0] == "crosstie", f"{command}: only crosstie commands are run"
    with TemporaryDirectory() as own_catalog:
        env = {**os.environ, "CROSSTIE_CATALOG": own_catalog, "COLUMNS": "80"}
        got = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, env=env, cwd=ROOT)
    return tidy(got.stdout + got.stderr)


@pytest.mark.slow
@pytest.mark.parametrize(("page", "body"), CONSOLE, ids=range(len(CONSOLE)))
def test_console_snippets_print_what_they_show(page: str, body: str) -> None:
    """Each `$ crosstie ...` line, then its output; `...` stands for lines left out."""
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        printed = rest = printed_by(command)
        pieces = [piece.strip() for piece in re.split(r"^\.\.\.$", tidy(shown), flags=re.MULTILINE)]
        for piece in filter(None, pieces):
            assert piece in rest, f"{page}: `{command}` prints\n{printed}"
            rest = rest.split(piece, 1)[1]


@pytest.mark.slow
@pytest.mark.parametrize(("page", "body"), PYTHON, ids=range(len(PYTHON)))
def test_python_snippets_run(page: str, body: str) -> None:
    names: dict[str, object] = {}
    exec(compile(body, page, "exec"), names)
    assert names
