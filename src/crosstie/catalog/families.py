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
    may_have_head_norm: bool = False
    sinks: bool = False
    gated_output: bool = False
    # One key-value head unless the config says otherwise; None: `multi_query` is no key of this family.
    multi_query: bool | None = None
    # Every n-th layer sees everything, the others a window.
    full_attention_every: int | None = None
    # Feed-forward.
    gated_mlp: bool = True
    # Dense layers have a key of their own, and the shared expert is as wide as a routed one.
    dense_inner_key: str = "intermediate_size"
    shared_expert: bool = False
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


_DATA = read_toml(Path(__file__).parent / "data" / "families.toml")
FAMILIES = msgspec.convert(_DATA["families"], dict[str, Quirks])
FOREIGN, FOREIGN_HEADS, STRUCTURAL = (tuple(_DATA[key]) for key in ("foreign", "foreign_heads", "structural"))
