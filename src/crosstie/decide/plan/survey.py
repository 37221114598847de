"""Every replica that could serve a workload, evaluated once; then read hopefully or warily, at little cost."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, groupby

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Deployment
from crosstie.core.disaggregated import Disaggregated, Servable
from crosstie.core.progress import OnProgress, no_progress
from crosstie.core.workload import RequestClass, Slice, Workload
from crosstie.decide.plan.apart import service_curves, services
from crosstie.decide.plan.candidates import candidates, key_of, with_adapters
from crosstie.decide.plan.capacity import (
    Capacity,
    Levels,
    LoadCurve,
    Meant,
    PartTargets,
    Tier,
    TrafficPart,
    curves,
    operating_points,
    tier_of,
)
from crosstie.decide.plan.gate import Gate
from crosstie.decide.plan.scaling import Reading
from crosstie.perf.hardware import Array, Hardware

# Promises that pools of one model can make; more distinct ones are merged, the nearest first, into the stricter of
# each. Promises that only a mixture of classes would ask for are tried where there are few.
_MOST_TIERS = 24
_FEW_TIERS = 8
# With more parts than this, pools are meant for whole classes alone.
_MANY_PARTS = 24
# Pools for the shorter half of a class's prompts take this part of what may miss its targets; the longer half the rest.
_SHORT_ALLOWANCE = 0.4
# Shares of requests that keep a target, this close, are the same.
_SAME_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class Survey:
    """One model: its deployments, and a curve for each of its parts on all of them."""

    deployments: list[Servable]
    parts: list[TrafficPart]
    curves: list[LoadCurve]
    tiers: list[Tier]

    def rows(self, index: Sequence[int]) -> "Survey":
        """Some of the deployments, or one of them several times."""
        deployments = [self.deployments[i] for i in index]
        return replace(self, deployments=deployments, curves=[curve.rows(index) for curve in self.curves])


@dataclass(frozen=True, slots=True)
class Purpose:
    """What a pool of a tier is meant for: parts by their place in the survey, and what of their misses it may have."""

    parts: tuple[int, ...]
    allowance: float = 1.0
    # Whether it also takes parts of other classes that its tier admits.
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class Column:
    """A pool that could be: a deployment that promises a tier, and what it is meant for."""

    deployment: Servable
    tier: Tier
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class Offers:
    """What every column takes of every part: arrays of shape (columns, parts)."""

    parts: list[TrafficPart]
    columns: list[Column]
    capacity: Capacity

    @property
    def requests_per_s(self) -> Array:
        return self.capacity.requests_per_s

    def corrected(self, by_model: Mapping[str, float]) -> "Offers":
        """With so many times what closed forms say that replicas of a model take."""
        factor = np.array([by_model.get(column.deployment.model.id, 1.0) for column in self.columns])
        return replace(self, capacity=self.capacity.faster(factor)) if by_model else self

    def beside(self, other: "Offers") -> "Offers":
        """These columns, then those of the same question."""
        capacity = Capacity.stacked([self.capacity, other.capacity])
        return replace(self, columns=[*self.columns, *other.columns], capacity=capacity)

    def only(self, keep: NDArray[np.int64]) -> "Offers":
        return replace(self, columns=[self.columns[i] for i in keep], capacity=self.capacity.rows(keep))


def parts_of(workload: Workload) -> list[TrafficPart]:
    cut = [(request_class, piece) for request_class in workload.classes for piece in request_class.slices]
    return [TrafficPart(request_class, piece, index) for index, (request_class, piece) in enumerate(cut)]


def surveys(
    catalog: Catalog,
    workload: Workload,
    accelerators: Sequence[Accelerator],
    on_progress: OnProgress = no_progress,
    gate: Gate | None = None,
    known: Sequence[Survey] = (),
) -> list[Survey]:
    """`known`: surveys of the same traffic; what they have of a replica is not worked out again."""
    parts = parts_of(workload)
    gate = gate or Gate(catalog, workload)
    found = []
    models = list(dict.fromkeys(request_class.model for request_class in workload.classes))
    for done, model_id in enumerate(models):
        mine = [part for part in parts if part.request_class.model == model_id]
        # A replica that holds only short requests may still serve these.
        contexts = [part.slice.context for part in mine]
        model, choice = catalog.model(model_id), workload.choice(model_id)
        evidence = workload.constraints.evidence
        tried = candidates(catalog, model, accelerators, choice, min(contexts), max(contexts), gate, evidence)
        tried = with_adapters(tried, [one for one in workload.classes if one.model == model_id])
        on_progress(done, len(models), f"{model_id}: {len(tried)} replicas, {len(mine)} kinds of requests")
        served = services(catalog, tried, [part.slice for part in mine]) if choice.apart else tried
        before = next((one for one in known if one.parts[0].request_class.model == model_id), None)
        found.append(survey(served, mine, before))
    return found


def survey(deployments: Sequence[Servable], parts: list[TrafficPart], known: Survey | None = None) -> Survey:
    """Deployments of one precision are evaluated together, and so are services with prefill and decode apart."""

    def kind(one: Servable) -> tuple[bool, str, str]:
        return isinstance(one, Disaggregated), one.precision.id, one.kv_format

    ordered = sorted(deployments, key=kind)
    if known is not None and known.deployments:
        place = {key_of(one): index for index, one in enumerate(known.deployments)}
        new = survey([one for one in ordered if key_of(one) not in place], parts)
        place.update({key_of(one): len(place) + index for index, one in enumerate(new.deployments)})
        both = [LoadCurve.stacked(pair) for pair in zip(known.curves, new.curves or known.curves, strict=True)]
        rows = [place[key_of(one)] for one in ordered]
        return replace(new, deployments=ordered, curves=[curve.rows(rows) for curve in both])
    per_part: list[list[LoadCurve]] = [[] for _ in parts]
    for _, group in groupby(ordered, key=kind):
        for held, curve in zip(per_part, _curves(list(group), [p.slice for p in parts]), strict=True):
            held.append(curve)
    joined = [LoadCurve.stacked(held) for held in per_part] if ordered else []
    return Survey(list(ordered), parts, joined, tiers([part.request_class for part in parts]))


def _curves(alike: Sequence[Servable], slices: Sequence[Slice]) -> list[LoadCurve]:
    apart = [one for one in alike if isinstance(one, Disaggregated)]
    return (
        service_curves(apart, slices)
        if apart
        else curves(Hardware([d for d in alike if isinstance(d, Deployment)]), slices)
    )


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


def peak_of(workload: Workload) -> float:
    """What the fleet is sized for, over today's peak: the end of its first year, and what is kept free."""
    return max(1.0 + workload.growth_per_year, 1.0) * (1.0 + workload.constraints.spare)


