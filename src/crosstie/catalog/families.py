"""What model families leave unsaid in their config.json, one row a family; and which ones cannot be read.

A new family of decoders is a row here, by its `model_type`, where keys of its config do not say everything.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Quirks:
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


_QWEN3_HYBRID = Quirks(head_norm=True, gated_output=True, shared_gate=True)
_GEMMA3 = Quirks(head_norm=True, full_attention_every=6, norms=4, tied=True)

# By model_type; one that ends in * stands for those that have no row of their own.
FAMILIES = {
    "bloom": Quirks(gated_mlp=False, tied=True),
    "cohere": Quirks(tied=True),
    "cohere2": Quirks(tied=True),
    "falcon": Quirks(gated_mlp=False, multi_query=False, norms=4, final_norms=2),
    "gemma": Quirks(tied=True),
    "gemma2": Quirks(full_attention_every=2, norms=4, tied=True),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "gemma4_text": Quirks(head_norm=True, norms=7, router_scale=True, tied=True),
    "glm4*": Quirks(may_have_head_norm=True),
    "gpt2": Quirks(gated_mlp=False, tied=True, positions_beyond=0),
    "gpt_bigcode": Quirks(gated_mlp=False, multi_query=True, tied=True, positions_beyond=0),
    "gpt_neo": Quirks(tied=True),
    "gpt_neox": Quirks(gated_mlp=False),
    "gpt_oss": Quirks(output_bias=True, sinks=True, router_bias=True, expert_bias=True),
    "gptj": Quirks(gated_mlp=False),
    "kimi_linear": Quirks(gated_output=True),
    "llama4_text": Quirks(dense_inner_key="intermediate_size_mlp", shared_expert=True),
    "mpt": Quirks(tied=True),
    "nemotron": Quirks(gated_mlp=False),
    "opt": Quirks(gated_mlp=False, tied=True, positions_beyond=2),
    "phi": Quirks(gated_mlp=False),
    "qwen*": Quirks(shared_gate=True),
    "qwen2": Quirks(qkv_bias=True, shared_gate=True),
    "qwen2_moe": Quirks(qkv_bias=True, shared_gate=True),
    "qwen3": Quirks(head_norm=True, shared_gate=True),
    "qwen3_5_moe_text": _QWEN3_HYBRID,
    "qwen3_5_text": _QWEN3_HYBRID,
    "qwen3_moe": Quirks(head_norm=True, shared_gate=True),
    "qwen3_next": _QWEN3_HYBRID,
    "starcoder2": Quirks(gated_mlp=False, tied=True),
}


def quirks_of(family: str) -> Quirks:
    relatives = (name for name in FAMILIES if name.endswith("*") and family.startswith(name[:-1]))
    return FAMILIES.get(family) or FAMILIES.get(next(relatives, ""), Quirks())


# Not decoder-only transformers: reading one by its keys would give numbers that mean nothing.
FOREIGN = {
    "albert", "bamba", "bart", "bert", "camembert", "clip", "deberta", "deberta-v2", "distilbert", "electra",
    "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "longformer", "mamba", "mamba2", "minimax",
    "minimax_text_01", "mllama", "modernbert", "mpnet", "mt5", "nemotron_h", "recurrent_gemma", "roberta", "rwkv",
    "siglip", "t5", "umt5",
    "vit", "whisper", "xlm-roberta", "zamba", "zamba2",
}  # fmt: skip
FOREIGN_HEADS = ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
# Keys that change what a layer is. One that no reader asked for means that the family is not understood.
STRUCTURAL = (
    "attn_config", "attn_layer_period", "attn_type_list", "block_configs", "block_types", "conv_L_cache",
    "cross_attention_layers", "expert_layer_period", "ffn_config", "full_attn_idxs", "hybrid_layer_pattern",
    "hybrid_override_pattern", "layer_group_size", "layers_block_type", "mamba_", "moe_k", "moe_num_experts",
    "num_experts_list", "parallel_attn_mlp_res", "ssm_", "swa_",
)  # fmt: skip
