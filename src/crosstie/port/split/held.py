"""A module's tensors in a trace: fakes in their place, so that nothing real is read or written while tracing.

Left as they are, the tracer would run what works on them alone for real: a counter in a buffer would count, and a
threshold's `.item()` would be built in as today's number.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from crosstie.port.split.opaque import Obstacle
from crosstie.port.split.state import holders


class Held:
    """Parameters, buffers and other tensors, in attributes and in lists and dictionaries that are attributes."""

    def __init__(self, root: nn.Module):
        self.places: list[tuple[Any, Any, torch.Tensor]] = []
        for _, held in holders(root):
            for name, value in held.items():
                if isinstance(value, torch.Tensor):
                    self.places.append((held, name, value))
                elif type(value) is list:
                    self.places += [(value, n, item) for n, item in enumerate(value) if isinstance(item, torch.Tensor)]
        self.tensors = list({id(tensor): tensor for _, _, tensor in self.places}.values())

    def fakes(self, mode: FakeTensorMode) -> list[torch.Tensor]:
        return [mode.from_tensor(tensor, static_shapes=True) for tensor in self.tensors]

    @contextmanager
    def replaced(self, fakes: Sequence[torch.Tensor]) -> Iterator[None]:
        fake_of = {id(tensor): fake for tensor, fake in zip(self.tensors, fakes, strict=True)}
        for holder, name, tensor in self.places:
            holder[name] = fake_of[id(tensor)]
        with _OnlyHeld():
            yield
        for holder, name, tensor in self.places:
            # What the call itself put there is another matter: a change of the module's state.
            if _has(holder, name) and holder[name] is fake_of[id(tensor)]:
                holder[name] = tensor

    def hold(self, graph: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
        """The graph's inputs that stand for these tensors become attributes of it."""
        for number, (node, tensor) in enumerate(zip(nodes, self.tensors, strict=True)):
            if node.users:
                setattr(graph, f"held_{number}", tensor)
                with graph.graph.inserting_before(node):
                    attribute = graph.graph.create_node("get_attr", f"held_{number}")
                attribute.meta = node.meta
                node.replace_all_uses_with(attribute)
            graph.graph.erase_node(node)


def _has(holder: Any, name: Any) -> bool:
    return name in holder if isinstance(holder, dict) else name < len(holder)


class _OnlyHeld(TorchDispatchMode):
    """Tensors of closures and globals stay real: what would read their numbers or write to them is refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        reads = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if tensors and not any(map(is_fake, tensors)) and (reads or func._schema.is_mutable):
            raise Obstacle(None, f"{func} works on a tensor that is no attribute of a module")
        return func(*args, **kwargs)
