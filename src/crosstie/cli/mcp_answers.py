"""What the tools of `crosstie mcp` answer, for their schemas: the keys of the documents that a reader needs first.

Documents have more keys than these. Where a part of one is a noun of the library, its type is that noun.
"""

from typing import Annotated, Any, NotRequired, TypedDict

from msgspec import Meta

from crosstie.catalog.describe import FactLine
from crosstie.core.estimate import Estimate
from crosstie.core.finding import Finding
from crosstie.core.question import BuyersQuestion, Reckoning
from crosstie.decide.compare.scorecard import Load
from crosstie.decide.plan.pools import Guided
from crosstie.decide.plan.run_result import ClassResult, PoolResult
from crosstie.perf.fit import Sizes


class Shortened(TypedDict):
    shortened: NotRequired[Annotated[list[str], Meta(description="What was left out; full=true has it.")]]


class Placement(TypedDict):
    accelerator: str
    gpus: int
    tp: int
    precision: str
    stack: str
    fits: bool
    verdict: str
    fewest: Annotated[bool, Meta(description="Whether no layout of fewer GPUs holds it.")]
    weight_bytes_per_gpu: float
    kv_bytes_left_per_gpu: float
    kv_tokens: float
    sequences: float
    sequences_interval: list[float]
    basis: str


class Assuming(TypedDict):
    assumptions: Annotated[BuyersQuestion, Meta(description="What it rests on, the same keys in every answer.")]
    reckoned: Annotated[list[Reckoning], Meta(description="By accelerator: how it serves, what a GPU gives and costs.")]


class Fit(Shortened, Assuming):
    model: str
    parameters: float
    active_parameters: float
    context: int
    sizes: list[Sizes]
    placements: list[Placement]
    problems: dict[str, str]


class ComparedOn(TypedDict):
    accelerator: str
    deployment: dict[str, Any] | None
    estimate: Estimate | None
    problem: str | None
    emulated: list[str]


class Compare(Assuming):
    model: str
    load: Load
    entries: list[ComparedOn]
    verdicts: Annotated[list[str], Meta(description="A sentence a pair: who wins and why.")]


class Quote(TypedDict):
    usd: float
    kind: str
    provider: str
    date: str
    discount: float


class PlannedPool(TypedDict):
    name: str
    model: str
    accelerator: str
    stack: str
    replicas: int
    gpus: int
    usd_per_hour: float
    limited_by: str
    measured: str
    carries: Annotated[list[dict[str, Any]], Meta(description="Classes of requests that go here, each with its why.")]


class PlannedFleet(TypedDict):
    usd_per_hour: float
    usd_per_month: float
    usd_over_horizon: float | None
    uncertainty: dict[str, Any] | None
    gpus: dict[str, int]
    pools: list[PlannedPool]


class Plan(Shortened, Assuming):
    made: str
    feasible: bool
    obstacles: list[Any]
    fleet: PlannedFleet | None
    prices: Annotated[dict[str, Quote], Meta(description="What was counted with: seller, kind and date.")]
    single_vendor: dict[str, Any]
    runner_up: dict[str, Any] | None
    flips: Annotated[list[dict[str, Any]], Meta(description="Prices and speeds at which the answer is another.")]
    guide: Annotated[list[Guided], Meta(description="Where requests go, by length, and why.")]
    simulated: list[dict[str, Any]]


class SimulatedRun(TypedDict):
    label: str
    policy: str
    load: float
    seed: int
    requests: int
    refused: int
    usd_per_hour: float
    usd_per_million_tokens: float | None
    within: Annotated[float, Meta(description="Share of requests that kept their targets.")]
    classes: list[ClassResult]
    pools: list[PoolResult]
    unsteady: str | None
    holds: bool


class Simulate(Shortened, Assuming):
    asked: int
    holds: Annotated[bool, Meta(description="Whether every class kept its targets in every run.")]
    notes: list[str]
    bounds: list[dict[str, Any]]
    runs: list[SimulatedRun]


class ShownFinding(Finding, frozen=True, kw_only=True):
    rests_on: Annotated[str, Meta(description="None of these is a run on an AMD GPU.")]


class Preflight(Shortened):
    model: str
    engine: str
    verdicts: Annotated[dict[str, str], Meta(description="By accelerator: ready ... will not run.")]
    layouts: dict[str, str]
    settings: dict[str, list[str]]
    findings: list[ShownFinding]
    effort: dict[str, Any]


class Explain(TypedDict):
    outcome: str
    pool: str | None
    replica: str | None
    policy: str
    reason: str
    request: dict[str, Any]
    considered: Annotated[list[dict[str, Any]], Meta(description="Each pool: its prediction, or what dropped it.")]


class CatalogShow(TypedDict):
    name: str
    facts: list[FactLine]


class CatalogList(Shortened):
    rows: list[dict[str, Any]]
