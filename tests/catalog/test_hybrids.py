"""Hybrids, state-space models and DBRX, by the fields of their published configs; sizes as the hub's pages give them."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command

from crosstie.catalog.huggingface import read_model
from crosstie.core.model import Model

_PLAIN: dict[str, Any] = {"torch_dtype": "bfloat16", "tie_word_embeddings": False, "hidden_act": "silu"}
_MAMBA2 = {
    "mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128,
    "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False,
}  # fmt: skip
JAMBA = {
    **_PLAIN, "architectures": ["JambaForCausalLM"], "model_type": "jamba", "attn_layer_offset": 4,
    "attn_layer_period": 8, "expert_layer_offset": 1, "expert_layer_period": 2, "hidden_size": 4096,
    "intermediate_size": 14336, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256,
    "mamba_expand": 2, "mamba_proj_bias": False, "max_position_embeddings": 262144, "num_attention_heads": 32,
    "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "sliding_window": None, "use_mamba_kernels": True, "vocab_size": 65536,
}  # fmt: skip
CODESTRAL = {
    **_PLAIN, "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "chunk_size": 256, "conv_kernel": 4,
    "expand": 2, "head_dim": 64, "hidden_size": 4096, "intermediate_size": 8192, "n_groups": 8, "num_heads": 128,
    "num_hidden_layers": 64, "rms_norm": True, "state_size": 128, "time_step_rank": 256, "use_bias": False,
    "use_conv_bias": True, "vocab_size": 32768,
}  # fmt: skip
NEMOTRON = {
    **_PLAIN, "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False,
    "chunk_size": 128, "conv_kernel": 4, "expand": 2, "head_dim": 128, "hidden_size": 4480, "intermediate_size": 15680,
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "mamba_head_dim": 80,
    "mamba_hidden_act": "silu", "mamba_num_heads": 128, "mamba_proj_bias": False, "max_position_embeddings": 131072,
    "mlp_bias": False, "mlp_hidden_act": "relu2", "n_groups": 8, "num_attention_heads": 40, "num_hidden_layers": 56,
    "num_key_value_heads": 8, "ssm_state_size": 128, "use_bias": False, "use_conv_bias": True, "vocab_size": 131072,
}  # fmt: skip
NANO = {
    **NEMOTRON, "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2, "mamba_num_heads": 64,
    "mamba_head_dim": 64, "intermediate_size": 1856, "n_routed_experts": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "num_hidden_layers": 52,
}  # fmt: skip
GRANITE = {
    **_PLAIN, **_MAMBA2, "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid",
    "attention_multiplier": 0.0078125, "hidden_size": 4096, "intermediate_size": 768,
    "layer_types": ["attention" if i in (5, 15, 25, 35) else "mamba" for i in range(40)],
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_experts_per_tok": 10, "num_hidden_layers": 40,
    "num_key_value_heads": 8, "num_local_experts": 72, "position_embedding_type": "nope", "tie_word_embeddings": True,
    "shared_intermediate_size": 1536, "vocab_size": 100352,
}  # fmt: skip
MICRO = {
    **GRANITE, "hidden_size": 2048, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 8192,
    "mamba_n_heads": 64,
}  # fmt: skip
DBRX = {
    **_PLAIN, "architectures": ["DbrxForCausalLM"], "model_type": "dbrx", "d_model": 6144, "max_seq_len": 32768,
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "model_type": "", "rope_theta": 500000}, "n_heads": 48,
    "ffn_config": {"ffn_hidden_size": 10752, "model_type": "", "moe_num_experts": 16, "moe_top_k": 4}, "n_layers": 40,
    "vocab_size": 100352,
}  # fmt: skip
FALCON_H1 = {
    **_PLAIN, **_MAMBA2, "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "head_dim": 128,
    "hidden_size": 3072, "intermediate_size": 12288, "mamba_d_head": 128, "mamba_d_ssm": 3072, "mamba_d_state": 256,
    "mamba_n_heads": 24, "mamba_rms_norm": False, "mamba_norm_before_gate": False, "max_position_embeddings": 262144,
    "num_attention_heads": 12, "num_hidden_layers": 44, "num_key_value_heads": 2, "projectors_bias": False,
    "ssm_multipliers": [0.35, 0.25, 0.17, 0.5, 0.35], "ssm_in_multiplier": 1.25, "vocab_size": 130048,
}  # fmt: skip
LFM2 = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "block_auto_adjust_ff_dim": True, "block_dim": 2048,
    "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256, "conv_L_cache": 3,
    "conv_bias": False, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "num_attention_heads": 32,
    "num_hidden_layers": 16, "num_key_value_heads": 8, "max_position_embeddings": 128000, "torch_dtype": "bfloat16",
    "vocab_size": 65536,
}  # fmt: skip
MAMBA = {
    "architectures": ["MambaForCausalLM"], "model_type": "mamba", "conv_kernel": 4, "expand": 2, "hidden_size": 2560,
    "intermediate_size": 5120, "n_layer": 64, "num_hidden_layers": 64, "ssm_cfg": {}, "state_size": 16,
    "time_step_rank": 160, "torch_dtype": "float32", "use_bias": False, "use_conv_bias": True, "vocab_size": 50280,
}  # fmt: skip


def read(config: dict[str, Any]) -> Model:
    return read_model(config, "config.json", id="m", name="m", source="s", date="2026-01")[0]


@pytest.mark.parametrize(
    ("config", "billions", "layers"),
    [
        (JAMBA, 51.6, {"gqa": 4, "mamba": 28}),
        (CODESTRAL, 7.29, {"mamba2": 64}),
        (NEMOTRON, 8.89, {"mamba2": 27, "no attention": 25, "gqa": 4}),
        (NANO, 31.6, {"mamba2": 23, "no attention": 23, "gqa": 6}),
        (GRANITE, 32.2, {"mamba2": 36, "gqa": 4}),
        (MICRO, 3.19, {"mamba2": 36, "gqa": 4}),
        (DBRX, 131.6, {"gqa": 40}),
        (FALCON_H1, 7.59, {"gqa beside mamba2": 44}),
        (LFM2, 1.17, {"short convolution": 10, "gqa": 6}),
        (MAMBA, 2.77, {"mamba": 64}),
    ],
)  # fmt: skip
def test_published_sizes_and_patterns(config: dict[str, Any], billions: float, layers: dict[str, int]) -> None:
    model = read(config)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    found: dict[str, int] = {}
    for layer in model.layers:
        kind = layer.kind.partition(" + ")[0]
        found[kind] = found.get(kind, 0) + layer.count
    assert found == layers
    assert sorted(number for layer in model.layers for number in layer.at) == list(range(model.layer_count))


def test_a_state_does_not_grow_with_the_context() -> None:
    """64 layers of 128 heads of 64 x 128 in 32 bits, and three steps of 10,240 channels in 16."""
    model = read(CODESTRAL)
    state = 64 * (128 * 64 * 128 * 4 + 3 * 10240 * 2)
    assert model.cache_bytes(1) == model.cache_bytes(100_000) == state


def test_only_the_layers_of_attention_keep_keys_and_values() -> None:
    """Jamba: 4 layers of 8 key-value heads of 128, in 16 bits."""
    model = read(JAMBA)
    assert model.cache_bytes(2000) - model.cache_bytes(1000) == 1000 * 4 * 2 * 8 * 128 * 2


@pytest.mark.parametrize("as_folder", [True, False])
@pytest.mark.parametrize(
    ("config", "verdict"),
    [
        (JAMBA, "ready"), (CODESTRAL, "ready"), (NEMOTRON, "ready"), (GRANITE, "ready"), (DBRX, "ready"),
        ({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "d_model": 1280, "decoder_layers": 32,
          "is_encoder_decoder": True, "torch_dtype": "float16", "vocab_size": 51866}, "not known"),
        ({"architectures": ["Zamba2ForCausalLM"], "model_type": "zamba2", "hidden_size": 3584, "num_hidden_layers": 81,
          "mamba_d_state": 64, "vocab_size": 32000}, "not known"),
        ({**_PLAIN, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096,
          "intermediate_size": 14336, "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
          "vocab_size": 128256, "quantization_config": {"quant_method": "aqlm"}}, "will not run"),
    ],
)  # fmt: skip
def test_a_config_alone_gets_the_verdict_that_its_facts_allow(
    crosstie: Command, tmp_path: Path, config: dict[str, Any], verdict: str, as_folder: bool
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    asked = tmp_path if as_folder else tmp_path / "config.json"
    told = crosstie("preflight", str(asked), "--on", "h200", "--json")
    assert json.loads(told.out)["verdicts"] == {"h200": verdict}, told.err


def test_a_pattern_that_transformers_says_twice_is_one() -> None:
    words = ["full_attention" if index in (2, 5, 8, 10, 12, 14) else "conv" for index in range(16)]
    assert read(LFM2 | {"layer_types": words}) == read(LFM2)
