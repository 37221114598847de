"""Graph-capture cases, fourth set: in inference mode, where PyTorch hands composed operations on whole."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from tests.port.capture.cases.setting import D, inputs, registry
from tests.port.capture.cases4.set_aside import State

__all__ = ["CASES", "State", "inputs"]
CASES, plain = registry()


def case(function):
    return plain(torch.inference_mode()(function))


case("inference_upload", lambda s, q, k, v, lens, score: q + s.host_row.to(q.device).sum())
case("inference_upload_number", lambda s, q, k, v, lens, score: q + torch.tensor(0.5).to(q.device))
case("inference_upload_number_as_tensor", lambda s, q, k, v, lens, score: q * torch.as_tensor(0.5, device=q.device))
case("inference_upload_pinned", lambda s, q, k, v, lens, score: q + s.pinned.to(q.device, non_blocking=True).sum())
case("inference_upload_module", lambda s, q, k, v, lens, score: torch.nn.LayerNorm(D).cuda()(q))
case("inference_upload_of_a_list_index", lambda s, q, k, v, lens, score: score[:, [0, 2]])
case("inference_inv", lambda s, q, k, v, lens, score: torch.linalg.inv(s.spd))
case("inference_inv_of_double", lambda s, q, k, v, lens, score: torch.linalg.inv(s.spd.double()))
case("inference_inv_ex", lambda s, q, k, v, lens, score: torch.linalg.inv_ex(s.spd.double()).inverse)
case("inference_inv_ex_checked", lambda s, q, k, v, lens, score: torch.linalg.inv_ex(s.spd, check_errors=True).inverse)
case("inference_solve", lambda s, q, k, v, lens, score: torch.linalg.solve(s.spd, s.w))


@case
def inference_counter_against_mask(s, q, k, v, lens, score):
    s.calls += 1
    return torch.where(score > s.calls * 0.1, score, 0.0)


@case
def inference_counter_on_device(s, q, k, v, lens, score):
    s.step.add_(1)
    return torch.where(score > s.step * 0.1, score, float("-inf"))


case("inference_one_hot_unsized", lambda s, q, k, v, lens, score: F.one_hot(lens))
case("inference_one_hot_sized", lambda s, q, k, v, lens, score: F.one_hot(lens, 64))
case("inference_allclose", lambda s, q, k, v, lens, score: q * (2 if torch.allclose(k, v) else 3))


@case
def inference_multi_head(s, q, k, v, lens, score):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(1, 64, dtype=torch.bool, device=q.device))


case("inference_to_host_list", lambda s, q, k, v, lens, score: q * max(lens.tolist()))
case("inference_half_precision", lambda s, q, k, v, lens, score: (q.half() @ s.w.to(q.device, torch.float16)).float())


@case
def inference_spectrum_and_back(s, q, k, v, lens, score):
    window = torch.hann_window(16, device=q.device)
    return torch.istft(torch.stft(score, 16, window=window, return_complex=True), 16, window=window)
