"""What targets cost: never more for a looser one, and what no replica keeps is called that."""

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from tests.decide.plan.workloads import BATCH, one_class, workload
from tests.present import present

from crosstie.catalog.library import Catalog
from crosstie.core.workload import Target
from crosstie.decide.plan.infeasible import with_class
from crosstie.decide.plan.plan import Plan, plan as make_plan
from crosstie.decide.plan.run_result import SimulatedClass
from crosstie.decide.plan.scaling import WorldScaling
from crosstie.decide.plan.survey import Offers, offers, offers_of_each, survey, surveys
from crosstie.decide.plan.targets import FACTORS, TargetPrice, TargetStep, _as_simulated

CHAT = one_class("chat", 300.0, {"median": 500, "p95": 3000}, {"mean": 250, "p95": 700}, (1.0, 0.9), (0.03, 0.9))


@pytest.fixture(scope="module")
def planned(catalog: Catalog) -> Plan:
    return make_plan(catalog, workload(CHAT, BATCH, accelerators=("mi300x",), whole_nodes=False))


def prices(plan: Plan, metric: str) -> TargetPrice:
    return next(one for one in plan.targets if one.metric == metric)


def test_every_target_has_its_prices(planned: Plan) -> None:
    """A class without targets has none to move."""
    assert [(one.class_name, one.metric) for one in planned.targets] == [("chat", "ttft"), ("chat", "tpot")]
    for one in planned.targets:
        assert [step.factor for step in one.steps] == list(FACTORS)
        own = one.steps[FACTORS.index(1.0)]
        assert own.seconds == one.seconds
        assert own.usd_per_hour == pytest.approx(present(planned.fleet).usd_per_hour)


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
    at_edge = make_plan(catalog, workload(tight, accelerators=("mi300x",), whole_nodes=False))
    one = prices(at_edge, "tpot")
    assert one.at_floor
    # Half of it no fleet keeps, so that the knee is at or above the target.
    assert one.steps[0].usd_per_hour is None
    assert present(one.knee_s) >= one.seconds * (1 - 1e-9)


def same(one: Offers, other: Offers) -> bool:
    rates = np.allclose(one.requests_per_s, other.requests_per_s, rtol=1e-9)
    kept = np.allclose(one.capacity.keeps_ttft, other.capacity.keeps_ttft, rtol=1e-9)
    return bool(rates and kept and one.columns == other.columns)


def test_moved_together_or_one_by_one_is_the_same(catalog: Catalog) -> None:
    accelerators = [catalog.accelerator("mi300x"), catalog.accelerator("h200")]
    work = workload(CHAT, BATCH)
    surveyed, scaling = surveys(catalog, work, accelerators), WorldScaling(work, 0.8)
    place, kind = next(
        (i, p.request_class) for i, one in enumerate(surveyed) for p in one.parts if p.request_class.ttft
    )
    insteads = [msgspec.structs.replace(kind, ttft=Target(seconds=s, percentile=0.9)) for s in (0.5, 2.0)]
    moved = [with_class(surveyed[place], kind, instead) for instead in insteads]
    together = offers_of_each(surveyed, moved, scaling, peak=1.2)
    for one, found in zip(moved, together, strict=True):
        alone = [one if i == place else other for i, other in enumerate(surveyed)]
        assert same(found, offers(alone, scaling, peak=1.2))
    assert not same(*together)


def test_what_is_known_of_a_replica_is_what_is_worked_out_of_it(catalog: Catalog) -> None:
    whole = surveys(catalog, workload(CHAT), [catalog.accelerator("mi300x"), catalog.accelerator("h200")])[0]
    half = survey(whole.deployments[::2], whole.parts)
    again = survey(whole.deployments, whole.parts, half)
    assert again.deployments == whole.deployments
    for one, other in zip(again.curves, whole.curves, strict=True):
        assert np.allclose(one.requests_per_s, other.requests_per_s, rtol=1e-9)
        assert np.allclose(one.tpot_s, other.tpot_s, rtol=1e-9)


@pytest.mark.parametrize(("seen_s", "marked"), [(0.6, [0.5]), (0.8, [0.5, 0.75]), (0.4, []), (None, [])])
def test_a_price_that_the_simulation_contradicts_is_a_lower_bound(seen_s: float | None, marked: list[float]) -> None:
    """Closed forms may say that a stricter TTFT costs nothing; the fleet at that price misses it when simulated."""
    steps = [TargetStep(factor, factor, 100.0) for factor in FACTORS]
    price = TargetPrice("chat", "ttft", 0.95, 1.0, steps, 0.1, None)
    target = Target(seconds=1.0, percentile=0.95)
    seen = SimulatedClass("chat", 100, seen_s, None, target, None)
    found = _as_simulated(price, [seen], 100.0)
    assert [step.factor for step in found.steps if step.at_least] == marked
    assert [step.usd_per_hour for step in found.steps] == [100.0] * len(FACTORS)
    # A dearer fleet than the answer was not simulated, so nothing is known against it.
    dearer = replace(price, steps=[replace(step, usd_per_hour=150.0) for step in steps])
    assert not any(step.at_least for step in _as_simulated(dearer, [seen], 100.0).steps)
    assert _as_simulated(price, [], 100.0) == price
