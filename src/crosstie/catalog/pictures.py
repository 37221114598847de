"""The `images` of a class: how many pictures a request has, of which size, and what its model makes of them."""

from pathlib import Path
from typing import Annotated

import msgspec

from crosstie.catalog.processors import rule_of_checkpoint
from crosstie.catalog.reading import read_record
from crosstie.catalog.vision import image_rule, shipped_vision
from crosstie.core.errors import BadData
from crosstie.core.images import ImageRule
from crosstie.core.model import Model
from crosstie.core.workload import Pictures

_Side = Annotated[int, msgspec.Meta(ge=1, le=65_535)]


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
