"""`crosstie diff`: the first module that differs between two machines."""

import math
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.text import Text

from crosstie.cli.options import FILE, json_option, verbose_option, whole_option
from crosstie.cli.progress import progress
from crosstie.cli.show import Output, closing, console, print_json, say, show_table
from crosstie.core.errors import BadInput
from crosstie.core.figures import kibibytes, percent, plural
from crosstie_port.divergence.comparison import ComparedTensor, Comparison, Divergence, compare
from crosstie_port.divergence.routing import RoutingFlips
from crosstie_port.divergence.subject import TYPES, record_directory

_DETAILS = "every tensor with its error and what is allowed"


@click.command("diff")
@click.argument("recordings", nargs=-1, type=FILE, metavar="[A B]")
@click.option("--record", "out", type=FILE, metavar="OUT", help="Record --model into this file instead.")
@click.option("--model", "folder", type=FILE, metavar="DIR", help="A Hugging Face model directory, with weights.")
@click.option("--prompt", metavar="TEXT", help="What it reads. [default: tokens drawn from the seed]")
@whole_option("--tokens", 2, 4096, "How many.", default=32)
@whole_option("--seed", 0, None, "Of tokens and samples.", default=0)
@click.option("--dtype", type=click.Choice(TYPES), default="auto", show_default=True, help="float32 sees most.")
@click.option("--device", metavar="D", help="[default: cuda where there is one (ROCm's GPUs too), else cpu]")
@click.option(
    "--only", multiple=True, metavar="GLOB", help="Only modules of such names: 'model.layers.0.*'. Repeatable."
)
@verbose_option(_DETAILS)
@json_option
def command(
    recordings: tuple[Path, ...], out: Path | None, folder: Path | None, prompt: str | None, tokens: int, seed: int,
    dtype: str, device: str | None, only: tuple[str, ...], verbose: bool, as_json: bool,
) -> int:  # fmt: skip
    """The first module whose numbers differ between two machines, and the likely cause. A is taken for right.

    \b
    crosstie diff --record a.npz --model ./my-model --dtype float32  # on A
    crosstie diff --record b.npz --model ./my-model --dtype float32  # on B
    crosstie diff a.npz b.npz

    A recording has norms, samples and hashes of what goes into each module and comes out: a few MB, and no weights.
    A module may be as far off as its input was, times what modules amplify, plus its own rounding; the first that is
    further off is named, with what its error looks like: a factor of two, a missing scale, zeros, NaN, permuted heads,
    uncapped logits. Any PyTorch module is recorded from Python (`with record(model, "a.npz"): model(x)`), vLLM and
    SGLang by their hooks: docs/diff.md. Exit status 0 where they are the same up to rounding, 1 where not.
    """
    if out is not None:
        if recordings or folder is None:
            raise BadInput("--record OUT goes with --model DIR, and with no other files")
        with progress() as on_progress:
            kept = record_directory(
                folder, out, prompt=prompt, tokens=tokens, seed=seed, dtype=dtype, device=device, modules=only,
                on_progress=on_progress,
            )  # fmt: skip
        size = out.stat().st_size
        if as_json:
            print_json({"file": str(out), "bytes": size, **kept})
        else:
            click.echo(
                f"{plural(kept['modules'], 'module')} on {plural(kept['tokens'], 'token')} written to {out}: ", nl=False
            )
            click.echo(f"{plural(kept['tensors'], 'tensor')} in {kibibytes(size)}")
        return 0
    if len(recordings) != 2 or folder is not None:
        raise BadInput("diff compares two recordings, `crosstie diff A B`; `--record OUT --model DIR` makes one")
    comparison = compare(*recordings)
    print_json(to_json(comparison)) if as_json else show(comparison, verbose)
    return 0 if comparison.verdict == "same" else 1


