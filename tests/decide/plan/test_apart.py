"""Services with prefill and decode apart in plans: candidates like any other, chosen where they are cheaper."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.present import present

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.deployment import Parallelism
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.errors import BadData
from crosstie.core.workload import ModelChoice, PrefixReuse, Workload
from crosstie.decide.plan.answer import PoolPlan
from crosstie.decide.plan.apart import able, service_curves, services
from crosstie.decide.plan.capacity import EstimateScale, Levels, Meant, operating_points
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.market import market
from crosstie.decide.plan.optimise import Choice, choice
from crosstie.decide.plan.plan import Plan, plan
from crosstie.decide.plan.programme import Solution
from crosstie.decide.plan.report import document
from crosstie.decide.plan.reuse import hit_rate
from crosstie.decide.plan.scaling import scaling_of
from crosstie.decide.plan.solver import solve
from crosstie.decide.plan.survey import (
    Survey,
    of_one_stack,
    offers,
    parts_of,
    peak_of,
    surveys,
    undominated,
)
from crosstie.decide.plan.trials import Trials
from crosstie.decide.plan.ways import Bears, Outlook, outlooks
from crosstie.perf.disaggregated import Sides, without_queues

CATALOG = Catalog([])
TEXT = """\
name = "r1"

[traffic]
requests_per_s = 20

[[class]]
name = "chat"
model = "deepseek-r1"
share = 1.0
input = { median = 6000, p95 = 16000 }
output = { mean = 1000, p95 = 2500 }
ttft_ms = { p95 = 5000 }
tpot_ms = { p90 = 40 }

[models."deepseek-r1"]
kv = ["fp8"]
stacks = ["sglang"]
speculation = ["none"]
apart = true

