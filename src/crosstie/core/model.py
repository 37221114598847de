"""What a model demands, in a form that holds any attention or feed-forward kind, and how its weights are stored.

A layer is its weight tensors, what it scans in the KV cache, and the state it carries. Readers in
`catalog` turn a config.json into these; `perf` and memory arithmetic know nothing of architectures,
so a new attention kind is a new reader and nothing else.
"""

from collections.abc import Iterable, Iterator
from typing import Annotated, Literal, get_args

import msgspec

from crosstie.core.errors import BadInput

# The formats that matrix units compute in; an accelerator file gives a dense rate for each it has.
ComputeFormat = Literal["fp32", "bf16", "fp16", "fp8", "fp4", "int8"]
COMPUTE_FORMATS: tuple[str, ...] = get_args(ComputeFormat)


class Format(msgspec.Struct, frozen=True, kw_only=True):
    """One storage format. `runs_as` lists compute formats in order of preference."""

    id: str
    title: str
    element_bits: Annotated[float, msgspec.Meta(ge=1, le=64)]
    # Bits of scale and zero-point metadata, and the weights that share them.
    scale_bits: Annotated[float, msgspec.Meta(ge=0, le=4096)] = 0.0
    group: Annotated[int, msgspec.Meta(ge=1, le=10**6)] = 1
    runs_as: tuple[ComputeFormat, ...]
    # The FP4 dialect that the matrix unit must have ("" where any will do).
    dialect: str = ""
    source: str
    date: str
    note: str = ""

    @property
    def bits(self) -> float:
        return self.element_bits + self.scale_bits / self.group

    @property
    def bytes(self) -> float:
        return self.bits / 8

    @property
    def width(self) -> str:
        """The class of formats that stream alike: 16, 8 or 4 bits."""
        return "16" if self.bits > 10 else ("8" if self.bits > 6 else "4")


# What a tensor is for. A precision says which format each role is stored in.
ROLES = {
    "embedding": "token embedding table",
    "head": "output projection to the vocabulary",
    "attention": "attention projections not named below",
    "key": "attention key projection",
    "value": "attention value projection",
    "output": "attention output projection",
    "mlp": "dense feed-forward, gate and up",
    "mlp_down": "dense feed-forward, down",
    "shared": "shared experts, gate and up",
    "shared_down": "shared experts, down",
    "experts": "routed experts, gate and up",
    "experts_down": "routed experts, down",
    "router": "expert router",
    "auxiliary": "matrices of gates, indexers' weights, compressors and latent projections",
    "small": "norms, biases, convolutions and other vectors",
}
ATTENTION_ROLES = ("attention", "key", "value", "output")
LINEAR_ROLES = (*ATTENTION_ROLES, "mlp", "mlp_down", "shared", "shared_down", "experts", "experts_down")


class Mix(msgspec.Struct, frozen=True, kw_only=True):
    """A role stored in more than one format: llama.cpp spreads two over the layers."""

    formats: tuple[Format, ...]
    fractions: tuple[float, ...]

    @property
    def bytes(self) -> float:
        return sum(f.bytes * share for f, share in zip(self.formats, self.fractions, strict=True))

    @property
    def main(self) -> Format:
        return max(zip(self.fractions, self.formats, strict=True), key=lambda pair: pair[0])[1]


def only(format: Format) -> Mix:
    return Mix(formats=(format,), fractions=(1.0,))


class Precision(msgspec.Struct, frozen=True, kw_only=True):
    """Which format each role of one model is stored in, under the name a user asks for."""

    id: str
    by_role: dict[str, Mix]

    def __getitem__(self, role: str) -> Mix:
        return self.by_role[role]

    def formats_of(self, roles: Iterable[str]) -> dict[str, Format]:
        """The formats that these roles are stored in, by id."""
        return {format.id: format for role in sorted(roles) for format in self.by_role[role].formats}


Shard = Literal["none", "out", "in", "vocab"]


class Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """A weight matrix of `rows` outputs and `cols` inputs, or a vector where `cols` is 1."""

    name: str
    role: str
    rows: int
    cols: int = 1
    # Experts: how many copies there are and how many a token visits.
    copies: int = 1
    active: int = 1
    # How tensor parallelism splits it, and into how many different parts at most.
    shard: Shard = "none"
    max_shards: int = 1 << 30
    # Tensors of a layer with the same kernel run as one matrix product; "" is no matrix product.
    kernel: str = ""
    # How many weights store this one: a block-diagonal matrix has fewer than rows x cols.
    density: float = 1.0

    @property
    def parameters(self) -> int:
        return round(self.rows * self.cols * self.copies * self.density)

    @property
    def active_parameters(self) -> int:
        return round(self.rows * self.cols * self.active * self.density)

    @property
    def is_multiplied(self) -> bool:
        """Whether tokens are multiplied by it: an embedding only where it is the head too."""
        return self.role != "embedding" or bool(self.kernel)


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """What attention keeps and reads per token of context.

    One cache row stands for `stride` tokens. Rows beyond `window` tokens are dropped; of those kept,
    a query reads at most `top_rows`. FLOPs are per query token and row read.
    """

    name: str
    row_bytes_16bit: float
    row_bytes_8bit: float
    decode_flop: float
    prefill_flop: float
    stride: int = 1
    window: int | None = None
    # Llama-4's chunks: past the window a query sees half of it on average, not all of it.
    window_read_fraction: float = 1.0
    top_rows: int | None = None
    # Heads that tensor parallelism can share out: of the cache rows, and of the arithmetic.
    kv_heads: int = 1
    query_heads: int = 1
    compute: str = "bf16"
    # False: another layer keeps the rows that this one reads.
    kept: bool = True

    def row_bytes(self, kv_bytes_per_element: float) -> float:
        return self.row_bytes_16bit if kv_bytes_per_element > 1 else self.row_bytes_8bit


