"""Graph-capture cases, second set: paged, ring, sliding and shared KV caches, and tables of positions."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import math
import zlib

import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import BLOCK, B, D, H, S, collected, inputs, registry, seeded

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())
RING = 6
MASKS: dict[tuple[object, ...], torch.Tensor] = {}


class State(setting.State):
    """Besides the common state: a ring of keys, block lists on the host, and two layers of beams."""

    def __init__(self, dev):
        super().__init__(dev)
        self.ring = torch.zeros(RING, H, D, device=dev)
        self.head = torch.zeros(1, dtype=torch.long, device=dev)
        self.free = list(range(RING))
        self.owned = {"a": [0, 2], "b": [1, 3]}
        self.layers = [seeded(40 + i, B, H, D).to(dev) for i in range(2)]
        self.spare = torch.zeros(B, H, D, device=dev)
        self.moves = torch.tensor([[0, 5], [1, 6]]).to(dev)
        self.host_pool = torch.zeros(B, H, 1, D)
        self.pinned_pool = torch.zeros(B, H, 1, D, pin_memory=dev == "cuda")
        self.offset = 0


def copy_on_write_fixed_pairs(s, q, k, v, lens, score):
    for source, target in ((0, 3), (1, 2)):
        s.pages[target].copy_(s.pages[source])
    s.pages[0] += k[0, 0, 0]
    return s.pages.sum((1, 2))


def copy_on_write_device_pairs(s, q, k, v, lens, score):
    for source, target in s.moves:
        s.pages[target] = s.pages[source]
    return s.pages.sum((1, 2))


def prefix_shared_by_expand(s, q, k, v, lens, score):
    shared = s.pages[:2].reshape(1, 1, -1, D).expand(B, H, -1, D)
    keys = torch.cat([shared, k], 2)
    seen = torch.arange(keys.shape[2], device=q.device) < 2 * BLOCK + lens.view(B, 1, 1, 1)
    return (q @ keys.transpose(-1, -2)).masked_fill(~seen, -1e9).softmax(-1) @ keys


def static_cache_position_from_counter(s, q, k, v, lens, score):
    position = torch.arange(s.calls, s.calls + 1, device=q.device)
    s.calls += 1
    s.kv.index_copy_(0, position, k[:1, :, 0])
    return q + s.kv.sum((0, 2)).view(1, H, 1, 1)


def static_cache_position_kept(s, q, k, v, lens, score):
    position = torch.arange(1, device=q.device) + s.step
    s.step.add_(k[:, :, :1].shape[2])
    s.kv.index_copy_(0, position, k[:1, :, 0])
    return q + (s.kv.sum((1, 2)) * torch.arange(S, device=q.device)).sum()


def window_fills_during_replays(s, q, k, v, lens, score):
    full = s.calls >= 5
    s.calls += 1
    if full:
        s.ring.copy_(s.ring.roll(-1, 0))
    s.ring[-1:].copy_(k[:1, :, 0])
    return s.ring * 2


def window_full_since_warm_up(s, q, k, v, lens, score):
    full = s.calls >= 1
    s.calls += 1
    if full:
        s.ring.copy_(s.ring.roll(-1, 0))
    s.ring[-1:].copy_(k[:1, :, 0])
    return s.ring * 2


def eviction_by_top_scores(s, q, k, v, lens, score):
    kept = score.topk(16, sorted=False).indices.sort(-1).values
    index = kept.view(B, 1, 16, 1).expand(-1, H, -1, D)
    return k.gather(2, index).sum(2), v.gather(2, index).sum(2)


def latent_cache_absorbed(s, q, k, v, lens, score):
    latent = s.kv[:, 0]
    s.kv[:, 0].index_copy_(0, lens, k[:, 0, 0])
    absorbed = torch.einsum("bhqd,de->bhqe", q, s.w)
    return torch.einsum("bhqe,se->bhqs", absorbed, latent).softmax(-1) @ latent


def beams_reordered_into_new_list(s, q, k, v, lens, score):
    order = score.sum(-1).argsort()
    s.layers = [(layer + q[:, :, 0]).index_select(0, order) for layer in s.layers]
    return torch.stack(s.layers)


def beams_reordered_through_spare(s, q, k, v, lens, score):
    torch.index_select(s.layers[0] + q[:, :, 0], 0, score.sum(-1).argsort(), out=s.spare)
    s.layers[0], s.spare = s.spare, s.layers[0]
    return s.layers[0] * 1


def beams_reordered_where_they_lie(s, q, k, v, lens, score):
    order = score.sum(-1).argsort()
    for layer in s.layers:
        layer[:] = (layer + q[:, :, 0])[order]
    return torch.stack(s.layers)


def rotary_table_grown_by_shape(s, q, k, v, lens, score):
    if s.cache is None or s.cache.shape[0] < k.shape[2]:
        turns = torch.outer(torch.arange(k.shape[2]).float(), torch.logspace(0, -4, D // 2))
        s.cache = torch.polar(torch.ones_like(turns), turns).to(q.device)
    turned = torch.view_as_complex(q.reshape(B, H, 1, -1, 2)) * s.cache[lens].view(B, 1, 1, -1)
    return torch.view_as_real(turned).flatten(3)


def rotary_table_grown_by_step(s, q, k, v, lens, score):
    s.offset += 1
    if s.cache is None or s.cache.shape[0] < s.offset:
        s.cache = torch.arange(s.offset, device=q.device).float().cos()
    return q * s.cache[-1:]


def rotary_table_grown_in_advance(s, q, k, v, lens, score):
    s.offset += 1
    if s.cache is None or s.cache.shape[0] < s.offset:
        s.cache = torch.arange(2 ** math.ceil(math.log2(s.offset + 200)), device=q.device).float().cos()
    return q * s.cache[lens].view(B, 1, 1, 1)


def rotary_table_polar_from_host(s, q, k, v, lens, score):
    turns = torch.linspace(0, 1, D // 2)
    wave = torch.polar(torch.ones_like(turns), turns).to(q.device)
    return torch.view_as_real(torch.view_as_complex(q.reshape(B, H, 1, -1, 2)) * wave).flatten(3)


def rotary_base_scaled_on_device(s, q, k, v, lens, score):
    base = 10000 * torch.clamp(lens.max() / 32, min=1.0) ** (D / (D - 2))
    angle = lens.view(B, 1) * base ** (-torch.arange(0, D, 2, device=q.device) / D)
    return q * angle.cos().repeat(1, 2).view(B, 1, 1, D)


def rotary_sections_interleaved(s, q, k, v, lens, score):
    angle = torch.stack([lens, lens // 2, lens % 4]).view(3, B, 1, 1, 1) * torch.linspace(0, 1, D, device=q.device)
    parts = angle.cos().split([8, 12, 12], -1)
    return q * torch.cat([part[i % 3] for i, part in enumerate(parts)], -1)


def position_offset_python_sum(s, q, k, v, lens, score):
    positions = torch.arange(s.offset, s.offset + q.shape[2], device=q.device)
    s.offset += q.shape[2]
    return q * (1 + positions).log1p()


def position_ids_from_mask(s, q, k, v, lens, score):
    mask = (torch.arange(S, device=q.device) >= S - lens.view(B, 1)).long()
    return (mask.cumsum(-1) - 1).masked_fill_(mask == 0, 1)


def mask_cached_by_key(s, q, k, v, lens, score):
    key = (S, q.dtype, q.device)
    if key not in MASKS:
        MASKS[key] = torch.ones(S, S, dtype=torch.bool).tril().triu(-BLOCK).to(q.device)
    return MASKS[key][lens] * score


def mask_none_on_first_step(s, q, k, v, lens, score):
    seen = torch.arange(S, device=q.device) < lens.view(B, 1, 1, 1)
    mask = seen if s.calls else None
    s.calls += 1
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def distance_buckets(s, q, k, v, lens, score):
    distance = (lens.view(B, 1) - torch.arange(S, device=q.device)).clamp_min(0)
    far = 8 + (distance.clamp_min(1).float() / 8).log().mul(4).long()
    return s.emb[torch.where(distance < 8, distance, far.clamp(0, 15))].sum(-1)


CASES |= collected(globals())
