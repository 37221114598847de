"""Whole checkpoints against accelerators and engines: the verdicts, and what they rest on."""

import json
from pathlib import Path

import msgspec
import pytest
from tests.conftest import Command
from tests.needs import one_in
from tests.port.checkpoint import samples
from tests.port.preflight import tiny

from crosstie.catalog.library import Catalog
from crosstie.core.finding import GROUNDS, rank
from crosstie.port.checkpoint.formats import KV_MARK, MARK
from crosstie.port.preflight.engine import engine_from, feature_operations
from crosstie.port.preflight.model import ModelOptions, ModelReport, check_model
from crosstie.port.preflight.operations import Layout, Weights, operations
from crosstie.port.preflight.rules import FACTS
from crosstie.port.preflight.stored import load_operations, read_stored

BLOCK = Weights(scheme="fp8-block", activations="dynamic", method="fp8")


def ask(catalog: Catalog, folder: Path, on: str, engine: str = "vllm", **more: object) -> ModelReport:
    chosen = [catalog.accelerator(name) for name in on.split(",")]
    question = ModelOptions(engine=engine_from(engine), **more)  # type: ignore[arg-type]
    return check_model(catalog, read_stored(catalog, str(folder)), chosen, question)


@pytest.mark.parametrize(
    ("model", "accelerator", "verdict"),
    [
        ("bf16", "mi300x", "ready"),
        ("fp8", "mi300x", "ready"),
        ("compressed", "mi300x", "ready"),
        ("modelopt", "mi300x", "will not run"),
        ("modelopt", "mi325x", "will not run"),
        ("modelopt", "mi355x", "ready"),
        ("modelopt", "h200", "ready"),
        ("modelopt-channel", "mi300x", "ready"),
        ("moe-modelopt", "mi300x", "will not run"),
        ("nvfp4", "mi300x", "slow path"),
        ("nvfp4", "h200", "slow path"),
        ("nvfp4", "b200", "ready"),
        ("fp8-block", "mi300x", "ready with settings"),
        ("fp8-block", "h200", "ready"),
        ("fnuz", "h200", "ready with settings"),
    ],
)
def test_verdicts_of_vllm_by_format_and_chip(
    catalog: Catalog, tmp_path: Path, model: str, accelerator: str, verdict: str
) -> None:
    found = ask(catalog, tiny.write(tmp_path / model, model), accelerator, "vllm==0.32.0")
    assert found.verdicts == {accelerator: verdict}, [f for f in found.findings if f.severity != "note"]


@pytest.mark.parametrize("engine", one_in(3, ("vllm", "sglang", "llama.cpp")))
def test_every_finding_has_evidence_grounds_and_a_remedy(catalog: Catalog, tmp_path: Path, engine: str) -> None:
    for name in tiny.MODELS:
        for finding in ask(catalog, tiny.write(tmp_path / name, name), "mi300x,mi355x,h200", engine).findings:
            assert finding.evidence
            assert finding.grounds in GROUNDS
            assert finding.remedy or finding.severity == "note", finding
            assert finding.where.file


def test_operations_have_the_facts_that_rules_may_ask_for_and_the_page_names(catalog: Catalog, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "preflight.md").read_text()
    layout = Layout(tp=1, kv="fp8")
    for asked in (*catalog.models, *(str(tiny.write(tmp_path / name, name)) for name in tiny.MODELS)):
        stored = read_stored(catalog, asked)
        needed = [
            *load_operations(stored, layout), *feature_operations(stored.config, ()),
            *operations(stored.config, stored.model(catalog), layout, stored.linear, stored.experts, stored.sinks),
        ]  # fmt: skip
        for one in needed:
            assert set(one.facts) <= FACTS[one.kind], one
    assert all(f"`{fact}`" in page for facts in FACTS.values() for fact in facts)


def test_scales_of_a_cache_that_a_conversion_left_alone(catalog: Catalog, tmp_path: Path) -> None:
    """Doubled already and doubled again is wrong; left alone and doubled by the loader is right."""
    scales = {f"model.layers.0.self_attn.{one}_scale": samples.floats(()) for one in "kv"}
    severities = []
    for marks in ({}, {KV_MARK: "e4m3fn"}):
        said = {**samples.FP8, "kv_cache_quant_algo": "FP8", MARK: "e4m3fnuz", **marks}
        samples.write_model(tmp_path, {**tiny.dense(tiny.fnuz), **scales}, said)
        (tmp_path / "config.json").write_text(json.dumps({**tiny.LLAMA, "quantization_config": said}))
        findings = ask(catalog, tmp_path, "mi300x", "vllm==0.32.0", kv="fp8").findings
        severities += [one.severity for one in findings if one.check == "kv-cache"]
    assert severities == ["error", "note"]


