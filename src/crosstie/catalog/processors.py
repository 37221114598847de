"""How a checkpoint's own files say that it takes pictures: preprocessor_config.json beside config.json."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.reading import read_json
from crosstie.core.errors import BadData
from crosstie.core.images import Encoder, ImageRule

PROCESSOR = "preprocessor_config.json"
# Families whose feed-forward part gates one product with another, so that it has three.
_GATED = ("qwen2_5_vl", "pixtral")

_Said = dict[str, Any]
# What a processor says, the config's part about vision and all of it, as the fields of an `ImageRule`.
_Reader = Callable[[_Said, _Said, _Said], _Said]


def rule_of_checkpoint(folder: Path) -> ImageRule | None:
    """None where the folder says nothing of pictures."""
    file = folder / PROCESSOR
    if not file.is_file():
        return None
    said, config = read_json(file), read_json(folder / "config.json")
    name = str(said.get("image_processor_type", ""))
    read = next((reader for known, reader in _READERS.items() if name.startswith(known)), None)
    if read is None:
        raise BadData(file, "image_processor_type", f"'{name}' is none of {', '.join(_READERS)}")
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise BadData(folder / "config.json", "vision_config", "missing: it says what looks at the pictures")
    try:
        rule = ImageRule(encoder=_encoder(vision), **read(said, vision, config))
        return msgspec.convert(msgspec.to_builtins(rule), ImageRule)
    except KeyError as error:
        raise BadData(file, str(error).strip("'"), "missing here and in config.json") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise BadData(file, "", f"is no processor as {name} has it: {error}") from None


def _encoder(vision: dict[str, Any]) -> Encoder:
    # Qwen2-VL calls the width of its encoder embed_dim, and the width that it hands over hidden_size.
    hidden = int(vision.get("embed_dim") or vision["hidden_size"])
    wide = vision.get("intermediate_size") or hidden * vision.get("mlp_ratio", 4)
    layers = vision.get("depth") or vision["num_hidden_layers"]
    gated = str(vision.get("model_type", "")).startswith(_GATED)
    return Encoder(layers=int(layers), hidden=hidden, intermediate=int(wide), products=3 if gated else 2)


def _side(value: Any) -> int:
    """A length, or the first of two equal ones, however it is written."""
    if isinstance(value, dict):
        value = value["height"]
    return int(value[0] if isinstance(value, list) else value)


def _area(said: _Said, vision: _Said, config: _Said) -> _Said:
    size = said.get("size") or {}
    return {
        "kind": "area",
        "patch": _side(said.get("patch_size") or vision["patch_size"]),
        "merge": int(said.get("merge_size") or vision["spatial_merge_size"]),
        "min_pixels": int(said.get("min_pixels") or size["shortest_edge"]),
        "max_pixels": int(said.get("max_pixels") or size["longest_edge"]),
        "around": 2,
    }


def _edge(said: _Said, vision: _Said, config: _Said) -> _Said:
    return {
        "kind": "edge",
        "patch": _side(said.get("patch_size") or vision["patch_size"]),
        "merge": int(config.get("spatial_merge_size", 1)),
        "longest_edge": int(said["size"]["longest_edge"]),
    }


def _tiled(kind: str, around: int, shrunk: Callable[[_Said, _Said], Any]) -> _Reader:
    """`shrunk`: by how much both sides of its patches are merged, as a share of vision_config or config.json."""
    return lambda said, vision, config: {
        "kind": kind,
        "patch": _side(vision["patch_size"]),
        "merge": round(1.0 / float(shrunk(vision, config))),
        "tile": _side(said["size"]),
        "most_tiles": int(said["max_patches"]),
        "around": around,
    }


def _fixed(said: _Said, vision: _Said, config: _Said) -> _Said:
    tile, patch = _side(said["size"]), _side(vision["patch_size"])
    return {
        "kind": "fixed",
        "patch": patch,
        "merge": round(tile / patch / math.sqrt(int(config["mm_tokens_per_image"]))),
        "tile": tile,
        "around": 4,
    }


# By how the name of the processor begins; "Fast" may follow.
_READERS: dict[str, _Reader] = {
    "Qwen2VLImageProcessor": _area,
    "Qwen3VLImageProcessor": _area,
    "PixtralImageProcessor": _edge,
    "Llama4ImageProcessor": _tiled("fitted", 3, lambda vision, _: vision.get("pixel_shuffle_ratio", 0.5)),
    "GotOcr2ImageProcessor": _tiled("aspect", 2, lambda _, config: config.get("downsample_ratio", 0.5)),
    "Gemma3ImageProcessor": _fixed,
}
