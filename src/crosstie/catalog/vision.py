"""How models cut pictures into tokens, by the name of the model; each rule has its sources."""

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

import msgspec

from crosstie.catalog.reading import optional_text, read_record, sourced_file, table, texts
from crosstie.core.errors import BadData
from crosstie.core.images import ImageRule

_FILE = Path(__file__).parent / "data" / "vision.toml"
# What each kind must say of itself, since a default would be a guess.
_NEEDS = {
    "area": ("min_pixels", "max_pixels"),
    "edge": ("longest_edge",),
    "fitted": ("tile", "most_tiles"),
    "aspect": ("tile", "most_tiles"),
    "fixed": ("tile",),
}


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
