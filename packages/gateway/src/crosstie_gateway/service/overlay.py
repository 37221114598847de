"""What administrators have changed of a fleet: changes laid over its file in their order. No file, clock or gateway
here. A change that the fleet below does not allow is left out with the reason."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from crosstie.catalog.fleets import check_pools
from crosstie.core.errors import BadInput, CrosstieError, near_names
from crosstie.core.fleet import Fleet, Pool, ServedClass

Action = Literal["drain", "admit", "add-pool", "add-backend", "remove-pool", "remove-backend", "weight"]
# What the reader of fleet files puts in the place of the file's name when pools with a change do not go together.
_CHANGED = Path("the fleet with this change")


class Change(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Of a pool, or of a `backend` of it; `made` is the pool that was added; weights are by pool."""

    action: Action
    pool: str | None = None
    backend: str | None = None
    made: Pool | None = None
    weights: dict[str, float] = {}

    @property
    def words(self) -> str:
        if self.action == "weight":
            return "weight " + ", ".join(f"{name} = {weight:g}" for name, weight in self.weights.items())
        if self.action == "add-backend":
            return f"add backend {self.backend} to pool {self.pool}"
        verb = self.action.split("-")[0]
        return f"{verb} backend {self.backend}" if self.backend else f"{verb} pool {self.pool}"


@dataclass(frozen=True, slots=True)
class Laid:
    """A fleet with its changes. `drained`: names of pools and addresses of backends."""

    fleet: Fleet
    drained: frozenset[str]
    kept: tuple[Change, ...]
    left_out: tuple[tuple[Change, str], ...]


def laid_over(fleet: Fleet, changes: Iterable[Change]) -> Laid:
    drained: set[str] = set()
    kept: list[Change] = []
    left_out: list[tuple[Change, str]] = []
    for change in changes:
        try:
            fleet = _applied(fleet, change)
        except CrosstieError as error:
            left_out.append((change, str(error)))
            continue
        kept.append(change)
        if change.action == "drain":
            drained.add(change.backend or change.pool or "")
    drained |= {pool.name for pool in fleet.pools if pool.drained}
    return Laid(fleet, frozenset(drained), tuple(kept), tuple(left_out))


# What an administrator asks for, as the changes that hold afterwards: what undoes an earlier one takes it away.


def with_change(changes: Sequence[Change], new: Change) -> tuple[Change, ...]:
    kept = list(changes)
    if new in kept and new.action != "remove-pool":
        return tuple(kept)
    admitted = Change(action="admit", pool=new.pool)
    if new.action == "drain" and new.backend is None and admitted in kept:
        # Its file has it drained.
        return tuple(change for change in kept if change != admitted)
    if new.action == "weight":
        kept = _without_weights(kept, new.weights)
    elif new.action in ("add-backend", "remove-backend"):
        adds = new.action == "add-backend"
        undone = msgspec.structs.replace(new, action="remove-backend" if adds else "add-backend")
        gone = [undone] if adds else [undone, msgspec.structs.replace(new, action="drain")]
        was_undone, kept = undone in kept, [change for change in kept if change not in gone]
        if was_undone:
            return tuple(kept)
    elif new.action == "remove-pool":
        added_too = any(change.action == "add-pool" and change.pool == new.pool for change in kept)
        kept = _without_weights(kept, (new.pool or "",))
        kept = [change for change in kept if change.pool != new.pool or change.action == "remove-pool"]
        if added_too or new in kept:
            return tuple(kept)
    return (*kept, new)


def _without_weights(changes: Iterable[Change], names: Iterable[str]) -> list[Change]:
    gone = set(names)
    kept = []
    for change in changes:
        weights = {name: weight for name, weight in change.weights.items() if name not in gone}
        if weights or change.action != "weight":
            kept.append(msgspec.structs.replace(change, weights=weights))
    return kept


