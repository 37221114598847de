"""Evidence first, and how sure a plan is as one number."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.present import present

from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.cli.plan_show import plan_parts
from crosstie.cli.show import show
from crosstie.core.errors import BadData, BadInput
from crosstie.core.progress import no_progress
from crosstie.core.workload import ModelChoice
from crosstie.decide.plan.answer import NO_FLEET
from crosstie.decide.plan.gate import Gate
from crosstie.decide.plan.market import adjusted, market
from crosstie.decide.plan.optimise import choice
from crosstie.decide.plan.plan import Plan, plan
from crosstie.decide.plan.report import document
from crosstie.decide.plan.scaling import scaling_of
from crosstie.decide.plan.solver import solve
from crosstie.decide.plan.survey import of_one_stack, offers, peak_of, surveys, undominated
from crosstie.decide.plan.uncertainty import JointErrors

from .workloads import CHAT, CODE, one_class, workload

CATALOG = Catalog([])
R1 = one_class("chat", 30.0, 1500, 300, ttft=(4.0, 0.9), tpot=(0.08, 0.9), model="deepseek-r1")
BIG = one_class("chat", 30.0, {"median": 800, "p95": 4000}, 250, model="llama-3.3-70b")


def enough(found: Plan) -> float:
    return present(found.uncertainty).enough


def stacks(found: Plan) -> set[str]:
    return {pool.deployment.stack.id for pool in present(found.fleet).pools}


@pytest.mark.slow
@pytest.mark.parametrize("on", [("mi300x",), ("h200",), ("mi300x", "h200")], ids=str)
def test_a_fleet_is_as_sure_as_was_asked(on: tuple[str, ...]) -> None:
    costs = []
    for sure in (0.6, 0.8, 0.95):
        found = plan(CATALOG, workload(BIG, CODE, accelerators=on, sure=sure))
        assert found.fleet is not None
        if found.too_dear:
            # Then the estimates' own fleet is the answer, and says what being sure would take.
            assert enough(found) >= 0.5 - 0.02
            assert found.too_dear.usd_per_hour > 5.0 * found.fleet.usd_per_hour
            continue
        assert enough(found) >= sure - 0.02, sure
        costs.append(found.fleet.usd_per_hour)
    assert len(costs) >= 2
    assert costs == sorted(costs)
    assert costs[0] < costs[-1]


@pytest.mark.slow
def test_where_being_sure_costs_many_times_as_much_it_does_not_buy_the_fleet() -> None:
    """Hardly above the floor of the estimate, next to nothing keeps the target at its slow end."""
    tight = one_class("chat", 5.0, 800, 250, ttft=(2.0, 0.9), tpot=(0.0107, 0.9), model="llama-3.3-70b")
    found = plan(CATALOG, workload(tight, accelerators=("mi300x",), sure=0.8))
    likely = plan(CATALOG, workload(tight, accelerators=("mi300x",), sizing="likely"))
    assert found.too_dear is not None
    assert likely.too_dear is None
    assert present(found.fleet).usd_per_hour == pytest.approx(present(likely.fleet).usd_per_hour)
    assert found.workload.sureness == 0.8


@pytest.mark.slow
def test_where_no_fleet_is_that_sure_the_estimates_have_the_answer_and_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A TPOT target between the estimate's floor and the slow end's: a guess is worth more than "no fleet"."""
    tight = one_class("chat", 5.0, 800, 250, ttft=(2.0, 0.9), tpot=(0.0105, 0.9), model="llama-3.3-70b")
    found = plan(CATALOG, workload(tight, accelerators=("mi300x",), sure=0.8))
    assert found.too_dear == NO_FLEET
    likely = plan(CATALOG, workload(tight, accelerators=("mi300x",), sizing="likely"))
    assert present(found.fleet).gpus == present(likely.fleet).gpus
    assert document(found, {})["too_dear_to_be_sure"]["usd_per_hour"] is None
    monkeypatch.setenv("COLUMNS", "200")
    show(plan_parts(found, verbose=False))
    assert "No fleet would be 80% sure" in capsys.readouterr().out
    impossible = one_class("chat", 5.0, 800, 250, ttft=(2.0, 0.9), tpot=(0.001, 0.9), model="llama-3.3-70b")
    assert plan(CATALOG, workload(impossible, accelerators=("mi300x",), sure=0.8)).fleet is None


def test_what_being_sure_costs_is_told() -> None:
    found = plan(CATALOG, workload(BIG, accelerators=("mi300x",), sure=0.9))
    assert [one.sure for one in found.sureness] == [0.5, 0.8, 0.9, 0.95]
    costs = [one.fleet.usd_per_hour for one in found.sureness if one.fleet]
    assert len(costs) == 4
    assert costs == sorted(costs)
    assert costs[2] == present(found.fleet).usd_per_hour


@pytest.mark.slow
def test_half_sure_is_what_the_estimates_say() -> None:
    found = plan(CATALOG, workload(BIG, accelerators=("mi300x",), sure=0.9))
    likely = plan(CATALOG, workload(BIG, accelerators=("mi300x",), sizing="likely"))
    half = found.sureness[0]
    assert half.sure == 0.5
    assert present(half.fleet).usd_per_hour == pytest.approx(present(likely.fleet).usd_per_hour, rel=0.02)


