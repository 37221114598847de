"""What a launch may use on each instruction set, and how much of it a compute unit has."""

import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import read_rows
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadData, BadInput, BadParameter, UnknownName

_ISA = re.compile(r"gfx[0-9a-f]{3,4}|sm_\d{2,3}")
# HIP and CUDA both: a block of more threads is refused.
MAX_THREADS = 1024
_FILE = Path(__file__).parent / "data" / "isas.csv"
# Columns with a whole number, and the range outside which it is a slip.
_NUMBERS = {
    "wave_width": (32, 64), "lds_kib": (16, 1024), "unit_lds_kib": (16, 1024), "simds": (1, 16),
    "waves_per_simd": (1, 64), "reserved_lds_kib": (0, 64),
}  # fmt: skip
_COLUMNS = ("isa", *_NUMBERS, "fp8", "basis", "source", "date")
# MLIR's names of the FP8 types, and Triton's.
_FP8 = {"f8E4M3FN": "fp8e4nv", "f8E4M3FNUZ": "fp8e4b8", "f8E5M2": "fp8e5", "f8E5M2FNUZ": "fp8e5b16"}


class Isa(msgspec.Struct, frozen=True, kw_only=True):
    """A row of data/isas.csv."""

    wave_width: int
    # The most that one workgroup may have, and what a compute unit (a WGP on RDNA, an SM) has for all of them.
    lds_bytes: int
    unit_lds_bytes: int
    # Schedulers of a compute unit, each with waves of its own, and the most waves of each.
    simds: int
    waves_per_simd: int
    # CUDA sets aside so much of an SM's shared memory for each block.
    reserved_lds_bytes: int
    # Triton's names of the FP8 types that its matrix units take.
    fp8: tuple[str, ...]
    basis: str
    source: str
    date: str


@cache
def isas(file: Path = _FILE) -> dict[str, Isa]:
    """A new instruction set is a row; one that stands there twice, or out of range, fails with its line."""
    found: dict[str, Isa] = {}
    for where, row in read_rows(file, _COLUMNS):
        name, fp8 = row["isa"], tuple(row["fp8"].split())
        if not _ISA.fullmatch(name) or name in found:
            raise BadData(file, where, f"'{name}' is no instruction set such as gfx942 or sm_90, or stands here twice")
        if not set(fp8) <= set(_FP8.values()):
            raise BadData(file, where, f"fp8 '{row['fp8']}' has other words than {', '.join(_FP8.values())}")
        numbers = {column: _whole(file, where, row, column, *limits) for column, limits in _NUMBERS.items()}
        found[name] = Isa(
            **{key.replace("_kib", "_bytes"): n * 1024 if key.endswith("_kib") else n for key, n in numbers.items()},
            fp8=fp8, basis=row["basis"], source=row["source"], date=row["date"],
        )  # fmt: skip
    return found


def _whole(file: Path, where: str, row: Mapping[str, str], column: str, low: int, high: int) -> int:
    if not row[column].isdecimal() or not low <= int(row[column]) <= high:
        raise BadData(file, where, f"{column} '{row[column]}' must be a whole number from {low} to {high}")
    return int(row[column])


class KernelTarget(msgspec.Struct, frozen=True, kw_only=True):
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
        """As `shadow.FakeGpu` takes it."""
        return {
            "isa": self.isa,
            "backend": self.backend,
            "wave_width": self.limits.wave_width,
            "lds_bytes": self.lds_bytes,
            "compute_units": self.compute_units,
            "name": self.product,
            "memory_bytes": self.memory_bytes,
        }


def target(catalog: Catalog, name: str) -> KernelTarget:
    """By the name of an accelerator, or of an instruction set such as gfx942 or sm_90."""
    if not _ISA.fullmatch(name):
        try:
            accelerator = catalog.accelerator(name)
        except UnknownName as error:
            known = f"; instruction sets are known as well: {', '.join(isas())}"
            raise BadInput(f"{error}{known}") from None
        return _of(accelerator, name=accelerator.id)
    if name not in isas():
        raise BadParameter("on", f"{name}: not known; known instruction sets: {', '.join(isas())}")
    # With the limits of the first accelerator that has it, as far as limits differ by product.
    first = next((one for one in catalog.accelerators.values() if one.chip.isa.value == name), None)
    if first is not None:
        return _of(first, name)
    limits = isas()[name]
    return KernelTarget(
        name=name, isa=name, limits=limits, lds_bytes=limits.lds_bytes, lds_source=limits.source,
        compute_units=64, memory_bytes=16 << 30, product=name,
    )  # fmt: skip


def _of(accelerator: Accelerator, name: str) -> KernelTarget:
    chip, isa = accelerator.chip, accelerator.chip.isa.value
    if isa not in isas():
        raise BadParameter("on", f"{name}: Triton's limits on {isa} are not known; known: {', '.join(isas())}")
    return KernelTarget(
        name=name,
        isa=isa,
        limits=isas()[isa],
        lds_bytes=round(chip.lds.si),
        lds_source=chip.lds.source,
        compute_units=round(chip.compute_units.value),
        memory_bytes=round(accelerator.memory_bytes),
        product=accelerator.name,
    )


def fp8_name(mlir: str) -> str:
    """MLIR's names of the FP8 types in Triton's words."""
    return _FP8.get(mlir, mlir)
