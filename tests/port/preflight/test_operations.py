"""Which operations a config asks for: one for each kind of layer, with facts a rank."""

from typing import Any

import pytest

from crosstie.catalog.config import Config
from crosstie.port.preflight.operations import Layout, ModelOperation, Weights, model_facts, operations

PLAIN = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}


def needed(raw: dict[str, Any], **layout: Any) -> list[ModelOperation]:
    stored = [Weights(scheme="fp8-block", activations="dynamic")]
    return operations(Config(raw, "config.json"), None, Layout(**layout), stored, stored)


def only(kind: str, raw: dict[str, Any], **layout: Any) -> ModelOperation:
    (found,) = [one for one in needed(raw, **layout) if one.kind == kind]
    return found


def test_grouped_attention_by_rank() -> None:
    facts = only("attention", PLAIN, tp=4, kv="fp8").facts
    assert facts["head_dim"] == 128
    assert (facts["heads"], facts["kv_heads"], facts["gqa_ratio"]) == (8, 2, 4)
    assert facts["kv"] == "fp8"


def test_more_ranks_than_key_value_heads_share_them() -> None:
    assert only("attention", PLAIN, tp=16).facts["kv_heads"] == 1


def test_heads_that_ranks_cannot_share_are_no_fact() -> None:
    assert "heads" not in only("attention", PLAIN, tp=3).facts


def test_a_head_size_that_does_not_follow_is_no_fact() -> None:
    assert "head_dim" not in only("attention", {**PLAIN, "hidden_size": 4097}).facts


def test_windows_and_full_layers_are_two_operations() -> None:
    raw = {**PLAIN, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}
    assert [one.facts["window"] for one in needed(raw) if one.kind == "attention"] == [True, False]
    assert [one.facts["window"] for one in needed({**raw, "use_sliding_window": False}) if one.kind == "attention"] == [
        False
    ]


def test_sinks_and_biased_experts_of_gpt_oss() -> None:
    raw = {**PLAIN, "model_type": "gpt_oss", "num_local_experts": 32, "intermediate_size": 2880}
    assert only("attention", raw).facts["sinks"] is True
    facts = only("moe", raw, tp=8).facts
    assert (facts["activation"], facts["bias"], facts["inter"]) == ("swigluoai", True, 360)


def test_latent_attention_with_and_without_an_index() -> None:
    latent = {**PLAIN, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128, "num_attention_heads": 128}
    assert only("mla", latent, tp=8).facts["heads"] == 16
    sparse = {**latent, "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}
    facts = only("sparse_attention", sparse, tp=8).facts
    assert (facts["kind"], facts["top_k"], facts["heads"]) == ("dsa", 2048, 16)
    assert not [one for one in needed(sparse) if one.kind in ("mla", "attention")]


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({"linear_num_value_heads": 32}, "gdn"),
        ({"linear_attn_config": {"num_heads": 32}}, "kda"),
        ({"model_type": "falcon_h1", "mamba_d_state": 256}, "mamba2"),
        ({"model_type": "lfm2", "conv_L_cache": 3}, "short_conv"),
        ({"model_type": "minimax"}, "lightning"),
    ],
)
def test_recurrent_layers_beside_attention(more: dict[str, Any], kind: str) -> None:
    found = {one.kind: one for one in needed({**PLAIN, **more})}
    assert found["linear_attention"].facts["kind"] == kind
    assert "attention" in found


def test_a_pure_state_space_model_has_no_attention() -> None:
    assert {one.kind for one in needed({**PLAIN, "model_type": "mamba2"})} == {"gemm", "linear_attention"}


def test_experts_are_cut_over_ranks_or_spread() -> None:
    raw = {**PLAIN, "num_experts": 128, "moe_intermediate_size": 1536, "num_experts_per_tok": 8}
    assert only("moe", raw, tp=8).facts["inter"] == 192
    assert only("moe", raw, tp=8, ep=True).facts["inter"] == 1536
    assert "inter" not in only("moe", raw, tp=5).facts


