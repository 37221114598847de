"""Single steps of a real vLLM 0.24.0 on an H200, timed between events on the GPU, against the model of a step.

`examples/results/h200-vllm-0.24-mixture/beside/steps.csv`: means over steps alike in what they carry. No latency of a
client is in them, so they say which part of the model is off where a percentile is.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.step import shape, step

RESULTS = Path(__file__).parents[2] / "examples" / "results"
STEPS = RESULTS / "h200-vllm-0.24-mixture" / "beside" / "steps.csv"
FOURTEEN = RESULTS / "h200-vllm-0.24-14b"


class Steps(NamedTuple):
    sequences: Array
    tokens: Array
    measured_s: Array
    predicted_s: Array


def steps(catalog: Catalog, model: str) -> Steps:
    with STEPS.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["model"] == model]
    columns = {name: np.array([float(row[name]) for row in rows]) for name in list(rows[0])[3:]}
    known = catalog.model(FOURTEEN if model == "qwen3-14b" else model)
    hardware = Hardware([catalog.deployment(known, catalog.accelerator("h200"), precision="bf16", stack="vllm")])
    tokens = columns["prefill_tokens"]
    at = shape(
        columns["decode_sequences"],
        columns["decode_context"],
        tokens,
        columns["prefill_start"],
        tokens / np.maximum(columns["prompts"], 1.0),
    )
    return Steps(
        columns["decode_sequences"],
        tokens,
        columns["gpu_ms"] / 1e3,
        step(hardware, at).gpu_s[0],
    )


def test_steps_of_a_dense_model(catalog: Catalog) -> None:
    seen = steps(catalog, "qwen3-14b")
    off = seen.predicted_s / seen.measured_s - 1.0
    decodes = seen.tokens == 0
    assert decodes.sum() >= 7
    assert np.abs(off[decodes]).max() < 0.08
    # With prompts in them they take longer than predicted, by a tenth at most in the middle.
    assert -0.10 < np.median(off[~decodes]) < 0.05
    assert np.quantile(np.abs(off[~decodes]), 0.9) < 0.2


def test_steps_of_a_mixture_of_experts(catalog: Catalog) -> None:
    seen = steps(catalog, "qwen3-30b-a3b")
    off = seen.predicted_s / seen.measured_s - 1.0
    many = (seen.tokens == 0) & (seen.sequences >= 8)
    assert np.abs(off[many]).max() < 0.2
    # A known miss: beyond 512 tokens Python starts the kernels one by one, a millisecond a layer (`launch_ms`), and the
    # model does not have that. Once it does, this test is to be turned round.
    eager = (seen.tokens > 600) & (seen.tokens < 1500)
    assert -0.45 < np.median(off[eager]) < -0.15
