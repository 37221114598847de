"""vLLM's own recipes against preflight: vllm-project/recipes@8959cf64 of 2026-08-21 (Apache-2.0), as facts in a table."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.recipes import UNKNOWN, Pair, compared, disagrees

from crosstie.port.preflight.engine import engine_from, unsupported

FILE = Path(__file__).with_name("vllm_recipes.csv")
ROOT = Path(__file__).parents[2]


def listed() -> list[Pair]:
    with FILE.open() as rows:
        return [
            Pair(
                recipe=row["recipe"], model_id=row["model"], hardware=row["hardware"], state=row["state"],
                precisions=tuple(row["precisions"].split()),
            )
            for row in csv.DictReader(rows)
        ]  # fmt: skip


@pytest.mark.slow
def test_pairs_that_vllm_verified_are_known_and_none_of_them_is_impossible() -> None:
    found = list(compared(listed(), engine_from("vllm==0.32.0")))
    assert len(found) == len(listed()) > 100
    verified = [(pair, verdict) for pair, verdict, _ in found if pair.state == "verified"]
    assert sum(verdict == UNKNOWN for _, verdict in verified) <= 0.05 * len(verified)
    assert [pair for pair, verdict, _ in found if verdict != UNKNOWN and disagrees(pair.state, verdict)] == []


def test_pairs_that_vllm_calls_unsupported_are_flagged() -> None:
    said = {(row.model, accelerator) for row in unsupported() for accelerator in row.on}
    asked = [pair for pair in listed() if pair.state == "unsupported"]
    assert {(pair.model_id, pair.hardware) for pair in asked} <= said
    found = list(compared(asked, engine_from("vllm")))
    assert len(found) == 3
    for _, verdict, why in found:
        assert verdict == "slow path"
        assert why


@pytest.mark.slow
def test_the_comparison_reads_a_clone(tmp_path: Path) -> None:
    """A recipe that calls verified what does not run makes it fail."""
    recipe = tmp_path / "models" / "openai" / "gpt-oss-20b.yaml"
    recipe.parent.mkdir(parents=True)
    recipe.write_text(
        "meta: {hardware: {mi300x: verified, a100: verified, tpu: verified}}\n"
        "model: {model_id: openai/gpt-oss-20b}\nvariants: {default: {precision: mxfp4}}\n"
    )
    for words in (("init", "-q"), ("add", "."), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    run = [sys.executable, "benchmarks/recipes.py", str(tmp_path), "--engine"]
    good = subprocess.run([*run, "vllm==0.32.0"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert good.returncode == 0, good.stdout + good.stderr
    assert "1 models, 2 pairs" in good.stdout
    bad = subprocess.run([*run, "vllm==0.9.2"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert "openai/gpt-oss-20b on mi300x: verified in models/openai/gpt-oss-20b.yaml" in bad.stdout
