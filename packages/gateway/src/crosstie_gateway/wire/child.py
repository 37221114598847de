"""Child processes that say in JSON when they are ready. A pipe from the parent closes when that ends, however it ends,
so no child outlives it."""

import asyncio
import contextlib
import json
import os
import select
import signal
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
# How often the parent is looked for, in case something that it forked holds the pipe open.
_CHECK_S = 2.0


class Child:
    """A running one; `stop` ends it, as does leaving a `with` block, or the end of this process."""

    def __init__(self, process: subprocess.Popen[bytes]):
        self.process = process

    def stop(self, grace_s: float = _GRACE_S) -> int:
        """Its exit status; one that takes longer is killed."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            # What it has started itself ends by itself when it has gone.
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        return self.process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class ChildFailed(Exception):
    """`fate`: how it ended, or that it did not answer in time; `lines`: what it has written to stderr."""

    def __init__(self, fate: str, lines: list[str]):
        super().__init__(fate)
        self.fate, self.lines = fate, lines


def start_child(command: Sequence[str], wait_s: float = _WAIT_S) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """The process, and what it says when it is ready. Raises ChildFailed."""
    # What it complains of goes to a file: a pipe that nobody reads would stop it in the end.
    with tempfile.TemporaryFile() as complaints:
        # In a session of its own: Ctrl-C is for the parent, which may have streams to finish.
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True
        )
        said = _announced(process, wait_s)
        if said is None:
            fate = _fate(process) or f"was not ready after {wait_s:g} s"
            process.kill()
            process.communicate()
            complaints.seek(0)
            lines = [line.strip() for line in complaints.read().decode(errors="replace").splitlines()]
            raise ChildFailed(fate, [line for line in lines if line])
    return process, said


def start_crosstie(arguments: Sequence[str], failed: str) -> tuple[subprocess.Popen[bytes], dict[str, Any]]:
    """`crosstie ARGUMENTS --json --with-parent`. `failed` begins the error where it does not start."""
    try:
        # -P: no folder that the user happens to be in is searched for modules.
        return start_child([sys.executable, "-P", "-m", "crosstie", *arguments, "--json", "--with-parent"])
    except ChildFailed as error:
        why = error.lines[-1].removeprefix("crosstie: ") if error.lines else f"it {error.fate}"
        raise BadInput(f"{failed}: {why}") from None


def _fate(process: subprocess.Popen[bytes]) -> str:
    """How it ended; empty: it has not. One that has closed its output is about to."""
    try:
        status = process.wait(_GRACE_S)
    except subprocess.TimeoutExpired:
        return ""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"


def _announced(process: subprocess.Popen[bytes], wait_s: float) -> dict[str, Any] | None:
    """A JSON object, over one line or several; None if the child ends or takes too long."""
    if process.stdout is None:
        return None
    deadline = time.monotonic() + wait_s
    said = b""
    while True:
        ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
        piece = os.read(process.stdout.fileno(), 65536) if ready else b""
        if not piece:
            return None
        said += piece
        with contextlib.suppress(json.JSONDecodeError):
            announced: dict[str, Any] = json.loads(said)
            return announced


def when_orphaned(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> None:
    """Calls once the parent has ended, or has closed the pipe that is standard input here."""

    def wait() -> None:
        wait_until_orphaned(os.getppid())
        loop.call_soon_threadsafe(call)

    threading.Thread(target=wait, daemon=True).start()


def wait_until_orphaned(parent: int) -> None:
    # Not through Python's own buffer: who ends for another reason would find it held by this thread, and abort.
    while os.getppid() == parent:
        readable, _, _ = select.select([sys.stdin.fileno()], [], [], _CHECK_S)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            return
