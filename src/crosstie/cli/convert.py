"""`crosstie convert`: an FP8 checkpoint from one dialect to the other, exactly."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from crosstie.cli.show import bandwidth, console, gigabytes, json_option, print_json, seconds
from crosstie.core.progress import OnProgress, no_progress
from crosstie.port.checkpoint.conversion import Conversion, plan_conversion
from crosstie.port.checkpoint.convert import Converted, convert, default_jobs
from crosstie.port.checkpoint.fp8 import DTYPES, OTHER, Dialect
from crosstie.port.checkpoint.index import open_checkpoint


@click.command("convert")
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="A new folder, on any disk.")
@click.option("--to", required=True, type=click.Choice(list(DTYPES)), help="The dialect that the weights shall have.")
@click.option("--jobs", type=click.IntRange(1, 16), help="Processes; one a core, up to 8, unless given.")
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
    model_dir: Path, out: Path, to: Dialect, jobs: int | None, even_if_normalised: bool, keep_kv_scales: bool,
    fsync: bool, dry_run: bool, as_json: bool,
) -> int:  # fmt: skip
    """Convert the FP8 checkpoint in MODEL_DIR to e4m3fnuz (MI300X, MI325X) or e4m3fn (everything else), exactly.

    \b
    crosstie convert ./Llama-3.1-8B-Instruct-FP8 -o ./Llama-3.1-8B-Instruct-FNUZ --to e4m3fnuz
    crosstie convert ./Llama-3.1-8B-Instruct-FNUZ -o ./back --to e4m3fn --dry-run

    Bytes stay, the one for minus zero aside, and every scale that goes with them doubles or halves; what has no exact
    counterpart is refused with its tensor. Each byte that was written is read back and compared. MODEL_DIR is only
    read. Interrupted, the same command goes on with what is missing; config.json comes last. Nothing runs on an
    accelerator. docs/convert.md has the formats and who needs this.
    """
    plan = plan_conversion(
        open_checkpoint(model_dir), to, even_if_normalised=even_if_normalised, keep_kv_scales=keep_kv_scales
    )
    done = None
    if not dry_run:
        with _bar() as advance:
            done = convert(plan, out, jobs=jobs or default_jobs(), sync=fsync, on_progress=advance)
    if as_json:
        print_json(_document(plan, out, done))
    else:
        _show(plan, out, done)
    return 0


@contextmanager
def _bar() -> Iterator[OnProgress]:
    """On a terminal's error stream only."""
    stream = Console(stderr=True)
    if not stream.is_terminal:
        yield no_progress
        return
    columns = (TextColumn("converting"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=stream, transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, _: bar.update(task, completed=done, total=total)


def _document(plan: Conversion, out: Path, done: Converted | None) -> dict[str, object]:
    return {
        "source": str(plan.checkpoint.folder),
        "out": str(out),
        "from": OTHER[plan.to],
        "to": plan.to,
        "method": plan.scheme.method,
        "scheme": plan.scheme.scheme,
        "shards": len(plan.shards),
        "nbytes": plan.nbytes,
        "tensors": len(plan.checkpoint.tensors),
        "recoded": sorted(plan.recoded),
        "rescaled": sorted(plan.rescaled),
        "kept": plan.kept,
        "converted": None if done is None else msgspec.to_builtins(done),
    }


def _show(plan: Conversion, out: Path, done: Converted | None) -> None:
    lines = console()
    verb = "would be converted" if done is None else "converted"
    copied = len(plan.checkpoint.tensors) - len(plan.recoded) - len(plan.rescaled)
    lines.print(
        f"{plan.checkpoint.folder}: {plan.scheme.method}, {plan.scheme.scheme}, {OTHER[plan.to]}; {verb} to {plan.to} "
        f"in {out}",
        soft_wrap=True,
    )
    lines.print(
        f"  {len(plan.recoded):,} weights recoded, {len(plan.rescaled):,} scales "
        f"{'doubled' if plan.to == 'e4m3fnuz' else 'halved'}, {copied:,} tensors as they were; "
        f"{gigabytes(plan.nbytes)} in {len(plan.shards):,} shards"
    )
    for why, count in _reasons(plan):
        lines.print(f"  {count:,} left alone: {why}", soft_wrap=True)
    if done is None:
        return
    if done.codes is None:
        lines.print("  nothing was left to do: an earlier run has finished it; all of it compared again")
        return
    lines.print(
        f"  {done.codes.total:,} codes, of which {done.codes.sign_only:,} were 0x80, minus zero, and are zero now"
    )
    for name in done.left_out:
        lines.print(f"  not copied: {name}", soft_wrap=True)
    again = f", {done.resumed:,} shards from an earlier run" if done.resumed else ""
    lines.print(f"  {seconds(done.seconds)}, {bandwidth(done.nbytes_per_s)}{again}; all of it read back and compared")


def _reasons(plan: Conversion) -> list[tuple[str, int]]:
    """How many tensors stay as they are for the same reason."""
    reasons = list(plan.kept.values())
    return [(why, reasons.count(why)) for why in dict.fromkeys(reasons)]
