"""What a GGUF file says of its model, in the keys of a Hugging Face config.json, so that one reader serves both."""

from collections.abc import Mapping
from typing import Any

from crosstie.port.checkpoint.gguf import Gguf

# GGUF's architecture -> model_type of Hugging Face, where the catalog's readers tell families apart by it.
_FAMILIES = {
    "llama": "llama", "qwen2": "qwen2", "qwen2moe": "qwen2_moe", "qwen3": "qwen3", "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss", "deepseek2": "deepseek_v3", "gemma2": "gemma2", "gemma3": "gemma3_text",
    "mistral3": "mistral", "llama4": "llama4_text", "glm4moe": "glm4_moe", "minimax-m2": "minimax_m2",
}  # fmt: skip
_KEYS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.indexer.top_k": "index_topk",
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "attn_logit_softcapping": "attn_logit_softcapping",
}


def config_of(gguf: Gguf) -> dict[str, Any]:
    """Keys that the file gives, and no others; what is not here is unknown to every rule that asks for it."""
    architecture = str(gguf.metadata.get("general.architecture", ""))
    found: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": _FAMILIES.get(architecture, architecture),
        "torch_dtype": "bfloat16",
    }
    for key, name in _KEYS.items():
        value = gguf.metadata.get(f"{architecture}.{key}")
        if value is not None and not isinstance(value, list):
            found[name] = value
    found.update(_latent(gguf.metadata, architecture))
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding and len(embedding[1]) == 2:
        # GGUF writes the fastest dimension first.
        found["vocab_size"] = embedding[1][1]
    found["tie_word_embeddings"] = "output.weight" not in gguf.tensors
    return found


def _latent(metadata: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """MLA's head sizes: the cached key is the latent and the rotary part, the per-head key has its own length."""
    key, value = (metadata.get(f"{architecture}.attention.{name}_length_mla") for name in ("key", "value"))
    rotary = metadata.get(f"{architecture}.rope.dimension_count")
    if not isinstance(key, int) or not isinstance(value, int) or not isinstance(rotary, int):
        return {}
    return {"qk_rope_head_dim": rotary, "qk_nope_head_dim": key - rotary, "v_head_dim": value, "head_dim": None}
