"""What two facts show together, on machines with the fault and without."""

from typing import Any

import msgspec
import pytest
from tests.port.doctor.machines import healthy

from crosstie.catalog.library import Catalog
from crosstie.core.finding import VERDICTS, Finding
from crosstie.port.doctor.doctor import diagnose, installed
from crosstie.port.doctor.machine import Link, Machine
from crosstie.port.doctor.relations import chip_stacks, relation_findings
from crosstie.port.preflight.engine import EngineRelease, engine_from

CATALOG = Catalog([])


def found(machine: Machine, *engines: str) -> dict[str, Finding]:
    releases = [engine_from(said) for said in engines]
    return {finding.check: finding for finding in relation_findings(machine, CATALOG, releases)}


@pytest.mark.parametrize("vendor", ["AMD", "NVIDIA"])
def test_a_machine_that_is_well_has_no_findings(vendor: str) -> None:
    assert found(healthy(vendor), "vllm==0.26.0") == {}


@pytest.mark.parametrize(
    ("check", "severity", "vendor", "fault"),
    [
        ("no-gpu", "error", "AMD", {"gpus": ()}),
        ("driver", "error", "NVIDIA", {"driverless": ("10de:2335 at 0000:01:00.0 (vfio-pci)",)}),
        ("tool-failed", "error", "AMD", {"failed": {"rocminfo": "exit status 1: Unable to open /dev/kfd"}}),
        ("tool-failed", "note", "AMD", {"failed": {"nvidia-smi": "exit status 9: no driver"}}),
        ("visible", "error", "NVIDIA", {"environment": {"CUDA_VISIBLE_DEVICES": ""}}),
        ("visible", "error", "AMD", {"environment": {"HIP_VISIBLE_DEVICES": "-1"}}),
        ("visible", "error", "AMD", {"environment": {"ROCR_VISIBLE_DEVICES": "0,7"}}),
        ("visible", "note", "AMD", {"environment": {"HIP_VISIBLE_DEVICES": "1"}}),
        ("links", "slow", "AMD", {"links": (Link(one=0, other=1, kind="PCIE"),)}),
        ("cuda-driver", "error", "NVIDIA", {"cuda": "12.8"}),
        ("cuda-driver", "note", "NVIDIA", {"torch_build": {"cuda": "13.1"}}),
        ("rocm-release", "unknown", "AMD", {"rocm": "6.4.1"}),
        ("engine-build", "unknown", "AMD", {"torch_build": {"hip": "6.4.43484"}, "rocm": ""}),
        ("engine-build", "unknown", "NVIDIA", {"torch_build": {"cuda": "12.8"}}),
        ("processors", "slow", "AMD", {"cpu_limit": 2.0}),
        ("host-memory", "setting", "NVIDIA", {"memory_limit_bytes": 32 << 30}),
        ("host-memory", "note", "NVIDIA", {"memory_bytes": 32 << 30, "memory_limit_bytes": 64 << 30}),
    ],
)
def test_a_fault_is_found(check: str, severity: str, vendor: str, fault: dict[str, Any]) -> None:
    finding = found(healthy(vendor, **fault), "vllm==0.26.0")[check]
    assert finding.severity == severity
    assert finding.remedy or severity == "note"


def test_uuids_are_taken_at_their_word() -> None:
    uuid = {"CUDA_VISIBLE_DEVICES": "GPU-4b2c1a9f,GPU-0a1b2c3d"}
    assert found(healthy("NVIDIA", environment=uuid)) == {}


def test_an_empty_list_of_visible_gpus_is_as_good_as_none_on_rocm() -> None:
    assert found(healthy("AMD", environment={"HIP_VISIBLE_DEVICES": ""})) == {}


def test_gpus_of_two_kinds_are_told() -> None:
    machine = healthy("AMD")
    other = msgspec.structs.replace(machine.gpus[1], accelerator="mi325x")
    assert "1 x mi325x" in found(msgspec.structs.replace(machine, gpus=(machine.gpus[0], other)))["mixed"].what


def test_a_release_that_nobody_read_is_unknown() -> None:
    assert "newer than what" in found(healthy("AMD"), "vllm==9.0")["engine-unread"].what


def test_engines_are_those_that_are_installed() -> None:
    packages = {"vllm": "0.26.0+rocm720", "sglang": "0.5.18"}
    assert [str(one) for one in installed(healthy("AMD", packages=packages, llama_cpp="10586"))] == [
        "vllm 0.26.0", "sglang 0.5.18", "llama.cpp 10586",
    ]  # fmt: skip
    assert installed(healthy("AMD", packages={"vllm": "mine"})) == []


def about_variables(machine: Machine, engines: list[EngineRelease]) -> list[Finding]:
    return [one for one in relation_findings(machine, CATALOG, engines) if one.check == "variable"]


def test_a_variable_that_the_engine_reads_no_more_is_found() -> None:
    def told(release: str, **set_here: str) -> list[Finding]:
        return about_variables(healthy("NVIDIA", environment=set_here), [engine_from(f"vllm=={release}")])

    (gone,) = told("0.32.0", VLLM_ATTENTION_BACKEND="FLASHINFER", VLLM_USE_DEEP_GEMM="1", NCCL_DEBUG="INFO")
    assert gone.severity == "setting"
    assert "VLLM_ATTENTION_BACKEND=FLASHINFER does nothing" in gone.what
    assert gone.remedy == "--attention-backend on the engine's command line"
    assert told("0.14.1", VLLM_ATTENTION_BACKEND="FLASHINFER") == []
    (unset,) = told("0.32.0", VLLM_USE_V1="1")
    assert unset.remedy == "unset VLLM_USE_V1"
    # Kubernetes sets such names for a Service called vllm.
    assert told("0.32.0", VLLM_SERVICE_PORT="8000") == []


