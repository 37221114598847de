"""Requests that a gateway sent to a real vLLM on an H200, and the simulator's engine under the same ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from crosstie.catalog.library import Catalog
from crosstie.sim.engine import Engine

RESULTS = Path(__file__).parents[2] / "examples" / "results"
PRODUCTION = RESULTS / "h200-vllm-0.24-mixture" / "beside" / "production-record.jsonl"
FOURTEEN = RESULTS / "h200-vllm-0.24-14b"


@pytest.mark.parametrize(("latency", "within"), [("ttft_ms", 0.15), ("tpot_ms", 0.15)])
def test_percentiles_of_a_minute_of_production(catalog: Catalog, latency: str, within: float) -> None:
    """At 40% of the replica's capacity."""
    sent = sorted(map(json.loads, PRODUCTION.read_text().splitlines()), key=lambda one: one["timestamp"])
    # The first seconds warmed the engine up.
    sent = [one for one in sent if one["timestamp"] > sent[-1]["timestamp"] - 60_000]
    model, accelerator = catalog.model(FOURTEEN), catalog.accelerator("h200")
    engine = Engine(catalog.deployment(model, accelerator, precision="bf16", stack="vllm"), 1000.0)
    first, last = dict[int, float](), dict[int, float]()
    tokens = []
    for number, one in enumerate(sent):
        tokens += engine.advance(one["timestamp"] / 1e3)
        engine.add(number, one["input_length"], one["output_length"], one["timestamp"] / 1e3)
    for token in [*tokens, *engine.advance(1e9)]:
        first.setdefault(token.id, token.at)
        last[token.id] = token.at
    simulated = {
        "ttft_ms": [1e3 * (first[i] - one["timestamp"] / 1e3) for i, one in enumerate(sent)],
        "tpot_ms": [1e3 * (last[i] - first[i]) / (one["output_length"] - 1) for i, one in enumerate(sent)],
    }
    seen = [one[latency] for one in sent]
    assert len(seen) > 700
    # What targets are set at. The median of TTFT is 21 ms too long: 30 ms for HTTP and tokenising, which published runs
    # show, where this engine takes 6 to 8.
    for percentile in (90, 95, 99):
        assert np.percentile(simulated[latency], percentile) == pytest.approx(
            np.percentile(seen, percentile), rel=within
        )
