"""Graph-capture cases: copies between host and device, pinned and pageable, and host scalars as operands."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import copy

import torch
from tests.port.capture.cases.setting import B, State, collected, inputs, registry, seeded

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


def pinned_non_blocking(s, q, k, v, lens, score):
    s.buf.copy_(s.pinned, non_blocking=True)
    return q + s.buf.sum()


def pageable_copy(s, q, k, v, lens, score):
    s.buf.copy_(s.host_row)
    return q + s.buf.sum()


def pageable_copy_non_blocking(s, q, k, v, lens, score):
    s.buf.copy_(s.host_row, non_blocking=True)
    return q + s.buf.sum()


case("pinned_to_device", lambda s, q, k, v, lens, score: q + s.pinned.to(q.device).sum())


def pinned_to_device_non_blocking(s, q, k, v, lens, score):
    return q + s.pinned.to(q.device, non_blocking=True).sum()


def pinned_slice_non_blocking(s, q, k, v, lens, score):
    return q + s.pinned[2:6].to(q.device, non_blocking=True).sum()


def pinned_view_non_blocking(s, q, k, v, lens, score):
    return q + s.pinned.view(2, 4).to(q.device, non_blocking=True).sum()


def pinned_strided_non_blocking(s, q, k, v, lens, score):
    s.buf[:4].copy_(s.pinned[::2], non_blocking=True)
    return q + s.buf.sum()


def pinned_cast_non_blocking(s, q, k, v, lens, score):
    half = s.pinned.to(q.device, torch.float16, non_blocking=True)
    return q + half.sum()


def pinned_clone_is_pageable(s, q, k, v, lens, score):
    return q + s.pinned.clone().to(q.device, non_blocking=True).sum()


def pinned_arithmetic_is_pageable(s, q, k, v, lens, score):
    return q + (s.pinned * 2).to(q.device, non_blocking=True).sum()


def device_to_pinned_non_blocking(s, q, k, v, lens, score):
    s.pinned_out.copy_(score[0, :8], non_blocking=True)
    return q * 2


def device_to_pinned_blocking(s, q, k, v, lens, score):
    s.pinned_out.copy_(score[0, :8])
    return q * 2


def device_to_pageable(s, q, k, v, lens, score):
    s.host_row.copy_(score[0, :8])
    return q * 2


def device_to_pinned_and_read(s, q, k, v, lens, score):
    s.pinned_out.copy_(score[0, :8], non_blocking=True)
    return q * float(s.pinned_out[0])


def pin_memory_inside(s, q, k, v, lens, score):
    return q + torch.ones(8).pin_memory().to(q.device, non_blocking=True).sum()


def empty_pinned_inside(s, q, k, v, lens, score):
    host = torch.zeros(8, pin_memory=True)
    return q + host.to(q.device, non_blocking=True).sum()


case("is_pinned_asked", lambda s, q, k, v, lens, score: q * 2 if s.pinned.is_pinned() else q * 3)
case("numpy_host_only", lambda s, q, k, v, lens, score: q * float(s.host_row.numpy().sum()))
case("host_tolist_only", lambda s, q, k, v, lens, score: q * sum(s.host_lens.tolist()))
case("host_item_only", lambda s, q, k, v, lens, score: q * s.host.item())
case("host_if_only", lambda s, q, k, v, lens, score: q * 2 if s.host > 0 else q)
case("host_nonzero_only", lambda s, q, k, v, lens, score: q * int(s.host_row.nonzero().numel()))
case("host_scalar_added", lambda s, q, k, v, lens, score: q + s.host)
case("host_scalar_inplace_operand", lambda s, q, k, v, lens, score: q.clone().mul_(s.host))
case("host_scalar_double", lambda s, q, k, v, lens, score: q * torch.tensor(0.125, dtype=torch.float64))


def host_scalar_copied_in(s, q, k, v, lens, score):
    s.buf.copy_(s.host)
    return q + s.buf.sum()


def host_scalar_fill(s, q, k, v, lens, score):
    s.buf.fill_(s.host)
    return q + s.buf.sum()


def device_scalar_fill(s, q, k, v, lens, score):
    s.buf.fill_(score[0, 0])
    return q + s.buf.sum()


case("host_scalar_to_device", lambda s, q, k, v, lens, score: q * s.host.to(q.device))
case("host_scalar_compare", lambda s, q, k, v, lens, score: q * (score > s.host).sum())
case("host_scalar_maximum", lambda s, q, k, v, lens, score: torch.maximum(q, s.host))
case("host_scalar_clamp", lambda s, q, k, v, lens, score: torch.clamp(q, min=-s.host, max=s.host))
case("host_scalar_pow", lambda s, q, k, v, lens, score: q.abs() ** s.host)
case("host_scalar_lerp", lambda s, q, k, v, lens, score: torch.lerp(q, q * 2, s.host.item()))
case("host_scalar_addcmul", lambda s, q, k, v, lens, score: torch.addcmul(q, q, q, value=float(s.host)))
case("host_base_device_exponent", lambda s, q, k, v, lens, score: torch.pow(torch.tensor(2.0), q))
case("python_scalars_only", lambda s, q, k, v, lens, score: (q * 0.5 + 1).clamp(-1, 1))
case("tensor_from_list_to_device", lambda s, q, k, v, lens, score: q * torch.tensor([1.0, 2.0]).to(q.device).sum())
case("tensor_from_list_on_device", lambda s, q, k, v, lens, score: q * torch.tensor([1.0, 2.0], device=q.device).sum())
case("tensor_from_number_on_device", lambda s, q, k, v, lens, score: q * torch.tensor(2.0, device=q.device))
case("full_number_on_device", lambda s, q, k, v, lens, score: q * torch.full((), 2.0, device=q.device))
case("full_vector_on_device", lambda s, q, k, v, lens, score: q * torch.full((2,), 2.0, device=q.device).sum())
case("full_of_device_scalar", lambda s, q, k, v, lens, score: q * torch.full((2,), score[0, 0], device=q.device).sum())
case("full_like_number", lambda s, q, k, v, lens, score: torch.full_like(q, 2.0) * q)
case("scalar_tensor_on_device", lambda s, q, k, v, lens, score: q * torch.scalar_tensor(2.0, device=q.device))
case("new_tensor_of_list", lambda s, q, k, v, lens, score: q * q.new_tensor([1.0, 2.0]).sum())
case("new_full_instead", lambda s, q, k, v, lens, score: q * q.new_full((2,), 1.5).sum())
case("as_tensor_of_list", lambda s, q, k, v, lens, score: q * torch.as_tensor([1.0, 2.0], device=q.device).sum())
case("as_tensor_of_device_tensor", lambda s, q, k, v, lens, score: q * torch.as_tensor(score, device=q.device).sum())


def tensor_of_device_scalars(s, q, k, v, lens, score):
    return q * torch.tensor([lens[0], lens[1]], device=q.device).sum()


case("stack_of_device_scalars", lambda s, q, k, v, lens, score: q * torch.stack([lens[0], lens[1]]).sum())
case("tensor_of_device_tensor", lambda s, q, k, v, lens, score: q * score.detach().clone().sum())
case("to_same_device", lambda s, q, k, v, lens, score: q.to(score.device) * 2)
case("to_other_dtype", lambda s, q, k, v, lens, score: q.to(torch.bfloat16).float() * 2)
case("type_as_device", lambda s, q, k, v, lens, score: q * lens.type_as(q).sum())
case("host_arange_to_device", lambda s, q, k, v, lens, score: q * torch.arange(8).to(q.device).sum())
case("device_arange", lambda s, q, k, v, lens, score: q * torch.arange(8, device=q.device).sum())


def host_mask_to_device(s, q, k, v, lens, score):
    mask = torch.ones(4, 4).tril().bool().to(q.device)
    return q * mask.sum()


case("device_mask", lambda s, q, k, v, lens, score: q * torch.ones(4, 4, device=q.device).tril().sum())


def host_computed_rope_table(s, q, k, v, lens, score):
    angles = torch.outer(torch.arange(4.0), torch.arange(4.0)).cos()
    return q * angles.to(q.device, non_blocking=True).sum()


case("device_method_cuda", lambda s, q, k, v, lens, score: q * s.host_row.cuda().sum() if s.dev == "cuda" else q)
case("roundtrip_through_host", lambda s, q, k, v, lens, score: q.cpu().to(q.device) * 2)
case("deepcopy_device_tensor", lambda s, q, k, v, lens, score: copy.deepcopy(score.detach()).sum() * q)
case("copy_copy_device_tensor", lambda s, q, k, v, lens, score: copy.copy(score).sum() * q)
case("deepcopy_host_tensor", lambda s, q, k, v, lens, score: q * copy.deepcopy(s.host))
case("h2d_weights_each_call", lambda s, q, k, v, lens, score: q @ seeded(5, q.shape[-1], q.shape[-1]).to(q.device))
case("device_weights_each_call", lambda s, q, k, v, lens, score: q @ s.w)
case("mixed_host_vector_operand", lambda s, q, k, v, lens, score: q * s.host_row[:1].squeeze())
case("broadcast_to_batch", lambda s, q, k, v, lens, score: q * s.buf.new_ones(B, 1, 1, 1))


def device_out_argument(s, q, k, v, lens, score):
    torch.mul(q, 2, out=s.out)
    return s.out + 1


def device_copy_between(s, q, k, v, lens, score):
    s.out.copy_(q)
    return s.out * 2


case("storage_bytes", lambda s, q, k, v, lens, score: q * (score.untyped_storage().nbytes() // 64))


def storage_to_host(s, q, k, v, lens, score):
    score.untyped_storage().cpu()
    return q * 2


CASES |= collected(globals())
