"""The `prefix` of a class: what it means for the slices, and one line for what it cannot mean."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.small_workload import small

from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.errors import BadData
from crosstie.core.workload import RequestClass

LENGTHS = "input = 1000\noutput = 200\n"


def read(catalog: Catalog, folder: Path, lines: str, lengths: str = LENGTHS) -> RequestClass:
    (one,) = read_workload(catalog, small(folder, (LENGTHS, f"{lengths}{lines}\n"))).classes
    return one


def trace(folder: Path, *, hashes: bool = True, times: bool = True) -> str:
    """A hundred turns a second of ten conversations; each sees what the turn before it had."""
    rows: list[dict[str, Any]] = []
    for turn in range(600):
        who, depth = turn % 10, turn // 10 % 20
        blocks = [who * 1000 + place for place in range(depth + 1)]
        row = {"timestamp": turn * 10, "input_length": 512 * (depth + 1), "output_length": 20}
        rows.append(row | ({"hash_ids": blocks} if hashes else {}))
    file = folder / "trace.jsonl"
    if times:
        file.write_text("\n".join(map(json.dumps, rows)))
    else:
        file = folder / "trace.csv"
        lines = [f"{row['input_length']},20,{';'.join(map(str, row['hash_ids']))}" for row in rows]
        file.write_text("\n".join(["input_length,output_length,hash_ids", *lines]))
    return f'trace = "{file.name}"\n'


def test_without_it_nothing_is_cached(catalog: Catalog, tmp_path: Path) -> None:
    one = read(catalog, tmp_path, "")
    assert one.prefix is None
    assert one.cached_tokens == 0


def test_a_hit_rate_is_a_share_of_every_prompt(catalog: Catalog, tmp_path: Path) -> None:
    one = read(
        catalog, tmp_path, "prefix = { hit_rate = 0.9 }", "input = { median = 1000, p95 = 5000 }\noutput = 200\n"
    )
    assert one.cached_tokens == pytest.approx(0.9 * one.input_tokens)
    for piece in one.slices:
        assert piece.cached_tokens == pytest.approx(0.9 * piece.input_tokens)
        assert piece.cached_sample == pytest.approx([0.9 * tokens for tokens, _ in piece.sample])
        assert piece.shared_tokens == 0


def test_shared_tokens_are_the_beginning_of_every_prompt(catalog: Catalog, tmp_path: Path) -> None:
    one = read(catalog, tmp_path, "prefix = { shared_tokens = 600 }")
    (piece,) = one.slices
    assert (piece.cached_tokens, piece.shared_tokens, piece.cached_sample) == (600, 600, (600,))
    long = "input = { histogram = [[100, 100, 1], [5000, 5000, 1]] }\noutput = 10\n"
    short, longer = read(catalog, tmp_path, "prefix = { shared_tokens = 600 }", long).slices
    assert (short.cached_tokens, longer.cached_tokens) == (99, 600), "a prompt's last token is computed"


def test_a_hit_rate_of_which_a_part_is_shared(catalog: Catalog, tmp_path: Path) -> None:
    (piece,) = read(catalog, tmp_path, "prefix = { hit_rate = 0.8, shared_tokens = 300, idle_s = 20 }").slices
    assert (piece.cached_tokens, piece.shared_tokens) == (800, 300)


def test_a_trace_says_what_a_cache_of_any_size_has(catalog: Catalog, tmp_path: Path) -> None:
    one = read(catalog, tmp_path, "prefix = { measured = true }", trace(tmp_path))
    assert one.requests_per_s == 5.0, "its own rate, not that of the trace"
    for piece in one.slices:
        assert piece.hits is not None
        tokens = one.input_tokens + one.output_tokens
        assert piece.hits.tokens_per_s == pytest.approx(100 * tokens, rel=0.01)
        assert piece.hits.class_tokens_per_s == pytest.approx(5 * tokens, rel=0.01)
        gathered, *spread = piece.hits.cached_tokens
        assert list(gathered) == sorted(gathered)
        assert gathered[-1] == piece.cached_tokens
        assert len(piece.cached_sample) == len(piece.sample)
        assert sum(piece.cached_sample) / len(piece.sample) == pytest.approx(piece.cached_tokens, rel=0.1)
        assert all(row[-1] < gathered[-1] for row in spread), "spread requests find less"
    # Of every turn but the first of each round all is known but the last block.
    assert one.cached_tokens / one.input_tokens == pytest.approx(0.95, abs=0.03)


@pytest.mark.parametrize(
    ("lines", "key", "words"),
    [
        ("prefix = { hit_rate = 1.2 }", "hit_rate", "1.2 must be a number from 0 to 1"),
        ("prefix = { hit_rate = -0.1 }", "hit_rate", "must be a number from 0 to 1"),
        ("prefix = { hit_rate = nan }", "hit_rate", "must be a number from 0 to 1"),
        ("prefix = { hit_rate = '90%' }", "hit_rate", "must be a number from 0 to 1"),
        ("prefix = 0.9", "", "must be a table"),
        ("prefix = {}", "", "give hit_rate, shared_tokens, or measured = true"),
        ("prefix = { hitrate = 0.9 }", "hitrate", "did you mean hit_rate"),
        ("prefix = { shared_tokens = -1 }", "shared_tokens", "must be a whole number from 0"),
        ("prefix = { hit_rate = 0.5, shared_tokens = 600 }", "shared_tokens", "600 are more than hit_rate, 0.5 of 1,000"),
        ("prefix = { hit_rate = 0.5, routing = 'spread' }", "routing", "needs measured = true"),
        ("prefix = { hit_rate = 0.5, host_gib_per_gpu = 100 }", "host_gib_per_gpu", "needs measured = true"),
        ("prefix = { measured = true }", "measured", "the class has no trace"),
        ("prefix = { measured = true, hit_rate = 0.5 }", "hit_rate", "is what measured = true finds out"),
    ],
)  # fmt: skip
def test_what_cannot_be(catalog: Catalog, tmp_path: Path, lines: str, key: str, words: str) -> None:
    with pytest.raises(BadData, match=words) as caught:
        read(catalog, tmp_path, lines)
    assert caught.value.key == ("class[0].prefix." + key).rstrip(".")


@pytest.mark.parametrize(
    ("given", "lines", "words"),
    [
        ({"hashes": False}, "prefix = { measured = true }", "has no hash_ids"),
        ({"times": False}, "prefix = { measured = true }", "has no times"),
        ({}, "prefix = { measured = true, remote_gb_per_s = 5 }", "has no meaning without remote_gib"),
        ({}, "prefix = { measured = true, routing = 'any' }", "is not one of gathered, spread"),
    ],
)
def test_what_a_trace_cannot_say(
    catalog: Catalog, tmp_path: Path, given: dict[str, bool], lines: str, words: str
) -> None:
    with pytest.raises(BadData, match=words):
        read(catalog, tmp_path, lines, trace(tmp_path, **given))
