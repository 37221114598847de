"""Fleet files: what is written reads back, and every fault of a hand-written one is named by its key."""

import errno
import re
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from hypothesis import given, settings, strategies as st

from crosstie.catalog.fleet_text import example_fleet_text, fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadData
from crosstie.core.fleet import MODALITIES, Adapter, Fleet, Pool, Route, ServedClass, Serving, TokenPrice
from crosstie.core.workload import Target

SERVE_RANGES: dict[str, tuple[Any, Any]] = {
    field.name: (field.type.ge, field.type.le)
    for field in msgspec.inspect.type_info(Serving).fields  # type: ignore[attr-defined]
    if isinstance(field.type, msgspec.inspect.IntType | msgspec.inspect.FloatType)
}
SERVE_OTHERS = {"default_class", "resume", "share_prefixes", "cors_origins", "trusted_proxies"}
PAGE = Path(__file__).parents[2] / "docs" / "fleet.md"
TEXT = """\
format = 1
name = "mine"
planned = "2026-11-15"
policy = "cheapest-meeting-target"

[serve]
retries = 1
drain_s = 30
default_class = "chat"

[[pool]]
name = "chat-mi300x"
model = "llama-3.1-8b"
accelerator = "mi300x"
tp = 2
precision = "fp8"
kv = "bf16"
stack = "vllm"
replicas = 2
usd_per_gpu_hour = 1.3
max_in_flight = 100
max_context = 50000
backends = ["http://a:8000/v1", "http://b:8000/v1"]

[[pool]]
name = "any"
model = "My Model 7B"
replicas = 1
served_as = "my/model"
api_key_env = "ANY_KEY"
weight = 2
modalities = ["text", "image"]

[[class]]
name = "chat"
model = "llama-3.1-8b"
requests_per_s = 5
input_tokens = 1000
output_tokens = 200
ttft_ms = { p95 = 1000 }
routes = [{ pool = "chat-mi300x", share = 1, up_to_input = 4000, why = "cheapest" }]
"""
POOL, CLASS = TEXT[TEXT.index("[[pool]]") : TEXT.index('[[pool]]\nname = "any"')], TEXT[TEXT.index("[[class]]") :]
ANY = TEXT[TEXT.index('[[pool]]\nname = "any"') : TEXT.index("[[class]]")]
SERVE = TEXT[TEXT.index("[serve]") : TEXT.index("[[pool]]")]
FLEET_KEYS = {"format", "name", "planned", "policy", "aliases", "fallbacks"}
DRAFTS = {"speculation", "text", "acceptance"}
BOUGHT = """[[pool]]
name = "provider"
model = "llama-3.1-8b"
usd_per_million_input = 0.1
usd_per_million_output = 0.4
usd_per_million_cached_input = 0.05
max_usd_per_hour = 2
max_usd_per_day = 20
max_context = 100000
api_key_env = "PROVIDER_KEY"
backends = ["https://api.example.com/v1"]
"""
TOKEN_KEYS = {*re.findall(r"^(\w+) =", BOUGHT, re.MULTILINE)}
POOL_KEYS = {
    *re.findall(r"^(\w+) =", POOL + ANY, re.MULTILINE),
    "pp",
    "ep",
    "dp",
    *DRAFTS,
    *TOKEN_KEYS,
    "paid_anyway",
    "drained",
    "shadow",
    "canary",
    "trial_class",
    "max_failed",
    "max_slower",
    "adapters",
    "max_adapters",
}
CLASS_KEYS = {*re.findall(r"^(\w+) =", CLASS, re.MULTILINE), "tpot_ms"}
ROUTE_KEYS = {"pool", "share", "up_to_input", "why"}
BACKENDS = '["http://a:8000/v1", "http://b:8000/v1"]'
ROUTES = '[{ pool = "chat-mi300x", share = 1, up_to_input = 4000, why = "cheapest" }]'
WEIGHTED = 'policy = "weighted"\n'


def fleet_file(folder: Path, text: str) -> Path:
    file = folder / "fleet.toml"
    file.write_text(text, encoding="utf-8")
    return file


def changed(*changes: tuple[str, str]) -> str:
    """The text with each first string, which it must have, replaced by the second."""
    text = TEXT
    for old, new in changes:
        assert old in text, old
        text = text.replace(old, new, 1)
    return text


def test_a_hand_written_fleet_means_what_it_says(catalog: Catalog, tmp_path: Path) -> None:
    got = read_fleet(catalog, fleet_file(tmp_path, TEXT))
    (pool, other), (one,) = got.pools, got.classes
    assert (pool.gpus, pool.parallelism.tp, pool.stack) == (4, 2, "vllm")
    assert pool.backends == ("http://a:8000/v1", "http://b:8000/v1")
    assert (pool.served_as, pool.api_key_env, pool.weight, pool.modalities) == (None, None, None, None)
    assert (other.model, other.served_as, other.api_key_env) == ("My Model 7B", "my/model", "ANY_KEY")
    assert (other.accelerator, other.precision, other.stack, other.kv_format) == (None, None, None, "bf16")
    assert (other.gpus, other.usd_per_gpu_hour, other.max_in_flight) == (1, 0.0, 256)
    assert (other.weight, other.modalities) == (2.0, ("text", "image"))
    assert got.usd_per_hour == pytest.approx(5.2)
    assert got.serving == Serving(retries=1, drain_s=30.0, default_class="chat")
    assert one.ttft == Target(seconds=1.0, percentile=0.95)
    assert one.tpot is None
    assert one.routes == (Route(pool="chat-mi300x", share=1.0, up_to_input=4000, why="cheapest"),)


