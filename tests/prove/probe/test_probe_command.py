"""`crosstie probe` as a user meets it, on a GPU that is played: whole runs, refusals, interrupts, and one line for each mistake."""

import ast
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.conftest import Command
from tests.prove.probe.fakes import FakeTorch, measured

from crosstie.prove.probe import device as probe_device, kernels as probe_kernels
from crosstie.prove.probe.document import read_probe
from crosstie.prove.probe.kernels import Case, LoadedDevice, Measured

SOURCE = Path(probe_kernels.__file__).parents[3]
ALONE = ("kernels", "device", "decoder")


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTorch:
    """A H200 on which every kernel takes the time of its kind, in an empty folder."""
    made = FakeTorch()
    use(monkeypatch, made)
    monkeypatch.setattr(probe_kernels, "KINDS", dict.fromkeys(probe_kernels.KINDS, measured))
    monkeypatch.setattr(probe_kernels, "WARM_S", 0.0)
    answer = SimpleNamespace(stdout="580.159.03, 700.00\n")
    monkeypatch.setattr("crosstie.prove.probe.device.subprocess.run", lambda *_, **__: answer)
    monkeypatch.chdir(tmp_path)
    return made


def use(monkeypatch: pytest.MonkeyPatch, torch: object) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch)


def only_file(folder: Path) -> Path:
    (file,) = folder.glob("*")
    return file


def test_a_whole_run_is_written_to_one_file(crosstie: Command, torch: FakeTorch, tmp_path: Path) -> None:
    got = crosstie("probe")
    assert got.status == 0
    file = only_file(tmp_path)
    assert file.name.startswith("probe-h200-20")
    assert got.err == f"written to {file.name}\n"
    assert "NVIDIA H200  taken for h200, 150.1 GB, 700 W limit, driver 580.159.03, PyTorch 2.99.0, CUDA 13.0" in got.out
    assert "roofline" in got.out
    probe = read_probe(file)
    assert probe.provenance.failures == ()
    assert probe.provenance.fp8_dialect == "e4m3fn"
    assert len(probe.measurements) > 500
    again = crosstie("probe", "--read", str(file))
    assert (again.status, again.out, again.err) == (0, got.out, "")


def test_as_json_and_to_a_file(crosstie: Command, torch: FakeTorch, tmp_path: Path) -> None:
    got = crosstie("probe", "--quick", "--parts", "copy,launch", "--json", "-o", "mine.json")
    assert got.status == 0
    assert json.loads(got.out) == json.loads(only_file(tmp_path).read_text())
    assert json.loads(got.out)["provenance"]["parts"] == ["copy", "launch"]
    assert crosstie("probe", "--read", "mine.json", "--json").out == got.out


def test_fractions_in_the_table(crosstie: Command, torch: FakeTorch) -> None:
    out = crosstie("probe", "--quick", "--parts", "copy,launch").out.splitlines()
    copy = next(line for line in out if line.lstrip().startswith("copy"))
    assert copy.split()[1:] == ["1,024", "MiB", "4", "TB/s", "4.8", "TB/s", "83%", "memory"]
    launch = next(line for line in out if "kernel in a graph" in line)
    assert launch.split()[-5:] == ["2", "us", "-", "-", "-"]


def test_a_device_that_the_catalog_lacks(crosstie: Command, monkeypatch: pytest.MonkeyPatch, torch: FakeTorch) -> None:
    use(monkeypatch, FakeTorch("AMD Instinct MI999X", 500_000_000_000, hip="7.9"))
    got = crosstie("probe", "--quick", "--parts", "copy", "-o", "x.json")
    assert "the catalog has no accelerator of this name and memory" in got.out
    assert "ROCm 7.9" in got.out
    made = read_probe(Path("x.json")).provenance
    assert (made.accelerator, made.architecture, made.fp8_dialect, made.cuda) == (None, "gfx942", "e4m3fnuz", None)


def test_a_refused_shape_is_a_row(crosstie: Command, monkeypatch: pytest.MonkeyPatch, torch: FakeTorch) -> None:
    def picky(bench: LoadedDevice, case: Case) -> Measured:
        if case["format"] == "fp8":
            raise RuntimeError("no kernel for this\nand a long story")
        return measured(bench, case)

    monkeypatch.setitem(probe_kernels.KINDS, "gemm", picky)
    got = crosstie("probe", "--quick", "--parts", "gemm", "-o", "x.json")
    assert got.status == 0
    probe = read_probe(Path("x.json"))
    assert {failure.format for failure in probe.provenance.failures} == {"fp8"}
    assert {row.format for row in probe.measurements} == {"bf16"}
    assert probe.provenance.failures[0].reason == "RuntimeError: no kernel for this"
    assert probe.provenance.failures[0].m == 64
    assert f"gemm, {len(probe.provenance.failures)} refused: RuntimeError: no kernel for this" in got.out


