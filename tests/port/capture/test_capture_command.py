"""`crosstie preflight capture` as a user runs it."""

import json
from pathlib import Path

import pytest
from tests.conftest import Command

STEPS = """
import torch

print("noise at import")


class State:
    def __init__(self, device):
        self.calls = 0


def inputs(device, seed=0):
    return (torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)).to(device),)


def safe(x):
    print("noise in a call")
    return x * 2


def syncs(x):
    return x * x.max().item()


def counts(s, x):
    s.calls += 1
    return x * s.calls


def fails(x):
    raise KeyError("weights")


def dies(x):
    import os
    os._exit(7)


def leaves(x):
    raise SystemExit(0)


def no_tensor(x):
    return x + "text"


class Scale(torch.nn.Module):
    def forward(self, x):
        return x * 3


STEPS = {"safe": safe, "syncs": syncs}
AT_IMPORT = torch.ones(8, device="cuda" if torch.cuda.is_available() else "cpu")
module = Scale()
nothing = {}


def uses_what_import_made(x):
    return x + AT_IMPORT
"""


@pytest.fixture
def steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    # A name of its own: Python keeps modules by name.
    name = f"steps_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(STEPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return name


def test_a_safe_function(crosstie: Command, steps: str) -> None:
    done = crosstie("preflight", "capture", f"{steps}.py:safe", "--inputs", f"{steps}.py:inputs")
    assert done.status == 0
    assert "no findings" in done.out
    assert "safe  ok" in done.out
    assert "Nothing here ran on an AMD GPU." in done.out
    # What user code prints is no part of the report.
    assert "noise" not in done.out
    assert "noise at import" in done.err


def test_a_hazard_with_its_line_and_remedy(crosstie: Command, steps: str) -> None:
    done = crosstie("preflight", "capture", f"{steps}:syncs", "--inputs", "inputs")
    assert done.status == 1
    line = STEPS.splitlines().index("    return x * x.max().item()") + 1
    assert f"{steps}.py:{line} syncs" in done.out
    assert "reads a device value on the host" in done.out
    assert "run on a stand-in for the device" in done.out
    assert "remedy" in done.out


def test_capture_as_json_and_sarif_has_its_keys(crosstie: Command, steps: str, tmp_path: Path) -> None:
    done = crosstie("preflight", "capture", f"{steps}:counts", "--inputs", "inputs", "--json", "--sarif", "out.sarif")
    assert done.status == 1
    said = json.loads(done.out)
    assert said["verdicts"] == {"counts": "stale"}
    assert said["target"] == f"{steps}:counts"
    (finding,) = said["findings"]
    assert finding["check"] == "capture-stale-host-value"
    assert finding["severity"] == "error"
    assert finding["grounds"] == "emulated"
    assert "aten::mul with 4, then with 5" in finding["evidence"]
    results = json.loads((tmp_path / "out.sarif").read_text())["runs"][0]["results"]
    assert [result["ruleId"] for result in results] == ["capture-stale-host-value"]


@pytest.mark.slow
def test_a_dictionary_an_entry_and_all_functions(crosstie: Command, steps: str) -> None:
    whole = crosstie("preflight", "capture", f"{steps}:STEPS", "--inputs", "inputs", "--json")
    assert json.loads(whole.out)["verdicts"] == {"safe": "ok", "syncs": "error"}
    entry = crosstie("preflight", "capture", f"{steps}:STEPS[safe]", "--inputs", "inputs", "--json")
    assert json.loads(entry.out)["verdicts"] == {"STEPS[safe]": "ok"}
    every = crosstie("preflight", "capture", f"{steps}.py", "--all", "--inputs", "inputs", "--json")
    assert json.loads(every.out)["verdicts"] == {
        "safe": "ok", "syncs": "error", "counts": "stale", "fails": "unknown", "dies": "unknown",
        "leaves": "unknown", "no_tensor": "unknown",
        "uses_what_import_made": "ok",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["module", "Scale"])
def test_a_module_and_its_class(crosstie: Command, steps: str, name: str) -> None:
    done = crosstie("preflight", "capture", f"{steps}:{name}", "--inputs", "inputs", "--json")
    assert json.loads(done.out)["verdicts"] == {name: "ok"}


