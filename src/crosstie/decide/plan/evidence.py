"""What passing over unmeasured stacks costs: the fleet that they would make, beside the answer.

Stacks that nobody measured with such a model on an accelerator are not compared, since among many estimates the best
looking are those that err most. Where they look far cheaper, whoever pays should know, and measure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.measured import measured_apart
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.workload import Workload
from crosstie.decide.plan.answer import Alternative, PoolPlan, alternative
from crosstie.decide.plan.gate import Gate
from crosstie.decide.plan.optimise import Choice
from crosstie.decide.plan.scaling import Reading
from crosstie.decide.plan.solver import solve
from crosstie.decide.plan.survey import of_one_stack, offers, surveys

# A saving below this share is within what estimates err by.
_WORTH_SAYING = 0.1


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """The fleet with all stacks compared, and those of them that nobody measured there."""

    stacks: tuple[str, ...]
    fleet: Alternative


def is_known_apart(catalog: Catalog, workload: Workload, pools: Iterable[PoolPlan]) -> bool:
    """Whether a fleet may be the answer: where nobody has published what a model does there with prefill and decode
    apart, such pools stand beside it with what they would save, unless all may compete."""
    if workload.constraints.evidence == "any":
        return True
    services = [pool.deployment for pool in pools if isinstance(pool.deployment, Disaggregated)]
    return all(measured_apart(catalog, side) for service in services for side in (service.prefill, service.decode))


def with_unmeasured(
    catalog: Catalog, workload: Workload, gate: Gate, asked: Choice, scaling: Reading, usd_per_hour: float
) -> Unmeasured | None:
    """None where it saves little. `usd_per_hour`: of the fleet that it is compared with, by the same measure."""
    if not gate.passed_over:
        return None
    limits = msgspec.structs.replace(workload.constraints, evidence="any")
    every = msgspec.structs.replace(workload, constraints=limits)
    where = _accelerators(gate.passed_over.values())
    kinds = [item.accelerator for item in asked.market.items if item.id in where]
    tried = of_one_stack(surveys(catalog, every, kinds, gate=Gate(catalog, every)), scaling)
    read = asked.by(offers(tried, scaling, peak=asked.peak))
    solution = solve(read.problem, quickly=True)
    fleet = alternative(read, solution, usd_per_hour)
    if solution is None or fleet is None or fleet.dearer > -_WORTH_SAYING:
        return None
    used = [read.offers.columns[i].deployment.decode for i in np.flatnonzero(solution.replicas)]
    over = [d.stack.name for d in used if d.accelerator.id in gate.passed_over.get((d.model.id, d.stack.name), ())]
    return Unmeasured(tuple(dict.fromkeys(over)), fleet) if over else None


def _accelerators(lists: Iterable[list[str]]) -> set[str]:
    return {name for names in lists for name in names}
