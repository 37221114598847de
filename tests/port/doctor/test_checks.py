"""Every row of checks.toml holds on a machine that has the fault, and on no machine that has not."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.port.doctor.machines import OPEN, SHUT, healthy

from crosstie.core.errors import BadData
from crosstie.core.finding import Finding
from crosstie.port.doctor.checks import check_findings, checks
from crosstie.port.doctor.machine import Machine, Nic

RDMA = (Nic(name="mlx5_0", layer="InfiniBand", up=True, rdma=True, gbit_per_s=400.0),)
PCIE: tuple[Any, ...] = ()
# The row, whose GPUs, and what is wrong with a machine that is well otherwise.
FAULTS: list[tuple[str, str, dict[str, Any]]] = [
    ("kfd-absent", "AMD", {"devices": {"/dev/dri/renderD128": OPEN}}),
    ("kfd-denied", "AMD", {"devices": {"/dev/kfd": SHUT, "/dev/dri/renderD128": OPEN}}),
    ("render-absent", "AMD", {"devices": {"/dev/kfd": OPEN}}),
    ("render-denied", "AMD", {"devices": {"/dev/kfd": OPEN, "/dev/dri/renderD128": SHUT}}),
    ("nvidia-absent", "NVIDIA", {"devices": {}}),
    ("nvidia-denied", "NVIDIA", {"devices": {"/dev/nvidiactl": SHUT}}),
    ("uvm-absent", "NVIDIA", {"devices": {"/dev/nvidiactl": OPEN}}),
    ("compute-partition", "AMD", {"gpu_compute_partition": "CPX", "gpu_memory_partition": "NPS4"}),
    ("mig", "NVIDIA", {"gpu_mig": "Enabled"}),
    ("fabric", "NVIDIA", {"gpu_fabric": "In Progress"}),
    ("compute-mode", "NVIDIA", {"gpu_compute_mode": "Exclusive_Process"}),
    ("persistence", "NVIDIA", {"gpu_persistence": "Disabled"}),
    ("narrow-link", "AMD", {"gpu_link_width": 4}),
    ("memory-taken", "NVIDIA", {"gpu_used_bytes": 100 << 30}),
    ("not-in-catalog", "AMD", {"gpu_accelerator": ""}),
    ("shm", "AMD", {"shm_bytes": 64 << 20}),
    ("memlock", "AMD", {"limits": {"memlock": 8 << 20, "nofile": 1 << 20}, "nics": RDMA}),
    ("nofile", "NVIDIA", {"limits": {"memlock": -1, "nofile": 1024}}),
    ("huge-pages", "AMD", {"transparent_hugepages": "never"}),
    ("reserved-huge-pages", "AMD", {"hugepages_bytes": 256 << 30}),
    ("numa-balancing", "AMD", {"numa_balancing": 1}),
    ("iommu", "AMD", {"boot": ()}),
    ("iommu-cuda", "NVIDIA", {"boot": (), "links": PCIE}),
    ("peer-memory", "NVIDIA", {"nics": RDMA, "modules": ()}),
    ("pids", "AMD", {"pids_limit": 512}),
    ("rdma-down", "AMD", {"nics": (Nic(name="mlx5_1", layer="InfiniBand", up=False, rdma=True),)}),
    ("seccomp", "AMD", {"container": True, "seccomp": True}),
    ("torch-cpu", "AMD", {"torch_build": {}}),
    ("torch-cuda-on-amd", "AMD", {"torch_build": {"cuda": "12.8"}}),
    ("torch-rocm-on-nvidia", "NVIDIA", {"torch_build": {"hip": "7.0"}}),
    ("aiter-namesake", "AMD", {"packages": {"aiter": "0.13.20191203"}}),
    ("aiter-absent", "AMD", {"packages": {}, "environment": {"VLLM_ROCM_USE_AITER": "1"}}),
    ("aiter-unsupported", "AMD", {"gpu_isa": "gfx1100", "environment": {"SGLANG_USE_AITER": "1"}}),
    ("visible-both", "AMD", {"environment": {"HIP_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "1"}}),
    ("visible-twice", "AMD", {"environment": {"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "0"}}),
    ("gfx-override", "AMD", {"environment": {"HSA_OVERRIDE_GFX_VERSION": "11.0.0"}}),
    ("gfx-override-same", "AMD", {"environment": {"HSA_OVERRIDE_GFX_VERSION": "9.4.2"}}),
    ("p2p-off", "NVIDIA", {"environment": {"NCCL_P2P_DISABLE": "1"}}),
    ("debug", "AMD", {"environment": {"AMD_SERIALIZE_KERNEL": "3"}}),
]  # fmt: skip


def found(machine: Machine) -> dict[str, Finding]:
    return {finding.check: finding for finding in check_findings(machine)}


@pytest.mark.parametrize("vendor", ["AMD", "NVIDIA"])
def test_a_machine_that_is_well_has_no_findings(vendor: str) -> None:
    assert found(healthy(vendor)) == {}


@pytest.mark.parametrize(("row", "vendor", "fault"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_found_and_told_with_its_remedy(row: str, vendor: str, fault: dict[str, Any]) -> None:
    finding = found(healthy(vendor, **fault))[row]
    assert finding.remedy or finding.severity == "note"
    assert finding.grounds == "seen"
    assert "{" not in finding.what + finding.remedy + finding.evidence
    assert "not told" not in finding.what + finding.remedy


@pytest.mark.parametrize(
    ("isa", "said", "check"),
    [
        ("gfx942", "9.4.2", "gfx-override-same"), ("gfx90a", "9.0.10", "gfx-override-same"),
        ("gfx942", "9.4.0", "gfx-override"), ("gfx90a", "9.0.0", "gfx-override"), ("gfx942", "gfx942", "gfx-override"),
    ],
)  # fmt: skip
def test_an_override_with_the_gpus_own_kind_is_no_other_gpu(isa: str, said: str, check: str) -> None:
    machine = healthy("AMD", gpu_isa=isa, environment={"HSA_OVERRIDE_GFX_VERSION": said})
    assert [name for name in found(machine) if name.startswith("gfx-override")] == [check]


def test_a_gpu_of_the_processor_beside_cards_is_found() -> None:
    assert "integrated" in found(with_own_gpu())
    assert found(with_own_gpu())["integrated"].target == ""


def with_own_gpu() -> Machine:
    machine = healthy("AMD")
    own = msgspec.structs.replace(machine.gpus[0], integrated=True, isa="gfx1036", accelerator="", bus="0000:7b:00.0")
    return msgspec.structs.replace(machine, gpus=(*machine.gpus, own))


def test_every_row_has_such_a_test() -> None:
    assert {check.id for check in checks()} == {row for row, _, _ in FAULTS} | {"integrated"}


def test_what_no_source_tells_is_no_fault() -> None:
    bare = healthy("AMD", shm_bytes=None, limits={}, packages={}, transparent_hugepages="", numa_balancing=None)
    assert found(bare) == {}


def test_windows_has_one_device_for_all() -> None:
    assert found(healthy("NVIDIA", devices={"/dev/dxg": OPEN})) == {}


def test_one_gpu_needs_no_iommu_setting() -> None:
    machine = healthy("AMD", boot=())
    assert found(msgspec.structs.replace(machine, gpus=machine.gpus[:1], links=())) == {}


ROW = """
[sources]
mine = {{ ref = "mine", date = "2026-11-16" }}
[[check]]
id = "x"
on = ["any"]
when = {{ {when} }}
severity = "slow"
what = "{what}"
{remedy}
needs = "nothing"
source = "mine"
"""


@pytest.mark.parametrize(
    ("when", "what", "remedy", "said"),
    [
        ("moon = true", "x", 'remedy = "y"', "no such fact"),
        ('shm_mib = "<64"', "{sun}", 'remedy = "y"', "is no fact"),
        ('shm_mib = "<64"', "x", "", "only a note may do without"),
        ('shm_mib = "<much"', "x", 'remedy = "y"', "compares with no whole number"),
    ],
)
def test_a_row_that_cannot_be_trusted_is_refused(
    when: str, what: str, remedy: str, said: str, tmp_path: Path
) -> None:  # fmt: skip
    file = tmp_path / "checks.toml"
    file.write_text(ROW.format(when=when, what=what, remedy=remedy))
    with pytest.raises(BadData, match=said):
        checks(file)
