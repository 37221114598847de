"""What runs of one load come to: each number with a 95% interval, the client's own share of it, and what GPUs used.

Repeats differ by more than chance within a run, so with two or more of them intervals are Student's t over repeats.
Of a single run they are a bootstrap over stretches of neighbouring requests, which says less, and nothing of what
another run would show.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from crosstie.core.fleet import Fleet
from crosstie.prove.bench.gpus import GpuUse
from crosstie.prove.bench.loads import BenchLoad
from crosstie.prove.bench.measure import BenchRun
from crosstie.prove.bench.server_counts import ServerCounts
from crosstie.prove.replay.outcomes import (
    ClassTargets,
    ReplayedClass,
    RequestGroup,
    by_class,
    classes_of,
    group_of,
    kept_targets,
    pools_of,
)
from crosstie.prove.replay.replay import RequestOutcome

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
LATENCIES = ("ttft_s", "tpot_s", "e2e_s", "longest_gap_s")
_MOST_FAULTS = 5
_RESAMPLES = 200
# By degrees of freedom from 1 on; beyond, the first terms of its expansion about the normal one.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.95996
# The client distorts a result if it was later than this share of what it measured.
_BENT = 0.1
# A request left this much too late, on the server's clock: so do those after it, and their answers come late.
_DISTURBED_S = 0.5
_TOO_MANY = 429


@dataclass(frozen=True)
class MeasuredInterval:
    value: float
    # Not a number where nothing tells.
    low: float = math.nan
    high: float = math.nan


@dataclass(frozen=True)
class ClientAccount:
    """How much of what was seen may be the client's own doing."""

    # On the server's clock: how late requests left.
    late_p99_s: float
    latest_s: float
    # Real seconds: how late the loop itself came to what it had to do.
    lag_p99_s: float
    cpu_s_per_request: float
    # Of one processor, on average over all senders.
    busy: float
    senders: int


@dataclass(frozen=True)
class PointResult:
    """One load on one endpoint."""

    load: BenchLoad
    repeats: int
    # Of all repeats together.
    requests: int
    failed: int
    faults: list[tuple[str, int]]
    # Means, as counted by the engine.
    input_tokens: float
    output_tokens: float
    # What was asked for, on average.
    asked_input_tokens: float
    metrics: dict[str, MeasuredInterval]
    # Shares of all requests: within both targets, and whether each was kept at its percentile. None without any.
    kept: float | None
    holds: bool
    client: ClientAccount
    gpus: list[GpuUse]
    # Neither interrupted nor given up.
    complete: bool
    # "student": over repeats; "bootstrap": over stretches of the one run.
    intervals: str
    # The metrics of each repeat.
    each: list[dict[str, float]]
    # Whether the client was slow enough to show in what it saw of the server.
    bent: bool
    # "steady": clients began one by one, and what counts is when all were at work; "lockstep": all began at once;
    # "unsettled": one by one, and they were never all at work; "by the clock": an open loop; "sessions": conversations;
    # "schedule": an open loop whose rate changes.
    arrivals: str = "lockstep"
    # Of all repeats together: turns of conversations or phases of a schedule; classes, where requests say theirs; and
    # pools, where a gateway says who answered.
    phases: list[RequestGroup] = field(default_factory=list)
    classes: list[ReplayedClass] = field(default_factory=list)
    pools: list[RequestGroup] = field(default_factory=list)
    # Of those that failed, told with status 429 to come again.
    turned_away: int = 0
    # USD: as a gateway attributes them; and the whole fleet's bill for as long as requests came, over the tokens within
    # targets, of which there may be none.
    attributed_usd_per_million_tokens: float | None = None
    fleet_usd_per_million_tokens_within_target: float | None = None
    # By the engine's own counters, of all repeats; None where it has none. Tokens of prompts that it looked up in its
    # prefix cache, and found there; tokens of a draft, and those that a step with drafts gives a sequence.
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    draft_tokens: int | None = None
    acceptance_length: float | None = None

    @property
    def disturbed(self) -> bool:
        """Whether the client's own machine stood still for long enough to show in what it saw of the server."""
        return self.client.latest_s > _DISTURBED_S


