"""Shared fixtures: the shipped catalog without any user's files, and the command as a user runs it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from crosstie.catalog.library import Catalog
from crosstie.cli.main import run


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return Catalog([])


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Outcome]


@pytest.fixture
def crosstie(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs the command line in this process, with an empty user catalog."""
    monkeypatch.setenv("CROSSTIE_CATALOG", str(tmp_path / "user-catalog"))

    def call(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["crosstie", *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        captured = capsys.readouterr()
        code = ended.value.code
        return Outcome(code if isinstance(code, int) else 0, captured.out, captured.err)

    return call
