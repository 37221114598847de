"""Where to cut: which operations of a traced graph may stand in a captured graph, and which run between them.

A graph repeats its kernels on the same addresses, with the same shapes. So an operation stays out that waits for the
device, whose shapes depend on values, that touches the host or draws random numbers; and so does one that writes to
memory which is at another address in each call.

Which nodes lie in the same memory: the trace's fake tensors share storage as the real ones will, with one exception:
each mention of a parameter or buffer has a fake of its own. What operators say of their results (a view, or an argument
itself) and the real addresses of the module's tensors join these.
"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from itertools import groupby
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_leaves

from crosstie.port.capture.tape import arguments_of
from crosstie.port.split.graphs import address, written_arguments
from crosstie.port.split.opaque import OpaqueCall, TraceObstacle
from crosstie.port.split.trace import place

_KEY = "crosstie_memory"

_aten = torch.ops.aten
# These wait for the device although all their shapes are known.
_WAITING = {
    _aten._local_scalar_dense, _aten.equal, _aten.is_nonzero, _aten.item, _aten.bincount, _aten.histc,
    _aten.repeat_interleave, _aten.linalg_inv, _aten.linalg_solve, _aten.linalg_eigh, _aten.linalg_svd,
    _aten._linalg_svd, _aten._linalg_eigh, _aten._linalg_solve_ex, _aten.linalg_lstsq, _aten.embedding_renorm_,
}  # fmt: skip
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_, _aten._index_put_impl_, _aten._unsafe_index_put}
# Reasons that only pass on another node's.
FOLLOWS = "its shapes or numbers depend on values"
SHORT = "too few kernels between dynamic operations for a graph of their own"
# On another page of memory than the last call's: copied where small, else graphs are made for each address.
LARGE_BYTES = 32 << 20


def mark_memory(graph: fx.GraphModule) -> None:
    """Notes on each node the memory that its value lies in; `storages` and `writes` read it."""
    same = _Groups()
    for node in graph.graph.nodes:
        own = _fakes(node)
        if node.op == "get_attr":
            own.append(("real", address(getattr(graph, str(node.target)))))
            same.join(own)
        elif isinstance(node.target, torch._ops.OpOverload) and any(r.alias_info for r in node.target._schema.returns):
            given = arguments_of(node.target, node.args, node.kwargs)
            shared = tree_leaves([value for argument, value in given if argument.alias_info is not None])
            own += [key for leaf in shared if isinstance(leaf, fx.Node) for key in _fakes(leaf)]
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
    if isinstance(node.target, OpaqueCall):
        given = dict(zip(node.target.moving, node.args, strict=True))
        written = [given[n] for n in node.target.written]
    elif isinstance(node.target, torch._ops.OpOverload):
        written = written_arguments(node.target, node.args, node.kwargs)
    return {memory for arg in written if isinstance(arg, fx.Node) for memory in storages(arg)}


@dataclass(frozen=True)
class Segment:
    """A run of nodes, in order. `why`: by node, what keeps it out of a graph; empty for a static part."""

    nodes: tuple[fx.Node, ...]
    static: bool
    why: dict[fx.Node, str]


def cut(graph: fx.GraphModule, device: torch.device, shortest: int, kept_out: dict[fx.Node, str]) -> list[Segment]:
    """`shortest`: kernels that a graph must have to be worth its launch; `kept_out`: what was found by running."""
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    why = {node: reason for node in nodes if (reason := _reason(node, device))}
    why.update(kept_out)
    while True:
        _spread(graph, nodes, why)
        segments = _segments(nodes, why)
        short = [segment for segment in segments if segment.static and sum(map(is_kernel, segment.nodes)) < shortest]
        if not short:
            return segments
        why.update({node: SHORT for segment in short for node in segment.nodes})


def _segments(nodes: list[fx.Node], why: dict[fx.Node, str]) -> list[Segment]:
    """Each node in the earliest part that has what it needs: parts are even where static, odd where dynamic.

    That keeps parts few and takes static work out from between dynamic operations. Where order may matter, it is kept:
    among writes, reads of what is ever written, Python and random numbers.
    """
    ever_written = {s for node in nodes for s in writes(node)}
    segment_of: dict[fx.Node, int] = {}
    reached = 0
    for node in nodes:
        inputs = [segment_of[arg] for arg in node.all_input_nodes if arg in segment_of]
        ordered = _in_order(node, ever_written)
        segment = max(inputs, default=0)
        if ordered:
            segment = max(segment, reached)
        segment += segment % 2 != (node in why)
        if ordered:
            reached = segment
        segment_of[node] = segment
    by_segment = sorted(nodes, key=segment_of.__getitem__)
    runs = [(segment % 2 == 0, tuple(run)) for segment, run in groupby(by_segment, key=segment_of.__getitem__)]
    return [Segment(run, static, {} if static else {node: why[node] for node in run}) for static, run in runs]


def _in_order(node: fx.Node, ever_written: set[Hashable]) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, OpaqueCall)
    if not node.target._schema.returns or torch.Tag.nondeterministic_seeded in node.target.tags:
        return True
    touched = storages(node).union(*(storages(arg) for arg in node.all_input_nodes))
    return not touched.isdisjoint(ever_written)


def _reason(node: fx.Node, device: torch.device) -> str:
    target, name = node.target, name_of(node)
    if isinstance(target, OpaqueCall):
        return f"{target.title} runs as Python"
    values = [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]
    waits = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(getattr(target, "tags", ()))
    if waits and node.meta.get("unbacked_bindings"):
        return f"{name} waits for the device: its size or value is read there"
    if any(free_unbacked_symbols(value) for value in tree_leaves(values) if _has_sizes(value)):
        return FOLLOWS
    if not isinstance(target, torch._ops.OpOverload):
        return "" if _source(node) else f"{name} is no operator"
    tags = target.tags
    if torch.Tag.inplace_view in tags:
        raise TraceObstacle(None, f"{name} changes the shape of a tensor in place ({place(node)})")
    if torch.Tag.nondeterministic_seeded in tags and not _without_dropout(node):
        return f"{name} draws random numbers"
    if torch.Tag.data_dependent_output in tags or target._overloadpacket in _WAITING:
        return f"{name} waits for the device"
    if target._overloadpacket in _INDEXING and _by_mask(node):
        return f"{name} by a mask waits for the device"
    tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
    if any(tensor.device != device for tensor in tensors) or (not tensors and target._schema.returns):
        return f"{name} touches memory of the host"
    return ""


def _without_dropout(node: fx.Node) -> bool:
    """Attention that could drop some of its weights at random, and was told not to."""
    given = arguments_of(node.target, node.args, node.kwargs)
    return any(argument.name == "dropout_p" and value == 0 for argument, value in given)


def _has_sizes(value: Any) -> bool:
    return isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool)


def _by_mask(node: fx.Node) -> bool:
    indices = tree_leaves(node.args[1]) if len(node.args) > 1 else []
    vals = [index.meta["val"] for index in indices if isinstance(index, fx.Node)]
    return any(isinstance(val, torch.Tensor) and val.dtype in (torch.bool, torch.uint8) for val in vals)


def _source(node: fx.Node) -> fx.Node | None:
    """For one of several results of an operation: that operation."""
    source = node.args[0] if node.target is getitem else None
    return source if isinstance(source, fx.Node) else None


def name_of(node: fx.Node) -> str:
    return str(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.name


def is_kernel(node: fx.Node) -> bool:
    """Not a view: it does something on the device."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return isinstance(node.target, OpaqueCall)
    returns = node.target._schema.returns
    return not returns or any(said.alias_info is None or said.alias_info.is_write for said in returns)


def _spread(graph: fx.GraphModule, nodes: list[fx.Node], why: dict[fx.Node, str]) -> None:
    """Adds the nodes that share the fate of others, above all writers to memory that graphs have a copy of."""
    anchored = {s for node in graph.graph.nodes if node.op in ("placeholder", "get_attr") for s in storages(node)}
    writers = [node for node in nodes if writes(node)]
    grown = True
    while grown:
        grown = False
        born: dict[Hashable, fx.Node] = {}
        copied: set[Hashable] = set()
        for node in nodes:
            for s in storages(node) - anchored:
                born.setdefault(s, node)
            if node in why and any(user not in why and user.op == "call_function" for user in node.users):
                copied |= storages(node)
            # An operation and its results stay together.
            if (source := _source(node)) and (source in why) != (node in why):
                reason = why.get(source) or why[node]
                why[source] = why[node] = reason
                grown = True
        loose = {s for s, node in born.items() if node in why}
        for node in writers:
            if node not in why and writes(node) & (loose | copied):
                why[node] = f"{name_of(node)} writes to memory of a dynamic part"
                grown = True
