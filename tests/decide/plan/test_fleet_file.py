"""What a plan writes as its fleet is what the reader of fleet files takes."""

from pathlib import Path

import pytest
from tests.small_workload import Change, constrained, small

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import EXAMPLES, read_workload
from crosstie.core.fleet import Serving
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.plan import plan as make_plan

WORKLOADS: dict[str, tuple[Change, ...]] = {
    "one length": (),
    # Pools of two vendors, so that classes are shared between them.
    "two vendors": (
        ("requests_per_s = 5", "requests_per_s = 80"),
        ("input = 1000", "input = { median = 900, p95 = 6000 }"),
        constrained("vendor_share = { AMD = 0.3, NVIDIA = 0.3 }"),
    ),
    # What is on hand costs its running alone.
    "on hand": (constrained("inventory = { h200 = 2 }"),),
    # Slices that end at the same whole number of tokens.
    "very short": (
        ("input = 1000", "input = { median = 1.25, p95 = 2.336 }"),
        ("ttft_ms = { p95", "ttft_ms = { p75"),
    ),
    "as cheap as can be": (constrained("[prices]\nusd_per_gpu_hour = { mi300x = 0.001 }\ndiscount = { AMD = 0.99 }"),),
}


def check_reads_back(catalog: Catalog, workload: Path, target: Path) -> None:
    fleet = fleet_of(make_plan(catalog, read_workload(catalog, workload)))
    target.write_text(fleet_text(fleet), encoding="utf-8")
    got = read_fleet(catalog, target)
    assert fleet_text(got) == fleet_text(fleet)
    assert [(pool.name, pool.replicas, pool.backends) for pool in got.pools] == [
        (pool.name, pool.replicas, ()) for pool in fleet.pools
    ]
    assert got.serving == Serving()


@pytest.mark.parametrize("changes", WORKLOADS.values(), ids=WORKLOADS)
def test_plans_read_back_as_fleets(catalog: Catalog, tmp_path: Path, changes: tuple[Change, ...]) -> None:
    check_reads_back(catalog, small(tmp_path, *changes), tmp_path / "fleet.toml")


def test_the_shipped_example_reads_back_as_a_fleet(catalog: Catalog, tmp_path: Path) -> None:
    check_reads_back(catalog, EXAMPLES / "assistant.toml", tmp_path / "fleet.toml")
