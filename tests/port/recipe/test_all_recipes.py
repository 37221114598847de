"""Every model on every part with every engine has a recipe, or a reason; and recipes stand beside vLLM's own."""

import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.all_recipes import ENGINES, Outcome, complaints, kind, outcomes, table

from crosstie.catalog.library import Catalog
from crosstie.core.finding import VERDICTS

THIS_YEARS = ("deepseek-v4-pro", "deepseek-v4-flash", "kimi-k3", "minimax-m3")
# Reasons for no recipe. A flag that the engine does not know is none.
REASONS = {"does not fit", "no image is built", "machines, and llama.cpp"}
TOOL = Path(__file__).parents[3] / "tools" / "public_recipes.py"


def held(found: list[Outcome]) -> None:
    assert {kind(one.reason) for one in found if one.reason} <= REASONS
    assert {one.verdict.partition(",")[0] for one in found if not one.reason} <= set(VERDICTS.values())


def test_this_years_models_have_a_recipe_on_amd() -> None:
    found = list(outcomes(THIS_YEARS, ("mi300x", "mi355x"), ("vllm",)))
    assert [(one.model, one.accelerator) for one in found if one.reason] == []
    assert len(found) == 8


def test_a_sample_has_a_recipe_or_a_reason() -> None:
    models = ("llama-3.1-70b", "gemma-3-27b", "qwen3-30b-a3b", "kimi-k3")
    found = list(outcomes(models, ("mi355x", "rx-7900-xtx", "b200", "rtx-4090")))
    held(found)
    assert len(found) == len(models) * 4 * len(ENGINES)
    assert any(one.reason for one in found)
    assert sum("| vllm |" in line for line in table(found)) == 2


@pytest.mark.slow
def test_every_model_on_every_part_has_a_recipe_or_a_reason() -> None:
    found = list(outcomes())
    held(found)
    catalog = Catalog([])
    parts = sum(one.vendor in ("AMD", "NVIDIA") for one in catalog.accelerators.values())
    assert len(found) == len(catalog.models) * parts * len(ENGINES)


def test_a_flag_that_is_unknown_is_no_reason() -> None:
    fault = Outcome(model="m", accelerator="a", vendor="AMD", engine="vllm", reason="--x is no flag of vllm 0.32.0")
    with pytest.raises(AssertionError):
        held([fault])


def test_what_the_engines_parser_refuses_is_told(tmp_path: Path) -> None:
    """With a stand-in for vLLM's own, which CI has not: it takes no --nope."""
    for name, text in {
        "vllm/__init__.py": "", "vllm/utils/__init__.py": "", "vllm/entrypoints/__init__.py": "",
        "vllm/entrypoints/launchers/__init__.py": "",
        "vllm/utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser\n",
        "vllm/entrypoints/launchers/cli_args.py": "def make_arg_parser(p):\n    p.add_argument('--port')\n    return p\n",
    }.items():  # fmt: skip
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    told = Outcome(model="m", accelerator="a", vendor="AMD", engine="vllm", arguments=("--port", "1"))
    wrong = Outcome(model="n", accelerator="a", vendor="AMD", engine="vllm", arguments=("--nope",))
    ((refused, said),) = complaints([told, wrong], "vllm", str(python))
    assert (refused.model, "--nope" in said) == ("n", True)


RECIPE = """
meta: {tasks: [text], hardware: {mi300x: verified, h200: unsupported}}
model:
  model_id: meta-llama/Llama-3.3-70B-Instruct
  min_vllm_version: "0.12.0"
  base_args: []
variants: {default: {precision: bf16, vram_minimum_gb: 170}}
hardware_overrides:
  amd: {extra_args: ["--max-num-batched-tokens", "4096"MORE], extra_env: {VLLM_ROCM_USE_AITER: "1"}}
"""


@pytest.mark.parametrize(("more", "status"), [("", 0), (', "--seed", "7"', 1)])
def test_a_difference_from_vllms_own_recipe_needs_a_reason(tmp_path: Path, more: str, status: int) -> None:
    file = tmp_path / "models" / "meta-llama" / "Llama.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(RECIPE.replace("MORE", more))
    who = ("-c", "user.name=x", "-c", "user.email=x@example.org")
    for arguments in (("init", "-q"), ("add", "."), (*who, "commit", "-qm", "x")):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True)
    done = subprocess.run([sys.executable, TOOL, tmp_path, "--beside"], capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert (
        "| `--max-num-batched-tokens 4096` | `--max-num-batched-tokens 8192` | llama-3.3-70b | mi300x |" in done.stdout
    )
    assert "VLLM_ROCM_USE_AITER" not in done.stdout
    assert ("NO REASON" in done.stdout) == bool(status)
