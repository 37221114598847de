"""Rules for pictures as data: what a file must say."""

from pathlib import Path

import pytest

from crosstie.catalog.vision import read_vision, shipped_vision
from crosstie.core.errors import BadData

GOOD = """
[sources]
ours = { ref = "a config.json", date = "2026-11" }

[[rule]]
models = ["seer-*"]
sources = ["ours"]
kind = "area"
patch = 14
merge = 2
min_pixels = 3136
max_pixels = 1000000
encoder = { layers = 32, hidden = 1280, intermediate = 3420 }
"""


def test_what_is_shipped_can_be_read() -> None:
    assert {one.rule.kind for one in shipped_vision()} == {"area", "edge", "fitted", "aspect", "fixed"}
    assert all(one.sources and one.rule.encoder for one in shipped_vision())


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("[[rule]]", "[rule]", "rule: missing"),
        ('"ours"]', '"theirs"]', "'theirs' is not in .sources."),
        ('sources = ["ours"]', "sources = []", "needs models and sources"),
        ("min_pixels = 3136\n", "", "min_pixels: missing: a rule of kind 'area' needs it"),
        ('"area"', '"round"', "'round' is not one of area, edge"),
        ("patch = 14", "patch = 0", "patch: 0 must be a whole number from 1"),
        ("layers = 32, ", "", "encoder.layers: missing"),
        ("merge = 2", "merges = 2", "merges: unknown key; did you mean merge"),
    ],
)
def test_what_is_no_rule(tmp_path: Path, old: str, new: str, says: str) -> None:
    file = tmp_path / "vision.toml"
    file.write_text(GOOD)
    assert len(read_vision(file)) == 1
    assert old in GOOD
    file.write_text(GOOD.replace(old, new))
    with pytest.raises(BadData, match=says):
        read_vision(file)
