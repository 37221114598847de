"""A place in a source that a port to ROCm trips over, and the targets that it concerns."""

import re
from typing import Literal

import msgspec

from crosstie.core.deployment import Accelerator
from crosstie.core.finding import Finding, Grounds, Location, Severity

_LDS = re.compile(r"^lds<([0-9]+)$")
_ISA = re.compile(r"gfx[0-9]+[0-9a-z]*")
# Of the accelerators that are ported to: what a list of targets may lack.
DATA_CENTRE_ISAS = frozenset({"gfx942", "gfx950"})
_DATA_CENTRE = re.compile(r"(?<![a-z0-9])gfx9(?:08|0a|4[0-2]|50)(?![0-9a-z])")
Condition = Literal["rocm", "wave64", "wave32", "fnuz", "ocp", "no-fp8", "gfx9"]


def targets_in(text: str) -> set[str]:
    """AMD's accelerators for data centres that a text names by their instruction sets."""
    return set(_DATA_CENTRE.findall(text))


class SourceTarget(msgspec.Struct, frozen=True):
    """What of an accelerator a source can depend on."""

    id: str
    isa: str
    wave: int
    lds_bytes: int
    fp8: str

    @property
    def is_amd(self) -> bool:
        return self.isa.startswith("gfx")

    def meets(self, condition: str) -> bool:
        """`condition`: an instruction set, a Condition, or "lds<N" for less local memory than N bytes."""
        if not self.is_amd:
            return False
        if (least := _LDS.match(condition)) is not None:
            return self.lds_bytes < int(least[1])
        return {
            "rocm": True,
            "wave64": self.wave == 64,
            "wave32": self.wave == 32,
            "fnuz": self.fp8 == "e4m3fnuz",
            "ocp": self.fp8 == "e4m3fn",
            "no-fp8": self.fp8 == "none",
            "gfx9": self.isa.startswith("gfx9"),
        }.get(condition, self.isa == condition)


def target_of(accelerator: Accelerator) -> SourceTarget:
    chip = accelerator.chip
    wave, lds_bytes = round(chip.wave_width.value), round(chip.lds.si)
    return SourceTarget(accelerator.id, chip.isa.value, wave, lds_bytes, chip.fp8_dialect.value)


class SourceHazard(msgspec.Struct, frozen=True):
    check: str
    severity: Severity
    what: str
    file: str
    evidence: str
    remedy: str
    line: int | None = None
    on: str = "rocm"
    name: str = ""
    grounds: Grounds = "read"


def _is_built_for(file: str, target: SourceTarget) -> bool:
    """A file with an instruction set of AMD's in its path (kernels/gfx950/gemm.cu) is for that one alone."""
    named = _ISA.findall(file.lower())
    return not named or any(target.isa.startswith(one) for one in named)


def findings_of(hazards: list[SourceHazard], targets: list[SourceTarget]) -> list[Finding]:
    """One finding a place: with no target where it concerns all that were asked for, else with their names."""
    found: dict[tuple[str, str, int | None, str, str], Finding] = {}
    for hazard in hazards:
        met = [target.id for target in targets if target.meets(hazard.on) and _is_built_for(hazard.file, target)]
        concerned = ",".join(met)
        key = (hazard.check, hazard.file, hazard.line, hazard.what, concerned)
        if met and key not in found:
            found[key] = Finding(
                check=hazard.check,
                severity=hazard.severity,
                what=hazard.what,
                where=Location(file=hazard.file, line=hazard.line, name=hazard.name),
                evidence=hazard.evidence,
                grounds=hazard.grounds,
                remedy=hazard.remedy,
                target="" if len(met) == len(targets) else concerned,
            )
    return list(found.values())
