"""Shared fixtures: the shipped catalog without any user's files, and the command as a user runs it."""

import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from crosstie.catalog.calibration import empty
from crosstie.catalog.library import Catalog
from crosstie.cli.main import run

pytest_plugins = ["tests.needs", "tests.no_skips"]
# Several processes share the tests already: threads of torch beside them only take turns.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples on every run, so that a red test is about the change; `HYPOTHESIS_PROFILE=hunt pytest
# tests/properties` looks for new ones.
# A busy machine is no fault of the code under test.
settings.register_profile(
    "steady", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("hunt", max_examples=3000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "steady"))

# Nothing that collection makes is garbage: the collector looks at none of it before the end, where extension modules
# count what was not freed.
gc.disable()
atexit.register(gc.unfreeze)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def catalog() -> Catalog:
    return Catalog([])


@pytest.fixture(scope="session")
def uncalibrated() -> Catalog:
    """Constants as the catalog has them, without what calibration makes of them."""
    return Catalog([], calibration=empty())


class Outcome(NamedTuple):
    status: int
    out: str
    err: str


Command = Callable[..., Outcome]


def status_of(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """Runs the command line in this process, to its end."""
    monkeypatch.setattr(sys, "argv", ["crosstie", *arguments])
    with pytest.raises(SystemExit) as ended:
        run()
    return ended.value.code if isinstance(ended.value.code, int) else 0


@pytest.fixture
def crosstie(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    """Runs the command line in this process, with an empty user catalog, on a screen on which nothing wraps."""
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("CROSSTIE_CATALOG", str(tmp_path / "user-catalog"))

    def call(*arguments: str) -> Outcome:
        status = status_of(arguments, monkeypatch)
        captured = capsys.readouterr()
        return Outcome(status, captured.out, captured.err)

    return call
