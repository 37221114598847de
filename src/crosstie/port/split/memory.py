"""Which nodes of a traced graph lie in the same memory, and which of them write to it.

The trace's fake tensors share storage as the real ones will, with one exception: each mention of a parameter or buffer
has a fake of its own. What operators say of their results (a view, or an argument itself) and the real addresses of
the module's tensors join these.
"""

from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from crosstie.port.split.graphs import address, written_arguments
from crosstie.port.split.opaque import opaque_call

_KEY = "crosstie_memory"


def mark_memory(graph: fx.GraphModule) -> None:
    """Notes on each node the memory that its value lies in; `storages` and `writes` read it."""
    same = _Groups()
    for node in graph.graph.nodes:
        own = _fakes(node)
        if node.op == "get_attr":
            own.append(("real", address(getattr(graph, str(node.target)))))
            same.join(own)
        elif isinstance(node.target, torch._ops.OpOverload) and any(r.alias_info for r in node.target._schema.returns):
            for position, argument in enumerate(node.target._schema.arguments):
                if argument.alias_info is not None:
                    value = node.kwargs.get(argument.name, node.args[position] if position < len(node.args) else None)
                    own += [key for leaf in tree_leaves(value) if isinstance(leaf, fx.Node) for key in _fakes(leaf)]
            same.join(own)
    for node in graph.graph.nodes:
        node.meta[_KEY] = frozenset(same.group(key) for key in _fakes(node))


def _fakes(node: fx.Node) -> list[Hashable]:
    values = tree_leaves(node.meta.get("val"))
    return [value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)]


class _Groups:
    """Sets that grow together (union-find)."""

    def __init__(self) -> None:
        self.parent: dict[Hashable, Hashable] = {}

    def group(self, key: Hashable) -> Hashable:
        while (up := self.parent.setdefault(key, key)) != key:
            key = up
        return key

    def join(self, keys: Iterable[Hashable]) -> None:
        groups = [self.group(key) for key in keys]
        for group in groups:
            self.parent[group] = groups[0]


def storages(node: fx.Node) -> frozenset[Hashable]:
    memory: frozenset[Hashable] = node.meta[_KEY]
    return memory


def writes(node: fx.Node) -> set[Hashable]:
    written: list[Any] = []
    if call := opaque_call(node.target):
        given = dict(zip(call.moving, node.args, strict=True))
        written = [given[n] for n in call.written]
    elif isinstance(node.target, torch._ops.OpOverload):
        written = written_arguments(node.target, node.args, node.kwargs)
    return {memory for arg in written if isinstance(arg, fx.Node) for memory in storages(arg)}
