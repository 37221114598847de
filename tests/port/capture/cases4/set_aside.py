"""Graph-capture cases, fourth set: written before their truth was taken, and before the checker was mended by them."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import functools
import itertools

import numpy
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import EXPERTS, VOCAB, B, D, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


class State(setting.State):
    def __init__(self, dev):
        super().__init__(dev)
        self.spd = (self.w @ self.w.T + D * torch.eye(D, device=dev)).contiguous()
        self.batch = torch.stack([self.spd, self.spd * 2])
        self.ticket = itertools.count()
        self.norm = torch.nn.LayerNorm(D).to(dev)
        self.host_norm = {name: tensor.cpu() for name, tensor in self.norm.state_dict().items()}
        self.host_matrix = setting.seeded(9, D, D)
        self.numpy_row = numpy.linspace(0, 1, D, dtype=numpy.float32)
        self.tokens = []


# Copies between pageable host memory and the device.


def upload_under_device_context(s, q, k, v, lens, score):
    with torch.device(q.device):
        scale = torch.tensor([0.5] * D)
    return q * scale


def upload_padded_rows(s, q, k, v, lens, score):
    rows = torch.nn.utils.rnn.pad_sequence([torch.ones(2), torch.ones(D)], batch_first=True)
    return q[:, 0, 0] * rows.cuda()


def upload_cached_after_first(s, q, k, v, lens, score):
    if "row" not in s.table:
        s.table["row"] = s.host_row.to(q.device)
    return q + s.table["row"].sum()


# Solvers.


# State that Python keeps.


@functools.cache
def _angles(length, device):
    return torch.arange(length, device=device).float()[:, None] / 10000


# What engines do.


def experts_over_unique(s, q, k, v, lens, score):
    chosen = (score[:, :D] @ s.w).argmax(-1) % EXPERTS
    out = torch.zeros(B, D, device=q.device)
    for expert in chosen.unique().tolist():
        out[chosen == expert] = score[chosen == expert, :D] @ s.experts[expert]
    return out


def experts_all_weighted(s, q, k, v, lens, score):
    gates = F.one_hot((score[:, :D] @ s.w).argmax(-1) % EXPERTS, EXPERTS).to(score.dtype)
    return torch.einsum("be,bd,edf->bf", gates, score[:, :D], s.experts)


def experts_grouped_bf16(s, q, k, v, lens, score):
    rows = k.reshape(-1, D).bfloat16()
    ends = torch.arange(1, EXPERTS + 1, device=q.device, dtype=torch.int32) * (rows.shape[0] // EXPERTS)
    return F.grouped_mm(rows, s.experts.bfloat16(), offs=ends)


def experts_sorted_tokens(s, q, k, v, lens, score):
    chosen = score[:, :EXPERTS].topk(2).indices.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.zeros(EXPERTS, dtype=torch.long, device=q.device).scatter_add_(0, chosen, torch.ones_like(chosen))
    return order, counts.cumsum(0)


def sampled_top_p(s, q, k, v, lens, score):
    probs, order = score.softmax(-1).sort(descending=True)
    probs = probs.masked_fill(probs.cumsum(-1) - probs > 0.9, 0.0)
    return order.gather(-1, torch.multinomial(probs, 1))


CASES |= collected(globals())
CASES["sampled_top_p"].random = True