def of_runs(
    load: BenchLoad, runs: Sequence[BenchRun], targets: ClassTargets, *, speed: float = 1.0, seed: int = 0,
    lockstep: bool = False, fleet: Fleet | None = None,
) -> PointResult:  # fmt: skip
    """`fleet`: whose bill it is."""
    outcomes = [outcome for run in runs for outcome in run.outcomes]
    served = [outcome for outcome in outcomes if outcome.served]
    each = [with_power(statistics_of(run, targets), run.gpus) for run in runs]
    if len(runs) > 1:
        metrics = {name: student([run[name] for run in each if name in run]) for name in each[0]}
    else:
        metrics = bootstrap(runs[0].settled_outcomes, each[0], load, seed)
    complete = not any(run.interrupted or run.gave_up for run in runs)
    wall, senders = sum(run.ended - run.began for run in runs), max(run.senders for run in runs)
    cpu = sum(run.client_cpu_s for run in runs)
    late = np.array([outcome.late_s for outcome in outcomes] or [0.0])
    lags = [lag for run in runs for lag in run.lags_s] or [0.0]
    late_p99, lag_p99 = float(np.quantile(late, 0.99)), float(np.quantile(lags, 0.99))
    ttft = metrics.get("ttft_s_p50", MeasuredInterval(math.inf)).value
    return PointResult(
        load=load,
        repeats=len(runs),
        requests=len(outcomes),
        failed=len(outcomes) - len(served),
        faults=Counter(outcome.error for outcome in outcomes if outcome.error).most_common(_MOST_FAULTS),
        input_tokens=_mean([outcome.input_tokens for outcome in served]),
        output_tokens=_mean([outcome.output_tokens for outcome in served]),
        asked_input_tokens=_mean([outcome.request.input_tokens for outcome in served]),
        metrics=metrics,
        kept=_mean([all(kept_targets(outcome, targets)) for outcome in outcomes]) if targets.any else None,
        holds=complete and _kept_at_percentiles(outcomes, targets),
        client=ClientAccount(
            late_p99_s=late_p99,
            latest_s=float(late.max()),
            lag_p99_s=lag_p99,
            cpu_s_per_request=cpu / max(len(outcomes), 1),
            busy=cpu / max(wall * senders, 1e-9),
            senders=senders,
        ),
        gpus=_together(runs),
        complete=complete,
        intervals="student" if len(runs) > 1 else "bootstrap",
        each=each,
        bent=max(late_p99, lag_p99 * speed) > _BENT * ttft,
        arrivals=_arrivals(load, runs, lockstep),
        phases=_phases(runs),
        classes=classes_of(outcomes, targets),
        pools=pools_of(outcomes),
        turned_away=sum(outcome.status == _TOO_MANY for outcome in outcomes),
        fleet_usd_per_million_tokens_within_target=_bill(fleet, runs, targets) if fleet else None,
        **_counted(runs),
    )


def _bill(fleet: Fleet, runs: Sequence[BenchRun], targets: ClassTargets) -> float:
    """Infinite where nothing was within its targets."""
    tokens = seconds = 0.0
    for run in runs:
        good = [outcome for outcome in run.outcomes if all(kept_targets(outcome, targets))]
        tokens += sum(outcome.input_tokens + outcome.output_tokens for outcome in good)
        arrivals = [outcome.request.arrival_s for outcome in run.outcomes] or [0.0]
        seconds += max(arrivals) - min(arrivals)
    return fleet.usd_per_hour * seconds / 3600.0 / tokens * 1e6 if tokens else math.inf


def _phases(runs: Sequence[BenchRun]) -> list[RequestGroup]:
    return [
        group_of(name, [outcome for run in runs for outcome in run.phases.get(name, ())]) for name in runs[0].phases
    ]


