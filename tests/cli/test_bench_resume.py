"""`crosstie bench` that ends early: what was measured is in the file, and --resume measures only the rest."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.run.emulate.running import emulated_beside
from tests.waiting import comes_true

from crosstie.catalog import writing
from crosstie.cli import bench as bench_command
from crosstie.core.errors import BadInput
from crosstie_gateway.emulate.fleet import EmulatedFleet

ASKED = ["--speed", "20", "--requests", "6", "--warmup", "0", "--input", "60", "--output", "4"]


@pytest.fixture(scope="module")
def running() -> Iterator[EmulatedFleet]:
    with emulated_beside() as made:
        yield made


def url(running: EmulatedFleet) -> str:
    return running.fleet.pools[0].backends[0]


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def points(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read(file)["endpoints"][0]["points"]
    return found


@pytest.mark.slow
def test_a_kill_leaves_what_was_measured_and_the_rest_is_measured_later(
    crosstie: Command, running: EmulatedFleet, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    # The second load takes for ever.
    hanging = ["bench", f"mi300x={url(running)}", *ASKED, "--concurrency", "1,2", "-o", str(file)]
    code = (
        "import sys; from crosstie.prove.bench import bench as b; real = b._points\n"
        "def points(session, measured, load):\n"
        "    import time\n"
        "    if load.clients == 2: time.sleep(3600)\n"
        "    real(session, measured, load)\n"
        "b._points = points\n"
        "from crosstie.cli.main import run\n"
        f"sys.argv = {['crosstie', *hanging]!r}\n"
        "run()"
    )
    beside = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert comes_true(file.exists)
    finally:
        os.killpg(beside.pid, signal.SIGKILL)
        beside.wait()
    left = read(file)
    assert not left["complete"]
    assert [one["name"] for one in points(file)] == ["1 client"]
    (first,) = points(file)

    seen = crosstie(*hanging, "--resume")
    assert seen.status == 0, seen.err
    assert read(file)["complete"]
    again, second = points(file)
    assert again == first
    assert (second["name"], second["requests"]) == ("2 clients", 6)
    # Nothing is left to do, and nothing is done again.
    assert crosstie(*hanging, "--resume").status == 0
    assert points(file) == [again, second]


def test_a_load_that_was_cut_short_is_measured_again(crosstie: Command, running: EmulatedFleet, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    asked = ["bench", url(running), *ASKED, "--concurrency", "1", "-o", str(file)]
    assert crosstie(*asked).status == 0
    told = read(file)
    told["endpoints"][0]["points"][0] |= {"complete": False, "requests": 2}
    file.write_text(json.dumps(told))
    assert crosstie(*asked, "--resume").status == 0
    assert [one["requests"] for one in points(file)] == [6]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (["--input", "61"], "lengths.input_tokens 60, not 61"),
        (["--repeat", "2"], "settings.repeats 1, not 2"),
        (["--field", "temperature=0"], "settings.more.temperature null, not 0"),
        (["--accelerator", "h200"], 'conditions.accelerator "mi300x", not "h200"'),
    ],
)
def test_other_settings_are_refused(
    crosstie: Command, running: EmulatedFleet, tmp_path: Path, other: list[str], said: str
) -> None:
    file = tmp_path / "run.json"
    asked = ["bench", f"one={url(running)}", *ASKED, "--concurrency", "1", "-o", str(file)]
    assert crosstie(*asked).status == 0
    before = file.read_text()
    seen = crosstie(*asked, *other, "--resume")
    assert seen.status == 2
    assert said in seen.err
    assert seen.err.count("\n") == 1
    assert file.read_text() == before
    seen = crosstie("bench", f"two={url(running)}", *asked[2:], "--resume")
    assert "is of one and not of two" in seen.err


def test_what_is_no_benchmark_is_not_gone_on_with(crosstie: Command, running: EmulatedFleet, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for text in ("{", "[]", '{"crosstie_bench": 1}'):
        file.write_text(text)
        seen = crosstie("bench", url(running), *ASKED, "--resume", "-o", str(file))
        assert (seen.status, seen.err.count("\n")) == (2, 1)
        assert str(file) in seen.err
        assert file.read_text() == text


def test_a_disk_that_is_full_for_a_while_loses_nothing(
    crosstie: Command, running: EmulatedFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, tried = tmp_path / "run.json", list[int]()
    full = {1, 2}

    def write_text(target: Path, text: str) -> None:
        tried.append(1)
        if len(tried) in full:
            raise BadInput(f"{target}: cannot be written: No space left on device")
        writing.write_text(target, text)

    monkeypatch.setattr(bench_command, "write_text", write_text)
    asked = ["bench", url(running), *ASKED, "--concurrency", "1,2,3", "-o", str(file)]
    seen = crosstie(*asked)
    assert seen.status == 0
    assert seen.err.count("No space left") == 2
    assert len(points(file)) == 3
    # Never any room: the answer is on the screen, and the status says that it is nowhere else.
    file.unlink()
    full.update(range(1, 100))
    seen = crosstie(*asked)
    assert seen.status == 2
    assert "3 clients" in seen.out
    assert not file.exists()