def of_one_stack(surveyed: Sequence[Survey], scaling: Reading) -> list[Survey]:
    """The surveys of the stacks that `one_stack` keeps, found where each part has it best: in its own tier."""
    kept = {key_of(column.deployment) for column in one_stack(offers(surveyed, scaling, own_tiers=True)).columns}
    return [one.rows([i for i, d in enumerate(one.deployments) if key_of(d) in kept]) for one in surveyed]


def of_accelerators(surveyed: Sequence[Survey], names: Collection[str]) -> list[Survey]:
    return [one.rows([i for i, d in enumerate(one.deployments) if d.accelerator.id in names]) for one in surveyed]


# A tier, what a pool of it is meant for, and what each deployment then takes of the parts that it may take.
_Pools = list[tuple[Tier, Purpose, list[int], Capacity]]


def offers(
    surveyed: Sequence[Survey], scaling: Reading, *, peak: float = 1.0, own_tiers: bool = False
) -> Offers:  # fmt: skip
    """What the columns of all models take, as estimates are scaled; of a part only in its own tier if that will do.

    `peak`: the traffic over today's, since more replicas that share it wait less.
    """
    return _joined([(one, _pools([one], scaling, peak, own_tiers=own_tiers)[0]) for one in surveyed])


def offers_of_each(
    surveyed: Sequence[Survey], moved: Sequence[Survey], scaling: Reading, *, peak: float = 1.0
) -> list[Offers]:
    """The same as each of `moved` takes the place of its model's survey, from which it differs in targets alone."""
    usual = [(one, _pools([one], scaling, peak)[0]) for one in surveyed]
    offerses: dict[int, Offers] = {}
    for place, one in enumerate(surveyed):
        mine = [other for other in moved if other.curves is one.curves]
        for other, pools in zip(mine, _pools(mine, scaling, peak), strict=True):
            offerses[id(other)] = _joined([*usual[:place], (other, pools), *usual[place + 1 :]])
    return [offerses[id(one)] for one in moved]


