"""`crosstie fit`: how a model sits in memory."""

from collections.abc import Sequence

import click
import msgspec
from rich.text import Text

from crosstie.catalog.library import Catalog, names_in
from crosstie.cli.answer import Drawing, Wanted, answer_options, plot_option
from crosstie.cli.options import model_argument, on_option, text_option
from crosstie.cli.replica import PRECISION_HELP, kv_option, layout_options, named_model, stack_option
from crosstie.cli.this_machine import ON_THIS, accelerators_on
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.document import picked, plain
from crosstie.core.figures import gigabytes, kibibytes, parameters, significant
from crosstie.core.model import Model
from crosstie.core.question import USUAL, BuyersQuestion, assumptions, reckoning
from crosstie.core.speculation import Speculation
from crosstie.perf.fit import BARELY, DOES_NOT_FIT, Fit, Placement, fit
from crosstie.web.chart import memory_picture
from crosstie.web.parts import Parts, Table, caution, closing, note

_DETAILS = "every layout, tokens of KV cache, and what the engine takes"


@click.command("fit")
@model_argument
@on_option(f"Accelerators; {ON_THIS}. [default: all of the catalog]")
@text_option("--precision precisions", "P,...", PRECISION_HELP, default=USUAL.precision, show_default=True)
@click.option(
    "--context", type=int, metavar="N", help=f"Tokens a sequence. [default: {USUAL.context}, or the model's limit]"
)
@layout_options
@kv_option
@stack_option
@plot_option("Draw the memory of each replica")
@answer_options(_DETAILS)
def command(
    model: str, accelerators: str | None, precisions: str, context: int | None, layout: Parallelism | None,
    kv: str, stack: str | None, plot: Drawing, wanted: Wanted,
) -> int:  # fmt: skip
    """How MODEL sits on each accelerator: weights, KV cache, GPUs needed, sequences that fit.

    \b
    crosstie fit llama-3.1-70b --on mi300x,h100-sxm --context 32768
    crosstie fit llama-3.1-405b --precision fp8,bf16 --on mi300x,h200,h100-sxm
    crosstie fit deepseek-v3 --on mi355x,b200 --kv fp8
    crosstie fit llama-3.1-8b --precision q4_k_m --on rx-7900-xtx
    crosstie fit ./my-model --on mi300x --tp 4
    crosstie fit model-Q4_K_M.gguf --on rx-7900-xtx
    crosstie fit qwen3-8b --on this

    Without --tp, --pp, --ep or --dp the layout with the fewest GPUs is shown, with -v every sensible one.
    Exit status 1 when the model fits on none of the accelerators.
    """
    catalog = Catalog()
    named, stored = named_model(catalog, model, precisions)
    chosen, at_most = accelerators_on(catalog, accelerators, stack)
    result = fit(
        catalog,
        named,
        chosen,
        context=context,
        precisions=names_in(stored),
        kv_format=kv,
        stack=stack,
        layouts=[layout] if layout else None,
        at_most=at_most,
    )
    title = f"{named.name}: memory of one GPU of each replica"
    plot.draw(lambda: memory_picture(_shown(result, wanted.verbose), title))
    wanted.give(lambda: to_json(result), lambda details: parts(result, details))
    return 0 if any(p.fits for p in result.placements) else 1


def parts(result: Fit, verbose: bool) -> Parts:
    model, sizes = result.model, result.sizes[0]
    yield Text.assemble((model.name, "bold"), f"  {describe(model)}")
    for size in result.sizes:
        by_format = " + ".join(f"{gigabytes(b)} {name}" for name, b in size.weight_bytes_by_format.items())
        yield f"  {size.precision}: weights {gigabytes(size.weight_bytes)} ({by_format})"
    state = sizes.state_bytes_per_sequence
    kept = f", plus {gigabytes(state)} of state a sequence" if state else ""
    per_token = kibibytes(sizes.kv_bytes_per_token)
    yield f"  KV cache in {sizes.kv_format}: {per_token} a token at {result.context:,} tokens{kept}"
    if model.draft_parameters:
        drafted = parameters(model.draft_parameters)
        yield f"  not counted: {drafted} of draft weights (MTP), which only speculative decoding loads"
    shown = _shown(result, verbose)
    columns = ["accelerator", ">GPUs", "layout", ">weights per GPU", ">KV left per GPU"]
    columns += [f">sequences of {result.context:,}", ">interval"]
    if len(result.sizes) > 1:
        columns.append("precision")
    if verbose:
        columns += [">KV tokens", ">engine per GPU"]
    yield Table(columns, [_row(p, columns) for p in shown])
    for p in shown:
        if p.verdict == BARELY:
            yield caution(f"  {p.deployment.accelerator.id} {p.deployment.parallelism}: {BARELY}")
    yield from (f"  {name}: {problem}" for name, problem in result.problems.items())
    if verbose and any(p.fewest for p in result.placements):
        yield "* the fewest GPUs that hold it"
    for stack in {p.deployment.stack.id: p.deployment.stack for p in result.placements}.values():
        own = f"{gigabytes(stack.reserved.si)} a GPU for itself ({stack.reserved.basis})"
        yield note(f"  interval: {stack.name} keeping half to twice {own}")
    yield note(f"  {question_of(result).line}")
    if not verbose:
        yield closing(_DETAILS)


