"""Disaggregated pools: read, written and read again, and every slip named by its key."""

from pathlib import Path

import pytest

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadData
from crosstie.route.build import service_of

TEXT = """\
format = 1

[[pool]]
name = "r1-apart"
model = "deepseek-r1"
accelerator = "mi355x"
prefill = { tp = 8 }
decode = { replicas = 2, dp = 8, ep = 8 }
precision = "native"
kv = "fp8"
stack = "sglang"
replicas = 3
usd_per_gpu_hour = 2.5
"""


def read(catalog: Catalog, tmp_path: Path, text: str) -> object:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    return read_fleet(catalog, file)


def test_a_pool_says_what_its_services_are_made_of(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(TEXT)
    (pool,) = read_fleet(catalog, tmp_path / "fleet.toml").pools
    assert (pool.layout, pool.replica_gpus, pool.gpus) == ("1xTP8:2xDP8·EP8", 24, 72)
    service = service_of(catalog, pool)
    assert service is not None
    assert (service.connector.id, service.link) == ("sglang-mori", "network")
    assert service.prefill.parallelism == Parallelism(tp=8)
    assert (service.prefill.kv_format, service.decode.kv_format) == ("fp8", "fp8")


def test_what_is_written_reads_back(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(TEXT)
    found = read_fleet(catalog, tmp_path / "fleet.toml")
    again = tmp_path / "again.toml"
    again.write_text(fleet_text(found))
    assert read_fleet(catalog, again).pools == found.pools


LED = TEXT.replace("replicas = 3\n", "").replace(
    "prefill = { tp = 8 }", 'prefill = { tp = 8, backends = ["http://p0:8000/v1", "http://p1:8000/v1"] }'
).replace("decode = { replicas = 2,", 'decode = { backends = ["http://d0:8000/v1"],')  # fmt: skip


def test_engines_may_have_addresses_of_their_own(catalog: Catalog, tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(LED)
    found = read_fleet(catalog, tmp_path / "fleet.toml")
    (pool,) = found.pools
    assert pool.apart is not None
    assert (pool.replicas, pool.layout, pool.gpus) == (1, "2xTP8:1xDP8·EP8", 24)
    assert pool.apart.prefill.bootstrap_ports == (8998, 8998)
    assert [one.backends for one in pool.by_model()] == [("http://d0:8000/v1",)]
    again = tmp_path / "again.toml"
    again.write_text(fleet_text(found))
    assert read_fleet(catalog, again).pools == found.pools
    own = LED.replace("prefill = { tp = 8,", "prefill = { tp = 8, bootstrap_port = [8998, 8999],")
    (tmp_path / "own.toml").write_text(own)
    found = read_fleet(catalog, tmp_path / "own.toml")
    assert found.pools[0].apart is not None
    assert found.pools[0].apart.prefill.bootstrap_ports == (8998, 8999)
    again.write_text(fleet_text(found))
    assert read_fleet(catalog, again).pools == found.pools


def test_engines_of_several_services_serve_as_one(catalog: Catalog, tmp_path: Path) -> None:
    text = LED.replace('stack = "sglang"', 'stack = "sglang"\nreplicas = 2\nmax_in_flight = 10').replace(
        '["http://d0:8000/v1"]', str([f"http://d{n}:8000/v1" for n in range(6)]).replace("'", '"')
    )
    (tmp_path / "fleet.toml").write_text(text)
    (pool,) = read_fleet(catalog, tmp_path / "fleet.toml").pools
    assert (pool.replicas, pool.layout, pool.gpus) == (2, "1xTP8:3xDP8·EP8", 64)
    # Of what a service may have in flight, each that decodes has its part.
    assert pool.by_model()[0].max_in_flight == 4


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('decode = { backends = ["http://d0:8000/v1"],', "decode = {", r"pool\[0\].decode.backends: missing"),
        ("prefill = { tp = 8,", "prefill = { tp = 8, replicas = 3,", "prefill.backends: 2 addresses for replicas = 3"),
        ("kv =", 'backends = ["http://x:1/v1"]\nkv =', r"pool\[0\].backends: is the address of a service's own proxy"),
        ("http://p1:", "http://d0:", "decode.backends.*already"),
        ("http://p1:8000/v1", "ftp://p1", r"pool\[0\].prefill.backends\[1\]"),
        (
            "http://p1:8000/v1",
            "dns+http://p:8000/v1",
            r"prefill.backends\[1\]: engines of a side are not found by name",
        ),
        ("prefill = { tp = 8,", "prefill = { tp = 8, bootstrap_port = 0,", "prefill.bootstrap_port"),
        ("prefill = { tp = 8,", "prefill = { tp = 8, bootstrap_port = [1],", "bootstrap_port: 1 ports for 2 backends"),
        ("decode = {", "decode = { bootstrap_port = 8998,", "decode.*bootstrap_port"),
        ('"sglang"', '"vllm"\nconnector = "vllm-moriio"', "connector: the gateway leads no engines over vllm-moriio"),
        ('"sglang"', '"vllm"\nconnector = "vllm-nixl"\nreplicas = 7', "prefill.backends"),
    ],
)
def test_slips_in_addresses_of_sides_are_named(
    catalog: Catalog, tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in LED
    with pytest.raises(BadData, match=message) as refused:
        read(catalog, tmp_path, LED.replace(old, new))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("decode = { replicas = 2, dp = 8, ep = 8 }\n", "", r"pool\[0\].decode: missing: prefill is there"),
        ("prefill = { tp = 8 }\n", "", r"pool\[0\].prefill: missing: decode is there, and a decode side alone"),
        ("prefill = { tp = 8 }", "prefill = 8", r"pool\[0\].prefill"),
        ("prefill = { tp = 8 }", "prefill = { tp = 8, kv = 1 }", r"pool\[0\].prefill.*kv"),
        ("prefill = { tp = 8 }", "prefill = { replicas = 0, tp = 8 }", r"pool\[0\].prefill.replicas"),
        ("prefill = { tp = 8 }", "prefill = { tp = 3 }", "tp 3 does not divide"),
        ("prefill = { tp = 8 }", "prefill = { tp = 8 }\ntp = 8", r"pool\[0\].tp: belongs into prefill and decode"),
        ("prefill = { tp = 8 }", "prefill = { tp = 4, pp = 2 }", "pipeline stages are not modelled"),
        ('stack = "sglang"', 'stack = "sglang"\nconnector = "vllm-nixl"', "vllm-nixl joins replicas of vllm"),
        ('stack = "sglang"', 'stack = "sglang"\nconnector = "pigeon"', "connector 'pigeon'"),
        ('stack = "sglang"', 'stack = "sglang"\nloading = "hook"', "together only"),
        ('accelerator = "mi355x"\n', "", r"pool\[0\].accelerator: missing"),
    ],
)
def test_slips_are_named(catalog: Catalog, tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(BadData, match=message) as refused:
        read(catalog, tmp_path, TEXT.replace(old, new))
    assert "\n" not in str(refused.value)
