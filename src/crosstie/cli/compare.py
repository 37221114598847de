"""`crosstie compare`: the scorecard."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import click
import msgspec
from rich.text import Text

from crosstie.catalog.library import Catalog
from crosstie.cli.fit import deployment_json, describe
from crosstie.cli.options import Replica, model_argument, replica_options
from crosstie.cli.show import console, count, json_option, print_json, print_table, seconds, share, table
from crosstie.decide.compare.curve import Curve, curves
from crosstie.decide.compare.scorecard import Entry, Scorecard
from crosstie.web.chart import draw_curves

INTERVAL = "80% interval"


@click.command("compare")
@model_argument
@click.option("--on", "accelerators", required=True, metavar="A,B,...", help="Accelerators to compare.")
@replica_options
@click.option("--sweep", is_flag=True, help="Also from one request in flight to a full replica.")
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE", help="Draw the sweep (.svg, .png, .pdf).")
@json_option
def command(model: str, accelerators: str, replica: Replica, sweep: bool, plot: Path | None, as_json: bool) -> int:
    """One MODEL under one load on several accelerators: the scorecard, and why one wins.

    \b
    crosstie compare llama-3.1-70b --on mi300x,h200,h100-sxm --input 4096 --output 1024 --concurrency 64
    crosstie compare deepseek-v3 --on mi355x,b200 --tp 8 --concurrency 128 --kv fp8
    crosstie compare llama-3.1-405b --on mi300x,h200 --precision fp8 --tp 8 --stack sglang

    Without --tp each accelerator gets the fewest GPUs that hold the model and the load. TTFT and TPOT
    are means in a steady state; "all at once" is the mean TTFT when every client starts together, as
    most benchmarks do. --sweep and --plot show what each replica trades between the speed of one user
    and the tokens of a GPU. Exit status 1 when no accelerator can run it.
    """
    card = replica.scorecard(Catalog(), model, accelerators)
    swept = curves(card) if sweep or plot else []
    if plot:
        load = f"{card.load.input_tokens:,} tokens in, {card.load.output_tokens:,} out"
        draw_curves(swept, f"{card.model.name}, {replica.precision}: {load}", plot)
    if as_json:
        print_json({**to_json(card), **({"sweep": [asdict(curve) for curve in swept]} if swept else {})})
    else:
        show(card)
        if sweep:
            show_sweep(swept)
        if plot:
            click.echo(f"drawn as {plot}", err=True)
    return 0 if any(entry.estimate for entry in card.entries) else 1


def show(card: Scorecard) -> None:
    out = console()
    out.print(Text.assemble((card.model.name, "bold"), f"  {describe(card.model)}"))
    load = card.load
    out.print(f"  {load.input_tokens:,} tokens in, {load.output_tokens:,} out, {load.concurrency:,} requests in flight")
    running = [entry for entry in card.entries if entry.estimate]
    if running:
        columns = [("", "left"), *((entry.accelerator.id, "right") for entry in running)]
        print_table(out, table("", columns, rows(running, load.output_tokens)))
    for entry in card.entries:
        if entry.problem:
            out.print(f"  {entry.accelerator.id}: {entry.problem}")
        for note in entry.emulated:
            out.print(f"  {entry.accelerator.id}: {note}")
    for sentence in card.verdicts:
        out.print(f"- {sentence}", soft_wrap=True)
    if running:
        out.print()
        for entry in running:
            assert entry.estimate
            out.print(f"  {entry.accelerator.id}: {entry.estimate.basis}", style="dim", soft_wrap=True)


def show_sweep(swept: list[Curve]) -> None:
    out = console()
    columns = [("in flight", "right"), ("TTFT", "right"), ("tokens/s a user", "right"), ("tokens/s a GPU", "right")]
    for curve in swept:
        lines = zip(
            curve.concurrency, curve.ttft_s, curve.tokens_per_s_per_user, curve.output_tokens_per_s_per_gpu, strict=True
        )
        cells = [[f"{n:,}", seconds(ttft), count(user), count(gpu)] for n, ttft, user, gpu in lines]
        print_table(out, table(curve.label, columns, cells))


def rows(entries: list[Entry], output_tokens: int) -> list[list[str]]:
    """One line a quantity: a scorecard is read across."""
    pairs = [(e.deployment, e.estimate) for e in entries if e.deployment and e.estimate]
    return [
        ["GPUs a replica", *(f"{d.parallelism.gpus} ({d.parallelism})" for d, _ in pairs)],
        ["weights, stack", *(f"{d.precision.id}, {d.stack.name}" for d, _ in pairs)],
        ["TTFT", *(seconds(e.ttft_s) for _, e in pairs)],
        *_intervals([_between(seconds, e.interval.ttft_s) if e.interval else "" for _, e in pairs]),
        ["TTFT, all at once", *(seconds(e.ttft_burst_s) for _, e in pairs)],
        ["TPOT", *(seconds(e.tpot_s) if output_tokens > 1 else "-" for _, e in pairs)],
        *_intervals(
            [_between(seconds, e.interval.tpot_s) if e.interval and output_tokens > 1 else "" for _, e in pairs]
        ),
        ["output tokens/s a replica", *(count(e.output_tokens_per_s) for _, e in pairs)],
        ["output tokens/s a GPU", *(count(e.output_tokens_per_s_per_gpu) for _, e in pairs)],
        *_intervals([_between(count, e.interval.per_gpu(d.parallelism.gpus)) if e.interval else "" for d, e in pairs]),
        ["requests that fit", *(count(e.concurrency_that_fits) for _, e in pairs)],
        ["prefill bound by", *(e.prefill_bound for _, e in pairs)],
        ["  of its roofline", *(share(e.prefill_roofline_fraction) for _, e in pairs)],
        ["decode bound by", *(e.decode_bound for _, e in pairs)],
        ["  of its roofline", *(share(e.decode_roofline_fraction) for _, e in pairs)],
        ["one stream, tokens/s", *(count(e.single_stream_tokens_per_s) for _, e in pairs)],
        ["  its ceiling", *(count(e.single_stream_ceiling_tokens_per_s) for _, e in pairs)],
    ]


def _intervals(cells: Sequence[str]) -> list[list[str]]:
    """The line under a quantity, where any accelerator has one."""
    return [[f"  {INTERVAL}", *(cell or "-" for cell in cells)]] if any(cells) else []


def _between(show: Callable[[float], str], ends: tuple[float, float]) -> str:
    return f"{show(ends[0])} to {show(ends[1])}"


def to_json(card: Scorecard) -> dict[str, object]:
    return {
        "model": card.model.id,
        "load": {
            "concurrency": card.load.concurrency,
            "input_tokens": card.load.input_tokens,
            "output_tokens": card.load.output_tokens,
        },
        "entries": [
            {
                "accelerator": entry.accelerator.id,
                "deployment": deployment_json(entry.deployment) if entry.deployment else None,
                "estimate": msgspec.to_builtins(entry.estimate) if entry.estimate else None,
                "emulated": list(entry.emulated),
                "problem": entry.problem,
            }
            for entry in card.entries
        ],
        "verdicts": card.verdicts,
    }
