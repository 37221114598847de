"""Graph-capture cases, second set: what attention metadata builders compute for a ragged batch before the kernels run."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import dataclasses
import functools
import itertools
import math

import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import BLOCK, B, D, H, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


class State(setting.State):
    """Besides the common state: lengths mirrored on the host, and a pinned staging buffer with its NumPy view."""

    def __init__(self, dev):
        super().__init__(dev)
        self.mirror = [3, 5]
        self.staging = torch.zeros(8, dtype=torch.int32, pin_memory=dev == "cuda")
        self.staging_np = self.staging.numpy()
        self.slots = torch.zeros(8, dtype=torch.int32, device=dev)
        self.cu = torch.zeros(B + 1, dtype=torch.int32, device=dev)


@dataclasses.dataclass
class Metadata:
    lens: torch.Tensor
    cu: torch.Tensor
    window: int = 16

    @property
    def longest(self):
        return int(self.lens.max())

    @functools.cached_property
    def blocks(self):
        return math.ceil(self.lens.max() / BLOCK)


def build(lens):
    return Metadata(lens, torch.nn.functional.pad(lens.cumsum(0), (1, 0)))


def metadata_cached_property_of_first_step(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = build(lens)
    return q * s.cache.blocks + lens.sum()


def metadata_replaced_field(s, q, k, v, lens, score):
    meta = dataclasses.replace(build(lens), window=8)
    near = torch.arange(S, device=q.device) >= meta.lens.view(B, 1) - meta.window
    return q * (score * near).sum()


def query_starts_of_uniform_batch(s, q, k, v, lens, score):
    starts = torch.arange(0, (B + 1) * 4, 4, dtype=torch.int32, device=q.device)
    return starts + s.cu.copy_(torch.nn.functional.pad(lens.cumsum(0), (1, 0)))


def splits_from_shapes(s, q, k, v, lens, score):
    splits = max(1, min(8, math.ceil(k.shape[2] / (B * H))))
    parts = (q @ k.transpose(-1, -2)).unflatten(-1, (splits, -1))
    return torch.logsumexp(parts.logsumexp(-1), -1)


def staging_written_from_mirror(s, q, k, v, lens, score):
    s.mirror[0] += 1
    s.staging_np[: len(s.mirror)] = s.mirror
    s.slots.copy_(s.staging, non_blocking=True)
    return q + s.slots.sum()


def shared_prefix_decided_on_host(s, q, k, v, lens, score):
    shared = torch.min(lens) // BLOCK * BLOCK
    if shared >= 2 * BLOCK:
        return q + k[:, :, : 2 * BLOCK].sum(2, keepdim=True)
    return q


def segment_sums_by_prefix_sum(s, q, k, v, lens, score):
    total = torch.nn.functional.pad(score.flatten().cumsum(0), (1, 0))
    ends = torch.nn.functional.pad(lens.cumsum(0), (1, 0))
    return total[ends[1:]] - total[ends[:-1]]


def segment_reduce_checked(s, q, k, v, lens, score):
    lengths = torch.cat([lens[:1], B * S - lens[:1]])
    return torch.segment_reduce(score.flatten(), "sum", lengths=lengths)


def segment_reduce_unchecked(s, q, k, v, lens, score):
    lengths = torch.cat([lens[:1], B * S - lens[:1]])
    return torch.segment_reduce(score.flatten(), "max", lengths=lengths, unsafe=True)


def spans_of_pairs(s, q, k, v, lens, score):
    ends = [0, *lens.cumsum(0).tolist()]
    flat = k.reshape(-1, D)
    return torch.stack([flat[a:b].mean(0) for a, b in itertools.pairwise(ends)])


def spans_of_fixed_chunks(s, q, k, v, lens, score):
    ends = itertools.accumulate([BLOCK] * (S // BLOCK), initial=0)
    return torch.stack([k[:, :, a:b].mean(2) for a, b in itertools.pairwise(ends)])


def block_table_padded_by_shape(s, q, k, v, lens, score):
    short = S // BLOCK + 2 - s.blocks.shape[1]
    table = torch.nn.functional.pad(s.blocks, (0, short), value=-1)
    used = torch.arange(table.shape[1], device=q.device) * BLOCK < lens.view(B, 1)
    return torch.where(used, table, -1)


CASES |= collected(globals())
