"""What engines' projects publish: parsers by family, vLLM's recipes by model, and what is left out of them."""

from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version
from tests.port.recipe.samples import pool

from crosstie.catalog.library import Catalog
from crosstie.perf.fit import surely_fits
from crosstie.port.preflight.engine import engines
from crosstie.port.preflight.variables import variables
from crosstie.port.recipe import published
from crosstie.port.recipe.asked import asked_pool, surely_longest
from crosstie.port.recipe.build import RecipeBook, RecipeOptions
from crosstie.port.recipe.flags import flag_table
from crosstie.port.recipe.published import families, left_out, parsers, public_recipes
from crosstie.port.recipe.recipe import Recipe, Setting
from crosstie.route.build import deployment_of


def asked(catalog: Catalog, model: str, accelerator: str, engine: str = "vllm", **more: Any) -> Recipe:
    made, chosen = asked_pool(catalog, catalog.model(model), catalog.accelerator(accelerator), engine=engine, **more)
    (recipe,) = RecipeBook(catalog, RecipeOptions(chosen=chosen)).recipes(made)
    return recipe


def said(recipe: Recipe) -> dict[str, Any]:
    return {setting.name: setting.value for setting in recipe.settings}


@pytest.mark.parametrize(
    ("engine", "model", "tools", "reasoning"),
    [
        ("vllm", "kimi-k3", "kimi_k3", "kimi_k3"),
        ("vllm", "deepseek-v4-pro", "deepseek_v4", "deepseek_v4"),
        ("vllm", "glm-4.7", "glm47", "glm45"),
        ("vllm", "llama-3.3-70b", "llama3_json", None),
        ("sglang", "kimi-k2", "kimi_k2", None),
        ("sglang", "deepseek-r1", "deepseekv3", "deepseek-r1"),
        ("sglang", "minimax-m2.5", "minimax-m2", "minimax-append-think"),
    ],
)
def test_parsers_are_those_of_the_family(
    catalog: Catalog, engine: str, model: str, tools: str, reasoning: str | None
) -> None:
    recipe = asked(catalog, model, "h200", engine)
    assert said(recipe).get("--tool-call-parser") == tools
    assert said(recipe).get("--reasoning-parser") == reasoning
    # SGLang has no such flag.
    assert ("--enable-auto-tool-choice" in said(recipe)) == (engine == "vllm")
    (why,) = [one.why for one in recipe.settings if one.name == "--tool-call-parser"]
    assert "sgl-project/sglang@" in why or "vllm-project/" in why


def test_the_checkpoints_name_decides_before_the_models(catalog: Catalog) -> None:
    book = RecipeBook(catalog, RecipeOptions(weights={"": "moonshotai/Kimi-K2-Thinking"}))
    (thinking,) = book.recipes(pool(model="kimi-k2", accelerator="h200", stack="vllm"))
    assert said(thinking)["--reasoning-parser"] == "kimi_k2"
    (own,) = RecipeBook(catalog).recipes(pool(model="kimi-k2", accelerator="h200"))
    assert "--reasoning-parser" not in said(own)


def test_a_family_without_a_parser_and_a_release_before_it_are_told(catalog: Catalog) -> None:
    (falcon,) = RecipeBook(catalog).recipes(pool(model="falcon-40b", accelerator="h200"))
    assert any("no parser of tool calls" in note for note in falcon.notes)
    assert "--tool-call-parser" not in said(falcon)
    assert parsers("vllm", "0.26.0", ("kimi-k3",)) is None
    assert parsers("vllm", "0.27.0", ("kimi-k3",)) is not None


def test_parsers_are_ones_that_the_engine_lists() -> None:
    assert {one.engine for one in families()} == set(published.PARSING)
    for one in families():
        table = flag_table(one.engine)
        assert [fault for setting in one.settings if (fault := table.fault(setting))] == [], one.models


def test_kimis_own_code_is_let_in(catalog: Catalog) -> None:
    names = [name for name in catalog.models if name.startswith("kimi-")]
    assert len(names) >= 5
    for name in names:
        for engine in published.PARSING:
            assert "--trust-remote-code" in said(asked(catalog, name, "mi355x", engine, context=8192))


def test_vllms_own_recipes_reach_amd(catalog: Catalog) -> None:
    llama, gpt, minimax = (said(asked(catalog, one, "mi300x")) for one in
                           ("llama-3.3-70b", "gpt-oss-120b", "minimax-m2.5"))  # fmt: skip
    assert [one["VLLM_ROCM_USE_AITER"] for one in (llama, gpt, minimax)] == ["1", "1", "1"]
    assert gpt["--attention-backend"] == "ROCM_AITER_UNIFIED_ATTN"
    assert (gpt["--block-size"], gpt["VLLM_ROCM_QUICK_REDUCE_QUANTIZATION"]) == ("64", "INT4")
    assert minimax["--attention-backend"] == "ROCM_AITER_FA"
    assert minimax["VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"] == "1"
    # None of that is NVIDIA's, nor another engine's.
    assert "--attention-backend" not in said(asked(catalog, "gpt-oss-120b", "h200"))
    assert "--attention-backend" not in said(asked(catalog, "minimax-m2.5", "mi300x", "sglang"))


