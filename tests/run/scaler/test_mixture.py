"""Which replicas carry a load, and which are cheapest."""

import numpy as np

from crosstie_gateway.scaler.mixture import SupplyChoices


def choices(rate: list[list[float]], have: list[int]) -> SupplyChoices:
    none = np.zeros(len(have))
    return SupplyChoices(
        rate=np.array(rate), usd_per_hour=none + 1.0, floor=none.astype(np.int64), have=np.array(have),
        most=np.array(have), starting=none,
    )  # fmt: skip


def test_what_there_is_carries_up_to_what_it_takes() -> None:
    two = choices([[2.0], [3.0]], [1, 2])
    assert two.load(np.array([4.0])) == 0.5
    assert two.carries(np.array([8.0]))
    assert not two.carries(np.array([8.1]))
    assert not choices([[2.0]], [0]).carries(np.array([0.1]))


def test_replicas_that_differ_in_what_suits_them_are_given_that() -> None:
    # One takes only the first kind, the other both, and badly the first: a like share says no, the solver yes.
    apart = choices([[10.0, 0.0], [1.0, 10.0]], [1, 1])
    demand = np.array([10.0, 9.5])
    assert apart.load(demand) > 1.0
    assert apart.carries(demand)
    assert not apart.carries(np.array([10.0, 10.5]))