def test_a_pool_may_be_on_trial(catalog: Catalog, tmp_path: Path) -> None:
    told = 'usd_per_gpu_hour = 1.3\nshadow = 0.01\ncanary = 0.02\ntrial_class = "chat"\nmax_slower = 2.0'
    pool = read_fleet(catalog, fleet_file(tmp_path, changed(("usd_per_gpu_hour = 1.3", told)))).pools[0]
    assert (pool.shadow, pool.canary, pool.trial_class) == (0.01, 0.02, "chat")
    assert (pool.max_failed, pool.max_slower) == (0.05, 2.0)
    for said, reason in (
        ('shadow = 0.01\ntrial_class = "nope"', r"pool\[0\]\.trial_class: 'nope' is no class; there are chat"),
        ("max_slower = 2.0", r"pool\[0\]\.max_slower: is about a trial: give shadow or canary"),
        ("shadow = 1.5", r"pool\[0\]\.shadow"),
    ):
        with pytest.raises(BadData, match=reason):
            read_fleet(
                catalog, fleet_file(tmp_path, changed(("usd_per_gpu_hour = 1.3", f"usd_per_gpu_hour = 1.3\n{said}")))
            )


def test_a_pool_may_be_paid_by_the_token(catalog: Catalog, tmp_path: Path) -> None:
    text = changed(
        ("[[class]]", BOUGHT + "\n[[class]]"),
        ("usd_per_gpu_hour = 1.3", "usd_per_gpu_hour = 1.3\npaid_anyway = false\ndrained = true"),
    )
    got = read_fleet(catalog, fleet_file(tmp_path, text))
    assert (got.pools[0].paid_anyway, got.pools[0].token_price) == (False, None)
    assert [pool.drained for pool in got.pools] == [True, False, False]
    assert got.pools[2].token_price == TokenPrice(
        usd_per_million_input=0.1, usd_per_million_output=0.4, usd_per_million_cached_input=0.05, max_usd_per_hour=2.0,
        max_usd_per_day=20.0,
    )  # fmt: skip
    assert read_fleet(catalog, fleet_file(tmp_path, fleet_text(got))) == got


@pytest.mark.parametrize(
    ("old", "new", "key", "reason"),
    [
        ("usd_per_million_output = 0.4\n", "", "usd_per_million_output", "missing"),
        ("usd_per_million_input = 0.1", "usd_per_million_input = -1", "usd_per_million_input", "-1"),
        ("max_usd_per_day = 20", "max_usd_per_day = 0", "max_usd_per_day", "0"),
        ('api_key_env = "PROVIDER_KEY"\n', "", "api_key_env", "a client's own is not passed on"),
        ("max_context = 100000\n", "", "max_context", "missing: how long a request"),
        (
            "max_context = 100000",
            "max_context = 100000\ntp = 2",
            "tp",
            "no meaning for a pool that is paid by the token",
        ),
        ("max_context = 100000", 'max_context = 100000\naccelerator = "h200"', "accelerator", "no meaning"),
        ("max_context = 100000", "max_context = 100000\nusd_per_gpu_hour = 2", "usd_per_gpu_hour", "no meaning"),
    ],
)
def test_faults_of_a_price_by_the_token_are_named(
    catalog: Catalog, tmp_path: Path, old: str, new: str, key: str, reason: str
) -> None:
    assert old in BOUGHT
    text = changed(("[[class]]", BOUGHT.replace(old, new) + "\n[[class]]"))
    with pytest.raises(BadData, match=re.escape(f"pool[2].{key}: ")) as told:
        read_fleet(catalog, fleet_file(tmp_path, text))
    assert reason in str(told.value)


SQL = '{ name = "sql", path = "/adapters/sql" }'


def adapters(text: str) -> tuple[str, str]:
    return "max_in_flight = 100", f"max_in_flight = 100\n{text}"


def test_a_pool_may_have_adapters(catalog: Catalog, tmp_path: Path) -> None:
    text = changed(adapters(f"max_adapters = 4\nadapters = [{SQL}]"))
    got = read_fleet(catalog, fleet_file(tmp_path, text))
    assert (got.pools[0].adapters, got.pools[0].max_adapters) == ((Adapter(name="sql", path="/adapters/sql"),), 4)
    assert read_fleet(catalog, fleet_file(tmp_path, fleet_text(got))) == got


@pytest.mark.parametrize(
    ("said", "key", "reason"),
    [
        ("max_adapters = 4", "pool[0].max_adapters", "goes with adapters"),
        ("adapters = []", "pool[0].adapters", "is no list such as"),
        ('adapters = [{ name = "sql" }]', "pool[0].adapters[0].path", "missing"),
        ('adapters = [{ name = "sql", path = "a", size = 3 }]', "pool[0].adapters[0].size", "unknown key"),
        (f"adapters = [{SQL}, {SQL}]", "pool[0].adapters[1].name", "is there twice"),
        (
            'adapters = [{ name = "my/model", path = "a" }]',
            "pool[0].adapters[0].name",
            "is the name of a model by pool[1]",
        ),
        (f"max_adapters = 0\nadapters = [{SQL}]", "pool[0].max_adapters", "0"),
    ],
)
def test_faults_of_adapters_are_named(catalog: Catalog, tmp_path: Path, said: str, key: str, reason: str) -> None:
    with pytest.raises(BadData, match=re.escape(f"{key}: ")) as told:
        read_fleet(catalog, fleet_file(tmp_path, changed(adapters(said))))
    assert reason in str(told.value)


def test_an_adapter_is_one_model_s(catalog: Catalog, tmp_path: Path) -> None:
    both = changed(
        adapters(f"adapters = [{SQL}]"), ('served_as = "my/model"', f'served_as = "my/model"\nadapters = [{SQL}]')
    )
    with pytest.raises(BadData, match=r"'sql' is an adapter of llama-3\.1-8b already"):
        read_fleet(catalog, fleet_file(tmp_path, both))


def test_weights_are_of_the_fleet_s_own_pools(catalog: Catalog, tmp_path: Path) -> None:
    text = changed(('policy = "cheapest-meeting-target"', 'policy = "weighted"'), ("[[class]]", BOUGHT + "\n[[class]]"))
    assert read_fleet(catalog, fleet_file(tmp_path, text.replace("tp = 2", "tp = 2\nweight = 1"))).policy == "weighted"


