"""Graph-capture cases, second set: expert dispatch, adapters and quantised layers."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import math

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import EXPERTS, B, D, H, collected, inputs, registry, seeded

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


class State(setting.State):
    """Besides the common state: a router's bias, two adapters by name, and scales that are learnt from the traffic."""

    def __init__(self, dev):
        super().__init__(dev)
        self.bias = torch.zeros(EXPERTS, device=dev)
        self.order = list(range(EXPERTS))
        self.adapters = {
            name: (seeded(seed, D, 4).to(dev), seeded(seed + 1, 4, D).to(dev))
            for name, seed in (("law", 20), ("code", 30))
        }
        self.stacked = torch.stack([a @ b for a, b in self.adapters.values()])
        self.active = "law"
        self.amax = torch.zeros(4, device=dev)
        self.head = torch.zeros(1, dtype=torch.long, device=dev)
        self.scale = torch.ones((), device=dev)
        self.codebook = torch.linspace(-1, 1, 16, device=dev)


def route(s, q):
    x = q.reshape(-1, D)
    logits = x @ s.experts[:, :, 0].t() + s.bias
    weight, chosen = logits.softmax(-1).topk(2)
    return x, weight / weight.sum(-1, keepdim=True), chosen


def experts_aligned_to_blocks(s, q, k, v, lens, score):
    _x, _weight, chosen = route(s, q)
    load = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
    padded = (load + 3) // 4 * 4
    return padded.cumsum(0) - padded, padded.sum()


def experts_permuted_and_back(s, q, k, v, lens, score):
    x, weight, chosen = route(s, q)
    order = chosen.flatten().sort(stable=True).indices
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel(), device=q.device))
    moved = x.repeat_interleave(2, 0)[order] * 3
    return (moved[back].view(-1, 2, D) * weight.unsqueeze(-1)).sum(1)


def experts_skipped_when_empty(s, q, k, v, lens, score):
    x, _weight, chosen = route(s, q)
    load = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
    return sum((x @ s.experts[e] for e in range(EXPERTS) if load[e] != 0), torch.zeros_like(x))


def experts_hit_listed(s, q, k, v, lens, score):
    x, _weight, chosen = route(s, q)
    mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    for e in torch.greater(mask.sum((-1, -2)), 0).nonzero():
        x = x + s.experts[e[0]].sum()
    return x


def experts_iterated_by_unique(s, q, k, v, lens, score):
    x, _weight, chosen = route(s, q)
    for e in chosen.unique():
        x = x + (chosen == e).sum()
    return x


def experts_limited_to_groups(s, q, k, v, lens, score):
    logits = (q.reshape(-1, D) @ s.emb[:16].t()).sigmoid()
    best = logits.view(-1, 4, 4).topk(2, dim=-1).values.sum(-1).topk(2, sorted=False).indices
    keep = torch.zeros(logits.shape[0], 4, device=q.device).scatter_(1, best, 1.0).repeat_interleave(4, 1)
    weight, chosen = logits.masked_fill(keep == 0, 0.0).topk(3)
    return weight / weight.sum(-1, keepdim=True), chosen


def experts_balanced_in_place(s, q, k, v, lens, score):
    _x, weight, chosen = route(s, q)
    load = F.one_hot(chosen, EXPERTS).sum((0, 1)).float()
    s.bias.add_(torch.sign(load.mean() - load), alpha=0.05)
    return weight, s.bias * 1


def experts_balanced_by_new_bias(s, q, k, v, lens, score):
    _x, weight, chosen = route(s, q)
    load = F.one_hot(chosen, EXPERTS).sum((0, 1)).float()
    s.bias = s.bias + 0.05 * torch.sign(load.mean() - load) + 0.01
    return weight, s.bias * 1


def experts_capacity_of_shape(s, q, k, v, lens, score):
    _x, weight, chosen = route(s, q)
    capacity = math.ceil(1.25 * weight.numel() / EXPERTS)
    hot = F.one_hot(chosen.flatten(), EXPERTS)
    place = (hot.cumsum(0) * hot).sum(-1) - 1
    slot = torch.where(place < capacity, chosen.flatten() * capacity + place, EXPERTS * capacity)
    table = torch.zeros(EXPERTS * capacity + 1, D, device=q.device)
    return table.index_add_(0, slot, q.reshape(-1, D).repeat_interleave(2, 0))[:-1]


def experts_capacity_of_load(s, q, k, v, lens, score):
    _x, _weight, chosen = route(s, q)
    capacity = F.one_hot(chosen.flatten(), EXPERTS).sum(0).max()
    return torch.zeros(EXPERTS, capacity, device=q.device).sum() + q


def experts_rearranged_now_and_then(s, q, k, v, lens, score):
    s.calls += 1
    if s.calls % 3 == 0:
        s.order = s.order[1:] + s.order[:1]
    x = q.reshape(-1, D)
    return sum((i + 1) * (x @ s.experts[e]) for i, e in enumerate(s.order))


def experts_local_shard_masked(s, q, k, v, lens, score):
    x, weight, chosen = route(s, q)
    local = (chosen >= 1) & (chosen < 3)
    index = torch.where(local, chosen - 1, 0)
    out = torch.einsum("td,tkdf->tkf", x, s.experts[1:3][index])
    return (out * (weight * local).unsqueeze(-1)).sum(1)


def adapter_by_request_or_none(s, q, k, v, lens, score):
    which = lens % 3 - 1
    delta = torch.bmm(q.view(B, H, D), s.stacked[which.clamp_min(0)])
    return q + (delta * (which >= 0).view(B, 1, 1)).view_as(q)


def adapter_loop_over_set(s, q, k, v, lens, score):
    out = q.clone()
    for which in set((lens % 2).tolist()):
        out = out + (q @ s.stacked[which]) * (lens % 2 == which).view(B, 1, 1, 1)
    return out


def quantised_shared_exponent(s, q, k, v, lens, score):
    blocks = k.reshape(-1, 16)
    _mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))
    return torch.ldexp(torch.ldexp(blocks, 3 - exponent).round(), exponent - 3)


def amax_history_python_slot(s, q, k, v, lens, score):
    s.amax[s.calls % 4 : s.calls % 4 + 1].copy_(q.abs().amax().view(1))
    s.calls += 1
    return q / s.amax.amax(), s.amax + 0


def amax_history_device_slot(s, q, k, v, lens, score):
    s.amax.index_copy_(0, s.head, q.abs().amax().view(1))
    s.head.add_(1).remainder_(4)
    return q / s.amax.amax(), s.amax + 0


def nibbles_unpacked(s, q, k, v, lens, score):
    packed = (score * 40).to(torch.int32).bitwise_and(255).to(torch.uint8)
    nibbles = torch.stack([packed & 15, packed >> 4], -1).flatten(1)
    return s.codebook[nibbles.int()]


def negative_zero_codes_cleared(s, q, k, v, lens, score):
    codes = (score * 0.001).to(torch.float8_e4m3fn).view(torch.uint8)
    clean = codes.masked_fill(codes == 0x80, 0)
    return clean, (codes == 0x80).sum()


def int8_matmul_native(s, q, k, v, lens, score):
    left = (k[0, 0] * 20).round().clamp(-128, 127).to(torch.int8)
    right = (s.w * 20).round().clamp(-128, 127).to(torch.int8)
    return torch._int_mm(left, right).float() / 400


CASES |= collected(globals())