def _counted(runs: Sequence[BenchRun]) -> dict[str, Any]:
    known = [run.counted for run in runs if run.counted is not None]
    if len(known) < len(runs):
        return {}
    total = reduce(ServerCounts.plus, known)
    counted: dict[str, Any] = {"attributed_usd_per_million_tokens": total.usd_per_million_tokens}
    if total.looked_up:
        counted |= {"prefix_queries": total.looked_up, "prefix_hits": total.hit}
    if total.drafts:
        counted |= {"draft_tokens": total.depth, "acceptance_length": total.acceptance_length}
    return counted


def _arrivals(load: BenchLoad, runs: Sequence[BenchRun], lockstep: bool) -> str:
    if load.turns is not None:
        return "sessions"
    if load.schedule:
        return "schedule"
    if load.clients is None:
        return "by the clock"
    if lockstep or (load.clients > 1 and not any(run.staggered for run in runs)):
        return "lockstep"
    return "steady" if load.clients == 1 or all(run.settled for run in runs) else "unsettled"


def _kept_at_percentiles(outcomes: Sequence[RequestOutcome], targets: ClassTargets) -> bool:
    """One that failed has kept nothing."""
    return all(
        _mean([kept_targets(outcome, own)[at] for outcome in some]) >= target.percentile
        for _, own, some in by_class(outcomes, targets)
        for at, target in enumerate((own.ttft, own.tpot))
        if target is not None
    )


def ratio(of: PointResult, to: PointResult, metric: str) -> MeasuredInterval:
    """Between two endpoints under one load: by repeats, which were run in turn, where there are several."""
    pairs = [(a[metric], b[metric]) for a, b in zip(of.each, to.each, strict=False) if metric in a and metric in b]
    if not pairs or not all(a > 0 and b > 0 for a, b in pairs):
        return MeasuredInterval(math.nan)
    interval = student([math.log(a / b) for a, b in pairs])
    return MeasuredInterval(math.exp(interval.value), math.exp(interval.low), math.exp(interval.high))


def statistics_of(run: BenchRun, targets: ClassTargets) -> dict[str, float]:
    """Of one run, or of the part of it that had settled; goodput is what kept its targets, over the time of all."""
    served = [outcome for outcome in run.outcomes if outcome.served]
    if not served:
        return {}
    begin = min(outcome.due_s for outcome in run.outcomes)
    end = max(outcome.due_s + outcome.e2e_s for outcome in served)
    if run.settled:
        begin, end = run.settled.begin_s, run.settled.end_s
    seconds = end - begin
    # Of each request, what of it lies in that time.
    shares = [_overlap(outcome.due_s, outcome.due_s + outcome.e2e_s, begin, end) for outcome in served]
    texts = [_overlap(outcome.due_s + outcome.ttft_s, outcome.due_s + outcome.e2e_s, begin, end) for outcome in served]
    output = sum(outcome.output_tokens * share for outcome, share in zip(served, texts, strict=True))
    inputs = sum(outcome.input_tokens * share for outcome, share in zip(served, shares, strict=True))
    good = [share for outcome, share in zip(served, shares, strict=True) if all(kept_targets(outcome, targets))]
    metrics = {
        "output_tokens_per_s": output / seconds,
        "total_tokens_per_s": (output + inputs) / seconds,
        "requests_per_s": sum(shares) / seconds,
        "goodput_requests_per_s": sum(good) / seconds,
        "seconds": seconds,
    }
    settled = [outcome for outcome in run.settled_outcomes if outcome.served]
    for name in LATENCIES:
        values = np.array([value for outcome in settled if not math.isnan(value := getattr(outcome, name))])
        if len(values):
            metrics[f"{name}_mean"] = float(values.mean())
            metrics |= {f"{name}_{at}": float(np.quantile(values, share)) for at, share in PERCENTILES.items()}
    return metrics


def _overlap(first: float, last: float, begin: float, end: float) -> float:
    """The share of one time that lies in another."""
    if last <= first:
        return float(begin <= first <= end)
    return max(min(last, end) - max(first, begin), 0.0) / (last - first)


