"""Graph-capture cases: small pieces of models: norms, rope, attention over a cache, experts, quantised layers."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import contextlib
import math

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases.setting import BLOCK, EXPERTS, B, D, H, S, State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


def route(s, q):
    """Two experts a token, with their weights."""
    x = q.reshape(-1, D)
    return x, *(x @ s.experts[:, :, 0].t()).softmax(-1).topk(2)


def rope_by_positions(s, q, k, v, lens, score):
    frequency = 10000 ** (-torch.arange(0, D, 2, device=q.device) / D)
    angle = lens.view(B, 1, 1, 1) * frequency
    first, second = q.chunk(2, -1)
    return torch.cat([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)


def rope_table_lookup(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.outer(torch.arange(256.0), 10000 ** (-torch.arange(0, D, 1) / D)).cos().to(q.device)
    return q * s.cache[lens].view(B, 1, 1, D)


def rope_table_grown_to_max(s, q, k, v, lens, score):
    needed = int(lens.max()) + 1
    if s.cache is None or s.cache.shape[0] < needed:
        s.cache = torch.arange(float(needed), device=q.device).cos()
    return q * s.cache[lens].view(B, 1, 1, 1)


def alibi_bias(s, q, k, v, lens, score):
    slope = 2.0 ** -torch.arange(1, H + 1, device=q.device)
    bias = slope.view(1, H, 1, 1) * (torch.arange(S, device=q.device) - lens.view(B, 1, 1, 1))
    return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v


def decode_attention_masked(s, q, k, v, lens, score):
    a = (q @ k.transpose(-1, -2)) / math.sqrt(D)
    keep = torch.arange(S, device=q.device) < lens.view(B, 1, 1, 1)
    return a.masked_fill(~keep, float("-inf")).softmax(-1) @ v


def sliding_window_mask(s, q, k, v, lens, score):
    position = torch.arange(S, device=q.device)
    keep = (position < lens.view(B, 1)) & (position >= lens.view(B, 1) - 16)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep.view(B, 1, 1, S))


def mask_all_true_shortcut(s, q, k, v, lens, score):
    keep = torch.arange(S, device=q.device) < lens.view(B, 1)
    if keep.all():
        return F.scaled_dot_product_attention(q, k, v)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep.view(B, 1, 1, S))


def finfo_min_bias(s, q, k, v, lens, score):
    keep = torch.arange(S, device=q.device) < lens.view(B, 1, 1, 1)
    bias = torch.where(keep, 0.0, torch.finfo(q.dtype).min)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def attention_sink_column(s, q, k, v, lens, score):
    sink = s.buf[:H].view(1, H, 1, 1).expand(B, H, 1, 1)
    a = torch.cat([q @ k.transpose(-1, -2), sink], -1).softmax(-1)
    return a[..., :-1] @ v


def paged_attention_gathered(s, q, k, v, lens, score):
    keys = s.pages[s.blocks].view(B, 1, -1, D)
    a = q @ keys.transpose(-1, -2)
    keep = torch.arange(S, device=q.device) < lens.view(B, 1, 1, 1)
    return a.masked_fill(~keep, -1e9).softmax(-1) @ keys


def paged_attention_python_blocks(s, q, k, v, lens, score):
    keys = [s.pages[table[: -(-n // BLOCK)]] for table, n in zip(s.blocks.tolist(), lens.tolist(), strict=True)]
    return q * sum(key.sum() for key in keys)


def paged_write_slots(s, q, k, v, lens, score):
    slot = s.blocks.gather(1, (lens // BLOCK).view(B, 1)).view(-1) * BLOCK + lens % BLOCK
    s.pages.view(-1, D).index_copy_(0, slot.long(), k[:, 0, 0])
    return q * s.pages.sum()


def paged_write_masked_slots(s, q, k, v, lens, score):
    slot = torch.where(lens > 30, lens, -1)
    keep = slot >= 0
    s.pages.view(-1, D)[slot[keep]] = k[keep, 0, 0]
    return q * s.pages.sum()


def paged_write_trash_slot(s, q, k, v, lens, score):
    slot = torch.where(lens > 30, lens, 127)
    s.pages.view(-1, D).index_copy_(0, slot, k[:, 0, 0])
    return q * s.pages.view(-1, D)[:127].sum()


def sparse_attention_topk(s, q, k, v, lens, score):
    index = score.topk(16).indices.view(B, 1, 16, 1).expand(B, H, 16, D)
    return (q @ k.gather(2, index).transpose(-1, -2)).softmax(-1) @ v.gather(2, index)


def sparse_attention_threshold_masked(s, q, k, v, lens, score):
    keep = (score > 0.5).any(0)
    a = (q @ k.transpose(-1, -2)).masked_fill(~keep, -1e9)
    return a.softmax(-1) @ v


def moe_loop_over_hit_experts(s, q, k, v, lens, score):
    x, weight, chosen = route(s, q)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, slot = torch.where(chosen == e)
        out.index_add_(0, token, (x[token] @ s.experts[e]) * weight[token, slot, None])
    return out


def moe_skip_empty_experts(s, q, k, v, lens, score):
    x, weight, chosen = route(s, q)
    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        hit = chosen == e
        if hit.any():
            out = out + (x @ s.experts[e]) * (weight * hit).sum(-1, keepdim=True)
    return out


def moe_dense_masked(s, q, k, v, lens, score):
    x, weight, chosen = route(s, q)
    gate = torch.zeros(x.shape[0], EXPERTS, device=q.device).scatter(1, chosen, weight)
    return torch.einsum("te,td,edf->tf", gate, x, s.experts)


def moe_sorted_tokens(s, q, k, v, lens, score):
    _x, weight, chosen = route(s, q)
    order = chosen.flatten().argsort(stable=True)
    load = F.one_hot(chosen.flatten(), EXPERTS).sum(0)
    return q.reshape(-1, D)[order // 2] * weight.flatten()[order, None] + load.cumsum(0)[-1]


def moe_tokens_per_expert_host(s, q, k, v, lens, score):
    x, _weight, chosen = route(s, q)
    counts = torch.bincount(chosen.flatten(), minlength=EXPERTS).cpu().tolist()
    parts = torch.split(x[chosen.flatten().argsort() // 2], counts)
    return torch.cat([part @ w for part, w in zip(parts, s.experts, strict=True)])


def moe_capacity_fixed(s, q, k, v, lens, score):
    gate = (q.reshape(-1, D) @ s.experts[:, :, 0].t()).softmax(-1)
    weight, token = gate.topk(4, dim=0)
    x = q.reshape(-1, D)[token.t()]
    return torch.zeros_like(q.reshape(-1, D)).index_add(
        0, token.t().flatten(), ((x @ s.experts) * weight.t()[..., None]).flatten(0, 1)
    )


def moe_load_logged(s, q, k, v, lens, score):
    _x, weight, chosen = route(s, q)
    s.history.append(F.one_hot(chosen, EXPERTS).sum((0, 1)).tolist())
    return q * weight.sum()


def moe_load_accumulated_on_device(s, q, k, v, lens, score):
    _x, weight, chosen = route(s, q)
    s.buf[:EXPERTS] += F.one_hot(chosen, EXPERTS).sum((0, 1))
    return q * weight.sum() + s.buf.sum()


def early_exit_confidence(s, q, k, v, lens, score):
    x = q
    for w in s.experts:
        x = x @ w
        if x.abs().mean() < 1e-3:
            break
    return x


def early_exit_masked(s, q, k, v, lens, score):
    x = q
    for w in s.experts:
        x = torch.where(x.abs().mean() < 1e-3, x, x @ w)
    return x


def residual_layers(s, q, k, v, lens, score):
    x = q
    for w in s.experts:
        x = x + F.gelu(x @ w)
    return x


def mamba_conv_state_roll(s, q, k, v, lens, score):
    s.buf.copy_(torch.roll(s.buf, -1))
    s.buf[-1:].copy_(score[:1, 0])
    return q + (s.buf * torch.arange(8, device=q.device)).sum()


def prefix_hash_on_host(s, q, k, v, lens, score):
    key = tuple(lens.tolist())
    if key not in s.table:
        s.table[key] = q * 2
    return s.table[key] + 1


def weights_dequantised_int4(s, q, k, v, lens, score):
    packed = (s.w * 4).round().clamp(-8, 7).to(torch.int8)
    low, high = packed & 15, (packed >> 4) & 15
    return q @ (low.float() - 8 + high.float())


def activation_scale_delayed_rebound(s, q, k, v, lens, score):
    scale = s.cache if s.cache is not None else torch.ones((), device=q.device)
    s.cache = q.abs().amax() + 1
    return q / scale


def nan_guard_suppressed(s, q, k, v, lens, score):
    with contextlib.suppress(ValueError):
        if torch.isnan(q).any():
            raise ValueError("nan")
    return q * 2


CASES |= collected(globals())
