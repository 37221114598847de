"""What runs in the child needs the standard library, Triton and (where a launcher has it) torch: nothing of Crosstie's."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.rooms.test_rooms import imports

import crosstie_port.kernels

FOLDER = Path(crosstie_port.kernels.__path__[0])
CHILD = ("child", "compiling", "jobs", "machine_code", "shadow", "spec")
OWN = {f"crosstie_port.kernels.{name}" for name in CHILD} | {"crosstie.core.errors", "crosstie.core.version"}


@pytest.mark.parametrize("name", CHILD)
def test_imports_of_a_module(name: str) -> None:
    for imported in imports((FOLDER / f"{name}.py").read_text()):
        top = imported.split(".")[0]
        assert imported in OWN or top in sys.stdlib_module_names or top in ("triton", "torch"), imported


def test_the_child_is_whole() -> None:
    """Everything that it imports is among the modules above."""
    code = (
        "import sys, triton, crosstie_port.kernels.child, crosstie_port.kernels.shadow, crosstie_port.kernels.compiling\n"
        "print(*(name for name, module in sys.modules.items() if name.startswith('crosstie.') and not hasattr(module, '__path__')))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert set(ran.stdout.split()) <= OWN
