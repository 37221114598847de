"""A requantisation carried out: each tensor of each shard made, read back, dequantised and compared."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

import numpy as np

from crosstie.core.errors import BadData
from crosstie.port.checkpoint.fp8 import Bytes, Codes, same
from crosstie.port.checkpoint.index import Checkpoint
from crosstie_port.checkpoint.matrix import Matrix, Opened, ReadRows, RoundingLoss
from crosstie_port.checkpoint.requantisation import NewTensor, Requantisation
from crosstie_port.checkpoint.shard import ShardPlan, drain, fill


def make_shard(
    plan: Requantisation, shard: ShardPlan, file: Path, *, jobs: int, only_compared: bool, done: Callable[[int], None]
) -> tuple[Codes, dict[str, RoundingLoss]]:
    """Fills a file that has its header and its length, or compares one that is full: counts, and what it cost.

    Threads, since numpy lets go of the interpreter's lock over arrays as long as these.
    """
    starts: dict[str, int] = {}
    at = len(shard.head)
    for made in plan.tensors[shard.name]:
        starts[made.name] = at
        at += made.nbytes
    with _Target(file, only_compared) as target, ThreadPoolExecutor(jobs) as pool:

        def work(made: NewTensor) -> tuple[str, RoundingLoss] | None:
            source = plan.checkpoint[made.source]
            if made.kind == "copy":
                _copy(plan.checkpoint, made, target, starts[made.name])
                done(source.nbytes)
                return None
            matrix = plan.matrices[made.source]
            scales = next(m for m in plan.tensors[shard.name] if m.kind == "scales" and m.source == made.source)
            cost = _remake(plan.checkpoint, matrix, target, starts[made.name], starts[scales.name])
            if cost.changed and not plan.inexact:
                raise BadData(source.file, made.source, _refusal(plan, cost))
            done(source.nbytes + plan.checkpoint[matrix.scale].nbytes)
            return made.source, cost

        try:
            futures = [pool.submit(work, made) for made in plan.tensors[shard.name] if made.kind != "scales"]
            found = [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    done(sum(plan.checkpoint[name].nbytes for name in plan.kept if plan.checkpoint[name].file == shard.source))
    costs = dict(one for one in found if one is not None)
    total = sum(cost.values for cost in costs.values())
    return Codes(total=total), {name: cost for name, cost in costs.items() if cost.changed}


def _refusal(plan: Requantisation, cost: RoundingLoss) -> str:
    return (
        f"not exact as {plan.granularity}: {cost.changed:,} of {cost.values:,} values change, at most by "
        f"{cost.max_relative:.2g} of their size, RMS {cost.rms_relative:.2g}; --inexact allows it, and reports each"
    )


class _File:
    """One side: bytes at their places."""

    def __init__(self, file: Path, flags: int):
        self._file = str(file)
        self._descriptor = os.open(file, flags)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def get(self, at: int, count: int) -> Bytes:
        return fill(np.empty(count, np.uint8), self._descriptor, at, self._file)

    def rows(self, at: int, width: int) -> ReadRows:
        return lambda start, stop: self.get(at + start * width, (stop - start) * width).reshape(-1, width)


class _Target(_File):
    def __init__(self, file: Path, only_compared: bool):
        super().__init__(file, os.O_RDONLY if only_compared else os.O_RDWR | os.O_NOFOLLOW)
        self._only_compared = only_compared

    def put(self, some: Bytes, at: int, name: str) -> None:
        if not self._only_compared:
            drain(some, self._descriptor, at)
        if not same(self.get(at, some.size), some):
            raise BadData(self._file, name, "the bytes read back are not those that belong there")


def _remake(checkpoint: Checkpoint, matrix: Matrix, target: _Target, codes_at: int, scales_at: int) -> RoundingLoss:
    info = checkpoint[matrix.name]
    scales = np.frombuffer(checkpoint.read(matrix.scale), np.uint8)
    with _File(info.file, os.O_RDONLY) as source:
        opened = Opened(matrix, source.rows(info.offset, info.nbytes // matrix.rows), scales, info.file)
        for start, slab in opened.slabs():
            target.put(slab.reshape(-1), codes_at + start * matrix.columns, matrix.name)
        new_scales = opened.new_scales.reshape(-1).view(np.uint8)
        target.put(new_scales, scales_at, matrix.scale)
        return opened.cost(target.rows(codes_at, matrix.columns), target.get(scales_at, new_scales.size))


def _copy(checkpoint: Checkpoint, made: NewTensor, target: _Target, at: int) -> None:
    for piece in checkpoint.chunks(made.source):
        target.put(np.frombuffer(piece, np.uint8), at, made.name)
        at += len(piece)
