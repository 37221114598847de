"""Rules of how benchmarks were run: order, narrowing, and bad files by their key."""

from pathlib import Path

import pytest

from crosstie.catalog.benchmarks import BenchmarkSettings, Protocols, read_datasets, read_rules
from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadData

SOURCES = '[sources]\nme = { ref = "my notes", date = "2026-11-15" }\n'
RULE = '[[rule]]\nname = "{}"\nsource = "me"\nwhen = {}\nset = {}\n'
ROW = {
    "rows": "x",
    "engines": "vllm",
    "vendors": "AMD",
    "accelerators": "mi300x",
    "models": "m",
    "bits": "8",
    "lengths": "1/1",
}


def protocols(tmp_path: Path, *rules: tuple[str, str, str]) -> Protocols:
    (tmp_path / "protocols.toml").write_text(SOURCES + "".join(RULE.format(*rule) for rule in rules))
    return Protocols(tmp_path)


def test_a_later_rule_wins_and_earlier_ones_stay_where_it_is_silent(tmp_path: Path) -> None:
    found = protocols(
        tmp_path,
        ("first", "{}", '{ kv_format = "fp8", chunk_tokens = 100, shortest = 0.5 }'),
        ("other engine", '{ engines = ["sglang"] }', "{ chunk_tokens = 1 }"),
        ("second", '{ engines = ["vllm", "atom"], vendors = ["AMD"] }', "{ chunk_tokens = 200 }"),
        ("one word fails", '{ engines = ["vllm"], vendors = ["NVIDIA"] }', "{ chunk_tokens = 300 }"),
    )
    settings, spoke = found.settings(ROW)
    assert settings == BenchmarkSettings(kv_format="fp8", chunk_tokens=200, shortest=0.5)
    assert spoke == ("first", "second")


def test_the_order_is_that_of_the_file(tmp_path: Path) -> None:
    a, b = ("a", "{}", "{ max_sequences = 1 }"), ("b", "{}", "{ max_sequences = 2 }")
    assert protocols(tmp_path, a, b).settings(ROW)[0].max_sequences == 2
    assert protocols(tmp_path, b, a).settings(ROW)[0].max_sequences == 1


def test_no_rule_sets_nothing(tmp_path: Path) -> None:
    assert protocols(tmp_path).settings(ROW) == (BenchmarkSettings(), ())


def test_settings_over_one_another() -> None:
    mine, other = (
        BenchmarkSettings(kv_format="bf16", few_clients=0.0),
        BenchmarkSettings(kv_format="fp8", shortest=0.8, few_clients=4.0),
    )
    assert mine.over(other) == BenchmarkSettings(kv_format="bf16", shortest=0.8, few_clients=0.0)
    assert BenchmarkSettings().over(other) == other


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ('[[rule]]\nname = "a"\nsource = "me"\nset = {}\n', "rule[0].when: missing"),
        ('[[rule]]\nname = "a"\nsource = "me"\nwhen = {}\n', "rule[0].set: missing"),
        ('[[rule]]\nsource = "me"\nwhen = {}\nset = {}\n', "rule[0].name: missing"),
        ('[[rule]]\nname = "a"\nwhen = {}\nset = {}\n', "rule[0].source"),
        ('[[rule]]\nname = "a"\nsource = "you"\nwhen = {}\nset = {}\n', "rule[0].source: 'you' is not in [sources]"),
        (RULE.format("a", '{ engine = ["vllm"] }', "{}"), "rule[0].when.engine: unknown key; did you mean engines?"),
        (RULE.format("a", '{ engines = "vllm" }', "{}"), "rule[0].when.engines: must be a list of strings"),
        (RULE.format("a", "{ engines = [1] }", "{}"), "rule[0].when.engines: must be a list of strings"),
        (RULE.format("a", "{}", "{ chunk = 5 }"), "rule[0].set.chunk"),
        (
            RULE.format("a", "{}", '{ chunk_tokens = "many" }'),
            "rule[0].set.chunk_tokens: 'many' must be a number above 0, up to 1e+07",
        ),
        (
            RULE.format("a", "{}", "{ receive_every = 1.5 }"),
            "rule[0].set.receive_every: 1.5 must be a whole number from 1 to 1,000",
        ),
        (RULE.format("a", "{}", "{}") + RULE.format("b", "{}", "[]"), "rule[1].set: must be a table"),
        (RULE.format("a", "{}", "{}") + "extra = 1\n", "rule[0].extra: unknown key"),
        ("rule = 3\n", "rule: is no list of tables"),
        ("rules = []\n", "rules: unknown key"),
        ("[[rule]\n", "not valid TOML"),
    ],
)
def test_a_bad_rule_is_named_by_its_key(tmp_path: Path, body: str, key: str) -> None:
    file = tmp_path / "protocols.toml"
    # A bare key must stand before the tables.
    file.write_text(body + SOURCES if body.startswith("rule") else SOURCES + body)
    with pytest.raises(BadData) as refused:
        read_rules(file)
    assert str(file) in str(refused.value)
    assert key in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadData, match="cannot be read"):
        _ = Protocols(tmp_path).rules
    with pytest.raises(BadData, match="cannot be read"):
        _ = Protocols(tmp_path).datasets


