"""Every example is run: workloads are planned, fleets served, scripts started, and the rest is in a tutorial."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import crosstie

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
FILES = sorted(file for file in EXAMPLES.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
# Scripts that talk to a server.
CLIENTS = [EXAMPLES / "scripts" / "chat.py"]
SCRIPTS = [file for file in sorted(EXAMPLES.glob("scripts/*.py")) if file not in CLIENTS]


def run(*words: object) -> str:
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def but_slow(files: list[Path], *slow: str) -> list[Any]:
    """Parameters, of which those named take seconds of a plan."""
    return [pytest.param(file, id=file.stem, marks=[pytest.mark.slow] if file.stem in slow else []) for file in files]


@pytest.mark.parametrize("file", but_slow(sorted(EXAMPLES.glob("workloads/*.toml")), "owned", "helpdesk"))
def test_a_fleet_is_found_for_every_workload(file: Path) -> None:
    assert not crosstie.plan(file, catalog=crosstie.Catalog([])).obstacles


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("fleets/*.toml")), ids=lambda file: file.stem)
def test_every_fleet_file_is_read_and_written_back(file: Path, tmp_path: Path) -> None:
    catalog = crosstie.Catalog([])
    fleet = crosstie.read_fleet(catalog, file)
    again = tmp_path / file.name
    again.write_text(crosstie.fleet_text(fleet))
    assert crosstie.read_fleet(catalog, again) == fleet


@pytest.mark.parametrize("script", but_slow(SCRIPTS, "plan_for_prices", "compare_accelerators"))
def test_every_script_runs(script: Path) -> None:
    assert run(script)


@pytest.mark.slow
def test_the_client_is_answered() -> None:
    serve = [sys.executable, "-m", "crosstie", "serve", str(EXAMPLES / "fleets" / "two_vendors.toml")]
    with subprocess.Popen(
        [*serve, "--emulate", "--speed", "20", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as gateway:
        try:
            assert gateway.stdout is not None
            address = next(found[1] for line in gateway.stdout if (found := re.match(r"serving at (\S+)", line)))
            printed = run(EXAMPLES / "scripts" / "chat.py", address)
        finally:
            gateway.terminate()
    assert "pool: mi300x" in printed
    assert "40 out" in printed


def test_every_example_is_listed_and_run_by_something() -> None:
    """Files of other folders than those above are in a tutorial, which tests/rooms/test_tutorials.py runs. The plugin is
    run by tests/run/service/test_plugins.py, launches of vLLM's kernels by tests/port/kernels/test_vllm.py; recorded machines are read whole by tests/port/doctor, and measured runs by
    tests/prove/calibration."""
    listed = (EXAMPLES / "README.md").read_text()
    tutorials = "".join(page.read_text() for page in (ROOT / "docs" / "tutorials").glob("*.md"))
    for file in FILES:
        read_whole = (
            EXAMPLES / "machines",
            EXAMPLES / "plugin",
            EXAMPLES / "port" / "vllm_launches.py",
            *(EXAMPLES / "results").glob("h200-*"),
        )
        if file.name == "README.md" or any(map(file.is_relative_to, read_whole)):
            continue
        folder = file.parent.name
        assert file.name in listed or folder == "port", file
        assert folder in ("workloads", "fleets", "scripts") or file.name in tutorials, file
