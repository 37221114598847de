"""A record has what is needed, and nothing that tells whose machine it is; what is written is read again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from crosstie.core.errors import BadInput
from crosstie.port.doctor import record as recording
from crosstie.port.doctor.doctor import diagnose
from crosstie.port.doctor.host import machine_of
from crosstie.port.doctor.record import NO_ANSWER, anonymous, capture, read_record, write_record

SRC = Path(recording.__file__).parents[3]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("<serial>1650522003820</serial>", "<serial>hidden</serial>"),
        ("<uuid>GPU-513536b6</uuid>", "<uuid>hidden</uuid>"),
        ("<clusterUuid>ab</clusterUuid>", "<clusterUuid>hidden</clusterUuid>"),
        ("<processes>\n<process_name>/home/me</process_name></processes>", "<processes></processes>"),
        ('"asic_serial": "0xAB",', '"asic_serial": "hidden",'),
        ("  Uuid:                    GPU-dc91284879207f2b  ", "  Uuid:                    GPU-XX  "),
        ("unique_id 14073402507705256556\nhive_id 7\ndomain 0", "unique_id 0\nhive_id 0\ndomain 0"),
        ("<product_name>NVIDIA H200</product_name>", "<product_name>NVIDIA H200</product_name>"),
    ],
)
def test_what_tells_one_machine_from_another_is_hidden(text: str, left: str) -> None:
    assert anonymous(text) == left


def test_secrets_and_addresses_of_the_environment_are_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "VLLM_API_KEY": "sk-1", "NCCL_SOCKET_IFNAME": "eth0", "HOME_SWEET": "x", "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "NVIDIA_REQUIRE_CUDA": "cuda>=13.0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    held = json.loads(capture()["facts.json"])["environment"]
    assert held["VLLM_API_KEY"] == held["KUBERNETES_SERVICE_HOST"] == "hidden"
    assert held["NCCL_SOCKET_IFNAME"] == "eth0"
    assert not {"HOME_SWEET", "NVIDIA_REQUIRE_CUDA"} & set(held)
    assert machine_of(capture()).container


def test_the_boot_line_keeps_what_matters() -> None:
    assert recording._LESS["proc/cmdline"]("BOOT_IMAGE=/vmlinuz root=UUID=12 iommu=pt pci=realloc=off ip=10.1.1.1") == (
        "iommu=pt pci=realloc=off"
    )


def test_a_tool_s_answer_or_its_fault_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_MORE_PATH", ())
    for name, body in {"rocminfo": "echo 'Unable to open /dev/kfd' >&2; exit 1", "nvidia-smi": "echo $1"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    taken = capture()
    assert taken["commands/rocminfo.txt.error"] == "exit status 1: Unable to open /dev/kfd"
    assert taken["commands/nvidia-smi-topo.txt"] == "topo\n"
    assert not any("amd-smi" in name for name in taken)


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    taken = capture() | {"files/sys/bus/pci/devices/0000:00:06.0/vendor": "0x10de\n"}
    write_record(taken, tmp_path / "node")
    assert not any(":" in path.name for path in (tmp_path / "node").rglob("*"))
    assert read_record(tmp_path / "node") == taken
    with pytest.raises(BadInput, match="is there already"):
        write_record(taken, tmp_path / "node")
    with pytest.raises(BadInput, match="no record of a machine"):
        read_record(tmp_path)


def test_python_without_crosstie_s_libraries_writes_one(tmp_path: Path) -> None:
    """-S leaves out every installed package."""
    run = [sys.executable, "-S", "-m", "crosstie.port.doctor.record", str(tmp_path / "node")]
    subprocess.run(run, check=True, env={"PYTHONPATH": str(SRC), "PATH": ""})
    assert machine_of(read_record(tmp_path / "node")).system


def test_an_interpreter_that_is_none_is_refused() -> None:
    with pytest.raises(BadInput, match="is no Python that tells its packages"):
        capture("/bin/false")


def test_an_engine_is_asked_for_its_requirements_and_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM of our own making, whose import fails for want of what it declares."""
    made = tmp_path / "vllm-0.24.0.dist-info"
    made.mkdir()
    needs = ["msgspec>=0.1", "no-such-package==1", 'other-os; sys_platform == "win32"', 'more; extra == "audio"']
    lines = "".join(f"Requires-Dist: {one}\n" for one in needs)
    (made / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: 0.24.0\n{lines}")
    (tmp_path / "vllm.py").write_text("import no_such_package\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    machine = machine_of(capture(tries_engines=True))
    assert machine.packages["vllm"] == "0.24.0"
    assert machine.requires["vllm"][needs[1]] == ""
    assert machine.requires["vllm"][needs[0]]
    assert needs[3] not in machine.requires["vllm"]
    assert machine.imports["vllm"] == "ModuleNotFoundError: No module named 'no_such_package'"
    told = {one.check: one.what for one in diagnose(machine).findings if one.severity == "error"}
    assert "no-such-package==1" in told["requirements"]
    assert "other-os" not in told["requirements"]
    assert "no_such_package" in told["import"]
    (tmp_path / "vllm.py").write_text("")
    assert machine_of(capture(tries_engines=True)).imports == {"vllm": ""}
    # Who only asks what is here does not wait for it.
    assert machine_of(capture()).imports == {}
    # An import that never ends is given up.
    monkeypatch.setattr(recording, "_IMPORT_S", 1.0)
    (tmp_path / "vllm.py").write_text("import time; time.sleep(3600)\n")
    assert machine_of(capture(tries_engines=True)).imports["vllm"].startswith(NO_ANSWER)
