"""Runs a cut graph: first node by node, then capturing its static segments, then replaying them.

A capture does nothing and a replay acts once, so a call takes effect exactly once in each of the three ways, and a
module with a key-value cache or a counter needs no rehearsal on made-up data.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_unflatten
from torch.utils.flop_counter import flop_registry

from crosstie.port.split.cut import LARGE_BYTES, Segment, cut, mark_memory, name_of, storages, writes
from crosstie.port.split.graphs import GraphRecorder, address, written_arguments
from crosstie.port.split.opaque import Departure, Like, OpaqueCall
from crosstie.port.split.trace import Traced

_aten = torch.ops.aten


def compiled(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], takes: Sequence[fx.Node], leaves: Sequence[fx.Node]
) -> Callable[..., Any]:
    """Takes the values of `takes`, gives those of `leaves`; values that nobody needs any more are let go at once."""
    names: dict[fx.Node, str] = {node: f"v{number}" for number, node in enumerate(takes)}
    space: dict[str, Any] = {}

    def constant(value: Any) -> str:
        name = f"c{len(space)}"
        space[name] = value
        return name

    def written(value: Any) -> str:
        if isinstance(value, fx.Node):
            if value.op == "get_attr" and value not in names:
                names[value] = constant(getattr(graph, str(value.target)))
            return names[value]
        if isinstance(value, list | tuple):
            inside = "".join(f"{written(item)}, " for item in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if isinstance(value, dict):
            return "{" + "".join(f"{key!r}: {written(item)}, " for key, item in value.items()) + "}"
        return repr(value) if type(value) in (int, bool, type(None), str) else constant(value)

    last = {arg: node for node in nodes for arg in node.all_input_nodes}
    ending: dict[fx.Node, list[fx.Node]] = {}
    for arg, node in last.items():
        if arg.op != "get_attr" and arg not in leaves:
            ending.setdefault(node, []).append(arg)
    lines = [f"def piece({', '.join(names[node] for node in takes)}):"]
    for number, node in enumerate(nodes):
        target = node.target._op if isinstance(node.target, torch._ops.OpOverload) else node.target
        given = [written(arg) for arg in node.args] + [f"{key}={written(arg)}" for key, arg in node.kwargs.items()]
        names[node] = f"r{number}"
        lines.append(f"    {names[node]} = {constant(target)}({', '.join(given)})")
        gone = [names[arg] for arg in ending.get(node, [])]
        if not node.users:
            gone.append(names[node])
        if gone:
            lines.append(f"    del {', '.join(gone)}")
    lines.append(f"    return ({''.join(f'{names[node]}, ' for node in leaves)})")
    exec("\n".join(lines), space)
    piece: Callable[..., Any] = space["piece"]
    return piece


@dataclass
class SegmentCode:
    """A part as code: what it takes from the slots, what it leaves there, and what nobody reads after it."""

    segment: Segment
    code: Callable[..., Any]
    takes: list[int]
    leaves: list[int]
    dead: list[int]


@dataclass
class Captured:
    """A static step's graph. `copies`: slots whose value is written into the graph's own input first."""

    graph: Any
    copies: list[tuple[int, "Room"]]


@dataclass
class GraphSet:
    captured: list[Captured | None]
    # Slots filled once and for all: what graphs leave at the same address each time.
    template: list[Any]
    # Memory that the next call's replay overwrites.
    owned: set[int]


@dataclass
class GraphPlan:
    """One module for one signature of arguments."""

    traced: Traced
    device: torch.device
    recorder: GraphRecorder
    shortest: int
    most_addresses: int
    flops: dict[fx.Node, int] = field(default_factory=dict)
    # What running showed: nodes that wait for the device, or that a capture would not take.
    kept_out: dict[fx.Node, str] = field(default_factory=dict)
    graphs: dict[tuple[int, ...], GraphSet] = field(default_factory=dict)
    warm: bool = False

    def __post_init__(self) -> None:
        mark_memory(self.traced.graph)
        nodes = list(self.traced.graph.graph.nodes)
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.results: list[Any] = tree_leaves(nodes[-1].args[0])
        self.calls = [node for node in nodes if node.op == "call_function"]
        self.opaque = [node.target for node in self.calls if isinstance(node.target, OpaqueCall)]
        self.written = {s for node in self.calls for s in writes(node)}
        constants = {str(node.target): node for node in nodes if node.op == "get_attr"}
        self.constants = [getattr(self.traced.graph, name) for name in constants]
        self.written_constants = {
            address(getattr(self.traced.graph, name))
            for name, node in constants.items()
            if storages(node) & self.written
        }
        self.constant_addresses = set(map(address, self.constants))
        self.written_inputs = [slot for slot, node in enumerate(self.inputs) if storages(node) & self.written]
        self._build()

    def _build(self) -> None:
        self.segments = cut(self.traced.graph, self.device, self.shortest, self.kept_out)
        self.slots: dict[fx.Node, int] = {node: slot for slot, node in enumerate(self.inputs)}
        self.steps = [self._step(segment) for segment in self.segments]
        last: dict[int, SegmentCode] = {slot: step for step in self.steps for slot in [*step.takes, *step.leaves]}
        kept = {self.slots[node] for node in self.results if isinstance(node, fx.Node) and node in self.slots}
        for slot, step in last.items():
            if slot not in kept and slot >= len(self.inputs):
                step.dead.append(slot)
        self.known_out = set(self.kept_out)
        self.rewritten = {slot for node, slot in self.slots.items() if storages(node) & self.written}
        static = {s for segment in self.segments if segment.static for node in segment.nodes for s in writes(node)}
        # A graph must work on the caller's own memory where it writes to it, and should where a copy would be large.
        self.in_place = [
            slot for slot, node in enumerate(self.inputs)
            if storages(node) & static or node.meta["val"].nbytes > LARGE_BYTES
        ]  # fmt: skip

    def _step(self, segment: Segment) -> SegmentCode:
        inside = set(segment.nodes)
        takes: dict[fx.Node, None] = {}
        for node in segment.nodes:
            takes.update({arg: None for arg in node.all_input_nodes if arg not in inside and arg.op != "get_attr"})
        leaves = [node for node in segment.nodes if any(user not in inside for user in node.users)]
        for node in leaves:
            self.slots[node] = len(self.slots)
        code = compiled(self.traced.graph, segment.nodes, list(takes), leaves)
        return SegmentCode(segment, code, [self.slots[n] for n in takes], [self.slots[n] for n in leaves], [])

    # The three ways ------------------------------------------------------------------------------------------------

    def call(self, tensors: Sequence[torch.Tensor]) -> Any:
        if not self.warm:
            return self._node_by_node(tensors)
        where = tuple(tensors[slot].data_ptr() for slot in self.in_place)
        graphs = self.graphs.get(where)
        if graphs is not None:
            return self._replay(graphs, tensors)
        return self._capture(where, tensors, keep=len(self.graphs) < self.most_addresses)

    def entangled(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Arguments share memory, with each other or with the module, that the call writes to."""
        if not self.written:
            return False
        given = [address(tensor) for tensor in tensors]
        for slot in self.written_inputs:
            if given.count(given[slot]) > 1 or given[slot] in self.constant_addresses:
                return True
        return not self.written_constants.isdisjoint(given)

    @property
    def pointless(self) -> bool:
        """Nothing in it is worth a graph, as far as running it has shown."""
        return self.warm and not any(segment.static for segment in self.segments)

    @property
    def ready(self) -> bool:
        return bool(self.graphs)

    def _node_by_node(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Eagerly, watching for operations that wait for the device and counting what each one computes."""
        values: dict[fx.Node, Any] = dict(zip(self.inputs, tensors, strict=True))
        last_use = {arg: node for node in self.traced.graph.graph.nodes for arg in node.all_input_nodes}
        for call in self.opaque:
            call.borrowed = set()
        for node in self.traced.graph.graph.nodes:
            if node.op == "get_attr":
                values[node] = getattr(self.traced.graph, str(node.target))
            if node.op != "call_function":
                continue
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            if isinstance(node.target, OpaqueCall):
                values[node] = node.target(*args, **kwargs)
            else:
                values[node], waited = self._watched(node.target, args, kwargs)
                if waited:
                    self.kept_out[node] = f"{name_of(node)} waits for the device"
                self.flops[node] = _flops(node.target, args, kwargs, values[node])
            for arg in node.all_input_nodes:
                if last_use[arg] is node and arg not in self.results:
                    values.pop(arg, None)
        results = [values[node] if isinstance(node, fx.Node) else node for node in self.results]
        self._build()
        self.warm = True
        return self._answer(results, set())

    def _watched(self, target: Any, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """An operation's result, and whether PyTorch says that it waits for the device.

        It says so by refusing, which comes before the wait; one that writes is not tried, lest it write twice.
        """
        operator = isinstance(target, torch._ops.OpOverload)
        if self.device.type != "cuda" or not operator or written_arguments(target, args, kwargs):
            return target(*args, **kwargs), False
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            # That the mode does not find everything: what it misses is found when a capture is refused.
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        try:
            return target(*args, **kwargs), False
        except RuntimeError as refusal:
            if "synchronizing" not in str(refusal):
                raise
        finally:
            torch.cuda.set_sync_debug_mode(before)
        return target(*args, **kwargs), True

    def _capture(self, where: tuple[int, ...], tensors: Sequence[torch.Tensor], keep: bool) -> Any:
        env: list[Any] = [*tensors, *[None] * (len(self.slots) - len(tensors))]
        graphs = GraphSet([], [None] * len(self.slots), set())
        fixed = {address(tensor) for tensor in self.constants} | {address(tensors[slot]) for slot in self.in_place}
        rooms: dict[int, Room] = {}
        at_home = set(self.in_place)
        for call in self.opaque:
            call.borrowed = graphs.owned
        for step in self.steps:
            captured = self._captured(step, env, rooms, at_home, graphs) if step.segment.static and keep else None
            if captured is None:
                # A capture that was refused has done nothing: what is left of this call runs as it is.
                keep = keep and not step.segment.static
                for slot, value in zip(step.leaves, step.code(*[env[slot] for slot in step.takes]), strict=True):
                    env[slot] = value
            else:
                at_home.update(step.leaves)
                for slot in step.leaves:
                    graphs.template[slot] = env[slot]
                    if address(env[slot]) not in fixed:
                        graphs.owned.add(address(env[slot]))
            graphs.captured.append(captured)
        answer = self._answer([self._slot(env, node) for node in self.results], graphs.owned)
        if keep:
            self.graphs[where] = graphs
        elif self.kept_out.keys() - self.known_out:
            self.recorder.wait()
            self.graphs.clear()
            self._build()
        return answer

    def _captured(
        self, step: SegmentCode, env: list[Any], rooms: dict[int, "Room"], at_home: set[int], graphs: GraphSet
    ) -> Captured | None:
        copies = []
        for slot in step.takes:
            if slot not in at_home:
                first = slot not in rooms
                if first:
                    rooms[slot] = Room(env[slot])
                    graphs.owned.add(address(rooms[slot].tensor))
                # What somebody writes to later is copied again for each graph that reads it.
                if first or slot in self.rewritten:
                    copies.append((slot, rooms[slot]))
        for slot, room in copies:
            room.fill(env[slot])
        inputs = [rooms[slot].tensor if slot in rooms else env[slot] for slot in step.takes]
        try:
            graph, outputs = self.recorder.capture(lambda: step.code(*inputs))
        except RuntimeError as error:
            said = str(error).strip().splitlines()[0]
            self.kept_out.update(dict.fromkeys(step.segment.nodes, f"a capture refused this part: {said}"))
            return None
        graph.replay()
        for slot, value in zip(step.leaves, outputs, strict=True):
            env[slot] = value
        return Captured(graph, copies)

    def _replay(self, graphs: GraphSet, tensors: Sequence[torch.Tensor]) -> Any:
        env = graphs.template.copy()
        env[: len(tensors)] = tensors
        for call in self.opaque:
            call.borrowed = graphs.owned
        for step, captured in zip(self.steps, graphs.captured, strict=True):
            if captured is not None:
                for slot, room in captured.copies:
                    room.fill(env[slot])
                captured.graph.replay()
                continue
            for slot, value in zip(step.leaves, step.code(*[env[slot] for slot in step.takes]), strict=True):
                env[slot] = value
            for slot in step.dead:
                env[slot] = None
        return self._answer([self._slot(env, node) for node in self.results], graphs.owned)

    def _slot(self, env: list[Any], node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        return getattr(self.traced.graph, str(node.target)) if node.op == "get_attr" else env[self.slots[node]]

    def _answer(self, values: list[Any], owned: set[int]) -> Any:
        """The caller's own: what lies in memory of graphs is copied out of it, once for each tensor."""
        copies: dict[int, Any] = {}
        for value in values:
            if isinstance(value, torch.Tensor) and address(value) in owned:
                copies.setdefault(id(value), value.clone())
        values = [copies.get(id(value), value) for value in values]
        leaves = [values[what] if kind == "node" else what for kind, what in self.traced.results]
        return tree_unflatten(leaves, self.traced.spec)


class Room:
    """A graph's own input: memory laid out as the first value was, to which later ones are copied."""

    def __init__(self, value: torch.Tensor):
        self.tensor = Like.of(value).empty()
        # An expanded tensor has one element in several places: it is written once.
        self.repeated = [
            d for d, (n, step) in enumerate(zip(value.shape, value.stride(), strict=True)) if n > 1 and not step
        ]
        self.written = self._distinct(self.tensor)

    def _distinct(self, tensor: torch.Tensor) -> torch.Tensor:
        for dimension in self.repeated:
            tensor = tensor.narrow(dimension, 0, 1)
        return tensor

    def fill(self, value: torch.Tensor) -> None:
        # copy_ would broadcast it, and cast it, without a word.
        if value.shape != self.tensor.shape or value.dtype != self.tensor.dtype:
            raise Departure(
                f"a dynamic part gave {value.dtype} {list(value.shape)} where its graph has "
                f"{self.tensor.dtype} {list(self.tensor.shape)}"
            )
        if self.repeated:
            if any(value.stride(dimension) for dimension in self.repeated):
                raise Departure("a dynamic part gave a tensor that was an expanded one when its graph was made")
            value = self._distinct(value)
        self.written.copy_(value)


def _grouped_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> int:
    """Rows of each group times its own matrix."""
    return 2 * a.numel() * b.shape[-1]


# With those that PyTorch's own counter leaves out.
_COUNTED = {
    **flop_registry,
    _aten._grouped_mm: _grouped_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: flop_registry[_aten._scaled_dot_product_flash_attention],
}


def _flops(target: Any, args: Any, kwargs: Any, out: Any) -> int:
    """Floating-point operations of matrix products and attention."""
    count = _COUNTED.get(getattr(target, "_overloadpacket", None))
    return int(count(*args, **kwargs, out_val=out)) if count else 0
