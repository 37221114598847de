"""The loop over emulated replicas: one report, nothing lost when it is killed, no engine left behind."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.run.emulate.running import emulated_beside
from tests.small_workload import SMALL
from tests.waiting import comes_true

from crosstie.port.doctor.record import read_record
from crosstie.prove.loop import prepare

MACHINES = Path(__file__).parents[3] / "examples" / "machines"

# Two short points of an emulated replica that is a fifth slower than it is predicted to be.
ASKED = ["llama-3.1-8b", "--emulate", "h200:1.2", "--speed", "20", "--points", "2", "--minutes", "2"]


def read(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def point_names(folder: Path) -> set[str]:
    return {file.name for file in (folder / "points").glob("*.json")}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unbroken")
    workload = folder / "small.toml"
    workload.write_text(SMALL)
    got = run("loop", *ASKED, "--workload", str(workload), "--quick", "--out", str(folder / "loop"))
    assert got.returncode == 0, got.stderr
    return folder / "loop"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "crosstie", *words], capture_output=True, text=True, check=False)


def test_one_report_has_what_was_predicted_measured_and_planned(unbroken: Path) -> None:
    made = read(unbroken / "report.json")
    assert made["emulated"]
    assert len(made["points"]) == 2
    for point in made["points"]:
        tpot = point["metrics"]["tpot_s"]
        assert tpot["inside"] == (tpot["predicted"]["low"] <= tpot["measured"] <= tpot["predicted"]["high"])
    # One client alone, which a busy machine hardly bends: as slow as the emulator was told, and nearer once learnt.
    (tpot,) = [one["metrics"]["tpot_s"] for one in made["points"] if one["clients"] == 1]
    assert 1.05 < tpot["measured"] / tpot["predicted"]["value"] < 1.5
    assert abs(tpot["predicted_after"]["value"] / tpot["measured"] - 1.0) < abs(tpot["error"])
    before, after = made["widths"]["tpot_s"]
    assert after < before
    assert made["plan"]["before"]["usd_per_hour"] > 0
    assert "EMULATED" in (unbroken / "report.md").read_text()
    assert "EMULATED" in (unbroken / "report.html").read_text()
    # What an emulator says is nobody's calibration.
    assert not (unbroken / "calibration.json").exists()
    assert all(read(file)["endpoints"][0]["emulated"] for file in (unbroken / "points").glob("*.json"))


@pytest.mark.slow
def test_the_same_command_again_measures_nothing_again(crosstie: Command, unbroken: Path) -> None:
    before = {file: file.stat().st_mtime_ns for file in (unbroken / "points").glob("*.json")}
    log = (unbroken / "engine.log").read_bytes()
    got = crosstie("loop", "--out", str(unbroken), "--quick", "--json")
    assert got.status == 0, got.err
    assert json.loads(got.out)["rows"] == 6
    assert {file: file.stat().st_mtime_ns for file in (unbroken / "points").glob("*.json")} == before
    assert (unbroken / "engine.log").read_bytes() == log


def test_another_question_is_refused_in_the_same_folder(crosstie: Command, unbroken: Path) -> None:
    got = crosstie("loop", "llama-3.1-70b", "--out", str(unbroken))
    assert (got.status, got.err.count("\n")) == (2, 1)
    assert "was begun with MODEL 'llama-3.1-8b', not 'llama-3.1-70b'" in got.err


def engines_of(folder: Path) -> list[int]:
    """Processes whose command line names the folder's fleet file."""
    mark = str((folder / "emulated.toml").absolute()).encode()
    found = []
    for one in Path("/proc").iterdir():
        if one.name.isdigit():
            try:
                if mark in (one / "cmdline").read_bytes():
                    found.append(int(one.name))
            except OSError:
                continue
    return found


