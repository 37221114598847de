"""What the gateway's setup.py compiles, and what that forbids to the rest: nothing else may inherit from it, tests
neither, which `make compiled` runs on it."""

import ast
import re
import runpy
from collections.abc import Callable
from pathlib import Path

from tests.packages import ROOT, SOURCES

MODULES_OF: Callable[[Path], list[str]] = runpy.run_path(str(ROOT / "tools" / "check_compiled.py"))["compiled_modules"]
COMPILED = set(MODULES_OF(ROOT / "packages" / "gateway" / "setup.py"))
HEIRS = re.compile(r"^[ \t]*class \w+[(\[](.*?)\):", re.MULTILINE | re.DOTALL)
TAKEN = re.compile(rf"from (?:{'|'.join(map(re.escape, sorted(COMPILED)))}) import (\([^)]*\)|[^\n]*)")
PLAIN = [
    path
    for folder in SOURCES.values()
    for path in sorted(folder.rglob("*.py"))
    if ".".join(path.relative_to(folder.parent).with_suffix("").parts) not in COMPILED
]


def inherited(text: str) -> list[str]:
    """Classes of compiled modules that a module's own classes derive from."""
    named, above = (set(re.findall(r"\w+", " ".join(kind.findall(text)))) for kind in (TAKEN, HEIRS))
    if not named & above:
        # To parse all files takes seconds.
        return []
    tree = ast.parse(text)
    taken = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in COMPILED
        for alias in node.names
    }
    bases = [base for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for base in node.bases]
    return [base.id for base in bases if isinstance(base, ast.Name) and base.id in taken]


def test_there_is_what_is_compiled() -> None:
    for module in COMPILED:
        package, *inner = module.split(".")
        assert SOURCES[package].joinpath(*inner).with_suffix(".py").exists(), module


def test_an_heir_would_be_found() -> None:
    assert inherited("from crosstie_gateway.wire.server import Server\nclass Mine(Server): pass") == ["Server"]


def test_no_plain_class_inherits_from_a_compiled_one() -> None:
    """mypyc's classes refuse interpreted heirs when the first is made, which no test of the sources sees."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    found = {str(module.relative_to(ROOT)): inherited(module.read_text()) for module in (*PLAIN, *tests)}
    assert {name: bases for name, bases in found.items() if bases} == {}