def test_a_pool_may_speculate(catalog: Catalog, tmp_path: Path) -> None:
    said = 'stack = "vllm"\nrelease = "0.32.0"\nspeculation = "eagle3:3"\ntext = "coding"\nacceptance = 2.5'
    got = read_fleet(catalog, fleet_file(tmp_path, changed(('stack = "vllm"', said))))
    assert (got.pools[0].speculation, got.pools[0].text, got.pools[0].acceptance) == ("eagle3:3", "coding", 2.5)
    assert got.pools[0].release == "0.32.0"
    again = read_fleet(catalog, fleet_file(tmp_path, fleet_text(got)))
    assert again.pools[0] == got.pools[0]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ('release = "newest"', r"pool\[0\].release: 'newest' is no release of an engine"),
        ('speculation = "mtp:3"', r"pool\[0\].speculation.*llama-3.1-8b has no prediction layer"),
        ('speculation = "magic"', r"pool\[0\].speculation.*must be one of mtp"),
        ('speculation = "eagle3:3"\ntext = "verse"', r"pool\[0\].speculation.*verse"),
        ('speculation = "eagle3:3"\nacceptance = 4.5', r"pool\[0\].speculation.*3 drafts give 1 to 4"),
        ('speculation = "eagle3:3"\nacceptance = 0.5', r"pool\[0\].acceptance"),
        ("acceptance = 2", r"pool\[0\].acceptance.*which the pool has not"),
    ],
)
def test_faults_of_speculation_are_named(catalog: Catalog, tmp_path: Path, said: str, reason: str) -> None:
    with pytest.raises(BadData, match=reason):
        read_fleet(catalog, fleet_file(tmp_path, changed(('stack = "vllm"', f'stack = "vllm"\n{said}'))))


def test_the_least_that_a_fleet_file_must_say(catalog: Catalog, tmp_path: Path) -> None:
    text = 'format = 1\n[[pool]]\nname = "a"\nmodel = "m"\nbackends = ["http://h", "http://i"]\n'
    got = read_fleet(catalog, fleet_file(tmp_path, text))
    assert (got.name, got.planned, got.policy, got.serving) == ("fleet", "", "cheapest-meeting-target", Serving())
    assert (got.pools[0].replicas, got.pools[0].backends, got.classes) == (2, ("http://h", "http://i"), ())


def test_a_server_of_unknown_speed_may_say_more(catalog: Catalog, tmp_path: Path) -> None:
    more = 'model = "My Model 7B"\ntp = 8\nusd_per_gpu_hour = 2\nprecision = "awq"\nkv = "fp8"\nstack = "SGLang"'
    pool = read_fleet(catalog, fleet_file(tmp_path, changed(('model = "My Model 7B"', more)))).pools[1]
    assert (pool.gpus, pool.usd_per_gpu_hour) == (8, 2.0)
    assert (pool.precision, pool.kv_format, pool.stack) == ("awq", "fp8", "sglang")


@pytest.mark.parametrize("asked", ["llama-3.1-8b", "Llama-3.1-8B", "meta-llama/Llama-3.1-8B"])
def test_a_class_may_use_any_name_of_the_catalog(catalog: Catalog, tmp_path: Path, asked: str) -> None:
    file = fleet_file(tmp_path, changed((CLASS, CLASS.replace("llama-3.1-8b", asked))))
    assert read_fleet(catalog, file).classes[0].model == "llama-3.1-8b"


@pytest.mark.parametrize("asked", ["My Model 7B", "my/model"])
def test_a_class_may_use_the_names_of_its_pools(catalog: Catalog, tmp_path: Path, asked: str) -> None:
    one = CLASS.replace("llama-3.1-8b", asked).replace('pool = "chat-mi300x"', 'pool = "any"')
    assert read_fleet(catalog, fleet_file(tmp_path, changed((CLASS, one)))).classes[0].model == "My Model 7B"


def test_text_and_fleet_and_text_again(catalog: Catalog, tmp_path: Path) -> None:
    first = fleet_text(read_fleet(catalog, fleet_file(tmp_path, TEXT)))
    assert fleet_text(read_fleet(catalog, fleet_file(tmp_path, first))) == first


def test_aliases_and_origins_are_read_and_written(catalog: Catalog, tmp_path: Path) -> None:
    more = '[aliases]\n"gpt 4o" = "meta-llama/Llama-3.1-8B"\nmine = "my/model"\n\n'
    more += '[fallbacks]\n"my/model" = ["meta-llama/Llama-3.1-8B"]\n\n'
    more += '[serve]\ncors_origins = ["https://a.com", "*"]'
    got = read_fleet(catalog, fleet_file(tmp_path, changed(("[serve]", more))))
    assert got.aliases == {"gpt 4o": "llama-3.1-8b", "mine": "My Model 7B"}
    assert got.fallbacks == {"My Model 7B": ("llama-3.1-8b",)}
    assert got.serving.cors_origins == ("https://a.com", "*")
    assert read_fleet(catalog, fleet_file(tmp_path, fleet_text(got))) == got


def test_defaults_are_not_written(catalog: Catalog, tmp_path: Path) -> None:
    got = read_fleet(catalog, fleet_file(tmp_path, TEXT))
    written = fleet_text(got)
    assert '[serve]\nretries = 1\ndrain_s = 30\ndefault_class = "chat"\n\n' in written
    other = written[written.index('name = "any"') : written.index("[[class]]")]
    keys = re.findall(r"^(\w+) =", other, re.MULTILINE)
    assert keys == [
        "name", "model", "replicas", "max_in_flight", "max_context", "served_as", "api_key_env", "weight", "modalities",
        "backends",
    ]  # fmt: skip
    assert "[serve]" not in fleet_text(msgspec.structs.replace(got, serving=Serving()))


class PoolInRack(Pool, frozen=True, kw_only=True):
    """What a new key takes: a line here."""

    rack_kw: Annotated[float, msgspec.Meta(ge=1, le=500)] = 40.0


