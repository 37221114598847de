"""Functions whose verdict a real H200 gave (shared_truth.csv), as they came with the issue that asked for the checker."""

# ruff: noqa: E702, E731, I001, N812
# fmt: off
# mypy: ignore-errors
import torch
import torch.nn.functional as F
B, S, H, D = 2, 64, 4, 32
CASES = {}
def case(f):
    CASES[f.__name__] = f
    return f

class State:  # what a module would keep between calls
    def __init__(self, dev):
        self.buf = torch.zeros(8, device=dev)
        self.calls = 0
        self.cache = None
        self.pinned = torch.ones(8).pin_memory() if dev == "cuda" else torch.ones(8)
        self.w = torch.randn(D, D, generator=torch.Generator().manual_seed(1)).to(dev)

def attn(q, k, v, m):
    a = (q @ k.transpose(-1, -2)) * 0.1
    return a.masked_fill(~m, -1e9).softmax(-1) @ v

@case
def nonzero_gather(s, q, k, v, lens, score):
    i = (score[0] > 0).nonzero().squeeze(-1)
    return q @ k[:, :, i].transpose(-1, -2) @ v[:, :, i]
@case
def nonzero_static_gather(s, q, k, v, lens, score):
    i = torch.nonzero_static(score[0] > 0, size=16, fill_value=0).squeeze(-1)
    return q @ k[:, :, i].transpose(-1, -2) @ v[:, :, i]
@case
def bool_index(s, q, k, v, lens, score):
    m = score[0] > 0
    return q @ k[:, :, m].transpose(-1, -2) @ v[:, :, m]
@case
def bool_assign_tensor(s, q, k, v, lens, score):
    a = score.clone(); m = a < 0; a[m] = -a[m]
    return q * a.sum()
@case
def where_three_arg(s, q, k, v, lens, score):
    return q * torch.where(score > 0, score, -score).sum()
@case
def cpu_scalar_operand(s, q, k, v, lens, score):
    return q * torch.tensor(0.125)
@case
def scalar_setitem(s, q, k, v, lens, score):
    s.buf[0] = 5.0
    return q + s.buf[0]
@case
def slice_fill(s, q, k, v, lens, score):
    s.buf[:4] = 5.0
    return q + s.buf[0]
@case
def copy_pinned_blocking(s, q, k, v, lens, score):
    s.buf.copy_(s.pinned)
    return q + s.buf.sum()
@case
def data_dependent_if(s, q, k, v, lens, score):
    return q * 2 if score.sum() > 0 else q
@case
def repeat_interleave_dynamic(s, q, k, v, lens, score):
    return q * torch.repeat_interleave(torch.arange(B, device=q.device), lens).sum()
@case
def assert_all(s, q, k, v, lens, score):
    assert (lens <= S).all()
    return q * 2
@case
def assert_async(s, q, k, v, lens, score):
    torch._assert_async((lens <= S).all())
    return q * 2
@case
def split_by_lens(s, q, k, v, lens, score):
    return torch.cat([p * 2 for p in torch.split(k.reshape(-1, D)[:80], lens.tolist())])
@case
def format_value(s, q, k, v, lens, score):
    r = q * 2
    str(r.mean())
    return r
@case
def cached_on_first_call(s, q, k, v, lens, score):
    if s.cache is None:
        s.cache = torch.tensor([2.0], device=q.device)
    return q * s.cache
@case
def bincount(s, q, k, v, lens, score):
    return q * torch.bincount(lens).sum()
@case
def index_put_accumulate(s, q, k, v, lens, score):
    a = torch.zeros(S, device=q.device)
    a.index_put_((lens,), torch.ones(B, device=q.device), accumulate=True)
    return q * a.sum()
@case
def sort_gather(s, q, k, v, lens, score):
    i = score.sort(-1).indices[:, :8]
    return q * score.gather(-1, i).sum()
@case
def arange_tensor_bound(s, q, k, v, lens, score):
    return q * torch.arange(lens[0], device=q.device).sum()
@case
def isnan_any_guard(s, q, k, v, lens, score):
    if torch.isnan(score).any():
        raise ValueError("nan")
    return q * 2
@case
def equal_check(s, q, k, v, lens, score):
    return q * (2 if torch.equal(lens, lens) else 3)
@case
def allclose_check(s, q, k, v, lens, score):
    return q * (2 if torch.allclose(score, score) else 3)
@case
def varlen_pack(s, q, k, v, lens, score):
    cu = F.pad(lens.cumsum(0), (1, 0))
    return q * cu[-1]
@case
def max_len_int(s, q, k, v, lens, score):
    n = int(lens.max())
    return q * n
@case
def clamp_with_tensor(s, q, k, v, lens, score):
    return torch.clamp(q, max=score.max())
@case
def numpy_roundtrip(s, q, k, v, lens, score):
    import numpy as np
    return q * torch.from_numpy(np.arange(4)).to(q.device).sum()

def inputs(dev, seed=0):
    g = torch.Generator().manual_seed(seed)
    t = lambda *a: torch.randn(*a, generator=g).to(dev)
    lens = torch.tensor([40, 40] if seed == 0 else [24, 56]).to(dev)
    return t(B, H, 1, D), t(B, H, S, D), t(B, H, S, D), lens, t(B, S)
