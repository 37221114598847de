"""Plans of models that share replicas: what `[hosting]` asks, what comes back, and that the gateway can read it."""

from pathlib import Path

import pytest
from tests.conftest import Command
from tests.present import present

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.errors import BadData
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.plan import Plan, plan as make_plan
from crosstie.decide.plan.shared import simulate_sharing

MODELS = ("llama-3.1-8b", "gpt-oss-20b", "qwen3-32b", "llama-3.3-70b", "gpt-oss-120b")


def text(hosting: str = "cold_share = 0.2", *, extra: str = "", accelerators: str = '"mi350x", "b200"') -> str:
    classes = "".join(
        f'[[class]]\nname = "{model}"\nmodel = "{model}"\nrequests_per_s = {0.2 / (place + 1):.3f}\n'
        "input = 1000\noutput = 200\nttft_ms = { p90 = 5000 }\n\n"
        for place, model in enumerate(MODELS)
    )
    # No seller's on-demand price of an MI350X is known.
    prices = '[prices]\nkind = ["on-demand", "quoted"]\n'
    limits = f"[constraints]\naccelerators = [{accelerators}]\n"
    return f'name = "shelf"\n[hosting]\n{hosting}\n{classes}{extra}\n{prices}{limits}'


def planned(catalog: Catalog, folder: Path, content: str) -> Plan:
    file = folder / "shelf.toml"
    file.write_text(content, encoding="utf-8")
    return make_plan(catalog, read_workload(catalog, file))


def test_larger_memory_means_fewer_evictions_on_as_many_gpus(catalog: Catalog, tmp_path: Path) -> None:
    plan = planned(catalog, tmp_path, text())
    assert plan.shared is not None
    pools = {pool.accelerator: pool for pool in plan.shared.pools}
    assert set(pools) == {"mi350x", "b200"}
    assert pools["mi350x"].layout.room_bytes > 1.5 * pools["b200"].layout.room_bytes
    assert pools["mi350x"].beside.evictions_per_hour < pools["b200"].beside.evictions_per_hour
    assert plan.answered
    assert plan.shared.pools[0].usd_per_hour == min(pool.usd_per_hour for pool in plan.shared.pools)
    assert plan.gpus == {plan.shared.pools[0].accelerator: plan.shared.pools[0].gpus}


def test_fewer_cold_requests_take_more_replicas(catalog: Catalog, tmp_path: Path) -> None:
    many, few = (planned(catalog, tmp_path, text(f"cold_share = {limit}")).shared for limit in (0.3, 0.001))
    assert many
    assert few
    by_name = {pool.accelerator: pool for pool in few.pools}
    for pool in many.pools:
        assert pool.expected.cold_share <= 0.3
        assert by_name[pool.accelerator].expected.cold_share <= 0.001
        assert by_name[pool.accelerator].replicas >= pool.replicas
    assert sum(pool.gpus for pool in few.pools) > sum(pool.gpus for pool in many.pools)


@pytest.mark.slow
def test_what_is_expected_is_near_what_is_simulated(catalog: Catalog, tmp_path: Path) -> None:
    plan = planned(catalog, tmp_path, text(accelerators='"b200"'))
    assert plan.shared
    assert plan.shared.answer
    found = simulate_sharing(plan.shared.answer, plan.workload)
    assert found.requests > 1000
    expected = plan.shared.answer.expected.cold_share
    assert expected > 0.005, "a case in which something is evicted"
    assert expected / 2.5 < found.cold_share < expected * 2.5


def test_the_fleet_file_reads_back_with_its_hosts(catalog: Catalog, tmp_path: Path) -> None:
    plan = planned(catalog, tmp_path, text('pinned = ["gpt-oss-20b"]\ncold_share = 0.2'))
    fleet = fleet_of(plan)
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet), encoding="utf-8")
    got = read_fleet(catalog, file)
    assert fleet_text(got) == fleet_text(fleet)
    (pool,) = got.pools
    assert [one.model for one in pool.hosts] == list(MODELS)
    assert [one.model for one in pool.hosts if one.pinned] == ["gpt-oss-20b"]
    assert pool.loading == "vllm-sleep"
    assert {route.pool for one in got.classes for route in one.routes} == {pool.name}


def test_others_have_replicas_of_their_own(catalog: Catalog, tmp_path: Path) -> None:
    extra = '[[class]]\nname = "own"\nmodel = "mistral-7b"\nrequests_per_s = 2\ninput = 500\noutput = 100\n'
    shared = f"models = {list(MODELS)}\ncold_share = 0.2"
    plan = planned(catalog, tmp_path, text(shared, extra=extra))
    assert plan.fleet is not None
    assert [carried.part.request_class.name for pool in plan.fleet.pools for carried in pool.carried][:1] == ["own"]
    assert plan.usd_per_hour == pytest.approx(
        plan.fleet.usd_per_hour + present(present(plan.shared).answer).usd_per_hour
    )
    fleet = fleet_of(plan)
    assert len(fleet.pools) == len(plan.fleet.pools) + 1
    names = {pool.name for pool in fleet.pools}
    assert all(route.pool in names for one in fleet.classes for route in one.routes)
    assert all(one.routes for one in fleet.classes)


