"""One service on more and more GPUs of a kind: the best layout at each size, and how much of the ideal it keeps."""

from collections.abc import Sequence
from dataclasses import dataclass

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Deployment, Parallelism
from crosstie.core.errors import BadInput, BadParameter
from crosstie.core.estimate import Estimate
from crosstie.core.model import Model
from crosstie.core.speculation import Speculation
from crosstie.decide.compare.scorecard import Load
from crosstie.perf.estimate import estimate
from crosstie.perf.fit import FITS, allowed, candidate_layouts, place_each

# What replicas on several machines behind one door keep of as many by themselves: the median of 30 MLPerf Inference
# results (v4.1 to v6.1, measured/results.csv.gz) on 16 to 288 GPUs over the best of the same round, accelerator, model
# and scenario on four or eight. Over 2 to 36 machines it does not fall with their number (0.4% more a factor of e, and
# they scatter by 7%), so that one figure stands for all sizes.
SEVERAL_MACHINES = 0.96
# What four fifths of them keep.
FOUR_FIFTHS = (0.89, 1.04)
_MACHINE = 8
# Widths of experts that reach beyond a node.
_WIDEST = 64


@dataclass(frozen=True, slots=True)
class Size:
    """A number of GPUs of one kind, in the layout that gives most there."""

    gpus: int
    deployment: Deployment | None = None
    replicas: int = 0
    # Of one replica; and of all, with what several machines lose.
    estimate: Estimate | None = None
    output_tokens_per_s: float = 0.0
    # Tokens a second a GPU over those of the first size; None where one of them cannot run it.
    efficiency: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Scaling:
    accelerator: Accelerator
    sizes: list[Size]


def scaling(
    catalog: Catalog, model: Model, accelerators: Sequence[Accelerator], gpus: Sequence[int], load: Load, *,
    precision: str | None = None, kv_format: str = "bf16", stack: str | None = None,
    speculation: Speculation | None = None,
) -> list[Scaling]:  # fmt: skip
    """`load.concurrency` is of the first size; each further one has as many requests a GPU."""
    if not gpus or any(n < 1 for n in gpus):
        raise BadParameter("gpus", "must be numbers of GPUs of at least 1, such as 8,16,32")
    if list(gpus) != sorted(set(gpus)):
        raise BadParameter("gpus", "must have each number once, the smallest first")
    scaled = []
    for accelerator in accelerators:
        first = catalog.deployment(model, accelerator, Parallelism(), precision, kv_format, stack, speculation)
        sizes = [_size(catalog, first, n, load, load.concurrency * n / gpus[0]) for n in gpus]
        base = sizes[0].output_tokens_per_s / sizes[0].gpus
        scaled.append(Scaling(accelerator, [_with_efficiency(size, base) for size in sizes]))
    if not any(size.deployment for each in scaled for size in each.sizes):
        raise BadInput(scaled[0].sizes[-1].problem)
    return scaled


def _with_efficiency(size: Size, base: float) -> Size:
    if not base or size.deployment is None:
        return size
    kept = size.output_tokens_per_s / size.gpus / base
    return Size(size.gpus, size.deployment, size.replicas, size.estimate, size.output_tokens_per_s, kept)


def _size(catalog: Catalog, first: Deployment, gpus: int, load: Load, requests: float) -> Size:
    """The layout whose replicas fill the GPUs and give most tokens."""
    best: Size | None = None
    tried = place_each(catalog, first, layouts(first.model, first.accelerator, gpus), load.context)
    holding = [placed.deployment for placed in tried if placed.verdict == FITS]
    # Stages beyond what one needs to hold the model are for nobody who can have replicas.
    for deployment in [d for d in holding if d.parallelism.pp == 1] or holding:
        replicas = gpus // deployment.parallelism.gpus
        each = max(round(requests / replicas), 1)
        got = estimate(deployment, concurrency=each, input_tokens=load.input_tokens, output_tokens=load.output_tokens)
        several = replicas > 1 and gpus > _MACHINE
        rate = got.output_tokens_per_s * replicas * (SEVERAL_MACHINES if several else 1.0)
        if best is None or rate > best.output_tokens_per_s:
            best = Size(gpus, deployment, replicas, got, rate)
    return best or Size(gpus, problem=f"{gpus} {first.accelerator.id} cannot hold {first.model.id}")


def layouts(model: Model, accelerator: Accelerator, gpus: int) -> list[Parallelism]:
    """Those of which whole replicas fill the GPUs, with experts that reach beyond a node among them."""
    parallelisms = candidate_layouts(model, accelerator)
    if model.is_moe:
        reach = [n for n in (16, 32, _WIDEST) if n > accelerator.domain]
        parallelisms += allowed([Parallelism(dp=n, ep=n) for n in reach], model, accelerator)
    return [split for split in parallelisms if gpus % split.gpus == 0]
