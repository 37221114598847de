"""What models take and how long they load: by hand, and by the data file's own rules."""

from pathlib import Path

import pytest

from crosstie.catalog.library import Catalog
from crosstie.catalog.loading import read_loading, shipped_loading
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.errors import BadData
from crosstie.core.workload import Sharing
from crosstie.host.sizes import hosted_model, least_cache_bytes, load_path, room_bytes, with_cache_of
from crosstie.perf.memory import memory_plan

SHIPPED = Path(read_loading.__code__.co_filename).parent / "data" / "loading.toml"
GIB = 2.0**30


def replica(catalog: Catalog, accelerator: str = "h200", tp: int = 1) -> Deployment:
    model = catalog.model("llama-3.1-8b")
    return catalog.deployment(model, catalog.accelerator(accelerator), Parallelism(tp=tp), "bf16", "bf16", "vllm")


def sharing(**given: object) -> Sharing:
    return Sharing(models=("llama-3.1-8b",), **given)  # type: ignore[arg-type]


def test_eight_billion_parameters_in_bf16(catalog: Catalog) -> None:
    one = replica(catalog)
    path = load_path(shipped_loading(), one.accelerator, sharing(host_gb_per_s=50.0))
    found = hosted_model(one, path, context=8192, sequences=8)
    weights = 8.03e9 * 2
    # 3 GiB that vLLM keeps, of which 1.27 stay when it sleeps.
    assert found.bytes == pytest.approx(weights + 1.73 * GIB, rel=1e-3)
    # 32 layers x 8 heads x 128 x keys and values x 2 bytes: 128 KiB a token.
    assert found.min_kv_bytes == pytest.approx(8 * 8192 * 131_072, rel=1e-6)
    assert found.load_s == pytest.approx(0.5 + weights / 50e9, rel=1e-3)


def test_every_gpu_of_a_replica_has_its_own_link_but_not_its_own_disk(catalog: Catalog) -> None:
    def load_s(tp: int, load_from: str) -> float:
        one = replica(catalog, tp=tp)
        path = load_path(shipped_loading(), one.accelerator, sharing(load_from=load_from))
        return hosted_model(one, path, context=1, sequences=1).load_s - path.fixed_s

    assert load_s(2, "host") == pytest.approx(load_s(1, "host") / 2, rel=0.01)
    assert load_s(2, "disk") == pytest.approx(load_s(1, "disk"), rel=0.01)


def test_only_engines_that_sleep_keep_memory(catalog: Catalog) -> None:
    one = replica(catalog)
    facts = shipped_loading()
    asleep, ended = (load_path(facts, one.accelerator, sharing(load_from=kind)) for kind in ("host", "start"))
    whole = 0.9 * one.accelerator.memory_bytes
    assert room_bytes(one, ended, 30) == pytest.approx(whole)
    assert room_bytes(one, asleep, 30) == pytest.approx(whole - 30 * 1.27 * GIB)
    assert room_bytes(one, asleep, 10_000) == 0.0
    assert ended.fixed_s == 30.0
    assert load_path(facts, one.accelerator, sharing(load_from="start", start_s=7.0)).fixed_s == 7.0


def test_a_smaller_cache_is_just_that(catalog: Catalog) -> None:
    one = replica(catalog)
    wanted = least_cache_bytes(one, 4096, 8)
    small = with_cache_of(one, wanted)
    assert memory_plan(small).cache_bytes == pytest.approx(wanted, rel=1e-6)
    assert memory_plan(small).weight_bytes == memory_plan(one).weight_bytes


def test_links_are_those_of_accelerators_that_there_are(catalog: Catalog) -> None:
    assert set(shipped_loading().host_link) - {"usual"} <= set(catalog.accelerators)
    assert shipped_loading().link_of("mi350x") is shipped_loading().host_link["usual"]
    assert shipped_loading().link_of("gh200").si > shipped_loading().link_of("h200").si


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("[host_link]\nusual", "[host_link]\nother", "host_link.usual"),
        ("disk = {", "disc = {", "loading.disc"),
        ('basis = "assumed", source = "vllm-blog"', 'basis = "assumed"', "loading.wake.source"),
        ("value = 5,", "value = 5e9,", "loading.disk"),
    ],
)
def test_a_slip_in_the_file_is_found(tmp_path: Path, old: str, new: str, key: str) -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    assert old in text
    file = tmp_path / "loading.toml"
    file.write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(BadData, match=key.replace(".", r"\.")):
        read_loading(file)
