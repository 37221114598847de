"""Rates that change: as many requests as the phases say, each where it should come, told phase by phase."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.conftest import Command
from tests.run.emulate.running import emulated_beside

from crosstie.catalog.days import shipped_days
from crosstie.core.errors import BadInput
from crosstie.prove.bench.loads import BenchLengths, BenchLoad, made, phases_of, scheduled
from crosstie_gateway.emulate.fleet import EmulatedFleet


@pytest.fixture(scope="module")
def running() -> Iterator[EmulatedFleet]:
    with emulated_beside() as found:
        yield found


def times(schedule: str) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(scheduled(phases_of(schedule), np.random.default_rng(0)))


def test_a_ramp_rises_evenly() -> None:
    found = times("ramp:2-20:100")
    assert len(found) == 1100
    assert (np.diff(found) >= 0).all()
    assert found.max() < 100
    # Half of the time has 2 to 11 requests a second, so a mean of 6.5.
    assert (found < 50).sum() == pytest.approx(325, abs=1)


def test_a_burst_is_in_the_middle() -> None:
    found = times("burst:4-12:100")
    assert [((found >= low) & (found < high)).sum() for low, high in ((0, 40), (40, 60), (60, 100))] == [160, 240, 160]


def test_a_day_has_its_shape() -> None:
    found = times("day:10:240")
    shape = shipped_days()["servegen-language"]
    assert len(found) == pytest.approx(100 * sum(shape), abs=1)
    hours = np.histogram(found, 24, (0, 240))[0]
    assert np.abs(hours - 100 * np.array(shape)).max() <= 1.0
    assert len({one.name for one in phases_of("day:10:240")}) == 6


def test_lengths_are_as_of_any_other_load() -> None:
    found = made(BenchLoad(schedule="ramp:1-1:50"), BenchLengths(100, 10, vary=0.2), None, None, 0)
    assert len(found) == 50
    assert sum(one.input_tokens for one in found) == pytest.approx(5000, abs=5)


@pytest.mark.parametrize("wrong", ["ramp", "ramp:1:2:3", "day=weekend:1:60", "burst:0-0:10", "ramp:-1-2:5"])
def test_what_is_no_schedule_is_refused(wrong: str) -> None:
    with pytest.raises(BadInput, match="--schedule"):
        phases_of(wrong)


def test_results_are_told_by_phase_and_are_no_prediction(
    crosstie: Command, running: EmulatedFleet, tmp_path: Path
) -> None:
    file = tmp_path / "run.json"
    url = running.fleet.pools[0].backends[0]
    asked = ["bench", url, "--speed", "20", "--schedule", "burst:1-4:20", "--input", "60", "--output", "4", "--warmup",
             "0", "-o", str(file)]  # fmt: skip
    got = crosstie(*asked)
    assert got.status == 0, got.err
    (point,) = json.loads(file.read_text())["endpoints"][0]["points"]
    assert point["arrivals"] == "schedule"
    assert [(one["name"], one["requests"]) for one in point["phases"]] == [
        ("before, 1 req/s", 8), ("burst, 4 req/s", 16), ("after, 1 req/s", 8),
    ]  # fmt: skip
    assert "burst, 4 req/s" in got.out
    assert "0 predicted" in crosstie("validate", str(file)).out
    got = crosstie(*asked, "--rate", "2")
    assert (got.status, got.err.count("\n")) == (2, 1)