def after(calls: int, what: BaseException) -> Any:
    left = calls

    def kind(bench: LoadedDevice, case: Case) -> Measured:
        nonlocal left
        left -= 1
        if left < 0:
            raise what
        return measured(bench, case)

    return kind


def test_an_interrupt_keeps_what_is_complete(
    crosstie: Command, monkeypatch: pytest.MonkeyPatch, torch: FakeTorch
) -> None:
    monkeypatch.setitem(probe_kernels.KINDS, "gemm", after(5, KeyboardInterrupt()))
    got = crosstie("probe", "--quick", "--parts", "gemm", "--json", "-o", "x.json")
    assert (got.status, got.out) == (2, "")
    assert got.err == "crosstie: interrupted after 5 of 28 measurements; x.json has them, marked as partial\n"
    probe = read_probe(Path("x.json"))
    assert (probe.provenance.partial, len(probe.measurements)) == ("interrupted", 5)
    assert "partial: interrupted" in crosstie("probe", "--read", "x.json").out


def interrupted() -> bool:
    raise KeyboardInterrupt


@pytest.mark.parametrize("when", ["first shape", "opening"])
def test_an_interrupt_before_anything_writes_nothing(
    crosstie: Command, monkeypatch: pytest.MonkeyPatch, torch: FakeTorch, tmp_path: Path, when: str
) -> None:
    if when == "opening":
        monkeypatch.setattr(torch.cuda, "is_available", interrupted)
    monkeypatch.setitem(probe_kernels.KINDS, "gemm", after(0, KeyboardInterrupt()))
    got = crosstie("probe", "--quick", "--parts", "gemm")
    assert got.status == 2
    assert got.err == "crosstie: interrupted before the first measurement; nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_dies_ends_the_run(crosstie: Command, monkeypatch: pytest.MonkeyPatch, torch: FakeTorch) -> None:
    def deadly(bench: LoadedDevice, case: Case) -> Measured:
        torch.cuda.broken = case["m"] > 1
        return measured(bench, case)

    monkeypatch.setitem(probe_kernels.KINDS, "gemm", deadly)
    got = crosstie("probe", "--quick", "--parts", "gemm", "-o", "x.json")
    assert got.status == 2
    assert (
        "the device failed (RuntimeError: CUDA error: an illegal memory access was encountered) after 2 of 28"
        in got.err
    )


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--parts", "gemm,copies"], "unknown part 'copies'; known: copy, launch,"),
        (["--parts", ","], "--parts names no part"),
        (["-o", "none/x.json"], "none/x.json: there is no folder"),
        (["-o", "."], ".: is a folder"),
        (["--read", "none.json"], "none.json: cannot be read: No such file"),
        (["--read", "x.json", "--quick"], "--read shows a document"),
        (["--plan", "p.json", "--json"], "--plan measures nothing"),
        (["--plan", "none/p.json"], "none/p.json: cannot be written: No such file"),
    ],
)
def test_mistakes_are_one_line(crosstie: Command, torch: FakeTorch, arguments: list[str], line: str) -> None:
    got = crosstie("probe", *arguments)
    assert (got.status, got.out) == (2, "")
    assert line in got.err
    assert got.err.count("\n") == 1


def test_a_folder_that_may_not_be_written_is_known_before(
    crosstie: Command, monkeypatch: pytest.MonkeyPatch, torch: FakeTorch
) -> None:
    monkeypatch.setattr("crosstie.prove.probe.kernels.os.access", lambda *_: False)
    assert "nothing may be written to" in crosstie("probe", "-o", "x.json").err


