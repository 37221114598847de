"""Engines and their releases, and the architectures that they know."""

from pathlib import Path

import pytest
from packaging.version import Version

from crosstie.catalog.config import Config
from crosstie.core.errors import BadData, BadInput
from crosstie.port.preflight import engine as engines
from crosstie.port.preflight.engine import (
    Support,
    _oldest,
    architecture_findings,
    architectures,
    engine_from,
    fallbacks,
    feature_operations,
    quantisation_findings,
    recipe_findings,
    unsupported,
)


def test_a_release_may_be_named_or_not() -> None:
    assert engine_from("vllm").version == engine_from("vllm").newest
    assert engine_from("vllm==0.28.0").version == Version("0.28.0")
    assert engine_from("llama.cpp==b6000").version == Version("6000")


@pytest.mark.parametrize(
    ("said", "reason"),
    [("tgi", "unknown engine 'tgi'.*in maintenance mode since 2025-12-11"), ("vllm==new", "'new' is no release")],
)
def test_what_is_no_engine_or_release(said: str, reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        engine_from(said)


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {
        "LlamaForCausalLM": Support(since=Version("0.5"), until=Version("0.30"), source="registry"),
        "OldForCausalLM": Support(since=Version("0.3"), until=None, source="registry"),
    }
    monkeypatch.setattr("crosstie.port.preflight.engine.architectures", lambda engine: rows)
    # Without what other tests have made it remember.
    monkeypatch.setattr("crosstie.port.preflight.engine._oldest", _oldest.__wrapped__)


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("release", "severity"), [("0.28.0", "note"), ("0.4.0", "error"), ("0.31.0", "error"), ("0.2.0", "unknown")]
)
def test_an_architecture_in_some_releases(release: str, severity: str) -> None:
    config = Config({"architectures": ["LlamaForCausalLM"]}, "config.json")
    (finding,) = architecture_findings(config, engine_from(f"vllm=={release}"))
    assert finding.severity == severity
    assert severity == "note" or "use vllm" in finding.remedy


@pytest.mark.usefixtures("known")
def test_an_architecture_that_nobody_read_is_unknown_and_its_code_is_named() -> None:
    config = Config({"architectures": ["NovelForCausalLM"], "auto_map": {"AutoModel": "x.Y"}}, "config.json")
    found = architecture_findings(config, engine_from("vllm"))
    assert [(one.check, one.severity) for one in found] == [("architecture", "unknown"), ("remote-code", "setting")]


@pytest.mark.parametrize("raw", [{}, {"architectures": []}, {"architectures": [3]}, {"architectures": "Llama"}])
def test_a_config_without_an_architecture_is_unknown(raw: dict[str, object]) -> None:
    (finding,) = architecture_findings(Config(raw, "config.json"), engine_from("vllm"))
    assert finding.severity == "unknown"


def test_features_always_on_asked_for_and_needed() -> None:
    config = Config({"vision_config": {}, "architectures": ["X"]}, "config.json")
    names = [one.facts["name"] for one in feature_operations(config, ["lora", "prefix-caching"])]
    assert len(names) == len(set(names))
    assert {"lora", "multimodal", "graph-capture"} <= set(names)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_shipped_architectures_can_be_read(engine: str) -> None:
    found = engines.architectures(engine)
    assert len(found) > 50
    assert all(row.until is None or row.since <= row.until for row in found.values())


