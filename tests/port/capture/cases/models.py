"""Graph-capture cases: small pieces of models: norms, rope, attention over a cache, experts, quantised layers."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import contextlib
import math

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases.setting import BLOCK, EXPERTS, B, D, H, S, State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


def route(s, q):
    """Two experts a token, with their weights."""
    x = q.reshape(-1, D)
    return x, *(x @ s.experts[:, :, 0].t()).softmax(-1).topk(2)


case("rms_norm", lambda s, q, k, v, lens, score: q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6))
case("layer_norm_function", lambda s, q, k, v, lens, score: F.layer_norm(q, (D,), s.emb[0], s.emb[1]))
case("swiglu", lambda s, q, k, v, lens, score: F.silu(q @ s.w) * (q @ s.w.t()))


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


def rope_dynamic_scaling_where(s, q, k, v, lens, score):
    scale = torch.where(lens > 32, lens / 32.0, 1.0)
    return q * (lens / scale).cos().view(B, 1, 1, 1)


def rope_dynamic_scaling_if(s, q, k, v, lens, score):
    scale = lens.max() / 32.0 if lens.max() > 32 else 1.0
    return q * (lens / scale).cos().view(B, 1, 1, 1)


def alibi_bias(s, q, k, v, lens, score):
    slope = 2.0 ** -torch.arange(1, H + 1, device=q.device)
    bias = slope.view(1, H, 1, 1) * (torch.arange(S, device=q.device) - lens.view(B, 1, 1, 1))
    return (q @ k.transpose(-1, -2) + bias).softmax(-1) @ v


def alibi_slopes_from_list(s, q, k, v, lens, score):
    slope = torch.tensor([2.0**-i for i in range(1, H + 1)], device=q.device)
    return q * slope.view(1, H, 1, 1)


def decode_attention_masked(s, q, k, v, lens, score):
    a = (q @ k.transpose(-1, -2)) / math.sqrt(D)
    keep = torch.arange(S, device=q.device) < lens.view(B, 1, 1, 1)
    return a.masked_fill(~keep, float("-inf")).softmax(-1) @ v


def decode_attention_sliced_per_row(s, q, k, v, lens, score):
    rows = [q[i] @ k[i, :, : lens[i]].transpose(-1, -2) @ v[i, :, : lens[i]] for i in range(B)]
    return torch.stack(rows)


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


case("softcap_logits", lambda s, q, k, v, lens, score: (50 * torch.tanh(q @ k.transpose(-1, -2) / 50)).softmax(-1) @ v)


def attention_sink_column(s, q, k, v, lens, score):
    sink = s.buf[:H].view(1, H, 1, 1).expand(B, H, 1, 1)
    a = torch.cat([q @ k.transpose(-1, -2), sink], -1).softmax(-1)
    return a[..., :-1] @ v


def kv_append_by_python_length(s, q, k, v, lens, score):
    s.kv[s.calls] = k[0, :, 0]
    s.calls += 1
    return torch.einsum("bhqd,shd->bhq", q, s.kv[: s.calls])


def kv_append_by_device_length(s, q, k, v, lens, score):
    s.kv.index_copy_(0, s.step, k[:1, :, 0])
    s.step += 1
    return torch.einsum("bhqd,shd->bhq", q, s.kv)


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


def sparse_attention_threshold(s, q, k, v, lens, score):
    keep = (score > 0.5).any(0)
    return (q @ k[:, :, keep].transpose(-1, -2)).softmax(-1) @ v[:, :, keep]


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


def moe_gathered_weights(s, q, k, v, lens, score):
    x, weight, chosen = route(s, q)
    return torch.einsum("td,tkdf,tk->tf", x, s.experts[chosen], weight)


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


def lora_by_index(s, q, k, v, lens, score):
    adapter = s.experts[lens % EXPERTS]
    return torch.einsum("bhqd,bdf->bhqf", q, adapter)


def lora_by_python_loop(s, q, k, v, lens, score):
    return torch.stack([q[i] @ s.experts[int(lens[i]) % EXPERTS] for i in range(B)])


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


case("logits_all_tokens", lambda s, q, k, v, lens, score: (k[:, 0] @ s.emb.t()).argmax(-1))


def logits_last_token(s, q, k, v, lens, score):
    return k[:, 0].gather(1, (lens - 1).view(B, 1, 1).expand(B, 1, D)) @ s.emb.t()


def vision_merge_masked_scatter(s, q, k, v, lens, score):
    rows = k[:, 0]
    image = (score > 0)[..., None].expand_as(rows)
    return rows.masked_scatter(image, v[:, 0])


def vision_merge_bool_assign(s, q, k, v, lens, score):
    rows = k[:, 0].clone()
    image = score > 0
    rows[image] = v[:, 0][image]
    return rows


case("vision_merge_where", lambda s, q, k, v, lens, score: torch.where((score > 0)[..., None], v[:, 0], k[:, 0]))


def mamba_conv_state_roll(s, q, k, v, lens, score):
    s.buf.copy_(torch.roll(s.buf, -1))
    s.buf[-1:].copy_(score[:1, 0])
    return q + (s.buf * torch.arange(8, device=q.device)).sum()


def mamba_scan_in_place(s, q, k, v, lens, score):
    s.buf.mul_(0.9).add_(score[0, :8])
    return q + s.buf.sum()


def mamba_state_rebound(s, q, k, v, lens, score):
    s.buf = s.buf * 0.9 + score[0, :8]
    return q + s.buf.sum()


def prefix_hash_on_host(s, q, k, v, lens, score):
    key = tuple(lens.tolist())
    if key not in s.table:
        s.table[key] = q * 2
    return s.table[key] + 1


def weights_dequantised_int4(s, q, k, v, lens, score):
    packed = (s.w * 4).round().clamp(-8, 7).to(torch.int8)
    low, high = packed & 15, (packed >> 4) & 15
    return q @ (low.float() - 8 + high.float())


def activation_scale_delayed(s, q, k, v, lens, score):
    scale = s.buf[:1] + 1
    r = q / scale
    s.buf[:1].copy_(q.abs().amax().view(1))
    return r


def activation_scale_delayed_rebound(s, q, k, v, lens, score):
    scale = s.cache if s.cache is not None else torch.ones((), device=q.device)
    s.cache = q.abs().amax() + 1
    return q / scale


def nan_guard_async(s, q, k, v, lens, score):
    torch._assert_async(torch.isfinite(q).all(), "not finite")
    return q * 2


def nan_guard_suppressed(s, q, k, v, lens, score):
    with contextlib.suppress(ValueError):
        if torch.isnan(q).any():
            raise ValueError("nan")
    return q * 2


def debug_assert_close(s, q, k, v, lens, score):
    torch.testing.assert_close(q, q * 1.0)
    return q * 2


def check_with_torch_check(s, q, k, v, lens, score):
    torch._check(q.shape[0] == B)
    return q * 2


case("beam_reorder_index_select", lambda s, q, k, v, lens, score: k.index_select(0, score.sum(-1).argsort()))
case("beam_reorder_python", lambda s, q, k, v, lens, score: k[score.sum(-1).argsort().tolist()])


def beam_cache_reordered_in_place(s, q, k, v, lens, score):
    s.out.copy_((s.out + q).index_select(0, score.sum(-1).argsort()))
    return s.out * 2


case("chunked_prefill_ranges", lambda s, q, k, v, lens, score: sum(k[:, :, i : i + 16].sum(2) for i in range(0, S, 16)))


def chunked_prefill_data_ranges(s, q, k, v, lens, score):
    return sum((k[:, :, i : i + 16].sum(2) for i in range(0, int(lens.max()), 16)), 0)


def weight_swapped_by_flag(s, q, k, v, lens, score):
    s.calls += 1
    return q @ (s.w if s.calls % 2 else s.w.t())


def weight_chosen_on_device(s, q, k, v, lens, score):
    s.step += 1
    return q @ torch.where(s.step % 2 == 1, s.w, s.w.t())


CASES |= collected(globals())