def test_nothing_is_said_of_models_that_nobody_asked_for() -> None:
    for vendor in ("AMD", "NVIDIA"):
        for environment in ({}, {"VLLM_ROCM_USE_AITER": "1", "SGLANG_USE_AITER": "1"}):
            machine = healthy(vendor, environment=environment)
            engines = [engine_from("vllm"), engine_from("sglang")]
            assert about_variables(machine, engines) == []


MI355X = {"gpu_accelerator": "mi355x", "gpu_isa": "gfx950", "gpu_pci": "1002:75a3"}


@pytest.mark.parametrize(
    ("stack", "checks"),
    [
        ({"rocm": "6.4.1", "torch_build": {"hip": "6.4.43484"}, "amdgpu": "6.12.12"}, {"chip-rocm", "chip-driver"}),
        ({"rocm": "6.4.1", "torch_build": {}, "packages": {}}, {"chip-rocm"}),
        ({"rocm": "7.0.2", "amdgpu": "30.10.2"}, set()),
        ({"rocm": "7.0.2", "amdgpu": "6.14.14"}, set()),
        ({"rocm": "7.2.2", "amdgpu": "6.12.12"}, {"chip-driver"}),
        # What came with the kernel has no number.
        ({"rocm": "7.2.2", "amdgpu": ""}, set()),
    ],
)
def test_a_chip_needs_a_rocm_and_a_driver_that_know_it(stack: dict[str, Any], checks: set[str]) -> None:
    machine = healthy("AMD", **MI355X, **stack)
    told = {one.check: one for one in diagnose(machine, catalog=CATALOG).findings}
    assert {name for name in told if name.startswith("chip-")} == checks
    assert all(told[name].severity == "error" and told[name].remedy for name in checks)
    if checks:
        assert diagnose(machine, catalog=CATALOG).verdicts == {"mi355x": VERDICTS["error"]}
    if "chip-driver" in checks:
        assert "01.25.13.09" in told["chip-driver"].remedy


def test_pytorch_of_a_newer_rocm_brings_its_own_libraries() -> None:
    machine = healthy("AMD", **MI355X, rocm="6.4.1", torch_build={"hip": "7.0.51831-a3e329ad8"})
    assert found(machine)["chip-rocm"].severity == "setting"
    # The same stack does for a chip that it knows.
    assert "chip-rocm" not in found(healthy("AMD", rocm="6.4.1"))


def test_chips_of_the_table_are_the_catalogs() -> None:
    rows = [name for row in chip_stacks() for name in row.accelerators]
    assert set(rows) <= set(CATALOG.accelerators)
    assert {one.id for one in CATALOG.accelerators.values() if one.vendor == "AMD"} <= set(rows)


def test_verdicts_are_by_kind_of_gpu() -> None:
    machine = healthy("AMD", gpu_compute_partition="CPX")
    other = msgspec.structs.replace(machine.gpus[0], accelerator="mi325x", compute_partition="SPX")
    machine = msgspec.structs.replace(machine, gpus=(machine.gpus[0], other), links=(), packages={}, torch_build={})
    assert diagnose(machine, catalog=CATALOG).verdicts == {"mi300x": "ready with settings", "mi325x": "ready"}
    assert diagnose(healthy("AMD", gpus=()), catalog=CATALOG).verdicts == {"this machine": "will not run"}


def test_an_engine_without_what_it_declares_is_not_ready() -> None:
    """As vLLM without FlashInfer, which doctor called ready and which died at its start."""
    requires = {
        "vllm": {
            "flashinfer-python==0.6.1": "",
            'numba==0.61; python_version < "3.10"': "",
            "torch==2.9.0": "2.9.0",
            "transformers>=4.56": "4.40.0",
            'xgrammar; platform_machine == "x86_64"': "",
        }
    }
    markers = {"python_version": "3.12", "platform_machine": "aarch64"}
    machine = healthy("NVIDIA", requires=requires, markers=markers)
    lacking, other = (one for one in diagnose(machine).findings if one.check == "requirements")
    assert lacking.severity == "error"
    assert lacking.what.endswith("declares 1 requirement that is not installed: flashinfer-python==0.6.1")
    assert other.severity == "unknown"
    assert "transformers>=4.56 (here 4.40.0)" in other.what
    assert set(diagnose(machine).verdicts.values()) == {
        diagnose(healthy("NVIDIA", imports={"vllm": "x"})).verdicts["h200"]
    }
    # One that can be imported may run without: neither ready nor said to fail.
    imported = diagnose(healthy("NVIDIA", requires=requires, markers=markers, imports={"vllm": ""}))
    assert {one.severity for one in imported.findings if one.check == "requirements"} == {"unknown"}
    assert imported.verdicts == {"h200": VERDICTS["unknown"]}
    whole = healthy("NVIDIA", requires={"vllm": {"torch==2.9.0": "2.9.0+cu130"}}, markers=markers, imports={"vllm": ""})
    assert not [one for one in diagnose(whole).findings if one.check in ("requirements", "import")]


def test_an_engine_that_cannot_be_imported_is_not_ready() -> None:
    (found,) = (
        one
        for one in diagnose(healthy("NVIDIA", imports={"vllm": "ModuleNotFoundError: No module named 'x'"})).findings
        if one.check == "import"
    )
    assert (found.severity, found.what) == ("error", "import vllm: ModuleNotFoundError: No module named 'x'")
    slow = healthy("NVIDIA", imports={"vllm": "no answer within 120 s"})
    assert [one.severity for one in diagnose(slow).findings if one.check == "import"] == ["unknown"]
