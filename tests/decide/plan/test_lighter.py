"""Lighter formats are suggested with what they save, and never chosen unless the workload names them."""

import pytest
from tests.decide.plan.workloads import one_class, workload
from tests.present import present

from crosstie.catalog.library import Catalog
from crosstie.core.workload import ModelChoice
from crosstie.decide.plan.plan import Plan, plan as make_plan

CATALOG = Catalog([])
# Long contexts: memory binds, so a smaller cache and smaller weights are worth most.
LONG = one_class("long", 4.0, 20_000, 500, ttft=(20.0, 0.9), tpot=(0.1, 0.9), model="llama-3.3-70b")


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(CATALOG, workload(LONG, accelerators=("b200",), models={}))


def test_the_answer_has_none_of_them(plan: Plan) -> None:
    assert {(pool.deployment.kv_format, pool.deployment.precision.id) for pool in present(plan.fleet).pools} == {
        ("bf16", "fp8")
    }


def test_each_is_said_with_its_gain_and_asked_for_gives_it(plan: Plan) -> None:
    assert plan.fleet is not None
    assert [one.what for one in plan.lighter] == ["an FP8 KV cache", "FP4 weights"]
    kv = plan.lighter[0].fleet
    assert kv.dearer < -0.02
    asked = {LONG.model: ModelChoice(kv_formats=("bf16", "fp8"))}
    again = make_plan(CATALOG, workload(LONG, accelerators=("b200",), models=asked))
    assert present(again.fleet).usd_per_hour <= kv.usd_per_hour * 1.02
    assert "an FP8 KV cache" not in [one.what for one in again.lighter]


def test_what_the_workload_names_already_is_no_suggestion() -> None:
    """FP4 weights are not offered where the workload has them."""
    every = ModelChoice(precisions=("fp8", "nvfp4", "mxfp4"), kv_formats=("bf16", "fp8"))
    asked = workload(LONG, accelerators=("b200",), models={LONG.model: every})
    assert make_plan(CATALOG, asked).lighter == []
