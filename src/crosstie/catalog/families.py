"""What model families leave unsaid in their config.json, by model_type; and which ones cannot be read."""

# Families whose MLP has no gate projection.
UNGATED = {"falcon", "gpt2", "gpt_neox", "gptj", "opt", "bloom", "gpt_bigcode", "starcoder2", "phi", "nemotron"}
HEAD_NORM = {
    "qwen3", "qwen3_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "gemma3", "gemma3_text", "gemma4_text",
}  # fmt: skip
# Families that share embedding and head unless the config says otherwise.
TIED = {
    "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4_text", "gpt2", "gpt_bigcode", "gpt_neo", "opt", "bloom", "mpt",
    "cohere", "cohere2", "starcoder2",
}  # fmt: skip
NORMS = {"gemma2": 4, "gemma3": 4, "gemma3_text": 4, "gemma4_text": 7, "falcon": 4}
# Families whose attention output is gated, whether the config says so or not.
GATED_OUTPUT = {"qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"}
# Families with one key-value head unless the config says otherwise.
MULTI_QUERY = {"gpt_bigcode": True, "falcon": False}
# Families with a learnt table of positions, and the rows that it has beyond the longest context.
POSITIONS = {"gpt2": 0, "gpt_bigcode": 0, "opt": 2}
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
