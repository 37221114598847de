"""How a model sits on accelerators: which layouts hold it, and what is left for the cache."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import msgspec

from crosstie.core.deployment import Accelerator, Deployment, Parallelism, kv_bytes_per_element
from crosstie.core.errors import BadInput
from crosstie.core.model import Model, Precision
from crosstie.core.question import USUAL
from crosstie.core.speculation import Speculation
from crosstie.perf.memory import (
    MemoryPlan,
    cache_sequences,
    memory_plan,
    requests_that_fit,
    sequences_that_fit,
    weight_bytes_by_format,
)

# What memory says of a layout, wherever it is asked: of one whole sequence beside the weights, also if the engine keeps
# twice the memory for itself that it is assumed to.
FITS = "fits"
BARELY = "fits only if the engine itself keeps little memory"
DOES_NOT_FIT = "does not fit"
_MOST_STAGES = 16


class Deployments(Protocol):
    """Where replicas come from: the catalog, which knows formats, stacks and what was measured."""

    def precision(self, model: Model, name: str | None = None) -> Precision: ...
    def deployment(
        self,
        model: Model,
        accelerator: Accelerator,
        parallelism: Parallelism | None = None,
        precision: str | None = None,
        kv_format: str = "bf16",
        stack: str | None = None,
        speculation: Speculation | None = None,
    ) -> Deployment: ...
    def calibrated(self, deployment: Deployment) -> Deployment: ...


@dataclass(frozen=True, slots=True)
class Placement:
    """One layout of a model on one kind of accelerator."""

    deployment: Deployment
    plan: MemoryPlan
    context: int
    cache_tokens: float
    sequences: int
    fewest: bool

    @property
    def fits(self) -> bool:
        return self.sequences >= 1

    @property
    def surely(self) -> bool:
        """Whether it fits even if the engine keeps twice the memory that it is assumed to."""
        return surely_fits(self.deployment, self.context)

    @property
    def verdict(self) -> str:
        """FITS, BARELY or DOES_NOT_FIT. Where a layout is chosen, BARELY is the last resort; `plan` never takes it."""
        if not self.fits:
            return DOES_NOT_FIT
        return FITS if self.surely else BARELY

    @property
    def preference(self) -> tuple[bool, int, int]:
        """The fewest GPUs; a layout whose fit depends on what the engine keeps for itself is the last resort."""
        split = self.deployment.parallelism
        return not self.surely, split.gpus, split.pp

    @property
    def sequences_interval(self) -> tuple[int, int]:
        """With twice and half the memory that the engine is assumed to keep for itself."""
        low, high = (_keeping(self.deployment, self.context, share) for share in (2.0, 0.5))
        return low, high


def surely_fits(deployment: Deployment, context: int) -> bool:
    """What "fits" means wherever a layout is chosen: one whole sequence, even if the engine keeps twice the memory for
    itself that it is assumed to."""
    return _keeping(deployment, context, 2.0) >= 1


def _keeping(deployment: Deployment, context: int, share: float) -> int:
    stack = deployment.stack
    reserved = msgspec.structs.replace(stack.reserved, value=stack.reserved.value * share)
    other = msgspec.structs.replace(deployment, stack=msgspec.structs.replace(stack, reserved=reserved))
    return sequences_that_fit(other, context)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a model takes in one precision, wherever it runs."""

    precision: str
    weight_bytes: float
    weight_bytes_by_format: dict[str, float]
    kv_format: str
    kv_bytes_per_token: float
    kv_bytes_per_sequence: float
    state_bytes_per_sequence: float


@dataclass(frozen=True, slots=True)
class Fit:
    model: Model
    context: int
    sizes: list[Sizes]
    placements: list[Placement]
    # Accelerators that cannot have the layout that was asked for, with the reason.
    problems: dict[str, str]


def fit(
    catalog: Deployments,
    model: Model,
    accelerators: Sequence[Accelerator],
    *,
    context: int | None = None,
    precisions: Sequence[str] = ("native",),
    kv_format: str = "bf16",
    stack: str | None = None,
    layouts: Sequence[Parallelism] | None = None,
    at_most: Mapping[str, int] | None = None,
) -> Fit:
    """Every layout that holds the model within a domain, or the given layouts only.

    `context`: tokens a sequence; 8,192 by default, or the model's limit. Names of one precision count once.
    `at_most`: GPUs that there are, by accelerator; without an entry, as many as a layout takes.
    """
    if not precisions:
        raise BadInput("no precision is named")
    if context is None:
        context = min(USUAL.context, model.max_context or USUAL.context)
    precisions = list({catalog.precision(model, name).id: name for name in precisions}.values())
    model.check_context(context, f"a context of {context}")
    element = kv_bytes_per_element(kv_format)
    state, per_sequence = model.cache_bytes(0, element), model.cache_bytes(context, element)
    sizes, placements = [], list[Placement]()
    problems: dict[str, str] = {}
    for precision in precisions:
        resolved = catalog.precision(model, precision)
        by_format = weight_bytes_by_format(model, resolved)
        sizes.append(
            Sizes(
                precision=resolved.id,
                weight_bytes=sum(by_format.values()),
                weight_bytes_by_format=by_format,
                kv_format=kv_format,
                kv_bytes_per_token=(per_sequence - state) / context,
                kv_bytes_per_sequence=per_sequence,
                state_bytes_per_sequence=state,
            )
        )
        for accelerator in accelerators:
            try:
                splits = _within(layouts or candidate_layouts(model, accelerator), accelerator, at_most or {})
                first = catalog.deployment(model, accelerator, splits[0], precision, kv_format, stack)
                tried = place_each(catalog, first, splits, context)
            except BadInput as error:
                if len(accelerators) == 1:
                    raise
                problems[accelerator.id] = str(error)
                continue
            placements += tried if layouts else worth_showing(tried)
    if accelerators and not placements:
        raise BadInput(next(iter(problems.values())))
    return Fit(model=model, context=context, sizes=sizes, placements=placements, problems=problems)


