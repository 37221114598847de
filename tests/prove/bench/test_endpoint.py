"""Which model an endpoint serves: by the structure of its folder, by a name of the catalog, by what it calls itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import Command
from tests.prove.bench.vllm_like import vllm_like
from tests.run.emulate.running import CATALOG

from crosstie.prove.bench.endpoint import BenchEndpoint, described

# Llama 3.1 8B's shape.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


def checkpoint(folder: Path, **changes: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LLAMA | changes))
    return folder


def said(served: str, root: str = "", model: str | None = None) -> BenchEndpoint:
    with vllm_like(served=served, root=root) as engine:
        return described(engine.url, model, None, True, {}, CATALOG)


@pytest.mark.parametrize(
    ("served", "root", "named"),
    [
        ("llama-3.1-8b", "/nowhere/model", "llama-3.1-8b"),
        ("my-chat", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("my-chat", "/nowhere/llama-3.1-8b", "llama-3.1-8b"),
        ("my-chat", "/nowhere/model", "my-chat"),
        ("my-chat", "somebody/else", "somebody/else"),
        ("/nowhere/model", "/nowhere/model", "model"),
    ],
)
def test_a_name_of_the_catalog_goes_before_a_path(served: str, root: str, named: str) -> None:
    found = said(served, root)
    assert found.model == served
    assert found.conditions["model"] == named
    assert "model_config" not in found.conditions


def test_the_structure_of_a_folder_says_which_model_it_is(tmp_path: Path) -> None:
    same = checkpoint(tmp_path / "model")
    assert said("llama-3.1-8b", str(same)).conditions["model"] == "llama-3.1-8b"
    # It is called so and has other layers.
    cut = checkpoint(tmp_path / "cut", num_hidden_layers=20)
    found = said("llama-3.1-8b", str(cut)).conditions
    assert found["model"].startswith("cut-")
    assert json.loads(found["model_config"])["num_hidden_layers"] == 20
    # Folders of one name with two structures are two models.
    other = checkpoint(tmp_path / "other" / "cut", num_hidden_layers=24)
    assert said("llama-3.1-8b", str(other)).conditions["model"] != found["model"]
    # Given by whoever asks, where the server's own path is on another machine.
    given = said("my-chat", "/nowhere/model", str(cut))
    assert given.model == "my-chat"
    assert given.conditions["model"] == found["model"]


@pytest.mark.parametrize("how", ["bench", pytest.param("validate", marks=pytest.mark.slow)])
def test_results_of_a_folder_are_predicted(crosstie: Command, tmp_path: Path, how: str) -> None:
    """Ten layers fewer than any model of the catalog: every row has its prediction, and calibrate learns from it."""
    folder = checkpoint(tmp_path / "short", num_hidden_layers=22)
    file = tmp_path / "run.json"
    asked = ["--concurrency", "1", "--requests", "4", "--warmup", "0", "--input", "64", "--output", "8"]
    asked += ["--accelerator", "h200", "--tp", "1", "--precision", "bf16", "--gpu-metrics", "none", "-o", str(file)]
    with vllm_like(served="short", root=str(folder) if how == "bench" else "/nowhere/short") as engine:
        assert crosstie("bench", engine.url, *asked).status == 0
    given = [] if how == "bench" else ["--model", str(folder)]
    if how == "bench":
        # Whoever reads it needs no folder.
        (folder / "config.json").unlink()
    found = json.loads(crosstie("validate", str(file), *given, "--json").out)
    assert found["rows"] > 0
    assert found["coverage"] == 1.0
    (model,) = found["by_model"]
    assert model.startswith("short-")
    learnt = crosstie("calibrate", str(file), *given, "--add")
    assert learnt.status == 0, learnt.err
    assert "1 operating points" in learnt.out


def test_a_structure_that_cannot_be_read_is_a_reason(crosstie: Command, tmp_path: Path) -> None:
    columns = "accelerator,model,model_config,precision,engine,input_len,output_len,concurrency,metric,unit,value"
    file = tmp_path / "rows.csv"
    file.write_text(f'{columns}\nh200,mine,"{{""hidden_size"": 0}}",bf16,vllm,64,8,1,ttft_ms_mean,ms,5\n')
    found = json.loads(crosstie("validate", str(file), "--json").out)
    (reason,) = found["uncovered"]
    assert "model_config" in reason
