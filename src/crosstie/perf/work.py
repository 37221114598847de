"""What one step of a model does, as a short list: equal parts of different layers counted together."""

from collections import Counter
from typing import NamedTuple

from crosstie.core.model import Model, Scan, State, Tensor


class Operation(NamedTuple):
    """Tensors of a layer that are multiplied in one kernel."""

    tensors: tuple[Tensor, ...]
    expert: bool


class Work(NamedTuple):
    """Parts of a step with the number of layers that have them."""

    operations: dict[Operation, int]
    scans: dict[Scan, int]
    states: dict[State, int]
    head: tuple[Operation, ...]
    # Sums over layers: bytes per token that every rank moves, that TP divides, and kernels.
    elementwise_bytes: float
    elementwise_sharded_bytes: float
    elementwise_kernels: float
    routing_kernels: float
    # Elements of a token that travel to an expert, and between layers.
    expert_width: int
    hidden: int
    layers: int
    expert_layers: int
    experts_per_token: int


def work_of(model: Model) -> Work:
    operations, scans, states = Counter[Operation](), Counter[Scan](), Counter[State]()
    moved = sharded = kernels = routing = 0.0
    for layer in model.layers:
        by_kernel: dict[str, list[Tensor]] = {}
        for tensor in layer.tensors:
            if tensor.kernel:
                by_kernel.setdefault(tensor.kernel, []).append(tensor)
        for tensors in by_kernel.values():
            operations[Operation(tuple(tensors), tensors[0].role.startswith("experts"))] += layer.count
        for scan in layer.scans:
            scans[scan] += layer.count
        if layer.state is not None:
            states[layer.state] += layer.count
        moved += layer.count * layer.elementwise_bytes
        sharded += layer.count * layer.elementwise_sharded_bytes
        kernels += layer.count * layer.elementwise_kernels
        routing += layer.count * layer.routing_kernels
    head = tuple(Operation((tensor,), False) for tensor in model.outer if tensor.kernel)
    width = max((t.cols for layer in model.layers for t in layer.tensors if t.role == "experts"), default=0)
    return Work(
        operations=dict(operations), scans=dict(scans), states=dict(states), head=head, elementwise_bytes=moved,
        elementwise_sharded_bytes=sharded, elementwise_kernels=kernels, routing_kernels=routing, expert_width=width,
        hidden=model.hidden, layers=model.layer_count,
        expert_layers=sum(layer.count for layer in model.layers if layer.routing_kernels),
        experts_per_token=model.experts_per_token,
    )  # fmt: skip
