"""`crosstie convert`: an FP8 checkpoint from one dialect to the other, exactly."""

from collections import Counter
from pathlib import Path

import click
import msgspec

from crosstie.cli.options import FILE, json_option
from crosstie.cli.progress import progress
from crosstie.cli.show import console, print_json, say
from crosstie.core.figures import bandwidth, gigabytes, seconds
from crosstie.port.checkpoint.convert import ConversionReport, Target, convert
from crosstie.port.checkpoint.fp8 import DTYPES
from crosstie.port.checkpoint.repackage import FORMAT


@click.command("convert")
@click.argument("model_dir", type=FILE)
@click.option("-o", "--out", required=True, type=FILE, help="A new folder, on any disk.")
@click.option(
    "--to",
    required=True,
    type=click.Choice([*DTYPES, FORMAT]),
    help="The dialect that the weights shall have; or another format for ModelOpt's FP8.",
)
@click.option("--jobs", type=click.IntRange(1, 16), metavar="N", help="Processes. [default: one a core, up to 8]")
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
@click.option("--fsync", is_flag=True, help="Flush each shard to the disk before it counts as finished.")
@click.option("--dry-run", is_flag=True, help="Say what would be done; read headers and write nothing.")
@json_option
def command(
    model_dir: Path, out: Path, to: Target, jobs: int | None, even_if_normalised: bool, keep_kv_scales: bool,
    fsync: bool, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    """Convert the FP8 checkpoint in MODEL_DIR to e4m3fnuz (MI300X, MI325X) or e4m3fn (everything else), exactly.

    \b
    crosstie convert ./Llama-3.1-8B-FP8 -o ./Llama-3.1-8B-FNUZ --to e4m3fnuz
    crosstie convert ./Llama-3.1-8B-FNUZ -o ./back --to e4m3fn --dry-run
    crosstie convert ./Llama-ModelOpt -o ./Llama-CT --to compressed-tensors

    Bytes stay, the one for minus zero aside, and every scale that goes with them doubles or halves; what has no exact
    counterpart is refused with its tensor. Each byte that was written is read back and compared. MODEL_DIR is only
    read. Interrupted, the same command goes on with what is missing; config.json comes last. Nothing runs on an
    accelerator. docs/convert.md has the formats and who needs this.
    """
    with progress("converting", in_bytes=True) as on_progress:
        found = convert(
            model_dir, out, to, jobs=jobs, even_if_normalised=even_if_normalised, keep_kv_scales=keep_kv_scales,
            sync=fsync, dry_run=dry_run, on_progress=on_progress,
        )  # fmt: skip
    print_json(msgspec.to_builtins(found)) if as_json else _show(found)
    return 0


def _show(found: ConversionReport) -> None:
    lines, done = console(), found.converted
    verb = "would be converted" if done is None else "converted"
    copied = found.tensors - len(found.recoded) - len(found.rescaled)
    to = found.to if found.format == found.method else found.format
    say(lines, f"{found.source}: {found.method}, {found.scheme}, {found.was}; {verb} to {to} in {found.out}")
    done_to = f"{len(found.recoded):,} weights recoded, {len(found.rescaled):,} scales " + (
        "doubled" if found.to == "e4m3fnuz" else "halved"
    )
    what = done_to if found.recoded else "the config alone changes"
    say(
        lines,
        f"  {what}, {copied:,} tensors as they were; {gigabytes(found.nbytes)} in {found.shards:,} shards",
    )
    for why, count in Counter(found.kept.values()).items():
        say(lines, f"  {count:,} left alone: {why}")
    if done is None:
        return
    if done.codes is None:
        say(lines, "  nothing was left to do: an earlier run has finished it; all of it compared again")
        return
    if found.recoded:
        zeros = f"{done.codes.sign_only:,} were 0x80, minus zero, and are zero now"
        say(lines, f"  {done.codes.total:,} codes, of which {zeros}")
    for name in done.left_out:
        say(lines, f"  not copied: {name}")
    again = f", {done.resumed:,} shards from an earlier run" if done.resumed else ""
    say(lines, f"  {seconds(done.seconds)}, {bandwidth(done.nbytes_per_s)}{again}; all of it read back and compared")