def test_the_shipped_rules_name_things_that_there_are(catalog: Catalog) -> None:
    shipped = Protocols()
    for rule in shipped.rules:
        assert set(rule.when.get("engines", ())) <= set(catalog.stacks)
        assert set(rule.when.get("accelerators", ())) <= set(catalog.accelerators)
        assert set(rule.when.get("models", ())) <= set(catalog.models)
        assert set(rule.when.get("vendors", ())) <= {a.vendor for a in catalog.accelerators.values()}
        assert set(rule.when.get("bits", ())) <= {"16", "8", "4"}
        assert rule.set.kv_format in (None, "bf16", "fp16", "fp8")
        assert rule.set.shortest is None or 0 < rule.set.shortest <= 1
        assert rule.set.memory_fraction is None or 0 < rule.set.memory_fraction < 1
        assert rule.set != BenchmarkSettings()
    assert len({rule.name for rule in shipped.rules}) == len(shipped.rules)


def test_the_shipped_data_sets_and_layouts_name_things_that_there_are(catalog: Catalog) -> None:
    shipped = Protocols()
    assert shipped.datasets["llama-2-70b"].limits["v4.1", "server"] == (2.0, 0.2)
    for dataset in shipped.datasets.values():
        assert dataset.input_mean > 0
        assert dataset.output_mean is None or dataset.output_mean > 0
        for ttft, tpot in dataset.limits.values():
            assert 0 < tpot < ttft
    assert len(shipped.layouts) > 20
    for (accelerator, model, scenario), layout in shipped.layouts.items():
        assert accelerator == accelerator.casefold()
        assert model == model.casefold()
        assert scenario in ("offline", "server", "interactive")
        assert int(layout["tp"]) >= 1


def test_the_layout_of_most_submissions_is_taken(tmp_path: Path) -> None:
    head = "accelerator,model,scenario,tp,pp,ep,attention_dp,weights\n"
    lines = [
        "X,M,Offline,8,1,,,fp8",
        "x,m,OFFLINE,4|8,1,,,fp8",
        "X,M,Offline,4,1,,,fp8",
        "X,M,Offline,,,,,",
        "X,M,Server,2,1,,,fp4",
    ]
    (tmp_path / "mlperf_layouts.csv").write_text(head + "\n".join(lines) + "\n")
    found = Protocols(tmp_path).layouts
    assert found["x", "m", "offline"]["tp"] == "4"
    assert found["x", "m", "server"]["weights"] == "fp4"
    assert set(found) == {("x", "m", "offline"), ("x", "m", "server")}


DATASET = SOURCES + '[m]\ninput_mean = { value = 10, basis = "measured" }\n'


def test_a_data_set_is_read(tmp_path: Path) -> None:
    file = tmp_path / "datasets.toml"
    file.write_text(
        DATASET + 'limits = [{ rounds = ["v1", "v2"], scenario = "Server", ttft_ms = 500, tpot_ms = 20 }]\n'
    )
    found = read_datasets(file)["m"]
    assert (found.input_mean, found.output_mean, found.basis) == (10, None, "measured")
    assert found.limits == {("v1", "server"): (0.5, 0.02), ("v2", "server"): (0.5, 0.02)}


@pytest.mark.parametrize(
    ("body", "key"),
    [
        (SOURCES + "[m]\n", "m.input_mean: missing"),
        (SOURCES + '[m]\ninput_mean = { value = "x", basis = "spec" }\n', "m.input_mean.value: must be a number"),
        (SOURCES + "[m]\ninput_mean = { value = 1 }\n", "m.input_mean.basis: missing"),
        ('[m]\ninput_mean = { value = 1, basis = "spec" }\n', "sources: missing"),
        (DATASET + "output_mean = 5\n", "m.output_mean: must be a table"),
    ],
)
def test_a_bad_data_set_is_named_by_its_key(tmp_path: Path, body: str, key: str) -> None:
    file = tmp_path / "datasets.toml"
    file.write_text(body)
    with pytest.raises(BadData) as refused:
        read_datasets(file)
    assert key in str(refused.value)


@pytest.mark.parametrize(
    "more",
    [
        'limits = [{ rounds = ["v1"], scenario = "Server", ttft_ms = 500 }]\n',
        "limits = 5\n",
        'limits = [{ rounds = ["v1"], scenario = "Server", ttft_ms = "x", tpot_ms = 1 }]\n',
        'output_mean = { value = "x" }\n',
        "surprise = 1\n",
    ],
)
def test_a_bad_limit_is_named_by_its_key(tmp_path: Path, more: str) -> None:
    file = tmp_path / "datasets.toml"
    file.write_text(DATASET + more)
    with pytest.raises(BadData, match=r"datasets\.toml: m\."):
        read_datasets(file)


@pytest.mark.parametrize("text", [None, "accelerator,model\nx,m\n"])
def test_a_bad_table_of_layouts_is_named(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "mlperf_layouts.csv").write_text(text)
    with pytest.raises(BadData, match=r"mlperf_layouts\.csv"):
        _ = Protocols(tmp_path).layouts


@pytest.mark.parametrize(
    "body", ["{ shortest = -3.0 }", "{ memory_fraction = 9.0 }", '{ kv_format = "fp3" }', "{ receive_every = 0 }"]
)
def test_a_setting_beyond_reason_is_refused(tmp_path: Path, body: str) -> None:
    with pytest.raises(BadData, match=r"rule\[0\]"):
        _ = protocols(tmp_path, ("a", "{}", body)).rules
