"""One replica: what silicon offers, how the software on it behaves, and a model split over them in some way.

Every field of an accelerator is a `Fact` or a `Label`, so it knows where it comes from.
"""

import math
from typing import Annotated, Literal

import msgspec

from crosstie.core.errors import BadInput
from crosstie.core.estimate import NONE, Correction
from crosstie.core.fact import Fact, Label, Quantity, Word
from crosstie.core.model import COMPUTE_FORMATS, Model, Precision
from crosstie.core.speculation import Speculation
from crosstie.core.units import UNITS

# What nobody measures: a vendor says it, or it follows.
_NOT_MEASURED = ("spec", "derived", "claimed", "assumed")
_Rates = Annotated[
    dict[Annotated[str, Word("a format of the matrix units", COMPUTE_FORMATS)], Fact],
    Quantity("flop_per_s", 1e12, 1e17, "peak of the matrix units", _NOT_MEASURED),
]
_Price = Annotated[Fact, Quantity("usd", 100, 1e6, "what one may cost", _NOT_MEASURED)]


class Chip(msgspec.Struct, frozen=True, kw_only=True):
    architecture: Annotated[Label, Word("the name of the microarchitecture")]
    isa: Annotated[Label, Word("the compiler's target, such as gfx942 or sm_90")]
    compute_units: Annotated[
        Fact, Quantity("count", 1, 2000, "compute units or streaming multiprocessors", _NOT_MEASURED)
    ]
    wave_width: Annotated[Fact, Quantity("count", 16, 128, "lanes that execute together", _NOT_MEASURED)]
    lds: Annotated[Fact, Quantity("bytes", 16e3, 1e6, "LDS or shared memory one workgroup may use", _NOT_MEASURED)]
    tdp: Annotated[Fact, Quantity("watts", 30, 5000, "board power limit", _NOT_MEASURED)]
    fp8_dialect: Annotated[Label, Word("which FP8 encoding the matrix units take", ("e4m3fn", "e4m3fnuz", "none"))]
    fp4_dialect: Annotated[Label, Word("which FP4 encodings they take", ("none", "mxfp4", "nvfp4", "nvfp4+mxfp4"))]


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    kind: Annotated[Label, Word("memory technology")]
    capacity: Annotated[Fact, Quantity("bytes", 4e9, 2e12, "memory as sold", _NOT_MEASURED)]
    bandwidth: Annotated[Fact, Quantity("bytes_per_s", 5e10, 5e13, "peak memory bandwidth", _NOT_MEASURED)]
    usable: Annotated[Fact | None, Quantity("bytes", 4e9, 2e12, "memory that the driver reports", ("measured",))] = None


class ScaleUp(msgspec.Struct, frozen=True, kw_only=True):
    technology: Annotated[Label, Word("the link between GPUs of one domain")]
    topology: Annotated[Label, Word("how the links join them", ("switch", "mesh", "bridge", "pcie"))]
    bandwidth: Annotated[Fact, Quantity("bytes_per_s", 4e9, 2e13, "per GPU, one direction, all links", _NOT_MEASURED)]
    domain: Annotated[Fact, Quantity("count", 1, 1024, "GPUs joined at that bandwidth", _NOT_MEASURED)]
    node: Annotated[
        Fact | None,
        Quantity("count", 1, 1024, "GPUs of a server or tray, if the domain has several", _NOT_MEASURED),
    ] = None


class ScaleOut(msgspec.Struct, frozen=True, kw_only=True):
    bandwidth: Annotated[Fact, Quantity("bytes_per_s", 1e8, 1e12, "network per GPU, one direction", _NOT_MEASURED)]


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """Of an accelerator that nobody can buy yet: when it is said to come, how much later in the mean, its price."""

    expected: Annotated[Label, Word("the month in which it is said to come, as YYYY-MM")]
    slip: Annotated[
        Fact, Quantity("years_in_s", 0, 5 * UNITS["year"].si, "mean delay beyond that", ("claimed", "assumed"))
    ]
    usd: _Price
    usd_low: _Price
    usd_high: _Price


# Cards that a large workstation holds; servers of cards hold eight.
_WORKSTATION_CARDS = 4


