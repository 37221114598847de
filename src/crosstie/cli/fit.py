"""`crosstie fit`: how a model sits in memory."""

import click
from rich.text import Text

from crosstie.catalog.library import Catalog
from crosstie.cli.options import (
    PRECISION_HELP,
    accelerators_from,
    kv_option,
    layout_from,
    layout_options,
    model_argument,
    stack_option,
)
from crosstie.cli.show import (
    console,
    count,
    gigabytes,
    json_option,
    kibibytes,
    names,
    parameters,
    print_json,
    print_table,
    table,
)
from crosstie.core.deployment import Deployment
from crosstie.core.model import Model
from crosstie.perf.fit import Fit, Placement, Sizes, fit


@click.command("fit")
@model_argument
@click.option("--on", "accelerators", metavar="A,B", help="Accelerators; without it, all of the catalog.")
@click.option("--precision", "precisions", metavar="P,...", default="native", show_default=True, help=PRECISION_HELP)
@click.option("--context", type=int, metavar="N", help="Tokens a sequence. [default: 8192, or the model's limit]")
@layout_options
@kv_option
@stack_option
@json_option
def command(
    model: str, accelerators: str | None, precisions: str, context: int | None, tp: int | None, pp: int | None,
    ep: int | None, dp: int | None, kv: str, stack: str | None, as_json: bool,
) -> int:  # fmt: skip
    """How MODEL sits on each accelerator: weights, KV cache, GPUs needed, sequences that fit.

    \b
    crosstie fit llama-3.1-70b --on mi300x,h100-sxm --context 32768
    crosstie fit llama-3.1-405b --precision fp8,bf16 --on mi300x,h200,h100-sxm
    crosstie fit deepseek-v3 --on mi355x,b200 --kv fp8
    crosstie fit llama-3.1-8b --precision q4_k_m --on rx-7900-xtx --stack llama.cpp
    crosstie fit ./my-model --on mi300x --tp 4

    Without --tp, --pp, --ep or --dp every sensible layout is shown, the fewest GPUs first and marked.
    Exit status 1 when the model fits on none of the accelerators.
    """
    catalog = Catalog()
    found = catalog.model(model)
    layout = layout_from(tp, pp, ep, dp)
    result = fit(
        catalog,
        found,
        accelerators_from(catalog, accelerators, stack),
        context=context if context is not None else min(8192, found.max_context or 8192),
        precisions=list({catalog.precision(found, name).id: name for name in names(precisions)}.values()),
        kv_format=kv,
        stack=stack,
        layouts=[layout] if layout else None,
    )
    if as_json:
        print_json(to_json(result))
    else:
        show(result)
    return 0 if any(p.fits for p in result.placements) else 1


def show(result: Fit) -> None:
    out = console()
    out.print(Text.assemble((result.model.name, "bold"), f"  {describe(result.model)}"))
    for sizes in result.sizes:
        by_format = " + ".join(f"{gigabytes(b)} {name}" for name, b in sizes.weight_bytes_by_format.items())
        out.print(f"  {sizes.precision}: weights {gigabytes(sizes.weight_bytes)} ({by_format})")
    sizes = result.sizes[0]
    state = (
        f", plus {gigabytes(sizes.state_bytes_per_sequence)} of state a sequence"
        if sizes.state_bytes_per_sequence
        else ""
    )
    per_token = kibibytes(sizes.kv_bytes_per_token)
    out.print(f"  KV cache in {sizes.kv_format}: {per_token} a token at {result.context:,} tokens{state}")
    if result.model.draft_parameters:
        drafted = parameters(result.model.draft_parameters)
        out.print(f"  not counted: {drafted} of draft weights (MTP), which only speculative decoding loads")
    columns = [("accelerator", "left"), ("precision", "left"), ("GPUs", "right"), ("layout", "left")]
    columns += [
        (heading, "right")
        for heading in (
            "weights/GPU",
            "engine/GPU",
            "KV left/GPU",
            "KV tokens",
            f"sequences of {result.context:,}",
            "interval",
        )
    ]
    print_table(out, table("", columns, [row(p) for p in result.placements]))
    for name, problem in result.problems.items():
        out.print(f"  {name}: {problem}")
    if any(p.fewest for p in result.placements):
        out.print("* the fewest GPUs that hold it")
    for name in sorted({p.deployment.stack.id for p in result.placements}):
        stack = next(p.deployment.stack for p in result.placements if p.deployment.stack.id == name)
        kept = f"{gigabytes(stack.reserved.si)} a GPU for itself ({stack.reserved.basis})"
        out.print(f"  interval: {stack.name} keeping half to twice {kept}", style="dim")


