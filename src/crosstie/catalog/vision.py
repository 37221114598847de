"""How models cut pictures into tokens, by the name of the model, each rule with its sources; and what the `images` of a
class add to its prompts. A checkpoint says it of itself by preprocessor_config.json beside config.json."""

import math
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from crosstie.catalog.reading import optional_text, read_json, read_record, read_toml, sourced_file, table, texts
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
    with sourced_file(file, ["rule", "processors"]) as (raw, sources):
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


@cache
def _processors() -> dict[str, dict[str, Any]]:
    """By how the name of a processor begins: where each field of its rule stands."""
    rows: dict[str, dict[str, Any]] = read_toml(_FILE)["processors"]
    return rows


def rule_of_checkpoint(folder: Path) -> ImageRule | None:
    """None where the folder says nothing of pictures."""
    file = folder / PROCESSOR
    if not file.is_file():
        return None
    processor, config = read_json(file), read_json(folder / "config.json")
    name = str(processor.get("image_processor_type", ""))
    row = next((row for known, row in _processors().items() if name.startswith(known)), None)
    if row is None:
        raise BadData(file, "image_processor_type", f"'{name}' is none of {', '.join(_processors())}")
    vision = config.get("vision_config")
    if not isinstance(vision, dict):
        raise BadData(folder / "config.json", "vision_config", "missing: it says what looks at the pictures")
    try:
        rule = ImageRule(
            encoder=_encoder(vision), **_fields(row, {"processor": processor, "vision": vision, "config": config})
        )
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


def _fields(row: dict[str, Any], files: dict[str, Any]) -> dict[str, Any]:
    """Those of an `ImageRule`."""
    values = {field: _found(where, files) if isinstance(where, list) else where for field, where in row.items()}
    if "shrunk" in values:
        values["merge"] = round(1.0 / float(values.pop("shrunk")))
    fields = {field: value if field == "kind" else _side(value) for field, value in values.items()}
    if "tokens" in fields:
        fields["merge"] = round(fields["tile"] / fields["patch"] / math.sqrt(fields.pop("tokens")))
    return fields


def _found(places: list[Any], files: dict[str, Any]) -> Any:
    """What stands at the first of these places that has anything; a place that is no text is the value itself."""
    key = ""
    for place in places:
        if not isinstance(place, str):
            return place
        value: Any = files
        for key in place.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value:
            return value
    raise KeyError(key)


def _side(value: Any) -> int:
    """A length, or the first of two equal ones, however it is written."""
    if isinstance(value, dict):
        value = value["height"]
    return int(value[0] if isinstance(value, list) else value)
