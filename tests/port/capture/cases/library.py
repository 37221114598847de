"""Graph-capture cases: library calls that may sync inside: linear algebra, sorting, FFT, losses, recurrent cells."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases.setting import B, D, H, S, State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


def positive(x):
    """A positive definite matrix that follows the input."""
    row = x[0, 0]
    return row.transpose(-1, -2) @ row / S + torch.eye(D, device=x.device)


def sdpa_math_backend(s, q, k, v, lens, score):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


def ctc_loss_device_lengths(s, q, k, v, lens, score):
    logits = k[:, 0].transpose(0, 1).log_softmax(-1)
    targets = (lens.view(B, 1) % 7 + 1).expand(B, 4)
    return q * F.ctc_loss(logits, targets, torch.full_like(lens, S), torch.full_like(lens, 4))


def gru_layer(s, q, k, v, lens, score):
    if s.cache is None:
        torch.manual_seed(0)
        s.cache = torch.nn.GRU(D, D, batch_first=True).to(q.device)
    with torch.no_grad():
        return s.cache(k[:, 0])[0]


def lstm_packed(s, q, k, v, lens, score):
    if s.cache is None:
        torch.manual_seed(0)
        s.cache = torch.nn.LSTM(D, D, batch_first=True).to(q.device)
    packed = torch.nn.utils.rnn.pack_padded_sequence(k[:, 0], lens.cpu(), batch_first=True, enforce_sorted=False)
    with torch.no_grad():
        return q * s.cache(packed)[0].data.sum()


def pack_host_lengths(s, q, k, v, lens, score):
    lengths = torch.tensor([64, 32])
    return torch.nn.utils.rnn.pack_padded_sequence(k[:, 0], lengths, batch_first=True).data * 2


def bmm_out(s, q, k, v, lens, score):
    out = torch.empty(B * H, 1, S, device=q.device)
    torch.bmm(q.view(B * H, 1, D), k.view(B * H, S, D).transpose(1, 2), out=out)
    return out


def baddbmm_scaled(s, q, k, v, lens, score):
    base = torch.zeros(B * H, 1, S, device=q.device)
    return torch.baddbmm(base, q.view(B * H, 1, D), k.view(B * H, S, D).transpose(1, 2), beta=0, alpha=0.1)


def int_matmul_emulated(s, q, k, v, lens, score):
    scale = k.abs().amax(-1, keepdim=True) / 127
    return torch.round(k / scale).clamp(-128, 127).to(torch.int8).float() @ s.w * scale


def fake_quantise_device_scale(s, q, k, v, lens, score):
    scale, zero = score.abs().amax().view(1)[0] / 127, torch.zeros((), dtype=torch.int32, device=q.device)
    return torch.fake_quantize_per_tensor_affine(q, scale, zero, -128, 127)


def backward_into_kept_grad(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.ones(D, device=q.device, requires_grad=True)
    (q * s.cache).sum().backward()
    return s.cache.grad * 1


def checkpointed(s, q, k, v, lens, score):
    x = q.detach().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(lambda t: (t @ s.w).tanh(), x, use_reentrant=False)
    return torch.autograd.grad(y.sum(), x)[0]


def checkpointed_without_rng(s, q, k, v, lens, score):
    x = q.detach().requires_grad_()
    y = torch.utils.checkpoint.checkpoint(lambda t: (t @ s.w).tanh(), x, use_reentrant=False, preserve_rng_state=False)
    return torch.autograd.grad(y.sum(), x)[0]


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, grad):
        return grad


def no_grad_scope(s, q, k, v, lens, score):
    with torch.no_grad():
        return q @ s.w


def inference_mode_scope(s, q, k, v, lens, score):
    with torch.inference_mode():
        return (q @ s.w) * 2


def autocast_scope(s, q, k, v, lens, score):
    with torch.autocast(q.device.type, torch.bfloat16):
        return (q @ s.w).float()


def clip_grad_norm(s, q, k, v, lens, score):
    x = q.detach().clone().requires_grad_()
    (x**2).sum().backward()
    torch.nn.utils.clip_grad_norm_([x], 1.0)
    return x.grad * 1


def clip_grad_norm_error_check(s, q, k, v, lens, score):
    x = q.detach().clone().requires_grad_()
    (x**2).sum().backward()
    torch.nn.utils.clip_grad_norm_([x], 1.0, error_if_nonfinite=True)
    return x.grad * 1


def histogram_by_buckets(s, q, k, v, lens, score):
    edges = torch.linspace(-3, 3, 9, device=q.device)
    bucket = torch.bucketize(score, edges)
    return (
        q
        * (
            torch.zeros(10, device=q.device).scatter_add_(0, bucket.flatten(), torch.ones(B * S, device=q.device)) ** 2
        ).sum()
    )


def multi_head_attention_module(s, q, k, v, lens, score):
    if s.cache is None:
        torch.manual_seed(0)
        s.cache = torch.nn.MultiheadAttention(D, 4, batch_first=True).to(q.device).eval()
    with torch.no_grad():
        return s.cache(q[:, 0], k[:, 0], v[:, 0])[0]


def encoder_layer_padding_mask(s, q, k, v, lens, score):
    if s.cache is None:
        torch.manual_seed(0)
        s.cache = torch.nn.TransformerEncoderLayer(D, 4, 64, batch_first=True).to(q.device).eval()
    pad = torch.arange(S, device=q.device) >= lens.view(B, 1)
    with torch.no_grad():
        return s.cache(k[:, 0], src_key_padding_mask=pad).sum(-1)


def encoder_layer_plain(s, q, k, v, lens, score):
    if s.cache is None:
        torch.manual_seed(0)
        s.cache = torch.nn.TransformerEncoderLayer(D, 4, 64, batch_first=True).to(q.device).eval()
    with torch.no_grad():
        return s.cache(k[:, 0])


def module_built_inside(s, q, k, v, lens, score):
    layer = torch.nn.Linear(D, D, device=q.device)
    torch.nn.init.eye_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    return layer(q).detach()


def load_state_dict_inside(s, q, k, v, lens, score):
    layer = torch.nn.Linear(D, D, bias=False, device=q.device)
    layer.load_state_dict({"weight": s.w})
    return layer(q).detach()


def complex_rope(s, q, k, v, lens, score):
    angle = lens.view(B, 1, 1, 1) * torch.linspace(0, 1, D // 2, device=q.device)
    turned = torch.view_as_complex(q.view(B, H, 1, D // 2, 2)) * torch.polar(torch.ones_like(angle), angle)
    return torch.view_as_real(turned).flatten(-2)


CASES |= collected(globals())
