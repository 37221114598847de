"""MODULE:NAME on the command line as Python objects. MODULE is dotted or a path to a .py file."""

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from crosstie.core.errors import BadInput, near_names
from crosstie.port.capture.inputs import Arguments
from crosstie.port.capture.sites import one_line

_STEP = re.compile(r"\.?([A-Za-z_]\w*)|\[([^\[\]]+)\]")


def split(reference: str) -> tuple[str, str]:
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
        raise BadInput(f"{at} has no '{name}'.{_near(name, dir(holder))}") from None


def _item(holder: Any, key: str, at: str) -> Any:
    if not isinstance(holder, dict):
        raise BadInput(f"{at} is no dictionary, so it has no '{key}'")
    keyed = {str(known): value for known, value in holder.items()}
    if key not in keyed:
        raise BadInput(f"{at} has no '{key}'.{_near(key, keyed)}")
    return keyed[key]


def _near(name: str, known: Any) -> str:
    near = near_names(name, known)
    return f" Did you mean {' or '.join(near)}?" if near else ""


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