def test_a_new_key_needs_one_place(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read, held to its limits, offered to who mistypes it, and written where it is not the default."""
    text = changed(("max_in_flight = 100", "max_in_flight = 100\nrack_kw = 120"))
    with pytest.raises(BadData, match=r"pool\[0\].rack_kw: unknown key"):
        read_fleet(catalog, fleet_file(tmp_path, text))
    monkeypatch.setattr("crosstie.catalog.pools.Pool", PoolInRack)
    got = read_fleet(catalog, fleet_file(tmp_path, text))
    assert [getattr(pool, "rack_kw", None) for pool in got.pools] == [120.0, 40.0]
    assert fleet_text(got).count("rack_kw = ") == 1
    assert read_fleet(catalog, fleet_file(tmp_path, fleet_text(got))) == got
    for slip, reason in (("rack_kw = 1000", "must be a number from 1 to 500"), ("rack_kv = 9", "did you mean rack_kw")):
        with pytest.raises(BadData, match=reason):
            read_fleet(catalog, fleet_file(tmp_path, text.replace("rack_kw = 120", slip)))


def test_what_is_still_to_be_done_is_said(catalog: Catalog, tmp_path: Path) -> None:
    text = fleet_text(read_fleet(catalog, fleet_file(tmp_path, TEXT)))
    assert "Add to every pool the addresses" in text
    assert 'backends = []  # 1 base URL, such as "http://host:8000/v1"' in text
    ready = changed(('name = "any"', 'name = "any"\nbackends = ["http://c"]'))
    assert "Add to every pool" not in fleet_text(read_fleet(catalog, fleet_file(tmp_path, ready)))


def test_the_example_reads(catalog: Catalog, tmp_path: Path) -> None:
    got = read_fleet(catalog, fleet_file(tmp_path, example_fleet_text()))
    assert [pool.accelerator for pool in got.pools] == ["mi300x", "h200"]
    assert {pool.stack for pool in got.pools} == {"vllm"}
    assert all(backend.startswith("http://127.0.0.1:") for pool in got.pools for backend in pool.backends)
    assert all(one.ttft for one in got.classes)
    assert len(got.classes) == 2


def test_the_page_about_fleet_files(catalog: Catalog, tmp_path: Path) -> None:
    """Its examples read, and its tables have every key."""
    page = PAGE.read_text(encoding="utf-8")
    examples = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    assert examples
    for example in examples:
        read_fleet(catalog, fleet_file(tmp_path, example))
    documented = set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    for known in (
        FLEET_KEYS,
        POOL_KEYS,
        CLASS_KEYS,
        ROUTE_KEYS,
        {*SERVE_RANGES, *SERVE_OTHERS},
    ):
        assert known <= documented, known - documented


def test_the_page_has_the_defaults_and_ranges_of_serve() -> None:
    page = PAGE.read_text(encoding="utf-8")
    usual = Serving()
    for key, (low, high) in SERVE_RANGES.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| `{key}`"))
        assert f"| {getattr(usual, key):g} | {low:g} to {int(high):,} |" in row


def test_every_setting_can_be_given() -> None:
    assert {*SERVE_RANGES, *SERVE_OTHERS} == {field.name for field in msgspec.structs.fields(Serving)}
    usual = Serving()
    for key, (low, high) in SERVE_RANGES.items():
        assert low <= getattr(usual, key) <= high


ADDRESSES = [
    ("http://c:8000/v1/", "http://c:8000/v1"),
    ("http://c:8000/v1///", "http://c:8000/v1"),
    ("HTTP://A.Example:80/V1", "http://a.example/V1"),
    ("https://a:443", "https://a"),
    ("https://a:80/", "https://a:80"),
    ("http://10.0.0.7:8000/v1", "http://10.0.0.7:8000/v1"),
    ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
    ("http://[0:0::0:1]:8000", "http://[::1]:8000"),
    ("http://vllm_1:65535/a/b/v1", "http://vllm_1:65535/a/b/v1"),
    ("https://host.example./openai/v1", "https://host.example./openai/v1"),
]


@pytest.mark.parametrize(("given", "normal"), ADDRESSES)
def test_addresses_have_one_form(catalog: Catalog, tmp_path: Path, given: str, normal: str) -> None:
    file = fleet_file(tmp_path, changed(('name = "any"', f'name = "any"\nbackends = ["{given}"]')))
    assert read_fleet(catalog, file).pools[1].backends == (normal,)


# What six digits hold exactly.
figures = st.integers(1, 999_999).map(lambda n: n / 1000)
words = st.text(st.characters(exclude_categories=("C", "Z")), min_size=1, max_size=12)
targets = st.none() | st.builds(
    Target,
    seconds=st.integers(1, 9999).map(lambda ms: ms / 1e3),
    percentile=st.sampled_from([0.5, 0.75, 0.9, 0.95, 0.99]),
)
pool_names = st.from_regex(r"[a-z0-9а-я][a-z0-9а-я._-]{0,12}", fullmatch=True)
MODELS = {"llama-3.1-8b": "a name", "My own model": "another name"}


@st.composite
def pools(draw: st.DrawFn, name: str, weighted: bool) -> Pool:
    known = draw(st.booleans())
    model = "llama-3.1-8b" if known else draw(st.sampled_from(sorted(MODELS)))
    # A host of its own, so that no address is there twice.
    backends = [f"https://h{name.encode().hex()}:8000/{i}" for i in range(draw(st.integers(0, 3)))]
    maybe = st.none()
    return Pool(
        name=name,
        model=model,
        accelerator=draw(st.sampled_from(["mi300x", "h200"])) if known else None,
        parallelism=Parallelism(tp=draw(st.sampled_from([1, 2, 4, 8]))),
        precision=draw(st.sampled_from(["fp8", "bf16"]) | (st.nothing() if known else maybe)),
        kv_format=draw(st.sampled_from(["bf16", "fp8"])),
        stack=draw(st.sampled_from(["vllm", "sglang"]) | (st.nothing() if known else maybe)),
        replicas=len(backends) or draw(st.integers(1, 9999)),
        usd_per_gpu_hour=draw(figures if known else st.just(0.0) | figures),
        max_in_flight=draw(st.integers(1, 1024)),
        max_context=draw(st.integers(1, 131_072)),
        backends=tuple(backends),
        served_as=draw(maybe | st.just(MODELS[model])),
        api_key_env=draw(maybe | st.from_regex(r"[A-Za-z_][A-Z_]{0,20}", fullmatch=True)),
        weight=draw(figures) if weighted else None,
        network_s=draw(st.sampled_from([0.0, 0.09])),
        modalities=draw(maybe | st.lists(st.sampled_from(MODALITIES), unique=True).map(tuple)),
    )


def shares(draw: st.DrawFn, names: list[str], bound: int | None) -> list[Route]:
    """Routes for prompts of one length, which add up to 1."""
    among = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
    parts = [draw(st.integers(0, 300)) / 1000 for _ in among[1:]]
    return [
        Route(pool=name, share=share, up_to_input=bound, why=draw(st.just("") | words))
        for name, share in zip(among, [round(1 - sum(parts), 3), *parts], strict=True)
    ]


@st.composite
def served(draw: st.DrawFn, name: str, pools: list[Pool]) -> ServedClass:
    model = draw(st.sampled_from([pool.model for pool in pools]))
    names = [pool.name for pool in pools if pool.model == model]
    bounds = draw(st.lists(st.none() | st.integers(1, 10**6), max_size=3, unique=True))
    return ServedClass(
        name=name,
        model=model,
        requests_per_s=draw(figures),
        input_tokens=1.0 + draw(figures),
        output_tokens=float(draw(st.integers(1, 9999))),
        ttft=draw(targets),
        tpot=draw(targets),
        routes=tuple(route for bound in bounds for route in shares(draw, names, bound)),
    )


@st.composite
def settings_of_serve(draw: st.DrawFn, classes: list[str]) -> Serving:
    usual = Serving()

    def thousandths(key: str) -> st.SearchStrategy[float]:
        return st.integers(50, int(1000 * min(600, SERVE_RANGES[key][1]))).map(lambda n: n / 1000)

    given: dict[str, Any] = {
        key: draw(
            st.integers(int(SERVE_RANGES[key][0]), 100) if isinstance(getattr(usual, key), int) else thousandths(key)
        )
        for key in draw(st.lists(st.sampled_from(sorted(SERVE_RANGES)), unique=True))
    }
    return Serving(**given, resume=draw(st.booleans()), default_class=draw(st.sampled_from([None, *classes])))


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    names = draw(st.lists(pool_names, min_size=1, max_size=3, unique=True))
    weighted = draw(st.booleans())
    found = [draw(pools(name, weighted)) for name in names]
    classes = draw(st.lists(words, max_size=2, unique=True))
    return Fleet(
        name=draw(words),
        planned=draw(st.sampled_from(["", "2026-11-15"])),
        policy=draw(st.sampled_from(["weighted", "prefix"])),
        pools=tuple(found),
        classes=tuple(draw(served(name, found)) for name in classes),
        serving=draw(settings_of_serve(classes)),
    )


@pytest.mark.slow
@given(fleet=fleets())
@settings(max_examples=60)
def test_any_fleet_reads_back(catalog: Catalog, tmp_path_factory: pytest.TempPathFactory, fleet: Fleet) -> None:
    file = fleet_file(tmp_path_factory.getbasetemp(), fleet_text(fleet))
    got = read_fleet(catalog, file)
    assert fleet_text(got) == fleet_text(fleet)
    assert (got.pools, got.name, got.serving) == (fleet.pools, fleet.name, fleet.serving)
    assert [one.routes for one in got.classes] == [one.routes for one in fleet.classes]


def at(address: str) -> tuple[str, str]:
    """The second pool with this address."""
    return 'name = "any"', f'name = "any"\nbackends = ["{address}"]'


def key_of(value: str) -> tuple[str, str]:
    return '"ANY_KEY"', f'"{value}"'


def routes_of(*routes: str) -> tuple[str, str]:
    tables = ", ".join(f'{{ pool = "chat-mi300x", {route} }}' for route in routes)
    return ROUTES, f"[{tables}]"


FAULTS = [
    # The file
    (("format = 1\n", ""), "format", "missing: write format = 1"),
    (("format = 1", "format = 2"), "format", "this version reads 1"),
    (("format = 1", "format = 1.0"), "format", "this version reads 1"),
    (("format = 1", "format = true"), "format", "this version reads 1"),
    (('name = "mine"', 'nam = "mine"'), "nam", "unknown key"),
    (('name = "mine"', "name = 7"), "name", "string"),
    ((SERVE, "[traffic]\nrequests_per_s = 5\n"), "traffic", "workload file"),
    (('policy = "cheapest-meeting-target"', 'policy = "luck"'), "policy", "least-loaded"),
    (('policy = "cheapest-meeting-target"', 'policy = ["prefix"]'), "policy", "least-loaded"),
    (('planned = "2026-11-15"', "planned = 4"), "planned", "not a date"),
    (('planned = "2026-11-15"', 'planned = "2026-02-30"'), "planned", "not a date"),
    # [aliases]
    (("[serve]", '[aliases]\n"my/model" = "llama-3.1-8b"\n\n[serve]'), "aliases.my/model", "of a model already"),
    (("[serve]", '[aliases]\ngpt = "gpt-9"\n\n[serve]'), "aliases.gpt", "no pool of this file serves 'gpt-9'"),
    (("[serve]", "[aliases]\ngpt = 4\n\n[serve]"), "aliases.gpt", "string"),
    (("[serve]", '[aliases]\n"" = "any"\n\n[serve]'), "aliases.", "is no name"),
    # [fallbacks]
    (("[serve]", '[fallbacks]\ngpt = ["my/model"]\n\n[serve]'), "fallbacks.gpt", "no pool of this file serves 'gpt'"),
    (("[serve]", '[fallbacks]\n"my/model" = ["gpt"]\n\n[serve]'), "fallbacks.my/model[0]", "serves 'gpt'"),
    (("[serve]", '[fallbacks]\n"my/model" = "gpt"\n\n[serve]'), "fallbacks.my/model", "list"),
    (("[serve]", '[fallbacks]\n"my/model" = ["My Model 7B"]\n\n[serve]'), "fallbacks.my/model", "for itself"),
    # [serve]
    (("retries = 1", 'trusted_proxies = ["10.0.0.0/40"]'), "serve.trusted_proxies[0]", "no address and no network"),
    (("retries = 1", 'trusted_proxies = ["proxy"]'), "serve.trusted_proxies[0]", "no address and no network"),
    (("retries = 1", 'cors_origins = ["example.com"]'), "serve.cors_origins[0]", "neither '*' nor as"),
    (("retries = 1", 'cors_origins = ["https://a.com/"]'), "serve.cors_origins[0]", "neither '*' nor as"),
    ((SERVE, "serve = 1\n"), "serve", "must be a table"),
    (("retries = 1", "retry = 1"), "serve.retry", "did you mean retries?"),
    (("retries = 1", "retries = 1.5"), "serve.retries", "whole number from 0 to 100"),
    (("retries = 1", "retries = -1"), "serve.retries", "whole number from 0 to 100"),
    (("retries = 1", "resume = 1"), "serve.resume", "neither true nor false"),
    (("retries = 1", "resume = 'no'"), "serve.resume", "neither true nor false"),
    (("retries = 1", "max_queued = 2000000"), "serve.max_queued", "to 1,000,000"),
    (("drain_s = 30", 'drain_s = "30s"'), "serve.drain_s", "number"),
    (("drain_s = 30", "drain_s = nan"), "serve.drain_s", "number"),
    (("drain_s = 30", "connect_timeout_s = 0"), "serve.connect_timeout_s", "number from 0.01 to 600"),
    (("drain_s = 30", "first_byte_timeout_s = inf"), "serve.first_byte_timeout_s", "to 86400"),
    (("drain_s = 30", "idle_timeout_s = -1"), "serve.idle_timeout_s", "number from 0.01"),
    (("drain_s = 30", "total_timeout_s = 1e9"), "serve.total_timeout_s", "to 604800"),
    (("drain_s = 30", "queue_s = -1"), "serve.queue_s", "number from 0"),
    (("drain_s = 30", "health_every_s = 0"), "serve.health_every_s", "number from 0.05"),
    (("drain_s = 30", "metrics_every_s = true"), "serve.metrics_every_s", "number from 0.05"),
    (("drain_s = 30", "slow_start_s = 1e6"), "serve.slow_start_s", "number from 0 to"),
    (("drain_s = 30", "max_body_mib = 0"), "serve.max_body_mib", "number from 0.001"),
    (('default_class = "chat"', 'default_class = "Chat"'), "serve.default_class", "there are chat"),
    (('default_class = "chat"', "default_class = 1"), "serve.default_class", "string"),
    ((CLASS, ""), "serve.default_class", "there are none"),
    # [[pool]]
    ((POOL + ANY + CLASS, ""), "pool", "missing: write [[pool]]"),
    ((POOL + ANY + CLASS, "[pool]\n"), "pool", "write [[pool]]"),
    ((SERVE + POOL + ANY, "pool = []\n"), "pool", "write [[pool]]"),
    ((SERVE + POOL + ANY, "pool = [1]\n"), "pool[0]", "must be a table"),
    ((POOL, POOL + POOL), "pool[1].name", "twice"),
    (("tp = 2", "tpp = 2"), "pool[0].tpp", "unknown key"),
    (("tp = 2", "tp = 0"), "pool[0].tp", "whole number"),
    (("tp = 2", "tp = 3"), "pool[0]", "3"),
    (('name = "chat-mi300x"\n', ""), "pool[0].name", "missing"),
    (('name = "chat-mi300x"', 'name = "Chat"'), "pool[0].name", "lower case"),
    (('name = "chat-mi300x"', 'name = "a b"'), "pool[0].name", "lower case"),
    (('model = "llama-3.1-8b"\nacc', 'model = "llama-9"\nacc'), "pool[0].model", "unknown model"),
    (('"mi300x"', '"mi999"'), "pool[0].accelerator", "unknown accelerator"),
    (('"mi300x"', '""'), "pool[0].accelerator", "non-empty"),
    (('accelerator = "mi300x"', 'acelerator = "mi300x"'), "pool[0].acelerator", "did you mean accelerator?"),
    (('precision = "fp8"', 'precision = "fp3"'), "pool[0].precision", "unknown precision"),
    (('precision = "fp8"\n', ""), "pool[0].precision", "missing"),
    (('kv = "bf16"', 'kv = "fp3"'), "pool[0].kv", "fp3"),
    (('kv = "bf16"', "kv = 8"), "pool[0].kv", "string"),
    (('stack = "vllm"', 'stack = "vlm"'), "pool[0].stack", "unknown stack"),
    (('stack = "vllm"', 'stack = "tensorrt-llm"'), "pool[0].stack", "does not run on mi300x"),
    (('stack = "vllm"\n', ""), "pool[0].stack", "missing"),
    (("replicas = 2", "replicas = 0"), "pool[0].replicas", "whole number"),
    (("replicas = 2", "replicas = true"), "pool[0].replicas", "whole number"),
    (("replicas = 2", "replicas = 3"), "pool[0].backends", "'chat-mi300x' has replicas = 3 and 2 backends"),
    (("replicas = 1\n", ""), "pool[1].replicas", "missing"),
    (("usd_per_gpu_hour = 1.3\n", ""), "pool[0].usd_per_gpu_hour", "missing"),
    (("usd_per_gpu_hour = 1.3", "usd_per_gpu_hour = 0"), "pool[0].usd_per_gpu_hour", "number"),
    (("usd_per_gpu_hour = 1.3", "usd_per_gpu_hour = nan"), "pool[0].usd_per_gpu_hour", "number"),
    (("max_in_flight = 100", "max_in_flight = 0"), "pool[0].max_in_flight", "whole number"),
    (("max_in_flight = 100", "max_in_flight = 100\nnetwork_s = 90"), "pool[0].network_s", "10"),
    (("max_context = 50000", "max_context = -5"), "pool[0].max_context", "whole number"),
    # A pool of any server
    (('model = "My Model 7B"\n', ""), "pool[1].model", "missing"),
    (('"My Model 7B"', '" My Model 7B"'), "pool[1].model", "space"),
    (('"My Model 7B"', r'"a\nb"'), "pool[1].model", "line breaks"),
    (('"My Model 7B"', '"m"\nstack = "vlm"'), "pool[1].stack", "unknown stack"),
    (('"My Model 7B"', '"m"\nprecision = 8'), "pool[1].precision", "string"),
    (('"My Model 7B"', '"m"\nkv = "fp3"'), "pool[1].kv", "fp3"),
    (('"My Model 7B"', '"m"\ntp = 0'), "pool[1].tp", "whole number"),
    (('"My Model 7B"', '"m"\nusd_per_gpu_hour = -1'), "pool[1].usd_per_gpu_hour", "number from 0 "),
    # Addresses
    ((BACKENDS, '"http://a:8000"'), "pool[0].backends", "list"),
    ((BACKENDS, '["http://a:8000/v1", 5]'), "pool[0].backends", "list of strings"),
    ((BACKENDS, '["http://a:8000/v1", "a:8000"]'), "pool[0].backends[1]", "no http or https address"),
    (at("ftp://c:21/v1"), "pool[1].backends[0]", "no http or https address"),
    (at("http:///v1"), "pool[1].backends[0]", "no http or https address"),
    (at("http://:8000/v1"), "pool[1].backends[0]", "no http or https address"),
    (at("http://c:99999/v1"), "pool[1].backends[0]", "0-65535"),
    (at("http://c:0/v1"), "pool[1].backends[0]", "port from 1 to 65535"),
    (at("http://c:/v1"), "pool[1].backends[0]", "port from 1 to 65535"),
    (at("http://c:http/v1"), "pool[1].backends[0]", "no address"),
    (at("http://me:secret@c:8000/v1"), "pool[1].backends[0]", "api_key_env"),
    (at("http://me@c:8000/v1"), "pool[1].backends[0]", "api_key_env"),
    (at("http://me:#secret@c:8000/v1"), "pool[1].backends[0]", "api_key_env"),
    (at("c:8000/v1?key=secret"), "pool[1].backends[0]", "query"),
    (at("http://c:8000/v1?key=secret"), "pool[1].backends[0]", "query"),
    (at("http://c:8000/v1#top"), "pool[1].backends[0]", "fragment"),
    (at("http://c:8000/v1?"), "pool[1].backends[0]", "query"),
    (at("http://c:8000/v1/chat/completions"), "pool[1].backends[0]", "base URL"),
    (at("http://c d:8000/v1"), "pool[1].backends[0]", "spaces"),
    (at(r"http://c:8000/v1\n"), "pool[1].backends[0]", "line breaks"),
    (at("http://c:8000/é"), "pool[1].backends[0]", "percent-encode"),
    (at("http://bücher:8000/v1"), "pool[1].backends[0]", "no host"),
    (at("http://-c-:8000"), "pool[1].backends[0]", "no host"),
    (at("http://10.0.0.300:8000"), "pool[1].backends[0]", "no IP address"),
    (at("http://[::1:8000"), "pool[1].backends[0]", "no address"),
    (at("http://[fe80::1%25eth0]:8000"), "pool[1].backends[0]", "no "),
    (at("http://b:8000/v1"), "pool[1].backends[0]", "is pool[0].backends[1] already"),
    (at("HTTP://B:8000/v1/"), "pool[1].backends[0]", "is pool[0].backends[1] already"),
    ((BACKENDS, '["http://a:80/v1", "http://a/v1"]'), "pool[0].backends[1]", "is pool[0].backends[0] already"),
    # Names that clients use
    (('"my/model"', "7"), "pool[1].served_as", "string"),
    (('"my/model"', '""'), "pool[1].served_as", "non-empty"),
    (('"my/model"', '"my/model "'), "pool[1].served_as", "space"),
    (('"my/model"', '"llama-3.1-8b"'), "pool[1].served_as", "llama-3.1-8b by pool[0].model"),
    (("replicas = 2", 'replicas = 2\nserved_as = "my/model"'), "pool[1].served_as", "by pool[0].served_as"),
    (("replicas = 2", 'replicas = 2\nserved_as = "My Model 7B"'), "pool[1].model", "by pool[0].served_as"),
    # Keys
    (("api_key_env", "api_key"), "pool[1].api_key", "did you mean api_key_env?"),
    (('"ANY_KEY"', "7"), "pool[1].api_key_env", "string"),
    (key_of("sk-proj-secret"), "pool[1].api_key_env", "not the key"),
    (key_of("$ANY_KEY"), "pool[1].api_key_env", "not the key"),
    (key_of("7KEYS"), "pool[1].api_key_env", "not the key"),
    (key_of("hf_secretAbCdEfGhIjKlMn0123"), "pool[1].api_key_env", "not the key"),
    (key_of("c0ffee00c0ffee00secret0c0ffee00"), "pool[1].api_key_env", "not the key"),
    # Weights and modalities
    (("weight = 2", "weight = -1"), "pool[1].weight", "number from 0"),
    (("weight = 2", 'weight = "2"'), "pool[1].weight", "number"),
    (('policy = "cheapest-meeting-target"\n', WEIGHTED), ("weight = 2", "weight = 0"), "pool[1].weight", "no pool of My Model 7B"),
    (('policy = "cheapest-meeting-target"\n', WEIGHTED), (ANY, ANY + POOL.replace("chat-mi300x", "c").replace(BACKENDS, "[]\nweight = 1")), "pool[0].weight", "give all of them a weight, or none"),
    (('["text", "image"]', '["smell"]'), "pool[1].modalities[0]", "text, image, audio, video"),
    (('["text", "image"]', '["text", "image", "text"]'), "pool[1].modalities[2]", "twice"),
    (('["text", "image"]', '"image"'), "pool[1].modalities", "list"),
    # [[class]]
    ((CLASS, CLASS + CLASS), "class[1].name", "twice"),
    ((CLASS, "[class]\n"), "class", "[[class]]"),
    ((CLASS, CLASS.replace("llama-3.1-8b", "llama-9")), "class[0].model", "they serve llama-3.1-8b, My Model 7B"),
    ((CLASS, CLASS.replace("llama-3.1-8b", "qwen3-8b")), "class[0].model", "no pool of this file serves 'qwen3-8b'"),
    ((CLASS, CLASS.replace("llama-3.1-8b", "./none")), "class[0].model", "no such file"),
    ((CLASS, CLASS.replace("llama-3.1-8b", "my/model")), "class[0].routes[0].pool", "serves llama-3.1-8b"),
    ((CLASS, CLASS.replace('name = "chat"\n', "")), "class[0].name", "missing"),
    ((CLASS, CLASS.replace('model = "llama-3.1-8b"\n', "")), "class[0].model", "missing"),
    (("requests_per_s = 5", "requests_per_s = -5"), "class[0].requests_per_s", "number"),
    (("input_tokens = 1000", "input_tokens = 0"), "class[0].input_tokens", "number"),
    (("output_tokens = 200", "output_tokens = inf"), "class[0].output_tokens", "number"),
    (("{ p95 = 1000 }", "1000"), "class[0].ttft_ms", "percentile"),
    (("ttft_ms = { p95 = 1000 }", "tpot_ms = { p80 = 50 }"), "class[0].tpot_ms.p80", "unknown key"),
    # Routes
    (("{ pool = ", "{ colour = 1, pool = "), "class[0].routes[0].colour", "unknown key"),
    (('{ pool = "chat-mi300x"', '{ pool = "other"'), "class[0].routes[0].pool", "there are chat-mi300x, any"),
    (("share = 1", "share = 1.5"), "class[0].routes[0].share", "number"),
    (("up_to_input = 4000", "up_to_input = 0.5"), "class[0].routes[0].up_to_input", "whole number"),
    (('why = "cheapest"', "why = 4"), "class[0].routes[0].why", "string"),
    (("routes = [{", "routes = [1, {"), "class[0].routes[0]", "table"),
    ((ROUTES, "7"), "class[0].routes", "no list"),
    (routes_of("share = 0.98"), "class[0].routes", "the shares of class 'chat' without up_to_input add up to 0.98, not to 1"),
    (routes_of("share = 0"), "class[0].routes", "add up to 0, not to 1"),
    (routes_of("share = 0.5, up_to_input = 4000", "share = 0.5"), "class[0].routes", "up to 4,000 tokens add up to 0.5"),
    (routes_of("share = 1, up_to_input = 4000", "share = 0.9"), "class[0].routes", "without up_to_input add up to 0.9"),
    (routes_of("share = 0.5", "share = 0.5"), "class[0].routes[1].pool", "here and in routes[0]"),
]  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS, ids=[f"{key}: {words}" for *_, key, words in FAULTS])
def test_faults_are_named_by_their_key(catalog: Catalog, tmp_path: Path, fault: tuple[Any, ...]) -> None:
    *changes, key, words = fault
    file = fleet_file(tmp_path, changed(*changes))
    with pytest.raises(BadData) as caught:
        read_fleet(catalog, file)
    assert (caught.value.file, caught.value.key) == (str(file), key)
    assert words in caught.value.reason
    assert str(caught.value).count(str(file)) == 1
    # What may be a password or a key is not repeated.
    assert "secret" not in str(caught.value)


def test_thirds_are_enough_of_a_whole(catalog: Catalog, tmp_path: Path) -> None:
    more = "".join(POOL.replace("chat-mi300x", name).replace(BACKENDS, "[]") for name in "bc")
    thirds = ", ".join(f'{{ pool = "{name}", share = 0.333 }}' for name in ("chat-mi300x", "b", "c"))
    got = read_fleet(catalog, fleet_file(tmp_path, changed((ANY, ANY + more), (ROUTES, f"[{thirds}]"))))
    assert len(got.classes[0].routes) == 3


BROKEN = [
    (b"", "format", "missing"),
    (b"# nothing yet\n", "format", "missing"),
    (b"format = 1\nname = \n", "", "line 2"),
    (b"{}", "", "not valid TOML"),
    (b"\xff\xfe\x00", "", "not UTF-8 text"),
    (b"x = " + b"9" * 5000, "", "not valid TOML"),
    (b"x = " + b"[" * 5000, "", "not valid TOML"),
]


@pytest.mark.parametrize(("content", "key", "words"), BROKEN, ids=range(len(BROKEN)))
def test_files_that_are_no_fleet(catalog: Catalog, tmp_path: Path, content: bytes, key: str, words: str) -> None:
    file = tmp_path / "fleet.toml"
    file.write_bytes(content)
    with pytest.raises(BadData) as caught:
        read_fleet(catalog, file)
    assert (caught.value.file, caught.value.key) == (str(file), key)
    assert words in caught.value.reason
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read(catalog: Catalog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file, reason in ((tmp_path, "Is a directory"), (tmp_path / "none.toml", "No such file")):
        with pytest.raises(BadData, match=f"cannot be read: {reason}"):
            read_fleet(catalog, file)

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    # Not by chmod: tests may run as root, who may read everything.
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(BadData, match="cannot be read: Permission denied"):
        read_fleet(catalog, tmp_path / "fleet.toml")


def test_a_byte_order_mark_and_dates_without_quotes_are_fine(catalog: Catalog, tmp_path: Path) -> None:
    text = changed(('"2026-11-15"', "2026-11-15"))
    assert read_fleet(catalog, fleet_file(tmp_path, f"\ufeff{text}")).planned == "2026-11-15"
