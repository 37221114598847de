"""A plan that several tests look at is made once in a process, whichever file the workload was read from."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from crosstie.catalog.library import Catalog
from crosstie.cli import plan as plan_command, ui
from crosstie.core.workload import Workload
from crosstie.decide.plan import subject, watch
from crosstie.decide.plan.plan import Plan, plan

_MADE: dict[str, Plan] = {}


def plan_once(catalog: Catalog, workload: Workload, *, confirm: bool = False, today: str = "", **others: Any) -> Plan:
    """As `plan`: a catalog that has more than the shipped data is asked anew each time."""
    if any(folder.exists() for folder in catalog.directories[1:]):
        return plan(catalog, workload, confirm=confirm, today=today, **others)
    asked = repr((msgspec.structs.replace(workload, file=""), confirm, today))
    if asked not in _MADE:
        _MADE[asked] = plan(catalog, workload, confirm=confirm, today=today, **others)
    made = _MADE[asked]
    # With the classes that it was made with: what they are routed to is found by their identity.
    return replace(made, workload=msgspec.structs.replace(made.workload, file=workload.file))


@pytest.fixture
def planned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is said of a plan and written of it."""
    for module in (plan_command, subject, ui, watch):
        monkeypatch.setattr(module, "plan", plan_once)
