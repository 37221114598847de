"""Graph-capture cases, fourth set: written before their truth was taken, and before the checker was mended by them."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import functools
import itertools

import numpy
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from tests.port.capture.cases import setting
from tests.port.capture.cases.setting import EXPERTS, VOCAB, B, D, S, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, case = registry()


class State(setting.State):
    def __init__(self, dev):
        super().__init__(dev)
        self.spd = (self.w @ self.w.T + D * torch.eye(D, device=dev)).contiguous()
        self.batch = torch.stack([self.spd, self.spd * 2])
        self.ticket = itertools.count()
        self.norm = torch.nn.LayerNorm(D).to(dev)
        self.host_norm = {name: tensor.cpu() for name, tensor in self.norm.state_dict().items()}
        self.host_matrix = setting.seeded(9, D, D)
        self.numpy_row = numpy.linspace(0, 1, D, dtype=numpy.float32)
        self.tokens = []


# Copies between pageable host memory and the device.


def upload_foreach_copy(s, q, k, v, lens, score):
    torch._foreach_copy_([s.buf, s.w], [s.host_row, s.host_matrix])
    return q @ s.w


def upload_foreach_copy_pageable_non_blocking(s, q, k, v, lens, score):
    torch._foreach_copy_([s.buf], [s.host_row], non_blocking=True)
    return q + s.buf.sum()


def upload_under_device_context(s, q, k, v, lens, score):
    with torch.device(q.device):
        scale = torch.tensor([0.5] * D)
    return q * scale


case("upload_numpy_as_tensor", lambda s, q, k, v, lens, score: q * torch.as_tensor(s.numpy_row, device=q.device))


def upload_numpy_pageable_non_blocking(s, q, k, v, lens, score):
    return q * torch.from_numpy(s.numpy_row).to(q.device, non_blocking=True)


def upload_static_buffer_non_blocking(s, q, k, v, lens, score):
    s.buf.copy_(s.host_row, non_blocking=True)
    return q + s.buf[0]


def upload_pinned_then_cloned(s, q, k, v, lens, score):
    return q + s.pinned.clone().to(q.device, non_blocking=True).sum()


def upload_pinned_after_arithmetic(s, q, k, v, lens, score):
    return q + (s.pinned * 2).to(q.device, non_blocking=True).sum()


def upload_pinned_through_numpy(s, q, k, v, lens, score):
    return q + torch.from_numpy(s.pinned.numpy()).to(q.device, non_blocking=True).sum()


def upload_pinned_index_selected(s, q, k, v, lens, score):
    return q + s.pinned[torch.tensor([0, 2])].to(q.device, non_blocking=True).sum()


case("upload_like_another_tensor", lambda s, q, k, v, lens, score: q @ s.host_matrix.to(q))
case("upload_type_as", lambda s, q, k, v, lens, score: q + s.host_row.type_as(q).sum())


def upload_into_out_argument(s, q, k, v, lens, score):
    staged = torch.empty(8, device=q.device)
    staged.copy_(s.host_row[None].expand(1, 8)[0])
    return q + staged.sum()


def upload_state_dict_of_layer(s, q, k, v, lens, score):
    s.norm.load_state_dict(s.host_norm)
    return s.norm(q)


case("upload_one_element", lambda s, q, k, v, lens, score: q * torch.ones(1).to(q.device))
case("upload_nothing", lambda s, q, k, v, lens, score: torch.cat([q.flatten(), torch.ones(0).to(q.device)]))


def upload_padded_rows(s, q, k, v, lens, score):
    rows = torch.nn.utils.rnn.pad_sequence([torch.ones(2), torch.ones(D)], batch_first=True)
    return q[:, 0, 0] * rows.cuda()


def upload_cached_after_first(s, q, k, v, lens, score):
    if "row" not in s.table:
        s.table["row"] = s.host_row.to(q.device)
    return q + s.table["row"].sum()


def download_non_blocking_pageable_target(s, q, k, v, lens, score):
    s.host_row.copy_(s.buf, non_blocking=True)
    return q * 2


def download_list_of_last(s, q, k, v, lens, score):
    s.tokens.append(score.argmax(-1)[0].tolist())
    return score.softmax(-1)


# Solvers.


case("solver_inv", lambda s, q, k, v, lens, score: q @ torch.linalg.inv(s.spd))
case("solver_inv_batched", lambda s, q, k, v, lens, score: torch.linalg.inv(s.batch))


def solver_inv_ex(s, q, k, v, lens, score):
    inverse, info = torch.linalg.inv_ex(s.spd)
    return q @ inverse, info


def solver_inv_ex_batched_of_inputs(s, q, k, v, lens, score):
    gram = k[:, 0].transpose(1, 2) @ k[:, 0] + torch.eye(D, device=q.device)
    return torch.linalg.inv_ex(gram).inverse


case("solver_inverse_method", lambda s, q, k, v, lens, score: s.spd.inverse() @ s.w)
case("solver_slogdet", lambda s, q, k, v, lens, score: torch.linalg.slogdet(s.batch).logabsdet)


def solver_cholesky_ex_then_solve(s, q, k, v, lens, score):
    low = torch.linalg.cholesky_ex(s.spd).L
    return torch.cholesky_solve(s.w, low)


case("solver_solve_ex", lambda s, q, k, v, lens, score: torch.linalg.solve_ex(s.spd, s.w).result)
case("solver_tensorinv", lambda s, q, k, v, lens, score: torch.linalg.tensorinv(s.spd.view(D, 4, 8), ind=1))
case("solver_matrix_power_negative", lambda s, q, k, v, lens, score: torch.linalg.matrix_power(s.spd, -1))
case("solver_lu_factor_ex", lambda s, q, k, v, lens, score: torch.linalg.lu_factor_ex(s.spd).LU)


# State that Python keeps.


case("counted_by_iterator", lambda s, q, k, v, lens, score: q + next(s.ticket))


def counted_in_python_and_printed(s, q, k, v, lens, score):
    s.calls += 1
    return q * (1 + s.calls), s.calls


def counted_and_returned_alone(s, q, k, v, lens, score):
    s.calls += 1
    return q * 2, s.calls


def counted_into_host_tensor(s, q, k, v, lens, score):
    s.host += 1
    return q * s.host


def counted_into_full(s, q, k, v, lens, score):
    s.calls += 1
    return q + torch.full((D,), float(s.calls), device=q.device)


def counted_by_list_length(s, q, k, v, lens, score):
    s.history.append(None)
    return q.roll(len(s.history), -1)


def counted_as_scalar_tensor(s, q, k, v, lens, score):
    s.calls += 1
    return q * torch.scalar_tensor(s.calls, device=q.device)


def counted_as_position_arange(s, q, k, v, lens, score):
    s.calls += 1
    positions = torch.arange(s.calls, s.calls + S, device=q.device)
    return k * positions[:, None].cos()


def counted_and_assigned_to_slice(s, q, k, v, lens, score):
    s.calls += 1
    s.buf[:1] = s.calls
    return q * s.buf[0]


def counted_and_assigned_to_element(s, q, k, v, lens, score):
    s.calls += 1
    s.buf[0] = s.calls
    return q * s.buf[0]


@functools.cache
def _angles(length, device):
    return torch.arange(length, device=device).float()[:, None] / 10000


case("cached_angles", lambda s, q, k, v, lens, score: k * _angles(S, q.device).cos())


# What engines do.


def experts_over_unique(s, q, k, v, lens, score):
    chosen = (score[:, :D] @ s.w).argmax(-1) % EXPERTS
    out = torch.zeros(B, D, device=q.device)
    for expert in chosen.unique().tolist():
        out[chosen == expert] = score[chosen == expert, :D] @ s.experts[expert]
    return out


def experts_all_weighted(s, q, k, v, lens, score):
    gates = F.one_hot((score[:, :D] @ s.w).argmax(-1) % EXPERTS, EXPERTS).to(score.dtype)
    return torch.einsum("be,bd,edf->bf", gates, score[:, :D], s.experts)


def experts_grouped_bf16(s, q, k, v, lens, score):
    rows = k.reshape(-1, D).bfloat16()
    ends = torch.arange(1, EXPERTS + 1, device=q.device, dtype=torch.int32) * (rows.shape[0] // EXPERTS)
    return F.grouped_mm(rows, s.experts.bfloat16(), offs=ends)


def experts_sorted_tokens(s, q, k, v, lens, score):
    chosen = score[:, :EXPERTS].topk(2).indices.flatten()
    order = chosen.argsort(stable=True)
    counts = torch.zeros(EXPERTS, dtype=torch.long, device=q.device).scatter_add_(0, chosen, torch.ones_like(chosen))
    return order, counts.cumsum(0)


def sampled_top_p(s, q, k, v, lens, score):
    probs, order = score.softmax(-1).sort(descending=True)
    probs = probs.masked_fill(probs.cumsum(-1) - probs > 0.9, 0.0)
    return order.gather(-1, torch.multinomial(probs, 1))


def penalty_by_bincount(s, q, k, v, lens, score):
    seen = torch.bincount(lens, minlength=S)[:S]
    return score - seen


def masked_mean_by_length(s, q, k, v, lens, score):
    live = torch.arange(S, device=q.device) < lens[:, None]
    return (score * live).sum(-1) / lens


case("longest_row_sliced", lambda s, q, k, v, lens, score: k[:, :, : lens.max()] * 2)


def assert_inside(s, q, k, v, lens, score):
    assert (lens > 0).all()
    return q * 2


case("embedding_of_clamped", lambda s, q, k, v, lens, score: F.embedding(lens.clamp(0, VOCAB - 1), s.emb))


def tensor_split_by_device_sizes(s, q, k, v, lens, score):
    return torch.split(score, [*lens.tolist()[:1], S - int(lens[0])], dim=-1)[0].sum()


case("quantile_of_scores", lambda s, q, k, v, lens, score: torch.quantile(score, 0.9, dim=-1))
case("combinations_of_row", lambda s, q, k, v, lens, score: torch.combinations(score[0, :5]))


def index_add_by_expert(s, q, k, v, lens, score):
    return torch.zeros(EXPERTS, S, device=q.device).index_add_(0, lens % EXPERTS, score)


CASES |= collected(globals())
CASES["sampled_top_p"].random = True
