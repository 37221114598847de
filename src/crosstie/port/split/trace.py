"""A module's operations as a graph, without running any of them: PyTorch's tracer on fake tensors.

Counts that are known at run time only (`nonzero`, `.item()`) pass through as symbols, so Python that computes with
them is traced too. Python that decides by them cannot be, nor can kernels that no tracer knows or state kept in
Python: such a module becomes one opaque call in its parent's graph and goes on as the Python that it is.
"""

import logging
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from crosstie.port.split.held import Held
from crosstie.port.split.opaque import PLAIN, Like, Obstacle, Watch, forwards, marked_calls, opaque_call, stub
from crosstie.port.split.state import PythonState
from crosstie.port.split.symbols import symbolic_numbers

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))


class Untraceable(Exception):
    """The module's own Python cannot be traced; its children's may be."""

    def __init__(self, why: str):
        self.why = why
        super().__init__(why)


@dataclass
class Traced:
    graph: fx.GraphModule
    # The result's leaves: ("node", index into the graph's outputs) or ("plain", value).
    results: list[tuple[str, Any]]
    spec: TreeSpec
    # Modules that run as Python inside this graph, and why.
    opaque: dict[nn.Module, str]


@dataclass
class Question:
    """What is traced: a module, for tensors like these and other arguments exactly these."""

    root: nn.Module
    forward: Callable[..., Any]
    leaves: Sequence[Any]
    spec: TreeSpec
    watch: Watch
    # Python's state before the run that was watched.
    before: PythonState
    # How a module runs that the graph passes over.
    run_opaque: Callable[[nn.Module, str], Callable[..., Any]]


def trace(question: Question) -> Traced:
    root, watch = question.root, question.watch
    parents = {child: module for module in root.modules() for child in module.children()}
    opaque: dict[nn.Module, str] = {}
    for module, parent in parents.items():
        # A hook may do anything; the root's own run around its graph.
        if module._forward_hooks or module._forward_pre_hooks:
            why = f"{type(module).__name__} has hooks, which run as Python"
            if not watch.passable(parent):
                raise Untraceable(why)
            opaque[parent] = why
    while True:
        try:
            traced = _trace_once(question, opaque)
            # Once more, with Python's state as it was a call ago: what differs would be stale in the next one.
            now = PythonState(root)
            question.before.put_back()
            try:
                again = _trace_once(question, opaque)
            finally:
                now.put_back()
            _compare(root, traced.graph, again.graph)
        except Obstacle as found:
            module = found.module
            while module is not None and (module in opaque or not watch.passable(module)):
                module = parents.get(module)
            if module is None or module is root:
                raise Untraceable(found.why) from found.__cause__
            # What one layer does, the others of its class do.
            kind = type(module)
            alike = [other for other in root.modules() if type(other) is kind and other is not root]
            opaque.update({other: found.why for other in alike if watch.passable(other)})
        else:
            return traced


def _trace_once(question: Question, opaque: dict[nn.Module, str]) -> Traced:
    root = question.root
    results: list[tuple[str, Any]] = []
    out_spec: list[TreeSpec] = []

    held = Held(root)

    def flat(*tensors: torch.Tensor) -> list[Any]:
        given = iter(tensors)
        leaves = [next(given) if isinstance(leaf, torch.Tensor) else leaf for leaf in question.leaves]
        args, kwargs = tree_unflatten(leaves, question.spec)
        with held.replaced(list(given)):
            out, spec = tree_flatten(question.forward(*args, **kwargs))
        out_spec.append(spec)
        outputs: list[Any] = []
        for leaf in out:
            if isinstance(leaf, torch.Tensor | torch.SymInt | torch.SymFloat | torch.SymBool):
                results.append(("node", len(outputs)))
                outputs.append(leaf)
            elif isinstance(leaf, PLAIN):
                results.append(("plain", leaf))
            else:
                raise Obstacle(root, f"it returns a {type(leaf).__name__}, neither tensor nor plain value")
        return outputs

    # Without fallback: kernels that have no fake counterpart would be run on made-up data.
    fakes = FakeTensorMode(
        allow_fallback_kernels=False, allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
    )
    with fakes:
        # Of their own memory each: two arguments that are one tensor now may be two in a later call.
        inputs = [Like.of(leaf).empty() for leaf in question.leaves if isinstance(leaf, torch.Tensor)]
    tracer = make_fx(
        flat, tracing_mode="fake", _allow_non_fake_inputs=True, _error_on_data_dependent_ops=False,
        record_stack_traces=True,
    )  # fmt: skip
    passed = [module for module in opaque if question.watch.calls.get(module)]
    functions = [owner for owner in question.watch.calls if not isinstance(owner, nn.Module)]
    stubs = {
        owner: stub(
            owner,
            question.run_opaque(owner, opaque[owner]) if isinstance(owner, nn.Module) else owner,
            question.watch.outside(owner, [*passed, *functions]),
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
    except Obstacle as found:
        raise Obstacle(found.module or _module_of(found, root), found.why) from found
    except Exception as error:  # Whatever it is: the module runs as Python, where it shows itself again.
        raise Obstacle(_module_of(error, root), _why(error)) from error
    finally:
        state.put_back()
    if changed:
        module, _, name = changed[0]
        raise Obstacle(module, f"`{name}` of {type(module).__name__} changes during the call: state kept in Python")
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    held.hold(graph, placeholders[len(inputs) :])
    return Traced(graph, results, out_spec[0], {module: opaque[module] for module in passed})


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
            raise Obstacle(None, f"{a.target} gets a number of Python's that is another one in each call ({at})")
    if len(ours) != len(theirs):
        raise Obstacle(None, "it does not do the same operations in each call")


def _spelt(node: fx.Node) -> str:
    target = "opaque" if opaque_call(node.target) else str(node.target)
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
