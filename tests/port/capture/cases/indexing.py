"""Graph-capture cases: indexing, gathering and scattering, as KV caches and block tables do it."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import torch
from tests.port.capture.cases.setting import BLOCK, B, D, S, State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


def slot_mapping(s, q, k, v, lens, score):
    position = lens - 1
    block = s.blocks.gather(1, (position // BLOCK).view(B, 1))
    slot = block.view(-1) * BLOCK + position % BLOCK
    return q * slot.sum()


def take_along_dim(s, q, k, v, lens, score):
    return q * torch.take_along_dim(score, score.argsort(-1)[:, :4], dim=-1).sum()


def index_add_counts(s, q, k, v, lens, score):
    counts = torch.zeros(S, device=q.device)
    counts.index_add_(0, lens, torch.ones(B, device=q.device))
    return q * (counts * torch.arange(S, device=q.device)).sum()


def scatter_add_expert_load(s, q, k, v, lens, score):
    load = torch.zeros(4, device=q.device).scatter_add_(0, lens % 4, torch.ones(B, device=q.device))
    return q * (load * load).sum() + load[0]


CASES |= collected(globals())
