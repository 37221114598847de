"""Predicted times against measured ones. Tolerances are what the model is held to, not what it hits."""

import csv
from pathlib import Path

import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.perf.hardware import Hardware
from crosstie.perf.step import shape, step

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
