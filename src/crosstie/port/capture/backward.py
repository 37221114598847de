"""Autograd's backward pass as a walk in Python.

PyTorch's engine asks the driver for streams and runs CUDA's part of the graph in threads of its own; on a machine
without a GPU it refuses. The nodes of the graph themselves run anywhere.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

# Where a node's metadata keeps its hooks.
_HOOKS = "crosstie.port.capture.hooks"
_engine = torch.autograd._engine_run_backward


def run_backward(
    roots: Any, gradients: Any, retain_graph: bool, create_graph: bool, inputs: Any, allow_unreachable: bool = True,
    accumulate_grad: bool = True,
) -> Any:  # fmt: skip
    """Takes and gives what the engine does, for roots on the device; others go to the engine."""
    if not any(root.device.type == "cuda" for root in roots):
        return _engine(roots, gradients, retain_graph, create_graph, inputs,
                       allow_unreachable=allow_unreachable, accumulate_grad=accumulate_grad)  # fmt: skip
    edges = [_edge(root) for root in roots]
    wanted = [_edge(tensor) for tensor in inputs]
    waiting = _times_reached([node for node, _ in edges])
    arrived: dict[Any, dict[int, Any]] = defaultdict(dict)
    for (node, index), gradient in zip(edges, gradients, strict=True):
        _arrive(arrived[node], index, gradient)
    ready = [node for node in dict.fromkeys(node for node, _ in edges) if not waiting[node]]
    caught: dict[tuple[Any, int], Any] = {}
    with torch.set_grad_enabled(create_graph):
        while ready:
            node = ready.pop()
            given = _after_hooks(node, arrived.pop(node, {}))
            caught.update({(node, index): gradient for index, gradient in given.items() if (node, index) in wanted})
            given_to_next = _through(
                node, given, caught_only=bool(wanted) and not (accumulate_grad and (node, 0) in wanted)
            )
            for (following, index), gradient in zip(node.next_functions, given_to_next, strict=False):
                if following is None:
                    continue
                if gradient is not None:
                    _arrive(arrived[following], index, _as_expected(following, index, gradient))
                waiting[following] -= 1
                if not waiting[following]:
                    ready.append(following)
    found = tuple(caught.get(edge) for edge in wanted)
    if not allow_unreachable and any(gradient is None for gradient in found):
        raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph. "
                           "Set allow_unused=True if this is the desired behavior.")  # fmt: skip
    return found


def add_hook(tensor: torch.Tensor, hook: Callable[[Any], Any]) -> RemovableHandle:
    """Tensor.register_hook: the engine runs these, not the nodes."""
    node, index = _edge(tensor)
    hooks = node.metadata.setdefault(_HOOKS, {}).setdefault(index, OrderedDict())
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def _after_hooks(node: Any, given: dict[int, Any]) -> dict[int, Any]:
    for index, hooks in node.metadata.get(_HOOKS, {}).items():
        for hook in list(hooks.values()):
            changed = hook(given[index]) if index in given else None
            if changed is not None:
                given[index] = changed
    return given


def _edge(tensor: torch.Tensor) -> tuple[Any, int]:
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _times_reached(roots: list[Any]) -> dict[Any, int]:
    """How many edges lead to each node: it runs when all of them have been walked."""
    times: dict[Any, int] = defaultdict(int)
    seen = set(roots)
    pending = list(seen)
    while pending:
        for following, _ in pending.pop().next_functions:
            if following is None:
                continue
            times[following] += 1
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return times


def _arrive(at: dict[int, Any], index: int, gradient: Any) -> None:
    at[index] = gradient if at.get(index) is None else at[index] + gradient


def _through(node: Any, given: dict[int, Any], caught_only: bool) -> tuple[Any, ...]:
    """What a node passes on. A leaf accumulates, unless the caller only wants the gradients."""
    is_leaf = hasattr(node, "variable")
    if not given or (is_leaf and caught_only):
        return (None,) * len(node.next_functions)
    arguments = [given.get(index) for index in range(len(node._input_metadata))]
    out = node(*arguments) if not hasattr(node, "apply") else node.apply(*arguments)
    return out if isinstance(out, tuple) else (out,)


def _as_expected(node: Any, index: int, gradient: torch.Tensor) -> torch.Tensor:
    """The engine sums what was broadcast, and casts; formulas rely on it."""
    expected = node._input_metadata[index]
    if gradient.shape != expected.shape:
        gradient = gradient.sum_to_size(expected.shape)
    return gradient if gradient.dtype == expected.dtype else gradient.to(expected.dtype)
