"""Accelerators beside each other by axis: silicon, money, speed, software, export. Every cell has its source."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from crosstie.catalog.export import export_class, shipped_export
from crosstie.catalog.library import Catalog
from crosstie.catalog.prices import KINDS
from crosstie.core.deployment import Accelerator, Deployment, Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fact import Fact, Sourced
from crosstie.core.figures import arithmetic, dollars, parameters, seconds, significant
from crosstie.core.model import COMPUTE_FORMATS
from crosstie.core.question import USUAL
from crosstie.core.units import HOURS_PER_MONTH
from crosstie.decide.cost.prices import PURCHASE, Quote, behind, quote, quotes
from crosstie.decide.scorecard.contest import Contest
from crosstie.perf.fit import smallest_layout
from crosstie.perf.memory import memory_plan
from crosstie.port.preflight.matrix import builds
from crosstie.port.preflight.readiness import ReadinessCheck

# What is left for a cache hangs on what else is there: the model that $ per GB of KV cache and engines are asked with.
REFERENCE, PRECISION = "llama-3.3-70b", "fp8"
_CONTEXT = USUAL.context
# Bytes a parameter of what one GPU's memory is asked to hold.
_WEIGHTS = {"bf16": 2.0, "fp8": 1.0}
_ENGINES = ("vllm", "sglang", "tensorrt-llm", "atom", "llama.cpp")
# Words of a verdict that a cell has room for.
_SHORT = {"ready with settings": "settings", "will not run": "no", "not known, but measured": "measured"}
SILICON, MONEY, SPEED, SOFTWARE, EXPORT = PARTS = ("silicon", "money", "speed", "software", "export")


@dataclass(frozen=True, slots=True)
class ScoreCell:
    text: str
    # SI, or USD; None where nobody knows.
    value: float | str | None
    # The source, its date and basis; or what it was computed from.
    source: str


@dataclass(frozen=True, slots=True)
class Axis:
    part: str
    name: str
    unit: str
    # By accelerator.
    cells: dict[str, ScoreCell]


NOTHING = ScoreCell("-", None, "not in the catalog")


def cited(fact: Sourced) -> str:
    return f"{fact.source} ({fact.basis}, {fact.date})" + (f"; {fact.note}" if fact.note else "")


def _of(fact: Fact | None) -> ScoreCell:
    return ScoreCell(str(fact), fact.si, cited(fact)) if fact else NOTHING


def silicon(catalog: Catalog, accelerators: Sequence[Accelerator]) -> list[Axis]:
    def axis(name: str, unit: str, facts: Mapping[str, Fact | None]) -> Axis:
        return Axis(SILICON, name, unit, {part: _of(fact) for part, fact in facts.items()})

    axises = [
        axis("memory", "bytes", {accelerator.id: accelerator.memory.capacity for accelerator in accelerators}),
        axis("bandwidth", "bytes/s", {accelerator.id: accelerator.memory.bandwidth for accelerator in accelerators}),
    ]
    for format in COMPUTE_FORMATS:
        rates = {accelerator.id: accelerator.dense.get(format) for accelerator in accelerators}
        if any(rates.values()):
            cells = {
                part: ScoreCell(significant(rate.si / 1e12), rate.si, cited(rate)) if rate else NOTHING
                for part, rate in rates.items()
            }
            axises.append(Axis(SILICON, f"dense {format}, TFLOP/s", "FLOP/s", cells))
    axises += [
        axis("links, one way", "bytes/s", {part.id: part.scale_up.bandwidth for part in accelerators}),
        axis("GPUs they join", "count", {accelerator.id: accelerator.scale_up.domain for accelerator in accelerators}),
        axis("network a GPU", "bytes/s", {part.id: part.scale_out.bandwidth for part in accelerators}),
        axis("power", "W", {accelerator.id: accelerator.chip.tdp for accelerator in accelerators}),
        *(
            Axis(SILICON, f"{format} weights it holds", "parameters",
                 {accelerator.id: _held(catalog, accelerator, bytes_each) for accelerator in accelerators})
            for format, bytes_each in _WEIGHTS.items()
        ),
    ]  # fmt: skip
    return axises


def _held(catalog: Catalog, accelerator: Accelerator, bytes_each: float) -> ScoreCell:
    """Parameters of a model whose weights alone fill what the engine takes of one GPU: a limit of the memory, whatever
    models there are."""
    stack = next(stack for stack in map(catalog.stack, ("vllm", "llama.cpp")) if stack.runs_on(accelerator.vendor))
    share, reserved = stack.memory_fraction, stack.reserved
    held = (share.value * accelerator.memory_bytes - reserved.si) / bytes_each
    said = (
        f"{accelerator.memory_bytes / 1e9:,.0f} GB, of which {stack.name} takes {share.value:.0%} and keeps "
        f"{reserved} ({reserved.basis}, {reserved.date}), at {bytes_each:g} bytes a parameter; no KV cache"
    )
    return ScoreCell(parameters(held), held, said)


def money(catalog: Catalog, accelerators: Sequence[Accelerator]) -> list[Axis]:
    def priced(asked: Quote | None) -> ScoreCell:
        if asked is None:
            return NOTHING
        refs = sorted({cited(price.amount) for price in behind(catalog.prices, asked)})
        return ScoreCell(dollars(asked.usd), asked.usd, f"{asked.origin}: {' | '.join(refs)}")

    axes = []
    for kind in KINDS:
        cells = {accelerator.id: priced(quote(catalog.prices, accelerator.id, kind)) for accelerator in accelerators}
        if any(cell.value is not None for cell in cells.values()):
            unit = "USD" if kind.startswith(PURCHASE) else "USD/h"
            axes.append(Axis(MONEY, f"{kind}, {'$' if unit == 'USD' else '$/h'}", unit, cells))
    rents = quotes(catalog.prices, [accelerator.id for accelerator in accelerators], [USUAL.price], {})
    bought = {accelerator.id: quote(catalog.prices, accelerator.id, PURCHASE) for accelerator in accelerators}
    rooms = {accelerator.id: _cache_gb(catalog, accelerator) for accelerator in accelerators}
    by_rent, by_price, by_cache = dict[str, ScoreCell](), dict[str, ScoreCell](), dict[str, ScoreCell]()
    for part in accelerators:
        gb = part.memory_bytes / 1e9
        rent, buy, room = rents.get(part.id), bought[part.id], rooms[part.id]
        by_rent[part.id] = by_price[part.id] = by_cache[part.id] = NOTHING
        if rent:
            month, said = rent.usd * HOURS_PER_MONTH, f"{dollars(rent.usd)}/h {rent.kind} ({rent.origin})"
            by_rent[part.id] = ScoreCell(dollars(month / gb), month / gb, f"{said} over {gb:,.0f} GB")
            if room:
                left, deployment = room
                where = f"{left:,.0f} GB a GPU that {deployment.model.id} {deployment.precision.id} leaves"
                text = f"{said} over {where} on {deployment.parallelism.gpus}, by `crosstie fit`"
                by_cache[part.id] = ScoreCell(dollars(month / left), month / left, text)
        if buy:
            by_price[part.id] = ScoreCell(dollars(buy.usd / gb), buy.usd / gb, f"{dollars(buy.usd)} ({buy.origin})")
    return [
        *axes,
        Axis(MONEY, "rent, $ a GB-month", "USD/GB-month", by_rent),
        Axis(MONEY, "purchase, $/GB", "USD/GB", by_price),
        Axis(MONEY, "KV cache, $ a GB-month", "USD/GB-month", by_cache),
    ]


def _cache_gb(catalog: Catalog, accelerator: Accelerator) -> tuple[float, Deployment] | None:
    """What the reference model leaves of a GPU, on the fewest that hold it."""
    try:
        placed = smallest_layout(
            catalog, catalog.model(REFERENCE), accelerator, context=_CONTEXT, output_tokens=1, sequences=1,
            precision=PRECISION,
        )  # fmt: skip
    except BadInput:
        return None
    return (memory_plan(placed.deployment).cache_bytes / 1e9, placed.deployment) if placed else None


def speed(contests: Iterable[Contest], accelerators: Sequence[Accelerator]) -> list[Axis]:
    """Of each scenario the tokens a second of a GPU, and what a million of them costs; by its own parts if it has."""
    axes = []
    for contest in contests:
        if contest.scenario.accelerators:
            continue
        by_name = {entry.accelerator.id: entry for entry in contest.ranking}
        rates, costs = dict[str, ScoreCell](), dict[str, ScoreCell]()
        for part in accelerators:
            own = by_name.get(part.id)
            if own is None:
                rates[part.id] = costs[part.id] = ScoreCell("-", None, contest.problems[part.id])
                continue
            at = f"{own.deployment.label}, {own.concurrency:,} in flight: TTFT {seconds(own.estimate.ttft_s)}"
            said = f"{at}, TPOT {seconds(own.estimate.tpot_s)}; predicted, {own.estimate.basis}"
            rates[part.id] = ScoreCell(significant(own.tokens_per_s_per_gpu), own.tokens_per_s_per_gpu, said)
            costs[part.id] = ScoreCell(dollars(own.usd_per_mtok), own.usd_per_mtok, f"{own.reckoned.price}; {said}")
        axes += [
            Axis(SPEED, f"{contest.scenario.name}, tokens/s", "output tokens/s a GPU", rates),
            Axis(SPEED, "  $/M tokens", "USD per million output tokens", costs),
        ]
    return axes


def software(catalog: Catalog, accelerators: Sequence[Accelerator]) -> list[Axis]:
    """The newest release of each engine that preflight has read: whether it runs the reference model."""
    check, model = ReadinessCheck(catalog), catalog.model(REFERENCE)
    dated = {(build.engine, build.version): f"{build.source}, {build.released}" for build in builds()}
    axes = []
    for engine in _ENGINES:
        cells = {}
        for accelerator in accelerators:
            try:
                deployment = catalog.deployment(model, accelerator, Parallelism(), PRECISION, stack=engine)
            except BadInput as error:
                cells[accelerator.id] = ScoreCell("no", "no", str(error))
                continue
            readiness = check.readiness(deployment)
            word = _SHORT.get(readiness.verdict, readiness.verdict)
            why = f": {readiness.why}" if readiness.why else ""
            built = dated.get((engine, readiness.release), "")
            said = f"`crosstie preflight` of {REFERENCE} {PRECISION} with {readiness.label}: {readiness.verdict}{why}"
            text = f"{word} {readiness.release}".strip()
            cells[accelerator.id] = ScoreCell(text, readiness.verdict, said + (f" ({built})" if built else ""))
        axes.append(Axis(SOFTWARE, engine, "", cells))
    return axes


def export(accelerators: Sequence[Accelerator]) -> list[Axis]:
    rule = shipped_export()
    tpp, threshold, review = dict[str, ScoreCell](), dict[str, ScoreCell](), dict[str, ScoreCell]()
    for accelerator in accelerators:
        export = export_class(accelerator, rule)
        rate = f"dense {export.format} {arithmetic(export.rate.si)} x bits: {cited(export.rate)}"
        tpp[accelerator.id] = ScoreCell(f"{export.tpp:,.0f}", export.tpp, rate)
        density = f"; needs the area of the die, which the catalog lacks: {cited(rule.density)}"
        why = f"{cited(rule.tpp)}{density if export.threshold == 'by density' else ''}"
        threshold[accelerator.id] = ScoreCell(export.threshold, export.threshold, why)
        said = {None: "-", True: "by case", False: "denial"}[export.case_by_case]
        why = f"{cited(rule.review_tpp)}; {cited(rule.review_bandwidth)}; {accelerator.memory.bandwidth} here"
        review[accelerator.id] = ScoreCell(said, said, why)
    return [
        Axis(EXPORT, "TPP", "TFLOP/s x bits", tpp),
        Axis(EXPORT, "US threshold", "", threshold),
        Axis(EXPORT, "China, Macau", "", review),
    ]
