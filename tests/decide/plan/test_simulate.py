"""A plan's fleet behind the gateway's own policy, by simulation; and what is asked wrongly."""

import msgspec
import pytest
from tests.decide.plan.workloads import CHAT, TWO, one_class, workload

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.market import adjusted
from crosstie.decide.plan.plan import Plan, plan
from crosstie.decide.plan.simulate import simulate, simulate_pools

WORK = workload(CHAT, accelerators=TWO, spare=0.2)


@pytest.fixture(scope="module")
def made(catalog: Catalog) -> Plan:
    return plan(catalog, WORK, today="2026-11-15")


def test_a_planned_fleet_keeps_its_targets_at_its_peak_and_not_at_many_times_it(catalog: Catalog, made: Plan) -> None:
    at_peak = simulate(catalog, made, WORK, requests=1500)
    assert at_peak.score.requests == 1200, "the first fifth fills the fleet"
    assert at_peak.by_class == {"chat": at_peak.score}
    assert at_peak.score.within > 0.85
    assert at_peak.score.refused == 0.0
    assert simulate(catalog, made, WORK, requests=1500, load=8.0).score.within < at_peak.score.within


def test_a_plan_and_its_fleet_are_the_same_question_and_a_seed_the_same_answer(catalog: Catalog, made: Plan) -> None:
    first, second = (simulate(catalog, asked, WORK, requests=300) for asked in (made, fleet_of(made)))
    assert first.score == second.score
    assert simulate(catalog, made, WORK, requests=300, seed=8).score != first.score
    assert simulate(catalog, made, WORK, requests=300, policy="round-robin").policy == "round-robin"


def test_pools_are_simulated_on_the_plan(made: Plan) -> None:
    (chat,) = simulate_pools(made).simulated
    assert chat.name == "chat"
    assert chat.holds


def test_questions_that_mean_nothing_are_refused(catalog: Catalog, made: Plan) -> None:
    with pytest.raises(BadInput, match="at least 100"):
        simulate(catalog, made, WORK, requests=5)
    with pytest.raises(BadInput, match="times the peak: must be above 0"):
        simulate(catalog, made, WORK, load=0.0)
    other = workload(one_class(model="gpt-oss-20b"), accelerators=TWO)
    with pytest.raises(BadInput, match="serves gpt-oss-20b"):
        simulate(catalog, made, other)


def test_a_workload_is_adjusted_in_what_is_given_and_nothing_else() -> None:
    got = adjusted(WORK, usd_per_gpu_hour={"mi300x": 1.5}, discount={"NVIDIA": 0.1}, accelerators=["h200", "h200"])
    assert got.prices.usd_per_gpu_hour == {"mi300x": 1.5}
    assert got.prices.discount == {"NVIDIA": 0.1}
    assert got.constraints == msgspec.structs.replace(WORK.constraints, accelerators=("h200",))
    assert adjusted(WORK) == WORK
    for wrong, why in (
        ({"usd_per_gpu_hour": {"mi300x": 0.0}}, "from 0.001"),
        ({"discount": {"AMD": 1.0}}, "from 0%"),
        ({"accelerators": []}, "none is named"),
    ):
        with pytest.raises(BadInput, match=why):
            adjusted(WORK, **wrong)