def test_without_calibration_nothing_is_said_of_it(uncalibrated: Catalog) -> None:
    found = plan(uncalibrated, workload(CHAT, accelerators=("mi300x",), sure=0.9))
    assert (found.uncertainty, found.sureness) == (None, [])


@pytest.mark.slow
def test_errors_of_an_accelerator_under_a_stack_go_together() -> None:
    """Two pools of the same are as sure as one; were they drawn apart, they would be less."""
    one = plan(CATALOG, workload(BIG, accelerators=("mi300x",), sure=0.8))
    both = plan(CATALOG, workload(BIG, CODE, accelerators=("mi300x",), sure=0.8))
    assert len(present(both.fleet).pools) > 1
    assert np.isclose(enough(one), enough(both), atol=0.12)
    assert enough(both) >= 0.78


@pytest.mark.slow
def test_a_stack_that_was_measured_with_the_model_goes_before_one_that_was_not() -> None:
    """vLLM on MI300X has no measured point of DeepSeek-R1, SGLang has ten; vLLM's estimate is the better looking."""
    models = {R1.model: ModelChoice(precisions=("native",))}
    first = plan(CATALOG, workload(R1, accelerators=("mi300x",), models=models))
    free = plan(CATALOG, workload(R1, accelerators=("mi300x",), models=models, evidence="any"))
    assert stacks(first) == {"sglang"}
    assert [(one.model, one.stack) for one in first.passed_over] == [("deepseek-r1", "vLLM")]
    assert stacks(free) == {"vllm"}
    assert free.passed_over == []
    assert present(free.fleet).usd_per_hour < present(first.fleet).usd_per_hour
    named = {R1.model: ModelChoice(precisions=("native",), stacks=("vllm",))}
    assert stacks(plan(CATALOG, workload(R1, accelerators=("mi300x",), models=named))) == {"vllm"}


def test_stacks_measured_with_models_of_the_kind_go_before_others() -> None:
    """Of a dense model on MI355X: vLLM was measured with dense ones there, ATOM and SGLang with mixtures alone."""
    dense = plan(CATALOG, workload(BIG, accelerators=("mi355x",)))
    assert stacks(dense) == {"vllm"}
    plugins = {"vLLM with the ATOM plug-in", "SGLang with the ATOM plug-in"}
    assert {one.stack for one in dense.passed_over} == {"ATOM", "SGLang", *plugins}


def test_sure_is_read_in_percent_and_held_to_what_can_be_known(tmp_path: Path) -> None:
    text = (
        'name = "w"\n%s\n[[class]]\nname = "c"\nmodel = "llama-3.1-8b"\nrequests_per_s = 1\ninput = 100\noutput = 9\n'
    )
    file = tmp_path / "w.toml"

    def read(line: str) -> float:
        file.write_text(text % line)
        return read_workload(CATALOG, file).sureness

    assert [read(""), read("sure = 95"), read('sizing = "likely"'), read('sizing = "safe"')] == [0.8, 0.95, 0.5, 0.8]
    for wrong, said in (("sure = 0.8", "50"), ("sure = 100", "99"), ('sure = 80\nsizing = "safe"', "cannot go with")):
        with pytest.raises(BadData, match=said):
            read(wrong)
    work = workload(CHAT)
    assert adjusted(work, sure=0.9).sureness == 0.9
    assert adjusted(msgspec.structs.replace(work, sure=0.9), sizing="likely").sureness == 0.5
    for given in ({"sure": 0.2}, {"sure": 0.9, "sizing": "safe"}):
        with pytest.raises(BadInput):
            adjusted(work, **given)


def test_what_simulation_corrects_makes_no_fleet_surer() -> None:
    """Replicas that take half as much again as closed forms say: a fleet sized by that is as sure as one sized without.
    Counted twice, the correction would make it look surer."""
    work = workload(one_class("chat", 600.0, 800, 250, model="llama-3.3-70b"), accelerators=("mi300x",), sure=0.8)
    scaling = scaling_of(work)
    gate = Gate(CATALOG, work)
    surveyed = of_one_stack(surveys(CATALOG, work, [CATALOG.accelerators["mi300x"]], no_progress, gate), scaling)
    offered = offers(surveyed, scaling, peak=peak_of(work))

    def sure_of(correction: dict[str, float]) -> tuple[float, float]:
        asked = choice(undominated(offered.corrected(correction)), market(CATALOG, work), work)
        asked = replace(asked, correction=correction)
        fleet = present(solve(asked.problem))
        return JointErrors(surveyed, asked, scaling).enough(fleet), fleet.usd_per_hour

    (plain, cost), (corrected, less) = sure_of({}), sure_of({"llama-3.3-70b": 1.5})
    assert less == pytest.approx(cost / 1.5, rel=0.1)
    assert corrected == pytest.approx(plain, abs=0.04)
