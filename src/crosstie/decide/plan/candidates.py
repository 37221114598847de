"""Every replica that could serve a model: accelerators x stacks x precisions x layouts that hold it; and every layout
that several models could share. Where requests ask for adapters (LoRA): slots in memory, slower steps, wider intervals.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.loading import shipped_loading
from crosstie.catalog.lora import most_in_flight, popularity_of, shipped_lora, slots_of
from crosstie.core.deployment import Accelerator, Adapters, Deployment, LoraTargets, Parallelism
from crosstie.core.disaggregated import Servable
from crosstie.core.errors import BadInput
from crosstie.core.estimate import METRICS, Correction
from crosstie.core.model import Model
from crosstie.core.workload import Evidence, Lora, ModelChoice, RequestClass, Sharing, Workload
from crosstie.core.worlds import WORLDS
from crosstie.decide.plan.gate import Gate
from crosstie.host.hosted import Hosted
from crosstie.host.sizes import hosted_model, load_path, room_bytes
from crosstie.perf.fit import candidate_layouts, surely_fits
from crosstie.perf.memory import gpu_weight_bytes
from crosstie.perf.worlds import two_piece

# Stacks that were measured on an accelerator are preferred over those that were not, those measured with the model or
# with models of its kind before others: among many estimates the best looking are those that err most, and without
# measurements the errors are largest.
_WITH_MODEL = ("model", "layout")
_MEASURED = (*_WITH_MODEL, "stack")
_USUAL_STACK = "vllm"
# Tensor-parallel ranks of replicas that models share; of an accelerator the narrowest that hold every model are tried.
_SHARED_WIDTHS = (1, 2, 4, 8)
_SHARED_LAYOUTS = 2
# What the longer steps of replicas with adapters do to each metric.
_LONGER = [-1.0 if metric == "throughput" else 1.0 for metric in METRICS]

# What tells one candidate from another.
Key = tuple[str, str, str, str, str, str, str]


def key_of(one: Servable) -> Key:
    drafts = str(one.speculation or "")
    return one.model.id, one.accelerator.id, one.stack.id, one.precision.id, one.kv_format, one.layout, drafts


def candidates(
    catalog: Catalog,
    model: Model,
    accelerators: Iterable[Accelerator],
    choice: ModelChoice,
    shortest: int,
    longest: int,
    gate: Gate,
    evidence: Evidence = "stack",
) -> list[Deployment]:
    """Those that run, and hold at least one request of the shortest contexts, and some that hold the longest."""
    deployments: list[Deployment] = []
    precisions = _different(catalog, model, choice.precisions)
    drafts = catalog.speculations(model, choice.speculation, text=choice.text, length=choice.acceptance)
    for accelerator in accelerators:
        splits = candidate_layouts(model, accelerator)
        for precision in precisions:
            for kv_format in choice.kv_formats:
                tried = _stacks(catalog, model, accelerator, splits[0], precision, kv_format, choice.stacks)
                for plain in tried if choice.stacks or evidence == "any" else _of_kind(catalog, tried, gate):
                    for way in drafts:
                        first = msgspec.structs.replace(plain, speculation=way)
                        held = _layouts(catalog, first, splits, shortest, longest)
                        deployments += [deployment for deployment in held if gate.passes(deployment)]
    return deployments if evidence == "any" else _better_known(deployments, evidence, gate)


def _of_kind(catalog: Catalog, tried: Sequence[Deployment], gate: Gate) -> Sequence[Deployment]:
    """Stacks that were measured here with this model or models of its kind, where there are any."""
    near = [d for d in tried if d.correction.nearness in _WITH_MODEL or catalog.knows_kind(d)]
    for deployment in tried if near else ():
        if deployment not in near:
            gate.pass_over(deployment)
    return near or tried


def _better_known(found: Sequence[Deployment], evidence: Evidence, gate: Gate) -> list[Deployment]:
    """Of each accelerator the stacks that were measured with this model there, where there are any; of these the
    layouts, where that is asked."""
    kept: list[Deployment] = []
    by_accelerator: dict[str, list[Deployment]] = {}
    for deployment in found:
        by_accelerator.setdefault(deployment.accelerator.id, []).append(deployment)
    for mine in by_accelerator.values():
        measured = {one.stack.id for one in mine if one.correction.nearness in _WITH_MODEL}
        for deployment in mine if measured else ():
            if deployment.stack.id not in measured:
                gate.pass_over(deployment)
        mine = [one for one in mine if not measured or one.stack.id in measured]
        exact = [one for one in mine if not one.correction.extrapolated]
        kept += exact if exact and evidence == "layout" else mine
    return kept


def _different(catalog: Catalog, model: Model, precisions: Sequence[str]) -> list[str]:
    """Names of precisions, each of what they stand for once: native may be FP8 already."""
    by_id: dict[str, str] = {}
    for name in precisions:
        by_id.setdefault(catalog.precision(model, name).id, name)
    return list(by_id.values())


def _stacks(
    catalog: Catalog, model: Model, accelerator: Accelerator, split: Parallelism, precision: str, kv_format: str,
    named: Sequence[str],
) -> list[Deployment]:  # fmt: skip
    """One replica a stack, in one layout; without names those that were measured here, or the usual one."""
    tried = []
    for stack in named or [s.id for s in catalog.stacks.values() if s.serves and s.id != "llama.cpp"]:
        try:
            tried.append(catalog.deployment(model, accelerator, split, precision, kv_format, stack))
        except BadInput:
            continue
    if named:
        return tried
    measured = [d for d in tried if d.correction.nearness in _MEASURED]
    return measured or [d for d in tried if d.stack.id == _USUAL_STACK] or tried[:1]


def _layouts(
    catalog: Catalog, first: Deployment, splits: Sequence[Parallelism], shortest: int, longest: int
) -> list[Deployment]:
    """Within one domain; stages beyond it only where nothing smaller holds the shortest, or the longest."""
    deployments = [d for d in (_held(first, split, shortest) for split in splits if split.pp == 1) if d]
    for context in (shortest, longest):
        if not any(_held(first, d.parallelism, context) for d in deployments):
            staged = (_held(first, split, context) for split in splits if split.pp > 1)
            deployments += [d for d in staged if d][:1]
    return [catalog.calibrated(deployment) for deployment in deployments]


def _held(first: Deployment, split: Parallelism, context: int) -> Deployment | None:
    deployment = msgspec.structs.replace(first, parallelism=split)
    return deployment if surely_fits(deployment, context) else None


class Unfit(Exception):
    """Why an accelerator cannot be shared by these models."""


@dataclass(frozen=True, slots=True)
class SharedLayout:
    """A replica that models could share: every model on it, what each takes, and the memory there is for them."""

    accelerator: Accelerator
    parallelism: Parallelism
    deployments: dict[str, Deployment]
    hosted: list[Hosted]
    room_bytes: float
    # Of the host's memory, for the weights of models that are asleep; 0 where they come from a disk.
    host_bytes: float


def longest_context(workload: Workload, model: str) -> int:
    """The longest request that any class asks of a model."""
    return max(piece.context for one in workload.classes if one.model == model for piece in one.slices)


def shared_layouts(
    catalog: Catalog, workload: Workload, sharing: Sharing, accelerator: Accelerator, gate: Gate
) -> list[SharedLayout]:
    layouts: list[SharedLayout] = []
    reason = ""
    for width in _SHARED_WIDTHS:
        if width > accelerator.domain or len(layouts) == _SHARED_LAYOUTS:
            break
        try:
            layouts.append(_shared_layout(catalog, workload, sharing, accelerator, Parallelism(tp=width), gate))
        except (Unfit, BadInput) as error:
            reason = str(error)
    if not layouts:
        raise Unfit(reason)
    return layouts


def _shared_layout(
    catalog: Catalog, workload: Workload, sharing: Sharing, accelerator: Accelerator, split: Parallelism, gate: Gate
) -> SharedLayout:
    path = load_path(shipped_loading(), accelerator, sharing)
    deployments = {name: _smallest(catalog, workload, accelerator, split, name, gate) for name in sharing.models}
    hosted = [
        hosted_model(
            deployment,
            path,
            context=longest_context(workload, name),
            sequences=sharing.sequences,
            pinned=name in sharing.pinned,
        )
        for name, deployment in deployments.items()
    ]
    room = min(room_bytes(deployment, path, len(hosted)) for deployment in deployments.values())
    largest = max(hosted, key=lambda one: one.taken_bytes)
    if largest.taken_bytes > room:
        raise Unfit(
            f"{largest.model} takes {largest.taken_bytes / 1e9:.0f} GB with a cache for {sharing.sequences} requests, "
            f"and {split.gpus} GPU{'s' if split.gpus > 1 else ''} leave {room / 1e9:.0f} GB for models that are awake"
        )
    weights = sum(gpu_weight_bytes(deployment) * split.gpus for deployment in deployments.values())
    asleep = sharing.load_from == "host"
    return SharedLayout(accelerator, split, deployments, hosted, room, weights if asleep else 0.0)


def _smallest(
    catalog: Catalog, workload: Workload, accelerator: Accelerator, split: Parallelism, name: str, gate: Gate
) -> Deployment:
    """In the smallest of the precisions that it may have: a shared replica is short of memory first."""
    model, choice = catalog.model(name), workload.choice(name)
    stack = choice.stacks[0] if choice.stacks else _USUAL_STACK
    deployments: list[Deployment] = []
    reason = ""
    for precision in choice.precisions:
        try:
            deployment = catalog.deployment(model, accelerator, split, precision, choice.kv_formats[0], stack)
        except BadInput as error:
            reason = str(error)
            continue
        if gate.passes(deployment):
            deployments.append(deployment)
        else:
            judged = gate.readiness(deployment)
            reason = f"{model.id} with {judged.label}: {judged.verdict}: {judged.why}"
    if not deployments:
        raise Unfit(reason)
    return catalog.calibrated(min(deployments, key=gpu_weight_bytes))


def with_adapters(deployments: Sequence[Deployment], classes: Sequence[RequestClass]) -> list[Deployment]:
    """The same with room for the adapters that the classes of their model ask for."""
    asked = [(request_class.lora, request_class.requests_per_s) for request_class in classes if request_class.lora]
    if not asked:
        return list(deployments)
    popularity = _together([(lora, rate) for lora, rate in asked], sum(one.requests_per_s for one in classes))
    slots = sum(slots_of(lora) for lora, _ in asked)
    rank = max(lora.rank for lora, _ in asked)
    targets: LoraTargets = "all" if any(lora.targets == "all" for lora, _ in asked) else "attention"
    most = most_in_flight(popularity, slots)
    facts = shipped_lora()
    found = []
    for deployment in deployments:
        low, likely, high = facts.speed(deployment.stack.id, moe=deployment.model.is_moe, rank=rank)
        adapters = Adapters(slots=slots, rank=rank, targets=targets, slowdown=1.0 / likely, max_sequences=most)
        correction = _wider(deployment.correction, math.log(likely / low), math.log(high / likely))
        found.append(msgspec.structs.replace(deployment, adapters=adapters, correction=correction))
    return found


def _together(asked: Sequence[tuple[Lora, float]], requests_per_s: float) -> list[float]:
    """Shares of a model's requests by adapter; those that ask for none need no slot."""
    return [share * rate / requests_per_s for lora, rate in asked for share in popularity_of(lora)]


def _wider(correction: Correction, slower: float, faster: float) -> Correction:
    """Nobody has measured this engine with adapters: what they cost is one more thing that differs between worlds."""
    if correction.worlds is None:
        return correction
    one = np.random.default_rng(list(b"adapters")).standard_normal(WORLDS // 2)
    longer = two_piece(np.concatenate([one, -one]), -faster, slower)
    return msgspec.structs.replace(correction, worlds=correction.worlds.off_by(np.outer(longer, _LONGER)))
