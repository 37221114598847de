"""Graph-capture cases: sizes that depend on data, creation ops, views and storage."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases.setting import B, D, H, S, State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


def repeat_interleave_int(s, q, k, v, lens, score):
    return q @ k[:, :2].repeat_interleave(2, dim=1).transpose(-1, -2)


def repeat_interleave_output_size(s, q, k, v, lens, score):
    rows = torch.arange(B, device=q.device)
    return q * torch.repeat_interleave(rows, torch.clamp(lens, 8, 8), output_size=16).sum()


case("repeat_interleave_one_argument", lambda s, q, k, v, lens, score: q * torch.repeat_interleave(lens).sum())
case("expand_instead_of_repeat", lambda s, q, k, v, lens, score: q @ k[:, :1].expand(B, H, S, D).transpose(-1, -2))


def token_to_request_searchsorted(s, q, k, v, lens, score):
    ends = lens.cumsum(0)
    return q * torch.searchsorted(ends, torch.arange(80, device=q.device), right=True).sum()


def bucketize_positions(s, q, k, v, lens, score):
    return q * torch.bucketize(torch.arange(80, device=q.device), lens.cumsum(0)).sum()


def split_by_python(s, q, k, v, lens, score):
    return torch.cat([part * 2 for part in torch.split(score, [24, 40], dim=1)], 1)


def chunk_by_python(s, q, k, v, lens, score):
    a, b = score.chunk(2, dim=-1)
    return F.silu(a) * b


def tensor_split_by_host_tensor(s, q, k, v, lens, score):
    return torch.tensor_split(score, s.host_lens, dim=1)[1] * 2


def tensor_split_by_device_tensor(s, q, k, v, lens, score):
    return q * torch.tensor_split(score, lens, dim=1)[0].sum()


case("tensor_split_by_python", lambda s, q, k, v, lens, score: torch.tensor_split(score, 3, dim=1)[1] * 2)
case("arange_python_bound", lambda s, q, k, v, lens, score: q * torch.arange(0, S, 2, device=q.device).sum())
case("arange_item_bound", lambda s, q, k, v, lens, score: q * torch.arange(lens.max().item(), device=q.device).sum())


def arange_host_tensor_bound(s, q, k, v, lens, score):
    return q * torch.arange(s.host_lens[0], device=q.device).sum()


case("arange_size_bound", lambda s, q, k, v, lens, score: q * torch.arange(k.size(2), device=q.device).sum())
case("linspace_python", lambda s, q, k, v, lens, score: q * torch.linspace(0, 1, D, device=q.device))


def linspace_device_ends(s, q, k, v, lens, score):
    return q * torch.linspace(score[0, 0], score[0, 1], D, device=q.device)


case("zeros_of_device_size", lambda s, q, k, v, lens, score: q + torch.zeros(int(lens[0]), device=q.device).sum())
case("zeros_of_tensor_size", lambda s, q, k, v, lens, score: q + torch.zeros(lens[0], device=q.device).sum())
case("zeros_of_python_size", lambda s, q, k, v, lens, score: q + torch.zeros(B * S, device=q.device).sum())
case("eye_matrix", lambda s, q, k, v, lens, score: q @ torch.eye(D, device=q.device))


def tril_indices(s, q, k, v, lens, score):
    rows, columns = torch.tril_indices(D, D, device=q.device)
    return q * s.w[rows, columns].sum()


def causal_mask_from_lens(s, q, k, v, lens, score):
    mask = torch.arange(S, device=q.device) < lens.view(B, 1, 1, 1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


case("pad_by_python", lambda s, q, k, v, lens, score: F.pad(score, (0, 3)) * 2)
case("pad_by_data", lambda s, q, k, v, lens, score: q * F.pad(score, (0, S - int(lens.min()))).sum())


def pad_sequence_of_rows(s, q, k, v, lens, score):
    return torch.nn.utils.rnn.pad_sequence([score[0, :10], score[1, :20]], batch_first=True)


def pad_sequence_by_lens(s, q, k, v, lens, score):
    rows = [row[:n] for row, n in zip(score, lens, strict=True)]
    return q * torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).sum()


case("reshape_by_python", lambda s, q, k, v, lens, score: k.reshape(B * H, S, D) * 2)
case("view_by_tensor_size", lambda s, q, k, v, lens, score: q.expand(B, H, lens[0] * 0 + 2, D) * 2)
case("unflatten_heads", lambda s, q, k, v, lens, score: score.unflatten(-1, (4, 16)).transpose(1, 2) * 2)
case("unfold_windows", lambda s, q, k, v, lens, score: score.unfold(1, 8, 4).mean(-1))
case("as_strided_windows", lambda s, q, k, v, lens, score: score.as_strided((2, 8, 8), (S, 8, 1)).sum(-1))
case("storage_offset_asked", lambda s, q, k, v, lens, score: q * (score[1].storage_offset() + score.stride(0)))
case("data_ptr_alignment", lambda s, q, k, v, lens, score: q * 2 if k.data_ptr() % 4 == 0 else q)
case("data_attribute", lambda s, q, k, v, lens, score: q.data * 2)


def data_attribute_replaced(s, q, k, v, lens, score):
    s.out.data = q * 2
    return s.out + 1


def set_to_other_storage(s, q, k, v, lens, score):
    s.out.set_(q * 2)
    return s.out + 1


def resize_within(s, q, k, v, lens, score):
    buffer = torch.zeros(16, device=q.device)
    return q + buffer.resize_(8).sum()


def resize_growing(s, q, k, v, lens, score):
    buffer = torch.zeros(8, device=q.device)
    buffer.resize_(1024).fill_(0.5)
    return q + buffer.sum()


def out_resized(s, q, k, v, lens, score):
    out = torch.empty(0, device=q.device)
    torch.mul(q, 2, out=out)
    return out + 1


case("view_dtype", lambda s, q, k, v, lens, score: q * (score.view(torch.int32) & 7).sum())
case("flip_and_roll", lambda s, q, k, v, lens, score: score.flip(-1).roll(3, -1) * 2)
case("contiguous_transpose", lambda s, q, k, v, lens, score: k.transpose(1, 2).contiguous().view(B, S, H * D).sum(1))


def inplace_on_input(s, q, k, v, lens, score):
    q.mul_(2)
    return q + 1


def inplace_copy_of_lens(s, q, k, v, lens, score):
    lens.add_(1)
    return q * lens.sum()


case("returns_input_itself", lambda s, q, k, v, lens, score: q)


def returns_view_of_state(s, q, k, v, lens, score):
    s.buf[:2].copy_(score[:, 0])
    return s.buf[:2]


case("returns_tuple", lambda s, q, k, v, lens, score: (q * 2, score.sum(), lens + 1))
case("returns_dict", lambda s, q, k, v, lens, score: {"out": q * 2, "mass": score.sum()})
case("cu_seqlens_pad", lambda s, q, k, v, lens, score: F.pad(lens.cumsum(0), (1, 0)).to(torch.int32))


def cu_seqlens_zeros_copy(s, q, k, v, lens, score):
    cu = torch.zeros(B + 1, dtype=torch.int32, device=q.device)
    torch.cumsum(lens, 0, out=cu[1:])
    return q * cu.sum()


def cu_seqlens_assigned(s, q, k, v, lens, score):
    cu = torch.zeros(B + 1, dtype=torch.long, device=q.device)
    cu[1:] = lens.cumsum(0)
    return q * cu[-1]


def cu_seqlens_first_element_zeroed(s, q, k, v, lens, score):
    cu = torch.empty(B + 1, dtype=torch.long, device=q.device)
    cu[0] = 0
    cu[1:] = lens.cumsum(0)
    return q * cu[-1]


def cu_seqlens_host_list(s, q, k, v, lens, score):
    ends = [0]
    for n in lens.tolist():
        ends.append(ends[-1] + n)
    return q * torch.tensor(ends, device=q.device)[-1]


case("num_blocks_ceil", lambda s, q, k, v, lens, score: q * ((lens + 15) // 16).sum())
case("floor_divide_by_zero_dim", lambda s, q, k, v, lens, score: q * torch.div(lens, 16, rounding_mode="floor").sum())


def meshgrid_positions(s, q, k, v, lens, score):
    a, b = torch.meshgrid(torch.arange(4, device=q.device), torch.arange(8, device=q.device), indexing="ij")
    return q * (a * b).sum()


case("cartesian_product", lambda s, q, k, v, lens, score: q * torch.cartesian_prod(lens, lens).sum())
case("combinations_of_lens", lambda s, q, k, v, lens, score: q * torch.combinations(lens).sum())


def nested_tensor_from_list(s, q, k, v, lens, score):
    nested = torch.nested.nested_tensor([score[0, :10], score[1, :20]])
    return q * nested.to_padded_tensor(0.0).sum()


def nested_as_tensor_jagged(s, q, k, v, lens, score):
    nested = torch.nested.as_nested_tensor([score[0, :10], score[1, :20]], layout=torch.jagged)
    return q * nested.values().sum()


def jagged_from_offsets(s, q, k, v, lens, score):
    offsets = F.pad(lens.cumsum(0), (1, 0))
    nested = torch.nested.nested_tensor_from_jagged(k.reshape(-1, D)[:80], offsets)
    return nested.values() * 2


case("to_sparse_coo", lambda s, q, k, v, lens, score: q * torch.sparse.sum(score.relu().to_sparse()))


def sparse_coo_coalesced(s, q, k, v, lens, score):
    index = torch.stack([lens % 4, lens % 8])
    sparse = torch.sparse_coo_tensor(index, score[:, 0], (4, 8)).coalesce()
    return q + sparse.to_dense().sum()


def sparse_coo_to_dense(s, q, k, v, lens, score):
    index = torch.stack([lens % 4, lens % 8])
    return q + torch.sparse_coo_tensor(index, score[:, 0], (4, 8)).to_dense().sum()


def sparse_csr_matmul(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = s.w.relu().to_sparse_csr()
    return s.cache @ k[0, 0].t()


case("block_diag_of_rows", lambda s, q, k, v, lens, score: torch.block_diag(score[0, :4], score[1, :4]) * 2)
case("tensor_of_shape", lambda s, q, k, v, lens, score: q * torch.tensor(k.shape, device=q.device).prod())
case("python_prod_of_shape", lambda s, q, k, v, lens, score: q * k.shape.numel())


CASES |= collected(globals())
