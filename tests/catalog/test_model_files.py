"""config.json in, Model out: what is missing is named, what is known is counted exactly."""

import json
from pathlib import Path
from typing import Any

import pytest

from crosstie.catalog.config import load_config
from crosstie.catalog.huggingface import read_model
from crosstie.catalog.library import SHIPPED, Catalog, spellings
from crosstie.catalog.models import model_file_text, read_model_file, read_model_path, shorter_names
from crosstie.core.errors import BadData, BadInput, UnknownName
from crosstie.core.model import Model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "bos_token_id": 1,
}  # fmt: skip


def read(**changes: Any) -> Model:
    raw = {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}
    return read_model(raw, "config.json", id="m", name="m", source="s", date="2026-01")[0]


@pytest.mark.parametrize(
    "field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"]
)
def test_a_missing_field_is_named_with_its_file(field: str) -> None:
    with pytest.raises(BadData, match="lacks the field") as error:
        read(**{field: ...})
    assert error.value.key == field
    assert error.value.file == "config.json"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hidden_size": -1}, "hidden_size"),
        ({"hidden_size": "4096"}, "hidden_size"),
        ({"num_attention_heads": 31, "num_key_value_heads": 31}, "head_dim"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["odd_attention"] * 32}, "layer_types[0]"),
        ({"torch_dtype": "int3"}, "torch_dtype"),
        ({"quantization_config": {"quant_method": "magic"}}, "quantization_config.quant_method"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "quantization_config"),
        ({"quantization_config": 7}, "quantization_config"),
        ({"num_local_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"attention_bias": "yes"}, "attention_bias"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": 50_000}, "num_hidden_layers"),
        ({"max_position_embeddings": "4096"}, "max_position_embeddings"),
        ({"max_position_embeddings": True}, "max_position_embeddings"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"layer_types": ["full_attention"] * 33}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_window"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"model_type": "bert"}, "model_type"),
        ({"model_type": "zamba2"}, "model_type"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*X"}, "layer_types[2]"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M*"}, "mamba_n_heads"),
        ({"model_type": "dbrx", "attn_config": 7}, "attn_config"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"hybrid_layer_pattern": [0, 1]}, "hybrid_layer_pattern"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"architectures": ["SomethingForMaskedLM"]}, "architectures"),
        ({"model_type": "mllama"}, "model_type"),
        ({"moe_num_experts": 64, "moe_k": 6, "moe_layer_end_index": 5}, "moe_layer_end_index"),
        ({"model_type": "laguna", "gating": "per-token"}, "gating"),
        ({"kda_lower_bound": -5.0}, "kda_lower_bound"),
        ({"num_nextn_predict_layers": 10**6}, "num_nextn_predict_layers"),
        ({"num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": "x"}, "moe_intermediate_size"),
        ({"quantization_config": {"quant_method": "fp8", "ignore": [1]}}, "quantization_config.ignore"),
        ({"quantization_config": {"quant_method": "fp8", "ignore": ["re:(["]}}, "quantization_config.ignore"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": [{}]}},
            "quantization_config.config_groups",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": None}}},
            "quantization_config.config_groups.g",
        ),
        (
            {"quantization_config": {"quant_method": "quark", "global_quant_config": {"weight": []}}},
            "quantization_config.global_quant_config.weight",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4, "dynamic": {"+:a": {"bits": 8}}}},
            "quantization_config.dynamic",
        ),
    ],
)
def test_nonsense_is_refused_by_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(BadData) as error:
        read(**changes)
    assert error.value.key == key