def test_a_release_that_nobody_read_is_not_known(catalog: Catalog, tmp_path: Path) -> None:
    found = ask(catalog, tiny.write(tmp_path, "fp8"), "mi300x", "vllm==99.0")
    assert found.verdicts == {"mi300x": "not known"}
    assert any("rules were read up to" in finding.remedy for finding in found.findings)


def test_a_chip_that_nobody_wrote_rules_for_is_not_ready(catalog: Catalog, tmp_path: Path) -> None:
    """gfx1100 has no FP8 matrix units; whatever the rules say, it is not "ready"."""
    assert ask(catalog, tiny.write(tmp_path, "fp8"), "rx-7900-xtx").verdicts["rx-7900-xtx"] != "ready"


def test_settings_that_cure_are_found_and_named(catalog: Catalog, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "fp8-block")
    found = ask(catalog, folder, "mi300x")
    assert found.settings == {"mi300x": ["VLLM_ROCM_USE_AITER=1"]}
    (finding,) = [one for one in found.findings if one.check == "kernel-gemm"]
    assert (finding.severity, finding.remedy) == ("setting", "set VLLM_ROCM_USE_AITER=1")


def test_settings_that_the_user_gave_are_taken_as_they_are(catalog: Catalog, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "fp8-block")
    on = ask(catalog, folder, "mi300x", environment={"VLLM_ROCM_USE_AITER": "1"})
    assert on.verdicts == {"mi300x": "ready"}
    off = ask(catalog, folder, "mi300x", environment={"VLLM_ROCM_USE_AITER": "0"})
    assert off.verdicts == {"mi300x": "slow path"}
    assert off.settings == {"mi300x": []}


def test_heads_that_ranks_cannot_share_are_an_error(catalog: Catalog, tmp_path: Path) -> None:
    found = ask(catalog, tiny.write(tmp_path, "bf16"), "mi300x", tp=3)
    assert found.verdicts == {"mi300x": "will not run"}


def test_a_model_of_the_catalog_is_named_as_such(crosstie: Command) -> None:
    """Reports are passed on: where Crosstie is installed is nobody's business."""
    told = crosstie("preflight", "llama-3.1-8b", "--on", "mi300x", "--json")
    assert {one["where"]["file"] for one in json.loads(told.out)["findings"]} == {"catalog/llama-3.1-8b.toml"}


def test_a_model_that_its_ranks_do_not_hold(catalog: Catalog) -> None:
    chosen = [catalog.accelerator("h200")]
    question = ModelOptions(engine=engine_from("vllm"), tp=4)
    found = check_model(catalog, read_stored(catalog, "kimi-k2"), chosen, question)
    assert [one.severity for one in found.findings if one.check == "memory"] == ["error"]


def test_blocks_that_ranks_would_cut_are_refused(catalog: Catalog, tmp_path: Path) -> None:
    """256-wide experts in 128-wide blocks: two ranks are fine, four would hold half a block each."""
    folder = tiny.write(tmp_path, "moe-block")
    two, four = (ask(catalog, folder, "h200", "vllm==0.28.0rc2", tp=tp) for tp in (2, 4))
    assert [one.severity for one in two.findings if one.check == "kernel-moe"] == ["note"]
    assert [one.severity for one in four.findings if one.check == "kernel-moe"] == ["error"]


def test_formats_beside_each_other_keep_their_own_activations(catalog: Catalog, tmp_path: Path) -> None:
    """Most bytes in BF16, some layers in FP8 with dynamic activations: those are not weight-only."""

    def only_keys(name: str, shape: tuple[int, int]) -> samples.Tensors:
        return (tiny.by_channel if "k_proj" in name else tiny.plain)(name, shape)

    folder = tiny.write(tmp_path, "compressed")
    quantisation = {**samples.COMPRESSED, "ignore": ["lm_head", *(one for one in tiny.MATRICES if "k_proj" not in one)]}
    samples.write_model(folder, tiny.dense(only_keys), quantisation)
    (folder / "config.json").write_text(json.dumps({**tiny.LLAMA, "quantization_config": quantisation}))
    stored = read_stored(catalog, str(folder))
    assert [(one.scheme, one.activations) for one in stored.linear] == [("bf16", "none"), ("fp8-channel", "dynamic")]
    assert ask(catalog, folder, "mi300x").verdicts == {"mi300x": "ready"}


