"""Decide, from Python: what fits, which is faster, which fleet to buy, how it would do, what owning it costs.

Models are catalog names, Hugging Face folders or config files, accelerators catalog names, workloads and fleets files;
the nouns themselves are taken as well. `catalog` is the shipped data with the user's folder unless another is given.
What is wrong with a question raises a `CrosstieError` of one line.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from crosstie.catalog.library import Catalog, names_in
from crosstie.catalog.traces import Trace, find_trace, read_trace
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.core.deployment import Accelerator, Parallelism
from crosstie.core.fleet import Fleet, Policy
from crosstie.core.model import Model
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.question import USUAL
from crosstie.core.speculation import Speculation
from crosstie.core.workload import Workload
from crosstie.decide.compare import scorecard
from crosstie.decide.compare.scorecard import Load, Scorecard
from crosstie.decide.cost import tco as owning
from crosstie.decide.cost.tco import Tco, TcoRequest
from crosstie.decide.plan import plan as planning, simulate as simulating
from crosstie.decide.plan.plan import Plan
from crosstie.decide.plan.run_result import Outage
from crosstie.decide.plan.simulate import Simulation
from crosstie.decide.plan.subject import Subject, of_fleet, of_plan, read_subject
from crosstie.decide.plan.sweep import RequestSource
from crosstie.perf import fit as fitting
from crosstie.perf.fit import Fit


def fit(
    model: str | Path | Model, on: str | Iterable[str | Accelerator] | None = None, *, context: int | None = None,
    precisions: str | Sequence[str] = USUAL.precision, kv_format: str = USUAL.kv_format, stack: str | None = None,
    layout: Parallelism | None = None, catalog: Catalog | None = None,
) -> Fit:  # fmt: skip
    """How a model sits in memory on each accelerator: weights, KV cache, the fewest GPUs, sequences that fit.

    Without `on`, on all that the stack runs on; without `layout`, in every sensible one. `context` is 8,192 tokens
    unless given, or the model's limit where that is less.
    """
    catalog = catalog or Catalog()
    return fitting.fit(
        catalog,
        catalog.model(model),
        catalog.accelerators_named(on, stack),
        context=context,
        precisions=names_in(precisions) if isinstance(precisions, str) else precisions,
        kv_format=kv_format,
        stack=stack,
        layouts=[layout] if layout else None,
    )


def compare(
    model: str | Path | Model, on: str | Iterable[str | Accelerator], *,
    input_tokens: int = USUAL.input_tokens, output_tokens: int = USUAL.output_tokens,
    concurrency: int = USUAL.in_flight or 1, precision: str = USUAL.precision, kv_format: str = USUAL.kv_format,
    stack: str | None = None,
    layout: Parallelism | None = None, speculation: str | Speculation | None = None, catalog: Catalog | None = None,
) -> Scorecard:  # fmt: skip
    """One model under one load on several accelerators: an estimate for each, and a sentence a pair that says why.

    `concurrency` is requests in flight on a replica. Without `layout` each accelerator gets the fewest GPUs that hold
    the model and the load. An accelerator that cannot run it has a `problem` instead of an estimate. `speculation`:
    "mtp:3", or what `catalog.speculation` makes of it for a kind of text or an acceptance of your own.
    """
    catalog = catalog or Catalog()
    found = catalog.model(model)
    return scorecard.compare(
        catalog,
        found,
        catalog.accelerators_named(on, stack),
        Load(concurrency, input_tokens, output_tokens),
        parallelism=layout,
        precision=precision,
        kv_format=kv_format,
        stack=stack,
        speculation=catalog.speculation(found, speculation) if isinstance(speculation, str) else speculation,
    )


def plan(
    workload: str | Path | Workload, *, confirm: bool = False, catalog: Catalog | None = None,
    on_progress: OnProgress = no_progress,
) -> Plan:  # fmt: skip
    """The cheapest fleet for a workload file or a shipped example, with alternatives and what would change it.

    Where no fleet will do, `plan.fleet` is None and `plan.obstacles` says why. `fleet_of(plan)` is the fleet that
    `serve` takes, `fleet_text` writes it as a file. `confirm` simulates and corrects it, as the command does unless it
    is `--quick`. `on_progress` hears how far it is.
    """
    catalog = catalog or Catalog()
    return planning.plan(catalog, _workload(catalog, workload), confirm=confirm, on_progress=on_progress)


def simulate(
    what: str | Path | Fleet | Plan | Workload, workload: str | Path | Workload | None = None, *,
    fleets: Iterable[str | Path | Fleet | Plan] = (), trace: str | Path | Trace | None = None,
    class_name: str | None = None, rate: float | None = None, load: float | Sequence[float] = 1.0,
    policy: str | Sequence[Policy] | None = None, requests: int | None = None, seeds: int | Sequence[int] = 1,
    kill: Iterable[Outage] = (), clairvoyant: bool = False, sure: float | None = None, processes: int | None = 1,
    ray: str | None = None, catalog: Catalog | None = None, on_progress: OnProgress = no_progress,
) -> Simulation:  # fmt: skip
    """Requests through fleets, by the gateway's own routing policies and engines that work in steps: a run for each
    fleet, policy, load and seed.

    `what` is a fleet, a plan, which brings its workload, or a workload, which is planned first; `fleets` are others
    beside it. Requests are the workload's, Poisson at its peak, or those of a `trace` at their own times; `rate` is in
    place of either's, `load` times it. `policy` tries others than the fleets' own, `kill` takes pools away for a while.
    `seeds` is how many, or which; `processes` None is one a core. Nothing is measured: replicas take the time that the
    performance model predicts, or with `sure` (a fraction) as long as a plan counts with that is so sure.
    """
    catalog = catalog or Catalog()
    subjects = [_subject(catalog, one, on_progress) for one in (what, *fleets)]
    given = None if workload is None else _workload(catalog, workload)
    recorded = trace if isinstance(trace, Trace) or trace is None else read_trace(find_trace(str(trace), Path()))
    return simulating.simulate(
        catalog,
        subjects,
        RequestSource(given, recorded, class_name, rate, requests),
        policies=_policies(policy),
        loads=[load] if isinstance(load, int | float) else list(load),
        seeds=range(seeds) if isinstance(seeds, int) else list(seeds),
        outages=list(kill),
        clairvoyant=clairvoyant,
        sure=sure,
        processes=processes,
        ray=ray,
        on_progress=on_progress,
    )


def _policies(given: str | Sequence[Policy] | None) -> Sequence[Policy]:
    if given is None:
        return ()
    return cast("Sequence[Policy]", names_in(given)) if isinstance(given, str) else given


def _subject(catalog: Catalog, what: str | Path | Fleet | Plan | Workload, on_progress: OnProgress) -> Subject:
    if isinstance(what, Fleet):
        return of_fleet(what)
    if isinstance(what, Workload):
        return of_plan(planning.plan(catalog, what, on_progress=on_progress, confirm=True))
    return of_plan(what) if isinstance(what, Plan) else read_subject(catalog, Path(what), on_progress)


def tco(card: Scorecard, request: TcoRequest | None = None, *, catalog: Catalog | None = None) -> Tco:
    """What owning each accelerator of a scorecard costs over the years, per million output tokens, and how sure it is.

    `card` comes from `compare` and says how fast each is; `request` has prices, discounts, engineers and assumptions
    in place of the catalog's, and what to compare with: renting, an API, or waiting for a successor.
    """
    return owning.tco(catalog or Catalog(), card, request)


def _workload(catalog: Catalog, given: str | Path | Workload) -> Workload:
    """A workload file, or the name of a shipped example."""
    return given if isinstance(given, Workload) else read_workload(catalog, find_workload(Path(given)))