def test_limits_of_vllms_own_recipes_hold_unless_somebody_says_otherwise(catalog: Catalog) -> None:
    pro, k3 = asked(catalog, "deepseek-v4-pro", "h200"), asked(catalog, "kimi-k3", "h200")
    assert (said(pro)["--max-model-len"], said(pro)["--max-num-seqs"]) == ("200000", "16")
    assert (said(k3)["--max-model-len"], said(k3)["--max-num-seqs"]) == ("32768", "5")
    assert all("vLLM's own recipe" in one.why for one in pro.settings if one.name == "--max-model-len")
    own = said(asked(catalog, "deepseek-v4-pro", "h200", context=400_000, in_flight=64))
    assert (own["--max-model-len"], own["--max-num-seqs"]) == ("400000", "64")


def test_a_replica_has_the_memory_that_vllms_own_recipe_asks_for(catalog: Catalog) -> None:
    recipe = asked(catalog, "deepseek-r1", "mi300x")
    assert recipe.gpus == 8
    (why,) = [one.why for one in recipe.settings if one.name == "--tensor-parallel-size"]
    assert "805 GB" in why
    assert asked(catalog, "llama-3.3-70b", "mi300x").gpus == 1


@pytest.mark.parametrize(("model", "accelerator"), [("llama-3.3-70b", "mi300x"), ("qwen3-32b", "h100-sxm")])
def test_the_context_fits_at_the_top_of_the_interval(catalog: Catalog, model: str, accelerator: str) -> None:
    made, _ = asked_pool(catalog, catalog.model(model), catalog.accelerator(accelerator), engine="vllm")
    deployment = deployment_of(catalog, made)
    assert deployment is not None
    assert surely_fits(deployment, made.max_context)
    assert not surely_fits(deployment, made.max_context + 1) or made.max_context == deployment.model.max_context
    assert made.max_context == surely_longest(deployment)


def test_what_the_release_does_not_know_is_left_out_with_the_reason(catalog: Catalog) -> None:
    newest = engines()["vllm"].newest

    def why(name: str, value: str | None = None) -> str:
        return left_out(Setting(name=name, value=value, why="x"), newest)

    gone = why("VLLM_USE_FLASHINFER_MOE_FP8", "1")
    assert "any more, since a release after 0.23.0: --moe-backend took its place" in gone
    assert "is no variable of vllm 0.32.0" in why("VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4", "1")
    assert "is no flag of vllm" in why("--max-sequences", "7")
    assert "--ep spreads them" in why("--enable-expert-parallel")
    assert why("--distributed-executor-backend", "mp") == "vLLM's default on one machine"
    assert (why("--distributed-executor-backend", "ray"), why("VLLM_ROCM_USE_AITER", "1"), why("NCCL_DEBUG")) == (
        "",
    ) * 3
    assert "VLLM_USE_FLASHINFER_MOE_FP8" not in said(asked(catalog, "deepseek-r1", "h200"))


def test_variables_by_release() -> None:
    known = variables("vllm")
    assert known is not None
    assert variables("llama.cpp") is None
    assert known.fault("VLLM_ATTENTION_BACKEND", Version("0.14.1")) == ""
    assert "--attention-backend took its place" in known.fault("VLLM_ATTENTION_BACKEND", Version("0.15.0"))
    # What a newer release reads nobody has read.
    assert known.fault("VLLM_SOMETHING_NEW", Version("0.33.0")) == ""
    assert set(known.instead) <= {name for name, last in known.last.items() if last}


def test_every_recipe_of_theirs_is_of_a_model_here(catalog: Catalog) -> None:
    named = {alias for model in catalog.models.values() for alias in model.aliases}
    assert {one.model for one in public_recipes()} <= named
    assert len(public_recipes()) > 25


def test_a_slip_in_a_row_is_refused_with_file_and_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parsers.toml").write_text(
        '[sources]\na = { ref = "somebody", date = "2026-11-18" }\n'
        '[[family]]\nengine = "vllm"\nmodels = ["x"]\ntool = "y"\nsource = "a"\nat = "line 1"\n'
    )
    monkeypatch.setattr(published, "_DATA", tmp_path)
    families.cache_clear()
    with pytest.raises(Exception, match=r"parsers\.toml.*tool: unknown key; did you mean tools"):
        families()
    families.cache_clear()