MOMENTS: dict[str, Callable[[Path], object]] = {
    "locked": lambda folder: (folder / "lock").exists(),
    "designed": lambda folder: (folder / "loop.json").exists(),
    "engine": engines_of,
    "point": point_names,
}


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="processes are looked for in /proc")
@pytest.mark.parametrize("moments", [["point"], pytest.param(list(MOMENTS), marks=pytest.mark.slow)], ids=len)
@pytest.mark.slow
def test_killed_it_goes_on_and_measures_the_same_points(unbroken: Path, tmp_path: Path, moments: list[str]) -> None:
    folder, workload = tmp_path / "loop", unbroken.parent / "small.toml"
    words = ["loop", *ASKED, "--workload", str(workload), "--quick", "--out", str(folder)]
    for name in moments:
        kill_once(words, folder, MOMENTS[name])
        assert comes_true(lambda: not engines_of(folder)), "an engine was left behind"
    kept = {name: (folder / "points" / name).read_bytes() for name in point_names(folder)}
    assert kept
    got = run("loop", "--out", str(folder))
    assert got.returncode == 0, got.stderr
    assert point_names(folder) == point_names(unbroken)
    assert {name: (folder / "points" / name).read_bytes() for name in kept} == kept
    assert len(read(folder / "report.json")["points"]) == 2
    assert not engines_of(folder)


