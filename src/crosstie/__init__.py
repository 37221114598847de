"""Crosstie: LLM inference on AMD and NVIDIA accelerators as one fleet.

    import crosstie

    catalog = crosstie.Catalog()
    model = catalog.model("llama-3.1-70b")
    card = crosstie.compare(
        catalog, model, [catalog.accelerator("mi300x"), catalog.accelerator("h200")],
        crosstie.Load(concurrency=64, input_tokens=4096, output_tokens=1024),
    )

Names are imported when first used, so that `import crosstie` stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from crosstie.catalog.fleet_text import fleet_text
    from crosstie.catalog.fleets import read_fleet
    from crosstie.catalog.library import Catalog
    from crosstie.catalog.workloads import read_workload
    from crosstie.core.accelerator import Accelerator
    from crosstie.core.deployment import Deployment, Parallelism
    from crosstie.core.errors import BadData, BadInput, CrosstieError, UnknownName
    from crosstie.core.estimate import Estimate
    from crosstie.core.fact import Fact, Label
    from crosstie.core.fleet import Fleet, Pool, Route
    from crosstie.core.formats import Format, Precision
    from crosstie.core.model import Layer, Model, Scan, State, Tensor
    from crosstie.core.stack import Efficiency, Stack
    from crosstie.core.workload import RequestClass, Target, Workload
    from crosstie.decide.compare.scorecard import Entry, Load, Scorecard, compare
    from crosstie.decide.plan.check import check
    from crosstie.decide.plan.fleet import fleet_of
    from crosstie.decide.plan.plan import Plan, make_plan
    from crosstie.perf.estimate import estimate, estimates
    from crosstie.perf.fit import Fit, Placement, fit, smallest_layout
    from crosstie.perf.hardware import Hardware
    from crosstie.perf.memory import MemoryPlan, memory_plan, sequences_that_fit, weight_bytes
    from crosstie.perf.steady_state import SteadyState, single_stream_ceiling, steady_state
    from crosstie.perf.step import Shape, StepCost, shape, step

_HOMES = {
    "crosstie.catalog.fleet_text": ("fleet_text",),
    "crosstie.catalog.fleets": ("read_fleet",),
    "crosstie.catalog.library": ("Catalog",),
    "crosstie.catalog.workloads": ("read_workload",),
    "crosstie.core.accelerator": ("Accelerator",),
    "crosstie.core.deployment": ("Deployment", "Parallelism"),
    "crosstie.core.errors": ("BadData", "BadInput", "CrosstieError", "UnknownName"),
    "crosstie.core.estimate": ("Estimate",),
    "crosstie.core.fact": ("Fact", "Label"),
    "crosstie.core.fleet": ("Fleet", "Pool", "Route"),
    "crosstie.core.formats": ("Format", "Precision"),
    "crosstie.core.model": ("Layer", "Model", "Scan", "State", "Tensor"),
    "crosstie.core.stack": ("Efficiency", "Stack"),
    "crosstie.core.workload": ("RequestClass", "Target", "Workload"),
    "crosstie.perf.estimate": ("estimate", "estimates"),
    "crosstie.perf.fit": ("Fit", "Placement", "fit", "smallest_layout"),
    "crosstie.perf.hardware": ("Hardware",),
    "crosstie.perf.memory": ("MemoryPlan", "memory_plan", "sequences_that_fit", "weight_bytes"),
    "crosstie.perf.steady_state": ("SteadyState", "single_stream_ceiling", "steady_state"),
    "crosstie.perf.step": ("Shape", "StepCost", "shape", "step"),
    "crosstie.decide.plan.check": ("check",),
    "crosstie.decide.compare.scorecard": ("Entry", "Load", "Scorecard", "compare"),
    "crosstie.decide.plan.fleet": ("fleet_of",),
    "crosstie.decide.plan.plan": ("Plan", "make_plan"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Accelerator",
    "BadData",
    "BadInput",
    "Catalog",
    "CrosstieError",
    "Deployment",
    "Efficiency",
    "Entry",
    "Estimate",
    "Fact",
    "Fit",
    "Fleet",
    "Format",
    "Hardware",
    "Label",
    "Layer",
    "Load",
    "MemoryPlan",
    "Model",
    "Parallelism",
    "Placement",
    "Plan",
    "Pool",
    "Precision",
    "RequestClass",
    "Route",
    "Scan",
    "Scorecard",
    "Shape",
    "Stack",
    "State",
    "SteadyState",
    "StepCost",
    "Target",
    "Tensor",
    "UnknownName",
    "Workload",
    "check",
    "compare",
    "estimate",
    "estimates",
    "fit",
    "fleet_of",
    "fleet_text",
    "make_plan",
    "memory_plan",
    "read_fleet",
    "read_workload",
    "sequences_that_fit",
    "shape",
    "single_stream_ceiling",
    "smallest_layout",
    "steady_state",
    "step",
    "weight_bytes",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'crosstie' has no name '{name}'")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
