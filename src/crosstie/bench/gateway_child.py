"""A gateway over an emulated fleet, in processes of its own, so that each has its own time and ends with this one."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Policy

_WAIT_S = 60.0
_GRACE_S = 5.0


class GatewayChild:
    """`crosstie serve --emulate` as a child. `url` is without /v1; `backends` are the replicas' own, by pool."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, backends: dict[str, list[str]]):
        self.process, self.url, self.backends = process, url, backends

    def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            # Its own child ends by itself when this one has gone.
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU that the gateway and the emulation have used; empty where the system does not say."""
        found = {}
        with contextlib.suppress(OSError, IndexError, ValueError):
            found["gateway"] = _cpu_s(self.process.pid)
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            found["emulation"] = sum(_cpu_s(int(pid)) for pid in children)
        return found

    def __enter__(self) -> "GatewayChild":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_gateway(
    fleet: Path, *, speed: float, policy: Policy | None = None, options: tuple[str, ...] = ()
) -> GatewayChild:
    """Serves an emulated fleet on a free port of this machine; returns when it answers."""
    command = [sys.executable, "-P", "-m", "crosstie", "serve", str(fleet), "--emulate", "--speed", str(speed)]
    if policy is not None:
        command += ["--policy", policy]
    with tempfile.TemporaryFile() as errors:
        # In a session of its own: Ctrl-C is for the parent, which then closes this one's input.
        process = subprocess.Popen(
            [*command, "--port", "0", "--json", "--with-parent", *options],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, start_new_session=True,
        )  # fmt: skip
        said = _announced(process)
        if said is None:
            process.kill()
            process.wait()
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            why = lines[-1].removeprefix("crosstie: ") if lines else f"it did not answer within {_WAIT_S:g} s"
            raise BadInput(f"the gateway could not be started: {why}")
    backends = {name: list(pool["backends"]) for name, pool in said["pools"].items()}
    return GatewayChild(process, said["url"].removesuffix("/v1"), backends)


def _announced(process: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """What the child says when it is ready, a JSON object over several lines; None if it ends or takes too long."""
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


def _cpu_s(pid: int) -> float:
    # The name may have spaces and brackets; what follows the last bracket has none.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
