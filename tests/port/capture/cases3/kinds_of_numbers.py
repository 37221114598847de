"""Graph-capture cases, third set: number types, linear algebra and reductions whose CUDA kernels differ from the rest."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


class State(setting.State):
    def __init__(self, dev):
        super().__init__(dev)
        torch.manual_seed(5)
        self.spd = torch.eye(D, device=dev) * 50 + self.w @ self.w.T
        self.one = torch.ones((), device=dev)
        self.w8 = (torch.randn(D, D) * 10).to(torch.int8).to(dev)
        self.f8 = torch.randn(D, D).to(torch.float8_e4m3fn).to(dev)


def number_scaled_mm(s, q, k, v, lens, score):
    x = k[0, 0].to(torch.float8_e4m3fn)
    return torch._scaled_mm(x, s.f8.t(), scale_a=s.one, scale_b=s.one, out_dtype=torch.bfloat16)


def number_scaled_mm_rowwise(s, q, k, v, lens, score):
    top = k[0, 0].abs().amax(-1, keepdim=True) / 448
    x = (k[0, 0] / top).to(torch.float8_e4m3fn)
    return torch._scaled_mm(
        x, s.f8.t(), scale_a=top, scale_b=torch.ones(1, D, device=q.device), out_dtype=torch.bfloat16
    )


def number_scaled_mm_scale_made_inside(s, q, k, v, lens, score):
    x = k[0, 0].to(torch.float8_e4m3fn)
    unit = torch.tensor(1.0, device=q.device)
    return torch._scaled_mm(x, s.f8.t(), scale_a=unit, scale_b=unit, out_dtype=torch.bfloat16)


def number_fp8_round_trip(s, q, k, v, lens, score):
    return k.to(torch.float8_e5m2).to(torch.float16) + k.to(torch.float8_e4m3fn).half()


case("number_int_mm", lambda s, q, k, v, lens, score: torch._int_mm((k[0, 0] * 10).to(torch.int8), s.w8))


def number_bfloat16_ops(s, q, k, v, lens, score):
    x = k.bfloat16()
    return torch.softmax(x @ x.transpose(-1, -2), -1).cumsum(-1) + x.std() + x.var(-1, keepdim=True)


def number_complex_rotation(s, q, k, v, lens, score):
    pairs = torch.view_as_complex(k.reshape(*k.shape[:-1], D // 2, 2))
    turn = torch.polar(torch.ones_like(score), score)
    return torch.view_as_real(pairs * turn[:, None, :, None]).flatten(-2)


def number_complex_reductions(s, q, k, v, lens, score):
    z = torch.complex(score, score * 2)
    return z.abs().sum() + z.angle().mean() + (z * z.conj()).real.sum() + z.sum().imag


case("number_double", lambda s, q, k, v, lens, score: (k.double() @ v.double().transpose(-1, -2)).float())


def number_uint8_bits(s, q, k, v, lens, score):
    packed = (score * 100).to(torch.uint8)
    return (packed >> 4) * 16 + (packed & 15) + (packed ^ 3)


def number_bool_sums(s, q, k, v, lens, score):
    hit = score > 0
    return hit.sum(-1) + hit.any(-1) + hit.all(-1) + hit.float().mean(-1) + torch.count_nonzero(hit, dim=-1)


case("number_count_nonzero_all", lambda s, q, k, v, lens, score: q * torch.count_nonzero(score))


def number_frexp_ldexp(s, q, k, v, lens, score):
    m, e = torch.frexp(score)
    return torch.ldexp(m, e) + torch.nextafter(score, score + 1) + torch.copysign(score, -score)


def number_integer_division(s, q, k, v, lens, score):
    return (
        torch.div(lens, 3, rounding_mode="floor")
        + lens % 5
        + lens // 2
        + torch.remainder(lens, 4)
        + torch.gcd(lens, lens * 2)
    )


case("algebra_inv_ex", lambda s, q, k, v, lens, score: torch.linalg.inv_ex(s.spd + score[0, 0].abs())[0])
case("algebra_inv", lambda s, q, k, v, lens, score: torch.linalg.inv(s.spd + score[0, 0].abs()))
case("algebra_cholesky_ex", lambda s, q, k, v, lens, score: torch.linalg.cholesky_ex(s.spd + score[0, 0].abs())[0])
case("algebra_solve_ex", lambda s, q, k, v, lens, score: torch.linalg.solve_ex(s.spd, q[0, 0, 0])[0])
case("algebra_lu_factor_ex", lambda s, q, k, v, lens, score: torch.linalg.lu_factor_ex(s.spd + score[0, 0])[0])


def algebra_lu_solve(s, q, k, v, lens, score):
    factor, pivots, _ = torch.linalg.lu_factor_ex(s.spd)
    return torch.linalg.lu_solve(factor, pivots, k[0, 0].T)


case("algebra_qr", lambda s, q, k, v, lens, score: torch.linalg.qr(k[0, 0])[1])
case("algebra_eigh", lambda s, q, k, v, lens, score: torch.linalg.eigh(s.spd)[0])
case("algebra_eigvalsh", lambda s, q, k, v, lens, score: torch.linalg.eigvalsh(s.spd) + score[0, 0])
case("algebra_svdvals", lambda s, q, k, v, lens, score: torch.linalg.svdvals(k[0, 0]))
case("algebra_rank", lambda s, q, k, v, lens, score: q * torch.linalg.matrix_rank(k[0, 0]))
case("algebra_det", lambda s, q, k, v, lens, score: torch.linalg.det(k[:, 0, :8, :8]) + torch.logdet(s.spd))
case("algebra_cond", lambda s, q, k, v, lens, score: torch.linalg.cond(s.spd + score[0, 0].abs()))
case("algebra_cond_one", lambda s, q, k, v, lens, score: torch.linalg.cond(s.spd + score[0, 0].abs(), 1))


def algebra_norms(s, q, k, v, lens, score):
    return torch.linalg.vector_norm(k, dim=-1).sum() + torch.linalg.matrix_norm(k).sum() + k.norm(p=1)


case("algebra_matrix_two_norm", lambda s, q, k, v, lens, score: torch.linalg.matrix_norm(k[0, 0], 2))


def algebra_triangular(s, q, k, v, lens, score):
    return torch.linalg.solve_triangular(s.spd.tril(), k[0, 0].T, upper=False)


def algebra_cholesky_solve(s, q, k, v, lens, score):
    return torch.cholesky_solve(k[0, 0].T, torch.linalg.cholesky_ex(s.spd)[0])


def algebra_orthogonal(s, q, k, v, lens, score):
    factors, tau = torch.geqrf(k[0, 0])
    return torch.linalg.householder_product(factors, tau)


def algebra_multi_dot(s, q, k, v, lens, score):
    return torch.linalg.multi_dot([k[0, 0], s.w, s.w]) + torch.chain_matmul(k[0, 0], s.w)


case("algebra_ldl", lambda s, q, k, v, lens, score: torch.linalg.ldl_factor_ex(s.spd)[0])


def algebra_kron_and_trace(s, q, k, v, lens, score):
    return (
        torch.kron(s.w[:2, :2], s.w[:3, :3]).trace()
        + torch.linalg.diagonal(k).sum()
        + torch.cross(k[0, 0, :, :3], v[0, 0, :, :3], -1).sum()
    )


case("reduced_quantile", lambda s, q, k, v, lens, score: torch.quantile(score, 0.9, dim=-1))


def reduced_quantile_list(s, q, k, v, lens, score):
    return torch.quantile(score, torch.tensor([0.1, 0.9], device=q.device), dim=-1)


case("reduced_nanquantile", lambda s, q, k, v, lens, score: torch.nanquantile(score, 0.5))
case("reduced_histogram", lambda s, q, k, v, lens, score: torch.histc(score, 10, -3, 3))
case("reduced_histogram_free_range", lambda s, q, k, v, lens, score: torch.histc(score, 10))
case("reduced_bincount_minlength", lambda s, q, k, v, lens, score: torch.bincount(lens, minlength=S))
case("reduced_unique", lambda s, q, k, v, lens, score: q * torch.unique(lens).numel())


def reduced_topk_sort(s, q, k, v, lens, score):
    values, where = score.topk(8)
    return values + score.sort(-1)[0][:, :8] + score.argsort(-1)[:, :8] + where + score.msort()[:, :8]


case("reduced_sort_long", lambda s, q, k, v, lens, score: k.flatten().sort()[0] + k.flatten().argsort(stable=True))


def reduced_median_and_mode(s, q, k, v, lens, score):
    return score.median(-1)[0] + score.mode(-1)[0] + score.nanmedian() + score.kthvalue(3)[0]


def reduced_cumulative(s, q, k, v, lens, score):
    return (
        score.cumprod(-1)
        + score.cummax(-1)[0]
        + score.cummin(-1)[0]
        + score.logcumsumexp(-1)
        + score.diff(prepend=score[:, :1])
    )


case("reduced_argwhere", lambda s, q, k, v, lens, score: q + torch.argwhere(score > 0).sum())
case("reduced_where_one_argument", lambda s, q, k, v, lens, score: q + torch.where(score > 0)[0].sum())
case("reduced_nonzero_static", lambda s, q, k, v, lens, score: q + torch.nonzero_static(score > 0, size=10).sum())
case("reduced_masked_select", lambda s, q, k, v, lens, score: q + score.masked_select(score > 0).sum())
case("reduced_masked_scatter", lambda s, q, k, v, lens, score: score.masked_scatter(score > 0, score.abs()))


def reduced_take_put(s, q, k, v, lens, score):
    return score.take(lens) + score.put(lens, lens.float()).sum() + score.take_along_dim(lens.view(B, 1), 1).sum()


def reduced_scatter_reduce(s, q, k, v, lens, score):
    return score.scatter_reduce(1, lens.view(B, 1), score[:, :1], "amax") + score.index_reduce(
        1, lens, score[:, :2], "mean"
    )


def reduced_index_copy(s, q, k, v, lens, score):
    return score.index_copy(1, lens, score[:, :2]) + score.index_add(1, lens, score[:, :2], alpha=2)


def reduced_bucketize(s, q, k, v, lens, score):
    edges = torch.linspace(-2, 2, 9, device=q.device)
    return torch.bucketize(score, edges) + torch.searchsorted(edges, score, right=True) + torch.bucketize(0.3, edges)


case("reduced_multinomial", lambda s, q, k, v, lens, score: torch.multinomial(score.softmax(-1), 1).shape[0] * q)


def reduced_multinomial_many(s, q, k, v, lens, score):
    return torch.multinomial(score.softmax(-1), 4, replacement=True).shape[1] * q


def reduced_distribution(s, q, k, v, lens, score):
    chosen = torch.distributions.Categorical(logits=score)
    return chosen.log_prob(lens) + chosen.entropy()


def reduced_distribution_unchecked(s, q, k, v, lens, score):
    chosen = torch.distributions.Categorical(logits=score, validate_args=False)
    return chosen.log_prob(lens) + chosen.entropy()


case("reduced_randperm", lambda s, q, k, v, lens, score: q * torch.randperm(8, device=q.device).shape[0])
case("reduced_bernoulli", lambda s, q, k, v, lens, score: q * torch.bernoulli(score.sigmoid()).shape[0])


def reduced_fft(s, q, k, v, lens, score):
    return torch.fft.irfft(torch.fft.rfft(score) * 2) + torch.fft.fftshift(score)


def reduced_stft(s, q, k, v, lens, score):
    window = torch.hann_window(16, device=q.device)
    return torch.stft(score, 16, window=window, return_complex=True).abs()


def reduced_istft(s, q, k, v, lens, score):
    window = torch.hann_window(16, device=q.device)
    return torch.istft(torch.stft(score, 16, window=window, return_complex=True), 16, window=window)


CASES |= collected(globals())
