"""The scorecard: one model under one load on several accelerators, and why one beats another."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from crosstie.catalog.benchmarks import at_length
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Accelerator, Deployment, Parallelism
from crosstie.core.errors import BadInput, DoesNotFit
from crosstie.core.estimate import Estimate
from crosstie.core.figures import significant
from crosstie.core.model import Model
from crosstie.core.question import BuyersQuestion, Reckoning, reckoning
from crosstie.core.speculation import Speculation
from crosstie.decide.compare.payoff import Payoff, payoff_of
from crosstie.perf.estimate import estimate
from crosstie.perf.fit import DOES_NOT_FIT, FITS, place, smallest_layout
from crosstie.perf.hardware import Hardware, compute_format, lacks
from crosstie.port.preflight.readiness import ReadinessCheck

# Rates that differ by less are called the same.
_SAME = 1.03


@dataclass(frozen=True, slots=True)
class Load:
    """What the clients do: requests in flight, and the lengths of each."""

    concurrency: int
    input_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value < 1:
                raise BadInput(f"{name.removesuffix('_tokens')} {value}: must be at least 1")

    @property
    def context(self) -> int:
        return self.input_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Entry:
    """One accelerator of the scorecard; `estimate` is None where the model cannot run."""

    accelerator: Accelerator
    deployment: Deployment | None
    estimate: Estimate | None
    emulated: tuple[str, ...]
    problem: str = ""
    # What speculation is worth on it, where it has any.
    payoff: Payoff | None = None
    # The same in other widths that hold it, where the width was not asked for.
    others: tuple[tuple[Deployment, Estimate], ...] = ()
    # What memory says of the layout, as `fit` and preflight put it.
    memory: str = DOES_NOT_FIT
    # What preflight says against it, where it runs all the same or nobody knows.
    caveat: str = ""
    # What is known against estimates at prompts of this length.
    at_length: str = ""


@dataclass(frozen=True, slots=True)
class Scorecard:
    model: Model
    load: Load
    entries: list[Entry]
    verdicts: list[str]
    # Whether the layout was asked for; else each has the fewest GPUs that hold model and load.
    asked: bool = False

    @property
    def question(self) -> BuyersQuestion:
        """Nothing is paid for yet: estimates themselves, at a load that is given."""
        deployment = next((entry.deployment for entry in self.entries if entry.deployment), None)
        asked = BuyersQuestion(
            models=(self.model.id,), input_tokens=self.load.input_tokens, output_tokens=self.load.output_tokens,
            in_flight=self.load.concurrency, price="", sure=0.5,
        )  # fmt: skip
        if deployment is None:
            return asked
        return msgspec.structs.replace(
            asked,
            precision=deployment.precision.id,
            kv_format=deployment.kv_format,
            engine=deployment.stack.id,
            drafts=str(deployment.speculation or ""),
        )

    def reckoned(self, entry: Entry, **price: Any) -> Reckoning:
        estimate, deployment = _estimate(entry), _deployment(entry)
        return reckoning(
            deployment, self.load.input_tokens, self.load.output_tokens, in_flight=self.load.concurrency,
            output_tokens_per_s_per_gpu=estimate.output_tokens_per_s_per_gpu,
            tokens_80=estimate.interval.per_gpu(deployment.parallelism.gpus) if estimate.interval else None, **price,
        )  # fmt: skip

    @property
    def layouts(self) -> str:
        """Which layout each accelerator is counted in, for the first line of an answer."""
        running = [_deployment(entry) for entry in self.entries if entry.estimate]
        if not running:
            return ""
        each = ", ".join(f"{d.accelerator.id} {d.parallelism}" for d in running)
        why = "as asked" if self.asked else "the fewest GPUs that hold model and load"
        return f"{running[0].precision.id} on {each} ({why})"


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
    speculation: Speculation | None = None,
) -> Scorecard:
    """Without a parallelism each accelerator gets the fewest GPUs that hold the model and the load."""
    model.check_context(load.context, f"input {load.input_tokens} plus output {load.output_tokens}")
    choices: dict[str, Any] = {
        "precision": precision, "kv_format": kv_format, "stack": stack, "speculation": speculation,
    }  # fmt: skip
    entries: list[Entry] = []
    refused: list[BadInput] = []
    check = ReadinessCheck(catalog)
    for accelerator in accelerators:
        try:
            deployment = _chosen(catalog, model, accelerator, load, parallelism, choices)
        except (DoesNotFit, BadInput) as error:
            if isinstance(error, BadInput):
                refused.append(error)
            entries.append(Entry(accelerator, None, None, (), str(error)))
            continue
        memory = place(deployment, load.context).verdict
        if not check.runs(deployment):
            readiness = check.readiness(deployment)
            against = f"preflight: {readiness.verdict} with {readiness.label}: {readiness.why}"
            entries.append(Entry(accelerator, None, None, (), against, memory=memory))
            continue
        payoff = payoff_of(deployment, load.concurrency, load.input_tokens, load.output_tokens)
        others = () if parallelism else _other_widths(catalog, deployment, load, len(accelerators))
        entries.append(
            Entry(
                accelerator, deployment, _estimated(deployment, load), emulated_formats(deployment), payoff=payoff,
                others=others, memory=memory, caveat=check.caveat(deployment),
                at_length=at_length(accelerator.id, load.input_tokens),
            )
        )  # fmt: skip
    if len(refused) == len(accelerators) and refused:
        raise refused[0]
    # Why one wins: the best against each of the others.
    running = sorted((e for e in entries if e.estimate), key=lambda e: -_estimate(e).output_tokens_per_s_per_gpu)
    verdicts = [verdict(running[0], other) for other in running[1:]]
    return Scorecard(model, load, entries, verdicts, asked=parallelism is not None)


def _estimated(deployment: Deployment, load: Load) -> Estimate:
    return estimate(
        deployment,
        concurrency=load.concurrency,
        input_tokens=load.input_tokens,
        output_tokens=load.output_tokens,
    )


def _other_widths(
    catalog: Catalog, deployment: Deployment, load: Load, compared: int
) -> tuple[tuple[Deployment, Estimate], ...]:
    """Half and twice as many tensor-parallel ranks, where they hold it; of one accelerator alone nobody asks."""
    split, others = deployment.parallelism, list[tuple[Deployment, Estimate]]()
    if compared < 2 or split.pp > 1:
        return ()
    for tp in (split.tp // 2, split.tp * 2):
        try:
            other = msgspec.structs.replace(deployment, parallelism=msgspec.structs.replace(split, tp=tp))
            other.parallelism.check(deployment.model, deployment.accelerator)
        except BadInput:
            continue
        if place(other, load.context).verdict == FITS:
            other = catalog.calibrated(other)
            others.append((other, _estimated(other, load)))
    return tuple(others)


def _chosen(
    catalog: Catalog, model: Model, accelerator: Accelerator, load: Load, parallelism: Parallelism | None,
    choices: dict[str, Any],
) -> Deployment:  # fmt: skip
    """The layout that was asked for, or the smallest that holds the load."""
    if parallelism is not None:
        given = catalog.deployment(model, accelerator, parallelism, **choices)
        if place(given, load.context).verdict != DOES_NOT_FIT:
            return given
        raise DoesNotFit(f"{parallelism.gpus} GPU{'s' if parallelism.gpus > 1 else ''} cannot hold it")
    placement = smallest_layout(
        catalog,
        model,
        accelerator,
        context=load.context,
        output_tokens=load.output_tokens,
        sequences=load.concurrency,
        **choices,
    )
    if placement is None:
        raise DoesNotFit("no layout within reach holds it")
    return placement.deployment


def emulated_formats(deployment: Deployment) -> tuple[str, ...]:
    """Weight formats that this silicon lacks, with what the engine does instead."""
    words = []
    for format in deployment.precision.formats_of(deployment.model.roles).values():
        if format.element_bits != 16 and lacks(deployment, format):
            written = deployment.stack.materialises(format.id, deployment.accelerator.vendor)
            instead = "written out first" if written else "unpacked in the kernel"
            instead = "rounded" if format.element_bits > 16 else instead
            words.append(f"{format.id} runs as {compute_format(deployment, format)}, {instead}")
    return tuple(words)


def verdict(a: Entry, b: Entry) -> str:
    """One sentence: who gives more output tokens a second per GPU, by how much, and why."""
    rate = _estimate(a).output_tokens_per_s_per_gpu, _estimate(b).output_tokens_per_s_per_gpu
    first, second = (a, b) if rate[0] >= rate[1] else (b, a)
    ratio = max(rate) / min(rate)
    if ratio < _SAME:
        return f"{first.accelerator.id} and {second.accelerator.id} give the same tokens/s per GPU within 3%."
    opening = f"{first.accelerator.id} gives {ratio:.2f}x the tokens/s per GPU of {second.accelerator.id}"
    doubt = " Their 80% intervals overlap." if _overlap(first, second) else ""
    against = [f" Of {side.accelerator.id} preflight says: {side.caveat}." for side in (first, second) if side.caveat]
    return f"{opening}: {'; '.join(reasons_for(first, second))}.{doubt}{''.join(against)}{_flipped(first, second)}"


def _flipped(first: Entry, second: Entry) -> str:
    """Where the second wins once one of the two runs in another width."""
    mine, theirs = _estimate(first).output_tokens_per_s_per_gpu, _estimate(second).output_tokens_per_s_per_gpu
    ratios = [(d, theirs / e.output_tokens_per_s_per_gpu) for d, e in first.others]
    ratios += [(d, e.output_tokens_per_s_per_gpu / mine) for d, e in second.others]
    flips = [(d, ratio) for d, ratio in ratios if ratio >= _SAME]
    if not flips:
        return ""
    d, ratio = max(flips, key=lambda pair: pair[1])
    gpus = f"{d.parallelism.gpus} GPU{'s' if d.parallelism.gpus > 1 else ''}"
    return f" The layout decides: with {d.accelerator.id} on {gpus} {second.accelerator.id} gives {ratio:.2f}x."


def _overlap(first: Entry, second: Entry) -> bool:
    """Whether the better could turn out the worse, by the intervals of tokens/s per GPU."""
    interval, other = _estimate(first).interval, _estimate(second).interval
    if interval is None or other is None:
        return False
    gpus = _deployment(first).parallelism.gpus, _deployment(second).parallelism.gpus
    return interval.per_gpu(gpus[0])[0] < other.per_gpu(gpus[1])[1]


def reasons_for(first: Entry, second: Entry) -> list[str]:
    """Memory first, since it sets the GPUs and the batch; then where the GPU time of a token goes."""
    winner, other = _estimate(first), _estimate(second)
    gpus = _deployment(first).parallelism.gpus, _deployment(second).parallelism.gpus
    reasons = []
    if gpus[0] < gpus[1]:
        what = "model and load" if winner.concurrency_that_fits >= winner.concurrency else "the model"
        reasons.append(f"its {first.accelerator.memory.capacity} a GPU hold {what} on {gpus[0]} instead of {gpus[1]}")
    if other.decode_bound == "memory capacity" and winner.concurrency_that_fits > other.concurrency_that_fits:
        reasons.append(
            f"{second.accelerator.id} has room for {other.concurrency_that_fits:.0f} of the {other.concurrency:.0f} "
            f"requests, {first.accelerator.id} for {min(winner.concurrency_that_fits, winner.concurrency):.0f}"
        )
    saved = {key: other.gpu_s_per_token[key] - spent for key, spent in winner.gpu_s_per_token.items()}
    total = sum(max(gap, 0.0) for gap in saved.values())
    for key in sorted(saved, key=lambda k: -saved[k])[:2]:
        if saved[key] > 0.2 * total:
            reasons.append(spending_reason(key, first, second))
    worst = min(saved, key=lambda k: saved[k])
    if saved[worst] < -0.2 * total:
        reasons.append("even though " + spending_reason(worst, first, second))
    return reasons


def spending_reason(key: str, first: Entry, second: Entry) -> str:
    """One line of a token's bill on both, with the silicon behind it where the silicon explains it."""
    phase, _, resource = key.partition(" ")
    spent = [_estimate(entry).gpu_s_per_token[key] * 1e3 for entry in (first, second)]
    what, rates, unit = {
        "compute": ("arithmetic", [dense_rate(e) / 1e12 for e in (first, second)], "dense TFLOP/s at peak"),
        "memory bandwidth": (
            "memory traffic", [e.accelerator.memory_bytes_per_s / 1e12 for e in (first, second)], "TB/s at peak",
        ),
        "interconnect": ("communication", [link_rate(e) / 1e9 for e in (first, second)], "GB/s each way"),
        "host": ("waiting for the host", [0.0, 0.0], ""),
    }[resource]  # fmt: skip
    line = f"{phase} {what} takes {significant(spent[0])} against {significant(spent[1])} GPU-ms a token"
    explains = (spent[0] < spent[1]) == (rates[0] > rates[1]) and f"{rates[0]:.3g}" != f"{rates[1]:.3g}"
    if not explains or not all(rates):
        return line
    mine, theirs = (significant(rate, 4) for rate in rates)
    if resource == "interconnect":
        topologies = [f" over the {e.accelerator.scale_up.topology.value}" for e in (first, second)]
        return f"{line} ({mine} {unit}{topologies[0]} against {theirs}{topologies[1]})"
    return f"{line} ({mine} against {theirs} {unit})"


def link_rate(entry: Entry) -> float:
    """Peak that each GPU has among its group, or 0 for a single one."""
    hardware = Hardware([_deployment(entry)])
    ranks = hardware.stage_gpus
    return float(hardware.link_peak_bytes_per_s(ranks)[0, 0]) if ranks[0, 0] > 1 else 0.0


def dense_rate(entry: Entry) -> float:
    """Dense peak of the compute format that most of the weights run in."""
    deployment = _deployment(entry)
    largest = max(deployment.model.tensors(), key=lambda pair: pair[0].parameters * pair[1])[0]
    return entry.accelerator.dense[compute_format(deployment, deployment.precision[largest.role].main)].si


def _estimate(entry: Entry) -> Estimate:
    assert entry.estimate is not None, "only entries that run are compared"
    return entry.estimate


def _deployment(entry: Entry) -> Deployment:
    assert entry.deployment is not None, "only entries that run are compared"
    return entry.deployment