def with_power(metrics: dict[str, float], use: Sequence[GpuUse]) -> dict[str, float]:
    """Watts of all GPUs that tell, on average, and joules of them for each token that came."""
    watts = sum(gpu_use.power_w for gpu_use in use if not math.isnan(gpu_use.power_w))
    if not watts or not metrics.get("output_tokens_per_s"):
        return metrics
    return metrics | {"power_w": watts, "joules_per_output_token": watts / metrics["output_tokens_per_s"]}


def _together(runs: Sequence[BenchRun]) -> list[GpuUse]:
    """Over all repeats, each GPU once."""
    by_gpu: dict[str, list[GpuUse]] = {}
    for use in (use for run in runs for use in run.gpus):
        by_gpu.setdefault(use.gpu, []).append(use)
    return [
        GpuUse(
            gpu, sum(use.readings for use in own), _mean([use.power_w for use in own]),
            max(use.most_power_w for use in own), max(use.most_memory_bytes for use in own),
            _mean([use.busy for use in own]),
        )
        for gpu, own in sorted(by_gpu.items())
    ]  # fmt: skip


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def student(values: Sequence[float]) -> MeasuredInterval:
    """The mean of repeats, and between what it lies at 95% if repeats scatter as a normal distribution does."""
    mean, freedom = _mean(values), len(values) - 1
    if freedom < 1:
        return MeasuredInterval(mean)
    wide = students_quantile(freedom) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return MeasuredInterval(mean, mean - wide, mean + wide)


def students_quantile(freedom: int) -> float:
    """Two-sided 95%."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = _NORMAL
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


def bootstrap(
    outcomes: Sequence[RequestOutcome], values: Mapping[str, float], load: BenchLoad, seed: int
) -> dict[str, MeasuredInterval]:
    """Stretches of neighbours are drawn whole, since neighbours wait for the same things.

    Throughput of a closed loop is tokens over the time that its clients spent on them. That of an open one is what was
    offered, as long as it keeps up: drawing again would say nothing of it.
    """
    served = sorted((outcome for outcome in outcomes if outcome.served), key=lambda outcome: outcome.due_s)
    intervals = {name: MeasuredInterval(value) for name, value in values.items()}
    if len(served) < 4:
        return intervals
    draw = np.random.default_rng(seed)
    size = max(min(round(len(served) ** (1 / 3)), len(served) // 2), 1)
    blocks = math.ceil(len(served) / size)
    columns = {name: np.array([getattr(outcome, name) for outcome in served]) for name in LATENCIES}
    tokens = np.array([float(outcome.output_tokens) for outcome in served])
    drawn: dict[str, list[float]] = {}
    for _ in range(_RESAMPLES):
        starts = draw.integers(0, len(served) - size + 1, blocks)
        rows = (starts[:, None] + np.arange(size)).ravel()[: len(served)]
        for name, column in columns.items():
            own = column[rows]
            own = own[~np.isnan(own)]
            if len(own):
                drawn.setdefault(f"{name}_mean", []).append(float(own.mean()))
                quantiles = np.quantile(own, list(PERCENTILES.values()))
                for at, value in zip(PERCENTILES, quantiles, strict=True):
                    drawn.setdefault(f"{name}_{at}", []).append(float(value))
        if load.clients is not None:
            drawn.setdefault("pace", []).append(float(tokens[rows].sum() / columns["e2e_s"][rows].sum()))
    for name, some in drawn.items():
        if name in intervals:
            low, high = np.quantile(some, [0.025, 0.975])
            intervals[name] = MeasuredInterval(intervals[name].value, float(low), float(high))
    if "pace" in drawn:
        low, high = np.quantile(drawn["pace"], [0.025, 0.975]) / np.median(drawn["pace"])
        for name in ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s"):
            value = intervals[name].value
            intervals[name] = MeasuredInterval(value, value * float(low), value * float(high))
    return intervals
