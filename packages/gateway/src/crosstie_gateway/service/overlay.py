"""What administrators have changed of a fleet: changes laid over its file, in the order in which they were made.

Nothing here knows a file, a clock or a gateway. A change that the fleet below it does not allow (any more) is left out,
with the reason; the others hold.
"""

import math
from collections.abc import Callable, Iterable, Sequence
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
            fleet = _STEPS[change.action](fleet, change)
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
        return tuple(one for one in kept if one != admitted)
    if new.action == "weight":
        kept = _without_weights(kept, new.weights)
    elif new.action in ("add-backend", "remove-backend"):
        adds = new.action == "add-backend"
        undone = msgspec.structs.replace(new, action="remove-backend" if adds else "add-backend")
        gone = [undone] if adds else [undone, msgspec.structs.replace(new, action="drain")]
        was_undone, kept = undone in kept, [one for one in kept if one not in gone]
        if was_undone:
            return tuple(kept)
    elif new.action == "remove-pool":
        added_too = any(one.action == "add-pool" and one.pool == new.pool for one in kept)
        kept = _without_weights(kept, (new.pool or "",))
        kept = [one for one in kept if one.pool != new.pool or one.action == "remove-pool"]
        if added_too or new in kept:
            return tuple(kept)
    return (*kept, new)


def _without_weights(changes: Iterable[Change], names: Iterable[str]) -> list[Change]:
    gone = set(names)
    kept = []
    for one in changes:
        weights = {name: weight for name, weight in one.weights.items() if name not in gone}
        if weights or one.action != "weight":
            kept.append(msgspec.structs.replace(one, weights=weights))
    return kept


# One change of a fleet each; BadInput says why it does not apply.


def _drain(fleet: Fleet, change: Change) -> Fleet:
    if change.backend is not None:
        pool_of(fleet, change.backend)
    else:
        pool_named(fleet, change.pool or "")
    return fleet


def _admit(fleet: Fleet, change: Change) -> Fleet:
    """What the file says is drained is so no more."""
    pool = pool_named(fleet, change.pool or "")
    if not pool.drained:
        raise BadInput(f"pool {pool.name} is not drained in the fleet file any more")
    made = msgspec.structs.replace(pool, drained=False)
    return _with_pools(fleet, tuple(made if one is pool else one for one in fleet.pools))


def _add_pool(fleet: Fleet, change: Change) -> Fleet:
    if change.made is None:
        raise BadInput("no pool is given")
    return _with_pools(fleet, (*fleet.pools, change.made))


def _add_backend(fleet: Fleet, change: Change) -> Fleet:
    pool = pool_named(fleet, change.pool or "")
    _check_not_led(pool)
    return _with_backends(fleet, pool, (*pool.backends, change.backend or ""))


def _remove_backend(fleet: Fleet, change: Change) -> Fleet:
    pool = pool_of(fleet, change.backend or "")
    _check_not_led(pool)
    if len(pool.backends) == 1:
        raise BadInput(f"{change.backend} is the only backend of pool {pool.name}: remove the pool, or drain it")
    return _with_backends(fleet, pool, tuple(one for one in pool.backends if one != change.backend))


def _remove_pool(fleet: Fleet, change: Change) -> Fleet:
    gone = pool_named(fleet, change.pool or "")
    pools = tuple(pool for pool in fleet.pools if pool is not gone)
    if not pools:
        raise BadInput(f"{gone.name} is the only pool of the fleet; it can be drained")
    served = {model for pool in pools for model in (pool.model, *(hosted.model for hosted in pool.hosts))}
    for one in fleet.classes:
        if one.model not in served:
            raise BadInput(f"class {one.name} asks for {one.model}, which no other pool serves; it can be drained")
    classes = tuple(_without_routes(one, gone.name) for one in fleet.classes)
    return _with_pools(msgspec.structs.replace(fleet, classes=classes), pools)


def _weigh(fleet: Fleet, change: Change) -> Fleet:
    for name, weight in change.weights.items():
        pool_named(fleet, name)
        if not (math.isfinite(weight) and 0 <= weight <= 1e6):
            raise BadInput(f"weights.{name}: {weight:g} is not from 0 to 1,000,000")
    pools = (msgspec.structs.replace(pool, weight=change.weights.get(pool.name, pool.weight)) for pool in fleet.pools)
    return _with_pools(fleet, tuple(pools))


_STEPS: dict[Action, Callable[[Fleet, Change], Fleet]] = {
    "drain": _drain,
    "admit": _admit,
    "add-pool": _add_pool,
    "add-backend": _add_backend,
    "remove-pool": _remove_pool,
    "remove-backend": _remove_backend,
    "weight": _weigh,
}


def pool_named(fleet: Fleet, name: str) -> Pool:
    found = next((pool for pool in fleet.pools if pool.name == name), None)
    if found is None:
        near = near_names(name, [pool.name for pool in fleet.pools])
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(p.name for p in fleet.pools)}"
        raise BadInput(f"there is no pool '{name}'; {hint}")
    return found


def pool_of(fleet: Fleet, backend: str) -> Pool:
    found = next((pool for pool in fleet.pools if backend in (*pool.backends, *pool.led_backends)), None)
    if found is None:
        raise BadInput(f"no pool has the backend {backend}")
    return found


def _check_not_led(pool: Pool) -> None:
    if pool.led_backends:
        raise BadInput(f"pool {pool.name} has prefill and decode engines: change them in the fleet file, and reload it")


def _with_backends(fleet: Fleet, changed: Pool, backends: tuple[str, ...]) -> Fleet:
    made = msgspec.structs.replace(changed, backends=backends, replicas=len(backends))
    return _with_pools(fleet, tuple(made if pool is changed else pool for pool in fleet.pools))


def _with_pools(fleet: Fleet, pools: tuple[Pool, ...]) -> Fleet:
    check_pools(_CHANGED, pools, fleet.policy)
    return msgspec.structs.replace(fleet, pools=pools)


def _without_routes(one: ServedClass, pool: str) -> ServedClass:
    """The others of the same lengths take over what went there, in proportion."""
    left = [route for route in one.routes if route.pool != pool]
    shares: dict[int | None, list[float]] = {}
    for route in left:
        shares.setdefault(route.up_to_input, []).append(route.share)
    routes = []
    for route in left:
        together = shares[route.up_to_input]
        total = math.fsum(together)
        grown = route.share / total if total > 0 else 1.0 / len(together)
        routes.append(msgspec.structs.replace(route, share=grown))
    return msgspec.structs.replace(one, routes=tuple(routes))
