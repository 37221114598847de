"""Whether a model fits, and on how many GPUs: `fit` as findings."""

from typing import Any

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Parallelism
from crosstie.core.errors import CrosstieError
from crosstie.core.figures import plural
from crosstie.core.finding import Finding, Location
from crosstie.core.model import Model
from crosstie.perf.fit import BARELY, DOES_NOT_FIT, Placement, candidate_layouts, place, place_each
from crosstie.port.preflight.phrases import told


def placement_on(
    catalog: Catalog, model: Model, accelerator: Accelerator, *,
    context: int, precision: str, kv: str, stack: str, tp: int | None,
) -> Placement | None:  # fmt: skip
    """The layout that was asked for, or the fewest GPUs that surely hold it; None where no layout in reach does."""
    if tp is None:
        splits = [split for split in candidate_layouts(model, accelerator) if split.ep == 1 and split.dp == 1]
        first = catalog.deployment(model, accelerator, splits[0], precision, kv, stack)
        tried = place_each(catalog, first, splits, context)
        return min(filter(lambda one: one.fits, tried), key=lambda placement: placement.preference, default=None)
    return place(catalog.deployment(model, accelerator, Parallelism(tp=tp), precision, kv, stack), context)


def _at(model: Model) -> Location:
    return Location(file=model.file, name="weights")


def uncounted(error: CrosstieError, model: Model, accelerator: Accelerator) -> Finding:
    """A precision, cache or stack that the arithmetic does not know."""
    return told("memory-uncounted", _at(model), accelerator.id, error=error, model=model.id)


def memory_finding(placement: Placement | None, model: Model, accelerator: Accelerator, context: int) -> Finding:
    at, tokens = _at(model), f"{context:,}"
    if placement is None:
        return told(
            "memory-nowhere", at, accelerator.id, domain=accelerator.domain, context=tokens, model=model.id,
            memory=f"{accelerator.memory_bytes / 1e9:.0f}", accelerator=accelerator.id,
        )  # fmt: skip
    plan, split = placement.plan, placement.deployment.parallelism
    sizes = f"{plan.weight_bytes / 1e9:.1f} GB of weights a GPU at {split}, {plan.capacity_bytes / 1e9:.0f} GB there"
    if placement.verdict == DOES_NOT_FIT:
        return told("memory-not-at", at, accelerator.id, split=split, context=tokens, sizes=sizes)
    # The engine's own share of memory is an assumption; with twice of it the answer may turn.
    low, high = (f"{sequences:,}" for sequences in placement.sequences_interval)
    facts: dict[str, Any] = {"split": split, "context": tokens, "sizes": sizes, "low": low, "high": high}
    if placement.verdict == BARELY:
        return told("memory-barely", at, accelerator.id, barely=BARELY, **facts)
    return told(
        "memory", at, accelerator.id, gpus=plural(split.gpus, "GPU"), sequences=f"{placement.sequences:,}", **facts
    )


def ranks_finding(error: CrosstieError, model: Model, accelerator: Accelerator) -> Finding:
    return told("memory-ranks", Location(file=model.file, name="num_attention_heads"), accelerator.id, error=error)
