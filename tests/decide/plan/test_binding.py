"""Limits that cost money, fleets that are simple, and stacks that are chosen early: each against doing without."""

import numpy as np
import pytest
from tests.decide.plan.workloads import BATCH, CHAT, CODE, one_class, workload
from tests.present import present

from crosstie.catalog.library import Catalog
from crosstie.decide.plan.candidates import key_of
from crosstie.decide.plan.optimise import simplest
from crosstie.decide.plan.plan import plan as make_plan
from crosstie.decide.plan.programme import Solution
from crosstie.decide.plan.scaling import WorldScaling
from crosstie.decide.plan.survey import of_one_stack, offers, one_stack, surveys

DOCUMENTS = one_class("documents", 4.0, {"median": 6000, "p95": 30_000}, 300, ttft=(10.0, 0.9), tpot=(0.08, 0.9))
ALLOWED = ("mi300x", "h200")


def test_a_limit_that_binds_is_named_with_what_it_costs() -> None:
    catalog = Catalog([])
    free = make_plan(catalog, workload(CODE, BATCH, accelerators=ALLOWED, at_most=dict.fromkeys(ALLOWED, 10_000)))
    assert free.binding == [], "a limit that does not bind is not named"
    most = {name: max(count // 2, 1) for name, count in list(present(free.fleet).gpus.items())[:1]}
    bound = make_plan(catalog, workload(CODE, BATCH, accelerators=ALLOWED, at_most=most))
    (name,) = most
    (one,) = bound.binding
    assert one.key == f"at_most.{name}"
    assert one.without_it.gpus[name] > most[name]
    assert one.saves_usd_per_hour == pytest.approx(present(bound.fleet).usd_per_hour - one.without_it.usd_per_hour)
    assert one.saves_usd_per_hour > 0


def fleet(usd: float, replicas: list[int], gpus: list[float]) -> Solution:
    shares = np.zeros((len(replicas), 1))
    return Solution(np.array(replicas), shares, usd, usd, np.array(gpus), np.array(gpus), 0.0)


def test_of_nearly_equal_fleets_the_simplest_is_taken_unless_a_vendor_undercuts_it() -> None:
    rich = fleet(100.0, [1, 1, 1], [1.0, 1.0, 1.0])
    plain = fleet(100.9, [3, 0, 0], [3.0, 0.0, 0.0])
    far = fleet(102.0, [1, 0, 0], [1.0, 0.0, 0.0])
    fleets = {"a": rich, "b": plain, "c": far, "d": None}
    assert simplest(fleets, 0.01, ()) == (rich, plain)
    assert simplest(fleets, 0.0, ()) == (rich, rich)
    assert simplest(fleets, 0.01, [fleet(100.5, [1], [1.0]), None]) == (rich, rich)


@pytest.mark.parametrize("sure", [0.5, 0.9], ids=["likely", "safe"])
def test_the_stack_of_an_accelerator_can_be_chosen_before_all_tiers_are_evaluated(sure: float) -> None:
    catalog = Catalog([])
    work = workload(CHAT, DOCUMENTS, accelerators=("mi300x", "mi355x", "h200", "b200"))
    sizing = WorldScaling(work, sure)
    surveyed = surveys(catalog, work, [catalog.accelerator(name) for name in work.constraints.accelerators])
    late = {key_of(column.deployment) for column in one_stack(offers(surveyed, sizing)).columns}
    early = {key_of(d) for one in of_one_stack(surveyed, sizing) for d in one.deployments}
    assert early == late
    assert len(early) < sum(len(one.deployments) for one in surveyed)
