"""Pictures in prompts: how large one is by its first bytes, and how many tokens a model makes of it."""

import base64
import binascii
import math
from functools import lru_cache
from typing import Annotated, Literal

import msgspec

_Count = Annotated[int, msgspec.Meta(ge=1, le=10**9)]
_Few = Annotated[int, msgspec.Meta(ge=0, le=10**6)]

# Of a JPEG as much is read as its previews and colour profiles usually take before its size is said.
_MOST_HEADER_BYTES = 1 << 17
_FIRST_BYTES = 64
# As much of a data URL as is ever looked at.
MOST_URL_BYTES = _MOST_HEADER_BYTES * 4 // 3 + 256
# Frames of a JPEG that give its size: all but tables (C4), extensions (C8) and arithmetic conditioning (CC).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_LARGEST_SIDE = 65_535


class Encoder(msgspec.Struct, frozen=True, kw_only=True):
    """A vision transformer: what it costs to look at a picture."""

    layers: _Count
    hidden: _Count
    intermediate: _Count
    # Products of the feed-forward part: two, or three where one gates.
    products: Annotated[int, msgspec.Meta(ge=2, le=3)] = 2


class PreparedImage(msgspec.Struct, frozen=True, kw_only=True):
    """A picture as a model takes it: tokens of the prompt, and patches of each part that the encoder looks at."""

    tokens: int
    patches: int
    parts: int = 1


class ImageRule(msgspec.Struct, frozen=True, kw_only=True):
    """How a model's processor cuts a picture up.

    area    sides are rounded to whole merged patches, with as many pixels as the rule allows (Qwen-VL)
    edge    shrunk until the longer side fits, a token more at the end of each row (Pixtral, Mistral)
    fitted  padded to the tiles that shrink it least, and seen once more as a whole (Llama-4)
    aspect  stretched to the tiles of the nearest proportions, and seen once more as a whole (InternVL)
    fixed   always the same size (Gemma-3)
    """

    kind: Literal["area", "edge", "fitted", "aspect", "fixed"]
    patch: _Count
    merge: _Count = 1
    # Tokens around a picture: its beginning, its end and line breaks.
    around: _Few = 0
    min_pixels: _Count = 1
    max_pixels: _Count = 10**9
    longest_edge: _Count = 10**6
    # Side of a tile, and the most of them; of a fixed size its only one.
    tile: _Count = 1
    most_tiles: _Count = 1
    encoder: Encoder | None = None

    def seen(self, width: int, height: int) -> PreparedImage:
        return _seen(self, max(width, 1), max(height, 1))

    @property
    def unknown(self) -> PreparedImage | None:
        """A picture of which nothing is known, where that does not matter."""
        return _seen(self, self.tile, self.tile) if self.kind == "fixed" else None


