"""Fleets by simulation, behind the gateway's own routing policy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.core.figures import seconds, significant
from crosstie.core.fleet import Fleet, Policy
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.question import BuyersQuestion, Reckoning
from crosstie.core.workload import Workload
from crosstie.decide.cost.energy import mean_share
from crosstie.decide.plan.assumed import run_reckoned, simulation_question
from crosstie.decide.plan.clairvoyant import Bound, clairvoyant_bound
from crosstie.decide.plan.run_result import Outage, Run, SimulatedCase
from crosstie.decide.plan.runs import WARM_UP, checked_outages
from crosstie.decide.plan.subject import Subject
from crosstie.decide.plan.sweep import RequestSource, sweep
from crosstie.decide.plan.traffic import Traffic, of_means
from crosstie.route.policies import make_policy

# Fewer say nothing about a percentile.
_FEWEST = 100


@dataclass(frozen=True, slots=True)
class Simulation:
    """How fleets served their traffic, by fleet, policy, load and seed."""

    runs: list[Run]
    # What no routing could beat, by fleet and load.
    bounds: dict[tuple[str, float], Bound]
    # What has to be known to read it: requests that were left out, lengths that nobody said.
    notes: list[str]
    # Runs that were asked for; more than there are where somebody interrupted it.
    asked: int
    # Of the first fleet: what was asked, and what each of its pools gave.
    question: BuyersQuestion
    reckoned: list[Reckoning]
    # Its workload's mean traffic over the peak; None: nobody said.
    mean_over_peak: float | None = None

    @property
    def holds(self) -> bool:
        """Whether every run kept the targets of every class."""
        return all(run.holds for run in self.runs)


def simulate(
    catalog: Catalog, subjects: Sequence[Subject], source: RequestSource, *, policies: Sequence[Policy] = (),
    loads: Sequence[float] = (1.0,), seeds: Sequence[int] = (0,), outages: Sequence[Outage] = (),
    clairvoyant: bool = False, sure: float | None = None, processes: int | None = None, ray: str | None = None,
    on_progress: OnProgress = no_progress,
) -> Simulation:  # fmt: skip
    """Requests of a workload or a trace through routing policies to engines that work in steps.

    `sure`: steps as slow as a plan counts with that is so sure, in place of the estimates themselves.
    `policies`: in place of each fleet's own. `clairvoyant`: each of them also with answers' lengths known in advance.
    `processes` and `ray` as in `sweep`.
    """
    source, notes = _checked(subjects, source, policies, loads)
    notes = [*(note for subject in subjects for note in subject.notes), *notes]
    if sure is not None:
        notes.append(f"steps are as slow as one in {1.0 / (1.0 - sure):.3g} worlds has them: {sure:.0%} sure")
    cases = [
        SimulatedCase(
            label=subject.label, fleet=subject.fleet, policy=policy, load=load, seed=seed, outages=tuple(outages),
            knows_lengths=knows, sure=sure,
        )
        for subject in subjects
        for load in loads
        for policy in policies or (subject.fleet.policy,)
        for knows in (False, True)[: 1 + clairvoyant]
        for seed in seeds
    ]  # fmt: skip
    bounds: dict[tuple[str, float], Bound] = {}
    for subject in subjects:
        for load in loads:
            traffic = source.traffic(subject.fleet, load, seeds[0])
            checked_outages(outages, subject.fleet, traffic.span_s)
            if isinstance(traffic, Traffic):
                bounds[subject.label, load] = clairvoyant_bound(catalog, subject.fleet, traffic)
            notes += [note for note in traffic.notes if note not in notes]
    swept = sweep(catalog, source, cases, processes=processes, ray=ray, on_progress=on_progress)
    workload, first, notes = source.workload, swept.runs[0], [*notes, *_doubtful(swept.runs)]
    asked = simulation_question(workload, source.trace, first)
    gave = run_reckoned(subjects[0].fleet, first, workload.classes if workload and not source.trace else ())
    mean = mean_share(workload) if workload and workload.file and not source.trace else None
    return Simulation(swept.runs, bounds, notes, swept.cases, asked, gave, mean)


def _checked(
    subjects: Sequence[Subject], source: RequestSource, policies: Sequence[Policy], loads: Sequence[float]
) -> tuple[RequestSource, list[str]]:
    """The source with what it still lacks, and what there is to say about it."""
    if source.requests is not None and source.requests < _FEWEST:
        raise BadInput(f"{source.requests} requests: at least {_FEWEST}, or no percentile means anything")
    for load in loads:
        if not (load > 0 and math.isfinite(load)):
            raise BadInput(f"a load of {load:g} times the peak: must be above 0")
    for policy in policies:
        make_policy(policy)
    labels = [subject.label for subject in subjects]
    twice = {label for label in labels if labels.count(label) > 1}
    if twice:
        raise BadInput(f"two fleets are called '{twice.pop()}': their files' names, or their own, must differ")
    if source.trace is None and source.workload is None:
        brought = next((subject.workload for subject in subjects if subject.workload), None)
        source = replace(source, workload=brought or of_means(subjects[0].fleet))
    workload = source.workload
    if source.trace is None and workload is not None:
        for subject in subjects:
            _match(subject.fleet, workload)
        if not workload.file:
            return source, list(workload.notes)
    return source, []


def _match(fleet: Fleet, workload: Workload) -> None:
    served = {pool.model for pool in fleet.pools}
    missing = sorted({request_class.model for request_class in workload.classes} - served)
    if missing:
        there = ", ".join(sorted(served))
        raise BadInput(
            f"no pool of fleet '{fleet.name}' serves {', '.join(missing)}, which workload '{workload.name}' asks for; "
            f"it serves {there}"
        )
    unknown = sorted({one.name for one in workload.classes} - {served_class.name for served_class in fleet.classes})
    if fleet.classes and unknown:
        known = ", ".join(served_class.name for served_class in fleet.classes)
        raise BadInput(
            f"fleet '{fleet.name}' has no class {', '.join(unknown)}, which workload '{workload.name}' sends; "
            f"it has {known}: plan the workload again, or name its classes alike"
        )


def _doubtful(runs: Sequence[Run]) -> list[str]:
    """Classes of which a run had nothing to measure, and runs that were over before the fleet was full."""
    found: list[str] = []
    for run in runs:
        for kind in run.classes:
            said, long = "", kind.finish_s.p90 or 0.0
            if not kind.requests:
                said = f"class {kind.name}: none of {run.requests:,} measured requests is of it; --requests gives more"
            elif run.filled_s is not None and long > run.filled_s:
                count = significant(1.2 * long / run.filled_s * run.requests / (1.0 - WARM_UP), 2).replace(",", "")
                said = (
                    f"a short run: it is measured from {seconds(run.filled_s)} on, and a tenth of the answers of "
                    f"{kind.name} take more than {seconds(long)}; --requests {count} would do"
                )
            if said and not any(other[:20] == said[:20] for other in found):
                found.append(said)
    return found
