"""What is checked: MODULE:NAME as Python objects, the function on the stand-in device, and the arguments of its calls.

MODULE is dotted or a path to a .py file. Arguments are made by the user's factory, varied for replays, and copied into
the captured ones.
"""

import copy
import dataclasses
import importlib
import importlib.util
import inspect
import random
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch

from crosstie.core.errors import BadInput, did_you_mean, near_names
from crosstie_port.capture.device_tensor import DEVICE, DeviceTensor
from crosstie_port.capture.hazards import NOT_FOLLOWED, CaptureResult
from crosstie_port.capture.sites import call_users, definition, one_line
from crosstie_port.capture.tape import NotFollowed

Source = Callable[..., Any]
Tree = TypeVar("Tree")
# The string, so that `dev == "cuda"` in user code holds.
DEVICE_NAME = "cuda"
_PLAIN = (bool, int, float, complex, str, type(None))

_STEP = re.compile(r"\.?([A-Za-z_]\w*)|\[([^\[\]]+)\]")


class Arguments(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def make(factory: Source, seed: int, device: str = DEVICE_NAME) -> Arguments:
    return as_arguments(with_device_and_seed(factory, seed, device))


def with_device_and_seed(factory: Callable[..., Any], seed: int, device: str = DEVICE_NAME) -> Any:
    """Calls factory(), factory(device) or factory(device, seed), whichever it takes."""
    import numpy

    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
    try:
        parameters = list(inspect.signature(factory).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    taken = [parameter for parameter in parameters if parameter.kind in kinds]
    given: list[Any] = []
    for parameter in taken[:2]:
        if parameter.name in ("seed", "rng_seed"):
            given.append(seed)
        elif parameter.name in ("dev", "device") or parameter.default is inspect.Parameter.empty:
            given.append(device if not given else seed)
        else:
            break
    try:
        return call_users(factory, *given)
    except (BadInput, NotFollowed):
        raise
    except (Exception, SystemExit) as error:
        name = getattr(factory, "__name__", type(factory).__name__)
        raise BadInput(f"{name}({', '.join(map(repr, given))}) fails: {one_line(error)}") from error


def as_arguments(made: Any) -> Arguments:
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], (tuple, list)) and isinstance(made[1], dict):
        return Arguments(tuple(made[0]), made[1])
    if isinstance(made, (tuple, list)):
        return Arguments(tuple(made), {})
    return Arguments((), made) if isinstance(made, dict) else Arguments((made,), {})


def load(static: Arguments, new: Arguments) -> Arguments:
    """Copies the new tensors into the captured ones; numbers and text are the new call's own, other objects stay."""

    def loaded(old: Any, fresh: Any) -> Any:
        if not isinstance(old, torch.Tensor):
            return fresh if isinstance(old, _PLAIN) else old
        if not isinstance(fresh, torch.Tensor) or old.shape != fresh.shape or old.dtype != fresh.dtype:
            shapes = f"{list(old.shape)} and {list(fresh.shape) if isinstance(fresh, torch.Tensor) else fresh!r}"
            raise BadInput(f"the inputs of two seeds have other shapes ({shapes}): a graph is captured for one")
        target, source = (t.elem if isinstance(t, DeviceTensor) else t for t in (old, fresh))
        with torch.no_grad():
            target.copy_(source)
        return old

    return each_leaf(loaded, static, new)


def vary(static: Arguments, seed: int) -> Arguments:
    """Other inputs of the same shapes where the factory gives the same each time: its numbers in another order."""
    order = torch.Generator().manual_seed(seed)

    def shuffled(leaf: Any) -> Any:
        if not isinstance(leaf, DeviceTensor):
            return leaf
        flat = leaf.elem.reshape(-1)
        return leaf.owner.wrap(flat[torch.randperm(flat.numel(), generator=order)].reshape(leaf.shape).clone())

    return each_leaf(shuffled, static)


def same(left: Arguments, right: Arguments) -> bool:
    for tensor, other in zip(leaves(left), leaves(right), strict=False):
        if isinstance(tensor, DeviceTensor):
            tensor, other = tensor.elem, other.elem
        if isinstance(tensor, torch.Tensor):
            if not torch.equal(tensor, other):
                return False
        elif isinstance(tensor, _PLAIN) and tensor != other:
            return False
    return True


def all_on_host(arguments: Arguments) -> bool:
    """Tensors, and none of them made for the device: pinned memory is."""
    tensors = [leaf for leaf in leaves(arguments) if isinstance(leaf, torch.Tensor)]
    return bool(tensors) and not any(isinstance(tensor, DeviceTensor) or tensor.is_pinned() for tensor in tensors)


def to_device(arguments: Arguments) -> Arguments:
    return each_leaf(lambda leaf: leaf.to(DEVICE_NAME) if isinstance(leaf, torch.Tensor) else leaf, arguments)


def to_host(arguments: Arguments) -> Arguments:
    return each_leaf(lambda leaf: leaf.elem if isinstance(leaf, DeviceTensor) else leaf, arguments)


def leaves(arguments: Arguments) -> list[Any]:
    found: list[Any] = []
    each_leaf(found.append, arguments)
    return found