class Accelerator(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    aliases: tuple[str, ...] = ()
    vendor: Literal["AMD", "NVIDIA", "Intel", "other"]
    family: str
    chip: Chip
    memory: Memory
    dense: _Rates
    sparse: _Rates = {}
    scale_up: ScaleUp
    scale_out: ScaleOut
    measured: dict[str, Fact] = {}
    # None: it is sold.
    announced: Announced | None = None
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

    @property
    def node(self) -> int:
        """GPUs that come together: those of a board or of a rack's tray; cards come singly."""
        if self.scale_up.topology.value not in ("switch", "mesh"):
            return 1
        return round((self.scale_up.node or self.scale_up.domain).value)

    @property
    def in_workstation(self) -> bool:
        """Cards that few of stand in one machine, whose owner has neither rack nor switch for them."""
        return self.scale_up.topology.value == "pcie" and self.domain <= _WORKSTATION_CARDS

    def flop_per_s(self, compute_format: str) -> float | None:
        """Dense peak of a compute format, or None where the matrix units lack it."""
        fact = self.dense.get(compute_format)
        return None if fact is None else fact.si


Scheduling = Literal["mixed", "prefill-first"]
# Whether a request is let in when its prompt fits, or only when all that it may become does.
Admission = Literal["growing", "whole"]
# What an engine's memory fraction is a fraction of: the GPU's memory, or what weights leave of it.
MemoryOf = Literal["gpu", "free"]
# What becomes of a format that an accelerator lacks: unpacked inside the kernel, or written out in 16 bits first.
Emulation = Literal["fused", "materialised"]

_DRAFT = Fact(
    value=0.3, unit="ms", basis="assumed", source="Crosstie, judgement", date="2026-11-16",
    note="choosing a token, preparing and launching the next pass",
)  # fmt: skip


class Host(msgspec.Struct, frozen=True, kw_only=True):
    """What one engine step costs outside the GPU's kernels."""

    step: Annotated[Fact, Quantity("seconds", 0, 0.1, "fixed cost of scheduling a step")]
    # Graphs do not cover prompts, so every kernel is launched by hand.
    prompt: Annotated[Fact, Quantity("seconds", 0, 0.1, "what a step that carries prompts costs beyond that")]
    sequence: Annotated[Fact, Quantity("seconds", 0, 0.01, "cost per sequence of a step")]
    # HTTP, tokenising, waiting for the step under way.
    request: Annotated[Fact, Quantity("seconds", 0, 10, "cost of a request before its first token")]
    # Whether the engine prepares the next step while the GPU runs this one; and the month since when it does.
    overlapped: bool
    overlapped_since: str = ""
    # Nothing hides it: a pass's launch waits for the tokens of the pass before.
    draft: Annotated[Fact, Quantity("seconds", 0, 0.1, "what a drafter's pass costs outside its kernels")] = _DRAFT


_ChunkTokens = Annotated[Fact, Quantity("tokens", 16, 1e6, "tokens that one step may prefill")]
_MaxSequences = Annotated[Fact, Quantity("count", 1, 1e6, "sequences that may decode at once")]


class SmallGpu(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that an engine lowers on GPUs with less memory than `below`."""

    below: Annotated[Fact, Quantity("bytes", 1e9, 1e12, "GPU memory under which these limits hold")]
    chunk_tokens: _ChunkTokens
    max_sequences: _MaxSequences


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
    chunk_tokens: _ChunkTokens
    max_sequences: _MaxSequences
    # None: the cache is given out token by token.
    block_tokens: Annotated[Fact | None, Quantity("tokens", 1, 4096, "tokens of a block of the KV cache")] = None
    memory_fraction: Annotated[Fact, Quantity("fraction", 0.1, 1.0, "share of GPU memory that the engine takes")]
    reserved: Annotated[Fact, Quantity("bytes", 0, 64e9, "activations, graphs and communication buffers per GPU")]
    # Of the whole replica; None: as many as without speculation.
    speculative_sequences: Annotated[
        Fact | None, Quantity("count", 1, 1e6, "sequences that may decode at once with speculation")
    ] = None
    host: Host
    # By vendor and format.
    emulation: dict[str, dict[str, Emulation]] = {}
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
    def block_size(self) -> int:
        """Tokens that the KV cache is given out in."""
        return int(self.block_tokens.value) if self.block_tokens is not None else 1

    @property
    def held_share(self) -> float:
        """Share of its output that a running request has in the cache, on average over its life."""
        return 1.0 if self.admission == "whole" else 0.5

    def materialises(self, format_id: str, vendor: str) -> bool:
        return self.emulation.get(vendor, {}).get(format_id) == "materialised"


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """The constants between a peak and what kernels reach. Each has a physical meaning."""

    # Dense products of large matrices over the dense peak, by compute format.
    compute: dict[str, Fact]
    experts: Annotated[Fact, Quantity("fraction", 0.01, 1.5, "rate of grouped products over that of plain ones")]
    # Weights that are streamed over the memory's bandwidth, by stored bits: 16, 8 or 4.
    weights: dict[str, Fact]
    attention: Annotated[Fact, Quantity("fraction", 0.01, 1.0, "prefill attention over the 16-bit dense peak")]
    cache: Annotated[Fact, Quantity("fraction", 0.01, 1.0, "reading the KV cache over the memory's bandwidth")]
    elementwise: Annotated[Fact, Quantity("fraction", 0.01, 1.0, "norms and activations over the memory's bandwidth")]
    kernel: Annotated[Fact, Quantity("seconds", 0, 1e-3, "time a kernel takes to start, ramp up and drain")]
    collective: Annotated[Fact, Quantity("seconds", 0, 1e-2, "time a collective takes with nothing to send")]
    link: Annotated[Fact, Quantity("fraction", 0.01, 1.0, "a collective over the scale-up bandwidth")]
    exchange: Annotated[
        Fact, Quantity("seconds", 0, 1e-2, "time an all-to-all between nodes takes one way with nothing to send")
    ]
    network: Annotated[Fact, Quantity("fraction", 0.01, 1.5, "rate of an all-to-all over a GPU's network port")]
    # Where each constant comes from: an accelerator, its family, or the default.
    scope: dict[str, str]
    # Highest share of the dense peak that a matrix product was measured to reach, by compute format.
    measured: dict[str, Fact] = {}

    def reached(self, compute_format: str) -> float:
        """That share; of a format that nobody measured, the best of the others; all of it where none was."""
        known = self.measured.get(compute_format)
        return known.value if known else max((fact.value for fact in self.measured.values()), default=1.0)


KV_FORMATS = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0}


def kv_bytes_per_element(kv_format: str) -> float:
    if kv_format not in KV_FORMATS:
        raise BadInput(f"unknown KV format '{kv_format}'; known: {', '.join(KV_FORMATS)}")
    return KV_FORMATS[kv_format]


def known_kv_format(given: str) -> str:
    kv_bytes_per_element(given)
    return given


# Of a layout in a file.
_Ranks = Annotated[int, msgspec.Meta(ge=1, le=1024)]
# Widths of expert parallelism up to which engines keep each expert once.
_NARROW = 8


class Parallelism(msgspec.Struct, frozen=True, kw_only=True, order=True):
    """tp: tensor-parallel ranks of attention. dp: attention replicas that share the experts.
    pp: pipeline stages. ep: groups over which experts are spread (1: experts split like the rest)."""

    tp: _Ranks = 1
    pp: _Ranks = 1
    ep: _Ranks = 1
    dp: _Ranks = 1

    @property
    def gpus(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def stage_gpus(self) -> int:
        return self.tp * self.dp

    @property
    def is_wide(self) -> bool:
        """Whether experts are spread so far that engines keep copies of the popular ones, to even the ranks out."""
        return self.ep > _NARROW and self.dp > 1

    def expert_places(self, experts: int) -> int:
        """Experts that a rank holds, copies included: of 256 experts 32 at EP8, 9 at EP32, 4 at EP72."""
        own, more = divmod(experts, self.ep)
        return own + 1 if more or self.is_wide else own

    def __str__(self) -> str:
        parts = [f"TP{self.tp}"] if self.tp > 1 or self.dp == 1 else []
        parts += [f"{name}{n}" for name, n in (("DP", self.dp), ("PP", self.pp), ("EP", self.ep)) if n > 1]
        return "·".join(parts)

    def check(self, model: Model, accelerator: Accelerator) -> None:
        """Refuses a split that the model or the machine cannot have, and says why."""
        for name, n in (("tp", self.tp), ("pp", self.pp), ("ep", self.ep), ("dp", self.dp)):
            if n < 1:
                raise BadInput(f"{name} {n}: must be at least 1")
        if model.heads % self.tp:
            raise BadInput(f"tp {self.tp} does not divide the {model.heads} attention heads of {model.id}")
        small, large = sorted((model.kv_heads, self.tp))
        if large % small:
            raise BadInput(f"tp {self.tp} and the {model.kv_heads} KV heads of {model.id} do not divide one another")
        if self.pp > model.layer_count:
            raise BadInput(f"pp {self.pp} exceeds the {model.layer_count} layers of {model.id}")
        if self.ep > 1:
            if not model.is_moe:
                raise BadInput(f"ep {self.ep}: {model.id} has no experts to spread")
            if model.experts % self.ep and not self.is_wide:
                raise BadInput(f"ep {self.ep} does not divide the {model.experts} experts of {model.id}")
            if self.ep > model.experts:
                raise BadInput(f"ep {self.ep} exceeds the {model.experts} experts of {model.id}")
            if self.stage_gpus % self.ep:
                raise BadInput(f"ep {self.ep} does not divide the {self.stage_gpus} GPUs of a stage (tp x dp)")
        if self.dp > 1 and not model.is_moe:
            raise BadInput(f"dp {self.dp}: attention replicas share experts, and {model.id} has none")
        if self.stage_gpus > accelerator.domain and (self.tp > accelerator.domain or self.ep != self.stage_gpus):
            raise BadInput(
                f"{self.stage_gpus} GPUs in one stage exceed the {accelerator.domain} that fast links join "
                f"on {accelerator.id}; use pipeline stages (pp) beyond that, or experts that are spread over all of "
                f"them (dp and ep)"
            )


# The matrices that adapters change: those of attention, or of the feed-forward part too.
LoraTargets = Literal["attention", "all"]


class Adapters(msgspec.Struct, frozen=True, kw_only=True):
    """Adapters (LoRA) that a replica has room for, and what they cost it."""

    slots: Annotated[int, msgspec.Meta(ge=1)]
    rank: Annotated[int, msgspec.Meta(ge=1)]
    targets: LoraTargets = "all"
    # Times a step's work on the GPU takes as long as without.
    slowdown: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    # Requests that an attention replica runs at once before they ask for more adapters than it has slots for.
    max_sequences: float = math.inf


class Deployment(msgspec.Struct, frozen=True, kw_only=True):
    model: Model
    accelerator: Accelerator
    parallelism: Parallelism
    precision: Precision
    kv_format: str
    stack: Stack
    efficiency: Efficiency
    correction: Correction = NONE
    # None: a step gives every sequence one token.
    speculation: Speculation | None = None
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        kv_bytes_per_element(self.kv_format)
        self.parallelism.check(self.model, self.accelerator)

    @property
    def kv_bytes_per_element(self) -> float:
        return kv_bytes_per_element(self.kv_format)

    @property
    def max_sequences(self) -> float:
        """Sequences that the engine runs at once, over all attention replicas."""
        most = self.stack.max_sequences_on(self.accelerator.memory_bytes) * self.parallelism.dp
        fewer = self.stack.speculative_sequences if self.speculation else None
        most = most if fewer is None else min(most, max(fewer.value, self.parallelism.dp))
        return min(most, self.adapters.max_sequences * self.parallelism.dp) if self.adapters else most

    @property
    def weight_width(self) -> str:
        """Bits of the weights that most of the work goes through: 16, 8 or 4."""
        return self.precision["experts_down" if self.model.is_moe else "mlp_down"].main.width

    @property
    def gpus(self) -> int:
        return self.parallelism.gpus

    @property
    def layout(self) -> str:
        return str(self.parallelism)

    @property
    def decode(self) -> "Deployment":
        """The replica that decodes, which is itself; of a disaggregated service, one of several."""
        return self

    def drafting(self, speculation: Speculation | None) -> "Deployment":
        return msgspec.structs.replace(self, speculation=speculation)

    @property
    def label(self) -> str:
        drafts = f" {self.speculation}" if self.speculation else ""
        return f"{self.parallelism.gpus} x {self.accelerator.id} {self.parallelism} {self.precision.id}{drafts}"
