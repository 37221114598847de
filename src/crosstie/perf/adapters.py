"""Adapters (LoRA) on a replica: what their slots take of its memory, and how often an adapter is not there."""

import math
from collections.abc import Sequence

from crosstie.core.deployment import Deployment
from crosstie.core.model import Tensor

_ATTENTION = frozenset(("attention", "key", "value", "output"))
_FORWARD = frozenset(("mlp", "mlp_down", "shared", "shared_down"))
# Two projections of the feed-forward part, which are one product of the model.
_PAIRS = frozenset(("mlp", "shared"))
_BYTES = 2.0
_BISECTIONS = 60


def gpu_adapter_bytes(deployment: Deployment) -> float:
    """On each GPU: every slot has room for the largest rank, in 16 bits, on all layers of a stage.

    Of an adapter's two matrices engines split the one that meets the split side of the weight; experts have none.
    """
    held = deployment.adapters
    if held is None:
        return 0.0
    roles = _ATTENTION if held.targets == "attention" else _ATTENTION | _FORWARD
    sides = sum(layers * _sides(tensor, deployment.parallelism.tp)
                for tensor, layers in deployment.model.tensors() if tensor.role in roles)  # fmt: skip
    return held.slots * held.rank * sides * _BYTES / deployment.parallelism.pp


def _sides(tensor: Tensor, tp: int) -> float:
    """Inputs and outputs that one GPU has of the adapter of a matrix."""
    split = float(min(tp, tensor.max_shards))
    pairs = 2.0 if tensor.role in _PAIRS else 1.0
    if tensor.shard == "in":
        return tensor.cols / split + tensor.rows
    return pairs * tensor.cols + tensor.rows / (split if tensor.shard == "out" else 1.0)


def shares(popularity: Sequence[float]) -> list[float]:
    total = math.fsum(popularity)
    return [one / total for one in popularity]


def zipf(count: int, exponent: float) -> list[float]:
    """Shares of requests by adapter, the n-th in proportion to n^-exponent."""
    return shares([n**-exponent for n in range(1, count + 1)])


def missing_share(popularity: Sequence[float], slots: int) -> float:
    """Share of requests whose adapter is not among those used last, as many as there are slots.

    Che's approximation: an adapter stays for as many requests after its last as fill the slots, the same for all.
    """
    if slots >= sum(one > 0 for one in popularity):
        return 0.0
    low, high = 0.0, 1.0
    while _present(popularity, high) < slots:
        high *= 2.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _present(popularity, middle) < slots else (low, middle)
    return math.fsum(one * math.exp(-one * high) for one in popularity)


def _present(popularity: Sequence[float], lasts: float) -> float:
    return math.fsum(-math.expm1(-one * lasts) for one in popularity)


def most_in_flight(popularity: Sequence[float], slots: int) -> float:
    """Requests that run at once with no more than that many adapters among them, on average; infinite: any number."""
    if slots >= sum(one > 0 for one in popularity):
        return math.inf
    low, high = float(slots), float(slots)
    while _distinct(popularity, high) <= slots:
        high *= 2.0
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if _distinct(popularity, middle) <= slots else (low, middle)
    return low


def _distinct(popularity: Sequence[float], requests: float) -> float:
    return math.fsum(-math.expm1(requests * math.log1p(-min(one, 1.0 - 1e-12))) for one in popularity)
