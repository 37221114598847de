"""What a simulation is of: a fleet file, a saved plan, or a workload, which is planned first."""

from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from crosstie.catalog.addresses import is_found
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import read_toml
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.core.errors import BadData, BadInput
from crosstie.core.fleet import Fleet
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import Workload
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.plan import Plan, plan
from crosstie.decide.plan.report import meet_folders, read_saved


@dataclass(frozen=True, slots=True)
class Subject:
    """A fleet with the name that it goes by in tables, and the workload that it came with, if it did."""

    label: str
    fleet: Fleet
    workload: Workload | None
    # What is in the file and not in the fleet.
    notes: tuple[str, ...] = ()
    # By model: what its replicas take in simulation over what closed forms say, where the plan was confirmed.
    correction: dict[str, float] = field(default_factory=dict)


def read_subject(catalog: Catalog, file: Path, on_progress: OnProgress = no_progress) -> Subject:
    """By what the file says; a name without a file is that of a shipped workload."""
    if file.is_file() and _begins_as_json(file):
        return _saved(catalog, file)
    if file.is_file() and "pool" in read_toml(file):
        fleet = read_fleet(catalog, file)
        own, notes = _without_providers(fleet)
        return Subject(file.stem, _addressed(own), None, notes)
    workload = read_workload(catalog, find_workload(file))
    return of_plan(plan(catalog, workload, on_progress=on_progress, confirm=True))


def of_plan(made: Plan) -> Subject:
    if not made.answered:
        raise BadInput(f"{made.workload.name}: no fleet will do, so none is simulated; `crosstie plan` says why")
    correction = made.confirmed.correction if made.confirmed else {}
    return Subject(made.workload.name, _addressed(fleet_of(made)), made.workload, correction=correction)


def of_fleet(fleet: Fleet) -> Subject:
    own, notes = _without_providers(fleet)
    return Subject(fleet.name, _addressed(own), None, notes)


def _without_providers(fleet: Fleet) -> tuple[Fleet, tuple[str, ...]]:
    """Without the pools that are paid by the token, since nothing says how fast a provider is; and that it is so."""
    gone = {pool.name for pool in fleet.pools if pool.token_price is not None}
    if not gone:
        return fleet, ()
    pools = tuple(pool for pool in fleet.pools if pool.name not in gone)
    if not pools:
        raise BadInput(f"fleet '{fleet.name}': every pool is paid by the token, and a provider is not simulated")
    classes = tuple(
        msgspec.structs.replace(one, routes=tuple(route for route in one.routes if route.pool not in gone))
        for one in fleet.classes
    )
    named = ", ".join(sorted(gone))
    note = f"{fleet.name}: without {named}, paid by the token: what the fleet has no room for is turned away here"
    return msgspec.structs.replace(fleet, pools=pools, classes=classes), (note,)


def _begins_as_json(file: Path) -> bool:
    try:
        with file.open("rb") as opened:
            return opened.read(64).lstrip().startswith(b"{")
    except OSError as error:
        raise BadData(file, "", f"cannot be read: {error.strerror}") from None


def _saved(catalog: Catalog, file: Path) -> Subject:
    saved = read_saved(file)
    try:
        fleet = msgspec.json.decode(saved.fleet_file, type=Fleet | None)
    except msgspec.MsgspecError as error:
        raise BadData(file, "fleet_file", str(error)) from None
    if fleet is None:
        why = "has no fleet: it was infeasible, or saved by an earlier version; `crosstie plan --save` makes it again"
        raise BadData(file, "fleet_file", why)
    meet_folders(catalog, file, saved.workload)
    correction = saved.confirmed.correction if saved.confirmed else {}
    return Subject(file.stem, _addressed(fleet), saved.workload, correction=correction)


def _addressed(fleet: Fleet) -> Fleet:
    """Replicas are told apart by their addresses; those of a plan have none yet, or one name together."""
    if any(pool.hosts for pool in fleet.pools):
        raise BadInput(
            f"fleet '{fleet.name}': pools that host several models are not simulated behind a policy; "
            "`crosstie plan --simulate` does those of a plan"
        )
    unknown = [pool.name for pool in fleet.pools if pool.accelerator is None]
    if unknown:
        raise BadInput(
            f"fleet '{fleet.name}': pool {unknown[0]} names no accelerator, so nothing says how fast it is; "
            "accelerator, parallelism and stack do"
        )
    pools = tuple(
        pool
        if pool.backends and not any(map(is_found, pool.backends))
        else msgspec.structs.replace(
            pool, backends=tuple(f"http://{pool.name}-{number}" for number in range(pool.replicas))
        )
        for pool in fleet.pools
    )
    return msgspec.structs.replace(fleet, pools=pools)
