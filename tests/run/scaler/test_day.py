"""Whole days: what is promised to users of `crosstie scale` holds, by a fluid for a day and by requests for an hour."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from benchmarks.day_simulator import ByScaler, Day, DaySimulator, Fixed, Loss, day_traffic, fewest_gpus, fluid_day
from tests.run.scaler.cases import CHEAP, DEAR, KNOWN

from crosstie.catalog.days import shipped_days
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.decide.plan.subject import of_fleet
from crosstie_gateway.scaler.capacities import capacities, rules_of
from crosstie_gateway.scaler.rules import ScaleRules, Supply
from crosstie_gateway.scaler.scaler import Scaler

pytestmark = pytest.mark.slow
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
# Of KNOWN's replicas, which take two a second, twenty carry the peak: ten of each.
PEAK, STATIC = 40.0, 20
RULES = ScaleRules(supplies=(CHEAP, msgspec.structs.replace(DEAR, most=30)), every_s=120.0)


def day(name: str, guess: tuple[float, ...], *losses: Loss) -> Day:
    shape = shipped_days()[name]
    scaler = ByScaler(Scaler(RULES, KNOWN, {"chat": guess}))
    return fluid_day(RULES, KNOWN, scaler, {"chat": (PEAK, shape)}, {"cheap": 10, "dear": 3}, losses=losses)


@pytest.mark.parametrize(("name", "share"), [("servegen-language", 0.74), ("servegen-reasoning", 0.6)])
def test_a_day_is_served_for_little_more_than_its_mean_without_flapping(name: str, share: float) -> None:
    found = day(name, shipped_days()[name])
    assert found.share > 0.99
    assert found.gpu_hours < share * 24 * STATIC
    assert found.bill.flaps == 0
    # Nobody does with less than the fewest.
    fewest = fewest_gpus(RULES, KNOWN, {"chat": (PEAK, shipped_days()[name])})
    assert max(fewest) == STATIC
    assert found.gpu_hours > 24.0 * sum(fewest) / len(fewest)


def test_a_pool_that_is_lost_at_the_peak_costs_minutes_of_it() -> None:
    shape = shipped_days()["servegen-language"]
    found = day("servegen-language", shape, Loss("cheap", 21 * 3600.0, 3600.0))
    assert found.share > 0.98
    assert found.worst_hour[1] > 0.85
    assert found.within[22] / found.requests[22] > 0.99


def test_a_day_that_nobody_expected_is_followed() -> None:
    assert day("servegen-reasoning", ()).share > 0.97
    assert day("servegen-reasoning", shipped_days()["servegen-language"]).share > 0.97


def test_requests_one_by_one_through_the_gateways_policy_keep_their_targets_as_replicas_come_and_go() -> None:
    catalog = Catalog()
    fleet = read_fleet(catalog, BENCHMARKS / "autoscale.toml")
    work = read_workload(catalog, BENCHMARKS / "autoscale_workload.toml")
    known = capacities(catalog, replace(of_fleet(fleet), workload=work))
    pools = [pool.name for pool in fleet.pools]
    rules = ScaleRules(supplies=tuple(Supply(name=one, pool=one, most=5) for one in pools), every_s=60.0)
    work = msgspec.structs.replace(
        work, classes=tuple(msgspec.structs.replace(one, requests_per_s=1.8) for one in work.classes)
    )
    # From a quarter of the peak to all of it, within an hour.
    shape = (0.25, 1.0) * 12
    traffic = day_traffic(work, shape, 4500.0, seed=3, begin_s=900.0)
    scaler = ByScaler(Scaler(rules, known, {"chat": shape}))
    found = DaySimulator(catalog, fleet, rules, known, scaler).run(traffic, dict.fromkeys(pools, 1))
    fixed = DaySimulator(catalog, fleet, rules, known, Fixed(dict.fromkeys(pools, 1))).run(
        traffic, dict.fromkeys(pools, 1)
    )
    assert found.requests.total() == len(traffic)
    assert found.share > 0.9 > fixed.share
    assert found.bill.moves > 0


def test_a_fleet_without_rules_may_have_twice_what_was_planned() -> None:
    subject = of_fleet(read_fleet(Catalog(), BENCHMARKS / "autoscale.toml"))
    planned = {pool.name: pool.replicas for pool in subject.fleet.pools}
    assert {one.name: one.most for one in rules_of(subject).supplies} == {name: 2 * n for name, n in planned.items()}
