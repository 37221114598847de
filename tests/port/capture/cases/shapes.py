"""Graph-capture cases: sizes that depend on data, creation ops, views and storage."""
# mypy: allow-untyped-defs, allow-untyped-calls, allow-untyped-decorators

import torch
import torch.nn.functional as F  # noqa: N812
from tests.port.capture.cases.setting import B, D, H, S, State, collected, inputs, registry

__all__ = ["CASES", "State", "inputs"]
CASES, _ = registry(globals())


def tril_indices(s, q, k, v, lens, score):
    rows, columns = torch.tril_indices(D, D, device=q.device)
    return q * s.w[rows, columns].sum()


def pad_sequence_by_lens(s, q, k, v, lens, score):
    rows = [row[:n] for row, n in zip(score, lens, strict=True)]
    return q * torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).sum()


def cu_seqlens_host_list(s, q, k, v, lens, score):
    ends = [0]
    for n in lens.tolist():
        ends.append(ends[-1] + n)
    return q * torch.tensor(ends, device=q.device)[-1]


def meshgrid_positions(s, q, k, v, lens, score):
    a, b = torch.meshgrid(torch.arange(4, device=q.device), torch.arange(8, device=q.device), indexing="ij")
    return q * (a * b).sum()


def jagged_from_offsets(s, q, k, v, lens, score):
    offsets = F.pad(lens.cumsum(0), (1, 0))
    nested = torch.nested.nested_tensor_from_jagged(k.reshape(-1, D)[:80], offsets)
    return nested.values() * 2


def sparse_coo_coalesced(s, q, k, v, lens, score):
    index = torch.stack([lens % 4, lens % 8])
    sparse = torch.sparse_coo_tensor(index, score[:, 0], (4, 8)).coalesce()
    return q + sparse.to_dense().sum()


def sparse_csr_matmul(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = s.w.relu().to_sparse_csr()
    return s.cache @ k[0, 0].t()


CASES |= collected(globals())
