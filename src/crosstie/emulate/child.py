"""Emulated replicas in a process of their own, so that their arithmetic takes no time from whoever asks for them."""

import subprocess
from pathlib import Path

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.wire.child import Child, start_child


class EmulatedChild(Child):
    """`crosstie emulate` as a child, with the addresses of its replicas by pool."""

    def __init__(self, process: subprocess.Popen[bytes], backends: dict[str, tuple[str, ...]]):
        super().__init__(process)
        self.backends = backends

    def placed(self, fleet: Fleet) -> Fleet:
        """The fleet with the addresses of its emulated replicas."""
        for pool in fleet.pools:
            if len(self.backends.get(pool.name, ())) != pool.replicas:
                raise BadInput(
                    f"pool {pool.name}: {pool.replicas} replicas are not being emulated; start again for that"
                )
        pools = tuple(msgspec.structs.replace(pool, backends=self.backends[pool.name]) for pool in fleet.pools)
        return msgspec.structs.replace(fleet, pools=pools)


def start_emulated(file: Path, *, speed: float = 1.0, options: tuple[str, ...] = ()) -> EmulatedChild:
    """Emulates the fleet of a file; returns when its replicas answer."""
    process, said = start_child(["emulate", str(file), "--speed", str(speed), *options], "the fleet cannot be emulated")
    backends: dict[str, tuple[str, ...]] = {}
    for one in said["replicas"]:
        backends[one["pool"]] = (*backends.get(one["pool"], ()), one["url"])
    return EmulatedChild(process, backends)
