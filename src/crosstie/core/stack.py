"""The software on top of the silicon: how an engine schedules, what it keeps, what it costs."""

from typing import Literal

import msgspec

from crosstie.core.fact import Fact

Scheduling = Literal["mixed", "prefill-first"]
# Whether a request is let in when its prompt fits, or only when all that it may become does.
Admission = Literal["growing", "whole"]
# What an engine's memory fraction is a fraction of: the GPU's memory, or what weights leave of it.
MemoryOf = Literal["gpu", "free"]
# What becomes of a format that an accelerator lacks: unpacked inside the kernel, or written out in 16 bits first.
Emulation = Literal["fused", "materialised"]


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step costs outside the GPU's kernels."""

    step: Fact
    # What a step that carries prompts adds: graphs do not cover it, so every kernel is launched by hand.
    prompt: Fact
    sequence: Fact
    # What a request adds to its first token: HTTP, tokenising, waiting for the step under way.
    request: Fact
    # Whether the engine prepares the next step while the GPU runs this one.
    overlapped: bool


class SmallGpu(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that an engine lowers on GPUs with less memory than `below`."""

    below: Fact
    chunk_tokens: Fact
    max_sequences: Fact


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    aliases: tuple[str, ...] = ()
    versions: str
    vendors: tuple[str, ...]
    # Weight formats that the engine reads; a trailing * stands for any ending.
    loads: tuple[str, ...]
    scheduling: Scheduling
    admission: Admission
    memory_of: MemoryOf = "gpu"
    chunk_tokens: Fact
    max_sequences: Fact
    memory_fraction: Fact
    reserved: Fact
    host: Host
    # By vendor and format.
    emulation: dict[str, dict[str, Emulation]]
    small: SmallGpu | None = None
    # Whether it serves requests; kernels timed by themselves do not.
    serves: bool = True
    file: str = ""

    def runs_on(self, vendor: str) -> bool:
        return vendor in self.vendors or "any" in self.vendors

    def reads(self, format_id: str) -> bool:
        return any(format_id == name or (name.endswith("*") and format_id.startswith(name[:-1])) for name in self.loads)

    def chunk_tokens_on(self, memory_bytes: float) -> float:
        small = self.small
        return (small if small and memory_bytes < small.below.si else self).chunk_tokens.value

    def max_sequences_on(self, memory_bytes: float) -> float:
        small = self.small
        return (small if small and memory_bytes < small.below.si else self).max_sequences.value

    @property
    def held_share(self) -> float:
        """Share of its output that a running request has in the cache, on average over its life."""
        return 1.0 if self.admission == "whole" else 0.5

    def materialises(self, format_id: str, vendor: str) -> bool:
        return self.emulation.get(vendor, {}).get(format_id) == "materialised"


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """The constants between a peak and what kernels reach. Each has a physical meaning.

    compute         dense GEMM rate at large sizes over the dense peak, by compute format
    experts         rate of grouped products of experts over that of plain ones
    weights         rate of streaming weights over HBM bandwidth, by stored bits: 16, 8 or 4
    attention       rate of prefill attention arithmetic over the 16-bit dense peak
    cache           rate of reading the KV cache over HBM bandwidth
    elementwise     rate of norms and activations over HBM bandwidth
    kernel          time that a kernel takes to start, ramp up and drain
    collective      time that a collective takes with nothing to send
    link            rate of a collective over the scale-up bandwidth
    """

    compute: dict[str, Fact]
    experts: Fact
    weights: dict[str, Fact]
    attention: Fact
    cache: Fact
    elementwise: Fact
    kernel: Fact
    collective: Fact
    link: Fact
    # Where each constant comes from: an accelerator, its family, or the default.
    scope: dict[str, str]
