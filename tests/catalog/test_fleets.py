"""Fleet files: what is written reads back, and every fault of a hand-written one is named by its key."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crosstie.catalog.fleets import fleet_text, read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadData
from crosstie.core.fleet import Fleet, Pool, Route, ServedClass
from crosstie.core.workload import Target

TEXT = """\
format = 1
name = "mine"
planned = "2026-11-15"
policy = "cheapest-meeting-target"

[[pool]]
name = "chat-mi300x"
model = "llama-3.1-8b"
accelerator = "mi300x"
tp = 2
precision = "fp8"
kv = "bf16"
stack = "vllm"
replicas = 3
usd_per_gpu_hour = 1.3
max_in_flight = 100
max_context = 50000
backends = ["http://a:8000/v1"]

[[class]]
name = "chat"
model = "llama-3.1-8b"
requests_per_s = 5
input_tokens = 1000
output_tokens = 200
ttft_ms = { p95 = 1000 }
routes = [{ pool = "chat-mi300x", share = 1, up_to_input = 4000, why = "cheapest" }]
"""


def fleet_file(folder: Path, text: str) -> Path:
    file = folder / "fleet.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_a_hand_written_fleet_means_what_it_says(catalog: Catalog, tmp_path: Path) -> None:
    got = read_fleet(catalog, fleet_file(tmp_path, TEXT))
    (pool,), (one,) = got.pools, got.classes
    assert (pool.gpus, pool.parallelism.tp, pool.stack, pool.backends) == (6, 2, "vllm", ("http://a:8000/v1",))
    assert got.usd_per_hour == pytest.approx(7.8)
    assert one.ttft == Target(seconds=1.0, percentile=0.95)
    assert one.tpot is None
    assert one.routes == (Route(pool="chat-mi300x", share=1.0, up_to_input=4000, why="cheapest"),)


def test_text_and_fleet_and_text_again(catalog: Catalog, tmp_path: Path) -> None:
    first = fleet_text(read_fleet(catalog, fleet_file(tmp_path, TEXT)))
    assert fleet_text(read_fleet(catalog, fleet_file(tmp_path, first))) == first


# What six digits hold exactly.
figures = st.integers(1, 999_999).map(lambda n: n / 1000)
words = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=12)
targets = st.none() | st.builds(
    Target,
    seconds=st.integers(1, 9999).map(lambda ms: ms / 1e3),
    percentile=st.sampled_from([0.5, 0.75, 0.9, 0.95, 0.99]),
)
pool_names = st.from_regex(r"[a-z0-9а-я][a-z0-9а-я._-]{0,12}", fullmatch=True)


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    names = draw(st.lists(pool_names, min_size=1, max_size=3, unique=True))
    pools = tuple(
        Pool(
            name=name,
            model="llama-3.1-8b",
            accelerator=draw(st.sampled_from(["mi300x", "h200"])),
            parallelism=Parallelism(tp=draw(st.sampled_from([1, 2, 4, 8]))),
            precision=draw(st.sampled_from(["fp8", "bf16"])),
            kv_format=draw(st.sampled_from(["bf16", "fp8"])),
            stack=draw(st.sampled_from(["vllm", "sglang"])),
            replicas=draw(st.integers(1, 9999)),
            usd_per_gpu_hour=draw(figures),
            max_in_flight=draw(st.integers(1, 1024)),
            max_context=draw(st.integers(1, 131_072)),
            backends=tuple(f"https://{host}:8000/v1" for host in draw(st.lists(st.sampled_from("abc"), max_size=2))),
        )
        for name in names
    )
    routes = st.builds(
        Route,
        pool=st.sampled_from(names),
        share=st.integers(0, 1000).map(lambda n: n / 1000),
        up_to_input=st.none() | st.integers(1, 10**6),
        why=st.just("") | words,
    )
    classes = tuple(
        ServedClass(
            name=name, model="llama-3.1-8b", requests_per_s=draw(figures), input_tokens=1.0 + draw(figures),
            output_tokens=float(draw(st.integers(1, 9999))), ttft=draw(targets), tpot=draw(targets),
            routes=tuple(draw(st.lists(routes, max_size=3))),
        )
        for name in draw(st.lists(words, max_size=2, unique=True))
    )  # fmt: skip
    return Fleet(name=draw(words), planned="2026-11-15", policy="weighted", pools=pools, classes=classes)


@given(fleet=fleets())
@settings(max_examples=30)
def test_any_fleet_reads_back(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory, fleet: Fleet) -> None:
    file = fleet_file(tmp_path_factory.getbasetemp(), fleet_text(fleet))
    got = read_fleet(catalog, file)
    assert fleet_text(got) == fleet_text(fleet)
    assert (got.pools, got.name) == (fleet.pools, fleet.name)
    assert [one.routes for one in got.classes] == [one.routes for one in fleet.classes]


POOL, CLASS = TEXT[TEXT.index("[[pool]]") : TEXT.index("[[class]]")], TEXT[TEXT.index("[[class]]") :]
FAULTS = [
    ("format = 1\n", "", "format", "this version reads 1"),
    ("format = 1", "format = 2", "format", "this version reads 1"),
    ('name = "mine"', 'nam = "mine"', "nam", "unknown key"),
    ('policy = "cheapest-meeting-target"', 'policy = "luck"', "policy", "least-loaded"),
    ('planned = "2026-11-15"', "planned = 4", "planned", "string"),
    (POOL, "", "pool", "missing"),
    (POOL, "pool = 1\n", "pool", "missing"),
    (POOL, POOL + POOL, "pool[1].name", "twice"),
    ("tp = 2", "tpp = 2", "pool[0].tpp", "unknown key"),
    ("tp = 2", "tp = 0", "pool[0].tp", "whole number"),
    ("tp = 2", "tp = 3", "pool[0]", "3"),
    ('name = "chat-mi300x"\n', "", "pool[0].name", "missing"),
    ('name = "chat-mi300x"', 'name = "Chat"', "pool[0].name", "lower case"),
    ('name = "chat-mi300x"', 'name = "a b"', "pool[0].name", "lower case"),
    ('model = "llama-3.1-8b"\naccelerator', 'model = "llama-9"\naccelerator', "pool[0].model", "unknown model"),
    ('"mi300x"', '"mi999"', "pool[0].accelerator", "unknown accelerator"),
    ('precision = "fp8"', 'precision = "fp3"', "pool[0].precision", "unknown precision"),
    ('precision = "fp8"\n', "", "pool[0].precision", "missing"),
    ('kv = "bf16"', 'kv = "fp3"', "pool[0].kv", "fp3"),
    ('stack = "vllm"', 'stack = "vlm"', "pool[0].stack", "unknown stack"),
    ('stack = "vllm"', 'stack = "tensorrt-llm"', "pool[0].stack", "does not run on mi300x"),
    ("replicas = 3\n", "", "pool[0].replicas", "whole number"),
    ("replicas = 3", "replicas = 0", "pool[0].replicas", "whole number"),
    ("replicas = 3", "replicas = true", "pool[0].replicas", "whole number"),
    ("usd_per_gpu_hour = 1.3", "usd_per_gpu_hour = nan", "pool[0].usd_per_gpu_hour", "number"),
    ("max_in_flight = 100", "max_in_flight = 0", "pool[0].max_in_flight", "whole number"),
    ("max_context = 50000", "max_context = -5", "pool[0].max_context", "whole number"),
    ('["http://a:8000/v1"]', '["a:8000"]', "pool[0].backends", "http"),
    ('["http://a:8000/v1"]', '"http://a:8000"', "pool[0].backends", "list"),
    (CLASS, CLASS + CLASS, "class[1].name", "twice"),
    (CLASS, "[class]\n", "class", "[[class]]"),
    (CLASS, CLASS.replace("llama-3.1-8b", "llama-9"), "class[0].model", "unknown model"),
    (CLASS, CLASS.replace("llama-3.1-8b", "qwen3-8b"), "class[0].routes[0].pool", "serves llama-3.1-8b"),
    (CLASS, CLASS.replace('name = "chat"\n', ""), "class[0].name", "missing"),
    ("requests_per_s = 5", "requests_per_s = -5", "class[0].requests_per_s", "number"),
    ("input_tokens = 1000", "input_tokens = 0", "class[0].input_tokens", "number"),
    ("output_tokens = 200", "output_tokens = inf", "class[0].output_tokens", "number"),
    ("{ p95 = 1000 }", "1000", "class[0].ttft_ms", "percentile"),
    ("{ pool = ", "{ colour = 1, pool = ", "class[0].routes[0].colour", "unknown key"),
    ('{ pool = "chat-mi300x"', '{ pool = "other"', "class[0].routes[0].pool", "there are chat-mi300x"),
    ("share = 1", "share = 1.5", "class[0].routes[0].share", "number"),
    ("up_to_input = 4000", "up_to_input = 0.5", "class[0].routes[0].up_to_input", "whole number"),
    ('why = "cheapest"', "why = 4", "class[0].routes[0].why", "string"),
    ("routes = [{", "routes = [1, {", "class[0].routes[0]", "table"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "key", "words"), FAULTS, ids=[f"{key}: {words}" for *_, key, words in FAULTS])
def test_faults_are_named_by_their_key(
    catalog: Catalog, tmp_path: Path, old: str, new: str, key: str, words: str
) -> None:
    assert old in TEXT
    file = fleet_file(tmp_path, TEXT.replace(old, new, 1))
    with pytest.raises(BadData) as caught:
        read_fleet(catalog, file)
    assert (caught.value.file, caught.value.key) == (str(file), key)
    assert words in caught.value.reason
    assert str(caught.value).count(str(file)) == 1
