"""What stays Python in a split module: calls that its graph passes over, and the state that it keeps in Python.

What such a call returns is learnt from one real run that is watched. In the trace it is a node with results of that
shape; when the graph runs, the node calls the Python, and results of another shape are refused.
A graph has numbers, switches and addresses of tensors built in. Whoever changes one of them from outside must find
the graph thrown away, not a stale answer.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import wraps
from operator import getitem, is_
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, track_tensor_tree
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from crosstie.core.errors import CrosstieError
from crosstie.port.split.graphs import address

PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
_handling: ContextVar[Callable[[Any], Callable[..., Any]] | None] = ContextVar("handling", default=None)

_PLAIN_STATE = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
# What PyTorch itself keeps in a module and does not compute with.
_OF_EVERY_MODULE = {name for name, value in vars(nn.Module()).items() if name != "training"} | {"forward"}


def dynamic(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Marks a function whose Python must run in every call: `split` cuts around it and captures none of it.

    For code that decides by values of tensors. It returns tensors whose shapes do not depend on values.
    """

    @wraps(function)
    def marked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        handling = _handling.get()
        result: Result = function(*args, **kwargs) if handling is None else handling(function)(*args, **kwargs)
        return result

    return marked


@contextmanager
def marked_calls(handling: Callable[[Any], Callable[..., Any]] | None) -> Iterator[None]:
    """Calls of marked functions go through what `handling` makes of them."""
    token = _handling.set(handling)
    try:
        yield
    finally:
        _handling.reset(token)


