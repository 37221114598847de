"""The `lora` and `images` of a class, and how fast engines are with adapters, as data."""

from pathlib import Path

import pytest
from tests.small_workload import small, tables

from crosstie.catalog.library import Catalog
from crosstie.catalog.lora import popularity_of, read_lora_facts, shipped_lora, slots_of
from crosstie.catalog.workloads import read_workload
from crosstie.core.errors import BadData
from crosstie.core.workload import Lora, RequestClass

LENGTHS = "input = 1000\noutput = 200\n"
SPEED = """
[[speed]]
engine = "any"
moe = %s
rank = 16
speed = { value = 0.7, unit = "fraction", basis = "claimed", source = "ours" }
low = 0.4
high = 0.95
"""
GOOD = (
    """
[sources]
ours = { ref = "an article", date = "2026-11" }

[loading]
load = { value = 0.75, unit = "s", basis = "claimed", source = "ours" }
"""
    + SPEED % "false"
    + SPEED % "true"
)


def read(catalog: Catalog, folder: Path, lines: str) -> RequestClass:
    (one,) = read_workload(catalog, small(folder, (LENGTHS, f"{LENGTHS}{lines}\n"))).classes
    return one


def asked(catalog: Catalog, folder: Path, lines: str) -> Lora:
    found = read(catalog, folder, lines).lora
    assert found is not None
    return found


def test_adapters_and_their_popularity(catalog: Catalog, tmp_path: Path) -> None:
    one = asked(catalog, tmp_path, "lora = { adapters = 4, rank = 8 }")
    assert popularity_of(one) == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25])
    assert slots_of(one) == 4
    given = asked(catalog, tmp_path, "lora = { popularity = [3, 1, 0], slots = 2 }")
    assert (given.adapters, slots_of(given), popularity_of(given)) == (3, 2, [0.75, 0.25, 0.0])
    assert slots_of(asked(catalog, tmp_path, "lora = { adapters = 900 }")) == 64


def test_what_is_loaded_is_said(catalog: Catalog, tmp_path: Path) -> None:
    lines = "lora = { adapters = 100, slots = 10, host_slots = 50 }\n"
    notes = read_workload(catalog, small(tmp_path, (LENGTHS, LENGTHS + lines))).notes
    (said,) = [note for note in notes if "adapters" in note]
    assert said.startswith("chat: 100 adapters of rank 16, 10 at once on a replica; 6")
    assert "loaded from disk in 0.75 s" in said


@pytest.mark.parametrize(
    ("lines", "key", "words"),
    [
        ("lora = {}", "lora.adapters", "missing"),
        ("lora = 5", "lora", "must be a table"),
        ("lora = { adapters = 0 }", "lora.adapters", "whole number from 1"),
        ("lora = { adapters = 5, rank = 0 }", "lora.rank", "whole number from 1"),
        ("lora = { adapters = 5, targets = 'mlp' }", "lora.targets", "is not one of attention, all"),
        ("lora = { popularity = [] }", "lora.popularity", "one is above 0"),
        ("lora = { popularity = [0, 0] }", "lora.popularity", "one is above 0"),
        ("lora = { popularity = [1, -1] }", "lora.popularity[1]", "must be a number from 0"),
        ("lora = { popularity = [1], adapters = 3 }", "lora.adapters", "has no meaning beside popularity"),
        ("lora = { adapters = 50, slots = 8, host_slots = 4 }", "lora.host_slots", "4 are fewer than the 8 slots"),
        ("images = {}", "images.width", "missing"),
        ("images = { width = 0, height = 5 }", "images.width", "whole number from 1"),
        ("images = { width = 9, height = 9 }", "images", "nobody says how llama-3.1-8b cuts pictures up"),
        ("images = { width = 9, height = 9, count = 0 }", "images.count", "must be a number from 0.001"),
    ],
)
def test_what_cannot_be(catalog: Catalog, tmp_path: Path, lines: str, key: str, words: str) -> None:
    with pytest.raises(BadData, match=words) as caught:
        read(catalog, tmp_path, lines)
    assert caught.value.key == f"class[0].{key}"


def test_adapters_do_not_go_with_shared_replicas(catalog: Catalog, tmp_path: Path) -> None:
    file = small(tmp_path, (LENGTHS, f"{LENGTHS}lora = {{ adapters = 5 }}\n"), tables("[hosting]\ncold_share = 0.1"))
    with pytest.raises(BadData, match=r"class\[0\].lora: llama-3.1-8b shares replicas by .hosting."):
        read_workload(catalog, file)


def test_speeds_between_ranks_and_for_engines_that_nobody_measured() -> None:
    facts = shipped_lora()
    assert facts.speed("vllm", moe=False, rank=8) == pytest.approx((0.5, 0.66, 0.9))
    assert facts.speed("vllm", moe=False, rank=256)[1] == pytest.approx(0.25)
    low, likely, high = facts.speed("vllm", moe=False, rank=64)
    assert 0.25 < likely < 0.66
    assert low < likely < high
    assert facts.speed("vllm", moe=False, rank=1)[1] == pytest.approx(0.66)
    assert facts.speed("sglang", moe=True, rank=16)[0] == pytest.approx(0.45)
    assert facts.speed("tensorrt-llm", moe=True, rank=16) == facts.speed("vllm", moe=True, rank=64)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (SPEED % "true", "", "missing: engine = 'any' with moe = true"),
        ("moe = false", "moe = 0", "neither true nor false"),
        ("low = 0.4", "low = 0.8", "the speed must lie between low and high"),
        ('source = "ours" }\n\n[[', 'source = "theirs" }\n\n[[', "'theirs' is not in"),
        ("value = 0.7,", "value = 7,", "is outside"),
        ("rank = 16", "ranks = 16", "unknown key; did you mean rank"),
        ("[loading]", "[load]", "unknown key"),
    ],
)
def test_what_is_no_data(tmp_path: Path, old: str, new: str, says: str) -> None:
    file = tmp_path / "lora.toml"
    file.write_text(GOOD)
    assert len(read_lora_facts(file).speeds) == 2
    assert old in GOOD
    file.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(BadData, match=says):
        read_lora_facts(file)
