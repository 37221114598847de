"""What is expected of a shared pool without simulating it, against a simulation, and where it must be exact."""

from itertools import pairwise

import numpy as np
import pytest

from crosstie.host.expected import expect
from crosstie.host.hosted import Hosted
from crosstie.sim.hosting import HostedTraffic, host

SIZES = (2, 4, 8, 8, 10, 15, 16, 20, 27, 30, 33, 40, 50, 70, 75)
RATES = 0.1 / np.arange(1, 16) / float(np.sum(1.0 / np.arange(1, 16)))


def shelf(pinned: bool = False) -> list[Hosted]:
    sizes = np.random.default_rng(1).permutation(SIZES)
    return [
        Hosted(f"m{n}", float(size), 0.5 + size / 50.0, min_kv_bytes=3.0, pinned=pinned and n == 14)
        for n, size in enumerate(sizes)
    ]


def simulated(rooms: list[float], span_s: float = 100_000.0) -> tuple[float, float]:
    """Cold share and evictions an hour, by Poisson requests that never change their minds."""
    chance = np.random.default_rng(4)
    count = int(chance.poisson(RATES.sum() * span_s))
    kinds = chance.choice(len(RATES), count, p=RATES / RATES.sum())
    traffic = HostedTraffic(np.sort(chance.uniform(0.0, span_s, count)), kinds, np.full(count, 3.0))
    found = host(shelf(), rooms, traffic, warm_up_s=span_s / 4.0, ahead=False)
    return found.cold_share, found.evictions_per_hour


@pytest.mark.parametrize(
    "rooms",
    [[300.0], [90.0] * 4, *(pytest.param(x, marks=pytest.mark.slow) for x in ([100.0] * 2, [130.0] * 2, [90.0] * 3))],
)
def test_it_is_near_the_simulation(rooms: list[float]) -> None:
    found = expect(shelf(), RATES.tolist(), rooms)
    cold, evictions = simulated(rooms)
    assert found.holds
    assert 0.5 < found.cold_share / cold < 2.0
    assert 0.5 < found.evictions_per_hour / evictions < 2.0


def test_where_all_fit_nobody_is_evicted() -> None:
    found = expect(shelf(), RATES.tolist(), [500.0])
    assert found.cold_share == pytest.approx(0.0, abs=1e-9)
    assert simulated([500.0])[0] < 1e-3
    assert all(share > 0.999 for share in found.resident.values())


def test_memory_that_is_enough_in_total_but_in_pieces_is_not_taken_for_enough() -> None:
    """Three models of 60 on two replicas of 100: the sum would do."""
    hosted = [Hosted(name, 60.0, 1.0) for name in "abc"]
    assert expect(hosted, [0.01] * 3, [100.0, 100.0]).cold_share > 0.05
    assert expect(hosted, [0.01] * 3, [120.0, 100.0]).cold_share == pytest.approx(0.0, abs=1e-9)


def test_more_memory_is_never_colder() -> None:
    shares = [expect(shelf(), RATES.tolist(), [room, room]).cold_share for room in np.arange(80.0, 260.0, 10.0)]
    # The packing has steps, so that a little more memory may be used a little worse.
    assert all(after <= before * 1.1 + 1e-9 for before, after in pairwise(shares))
    assert shares[-1] < 0.01 < shares[0]


def test_pinned_models_are_never_cold() -> None:
    found = expect(shelf(pinned=True), RATES.tolist(), [120.0, 120.0])
    assert found.resident["m14"] == 1.0
    assert expect(shelf(), RATES.tolist(), [120.0, 120.0]).resident["m14"] < 0.9


def test_loads_that_leave_no_time_are_said_to() -> None:
    slow = [Hosted(f"m{n}", 10.0, 60.0) for n in range(10)]
    assert not expect(slow, [0.05] * 10, [10.0]).holds
    assert expect(slow, [0.05] * 10, [100.0]).holds


def test_models_that_nobody_asks_for_take_nothing() -> None:
    found = expect([Hosted("a", 10.0, 1.0), Hosted("b", 10.0, 1.0)], [0.1, 0.0], [10.0])
    assert found.cold_share < 0.05
    assert found.resident["b"] == 0.0
