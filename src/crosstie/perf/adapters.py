"""Adapters (LoRA) on a replica: what their slots take of its memory."""

from crosstie.core.deployment import Deployment
from crosstie.core.model import Tensor

_ATTENTION = frozenset(("attention", "key", "value", "output"))
_FORWARD = frozenset(("mlp", "mlp_down", "shared", "shared_down"))
# Two projections of the feed-forward part, which are one product of the model.
_PAIRS = frozenset(("mlp", "shared"))
_BYTES = 2.0


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