def test_without_torch_or_without_a_gpu(crosstie: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    use(monkeypatch, None)
    got = crosstie("probe")
    assert got.status == 2
    assert got.err.startswith("crosstie: the probe runs through PyTorch, which this Python lacks")
    use(monkeypatch, FakeTorch(gpus=0))
    got = crosstie("probe")
    assert (got.status, got.err) == (
        2,
        "crosstie: there is nothing to probe: PyTorch 2.99.0 sees no CUDA or ROCm GPU\n",
    )
    monkeypatch.delitem(sys.modules, "torch")

    def broken(name: str) -> object:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(probe_device, "import_module", broken)
    assert "PyTorch cannot be loaded: OSError: libcudart" in crosstie("probe").err
    assert list(tmp_path.iterdir()) == []


def test_what_the_driver_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ask(stdout: str) -> tuple[str | None, float | None]:
        monkeypatch.setattr(
            "crosstie.prove.probe.device.subprocess.run", lambda *_, **__: SimpleNamespace(stdout=stdout)
        )
        return probe_device.driver_and_power(FakeTorch(), "0000:1a:00.0")

    assert ask("580.1, 700.00\n") == ("580.1", 700.0)
    assert ask("580.1, [N/A]\n") == ("580.1", None)
    assert ask("580.1, 700\n580.1, 300\n") == ("580.1", None)
    assert ask("") == (None, None)

    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError

    monkeypatch.setattr("crosstie.prove.probe.device.subprocess.run", missing)
    assert probe_device.driver_and_power(FakeTorch(), None) == (None, None)
    (tmp_path / "cap").write_text("750000000\n")
    monkeypatch.setattr("crosstie.prove.probe.device.glob.glob", lambda _: [str(tmp_path / "cap")])
    assert probe_device.driver_and_power(FakeTorch(hip="7"), "0000:1a:00.0")[1] == 750.0
    assert probe_device.pci_address(SimpleNamespace()) is None


def test_the_timing_needs_nothing_but_torch() -> None:
    """Modules that travel to a GPU machine import the standard library and one another."""
    own = {f"crosstie.prove.probe.{name}" for name in ALONE} | {
        "crosstie.core.errors",
        "crosstie.core.progress",
        "crosstie.core.version",
        "crosstie.catalog.writing",
    }
    for name in (*own, "crosstie", "crosstie.core", "crosstie.catalog", "crosstie.prove", "crosstie.prove.probe"):
        text = Path(str(importlib.import_module(name).__file__)).read_text()
        tree = ast.parse(text)
        outer = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        found = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in outer}
        assert {module for module in found if module not in own} <= set(sys.stdlib_module_names) | {
            "collections.abc",
            "importlib",
        }, name


def alone(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Without site-packages, as on a machine that has none of the package's dependencies."""
    command = [sys.executable, "-S", "-m", "crosstie.prove.probe.kernels", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SOURCE)}, **more
    )


def test_alone_without_torch(crosstie: Command, tmp_path: Path) -> None:
    plan, out = tmp_path / "plan.json", tmp_path / "out.json"
    assert crosstie("probe", "--plan", str(plan), "--quick").out == f"42 shapes written to {plan}\n"
    got = alone(str(plan), str(out))
    assert got.returncode == 2
    assert got.stderr.startswith("crosstie: the probe runs through PyTorch")
    assert alone().returncode == 2
    assert "PLAN.json OUT.json" in alone("--help").stderr
    assert "cannot be read" in alone(str(out), str(out)).stderr
    plan.write_text("{}")
    assert "is no plan of this version" in alone(str(plan), str(out)).stderr
    assert not out.exists()


def test_a_run_alone_on_a_gpu_says_so(
    crosstie: Command, monkeypatch: pytest.MonkeyPatch, torch: FakeTorch, capsys: pytest.CaptureFixture[str]
) -> None:
    crosstie("probe", "--plan", "plan.json", "--quick")
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert probe_kernels.main(["plan.json", "out.json"]) == 0
        shown = capsys.readouterr()
        assert "NVIDIA H200: 42 measurements, 0 refused" in shown.out
        assert "  moe" in shown.err
        assert crosstie("probe", "--read", "out.json").status == 0
        monkeypatch.setitem(probe_kernels.KINDS, "gemm", after(3, KeyboardInterrupt()))
        assert probe_kernels.main(["plan.json", "out.json"]) == 2
        assert "interrupted after 7 of 42 measurements; out.json has them" in capsys.readouterr().err
        assert probe_kernels.main(["plan.json", "none/out.json"]) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_bar_only_on_a_terminal(crosstie: Command, monkeypatch: pytest.MonkeyPatch, torch: FakeTorch) -> None:
    assert crosstie("probe", "--parts", "launch", "-o", "x.json").err == "written to x.json\n"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    got = crosstie("probe", "--parts", "launch", "-o", "x.json")
    assert "what starting a kernel costs" in got.err
    assert "\x1b" not in got.out
