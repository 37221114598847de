"""The rooms themselves: imports go down only, names stay public on purpose."""

import importlib
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from tests.packages import SOURCES

import crosstie

# A room may import itself and those before it in its package's list; a room of another package than `crosstie` all of
# that as well. The wings of `crosstie` hold rooms of their own.
LISTS = {
    "crosstie": [
        "core", "wire", "perf", "catalog", "host", "route", "sim", "port.checkpoint", "port.preflight", "port.doctor",
        "port.recipe", "decide.compare", "decide.cost", "decide.plan", "decide.schedule", "decide.scorecard",
        "prove.replay", "prove.probe", "prove.calibration", "prove.parity", "prove.bench", "prove.loop",
        "prove.review", "prove.claims", "web", "cli",
    ],
    "crosstie_gateway": [
        "wire", "ledger", "share", "emulate", "gateway", "batch", "cluster", "service", "hosting", "start", "pick",
        "scaler", "scale", "demo", "cli",
    ],
    "crosstie_port": ["kernels", "capture", "source", "divergence", "checkpoint", "profile", "porting", "cli"],
}  # fmt: skip
WINGS = {room.partition(".")[0] for room in LISTS["crosstie"] if "." in room}
# As they are called here: `decide.plan`, `crosstie_port.kernels`.
ROOMS = [room if package == "crosstie" else f"{package}.{room}" for package, rooms in LISTS.items() for room in rooms]
MODULES = sorted(module for folder in SOURCES.values() for module in folder.rglob("*.py"))


# A statement has its line to itself, as ruff formats it. To parse all files takes seconds.
IMPORT = re.compile(r"^[ \t]*(?:from +(\S+) +import\b|import +([\w., ]+))", re.MULTILINE)


def imports(text: str) -> set[str]:
    found: set[str] = set()
    for whose, names in IMPORT.findall(text):
        found |= {name.split()[0] for name in names.split(",")} if names else {whose}
    assert not any(name.startswith(".") for name in found), "imports are absolute"
    return found


def test_imports_are_found_wherever_they_stand() -> None:
    text = "import a, b.c as d\nfrom e.f import (\n    g,\n)\ndef h():\n    from i import j\n    import k  # why\n"
    assert imports(text) == {"a", "b.c", "e.f", "i", "k"}
    with pytest.raises(AssertionError, match="absolute"):
        imports("from .near import x")


def room_of(dotted: str) -> str:
    """The room of a module: `decide.plan` of `crosstie.decide.plan.plan`, `crosstie_port.kernels` of one of its."""
    package, *parts = dotted.split(".")
    if package != "crosstie":
        return f"{package}.{parts[0]}"
    return ".".join(parts[:2] if parts[0] in WINGS else parts[:1])


def named_rooms(text: str) -> list[str]:
    """The rooms of all packages that a module's text imports from."""
    return [room_of(name) for name in imports(text) if name.partition(".")[0] in SOURCES and "." in name]


def climbs(room: str, text: str) -> list[str]:
    """Imports of rooms that stand after `room` in the list of its package, and those of a package beside it."""
    package = room.partition(".")[0]
    if package in LISTS and package != "crosstie":
        own = [f"{package}.{name}" for name in LISTS[package]]
        allowed = {*LISTS["crosstie"], *own[: own.index(room) + 1]}
    else:
        allowed = {*ROOMS[: ROOMS.index(room) + 1]}
    return [name for name in named_rooms(text) if name not in allowed]


def dotted(module: Path) -> str:
    """`crosstie.decide.plan.plan` of its file."""
    (folder,) = [folder for folder in SOURCES.values() if module.is_relative_to(folder)]
    return ".".join(module.relative_to(folder.parent).with_suffix("").parts)


def inside() -> list[Path]:
    """Modules that are in a room: not a package's front page, nor that of a wing."""
    return [module for module in MODULES if module.parent not in SOURCES.values() and module.parent.name not in WINGS]


def test_imports_go_down() -> None:
    found = {dotted(module): climbs(room_of(dotted(module)), module.read_text()) for module in inside()}
    assert {name: climbing for name, climbing in found.items() if climbing} == {}


