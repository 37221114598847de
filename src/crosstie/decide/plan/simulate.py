"""Plans and fleets by simulation: each pool by itself, or the whole fleet behind the gateway's own routing policy.

The plan is made with closed forms; here every pool gets Poisson traffic of the requests that the plan sends it, and an
engine that works in steps answers them. What is checked is the arithmetic between means and percentiles and the mixing
of classes, not the estimates of step times, which both share.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.errors import BadInput
from crosstie.core.figures import seconds, significant
from crosstie.core.fleet import Fleet, Policy
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.question import BuyersQuestion, Reckoning
from crosstie.core.workload import RequestClass, Target, Workload
from crosstie.decide.cost.energy import mean_share
from crosstie.decide.plan.answer import FleetPlan, PoolPlan
from crosstie.decide.plan.assumed import run_reckoned, simulation_question
from crosstie.decide.plan.clairvoyant import Bound, clairvoyant_bound
from crosstie.decide.plan.plan import Plan, SimulatedClass
from crosstie.decide.plan.run_result import Outage, Run, SimulatedCase
from crosstie.decide.plan.runs import WARM_UP, checked_outages
from crosstie.decide.plan.shared import SharedPoolPlan, SimulatedSharing, mean_rates, own_classes
from crosstie.decide.plan.subject import Subject
from crosstie.decide.plan.sweep import RequestSource, sweep
from crosstie.decide.plan.traffic import drawn, of_means
from crosstie.route.policies import make_policy
from crosstie.sim import arrivals
from crosstie.sim.disaggregated import simulate_apart
from crosstie.sim.hosting import HostedTraffic, host

# Fewer say nothing about a percentile.
_FEWEST = 100
# Requests that a replica of each pool is sent. Long prompts come rarely and are felt for long: with a thousand requests
# their percentiles scatter by half.
_REQUESTS = 6000
_LONGEST_RUN_TOKENS = 1_500_000
# By then percentiles of cold requests stand.
_ENOUGH_REQUESTS = 40_000

# TTFT, TPOT and weight of a request.
_Row = tuple[float, float, float]


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
        return all(one.holds for one in self.runs)


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
    source, notes = _checked(catalog, subjects, source, policies, loads)
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
            bounds[subject.label, load] = clairvoyant_bound(catalog, subject.fleet, traffic)
            notes += [note for note in traffic.notes if note not in notes]
    swept = sweep(catalog, source, cases, processes=processes, ray=ray, on_progress=on_progress)
    workload, first, notes = source.workload, swept.runs[0], [*notes, *_doubtful(swept.runs)]
    asked = simulation_question(workload, source.trace, first)
    gave = run_reckoned(subjects[0].fleet, first, workload.classes if workload and not source.trace else ())
    mean = mean_share(workload) if workload and workload.file and not source.trace else None
    return Simulation(swept.runs, bounds, notes, swept.cases, asked, gave, mean)


def _checked(
    catalog: Catalog,
    subjects: Sequence[Subject],
    source: RequestSource,
    policies: Sequence[Policy],
    loads: Sequence[float],
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
        if workload.file:
            return source, []
        return source, list(workload.notes)
    return source, []


def _match(fleet: Fleet, workload: Workload) -> None:
    served = {pool.model for pool in fleet.pools}
    missing = sorted({one.model for one in workload.classes} - served)
    if missing:
        there = ", ".join(sorted(served))
        raise BadInput(
            f"no pool of fleet '{fleet.name}' serves {', '.join(missing)}, which workload '{workload.name}' asks for; "
            f"it serves {there}"
        )
    unknown = sorted({one.name for one in workload.classes} - {one.name for one in fleet.classes})
    if fleet.classes and unknown:
        known = ", ".join(one.name for one in fleet.classes)
        raise BadInput(
            f"fleet '{fleet.name}' has no class {', '.join(unknown)}, which workload '{workload.name}' sends; "
            f"it has {known}: plan the workload again, or name its classes alike"
        )


def _doubtful(runs: Sequence[Run]) -> list[str]:
    """Classes of which a run had nothing to measure, and runs that were over before the fleet was full."""
    found: list[str] = []
    for one in runs:
        for kind in one.classes:
            said, long = "", kind.finish_s.p90 or 0.0
            if not kind.requests:
                said = f"class {kind.name}: none of {one.requests:,} measured requests is of it; --requests gives more"
            elif one.filled_s is not None and long > one.filled_s:
                count = significant(1.2 * long / one.filled_s * one.requests / (1.0 - WARM_UP), 2).replace(",", "")
                said = (
                    f"a short run: it is measured from {seconds(one.filled_s)} on, and a tenth of the answers of "
                    f"{kind.name} take more than {seconds(long)}; --requests {count} would do"
                )
            if said and not any(other[:20] == said[:20] for other in found):
                found.append(said)
    return found


def simulate_pools(plan: Plan, on_progress: OnProgress = no_progress) -> Plan:
    """The plan with its promises checked: each pool under the traffic that the plan sends it, where its fleet was not
    confirmed behind the gateway's policy; and the replicas that models share."""
    if plan.fleet and plan.confirmed is None:
        plan = replace(
            plan, simulated=simulate_classes(plan.fleet, own_classes(plan.workload), on_progress=on_progress)
        )
    if plan.shared and plan.shared.answer:
        on_progress(0, 0, "simulating shared replicas")
        found = simulate_sharing(plan.shared.answer, plan.workload)
        plan = replace(plan, shared=replace(plan.shared, simulated=found))
    return plan


