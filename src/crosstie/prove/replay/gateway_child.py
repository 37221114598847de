"""A gateway over an emulated fleet, in processes of its own, so that each has its own time and ends with this one."""

import contextlib
import os
import subprocess
from pathlib import Path

from crosstie.core.fleet import Policy
from crosstie.run.wire.child import Child, start_child


class GatewayChild(Child):
    """`crosstie serve --emulate` as a child. `url` is without /v1; `backends` are the replicas' own, by pool."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, backends: dict[str, list[str]]):
        super().__init__(process)
        self.url, self.backends = url, backends

    def cpu_s(self) -> dict[str, float]:
        """Seconds of CPU that the gateway and the emulation have used; empty where the system does not say."""
        found = {}
        with contextlib.suppress(OSError, IndexError, ValueError):
            found["gateway"] = _cpu_s(self.process.pid)
            children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
            found["emulation"] = sum(_cpu_s(int(pid)) for pid in children)
        return found


def start_gateway(
    fleet: Path, *, speed: float, policy: Policy | None = None, options: tuple[str, ...] = ()
) -> GatewayChild:
    """Serves an emulated fleet on a free port of this machine; returns when it answers."""
    command = ["serve", str(fleet), "--emulate", "--speed", str(speed), "--port", "0", *options]
    if policy is not None:
        command += ["--policy", policy]
    process, said = start_child(command, "the gateway could not be started")
    backends = {name: list(pool["backends"]) for name, pool in said["pools"].items()}
    return GatewayChild(process, said["url"].removesuffix("/v1"), backends)


def _cpu_s(pid: int) -> float:
    # The name may have spaces and brackets; what follows the last bracket has none.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