def each_leaf(change: Callable[..., Any], value: Tree, *others: Tree) -> Tree:
    """The same structure with `change(leaf, *its fellows)` for each leaf of containers and plain records."""
    parts = [_parts(one) for one in (value, *others)]
    made: Tree
    if parts[0] is None:
        made = change(value, *others)
        return made
    if any(part is None or part.keys() != parts[0].keys() for part in parts):
        raise BadInput("the inputs of two seeds have another structure: a graph is captured for one")
    changed = {key: each_leaf(change, *(part[key] for part in parts if part is not None)) for key in parts[0]}
    # The last: what is no leaf, such as the class or a private attribute, is that of the new call.
    made = _rebuilt((value, *others)[-1], changed)
    return made


def _parts(value: Any) -> dict[Any, Any] | None:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, (list, tuple)):
        return dict(enumerate(value))
    is_record = dataclasses.is_dataclass(value) or isinstance(value, SimpleNamespace)
    return dict(vars(value)) if is_record and not isinstance(value, type) and hasattr(value, "__dict__") else None


def _rebuilt(like: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(like, (list, tuple)):
        is_named = hasattr(like, "_fields")
        return type(like)(*parts.values()) if is_named else type(like)(parts.values())
    made = copy.copy(like)
    for key, part in parts.items():
        if isinstance(like, Mapping):
            made[key] = part
        else:
            # A frozen dataclass refuses plain assignment.
            object.__setattr__(made, key, part)
    return made


def parse_reference(reference: str) -> tuple[str, str]:
    module, colon, name = reference.rpartition(":")
    return (module, name) if colon else (reference, "")


def load_module(module: str) -> ModuleType:
    where = Path(module)
    try:
        if where.suffix == ".py":
            return _from_file(where)
        if str(Path.cwd()) not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        return importlib.import_module(module)
    except BadInput:
        raise
    except ModuleNotFoundError as error:
        raise BadInput(f"{module}: {error}") from error
    except (Exception, SystemExit) as error:
        raise BadInput(f"{module} cannot be imported: {one_line(error)}") from error


def _from_file(file: Path) -> ModuleType:
    if not file.is_file():
        raise BadInput(f"{file}: no such file")
    name = file.stem
    known = sys.modules.get(name)
    if known is not None and Path(getattr(known, "__file__", None) or "").resolve() == file.resolve():
        return known
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, file.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def find(module: ModuleType, name: str) -> Any:
    """NAME, NAME.attribute or NAME[key]."""
    found, at, end = module, module.__name__, 0
    for step in _STEP.finditer(name):
        if step.start() != end:
            break
        end = step.end()
        attribute, key = step.groups()
        found = _attribute(found, attribute, at) if attribute else _item(found, key.strip("'\""), at)
        at += step.group()
    if not name or end != len(name):
        raise BadInput(f"'{name}' is not a name: MODULE:NAME, MODULE:NAME.attribute or MODULE:NAME[key]")
    return found


def _attribute(holder: Any, name: str, at: str) -> Any:
    try:
        return getattr(holder, name)
    except AttributeError:
        raise BadInput(f"{at} has no '{name}'.{did_you_mean(near_names(name, dir(holder)))}") from None


def _item(holder: Any, key: str, at: str) -> Any:
    if not isinstance(holder, dict):
        raise BadInput(f"{at} is no dictionary, so it has no '{key}'")
    keyed = {str(known): value for known, value in holder.items()}
    if key not in keyed:
        raise BadInput(f"{at} has no '{key}'.{did_you_mean(near_names(key, keyed))}")
    return keyed[key]


def callables(found: Any, name: str) -> dict[str, Any]:
    """One callable, or all of a dictionary."""
    if not isinstance(found, dict):
        return {name: found}
    chosen = {str(key): value for key, value in found.items() if callable(value)}
    if not chosen:
        raise BadInput(f"{name} holds no callable")
    return chosen


def functions_of(module: ModuleType) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def takes(fn: Any, arguments: Arguments, before: int = 0) -> bool:
    """Whether it can be called with the arguments, after `before` others."""
    try:
        inspect.signature(fn).bind(*([None] * before), *arguments.args, **arguments.kwargs)
    except (TypeError, ValueError):
        return False
    return True


def is_compiled(fn: Any) -> bool:
    return hasattr(fn, "_torchdynamo_orig_callable") or type(fn).__name__ == "OptimizedModule"


def unknown(fn: Any, evidence: str, remedy: str) -> CaptureResult:
    return CaptureResult(verdict="unknown", hazards=(NOT_FOLLOWED.at(definition(fn), evidence, remedy),))


def on_device(fn: Any, arguments: Arguments) -> Any:
    """The function itself, or a module as a copy on the device; a class or factory is called for it."""
    makes_module = inspect.isclass(fn)
    if inspect.isroutine(fn) and not takes(fn, arguments):
        makes_module = all(name in ("dev", "device", "seed") for name in inspect.signature(fn).parameters)
    if makes_module:
        fn = with_device_and_seed(fn, 0)
    if not callable(fn):
        raise BadInput(f"{type(fn).__name__} cannot be called")
    if not isinstance(fn, torch.nn.Module):
        return fn
    try:
        return copy.deepcopy(fn).to(DEVICE)
    except Exception as error:
        raise BadInput(f"{type(fn).__name__} cannot be copied to the device: {one_line(error)}") from error
