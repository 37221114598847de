"""Three packages: each finds its commands in the others by entry points, and says what to install where one is missing."""

import runpy
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import EntryPoints
from pathlib import Path

import pytest
from tests.conftest import Command
from tests.packages import ROOT, SOURCES, TESTS, paths_of

import crosstie
from crosstie.cli import lazy
from crosstie.cli.main import OTHERS
from crosstie.cli.preflight import OTHERS as PREFLIGHT_OTHERS
from crosstie.core.errors import MissingPackage

BROUGHT = {**OTHERS, **{f"preflight.{name}": package for name, package in PREFLIGHT_OTHERS.items()}}


def entry_points(package: str) -> dict[str, str]:
    project = tomllib.loads((ROOT / "packages" / package / "pyproject.toml").read_text())["project"]
    found: dict[str, str] = project["entry-points"][lazy.COMMANDS]
    return found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no other package were installed."""
    monkeypatch.setattr(lazy, "entry_points", lambda **asked: EntryPoints())
    for name in list(sys.modules):
        if name.partition(".")[0] in ("crosstie_gateway", "crosstie_port"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [_Missing(), *sys.meta_path])


class _Missing:
    @staticmethod
    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ("crosstie_gateway", "crosstie_port"):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name.partition(".")[0])


@pytest.mark.parametrize("package", ["gateway", "port"])
def test_a_package_brings_the_commands_that_are_said_to_be_its(package: str) -> None:
    points = entry_points(package)
    assert set(points) == {name for name, brings in BROUGHT.items() if brings == f"crosstie-{package}"}
    for name, place in points.items():
        module, _, variable = place.partition(":")
        # `preflight capture` is named by its last word, as click shows it.
        assert getattr(import_module(module), variable).name == name.rpartition(".")[2]


@pytest.mark.parametrize("name", BROUGHT)
@pytest.mark.usefixtures("alone")
def test_a_command_of_a_missing_package_is_one_line(name: str, crosstie: Command) -> None:
    got = crosstie(*name.split("."), "--help")
    folder = BROUGHT[name].removeprefix("crosstie-")
    assert (got.status, got.out) == (2, "")
    assert got.err == (
        f"crosstie: `crosstie {name.replace('.', ' ')}` needs {BROUGHT[name]}, which is not installed: "
        f"`pip install ./packages/{folder}` in a checkout of Crosstie\n"
    )


@pytest.mark.usefixtures("alone")
def test_help_lists_commands_of_missing_packages_as_such(crosstie: Command) -> None:
    said, inner = (" ".join(crosstie(*asked).out.split()) for asked in (("--commands",), ("preflight", "--help")))
    assert said.count("(needs crosstie-gateway)") == len([name for name in OTHERS.values() if name.endswith("gateway")])
    assert said.count("(needs crosstie-port)") == len([name for name in OTHERS.values() if name.endswith("port")])
    assert inner.count("(needs crosstie-port)") == len(PREFLIGHT_OTHERS)


def test_help_says_nothing_of_packages_that_are_there(crosstie: Command) -> None:
    assert "(needs" not in crosstie("--help").out + crosstie("preflight", "--help").out


@pytest.mark.usefixtures("alone")
def test_a_public_name_of_a_missing_package_says_what_to_install() -> None:
    with pytest.raises(MissingPackage, match=r"^crosstie\.serve needs crosstie-gateway, .* ./packages/gateway`"):
        _ = crosstie.serve
    with pytest.raises(MissingPackage, match=r"^crosstie\.convert needs crosstie-port, .* ./packages/port`"):
        _ = crosstie.convert
    assert callable(crosstie.plan)


@pytest.mark.usefixtures("alone")
def test_a_review_of_a_store_needs_the_gateway() -> None:
    with pytest.raises(MissingPackage, match="`crosstie review --store` needs crosstie-gateway"):
        lazy.brought(lazy.SOURCES, "usage", "`crosstie review --store`", "crosstie-gateway")


def test_the_gateways_usage_is_found_by_its_entry_point() -> None:
    from crosstie_gateway.ledger.places import usage_by_hour

    assert lazy.brought(lazy.SOURCES, "usage", "it", "crosstie-gateway") is usage_by_hour


def test_every_test_belongs_to_one_package() -> None:
    listed = [ROOT / "tests" / path for paths in TESTS.values() for path in paths]
    assert all(path.exists() for path in listed)
    assert not [path for path in listed if any(other in path.parents for other in listed)]
    assert {"tests", "--ignore=tests/run", "--ignore=tests/port/kernels"} <= set(paths_of("base"))
    with pytest.raises(SystemExit, match="no package 'gate': base, gateway, port"):
        paths_of("gate")


IMPORTS_ALONE = """
import sys, pkgutil, importlib, crosstie
for module in pkgutil.walk_packages(crosstie.__path__, "crosstie."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"crosstie_gateway", "crosstie_port", "torch", "triton"}))
"""


@pytest.mark.slow
def test_importing_all_of_the_base_imports_nothing_of_the_others() -> None:
    got = subprocess.run([sys.executable, "-c", IMPORTS_ALONE], capture_output=True, text=True, check=True)
    assert got.stdout.strip() == "[]"


def test_compiling_is_asked_for_and_needs_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ROOT / "packages" / "gateway" / "setup.py"
    given: list[dict[str, object]] = []
    monkeypatch.setattr("setuptools.setup", lambda **options: given.append(options))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CROSSTIE_COMPILE", raising=False)
    monkeypatch.setattr(sys, "argv", ["setup.py", "bdist_wheel"])
    runpy.run_path(str(file))
    monkeypatch.setenv("CROSSTIE_COMPILE", "1")
    with pytest.raises(SystemExit, match=r"CROSSTIE_COMPILE=1 needs a checkout of Crosstie: there is no \.\./\.\./src"):
        runpy.run_path(str(file))
    monkeypatch.setattr(sys, "argv", ["setup.py", "egg_info"])
    runpy.run_path(str(file))
    assert given[0] == {}
    assert "mypy" in str(given[1]["setup_requires"])
    assert SOURCES.keys() == {"crosstie", "crosstie_gateway", "crosstie_port"}
