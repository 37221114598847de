"""Pools that host several models, as fleet files have them: what is written reads back, and slips are named."""

from pathlib import Path

import pytest

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData
from crosstie.core.fleet import Fleet

CATALOG = Catalog([])
SLEEPING = """\
format = 1
name = "shared"

[[pool]]
name = "sleepers"
accelerator = "mi300x"
precision = "fp8"
stack = "vllm"
usd_per_gpu_hour = 1.3
loading = "vllm-sleep"
host_memory_gib = 150
hosts = [
  { model = "llama-3.1-8b", pinned = true, memory_gib = 20, backends = ["http://a:8001/v1", "http://b:8001/v1"] },
  { model = "qwen3-32b", served_as = "Qwen/Qwen3-32B", load_s = 4, max_context = 9000, backends = ["http://a:8002/v1", "http://b:8002/v1"] },
]

[[class]]
name = "chat"
model = "Qwen/Qwen3-32B"
routes = [{ pool = "sleepers" }]
"""
ROUTER = """\
format = 1
name = "routers"

[[pool]]
name = "gguf"
loading = "llamacpp-router"
host_memory_gib = 22.5
backends = ["http://a:8080/v1"]
hosts = [
  { model = "My Model", served_as = "my-model-Q4", memory_gib = 9 },
  { model = "other", weight_gib = 4.25, load_s = 0 },
]
"""
HOOK = ROUTER.replace('"llamacpp-router"', '"hook"\nload_hook = "/opt/bin/models --quiet \'two words\'"')


def read(tmp_path: Path, text: str) -> Fleet:
    file = tmp_path / "fleet.toml"
    file.write_text(text)
    return read_fleet(CATALOG, file)


@pytest.mark.parametrize("text", [SLEEPING, ROUTER, HOOK])
def test_what_is_written_reads_back(tmp_path: Path, text: str) -> None:
    fleet = read(tmp_path, text)
    assert read(tmp_path, fleet_text(fleet)) == fleet


def test_models_with_servers_of_their_own(tmp_path: Path) -> None:
    fleet = read(tmp_path, SLEEPING)
    pool = fleet.pools[0]
    assert (pool.replicas, pool.loading, pool.host_memory_gib) == (2, "vllm-sleep", 150)
    small, large = pool.by_model()
    assert (small.model, small.max_context, small.precision) == ("llama-3.1-8b", 131072, "fp8")
    assert (large.model, large.max_context, large.served_as) == ("qwen3-32b", 9000, "Qwen/Qwen3-32B")
    assert large.backends == ("http://a:8002/v1", "http://b:8002/v1")
    assert {one.name for one in (small, large)} == {"sleepers"}
    assert [one.pinned for one in pool.hosts] == [True, False]
    assert fleet.classes[0].model == "qwen3-32b"


def test_models_that_share_an_address(tmp_path: Path) -> None:
    pool = read(tmp_path, ROUTER).pools[0]
    assert [one.backends for one in pool.by_model()] == [("http://a:8080/v1#My Model",), ("http://a:8080/v1#other",)]
    assert pool.hosts[1].load_s == 0


def test_a_plan_without_addresses(tmp_path: Path) -> None:
    bare = SLEEPING.replace(', backends = ["http://a:8001/v1", "http://b:8001/v1"]', "")
    bare = bare.replace(', backends = ["http://a:8002/v1", "http://b:8002/v1"]', "")
    fleet = read(tmp_path, bare.replace("host_memory_gib = 150", "replicas = 3"))
    assert (fleet.pools[0].replicas, fleet.pools[0].host_memory_gib) == (3, None)
    written = fleet_text(fleet)
    assert "3 base URLs" in written
    assert read(tmp_path, written) == fleet


