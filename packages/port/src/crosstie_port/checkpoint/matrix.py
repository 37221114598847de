"""One matrix under other scales: as many of its values kept as E4M3 can keep, and what the rest costs.

Where source and new scales overlap, the matrix falls into cells, each with one scale before and one after. A code's new
byte then depends on the code and on the ratio of the two scales alone, and comes out of a table. A new scale is the one
of the cell with the largest value, times the power of two that leaves most room below: whatever differs from it by
powers of two keeps its value unless it falls out of E4M3's range.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie.core.errors import BadData
from crosstie.port.checkpoint.fp8 import (
    LARGEST,
    VALUES,
    Bytes,
    Dialect,
    Inexact,
    encode,
    scale_values,
    sound_scales,
    stored,
)

Grid = NDArray[np.float64]
Rows = NDArray[np.intp]
# The bytes of the rows from one to another.
ReadRows = Callable[[int, int], Bytes]

# FP4 (E2M1), two in a byte, the lower half first.
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
FP4_VALUES = np.concatenate([_E2M1, -_E2M1])
# So many values at a time: some of their numbers are eight bytes long.
_SLAB = 1 << 19
# Tables of so many ratios are made at a time.
_RATIOS = 1 << 12


class RoundingLoss(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a matrix's values, both sides in float64."""

    values: int
    # Those that are not what they were.
    changed: int
    # The largest of |new - old| / |old|, and sqrt(sum (new - old)^2 / sum old^2).
    max_relative: float
    rms_relative: float


