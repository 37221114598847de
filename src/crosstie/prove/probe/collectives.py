"""All-reduce over the GPUs of this machine, one process each, by message size and number of ranks."""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from crosstie.prove.probe.device import REFUSALS, first_line
from crosstie.prove.probe.timer import GpuTimer, HostTimer, timing

# Each rank must do the same number of rounds, so time cannot say when to stop.
ROUNDS = 15
LIMIT_S = 120.0


def all_reduces(device: str, backend: str, gpus: int, sizes: Sequence[int]) -> tuple[list[dict[str, Any]], str]:
    """Rows as rank 0 timed them, and what went wrong, if anything did."""
    processes = import_module("torch.multiprocessing").get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = (device, backend, gpus, tuple(sizes), folder)
        ranks = [processes.Process(target=_rank, args=(rank, *arguments)) for rank in range(gpus)]
        try:
            for process in ranks:
                process.start()
            deadline = time.monotonic() + LIMIT_S
            for process in ranks:
                process.join(max(0.1, deadline - time.monotonic()))
            late = [str(i) for i, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:
                if process.pid and process.is_alive():
                    process.terminate()
                    process.join()
        rows = [json.loads(line) for line in _lines(Path(folder) / "rows")]
        errors = [line for rank in range(gpus) for line in _lines(Path(folder) / f"error-{rank}")]
        dead = [str(i) for i, process in enumerate(ranks) if process.exitcode]
        if late:
            errors.append(f"ranks {', '.join(late)} did not end within {LIMIT_S:.0f} s")
        elif dead and not errors:
            errors.append(f"ranks {', '.join(dead)} died without a reason")
        return rows, "; ".join(errors)


def groups_of(gpus: int) -> list[int]:
    """Two, four, eight, and all: on a mesh each has other links."""
    return sorted({n for n in (2, 4, 8, 16) if n < gpus} | {gpus})


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _rank(rank: int, device: str, backend: str, gpus: int, sizes: tuple[int, ...], folder: str) -> None:
    try:
        _reduce(rank, device, backend, gpus, sizes, Path(folder))
    except REFUSALS as error:
        (Path(folder) / f"error-{rank}").write_text(f"rank {rank}: {first_line(error)}\n")


def _reduce(rank: int, device: str, backend: str, gpus: int, sizes: tuple[int, ...], folder: Path) -> None:
    torch, distributed = import_module("torch"), import_module("torch.distributed")
    place, timer = device, HostTimer() if device == "cpu" else GpuTimer(torch)
    if device != "cpu":
        torch.cuda.set_device(rank)
        place = f"{device}:{rank}"
    distributed.init_process_group(
        backend, init_method=f"file://{folder}/meeting", rank=rank, world_size=gpus, timeout=timedelta(seconds=60)
    )
    for ranks in groups_of(gpus):
        group = distributed.new_group(list(range(ranks)))
        for size in sizes:
            if rank < ranks:
                data = torch.zeros(size // 2, device=place, dtype=torch.bfloat16)
                row = _one(timer, partial(distributed.all_reduce, data, group=group), size, ranks)
                if rank == 0:
                    with (folder / "rows").open("a") as out:
                        out.write(json.dumps(row) + "\n")
        distributed.barrier()
    distributed.destroy_process_group()


def _one(timer: HostTimer, reduce: Callable[[], object], size: int, ranks: int) -> dict[str, Any]:
    """Small messages several in a row, since one alone is mostly the host."""
    operations = 20 if size < 1 << 22 else 2

    def run() -> None:
        for _ in range(operations):
            reduce()

    run()
    timed = timing([timer.elapsed(run) for _ in range(ROUNDS)], operations, False)
    return {"kind": "all-reduce", "format": "bf16", "bytes": size, "ranks": ranks, **timed._asdict()}
