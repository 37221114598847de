"""Whether a model fits, and on how many GPUs: `fit` as findings."""

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Parallelism
from crosstie.core.errors import CrosstieError
from crosstie.core.finding import Finding, Location, Severity
from crosstie.core.model import Model
from crosstie.perf.fit import BARELY, DOES_NOT_FIT, Placement, candidate_layouts, place, place_each

_SMALLER = "more ranks (--tp), a smaller precision or a shorter --context"


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


def _finding(
    severity: Severity, model: Model, accelerator: Accelerator, *, what: str, evidence: str, remedy: str,
    key: str = "weights",
) -> Finding:  # fmt: skip
    return Finding(
        check="memory", severity=severity, what=what, where=Location(file=model.file, name=key), evidence=evidence,
        grounds="computed", remedy=remedy, target=accelerator.id,
    )  # fmt: skip


def uncounted(error: CrosstieError, model: Model, accelerator: Accelerator) -> Finding:
    """A precision, cache or stack that the arithmetic does not know."""
    return _finding(
        "unknown", model, accelerator, what="whether it fits was not counted", evidence=str(error),
        remedy=f"count by hand, or ask `crosstie fit` with a precision that it knows ({model.id})",
    )  # fmt: skip


def memory_finding(placement: Placement | None, model: Model, accelerator: Accelerator, context: int) -> Finding:
    if placement is None:
        return _finding(
            "error", model, accelerator,
            what=f"no layout within {accelerator.domain} GPUs holds the weights and one sequence of {context:,} tokens",
            evidence=f"{accelerator.memory_bytes / 1e9:.0f} GB a GPU; `crosstie fit {model.id} --on {accelerator.id}`",
            remedy="a smaller precision, a shorter --context, or an accelerator with more memory",
        )  # fmt: skip
    plan, split = placement.plan, placement.deployment.parallelism
    sizes = f"{plan.weight_bytes / 1e9:.1f} GB of weights a GPU at {split}, {plan.capacity_bytes / 1e9:.0f} GB there"
    if placement.verdict == DOES_NOT_FIT:
        return _finding(
            "error", model, accelerator,
            what=f"at {split} memory does not hold the weights and one sequence of {context:,} tokens",
            evidence=sizes, remedy=_SMALLER,
        )  # fmt: skip
    # The engine's own share of memory is an assumption; with twice of it the answer may turn.
    low, high = placement.sequences_interval
    if placement.verdict == BARELY:
        return _finding(
            "unknown", model, accelerator,
            what=f"at {split} one sequence of {context:,} tokens {BARELY}",
            evidence=f"{sizes}; between {low} and {high} sequences",
            remedy=_SMALLER,
        )  # fmt: skip
    return _finding(
        "note", model, accelerator, remedy="",
        what=f"fits on {split.gpus} GPU{'s' if split.gpus > 1 else ''} ({split}) "
        f"with {placement.sequences:,} sequences of {context:,} tokens",
        evidence=f"{sizes}; {low:,} to {high:,} sequences as the engine keeps more or less for itself",
    )  # fmt: skip


def ranks_finding(error: CrosstieError, model: Model, accelerator: Accelerator) -> Finding:
    return _finding(
        "error", model, accelerator, key="num_attention_heads",
        what="the ranks that were asked for cannot share this model", evidence=str(error),
        remedy="another --tp: one that divides the heads and stays within the domain",
    )  # fmt: skip
