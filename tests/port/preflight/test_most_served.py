"""The architectures that are served most, each by transformers' default config: a verdict by name, not "not known"."""

import json
from pathlib import Path

import pytest

from crosstie.catalog.config import Config
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData
from crosstie.core.finding import VERDICTS
from crosstie.port.preflight.model import preflight

pytestmark = pytest.mark.transformers
# Picked by hand from what engines' recipes and the catalog have: transformers' model_type and the architecture.
MOST_SERVED = {
    "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration", "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForCausalLM", "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration", "phi3": "Phi3ForCausalLM", "gpt_oss": "GptOssForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM", "glm_moe_dsa": "GlmMoeDsaForCausalLM", "llama4_text": "Llama4ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM", "mistral3": "Mistral3ForConditionalGeneration",
    "gemma3n": "Gemma3nForConditionalGeneration", "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM", "lfm2": "Lfm2ForCausalLM", "lfm2_vl": "Lfm2VlForConditionalGeneration",
}  # fmt: skip


@pytest.mark.parametrize(("model_type", "architecture"), MOST_SERVED.items(), ids=list(MOST_SERVED))
def test_a_most_served_architecture_has_a_verdict(
    model_type: str, architecture: str, catalog: Catalog, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(model_type).to_dict()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config | {"architectures": [architecture], "torch_dtype": "bfloat16"}, default=str))
    report = preflight(str(file), on=["mi300x", "mi355x", "h200"], catalog=catalog)
    assert VERDICTS["unknown"] not in report.verdicts.values(), [
        one.what for one in report.findings if one.severity == "unknown"
    ]


def test_one_that_nobody_read_has_none(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["MineForCausalLM"], "model_type": "mine"}))
    report = preflight(str(tmp_path / "config.json"), on=["mi300x"], catalog=catalog)
    assert report.verdicts == {"mi300x": VERDICTS["unknown"]}


@pytest.mark.parametrize("kinds", [["compressed"], [[4]], 4])
def test_kinds_of_layers_that_nobody_read(kinds: object) -> None:
    with pytest.raises(BadData, match="layer_types"):
        Config({"compress_rates": {"compressed_sparse_attention": 4}, "layer_types": kinds}, "config.json")