def simulate_classes(
    fleet: FleetPlan,
    classes: tuple[RequestClass, ...],
    requests: int = _REQUESTS,
    on_progress: OnProgress = no_progress,
) -> list[SimulatedClass]:
    """Every pool by one of its replicas; requests of a class count by the traffic that a pool takes of it."""
    rows: dict[str, list[_Row]] = {one.name: [] for one in classes}
    for done, pool in enumerate(fleet.pools):
        on_progress(done, len(fleet.pools), f"simulating {pool.name}")
        if pool.deployment.parallelism.pp == 1 and pool.carried:
            for name, row in _simulated(pool, requests):
                rows[name].append(row)
    return [
        SimulatedClass(
            name=one.name,
            requests=len(rows[one.name]),
            ttft_s=_quantile([(ttft_s, weight) for ttft_s, _, weight in rows[one.name]], one.ttft),
            tpot_s=_quantile([(tpot_s, weight) for _, tpot_s, weight in rows[one.name]], one.tpot),
            ttft=one.ttft,
            tpot=one.tpot,
        )
        for one in classes
    ]


def _simulated(pool: PoolPlan, count: int) -> Iterator[tuple[str, _Row]]:
    """By request after the warm-up: its class, its latencies and what it counts for."""
    rates = np.array([one.requests_per_s for one in pool.carried]) / pool.replicas
    slices = [one.part.slice for one in pool.carried]
    # Long answers on busy replicas make many steps: a bound on the work, not on the accuracy of the rare.
    longest = int(_LONGEST_RUN_TOKENS / fmean([piece.output_tokens for piece in slices]))
    most = max(min(count, longest), 200)
    at, kinds, inputs, outputs, endless = drawn(rates, slices, most, np.random.default_rng(7))
    # Of what each prompt could find, as much as the pool's replicas have.
    shares = [
        c.hit_rate * s.input_tokens / max(s.cached_tokens, 1e-9) for c, s in zip(pool.carried, slices, strict=True)
    ]
    cached = (np.array(shares)[kinds] * endless).astype(np.int64)
    rows = zip(at.tolist(), inputs.tolist(), outputs.tolist(), cached.tolist(), strict=True)
    sent = [arrivals.Arrival(*row) for row in rows]
    one = pool.deployment
    served = simulate_apart(one, sent) if isinstance(one, Disaggregated) else arrivals.simulate(one, sent)
    started = int(len(at) * WARM_UP)
    seen = np.bincount(kinds[started:], minlength=len(rates))
    for index in range(started, len(at)):
        carried = pool.carried[kinds[index]]
        weight = carried.requests_per_s / seen[kinds[index]]
        yield carried.part.request_class.name, (float(served.ttft_s[index]), float(served.tpot_s[index]), weight)


def _quantile(values: Sequence[tuple[float, float]], target: Target | None) -> float | None:
    """Of values with weights; those that are no number, as the TPOT of one token, are left out."""
    kept = np.array([pair for pair in values if not math.isnan(pair[0])])
    if not len(kept) or target is None:
        return None
    values_s, weight = kept[np.argsort(kept[:, 0])].T
    reached = np.cumsum(weight) / weight.sum()
    return float(values_s[min(int(np.searchsorted(reached, target.percentile)), len(values_s) - 1)])


def simulate_sharing(pool: SharedPoolPlan, workload: Workload, hours: float = 12.0, seed: int = 7) -> SimulatedSharing:
    """Poisson traffic at the mean, through the residency that the gateway has."""
    chance = np.random.default_rng(seed)
    rates = mean_rates(workload)
    hosted = pool.layout.hosted
    each = np.array([rates[one.model] for one in hosted])
    span_s = min(hours * 3600.0, _ENOUGH_REQUESTS / float(each.sum()))
    count = int(chance.poisson(each.sum() * span_s))
    kinds = chance.choice(len(each), count, p=each / each.sum())
    takes = np.array([pool.takes_s[one.model] for one in hosted])
    traffic = HostedTraffic(np.sort(chance.uniform(0.0, span_s, count)), kinds, takes[kinds])
    found = host(hosted, [pool.layout.room_bytes] * pool.replicas, traffic, warm_up_s=span_s / 4.0)
    return SimulatedSharing(
        found.requests, found.cold_share, found.evictions_per_hour, found.wait_s(0.5), found.wait_s(0.99)
    )