@pytest.mark.parametrize(
    ("text", "change", "key", "reason"),
    [
        (SLEEPING, ('loading = "vllm-sleep"\n', ""), "pool[0].loading", "missing"),
        (SLEEPING, ('"vllm-sleep"', '"sleep"'), "pool[0].loading", "is not one of vllm-sleep"),
        (SLEEPING, ('"vllm-sleep"', '["hook"]'), "pool[0].loading", "is not one of"),
        (SLEEPING, ('"vllm-sleep"', '"hook"'), "pool[0].load_hook", "missing"),
        (HOOK, ("'two words'", "'two"), "pool[0].load_hook", "is no command"),
        (
            HOOK,
            ("\"/opt/bin/models --quiet 'two words'\"", "\"'' --quiet\""),
            "pool[0].load_hook",
            "first word is empty",
        ),
        (ROUTER, ('backends = ["http', 'load_hook = "x"\nbackends = ["http'), "pool[0].load_hook", "no meaning"),
        (SLEEPING, ("hosts = [\n", 'model = "qwen3-8b"\nhosts = [\n'), "pool[0].model", "entries of hosts"),
        (SLEEPING, ("hosts = [\n", 'served_as = "q"\nhosts = [\n'), "pool[0].served_as", "entries of hosts"),
        (SLEEPING, ("llama-3.1-8b", "llama-9"), "pool[0].hosts[0].model", "unknown model"),
        (SLEEPING, ("qwen3-32b", "llama-3.1-8b"), "pool[0].hosts[1].model", "is there twice"),
        (SLEEPING, ("pinned = true", 'pinned = "yes"'), "pool[0].hosts[0].pinned", "neither true nor false"),
        (SLEEPING, ("pinned = true", "pined = true"), "pool[0].hosts[0].pined", "pinned"),
        (SLEEPING, ("memory_gib = 20", "memory_gib = 0"), "pool[0].hosts[0].memory_gib", "must be"),
        (SLEEPING, ("load_s = 4", "load_s = -1"), "pool[0].hosts[1].load_s", "must be"),
        (SLEEPING, ("load_s = 4", 'precision = "fp3"'), "pool[0].hosts[1].precision", "unknown precision"),
        (SLEEPING, ('precision = "fp8"\n', ""), "pool[0].hosts[0].precision", "missing"),
        (SLEEPING, ("b:8002", "a:8001"), "pool[0].hosts[1].backends[1]", "already"),
        (SLEEPING, (', "http://b:8002/v1"]', "]"), "pool[0].hosts[1].backends", "one for each replica"),
        (SLEEPING, ("hosts = [\n", 'backends = ["http://c:1/v1"]\nhosts = [\n'), "pool[0].backends", "one model"),
        (SLEEPING, ("hosts = [\n", "replicas = 3\nhosts = [\n"), "pool[0].backends", "replicas = 3"),
        (
            ROUTER,
            ("memory_gib = 9", 'memory_gib = 9, backends = ["http://c:1/v1"]'),
            "pool[0].hosts[0].backends",
            "one",
        ),
        (HOOK, ("memory_gib = 9", 'memory_gib = 9, backends = ["http://c:1/v1"]'), "pool[0].hosts[0].backends", "pool"),
        (ROUTER, ("host_memory_gib = 22.5\n", ""), "pool[0].host_memory_gib", "missing"),
        (ROUTER, (", memory_gib = 9", ""), "pool[0].hosts[0].memory_gib", "missing"),
        (ROUTER, ('served_as = "my-model-Q4"', 'served_as = "other"'), "pool[0].hosts[1].model", "would name"),
        (ROUTER, ("hosts = [", "hosts = []\nhosst = ["), "pool[0].hosst", "hosts"),
        (ROUTER.partition("hosts = [")[0], ("gguf", "gguf"), "pool[0].host_memory_gib", "goes with hosts"),
        (SLEEPING, ('{ pool = "sleepers" }', '{ pool = "sleeper" }'), "class[0].routes[0].pool", "no pool"),
        (SLEEPING, ('"Qwen/Qwen3-32B"\nroutes', '"qwen3-8b"\nroutes'), "class[0].model", "no pool of this file"),
    ],
)
def test_slips_are_named(tmp_path: Path, text: str, change: tuple[str, str], key: str, reason: str) -> None:
    assert change[0] in text
    with pytest.raises(BadData) as raised:
        read(tmp_path, text.replace(*change))
    assert f"fleet.toml: {key}: " in str(raised.value)
    assert reason in str(raised.value)
