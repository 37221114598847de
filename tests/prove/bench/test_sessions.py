"""Conversations: every prompt holds the one before it, and the engine's own counters say what its cache served."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.run.emulate.running import emulated_beside

from crosstie_gateway.emulate.fleet import EmulatedFleet


@pytest.fixture(scope="module")
def running() -> Iterator[EmulatedFleet]:
    with emulated_beside() as made:
        yield made


def point(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())["endpoints"][0]["points"][0]
    return found


def test_prompts_grow_and_the_cache_serves_what_was_said(
    crosstie: Command, running: EmulatedFleet, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    asked = [
        "bench", running.fleet.pools[0].backends[0], "--speed", "20", "--sessions", "3", "--turns", "4", "--pause", "2",
        "--input", "400", "--output", "20", "--vary", "0", "--warmup", "0", "-o", str(file),
    ]  # fmt: skip
    got = crosstie(*asked)
    assert got.status == 0, got.err
    found = point(file)
    assert (found["arrivals"], found["requests"], found["failed"]) == ("sessions", 12, 0)
    assert [one["name"] for one in found["phases"]] == ["turn 1", "turn 2", "turn 3", "turn 4"]
    tokens = [one["input_tokens"] / one["requests"] for one in found["phases"]]
    # Each has the prompt before it, its answer and as much that is new.
    for before, after in pairwise(tokens):
        assert after - before == pytest.approx(420, rel=0.1)
    # Of four prompts of 1 to 4 parts, 6 of 10 parts were there before.
    assert found["prefix_hits"] / found["prefix_queries"] == pytest.approx(0.6, abs=0.1)
    assert "prefix cache, by the engine's own counters" in got.out
    assert "turn 4" in got.out
    # Nothing is predicted of them, and nothing learnt.
    seen = crosstie("validate", str(file))
    assert seen.status != 0 or "0 predicted" in seen.out
    before = file.read_text()
    assert crosstie(*asked, "--resume").status == 0
    assert point(file) == json.loads(before)["endpoints"][0]["points"][0]


def test_sessions_stand_alone(crosstie: Command) -> None:
    got = crosstie("bench", "http://127.0.0.1:1", "--sessions", "2", "--rate", "3")
    assert (got.status, got.err.count("\n")) == (2, 1)
    assert "--sessions is a load of its own" in got.err
