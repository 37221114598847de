"""Emulated replicas in a process of their own, so that their arithmetic takes no time from whoever asks for them."""

import subprocess
from pathlib import Path

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Pool
from crosstie.run.emulate.fleet import placed
from crosstie.run.wire.child import Child, start_crosstie


class EmulatedChild(Child):
    """`crosstie emulate` as a child, with the addresses of its replicas by pool."""

    def __init__(self, process: subprocess.Popen[bytes], backends: dict[tuple[str, str | None], tuple[str, ...]]):
        """`backends`: by pool and, where the models of one have addresses of their own, by model."""
        super().__init__(process)
        self.backends = backends

    def placed(self, fleet: Fleet) -> Fleet:
        """The fleet with the addresses of its emulated replicas."""
        return msgspec.structs.replace(fleet, pools=tuple(map(self._placed, fleet.pools)))

    def _placed(self, pool: Pool) -> Pool:
        own = pool.hosts and pool.loading != "llamacpp-router"
        addresses = [self.backends.get((pool.name, one.model if own else None), ()) for one in pool.by_model()]
        if any(len(one) != pool.replicas for one in addresses):
            raise BadInput(f"pool {pool.name}: {pool.replicas} replicas are not being emulated; start again for that")
        return placed(pool, addresses)


def start_emulated(file: Path, *, speed: float = 1.0, options: tuple[str, ...] = ()) -> EmulatedChild:
    """Emulates the fleet of a file; returns when its replicas answer."""
    arguments = ["emulate", str(file), "--speed", str(speed), *options]
    process, said = start_crosstie(arguments, "the fleet cannot be emulated")
    backends: dict[tuple[str, str | None], tuple[str, ...]] = {}
    for one in said["replicas"]:
        key = one["pool"], one["hosted"]
        backends[key] = (*backends.get(key, ()), one["url"])
    return EmulatedChild(process, backends)
