"""Plans against simulations: the percentiles come out as promised, and a fleet too small does not."""

from dataclasses import replace

import numpy as np
import pytest
from tests.decide.plan.workloads import one_class, workload

from crosstie.catalog.library import Catalog
from crosstie.core.workload import RequestClass, Target
from crosstie.decide.plan.plan import SimulatedClass, plan as make_plan
from crosstie.decide.plan.simulate import _quantile, simulate_classes

SHORT = one_class("chat", 300.0, {"median": 300, "p95": 1200}, {"mean": 200, "p95": 500}, (0.5, 0.95), (0.03, 0.9))
LONG = one_class(
    "documents", 6.0, {"median": 12_000, "p95": 40_000}, {"mean": 300, "p95": 800}, (10.0, 0.9), (0.06, 0.9)
)
COMPLETIONS = one_class("code", 300.0, 2000, 30, (0.4, 0.95), (0.02, 0.9))
PROMPTS = one_class("search", 100.0, 2000, 10, (0.6, 0.99), None)
FILL = one_class("batch", 40.0, 1500, 400, None, None)
FEW_STRICT = one_class("chat", 3.0, 500, 200, (0.6, 0.99), (0.03, 0.99))
SPARSE = one_class("agent", 30.0, {"median": 2000, "p95": 6000}, 300, (1.5, 0.9), (0.03, 0.9), model="gpt-oss-120b")

CASES: dict[str, tuple[RequestClass, ...]] = {
    "short chat": (SHORT,),
    "long documents": (LONG,),
    "code completions": (COMPLETIONS,),
    "prompts": (PROMPTS,),
    "mixed": (SHORT, LONG, COMPLETIONS, FILL),
    "a few strict among many without targets": (FEW_STRICT, FILL),
    "experts": (SPARSE,),
}


@pytest.mark.slow
@pytest.mark.parametrize("accelerator", ["mi300x", "b200"])
@pytest.mark.parametrize("classes", CASES.values(), ids=CASES)
def test_targets_are_kept_when_simulated(catalog: Catalog, classes: tuple[RequestClass, ...], accelerator: str) -> None:
    """A confirmed plan holds with seeds by which it was not found."""
    made = make_plan(catalog, workload(*classes, accelerators=(accelerator,), whole_nodes=False), confirm=True)
    assert made.confirmed is not None
    for one in made.simulated:
        assert one.requests > 0
        assert (one.ttft_s is None) == (one.ttft is None)
        assert (one.tpot_s is None) == (one.tpot is None)
        assert one.holds, one


def test_half_the_replicas_miss(catalog: Catalog) -> None:
    asked = workload(PROMPTS, accelerators=("mi300x",))
    fleet = make_plan(catalog, asked).fleet
    assert fleet is not None
    assert all(one.holds for one in simulate_classes(fleet, asked.classes))
    few = replace(fleet, pools=[replace(pool, replicas=max(pool.replicas // 2, 1)) for pool in fleet.pools])
    assert not all(one.holds for one in simulate_classes(few, asked.classes))


def test_holds_is_about_both_targets() -> None:
    target = Target(seconds=1.0, percentile=0.9)
    assert SimulatedClass("x", 10, 0.9, 1.0, target, target).holds
    assert not SimulatedClass("x", 10, 1.1, 0.5, target, target).holds
    assert not SimulatedClass("x", 10, 0.5, 1.1, target, target).holds
    assert SimulatedClass("x", 10, None, None, None, None).holds


def test_quantiles_are_weighed() -> None:
    """A pool that takes most of a class counts for most of it, however few of its requests were simulated."""
    target = Target(seconds=1.0, percentile=0.5)
    assert _quantile([(1.0, 9.0), (2.0, 0.5), (3.0, 0.5)], target) == 1.0
    assert _quantile([(1.0, 1.0), (2.0, 1.0), (3.0, 9.0)], target) == 3.0
    even = [(float(value), 1.0) for value in np.random.default_rng(1).permutation(1001)]
    assert _quantile(even, Target(seconds=1.0, percentile=0.9)) == pytest.approx(900, abs=1)
    assert _quantile([], target) is None
    assert _quantile(even, None) is None
