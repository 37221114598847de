"""`crosstie convert`: an FP8 checkpoint from one dialect to the other, exactly."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from crosstie.cli.show import bandwidth, console, gigabytes, json_option, print_json, seconds
from crosstie.core.progress import OnProgress, no_progress
from crosstie.port.checkpoint.convert import ConversionReport, convert
from crosstie.port.checkpoint.fp8 import DTYPES, Dialect


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
    with _bar() as on_progress:
        found = convert(
            model_dir, out, to, jobs=jobs, even_if_normalised=even_if_normalised, keep_kv_scales=keep_kv_scales,
            sync=fsync, dry_run=dry_run, on_progress=on_progress,
        )  # fmt: skip
    if as_json:
        print_json(msgspec.to_builtins(found))
    else:
        _show(found)
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


def _show(found: ConversionReport) -> None:
    lines, done = console(), found.converted
    verb = "would be converted" if done is None else "converted"
    copied = found.tensors - len(found.recoded) - len(found.rescaled)
    lines.print(
        f"{found.source}: {found.method}, {found.scheme}, {found.was}; {verb} to {found.to} in {found.out}",
        soft_wrap=True,
    )
    lines.print(
        f"  {len(found.recoded):,} weights recoded, {len(found.rescaled):,} scales "
        f"{'doubled' if found.to == 'e4m3fnuz' else 'halved'}, {copied:,} tensors as they were; "
        f"{gigabytes(found.nbytes)} in {found.shards:,} shards"
    )
    for why, count in Counter(found.kept.values()).items():
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
