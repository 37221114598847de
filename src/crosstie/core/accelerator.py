"""What silicon offers. Every field is a `Fact` or a `Label`, so it knows where it comes from."""

import msgspec

from crosstie.core.fact import Fact, Label


class Chip(msgspec.Struct, frozen=True, kw_only=True):
    architecture: Label
    isa: Label
    compute_units: Fact
    wave_width: Fact
    lds: Fact
    tdp: Fact
    fp8_dialect: Label
    fp4_dialect: Label


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    kind: Label
    capacity: Fact
    bandwidth: Fact
    usable: Fact | None = None


class ScaleUp(msgspec.Struct, frozen=True, kw_only=True):
    technology: Label
    topology: Label
    bandwidth: Fact
    domain: Fact


class ScaleOut(msgspec.Struct, frozen=True, kw_only=True):
    bandwidth: Fact


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    aliases: tuple[str, ...]
    vendor: str
    family: str
    chip: Chip
    memory: Memory
    dense: dict[str, Fact]
    sparse: dict[str, Fact]
    scale_up: ScaleUp
    scale_out: ScaleOut
    measured: dict[str, Fact]
    file: str = ""

    @property
    def memory_bytes(self) -> float:
        """What a program can allocate: the driver's own figure where one was measured."""
        return (self.memory.usable or self.memory.capacity).si

    @property
    def memory_bytes_per_s(self) -> float:
        return self.memory.bandwidth.si

    @property
    def domain(self) -> int:
        return round(self.scale_up.domain.value)

    def flop_per_s(self, compute_format: str) -> float | None:
        """Dense peak of a compute format, or None where the matrix units lack it."""
        fact = self.dense.get(compute_format)
        return None if fact is None else fact.si
