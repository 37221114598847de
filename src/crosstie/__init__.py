"""Crosstie: LLM inference on AMD and NVIDIA accelerators as one fleet.

    import crosstie

    card = crosstie.compare("llama-3.1-70b", on="mi300x,h200", input_tokens=4096, output_tokens=1024, concurrency=64)
    plan = crosstie.plan("workload.toml")
    report = crosstie.preflight("./my-model", on="mi300x", engine="vllm")

Names are imported when first used, so that `import crosstie` stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from crosstie.core.version import __version__ as __version__

if TYPE_CHECKING:
    from crosstie.catalog.calibration import Calibration as Calibration, calibration_text as calibration_text
    from crosstie.catalog.fleet_text import fleet_text as fleet_text
    from crosstie.catalog.fleets import read_fleet as read_fleet
    from crosstie.catalog.library import Catalog as Catalog
    from crosstie.catalog.workloads import read_workload as read_workload
    from crosstie.core.deployment import (
        Accelerator as Accelerator,
        Deployment as Deployment,
        Efficiency as Efficiency,
        Parallelism as Parallelism,
        Stack as Stack,
    )
    from crosstie.core.errors import (
        BadData as BadData,
        BadInput as BadInput,
        CrosstieError as CrosstieError,
        DoesNotFit as DoesNotFit,
        UnknownName as UnknownName,
    )
    from crosstie.core.estimate import Estimate as Estimate
    from crosstie.core.fact import Fact as Fact, Label as Label
    from crosstie.core.finding import Finding as Finding
    from crosstie.core.fleet import Fleet as Fleet, Pool as Pool, Route as Route
    from crosstie.core.model import (
        Format as Format,
        Layer as Layer,
        Model as Model,
        Precision as Precision,
        Scan as Scan,
        State as State,
        Tensor as Tensor,
    )
    from crosstie.core.speculation import Speculation as Speculation
    from crosstie.core.workload import RequestClass as RequestClass, Target as Target, Workload as Workload
    from crosstie.decide.api import compare as compare, fit as fit, plan as plan, simulate as simulate, tco as tco
    from crosstie.decide.compare.scorecard import Entry as Entry, Load as Load, Scorecard as Scorecard
    from crosstie.decide.cost.tco import Tco as Tco, TcoRequest as TcoRequest
    from crosstie.decide.plan.fleet import fleet_of as fleet_of
    from crosstie.decide.plan.plan import Plan as Plan
    from crosstie.decide.plan.run_result import Outage as Outage, Run as Run
    from crosstie.decide.plan.simulate import Simulation as Simulation
    from crosstie.perf.estimate import estimate as estimate, estimates as estimates
    from crosstie.perf.fit import Fit as Fit, Placement as Placement
    from crosstie.perf.hardware import Hardware as Hardware
    from crosstie.perf.memory import (
        MemoryPlan as MemoryPlan,
        memory_plan as memory_plan,
        sequences_that_fit as sequences_that_fit,
        weight_bytes as weight_bytes,
    )
    from crosstie.perf.steady_state import (
        SteadyState as SteadyState,
        single_stream_ceiling as single_stream_ceiling,
        steady_state as steady_state,
    )
    from crosstie.perf.step import Shape as Shape, StepCost as StepCost, shape as shape, step as step
    from crosstie.port.preflight.model import ModelReport as ModelReport, preflight as preflight
    from crosstie.prove.api import calibrate as calibrate, validate as validate
    from crosstie.prove.calibration.validate import Validation as Validation
    from crosstie_gateway.start.start import RunningGateway as RunningGateway, serve as serve
    from crosstie_port.capture.report import CaptureReport as CaptureReport, preflight_capture as preflight_capture
    from crosstie_port.checkpoint.convert import ConversionReport as ConversionReport, convert as convert
    from crosstie_port.kernels.report import KernelReport as KernelReport, preflight_kernels as preflight_kernels
    from crosstie_port.source.check import SourceReport as SourceReport, preflight_source as preflight_source

# Where each public name lives; a test holds it to the imports above, which are for type checkers.
_HOMES = {
    "crosstie.catalog.calibration": ("Calibration", "calibration_text"),
    "crosstie.catalog.fleet_text": ("fleet_text",),
    "crosstie.catalog.fleets": ("read_fleet",),
    "crosstie.catalog.library": ("Catalog",),
    "crosstie.catalog.workloads": ("read_workload",),
    "crosstie.core.speculation": ("Speculation",),
    "crosstie.core.deployment": ("Accelerator", "Deployment", "Efficiency", "Parallelism", "Stack"),
    "crosstie.core.errors": ("BadData", "BadInput", "CrosstieError", "DoesNotFit", "UnknownName"),
    "crosstie.core.estimate": ("Estimate",),
    "crosstie.core.fact": ("Fact", "Label"),
    "crosstie.core.finding": ("Finding",),
    "crosstie.core.fleet": ("Fleet", "Pool", "Route"),
    "crosstie.core.model": ("Format", "Layer", "Model", "Precision", "Scan", "State", "Tensor"),
    "crosstie.core.workload": ("RequestClass", "Target", "Workload"),
    "crosstie.decide.api": ("compare", "fit", "plan", "simulate", "tco"),
    "crosstie.decide.compare.scorecard": ("Entry", "Load", "Scorecard"),
    "crosstie.decide.cost.tco": ("Tco", "TcoRequest"),
    "crosstie.decide.plan.fleet": ("fleet_of",),
    "crosstie.decide.plan.plan": ("Plan",),
    "crosstie.decide.plan.run_result": ("Outage", "Run"),
    "crosstie.decide.plan.simulate": ("Simulation",),
    "crosstie.perf.estimate": ("estimate", "estimates"),
    "crosstie.perf.fit": ("Fit", "Placement"),
    "crosstie.perf.hardware": ("Hardware",),
    "crosstie.perf.memory": ("MemoryPlan", "memory_plan", "sequences_that_fit", "weight_bytes"),
    "crosstie.perf.steady_state": ("SteadyState", "single_stream_ceiling", "steady_state"),
    "crosstie.perf.step": ("Shape", "StepCost", "shape", "step"),
    "crosstie_port.capture.report": ("CaptureReport", "preflight_capture"),
    "crosstie_port.checkpoint.convert": ("ConversionReport", "convert"),
    "crosstie_port.kernels.report": ("KernelReport", "preflight_kernels"),
    "crosstie.port.preflight.model": ("ModelReport", "preflight"),
    "crosstie_port.source.check": ("SourceReport", "preflight_source"),
    "crosstie.prove.api": ("calibrate", "validate"),
    "crosstie.prove.calibration.validate": ("Validation",),
    "crosstie_gateway.start.start": ("RunningGateway", "serve"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


if not TYPE_CHECKING:
    # Hidden from type checkers, which would take any name for one of ours.
    def __getattr__(name: str) -> Any:
        if name not in _HOME_OF:
            raise AttributeError(f"module 'crosstie' has no name '{name}'")
        home = _HOME_OF[name]
        try:
            return getattr(import_module(home), name)
        except ModuleNotFoundError as error:
            package = home.partition(".")[0]
            if error.name != package:
                raise
            from crosstie.core.errors import MissingPackage

            raise MissingPackage(f"crosstie.{name}", package.replace("_", "-")) from None


def __dir__() -> list[str]:
    return __all__