class Matrix(msgspec.Struct, frozen=True, kw_only=True):
    """A weight as it is, and how its scales shall be shared. Sides of a block: rows, columns."""

    name: str
    rows: int
    columns: int
    # None: FP4.
    dialect: Dialect | None
    scale: str
    scale_dtype: str
    block: tuple[int, int]
    new_dialect: Dialect
    new_scale_dtype: str
    new_block: tuple[int, int]

    @property
    def grid(self) -> tuple[int, int]:
        """How many new scales, along both sides."""
        return -(-self.rows // self.new_block[0]), -(-self.columns // self.new_block[1])

    @property
    def values(self) -> Grid:
        return FP4_VALUES if self.dialect is None else VALUES[self.dialect]


class Opened:
    """A matrix with its bytes: the cells, the new scales and the new codes."""

    def __init__(self, matrix: Matrix, read: ReadRows, scales: Bytes, file: Path):
        self.matrix, self._read, self._file = matrix, read, file
        self._row_edges = _edges(matrix.rows, matrix.block[0], matrix.new_block[0])
        self._column_edges = _edges(matrix.columns, matrix.block[1], matrix.new_block[1])
        try:
            before = sound_scales(scales, matrix.scale_dtype)
        except Inexact as error:
            raise BadData(file, matrix.scale, str(error)) from None
        across = -(-matrix.columns // matrix.block[1])
        self._scales = before.reshape(-1, across)[
            np.ix_(self._row_edges // matrix.block[0], self._column_edges // matrix.block[1])
        ]
        self.new_scales = stored(self._chosen(), matrix.new_scale_dtype)

    def slabs(self) -> Iterator[tuple[int, Bytes]]:
        """The new codes, some rows at a time, with the first row's number."""
        tables, which = self._tables()
        width = tables.shape[1]
        plain = len(tables) == 1 and np.array_equal(tables[0], np.arange(width, dtype=np.uint8))
        for start, codes in self._slabs():
            if plain:
                yield start, codes
            elif len(tables) == 1:
                yield start, tables[0][codes]
            else:
                at = self._spread(which, start, len(codes)) * width + codes
                yield start, tables.reshape(-1)[at]

    def cost(self, read_new: ReadRows, new_scales: Bytes) -> RoundingLoss:
        """Of codes and scales as they were read back from the new file."""
        matrix = self.matrix
        after = self._over_cells(scale_values(new_scales, matrix.new_scale_dtype))
        changed, largest, wrong, whole = 0, 0.0, 0.0, 0.0
        for start, codes in self._slabs():
            old = matrix.values[codes] * self._spread(self._scales, start, len(codes))
            new = VALUES[matrix.new_dialect][read_new(start, start + len(codes))]
            new *= self._spread(after, start, len(codes))
            whole += float(np.vdot(old, old))
            new -= old
            differ = new != 0
            if differ.any():
                # Zero stays zero, so that no old value here is.
                changed += int(np.count_nonzero(differ))
                largest = max(largest, float((np.abs(new[differ]) / np.abs(old[differ])).max()))
                wrong += float(np.vdot(new, new))
        rms = float(np.sqrt(wrong / whole)) if wrong else 0.0
        return RoundingLoss(
            values=matrix.rows * matrix.columns, changed=changed, max_relative=largest, rms_relative=rms
        )

    def _slabs(self) -> Iterator[tuple[int, Bytes]]:
        step = max(1, _SLAB // self.matrix.columns)
        for start in range(0, self.matrix.rows, step):
            codes = self._read(start, min(start + step, self.matrix.rows))
            yield start, codes if self.matrix.dialect is not None else _unpacked(codes)

    def _magnitudes(self) -> Bytes:
        """The largest code without its sign, cell by cell."""
        mask = 0x07 if self.matrix.dialect is None else 0x7F
        found = np.zeros(self._scales.shape, np.uint8)
        for start, codes in self._slabs():
            self._check(codes)
            cells = self._cell_rows(start, len(codes))
            first = np.flatnonzero(np.diff(cells, prepend=-1))
            narrow = np.maximum.reduceat(codes & mask, self._column_edges, axis=1)
            found[cells[first]] = np.maximum(found[cells[first]], np.maximum.reduceat(narrow, first, axis=0))
        return found

    def _check(self, codes: Bytes) -> None:
        if self.matrix.dialect is None:
            return
        damaged = (codes & 0x7F == 0x7F) if self.matrix.dialect == "e4m3fn" else (codes == 0x80)
        if damaged.any():
            lost = f"{np.count_nonzero(damaged):,} weights are NaN: the checkpoint is damaged"
            raise BadData(self._file, self.matrix.name, lost)

    def _chosen(self) -> Grid:
        """The new scales, as they would be without rounding."""
        matrix = self.matrix
        magnitudes = matrix.values[self._magnitudes()]
        largest = magnitudes * self._scales
        peak = largest == self._over_cells(self._by_group(np.maximum, largest))
        scale = self._by_group(np.maximum, np.where(peak, self._scales, 0))
        peaks = self._by_group(np.maximum, np.where(peak, magnitudes, 0))
        alike = self._by_group(np.minimum, np.where(largest > 0, self._scales, np.inf)) >= self._by_group(
            np.maximum, np.where(largest > 0, self._scales, 0)
        )
        kept = alike & (matrix.dialect == matrix.new_dialect)
        room = np.frexp(LARGEST[matrix.new_dialect] / np.where(peaks > 0, peaks, LARGEST[matrix.new_dialect]))[1] - 1
        return scale * np.exp2(-np.where(kept, 0, room))

    def _tables(self) -> tuple[Bytes, Rows]:
        """New bytes by code, one table for each ratio of scales, and which of them is each cell's."""
        matrix = self.matrix
        after = self._over_cells(scale_values(self.new_scales, matrix.new_scale_dtype))
        if not (np.isfinite(after) & (after > 0)).all():
            raise BadData(self._file, matrix.scale, f"a scale that {matrix.new_scale_dtype} cannot hold")
        ratios, which = np.unique(self._scales / after, return_inverse=True)
        # NaN was refused: what stands for it in the table is not used.
        values = np.nan_to_num(matrix.values)
        made = [
            encode(values * some[:, None], matrix.new_dialect)
            for some in np.split(ratios, range(_RATIOS, len(ratios), _RATIOS))
        ]
        tables = np.concatenate(made)
        if matrix.dialect is not None:
            # The bytes stay where the scale does: signs of zeros too.
            tables[ratios == 1] = np.arange(256, dtype=np.uint8)
        return tables, which.reshape(self._scales.shape)

    def _by_group(self, reduce: np.ufunc, cells: Grid) -> Grid:
        """One number for all cells under the same new scale."""
        rows, columns = self._row_edges // self.matrix.new_block[0], self._column_edges // self.matrix.new_block[1]
        narrow = reduce.reduceat(cells, np.flatnonzero(np.diff(columns, prepend=-1)), axis=1)
        found: Grid = reduce.reduceat(narrow, np.flatnonzero(np.diff(rows, prepend=-1)), axis=0)
        return found

    def _over_cells(self, groups: Grid) -> Grid:
        grid = groups.reshape(self.matrix.grid)
        return grid[np.ix_(self._row_edges // self.matrix.new_block[0], self._column_edges // self.matrix.new_block[1])]

    def _cell_rows(self, start: int, count: int) -> Rows:
        return np.searchsorted(self._row_edges, np.arange(start, start + count), side="right") - 1

    def _spread(self, cells: NDArray[Any], start: int, count: int) -> NDArray[Any]:
        """What belongs to each value of some rows."""
        if cells.size == 1:
            return cells
        lengths = np.diff(self._column_edges, append=self.matrix.columns)
        return np.repeat(cells[self._cell_rows(start, count)], lengths, axis=1)


def _edges(side: int, *lengths: int) -> Rows:
    """Where cells begin: at each multiple of any of the lengths."""
    return np.unique(np.concatenate([np.arange(0, side, length) for length in lengths]))


def _unpacked(packed: Bytes) -> Bytes:
    made = np.empty((packed.shape[0], 2 * packed.shape[1]), np.uint8)
    np.bitwise_and(packed, 0x0F, out=made[:, ::2])
    np.right_shift(packed, 4, out=made[:, 1::2])
    return made