def _pools(alike: Sequence[Survey], scaling: Reading, peak: float, *, own_tiers: bool = False) -> list[_Pools]:
    """The pools of surveys that differ in targets alone."""
    if not alike or not alike[0].deployments:
        return [[] for _ in alike]
    levels = Levels(alike[0].parts, alike[0].curves, scaling(alike[0].deployments))
    asked = [(one, PartTargets(one.parts)) for one in alike]
    every = [
        (place, tier, purpose, _meant(one, targets, purpose, peak))
        for place, (one, targets) in enumerate(asked)
        for tier in one.tiers
        for purpose in purposes(one, tier, own_tiers=own_tiers)
    ]
    found: list[_Pools] = [[] for _ in alike]
    points = operating_points(levels, [meant for _, _, _, meant in every])
    for (place, tier, purpose, _), point in zip(every, points, strict=True):
        found[place].append((tier, purpose, _taken(alike[place], tier, purpose, own_tiers), point))
    return found


def _joined(found: Sequence[tuple[Survey, _Pools]]) -> Offers:
    parts = sorted((part for one, _ in found for part in one.parts), key=lambda part: part.index)
    columns = [
        Column(deployment, tier, purpose)
        for one, pools in found
        for tier, purpose, _, _ in pools
        for deployment in one.deployments
    ]
    taken = Capacity.empty((len(columns), len(parts)))
    place = {part.index: place for place, part in enumerate(parts)}
    start = 0
    for one, pools in found:
        for _, _, takes, capacity in pools:
            rows = slice(start, start := start + len(one.deployments))
            taken.fill(rows, [place[one.parts[k].index] for k in takes], capacity.of_parts(takes))
    return Offers(parts, columns, taken)


def _meant(one: Survey, targets: PartTargets, purpose: Purpose, peak: float) -> Meant:
    share = np.zeros(len(one.parts))
    share[list(purpose.parts)] = [one.parts[place].requests_per_s for place in purpose.parts]
    return Meant(targets, share, float(share.sum()) * peak, purpose.allowance)


def rates_of(one: Survey, levels: Levels, column: Column, peak: float) -> dict[int, Array]:
    """By part: what pools as a column has them take of it; an entry a deployment."""
    (capacity,) = operating_points(levels, [_meant(one, levels.targets, column.purpose, peak)])
    takes = _taken(one, column.tier, column.purpose, False)
    return {one.parts[place].index: capacity.requests_per_s[:, place] for place in takes}


def purposes(one: Survey, tier: Tier, *, own_tiers: bool = False) -> list[Purpose]:
    """What pools of a tier may be meant for: each class whose own it is, the shorter or the longer of its prompts, the
    classes that ask for it together, and all that it admits."""
    admitted: dict[str, list[int]] = {}
    asking: list[str] = []
    alone: list[str] = []
    for place, part in enumerate(one.parts):
        kind = part.request_class
        if not tier.admits(kind):
            continue
        if kind.name not in admitted:
            own = tier_of(kind)
            asking += [kind.name] if tier.is_asked_by(kind) else []
            alone += [kind.name] if own == tier or own not in one.tiers else []
        admitted.setdefault(kind.name, []).append(place)
    found = [Purpose(tuple(admitted[name]), is_open=True) for name in alone]
    if own_tiers or len(one.parts) > _MANY_PARTS:
        return found
    shorter = _shorter_half(one.parts)
    for name in alone:
        short = tuple(i for i in admitted[name] if i in shorter)
        long = tuple(i for i in admitted[name] if i not in shorter)
        if short and long:
            found += [Purpose(short, _SHORT_ALLOWANCE), Purpose(long, 2.0 - _SHORT_ALLOWANCE)]
    for together in (asking, list(admitted)):
        parts = tuple(sorted(i for name in together for i in admitted[name]))
        if len(together) > 1 and all(parts != known.parts for known in found):
            found.append(Purpose(parts, is_open=True))
    return found


