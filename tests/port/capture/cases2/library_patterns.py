"""Graph-capture cases, second set: passages in the manner of serving libraries' own code, each told anew in small."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import collections
import itertools
import random

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import EXPERTS, B, D, H, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


class State(setting.State):
    """Besides the common state: what engines keep per step, on either side."""

    def __init__(self, dev):
        super().__init__(dev)
        self.unfinished = torch.ones(B, dtype=torch.long, device=dev)
        self.grid = torch.tensor([[1, 4, 4], [2, 2, 4]]).to(dev)
        self.grid_list = [[1, 4, 4], [2, 2, 4]]
        self.recent: collections.deque[torch.Tensor] = collections.deque(maxlen=3)
        self.double = [torch.zeros(B, H, 1, D, device=dev) for _ in range(2)]
        self.decay = 1.0
        self.phase = "warm"
        self.rotation = itertools.cycle(self.experts)


def unpadded_for_varlen_attention(s, q, k, v, lens, score):
    mask = torch.arange(S, device=q.device) < lens.view(B, 1)
    rows = torch.nonzero(mask.flatten(), as_tuple=False).flatten()
    return k.transpose(1, 2).reshape(B * S, H, D).index_select(0, rows).sum(0)


def unpadded_to_fixed_bound(s, q, k, v, lens, score):
    mask = torch.arange(S, device=q.device) < lens.view(B, 1)
    rows = torch.nonzero_static(mask.flatten(), size=B * S, fill_value=B * S).flatten()
    flat = F.pad(k.transpose(1, 2).reshape(B * S, H * D), (0, 0, 0, 1))
    return flat.index_select(0, rows).sum(0)


def sequences_found_by_position_zero(s, q, k, v, lens, score):
    positions = torch.arange(S, device=q.device) % lens[0]
    starts = (positions == 0).nonzero().view(-1)
    return q * torch.diff(starts, append=starts.new_full((1,), S)).amax()


def image_grid_from_python(s, q, k, v, lens, score):
    rows = [torch.arange(h, device=q.device).repeat_interleave(w).repeat(t) for t, h, w in s.grid_list]
    return q * torch.cat(rows).sum()


def prompt_tokens_of_each_row(s, q, k, v, lens, score):
    ids = (score * 10).long()
    kept = [row[mask == 1] for row, mask in zip(ids, ids > 0, strict=True)]
    return torch.stack([row.sum() for row in kept])


def tokens_per_expert_as_numpy(s, q, k, v, lens, score):
    chosen = (q.reshape(-1, D) @ s.experts[:, :, 0].t()).argmax(-1)
    counts = F.one_hot(chosen, EXPERTS).sum(0).cpu().numpy()
    rows = q.reshape(-1, D)[chosen.argsort()]
    edges = np.cumsum(counts)
    return torch.cat([rows[a:b] @ w for a, b, w in zip([0, *edges], edges, s.experts, strict=False)])


def lengths_uploaded_unpinned(s, q, k, v, lens, score):
    prompts = ["a b c", "d e"]
    sizes = torch.tensor([len(p.split()) for p in prompts], dtype=torch.int32, device="cpu")
    return q * sizes.to(q.device, non_blocking=True).view(B, 1, 1, 1)


CASES |= collected(globals())
