"""What each operation of PyTorch does under capture. Each is one line on inputs x (4 x 8), m (4 x 4), i (4 whole numbers)."""
# mypy: allow-untyped-defs, allow-untyped-calls

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its name everywhere
from tests.needs import one_in

from crosstie_port.capture.check import check

Operation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]

REFUSED: dict[str, Operation] = {
    "nonzero": lambda x, m, i: x.nonzero(),
    "where of one argument": lambda x, m, i: torch.where(x > 0)[0],
    "masked_select": lambda x, m, i: x.masked_select(x > 0),
    "mask assignment of a tensor": lambda x, m, i: x.clone().__setitem__(x > 0, x[x > 0]),
    "unique": lambda x, m, i: i.unique(),
    "unique_consecutive": lambda x, m, i: i.unique_consecutive(),
    "unique of rows": lambda x, m, i: x.unique(dim=0),
    "bincount": lambda x, m, i: i.bincount(minlength=16),
    "histc without bounds": lambda x, m, i: x.histc(4),
    "allclose": lambda x, m, i: torch.tensor(torch.allclose(x, x + 1)),
    "equal": lambda x, m, i: x * torch.equal(x, x.clone()),
    "arange to a tensor": lambda x, m, i: torch.arange(i[0], device=x.device),
    "linspace to a tensor": lambda x, m, i: torch.linspace(x.min(), x.max(), 4),
    "slice to a tensor": lambda x, m, i: x[:, : i[0]],
    "one_hot of unknown width": lambda x, m, i: F.one_hot(i),
    "index by a list": lambda x, m, i: x[[0, 2]],
    "index by a host tensor": lambda x, m, i: x[torch.tensor([0, 2])],
    "number at a device index": lambda x, m, i: x.clone().__setitem__(i % 4, 1.0),
    "masked_fill with a device value": lambda x, m, i: x.masked_fill(x > 0, x.sum()),
    "index_fill with a device value": lambda x, m, i: x.index_fill(0, i % 4, x.sum()),
    "as_tensor of a list": lambda x, m, i: x * torch.as_tensor([1.0], device=x.device),
    "new_tensor": lambda x, m, i: x * x.new_tensor([1.0]),
    "host tensor moved": lambda x, m, i: x * torch.ones(8).to(x.device, non_blocking=True),
    "pinned and converted while waiting": lambda x, m, i: torch.ones(8).pin_memory().to(x.device, torch.float16),
    "pinned but strided": lambda x, m, i: torch.ones(8, 8).pin_memory()[:, ::2].to(x.device, non_blocking=True),
    "pinned but transposed": lambda x, m, i: _into(m.clone(), torch.ones(4, 4).pin_memory().t()),
    "pinned but expanded": lambda x, m, i: _into(m.clone(), torch.ones(4).pin_memory()),
    "tolist": lambda x, m, i: x * len(x.tolist()),
    "print": lambda x, m, i: (repr(x), x * 2)[1],
    "element in tensor": lambda x, m, i: x * (3 in i),
    "iteration with int": lambda x, m, i: x * sum(int(n) for n in i),
    "index by tuples": lambda x, m, i: x[(0, 1), (1, 2)],
    "old constructor of data": lambda x, m, i: x * x.new([1.0]),
    "type by the device's name": lambda x, m, i: x * torch.ones(8).type("torch.cuda.FloatTensor"),
    "several tensors copied over": lambda x, m, i: torch._foreach_copy_([m.clone()], [torch.ones(4, 4)]),
    "pinned and moved to shared memory": lambda x, m, i: _into(
        m.clone(), torch.ones(4, 4).pin_memory().share_memory_()
    ),
    "inverse without check, checked after all": lambda x, m, i: torch.linalg.inv_ex(m, check_errors=True)[0],
    "inverse": lambda x, m, i: torch.linalg.inv(m),
    "solve": lambda x, m, i: torch.linalg.solve(m, m),
    "cholesky": lambda x, m, i: torch.linalg.cholesky(m @ m.T + torch.eye(4, device=x.device)),
    "svd": lambda x, m, i: torch.linalg.svdvals(m),
    "eigh": lambda x, m, i: torch.linalg.eigvalsh(m @ m.T),
    "rank": lambda x, m, i: torch.linalg.matrix_rank(m),
    "matrix exponential": lambda x, m, i: torch.linalg.matrix_exp(m),
    "normal with spread on the device": lambda x, m, i: torch.normal(x, x.abs()),
    "isin many": lambda x, m, i: torch.isin(i, torch.arange(200, device=x.device)),
    "searchsorted with a sorter": lambda x, m, i: torch.searchsorted(x[0], x[1], sorter=x[0].argsort()),
    "to_sparse": lambda x, m, i: x.to_sparse().sum(),
    "nested": lambda x, m, i: torch.nested.nested_tensor([x[0, :3], x[1]], layout=torch.strided).to_padded_tensor(0.0),
    "grouped products in single precision": lambda x, m, i: torch._grouped_mm(
        x, x.T.unsqueeze(0).contiguous(), offs=torch.full((1,), 4, dtype=torch.int32, device=x.device)
    ),
    "istft": lambda x, m, i: _there_and_back(x, torch.ones(4, device=x.device)),
}
TAKEN: dict[str, Operation] = {
    "nonzero_static": lambda x, m, i: x.nonzero_static(size=8),
    "where of three": lambda x, m, i: torch.where(x > 0, x, 0.0),
    "mask assignment of a number": lambda x, m, i: x.clone().__setitem__(x > 0, 1.0),
    "masked_scatter": lambda x, m, i: x.masked_scatter(x > 0, x * 2),
    "histc with bounds": lambda x, m, i: x.histc(4, min=-1.0, max=1.0),
    "equal to itself": lambda x, m, i: x * torch.equal(x, x),
    "one_hot of known width": lambda x, m, i: F.one_hot(i, 16),
    "index by a device tensor": lambda x, m, i: x[i % 4],
    "index_put accumulate": lambda x, m, i: x.index_put((i % 4,), x[0], accumulate=True),
    "number in a slice": lambda x, m, i: x.clone().__setitem__(slice(0, 2), 1.0),
    "masked_fill with a number": lambda x, m, i: x.masked_fill(x > 0, 1.0),
    "host scalar as operand": lambda x, m, i: x * torch.tensor(0.5),
    "tensor made on the device": lambda x, m, i: x * torch.full((8,), 2.0, device=x.device),
    "pinned and transposed alike": lambda x, m, i: torch.ones(8, 4).pin_memory().t().to(x.device, non_blocking=True),
    "pinned into a transposed target": lambda x, m, i: _into(m.clone().t(), torch.ones(4, 4).pin_memory()),
    "pinned without waiting": lambda x, m, i: x * torch.ones(8).pin_memory().to(x.device, non_blocking=True),
    "pinned and converted": lambda x, m, i: torch.ones(8).pin_memory().to(x.device, torch.float16, non_blocking=True),
    "pinned behind an array": lambda x, m, i: _into_by_array(m.clone(), torch.ones(4, 4).pin_memory()),
    "to the host without waiting": lambda x, m, i: (x.to("cpu", non_blocking=True), x * 2)[1],
    "iteration": lambda x, m, i: sum(row for row in x),
    "inverse unchecked": lambda x, m, i: torch.linalg.inv_ex(m).inverse,
    "cholesky unchecked": lambda x, m, i: torch.linalg.cholesky_ex(m @ m.T + torch.eye(4, device=x.device)).L,
    "norms": lambda x, m, i: torch.linalg.vector_norm(x) + torch.linalg.matrix_norm(m),
    "embedding": lambda x, m, i: F.embedding(i % 4, x),
    "isin few": lambda x, m, i: torch.isin(i, torch.arange(2, device=x.device)),
    "searchsorted": lambda x, m, i: torch.searchsorted(x[0].sort().values, x[1]),
    "sort and gather": lambda x, m, i: x.gather(1, x.argsort(1)),
    "multinomial": lambda x, m, i: x.softmax(-1).multinomial(2),
    "attention": lambda x, m, i: F.scaled_dot_product_attention(x[None], x[None], x[None], is_causal=True),
    "grouped products in bfloat16": lambda x, m, i: torch._grouped_mm(
        x.bfloat16(),
        torch.ones(1, 8, 8, device=x.device, dtype=torch.bfloat16),
        offs=torch.full((1,), 4, dtype=torch.int32, device=x.device),
    ),
    "autocast": lambda x, m, i: _half(x),
    "vmap": lambda x, m, i: torch.vmap(lambda row: (row * 2).sum())(x),
    "gradient": lambda x, m, i: torch.func.grad(lambda y: (y * y).sum())(x),
    "inference mode": lambda x, m, i: _inferred(x),
    "complex conjugate": lambda x, m, i: torch.fft.fft(x).conj().real,
    "resized in place": lambda x, m, i: torch.empty(0, device=x.device).resize_(4, 8).copy_(x).unsqueeze_(0),
    "stop before the first": lambda x, m, i: x[:0].sum(),
    "module properties": lambda x, m, i: x * (x.is_cuda + torch.cuda.current_device() + x.get_device() + 1),
    "cache emptied": lambda x, m, i: (torch.cuda.empty_cache(), x * 2)[1],
}


