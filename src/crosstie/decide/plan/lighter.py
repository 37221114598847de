"""Lighter formats that the workload does not ask for: what an FP8 cache or FP4 weights would save.

They change what the model answers, so they are never chosen unless the workload names them (`models.NAME.kv`,
`models.NAME.precisions`); but nobody should pay for a wider format without knowing its price.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.workload import ModelChoice, Workload
from crosstie.decide.plan.answer import Alternative, alternative
from crosstie.decide.plan.gate import Gate
from crosstie.decide.plan.market import Market
from crosstie.decide.plan.optimise import choice
from crosstie.decide.plan.scaling import scaling_of
from crosstie.decide.plan.solver import solve
from crosstie.decide.plan.survey import Survey, of_one_stack, offers, peak_of, surveys, undominated

# What is tried, with the keys of a model's choice that it adds to.
_TRIED: dict[str, dict[str, tuple[str, ...]]] = {
    "an FP8 KV cache": {"kv_formats": ("fp8",)},
    "FP4 weights": {"precisions": ("mxfp4", "nvfp4")},
}
# A saving below this share is not worth a check of what the model answers.
_WORTH_SAYING = 0.02


@dataclass(frozen=True, slots=True)
class Lighter:
    what: str
    fleet: Alternative


def lighter_formats(
    catalog: Catalog, workload: Workload, market: Market, accelerators: set[str], usd_per_hour: float,
    correction: Mapping[str, float], known: Sequence[Survey] = (),
) -> list[Lighter]:  # fmt: skip
    """The formats that would make a fleet of these accelerators, the answer's, cheaper.

    `correction`: by model, of what closed forms say that its replicas take. `known`: the surveys of the workload.
    """
    found = []
    parts = [item.accelerator for item in market.items if item.id in accelerators]
    for what, more in _TRIED.items():
        asked = _with(workload, more)
        if asked == workload:
            continue
        scaling = scaling_of(asked)
        tried = of_one_stack(surveys(catalog, asked, parts, gate=Gate(catalog, asked), known=known), scaling)
        offered = offers(tried, scaling, peak=peak_of(asked)).corrected(correction)
        read = choice(undominated(offered), market, asked)
        fleet = alternative(read, solve(read.problem, quickly=True), usd_per_hour)
        if fleet is not None and fleet.dearer < -_WORTH_SAYING:
            found.append(Lighter(what, fleet))
    return found


def _with(workload: Workload, more: dict[str, tuple[str, ...]]) -> Workload:
    """The same with these formats allowed for every model."""

    def wider(chosen: ModelChoice) -> ModelChoice:
        added: dict[str, Any] = {
            key: tuple(dict.fromkeys((*getattr(chosen, key), *names))) for key, names in more.items()
        }
        return msgspec.structs.replace(chosen, **added)

    models = {one.model: wider(workload.choice(one.model)) for one in workload.classes}
    return msgspec.structs.replace(workload, models={**workload.models, **models})
