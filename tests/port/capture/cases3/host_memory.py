"""Graph-capture cases, third set: memory that is pinned, shared, exchanged or looked at below the tensor."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import io

import numpy
import torch
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import B, D, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()
State = setting.State


def pinned_tensor_of_list(s, q, k, v, lens, score):
    return q * torch.tensor([2.0] * D, pin_memory=True).to(q.device, non_blocking=True)


def pinned_tensor_of_list_blocking(s, q, k, v, lens, score):
    return q * torch.tensor([2.0] * D, pin_memory=True).to(q.device)


def pinned_full_uploaded(s, q, k, v, lens, score):
    return q * torch.full((D,), 2.0, pin_memory=True).to(q.device, non_blocking=True)


def pinned_zeros_filled_uploaded(s, q, k, v, lens, score):
    stage = torch.zeros(D, pin_memory=True)
    stage[0] = 3
    return q * stage.cuda(non_blocking=True)


def pinned_arange_uploaded(s, q, k, v, lens, score):
    return q + torch.arange(D, pin_memory=True).to(q.device, non_blocking=True)


def pinned_empty_like_uploaded(s, q, k, v, lens, score):
    stage = torch.empty_like(s.host_row, pin_memory=True).fill_(2)
    s.buf.copy_(stage, non_blocking=True)
    return q * s.buf[0]


def pinned_randn_uploaded(s, q, k, v, lens, score):
    stage = torch.randn(D, pin_memory=True)
    return q + 0 * stage.to(q.device, non_blocking=True)


def pinned_copy_of_pageable(s, q, k, v, lens, score):
    return q + s.host_row.pin_memory().to(q.device, non_blocking=True).sum()


def pinned_from_numpy(s, q, k, v, lens, score):
    row = torch.from_numpy(numpy.arange(8, dtype=numpy.float32)).pin_memory()
    return q + row.to(q.device, non_blocking=True).sum()


def pinned_new_tensor(s, q, k, v, lens, score):
    stage = s.pinned.new_zeros(8, pin_memory=True)
    stage += 1
    return q + stage.to(q.device, non_blocking=True).sum()


def pinned_step_counter_uploaded(s, q, k, v, lens, score):
    s.calls += 1
    step = torch.tensor([s.calls], pin_memory=True)
    return q + step.to(q.device, non_blocking=True)


def pinned_slice_of_larger(s, q, k, v, lens, score):
    s.buf[:4].copy_(s.pinned[4:], non_blocking=True)
    return q + s.buf[0]


def pinned_transposed(s, q, k, v, lens, score):
    stage = torch.ones(4, 8, pin_memory=True)
    return q.sum() + stage.t().to(q.device, non_blocking=True)


def pinned_expanded(s, q, k, v, lens, score):
    return q.sum() + s.pinned[:1].expand(8).to(q.device, non_blocking=True)


case("pinned_download_non_blocking_fresh", lambda s, q, k, v, lens, score: (q * 2, score.to("cpu", non_blocking=True)))


def pinned_download_into_kept(s, q, k, v, lens, score):
    s.pinned_out.copy_(score[0, :8], non_blocking=True)
    return q * 2


case("host_number_factor", lambda s, q, k, v, lens, score: q * torch.tensor(3.0) + torch.tensor(2))
case("host_number_in_where", lambda s, q, k, v, lens, score: torch.where(score > 0, score, torch.tensor(0.0)))


def host_number_both_in_where(s, q, k, v, lens, score):
    return torch.where(score > 0, torch.tensor(1.0), torch.tensor(0.0))


case("host_number_in_where_numbers", lambda s, q, k, v, lens, score: torch.where(score > 0, 1.0, 0.0))
case("host_number_clamp", lambda s, q, k, v, lens, score: torch.clamp(score, max=torch.tensor(1.0)))
case("host_number_minimum", lambda s, q, k, v, lens, score: torch.minimum(score, torch.tensor(1.0)))
case("host_number_lerp", lambda s, q, k, v, lens, score: torch.lerp(score, score * 2, torch.tensor(0.5)))
case("host_number_addcmul", lambda s, q, k, v, lens, score: torch.addcmul(score, score, torch.tensor(2.0)))
case("host_number_masked_fill", lambda s, q, k, v, lens, score: score.masked_fill(score > 0, torch.tensor(2.0)))
case("host_number_index_fill", lambda s, q, k, v, lens, score: score.index_fill(1, lens, torch.tensor(2.0)))


def host_number_index_add(s, q, k, v, lens, score):
    return score[0].index_add(0, lens, score[0, :2] * torch.tensor(2.0))


case("host_number_scatter", lambda s, q, k, v, lens, score: score.scatter(1, lens.view(B, 1), 2.0))
case("host_number_out_of_comparison", lambda s, q, k, v, lens, score: score * (score > torch.tensor(0.1)))
case("host_number_pow", lambda s, q, k, v, lens, score: torch.tensor(2.0) ** score + score ** torch.tensor(2.0))


def host_number_put(s, q, k, v, lens, score):
    out = score.clone()
    out[:, 0] = torch.tensor(2.0)
    return out


def host_number_put_in_slice(s, q, k, v, lens, score):
    out = score.clone()
    out[:, 3:5] = 1.5
    out[:, ::2] *= 2
    return out


def host_number_put_by_index_tensor(s, q, k, v, lens, score):
    out = score.clone()
    out[:, lens] = 2.0
    return out


def host_number_put_by_mask(s, q, k, v, lens, score):
    out = score.clone()
    out[out > 0] = 2.0
    return out


def host_number_put_by_mask_device_value(s, q, k, v, lens, score):
    out = score.clone()
    out[out > 0] = out.max()
    return out


case("host_mask_on_host_lengths", lambda s, q, k, v, lens, score: q * int(s.host_lens[s.host_lens > 3].sum()))
case("host_mask_indexes_device", lambda s, q, k, v, lens, score: k[:, :, torch.arange(S) < 10].sum(2))
case("host_index_indexes_device", lambda s, q, k, v, lens, score: k[:, :, torch.tensor([1, 2])].sum(2))
case("host_zero_dim_index", lambda s, q, k, v, lens, score: k[:, :, torch.tensor(3)])
case("host_index_by_numpy_int", lambda s, q, k, v, lens, score: k[:, :, numpy.int64(3)])
case("host_index_select", lambda s, q, k, v, lens, score: k.index_select(2, torch.tensor([1, 2], device=q.device)))


def storage_bytes_copied(s, q, k, v, lens, score):
    s.buf.untyped_storage().copy_(s.buf.clone().untyped_storage())
    return q * 2


def storage_size_asked(s, q, k, v, lens, score):
    return q * (k.untyped_storage().nbytes() // 1024 + k.untyped_storage().size() // 4096)


case("storage_element_read", lambda s, q, k, v, lens, score: q * s.buf.untyped_storage()[0])
case("storage_tolist", lambda s, q, k, v, lens, score: q * len(s.buf.untyped_storage().tolist()))


def storage_cloned(s, q, k, v, lens, score):
    copy = s.buf.untyped_storage().clone()
    return q + torch.tensor([], device=q.device).set_(copy, 0, (8,))


def storage_shared_asked(s, q, k, v, lens, score):
    shared = q.untyped_storage().data_ptr() == q.view(-1).untyped_storage().data_ptr()
    return q * (2 if shared else 3)


def storage_filled(s, q, k, v, lens, score):
    s.buf.untyped_storage().fill_(0)
    return q + s.buf.sum()


case("dlpack_round_trip", lambda s, q, k, v, lens, score: torch.from_dlpack(q.contiguous()) * 2)


def dlpack_capsule(s, q, k, v, lens, score):
    return torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(q)) + 1


def dlpack_device_asked(s, q, k, v, lens, score):
    kind, index = q.__dlpack_device__()
    return q * (int(kind) + index)


def array_interface_asked(s, q, k, v, lens, score):
    shape = q.__cuda_array_interface__["shape"]
    return q * shape[0]


def array_interface_absent_on_host(s, q, k, v, lens, score):
    return q * (2 if hasattr(s.host, "__cuda_array_interface__") else 3)


def numpy_asarray_of_device(s, q, k, v, lens, score):
    try:
        numpy.asarray(score)
    except TypeError:
        return q * 2
    return q


case("numpy_forced", lambda s, q, k, v, lens, score: q * float(score.numpy(force=True).max()))
case("numpy_ufunc_of_host", lambda s, q, k, v, lens, score: q * float(numpy.sqrt(s.host_row).sum()))


def numpy_row_uploaded(s, q, k, v, lens, score):
    return q + torch.as_tensor(numpy.ones(D, dtype=numpy.float32), device=q.device)


case("numpy_scalar_factor", lambda s, q, k, v, lens, score: q * numpy.float32(2.5))


def frombuffer_uploaded(s, q, k, v, lens, score):
    return q + torch.frombuffer(bytearray(D), dtype=torch.uint8).to(q.device)


def saved_and_loaded_on_host(s, q, k, v, lens, score):
    file = io.BytesIO()
    torch.save(s.host_row, file)
    file.seek(0)
    return q * float(torch.load(file).sum())


def loaded_onto_device(s, q, k, v, lens, score):
    file = io.BytesIO()
    torch.save(s.host_row, file)
    file.seek(0)
    return q + torch.load(file, map_location="cuda").sum()


case("shared_memory_asked", lambda s, q, k, v, lens, score: q * (2 if q.is_shared() else 3))


def uploaded_zero_elements(s, q, k, v, lens, score):
    return torch.cat([q.flatten(), torch.tensor([], device=q.device)])


case("uploaded_scalar_item_one", lambda s, q, k, v, lens, score: q * torch.scalar_tensor(2.0, device=q.device))
case("uploaded_scalar_tensor", lambda s, q, k, v, lens, score: q * torch.tensor(2.0, device=q.device))
case("uploaded_new_full", lambda s, q, k, v, lens, score: q * q.new_full((D,), 2.0) + q.new_ones(1))
case("uploaded_new_tensor", lambda s, q, k, v, lens, score: q * q.new_tensor([2.0]))
case("uploaded_asarray", lambda s, q, k, v, lens, score: q * torch.asarray([2.0], device=q.device))
case("uploaded_by_type", lambda s, q, k, v, lens, score: q * s.host_row.type_as(q).sum())
case("uploaded_by_to_other", lambda s, q, k, v, lens, score: q * s.host_row.to(q).sum())


def uploaded_by_copy_broadcast(s, q, k, v, lens, score):
    out = torch.empty_like(q)
    out.copy_(torch.tensor(2.0))
    return out


def uploaded_by_out(s, q, k, v, lens, score):
    out = torch.empty(D, device=q.device)
    torch.arange(D, out=out)
    return q + out


CASES |= collected(globals())
