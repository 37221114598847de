"""Graph-capture cases, fourth set: in inference mode, where PyTorch hands composed operations on whole."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from tests.port.capture.cases.setting import D, inputs, registry
from tests.port.capture.cases4.set_aside import State

__all__ = ["CASES", "State", "inputs"]
CASES, plain = registry(globals())


def case(function):
    return plain(torch.inference_mode()(function))


@case
def inference_upload(s, q, k, v, lens, score):
    return q + s.host_row.to(q.device).sum()


@case
def inference_upload_number(s, q, k, v, lens, score):
    return q + torch.tensor(0.5).to(q.device)


@case
def inference_upload_number_as_tensor(s, q, k, v, lens, score):
    return q * torch.as_tensor(0.5, device=q.device)


@case
def inference_upload_pinned(s, q, k, v, lens, score):
    return q + s.pinned.to(q.device, non_blocking=True).sum()


@case
def inference_upload_module(s, q, k, v, lens, score):
    return torch.nn.LayerNorm(D).cuda()(q)


@case
def inference_upload_of_a_list_index(s, q, k, v, lens, score):
    return score[:, [0, 2]]


@case
def inference_inv(s, q, k, v, lens, score):
    return torch.linalg.inv(s.spd)


@case
def inference_inv_of_double(s, q, k, v, lens, score):
    return torch.linalg.inv(s.spd.double())


@case
def inference_inv_ex(s, q, k, v, lens, score):
    return torch.linalg.inv_ex(s.spd.double()).inverse


@case
def inference_inv_ex_checked(s, q, k, v, lens, score):
    return torch.linalg.inv_ex(s.spd, check_errors=True).inverse


@case
def inference_solve(s, q, k, v, lens, score):
    return torch.linalg.solve(s.spd, s.w)


@case
def inference_counter_against_mask(s, q, k, v, lens, score):
    s.calls += 1
    return torch.where(score > s.calls * 0.1, score, 0.0)


@case
def inference_counter_on_device(s, q, k, v, lens, score):
    s.step.add_(1)
    return torch.where(score > s.step * 0.1, score, float("-inf"))


@case
def inference_one_hot_unsized(s, q, k, v, lens, score):
    return F.one_hot(lens)


@case
def inference_one_hot_sized(s, q, k, v, lens, score):
    return F.one_hot(lens, 64)


@case
def inference_allclose(s, q, k, v, lens, score):
    return q * (2 if torch.allclose(k, v) else 3)


@case
def inference_multi_head(s, q, k, v, lens, score):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(1, 64, dtype=torch.bool, device=q.device))


@case
def inference_to_host_list(s, q, k, v, lens, score):
    return q * max(lens.tolist())


@case
def inference_half_precision(s, q, k, v, lens, score):
    return (q.half() @ s.w.to(q.device, torch.float16)).float()


@case
def inference_spectrum_and_back(s, q, k, v, lens, score):
    window = torch.hann_window(16, device=q.device)
    return torch.istft(torch.stft(score, 16, window=window, return_complex=True), 16, window=window)
