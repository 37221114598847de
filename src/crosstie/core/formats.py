"""Number formats: how many bits a stored weight takes and which matrix unit multiplies it."""

from collections.abc import Iterable

import msgspec

# The formats that matrix units compute in; an accelerator file gives a dense rate for each it has.
COMPUTE_FORMATS = ("fp32", "bf16", "fp16", "fp8", "fp4", "int8")


class Format(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One storage format. `runs_as` lists compute formats in order of preference."""

    id: str
    title: str
    element_bits: float
    # Bits of scale and zero-point metadata, and the weights that share them.
    scale_bits: float = 0.0
    group: int = 1
    runs_as: tuple[str, ...]
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
