"""`split`: a module that runs as a few captured graphs, with what cannot be captured in between.

The static part (projections, norms, MLPs, writes to a cache at given positions) is replayed from CUDA or HIP graphs;
the dynamic part (routing metadata: `nonzero`, `.item()`, shapes that depend on values) runs eagerly between them,
with this call's values. docs/capture-split.md has the rules and the figures.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from crosstie.core.errors import BadInput
from crosstie.port.split.cures import EagerReason, obstacle
from crosstie.port.split.cut import FOLLOWS, SHORT, Segment, is_kernel
from crosstie.port.split.graphs import GraphRecorder, recorder
from crosstie.port.split.opaque import PLAIN, CallWatch, PythonState, StateGuard, TraceObstacle, forwards
from crosstie.port.split.run import GraphPlan
from crosstie.port.split.trace import TraceRequest, place, trace

# Graphs thrown away because the module was changed from outside, before it is left alone.
_PATIENCE = 8
_LEAVES = {torch.Tensor, nn.Parameter, *PLAIN}
# Watched, node by node, capturing.
_CALLS_TO_GRAPHS = 3


@dataclass(frozen=True)
class Piece:
    """A run of operations: one graph, or eager code between graphs."""

    # The module that it belongs to, and its number in there.
    name: str
    static: bool
    # Why it is dynamic: operation and reason, with file:line where known; empty for a static piece.
    why: tuple[str, ...]
    kernels: int
    # Of matrix products and attention, in the call that was counted.
    flops: int


@dataclass
class SplitOptions:
    most_signatures: int
    shortest: int
    device: torch.device
    recorder: GraphRecorder


class Region:
    """One module: its plans by signature, or, where its own Python cannot be traced, its children's regions."""

    def __init__(self, name: str, module: nn.Module, options: SplitOptions):
        self.name, self.module, self.options = name, module, options
        # Before anybody puts this region in its place.
        self.forward = module.forward
        self.plans: OrderedDict[Any, tuple[GraphPlan, StateGuard]] = OrderedDict()
        self.seen: set[Any] = set()
        self.thrown_away = 0
        # Why this module's own Python runs in every call, or in calls of a signature; "" as long as it need not.
        self.open = ""
        self.open_for: dict[Any, str] = {}
        self.children: dict[nn.Module, Region] = {}
        # How calls were answered: replayed, preparing, eager.
        self.counts: Counter[str] = Counter()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.open:
            return self.run_open(*args, **kwargs)
        leaves, structure = _flat(args, kwargs)
        key = _signature(leaves, structure)
        if key is None or key in self.open_for:
            return self.run_open(*args, **kwargs)
        plan, guard = self.plans.get(key, (None, None))
        if guard is not None and not guard.holds():
            self._forget()
            plan = None
        if plan is None:
            return self._first(key, args, kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if plan.pointless or plan.entangled(tensors):
            self.counts["eager"] += 1
            return self.forward(*args, **kwargs)
        self.plans.move_to_end(key)
        self.counts["replayed" if plan.ready else "preparing"] += 1
        return plan.call(tensors)

    def run_open(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own Python, with what it calls replaced by regions."""
        self.counts["eager"] += 1
        if not self.children:
            self.children = {
                child: Region(name, child, self.options) for name, child in _callees(self.module, self.name)
            }
        with forwards(dict(self.children)):
            return self.forward(*args, **kwargs)

    def _first(self, key: Any, args: Any, kwargs: Any) -> Any:
        """An eager call that is watched, and then traced; a plain one where too many signatures were seen."""
        self.counts["eager"] += 1
        if key in self.seen or len(self.seen) >= 4 * self.options.most_signatures:
            return self.forward(*args, **kwargs)
        self.seen.add(key)
        watch, before = CallWatch(), PythonState(self.module)
        with watch.on(self.module):
            answer = self.forward(*args, **kwargs)
        living = {(id(held), name) for _, held, name in before.changed()}
        options = self.options
        leaves, spec = tree_flatten((args, kwargs))
        try:
            traced = trace(TraceRequest(self.module, self.forward, leaves, spec, watch, before, self._passed_over))
            plan = GraphPlan(traced, options.device, options.recorder, options.shortest, options.most_signatures)
        except TraceObstacle as error:
            self.open_for[key] = error.why
        else:
            self.plans[key] = (plan, StateGuard(self.module, plan.constants, living))
            if len(self.plans) > options.most_signatures:
                options.recorder.wait()
                self.plans.popitem(last=False)
        return answer

    def _passed_over(self, module: nn.Module, why: str) -> Callable[..., Any]:
        """How a module runs that a graph of this one passes over."""
        if module not in self.children:
            name = next(name for name, child in self.module.named_modules() if child is module)
            self.children[module] = Region(_joined(self.name, name), module, self.options)
            self.children[module].open = why
        return self.children[module].run_open

    def _forget(self) -> None:
        self.options.recorder.wait()
        self.plans.clear()
        self.seen.clear()
        self.children.clear()
        self.open_for.clear()
        self.thrown_away += 1
        if self.thrown_away > _PATIENCE:
            self.open = "its attributes or tensors were replaced between calls too often"

    def pieces(self) -> list[Piece]:
        found: list[Piece] = []
        if self.plans:
            plan, _ = next(reversed(self.plans.values()))
            found += [_piece(f"{self.name or 'module'}#{n}", plan, segment) for n, segment in enumerate(plan.segments)]
        for child in self.children.values():
            found += child.pieces()
        return found


def _piece(name: str, plan: GraphPlan, segment: Segment) -> Piece:
    causes = {node: why for node, why in segment.why.items() if why not in (FOLLOWS, SHORT)} or segment.why
    said = dict.fromkeys(f"{why} ({at})" if (at := place(node)) else why for node, why in causes.items())
    flops = sum(plan.flops.get(node, 0) for node in segment.nodes)
    return Piece(name, segment.static, tuple(said), sum(map(is_kernel, segment.nodes)), flops)


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """The leaves, and what tells their structure: where no argument has any, that is much quicker to say."""
    leaves = [*args, *kwargs.values()]
    if all(type(leaf) in _LEAVES for leaf in leaves):
        return leaves, (len(args), *kwargs)
    return tree_flatten((args, kwargs))


def _signature(leaves: Sequence[Any], structure: Any) -> Any:
    """What graphs are made for; None where an argument is neither a plain tensor nor a plain value."""
    said: list[Any] = [structure, torch.is_inference_mode_enabled()]
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            said.append((kind, torch.get_autocast_dtype(kind)))
    for leaf in leaves:
        if type(leaf) in (torch.Tensor, nn.Parameter) and leaf.layout is torch.strided:
            said.append((leaf.shape, leaf.stride(), leaf.dtype, leaf.device))
        elif isinstance(leaf, PLAIN):
            said.append((type(leaf), leaf))
        else:
            return None
    return tuple(said)


def _callees(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a module calls; lists and dictionaries of modules are never called themselves."""
    for own, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _callees(child, _joined(name, own))
        else:
            yield _joined(name, own), child


def _joined(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own


class Split(nn.Module):
    """Called as the module is, one call at a time. Everything runs without gradients."""

    def __init__(self, module: nn.Module, options: SplitOptions):
        super().__init__()
        # Not as a submodule: it stays what it is, and its parameters are counted once.
        self.__dict__["module"] = module
        self.region = Region("", module, options)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in _flat(args, kwargs)[0]
        ):
            raise BadInput("split runs without gradients: detach the inputs, or call it under torch.no_grad()")
        # Through the module's own call, for the sake of its hooks.
        with torch.set_grad_enabled(False), forwards({self.module: self.region}):
            return self.module(*args, **kwargs)

    @property
    def pieces(self) -> list[Piece]:
        """Of the signature that was called last; a module's pieces in the order in which they run."""
        return self.region.pieces()

    @property
    def flops_in_graphs_fraction(self) -> float | None:
        """Of matrix products and attention. None where some of it is not known, because it runs as Python."""
        total = sum(piece.flops for piece in self.pieces)
        if not total or any(region.open or region.open_for for region in _regions(self.region)):
            return None
        return sum(piece.flops for piece in self.pieces if piece.static) / total

    @property
    def obstacles(self) -> list[EagerReason]:
        """What keeps modules' own Python out of graphs, with the statement and what would mend it."""
        said = {
            (region.name or "module", why): None
            for region in _regions(self.region)
            for why in [region.open, *region.open_for.values()]
            if why
        }
        return [obstacle(name, why) for name, why in said]

    def report(self) -> str:
        lines = []
        for piece in self.pieces:
            kind = "graph" if piece.static else "eager"
            lines.append(f"{piece.name:<24} {kind}  {piece.kernels:>4} kernels  {piece.flops / 1e9:>10.3f} GFLOP")
            lines += [f"    {why}" for why in piece.why]
        for found in self.obstacles:
            lines.append(f"{found.name:<24} as Python: {found.why}")
            if found.statement:
                lines.append(f"    {found.place}: {found.statement}")
            lines.append(f"    cure: {found.cure}")
        fraction = self.flops_in_graphs_fraction
        lines.append(f"FLOPs in graphs: {'not known' if fraction is None else f'{fraction:.1%}'}")
        counts = [f"{self.region.counts[how]} {how}" for how in ("replayed", "preparing", "eager")]
        lines.append(f"calls: {', '.join(counts)}")
        return "\n".join(lines)


def _regions(region: Region) -> Iterator[Region]:
    yield region
    for child in region.children.values():
        yield from _regions(child)


def split(
    module: nn.Module, example_inputs: Sequence[Any] | torch.Tensor | None = None,
    example_kwargs: Mapping[str, Any] | None = None, *,
    most_signatures: int = 8, shortest: int = 4, keep_state: bool = True,
) -> Split:  # fmt: skip
    """A module that answers as `module` does, from captured graphs where that is possible.

    With example inputs, graphs for arguments like these are made at once: the module runs on them three times, and
    with `keep_state` its buffers, its other tensors and the inputs are put back to what they were. Without, they are
    made in the first three calls. `most_signatures`: sets of shapes, and of other arguments, that graphs are kept for;
    further ones run eagerly. `shortest`: kernels that a graph must have.
    """
    if not isinstance(module, nn.Module):
        raise BadInput(f"split takes a torch.nn.Module, not a {type(module).__name__}")
    args = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else tuple(example_inputs or ())
    kwargs = dict(example_kwargs or {})
    held = _tensors(module)
    given = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
    device = _device([*module.parameters(), *held, *given])
    made = Split(module, SplitOptions(most_signatures, shortest, device, recorder(device)))
    if args or kwargs:
        saved = [(tensor, tensor.clone()) for tensor in (*held, *given)] if keep_state else []
        state = PythonState(module)
        for _ in range(_CALLS_TO_GRAPHS):
            made(*args, **kwargs)
        if keep_state:
            state.put_back()
            with torch.no_grad():
                for tensor, before in saved:
                    tensor.copy_(before)
    return made


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    """Buffers, and tensors that are plain attributes: what a call may write to."""
    own = [value for child in module.modules() for value in child.__dict__.values() if type(value) is torch.Tensor]
    return list({id(tensor): tensor for tensor in (*module.buffers(), *own)}.values())


def _device(tensors: Sequence[torch.Tensor]) -> torch.device:
    found = sorted({tensor.device for tensor in tensors if tensor.device.type != "cpu"}, key=str)
    if len(found) > 1 or (found and found[0].type != "cuda"):
        said = ", ".join(map(str, found))
        raise BadInput(f"split captures on one CUDA or ROCm device; these tensors are on {said}")
    return found[0] if found else torch.device("cpu")
