"""Graph-capture cases: library calls that may sync inside: linear algebra, sorting, FFT, losses, recurrent cells."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases.setting import B, D, H, S, State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


def positive(x):
    """A positive definite matrix that follows the input."""
    row = x[0, 0]
    return row.transpose(-1, -2) @ row / S + torch.eye(D, device=x.device)


case("linalg_inv", lambda s, q, k, v, lens, score: q @ torch.linalg.inv(positive(k)))
case("linalg_inv_ex", lambda s, q, k, v, lens, score: q @ torch.linalg.inv_ex(positive(k)).inverse)
case("linalg_solve", lambda s, q, k, v, lens, score: torch.linalg.solve(positive(k), k[0, 0].t()))
case("linalg_solve_ex", lambda s, q, k, v, lens, score: torch.linalg.solve_ex(positive(k), k[0, 0].t()).result)
case("linalg_cholesky", lambda s, q, k, v, lens, score: torch.linalg.cholesky(positive(k)))
case("linalg_cholesky_ex", lambda s, q, k, v, lens, score: torch.linalg.cholesky_ex(positive(k)).L)


def linalg_qr(s, q, k, v, lens, score):
    a, b = torch.linalg.qr(k[0, 0])
    return a @ b


case("linalg_svdvals", lambda s, q, k, v, lens, score: torch.linalg.svdvals(k[0, 0]))
case("linalg_eigvalsh", lambda s, q, k, v, lens, score: torch.linalg.eigvalsh(positive(k)))
case("linalg_det", lambda s, q, k, v, lens, score: torch.linalg.det(positive(k)))
case("linalg_slogdet", lambda s, q, k, v, lens, score: torch.linalg.slogdet(positive(k)).logabsdet)


def linalg_norms(s, q, k, v, lens, score):
    return torch.linalg.vector_norm(k, dim=-1) + torch.linalg.matrix_norm(k)[..., None]


case("linalg_matrix_power", lambda s, q, k, v, lens, score: torch.linalg.matrix_power(positive(k) / D, 3))


def linalg_solve_triangular(s, q, k, v, lens, score):
    return torch.linalg.solve_triangular(positive(k).tril(), k[0, 0].t(), upper=False)


case("linalg_lstsq", lambda s, q, k, v, lens, score: torch.linalg.lstsq(k[0, 0], v[0, 0]).solution)


def linalg_lu(s, q, k, v, lens, score):
    p, lower, upper = torch.linalg.lu(positive(k))
    return p @ lower @ upper


case("matrix_exp", lambda s, q, k, v, lens, score: torch.linalg.matrix_exp(positive(k) / D))
case("fft_of_rows", lambda s, q, k, v, lens, score: torch.fft.rfft(score).abs())


def fft_convolution(s, q, k, v, lens, score):
    return torch.fft.irfft(torch.fft.rfft(score) * torch.fft.rfft(score.flip(-1)))


case("sort_stable", lambda s, q, k, v, lens, score: torch.sort(score, dim=-1, stable=True).values)
case("sort_large_flat", lambda s, q, k, v, lens, score: k.flatten().sort().values[:100])
case("argsort_descending", lambda s, q, k, v, lens, score: score.argsort(-1, descending=True))
case("topk_values", lambda s, q, k, v, lens, score: score.topk(8).values)
case("topk_large", lambda s, q, k, v, lens, score: k.flatten().topk(2000).values)
case("kthvalue_of_rows", lambda s, q, k, v, lens, score: score.kthvalue(5, -1).values)
case("median_of_rows", lambda s, q, k, v, lens, score: score.median(-1).values)
case("median_of_all", lambda s, q, k, v, lens, score: q * score.median())
case("nanmedian_of_all", lambda s, q, k, v, lens, score: q * score.nanmedian())
case("quantile_number", lambda s, q, k, v, lens, score: torch.quantile(score, 0.5, dim=-1))


def quantile_device_tensor(s, q, k, v, lens, score):
    return torch.quantile(score, torch.full((1,), 0.5, device=q.device), dim=-1)


case("mode_of_rows", lambda s, q, k, v, lens, score: (score * 2).round().mode(-1).values)
case("cummax_of_rows", lambda s, q, k, v, lens, score: score.cummax(-1).values)
case("logcumsumexp_of_rows", lambda s, q, k, v, lens, score: score.logcumsumexp(-1))


def aminmax_of_all(s, q, k, v, lens, score):
    low, high = torch.aminmax(score)
    return (q - low) / (high - low)


def std_var_mean(s, q, k, v, lens, score):
    var, mean = torch.var_mean(score, -1)
    return var + mean + score.std(-1)


def conv1d_causal(s, q, k, v, lens, score):
    weight = s.w[:4, :4].reshape(4, 1, 4)
    return F.conv1d(F.pad(score.view(B, 4, 16), (3, 0)), weight, groups=4)


case("conv2d_patch", lambda s, q, k, v, lens, score: F.conv2d(k, s.w.reshape(8, 4, 4, 8)[:, :, :, :4], stride=4))


def interpolate_positions(s, q, k, v, lens, score):
    return F.interpolate(score[:, None], scale_factor=2.0, mode="linear")


case("sdpa_plain", lambda s, q, k, v, lens, score: F.scaled_dot_product_attention(q, k, v))
case("sdpa_causal", lambda s, q, k, v, lens, score: F.scaled_dot_product_attention(k, k, v, is_causal=True))


def sdpa_float_mask(s, q, k, v, lens, score):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=score.view(B, 1, 1, S))


def sdpa_half(s, q, k, v, lens, score):
    return F.scaled_dot_product_attention(k.half(), k.half(), v.half(), is_causal=True)


case("sdpa_gqa", lambda s, q, k, v, lens, score: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True))


def sdpa_math_backend(s, q, k, v, lens, score):
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return F.scaled_dot_product_attention(q, k, v)


case("cross_entropy_plain", lambda s, q, k, v, lens, score: q * F.cross_entropy(score, lens))
case("cross_entropy_ignore_index", lambda s, q, k, v, lens, score: q * F.cross_entropy(score, lens, ignore_index=24))


def kl_divergence(s, q, k, v, lens, score):
    return q * F.kl_div(score.log_softmax(-1), score.flip(-1).softmax(-1), reduction="batchmean")


def ctc_loss_device_lengths(s, q, k, v, lens, score):
    logits = k[:, 0].transpose(0, 1).log_softmax(-1)
    targets = (lens.view(B, 1) % 7 + 1).expand(B, 4)
    return q * F.ctc_loss(logits, targets, torch.full_like(lens, S), torch.full_like(lens, 4))


case("embedding_lookup", lambda s, q, k, v, lens, score: F.embedding(lens, s.emb))
case("embedding_max_norm", lambda s, q, k, v, lens, score: F.embedding(lens, s.emb, max_norm=1.0))


def embedding_bag_offsets(s, q, k, v, lens, score):
    return F.embedding_bag(lens.repeat(4), s.emb, torch.arange(0, 8, 4, device=q.device))


def embedding_bag_two_dim(s, q, k, v, lens, score):
    return F.embedding_bag(lens.view(B, 1).repeat(1, 3), s.emb, mode="mean")


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


case("addmm_bias", lambda s, q, k, v, lens, score: torch.addmm(s.emb[0], k[0, 0], s.w))
case("einsum_attention", lambda s, q, k, v, lens, score: torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1))
case("tensordot_heads", lambda s, q, k, v, lens, score: torch.tensordot(q, s.w, dims=1))
case("half_matmul", lambda s, q, k, v, lens, score: (k.bfloat16() @ s.w.bfloat16()).float())


def int_matmul_emulated(s, q, k, v, lens, score):
    scale = k.abs().amax(-1, keepdim=True) / 127
    return torch.round(k / scale).clamp(-128, 127).to(torch.int8).float() @ s.w * scale


def fp8_quantise_dynamic(s, q, k, v, lens, score):
    scale = k.abs().amax() / 448
    return (k / scale).to(torch.float8_e4m3fn).float() * scale


def fp8_quantise_item_scale(s, q, k, v, lens, score):
    scale = (k.abs().amax() / 448).item()
    return (k / scale).to(torch.float8_e4m3fn).float() * scale


def fake_quantise_device_scale(s, q, k, v, lens, score):
    scale, zero = score.abs().amax().view(1)[0] / 127, torch.zeros((), dtype=torch.int32, device=q.device)
    return torch.fake_quantize_per_tensor_affine(q, scale, zero, -128, 127)


def quantize_per_tensor_number(s, q, k, v, lens, score):
    return torch.fake_quantize_per_tensor_affine(q, 0.1, 0, -128, 127)


case("cdist_rows", lambda s, q, k, v, lens, score: torch.cdist(q[:, :, 0], k[:, 0, :8]))
case("vander_and_polyval", lambda s, q, k, v, lens, score: torch.vander(score[0, :4], N=3))
case("trapezoid_rule", lambda s, q, k, v, lens, score: torch.trapezoid(score, dx=0.5))


def grid_sample_rows(s, q, k, v, lens, score):
    grid = k[:, :1, :8, :2].reshape(B, 1, 8, 2).tanh()
    return F.grid_sample(k, grid, align_corners=False)


def backward_inside(s, q, k, v, lens, score):
    x = q.detach().clone().requires_grad_()
    ((x @ s.w) ** 2).sum().backward()
    return x.grad


def autograd_grad_inside(s, q, k, v, lens, score):
    x = q.detach().requires_grad_()
    return torch.autograd.grad((x.tanh() @ s.w).sum(), x)[0]


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


case("custom_function", lambda s, q, k, v, lens, score: Straight.apply(q) * 2)


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


def foreach_ops(s, q, k, v, lens, score):
    a, b = torch._foreach_mul([q, score], 2.0)
    return a * b.sum()


case("vmap_rows", lambda s, q, k, v, lens, score: torch.vmap(lambda row: row.softmax(-1))(score))
case("corrcoef_rows", lambda s, q, k, v, lens, score: torch.corrcoef(score))
case("cov_rows", lambda s, q, k, v, lens, score: torch.cov(score[:, :8]))


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


def module_moved_inside(s, q, k, v, lens, score):
    layer = torch.nn.LayerNorm(D).to(q.device)
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
