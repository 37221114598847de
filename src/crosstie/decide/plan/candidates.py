"""Every replica that could serve a model: accelerators x stacks x precisions x layouts that hold it."""

from collections.abc import Iterable, Sequence

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.accelerator import Accelerator
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.model import Model
from crosstie.core.workload import ModelChoice
from crosstie.perf.fit import candidate_layouts
from crosstie.perf.memory import sequences_that_fit

# Stacks that were measured on an accelerator are preferred over those that were not: among many estimates
# the best looking are those that err most, and without measurements the errors are largest.
_MEASURED = ("model", "stack")


def candidates(
    catalog: Catalog,
    model: Model,
    accelerators: Iterable[Accelerator],
    choice: ModelChoice,
    shortest: int,
    longest: int,
) -> list[Deployment]:
    """Those that hold at least one request of the shortest contexts, and some that hold the longest."""
    found: list[Deployment] = []
    precisions = _different(catalog, model, choice.precisions)
    for accelerator in accelerators:
        splits = candidate_layouts(model, accelerator)
        for precision in precisions:
            for kv_format in choice.kv_formats:
                for first in _stacks(catalog, model, accelerator, splits[0], precision, kv_format, choice.stacks):
                    found += _layouts(catalog, first, splits, shortest, longest)
    return found


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
    return measured or [d for d in tried if d.stack.id == "vllm"] or tried[:1]


def _layouts(
    catalog: Catalog, first: Deployment, splits: Sequence[Parallelism], shortest: int, longest: int
) -> list[Deployment]:
    """Within one domain; stages beyond it only where nothing smaller holds the shortest, or the longest."""
    found = [d for d in (_held(first, split, shortest) for split in splits if split.pp == 1) if d]
    for context in (shortest, longest):
        if not any(_held(first, d.parallelism, context) for d in found):
            staged = (_held(first, split, context) for split in splits if split.pp > 1)
            found += [d for d in staged if d][:1]
    return [catalog.calibrated(deployment) for deployment in found]


def _held(first: Deployment, split: Parallelism, context: int) -> Deployment | None:
    deployment = msgspec.structs.replace(first, parallelism=split)
    return deployment if sequences_that_fit(deployment, context) else None
