"""Which experts a router chose: as sets, with the margin by which each token's choice was made.

A token whose last chosen and first refused expert score almost the same goes elsewhere for a rounding. That is no
fault; a token that goes elsewhere in spite of a margin is one.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

# The name of the tensor that holds margins, after that of the indices which they are of.
MARGIN = ".margin"
# How much larger than the scores' own error a margin may be that the error turned over: both scores move, and the
# error is known for some rows only.
TURNS = 8.0


class RoutingFlips(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens that a router sent to other experts for a margin that rounding explains."""

    module: str
    tokens: int
    # Of the tokens whose choice is kept; a margin is a part of the row's root mean square.
    of: int
    largest_margin: float
    # How far apart the scores are, relative.
    scores_off: float


def choice_of(tensors: Sequence[tuple[str, Any]]) -> tuple[str, Any, Any] | None:
    """Of what a router gives: the name of its indices, those in order, and margins. None where it is no router's."""
    chosen = next(((name, one) for name, one in tensors if _is_choice(one)), None)
    if chosen is None:
        return None
    name, indices = chosen
    rows, taken = indices.shape
    scores = next((one for _, one in tensors if one.is_floating_point() and _fits(one, rows, taken)), None)
    if scores is None:
        return None
    return name, indices, margins(scores.detach(), indices)


def _is_choice(one: Any) -> bool:
    import torch

    return not one.is_floating_point() and one.dtype != torch.bool and one.ndim == 2 and one.shape[1] <= 64


def _fits(scores: Any, rows: int, taken: int) -> bool:
    return scores.ndim >= 2 and scores.shape[-1] > taken and scores.numel() == rows * scores.shape[-1]


def margins(scores: Any, indices: Any) -> Any:
    """A column: from the last expert that was chosen to the first that was not, over the row's root mean square. -1
    where others were chosen than those that score most, as where a bias or a group has a say: it is not known."""
    import torch

    wide = scores.reshape(indices.shape[0], -1).to(torch.float64)
    taken = torch.zeros_like(wide, dtype=torch.bool).scatter_(1, indices.to(torch.int64), True)
    least = wide.masked_fill(~taken, torch.inf).amin(1)
    most = wide.masked_fill(taken, -torch.inf).amax(1)
    size = wide.pow(2).mean(1).sqrt().clamp_min(1e-300)
    return torch.where(least >= most, (least - most) / size, -1.0).to(torch.float32)[:, None]
