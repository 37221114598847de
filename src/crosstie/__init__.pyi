"""What `import crosstie` offers: every name and its home. Python reads it too, for the homes."""

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
from crosstie.core.version import __version__ as __version__
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
