"""The rule for pictures as a checkpoint's own files have it: those of the families that ship, and what is none."""

import json
from pathlib import Path
from typing import Any

import pytest

from crosstie.catalog.models import read_model_path
from crosstie.catalog.vision import image_rule, read_images, rule_of_checkpoint
from crosstie.core.errors import BadData

QWEN_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16, "spatial_merge_size": 2}
QWEN = {
    "image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}  # fmt: skip
# By model: its preprocessor_config.json, and what config.json says of vision.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3-vl-32b": (QWEN, {"vision_config": QWEN_VISION}),
    "qwen2.5-vl-7b": (
        {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "min_pixels": 3136,
         "max_pixels": 12845056},
        {"vision_config": {"model_type": "qwen2_5_vl", "depth": 32, "hidden_size": 1280, "intermediate_size": 3420}},
    ),
    "llama-4-scout": (
        {"image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 336, "width": 336}, "max_patches": 16},
        {"vision_config": {"num_hidden_layers": 34, "hidden_size": 1408, "intermediate_size": 5632, "patch_size": 14,
                           "pixel_shuffle_ratio": 0.5}},
    ),
    "gemma-3-27b": (
        {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}},
        {"mm_tokens_per_image": 256,
         "vision_config": {"num_hidden_layers": 27, "hidden_size": 1152, "intermediate_size": 4304, "patch_size": 14}},
    ),
    "pixtral-12b": (
        {"image_processor_type": "PixtralImageProcessor", "patch_size": {"height": 16, "width": 16},
         "size": {"longest_edge": 1024}},
        {"vision_config": {"model_type": "pixtral", "num_hidden_layers": 24, "hidden_size": 1024,
                           "intermediate_size": 4096}},
    ),
    "mistral-small-3.1-24b": (
        {"image_processor_type": "PixtralImageProcessorFast", "patch_size": 14, "size": {"longest_edge": 1540}},
        {"spatial_merge_size": 2, "vision_config": {"model_type": "pixtral", "num_hidden_layers": 24,
                                                    "hidden_size": 1024, "intermediate_size": 4096}},
    ),
    "internvl3-8b": (
        {"image_processor_type": "GotOcr2ImageProcessorFast", "size": {"height": 448, "width": 448}, "max_patches": 12},
        {"downsample_ratio": 0.5, "vision_config": {"num_hidden_layers": 24, "hidden_size": 1024,
                                                    "intermediate_size": 4096, "patch_size": [14, 14]}},
    ),
}  # fmt: skip


def written(folder: Path, processor: object, config: object) -> Path:
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("model", FAMILIES)
def test_a_checkpoint_says_what_is_shipped_of_its_family(tmp_path: Path, model: str) -> None:
    assert rule_of_checkpoint(written(tmp_path, *FAMILIES[model])) == image_rule(model)


def test_a_folder_without_a_processor_says_nothing(tmp_path: Path) -> None:
    assert rule_of_checkpoint(tmp_path) is None


def test_a_checkpoint_goes_before_what_its_name_says(tmp_path: Path) -> None:
    folder = tmp_path / "qwen3-vl-mine"
    folder.mkdir()
    text = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
        "vocab_size": 32000, "max_position_embeddings": 32768,
    }  # fmt: skip
    small = QWEN | {"size": {"shortest_edge": 1024, "longest_edge": 262144}}
    written(folder, small, text | {"vision_config": QWEN_VISION})
    model = read_model_path(folder)
    size = {"width": 1024, "height": 1024}
    assert read_images(tmp_path, "x", size, model)[0] == 16 * 16 + 2
    (folder / "preprocessor_config.json").unlink()
    assert read_images(tmp_path, "x", size, model)[0] == 32 * 32 + 2


@pytest.mark.parametrize(
    ("processor", "config", "says"),
    [
        ([], {}, "one JSON object"),
        ({"image_processor_type": "SeerImageProcessor"}, {}, "'SeerImageProcessor' is none of Qwen2VLImageProcessor"),
        (QWEN, {}, "vision_config: missing"),
        ({**QWEN, "size": {}}, {"vision_config": QWEN_VISION}, "shortest_edge: missing"),
        ({**QWEN, "patch_size": "big"}, {"vision_config": QWEN_VISION}, "is no processor as Qwen2VLImageProcessorFast"),
        ({**QWEN, "merge_size": -2}, {"vision_config": QWEN_VISION}, "is no processor"),
        (QWEN, {"vision_config": {"depth": 2}}, "hidden_size: missing"),
    ],
)
def test_what_is_no_processor(tmp_path: Path, processor: object, config: object, says: str) -> None:
    with pytest.raises(BadData, match=says):
        rule_of_checkpoint(written(tmp_path, processor, config))


def test_no_json_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("{")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadData, match="not valid JSON"):
        rule_of_checkpoint(tmp_path)
