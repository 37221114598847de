"""Emulated replicas in a process of their own, so that their arithmetic takes no time from whoever asks for them."""

import json
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet

_WAIT_S = 60.0
_GRACE_S = 5.0


class EmulatedChild:
    """`crosstie emulate` as a child. It ends when its standard input closes, so it never outlives its parent."""

    def __init__(self, process: subprocess.Popen[bytes], backends: dict[str, tuple[str, ...]]):
        self.process, self.backends = process, backends

    def placed(self, fleet: Fleet) -> Fleet:
        """The fleet with the addresses of its emulated replicas."""
        for pool in fleet.pools:
            if len(self.backends.get(pool.name, ())) != pool.replicas:
                raise BadInput(
                    f"pool {pool.name}: {pool.replicas} replicas are not being emulated; start again for that"
                )
        pools = tuple(msgspec.structs.replace(pool, backends=self.backends[pool.name]) for pool in fleet.pools)
        return msgspec.structs.replace(fleet, pools=pools)

    def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> "EmulatedChild":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_emulated(file: Path, *, speed: float = 1.0, options: tuple[str, ...] = ()) -> EmulatedChild:
    """Emulates the fleet of a file; returns when its replicas answer."""
    command = [sys.executable, "-P", "-m", "crosstie", "emulate", str(file), "--speed", str(speed)]
    # What it complains of goes to a file: a pipe that nobody reads would stop it in the end.
    with tempfile.TemporaryFile() as complaints:
        # In a session of its own: Ctrl-C is for the parent, which may have streams to finish.
        process = subprocess.Popen(
            [*command, "--json", "--with-parent", *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, start_new_session=True,
        )  # fmt: skip
        said = _first_line(process)
        if said is None:
            process.kill()
            process.communicate()
            complaints.seek(0)
            lines = complaints.read().decode(errors="replace").strip().splitlines()
            why = lines[-1].removeprefix("crosstie: ") if lines else f"no answer within {_WAIT_S:g} s"
            raise BadInput(f"the fleet cannot be emulated: {why}")
    backends: dict[str, tuple[str, ...]] = {}
    for one in said["replicas"]:
        backends[one["pool"]] = (*backends.get(one["pool"], ()), one["url"])
    return EmulatedChild(process, backends)


def _first_line(process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """What the child says when it is ready; None if it ends or takes too long."""
    if process.stdout is None:
        return None
    deadline = time.monotonic() + _WAIT_S
    said = b""
    while not said.endswith(b"\n"):
        ready, _, _ = select.select([process.stdout], [], [], max(deadline - time.monotonic(), 0.0))
        piece = process.stdout.read1(65536) if ready else b""  # type: ignore[attr-defined]
        if not piece:
            return None
        said += piece
    found: dict[str, Any] = json.loads(said)
    return found
