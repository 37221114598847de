"""How models cut pictures into tokens, by the name of the model, each rule with its sources; and what the `images` of a
class add to its prompts."""

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec

from crosstie.catalog.processors import rule_of_checkpoint
from crosstie.catalog.reading import optional_text, read_record, sourced_file, table, texts
from crosstie.core.errors import BadData
from crosstie.core.images import ImageRule
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
