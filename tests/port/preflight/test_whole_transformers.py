"""Whole checkpoints that transformers itself writes: each family that is called counted is counted to the last element.

Names are those of the hub: transformers undoes its own renaming when it saves.
"""
# mypy: allow-untyped-calls

import json
from pathlib import Path
from typing import Any

import pytest

from crosstie.catalog.families import COUNTED
from crosstie.catalog.huggingface import read_model
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData
from crosstie.port.preflight.stored import read_stored
from crosstie.port.preflight.whole import whole_findings

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.transformers

_PLAIN: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
_HEAD = {**_PLAIN, "head_dim": 32}
_MOE = {**_PLAIN, "num_local_experts": 4, "num_experts_per_tok": 2}
_FINE = {**_HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_SHARED = {**_FINE, "shared_expert_intermediate_size": 48}
_ROUTED = {
    **_PLAIN, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_LATENT = {
    **_ROUTED, "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16,
}  # fmt: skip
_INDEXED = {**_LATENT, "index_n_heads": 4, "index_head_dim": 16, "mlp_layer_types": ["dense", "sparse"]}
_DELTA = {
    "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
_STATE = {**_PLAIN, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
_BARE = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 128, "state_size": 8}
_GPT = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64}
_FALCON = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
_JAMBA = {
    **_PLAIN, "num_hidden_layers": 4, "num_experts": 4, "mamba_d_state": 8, "attn_layer_period": 2,
    "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
}  # fmt: skip
_NEMOTRON = {
    **_HEAD, "num_hidden_layers": 4, "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 48,
}  # fmt: skip
_GRANITE = {**_STATE, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 32}
_CONV = {**_PLAIN, "layer_types": ["conv", "full_attention"]}
# By model_type: one configuration or more, so that each key that changes a layer is seen both ways.
CASES: dict[str, list[dict[str, Any]]] = {
    **{
        family: [_PLAIN]
        for family in (
            "arcee", "cohere2", "cwm", "exaone4", "glm", "glm4", "granite", "jais2", "mistral", "nemotron",
            "olmo", "olmo2", "olmo3", "qwen2", "smollm3", "phi3",
        )
    },
    **{family: [_HEAD] for family in ("gemma", "gemma2", "ministral", "ministral3", "qwen3", "vaultgemma")},
    **{family: [_MOE] for family in ("granitemoe", "minimax_m2", "mixtral")},
    **{family: [_LATENT, {**_LATENT, "q_lora_rank": None}] for family in ("deepseek_v2", "deepseek_v3")},
    "bamba": [{**_STATE, "attn_layer_indices": [1]}],
    "cohere": [_PLAIN, {**_PLAIN, "use_qk_norm": True}],
    "deepseek_v32": [_INDEXED],
    "dots1": [_ROUTED],
    "ernie4_5": [_HEAD, {**_HEAD, "use_bias": True}],
    "falcon": [
        {**_FALCON, "num_kv_heads": 2, "new_decoder_architecture": True},
        {**_FALCON, "multi_query": True, "parallel_attn": True, "new_decoder_architecture": False, "bias": True},
    ],
    "falcon_h1": [
        {**_STATE, "mamba_d_ssm": 96, "mamba_n_heads": 6},
        {**_STATE, "mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_rms_norm": True, "mamba_proj_bias": True, "mlp_bias": True},
    ],
    "falcon_mamba": [_BARE],
    "gemma3_text": [_HEAD, {**_HEAD, "attention_bias": True}],
    "glm4_moe": [_ROUTED, {**_ROUTED, "use_qk_norm": True, "attention_bias": True}],
    "glm_moe_dsa": [_INDEXED],
    "gpt2": [_GPT],
    "gpt_bigcode": [_GPT, {**_GPT, "multi_query": False}],
    "gpt_neox": [{key: value for key, value in _PLAIN.items() if key != "num_key_value_heads"}],
    "gpt_oss": [{**_MOE, "head_dim": 32}],
    "granitemoehybrid": [{**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}, {**_GRANITE, "num_local_experts": 0}],
    "granitemoeshared": [{**_MOE, "shared_intermediate_size": 32}],
    "jamba": [_JAMBA, {**_JAMBA, "num_experts": 1, "mamba_proj_bias": True}],
    "lfm2": [{**_CONV, "intermediate_size": 960, "block_multiple_of": 64}, {**_CONV, "conv_bias": True}],
    "lfm2_moe": [{**_CONV, **_FINE, "num_dense_layers": 1}],
    "llama": [_PLAIN, {**_HEAD, "attention_bias": True, "mlp_bias": True}],
    "llama4_text": [{**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 96, "interleave_moe_layer_step": 2}],
    "mamba": [_BARE, {**_BARE, "use_bias": True, "use_conv_bias": False}],
    "mamba2": [
        {**_BARE, "num_heads": 8, "head_dim": 16, "n_groups": 2},
        {**_BARE, "num_heads": 8, "head_dim": 16, "n_groups": 2, "use_bias": True, "use_conv_bias": False},
    ],
    "mellum": [_FINE],
    "nemotron_h": [_NEMOTRON, {**_NEMOTRON, "moe_latent_size": 24, "use_bias": True}],
    "olmoe": [{**_PLAIN, "num_experts": 4, "num_experts_per_tok": 2}],
    "phimoe": [_MOE, {**_MOE, "attention_bias": True, "lm_head_bias": True}],
    "qwen2_moe": [_SHARED],
    "qwen3_5_moe_text": [{**_SHARED, **_DELTA}],
    "qwen3_5_text": [{**_HEAD, **_DELTA}],
    "qwen3_moe": [_FINE],
    "qwen3_next": [{**_SHARED, **_DELTA}],
    "seed_oss": [_HEAD, {**_HEAD, "attention_bias": True, "attention_out_bias": True}],
    "starcoder2": [_PLAIN, {**_PLAIN, "use_bias": False}],
}  # fmt: skip
# Kimi-K2 is DeepSeek-V3 under another name; transformers cannot build DBRX, which test_whole.py has; V4 is below.
_ELSEWHERE = {"kimi_k2", "dbrx", "deepseek_v4"}


def test_every_family_that_is_called_counted_is_tried() -> None:
    assert set(CASES) | _ELSEWHERE == COUNTED


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("family", sorted(CASES))
def test_what_transformers_writes_is_whole(catalog: Catalog, tmp_path: Path, family: str) -> None:
    for number, keys in enumerate(CASES[family]):
        folder = tmp_path / str(number)
        config = transformers.CONFIG_MAPPING[family](**keys)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        stored = read_stored(catalog, str(folder))
        model = stored.model(catalog)
        assert whole_findings(stored, model) == []
        assert stored.checkpoint
        held = sum(info.elements for info in stored.checkpoint.tensors.values())
        # The bias of what leaves attention, and of the head, is not counted: it is there in some families only.
        spare = sum(
            i.elements
            for name, i in stored.checkpoint.tensors.items()
            if name.endswith(("o_proj.bias", "lm_head.bias"))
        )
        assert model.parameters in (held, held - spare)


def test_deepseek_v4_in_the_keys_that_its_makers_publish(catalog: Catalog, tmp_path: Path) -> None:
    """transformers spells the ratios of compression and the hashed layers out, layer by layer."""
    shared = {
        "vocab_size": 128, "hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 32, "q_lora_rank": 24, "num_experts_per_tok": 2,
        "n_routed_experts": 4, "n_shared_experts": 1, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 4,
        "index_head_dim": 16, "index_topk": 8, "sliding_window": 16, "max_position_embeddings": 64, "hc_mult": 4,
        "tie_word_embeddings": False,
    }  # fmt: skip
    spelt_out = {
        "layer_types": ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "sliding_attention"],
        "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    }  # fmt: skip
    config = transformers.CONFIG_MAPPING["deepseek_v4"](**shared, **spelt_out)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    stored = read_stored(catalog, str(tmp_path))
    assert whole_findings(stored, stored.model(catalog)) == []
    published = {
        **shared, "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "qk_rope_head_dim": 4,
        "num_hash_layers": 2, "topk_method": "noaux_tc", "compress_ratios": [0, 4, 128, 0],
    }  # fmt: skip
    for keys, severities in (
        ({}, []),
        ({"num_hash_layers": 1}, ["error"]),
        ({"compress_ratios": [0, 4, 4, 0]}, ["error"]),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**published, **keys}))
        stored = read_stored(catalog, str(tmp_path))
        found = whole_findings(stored, stored.model(catalog))
        assert [one.severity for one in found[:1]] == severities, found


