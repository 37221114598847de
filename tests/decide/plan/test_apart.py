"""Services with prefill and decode apart in plans: candidates like any other, chosen where they are cheaper."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.errors import BadData
from crosstie.core.workload import ModelChoice, Workload
from crosstie.decide.plan.apart import service_curves, services
from crosstie.decide.plan.capacity import EstimateScale, Levels, operating_point
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.plan import Plan, plan
from crosstie.decide.plan.report import document
from crosstie.decide.plan.simulate import simulate_classes
from crosstie.decide.plan.survey import parts_of, surveys
from crosstie.perf.disaggregated import Sides, disaggregated_traffic

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


def choosing(workload: Workload, apart: bool) -> Workload:
    choice = msgspec.structs.replace(workload.models["deepseek-r1"], apart=apart)
    return msgspec.structs.replace(workload, models={"deepseek-r1": choice})


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
    taken = operating_point(levels, share, float(share.sum()))
    assert (taken.requests_per_s.max(axis=1) > 0).any()
    for row, service in enumerate(found):
        for place, part in enumerate(parts):
            rate = float(taken.requests_per_s[row, place])
            if rate > 0:
                got = disaggregated_traffic(Sides([service]), rate, part.slice.input_tokens, part.slice.output_tokens)
                assert float(got.prefill_busy[0, 0]) < 1.0
                assert np.isfinite(got.ttft_s[0, 0])


def test_a_plan_chooses_them_where_they_are_cheaper_and_their_promises_hold(workload: Workload, apart: Plan) -> None:
    together = plan(CATALOG, choosing(workload, False), today="2026-11-16")
    assert apart.fleet is not None
    assert together.fleet is not None
    assert any(isinstance(pool.deployment, Disaggregated) for pool in apart.fleet.pools)
    assert apart.fleet.usd_per_hour < together.fleet.usd_per_hour
    assert apart.together is not None
    assert apart.together.usd_per_hour == pytest.approx(together.fleet.usd_per_hour)
    assert (together.together, together.apart, apart.apart) == (None, None, None)
    assert apart.fleet.gpus == {"mi355x": sum(pool.gpus for pool in apart.fleet.pools)}
    for one in simulate_classes(apart.fleet, workload.classes, requests=2000):
        assert one.holds, one


@pytest.mark.slow
def test_of_both_ways_the_one_is_chosen_that_is_cheaper_when_simulated(workload: Workload) -> None:
    """Each way is confirmed by itself; closed forms alone may rank them otherwise."""
    less = msgspec.structs.replace(
        workload, classes=tuple(msgspec.structs.replace(one, requests_per_s=6.0) for one in workload.classes)
    )
    found = plan(CATALOG, choosing(less, True), today="2026-11-16", confirm=True)
    together = plan(CATALOG, choosing(less, False), today="2026-11-16", confirm=True)
    assert found.fleet is not None
    assert together.fleet is not None
    apart = any(isinstance(pool.deployment, Disaggregated) for pool in found.fleet.pools)
    assert found.fleet.usd_per_hour <= together.fleet.usd_per_hour
    other = found.together if apart else found.apart
    if other is None:
        assert found.fleet.usd_per_hour == together.fleet.usd_per_hour
    else:
        assert other.usd_per_hour >= found.fleet.usd_per_hour
    assert all(one.holds for one in found.simulated)


def test_the_fleet_file_and_the_document_say_what_they_are_made_of(apart: Plan, tmp_path: Path) -> None:
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
    assert ModelChoice().apart is False
