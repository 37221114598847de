"""How models cut pictures into tokens, by the name of the model, each rule with its sources; and what the `images` of a
class add to its prompts. A checkpoint says it of itself by preprocessor_config.json beside config.json."""

import math
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from crosstie.catalog.reading import optional_text, read_json, read_record, sourced_file, table, texts
from crosstie.core.errors import BadData
from crosstie.core.images import Encoder, ImageRule
from crosstie.core.model import Model
from crosstie.core.workload import Pictures

_FILE = Path(__file__).parent / "data" / "vision.toml"
# What each kind must say of itself, since a default would be a guess.
_NEEDS = {
    "area": ("min_pixels", "max_pixels"),
    "edge": ("longest_edge",),
    "fitted": ("tile", "most_tiles"),
    "aspect": ("tile", "most_tiles"),
    "fixed": ("tile",),
}
_Side = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
PROCESSOR = "preprocessor_config.json"
# Families whose feed-forward part gates one product with another, so that it has three.
_GATED = ("qwen2_5_vl", "pixtral")


class VisionRule(msgspec.Struct, frozen=True, kw_only=True):
    models: tuple[str, ...]
    rule: ImageRule
    sources: tuple[str, ...]
    note: str = ""


@cache
def shipped_vision() -> tuple[VisionRule, ...]:
    return read_vision(_FILE)


@cache
def image_rule(model: str) -> ImageRule | None:
    """The first that matches the model's id; None: nobody says how it takes pictures, if at all."""
    name = model.casefold()
    rules = (rule.rule for rule in shipped_vision() if any(fnmatchcase(name, pattern) for pattern in rule.models))
    return next(rules, None)


def read_vision(file: Path) -> tuple[VisionRule, ...]:
    with sourced_file(file, ["rule"]) as (raw, sources):
        given = raw.get("rule")
        if not isinstance(given, list) or not given:
            raise BadData(file, "rule", "missing: a [[rule]] for every way of cutting pictures up")
        rules = []
        for index, entry in enumerate(given):
            where = f"rule[{index}]"
            own = dict(table(file, where, entry))
            models = texts(file, f"{where}.models", own.pop("models", None))
            cited = texts(file, f"{where}.sources", own.pop("sources", None))
            if not models or not cited:
                raise BadData(file, where, "needs models and sources")
            references = tuple(sources.cite(where, key)[0] for key in cited)
            note = optional_text(file, f"{where}.note", own.pop("note", ""))
            rule = read_record(file, where, own, ImageRule)
            for key in ("encoder", *_NEEDS[rule.kind]):
                if key not in own:
                    raise BadData(file, f"{where}.{key}", f"missing: a rule of kind '{rule.kind}' needs it")
            rules.append(VisionRule(models=models, rule=rule, sources=references, note=note))
        return tuple(rules)


class Images(msgspec.Struct, frozen=True, kw_only=True):
    """Pictures of a request, on average so many, all of one size in pixels."""

    width: _Side
    height: _Side
    count: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] = 1.0


def _rule(model: Model) -> ImageRule | None:
    """The files of a checkpoint override what is known of its name."""
    file = Path(model.file)
    own = rule_of_checkpoint(file.parent) if file.suffix == ".json" else None
    return own or image_rule(model.id)


def read_images(file: Path, where: str, raw: object, model: Model) -> tuple[float, Pictures]:
    """Tokens that they add to a prompt, and what the encoder has to do."""
    images = read_record(file, where, raw, Images)
    rule = _rule(model)
    if rule is None:
        known = ", ".join(pattern for vision_rule in shipped_vision() for pattern in vision_rule.models)
        raise BadData(file, where, f"nobody says how {model.id} cuts pictures up, if at all; known: {known}")
    assert rule.encoder is not None, "the catalog refuses rules without one"
    seen = rule.seen(images.width, images.height)
    pictures = Pictures(encoder=rule.encoder, patches=float(seen.patches), parts=images.count * seen.parts)
    return images.count * seen.tokens, pictures


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