def test_what_an_engines_own_recipes_do_not_support_is_said() -> None:
    config, vllm = Config({}, "config.json"), engine_from("vllm")
    (found,) = recipe_findings("DeepSeek-V4-Flash", config, "mi300x", vllm)
    assert (found.severity, found.check, found.target) == ("slow", "recipe", "mi300x")
    assert "vllm-project/recipes@8959cf64" in found.evidence
    assert "models/deepseek-ai/DeepSeek-V4-Flash.yaml:22, of 2026-08-21" in found.evidence
    assert recipe_findings("deepseek-ai/deepseek-v4-flash", config, "mi300x", vllm)
    assert not recipe_findings("DeepSeek-V4-Flash", config, "mi325x", vllm)
    assert not recipe_findings("DeepSeek-V4-Flash", config, "mi300x", engine_from("sglang"))
    assert not recipe_findings("DeepSeek-V4-Flash-FP8", config, "mi300x", vllm)


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ('engine = "tgi"\nmodel = "a/b"\non = ["mi300x"]\nsource = "s"\nat = "x:1"', "unsupported[0].engine"),
        ('engine = "vllm"\nmodel = "a/b"\non = "mi300x"\nsource = "s"\nat = "x:1"', "unsupported[0].on"),
        ('engine = "vllm"\nmodel = "a/b"\non = ["mi300x"]\nsource = "t"\nat = "x:1"', "unsupported[0]"),
        ('engine = "vllm"\nmodel = "a/b"\non = ["mi300x"]\nsource = "s"\nat = "x:1"\nwhy = 1', "unsupported[0].why"),
    ],
)
def test_a_bad_list_of_recipes_names_its_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: str, key: str
) -> None:
    file = tmp_path / "recipes.toml"
    file.write_text(f'[sources]\ns = {{ ref = "a/b@12345678", date = "2026-08-21" }}\n[[unsupported]]\n{row}\n')
    monkeypatch.setattr("crosstie.port.preflight.engine.newest_file", lambda *_: file)
    with pytest.raises(BadData) as error:
        unsupported.__wrapped__()
    assert key in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("architecture,since\nX,1.0\n", "line 1: columns must be architecture,since,until,source"),
        ("architecture,since,until,source\nX,soon,,a\n", "line 2: since 'soon' is no release"),
    ],
)
def test_a_bad_list_of_architectures_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    file = tmp_path / "vllm.csv"
    file.write_text(text)
    monkeypatch.setattr(engines, "newest_file", lambda *_: file)
    with pytest.raises(BadData, match=said):
        engines.architectures.__wrapped__("vllm")


@pytest.mark.parametrize(
    ("engine", "method", "is_fault"),
    [
        ("vllm", "hqq", True), ("vllm==0.27.1", "hqq", True), ("sglang", "hqq", True), ("vllm", "quanto", True),
        ("vllm", "auto-round", False), ("vllm", "torchao", False), ("sglang", "torchao", True),
        ("vllm==0.20.0", "fp8_per_channel", True), ("vllm==0.24.0", "fp8_per_channel", False),
        ("vllm==0.23.0", "gguf", False), ("vllm==0.24.0", "gguf", True),
        # Nobody read those lists.
        ("vllm==0.10.0", "hqq", False), ("vllm==9.0", "hqq", False), ("llama.cpp", "hqq", False), ("vllm", "", False),
    ],
)  # fmt: skip
def test_a_quantisation_that_the_engine_lists_or_not(engine: str, method: str, is_fault: bool) -> None:
    found = quantisation_findings(method, Config({}, "config.json"), engine_from(engine))
    assert [one.severity for one in found] == ["error"] * is_fault
    assert all(f"'{method}'" in one.what and one.remedy for one in found)


def test_an_architecture_that_vllm_has_no_class_for_is_run_by_transformers_or_refused() -> None:
    def told(name: str, engine: str) -> tuple[str, str]:
        (finding,) = architecture_findings(Config({"architectures": [name]}, "config.json"), engine_from(engine))
        return finding.severity, finding.what

    for name, severity, why in (
        ("XLNetLMHeadModel", "error", "does not take vLLM's attention"),
        ("BartForCausalLM", "error", "encoder and decoder"),
        ("xLSTMForCausalLM", "error", "neither full nor sliding"),
        ("JetMoeForCausalLM", "setting", "no tensor-parallel plan"),
        ("HeliumForCausalLM", "setting", "full or sliding attention"),
    ):
        told_severity, what = told(name, "vllm")
        assert (told_severity, why in what, "through that of transformers" in what) == (severity, True, True)
    (over_two,) = architecture_findings(
        Config({"architectures": ["JetMoeForCausalLM"]}, "config.json"), engine_from("vllm"), tp=2
    )
    assert over_two.severity == "unknown"
    for is_decoder, severity in ((None, "error"), (False, "error"), (True, "setting")):
        encoder = Config({"architectures": ["BertLMHeadModel"], "is_decoder": is_decoder}, "config.json")
        assert [one.severity for one in architecture_findings(encoder, engine_from("vllm"))] == [severity]
    # Of another release, another engine or another name nobody has read that.
    for name, engine in (("XLNetLMHeadModel", "vllm==0.27.1"), ("XLNetLMHeadModel", "sglang"), ("Mine", "vllm")):
        severity, what = told(name, engine)
        assert (severity, "is in no release" in what) == ("unknown", True)
    assert not set(fallbacks()) & set(architectures("vllm"))
