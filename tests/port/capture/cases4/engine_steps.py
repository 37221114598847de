"""Graph-capture cases, fourth set: steps of engines, written after the checker was mended and before their truth."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import math

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import BLOCK, EXPERTS, VOCAB, B, D, H, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


class State(setting.State):
    def __init__(self, dev):
        super().__init__(dev)
        self.adapters = (setting.seeded(11, 3, D, 4) * 0.1).to(dev)
        self.adapter_of = torch.tensor([0, 2]).to(dev)
        self.beams = torch.zeros(B, dtype=torch.long, device=dev)
        self.draft = torch.tensor([[3, 5, 7], [2, 4, 6]]).to(dev)
        self.scale = torch.tensor(0.25)
        self.window = 16
        self.seen = set()
        self.gates = torch.nn.Linear(D, EXPERTS).to(dev)
        self.finished = torch.zeros(B, dtype=torch.bool, device=dev)


def alibi_bias_built_each_step(s, q, k, v, lens, score):
    slopes = torch.tensor([2 ** -(h + 1) for h in range(H)]).to(q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=slopes[:, None, None] * torch.arange(S, device=q.device))


def alibi_bias_by_exp2(s, q, k, v, lens, score):
    slopes = torch.exp2(-(torch.arange(H, device=q.device) + 1.0))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=slopes[:, None, None] * torch.arange(S, device=q.device))


def sliding_window_mask_of_lengths(s, q, k, v, lens, score):
    at = torch.arange(S, device=q.device)
    live = (at < lens[:, None]) & (at >= lens[:, None] - s.window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=live[:, None, None])


def lora_loop_over_adapters(s, q, k, v, lens, score):
    out = torch.zeros(B, H, 4, device=q.device)
    for adapter in range(3):
        mask = s.adapter_of == adapter
        if mask.any():
            out[mask] = q[mask][:, :, 0] @ s.adapters[adapter]
    return out


def stop_when_all_finished(s, q, k, v, lens, score):
    s.finished |= score.argmax(-1) == 3
    if s.finished.all():
        return torch.zeros_like(score)
    return score * 2


def block_table_lookup(s, q, k, v, lens, score):
    at = lens - 1
    block = s.blocks.gather(1, (at // BLOCK)[:, None].clamp(max=s.blocks.shape[1] - 1)).squeeze(1)
    return s.pages[block.long(), at % BLOCK]


def gumbel_noise_sampling(s, q, k, v, lens, score):
    return (score - torch.empty_like(score).exponential_().log()).argmax(-1)


def experts_loop_over_all(s, q, k, v, lens, score):
    x = k[:, 0].reshape(-1, D)
    weights = s.gates(x).softmax(-1)
    return sum(weights[:, e, None] * (x @ s.experts[e]) for e in range(EXPERTS))


def experts_where_one_argument(s, q, k, v, lens, score):
    x = k[:, 0].reshape(-1, D)
    chosen = s.gates(x).argmax(-1)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        rows = torch.where(chosen == e)[0]
        out.index_add_(0, rows, x[rows] @ s.experts[e])
    return out


def quantised_per_row_int8(s, q, k, v, lens, score):
    scale = score.abs().amax(-1, keepdim=True) / 127
    return (score / scale).round().clamp(-128, 127).to(torch.int8), scale


def rope_table_longer_when_needed(s, q, k, v, lens, score):
    need = int(lens.max())
    if s.cache is None or s.cache.shape[0] < need:
        s.cache = torch.arange(need, device=q.device).float().cos()
    return s.cache[:1] * q


def rope_by_position_tensor(s, q, k, v, lens, score):
    inverse = 1.0 / 10000 ** (torch.arange(0, D, 2, device=q.device) / D)
    angles = lens[:, None] * inverse
    return torch.cat([q[:, 0, 0, ::2] * angles.cos(), q[:, 0, 0, 1::2] * angles.sin()], -1)


def warnings_only_in_first_call(s, q, k, v, lens, score):
    if s.calls == 0:
        print("first call, mean", float(score.mean()))
    s.calls = 1
    return score * 2


def vocabulary_shard_masked(s, q, k, v, lens, score):
    inside = (lens >= 10) & (lens < VOCAB)
    rows = F.embedding(torch.where(inside, lens - 10, 0), s.emb)
    return rows * inside[:, None]


CASES |= collected(globals())
CASES["gumbel_noise_sampling"].random = True
