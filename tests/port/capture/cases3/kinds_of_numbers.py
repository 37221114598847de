"""Graph-capture cases, third set: number types, linear algebra and reductions whose CUDA kernels differ from the rest."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


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


def number_complex_rotation(s, q, k, v, lens, score):
    pairs = torch.view_as_complex(k.reshape(*k.shape[:-1], D // 2, 2))
    turn = torch.polar(torch.ones_like(score), score)
    return torch.view_as_real(pairs * turn[:, None, :, None]).flatten(-2)


def number_complex_reductions(s, q, k, v, lens, score):
    z = torch.complex(score, score * 2)
    return z.abs().sum() + z.angle().mean() + (z * z.conj()).real.sum() + z.sum().imag


def number_bool_sums(s, q, k, v, lens, score):
    hit = score > 0
    return hit.sum(-1) + hit.any(-1) + hit.all(-1) + hit.float().mean(-1) + torch.count_nonzero(hit, dim=-1)


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


def algebra_kron_and_trace(s, q, k, v, lens, score):
    return (
        torch.kron(s.w[:2, :2], s.w[:3, :3]).trace()
        + torch.linalg.diagonal(k).sum()
        + torch.cross(k[0, 0, :, :3], v[0, 0, :, :3], -1).sum()
    )


def reduced_topk_sort(s, q, k, v, lens, score):
    values, where = score.topk(8)
    return values + score.sort(-1)[0][:, :8] + score.argsort(-1)[:, :8] + where + score.msort()[:, :8]


def reduced_cumulative(s, q, k, v, lens, score):
    return (
        score.cumprod(-1)
        + score.cummax(-1)[0]
        + score.cummin(-1)[0]
        + score.logcumsumexp(-1)
        + score.diff(prepend=score[:, :1])
    )


def reduced_scatter_reduce(s, q, k, v, lens, score):
    return score.scatter_reduce(1, lens.view(B, 1), score[:, :1], "amax") + score.index_reduce(
        1, lens, score[:, :2], "mean"
    )


def reduced_bucketize(s, q, k, v, lens, score):
    edges = torch.linspace(-2, 2, 9, device=q.device)
    return torch.bucketize(score, edges) + torch.searchsorted(edges, score, right=True) + torch.bucketize(0.3, edges)


def reduced_distribution_unchecked(s, q, k, v, lens, score):
    chosen = torch.distributions.Categorical(logits=score, validate_args=False)
    return chosen.log_prob(lens) + chosen.entropy()


def reduced_istft(s, q, k, v, lens, score):
    window = torch.hann_window(16, device=q.device)
    return torch.istft(torch.stft(score, 16, window=window, return_complex=True), 16, window=window)


CASES |= collected(globals())
