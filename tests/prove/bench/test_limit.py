"""The search for the highest rate: against servers whose limit is known, and one that holds by luck."""

from dataclasses import replace

import pytest
from tests.prove.bench.test_summary import TARGETS, outcome, run

from crosstie.prove.bench.limit import find_limit
from crosstie.prove.bench.loads import BenchLoad
from crosstie.prove.bench.summary import PointResult, of_runs

HELD = of_runs(BenchLoad(requests_per_s=1.0), [run([outcome(0.0, 0.1, 1.0)] * 8)], TARGETS)


def result(well: bool) -> PointResult:
    return HELD if well else replace(HELD, holds=False)


@pytest.mark.parametrize("start", [0.1, 3.0, 200.0])
def test_the_limit_is_found_from_below_and_from_above(start: float) -> None:
    found = find_limit(start, lambda rate, number: result(rate <= 17.3), lambda one: one.holds)
    assert found.confirmed
    assert found.requests_per_s is not None
    assert found.missed is not None
    assert found.requests_per_s <= 17.3 < found.missed <= found.requests_per_s * 1.05
    assert found.goodput_requests_per_s == found.requests_per_s
    assert len(found.trials) < 24


def test_what_held_by_luck_is_taken_for_too_much() -> None:
    """Above 10 it holds the first time and never again."""
    seen: set[float] = set()

    def trial(rate: float, number: int) -> PointResult:
        lucky = rate <= 12.0 and rate not in seen
        seen.add(rate)
        return result(rate <= 10.0 or lucky)

    found = find_limit(1.0, trial, lambda one: one.holds)
    assert found.requests_per_s is not None
    assert found.requests_per_s <= 10.0
    assert found.confirmed


def test_a_server_that_keeps_nothing_has_no_limit() -> None:
    found = find_limit(1.0, lambda rate, number: result(False), lambda one: one.holds, lowest=0.1)
    assert [rate for rate, _ in found.trials] == [1.0, 0.5, 0.25, 0.125]
    assert found.requests_per_s is None
    assert found.missed is not None
    assert not found.confirmed


def test_a_server_that_stands_everything_ends_the_search_too() -> None:
    found = find_limit(1.0, lambda rate, number: result(True), lambda one: one.holds)
    assert found.missed is None
    assert not found.confirmed
    assert found.requests_per_s == 2.0**23


def test_an_interrupt_keeps_what_was_found() -> None:
    found = find_limit(1.0, lambda rate, number: result(True) if number < 3 else None, lambda one: one.holds)
    assert found.requests_per_s == 4.0
    assert not found.confirmed