@contextmanager
def forwards(replaced: dict[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """These modules' `forward` is another one for a while; set on the object, so that its class is untouched."""
    before = {module: module.__dict__.get("forward") for module in replaced}
    try:
        for module, forward in replaced.items():
            module.__dict__["forward"] = forward
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = own


class TraceObstacle(Exception):
    """A trace cannot go on. `module`: whose Python is to blame, None where the traceback says it."""

    def __init__(self, module: nn.Module | None, why: str):
        self.module, self.why = module, why
        super().__init__(why)


@dataclass(frozen=True)
class Like:
    """How a tensor lies in memory, without the memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Like":
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)

    def empty(self) -> torch.Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Argument:
    """A result that is one of the tensors given."""

    position: int


@dataclass(frozen=True)
class SeenCall:
    """One real call. `results`: a Like, an Argument or a plain value each; `written`: positions of tensors given."""

    spec: TreeSpec
    results: tuple[Any, ...]
    written: frozenset[int]
    # Modules and functions that were running around it.
    inside: tuple[Any, ...]


class CallWatch:
    """What calls looked like in one real run, by module or marked function, in order."""

    def __init__(self) -> None:
        self.calls: dict[Any, list[SeenCall]] = {}
        self.running: list[Any] = []

    @contextmanager
    def on(self, root: nn.Module) -> Iterator[None]:
        wrapped = {module: self._wrap(module, module.forward) for module in root.modules() if module is not root}
        with forwards(wrapped), marked_calls(lambda function: self._wrap(function, function)):
            yield

    def _wrap(self, owner: Any, function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor)]
            versions = [_version(tensor) for tensor in tensors]
            inside = tuple(self.running)
            self.running.append(owner)
            try:
                out = function(*args, **kwargs)
            finally:
                self.running.pop()
            leaves, spec = tree_flatten(out)
            # An inference tensor counts no versions: it may have been written to.
            written = {n for n, before in enumerate(versions) if before is None or _version(tensors[n]) != before}
            results = tuple(_result(leaf, tensors) for leaf in leaves)
            self.calls.setdefault(owner, []).append(SeenCall(spec, results, frozenset(written), inside))
            return out

        return watched

    def passable(self, owner: Any) -> bool:
        """A trace can pass over its calls: they return tensors and plain values."""
        seen = self.calls.get(owner, [])
        return bool(seen) and all(isinstance(leaf, (*PLAIN, Like, Argument)) for call in seen for leaf in call.results)

    def outside(self, owner: Any, opaque: Sequence[Any]) -> list[SeenCall]:
        """Its calls that were made by code that the trace runs."""
        return [call for call in self.calls.get(owner, []) if not any(other in opaque for other in call.inside)]


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else int(tensor._version)


def _result(leaf: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    same = [n for n, tensor in enumerate(tensors) if tensor is leaf]
    return Argument(same[0]) if same else Like.of(leaf)


class OpaqueCall:
    """A node's target: Python called with the tensors and numbers that the graph has for it."""

    def __init__(self, title: str, function: Callable[..., Any], leaves: list[Any], spec: TreeSpec, seen: SeenCall):
        self.title, self.function, self.spec, self.seen = title, function, spec, seen
        self.moving = [n for n, leaf in enumerate(leaves) if isinstance(leaf, (torch.Tensor, *_SYMBOLS))]
        self.fixed = [None if n in self.moving else leaf for n, leaf in enumerate(leaves)]
        self.tensors = [n for n, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        self.written = {self.tensors[position] for position in seen.written}
        # torch.fx wants a name on what it calls.
        self.__name__, self.__module__ = "opaque", "crosstie_opaque"
        # Memory that graphs write to: Python may keep what it is given, so it gets copies.
        self.borrowed: set[int] = set()

    def __call__(self, *values: Any) -> list[torch.Tensor]:
        leaves = list(self.fixed)
        for n, value in zip(self.moving, values, strict=True):
            lent = isinstance(value, torch.Tensor) and n not in self.written and address(value) in self.borrowed
            leaves[n] = value.clone() if lent else value
        args, kwargs = tree_unflatten(leaves, self.spec)
        out, spec = tree_flatten(self.function(*args, **kwargs))
        if spec != self.seen.spec:
            raise Departure(f"{self.title} returned another structure than in the first call")
        given = {address(leaves[n]) for n in self.tensors}
        new = []
        for leaf, expected in zip(out, self.seen.results, strict=True):
            if isinstance(expected, Like):
                if not isinstance(leaf, torch.Tensor) or (tuple(leaf.shape), leaf.dtype) != (
                    expected.shape,
                    expected.dtype,
                ):
                    raise Departure(
                        f"{self.title} returned {_said(leaf)}, and {expected.dtype} {list(expected.shape)} in the "
                        "first call: the shape of what it returns must not depend on values"
                    )
                new.append(leaf.clone() if address(leaf) in given else leaf)
            elif not isinstance(expected, Argument) and leaf != expected:
                raise Departure(f"{self.title} returned {leaf!r}, and {expected!r} in the first call")
        return new


class Departure(CrosstieError):
    """A call went another way than the one that the graphs were made from."""


def _said(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else f"a {type(leaf).__name__}"


def title(owner: Any) -> str:
    return type(owner).__name__ if isinstance(owner, nn.Module) else str(getattr(owner, "__qualname__", owner))


def stub(owner: Any, function: Callable[..., Any], calls: Sequence[SeenCall]) -> Callable[..., Any]:
    """Stands for `function` in a trace."""
    remaining = iter(calls)

    def stubbed(*args: Any, **kwargs: Any) -> Any:
        seen = next(remaining, None)
        if seen is None:
            raise TraceObstacle(None, f"{title(owner)} is called more often than in the run that was watched")
        mode = get_proxy_mode()
        assert mode is not None
        leaves, spec = tree_flatten((args, kwargs))
        for leaf in leaves:
            if not isinstance(leaf, (torch.Tensor, nn.Module, *_SYMBOLS, *PLAIN)):
                raise TraceObstacle(
                    None, f"{title(owner)} takes a {type(leaf).__name__}, neither tensor nor plain value"
                )
        call = OpaqueCall(title(owner), function, leaves, spec, seen)
        proxies = tuple(mode.tracer.unwrap_proxy(leaves[n]) for n in call.moving)
        proxy = mode.tracer.create_proxy("call_function", call, proxies, {}, name="opaque")
        with disable_proxy_modes_tracing():
            new = [result.empty() for result in seen.results if isinstance(result, Like)]
        track_tensor_tree(new, proxy, constant=None, tracer=mode.tracer)
        fresh = iter(new)

        def returned(result: Any) -> Any:
            if isinstance(result, Like):
                return next(fresh)
            return leaves[call.tensors[result.position]] if isinstance(result, Argument) else result

        return tree_unflatten(list(map(returned, seen.results)), seen.spec)

    return stubbed


def holders(root: nn.Module) -> list[tuple[nn.Module, dict[str, Any]]]:
    """The dictionaries of all modules, and of the plain objects and dictionaries that they hold (a config, a cache)."""
    found: dict[int, tuple[nn.Module, dict[str, Any]]] = {}
    for module in root.modules():
        found.setdefault(id(module.__dict__), (module, module.__dict__))
        for value in module.__dict__.values():
            inner = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            if type(inner) is dict and not isinstance(value, nn.Module | torch.Tensor | type) and not callable(value):
                found.setdefault(id(inner), (module, inner))
    return list(found.values())


class PythonState:
    """Everything but the contents of tensors: attributes, and lists, dictionaries and sets that they hold."""

    def __init__(self, root: nn.Module):
        self.root = root
        self.saved = [(module, held, dict(held)) for module, held in holders(root)]
        self.contents = [
            (module, name, value, value.copy())
            for module, held, _ in self.saved
            for name, value in held.items()
            if type(value) in (list, set)
        ]

    def changed(self) -> list[tuple[nn.Module, dict[str, Any], str]]:
        """Module, dictionary and name of whatever is another object than it was."""
        found = []
        for module, held, before in self.saved:
            for name in held.keys() | before.keys():
                now, then = held.get(name, self), before.get(name, self)
                if now is not then and not (isinstance(now, _PLAIN_STATE) and same_plain(now, then)):
                    found.append((module, held, name))
        for module, name, value, before in self.contents:
            if len(value) != len(before) or not all(map(is_, value, before)):
                found.append((module, module.__dict__, name))
        return found

    def put_back(self) -> None:
        for _, held, before in self.saved:
            if held.keys() != before.keys() or not all(map(is_, held.values(), before.values())):
                held.clear()
                held.update(before)
        for _, _, value, before in self.contents:
            value.clear()
            (value.extend if isinstance(value, list) else value.update)(before)


class StateGuard:
    """Holds as long as what graphs have built in is what the module has.

    `living` names what changes in every call by the module's own doing: (dictionary's id, name).
    """

    def __init__(self, root: nn.Module, constants: Iterable[torch.Tensor], living: set[tuple[int, str]]):
        places = [
            (held, name)
            for _, held in holders(root)
            for name, value in held.items()
            if isinstance(value, (*_PLAIN_STATE, torch.Tensor, nn.Module))
            and name not in _OF_EVERY_MODULE
            and (id(held), name) not in living
        ]
        # Two flat lists, so that a check is two loops in C: it runs in every call.
        self.held, self.names = [held for held, _ in places], [name for _, name in places]
        self.values = list(map(getitem, self.held, self.names))
        # The root's own hooks run around its graph.
        modules = [module for module in root.modules() if module is not root]
        self.hooks = [hooks for m in modules for hooks in (m._forward_hooks, m._forward_pre_hooks)]
        self.hook_count = sum(map(len, self.hooks))
        self.constants = list(constants)
        self.addresses = list(map(torch.Tensor.data_ptr, self.constants))

    def holds(self) -> bool:
        try:
            return (
                (all(map(is_, map(getitem, self.held, self.names), self.values)) or self._equal())
                and list(map(torch.Tensor.data_ptr, self.constants)) == self.addresses
                and sum(map(len, self.hooks)) == self.hook_count
            )
        except KeyError:
            return False

    def _equal(self) -> bool:
        """Another object is no change where it is the same number."""
        now = list(map(getitem, self.held, self.names))
        return all(
            a is b or (isinstance(a, _PLAIN_STATE) and same_plain(a, b)) for a, b in zip(now, self.values, strict=True)
        )


def same_plain(a: Any, b: Any) -> bool:
    return type(a) is type(b) and bool(a == b)
