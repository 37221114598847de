"""What is kept of one tensor: norms, a grid of samples, a hash. A kilobyte or two, whatever its size.

Samples are a grid, the same columns of several rows: factors of a column, of a row and of all can be told apart. With
each position come those where its value would be if the tensor were laid out wrongly in one of the ways of `LAYOUTS`:
such a mistake is then recognised from the samples alone.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# Of a tensor's rows, and of each row's values.
SAMPLED_ROWS, SAMPLED_COLUMNS = 6, 12
# Rows whose norm is kept, and groups of columns: heads where their width is known.
MOST_ROWS, MOST_GROUPS = 64, 256
GROUP = 64
# The type of a mask that is kept as what it blocks.
MASK = "mask"


@dataclass(frozen=True)
class TensorSummary:
    """Of a whole tensor, NaN and infinite values apart; `rows` and `groups` have a norm, a mean and a maximum each."""

    shape: tuple[int, ...]
    dtype: str
    hash: str
    norm: float
    mean: float
    largest: float
    nans: int
    infinities: int
    zeros: int
    # The grid, then the same positions in each of LAYOUTS.
    samples: Floats
    rows: Floats
    groups: Floats

    @property
    def elements(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def is_whole(self) -> bool:
        """Whether it holds whole numbers: indices or a mask, which agree or do not."""
        return "int" in self.dtype or self.dtype in ("bool", MASK)

    def grid(self, layout: int = 0) -> Floats:
        """Sampled values, a row of the tensor a row; or what would be there if it were laid out as LAYOUTS says."""
        height, width = grid_size(self.shape)
        return np.asarray(self.samples.reshape(len(LAYOUTS) + 1, height, width)[layout])


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64: the same on every machine, in every release of every library."""
    with np.errstate(over="ignore"):
        numbers = numbers + np.uint64(0x9E3779B97F4A7C15)
        numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return numbers ^ (numbers >> np.uint64(31))


def draws(seed: int, salt: int, count: int, below: int) -> Integers:
    """`count` numbers from 0 to `below` - 1, perhaps some of them twice."""
    with np.errstate(over="ignore"):
        start = np.uint64(seed) * np.uint64(0x632BE59BD9B4E019) + np.uint64(salt) * np.uint64(0x9E3779B97F4A7C15)
        return (_mixed(np.arange(count, dtype=np.uint64) + start) % np.uint64(max(below, 1))).astype(np.int64)


