"""What model families leave unsaid in their config.json, one row a family; and which ones cannot be read.

A new family of decoders is a row of data/families.toml, by its `model_type`, where its config does not say everything.
"""

from pathlib import Path

import msgspec

from crosstie.catalog.reading import read_toml


class Quirks(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a family differs from a Llama and its config.json does not say so."""

    # Attention.
    qkv_bias: bool = False
    output_bias: bool = False
    # Queries and keys are normalised head by head; for some only where `use_qk_norm` is set.
    head_norm: bool = False
    # Or over all heads together.
    full_norm: bool = False
    may_have_full_norm: bool = False
    may_have_head_norm: bool = False
    sinks: bool = False
    gated_output: bool = False
    # Its `gating` says whether a head's output is gated as a whole or element by element.
    gating: bool = False
    # Every matrix of a layer has a bias, unless `use_bias` or `bias` say otherwise; None: they are no keys of it.
    linear_bias: bool | None = None
    # One key-value head unless the config says otherwise; None: `multi_query` is no key of this family.
    multi_query: bool | None = None
    # Every n-th layer sees everything, the others a window.
    full_attention_every: int | None = None
    # Feed-forward.
    gated_mlp: bool = True
    # Dense layers have a key of their own, and the shared expert is as wide as a routed one.
    dense_inner_key: str = "intermediate_size"
    shared_expert: bool = False
    # Without experts the shared one is the feed-forward; its width may be rounded up.
    shared_alone: bool = False
    inner_rounded: bool = False
    shared_gate: bool = False
    router_bias: bool = False
    router_scale: bool = False
    expert_bias: bool = False
    # Around them: vectors of norms in a layer and after the last, and whether embedding and head are one
    # unless the config says otherwise.
    norms: int = 2
    final_norms: int = 1
    tied: bool = False
    # Rows that a learnt table of positions has beyond the longest context; None: there is no such table.
    positions_beyond: int | None = None


def quirks_of(family: str) -> Quirks:
    relatives = (name for name in FAMILIES if name.endswith("*") and family.startswith(name[:-1]))
    return FAMILIES.get(family) or FAMILIES.get(next(relatives, ""), Quirks())


def is_counted(family: str) -> bool:
    """Whether the readers count every tensor of such a model: one too many or too few is a fault of its files."""
    return family in COUNTED


_DATA = read_toml(Path(__file__).parent / "data" / "families.toml")
FAMILIES = msgspec.convert(_DATA["families"], dict[str, Quirks])
FOREIGN, FOREIGN_HEADS, STRUCTURAL = (tuple(_DATA[key]) for key in ("foreign", "foreign_heads", "structural"))
COUNTED, HYBRID = frozenset(_DATA["counted"]), frozenset(_DATA["hybrid"])
WITH_OBJECTS, SPELT_APART, IN_OBJECTS = (_DATA["objects"][key] for key in ("families", "usual", "inside"))
