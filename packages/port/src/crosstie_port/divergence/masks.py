"""Attention masks as what they block: one meaning, in whatever type or value a backend writes them.

A mask that is added blocks by minus infinity or by the least number of its type; one that is bool or of 0 and 1 blocks
where it is false. As 1 for blocked and 0 for seen they are the same mask.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstie_port.divergence.digest import TensorSummary, matrix_size, normed_rows

# No score is so low: added, it blocks. float16's least number is -65,504.
_BLOCKS = -1e4


def as_blocked(name: str, tensor: Any) -> Any | None:
    """1 where it blocks and 0 where it does not; None if it is no mask, by its name and its values."""
    import torch

    named = "mask" in name.lower()
    if tensor.dtype == torch.bool:
        return (~tensor).to(torch.uint8) if named or tensor.ndim > 2 else None
    if not tensor.is_floating_point():
        is_binary = named and bool(((tensor == 0) | (tensor == 1)).all())
        return (tensor == 0).to(torch.uint8) if is_binary else None
    if tensor.ndim < 2:
        return None
    blocked = tensor <= _BLOCKS
    added = bool((blocked | (tensor == 0)).all()) and (named or bool(blocked.any()))
    return blocked.to(torch.uint8) if added else None


def mask_difference(a: TensorSummary, b: TensorSummary, seed: int) -> tuple[str, str]:
    """What of the second mask is other, and the figures."""
    keys = a.shape[-1]
    # The norm of a row of ones and zeros is the root of how many are blocked.
    one, other = (np.rint(side.rows[:, 0] ** 2).astype(int) for side in (a, b))
    figures = f"{_blocked(a):,} of {a.elements:,} places are blocked in the first, {_blocked(b):,} in the second"
    rows = normed_rows(a.shape, seed) % matrix_size(a.shape[:-1] or (1,))[1]
    return next(_named(one, other, rows, keys), "other places are blocked"), figures


def _blocked(mask: TensorSummary) -> int:
    return mask.elements - mask.zeros


def _named(one: NDArray[np.int64], other: NDArray[np.int64], rows: NDArray[np.int64], keys: int) -> Iterator[str]:
    more = other - one
    changed = more[more != 0]
    if not other.any():
        yield "the second blocks nothing: every token sees those after it"
    elif (one + other == keys).all():
        yield "inverted: the second blocks what the first shows"
    elif len(set(changed.tolist())) == 1 and len(changed) > 0.7 * len(more):
        # The last token sees all of them, or the first none, either way.
        shift = int(changed[0])
        yield f"tokens see {abs(shift)} {'fewer' if shift > 0 else 'more'} each: shifted"
    elif (more <= 0).all() and not more[rows == rows.min()].any():
        yield f"later tokens see up to {-int(more.min())} more: a sliding window or padding is left out"
    elif (more >= 0).all():
        yield f"tokens see up to {int(more.max())} fewer: a sliding window or padding that the first has not"
