"""A `crosstie` command as a child process: it says where it answers, and ends when its input closes.

A pipe that the parent holds open closes when the parent ends, however it ends, so no child outlives it.
"""

import asyncio
import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from crosstie.core.errors import BadInput

_WAIT_S = 60.0
_GRACE_S = 5.0


class Child:
    """A running one; `stop` ends it, as does leaving a `with` block, or the end of this process."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self.process = process

    def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            # What it has started itself ends by itself when it has gone.
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_child(command: Sequence[str], failed: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """`crosstie COMMAND --json --with-parent`, and what it says when it is ready. `failed` begins the error if not."""
    # What it complains of goes to a file: a pipe that nobody reads would stop it in the end.
    with tempfile.TemporaryFile() as complaints:
        # In a session of its own: Ctrl-C is for the parent, which may have streams to finish.
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "crosstie", *command, "--json", "--with-parent"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True,
        )  # fmt: skip
        said = _announced(process)
        if said is None:
            process.kill()
            process.communicate()
            complaints.seek(0)
            lines = complaints.read().decode(errors="replace").strip().splitlines()
            why = lines[-1].removeprefix("crosstie: ") if lines else f"it did not answer within {_WAIT_S:g} s"
            raise BadInput(f"{failed}: {why}")
    return process, said


def _announced(process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """A JSON object, over one line or several; None if the child ends or takes too long."""
    if process.stdout is None:
        return None
    deadline = time.monotonic() + _WAIT_S
    said = b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
        piece = os.read(process.stdout.fileno(), 65536) if ready else b""
        if not piece:
            return None
        said += piece
        with contextlib.suppress(json.JSONDecodeError):
            found: dict[str, Any] = json.loads(said)
            return found


def when_orphaned(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Calls once standard input has closed, which whoever started this process holds open as long as it lives."""
    threading.Thread(target=_wait, args=(loop, call), daemon=True).start()


def _wait(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    # Not through Python's own buffer: who ends for another reason would find it held by this thread, and abort.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    loop.call_soon_threadsafe(call)