@pytest.mark.parametrize(("kind", "verdict"), [(1, "ready"), (0, "not known")])
def test_a_list_of_layers_that_are_all_the_usual_kind(
    catalog: Catalog, tmp_path: Path, kind: int, verdict: str
) -> None:  # fmt: skip
    """As MiniMax-M2 writes it; 0 is lightning attention."""
    folder = tiny.write(tmp_path, "moe-bf16", attn_type_list=[kind])
    assert ask(catalog, folder, "h200").verdicts == {"h200": verdict}


def test_sinks_are_seen_in_the_tensors(catalog: Catalog, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "bf16")
    sinks = {"model.layers.0.self_attn.sinks": samples.bf16((tiny.HEADS,))}
    assert not read_stored(catalog, str(folder)).sinks
    samples.write_model(folder, {**tiny.dense(tiny.plain), **sinks}, None)
    assert read_stored(catalog, str(folder)).sinks


def test_one_key_value_head_however_many_the_config_writes(catalog: Catalog, tmp_path: Path) -> None:
    """Falcon-7B: 71 query heads on one key-value head are more than the hand-written kernel takes."""
    falcon = {
        "architectures": ["FalconForCausalLM"], "model_type": "falcon", "hidden_size": 4544, "num_attention_heads": 71,
        "num_kv_heads": 71, "num_hidden_layers": 32, "vocab_size": 65024, "torch_dtype": "bfloat16",
        "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True, "bias": False, "alibi": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(falcon))
    (found,) = [
        one for one in ask(catalog, tmp_path / "config.json", "mi300x").findings if one.check == "kernel-attention"
    ]
    assert "71 heads of 64 on 1 key-value heads" in found.what
    assert found.severity != "note"


def test_a_config_that_only_the_operations_stumble_over_is_not_ready(catalog: Catalog, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "moe-bf16", moe_k=[2, 3], num_experts_per_tok=None)
    found = ask(catalog, folder, "h200")
    assert found.verdicts == {"h200": "not known"}
    assert any(one.check == "config" and one.where.name for one in found.findings)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("compressed", "config_groups", {"group_0": 3}),
        ("compressed", "config_groups", {"group_0": {"weights": "int", "targets": 3}}),
        ("compressed", "config_groups", []),
        ("quark", "layer_quant_config", "all"),
        ("quark", "global_quant_config", None),
        ("modelopt", "quant_algo", 8),
        ("fp8", "ignored_layers", {"a": 1}),
        ("fp8", "quant_method", ["fp8"]),
    ],
)
def test_a_quantisation_config_of_the_wrong_shape_is_told(
    crosstie: Command, tmp_path: Path, name: str, key: str, value: object
) -> None:
    """In one line, or as a verdict that is not "ready"; never as a traceback."""
    folder = tiny.write(tmp_path, name)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"][key] = value
    (folder / "config.json").write_text(json.dumps(config))
    told = crosstie("preflight", str(folder), "--on", "h200", "--json")
    if told.status == 2:
        assert "config.json" in told.err
        assert len(told.err.strip().splitlines()) == 1
    else:
        assert json.loads(told.out)["verdicts"] != {"h200": "ready"}


def test_the_layout_is_one_that_surely_fits(catalog: Catalog) -> None:
    """Two H100 hold Llama-3.1-70B only if the engine keeps little for itself; four do in any case."""
    chosen = [catalog.accelerator("h100-sxm")]
    stored = read_stored(catalog, "llama-3.1-70b")
    found = check_model(catalog, stored, chosen, ModelOptions(engine=engine_from("vllm")))
    assert found.layouts == {"h100-sxm": "TP4"}
    assert [one.severity for one in found.findings if one.check == "memory"] == ["note"]
    tight = check_model(catalog, stored, chosen, ModelOptions(engine=engine_from("vllm"), tp=2))
    assert [one.severity for one in tight.findings if one.check == "memory"] == ["unknown"]


def test_two_settings_that_help_only_together(catalog: Catalog) -> None:
    """AITER on for products, and off for experts whose shape nobody has tuned on gfx950."""
    question = ModelOptions(engine=engine_from("vllm==0.32.0"), tp=1)
    chosen = [catalog.accelerator("mi355x")]
    stored = read_stored(catalog, "qwen3-30b-a3b")
    block = msgspec.structs.replace(
        stored, method="fp8", linear=(BLOCK,), experts=(BLOCK,),
    )  # fmt: skip
    found = check_model(catalog, block, chosen, question)
    assert found.settings == {"mi355x": ["VLLM_ROCM_USE_AITER=1", "VLLM_ROCM_USE_AITER_MOE=0"]}