def _shown(result: Fit, verbose: bool) -> list[Placement]:
    # Where nothing was found to be the least, everything was asked for or nothing fits.
    least = {(p.deployment.accelerator.id, p.deployment.precision.id) for p in result.placements if p.fewest}
    return [
        p for p in result.placements
        if verbose or p.fewest or (p.deployment.accelerator.id, p.deployment.precision.id) not in least
    ]  # fmt: skip


def _row(p: Placement, columns: Sequence[str]) -> list[str]:
    split, plan = p.deployment.parallelism, p.plan
    low, high = p.sequences_interval
    row = [
        p.deployment.accelerator.id, str(split.gpus), str(split), gigabytes(plan.weight_bytes),
        gigabytes(plan.cache_bytes) if p.fits else DOES_NOT_FIT, f"{p.sequences:,}", f"{low:,} to {high:,}",
    ]  # fmt: skip
    if "precision" in columns:
        row.append(p.deployment.precision.id)
    if ">KV tokens" in columns:
        row[2] += " *" if p.fewest else ""
        row += [significant(p.cache_tokens) if p.fits else "-", gigabytes(plan.engine_bytes)]
    return row


def describe(model: Model) -> str:
    experts = f", {parameters(model.active_parameters)} active" if model.is_moe else ""
    limit = f", context up to {model.max_context:,}" if model.max_context else ""
    return f"{parameters(model.parameters)} parameters{experts}, {model.layer_count} layers{limit}"


def to_json(result: Fit) -> dict[str, object]:
    rows = [reckoning(p.deployment, result.context, 1) for p in result.placements if p.fewest]
    return {
        "model": result.model.id,
        **picked(result.model, "parameters active_parameters draft_parameters"),
        **picked(result, "context sizes"),
        "placements": [placement_json(p) for p in result.placements],
        "problems": result.problems,
        **assumptions(question_of(result), rows),
    }


def question_of(result: Fit) -> BuyersQuestion:
    sizes = result.sizes[0]
    return BuyersQuestion(
        models=(result.model.id,), context=result.context, in_flight=None, precision=sizes.precision,
        kv_format=sizes.kv_format, price="", by="memory",
    )  # fmt: skip


def placement_json(p: Placement) -> dict[str, object]:
    reserved = p.deployment.stack.reserved
    return {
        **deployment_json(p.deployment),
        **picked(
            p,
            "fits verdict fewest memory_bytes=plan.capacity_bytes engine_bytes_per_gpu=plan.engine_bytes "
            "weight_bytes_per_gpu=plan.weight_bytes kv_bytes_left_per_gpu=plan.cache_bytes kv_tokens=cache_tokens "
            "sequences sequences_interval",
        ),
        "basis": f"{p.deployment.stack.name} keeping half to twice {reserved.si:.3g} bytes a GPU, "
        f"{reserved.basis}: {reserved.note}",
    }


def deployment_json(deployment: Deployment) -> dict[str, object]:
    return {
        **picked(deployment, "accelerator=accelerator.id gpus=parallelism.gpus"),
        **plain(deployment.parallelism),
        **picked(deployment, "precision=precision.id kv_format stack=stack.id"),
        **({"speculation": speculation_json(deployment.speculation)} if deployment.speculation else {}),
    }


def speculation_json(speculation: Speculation) -> dict[str, object]:
    """What matters of it, without the layers that draft."""
    kept = plain(msgspec.structs.replace(speculation, drafter=None))
    del kept["drafter"]
    return {**kept, **picked(speculation, "depth acceptance_length")}
