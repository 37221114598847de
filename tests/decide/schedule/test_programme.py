"""The programme of a purchase schedule against costs worked out by hand, and laws that hold for every answer."""

import numpy as np
import pytest

from crosstie.decide.schedule.programme import CONTRACT, OWNED, RENTED, Acquisition, Futures, decide, rounded

QUARTERS = 4


def rents(part: int, usd: float) -> list[Acquisition]:
    return [Acquisition(part, RENTED, q, q, q + 1, usd, "on-demand") for q in range(QUARTERS)]


def buys(part: int, first: float, each: float, lead: int) -> list[Acquisition]:
    """`first` USD for having bought one, and `each` for every quarter that it is kept."""
    return [
        Acquisition(part, OWNED, ordered, ordered + lead, until, first + each * (until - ordered - lead), "buy")
        for ordered in range(QUARTERS)
        for until in range(ordered + lead + 1, QUARTERS + 1)
    ]


def known(demand: list[float], gpus: tuple[float, ...] = (10.0,), orderable: tuple[int, ...] = (0,)) -> Futures:
    return Futures(
        gpus=np.array([gpus]), demand=np.array([demand]), orderable=np.array([orderable]),
        there=np.zeros((len(gpus), QUARTERS)),
    )  # fmt: skip


def test_what_is_bought_costs_less_than_renting_from_its_delivery_on() -> None:
    """10 GPUs: a quarter's rent of 1.0 each until they come, then 0.5 + 3 x 0.2 for each bought: 10 + 11, not 40."""
    found = decide([*rents(0, 1.0), *buys(0, 0.5, 0.2, 1)], known([1.0] * QUARTERS))
    assert found.now == {(0, OWNED, "buy"): pytest.approx(10.0)}
    assert found.usd[0] == pytest.approx(10.0 + 10.0 * (0.5 + 0.6))


def test_what_is_dearer_to_buy_is_rented() -> None:
    found = decide([*rents(0, 1.0), *buys(0, 5.0, 0.2, 1)], known([1.0] * QUARTERS))
    assert found.now[0, OWNED, "buy"] == pytest.approx(0.0)
    assert found.usd[0] == pytest.approx(40.0)


def test_a_part_that_comes_later_is_not_ordered_before() -> None:
    """The second carries the traffic with half the GPUs, and can be ordered from the third quarter on."""
    ways = [*rents(0, 1.0), *buys(1, 0.0, 0.1, 0)]
    found = decide(ways, known([1.0] * QUARTERS, (10.0, 5.0), (0, 2)))
    assert found.usd[0] == pytest.approx(2 * 10.0 + 5.0 * 0.1 * 2)


def test_what_is_there_is_used_first() -> None:
    there = np.full((1, QUARTERS), 4.0)
    uncertain = Futures(np.array([[10.0]]), np.ones((1, QUARTERS)), np.array([[0]]), there)
    assert decide(rents(0, 1.0), uncertain).usd[0] == pytest.approx(4 * 6.0)


def test_orders_of_now_are_the_same_in_all_worlds_and_later_ones_follow_the_world() -> None:
    """Traffic stays or doubles: now is ordered what both need, since a GPU too many costs more than one rented."""
    ways = [*rents(0, 1.0), *buys(0, 1.2, 0.2, 1)]
    uncertain = Futures(
        gpus=np.full((2, 1), 10.0), demand=np.array([[1.0] * 4, [1.0, 2.0, 2.0, 2.0]]),
        orderable=np.zeros((2, 1)), there=np.zeros((1, QUARTERS)),
    )  # fmt: skip
    found = decide(ways, uncertain)
    bought = [sum(found.gpus[w, i] for i, way in enumerate(ways) if way.is_now) for w in range(2)]
    assert bought[0] == pytest.approx(bought[1])
    assert bought[0] == pytest.approx(10.0)
    assert found.usd[1] > found.usd[0]


def test_less_choice_and_fixed_orders_are_never_cheaper() -> None:
    ways = [*rents(0, 1.0), *buys(0, 1.2, 0.2, 1), Acquisition(0, CONTRACT, 0, 0, 4, 3.0, "reserved-1-year")]
    uncertain = known([1.0, 1.5, 1.2, 2.0])
    free = decide(ways, uncertain)
    for kept in (ways[:-1], rents(0, 1.0)):
        assert decide(kept, uncertain).usd[0] >= free.usd[0] - 1e-6
    whole = rounded(free.now, lambda part: 8)
    assert all(gpus % 8 == 0 for gpus in whole.values())
    assert decide(ways, uncertain, whole).usd[0] >= free.usd[0] - 1e-6
