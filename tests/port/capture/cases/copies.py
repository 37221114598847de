"""Graph-capture cases: copies between host and device, pinned and pageable, and host scalars as operands."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import copy

import torch
from tests.port.capture.cases.setting import B, State, inputs, registry, seeded

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


@case
def pinned_non_blocking(s, q, k, v, lens, score):
    s.buf.copy_(s.pinned, non_blocking=True)
    return q + s.buf.sum()


@case
def pageable_copy(s, q, k, v, lens, score):
    s.buf.copy_(s.host_row)
    return q + s.buf.sum()


@case
def pageable_copy_non_blocking(s, q, k, v, lens, score):
    s.buf.copy_(s.host_row, non_blocking=True)
    return q + s.buf.sum()


@case
def pinned_to_device(s, q, k, v, lens, score):
    return q + s.pinned.to(q.device).sum()


@case
def pinned_to_device_non_blocking(s, q, k, v, lens, score):
    return q + s.pinned.to(q.device, non_blocking=True).sum()


@case
def pinned_slice_non_blocking(s, q, k, v, lens, score):
    return q + s.pinned[2:6].to(q.device, non_blocking=True).sum()


@case
def pinned_view_non_blocking(s, q, k, v, lens, score):
    return q + s.pinned.view(2, 4).to(q.device, non_blocking=True).sum()


@case
def pinned_strided_non_blocking(s, q, k, v, lens, score):
    s.buf[:4].copy_(s.pinned[::2], non_blocking=True)
    return q + s.buf.sum()


@case
def pinned_cast_non_blocking(s, q, k, v, lens, score):
    half = s.pinned.to(q.device, torch.float16, non_blocking=True)
    return q + half.sum()


@case
def pinned_clone_is_pageable(s, q, k, v, lens, score):
    return q + s.pinned.clone().to(q.device, non_blocking=True).sum()


@case
def pinned_arithmetic_is_pageable(s, q, k, v, lens, score):
    return q + (s.pinned * 2).to(q.device, non_blocking=True).sum()


@case
def device_to_pinned_non_blocking(s, q, k, v, lens, score):
    s.pinned_out.copy_(score[0, :8], non_blocking=True)
    return q * 2


@case
def device_to_pinned_blocking(s, q, k, v, lens, score):
    s.pinned_out.copy_(score[0, :8])
    return q * 2


@case
def device_to_pageable(s, q, k, v, lens, score):
    s.host_row.copy_(score[0, :8])
    return q * 2


@case
def device_to_pinned_and_read(s, q, k, v, lens, score):
    s.pinned_out.copy_(score[0, :8], non_blocking=True)
    return q * float(s.pinned_out[0])


@case
def pin_memory_inside(s, q, k, v, lens, score):
    return q + torch.ones(8).pin_memory().to(q.device, non_blocking=True).sum()


@case
def empty_pinned_inside(s, q, k, v, lens, score):
    host = torch.zeros(8, pin_memory=True)
    return q + host.to(q.device, non_blocking=True).sum()


@case
def is_pinned_asked(s, q, k, v, lens, score):
    return q * 2 if s.pinned.is_pinned() else q * 3


@case
def numpy_host_only(s, q, k, v, lens, score):
    return q * float(s.host_row.numpy().sum())


@case
def host_tolist_only(s, q, k, v, lens, score):
    return q * sum(s.host_lens.tolist())


@case
def host_item_only(s, q, k, v, lens, score):
    return q * s.host.item()


@case
def host_if_only(s, q, k, v, lens, score):
    return q * 2 if s.host > 0 else q


@case
def host_nonzero_only(s, q, k, v, lens, score):
    return q * int(s.host_row.nonzero().numel())


@case
def host_scalar_added(s, q, k, v, lens, score):
    return q + s.host


@case
def host_scalar_inplace_operand(s, q, k, v, lens, score):
    return q.clone().mul_(s.host)


@case
def host_scalar_double(s, q, k, v, lens, score):
    return q * torch.tensor(0.125, dtype=torch.float64)


@case
def host_scalar_copied_in(s, q, k, v, lens, score):
    s.buf.copy_(s.host)
    return q + s.buf.sum()


@case
def host_scalar_fill(s, q, k, v, lens, score):
    s.buf.fill_(s.host)
    return q + s.buf.sum()


@case
def device_scalar_fill(s, q, k, v, lens, score):
    s.buf.fill_(score[0, 0])
    return q + s.buf.sum()


@case
def host_scalar_to_device(s, q, k, v, lens, score):
    return q * s.host.to(q.device)


@case
def host_scalar_compare(s, q, k, v, lens, score):
    return q * (score > s.host).sum()


@case
def host_scalar_maximum(s, q, k, v, lens, score):
    return torch.maximum(q, s.host)


@case
def host_scalar_clamp(s, q, k, v, lens, score):
    return torch.clamp(q, min=-s.host, max=s.host)


@case
def host_scalar_pow(s, q, k, v, lens, score):
    return q.abs() ** s.host


@case
def host_scalar_lerp(s, q, k, v, lens, score):
    return torch.lerp(q, q * 2, s.host.item())


@case
def host_scalar_addcmul(s, q, k, v, lens, score):
    return torch.addcmul(q, q, q, value=float(s.host))


@case
def host_base_device_exponent(s, q, k, v, lens, score):
    return torch.pow(torch.tensor(2.0), q)


@case
def python_scalars_only(s, q, k, v, lens, score):
    return (q * 0.5 + 1).clamp(-1, 1)


@case
def tensor_from_list_to_device(s, q, k, v, lens, score):
    return q * torch.tensor([1.0, 2.0]).to(q.device).sum()


@case
def tensor_from_list_on_device(s, q, k, v, lens, score):
    return q * torch.tensor([1.0, 2.0], device=q.device).sum()


@case
def tensor_from_number_on_device(s, q, k, v, lens, score):
    return q * torch.tensor(2.0, device=q.device)


@case
def full_number_on_device(s, q, k, v, lens, score):
    return q * torch.full((), 2.0, device=q.device)


@case
def full_vector_on_device(s, q, k, v, lens, score):
    return q * torch.full((2,), 2.0, device=q.device).sum()


@case
def full_of_device_scalar(s, q, k, v, lens, score):
    return q * torch.full((2,), score[0, 0], device=q.device).sum()


@case
def full_like_number(s, q, k, v, lens, score):
    return torch.full_like(q, 2.0) * q


@case
def scalar_tensor_on_device(s, q, k, v, lens, score):
    return q * torch.scalar_tensor(2.0, device=q.device)


@case
def new_tensor_of_list(s, q, k, v, lens, score):
    return q * q.new_tensor([1.0, 2.0]).sum()


@case
def new_full_instead(s, q, k, v, lens, score):
    return q * q.new_full((2,), 1.5).sum()


@case
def as_tensor_of_list(s, q, k, v, lens, score):
    return q * torch.as_tensor([1.0, 2.0], device=q.device).sum()


@case
def as_tensor_of_device_tensor(s, q, k, v, lens, score):
    return q * torch.as_tensor(score, device=q.device).sum()


@case
def tensor_of_device_scalars(s, q, k, v, lens, score):
    return q * torch.tensor([lens[0], lens[1]], device=q.device).sum()


@case
def stack_of_device_scalars(s, q, k, v, lens, score):
    return q * torch.stack([lens[0], lens[1]]).sum()


@case
def tensor_of_device_tensor(s, q, k, v, lens, score):
    return q * score.detach().clone().sum()


@case
def to_same_device(s, q, k, v, lens, score):
    return q.to(score.device) * 2


@case
def to_other_dtype(s, q, k, v, lens, score):
    return q.to(torch.bfloat16).float() * 2


@case
def type_as_device(s, q, k, v, lens, score):
    return q * lens.type_as(q).sum()


@case
def host_arange_to_device(s, q, k, v, lens, score):
    return q * torch.arange(8).to(q.device).sum()


@case
def device_arange(s, q, k, v, lens, score):
    return q * torch.arange(8, device=q.device).sum()


@case
def host_mask_to_device(s, q, k, v, lens, score):
    mask = torch.ones(4, 4).tril().bool().to(q.device)
    return q * mask.sum()


@case
def device_mask(s, q, k, v, lens, score):
    return q * torch.ones(4, 4, device=q.device).tril().sum()


@case
def host_computed_rope_table(s, q, k, v, lens, score):
    angles = torch.outer(torch.arange(4.0), torch.arange(4.0)).cos()
    return q * angles.to(q.device, non_blocking=True).sum()


@case
def device_method_cuda(s, q, k, v, lens, score):
    return q * s.host_row.cuda().sum() if s.dev == "cuda" else q


@case
def roundtrip_through_host(s, q, k, v, lens, score):
    return q.cpu().to(q.device) * 2


@case
def deepcopy_device_tensor(s, q, k, v, lens, score):
    return copy.deepcopy(score.detach()).sum() * q


@case
def copy_copy_device_tensor(s, q, k, v, lens, score):
    return copy.copy(score).sum() * q


@case
def deepcopy_host_tensor(s, q, k, v, lens, score):
    return q * copy.deepcopy(s.host)


@case
def h2d_weights_each_call(s, q, k, v, lens, score):
    return q @ seeded(5, q.shape[-1], q.shape[-1]).to(q.device)


@case
def device_weights_each_call(s, q, k, v, lens, score):
    return q @ s.w


@case
def mixed_host_vector_operand(s, q, k, v, lens, score):
    return q * s.host_row[:1].squeeze()


@case
def broadcast_to_batch(s, q, k, v, lens, score):
    return q * s.buf.new_ones(B, 1, 1, 1)


@case
def device_out_argument(s, q, k, v, lens, score):
    torch.mul(q, 2, out=s.out)
    return s.out + 1


@case
def device_copy_between(s, q, k, v, lens, score):
    s.out.copy_(q)
    return s.out * 2


@case
def storage_bytes(s, q, k, v, lens, score):
    return q * (score.untyped_storage().nbytes() // 64)


@case
def storage_to_host(s, q, k, v, lens, score):
    score.untyped_storage().cpu()
    return q * 2