def test_groups_that_ranks_would_cut_are_refused(catalog: Catalog, tmp_path: Path) -> None:
    """1,024 columns in groups of 128: eight ranks hold one group each, sixteen half of one."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    wide = {**tiny.LLAMA, "num_attention_heads": 16, "num_key_value_heads": 16, "hidden_size": 2048}
    (tmp_path / "config.json").write_text(json.dumps({**wide, "quantization_config": awq}))
    for tp, severity in ((8, "note"), (16, "error")):
        found = ask(catalog, tmp_path / "config.json", "gb200", "vllm==0.32.0", tp=tp)
        assert [one.severity for one in found.findings if one.check == "kernel-gemm"] == [severity]


def test_prediction_of_further_tokens_needs_layers_for_it(catalog: Catalog, tmp_path: Path) -> None:
    features = ("speculative-mtp",)
    folder = tiny.write(tmp_path, "bf16", num_nextn_predict_layers=1)
    assert ask(catalog, folder, "h200", features=features).verdicts == {"h200": "will not run"}
    more = {"model.layers.1.eh_proj.weight": samples.bf16((tiny.HIDDEN, 2 * tiny.HIDDEN))}
    samples.write_model(folder, {**tiny.dense(tiny.plain), **more}, None)
    (folder / "config.json").write_text(json.dumps({**tiny.LLAMA, "num_nextn_predict_layers": 1}))
    assert ask(catalog, folder, "h200", features=features).verdicts == {"h200": "ready"}
    bare = ask(catalog, folder / "config.json", "h200", features=features)
    assert not [one for one in bare.findings if one.where.name == "num_nextn_predict_layers"]
    (folder / "config.json").write_text(json.dumps(tiny.LLAMA))
    assert ask(catalog, folder / "config.json", "h200", features=features).verdicts == {"h200": "not known"}


def test_a_context_beyond_the_models_own_is_refused(crosstie: Command, tmp_path: Path) -> None:
    folder = str(tiny.write(tmp_path / "model", "bf16"))
    told = crosstie("preflight", folder, "--on", "h200", "--context", "5000")
    assert told.status == 2
    assert "the context is 5000 tokens, beyond the 4096" in told.err
    assert crosstie("preflight", folder, "--on", "h200", "--context", "4096").status == 0


def test_the_type_that_the_engine_is_told_counts(catalog: Catalog, tmp_path: Path) -> None:
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
    config = {**tiny.LLAMA, "quantization_config": awq}
    (tmp_path / "config.json").write_text(json.dumps(config))
    told = [
        ask(catalog, tmp_path / "config.json", "mi300x", "vllm==0.20.2", flags=flags).verdicts["mi300x"]
        for flags in ({}, {"dtype": "half"}, {"dtype": "auto"})
    ]
    assert told == ["ready with settings", "ready", "ready with settings"]


def test_an_architecture_that_nobody_knows_is_not_ready(catalog: Catalog, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "bf16", architectures=["NovelForCausalLM"])
    assert ask(catalog, folder, "h200").verdicts == {"h200": "not known"}


def test_a_config_that_no_reader_understands_is_not_ready(catalog: Catalog, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "bf16", layer_types=["telepathic_attention"])
    found = ask(catalog, folder, "h200")
    assert found.verdicts == {"h200": "not known"}
    assert [one.where.name for one in found.findings if one.check == "config"] == ["layer_types[0]"]


def test_a_checkpoint_that_contradicts_itself_will_not_run(catalog: Catalog, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path, "fp8")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert ask(catalog, folder, "h200").verdicts == {"h200": "will not run"}


def test_preflight_says_what_will_not_run(crosstie: Command, tmp_path: Path) -> None:
    folder = tiny.write(tmp_path / "model", "modelopt")
    sarif = tmp_path / "found.sarif"
    told = crosstie("preflight", str(folder), "--on", "mi300x,h200", "--sarif", str(sarif))
    assert told.status == 1
    assert "will not run" in told.out
    assert "Nothing here ran on an AMD GPU." in told.out
    document = json.loads(sarif.read_text())
    (run,) = document["runs"]
    assert document["version"] == "2.1.0"
    assert {"error", "note"} <= {result["level"] for result in run["results"]}
    names = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert all(names[result["ruleIndex"]] == result["ruleId"] for result in run["results"])


@pytest.mark.parametrize(
    ("model", "engine", "said"),
    [
        ("bf16", "vllm==0.32.0", "ready"),
        ("fp8-block", "vllm==0.32.0", "ready with settings: VLLM_ROCM_USE_AITER=1"),
        ("fnuz", "vllm==0.32.0", "ready with settings: the remedies below"),
        ("nvfp4", "vllm==0.32.0", "slow path"),
        ("modelopt", "vllm==0.32.0", "will not run"),
    ],
)
def test_the_verdict_comes_first(crosstie: Command, tmp_path: Path, model: str, engine: str, said: str) -> None:
    told = crosstie("preflight", str(tiny.write(tmp_path / "model", model)), "--on", "mi300x", "--engine", engine)
    assert told.out.splitlines()[1] == f"mi300x (TP1)  {said}"


def test_the_command_as_json_and_its_status(crosstie: Command, tmp_path: Path) -> None:
    folder = str(tiny.write(tmp_path / "model", "fp8-block"))
    told = crosstie("preflight", folder, "--on", "mi300x", "--json")
    document = json.loads(told.out)
    assert told.status == 0
    assert document["verdicts"] == {"mi300x": "ready with settings"}
    assert document["settings"] == {"mi300x": ["VLLM_ROCM_USE_AITER=1"]}
    ranks = [rank(finding["severity"]) for finding in document["findings"]]
    assert ranks == sorted(ranks, reverse=True)
    assert crosstie("preflight", folder, "--on", "mi300x", "--fail-on", "setting").status == 1
    assert crosstie("preflight", folder, "--on", "h200", "--fail-on", "setting").status == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--on", "mi9000x"], "unknown accelerator"),
        (["--on", "mi300x", "--engine", "tgi"], "unknown engine"),
        (["--on", "mi300x", "--with", "telepathy"], "--with telepathy"),
        (["--on", "mi300x", "--env", "AITER"], "write NAME=VALUE"),
        ([], "--on"),
    ],
)
def test_mistakes_are_one_line(crosstie: Command, tmp_path: Path, arguments: list[str], said: str) -> None:
    told = crosstie("preflight", str(tiny.write(tmp_path / "model", "bf16")), *arguments)
    assert told.status == 2
    assert said in told.err
    assert len(told.err.strip().splitlines()) == 1


def test_a_folder_that_is_no_model(crosstie: Command, tmp_path: Path) -> None:
    told = crosstie("preflight", str(tmp_path), "--on", "mi300x")
    assert told.status == 2
    assert "config.json" in told.err


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("adapter_config.json", "an adapter, not a model"),
        ("params.json", "Mistral's own format"),
        ("model_index.json", "diffusers"),
        ("snapshots/0123abcd/config.json", "snapshots/0123abcd"),
    ],
)
def test_a_folder_that_is_something_else(crosstie: Command, tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text("{}")
    told = crosstie("preflight", str(tmp_path), "--on", "mi300x")
    assert told.status == 2
    assert said in told.err
    assert len(told.err.strip().splitlines()) == 1


def test_a_model_in_the_cache_of_hugging_face(catalog: Catalog, tmp_path: Path) -> None:
    """Snapshots are folders of links into a folder of blobs, and named by their commit."""
    blobs, snapshot = tmp_path / "models--acme--Tiny-1B/blobs", tmp_path / "models--acme--Tiny-1B/snapshots/0123abcd"
    written = tiny.write(tmp_path / "written", "fp8")
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in written.iterdir():
        file.rename(blobs / file.name)
        (snapshot / file.name).symlink_to(blobs / file.name)
    found = ask(catalog, snapshot, "mi300x")
    assert (found.name, found.verdicts) == ("Tiny-1B", {"mi300x": "ready"})


def test_places_in_sarif_are_relative_where_they_can_be(
    crosstie: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny.write(tmp_path / "my model", "modelopt")
    sarif = tmp_path / "found.sarif"

    def places() -> set[str]:
        crosstie("preflight", str(folder), "--on", "mi300x", "--sarif", str(sarif))
        results = json.loads(sarif.read_text())["runs"][0]["results"]
        return {one["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] for one in results}

    assert all(uri.startswith("file:///") for uri in places())
    monkeypatch.chdir(tmp_path)
    assert places() == {"my%20model/config.json"}


def test_the_help_of_preflight_names_its_commands(crosstie: Command) -> None:
    assert "kernels" in crosstie("preflight", "--help").out
    assert "MODEL_DIR" in crosstie("preflight", "model", "--help").out