def between(p: Placement) -> str:
    low, high = p.sequences_interval
    return f"{low:,} to {high:,}"


def row(p: Placement) -> list[str]:
    split, plan = p.deployment.parallelism, p.plan
    mark = "*" if p.fewest else " "
    kept = (
        [gigabytes(plan.cache_bytes), count(p.cache_tokens), f"{p.sequences:,}", between(p)]
        if p.fits
        else ["does not fit", "-", "0", between(p)]
    )
    return [
        f"{mark} {p.deployment.accelerator.id}", p.deployment.precision.id, str(split.gpus), str(split),
        gigabytes(plan.weight_bytes), gigabytes(plan.engine_bytes), *kept,
    ]  # fmt: skip


def describe(model: Model) -> str:
    experts = f", {parameters(model.active_parameters)} active" if model.is_moe else ""
    limit = f", context up to {model.max_context:,}" if model.max_context else ""
    return f"{parameters(model.parameters)} parameters{experts}, {model.layer_count} layers{limit}"


def to_json(result: Fit) -> dict[str, object]:
    return {
        "model": result.model.id,
        "parameters": result.model.parameters,
        "active_parameters": result.model.active_parameters,
        "draft_parameters": result.model.draft_parameters,
        "context": result.context,
        "sizes": [sizes_json(sizes) for sizes in result.sizes],
        "placements": [placement_json(p) for p in result.placements],
        "problems": result.problems,
    }


def sizes_json(sizes: Sizes) -> dict[str, object]:
    return {
        "precision": sizes.precision,
        "weight_bytes": sizes.weight_bytes,
        "weight_bytes_by_format": sizes.weight_bytes_by_format,
        "kv_format": sizes.kv_format,
        "kv_bytes_per_token": sizes.kv_bytes_per_token,
        "kv_bytes_per_sequence": sizes.kv_bytes_per_sequence,
        "state_bytes_per_sequence": sizes.state_bytes_per_sequence,
    }


def placement_json(p: Placement) -> dict[str, object]:
    return {
        **deployment_json(p.deployment),
        "fits": p.fits,
        "fewest": p.fewest,
        "memory_bytes": p.plan.capacity_bytes,
        "engine_bytes_per_gpu": p.plan.engine_bytes,
        "weight_bytes_per_gpu": p.plan.weight_bytes,
        "kv_bytes_left_per_gpu": p.plan.cache_bytes,
        "kv_tokens": p.cache_tokens,
        "sequences": p.sequences,
        "sequences_interval": list(p.sequences_interval),
        "basis": f"{p.deployment.stack.name} keeping half to twice {p.deployment.stack.reserved.si:.3g} bytes a GPU, "
        f"{p.deployment.stack.reserved.basis}: {p.deployment.stack.reserved.note}",
    }


def deployment_json(deployment: Deployment) -> dict[str, object]:
    split = deployment.parallelism
    return {
        "accelerator": deployment.accelerator.id,
        "gpus": split.gpus,
        "tp": split.tp,
        "pp": split.pp,
        "ep": split.ep,
        "dp": split.dp,
        "precision": deployment.precision.id,
        "kv_format": deployment.kv_format,
        "stack": deployment.stack.id,
    }
