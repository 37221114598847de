"""An engine ends with whoever asked for it, and with all that it has started; the next one waits for that."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.waiting import comes_true

# Starts a child of its own, and both take their time to end, as engines do.
ENGINE = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: time.sleep(0.5) or sys.exit(0))
print("engine", os.getpid(), flush=True)
if os.fork() == 0:
    print("child", os.getpid(), flush=True)
while True:
    time.sleep(1)
"""
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-m", "crosstie.prove.loop.watchdog", sys.argv[1], sys.executable, "-c", sys.argv[2]],
                 stdin=subprocess.PIPE, start_new_session=True)
time.sleep(3600)
"""


def pids(log: Path) -> list[int]:
    # A line may be written in part when it is looked at.
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return [int(line.split()[1]) for line in lines if line.endswith("\n")]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False


def parent(log: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PARENT, str(log), ENGINE], start_new_session=True)


def test_a_killed_parent_takes_its_engine_along_and_the_next_waits_for_it(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    first = parent(log)
    assert comes_true(lambda: len(pids(log)) == 2)
    one, child = pids(log)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    second = parent(log)
    try:
        assert comes_true(lambda: len(pids(log)) == 4)
        # When the second engine had begun, nothing of the first was left.
        assert not alive(one)
        assert not alive(child)
    finally:
        os.kill(second.pid, signal.SIGKILL)
        second.wait()
    assert comes_true(lambda: not any(map(alive, pids(log))))


def test_what_cannot_be_started_is_said_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    words = [sys.executable, "-m", "crosstie.prove.loop.watchdog", str(log), str(tmp_path / "no-such-engine")]
    assert subprocess.run(words, stdin=subprocess.PIPE, check=False).returncode == 127
    assert "no-such-engine: No such file" in log.read_text()
