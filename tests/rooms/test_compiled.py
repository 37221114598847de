"""What setup.py compiles, and what that forbids to the rest: nothing else may inherit from it, tests neither, which
`make compiled` runs on it."""

import ast
import re
from pathlib import Path

import crosstie

SOURCE = Path(crosstie.__file__).parent
ROOT = SOURCE.parents[1]


def compiled() -> set[str]:
    tree = ast.parse((ROOT / "setup.py").read_text())
    (said,) = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "COMPILED"
    ]
    rooms: dict[str, list[str]] = ast.literal_eval(said)
    return {f"crosstie.{room.replace('/', '.')}.{module}" for room, modules in rooms.items() for module in modules}


COMPILED = compiled()
HEIRS = re.compile(r"^[ \t]*class \w+[(\[](.*?)\):", re.MULTILINE | re.DOTALL)
TAKEN = re.compile(rf"from (?:{'|'.join(map(re.escape, sorted(COMPILED)))}) import (\([^)]*\)|[^\n]*)")
PLAIN = [
    path
    for path in sorted(SOURCE.rglob("*.py"))
    if ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts) not in COMPILED
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
        assert (SOURCE.parent / Path(*module.split("."))).with_suffix(".py").exists(), module


def test_an_heir_would_be_found() -> None:
    assert inherited("from crosstie.wire.server import Server\nclass Mine(Server): pass") == ["Server"]


def test_no_plain_class_inherits_from_a_compiled_one() -> None:
    """mypyc's classes refuse interpreted heirs when the first is made, which no test of the sources sees."""
    tests = sorted((ROOT / "tests").rglob("*.py"))
    found = {str(module.relative_to(ROOT)): inherited(module.read_text()) for module in (*PLAIN, *tests)}
    assert {name: bases for name, bases in found.items() if bases} == {}
