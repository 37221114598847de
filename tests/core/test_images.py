"""Sizes of pictures by their first bytes, and what models make of them, by hand and against transformers."""

import base64
import io
import math
import random

import pytest
from PIL import Image

from crosstie.catalog.vision import image_rule
from crosstie.core.images import ImageRule, PreparedImage, size_of, size_of_data_url


def rule(model: str) -> ImageRule:
    found = image_rule(model)
    assert found is not None
    return found


def picture(kind: str, size: tuple[int, int], **options: object) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", size, (200, 30, 90)).save(held, kind, **options)
    return held.getvalue()


@pytest.mark.parametrize("size", [(1, 1), (640, 480), (1001, 77), (4000, 30), (30, 3000)])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("GIF", {}), ("WEBP", {}), ("WEBP", {"lossless": True})],
    ids=str,
)  # fmt: skip
def test_the_first_bytes_of_a_picture_say_its_size(
    kind: str, options: dict[str, object], size: tuple[int, int]
) -> None:
    data = picture(kind, size, **options)
    assert size_of(data) == size
    url = f"data:image/{kind.lower()};base64,".encode() + base64.b64encode(data)
    assert size_of_data_url(url) == size
    # As JSON may have it.
    assert size_of_data_url(url.replace(b"/", b"\\/")) == size


def test_a_jpeg_whose_size_stands_behind_a_preview() -> None:
    plain = picture("JPEG", (800, 600))
    data = plain[:2] + b"\xff\xe1\xff\xff" + bytes(65533) + plain[2:]
    assert size_of(data) == (800, 600)
    assert size_of_data_url(b"data:image/jpeg;base64," + base64.b64encode(data)) == (800, 600)


@pytest.mark.parametrize(
    "url",
    [
        b"data:image/png;base64,AAAA",
        b"data:image/png;base64,",
        b"data:image/png,%89PNG",
        b"https://example.com/cat.png",
        b"data:image/png;base64,!!!!",
        b"data:image/png;base64," + base64.b64encode(picture("PNG", (9, 9))[:20]),
        b"data:image/png;base64," + base64.b64encode(picture("PNG", (9, 9))[:16] + bytes(8)),
        b"data:image/jpeg;base64," + base64.b64encode(b"\xff\xd8" + b"\xff\xe1\x00\x00" * 50),
        b"data:image/webp;base64," + base64.b64encode(b"RIFF0000WEBPVP9 " + bytes(20)),
    ],
)
def test_what_says_no_size(url: bytes) -> None:
    assert size_of_data_url(url) is None


@pytest.mark.parametrize(
    ("model", "size", "tokens"),
    [
        # 1,024 x 768 in squares of 32 pixels, and its two ends.
        ("qwen3-vl-32b", (1024, 768), 32 * 24 + 2),
        # Too small: enlarged to 65,536 pixels.
        ("qwen3-vl-32b", (64, 64), 8 * 8 + 2),
        ("qwen2.5-vl-7b", (1024, 768), 37 * 27 + 2),
        # 4 x 3 tiles of 144 tokens with a token behind each, the whole as one more, and three around it.
        ("llama-4-scout", (1024, 768), 13 * 144 + 12 + 3),
        ("llama-4-maverick", (336, 336), 144 + 3),
        ("gemma-3-27b", (4000, 100), 256 + 4),
        # 64 x 48 patches and an end for each row.
        ("pixtral-12b", (1024, 768), 64 * 48 + 48),
        ("mistral-small-3.1-24b", (3080, 1540), 55 * 28 + 28),
        ("internvl3-8b", (896, 448), 3 * 256 + 2),
        ("internvl3-8b", (448, 448), 256 + 2),
    ],
)  # fmt: skip
def test_tokens_by_hand(model: str, size: tuple[int, int], tokens: int) -> None:
    assert rule(model).seen(*size).tokens == tokens


def test_what_the_encoder_looks_at() -> None:
    assert rule("qwen3-vl-32b").seen(1024, 768) == PreparedImage(tokens=770, patches=64 * 48)
    assert rule("llama-4-scout").seen(1024, 768) == PreparedImage(tokens=1887, patches=24 * 24, parts=13)


def test_only_a_fixed_size_is_known_of_an_unknown_picture() -> None:
    assert rule("gemma-3-27b").unknown == PreparedImage(tokens=260, patches=64 * 64)
    assert rule("qwen3-vl-32b").unknown is None
    assert image_rule("llama-3.1-8b") is None


def sizes(count: int) -> list[tuple[int, int]]:
    draw = random.Random(1)
    found = [(int(math.exp(draw.uniform(3, 9))), int(math.exp(draw.uniform(3, 9)))) for _ in range(count)]
    return [(w, h) for w, h in found if max(w, h) < 100 * min(w, h)]


@pytest.mark.transformers
def test_qwens_rule_is_that_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    for model, factor in (("qwen3-vl-32b", 32), ("qwen2.5-vl-7b", 28)):
        one = rule(model)
        for width, height in sizes(1000):
            down, across = smart_resize(height, width, factor, one.min_pixels, one.max_pixels)
            assert one.seen(width, height).tokens == down * across // factor**2 + 2 or 0 in (down, across)


@pytest.mark.transformers
def test_internvls_rule_is_that_of_transformers() -> None:
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import get_optimal_tiled_canvas

    for width, height in sizes(1000):
        across, down = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
        tiles = across * down
        assert rule("internvl3-8b").seen(width, height).tokens == (tiles + (tiles > 1)) * 256 + 2


@pytest.mark.transformers
def test_pixtrals_rule_is_that_of_transformers() -> None:
    import numpy as np
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    for model, side in (("pixtral-12b", 16), ("mistral-small-3.1-24b", 28)):
        one = rule(model)
        for width, height in [size for size in sizes(300) if size[0] * size[1] < 10**6]:
            given, most = np.zeros((height, width, 3), np.uint8), (one.longest_edge, one.longest_edge)
            down, across = get_resize_output_image_size(given, size=most, patch_size=(side, side))
            assert one.seen(width, height).tokens == (across // side + 1) * (down // side)
