"""What memory for sessions is worth: in GPUs, in dollars and as a picture."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.present import present

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.decide.plan.answer import found_share
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.lighter import Others
from crosstie.decide.plan.market import market
from crosstie.decide.plan.plan import Plan, plan as make_plan
from crosstie.decide.plan.reuse import found_by_memory, knee
from crosstie.decide.plan.run_result import SimulatedCase
from crosstie.decide.plan.subject import of_fleet
from crosstie.decide.plan.sweep import RequestSource, one_run
from crosstie.web.plan_chart import plan_picture

CATALOG = Catalog([])
AGENTS = """
[[class]]
name = "coders"
model = "llama-3.3-70b"
turn_s = { p95 = 60 }
[class.sessions]
live = 60
turns = 20
system = 4000
first = 2000
added = 2500
output = 400
pause_s = 20
[constraints]
accelerators = ["h200"]
"""


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(CATALOG, read_workload(CATALOG, Path("w.toml"), AGENTS))


def test_more_memory_finds_more_and_needs_no_more_gpus(plan: Plan) -> None:
    half, twice = plan.memory
    assert (half.times, twice.times) == (0.5, 2.0)
    assert half.what == "half the memory for them"
    coders = plan.workload.classes[0]
    assert half.found["coders"] <= found_share(present(plan.fleet), coders) + 0.01 <= twice.found["coders"] + 0.02
    assert half.fleet.usd_per_hour >= twice.fleet.usd_per_hour
    assert half.fleet.dearer > 0 or twice.fleet.dearer < 0


def gpus_by_memory(own: str, rival: str) -> dict[str, int]:
    """By what is said of the memory: GPUs of `own` for the agents."""
    workload = read_workload(
        CATALOG, Path("w.toml"), AGENTS.replace('["h200"]', '["h200", "mi355x"]').replace("live = 60", "live = 200")
    )
    steps = Others(CATALOG, workload, market(CATALOG, workload), {own}, 20.0, {}).memory_steps([rival])
    return {step.what: step.fleet.gpus[own] for step in steps}


def test_a_rival_s_memory_is_worth_the_gpus_that_it_takes_more_or_less() -> None:
    half, twice, like_h200 = "half the memory for them", "twice the memory for them", "the 141 GiB of h200 on each GPU"
    smaller = gpus_by_memory("mi355x", "h200")
    assert list(smaller) == [half, twice, like_h200]
    assert smaller[like_h200] > smaller[twice]
    larger = gpus_by_memory("h200", "mi355x")
    assert larger["the 288 GiB of mi355x on each GPU"] < larger[half]
    assert list(gpus_by_memory("h200", "h200")) == [half, twice]


def test_the_curve_rises_to_what_endless_memory_finds(plan: Plan) -> None:
    one = plan.workload.classes[0]
    tokens, found = found_by_memory(one)
    assert found[0] == 0
    assert (np.diff(found) >= -1e-9).all()
    assert found[-1] == pytest.approx(one.cached_tokens / one.input_tokens, rel=0.01)
    # A session of 20 turns has 50,000 tokens in the end and half of them on average: by then most is there.
    assert 10_000 < tokens[knee(tokens, found)] < 80_000


def test_the_knee_is_where_the_line_bends() -> None:
    sizes = np.array([0.0, 1.0, 2.0, 3.0, 10.0])
    assert knee(sizes, np.array([0.0, 0.3, 0.6, 0.9, 1.0])) == 3


def test_the_picture_has_the_knee(plan: Plan, tmp_path: Path) -> None:
    plan_picture(plan).draw(tmp_path / "p.svg")
    drawn = (tmp_path / "p.svg").read_text()
    for words in ("knee: ", "this fleet: ", "half the memory"):
        assert words in drawn


@pytest.mark.slow
def test_memory_of_the_host_stands_in_the_fleet_file_and_is_simulated(tmp_path: Path) -> None:
    asked = AGENTS.replace("[constraints]", "[class.prefix]\nhost_gib_per_gpu = 512\n[constraints]")
    workload = read_workload(CATALOG, Path("w.toml"), asked)
    fleet = fleet_of(make_plan(CATALOG, workload))
    assert {pool.host_gib_per_gpu for pool in fleet.pools} == {512.0}
    (tmp_path / "f.toml").write_text(fleet_text(fleet))
    assert read_fleet(CATALOG, tmp_path / "f.toml").pools == fleet.pools
    without = msgspec.structs.replace(
        fleet, pools=tuple(msgspec.structs.replace(pool, host_gib_per_gpu=0.0) for pool in fleet.pools)
    )
    # More sessions than the GPUs keep.
    source = RequestSource(workload, sessions=240, requests=1500)
    with_host, alone = (
        one_run(CATALOG, source, SimulatedCase(label="x", fleet=each, policy=each.policy, seed=0)).sessions[0]
        for each in (of_fleet(fleet).fleet, of_fleet(without).fleet)
    )
    assert with_host.hit_rate > alone.hit_rate + 0.05
