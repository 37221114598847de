"""Plans against simulations: the percentiles come out as promised."""

import pytest
from tests.decide.plan.workloads import one_class, workload

from crosstie.catalog.library import Catalog
from crosstie.core.workload import RequestClass, Target
from crosstie.decide.plan.plan import SimulatedClass, plan as make_plan

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
@pytest.mark.parametrize("name", list(CASES))
def test_targets_are_kept_when_simulated(catalog: Catalog, name: str, accelerator: str) -> None:
    """A confirmed plan holds with seeds by which it was not found."""
    classes = CASES[name]
    made = make_plan(catalog, workload(*classes, accelerators=(accelerator,), whole_nodes=False), confirm=True)
    assert made.confirmed is not None
    for one in made.simulated:
        assert one.requests > 0
        assert (one.ttft_s is None) == (one.ttft is None)
        assert (one.tpot_s is None) == (one.tpot is None)
        assert one.holds, one


def test_holds_is_about_both_targets() -> None:
    target = Target(seconds=1.0, percentile=0.9)
    assert SimulatedClass("x", 10, 0.9, 1.0, target, target).holds
    assert not SimulatedClass("x", 10, 1.1, 0.5, target, target).holds
    assert not SimulatedClass("x", 10, 0.5, 1.1, target, target).holds
    assert SimulatedClass("x", 10, None, None, None, None).holds
