"""Reserved for the base of a day, on-demand for its peak: counted by hand, and against every other number."""

from typing import Any

import numpy as np
import pytest
from tests.decide.plan.workloads import CODE, workload
from tests.present import present

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.workload import Workload
from crosstie.decide.plan.market import market
from crosstie.decide.plan.mixture import Mixture, mixture
from crosstie.decide.plan.plan import plan as make_plan

# Six hours at the peak, the others at half of it; an hour before each replicas must be there.
DAY = (0.5,) * 10 + (1.0,) * 6 + (0.5,) * 8


class FakePool:
    """Of a fleet: what a mixture asks of it."""

    def __init__(self, catalog: Catalog, name: str, replicas: int, gpus: int):
        model, on = catalog.model("llama-3.1-8b"), catalog.accelerator(name)
        self.deployment = catalog.deployment(model, on, Parallelism(tp=gpus))
        self.replicas = replicas


class FakeFleet:
    def __init__(self, *pools: FakePool):
        self.pools = pools


def mixed(catalog: Catalog, pools: list[tuple[str, int, int]], **changes: Any) -> Mixture | None:
    asked: Workload = workload(day=changes.pop("day", DAY), kinds=("on-demand",), **changes)
    fleet: Any = FakeFleet(*(FakePool(catalog, *pool) for pool in pools))
    return mixture(catalog, asked, market(catalog, asked), fleet)


def test_by_hand(catalog: Catalog) -> None:
    """10 GPUs for seven hours, 5 for seventeen: contracts at 2 against rent at 3 pay for the five that stay."""
    prices = {"usd_per_gpu_hour": {"h200": 3.0}, "reserved_usd_per_gpu_hour": {"h200": 2.0}}
    found = present(mixed(catalog, [("h200", 10, 1)], **prices))
    one = found.accelerators["h200"]
    assert (one.reserved, one.most_on_demand) == (5, 5)
    assert one.usd_per_hour == pytest.approx(5 * 2.0 + 5 * 7 / 24 * 3.0)
    assert one.all_reserved_usd_per_hour == pytest.approx(20.0)
    assert one.as_needed_usd_per_hour == pytest.approx((10 * 7 + 5 * 17) / 24 * 3.0)
    assert one.around_the_clock_usd_per_hour == pytest.approx(30.0)
    assert found.saves == pytest.approx(1.0 - one.usd_per_hour / one.as_needed_usd_per_hour)


@pytest.mark.parametrize(
    ("contract", "reserved"),
    # Rent is 3; the upper five are needed for 7 of 24 hours, so a contract for them pays below 0.875.
    [(0.8, 10), (0.9, 5), (2.9, 5), (3.1, 0)],
)
def test_the_two_prices_decide(catalog: Catalog, contract: float, reserved: int) -> None:
    prices = {"usd_per_gpu_hour": {"h200": 3.0}, "reserved_usd_per_gpu_hour": {"h200": contract}}
    found = present(mixed(catalog, [("h200", 10, 1)], **prices))
    assert found.accelerators["h200"].reserved == reserved


def test_no_other_number_costs_less(catalog: Catalog) -> None:
    day = tuple(np.random.default_rng(3).random(24))
    day = tuple(hour / max(day) for hour in day)
    prices = {"usd_per_gpu_hour": {"h200": 3.0}, "reserved_usd_per_gpu_hour": {"h200": 1.9}}
    found = present(mixed(catalog, [("h200", 23, 2)], day=day, **prices))
    needed = [2 * max(np.ceil(23 * max(day[h], day[(h + 1) % 24]) - 1e-9), 1) for h in range(24)]
    costs = [n * 1.9 + float(np.mean([max(gpus - n, 0) for gpus in needed])) * 3.0 for n in range(60)]
    assert found.accelerators["h200"].usd_per_hour == pytest.approx(min(costs))


def test_whole_nodes_and_those_on_hand(catalog: Catalog) -> None:
    prices = {"usd_per_gpu_hour": {"h200": 3.0}, "reserved_usd_per_gpu_hour": {"h200": 2.0}}
    found = present(mixed(catalog, [("h200", 20, 1)], whole_nodes=True, inventory={"h200": 4}, **prices))
    # 16 beyond those on hand at the peak, 6 in other hours: two nodes and one.
    assert (found.accelerators["h200"].reserved, found.accelerators["h200"].most_on_demand) == (8, 8)
    assert mixed(catalog, [("h200", 4, 1)], inventory={"h200": 4}, **prices) is None


def test_what_has_no_contract_price_is_said_with_the_price_at_which_it_would_pay(catalog: Catalog) -> None:
    found = present(mixed(catalog, [("mi355x", 10, 1)], usd_per_gpu_hour={"mi355x": 3.0}))
    assert found.accelerators == {}
    kind, level = found.lacking["mi355x"]
    assert kind == "reserved"
    assert level == pytest.approx(3.0 * (10 * 7 + 5 * 17) / 240)


def test_a_plan_has_one_where_its_workload_has_a_day(catalog: Catalog) -> None:
    asked = {"kinds": ("on-demand",), "accelerators": ("h200",)}
    assert make_plan(catalog, workload(CODE, **asked)).mixture is None
    plan = make_plan(catalog, workload(CODE, **asked, day=DAY, discount={"NVIDIA": 0.1}))
    assert plan.mixture is not None
    assert plan.fleet is not None
    assert set(plan.mixture.accelerators) == set(plan.fleet.gpus)
    for one in plan.mixture.accelerators.values():
        assert (one.contract.kind, one.contract.provider) == ("reserved", "hyperstack")
    around = plan.mixture.total("around_the_clock_usd_per_hour")
    assert around == pytest.approx(plan.fleet.usd_per_hour)
    assert plan.mixture.total("usd_per_hour") < around
