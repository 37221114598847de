"""A module's operations as a graph, without running any of them: PyTorch's tracer on fake tensors.

Counts that are known at run time only (`nonzero`, `.item()`) pass through as symbols, so Python that computes with
them is traced too. Python that decides by them cannot be, nor can kernels that no tracer knows or state kept in
Python: such a module becomes one opaque call in its parent's graph and goes on as the Python that it is.
While a module is traced, fakes stand in its tensors' place: left as they are, the tracer would run what works on them
alone for real. A counter in a buffer would count, and a threshold's `.item()` would be built in as today's number.
`int` and `float` in the files of its classes are stand-ins that let symbols through.
"""

import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from crosstie.port.split.opaque import (
    PLAIN,
    CallWatch,
    Like,
    OpaqueCall,
    PythonState,
    TraceObstacle,
    forwards,
    holders,
    marked_calls,
    stub,
)

_STANDING_IN = ("int", "float")

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class _Standing(type):
    """Answers for the built-in type in `isinstance` and in everything that is asked of the type itself."""

    real: type

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, other: type) -> bool:
        return issubclass(other, cls.real)

    def __eq__(cls, other: object) -> bool:
        return other is cls.real or other is cls

    def __hash__(cls) -> int:
        return hash(cls.real)

    def __getattr__(cls, name: str) -> Any:
        return getattr(cls.real, name)


def _symbol(args: Any) -> Any:
    """What stands for a number that is not known yet: the argument, or what a tensor's value is; else None."""
    value = next(iter(args), None)
    value = value.item() if isinstance(value, torch.Tensor) else value
    return value if isinstance(value, torch.SymInt | torch.SymFloat) else None


