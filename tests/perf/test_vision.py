"""The encoder of pictures, as a prefill of its own."""

import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.catalog.vision import image_rule
from crosstie.core.deployment import Parallelism
from crosstie.core.images import Encoder
from crosstie.perf.hardware import Hardware
from crosstie.perf.steady_state import steady_state
from crosstie.perf.vision import encode_s


def machine(catalog: Catalog, tp: int = 1) -> Hardware:
    return Hardware(
        [catalog.deployment(catalog.model("qwen3-vl-32b"), catalog.accelerator("h200"), Parallelism(tp=tp))]
    )


def encoder() -> Encoder:
    rule = image_rule("qwen3-vl-32b")
    assert rule is not None
    assert rule.encoder is not None
    return rule.encoder


def test_a_large_picture_is_its_arithmetic(catalog: Catalog) -> None:
    """1,024 x 768 pixels, 3,072 patches: 2.5 TFLOP of products and 1.2 of attention, some 10 ms at what kernels reach."""
    got = float(encode_s(machine(catalog), encoder(), 3072, 1)[0, 0])
    flop = 27 * 3072 * (2 * 1152 * (4 * 1152 + 2 * 4304) + 4 * 3072 * 1152)
    assert flop == pytest.approx(3.7e12, rel=0.02)
    assert 989e12 * 0.2 < flop / got < 989e12 * 0.85


def test_nothing_to_look_at(catalog: Catalog) -> None:
    assert float(encode_s(machine(catalog), encoder(), 3072, 0)[0, 0]) == 0.0


def test_more_pictures_take_longer_and_more_ranks_less(catalog: Catalog) -> None:
    one, two, split = (
        float(encode_s(machine(catalog, tp), encoder(), 3072, parts)[0, 0]) for tp, parts in ((1, 1), (1, 2), (2, 1))
    )
    assert 1.7 * one < two < 2.0 * one
    assert 0.45 * one < split < one


def test_pictures_hold_up_the_first_token_and_the_others(catalog: Catalog) -> None:
    clients = np.array([1, 64])
    plain, seeing = (steady_state(machine(catalog), clients, 1500, 100, encode_s=s) for s in (0.0, 0.05))
    assert float(seeing.ttft_s[0, 0] - plain.ttft_s[0, 0]) == pytest.approx(0.05, rel=1e-6)
    assert float(seeing.tpot_s[0, 0]) == pytest.approx(float(plain.tpot_s[0, 0]), rel=1e-3), "nobody else's pictures"
    assert float(seeing.tpot_s[0, 1]) > float(plain.tpot_s[0, 1])
    assert float(seeing.requests_per_s[0, 1]) < 0.95 * float(plain.requests_per_s[0, 1])
    assert float((seeing.service_s - plain.service_s)[0, 1]) == pytest.approx(0.05, rel=0.2)
