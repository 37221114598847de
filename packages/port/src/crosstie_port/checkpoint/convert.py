"""A checkpoint in the other FP8 dialect or under other scales: shard by shard, all compared, a rerun goes on."""

import errno
import os
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import msgspec

from crosstie.core.errors import BadData, BadInput, BadParameter, CrosstieError
from crosstie.core.progress import OnProgress, Progress, no_progress
from crosstie.port.checkpoint.fp8 import Codes, Dialect
from crosstie.port.checkpoint.headers import read_header
from crosstie.port.checkpoint.index import open_checkpoint
from crosstie_port.checkpoint.conversion import FORMAT, Conversion, check_repackaged, plan_conversion, plan_repackaging
from crosstie_port.checkpoint.matrix import RoundingLoss
from crosstie_port.checkpoint.output import OutputFolder, flush
from crosstie_port.checkpoint.requantisation import (
    Granularity,
    Requantisation,
    check_requantised,
    make_shard,
    plan_requantisation,
)
from crosstie_port.checkpoint.shard import NewFile, ShardPlan, ShardTask, in_threads

Target = Dialect | Literal["compressed-tensors"] | Granularity
# With less to do, another process takes longer to start than it saves.
_WORTH_PROCESSES = 1 << 31
_MOST_JOBS = 8
# Left free beside the shards, for everything else that is copied.
_SPARE_BYTES = 1 << 26


class Converted(msgspec.Struct, frozen=True, kw_only=True):
    """What was done, all shards together."""

    shards: int
    # Shards that an earlier run had finished.
    resumed: int
    # All of it, and what this run has written of it.
    nbytes: int
    written_bytes: int
    # None where an earlier run has done all of it, and counted.
    codes: Codes | None
    # Of weights whose values are not what they were; only where that was allowed.
    costs: dict[str, RoundingLoss] = {}
    seconds: float
    # Files of the source that are not in the new folder: weights in other formats.
    left_out: list[str]

    @property
    def nbytes_per_s(self) -> float:
        return self.written_bytes / max(self.seconds, 1e-9)


