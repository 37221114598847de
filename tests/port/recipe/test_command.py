"""`crosstie recipe` as a user runs it."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from tests.conftest import Command

FLEET = """
format = 1
[[pool]]
name = "chat-mi300x"
model = "llama-3.1-70b"
accelerator = "mi300x"
precision = "fp8"
stack = "vllm"
replicas = 2
usd_per_gpu_hour = 2.0
backends = ["dns+http://chat-mi300x:8000/v1"]

[[pool]]
name = "long"
model = "deepseek-r1"
accelerator = "mi355x"
precision = "native"
kv = "fp8"
stack = "sglang"
usd_per_gpu_hour = 2.5
replicas = 1
prefill = { replicas = 1, tp = 8 }
decode = { replicas = 1, tp = 8 }
connector = "sglang-mori"

[[pool]]
name = "spare"
model = "anything"
backends = ["https://api.example.com/v1"]
usd_per_million_input = 1.0
usd_per_million_output = 2.0
api_key_env = "SPARE_KEY"
max_context = 8192
"""


@pytest.fixture
def fleet(tmp_path: Path) -> str:
    file = tmp_path / "fleet.toml"
    file.write_text(FLEET)
    return str(file)


def test_a_model_and_an_accelerator_make_a_line_with_reasons(crosstie: Command) -> None:
    found = crosstie("recipe", "llama-3.1-70b", "--on", "mi300x,h200")
    assert (found.status, found.err) == (0, "")
    assert "--device /dev/kfd \\\n" in found.out
    assert "--runtime nvidia --gpus '\"device=0,1\"'" in found.out
    assert "--tensor-parallel-size 1  the fewest GPUs that hold it: TP1" in found.out


def test_the_answer_as_json_has_everything(crosstie: Command) -> None:
    found = crosstie("recipe", "deepseek-v3", "--on", "mi300x", "--tp", "8", "--json")
    (recipe,) = json.loads(found.out)["recipes"]
    assert recipe["command"][:3] == ["vllm", "serve", "deepseek-ai/DeepSeek-V3"]
    reasons = {one["name"]: one["why"] for one in recipe["settings"]}
    assert "as asked: TP8" in reasons["--tensor-parallel-size"]
    assert "preflight" in reasons["VLLM_ROCM_USE_AITER"]
    assert "files" not in json.loads(found.out)
    shown = json.loads(crosstie("recipe", "llama-3.1-8b", "--on", "h200", "--as", "slurm", "--json").out)
    assert list(shown["files"]) == ["llama-3-1-8b-h200.sbatch"]


def test_every_pool_of_a_fleet_has_its_files(crosstie: Command, fleet: str, tmp_path: Path) -> None:
    out = tmp_path / "made"
    found = crosstie("recipe", "--fleet", fleet, "--as", "kubernetes", "-o", str(out))
    assert found.status == 0
    assert sorted(file.name for file in out.iterdir()) == [
        "chat-mi300x.yaml", "fleet.yaml", "gateway.yaml", "kustomization.yaml", "long-decode.yaml", "long-prefill.yaml",
        "monitoring.yaml", "network.yaml", "picker.yaml",
    ]  # fmt: skip
    kinds = [one["kind"] for one in yaml.safe_load_all((out / "chat-mi300x.yaml").read_text())]
    assert kinds == ["PersistentVolumeClaim", "Deployment", "Service", "PodDisruptionBudget"]
    assert "spare left out: pool spare: is bought by the token" in found.out
    assert f"written: {out / 'long-prefill.yaml'}" in found.out


def test_one_pool_of_a_fleet_is_printed(crosstie: Command, fleet: str) -> None:
    found = crosstie("recipe", "--fleet", fleet, "--pool", "long", "--as", "compose")
    assert found.out.count("services:") == 2
    assert found.out.startswith("# long-prefill.compose.yaml\n")
    one = crosstie("recipe", "--fleet", fleet, "--pool", "chat-mi300x", "--as", "compose")
    assert yaml.safe_load(one.out)["services"].keys() == {"chat-mi300x-0", "chat-mi300x-1"}


def test_what_the_catalog_does_not_know_is_said_by_hand(crosstie: Command, fleet: str) -> None:
    more = ["--weights", "chat-mi300x=amd/Llama-FP8", "--image", "own:1", "--json"]
    recipes = json.loads(crosstie("recipe", "--fleet", fleet, *more).out)["recipes"]
    assert [one["image"] for one in recipes] == ["own:1"] * 3
    assert recipes[0]["program"][-1] == "amd/Llama-FP8"
    assert "--quantization" not in recipes[0]["command"]


def test_without_a_container_paths_are_the_machines(crosstie: Command) -> None:
    found = crosstie("recipe", "llama-3.1-8b", "--precision", "q4_k_m", "--on", "rx-7900-xtx", "--bare")
    assert "llama-server \\\n  --model /srv/models/llama-3.1-8b-q4_k_m.gguf" in found.out
    assert "docker" not in found.out


def test_this_machine_is_asked_what_it_has(crosstie: Command) -> None:
    this = "this:examples/machines/rx-9070-xt"
    found = crosstie("recipe", "llama-3.1-8b", "--precision", "q4_k_m", "--on", this)
    assert "on 1 x rx-9070-xt TP1, llama.cpp" in found.out
    found = crosstie("recipe", "llama-3.1-70b", "--precision", "q4_k_m", "--on", this)
    assert (found.status, found.err.count("\n")) == (2, 1)
    assert "there are 1" in found.err


def test_this_machine_s_own_release_is_written_for(crosstie: Command, tmp_path: Path) -> None:
    """As doctor sees it, unless somebody names another."""
    for folder in ("h200", "h200-0.24"):
        shutil.copytree("examples/machines/h200", tmp_path / folder)
    facts = tmp_path / "h200-0.24" / "facts.json"
    told = json.loads(facts.read_text())
    facts.write_text(json.dumps(told | {"packages": told["packages"] | {"vllm": "0.24.0+cu130"}}))
    asked = ["recipe", "llama-3.1-8b", "--json", "--on"]

    def releases(*more: str) -> list[str]:
        return [one["release"] for one in json.loads(crosstie(*asked, *more).out)["recipes"]]

    here = f"this:{tmp_path / 'h200-0.24'}"
    assert releases(here) == releases(here, "--engine", "vllm") == ["0.24.0"]
    assert releases(here, "--engine", "vllm==0.30.0") == ["0.30.0"]
    assert releases(here, "--engine", "sglang") == releases("h200", "--engine", "sglang")
    assert releases(f"this:{tmp_path / 'h200'}") == releases("h200") != ["0.24.0"]


def test_what_the_command_does_not_set_is_not_explained(crosstie: Command) -> None:
    assert "HF_HOME" in crosstie("recipe", "llama-3.1-8b", "--on", "h200", "-v").out
    assert "HF_HOME" not in crosstie("recipe", "llama-3.1-8b", "--on", "h200", "--bare", "-v").out


def test_status_1_where_it_would_not_run(crosstie: Command) -> None:
    found = crosstie("recipe", "llama-3.1-405b", "--on", "h200", "--tp", "1")
    assert found.status == 1
    assert "does not fit" in found.out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["llama-3.1-8b"], "name a MODEL and --on an accelerator, or a --fleet file"),
        (["llama-3.1-8b", "--on", "h200", "--fleet", "FLEET"], "leave MODEL and --on out"),
        (["llama-3.1-8b", "--on", "h200", "--pool", "x"], "--pool is about --fleet"),
        (["--fleet", "FLEET", "--pool", "x"], "has no pool 'x'; there are chat-mi300x, long, spare"),
        (["--fleet", "FLEET", "--weights", "x=y"], "has no pool 'x'"),
        (["--fleet", "FLEET", "--pool", "spare"], "bought by the token"),
        (["llama-3.1-8b", "--on", "h200", "--engine", "tgi"], "repository archived, read-only, on 2026-03-21"),
        (["llama-3.1-8b", "--on", "h200", "--engine", "vllm==x"], "'x' is no release of vllm"),
        (["llama-3.1-8b", "--on", "h200", "--as", "compose", "--bare"], "--bare is for shell, systemd, slurm"),
        (["llama-3.1-8b", "--on", "h200", "--context", "10000000"], "beyond the 131072 that llama-3.1-8b supports"),
        (["llama-3.1-8b", "--on", "h200", "--disaggregated", "1xTP1"], "a prefill pool alone answers nobody"),
        (
            ["llama-3.1-8b", "--on", "h200", "--disaggregated", "1xTP1:1xTP1", "--tp", "2"],
            "leave --tp, --pp, --ep and --dp",
        ),
        (["llama-3.1-8b", "--on", "h200", "--connector", "vllm-nixl"], "--connector is about --disaggregated"),
        (["llama-3.1-8b", "--on", "h200", "--lora", "sql"], "'sql' is no NAME=PATH"),
        (["kimi-k2", "--precision", "bf16", "--on", "rtx-4090"], "kimi-k2 does not fit on rtx-4090 with 8,192 tokens"),
        (["llama-3.1-8b", "--on", "rx-7900-xtx", "--engine", "sglang"], "no image is built for gfx1100"),
    ],
)
def test_a_wrong_question_is_one_line(crosstie: Command, fleet: str, arguments: list[str], said: str) -> None:
    found = crosstie("recipe", *(fleet if word == "FLEET" else word for word in arguments))
    assert (found.status, found.out) == (2, "")
    assert said in found.err
    assert found.err.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_named(crosstie: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = crosstie("recipe", "llama-3.1-8b", "--on", "h200", "-o", str(tmp_path / "file" / "x"))
    assert found.status == 2
    assert "cannot be written" in found.err


def test_an_engine_may_be_run_by_other_words(crosstie: Command) -> None:
    asked = [
        "recipe",
        "llama-3.1-8b",
        "--on",
        "h200",
        "--bare",
        "--engine-command",
        "python3 -m vllm.entrypoints.cli.main",
    ]
    said = " ".join(crosstie(*asked).out.replace("\\\n", " ").split())
    assert "python3 -m vllm.entrypoints.cli.main serve meta-llama/Llama-3.1-8B" in said
    said = " ".join(crosstie(*asked, "--engine", "sglang").out.replace("\\\n", " ").split())
    assert "python3 -m vllm.entrypoints.cli.main --model-path" in said


def test_a_folder_has_the_release_that_was_asked_for_and_is_quantised_while_it_loads(
    crosstie: Command, tmp_path: Path
) -> None:
    shape = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16", "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    asked = ["recipe", str(tmp_path), "--on", "h200", "--engine", "vllm==0.24.0", "--bare", "--json"]
    (plain,) = json.loads(crosstie(*asked).out)["recipes"]
    assert plain["release"] == "0.24.0"
    assert "--quantization" not in plain["command"]
    (small,) = json.loads(crosstie(*asked, "--precision", "fp8").out)["recipes"]
    assert small["command"][small["command"].index("--quantization") + 1] == "fp8"