def matrix_size(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns, where everything but the last dimension is rows."""
    columns = shape[-1] if shape else 1
    return (int(np.prod(shape, dtype=np.int64)) // columns if columns else 0), columns


def grid_size(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = matrix_size(shape)
    return min(rows, SAMPLED_ROWS), min(columns, SAMPLED_COLUMNS)


def chosen(seed: int, salt: int, count: int, below: int) -> Integers:
    """Different ones in order, the first and the last among them where they are several."""
    if count >= below:
        return np.arange(below, dtype=np.int64)
    found = {0, below - 1} if count > 1 else set()
    for one in draws(seed, salt, 64 * count, below):
        if len(found) >= count:
            break
        found.add(int(one))
    for one in range(below):
        if len(found) >= count:
            break
        found.add(one)
    return np.array(sorted(found), dtype=np.int64)


def _at(rows: int, columns: int, row: Integers, column: Integers) -> Integers:
    return row * columns + column


def _transposed(rows: int, columns: int, head: int, row: Integers, column: Integers) -> Integers:
    flat = _at(rows, columns, row, column)
    return flat % rows * columns + flat // rows


def _heads_first(rows: int, columns: int, head: int, row: Integers, column: Integers) -> Integers:
    flat = _at(rows, columns, row, column)
    return (flat // head % rows * (columns // head) + flat // (head * rows)) * head + flat % head


def _halved(rows: int, columns: int, head: int, row: Integers, column: Integers) -> Integers:
    inside, half = column % head, max(head // 2, 1)
    moved = inside % half * 2 + inside // half if head % 2 == 0 else inside
    return _at(rows, columns, row, column - inside + moved)


def _swapped(rows: int, columns: int, head: int, row: Integers, column: Integers) -> Integers:
    return _at(rows, columns, row, (column + columns // 2) % columns)


# Ways to lay a tensor out wrongly: (rows, columns, width of a head, row, column) -> where a right one has the value
# that a wrong one has there.
LAYOUTS: dict[str, Callable[[int, int, int, Integers, Integers], Integers]] = {
    "transposed": _transposed,
    "heads before tokens": _heads_first,
    "halves of a head for pairs": _halved,
    "halves swapped": _swapped,
}


def group_width(columns: int, head: int) -> int:
    """Columns of a group: a head's where the model says how wide one is, and all where there would be too many."""
    for width in (head, GROUP):
        if width and columns % width == 0 and columns // width <= MOST_GROUPS:
            return width
    return max(columns, 1)


def positions(shape: tuple[int, ...], seed: int, head: int) -> Integers:
    rows, columns = matrix_size(shape)
    height, width = grid_size(shape)
    row = np.repeat(chosen(seed, rows, height, rows), width)
    column = np.tile(sampled_columns(shape, seed), height)
    found = [_at(rows, columns, row, column)]
    found += [layout(rows, columns, group_width(columns, head), row, column) for layout in LAYOUTS.values()]
    return np.concatenate(found) if rows * columns else np.zeros(0, dtype=np.int64)


def sampled_rows(shape: tuple[int, ...], seed: int) -> Integers:
    rows, _ = matrix_size(shape)
    return chosen(seed, rows, grid_size(shape)[0], rows)


def sampled_columns(shape: tuple[int, ...], seed: int) -> Integers:
    _, columns = matrix_size(shape)
    return chosen(seed, ~columns & 0xFFFF, grid_size(shape)[1], columns)


def normed_rows(shape: tuple[int, ...], seed: int) -> Integers:
    rows, _ = matrix_size(shape)
    return chosen(seed, rows + 1, min(rows, MOST_ROWS), rows)


def _of(parts: Floats) -> Floats:
    """Norm, mean and largest of each row of a matrix."""
    if not parts.size:
        return np.zeros((parts.shape[0], 3))
    return np.stack([np.sqrt((parts**2).sum(1)), parts.mean(1), np.abs(parts).max(1)], axis=1)


def summarise(tensor: Any, seed: int, head: int = 0) -> TensorSummary:
    """Of a PyTorch tensor on any device. It is copied to the host once; sums are taken there, in float64."""
    import torch

    # A copy, since an engine may write into the same memory next.
    held = tensor.detach().to("cpu", copy=True).contiguous()
    shape, dtype = tuple(held.shape), str(held.dtype).removeprefix("torch.")
    raw = held.reshape(-1).view(torch.uint8).numpy() if held.numel() else np.zeros(0, dtype=np.uint8)
    values = held.to(torch.float64).reshape(-1).numpy()
    finite = np.isfinite(values)
    nans = int(np.isnan(values).sum())
    # What is not a number would make every sum one: it is counted, and left out of them.
    clean = values if finite.all() else np.where(finite, values, 0.0)
    rows, columns = matrix_size(shape)
    matrix = clean.reshape(rows, columns)
    width = group_width(columns, head)
    by_group = matrix.reshape(rows, -1, width).transpose(1, 0, 2).reshape(max(columns // width, 0), -1)
    return TensorSummary(
        shape=shape, dtype=dtype, hash=hashlib.blake2b(raw.data, digest_size=8, person=dtype[:16].encode()).hexdigest(),
        norm=float(np.sqrt((clean**2).sum())), mean=float(clean.mean()) if clean.size else 0.0,
        largest=float(np.abs(clean).max()) if clean.size else 0.0,
        nans=nans, infinities=int((~finite).sum()) - nans, zeros=int((values == 0.0).sum()),
        samples=values[positions(shape, seed, head)], rows=_of(matrix[normed_rows(shape, seed)]),
        groups=_of(by_group) if clean.size else np.zeros((0, 3)),
    )  # fmt: skip
