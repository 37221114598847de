"""`crosstie preflight kernels` as a user runs it."""

import json
import os
import sys
from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.core.errors import BadInput

pytestmark = pytest.mark.triton

KERNEL = """import triton
import triton.language as tl


@triton.jit
def copy(x, o, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(o + i, tl.load(x + i))
"""
SPEC = '[[kernel]]\nname = "copy"\nsignature = {{ x = "*fp32", o = "*fp32" }}\nconstexprs = {{ N = 4096 }}\nnum_warps = {warps}\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """With a kernel, its spec beside it and a cache of its own; the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "mine.py").write_text(KERNEL)
    (tmp_path / "mine.toml").write_text(SPEC.format(warps=4))
    return tmp_path


def test_a_table_the_verdicts_and_the_cache(crosstie: Command, folder: Path) -> None:
    first = crosstie("preflight", "kernels", "mine.py", "--on", "mi300x")
    assert first.status == 0
    assert "mi300x  ready" in first.out
    assert "Nothing here ran on an AMD GPU." in first.out
    assert first.err == ""
    asked = ("preflight", "kernels", "./mine.py", "--on", "mi300x,MI325X", "--json")
    told = json.loads(crosstie(*asked).out)
    assert told["verdicts"] == {"mi300x": "ready", "mi325x": "ready"}
    assert [(row["target"], row["cached"]) for row in told["kernels"]] == [("mi300x", True), ("mi325x", True)]
    assert told["kernels"][0]["lds_limit_bytes"] == 65536
    again = json.loads(crosstie(*asked, "--no-cache").out)
    assert [row["cached"] for row in again["kernels"]] == [False, False]


def test_findings_decide_the_status(crosstie: Command, folder: Path) -> None:
    (folder / "mine.toml").write_text(SPEC.format(warps=32))
    asked = ("preflight", "kernels", "mine.py", "--on", "mi300x", "--json", "--sarif", "found.sarif")
    outcome = crosstie(*asked)
    assert outcome.status == 1
    (finding,) = json.loads(outcome.out)["findings"]
    assert (finding["check"], finding["where"]["file"], finding["where"]["line"]) == (
        "threads-over-limit",
        "mine.py",
        6,
    )
    (result,) = json.loads((folder / "found.sarif").read_text())["runs"][0]["results"]
    assert result["ruleId"] == "threads-over-limit"
    (folder / "mine.toml").unlink()
    assert crosstie("preflight", "kernels", "mine.py", "--on", "mi300x").status == 0
    unknown = crosstie("preflight", "kernels", "mine.py", "--on", "mi300x", "--fail-on", "unknown")
    assert unknown.status == 1
    assert "not known" in unknown.out


def test_a_module_by_name_with_a_launcher_elsewhere(crosstie: Command, folder: Path) -> None:
    (folder / "mine.toml").unlink()
    (folder / "calls.py").write_text(
        "import torch\nimport mine\n\ndef smoke():\n    x = torch.empty(64)\n    mine.copy[(1,)](x, x, N=1024)\n"
    )
    outcome = crosstie("preflight", "kernels", "mine", "--launch", "calls.py:smoke", "--on", "gfx942", "--json")
    assert outcome.status == 0
    assert json.loads(outcome.out)["verdicts"] == {"gfx942": "ready"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mine.py", "--on", "mi300y"), "unknown accelerator 'mi300y'"),
        (("mine.py", "--on", ","), "--on names no accelerator"),
        (("--on", "mi300x"), "give a file or a module"),
        (("none.py", "--on", "mi300x"), "none.py: there is no such file"),
        (("./mine.toml", "--on", "mi300x"), "is no Python file"),
        (("./", "--on", "mi300x"), "is a folder"),
        (("no.such.module", "--on", "mi300x"), "No module named 'no'"),
        (("mine.py", "--on", "mi300x", "--launch", "smoke"), "has no function 'smoke'"),
        (("mine.py", "--on", "mi300x", "--python", "/none/python"), "--python /none/python: No such file"),
        (("empty.py", "--on", "mi300x"), "no Triton kernel that can be launched"),
        (("borrowed.py", "--on", "mi300x"), "it imports copy: name their module"),
        (("broken.py", "--on", "mi300x"), "line 3: cannot be imported: ZeroDivisionError"),
        (("leaving.py", "--on", "mi300x"), "exit status 7"),
    ],
)
def test_what_cannot_run_is_one_line(
    crosstie: Command, folder: Path, arguments: tuple[str, ...], message: str
) -> None:  # fmt: skip
    (folder / "empty.py").write_text("def nothing():\n    pass\n")
    (folder / "borrowed.py").write_text("from mine import copy\n")
    (folder / "broken.py").write_text("import os\n\n1 / 0\n")
    (folder / "leaving.py").write_text("import os\n\nos._exit(7)\n")
    outcome = crosstie("preflight", "kernels", *arguments)
    assert outcome.status == 2
    assert message in outcome.err
    assert len(outcome.err.strip().splitlines()) == 1
    assert outcome.out == ""


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from crosstie_port.kernels import child

    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(BadInput, match=r"preflight kernels needs triton: pip install triton"):
        child._run({}, lambda _: None)


def test_a_file_of_a_package_that_imports_its_neighbours(crosstie: Command, folder: Path) -> None:
    package = folder / "pack" / "ops"
    package.mkdir(parents=True)
    for init in (package, package.parent):
        (init / "__init__.py").write_text("")
    (package / "sizes.py").write_text("N = 1024\n")
    spec = '[{"name": "copy", "signature": {"x": "*fp32", "o": "*fp32"}, "constexprs": {"N": N}}]'
    (package / "select.py").write_text(f"from .sizes import N\n{KERNEL}\nCROSSTIE_KERNELS = {spec}\n")
    outcome = crosstie("preflight", "kernels", "pack/ops/select.py", "--on", "gfx942", "--json")
    assert json.loads(outcome.out)["verdicts"] == {"gfx942": "ready"}


def test_a_file_named_like_a_module_of_the_standard_library(crosstie: Command, folder: Path) -> None:
    spec = '[{"name": "copy", "signature": {"x": "*fp32", "o": "*fp32"}, "constexprs": {"N": 1024}}]'
    (folder / "select.py").write_text(f"{KERNEL}\nCROSSTIE_KERNELS = {spec}\n")
    outcome = crosstie("preflight", "kernels", "select.py", "--on", "gfx942", "--json")
    assert json.loads(outcome.out)["verdicts"] == {"gfx942": "ready"}
