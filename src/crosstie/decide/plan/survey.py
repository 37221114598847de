"""Every replica that could serve a workload, evaluated once; then read hopefully or warily, at little cost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Deployment
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import RequestClass, Workload
from crosstie.decide.plan.candidates import candidates, key_of
from crosstie.decide.plan.capacity import (
    Capacity,
    EstimateScale,
    LoadCurve,
    Promise,
    Tier,
    TrafficPart,
    capacity,
    curves,
    own_ttft_s,
    tier_of,
)
from crosstie.decide.plan.gate import Gate
from crosstie.perf.hardware import Array, Hardware

# Promises that pools of one model can make; more distinct ones are merged, the nearest first, into the stricter of
# each. Promises that only a mixture of classes would ask for are tried where there are few.
_MOST_TIERS = 24
_FEW_TIERS = 8


@dataclass(frozen=True, slots=True)
class Survey:
    """One model: its deployments, and a curve for each of its parts on all of them."""

    deployments: list[Deployment]
    parts: list[TrafficPart]
    curves: list[LoadCurve]
    tiers: list[Tier]

    def rows(self, index: Sequence[int]) -> "Survey":
        """Some of the deployments, or one of them several times."""
        deployments = [self.deployments[i] for i in index]
        return replace(self, deployments=deployments, curves=[curve.rows(index) for curve in self.curves])


@dataclass(frozen=True, slots=True)
class Column:
    """A pool that could be: a deployment that promises a tier."""

    deployment: Deployment
    tier: Tier


@dataclass(frozen=True, slots=True)
class Offers:
    """What every column takes of every part: arrays of shape (columns, parts)."""

    parts: list[TrafficPart]
    columns: list[Column]
    capacity: Capacity

    @property
    def requests_per_s(self) -> Array:
        return self.capacity.requests_per_s

    def only(self, keep: NDArray[np.int64]) -> "Offers":
        return replace(self, columns=[self.columns[i] for i in keep], capacity=self.capacity.rows(keep))


def parts_of(workload: Workload) -> list[TrafficPart]:
    cut = [(one, piece) for one in workload.classes for piece in one.slices]
    return [TrafficPart(one, piece, index) for index, (one, piece) in enumerate(cut)]


def surveys(
    catalog: Catalog,
    workload: Workload,
    accelerators: Sequence[Accelerator],
    on_progress: OnProgress = no_progress,
    gate: Gate | None = None,
) -> list[Survey]:
    parts = parts_of(workload)
    gate = gate or Gate(catalog, workload)
    found = []
    models = list(dict.fromkeys(one.model for one in workload.classes))
    for done, model_id in enumerate(models):
        mine = [part for part in parts if part.request_class.model == model_id]
        # A replica that holds only short requests may still serve these.
        contexts = [part.slice.context for part in mine]
        model, choice = catalog.model(model_id), workload.choice(model_id)
        tried = candidates(catalog, model, accelerators, choice, min(contexts), max(contexts), gate)
        on_progress(done, len(models), f"{model_id}: {len(tried)} replicas, {len(mine)} kinds of requests")
        found.append(survey(tried, mine))
    return found


def survey(deployments: Sequence[Deployment], parts: list[TrafficPart]) -> Survey:
    """Deployments of one precision are evaluated together."""
    ordered = sorted(deployments, key=lambda d: (d.precision.id, d.kv_format))
    per_part: list[list[LoadCurve]] = [[] for _ in parts]
    for _, group in groupby(ordered, key=lambda d: (d.precision.id, d.kv_format)):
        for held, curve in zip(per_part, curves(Hardware(list(group)), [p.slice for p in parts]), strict=True):
            held.append(curve)
    joined = [LoadCurve.stacked(held) for held in per_part] if ordered else []
    return Survey(list(ordered), parts, joined, tiers([part.request_class for part in parts]))


def tiers(classes: Sequence[RequestClass]) -> list[Tier]:
    """What pools may promise: what some class asks, and the stricter of both where two classes differ in each."""
    asked = dict.fromkeys(map(tier_of, classes))
    found = list(dict.fromkeys([*asked, *(_stricter(a, b) for a, b in combinations(asked, 2))]))
    if len(found) > _FEW_TIERS:
        found = list(asked)
    while len(found) > _MOST_TIERS:
        a, b = min(combinations(found, 2), key=lambda pair: _apart(*pair))
        found = list(dict.fromkeys([t for t in found if t not in (a, b)] + [_stricter(a, b)]))
    return found


def _stricter(a: Tier, b: Tier) -> Tier:
    return Tier(min(a.ttft_s, b.ttft_s), min(a.tpot_s, b.tpot_s))


def _apart(a: Tier, b: Tier) -> float:
    pairs = [(min(x, 1e4), min(y, 1e4)) for x, y in ((a.ttft_s, b.ttft_s), (a.tpot_s, b.tpot_s))]
    return float(sum(abs(np.log(x / y)) for x, y in pairs))


Scaling = Callable[[Sequence[Deployment]], EstimateScale]


def scaling_of(workload: Workload) -> Scaling:
    """By the upper 80% bound of the estimates or by the estimates, as the workload asks."""
    return EstimateScale.upper_bound if workload.sizing == "safe" else EstimateScale.none


def of_one_stack(surveyed: Sequence[Survey], scaling: Scaling) -> list[Survey]:
    """The surveys of the stacks that `one_stack` keeps, found where each part has it best: in its own tier."""
    kept = {key_of(column.deployment) for column in one_stack(offers(surveyed, scaling, own_tiers=True)).columns}
    return [one.rows([i for i, d in enumerate(one.deployments) if key_of(d) in kept]) for one in surveyed]


def offers(surveyed: Sequence[Survey], scaling: Scaling, *, own_tiers: bool = False) -> Offers:
    """What the columns of all models take, as estimates are scaled; of a part only in its own tier if that will do."""
    parts = sorted((part for one in surveyed for part in one.parts), key=lambda part: part.index)
    able = [one for one in surveyed if one.deployments]
    columns = [Column(deployment, tier) for one in able for tier in one.tiers for deployment in one.deployments]
    taken = Capacity.empty((len(columns), len(parts)))
    start = 0
    for one in able:
        count = len(one.deployments)
        scale = scaling(one.deployments)
        promises = [promise_of(one, tier, scale) for tier in one.tiers]
        for part, curve in zip(one.parts, one.curves, strict=True):
            admitting = [index for index, tier in enumerate(one.tiers) if tier.admits(part.request_class)]
            if own_tiers:
                own = tier_of(part.request_class)
                admitting = [index for index in admitting if one.tiers[index] == own] or admitting
            # All tiers in one evaluation: the deployments once for each of them.
            again = np.tile(np.arange(count), len(admitting))
            promised = Promise.stacked([promises[index] for index in admitting])
            rows = start + np.repeat(admitting, count) * count + again
            taken.fill(rows, part.index, capacity(curve.rows(again), part, promised, scale.rows(again)))
        start += len(one.tiers) * count
    return Offers(parts, columns, taken)


def promise_of(one: Survey, tier: Tier, scale: EstimateScale) -> Promise:
    """What the classes that a tier is named after ask of all that it admits."""
    promise = Promise.none(one.deployments)
    wait_s, quantile, deviations = promise.wait_s, promise.quantile, promise.deviations
    for part, curve in zip(one.parts, one.curves, strict=True):
        if not tier.admits(part.request_class):
            continue
        if tier.is_asked_by(part.request_class):
            deviations = np.maximum(deviations, part.deviations)
        if part.ttft and part.ttft.seconds <= tier.ttft_s:
            quantile = np.maximum(quantile, part.ttft.load_quantile)
            left = tier.ttft_s - own_ttft_s(curve, scale)
            # Prompts that are late even alone go to other deployments, and do not wait here.
            wait_s = np.where(left > 0, np.minimum(wait_s, left), wait_s)
    return Promise(np.full(len(one.deployments), tier.tpot_s), wait_s, quantile, deviations)


def longer(one: Survey, factor: float) -> list[TrafficPart]:
    """The parts of a model with prompts so many times as long, as far as its context goes."""
    room = one.deployments[0].model.max_context or 10**8

    def stretched(part: TrafficPart) -> TrafficPart:
        piece = part.slice
        longest = min(max(round(piece.longest_input * factor), 1), max(room - piece.longest_output, 1))
        mean = min(max(piece.input_tokens * factor, 1.0), float(longest))
        return replace(part, slice=msgspec.structs.replace(piece, input_tokens=mean, longest_input=longest))

    return [stretched(part) for part in one.parts]


def one_stack(offered: Offers) -> Offers:
    """Of every model on every accelerator the stack alone that would carry all of its load on the fewest GPUs.

    Two engines side by side for the same model and silicon would save a percent, which the estimates cannot
    tell, and double the work of whoever runs them.
    """
    rate = offered.requests_per_s
    demand = np.array([part.requests_per_s for part in offered.parts])
    gpus = np.array([float(column.deployment.parallelism.gpus) for column in offered.columns])
    per_request = np.divide(gpus[:, None], rate, out=np.full_like(rate, np.inf), where=rate > 0)
    scores: dict[tuple[str, str], dict[str, tuple[int, float]]] = {}
    rows: dict[tuple[str, str, str], list[int]] = {}
    for index, column in enumerate(offered.columns):
        d = column.deployment
        rows.setdefault((d.model.id, d.accelerator.id, d.stack.id), []).append(index)
    for (model, accelerator, stack), mine in rows.items():
        best = per_request[mine].min(axis=0)
        served = np.isfinite(best)
        # Serving more kinds of requests comes first, then fewer GPUs.
        score = (-int(served.sum()), float(best[served] @ demand[served]))
        scores.setdefault((model, accelerator), {})[stack] = score
    chosen = {(*key, min(stacks, key=lambda s: stacks[s])) for key, stacks in scores.items()}
    kept = sorted(index for key, mine in rows.items() if key in chosen for index in mine)
    return offered.only(np.array(kept, np.int64))


def undominated(offered: Offers) -> Offers:
    """Without columns that another of the same accelerator and model replaces at no loss.

    One replaces another if it takes as much of every part per GPU, and if its GPUs divide the other's, so that
    whole numbers of it stand for whole numbers of the other. This loses no fleet.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, column in enumerate(offered.columns):
        if offered.requests_per_s[index].max(initial=0.0) > 0:
            key = (column.deployment.model.id, column.deployment.accelerator.id)
            groups.setdefault(key, []).append(index)
    kept = [index for group in groups.values() for index in _front(offered, np.array(group))]
    return offered.only(np.array(sorted(kept), np.int64))


def _front(offered: Offers, group: NDArray[np.int64]) -> list[int]:
    gpus = np.array([offered.columns[i].deployment.parallelism.gpus for i in group])
    rate = offered.requests_per_s[group]
    used = rate.max(axis=0) > 0
    per_gpu = rate[:, used] / gpus[:, None]
    # Best first, so that most fall to the first few they meet.
    order = np.argsort(-per_gpu.sum(axis=1) - 1e-9 / gpus, kind="stable")
    kept: list[int] = []
    for index in order:
        others = np.array(kept, np.int64)
        if len(others):
            divides = gpus[index] % gpus[others] == 0
            covers = np.all(per_gpu[others] >= per_gpu[index] * (1.0 - 1e-9), axis=1)
            if np.any(divides & covers):
                continue
        kept.append(int(index))
    return [int(group[i]) for i in kept]
