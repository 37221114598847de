"""The rooms themselves: imports go down only, names stay public on purpose, files stay small."""

import ast
import importlib
from pathlib import Path

import pytest

import crosstie

SOURCE = Path(crosstie.__file__).parent
ROOT = SOURCE.parents[1]
# Lower rooms first. A room may import itself and those before it.
ROOMS = [
    "core",
    "wire",
    "ledger",
    "share",
    "catalog",
    "perf",
    "cost",
    "host",
    "route",
    "sim",
    "plan",
    "checkpoint",
    "capture",
    "kernels",
    "source",
    "preflight",
    "recipes",
    "emulate",
    "gateway",
    "service",
    "bench",
    "claims",
    "web",
    "cli",
]
MODULES = sorted(SOURCE.rglob("*.py"))


def imports(text: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.add(node.module or "")
    return found


def climbs(room: str, text: str) -> list[str]:
    """Imports of rooms above `room`."""
    allowed = ROOMS[: ROOMS.index(room) + 1]
    named = [name.split(".")[1] for name in imports(text) if name.startswith("crosstie.")]
    return [name for name in named if name not in allowed]


@pytest.mark.parametrize("module", [m for m in MODULES if m.parent != SOURCE], ids=lambda m: str(m.relative_to(SOURCE)))
def test_imports_go_down(module: Path) -> None:
    assert climbs(module.relative_to(SOURCE).parts[0], module.read_text()) == []


def test_a_climbing_import_would_be_caught() -> None:
    assert climbs("core", "from crosstie.perf.step import step") == ["perf"]
    assert climbs("perf", "import crosstie.cli.main") == ["cli"]
    assert climbs("cli", "from crosstie.perf.step import step") == []


def test_every_folder_is_a_known_room() -> None:
    assert {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"} <= set(ROOMS)


def test_core_does_no_input_or_output() -> None:
    for module in (SOURCE / "core").glob("*.py"):
        assert not imports(module.read_text()) & {"pathlib", "os", "io", "json", "tomllib", "csv", "subprocess"}, module


def test_the_command_line_does_no_arithmetic() -> None:
    for module in (SOURCE / "cli").glob("*.py"):
        assert "numpy" not in imports(module.read_text()), module


def test_public_names_resolve_and_are_typed() -> None:
    for name in crosstie.__all__:
        assert getattr(crosstie, name) is not None
    assert set(crosstie._HOME_OF) == set(crosstie.__all__)
    assert (SOURCE / "py.typed").exists()
    with pytest.raises(AttributeError, match="no name 'guess'"):
        _ = crosstie.guess


def test_public_names_are_documented() -> None:
    for home in crosstie._HOMES:
        assert importlib.import_module(home).__doc__, home


@pytest.mark.parametrize("module", MODULES, ids=lambda m: str(m.relative_to(SOURCE)))
def test_files_fit_in_the_head(module: Path) -> None:
    assert len(module.read_text().splitlines()) <= 400


def test_every_room_is_on_the_page_about_rooms() -> None:
    page = (ROOT / "docs" / "rooms.md").read_text()
    for module in MODULES:
        if module.name not in ("__init__.py", "__main__.py"):
            assert f"`{module.stem}`" in page, f"{module} is not mentioned in docs/rooms.md"