[constraints]
accelerators = ["mi355x"]
"""


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    file = tmp_path_factory.mktemp("apart") / "r1.toml"
    file.write_text(TEXT)
    return read_workload(CATALOG, file)


@pytest.fixture(scope="module")
def apart(workload: Workload) -> Plan:
    return plan(CATALOG, choosing(workload, True), today="2026-11-16")


def choosing(workload: Workload, apart: bool | None) -> Workload:
    picked = msgspec.structs.replace(workload.models["deepseek-r1"], apart=apart)
    return msgspec.structs.replace(workload, models={"deepseek-r1": picked})


def test_services_are_pairs_of_one_accelerator_and_engine(workload: Workload) -> None:
    (surveyed,) = surveys(CATALOG, choosing(workload, True), [CATALOG.accelerator("mi355x")])
    apart = [one for one in surveyed.deployments if isinstance(one, Disaggregated)]
    assert apart
    assert len({one.layout for one in apart}) > 3
    for one in apart:
        assert one.prefill.accelerator.id == one.decode.accelerator.id == "mi355x"
        assert one.prefill.stack.id == one.decode.stack.id == one.connector.stacks[0]
        assert one.gpus <= 64
    (together,) = surveys(CATALOG, choosing(workload, False), [CATALOG.accelerator("mi355x")])
    assert not any(isinstance(one, Disaggregated) for one in together.deployments)


def test_no_part_keeps_prefill_busier_than_the_targets_bear(workload: Workload) -> None:
    """A pool that is meant for a mixture may get its long prompts alone; both sides must bear that."""
    parts = parts_of(workload)
    one = CATALOG.model("deepseek-r1")
    side = CATALOG.deployment(one, CATALOG.accelerator("mi355x"), None, "native", "fp8", "sglang")
    wide = CATALOG.calibrated(
        msgspec.structs.replace(side, parallelism=msgspec.structs.replace(side.parallelism, tp=8))
    )
    found = services(CATALOG, [wide], [part.slice for part in parts])
    curves = service_curves(found, [part.slice for part in parts])
    levels = Levels(parts, curves, EstimateScale.none(found))
    share = np.array([part.requests_per_s for part in parts])
    (taken,) = operating_points(levels, [Meant(levels.targets, share, float(share.sum()))])
    assert (taken.requests_per_s.max(axis=1) > 0).any()
    for row, service in enumerate(found):
        for place, part in enumerate(parts):
            rate = float(taken.requests_per_s[row, place])
            if rate > 0:
                some = np.geomspace(1.0, 10_000.0, 40)
                got = without_queues(Sides([service]), some, part.slice.input_tokens, part.slice.output_tokens)
                assert rate * float(got.service_s[0, 0]) < 1.0
                assert rate < got.requests_per_s[0, some <= got.room[0, 0]].max()


@pytest.mark.slow
def test_a_plan_chooses_them_where_they_are_cheaper_and_their_promises_hold(workload: Workload, apart: Plan) -> None:
    together = plan(CATALOG, choosing(workload, False), today="2026-11-16")
    assert apart.fleet is not None
    assert together.fleet is not None
    assert any(isinstance(pool.deployment, Disaggregated) for pool in apart.fleet.pools)
    assert apart.fleet.usd_per_hour < together.fleet.usd_per_hour
    assert present(apart.together).usd_per_hour == pytest.approx(together.fleet.usd_per_hour)
    assert (together.together, together.apart, apart.apart) == (None, None, None)
    assert together.outlooks == apart.outlooks == []
    assert apart.fleet.gpus == {"mi355x": sum(pool.gpus for pool in apart.fleet.pools)}
    trials = Trials(CATALOG, workload, "deepseek-r1", EstimateScale.none, peak_of(workload))
    assert trials.verdict(apart.fleet.pools).holds


Together = tuple[list[Survey], Choice, Solution]


def together_of(workload: Workload) -> Together:
    """What there is to choose from, and the cheapest fleet with both together."""
    market_now, scaling = market(CATALOG, workload), scaling_of(workload)
    surveyed = of_one_stack(surveys(CATALOG, workload, [item.accelerator for item in market_now.items]), scaling)
    asked = choice(undominated(offers(surveyed, scaling, peak=peak_of(workload))), market_now, workload)
    answer = present(solve(asked.problem))
    return surveyed, asked, answer


def looked(workload: Workload, bears: Bears, together: Together | None = None) -> tuple[Outlook, float]:
    """At the one model of a workload; and what its fleet with both together costs."""
    surveyed, asked, answer = together or together_of(workload)
    (found,) = outlooks(CATALOG, workload, surveyed, asked, answer, scaling_of(workload), bears)
    return found, answer.usd_per_hour


def never(model: str, pools: Sequence[PoolPlan]) -> float:
    raise AssertionError(f"{model} was simulated")


def with_class(workload: Workload, **changes: object) -> Workload:
    return msgspec.structs.replace(
        workload, classes=tuple(msgspec.structs.replace(one, **changes) for one in workload.classes)
    )


@pytest.mark.slow
def test_left_open_both_ways_are_looked_at_and_simulation_decides(workload: Workload) -> None:
    asked: list[str] = []

    def bears(model: str, pools: Sequence[PoolPlan]) -> float:
        asked.extend(pool.deployment.layout for pool in pools)
        assert all(isinstance(pool.deployment, Disaggregated) for pool in pools)
        return times

    times, left_open = 1.0, choosing(workload, None)
    known = together_of(left_open)
    found, together = looked(left_open, bears, known)
    assert asked
    assert (found.by, found.may_pay) == ("simulation", True)
    assert found.usd_per_hour is not None
    assert found.usd_per_hour < together
    times = 0.5
    half, _ = looked(left_open, bears, known)
    assert half.usd_per_hour == pytest.approx(2.0 * found.usd_per_hour)
    assert not half.may_pay


def test_what_cannot_pay_is_not_simulated_and_says_why(workload: Workload) -> None:
    left_open = choosing(workload, None)
    for changed, why in (
        (with_class(left_open, tpot=None), "no class has a TPOT target"),
        (with_class(left_open, requests_per_s=0.05), "the smallest service costs"),
    ):
        found, _ = looked(changed, never)
        assert why in found.why
        assert (found.usd_per_hour, found.may_pay) == (None, False)


@pytest.mark.slow
def test_without_simulation_replicas_do_both_and_the_answer_says_so(workload: Workload) -> None:
    found = plan(CATALOG, choosing(workload, None), today="2026-11-16")
    assert not any(isinstance(pool.deployment, Disaggregated) for pool in present(found.fleet).pools)
    (told,) = document(found, {})["apart_looked_at"]
    assert "nothing was simulated" in told["why"]


def test_apart_where_no_engine_can_is_an_obstacle_with_its_key(workload: Workload) -> None:
    picked = msgspec.structs.replace(choosing(workload, True).models["deepseek-r1"], stacks=("pytorch",))
    found = plan(CATALOG, msgspec.structs.replace(workload, models={"deepseek-r1": picked}), today="2026-11-16")
    assert found.fleet is None
    (obstacle,) = found.obstacles
    assert obstacle.key == 'models."deepseek-r1".apart'
    assert "connector" in obstacle.needs


def test_hits_of_the_prefill_side_count_and_those_that_do_not_stay_are_none(workload: Workload) -> None:
    piece = workload.classes[0].slices[0]
    reused = msgspec.structs.replace(piece, cached_tokens=0.8 * piece.input_tokens)
    side = CATALOG.deployment(
        CATALOG.model("deepseek-r1"), CATALOG.accelerator("mi355x"), Parallelism(tp=8), "native", "fp8", "sglang"
    )
    (connector,) = [one for _, one in able(CATALOG, [side], [piece])]
    service = Disaggregated(prefill=side, prefill_replicas=1, decode=side, decode_replicas=1, connector=connector)
    (plain,), (with_hits,) = (service_curves([service], [one]) for one in (piece, reused))
    # Prompts take less of the prefill side; the decode side is as it was.
    assert (with_hits.service_s < 0.5 * plain.service_s).all()
    assert (with_hits.alone_ttft_s < plain.alone_ttft_s).all()
    np.testing.assert_allclose(with_hits.requests_per_s, plain.requests_per_s)
    assert hit_rate(service, reused, 1e4) == pytest.approx(0.8)
    waits = msgspec.structs.replace(reused, prefix=PrefixReuse(hit_rate=0.8, idle_s=3600.0))
    few, many = (hit_rate(service, waits, tokens) for tokens in (1.0, 1e6))
    assert few == pytest.approx(0.8)
    assert many < 0.1
    two = msgspec.structs.replace(service, prefill_replicas=2)
    assert hit_rate(two, waits, 1e6) == pytest.approx(2.0 * many)


@pytest.mark.slow
def test_of_both_ways_the_one_is_chosen_that_is_cheaper_when_simulated(workload: Workload) -> None:
    """Each way is confirmed by itself; closed forms alone may rank them otherwise."""
    less = with_class(workload, requests_per_s=6.0)
    found = plan(CATALOG, choosing(less, None), today="2026-11-16", confirm=True)
    together = plan(CATALOG, choosing(less, False), today="2026-11-16", confirm=True)
    assert found.fleet is not None
    assert together.fleet is not None
    assert found.fleet.usd_per_hour <= together.fleet.usd_per_hour
    (told,) = found.outlooks
    apart = any(isinstance(pool.deployment, Disaggregated) for pool in found.fleet.pools)
    if apart:
        assert present(found.together).usd_per_hour == pytest.approx(together.fleet.usd_per_hour)
    else:
        assert found.fleet.usd_per_hour == pytest.approx(together.fleet.usd_per_hour)
        assert found.apart is not None or not told.may_pay
    assert all(one.holds for one in found.simulated)


def test_the_fleet_file_and_the_document_say_what_they_are_made_of(tmp_path: Path) -> None:
    file = tmp_path / "r1.toml"
    file.write_text(TEXT.replace("{ median = 6000, p95 = 16000 }", "6000") + "whole_nodes = false\n")
    apart = plan(CATALOG, read_workload(CATALOG, file), today="2026-11-16")
    fleet = fleet_of(apart)
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet))
    assert read_fleet(CATALOG, file).pools == fleet.pools
    assert any(pool.apart for pool in fleet.pools)
    told = document(apart, {})["fleet"]["pools"]
    assert any(pool["apart"] and pool["apart"]["connector"] == "sglang-mori" for pool in told)


def test_apart_is_a_yes_or_a_no(tmp_path: Path) -> None:
    file = tmp_path / "bad.toml"
    file.write_text(TEXT.replace("apart = true", 'apart = "please"'))
    with pytest.raises(BadData, match=r"models.*apart.*neither true nor false"):
        read_workload(CATALOG, file)
    assert ModelChoice().apart is None