def test_fail_on_takes_known_severities(crosstie: Command, steps: str) -> None:
    asked = ("preflight", "capture", f"{steps}:safe", "--inputs", "inputs")
    assert crosstie(*asked, "--fail-on", "note").status == 0
    assert crosstie(*asked, "--fail-on", "nonsense").status == 2


@pytest.mark.parametrize(
    ("target", "inputs", "said"),
    [
        ("no_such_module:f", "inputs", "No module named 'no_such_module'"),
        ("no_such_file.py:f", "inputs", "no_such_file.py: no such file"),
        ("{steps}:sfae", "inputs", "has no 'sfae'. Did you mean safe"),
        ("{steps}:STEPS[sync]", "inputs", "has no 'sync'. Did you mean syncs?"),
        ("{steps}:safe[0]", "inputs", "is no dictionary"),
        ("{steps}:nothing", "inputs", "holds no callable"),
        ("{steps}", "inputs", "is not a name"),
        ("{steps}:safe", "no_inputs", "has no 'no_inputs'"),
        ("{steps}:safe", "STEPS", "is no function"),
        ("{steps}:fails", "inputs", "fails fails in a plain call, before any capture: KeyError: 'weights'"),
        ("{steps}:dies", "inputs", "dies ended its process (status 7)"),
        ("{steps}:leaves", "inputs", "leaves fails in a plain call, before any capture: SystemExit: 0"),
        ("{steps}:safe", "fails", "fails('cuda') fails: KeyError: 'weights'"),
        ("broken.py:f", "inputs", "broken.py cannot be imported: SyntaxError"),
    ],
)
def test_bad_input_is_one_line(
    crosstie: Command, steps: str, tmp_path: Path, target: str, inputs: str, said: str
) -> None:  # fmt: skip
    (tmp_path / "broken.py").write_text("def f(:\n")
    done = crosstie("preflight", "capture", target.format(steps=steps), "--inputs", inputs)
    assert done.status == 2
    assert done.out == ""
    message = done.err.replace("noise at import\n", "").replace("noise in a call\n", "")
    assert said in message
    assert len(message.strip().splitlines()) == 1
    assert "Traceback" not in message


SCRIPTED = """
import torch


@torch.jit.script
def uploads(x: torch.Tensor) -> torch.Tensor:
    return x + torch.tensor([1.0, 2.0], device=x.device)


@torch.jit.script
def fills(x: torch.Tensor) -> torch.Tensor:
    return x + torch.full([2], 2.0, device=x.device)


STEPS = {"uploads": lambda x: uploads(x), "fills": lambda x: fills(x)}


def inputs(device, seed):
    return (torch.randn(4, 2, generator=torch.Generator().manual_seed(seed)).to(device),)
"""


def test_a_file_with_torchscript_can_be_imported(crosstie: Command, tmp_path: Path) -> None:
    (tmp_path / "scripted_steps.py").write_text(SCRIPTED)
    done = crosstie("preflight", "capture", f"{tmp_path}/scripted_steps.py:STEPS", "--inputs", "inputs", "--json")
    assert json.loads(done.out)["verdicts"] == {"uploads": "error", "fills": "ok"}


def test_the_report_says_what_the_device_stood_for(crosstie: Command, steps: str) -> None:
    asked = ("preflight", "capture", f"{steps}:safe", "--inputs", "inputs")
    assert "on a stand-in for NVIDIA H200 SXM 141 GB (sm_90)" in crosstie(*asked).out
    there = crosstie(*asked, "--on", "mi300x")
    assert there.status == 0
    assert "on a stand-in for AMD Instinct MI300X (gfx942)" in there.out
    assert "before ROCm 7.14 HIP does not report every error" in " ".join(there.out.split())
    assert "Nothing here ran on an AMD GPU." in there.out
    said = json.loads(crosstie(*asked, "--on", "gfx950", "--json").out)
    assert said["stand_in"].endswith("(gfx950)")
    wrong = crosstie(*asked, "--on", "mi3000x")
    assert wrong.status == 2
    assert "mi3000x" in wrong.err
    assert len(wrong.err.strip().splitlines()) == 1


def test_help_names_the_verdicts(crosstie: Command) -> None:
    done = crosstie("preflight", "capture", "--help")
    assert done.status == 0
    assert "stale" in done.out


def test_without_torch_it_says_what_to_install(crosstie: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    done = crosstie("preflight", "capture", "a:b", "--inputs", "c")
    assert done.status == 2
    assert "preflight capture needs torch: pip install torch" in done.err
