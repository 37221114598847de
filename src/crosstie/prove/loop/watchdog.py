"""Starts an engine and ends it, and all that it has started, once whoever asked for it has gone, however that went.

    python -m crosstie.prove.loop.watchdog LOG COMMAND...

The pipe that is standard input here closes when the parent ends, by `kill -9` too. An engine that an earlier watchdog
of the same log is still ending is waited for: it has the memory of the GPUs.
"""

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
from types import FrameType
from typing import IO

# How long an engine may take to end by itself: it has memory of GPUs to give back.
_GRACE_S = 30.0
_LOOK_S = 0.1
_NOT_STARTED = 127


def main() -> int:
    log, *command = sys.argv[1:]
    asked: list[int] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        asked.append(number)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, on_signal)
    with open(log, "ab") as out:
        while not _alone(out):
            if asked or _orphaned():
                return _NOT_STARTED
        try:
            engine = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            out.write(f"{command[0]}: {error.strerror}\n".encode())
            return _NOT_STARTED
        while engine.poll() is None and not asked and not _orphaned():
            pass
        return end_group(engine)


def _alone(log: IO[bytes]) -> bool:
    """Whether no other watchdog has an engine that writes there; from then on nobody else may."""
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _orphaned() -> bool:
    """Looks for a moment."""
    readable, _, _ = select.select([sys.stdin.fileno()], [], [], _LOOK_S)
    return bool(readable) and not os.read(sys.stdin.fileno(), 4096)


def end_group(engine: subprocess.Popen[bytes]) -> int:
    """The engine's own exit status, or 128 and the signal's number. What it has started goes with its group."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        engine.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(engine.pid, signal.SIGKILL)
    status = engine.wait()
    # As shells have it.
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
