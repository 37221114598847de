"""Graph-capture cases: indexing, gathering and scattering, as KV caches and block tables do it."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import torch
from tests.port.capture.cases.setting import BLOCK, B, D, S, State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


def kv_write_index_copy(s, q, k, v, lens, score):
    s.kv.index_copy_(0, lens, k[:, :, 0])
    return q + s.kv.sum()


def kv_write_setitem_tensor(s, q, k, v, lens, score):
    s.kv[lens] = k[:, :, 0]
    return q + s.kv.sum()


def kv_write_setitem_python_int(s, q, k, v, lens, score):
    s.kv[3] = k[0, :, 0]
    return q + s.kv.sum()


def kv_write_scatter(s, q, k, v, lens, score):
    index = lens.view(B, 1, 1).expand(B, *s.kv.shape[1:])
    s.kv.scatter_(0, index, k[:, :, 0])
    return q + s.kv.sum()


case("paged_gather", lambda s, q, k, v, lens, score: q @ s.pages[s.blocks.long()].view(B, 1, -1, D).transpose(-1, -2))


def slot_mapping(s, q, k, v, lens, score):
    position = lens - 1
    block = s.blocks.gather(1, (position // BLOCK).view(B, 1))
    slot = block.view(-1) * BLOCK + position % BLOCK
    return q * slot.sum()


case("index_select_rows", lambda s, q, k, v, lens, score: q * s.emb.index_select(0, lens).sum())
case("take_flat", lambda s, q, k, v, lens, score: q * torch.take(score, lens).sum())


def take_along_dim(s, q, k, v, lens, score):
    return q * torch.take_along_dim(score, score.argsort(-1)[:, :4], dim=-1).sum()


def index_add_counts(s, q, k, v, lens, score):
    counts = torch.zeros(S, device=q.device)
    counts.index_add_(0, lens, torch.ones(B, device=q.device))
    return q * (counts * torch.arange(S, device=q.device)).sum()


case("index_fill_rows", lambda s, q, k, v, lens, score: q * score.index_fill(1, lens, 0.0).sum())


def scatter_add_expert_load(s, q, k, v, lens, score):
    load = torch.zeros(4, device=q.device).scatter_add_(0, lens % 4, torch.ones(B, device=q.device))
    return q * (load * load).sum() + load[0]


def scatter_reduce_amax(s, q, k, v, lens, score):
    r = torch.zeros(4, device=q.device).scatter_reduce_(0, lens % 4, score[:, 0], reduce="amax")
    return q + r.sum()


def scatter_value(s, q, k, v, lens, score):
    mask = torch.zeros_like(score).scatter_(1, lens.view(B, 1), 1.0)
    return q * (mask * score).sum()


case("masked_select_sum", lambda s, q, k, v, lens, score: q * torch.masked_select(score, score > 0).sum())
case("mask_multiplied_sum", lambda s, q, k, v, lens, score: q * (score * (score > 0)).sum())


def masked_scatter_rows(s, q, k, v, lens, score):
    return q * score.masked_scatter(score > 0, torch.zeros_like(score)).sum()


case("masked_fill_number", lambda s, q, k, v, lens, score: q * score.masked_fill(score > 0, -1.0).sum())
case("masked_fill_device_value", lambda s, q, k, v, lens, score: q * score.masked_fill(score > 0, score.min()).sum())


def masked_fill_host_value(s, q, k, v, lens, score):
    return q * score.masked_fill(score > 0, torch.tensor(-1.0)).sum()


def bool_assign_number(s, q, k, v, lens, score):
    a = score.clone()
    a[a < 0] = 0.0
    return q * a.sum()


def bool_assign_rows_number(s, q, k, v, lens, score):
    a = score.clone()
    a[lens > 30] = float("-1")
    return q * a.sum()


def bool_assign_device_scalar(s, q, k, v, lens, score):
    a = score.clone()
    a[a < 0] = score.max()
    return q * a.sum()


def bool_index_added(s, q, k, v, lens, score):
    a = score.clone()
    a[a < 0] += 1
    return q * a.sum()


case("bool_host_mask", lambda s, q, k, v, lens, score: q * score[torch.tensor([True, False])].sum())
case("bool_python_list", lambda s, q, k, v, lens, score: q * score[[True, False]].sum())
case("python_bool_index", lambda s, q, k, v, lens, score: q * score[True].sum())
case("uint8_mask_index", lambda s, q, k, v, lens, score: q * score[:, (score[0] > 0).to(torch.int64)].sum())
case("python_list_index", lambda s, q, k, v, lens, score: q * score[:, [1, 3, 5]].sum())
case("host_tensor_index", lambda s, q, k, v, lens, score: q * score[:, torch.tensor([1, 3, 5])].sum())
case("host_tensor_index_from_state", lambda s, q, k, v, lens, score: q * score[:, s.host_lens].sum())
case("zero_dim_host_index", lambda s, q, k, v, lens, score: q * score[:, torch.tensor(3)].sum())
case("zero_dim_device_index", lambda s, q, k, v, lens, score: q * score[:, lens[0]].sum())
case("zero_dim_device_index_first", lambda s, q, k, v, lens, score: q + s.kv[lens[1]].sum() + score[0][lens[0]])
case("one_dim_device_index", lambda s, q, k, v, lens, score: q * score[:, lens[:1]].sum())


def zero_dim_device_setitem(s, q, k, v, lens, score):
    a = torch.zeros(S, device=q.device)
    a[lens[0]] = 1.0
    return q + (a * score[0]).sum()


case("slice_by_tensor", lambda s, q, k, v, lens, score: q * score[:, : lens[0]].sum())
case("slice_by_python", lambda s, q, k, v, lens, score: q * score[:, :40].sum())


def mask_instead_of_slice(s, q, k, v, lens, score):
    keep = torch.arange(S, device=q.device) < lens.view(B, 1)
    return q * torch.where(keep, score, 0.0).sum()


case("narrow_by_python", lambda s, q, k, v, lens, score: q * score.narrow(1, 2, 8).sum())
case("narrow_by_device_start", lambda s, q, k, v, lens, score: q * score.narrow(1, lens[0] - 10, 8).sum())
case("select_by_python", lambda s, q, k, v, lens, score: q * score.select(1, 3).sum())


def setitem_int_number(s, q, k, v, lens, score):
    a = torch.zeros(8, device=q.device)
    a[3] = 2.0
    return q + a.sum()


def setitem_int_device_value(s, q, k, v, lens, score):
    s.buf[3] = score[0, 0]
    return q + s.buf.sum()


def setitem_int_host_value(s, q, k, v, lens, score):
    s.buf[3] = torch.tensor(2.0)
    return q + s.buf.sum()


def setitem_slice_of_one(s, q, k, v, lens, score):
    s.buf[3:4] = 2.0
    return q + s.buf.sum()


def setitem_slice_device_value(s, q, k, v, lens, score):
    s.buf[:2] = score[:, 0]
    return q + s.buf.sum()


def setitem_slice_host_vector(s, q, k, v, lens, score):
    s.buf[:8] = s.host_row
    return q + s.buf.sum()


def setitem_column_number(s, q, k, v, lens, score):
    a = score.clone()
    a[:, 0] = 1.0
    return q * a.sum()


def setitem_corner_number(s, q, k, v, lens, score):
    a = score.clone()
    a[0, 0] = 1.0
    return q * a.sum()


def setitem_all_ellipsis(s, q, k, v, lens, score):
    a = score.clone()
    a[...] = 1.0
    return q * a.sum()


def setitem_list_number(s, q, k, v, lens, score):
    a = score.clone()
    a[:, [0, 1]] = 1.0
    return q * a.sum()


def setitem_device_index_number(s, q, k, v, lens, score):
    a = score.clone()
    a[:, lens] = 1.0
    return q * a.sum()


def fill_one_element(s, q, k, v, lens, score):
    s.buf[3].fill_(2.0)
    return q + s.buf.sum()


def add_to_one_element(s, q, k, v, lens, score):
    a = score.clone()
    a[0, 3] += 2.0
    return q * a.sum()


def nonzero_as_tuple(s, q, k, v, lens, score):
    rows, columns = torch.nonzero(score > 0, as_tuple=True)
    return q * (rows + columns).sum()


case("argwhere_sum", lambda s, q, k, v, lens, score: q * torch.argwhere(score > 0).sum())
case("where_one_arg", lambda s, q, k, v, lens, score: q * torch.where(score > 0)[0].sum())
case("where_scalar_branches", lambda s, q, k, v, lens, score: q * torch.where(score > 0, 1.0, 0.0).sum())


def where_host_scalar_tensor(s, q, k, v, lens, score):
    return q * torch.where(score > 0, score, torch.tensor(0.0)).sum()


case("count_nonzero", lambda s, q, k, v, lens, score: q * torch.count_nonzero(score > 0))


def nonzero_static_mask(s, q, k, v, lens, score):
    return q * torch.nonzero_static(score > 1, size=20, fill_value=-1).sum()


def topk_instead_of_nonzero(s, q, k, v, lens, score):
    index = (score > 0).float().topk(16).indices
    return q * score.gather(-1, index).sum()


case("unique_values", lambda s, q, k, v, lens, score: q * torch.unique(lens % 7).sum())
case("unique_consecutive", lambda s, q, k, v, lens, score: q * torch.unique_consecutive(lens % 7).sum())


def diagonal_write(s, q, k, v, lens, score):
    a = s.w.clone()
    a.fill_diagonal_(0.0)
    return q @ a


def gather_last_token(s, q, k, v, lens, score):
    index = (lens - 1).view(B, 1, 1, 1).expand(B, k.shape[1], 1, D)
    return k.gather(2, index)


case("last_token_advanced", lambda s, q, k, v, lens, score: k[torch.arange(B, device=q.device), :, lens - 1])
case("last_token_host_arange", lambda s, q, k, v, lens, score: k[torch.arange(B), :, lens - 1])


def put_accumulate(s, q, k, v, lens, score):
    a = torch.zeros(S, device=q.device).put_(lens, score[:, 0], accumulate=True)
    return q + a.sum()


def index_put_bool(s, q, k, v, lens, score):
    a = score.clone()
    a.index_put_((a > 0,), torch.tensor(1.0, device=q.device))
    return q * a.sum()


case("device_index_of_host_tensor", lambda s, q, k, v, lens, score: q * s.host_row[lens % 8].sum())
case("histc_of_score", lambda s, q, k, v, lens, score: q * (torch.histc(score, bins=8, min=-3, max=3) ** 2).sum())
case("histc_without_range", lambda s, q, k, v, lens, score: q * (torch.histc(score, bins=8) ** 2).sum())


def bincount_minlength(s, q, k, v, lens, score):
    return q * (torch.bincount(lens, minlength=S)[:S] * torch.arange(S, device=q.device)).sum()


case("one_hot_without_classes", lambda s, q, k, v, lens, score: q * torch.nn.functional.one_hot(lens)[0, 10].sum())
case("one_hot_with_classes", lambda s, q, k, v, lens, score: q * (torch.nn.functional.one_hot(lens, S) * score).sum())


def one_hot_by_compare(s, q, k, v, lens, score):
    return q * ((lens.view(B, 1) == torch.arange(S, device=q.device)) * score).sum()


CASES |= collected(globals())
