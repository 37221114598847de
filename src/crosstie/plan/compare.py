"""The scorecard: one model under one load on several accelerators, and why one beats another."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from crosstie.catalog.library import Catalog
from crosstie.core.accelerator import Accelerator
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.estimate import Estimate
from crosstie.core.model import Model
from crosstie.perf.estimate import estimates
from crosstie.perf.fit import place, smallest_layout
from crosstie.perf.hardware import compute_format, peer_bytes_per_s


@dataclass(frozen=True)
class Load:
    """What the clients do: requests in flight, and the lengths of each."""

    concurrency: int
    input_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name, value in (
            ("--concurrency", self.concurrency),
            ("--input", self.input_tokens),
            ("--output", self.output_tokens),
        ):
            if value < 1:
                raise BadInput(f"{name} {value}: must be at least 1")

    @property
    def context(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True)
class Entry:
    """One accelerator of the scorecard; `estimate` is None where the model cannot run."""

    accelerator: Accelerator
    deployment: Deployment | None
    estimate: Estimate | None
    emulated: tuple[str, ...]
    problem: str = ""


@dataclass(frozen=True)
class Scorecard:
    model: Model
    load: Load
    entries: list[Entry]
    verdicts: list[str]


def compare(
    catalog: Catalog,
    model: Model,
    accelerators: Sequence[Accelerator],
    load: Load,
    *,
    parallelism: Parallelism | None = None,
    precision: str | None = None,
    kv_format: str = "bf16",
    stack: str | None = None,
) -> Scorecard:
    """Without a parallelism each accelerator gets the fewest GPUs that hold the model and the load."""
    check_context(model, load)
    entries = []
    for accelerator in accelerators:
        deployment, problem = None, ""
        if parallelism is not None:
            given = catalog.deployment(model, accelerator, parallelism, precision, kv_format, stack)
            if place(given, load.context).fits:
                deployment = given
            else:
                problem = f"{given.parallelism.gpus} GPU{'s' if given.parallelism.gpus > 1 else ''} cannot hold it"
        else:
            placement = smallest_layout(
                catalog, model, accelerator, context=load.context, sequences=load.concurrency,
                precision=precision, kv_format=kv_format, stack=stack,
            )  # fmt: skip
            deployment = placement.deployment if placement else None
            problem = "" if placement else "no layout within reach holds it"
        if deployment is None:
            entries.append(Entry(accelerator, None, None, (), problem))
            continue
        found = estimates(
            [deployment], concurrency=load.concurrency, input_tokens=load.input_tokens, output_tokens=load.output_tokens
        )[0]
        entries.append(Entry(accelerator, deployment, found, emulated_formats(deployment)))
    verdicts = [verdict(a, b) for a, b in combinations([e for e in entries if e.estimate], 2)]
    return Scorecard(model=model, load=load, entries=entries, verdicts=verdicts)


def check_context(model: Model, load: Load) -> None:
    if model.max_context is not None and load.context > model.max_context:
        raise BadInput(
            f"--input {load.input_tokens} plus --output {load.output_tokens} is {load.context} tokens, "
            f"beyond the {model.max_context} that {model.id} supports"
        )


def emulated_formats(deployment: Deployment) -> tuple[str, ...]:
    """Weight formats that this silicon lacks, with what the engine does instead."""
    found = []
    used = {f.id: f for mix in deployment.precision.by_role.values() for f in mix.formats}
    roles = {t.role for t, _ in deployment.model.tensors()}
    stored = {f.id for role in roles for f in deployment.precision[role].formats}
    for format in used.values():
        if format.id not in stored:
            continue
        runs = compute_format(deployment, format)
        if runs != format.runs_as[0] and format.element_bits < 16:
            way = (
                "written out first"
                if deployment.stack.materialises(format.id, deployment.accelerator.vendor)
                else "unpacked in the kernel"
            )
            found.append(f"{format.id} runs as {runs}, {way}")
    return tuple(found)


def verdict(a: Entry, b: Entry) -> str:
    """One sentence: who gives more output tokens a second per GPU, by how much, and why."""
    rate = _estimate(a).output_tokens_per_s_per_gpu, _estimate(b).output_tokens_per_s_per_gpu
    first, second = (a, b) if rate[0] >= rate[1] else (b, a)
    ratio = max(rate) / min(rate)
    if ratio < 1.03:
        return f"{first.accelerator.id} and {second.accelerator.id} give the same tokens/s per GPU within 3%."
    opening = f"{first.accelerator.id} gives {ratio:.2f}x the tokens/s per GPU of {second.accelerator.id}"
    return f"{opening}: {'; '.join(reasons_for(first, second))}."


def reasons_for(first: Entry, second: Entry) -> list[str]:
    """Memory first, since it sets the GPUs and the batch; then where the GPU time of a token goes."""
    one, other = _estimate(first), _estimate(second)
    gpus = _deployment(first).parallelism.gpus, _deployment(second).parallelism.gpus
    reasons = []
    if gpus[0] < gpus[1]:
        reasons.append(f"its {memory(first)} a GPU hold model and load on {gpus[0]} instead of {gpus[1]}")
    if other.decode_bound == "memory capacity":
        reasons.append(
            f"{second.accelerator.id} has room for {other.concurrency_that_fits:.0f} of the {other.concurrency:.0f} "
            f"requests, {first.accelerator.id} for {min(one.concurrency_that_fits, one.concurrency):.0f}"
        )
    saved = {key: other.gpu_s_per_token[key] - spent for key, spent in one.gpu_s_per_token.items()}
    total = sum(max(gap, 0.0) for gap in saved.values())
    for key in sorted(saved, key=lambda k: -saved[k])[:2]:
        if saved[key] > 0.2 * total:
            reasons.append(spending_reason(key, first, second))
    worst = min(saved, key=lambda k: saved[k])
    if saved[worst] < -0.2 * total:
        reasons.append("even though " + spending_reason(worst, first, second))
    return reasons


def spending_reason(key: str, first: Entry, second: Entry) -> str:
    """One line of a token's bill on both, with the silicon behind it."""
    phase, _, resource = key.partition(" ")
    spent = [f"{_estimate(entry).gpu_s_per_token[key] * 1e3:.2f}" for entry in (first, second)]
    a, b = first.accelerator, second.accelerator
    if resource == "memory bandwidth":
        what = f"{phase} memory traffic"
        why = f"{a.memory_bytes_per_s / 1e12:.2f} against {b.memory_bytes_per_s / 1e12:.2f} TB/s at peak"
    elif resource == "compute":
        rates = [
            f"{(e.accelerator.flop_per_s(main_compute(_deployment(e))) or 0.0) / 1e12:,.0f}" for e in (first, second)
        ]
        what, why = f"{phase} arithmetic", f"{rates[0]} against {rates[1]} dense TFLOP/s at peak"
    elif resource == "interconnect":
        what = f"{phase} communication"
        why = f"{links(first)} against {links(second)}"
    else:
        what, why = (
            f"{phase} waiting for the host",
            f"{_deployment(first).stack.name}, {_deployment(second).stack.name}",
        )
    return f"{what} takes {spent[0]} against {spent[1]} GPU-ms a token ({why})"


def links(entry: Entry) -> str:
    deployment = _deployment(entry)
    if deployment.parallelism.gpus == 1:
        return "one GPU"
    ranks = deployment.parallelism.stage_gpus
    peak = min(peer_bytes_per_s(deployment) * max(ranks - 1, 1), entry.accelerator.scale_up.bandwidth.si)
    topology = entry.accelerator.scale_up.topology.value
    return f"{peak / 1e9:.0f} GB/s each way over the {topology}"


def _estimate(entry: Entry) -> Estimate:
    assert entry.estimate is not None, "only entries that run are compared"
    return entry.estimate


def _deployment(entry: Entry) -> Deployment:
    assert entry.deployment is not None, "only entries that run are compared"
    return entry.deployment


def memory(entry: Entry) -> str:
    return f"{entry.accelerator.memory.capacity.value:g} {entry.accelerator.memory.capacity.unit}"


def main_compute(deployment: Deployment) -> str:
    """The compute format of most of the weights."""
    largest = max(deployment.model.tensors(), key=lambda pair: pair[0].parameters * pair[1])[0]
    return compute_format(deployment, deployment.precision[largest.role].main)