def _into(target, source):
    return target.copy_(source, non_blocking=True)


def _into_by_array(target, pinned):
    return target.copy_(torch.from_numpy(pinned.numpy()), non_blocking=True)


def _there_and_back(x, window):
    return torch.istft(torch.stft(x, 4, 1, window=window, return_complex=True), 4, 1, window=window)


def _half(x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        product = x @ x.T
    assert product.dtype is torch.bfloat16
    return product


def _inferred(x):
    with torch.inference_mode():
        y = x * 2
        y[:, :4].add_(1)
        return y.unsqueeze_(0)


def inputs(device: str, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x, m = torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)
    return x.to(device), m.to(device), torch.randint(1, 8, (4,), generator=generator).to(device)


@pytest.mark.parametrize("name", one_in(4, REFUSED))
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_capture_refuses(name: str) -> None:
    result = check(REFUSED[name], inputs)
    assert result.verdict == "error"
    assert {hazard.kind for hazard in result.hazards} & {"host-sync", "pageable-copy", "data-dependent-shape"}


@pytest.mark.parametrize("name", one_in(4, TAKEN))
def test_operations_that_capture_takes_are_no_hazard(name: str) -> None:
    result = check(TAKEN[name], inputs)
    assert (result.verdict, result.hazards) == ("ok", ())