def show(found: Comparison, verbose: bool) -> None:
    out = console()
    if found.first is not None:
        _show_divergence(out, found.first)
    elif found.verdict == "drifts":
        say(out, Text("drifts: no module stands out, and the sum is more than rounding explains", "bold yellow"))
        say(out, f"  error {figure(found.largest_error)} at most, where {figure(found.explained)} is explained")
    else:
        said = "the same bits" if found.identical == len(found.steps) else "the same up to rounding"
        say(out, Text(f"{said}: {found.compared:,} modules", "bold green"))
        if found.identical < len(found.steps):
            say(out, f"  error {figure(found.largest_error)} at most, where {figure(found.explained)} is explained")
    if found.identical and found.identical < len(found.steps):
        say(out, f"  the same bits in the first {plural(found.identical, 'tensor')} of {len(found.steps):,} compared")
    if found.flips:
        _show_flips(out, found.flips)
    if found.not_compared:
        some = ", ".join(found.not_compared[:3]) + (", ..." if len(found.not_compared) > 3 else "")
        say(out, f"  not compared, in one recording only or of other shapes: {len(found.not_compared):,} ({some})")
    if found.hides:
        say(out, f"  weights are of two types: their rounding explains errors of up to {percent(found.hides)},")
        say(out, "  and no fault below that is seen; record both in one type to see more")
    for name, machine in zip("AB", found.machines, strict=True):
        say(out, Text(f"  {name}: {_machine(machine)}", "dim"))
    if verbose:
        show_table(out, ["module", "tensor", "type", ">error", ">allowed"], map(_row, found.steps))
    else:
        closing(out, _DETAILS)


def _show_flips(out: Output, flips: list[RoutingFlips]) -> None:
    """Margins are not known where the router's scores were not recorded."""
    most = max(flips, key=lambda flip: flip.largest_margin if flip.largest_margin >= 0.0 else -1.0)
    margin = f": margins up to {figure(most.largest_margin)}, scores {figure(most.scores_off)} off"
    tokens = plural(sum(flip.tokens for flip in flips), "token")
    say(
        out,
        f"  routing: {tokens} of {flips[0].of} went to other experts in {plural(len(flips), 'router')}, up to rounding"
        f"{margin if most.largest_margin >= 0.0 else ''}; behind {flips[0].module} the middle token is judged",
        hang=4,
    )


def _show_divergence(out: Output, first: Divergence) -> None:
    step = first.step
    call = f", call {step.call + 1}" if step.call else ""
    say(out, Text(f"diverges at {step.module or 'the model'} ({step.kind}), {step.what}{call}", "bold red"))
    if "code" in first.where:
        say(out, f"  {first.where}")
    before = f"what it was made of was {figure(step.before)} off" if step.before else "what it was made of agrees"
    say(out, f"  error {figure(step.error)}, where {figure(step.allowed)} is allowed; {before}")
    for cause in first.causes:
        for name, text in (("likely", cause.what), ("evidence", cause.evidence), ("look at", cause.look)):
            say(out, Text.assemble((f"  {name:<9}", "dim"), text), hang=11)


def _row(step: ComparedTensor) -> list[str]:
    call = f" #{step.call + 1}" if step.call else ""
    return [f"{step.module or '(the model)'}{call}", step.what, step.dtype, figure(step.error), figure(step.allowed)]


def figure(value: float) -> str:
    """Errors span ten orders of magnitude."""
    return "0" if value == 0 else "no number" if not math.isfinite(value) else f"{value:.1e}"


def _machine(machine: dict[str, str]) -> str:
    parts = [machine.get("device", "?"), machine.get("architecture", ""), machine.get("runtime", "")]
    parts += [f"PyTorch {machine['torch']}" if "torch" in machine else "", machine.get("engine", "")]
    parts += [machine.get("model", ""), machine.get("weights", "")]
    if machine.get("ranks", "1") != "1":
        parts.append(f"rank {machine.get('rank', '0')} of {machine['ranks']}")
    return ", ".join(part for part in parts if part)


def to_json(comparison: Comparison) -> Any:
    """Errors that are no numbers are null, as msgspec writes them."""
    return msgspec.json.decode(msgspec.json.encode(comparison))