class State(msgspec.Struct, frozen=True, kw_only=True):
    """A recurrent state of fixed size per sequence, read and written at every token."""

    bytes: float
    decode_flop: float
    prefill_flop: float
    heads: int = 1


class Layer(msgspec.Struct, frozen=True, kw_only=True):
    """`count` identical layers."""

    kind: str
    count: int
    # Which layers they are, from 0; empty where nobody said.
    at: tuple[int, ...] = ()
    tensors: tuple[Tensor, ...]
    scans: tuple[Scan, ...] = ()
    state: State | None = None
    # Bytes of activations that norms, rotary embedding and activation functions move per token,
    # split into what every rank moves and what tensor parallelism divides; and their kernels.
    elementwise_bytes: float = 0.0
    elementwise_sharded_bytes: float = 0.0
    elementwise_kernels: int = 5
    # Kernels that route, sort and gather tokens around the experts.
    routing_kernels: int = 0


class Model(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    name: str
    aliases: tuple[str, ...] = ()
    architecture: str
    hidden: int
    vocabulary: int
    heads: int
    kv_heads: int
    max_context: int | None
    layers: tuple[Layer, ...]
    # Tensors outside the layers: embedding, final norm, head.
    outer: tuple[Tensor, ...]
    # Weights that are loaded only for speculative decoding (multi-token prediction).
    draft_tensors: tuple[Tensor, ...] = ()
    experts: int = 0
    experts_per_token: int = 0
    # How the checkpoint stores each role: formats with the share of the layers that use them.
    native: dict[str, dict[str, float]]
    native_name: str
    source: str
    date: str
    licence: str = ""
    notes: tuple[str, ...] = ()
    file: str = ""

    @property
    def layer_count(self) -> int:
        return sum(layer.count for layer in self.layers)

    @property
    def parameters(self) -> int:
        return sum(t.parameters * n for t, n in self.tensors())

    @property
    def active_parameters(self) -> int:
        """Weights that one token multiplies by."""
        return sum(t.active_parameters * n for t, n in self.tensors() if t.is_multiplied)

    @property
    def draft_parameters(self) -> int:
        """Weights beside the model that only speculative decoding loads."""
        return sum(t.parameters for t in self.draft_tensors)

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    def tensors(self) -> Iterator[tuple[Tensor, int]]:
        """Every tensor with the number of layers that have it."""
        for tensor in self.outer:
            yield tensor, 1
        for layer in self.layers:
            for tensor in layer.tensors:
                yield tensor, layer.count

    @property
    def roles(self) -> frozenset[str]:
        return frozenset(tensor.role for tensor, _ in self.tensors())

    def check_context(self, tokens: int, asked: str) -> None:
        """Refuses a context that the model does not have; `asked` is how the user put it."""
        if tokens < 1:
            raise BadInput(f"{asked}: must be at least 1")
        if self.max_context is not None and tokens > self.max_context:
            raise BadInput(f"{asked} is {tokens} tokens, beyond the {self.max_context} that {self.id} supports")

    def cache_parts(self, kv_bytes_per_element: float) -> Iterator["CachePart"]:
        """What a sequence keeps, part by part, over all layers."""
        for layer in self.layers:
            for scan in (one for one in layer.scans if one.kept):
                grows = layer.count * scan.row_bytes(kv_bytes_per_element) / scan.stride
                yield CachePart(bytes_per_token=grows, window=scan.window, holders=scan.kv_heads)
            if layer.state is not None:
                yield CachePart(fixed_bytes=layer.count * layer.state.bytes, holders=layer.state.heads)

    def cache_bytes(self, context: float, kv_bytes_per_element: float = 2.0) -> float:
        """Bytes that one sequence of `context` tokens keeps, over all layers, counted once."""
        return sum(part.bytes_at(context) for part in self.cache_parts(kv_bytes_per_element))


class CachePart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a sequence's cache that grows up to a window, or a state of fixed size."""

    bytes_per_token: float = 0.0
    window: int | None = None
    fixed_bytes: float = 0.0
    # Heads that tensor parallelism can share it out over; further ranks keep copies.
    holders: int = 1

    def bytes_at(self, context: float) -> float:
        kept = context if self.window is None else min(context, self.window)
        return self.fixed_bytes + self.bytes_per_token * kept
