"""Graph-capture cases, third set: layers and losses of torch.nn, in the types that inference uses."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code=index

import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import VOCAB, B, D, H, S, collected, inputs, registry
from torch import nn
from torch.nn import functional

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


class State(setting.State):
    def __init__(self, dev):
        super().__init__(dev)
        torch.manual_seed(5)
        layers = {
            "attention": nn.MultiheadAttention(D, 4, batch_first=True),
            "encoder": nn.TransformerEncoderLayer(D, 4, 64, batch_first=True),
            "decoder": nn.TransformerDecoderLayer(D, 4, 64, batch_first=True),
            "lstm": nn.LSTM(D, 16, batch_first=True, bidirectional=True),
            "gru": nn.GRU(D, 16, num_layers=2, batch_first=True),
            "rnn": nn.RNN(D, 16, batch_first=True),
            "cell": nn.LSTMCell(D, 16),
            "conv": nn.Conv1d(D, D, 3, padding=1),
            "conv2d": nn.Conv2d(H, 8, 3, padding=1),
            "up": nn.ConvTranspose2d(H, 4, 2, stride=2),
            "group": nn.GroupNorm(2, H),
            "instance": nn.InstanceNorm2d(H),
            "batch": nn.BatchNorm1d(D),
            "bag": nn.EmbeddingBag(VOCAB, D, mode="mean"),
            "adaptive": nn.AdaptiveLogSoftmaxWithLoss(D, VOCAB, [20, 50]),
            "bilinear": nn.Bilinear(D, D, 8),
            "padded": nn.Embedding(VOCAB, D, padding_idx=0),
            "normed": nn.Embedding(VOCAB, D, max_norm=1.0),
        }
        self.nn = nn.ModuleDict(layers).to(dev).eval()
        self.half = nn.Sequential(nn.Linear(D, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, D)).to(dev).half()
        self.linear8 = (torch.randn(D, D) * 10).to(torch.int8).to(dev)


def layer_attention_padding(s, q, k, v, lens, score):
    padded = torch.arange(S, device=q.device) >= lens.view(B, 1)
    return s.nn["attention"](q[:, 0], k[:, 0], v[:, 0], key_padding_mask=padded, need_weights=False)[0]


def layer_encoder_eval_no_grad(s, q, k, v, lens, score):
    with torch.no_grad():
        return s.nn["encoder"](k[:, 0])


def layer_encoder_eval_masked_no_grad(s, q, k, v, lens, score):
    padded = torch.arange(S, device=q.device) >= lens.view(B, 1)
    with torch.no_grad():
        return s.nn["encoder"](k[:, 0], src_key_padding_mask=padded)


def layer_encoder_causal_mask(s, q, k, v, lens, score):
    mask = nn.Transformer.generate_square_subsequent_mask(S, device=q.device)
    return s.nn["encoder"](k[:, 0], src_mask=mask, is_causal=True)


def layer_encoder_causality_detected(s, q, k, v, lens, score):
    stack = nn.TransformerEncoder(s.nn["encoder"], 1, enable_nested_tensor=False)
    mask = nn.Transformer.generate_square_subsequent_mask(S, device=q.device)
    return stack(k[:, 0], mask=mask)


def layer_lstm_cell_loop(s, q, k, v, lens, score):
    state = None
    for t in range(4):
        state = s.nn["cell"](k[:, 0, t], state)
    return state[0]


def layer_embedding_normed(s, q, k, v, lens, score):
    with torch.no_grad():
        return s.nn["normed"](lens)


def layer_autocast_bfloat16(s, q, k, v, lens, score):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return s.nn["encoder"](k[:, 0])


def layer_autocast_without_cache(s, q, k, v, lens, score):
    with torch.autocast("cuda", dtype=torch.float16, cache_enabled=False):
        return functional.linear(q, s.w) @ s.w


def layer_inference_mode(s, q, k, v, lens, score):
    with torch.inference_mode():
        return s.nn["decoder"](q[:, 0], k[:, 0])


def layer_pools(s, q, k, v, lens, score):
    a = functional.adaptive_avg_pool2d(k, (4, 4)).mean()
    b, where = functional.max_pool1d(k[:, 0], 4, return_indices=True)
    return a + b.mean() + functional.adaptive_max_pool1d(k[:, 0], 8).sum() + functional.lp_pool1d(
        k[:, 0].abs(), 2, 4
    ).sum(), where


def layer_unpool(s, q, k, v, lens, score):
    pooled, where = functional.max_pool1d(k[:, 0], 4, return_indices=True)
    return functional.max_unpool1d(pooled, where, 4)


def layer_grid_and_affine(s, q, k, v, lens, score):
    grid = functional.affine_grid(torch.eye(2, 3, device=q.device).expand(B, 2, 3), [B, H, 8, 8], align_corners=False)
    return functional.grid_sample(k, grid, align_corners=False)


def layer_losses(s, q, k, v, lens, score):
    a = (
        functional.smooth_l1_loss(score, score * 2)
        + functional.huber_loss(score, score + 1)
        + functional.mse_loss(score, score.abs())
    )
    b = functional.binary_cross_entropy_with_logits(score, (score > 0).float()) + functional.soft_margin_loss(
        score, score.sign()
    )
    return (
        a
        + b
        + functional.gaussian_nll_loss(score, score, score.abs() + 1)
        + functional.poisson_nll_loss(score, score.abs())
    )


def layer_margin_losses(s, q, k, v, lens, score):
    target = torch.arange(B, device=q.device)
    return functional.multi_margin_loss(score, target) + functional.triplet_margin_loss(score, score + 1, score * 2)


def layer_activations(s, q, k, v, lens, score):
    x = (
        functional.glu(score)
        + functional.mish(score[:, :32])
        + functional.hardswish(score[:, :32])
        + functional.elu(score[:, :32])
        + functional.softsign(score[:, :32])
    )
    return (
        functional.prelu(x, torch.full((1,), 0.1, device=q.device))
        + functional.rrelu(x)
        + functional.threshold(x, 0.1, 0.2)
        + functional.celu(x)
    )


def layer_pairwise(s, q, k, v, lens, score):
    return (
        functional.pdist(k[0, 0]).sum()
        + functional.cosine_similarity(k[0], v[0], -1).sum()
        + functional.pairwise_distance(score, score + 1).sum()
    )


def layer_sdpa_flash(s, q, k, v, lens, score):
    with nn.attention.sdpa_kernel(nn.attention.SDPBackend.FLASH_ATTENTION):
        return functional.scaled_dot_product_attention(k.half(), k.half(), v.half(), is_causal=True)


def layer_sdpa_efficient_masked(s, q, k, v, lens, score):
    mask = (torch.arange(S, device=q.device) < lens.view(B, 1, 1, 1)).expand(B, H, 1, S)
    with nn.attention.sdpa_kernel([nn.attention.SDPBackend.EFFICIENT_ATTENTION, nn.attention.SDPBackend.MATH]):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def layer_sdpa_cudnn_or_other(s, q, k, v, lens, score):
    order = [nn.attention.SDPBackend.CUDNN_ATTENTION, nn.attention.SDPBackend.FLASH_ATTENTION]
    with nn.attention.sdpa_kernel(order, set_priority=True):
        return functional.scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())


def layer_sdpa_grouped(s, q, k, v, lens, score):
    return functional.scaled_dot_product_attention(
        q.bfloat16(), k[:, :2].bfloat16(), v[:, :2].bfloat16(), enable_gqa=True
    )


def layer_parameter_list(s, q, k, v, lens, score):
    with torch.no_grad():
        return sum((p.sum() for p in s.nn["encoder"].parameters()), q)


def layer_optimizer_step(s, q, k, v, lens, score):
    weight = s.table.setdefault("weight", nn.Parameter(s.w.clone()))
    optimizer = s.table.setdefault("optimizer", torch.optim.SGD([weight], lr=0.01))
    optimizer.zero_grad(set_to_none=False)
    loss = (q @ weight).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def layer_adam_step(s, q, k, v, lens, score):
    weight = s.table.setdefault("weight", nn.Parameter(s.w.clone()))
    optimizer = s.table.setdefault("optimizer", torch.optim.Adam([weight], lr=0.01))
    optimizer.zero_grad()
    loss = (q @ weight).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def layer_adam_step_capturable(s, q, k, v, lens, score):
    weight = s.table.setdefault("weight", nn.Parameter(s.w.clone()))
    optimizer = s.table.setdefault("optimizer", torch.optim.AdamW([weight], lr=0.01, capturable=True))
    optimizer.zero_grad()
    loss = (q @ weight).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


CASES |= collected(globals())
