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
# Not decoder-only transformers: reading one by its keys would give numbers that mean nothing.
FOREIGN = {
    "bert", "roberta", "xlm-roberta", "distilbert", "albert", "electra", "deberta", "deberta-v2", "t5", "mt5", "umt5",
    "bart", "whisper", "clip", "siglip", "vit", "mamba", "mamba2", "rwkv", "jamba", "zamba", "zamba2", "falcon_h1",
    "nemotron_h", "bamba", "granitemoehybrid", "minimax", "minimax_text_01",
}  # fmt: skip
# Keys that change what a layer is. One that no reader asked for means that the family is not understood.
STRUCTURAL = (
    "mamba_", "ssm_", "attn_layer_period", "expert_layer_period", "hybrid_override_pattern", "layers_block_type",
    "block_configs", "attn_type_list", "moe_num_experts", "moe_k", "num_experts_list", "attn_config", "ffn_config",
)  # fmt: skip