def kill_once(words: list[str], folder: Path, moment: Callable[[Path], object]) -> None:
    """The loop alone: what it has started must end by itself."""
    beside = subprocess.Popen(
        [sys.executable, "-m", "crosstie", *words], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert comes_true(lambda: moment(folder) or beside.poll() is not None)
    finally:
        os.kill(beside.pid, signal.SIGKILL)
        beside.wait()


def test_an_engine_that_dies_is_told_with_its_last_words(crosstie: Command, unbroken: Path, tmp_path: Path) -> None:
    folder = tmp_path / "loop"
    shutil.copytree(unbroken, folder)
    # The fleet file that the emulator is started with is no more what it was; one point is to be measured again.
    (unbroken / "emulated.toml").rename(unbroken / "aside")
    next((folder / "points").glob("*.json")).unlink()
    try:
        got = crosstie("loop", "--out", str(folder))
    finally:
        (unbroken / "aside").rename(unbroken / "emulated.toml")
    assert (got.status, got.err.count("\n")) == (1, 1)
    assert "the engine ended with status 2" in got.err
    assert "emulated.toml" in got.err


@pytest.mark.slow
def test_a_point_that_is_too_long_leaves_the_time_to_shorter_ones(
    crosstie: Command, unbroken: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "loop"
    shutil.copytree(unbroken, folder)
    kept = read(folder / "loop.json")
    first, second = kept["design"]
    long = {**second, "clients": second["clients"] + 1, "expected_s": 1e6}
    short = {**second, "clients": 2, "requests": 4, "expected_s": 1.0}
    kept["design"] = [first, second, long, short]
    (folder / "loop.json").write_text(json.dumps(kept))
    got = crosstie("loop", "--out", str(folder))
    assert got.status == 0, got.err
    assert "2 minutes: 1 point left out" in got.err
    assert len(point_names(folder) - point_names(unbroken)) == 1
    assert len(read(folder / "report.json")["not_measured"]) == 1
    # No engine is started for a point that would be over after its start and the time.
    (folder / "points" / f"{short['input_tokens']}-{short['output_tokens']}-2.json").unlink()
    kept["starts_s"] = [1000.0]
    (folder / "loop.json").write_text(json.dumps(kept))
    log = (folder / "engine.log").read_bytes()
    assert crosstie("loop", "--out", str(folder)).status == 0
    assert (folder / "engine.log").read_bytes() == log


def kill_engine(folder: Path) -> None:
    """Alone, not the one that watches it."""
    for pid in engines_of(folder):
        if b"watchdog" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            os.kill(pid, signal.SIGKILL)


# A shell has what it starts in the background ignore the signal, tests and their children too.
HEARS_CTRL_C = """
import signal
from crosstie.cli.main import run
signal.signal(signal.SIGINT, signal.default_int_handler)
run()
"""


@pytest.mark.parametrize(
    ("happens", "status", "told"),
    [("engine killed", 1, "the engine was killed by SIGKILL"), ("Ctrl-C", 130, "goes on")],
)
@pytest.mark.slow
def test_what_ends_it_under_load_leaves_no_half_of_a_point(
    unbroken: Path, tmp_path: Path, happens: str, status: int, told: str
) -> None:
    folder = tmp_path / "loop"
    shutil.copytree(unbroken, folder)
    for file in (folder / "points").glob("*.json"):
        file.unlink()
    kept = json.loads((folder / "loop.json").read_text())
    # At its own pace, the first point takes longer than it takes to find the engine.
    words = kept["prepared"]["command"]
    words[words.index("--speed") + 1] = "1"
    (folder / "loop.json").write_text(json.dumps(kept))
    asked = [sys.executable, "-c", HEARS_CTRL_C, "loop", "--out", str(folder)]
    with subprocess.Popen(asked, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as beside:
        assert beside.stderr is not None
        assert any("engine healthy" in line for line in beside.stderr)
        kill_engine(unbroken) if happens == "engine killed" else beside.send_signal(signal.SIGINT)
        said = beside.stderr.read()
    assert beside.returncode == status, said
    assert told in said or happens == "Ctrl-C"
    assert point_names(folder) == set()
    assert comes_true(lambda: not engines_of(unbroken))


def test_a_folder_is_one_loops_at_a_time(crosstie: Command, tmp_path: Path) -> None:
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        got = crosstie("loop", *ASKED, "--out", str(tmp_path))
    assert (got.status, got.err.count("\n")) == (2, 1)
    assert "another loop is at work there" in got.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--emulate", "h200:fast"], "--emulate h200:fast: write ACCELERATOR[:FACTOR]"),
        (["--emulate", "h200", "--endpoint", "http://127.0.0.1:1"], "give one of them"),
        (["--speed", "3"], "--speed is about --emulate"),
        ([], "no GPU is seen"),
    ],
)
def test_what_cannot_be_is_one_line(crosstie: Command, tmp_path: Path, words: list[str], said: str) -> None:
    got = crosstie("loop", "llama-3.1-8b", *words, "--out", str(tmp_path / "loop"))
    assert (got.status, got.err.count("\n")) == (2, 1)
    assert said in got.err


ENGINE = """
import subprocess, sys
words = sys.argv[1:]
open(sys.argv[0] + ".words", "w").write("\\n".join(words))
port = words[words.index("--port") + 1]
sys.exit(subprocess.run([sys.executable, "-m", "crosstie", "emulate", sys.argv[0] + ".toml", "--port", port]).returncode)
"""


@pytest.mark.slow
def test_on_a_machine_with_a_gpu_the_recipes_command_is_run(
    crosstie: Command, unbroken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine as it was recorded, and a program in the place of its engine."""
    monkeypatch.setattr(prepare, "capture", lambda python, tries_engines=False: read_record(MACHINES / "h200"))
    engine, folder = tmp_path / "engine.py", tmp_path / "loop"
    engine.write_text(ENGINE)
    (tmp_path / "engine.py.toml").write_text((unbroken / "emulated.toml").read_text())
    got = crosstie(
        "loop", "llama-3.1-8b", "--engine", "vllm==0.27.1", "--engine-command", f"{sys.executable} {engine}",
        "--engine-args", "--load-format dummy", "--points", "1", "--minutes", "0.5", "--out", str(folder),
        "--prompts", str(Path(__file__).parent),
    )  # fmt: skip
    assert got.status == 0, got.err
    words = (tmp_path / "engine.py.words").read_text().split("\n")
    assert words[0] == "serve"
    assert words[words.index("--served-model-name") + 1] == "llama-3.1-8b"
    assert words[-2:] == ["--load-format", "dummy"]
    made = read(folder / "report.json")
    assert made["doctor"]["verdicts"] == {"h200": "ready"}
    # An emulator that says so is no engine, whoever started it.
    assert made["emulated"]
    assert not (folder / "calibration.json").exists()
    (point,) = (folder / "points").glob("*.json")
    assert read(point)["prompts"]["kind"] == "documents"
    assert read(point)["endpoints"][0]["conditions"]["engine_version"] == "0.27.1"


@pytest.mark.slow
def test_an_engine_that_runs_already_is_measured(crosstie: Command, tmp_path: Path) -> None:
    folder = tmp_path / "loop"
    with emulated_beside() as running:
        url = running.fleet.pools[0].backends[0]
        got = crosstie("loop", "--endpoint", url, "--points", "1", "--minutes", "0.3", "--out", str(folder), "--json")
    assert got.status == 0, got.err
    made = json.loads(got.out)
    assert made["emulated"]
    assert made["conditions"]["accelerator"] == "mi300x"
    assert made["command"] == []
    assert len(made["points"]) == 1