def _shorter_half(parts: Sequence[TrafficPart]) -> set[int]:
    """Places of the slices that are of the shorter half of their class's prompts; slices come by length."""
    upto: dict[str, float] = {}
    found = set()
    for place, part in enumerate(parts):
        name = part.request_class.name
        upto[name] = upto.get(name, 0.0) + part.slice.share
        if upto[name] <= 0.5 + 1e-6:
            found.add(place)
    return found


def _taken(one: Survey, tier: Tier, purpose: Purpose, own_tiers: bool) -> list[int]:
    if not purpose.is_open or own_tiers:
        return list(purpose.parts)
    asking = {id(one.parts[place].request_class) for place in purpose.parts}
    return [
        place
        for place, part in enumerate(one.parts)
        if place in purpose.parts or (tier.admits(part.request_class) and id(part.request_class) not in asking)
    ]


def longer(one: Survey, factor: float) -> list[TrafficPart]:
    """The parts of a model with prompts so many times as long, as far as its context goes."""
    room = one.deployments[0].model.max_context or 10**8

    def stretched(part: TrafficPart) -> TrafficPart:
        piece = part.slice
        longest = min(max(round(piece.longest_input * factor), 1), max(room - piece.longest_output, 1))
        sample = tuple((min(max(round(inputs * factor), 1), longest), outputs) for inputs, outputs in piece.sample)
        mean = min(max(piece.input_tokens * factor, 1.0), float(longest))
        # Of longer prompts the same share is cached, unless all have it in common.
        own = piece.cached_tokens - piece.shared_tokens
        shared = min(piece.shared_tokens, max(mean - 1.0, 0.0))
        cached = min(shared + own * mean / piece.input_tokens, mean)
        return replace(
            part,
            slice=msgspec.structs.replace(
                piece, input_tokens=mean, longest_input=longest, sample=sample, cached_tokens=cached,
                shared_tokens=shared, cached_sample=tuple(one * factor for one in piece.cached_sample),
            ),
        )  # fmt: skip

    return [stretched(part) for part in one.parts]


def one_stack(offered: Offers) -> Offers:
    """Of every model on every accelerator the stack alone that would carry all of its load on the fewest GPUs.

    Two engines side by side for the same model and silicon would save a percent, which the estimates cannot
    tell, and double the work of whoever runs them.
    """
    rate = offered.requests_per_s
    demand = np.array([part.requests_per_s for part in offered.parts])
    gpus = np.array([float(column.deployment.gpus) for column in offered.columns])
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

    One replaces another if it takes as much of every part per GPU, keeps targets as often, and if its GPUs divide the
    other's, so that whole numbers of it stand for whole numbers of the other. This loses no fleet.
    """
    groups: dict[tuple[str, str], list[int]] = {}
    for index, column in enumerate(offered.columns):
        if offered.requests_per_s[index].max(initial=0.0) > 0:
            key = (column.deployment.model.id, column.deployment.accelerator.id)
            groups.setdefault(key, []).append(index)
    kept = [index for group in groups.values() for index in _front(offered, np.array(group))]
    return offered.only(np.array(sorted(kept), np.int64))


def _front(offered: Offers, group: NDArray[np.int64]) -> list[int]:
    gpus = np.array([offered.columns[i].deployment.gpus for i in group])
    rate = offered.requests_per_s[group]
    used = rate.max(axis=0) > 0
    per_gpu = rate[:, used] / gpus[:, None]
    kept_of = [
        np.where(rate[:, used] > 0, kept[group][:, used], 0.0)
        for kept in (offered.capacity.keeps_ttft, offered.capacity.keeps_tpot)
    ]
    keeps = np.concatenate(kept_of, axis=1)
    # Best first, so that most fall to the first few they meet.
    order = np.argsort(-per_gpu.sum(axis=1) - 1e-9 / gpus, kind="stable")
    gpus, per_gpu, keeps = gpus[order], per_gpu[order], keeps[order]
    left = np.ones(len(order), bool)
    for index in range(len(order)):
        if left[index]:
            later = index + 1 + np.flatnonzero(left[index + 1 :] & (gpus[index + 1 :] % gpus[index] == 0))
            covers = np.all(per_gpu[index] >= per_gpu[later] * (1.0 - 1e-9), axis=1)
            later = later[covers]
            left[later[np.all(keeps[index] >= keeps[later] - _SAME_SHARE, axis=1)]] = False
    return [int(group[i]) for i in order[left]]