def _applied(fleet: Fleet, change: Change) -> Fleet:
    """The fleet with this change; BadInput says why it does not apply."""
    name, backend = change.pool or "", change.backend or ""
    match change.action:
        case "drain":
            pool_of(fleet, backend) if backend else pool_named(fleet, name)
            return fleet
        case "admit":
            pool = pool_named(fleet, name)
            if not pool.drained:
                raise BadInput(f"pool {pool.name} is not drained in the fleet file any more")
            return _exchanged(fleet, pool, msgspec.structs.replace(pool, drained=False))
        case "add-pool":
            if change.made is None:
                raise BadInput("no pool is given")
            return _with_pools(fleet, (*fleet.pools, change.made))
        case "add-backend":
            pool = pool_named(fleet, name)
            return _with_backends(fleet, pool, (*pool.backends, backend))
        case "remove-backend":
            pool = pool_of(fleet, backend)
            if len(pool.backends) == 1 and not pool.led_backends:
                raise BadInput(f"{backend} is the only backend of pool {pool.name}: remove the pool, or drain it")
            return _with_backends(fleet, pool, tuple(known for known in pool.backends if known != backend))
        case "remove-pool":
            return _without_pool(fleet, pool_named(fleet, name))
        case "weight":
            return _weighed(fleet, change.weights)


def _without_pool(fleet: Fleet, gone: Pool) -> Fleet:
    pools = tuple(pool for pool in fleet.pools if pool is not gone)
    if not pools:
        raise BadInput(f"{gone.name} is the only pool of the fleet; it can be drained")
    served = {model for pool in pools for model in (pool.model, *(hosted.model for hosted in pool.hosts))}
    for asks in fleet.classes:
        if asks.model not in served:
            raise BadInput(f"class {asks.name} asks for {asks.model}, which no other pool serves; it can be drained")
    classes = tuple(_without_routes(asks, gone.name) for asks in fleet.classes)
    return _with_pools(msgspec.structs.replace(fleet, classes=classes), pools)


def _weighed(fleet: Fleet, weights: dict[str, float]) -> Fleet:
    for name, weight in weights.items():
        pool_named(fleet, name)
        if not (math.isfinite(weight) and 0 <= weight <= 1e6):
            raise BadInput(f"weights.{name}: {weight:g} is not from 0 to 1,000,000")
    pools = (msgspec.structs.replace(pool, weight=weights.get(pool.name, pool.weight)) for pool in fleet.pools)
    return _with_pools(fleet, tuple(pools))


def pool_named(fleet: Fleet, name: str) -> Pool:
    match = next((pool for pool in fleet.pools if pool.name == name), None)
    if match is None:
        near = near_names(name, [pool.name for pool in fleet.pools])
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(p.name for p in fleet.pools)}"
        raise BadInput(f"there is no pool '{name}'; {hint}")
    return match


def pool_of(fleet: Fleet, backend: str) -> Pool:
    owner = next((pool for pool in fleet.pools if backend in (*pool.backends, *pool.led_backends)), None)
    if owner is None:
        raise BadInput(f"no pool has the backend {backend}")
    return owner


def _with_backends(fleet: Fleet, pool: Pool, backends: tuple[str, ...]) -> Fleet:
    if pool.led_backends:
        raise BadInput(f"pool {pool.name} has prefill and decode engines: change them in the fleet file, and reload it")
    return _exchanged(fleet, pool, msgspec.structs.replace(pool, backends=backends, replicas=len(backends)))


def _exchanged(fleet: Fleet, before: Pool, made: Pool) -> Fleet:
    return _with_pools(fleet, tuple(made if pool is before else pool for pool in fleet.pools))


def _with_pools(fleet: Fleet, pools: tuple[Pool, ...]) -> Fleet:
    check_pools(_CHANGED, pools, fleet.policy)
    return msgspec.structs.replace(fleet, pools=pools)


def _without_routes(served: ServedClass, pool: str) -> ServedClass:
    """The class without routes to a pool; routes for the same lengths take over its share."""
    left = [route for route in served.routes if route.pool != pool]
    shares: dict[int | None, list[float]] = {}
    for route in left:
        shares.setdefault(route.up_to_input, []).append(route.share)
    routes = []
    for route in left:
        together = shares[route.up_to_input]
        total = math.fsum(together)
        grown = route.share / total if total > 0 else 1.0 / len(together)
        routes.append(msgspec.structs.replace(route, share=grown))
    return msgspec.structs.replace(served, routes=tuple(routes))
