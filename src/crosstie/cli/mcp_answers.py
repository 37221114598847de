"""What the tools of `crosstie mcp` answer, for their schemas: the keys of the documents that a reader needs first.

Documents have more keys than these. Where a part of one is a noun of the library, its type is that noun; what a row
holds beside that is in the row.
"""

from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from crosstie.catalog.describe import FactLine
from crosstie.core.estimate import Estimate
from crosstie.core.finding import Finding
from crosstie.core.question import BuyersQuestion, Reckoning
from crosstie.decide.compare.scorecard import Load
from crosstie.decide.plan.guide import Guided
from crosstie.decide.plan.run_result import ClassResult, PoolResult
from crosstie.perf.fit import Sizes

Rows = list[dict[str, Any]]


class Shortened(TypedDict):
    shortened: NotRequired[Annotated[list[str], Meta(description="What was left out; full=true has it.")]]


class Assuming(TypedDict):
    assumptions: Annotated[BuyersQuestion, Meta(description="What it rests on, the same keys in every answer.")]
    reckoned: Annotated[list[Reckoning], Meta(description="By accelerator: how it serves, what a GPU gives and costs.")]


class Fit(Shortened, Assuming):
    model: str
    parameters: float
    active_parameters: float
    context: int
    sizes: list[Sizes]
    placements: Annotated[Rows, Meta(description="`fewest`: whether no layout of fewer GPUs holds it.")]
    problems: dict[str, str]


class ComparedOn(TypedDict):
    accelerator: str
    estimate: Estimate | None
    problem: str | None


class Compare(Assuming):
    model: str
    load: Load
    entries: list[ComparedOn]
    verdicts: Annotated[list[str], Meta(description="A sentence a pair: who wins and why.")]


class PlannedFleet(TypedDict):
    usd_per_hour: float
    usd_per_month: float
    uncertainty: dict[str, Any] | None
    gpus: dict[str, int]
    pools: Annotated[Rows, Meta(description="`carries`: classes of requests that go here, each with its why.")]


class Plan(Shortened, Assuming):
    made: str
    feasible: bool
    obstacles: list[Any]
    fleet: PlannedFleet | None
    prices: Annotated[dict[str, Any], Meta(description="What was counted with: seller, kind and date.")]
    single_vendor: dict[str, Any]
    runner_up: dict[str, Any] | None
    flips: Annotated[Rows, Meta(description="Prices and speeds at which the answer is another.")]
    guide: Annotated[list[Guided], Meta(description="Where requests go, by length, and why.")]
    simulated: Rows


class SimulatedRun(TypedDict):
    label: str
    policy: str
    within: Annotated[float, Meta(description="Share of requests that kept their targets.")]
    classes: list[ClassResult]
    pools: list[PoolResult]
    holds: bool


class Simulate(Shortened, Assuming):
    holds: Annotated[bool, Meta(description="Whether every class kept its targets in every run.")]
    notes: list[str]
    bounds: Rows
    runs: list[SimulatedRun]


class ShownFinding(Finding, frozen=True, kw_only=True):
    rests_on: Annotated[str, Meta(description="None of these is a run on an AMD GPU.")]


class Preflight(Shortened):
    model: str
    engine: str
    verdicts: Annotated[dict[str, str], Meta(description="By accelerator: ready ... will not run.")]
    settings: dict[str, list[str]]
    findings: list[ShownFinding]
    effort: dict[str, Any]


class Explain(TypedDict):
    outcome: str
    pool: str | None
    replica: str | None
    policy: str
    reason: str
    considered: Annotated[Rows, Meta(description="Each pool: its prediction, or what dropped it.")]


class CatalogShow(TypedDict):
    name: str
    facts: list[FactLine]


class CatalogList(Shortened):
    rows: Rows