class ConversionReport(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of a checkpoint, tensor by tensor; `converted` is None after a dry run."""

    source: str
    out: str
    was: Dialect = msgspec.field(name="from")
    to: Dialect
    method: str
    # The method that its config names afterwards.
    format: str
    scheme: str
    # What its weights are afterwards; None where they are what they were.
    new_scheme: str | None
    shards: int
    nbytes: int
    tensors: int
    # Names of weights in the other dialect's codes, of scales that double or halve, and of what stays and why.
    recoded: list[str]
    rescaled: list[str]
    kept: dict[str, str]
    converted: Converted | None


def convert(
    model_dir: Path, out: Path, to: Target, *, jobs: int | None = None, even_if_normalised: bool = False,
    keep_kv_scales: bool = False, inexact: bool = False, sync: bool = False, dry_run: bool = False,
    on_progress: OnProgress = no_progress,
) -> ConversionReport:  # fmt: skip
    """Converts the FP8 checkpoint in a folder to the other dialect, exactly, into a new folder; or refuses.

    To "compressed-tensors": ModelOpt's FP8 by tensor under another config, the same bytes, for loaders that convert.
    To "fp8-tensor", "fp8-channel" or "fp8-block": FP8 or MXFP4 weights with scales that are shared so; `inexact`: also
    where values change, and by how much is reported.
    Interrupted, the same call goes on with what is missing. `even_if_normalised`: formats too that vLLM and SGLang
    convert themselves; `keep_kv_scales`: scales of the KV cache stay; `sync`: each shard is flushed to the disk before
    it counts as finished; `dry_run`: what would be done, from the headers alone.
    """
    checkpoint = open_checkpoint(Path(model_dir))
    _check_options(to, inexact=inexact, even_if_normalised=even_if_normalised, keep_kv_scales=keep_kv_scales)
    plan: Conversion
    if to == "compressed-tensors":
        plan = plan_repackaging(checkpoint)
    elif to == "fp8-tensor" or to == "fp8-channel" or to == "fp8-block":
        plan = plan_requantisation(checkpoint, to, inexact=inexact)
    else:
        plan = plan_conversion(checkpoint, to, even_if_normalised=even_if_normalised, keep_kv_scales=keep_kv_scales)
    jobs = jobs or default_jobs()
    done = None if dry_run else run_conversion(plan, Path(out), jobs=jobs, sync=sync, on_progress=on_progress)
    if to == FORMAT and done is not None:
        check_repackaged(plan, open_checkpoint(Path(out)))
    if isinstance(plan, Requantisation) and done is not None:
        check_requantised(plan, open_checkpoint(Path(out)))
    return ConversionReport(
        source=str(plan.checkpoint.folder), out=str(out), was=plan.scheme.dialect or plan.to, to=plan.to,
        format=plan.method if isinstance(plan, Requantisation) else FORMAT if to == FORMAT else plan.scheme.method,
        method=plan.scheme.method, scheme=plan.scheme.scheme,
        new_scheme=plan.granularity if isinstance(plan, Requantisation) else None,
        shards=len(plan.shards), nbytes=plan.nbytes, tensors=len(plan.checkpoint.tensors),
        recoded=sorted(plan.recoded), rescaled=sorted(plan.rescaled), kept=plan.kept, converted=done,
    )  # fmt: skip


def _check_options(to: Target, *, inexact: bool, **of_dialects: bool) -> None:
    """An option that would do nothing is a misunderstanding."""
    if inexact and to not in get_args(Granularity):
        raise BadParameter("inexact", f"goes with {', '.join(get_args(Granularity))}: {to} is exact or refused")
    for name, given in of_dialects.items():
        if given and to not in get_args(Dialect):
            raise BadParameter(name, f"goes with {' and '.join(get_args(Dialect))}, not with {to}")


def default_jobs() -> int:
    return min(os.cpu_count() or 1, _MOST_JOBS)


def run_conversion(
    conversion: Conversion, out: Path, *, jobs: int, sync: bool = False, on_progress: OnProgress = no_progress
) -> Converted:
    """Fills `out`; raises with nothing left behind where the checkpoint cannot be converted. Progress is in bytes."""
    began = time.monotonic()
    progress = Progress(on_progress, "converting", sum(shard.data_bytes for shard in conversion.shards))
    output = OutputFolder(out, conversion, flush=sync)
    try:
        with output.opened():
            try:
                return _convert(conversion, output, jobs, sync, progress, began)
            except CrosstieError as error:
                # Data that cannot be converted will not be next time; a folder without a finished shard is no loss.
                if not output.was_complete and (isinstance(error, BadData) or not output.has_finished):
                    output.discard()
                raise
    except OSError as error:
        raise _said(error, out) from None


def _convert(
    conversion: Conversion, output: OutputFolder, jobs: int, sync: bool, progress: Progress, began: float
) -> Converted:
    resumed, to_write, codes, left_out = len(conversion.shards), 0, None, list[str]()
    costs: dict[str, RoundingLoss] = {}
    if output.was_complete:
        costs = _compare_again(conversion, output, jobs, progress)
    else:
        codes, todo = Codes(), list[ShardPlan]()
        for shard in conversion.shards:
            found = output.finished(shard)
            if found is not None:
                codes += found.codes
                costs |= found.costs
                progress.add(shard.data_bytes)
            else:
                output.make_room(shard)
                todo.append(shard)
        resumed -= len(todo)
        to_write = sum(shard.size for shard in todo)
        _check_room(output.folder, to_write)

        def make(shard: ShardPlan, apart: bool) -> _Made:
            file = output.part(shard)
            _begin(shard, file)
            made = _fill(conversion, shard, file, jobs, progress, apart=apart, flushes=sync)
            if not shard.unchanged():
                raise BadData(shard.source, "", "was changed while it was converted")
            _compare_header(conversion, shard, file)
            if sync:
                flush(file)
            output.seal(shard, *made)
            return made

        for counted, cost in _together(conversion, todo, jobs, make):
            codes += counted
            costs |= cost
        left_out = output.complete()
    return Converted(
        shards=len(conversion.shards), resumed=resumed, nbytes=conversion.nbytes, written_bytes=to_write, codes=codes,
        costs=costs, seconds=time.monotonic() - began, left_out=left_out,
    )  # fmt: skip


_Made = tuple[Codes, dict[str, RoundingLoss]]


def _together(conversion: Conversion, todo: Sequence[ShardPlan], jobs: int, make: Callable[..., _Made]) -> list[_Made]:
    """Shards side by side where there is enough to do: one here, the others each in a process of its own. A
    requantisation spreads each shard over threads."""
    one_by_one = isinstance(conversion, Requantisation) or sum(shard.size for shard in todo) < _WORTH_PROCESSES
    workers = [partial(make, apart=number > 0) for number in range(1 if one_by_one else min(jobs, len(todo)))]
    return in_threads(workers, todo) if todo else []


def _begin(shard: ShardPlan, file: Path) -> None:
    """A new file with the header. One that is there is put aside, never written into."""
    file.unlink(missing_ok=True)
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb") as draft:
        draft.write(shard.head)
        draft.truncate(shard.size)


def _fill(
    conversion: Conversion, shard: ShardPlan, file: Path, jobs: int, progress: Progress, *, apart: bool,
    flushes: bool = False, only_compared: bool = False,
) -> _Made:  # fmt: skip
    if isinstance(conversion, Requantisation):
        with NewFile(file, only_compared=only_compared, flushes=flushes) as target:
            return make_shard(conversion, shard, target, jobs, progress.add)
    task = ShardTask(shard=shard, to=conversion.to, file=file, only_compared=only_compared, flushes=flushes)
    return (task.run_apart if apart else task.run)(progress.add), {}


def _compare_again(
    conversion: Conversion, output: OutputFolder, jobs: int, progress: Progress
) -> dict[str, RoundingLoss]:
    """A source with other numbers in it has the same headers."""

    def compare(shard: ShardPlan, apart: bool) -> _Made:
        return _fill(conversion, shard, output.final(shard), jobs, progress, apart=apart, only_compared=True)

    try:
        made = _together(conversion, conversion.shards, jobs, compare)
    except BadData as error:
        raise BadInput(
            f"{output.folder}: holds a conversion, but not of this model as it is now ({error}); "
            "delete it to start again"
        ) from None
    return {name: cost for _, costs in made for name, cost in costs.items()}


def _compare_header(conversion: Conversion, shard: ShardPlan, file: Path) -> None:
    """The new file as whoever loads it will see it: its size and layout, names, types and shapes."""
    made = read_header(file).tensors
    for name, (dtype, shape) in conversion.layout(shard).items():
        if name not in made or (made[name].dtype, made[name].shape) != (dtype, shape):
            raise BadData(file, name, f"is not there as {dtype} of shape {list(shape)}")


def _check_room(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed + _SPARE_BYTES > free:
        raise BadInput(
            f"{folder}: {needed / 1e9:,.3f} GB are to be written and {free / 1e9:,.3f} GB are free, of which "
            f"{_SPARE_BYTES / 1e9:,.3f} GB are for the other files"
        )


def _said(error: OSError, out: Path) -> BadInput:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return BadInput(f"{out}: the disk is full; make room and run it again, it goes on with what is missing")
    where = error.filename or out
    return BadInput(f"{where}: {error.strerror or error}; run it again, and it goes on with what is missing")
