"""`crosstie convert`: an FP8 or MXFP4 checkpoint in another dialect or under other scales."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import click
import msgspec

from crosstie.cli.options import FILE, json_option, whole_option
from crosstie.cli.progress import progress
from crosstie.cli.show import Output, console, print_json, say
from crosstie.core.figures import bandwidth, gigabytes, seconds
from crosstie.port.checkpoint.fp8 import DTYPES
from crosstie_port.checkpoint.conversion import FORMAT
from crosstie_port.checkpoint.convert import ConversionReport, Target, convert
from crosstie_port.checkpoint.matrix import RoundingLoss
from crosstie_port.checkpoint.requantisation import Granularity


@click.command("convert")
@click.argument("model_dir", type=FILE)
@click.option("-o", "--out", required=True, type=FILE, help="A new folder, on any disk.")
@click.option(
    "--to",
    required=True,
    type=click.Choice([*DTYPES, FORMAT, *get_args(Granularity)]),
    help="The dialect that the weights shall have; another format for ModelOpt's FP8; or what shares a scale.",
)
@whole_option("--jobs", 1, 16, "Processes. [default: one a core, up to 8]")
@click.option(
    "--even-if-normalised",
    is_flag=True,
    help="Convert a format that vLLM and SGLang convert themselves while loading it, for another loader.",
)
@click.option(
    "--keep-kv-scales",
    is_flag=True,
    help="Leave KV-cache scales alone: vLLM and SGLang double those themselves in every format.",
)
@click.option(
    "--inexact",
    is_flag=True,
    help="With fp8-tensor, fp8-channel, fp8-block: also where values change; the error of each weight is reported.",
)
@click.option("--fsync", is_flag=True, help="Flush each shard to the disk before it counts as finished.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; read headers and write nothing.")
@json_option
def command(
    model_dir: Path, out: Path, to: Target, jobs: int | None, even_if_normalised: bool, keep_kv_scales: bool,
    inexact: bool, fsync: bool, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    """Convert the FP8 checkpoint in MODEL_DIR to e4m3fnuz (MI300X, MI325X) or e4m3fn (everything else), exactly; or its
    FP8 or MXFP4 weights to FP8 with one scale for each tensor, channel or block of 128x128, exactly unless told.

    \b
    crosstie convert ./Llama-3.1-8B-FP8 -o ./Llama-3.1-8B-FNUZ --to e4m3fnuz
    crosstie convert ./Llama-3.1-8B-FNUZ -o ./back --to e4m3fn --dry-run
    crosstie convert ./Llama-ModelOpt -o ./Llama-CT --to compressed-tensors
    crosstie convert ./Model-MXFP4 -o ./Model-FP8 --to fp8-block

    Bytes stay, the one for minus zero aside, and every scale that goes with them doubles or halves; what has no exact
    counterpart is refused with its tensor. Each byte that was written is read back and compared. MODEL_DIR is only
    read. Interrupted, the same command goes on with what is missing; config.json comes last. Nothing runs on an
    accelerator. docs/convert.md has the formats and who needs this.
    """
    with progress("converting", in_bytes=True) as on_progress:
        report = convert(
            model_dir, out, to, jobs=jobs, even_if_normalised=even_if_normalised, keep_kv_scales=keep_kv_scales,
            inexact=inexact, sync=fsync, dry_run=dry_run, on_progress=on_progress,
        )  # fmt: skip
    print_json(msgspec.to_builtins(report)) if as_json else _show(report)
    return 0


# Weights that are named with their error; --json has all.
_NAMED = 10


def _show(report: ConversionReport) -> None:
    lines, done = console(), report.converted
    verb = "would be converted" if done is None else "converted"
    requantised = report.new_scheme is not None
    to = report.to if report.format == report.method else report.format
    if requantised:
        to = f"{report.format}, {report.new_scheme}"
    say(lines, f"{report.source}: {report.method}, {report.scheme}, {report.was}; {verb} to {to} in {report.out}")
    say(lines, f"  {_changes(report, requantised)}; {gigabytes(report.nbytes)} in {report.shards:,} shards")
    for why, count in Counter(report.kept.values()).items():
        say(lines, f"  {count:,} {'' if requantised else 'left alone: '}{why}")
    if done is None:
        return
    _show_costs(lines, done.costs, len(report.recoded) if requantised else 0)
    if done.codes is None:
        say(lines, "  nothing was left to do: an earlier run has finished it; all of it compared again")
        return
    if report.recoded and not requantised:
        zeros = f"{done.codes.sign_only:,} were 0x80, minus zero, and are zero now"
        say(lines, f"  {done.codes.total:,} codes, of which {zeros}")
    for name in done.left_out:
        say(lines, f"  not copied: {name}")
    again = f", {done.resumed:,} shards from an earlier run" if done.resumed else ""
    say(lines, f"  {seconds(done.seconds)}, {bandwidth(done.nbytes_per_s)}{again}; all of it read back and compared")


def _changes(report: ConversionReport, requantised: bool) -> str:
    if requantised:
        return f"{len(report.recoded):,} weights under new scales"
    changed = f"{len(report.recoded):,} weights recoded, {len(report.rescaled):,} scales "
    changed += "doubled" if report.to == "e4m3fnuz" else "halved"
    copied = report.tensors - len(report.recoded) - len(report.rescaled)
    return f"{changed if report.recoded else 'the config alone changes'}, {copied:,} tensors as they were"


def _show_costs(lines: Output, costs: Mapping[str, RoundingLoss], weights: int) -> None:
    """What is not what it was, the worst first."""
    if weights and not costs:
        say(lines, "  exact: every weight, dequantised in float64, is what it was")
    if not costs:
        return
    say(lines, f"  {len(costs):,} of {weights:,} weights are not exact, dequantised in float64; relative errors:")
    worst = sorted(costs, key=lambda name: -costs[name].rms_relative)
    for name in worst[:_NAMED]:
        cost = costs[name]
        part = f"{cost.changed:,} of {cost.values:,} values"
        say(lines, f"    {name}: max {cost.max_relative:.3g}, RMS {cost.rms_relative:.3g}; {part}")
    if len(worst) > _NAMED:
        say(lines, f"    and {len(worst) - _NAMED:,} with less; --json has them all")