def test_a_climbing_import_would_be_caught() -> None:
    assert climbs("core", "from crosstie.perf.step import step") == ["perf"]
    assert climbs("perf", "import crosstie.cli.main") == ["cli"]
    assert climbs("crosstie_gateway.wire", "import crosstie_gateway.gateway.gateway") == ["crosstie_gateway.gateway"]
    assert climbs("crosstie_gateway.cli", "import crosstie_port.cli.diff") == ["crosstie_port.cli"]
    assert climbs("cli", "from crosstie.perf.step import step") == []
    assert climbs("cli", "from crosstie_port.kernels.targets import target") == ["crosstie_port.kernels"]
    assert climbs("crosstie_port.kernels", "import crosstie_port.capture.check") == ["crosstie_port.capture"]
    assert climbs("crosstie_port.capture", "import crosstie_port.kernels.targets, crosstie.cli.show") == []


FROM = re.compile(r"^[ \t]*from +(crosstie[\w.]*) +import +(?:\(([^)]*)\)|(.*))", re.MULTILINE)


def circles(texts: Mapping[str, str]) -> list[list[str]]:
    """Modules that import each other, straight or by way of others; `texts`: what stands in each."""
    place = {name: index for index, name in enumerate(texts)}
    reach = np.eye(len(place), dtype=np.float32)
    for name, text in texts.items():
        named = imports(text)
        for whose, several, one in FROM.findall(text):
            named |= {f"{whose}.{what.split()[0]}" for what in (several or one).split(",") if what.strip()}
        for other in named & place.keys() - {name}:
            reach[place[name], place[other]] = 1.0
    # In two steps what is reached in one, until that is no more.
    while (further := np.minimum(reach @ reach, 1.0)).sum() > reach.sum():
        reach = further
    every = np.array(list(texts))
    found = {tuple(every[row]) for row in (reach * reach.T) > 0.0}
    return sorted(sorted(names) for names in found if len(names) > 1)


def test_no_circle_has_more_than_two_files() -> None:
    texts = {dotted(module).removesuffix(".__init__"): module.read_text() for module in MODULES}
    assert [names for names in circles(texts) if len(names) > 2] == []


def test_a_circle_would_be_caught() -> None:
    texts = {
        "crosstie": "from crosstie.a import x",
        "crosstie.a": "from crosstie.b import (\n    x,\n)",
        "crosstie.b": "import crosstie",
        "crosstie.c": "from crosstie import d as e, a",
        "crosstie.d": "def f():\n    from crosstie.c import g",
        "crosstie.h": "from crosstie.d import i",
    }
    assert circles(texts) == [["crosstie", "crosstie.a", "crosstie.b"], ["crosstie.c", "crosstie.d"]]


# A cell of the board, that of what the router writes to.
ONE_NAME_TWICE = ("crosstie.route.load",)


def test_a_class_has_its_name_to_itself() -> None:
    found: dict[str, list[str]] = {}
    for module in MODULES:
        if not dotted(module).startswith(ONE_NAME_TWICE):
            for name in re.findall(r"^class ([A-Z]\w*)", module.read_text(), re.MULTILINE):
                found.setdefault(name, []).append(dotted(module))
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_every_folder_is_a_known_room() -> None:
    assert {room_of(dotted(module)) for module in inside()} == set(ROOMS)


def test_core_does_no_input_or_output() -> None:
    for module in (SOURCES["crosstie"] / "core").glob("*.py"):
        assert not imports(module.read_text()) & {"pathlib", "os", "io", "json", "tomllib", "csv", "subprocess"}, module


def test_the_command_line_does_no_arithmetic() -> None:
    for module in [module for folder in SOURCES.values() for module in (folder / "cli").glob("*.py")]:
        assert "numpy" not in imports(module.read_text()), module


def test_public_names_resolve_and_are_typed() -> None:
    for name in dir(crosstie):
        assert getattr(crosstie, name) is not None
    assert all((folder / "py.typed").exists() for folder in SOURCES.values())
    with pytest.raises(AttributeError, match="no name 'guess'"):
        getattr(crosstie, "guess")  # noqa: B009


def test_public_names_are_documented() -> None:
    for home in set(getattr(crosstie, "_homes")().values()):  # noqa: B009
        assert importlib.import_module(home).__doc__, home