def test_a_dense_model_has_no_experts() -> None:
    assert not [one for one in needed(PLAIN) if one.kind == "moe"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({}, "plain"),
        ({"query_pre_attn_scalar": 128}, "plain"),
        ({"query_pre_attn_scalar": 168}, "own"),
        ({"attention_multiplier": 0.0078125}, "own"),
        ({"attention_multiplier": 128**-0.5}, "plain"),
        ({"attention_multiplier": "large"}, "own"),
    ],
)
def test_a_scale_of_attention_that_is_the_models_own(more: dict[str, Any], said: str) -> None:
    assert only("attention", {**PLAIN, **more}).facts["scale"] == said


@pytest.mark.parametrize("key", ["attention_sinks", "add_swa_attention_sink_bias", "swa_attention_sink_enabled"])
def test_sinks_by_the_config(key: str) -> None:
    assert only("attention", {**PLAIN, key: True}).facts["sinks"] is True
    assert only("attention", {**PLAIN, key: False}).facts["sinks"] is False


def test_a_list_of_kinds_that_has_no_recurrent_layer() -> None:
    """MiniMax-M2 writes 1 for every layer; 0 would be lightning attention."""
    kinds = [{one.kind for one in needed({**PLAIN, "attn_type_list": listed})} for listed in ([1, 1], [0, 1])]
    assert "linear_attention" not in kinds[0]
    assert "linear_attention" in kinds[1]


def test_values_may_be_narrower_than_keys() -> None:
    facts = only("attention", {**PLAIN, "head_dim": 192, "v_head_dim": 128}).facts
    assert (facts["head_dim"], facts["v_head_dim"]) == (192, 128)


def test_the_activation_of_experts_however_it_is_spelt() -> None:
    raw = {**PLAIN, "num_experts": 8, "moe_intermediate_size": 256}
    assert only("moe", {**raw, "mlp_hidden_act": "relu2"}).facts["activation"] == "relu2"
    assert only("moe", raw).facts["activation"] == "silu"


@pytest.mark.parametrize(
    ("said", "type"), [("float16", "fp16"), ("bfloat16", "bf16"), ("float32", "bf16"), (None, "bf16")]
)
def test_what_products_are_computed_in(said: str | None, type: str) -> None:
    assert only("gemm", {**PLAIN, "torch_dtype": said}).facts["compute"] == type


def facts_of(raw: dict[str, Any]) -> dict[str, object]:
    return {name.removeprefix("model."): value for name, value in model_facts(Config(raw, "c"), needed(raw)).items()}


def test_a_model_is_known_by_what_it_does() -> None:
    v4 = {
        **PLAIN, "model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], "index_topk": 512,
        "compress_ratios": [0, 4, 128], "n_routed_experts": 256, "num_hash_layers": 3, "hc_mult": 4,
    }  # fmt: skip
    assert facts_of(v4) == {
        "architecture": "DeepseekV4ForCausalLM", "attention": "v4", "compressed": True, "indexer": True,
        "recurrent": "none", "chunked": False, "routing": "hash", "hyper_connections": True,
        "expert_dtype": "unsaid",
    }  # fmt: skip
    plain = facts_of(PLAIN)
    assert (plain["attention"], plain["routing"], plain["indexer"]) == ("gqa", "none", False)
    assert facts_of({**PLAIN, "num_experts": 8, "n_group": 8})["routing"] == "grouped"
    assert facts_of({**PLAIN, "num_experts": 8, "n_group": 1})["routing"] == "top-k"
    assert facts_of({**PLAIN, "attention_chunk_size": 8192})["chunked"] is True
    assert facts_of({**PLAIN, "linear_num_value_heads": 32})["recurrent"] == "gdn"


def test_blocks_that_an_index_picks_are_an_operation_beside_the_full_layers() -> None:
    said = {"sparse_num_index_heads": 4, "sparse_index_dim": 128, "sparse_topk_blocks": 16}
    raw = {**PLAIN, "sparse_attention_config": said}
    facts = only("sparse_attention", raw).facts
    assert (facts["kind"], facts["top_k"], facts["index_heads"]) == ("msa", 16, 4)
    assert only("attention", raw)
    assert facts_of(raw)["attention"] == "msa"
