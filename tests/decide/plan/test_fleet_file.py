"""What a plan writes as its fleet is what the reader of fleet files takes."""

from pathlib import Path

import msgspec
import pytest
from tests.port.recipe.samples import pool, routed, sleeping
from tests.small_workload import Change, constrained, small

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import EXAMPLES, read_workload
from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Fleet, PoolApart, PoolSide, Serving
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.plan import plan as make_plan
from crosstie.decide.plan.subject import of_fleet
from crosstie.port.recipe.build import RecipeBook
from crosstie.port.recipe.names import with_names

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
    named = with_names(fleet)
    target.write_text(fleet_text(named), encoding="utf-8")
    assert fleet_text(read_fleet(catalog, target)) == fleet_text(named)
    assert [pool.backends for pool in named.pools] == [(f"dns+http://{pool.name}:8000/v1",) for pool in fleet.pools]
    # Simulated, a name is as many replicas as the plan has.
    counts = [len(pool.backends) for pool in of_fleet(read_fleet(catalog, target)).fleet.pools]
    assert counts == [pool.replicas for pool in fleet.pools]


def test_engines_that_are_asked_one_by_one_have_names_of_their_own(catalog: Catalog, tmp_path: Path) -> None:
    side = PoolSide(replicas=2, parallelism=Parallelism(tp=8))
    more = {"model": "deepseek-r1", "accelerator": "mi355x", "stack": "sglang", "kv_format": "fp8"}
    led = pool(name="r1", apart=PoolApart(prefill=side, decode=side, connector="sglang-mori"), **more)
    # Whose engines only a proxy can lead: that is asked.
    behind = pool(name="r2", apart=PoolApart(prefill=side, decode=side, connector="vllm-moriio"), **more)
    spare = pool(name="spare", accelerator=None, precision=None, stack=None, backends=("http://x/v1",))
    fleet = Fleet(name="f", planned="", policy="fastest", pools=(led, sleeping(), routed(), behind, spare), classes=())
    r1, shared, gguf, r2, other = with_names(fleet).pools
    assert r1.apart is not None
    assert r1.apart.prefill.backends == tuple(f"http://r1-prefill-{n}.r1-prefill:8000/v1" for n in range(4))
    assert shared.hosts[1].backends == tuple(f"http://shared-m1-{n}.shared-m1:8100/v1" for n in range(2))
    assert gguf.backends == ("http://gguf-0.gguf:8000/v1", "http://gguf-1.gguf:8000/v1")
    assert r2.backends == ("http://r2-0.r2:8000/v1", "http://r2-1.r2:8000/v1")
    assert other == spare
    target = tmp_path / "fleet.toml"
    target.write_text(fleet_text(with_names(msgspec.structs.replace(fleet, pools=(led, sleeping(), routed())))))
    assert read_fleet(catalog, target).pools[0].apart == msgspec.structs.replace(
        r1.apart, prefill=msgspec.structs.replace(r1.apart.prefill, bootstrap_ports=(8998,) * 4)
    )
    # And the recipes are of these names.
    started = [one for each in (led, sleeping(), routed()) for one in RecipeBook(catalog).recipes(each)]
    assert [one.name for one in started] == ["r1-prefill", "r1-decode", "shared-m0", "shared-m1", "gguf"]


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(changes, id=name, marks=[] if name in ("on hand", "very short") else pytest.mark.slow)
        for name, changes in WORKLOADS.items()
    ],
)
def test_plans_read_back_as_fleets(catalog: Catalog, tmp_path: Path, changes: tuple[Change, ...]) -> None:
    check_reads_back(catalog, small(tmp_path, *changes), tmp_path / "fleet.toml")


@pytest.mark.slow
def test_the_shipped_example_reads_back_as_a_fleet(catalog: Catalog, tmp_path: Path) -> None:
    check_reads_back(catalog, EXAMPLES / "assistant.toml", tmp_path / "fleet.toml")
