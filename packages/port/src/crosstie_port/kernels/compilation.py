"""One kernel compiled for one target: what was asked, what came of it, and how many waves of it fit."""

from typing import Any

import msgspec

from crosstie.core.finding import Location
from crosstie_port.kernels.targets import MAX_THREADS, KernelTarget

# Warps take registers in units of 256, of 65,536 an SM has (CUDA C++ Programming Guide).
_SM_REGISTERS, _REGISTER_UNIT = 65536, 256


class Compilation(msgspec.Struct, frozen=True, kw_only=True):
    job: dict[str, Any]
    result: dict[str, Any]
    target: KernelTarget

    @property
    def kernel(self) -> str:
        return str(self.job["kernel"])

    @property
    def key(self) -> tuple[str, int]:
        return str(self.job["file"]), int(self.job["line"])

    def place(self, file: str = "", line: int = 0) -> Location:
        """Of a statement, or of the kernel where its line is not known."""
        file, line = (file, line) if file and line else self.key
        return Location(file=file, line=line, name=self.kernel)

    @property
    def compiled(self) -> bool:
        return bool(self.result["status"] == "compiled")

    @property
    def lds_bytes(self) -> int:
        return int(self.result.get("lds_bytes") or 0)

    @property
    def num_warps(self) -> int:
        return int(self.result.get("num_warps") or self.job["options"].get("num_warps") or 4)

    @property
    def wave_width(self) -> int:
        return self.target.limits.wave_width

    @property
    def threads(self) -> int:
        return self.num_warps * self.wave_width

    @property
    def matrix(self) -> dict[str, int]:
        found: dict[str, int] = self.result.get("matrix") or {}
        return found

    @property
    def registers(self) -> int | None:
        """Of one lane: VGPRs with AGPRs, or a CUDA thread's."""
        return self.result.get("vgprs" if self.target.backend == "hip" else "registers")

    @property
    def spills(self) -> int | None:
        """VGPRs of each lane, or bytes of stores and loads of a CUDA thread."""
        return self.result.get("vgpr_spills" if self.target.backend == "hip" else "spill_bytes")

    @property
    def is_out_of_resources(self) -> bool:
        """Whether Triton refuses it at launch, and its autotuner passes over it."""
        return self.compiled and (self.lds_bytes > self.target.lds_bytes or self.threads > MAX_THREADS)

    @property
    def groups_by(self) -> dict[str, int]:
        """Workgroups that a compute unit holds at once, by what limits them."""
        limits, found = self.target.limits, {}
        found["wave slots"] = limits.simds * limits.waves_per_simd // self.num_warps
        if self.lds_bytes:
            found["LDS"] = limits.unit_lds_bytes // (self.lds_bytes + limits.reserved_lds_bytes)
        by_registers = self.result.get("waves_by_registers")
        if by_registers is not None:
            found["registers"] = by_registers * limits.simds // self.num_warps
        elif self.registers:
            of_warp = -(-self.registers * limits.wave_width // _REGISTER_UNIT) * _REGISTER_UNIT
            found["registers"] = _SM_REGISTERS // of_warp // self.num_warps
        return found

    @property
    def waves_per_simd(self) -> float | None:
        """Resident at once, on average over the SIMDs of a compute unit."""
        if not self.compiled or self.is_out_of_resources or self.registers is None:
            return None
        return min(self.groups_by.values()) * self.num_warps / self.target.limits.simds

    @property
    def configuration(self) -> str:
        """Short, for people: the constants and options that tell configurations of one kernel apart."""
        constants = {k: v for k, v in self.job["constexprs"].items() if isinstance(v, int | str) and v != ""}
        options = {k: v for k, v in self.job["options"].items() if v is not None}
        return ", ".join(f"{name}={value}" for name, value in {**constants, **options}.items())
