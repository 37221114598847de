"""--help teaches: one example a command, nothing wider than 80 columns; and shells complete names of the catalog."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tests.conftest import Command

from crosstie.cli.lazy import GroupedCommand
from crosstie.cli.main import FIRST, SECTIONS, crosstie as group


def commands(command: click.Command, path: str, parent: click.Context | None = None) -> Iterator[tuple[str, str]]:
    """Every command with its help, on 80 columns."""
    context = click.Context(command, info_name=path.split()[-1], parent=parent, terminal_width=80)
    yield path, command.get_help(context)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            assert inner is not None
            yield from commands(inner, f"{path} {name}", context)


HELP = dict(commands(group, "crosstie"))


@pytest.mark.parametrize("path", HELP)
def test_help_has_an_example_and_fits(path: str) -> None:
    usage, _, rest = HELP[path].partition("\n")
    assert usage.startswith(f"Usage: {path}")
    assert f"{path} " in rest or f"{path}\n" in f"{rest}\n"
    assert [line for line in rest.splitlines() if len(line) > 80] == []


def test_many_options_are_listed_under_headings() -> None:
    for path, heading in (("crosstie tco", "Alternatives to owning:"), ("crosstie serve", "Administration:")):
        assert f"\n{heading}\n" in HELP[path]


def test_an_option_that_is_not_there_cannot_be_grouped() -> None:
    with pytest.raises(ValueError, match="no such options: --gone"):
        GroupedCommand("some", params=[click.Option(["--here"])], groups={"All": "--here --gone"})


def completed(words: str, folder: Path) -> list[str]:
    """What bash is offered for the last of the words."""
    asked = {"_CROSSTIE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    env = {**os.environ, **asked, "CROSSTIE_CATALOG": str(folder)}
    got = subprocess.run([sys.executable, "-m", "crosstie"], capture_output=True, text=True, env=env, check=True)
    return [line.removeprefix("plain,") for line in got.stdout.splitlines()]


def test_models_and_accelerators_complete_from_the_catalog(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    # Whether the file is any good is not asked: it is not read.
    (tmp_path / "models" / "llama-of-ours.toml").write_text("")
    assert "llama-of-ours" in completed("crosstie fit llama-o", tmp_path)
    assert completed("crosstie fit x --on h200,mi35", tmp_path) == ["h200,mi350x", "h200,mi355x"]


def test_commands_complete_without_being_imported(tmp_path: Path) -> None:
    assert completed("crosstie pr", tmp_path) == ["preflight", "profile", "probe"]


def test_completion_is_installed_once(crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "ZDOTDIR"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / ".bashrc").write_text("alias ll='ls -l'")
    for _ in range(2):
        assert crosstie("completion", "bash", "--install").status == 0
    script = tmp_path / ".local/share/crosstie/completion.bash"
    assert (tmp_path / ".bashrc").read_text() == f'alias ll=\'ls -l\'\n[ -r "{script}" ] && . "{script}"\n'
    assert "_CROSSTIE_COMPLETE" in script.read_text()
    assert crosstie("completion", "fish", "--install").status == 0
    assert "_CROSSTIE_COMPLETE" in (tmp_path / ".config/fish/completions/crosstie.fish").read_text()
    loaded = subprocess.run(
        ["bash", "-c", ". ~/.bashrc; complete -p crosstie"], env={**os.environ, "HOME": str(tmp_path)}, capture_output=True,
        text=True,
    )  # fmt: skip
    assert "_crosstie_completion" in loaded.stdout


def test_completion_that_cannot_be_installed_is_one_line(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "file"))
    got = crosstie("completion", "bash", "--install")
    assert (got.status, got.err.count("\n")) == (2, 1)
    assert got.err.startswith("crosstie: cannot be installed: ")


@pytest.mark.parametrize(("typed", "meant"), [("plann", "plan"), ("bnech", "bench")])
def test_a_slip_in_a_command_is_answered_by_its_name(crosstie: Command, typed: str, meant: str) -> None:
    got = crosstie(typed, "assistant")
    assert got.status == 2
    assert f"did you mean {meant}" in got.err.lower()
    assert got.err.count("\n") == 1


def test_help_describes_what_a_newcomer_needs_and_names_the_rest(crosstie: Command) -> None:
    said, every = crosstie("--help").out, crosstie("--commands").out
    names = [name for listed in SECTIONS.values() for name in listed]
    assert set(names) > FIRST
    for name in names:
        assert re.search(rf"\b{name}\b", said), name
        assert bool(re.search(rf"^  {name}  ", said, re.MULTILINE)) == (name in FIRST)
        assert re.search(rf"^  {name}  ", every, re.MULTILINE), name
