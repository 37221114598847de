"""Predicted times against measured ones. Tolerances are what the model is held to, not what it hits."""

import csv
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.core.deployment import Parallelism
from crosstie.perf.hardware import Hardware
from crosstie.perf.step import distinct_share, shape, step

HERE = Path(__file__).parent
H200 = HERE.parents[1] / "benchmarks" / "results" / "h200-kernels-2026-11-15.csv"
ROCM = HERE / "data" / "rocm_vllm_batch_latency.csv"


def gpu_ms(catalog: Catalog, model: str, fmt: str, decode: tuple[float, float] | None, prefill: float = 0) -> float:
    one = catalog.deployment(catalog.model(model), catalog.accelerator("h200"), precision=fmt, stack="pytorch")
    machine = Hardware([one])
    at = shape(*decode) if decode else shape(prefill_tokens=prefill)
    return float(step(machine, at).gpu_s[0, 0]) * 1e3


def test_the_three_anchors(catalog: Catalog) -> None:
    """An independent measurement on another H200: decode and prefill steps of real shapes."""
    assert gpu_ms(catalog, "llama-3.1-8b", "bf16", (1, 4096)) == pytest.approx(4.65, rel=0.2)
    assert gpu_ms(catalog, "llama-3.1-8b", "bf16", (128, 4096)) == pytest.approx(21.3, rel=0.2)
    assert gpu_ms(catalog, "qwen3-32b", "bf16", None, 8192) == pytest.approx(927, rel=0.2)


def h200_rows(*models: str) -> list[dict[str, str]]:
    with H200.open() as lines:
        rows = list(csv.DictReader(lines))
    return [
        r
        for r in rows
        if r["kind"] in ("decode", "prefill")
        and r["backend"] == "cudnn"
        and r["fmt"] == "bf16"
        and r["model"] in models
    ]


def errors(catalog: Catalog, rows: list[dict[str, str]]) -> np.ndarray:
    ratios = []
    for r in rows:
        decode = (float(r["m"]), float(r["ctx"])) if r["kind"] == "decode" else None
        ratios.append(gpu_ms(catalog, r["model"], r["fmt"], decode, float(r["m"])) / float(r["ms"]) - 1)
    return np.abs(ratios)


def test_whole_steps_of_an_earlier_run_of_models_that_were_calibrated_on(catalog: Catalog) -> None:
    found = errors(catalog, h200_rows("llama-3.1-8b", "qwen3-32b"))
    assert len(found) == 27
    assert float(np.median(found)) < 0.05
    assert float(found.max()) < 0.2


def test_whole_steps_of_an_earlier_run_of_another_model(catalog: Catalog) -> None:
    found = errors(catalog, h200_rows("qwen3-8b"))
    assert len(found) == 10
    assert float(np.median(found)) < 0.06
    assert float(found.max()) < 0.2


def test_gemms_follow_the_smooth_maximum(catalog: Catalog) -> None:
    """t = kernel + (compute^4 + memory^4)^(1/4), with the constants of the hopper family."""
    h200 = catalog.accelerator("h200")
    constants = catalog.efficiency(h200)
    with H200.open() as lines:
        rows = [r for r in csv.DictReader(lines) if r["kind"] == "gemm" and r["fmt"] == "bf16"]
    m, n, k, ms = (np.array([float(r[key]) for r in rows]) for key in ("m", "n", "k", "ms"))
    compute = 2 * m * n * k / (h200.dense["bf16"].si * constants.compute["bf16"].value)
    memory = 2 * (n * k + m * (n + k)) / (h200.memory_bytes_per_s * constants.weights["16"].value)
    predicted = constants.kernel.si + (compute**4 + memory**4) ** 0.25
    found = np.abs(predicted * 1e3 / ms - 1)
    assert len(found) > 200
    assert float(np.median(found)) < 0.15


def test_llama_on_eight_mi300x_before_any_calibration(uncalibrated: Catalog) -> None:
    """AMD's own batch latencies of vLLM 0.10.0: a whole batch prefilled, then decoded to its end."""
    with ROCM.open() as lines:
        rows = list(csv.DictReader(lines))
    ratios = []
    for r in rows:
        one = uncalibrated.deployment(
            uncalibrated.model(r["model"]),
            uncalibrated.accelerator(r["accelerator"]),
            Parallelism(tp=int(r["tp"])),
            r["precision"],
        )
        machine, batch, inputs, outputs = (
            Hardware([one]),
            float(r["concurrency"]),
            float(r["input_len"]),
            float(r["output_len"]),
        )
        chunk = min(8192.0, batch * inputs)
        prefill = (
            float(step(machine, shape(prefill_tokens=chunk, prefill_span=min(inputs, chunk))).total_s[0, 0])
            * batch
            * inputs
            / chunk
        )
        decode = float(step(machine, shape(batch, inputs + outputs / 2)).total_s[0, 0]) * (outputs - 1)
        ratios.append((prefill + decode) / float(r["value"]))
    found = np.array(ratios)
    assert len(found) == 28
    assert float(np.median(np.abs(found - 1))) < 0.10
    assert float(found.min()) > 0.65
    assert float(found.max()) < 1.35


def verifying_steps(catalog: Catalog) -> list[tuple[dict[str, Any], float, float]]:
    """Each measured step with its predicted seconds, and the predicted growth over the measured one."""
    rows = json.loads((SHIPPED / "measured" / "h200-verify-steps.json").read_text())["measurements"]
    made = []
    for row in rows:
        one = catalog.deployment(
            catalog.model(row["model"]), catalog.accelerator("h200"), precision=row["format"], stack="pytorch"
        )
        if row["queries"] > 1:
            drafts = catalog.speculation(one.model, f"ngram:{row['queries'] - 1}")
            one = msgspec.structs.replace(one, speculation=drafts)
        made.append((row, float(step(Hardware([one]), shape(row["batch"], row["context"])).gpu_s[0, 0])))
    conditions = ("model", "format", "context", "batch")
    plain = {tuple(row[c] for c in conditions): (row["seconds"], s) for row, s in made if row["queries"] == 1}
    found = []
    for row, seconds in made:
        measured, predicted = plain[tuple(row[c] for c in conditions)]
        found.append((row, seconds, (seconds / predicted) / (row["seconds"] / measured)))
    return found


def test_verifying_steps_cost_what_an_h200_takes_for_them(catalog: Catalog) -> None:
    """2, 4 and 8 queries a sequence, batches of 1 to 256, dense and with experts."""
    found = [one for one in verifying_steps(catalog) if one[0]["queries"] > 1]
    assert len(found) == 129
    errors = np.abs([seconds / row["seconds"] - 1 for row, seconds, _ in found])
    assert float(np.median(errors)) < 0.05
    assert float(errors.max()) < 0.15
    growth = np.abs([over - 1 for *_, over in found])
    assert float(np.median(growth)) < 0.05
    assert float(growth.max()) < 0.15


def test_the_experts_of_a_verifying_step_are_those_that_were_visited(catalog: Catalog) -> None:
    """Tokens of random text: 8 to 128 experts of 128, never more than 16% fewer than of independent tokens."""
    for row, *_ in verifying_steps(catalog):
        if "experts_visited" in row:
            tokens = np.array(float(row["batch"] * row["queries"]))
            expected = 128 * float(distinct_share(8 / 128, tokens))
            assert 0.84 * expected <= row["experts_visited"] <= 1.02 * expected
