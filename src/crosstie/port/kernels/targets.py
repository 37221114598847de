"""What a launch may use on each instruction set, and how much of it a compute unit has."""

import re

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.core.accelerator import Accelerator
from crosstie.core.errors import BadInput, UnknownName

_LLVM = "LLVM llvmorg-20, AMDGPUUsage and AMDGPUBaseInfo.cpp (LDS, waves and registers by processor)"
_CUDA = "NVIDIA, CUDA C++ Programming Guide 12.8, technical specifications per compute capability"
_ISA = re.compile(r"gfx[0-9a-f]{3,4}|sm_\d{2,3}")
# HIP and CUDA both: a block of more threads is refused.
MAX_THREADS = 1024


class Isa(msgspec.Struct, frozen=True, kw_only=True):
    wave_width: int
    # The most that one workgroup may have, and what a compute unit (a WGP on RDNA, an SM) has for all of them.
    lds_bytes: int
    unit_lds_bytes: int
    # Schedulers of a compute unit, each with waves of its own, and the most waves of each.
    simds: int
    waves_per_simd: int
    # CUDA sets aside so much of an SM's shared memory for each block.
    reserved_lds_bytes: int = 0
    fp8: tuple[str, ...] = ()
    source: str = ""


def _cdna(lds_kib: int, waves: int, fp8: tuple[str, ...]) -> Isa:
    return Isa(
        wave_width=64, lds_bytes=lds_kib * 1024, unit_lds_bytes=lds_kib * 1024, simds=4, waves_per_simd=waves,
        fp8=fp8, source=_LLVM,
    )  # fmt: skip


def _rdna(fp8: tuple[str, ...]) -> Isa:
    return Isa(
        wave_width=32, lds_bytes=64 * 1024, unit_lds_bytes=128 * 1024, simds=4, waves_per_simd=16, fp8=fp8, source=_LLVM
    )


def _sm(block_kib: int, unit_kib: int, warps: int, fp8: tuple[str, ...]) -> Isa:
    return Isa(
        wave_width=32, lds_bytes=block_kib * 1024, unit_lds_bytes=unit_kib * 1024, simds=4, waves_per_simd=warps // 4,
        reserved_lds_bytes=1024, fp8=fp8, source=_CUDA,
    )  # fmt: skip


_OCP = ("fp8e4nv", "fp8e5")
_FNUZ = ("fp8e4b8", "fp8e5b16")
ISAS: dict[str, Isa] = {
    "gfx90a": _cdna(64, 8, ()),
    "gfx942": _cdna(64, 8, _FNUZ),
    "gfx950": _cdna(160, 8, _OCP),
    "gfx1100": _rdna(()),
    "gfx1101": _rdna(()),
    "gfx1151": _rdna(()),
    "gfx1200": _rdna(_OCP),
    "gfx1201": _rdna(_OCP),
    "sm_80": _sm(163, 164, 64, ()),
    "sm_86": _sm(99, 100, 48, ()),
    "sm_89": _sm(99, 100, 48, _OCP),
    "sm_90": _sm(227, 228, 64, _OCP),
    "sm_100": _sm(227, 228, 64, _OCP),
    "sm_103": _sm(227, 228, 64, _OCP),
    "sm_120": _sm(99, 100, 48, _OCP),
}


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """An accelerator of the catalog, or an instruction set alone."""

    name: str
    isa: str
    limits: Isa
    lds_bytes: int
    lds_source: str
    compute_units: int
    memory_bytes: int
    product: str

    @property
    def backend(self) -> str:
        return "hip" if self.isa.startswith("gfx") else "cuda"

    @property
    def device(self) -> dict[str, object]:
        """As `fake_device.Device` takes it."""
        return {
            "isa": self.isa,
            "backend": self.backend,
            "wave_width": self.limits.wave_width,
            "lds_bytes": self.lds_bytes,
            "compute_units": self.compute_units,
            "name": self.product,
            "memory_bytes": self.memory_bytes,
        }


def target(catalog: Catalog, name: str) -> Target:
    """By the name of an accelerator, or of an instruction set such as gfx942 or sm_90."""
    if _ISA.fullmatch(name):
        return _alone(catalog, name)
    try:
        accelerator = catalog.accelerator(name)
    except UnknownName as error:
        known = f"; instruction sets are known as well: {', '.join(ISAS)}"
        raise BadInput(f"{error}{known}") from None
    return _of(accelerator, name=accelerator.id)


def _alone(catalog: Catalog, isa: str) -> Target:
    """With the limits of the first accelerator that has it, as far as limits differ by product."""
    if isa not in ISAS:
        raise BadInput(f"--on {isa}: not known; known instruction sets: {', '.join(ISAS)}")
    for accelerator in catalog.accelerators.values():
        if accelerator.chip.isa.value == isa:
            return _of(accelerator, name=isa)
    limits = ISAS[isa]
    return Target(
        name=isa, isa=isa, limits=limits, lds_bytes=limits.lds_bytes, lds_source=limits.source,
        compute_units=64, memory_bytes=16 << 30, product=isa,
    )  # fmt: skip


def _of(accelerator: Accelerator, name: str) -> Target:
    isa = accelerator.chip.isa.value
    if isa not in ISAS:
        raise BadInput(f"--on {name}: Triton's limits on {isa} are not known; known: {', '.join(ISAS)}")
    lds = accelerator.chip.lds
    return Target(
        name=name,
        isa=isa,
        limits=ISAS[isa],
        lds_bytes=round(lds.si),
        lds_source=lds.source,
        compute_units=round(accelerator.chip.compute_units.value),
        memory_bytes=round(accelerator.memory_bytes),
        product=accelerator.name,
    )


def fp8_name(mlir: str) -> str:
    """MLIR's names of the FP8 types in Triton's words."""
    return {
        "f8E4M3FN": "fp8e4nv",
        "f8E4M3FNUZ": "fp8e4b8",
        "f8E5M2": "fp8e5",
        "f8E5M2FNUZ": "fp8e5b16",
    }.get(mlir, mlir)
