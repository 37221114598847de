"""What targets cost: never more for a looser one, and what no replica keeps is called that."""

import itertools

import pytest
from tests.decide.plan.workloads import BATCH, one_class, workload

from crosstie.catalog.library import Catalog
from crosstie.decide.plan.plan import Plan, plan as make_plan
from crosstie.decide.plan.targets import FACTORS, TargetPrice

CHAT = one_class("chat", 300.0, {"median": 500, "p95": 3000}, {"mean": 250, "p95": 700}, (1.0, 0.9), (0.03, 0.9))


@pytest.fixture(scope="module")
def planned(catalog: Catalog) -> Plan:
    return make_plan(catalog, workload(CHAT, BATCH, accelerators=("mi300x", "h200"), whole_nodes=False))


def prices(plan: Plan, metric: str) -> TargetPrice:
    return next(one for one in plan.targets if one.metric == metric)


def test_every_target_has_its_prices(planned: Plan) -> None:
    """A class without targets has none to move."""
    assert [(one.class_name, one.metric) for one in planned.targets] == [("chat", "ttft"), ("chat", "tpot")]
    assert planned.fleet is not None
    for one in planned.targets:
        assert [step.factor for step in one.steps] == list(FACTORS)
        own = one.steps[FACTORS.index(1.0)]
        assert own.seconds == one.seconds
        assert own.usd_per_hour == pytest.approx(planned.fleet.usd_per_hour)


def test_looser_targets_are_never_dearer(planned: Plan) -> None:
    for one in planned.targets:
        costs = [float("inf") if step.usd_per_hour is None else step.usd_per_hour for step in one.steps]
        assert all(left >= right * (1 - 1e-9) for left, right in itertools.pairwise(costs)), one
    # And a TPOT target at the edge of what a token takes is worth something.
    steps = prices(planned, "tpot").steps
    assert steps[0].usd_per_hour is None or steps[0].usd_per_hour > (steps[-1].usd_per_hour or 0.0)


def test_a_target_at_the_floor_is_called_that(catalog: Catalog, planned: Plan) -> None:
    floor = prices(planned, "tpot").floor_s
    assert 0 < floor < 0.03
    assert not prices(planned, "tpot").at_floor
    tight = one_class("chat", 20.0, 500, 200, (1.0, 0.9), (floor * 1.08, 0.9))
    at_edge = make_plan(catalog, workload(tight, accelerators=("mi300x", "h200"), whole_nodes=False))
    one = prices(at_edge, "tpot")
    assert one.at_floor
    # Half of it no fleet keeps, so that the knee is at or above the target.
    assert one.steps[0].usd_per_hour is None
    assert one.knee_s is not None
    assert one.knee_s >= one.seconds * (1 - 1e-9)
