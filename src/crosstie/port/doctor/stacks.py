"""The ROCm, driver and firmware that a chip needs at least, against those that the machine has."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec
from packaging.version import Version

from crosstie.catalog.reading import read_records, sourced_file
from crosstie.core.finding import Finding, Location
from crosstie.port.doctor.machine import Gpu, Machine, release_of

FILE = Path(__file__).parent / "data" / "stacks.toml"
# AMD's packages of the driver are numbered from 30 on since ROCm 7; the module has the kernel's number.
_FIRST_PACKAGE = 30


class ChipStack(msgspec.Struct, frozen=True, kw_only=True):
    """What these accelerators need at least; "" where the source says nothing of it."""

    accelerators: tuple[str, ...]
    rocm: str = ""
    amdgpu: str = ""
    module: str = ""
    firmware: str = ""
    source: str
    date: str


@cache
def chip_stacks(file: Path = FILE) -> tuple[ChipStack, ...]:
    with sourced_file(file, {"chip"}) as (raw, sources):
        return read_records(file, "chip", raw.get("chip"), ChipStack, sources)


def stack_findings(machine: Machine, kinds: dict[str, list[Gpu]]) -> Iterator[Finding]:
    for label, gpus in kinds.items():
        for row in chip_stacks():
            if gpus[0].accelerator in row.accelerators:
                yield from _of_rocm(machine, row, label, gpus[0].isa)
                yield from _of_driver(machine, row, label)


def _of_rocm(machine: Machine, row: ChipStack, label: str, isa: str) -> Iterator[Finding]:
    """PyTorch brings libraries of the ROCm that it is built for; the installed ones count where it brings none."""
    built, installed = release_of(machine.torch_build.get("hip", "")), release_of(machine.rocm)
    has, whose = (built, f"PyTorch is built for ROCm {built}") if built else (installed, f"ROCm {installed} is here")
    if row.rocm and has and has < Version(row.rocm):
        yield _finding(
            row, label, "chip-rocm", f"{label} needs ROCm {row.rocm} or newer, and {whose}: its libraries have no "
            f"kernels for {isa or 'this chip'}", "/opt/rocm",
            f"ROCm {row.rocm} or newer with an engine that is built for it: the engines' own images have both.",
        )  # fmt: skip
    elif row.rocm and built and installed and installed < Version(row.rocm):
        yield _finding(
            row, label, "chip-rocm", f"{label} needs ROCm {row.rocm} or newer, and {installed} is installed; PyTorch "
            f"brings {built}", "/opt/rocm", f"ROCm {row.rocm} or newer, so that what PyTorch does not bring goes with "
            "it.", severe=False,
        )  # fmt: skip


def _of_driver(machine: Machine, row: ChipStack, label: str) -> Iterator[Finding]:
    has = release_of(machine.amdgpu)
    wanted = "" if has is None else row.amdgpu if has.major >= _FIRST_PACKAGE else row.module
    if not wanted or has is None or has >= Version(wanted):
        return
    module = f" (the module says {row.module})" if row.module else ""
    firmware = f" Its firmware: PLDM bundle {row.firmware} or newer, from the server's maker." if row.firmware else ""
    yield _finding(
        row, label, "chip-driver", f"{label} needs AMD's driver {row.amdgpu} or newer{module}, and {has} is loaded",
        "/sys/module/amdgpu/version", f"amdgpu {row.amdgpu} or newer on the host; a container has the host's."
        + firmware,
    )  # fmt: skip


def _finding(
    row: ChipStack, label: str, check: str, what: str, file: str, remedy: str, *, severe: bool = True
) -> Finding:
    return Finding(
        check=check, severity="error" if severe else "setting", what=what, where=Location(file=file), grounds="seen",
        evidence=f"{row.source}, {row.date}", remedy=remedy, target=label,
    )  # fmt: skip