def _within(splits: Sequence[Parallelism], accelerator: Accelerator, at_most: Mapping[str, int]) -> list[Parallelism]:
    limit = at_most.get(accelerator.id)
    parallelisms = [split for split in splits if limit is None or split.gpus <= limit]
    if not parallelisms:
        raise BadInput(f"{splits[0]} takes {splits[0].gpus} GPUs, and there are {limit} of {accelerator.id}")
    return parallelisms


def place_each(catalog: Deployments, first: Deployment, splits: Sequence[Parallelism], context: int) -> list[Placement]:
    """The same replica in other layouts: everything but the split is resolved once."""
    return [place(catalog.calibrated(msgspec.structs.replace(first, parallelism=split)), context) for split in splits]


def place(deployment: Deployment, context: int) -> Placement:
    return Placement(
        deployment,
        memory_plan(deployment),
        context=context,
        cache_tokens=float(cache_sequences(deployment, context)) * context,
        sequences=sequences_that_fit(deployment, context),
        fewest=False,
    )


def longest_context(*deployments: Deployment) -> int:
    """The longest single request whose cache each of these holds, as far as the model reaches."""
    most = deployments[0].model.max_context or 10**7

    def too_long(tokens: int) -> bool:
        return not all(sequences_that_fit(deployment, tokens) for deployment in deployments)

    # The first length that does not fit, less one.
    return bisect_left(range(most + 1), True, lo=2, key=too_long) - 1


def candidate_layouts(model: Model, accelerator: Accelerator) -> list[Parallelism]:
    """Tensor parallelism within the domain, attention replicas for experts, stages beyond the domain.

    Spreading experts under tensor parallelism (TPn·EPn) fills memory as TPn does, so it is left out.
    """
    widths = [n for n in (1, 2, 4, 8, 16, 32, 64, 72) if n <= accelerator.domain]
    parallelisms = [Parallelism(tp=n) for n in widths]
    if model.is_moe:
        parallelisms += [Parallelism(dp=n, ep=n) for n in widths if n > 1]
    widest = max((split.tp for split in allowed(parallelisms, model, accelerator)), default=1)
    parallelisms += [Parallelism(tp=widest, pp=n) for n in range(2, _MOST_STAGES + 1) if n <= model.layer_count]
    return list(allowed(parallelisms, model, accelerator))


def allowed(layouts: Iterable[Parallelism], model: Model, accelerator: Accelerator) -> Iterable[Parallelism]:
    for split in layouts:
        try:
            split.check(model, accelerator)
        except BadInput:
            continue
        yield split


def worth_showing(tried: list[Placement]) -> list[Placement]:
    """The fewest GPUs that hold the model, what else holds it within the domain, or the nearest miss."""
    holding = [p for p in tried if p.fits]
    if not holding:
        return [max(tried, key=lambda p: p.deployment.parallelism.gpus)]
    fewest = min(p.deployment.parallelism.gpus for p in holding)
    staged = all(p.deployment.parallelism.pp > 1 for p in holding)
    shown = [p for p in holding if staged or p.deployment.parallelism.pp == 1]
    shown = [p for p in shown if p.deployment.parallelism.gpus <= (2 * fewest if staged else 8 * fewest)]
    shown.sort(key=lambda p: (p.deployment.parallelism.gpus, p.deployment.parallelism.dp, p.deployment.parallelism.ep))
    best = min(holding, key=lambda p: p.preference)
    shown += [best] if best not in shown else []
    return [replace(p, fewest=p.deployment.parallelism.gpus == best.deployment.parallelism.gpus) for p in shown]


def smallest_layout(
    catalog: Deployments,
    model: Model,
    accelerator: Accelerator,
    *,
    context: int,
    output_tokens: int = 0,
    sequences: int = 1,
    precision: str | None = None,
    kv_format: str = "bf16",
    stack: str | None = None,
    speculation: Speculation | None = None,
) -> Placement | None:
    """The fewest GPUs, tensor parallel first, that hold one request of the whole context and so many in flight, of
    which the last `output_tokens` come one by one.

    Where none holds that many, the layout that holds most; None where none holds even one.
    """
    splits = [s for s in candidate_layouts(model, accelerator) if s.ep == 1 and s.dp == 1]
    first = catalog.deployment(model, accelerator, splits[0], precision, kv_format, stack, speculation)
    tried = place_each(catalog, first, splits, context)
    room = {id(p): requests_that_fit(p.deployment, context - output_tokens, output_tokens) for p in tried if p.fits}
    enough = [p for p in tried if room.get(id(p), 0) >= sequences]
    if enough:
        return min(enough, key=lambda p: p.preference)
    return max((p for p in tried if p.fits), key=lambda p: room[id(p)], default=None)