def test_what_is_taken_from_it_is_missed(catalog: Catalog, tmp_path: Path) -> None:
    """Of a hybrid, where the parts of a layer go by names of their own."""
    config = transformers.CONFIG_MAPPING["nemotron_h"](**_NEMOTRON)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for key, value in {"mamba_num_heads": 4, "ssm_state_size": 16, "n_groups": 1, "moe_latent_size": 24}.items():
        (tmp_path / "config.json").write_text(json.dumps({**written, key: value}))
        stored = read_stored(catalog, str(tmp_path))
        assert {one.severity for one in whole_findings(stored, stored.model(catalog))} == {"error"}, key


_BY_TOKEN = {
    **_HEAD, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip


@pytest.mark.parametrize("told", [2, [2, 2]])
def test_hunyuan_says_of_each_layer_how_many_experts_a_token_has(told: int | list[int]) -> None:
    keys = {**_HEAD, "num_experts": 4, "moe_topk": told}
    config = transformers.CONFIG_MAPPING["hunyuan_v1_moe"](**{**keys, "moe_topk": 2})
    held = sum(one.numel() for one in transformers.AutoModelForCausalLM.from_config(config).parameters())
    raw = json.loads(config.to_json_string()) | {"architectures": ["HunYuanMoEV1ForCausalLM"], "moe_topk": told}
    model = read_model(raw, "config.json", id="m", name="m", source="s", date="2026-01")[0]
    assert (model.parameters, model.experts_per_token) == (held, 2)
    with pytest.raises(BadData, match="num_experts_per_tok"):
        read_model(raw | {"moe_topk": 5}, "config.json", id="m", name="m", source="s", date="2026-01")


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("gemma3n_text", {"laurel_rank": 4, "altup_num_inputs": 3, "num_kv_shared_layers": 2}),
        ("gemma4_text", {"num_kv_shared_layers": 0}),
        ("gemma4_text", {"num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
    ],
)
def test_layers_that_are_told_of_the_token_are_counted(family: str, keys: dict[str, Any]) -> None:
    widths = {"activation_sparsity_pattern": [0.0] * 4} if family == "gemma3n_text" else {"global_head_dim": 32}
    config = transformers.CONFIG_MAPPING[family](**{**_BY_TOKEN, **keys, **widths})
    held = sum(one.numel() for one in transformers.AutoModelForCausalLM.from_config(config).parameters())
    raw = json.loads(config.to_json_string()) | {"architectures": ["Gemma"]}
    model = read_model(raw, "config.json", id="m", name="m", source="s", date="2026-01")[0]
    # Of Gemma 4 the norms of its experts are counted in dense layers as well.
    assert model.parameters - held == (0 if family == "gemma3n_text" else 3 * 64 * 4)
    alone = read_model(raw | {"num_kv_shared_layers": 0}, "config.json", id="m", name="m", source="s", date="2026-01")[
        0
    ]
    assert model.cache_bytes(64) == alone.cache_bytes(64) * (4 - keys["num_kv_shared_layers"]) / 4