QUANTISED = [
    ({"quant_method": "fp8"}, "fp8"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
    ({"quant_method": "fbgemm_fp8"}, "fp8-channel"),
    ({"quant_method": "awq", "w_bit": 4, "q_group_size": 128}, "int4-g128"),
    ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8-g128"),
    ({"quant_method": "gptq", "bits": "4", "group_size": -1}, "int4-channel"),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, "int8"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp4"}}}, "mxfp4"),
    ({"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}, "fp8-channel"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "format"), QUANTISED)
def test_checkpoint_formats(config: dict[str, Any], format: str) -> None:
    model = read(quantization_config=config)
    assert model.native["mlp"] == {format: 1.0}
    assert model.native["embedding"] == model.native["small"] == {"bf16": 1.0}


def test_modules_left_alone_stay_wide() -> None:
    model = read(quantization_config={"quant_method": "fp8", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    assert model.native["attention"] == model.native["output"] == {"bf16": 1.0}
    assert model.native["mlp"] == {"fp8": 1.0}


def test_layers_left_alone_are_a_share_of_the_role() -> None:
    """As Llama-3.1-405B-FP8: all attention, and the feed-forward of the first and the last layer."""
    kept = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(32) for p in "qkvo"]
    kept += [f"model.layers.{i}.mlp.{p}_proj" for i in (0, 31) for p in ("gate", "up", "down")]
    model = read(quantization_config={"quant_method": "fbgemm_fp8", "modules_to_not_convert": kept})
    assert model.native["mlp"] == {"bf16": 2 / 32, "fp8-channel": 30 / 32}
    assert model.native["attention"] == {"bf16": 1.0}
    assert model.native_name == "fp8-channel"


def test_an_ignore_counts_only_where_the_role_is() -> None:
    """DeepSeek's first three layers are dense: leaving their MLPs alone says nothing of the experts."""
    mixture = {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 512,
        "first_k_dense_replace": 3,
    }
    kept = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "exclude_modules": ["lm_head", *(f"model.layers.{i}.mlp*" for i in range(3))],
    }
    model = read(**mixture, quantization_config=kept)
    assert model.native["mlp"] == {"bf16": 1.0}
    assert model.native["experts"] == {"nvfp4": 1.0}
    assert model.native_name == "nvfp4"


def test_linear_attention_has_names_of_its_own() -> None:
    hybrid = {
        "model_type": "qwen3_next", "full_attention_interval": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    model = read(**hybrid, quantization_config={"quant_method": "fp8", "ignore": ["re:.*linear_attn.*"]})
    assert model.native["attention"] == {"bf16": 24 / 32, "fp8": 8 / 32}
    gated = next(t for layer in model.layers for t in layer.tensors if t.name == "q")
    assert gated.rows == 2 * 32 * 128


def test_modelopt_settings_in_a_file_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    assert read_model_path(tmp_path).native_name == "fp8"


def test_multi_query_by_family() -> None:
    assert read(model_type="gpt_bigcode", num_key_value_heads=...).kv_heads == 1
    assert read(model_type="gpt_bigcode", num_key_value_heads=..., multi_query=False).kv_heads == 32


def test_groups_apply_to_their_targets() -> None:
    groups = {
        "attention": {
            "targets": ["re:.*self_attn.*"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
        },
        "rest": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
    }
    model = read(
        quantization_config={
            "quant_method": "compressed-tensors",
            "config_groups": groups,
            "ignore": ["lm_head", "model.layers.0*"],
        }
    )
    assert model.native["attention"] == {"bf16": 1 / 32, "fp8-channel": 31 / 32}
    assert model.native["mlp"] == {"bf16": 1 / 32, "nvfp4": 31 / 32}


def test_experts_alone_are_quantised_where_the_config_says_so(catalog: Catalog) -> None:
    for name, format in (("gpt-oss-120b", "mxfp4-a8"), ("kimi-k2.5", "int4-g32"), ("deepseek-v4-flash", "mxfp4-a8")):
        native = catalog.model(name).native
        assert native["experts"] == native["experts_down"] == {format: 1.0}
        assert format not in native["attention"]


def test_a_directory_and_a_file_read_alike(tmp_path: Path) -> None:
    (tmp_path / "My Model").mkdir()
    file = tmp_path / "My Model" / "config.json"
    file.write_text(json.dumps(LLAMA))
    assert read_model_path(file.parent) == read_model_path(file)
    assert read_model_path(file).id == "my-model"


def test_a_folder_read_by_its_path_is_known_by_its_name_but_not_one_of_two(tmp_path: Path) -> None:
    one, other = tmp_path / "one" / "own-model", tmp_path / "other" / "own-model"
    for folder, layers in ((one, 2), (other, 4)):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(LLAMA | {"num_hidden_layers": layers}))
    catalog = Catalog()
    found = catalog.model(str(one))
    # As a workload or a fleet has it, wherever the command runs, and under what was learnt.
    assert catalog.model(found.id) == found
    assert catalog.calibrated_by(catalog.calibration).model(found.id) == found
    with pytest.raises(UnknownName):
        Catalog().model(found.id)
    catalog.model(str(other))
    with pytest.raises(UnknownName):
        catalog.model(found.id)


def test_a_model_can_be_added_and_read_back(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    text = model_file_text(file, id="mine", name="Mine", aliases=("me/mine",), source='a "source"', date="2026-11-01")
    assert "bos_token_id" not in text
    kept = tmp_path / "mine.toml"
    kept.write_text(text)
    model = read_model_file(kept)
    assert (model.parameters, model.source, model.aliases) == (8030261248, 'a "source"', ("me/mine",))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda t: t.replace("[config]", "[config]\ncolour = 1"), "config.colour"),
        (lambda t: t.replace('source = "s"', ""), "source"),
        (lambda t: t.replace('date = "2026-11-01"', 'date = "2026"'), "date"),
        (lambda t: t.replace('id = "mine"', 'id = "yours"'), "id"),
        (lambda t: t.replace("hidden_size = 4096", ""), "config.hidden_size"),
        (lambda t: t.replace('name = "Mine"', 'name = "Mine"\nprice = 3'), "price"),
    ],
)
def test_a_broken_model_file_names_the_key(change: Any, key: str, tmp_path: Path) -> None:
    source = tmp_path / "config.json"
    source.write_text(json.dumps(LLAMA))
    text = model_file_text(source, id="mine", name="Mine", aliases=(), source="s", date="2026-11-01")
    broken = change(text)
    assert broken != text
    file = tmp_path / "mine.toml"
    file.write_text(broken)
    with pytest.raises(BadData) as error:
        read_model_file(file)
    assert error.value.key == key


@pytest.mark.parametrize(("content", "reason"), [("{", "not valid JSON"), ("[]", "one JSON object"), ("\xff", "UTF-8")])
def test_a_config_that_is_no_json_is_refused_with_the_reason(content: str, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(BadData, match=reason):
        load_config(file)


def test_a_missing_file_and_a_bad_id(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="no such file"):
        load_config(tmp_path / "absent")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(BadInput, match="cannot be a catalog id"):
        model_file_text(tmp_path / "config.json", id="../x", name="x", aliases=(), source="s", date="2026-01")


def test_mha_without_kv_heads_and_tied_embeddings() -> None:
    mha = read(num_key_value_heads=...)
    assert mha.kv_heads == 32
    tied = read(tie_word_embeddings=True)
    assert tied.parameters == 8030261248 - 128256 * 4096
    assert tied.active_parameters == read().active_parameters


# Families that are not shipped: config keys as published, and the published number of weights.
FAMILIES = {
    "gpt2": ({"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}, 124_439_808),
    "qwen2.5-7b": ({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False, "use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}, 7_615_616_512),
    "gemma-2-9b": ({"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336, "num_hidden_layers": 42, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "vocab_size": 256000, "sliding_window": 4096}, 9_241_705_984),
    "phi-3-mini": ({"model_type": "phi3", "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32064, "tie_word_embeddings": False, "sliding_window": 2047}, 3_821_079_552),
    "gpt-neox-20b": ({"model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44, "num_attention_heads": 64, "vocab_size": 50432, "tie_word_embeddings": False}, 20_554_567_680),
    "command-r": ({"model_type": "cohere", "hidden_size": 8192, "intermediate_size": 22528, "num_hidden_layers": 40, "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 256000}, 34_980_831_232),
    "deepseek-v2-lite": ({"model_type": "deepseek_v2", "hidden_size": 2048, "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 102400, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "tie_word_embeddings": False}, 15_706_484_224),
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families_that_are_not_shipped(name: str) -> None:
    raw, weights = FAMILIES[name]
    model, _ = read_model(raw, "config.json", id="m", name="m", source="s", date="2026-01")
    assert model.parameters == pytest.approx(weights, rel=0.01)


def test_windows_alternate_or_start_late_by_family() -> None:
    gemma, _ = read_model(FAMILIES["gemma-2-9b"][0], "c", id="m", name="m", source="s", date="2026-01")
    assert sorted(layer.count for layer in gemma.layers) == [21, 21]
    late = read(model_type="qwen2", sliding_window=4096, use_sliding_window=True, max_window_layers=28)
    assert {layer.scans[0].window: layer.count for layer in late.layers} == {None: 28, 4096: 4}
    listed = read(num_local_experts=4, num_experts_per_tok=1, moe_layer_freq=[0] * 2 + [1] * 30)
    assert sorted(layer.count for layer in listed.layers) == [2, 30]


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-3.1-70B-Instruct", "Llama-3.1-70B-Instruct", "LLAMA-3.1-70B", "Meta-Llama-3.1-70B"]
)
def test_spellings_of_a_name(catalog: Catalog, name: str) -> None:
    assert catalog.model(name).id == "llama-3.1-70b"


def test_heads_and_gates_that_differ_by_layer(catalog: Catalog) -> None:
    laguna = catalog.model("laguna-xs.2")
    heads = {(scan.window, scan.query_heads): layer.count for layer in laguna.layers for scan in layer.scans}
    assert set(heads) == {(None, 48), (512, 64)}
    gates = {tensor.rows for tensor, _ in laguna.tensors() if tensor.name == "head_gate"}
    assert gates == {48, 64}
    whole = read(model_type="laguna", gating="per-element")
    query = next(tensor for tensor, _ in whole.tensors() if tensor.name == "q")
    assert query.rows == 2 * 4096


def test_linear_attention_in_groups_keeps_a_state_of_one_size(catalog: Catalog) -> None:
    ring = catalog.model("ring-2.5-1t")
    linear = [layer for layer in ring.layers if layer.state]
    assert sum(layer.count for layer in linear) == 70
    # 64 heads of 128 by 128 in 32 bits.
    assert {layer.state.bytes for layer in linear if layer.state} == {64 * 128 * 128 * 4.0}


def test_layers_of_the_feed_forward_by_name() -> None:
    model = read(num_local_experts=4, num_experts_per_tok=1, mlp_layer_types=["dense"] * 3 + ["sparse"] * 29)
    assert sorted(layer.count for layer in model.layers) == [3, 29]


def test_every_shipped_model_reads(catalog: Catalog) -> None:
    assert set(catalog.models) == {file.stem for file in (SHIPPED / "models").glob("*.toml")}


def test_blocks_that_an_index_chooses_and_layers_that_share_an_index(catalog: Catalog) -> None:
    sparse = next(layer for layer in catalog.model("minimax-m3").layers if layer.count == 57)
    assert [(scan.name, scan.top_rows, scan.kv_heads) for scan in sparse.scans] == [
        ("full", 2048, 4),
        ("index", None, 1),
    ]
    glm = catalog.model("glm-5.2")
    assert sum(layer.count for layer in glm.layers if any(scan.name == "index" for scan in layer.scans)) == 21
    assert all(any(scan.top_rows == 2048 for scan in layer.scans) for layer in glm.layers)


def test_an_unknown_kind_of_indexer_is_refused() -> None:
    latent = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
              "index_topk": 8, "index_n_heads": 2, "index_head_dim": 64}  # fmt: skip
    with pytest.raises(BadData, match="'often' is not one of full, shared"):
        read(**latent, indexer_types=["full"] * 31 + ["often"])


@pytest.mark.parametrize(
    ("name", "model", "precision"),
    [
        ("gemma-4-26B-A4B-it", "gemma-4-26b-a4b", ""),
        ("google/gemma-4-26B-A4B-it", "gemma-4-26b-a4b", ""),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b", ""),
        ("Qwen/Qwen3-235B-A22B-Thinking-2507-FP8", "qwen3-235b-a22b", "fp8"),
        ("nvidia/DeepSeek-R1-0528-FP4-V2", "deepseek-r1", "nvfp4"),
        ("amd/DeepSeek-R1-0528-MXFP4-Preview", "deepseek-r1", "mxfp4"),
        ("amd/Llama-3.3-70B-Instruct-FP8-KV", "llama-3.3-70b", "fp8"),
        ("Qwen3-32B-AWQ", "qwen3-32b", "int4"),
        # A name of the catalog wins as it stands.
        ("zai-org/GLM-4.7-FP8", "glm-4.7", ""),
    ],
)
def test_ends_of_a_checkpoints_name(catalog: Catalog, name: str, model: str, precision: str) -> None:
    found, said = catalog.checkpoint(name)
    assert (found.id, said) == (model, precision)


@pytest.mark.parametrize(
    "name", ["gemma-4-26B-A4B-itt", "Kimi-K2-Thinking", "-it", "Qwen3-32B-1399", "Qwen3-32B-v2", "it", "qwen3-32b-it-x"]
)
def test_ends_that_are_not_listed_are_no_part_of_a_name(catalog: Catalog, name: str) -> None:
    with pytest.raises(UnknownName):
        catalog.checkpoint(name)


def test_a_name_that_stores_the_weights_otherwise_does_not_pass_for_the_native_ones(catalog: Catalog) -> None:
    assert catalog.model("gemma-4-26B-A4B-it").id == "gemma-4-26b-a4b"
    assert catalog.model("DeepSeek-R1-0528-FP8").id == "deepseek-r1"
    with pytest.raises(UnknownName, match="Did you mean qwen3-32b"):
        catalog.model("Qwen3-32B-FP8")


def test_no_name_of_the_catalog_is_another_models_with_an_end(catalog: Catalog) -> None:
    names = {name: model.id for model in catalog.models.values() for name in spellings(model)}
    for name, owner in names.items():
        assert {names[shorter] for shorter, _ in shorter_names(name) if shorter in names} <= {owner}