class _Number(metaclass=_Standing):
    symbolic: Callable[..., Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        symbol = _symbol(args)
        return cls.real(*args, **kwargs) if symbol is None else cls.symbolic(symbol)


class _Int(_Number):
    real, symbolic = int, staticmethod(torch.sym_int)


class _Float(_Number):
    real, symbolic = float, staticmethod(torch.sym_float)


@contextmanager
def symbolic_numbers(root: nn.Module) -> Iterator[None]:
    names = {type(module).__module__ for module in root.modules()}
    files = [sys.modules[name] for name in names if name in sys.modules and name.partition(".")[0] != "torch"]
    # A file that has its own `int` keeps it.
    spaces = [vars(file) for file in files if not any(name in vars(file) for name in _STANDING_IN)]
    try:
        for space in spaces:
            space.update({"int": _Int, "float": _Float})
        yield
    finally:
        for space in spaces:
            for name in _STANDING_IN:
                del space[name]


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
            still = name in holder if isinstance(holder, dict) else name < len(holder)
            if still and holder[name] is fake_of[id(tensor)]:
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


class _OnlyHeld(TorchDispatchMode):
    """Tensors of closures and globals stay real: what would read their numbers or write to them is refused."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        reads = torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags
        if tensors and not any(map(is_fake, tensors)) and (reads or func._schema.is_mutable):
            raise TraceObstacle(None, f"{func} works on a tensor that is no attribute of a module")
        return func(*args, **kwargs)


@dataclass
class Traced:
    graph: fx.GraphModule
    # The result's leaves: ("node", index into the graph's outputs) or ("plain", value).
    results: list[tuple[str, Any]]
    spec: TreeSpec


@dataclass
class TraceRequest:
    """What is traced: a module, for tensors like these and other arguments exactly these."""

    root: nn.Module
    forward: Callable[..., Any]
    leaves: Sequence[Any]
    spec: TreeSpec
    watch: CallWatch
    # Python's state before the run that was watched.
    before: PythonState
    # How a module runs that the graph passes over.
    run_opaque: Callable[[nn.Module, str], Callable[..., Any]]


def trace(request: TraceRequest) -> Traced:
    """Raises TraceObstacle where the module's own Python cannot be traced; its children's may be."""
    root, watch = request.root, request.watch
    parents = {child: module for module in root.modules() for child in module.children()}
    opaque: dict[nn.Module, str] = {}
    for module, parent in parents.items():
        # A hook may do anything; the root's own run around its graph.
        if module._forward_hooks or module._forward_pre_hooks:
            why = f"{type(module).__name__} has hooks, which run as Python"
            if not watch.passable(parent):
                raise TraceObstacle(root, why)
            opaque[parent] = why
    while True:
        try:
            traced = _trace_once(request, opaque)
            # Once more, with Python's state as it was a call ago: what differs would be stale in the next one.
            now = PythonState(root)
            request.before.put_back()
            try:
                again = _trace_once(request, opaque)
            finally:
                now.put_back()
            _compare(root, traced.graph, again.graph)
        except TraceObstacle as found:
            module = found.module
            while module is not None and (module in opaque or not watch.passable(module)):
                module = parents.get(module)
            if module is None or module is root:
                raise TraceObstacle(root, found.why) from found.__cause__
            # What one layer does, the others of its class do.
            kind = type(module)
            alike = [other for other in root.modules() if type(other) is kind and other is not root]
            opaque.update({other: found.why for other in alike if watch.passable(other)})
        else:
            return traced


def _trace_once(request: TraceRequest, opaque: dict[nn.Module, str]) -> Traced:
    root = request.root
    results: list[tuple[str, Any]] = []
    out_spec: list[TreeSpec] = []

    held = Held(root)

    def flat(*tensors: torch.Tensor) -> list[Any]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in request.leaves]
        args, kwargs = tree_unflatten(leaves, request.spec)
        with held.replaced(list(given)):
            out, spec = tree_flatten(request.forward(*args, **kwargs))
        out_spec.append(spec)
        outputs: list[Any] = []
        for leaf in out:
            if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
                results.append(("node", len(outputs)))
                outputs.append(leaf)
            elif isinstance(leaf, PLAIN):
                results.append(("plain", leaf))
            else:
                raise TraceObstacle(root, f"it returns a {type(leaf).__name__}, neither tensor nor plain value")
        return outputs

    # Without fallback: kernels that have no fake counterpart would be run on made-up data.
    fakes = FakeTensorMode(
        allow_fallback_kernels=False, allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
    )
    with fakes:
        # Of their own memory each: two arguments that are one tensor now may be two in a later call.
        inputs = [Like.of(leaf).empty() for leaf in request.leaves if isinstance(leaf, torch.Tensor)]
    tracer = make_fx(
        flat, tracing_mode="fake", _allow_non_fake_inputs=True, _error_on_data_dependent_ops=False,
        record_stack_traces=True,
    )  # fmt: skip
    passed = [module for module in opaque if request.watch.calls.get(module)]
    functions = [owner for owner in request.watch.calls if not isinstance(owner, nn.Module)]
    stubs = {
        owner: stub(
            owner,
            request.run_opaque(owner, opaque[owner]) if isinstance(owner, nn.Module) else owner,
            request.watch.outside(owner, [*passed, *functions]),
        )
        for owner in [*passed, *functions]
    }
    state = PythonState(root)
    try:
        with (
            forwards({module: stubs[module] for module in passed}),
            marked_calls(stubs.__getitem__),
            symbolic_numbers(root),
            # Composite operators in Python: up to 2.12 some in C++ (matmul) ask a symbol for its number.
            enable_python_dispatcher(),
            _quiet(),
        ):
            graph = tracer(*inputs, *held.fakes(fakes))
        changed = state.changed()
    except TraceObstacle as found:
        raise TraceObstacle(found.module or _module_of(found, root), found.why) from found
    except Exception as error:  # Whatever it is: the module runs as Python, where it shows itself again.
        raise TraceObstacle(_module_of(error, root), _why(error)) from error
    finally:
        state.put_back()
    if changed:
        module, _, name = changed[0]
        raise TraceObstacle(
            module, f"`{name}` of {type(module).__name__} changes during the call: state kept in Python"
        )
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    held.hold(graph, placeholders[len(inputs) :])
    return Traced(graph, results, out_spec[0])


@contextmanager
def _quiet() -> Iterator[None]:
    """PyTorch logs what its tracer cannot do; here that is a reason in the report."""
    loggers = [logging.getLogger(f"torch.{name}") for name in ("_subclasses.fake_tensor", "fx.experimental")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


def _compare(root: nn.Module, one: fx.GraphModule, other: fx.GraphModule) -> None:
    ours, theirs = list(one.graph.nodes), list(other.graph.nodes)
    for a, b in zip(ours, theirs, strict=False):
        if _spelt(a) != _spelt(b) or not _same_constant(one, a, other, b):
            at = place(a)
            raise TraceObstacle(None, f"{a.target} gets a number of Python's that is another one in each call ({at})")
    if len(ours) != len(theirs):
        raise TraceObstacle(None, "it does not do the same operations in each call")


def _spelt(node: fx.Node) -> str:
    target = "opaque" if isinstance(node.target, OpaqueCall) else str(node.target)
    return f"{node.op} {target} {node.args} {node.kwargs}"


def _same_constant(one: fx.GraphModule, a: fx.Node, other: fx.GraphModule, b: fx.Node) -> bool:
    if a.op != "get_attr":
        return True
    ours, theirs = getattr(one, str(a.target)), getattr(other, str(b.target))
    return ours is theirs or bool(torch.equal(ours, theirs))


def _module_of(error: BaseException, root: nn.Module) -> nn.Module | None:
    """The innermost of root's modules whose code was running."""
    members = set(root.modules())
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    owners = [frame.f_locals.get("self") for frame in frames]
    return next((owner for owner in reversed(owners) if isinstance(owner, nn.Module) and owner in members), None)


def _why(error: BaseException) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    users = [frame for frame in frames if not frame.filename.startswith(_NOT_THE_USERS)]
    return f"{first} ({users[-1].filename}:{users[-1].lineno})" if users else first


def place(node: fx.Node) -> str:
    """file:line of the user's code that a node comes from, "" where it is not known."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', node.meta.get("stack_trace") or "")
    users = [(file, line) for file, line in frames if not file.startswith(_NOT_THE_USERS)]
    return ":".join(users[-1]) if users else ""