def test_a_shared_pool_is_priced_and_limited_as_others_are(catalog: Catalog, tmp_path: Path) -> None:
    """GPUs on hand cost their running, whole nodes what is bought; at_most is for both together."""
    limits = "inventory = { b200 = 1 }\nwhole_nodes = true\n"
    plan = planned(catalog, tmp_path, text("cold_share = 0.001", accelerators='"b200"') + limits)
    (pool,) = present(plan.shared).pools
    assert 1 < pool.gpus <= 8
    (item,) = plan.market.items
    # A node is bought, and then nothing runs on what is on hand.
    assert pool.usd_per_hour == pytest.approx(8 * item.quote.usd)
    alone = planned(catalog, tmp_path, text(accelerators='"b200"') + "inventory = { b200 = 100 }\n")
    (owned,) = present(alone.shared).pools
    assert owned.usd_per_hour == pytest.approx(owned.gpus * item.running_usd_per_hour)
    stinted = "inventory = { b200 = 100 }\nat_most = { b200 = 0 }\n"
    refused = present(planned(catalog, tmp_path, text(accelerators='"b200"') + stinted).shared)
    assert "constraints.at_most" in refused.left_out["b200"]


def test_a_limit_in_the_way_is_named(catalog: Catalog, tmp_path: Path) -> None:
    plan = planned(catalog, tmp_path, text("cold_share = 0.001") + "at_most = { mi350x = 0, b200 = 1 }\n")
    assert not plan.answered
    assert plan.shared is not None
    assert plan.shared.pools == []
    assert "constraints.at_most" in plan.shared.left_out["b200"]
    with pytest.raises(ValueError, match="without a fleet"):
        fleet_of(plan)


def test_a_model_that_fits_nowhere_is_named(catalog: Catalog, tmp_path: Path) -> None:
    plan = planned(catalog, tmp_path, text(accelerators='"rtx-4090"'))
    assert plan.shared is not None
    assert not plan.answered
    assert "GB" in plan.shared.left_out["rtx-4090"] or "GPU" in plan.shared.left_out["rtx-4090"]


@pytest.mark.parametrize(
    ("hosting", "fault"),
    [
        ('models = ["mistral-7b"]', r"hosting\.models: mistral-7b is asked for by no class"),
        ('models = ["nonesuch"]', r"hosting\.models: .*nonesuch"),
        ('models = ["qwen3-32b", "Qwen/Qwen3-32B"]', r"hosting\.models: qwen3-32b is there twice"),
        ("models = []", r"hosting\.models: is empty"),
        ('models = ["qwen3-32b"]\npinned = ["gpt-oss-20b"]', r"hosting\.pinned: gpt-oss-20b is not among"),
        ("cold_share = 0", r"hosting\.cold_share"),
        ("cold_share = 2", r"hosting\.cold_share"),
        ('load_from = "tape"', r"hosting\.load_from: 'tape' is not one of host, disk, start"),
        ('load_from = "disk"\nhost_gb_per_s = 50', r"hosting\.host_gb_per_s: has no meaning with"),
        ("disk_gb_per_s = 5", r"hosting\.disk_gb_per_s: has no meaning with"),
        ("sequences = 0", r"hosting\.sequences"),
        ("shared = true", r"hosting\.shared"),
    ],
)
def test_slips_are_refused_with_their_key(catalog: Catalog, tmp_path: Path, hosting: str, fault: str) -> None:
    with pytest.raises(BadData, match=fault):
        planned(catalog, tmp_path, text(hosting))


def test_shares_of_vendors_cannot_be_kept_by_a_pool_of_one_kind(catalog: Catalog, tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"constraints\.vendor_share: cannot go with \[hosting\]"):
        planned(catalog, tmp_path, text() + "vendor_share = { AMD = 0.3 }\n")


@pytest.mark.slow
def test_the_command_says_it_and_keeps_it(crosstie: Command, tmp_path: Path) -> None:
    file, saved, fleet = (tmp_path / name for name in ("shelf.toml", "plan.json", "fleet.toml"))
    file.write_text(text(), encoding="utf-8")
    told = crosstie("plan", str(file), "--save", str(saved), "--fleet", str(fleet), "-v")
    assert told.status == 0
    assert "Shared by 5 models: " in told.out
    assert "evictions/h with" in told.out
    assert "simulated, " in told.out
    assert "hosts = [" in fleet.read_text(encoding="utf-8")
    assert crosstie("plan", "--watch", str(saved)).status == 0


def test_the_command_answers_with_status_1_where_nothing_will_do(crosstie: Command, tmp_path: Path) -> None:
    file = tmp_path / "shelf.toml"
    file.write_text(text() + "power_kw = 0.5\n", encoding="utf-8")
    told = crosstie("plan", str(file), "--json")
    assert told.status == 1
    assert '"feasible": false' in told.out
    assert "constraints.power_kw" in told.out
