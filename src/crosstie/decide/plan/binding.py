"""Which limits of a workload cost money: the fleet without each of them, and what it would save."""

from dataclasses import dataclass, replace

import numpy as np

from crosstie.core.workload import Workload
from crosstie.decide.plan.answer import Alternative, alternative
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.programme import Programme, Solution
from crosstie.decide.plan.solver import solve

# A saving below this share is the solver's, not the limit's.
_WORTH_SAYING = 0.002


@dataclass(frozen=True, slots=True)
class Binding:
    """A limit by its key in the workload file, and the fleet that would do without it."""

    key: str
    now: str
    saves_usd_per_hour: float
    instead: Alternative


def bindings(asked: Choice, answer: Solution, workload: Workload) -> list[Binding]:
    """Limits that bind, those that cost most first."""
    found = []
    for key, now, freed in _lifted(asked, workload):
        other = solve(freed)
        instead = alternative(asked, other, answer.usd_per_hour)
        if other is None or instead is None:
            continue
        saved = answer.usd_per_hour - other.usd_per_hour
        if saved > _WORTH_SAYING * answer.usd_per_hour:
            found.append(Binding(key, now, saved, instead))
    return sorted(found, key=lambda one: -one.saves_usd_per_hour)


def _lifted(asked: Choice, workload: Workload) -> list[tuple[str, str, Programme]]:
    """Each limit that the workload sets, and the programme without it."""
    problem, limits = asked.problem, workload.constraints
    found = []
    if limits.power_kw is not None:
        found.append(("power_kw", f"{limits.power_kw:g}", replace(problem, power_watts=np.inf)))
    if np.any(problem.vendor_share > 0):
        shares = ", ".join(f"{vendor} {share:g}" for vendor, share in limits.vendor_share.items())
        found.append(("vendor_share", shares, replace(problem, vendor_share=np.zeros_like(problem.vendor_share))))
    if limits.whole_nodes:
        found.append(("whole_nodes", "true", replace(problem, unit=np.ones_like(problem.unit))))
    for index, item in enumerate(asked.market.items):
        if np.isfinite(item.at_most):
            free = problem.at_most.copy()
            free[index] = np.inf
            found.append((f"at_most.{item.id}", f"{item.at_most:g}", replace(problem, at_most=free)))
    return found
