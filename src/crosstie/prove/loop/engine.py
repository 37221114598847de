"""An engine for as long as it is needed: started by its command, waited for, its log kept, ended in every case."""

import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from crosstie.core.errors import CrosstieError
from crosstie.core.progress import OnProgress
from crosstie.wire.address import Address
from crosstie.wire.fetch import fetch_once
from crosstie.wire.loops import run_on_loop

_ASK_EVERY_S = 0.25
# How long the watchdog may take to see that the engine has gone.
_SHOWS_S = 2.0
# The watchdog's own grace, and a little.
_END_S = 45.0
_LAST_LINES = 3
_KILLED = 128
PORT = "{port}"


class EngineFailed(CrosstieError):
    """It did not start, or did not answer in time."""


@dataclass(frozen=True)
class RunningEngine:
    url: str
    # Seconds until it was healthy.
    started_s: float
    watchdog: subprocess.Popen[bytes]
    log: Path

    def check(self) -> None:
        """After something went wrong: raises EngineFailed where the engine has ended, which shows in a moment."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = self.watchdog.wait(_SHOWS_S)
            raise EngineFailed(f"the engine {_fate(status)}: {_last(self.log)}")


@contextmanager
def running_engine(
    command: Sequence[str], variables: Mapping[str, str], log: Path, *, health: str, wait_s: float,
    environment: Mapping[str, str], on_progress: OnProgress,
) -> Iterator[RunningEngine]:  # fmt: skip
    """The engine that the command starts, once it is healthy. PORT in the command stands for a port that is free."""
    port = _free_port()
    words = [word.replace(PORT, str(port)) for word in command]
    watchdog = subprocess.Popen(
        [sys.executable, "-P", "-m", "crosstie.prove.loop.watchdog", str(log.absolute()), *words],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, env={**environment, **variables},
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    try:
        yield RunningEngine(url, _healthy(watchdog, url + health, log, wait_s, on_progress), watchdog, log)
    finally:
        assert watchdog.stdin is not None
        watchdog.stdin.close()
        try:
            watchdog.wait(_END_S)
        except subprocess.TimeoutExpired:
            watchdog.kill()
            watchdog.wait()


def _healthy(watchdog: subprocess.Popen[bytes], url: str, log: Path, wait_s: float, on_progress: OnProgress) -> float:
    began, address = time.monotonic(), Address(url)
    while True:
        waited = time.monotonic() - began
        if watchdog.poll() is not None:
            raise EngineFailed(f"the engine {_fate(watchdog.returncode)} after {waited:.0f} s: {_last(log)}")
        if waited > wait_s:
            raise EngineFailed(f"the engine was not healthy after {wait_s:.0f} s: {_last(log)}")
        on_progress(0, 0, f"engine: {waited:.0f} s, {''.join(_lines(log)[-1:])[-60:]}")
        try:
            answer = run_on_loop(fetch_once(address, "GET", address.root, timeout_s=2.0))
            if answer.status == 200:
                return time.monotonic() - began
        except OSError:
            pass
        time.sleep(_ASK_EVERY_S)


def _fate(status: int) -> str:
    named = [Signal.name for Signal in signal.Signals if status == _KILLED + Signal]
    return f"was killed by {named[0]}" if named else f"ended with status {status}"


def _last(log: Path) -> str:
    """The log's last lines, and where the others are."""
    said = " | ".join(line[:160] for line in _lines(log)[-_LAST_LINES:])
    return f"{said or 'it said nothing'} ({log})"


def _lines(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - 4000, 0))
            said = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [" ".join(line.split()) for line in said if line.strip()]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
