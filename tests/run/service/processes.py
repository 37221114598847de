"""`crosstie` as processes that tests start, talk to and end, each with an empty user catalog of its own."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.waiting import comes_true as comes_true

import crosstie
import crosstie_gateway

# Two busy cores: a start takes a second or two, and may take ten times as long.
START_S = 180.0
END_S = 120.0
PYTHONPATH = os.pathsep.join(str(Path(str(made.__file__)).parents[1]) for made in (crosstie, crosstie_gateway))


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The code that this test has imported, whatever else is installed."""
    return {**os.environ, "PYTHONPATH": PYTHONPATH, "CROSSTIE_CATALOG": str(folder / "user-catalog"), **more}


def put(file: Path, text: str) -> None:
    """Replaced at once, as careful tools do it: half a file is no fleet, and a gateway that follows it would say so."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(file)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "crosstie", *map(str, arguments)]


class Running:
    """A command that has said in JSON that it is ready, and where."""

    def __init__(self, process: subprocess.Popen[bytes], said: dict[str, Any], complaints: Path):
        self.process, self.said, self._complaints = process, said, complaints

    @property
    def url(self) -> str:
        return str(self.said["url"])

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].removesuffix("/v1"))

    @property
    def errors(self) -> str:
        """What it has written to stderr so far."""
        return self._complaints.read_text()

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ends(self, number: signal.Signals | None = signal.SIGTERM) -> int:
        """The exit status, after the signal if one is to be sent."""
        if number is not None:
            self.send(number)
        return self.process.wait(END_S)

    def children(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in found]


@contextlib.contextmanager
def started(folder: Path, *arguments: str | Path) -> Iterator[Running]:
    """Whatever is left of it at the end is killed; its own children then end by themselves."""
    complaints = folder / f"stderr-{time.monotonic_ns()}"
    with complaints.open("wb") as lines:
        process = subprocess.Popen(
            command(*arguments, "--json"), stdout=subprocess.PIPE, stderr=lines, stdin=subprocess.DEVNULL,
            env=environment(folder),
        )  # fmt: skip
    try:
        yield Running(process, _announced(process, complaints), complaints)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@contextlib.contextmanager
def serving(folder: Path, *arguments: str | Path) -> Iterator[Running]:
    """`crosstie serve` on a free port."""
    with started(folder, "serve", *arguments, "--port", "0") as running:
        yield running


def _announced(process: subprocess.Popen[bytes], complaints: Path) -> dict[str, Any]:
    assert process.stdout is not None
    deadline = time.monotonic() + START_S
    said = b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
        piece = os.read(process.stdout.fileno(), 65536) if ready else b""
        assert piece, f"it never said that it was ready: {complaints.read_text()}"
        said += piece
        with contextlib.suppress(json.JSONDecodeError):
            found: dict[str, Any] = json.loads(said)
            return found


def gone(pid: int) -> bool:
    """Ended, reaped or not: whoever inherits an orphan may be slow to reap it."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"