@lru_cache(maxsize=4096)
def _seen(rule: ImageRule, width: int, height: int) -> PreparedImage:
    side = rule.patch * rule.merge
    if rule.kind == "area":
        width, height = _within_area(rule, width, height, side)
        return _grid(width // side, height // side, rule, 0)
    if rule.kind == "edge":
        ratio = max(width, height) / rule.longest_edge
        if ratio > 1.0:
            width, height = max(math.floor(width / ratio), 1), max(math.floor(height / ratio), 1)
        across, down = (width - 1) // side + 1, (height - 1) // side + 1
        return _grid(across, down, rule, down)
    each, patches = (rule.tile // side) ** 2, (rule.tile // rule.patch) ** 2
    if rule.kind == "fixed":
        return PreparedImage(tokens=each + rule.around, patches=patches)
    across, down = _fitted(rule, width, height) if rule.kind == "fitted" else _nearest_aspect(rule, width, height)
    tiles = across * down
    parts = tiles + 1 if tiles > 1 else 1
    # Llama-4 puts a token behind each of the tiles.
    between = tiles if rule.kind == "fitted" and tiles > 1 else 0
    return PreparedImage(tokens=parts * each + between + rule.around, patches=patches, parts=parts)


def _grid(across: int, down: int, rule: ImageRule, breaks: int) -> PreparedImage:
    tokens = across * down
    return PreparedImage(tokens=tokens + breaks + rule.around, patches=tokens * rule.merge**2)


def _within_area(rule: ImageRule, width: int, height: int, side: int) -> tuple[int, int]:
    across, down = round(width / side) * side, round(height / side) * side
    if across * down > rule.max_pixels:
        shrink = math.sqrt(width * height / rule.max_pixels)
        across, down = (max(side, math.floor(n / shrink / side) * side) for n in (width, height))
    elif across * down < rule.min_pixels:
        grow = math.sqrt(rule.min_pixels / (width * height))
        across, down = (math.ceil(n * grow / side) * side for n in (width, height))
    return max(across, side), max(down, side)


def _fitted(rule: ImageRule, width: int, height: int) -> tuple[int, int]:
    """The least enlargement, else the least shrinking; of equals the smallest canvas."""
    shapes = [(a, d) for a in range(1, rule.most_tiles + 1) for d in range(1, rule.most_tiles // a + 1)]
    scales = {(a, d): min(a * rule.tile / width, d * rule.tile / height) for a, d in shapes}
    larger = [scale for scale in scales.values() if scale >= 1.0]
    chosen = min(larger) if larger else max(scales.values())
    return min((shape for shape in shapes if scales[shape] == chosen), key=lambda shape: shape[0] * shape[1])


def _nearest_aspect(rule: ImageRule, width: int, height: int) -> tuple[int, int]:
    """The nearest proportions; of equals the larger, unless it had twice the picture's area."""
    shapes = [(a, d) for a in range(1, rule.most_tiles + 1) for d in range(1, rule.most_tiles // a + 1)]
    best, away = (1, 1), math.inf
    for shape in sorted(shapes, key=lambda shape: shape[0] * shape[1]):
        off = abs(width / height - shape[0] / shape[1])
        roomy = width * height > 0.5 * rule.tile**2 * shape[0] * shape[1]
        if off < away or (off == away and roomy):
            best, away = shape, off
    return best


def size_of_data_url(url: bytes) -> tuple[int, int] | None:
    """Width and height of a picture in `data:image/...;base64,...`; None where they cannot be told."""
    head, comma, encoded = url[:MOST_URL_BYTES].partition(b",")
    if not comma or not head.endswith(b";base64"):
        return None
    found = size_of(_decoded(encoded[: _FIRST_BYTES * 4 // 3]))
    return found or size_of(_decoded(encoded[: _MOST_HEADER_BYTES * 4 // 3]))


def _decoded(encoded: bytes) -> bytes:
    # Slashes may be escaped in JSON.
    plain = encoded.replace(b"\\/", b"/")
    try:
        return base64.b64decode(plain[: len(plain) // 4 * 4])
    except binascii.Error:
        return b""


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height by the first bytes of a PNG, GIF, WebP or JPEG; None where they do not say."""
    found: tuple[int, int] | None = None
    if data[:8] == b"\x89PNG\r\n\x1a\n" and len(data) >= 24:
        found = _big(data[16:20]), _big(data[20:24])
    elif data[:6] in (b"GIF87a", b"GIF89a") and len(data) >= 10:
        found = _little(data[6:8]), _little(data[8:10])
    elif data[:4] == b"RIFF" and data[8:12] == b"WEBP" and len(data) >= 30:
        found = _size_of_webp(data)
    elif data[:2] == b"\xff\xd8":
        found = _size_of_jpeg(data)
    return found if found and all(0 < side <= _LARGEST_SIDE for side in found) else None


def _size_of_webp(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8X":
        return _little(data[24:27]) + 1, _little(data[27:30]) + 1
    if kind == b"VP8L":
        bits = _little(data[21:25])
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    return (_little(data[26:28]) & 0x3FFF, _little(data[28:30]) & 0x3FFF) if kind == b"VP8 " else None


def _size_of_jpeg(data: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        mark = data[at + 1]
        if mark in _FRAMES:
            return _big(data[at + 7 : at + 9]), _big(data[at + 5 : at + 7])
        # Padding, and marks that stand alone.
        at += 1 if mark == 0xFF else 2 if 0xD0 <= mark <= 0xD8 else 2 + max(_big(data[at + 2 : at + 4]), 2)
    return None


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")
