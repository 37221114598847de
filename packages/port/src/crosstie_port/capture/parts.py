"""Which GPU the stand-in device says it is: its properties from the catalog, and rules of capture that are its own.

What is common to all is in `rules`; what differs from part to part is data, data/stand_ins.toml, each row with its
source.
"""

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec

from crosstie.catalog.library import Catalog
from crosstie.catalog.reading import read_record, read_toml
from crosstie_port.capture.hazards import Kind, Reason
from crosstie_port.kernels.targets import MAX_THREADS, KernelTarget, target

# The part on which the common rules were checked.
DEFAULT = "h200"
_FILE = Path(__file__).parent / "data" / "stand_ins.toml"


class SourcedRow(msgspec.Struct, frozen=True, kw_only=True):
    # Beginnings of names of instruction sets.
    isas: tuple[str, ...]
    source: str


Row = TypeVar("Row", bound=SourcedRow)


class Properties(SourcedRow, frozen=True, kw_only=True):
    values: dict[str, int | str]


class Rule(SourcedRow, frozen=True, kw_only=True):
    id: str
    operations: tuple[str, ...]
    kind: Kind
    what: str
    remedy: str
    when: dict[str, tuple[str, ...]] = {}
    unless: dict[str, tuple[str, ...]] = {}
    unless_env: str = ""
    first_on_side_stream: bool = False

    @property
    def reason(self) -> Reason:
        return Reason(self.kind, self.what, f"{self.remedy} ({self.source})")

    def holds(self, given: Mapping[str, Any]) -> bool:
        """Of an operation with these arguments."""
        if self.unless_env and os.environ.get(self.unless_env) == "1":
            return False
        if self.unless and all(_is(given.get(name), words) for name, words in self.unless.items()):
            return False
        return all(_is(given.get(name), words) for name, words in self.when.items())


class AttentionLimit(SourcedRow, frozen=True, kw_only=True):
    backend: str
    max_head_size: int


class CaptureLimit(SourcedRow, frozen=True, kw_only=True):
    what: str


class GpuPart(msgspec.Struct, frozen=True, kw_only=True):
    """`name` as PyTorch prints it."""

    name: str
    isa: str
    properties: Any
    # torch.version.hip and torch.version.cuda.
    versions: dict[str, str | None]
    rules: dict[str, list[Rule]]
    attention: tuple[AttentionLimit, ...]
    limits: tuple[CaptureLimit, ...]

    @property
    def is_amd(self) -> bool:
        return self.isa.startswith("gfx")

    def __str__(self) -> str:
        return f"{self.name} ({self.isa})"


def _is(value: Any, words: tuple[str, ...]) -> bool:
    """Whether an argument is a tensor on the device, or of one of these types."""
    held = value[0] if isinstance(value, (list, tuple)) and value else value
    kind = str(getattr(held, "dtype", "")).removeprefix("torch.")
    # Not an instance of DeviceTensor: this room's data are read without PyTorch.
    on_device = getattr(getattr(held, "device", None), "type", "cpu") != "cpu"
    return kind in words or ("device" in words and on_device)


@cache
def part(name: str = DEFAULT) -> GpuPart:
    """By the name of an accelerator of the catalog, or of an instruction set."""
    chosen = target(Catalog(), name)
    data = stand_ins()
    rules: dict[str, list[Rule]] = {}
    for rule in _of(chosen.isa, data.refusals):
        for operation in rule.operations:
            rules.setdefault(operation, []).append(rule)
    amd = chosen.backend == "hip"
    return GpuPart(
        name=chosen.product,
        isa=chosen.isa,
        properties=_properties(chosen, _of(chosen.isa, data.properties)),
        versions={"hip": data.versions["hip"] if amd else None, "cuda": None if amd else data.versions["cuda"]},
        rules=rules,
        attention=_of(chosen.isa, data.attention),
        limits=_of(chosen.isa, data.limits),
    )


def _of(isa: str, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    return tuple(row for row in rows if isa.startswith(row.isas))


def _properties(of: KernelTarget, rows: Sequence[Properties]) -> SimpleNamespace:
    digits = of.isa.removeprefix("gfx").removeprefix("sm_")
    # gfx942 is 9.4, step 2; gfx1100 is 11.0, step 0; sm_100 is 10.0.
    numbers = digits[:-1] if of.backend == "hip" else digits
    named = {
        key: value.format(isa=of.isa) if isinstance(value, str) else value
        for row in reversed(rows)
        for key, value in row.values.items()
    }
    limits = of.limits
    # "AMD Instinct MI300X", and "NVIDIA H200" without the catalog's "SXM 141 GB".
    product = of.product if of.backend == "hip" else " ".join(of.product.split()[:2])
    return SimpleNamespace(
        **{
            "name": product,
            "major": int(numbers[:-1]),
            "minor": int(numbers[-1], 16),
            "multi_processor_count": of.compute_units,
            "total_memory": of.memory_bytes,
            "warp_size": limits.wave_width,
            "max_threads_per_multi_processor": limits.simds * limits.waves_per_simd * limits.wave_width,
            "max_threads_per_block": MAX_THREADS,
            "shared_memory_per_block": of.lds_bytes,
            "shared_memory_per_block_optin": of.lds_bytes,
            "shared_memory_per_multiprocessor": limits.unit_lds_bytes,
            "gcnArchName": of.isa if of.backend == "hip" else "",
            "is_integrated": False,
            "is_multi_gpu_board": False,
            **named,
        }
    )


class StandIns(msgspec.Struct, frozen=True):
    versions: dict[str, str]
    properties: tuple[Properties, ...] = ()
    refusals: tuple[Rule, ...] = ()
    attention: tuple[AttentionLimit, ...] = ()
    limits: tuple[CaptureLimit, ...] = ()


@cache
def stand_ins(file: Path = _FILE) -> StandIns:
    return read_record(file, "", read_toml(file), StandIns)
