"""Which kernels a module has: those that Python can reach, and those that only its source shows."""

import ast
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_JIT = ("jit", "autotune", "heuristics")
# Names under which a module may have triton without importing it from there, as `from vllm.triton_utils import triton`.
_USUAL = {"triton", "gluon"}


@dataclass
class Found:
    name: str
    file: str
    line: int
    # The kernel with its autotuner and heuristics; None where it is made inside a function.
    candidate: Any
    # A function that kernels call, and nobody can launch.
    helper: bool
    # From another module.
    imported: bool

    def said(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "file": self.file,
            "line": self.line,
            "helper": self.helper,
            "imported": self.imported,
        }


def kernels_in(module: ModuleType) -> list[Found]:
    from crosstie.port.kernels.jobs import def_line, jit_function

    found: dict[tuple[str, int], Found] = {}
    for name, candidate in list(vars(module).items()):
        function = jit_function(candidate)
        if function is None:
            continue
        own = function.fn.__module__ == module.__name__
        line = def_line(function)
        file = function.fn.__code__.co_filename
        found.setdefault((file, line), Found(name, file, line, candidate, _returns_value(function), not own))
    called = _called(found.values())
    for kernel in found.values():
        kernel.helper |= jit_function(kernel.candidate).__name__ in called
    source = getattr(module, "__file__", None)
    if source:
        for name, line in _in_source(Path(source)):
            found.setdefault((source, line), Found(name, source, line, None, False, False))
    return sorted(found.values(), key=lambda kernel: kernel.line)


def _returns_value(function: Any) -> bool:
    tree = function.parse()
    return any(isinstance(node, ast.Return) and node.value is not None for node in ast.walk(tree))


def _called(kernels: Any) -> set[str]:
    """Names that the kernels' own code calls: such a function is compiled with its caller."""
    from crosstie.port.kernels.jobs import jit_function

    names: set[str] = set()
    for kernel in kernels:
        function = jit_function(kernel.candidate)
        calls = (node.func for node in ast.walk(function.parse()) if isinstance(node, ast.Call))
        names |= {call.id for call in calls if isinstance(call, ast.Name)} - {function.__name__}
    return names


def _in_source(file: Path) -> list[tuple[str, int]]:
    """Functions decorated with triton.jit anywhere in the file, by the line of their `def`."""
    try:
        tree = ast.parse(file.read_text())
    except (OSError, SyntaxError, ValueError):
        return []
    modules, names = _USUAL | _imported(tree, whole=True), _imported(tree, whole=False)
    return [
        (node.name, node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(_is_jit(one, modules, names) for one in node.decorator_list)
        if not any(isinstance(inner, ast.Return) and inner.value is not None for inner in ast.walk(node))
    ]


def _imported(tree: ast.Module, *, whole: bool) -> set[str]:
    """What the file calls triton itself, or its decorators."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and whole:
            found |= {alias.asname or alias.name for alias in node.names if alias.name == "triton"}
        elif isinstance(node, ast.ImportFrom) and not whole and (node.module or "").split(".")[0] == "triton":
            found |= {alias.asname or alias.name for alias in node.names if alias.name in _JIT}
    return found


def _is_jit(decorator: ast.expr, modules: set[str], names: set[str]) -> bool:
    name = decorator.func if isinstance(decorator, ast.Call) else decorator
    if isinstance(name, ast.Attribute):
        return name.attr in _JIT and isinstance(name.value, ast.Name) and name.value.id in modules
    return isinstance(name, ast.Name) and name.id in names
