"""Pools with prefill and decode apart: read, written and read again, and every slip named by its key."""

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
