"""How long a verifying step takes on a real GPU: 1, 2, 4 and 8 query tokens a sequence, dense and with experts.

    PYTHONPATH=src python3 benchmarks/verify_steps.py OUT.json                 # about four minutes on an H200
    PYTHONPATH=src python3 benchmarks/verify_steps.py OUT.json --tiny          # any machine: only that it runs

Needs PyTorch and nothing else. The decoder is that of `crosstie probe`: all layers and the head of a real model's shape
with random weights, replayed as a graph. The queries of a sequence lie side by side as further rows of each KV head, so
that attention reads the cache once for all of them, as the kernels of engines do; of the triangle among the queries
themselves the upper half is computed too, which at 8 queries of 1,024 tokens is 0.3% of the attention.

Each row has the step's seconds, and for models with experts how many of them a layer visited in the mean.
"""

import argparse
import gc
import sys
import time
import warnings
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from crosstie.catalog.writing import json_rows, write_text
from crosstie.core.errors import BadInput
from crosstie.prove.probe.decoder import WORKSPACE_BYTES, Decoder, Small
from crosstie.prove.probe.device import REFUSALS, HostTimer, ProbedDevice, describe, first_line, load_torch, open_device
from crosstie.prove.probe.kernels import BACKENDS, using

Tensor = Any
# As in the catalog: layers, hidden, inner, heads, kv_heads, head_dim, vocabulary, experts, experts_per_token.
FIELDS = ("layers", "hidden", "inner", "heads", "kv_heads", "head_dim", "vocabulary", "experts", "experts_per_token")
MODELS = {
    "llama-3.1-8b": (32, 4096, 14336, 32, 8, 128, 128256, 0, 0),
    "qwen3-30b-a3b": (48, 2048, 768, 32, 4, 128, 151936, 128, 8),
}
TINY = {"llama-3.1-8b": (2, 256, 512, 4, 2, 64, 512, 0, 0), "qwen3-30b-a3b": (2, 256, 128, 4, 2, 64, 512, 8, 2)}
RUNS = (
    ("llama-3.1-8b", "bf16", 1024),
    ("llama-3.1-8b", "bf16", 4096),
    ("llama-3.1-8b", "fp8", 1024),
    ("qwen3-30b-a3b", "bf16", 1024),
    ("qwen3-30b-a3b", "bf16", 4096),
)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
QUERIES = (1, 2, 4, 8)
# No point is begun after this, so that a run ends within its lease.
LATEST_S = 330.0


class Verifier(Decoder):
    """A decoder whose sequences have several tokens in a step."""

    queries = 1
    # Experts that each layer visited, while they are counted.
    visited: list[int] | None = None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor] | None) -> Tensor:
        assert cache is not None
        keys, values = cache
        sequences, rows = keys.shape[0], self.queries
        # The tokens of this step are the last ones of the cache.
        for part, store in ((k, keys), (v, values)):
            store[:, :, -rows:] = part.view(sequences, rows, self.kv_heads, self.head_dim).transpose(1, 2)
        group = self.heads // self.kv_heads
        q = q.view(sequences, rows, self.kv_heads, group, self.head_dim).permute(0, 2, 1, 3, 4)
        q = q.reshape(sequences, self.kv_heads, rows * group, self.head_dim)
        out = self.device.functional.scaled_dot_product_attention(q, keys, values)
        out = out.view(sequences, self.kv_heads, rows, group, self.head_dim).permute(0, 2, 1, 3, 4)
        return out.reshape(sequences * rows, self.heads, self.head_dim)

    def mixture(self, x: Tensor, w: dict[str, Any]) -> Tensor:
        if self.visited is not None:
            chosen = self.device.torch.topk((x @ w["router"].T).float(), self.active)[1]
            self.visited.append(int(chosen.unique().numel()))
        return super().mixture(x, w)

    def caches(self, batch: int, context: int) -> list[tuple[Tensor, Tensor]]:
        self.device.need(self.cache_bytes(batch, context) + WORKSPACE_BYTES, "caches")
        size = (batch, self.kv_heads, context, self.head_dim)
        return [(self.device.normal(*size), self.device.normal(*size)) for _ in self.layers]


def point(decoder: Verifier, caches: list[tuple[Tensor, Tensor]], batch: int, queries: int) -> dict[str, Any]:
    """The step with the fastest attention backend, and the experts that it visits."""
    decoder.queries = queries
    x, angle = decoder._inputs(batch * queries)
    held = [(keys[:batch], values[:batch]) for keys, values in caches]

    def run() -> Tensor:
        return decoder.step(x, angle, held)

    found, reasons = [], []
    for backend in BACKENDS if decoder.device.name != "cpu" else ("any",):
        try:
            if backend == "any":
                found.append((decoder.device.timer.time(run, budget_s=0.05), backend))
                continue
            with using(backend):
                found.append((decoder.device.timer.time(run, budget_s=0.05), backend))
        except REFUSALS as error:
            reasons.append(f"{backend}: {first_line(error)}")
    if not found:
        raise RuntimeError("; ".join(reasons))
    best, backend = min(found, key=lambda pair: pair[0].seconds)
    row = {"seconds": best.seconds, "spread": best.spread, "samples": best.samples, "graph": best.graph}
    if decoder.experts:
        decoder.visited = []
        run()
        row["experts_visited"] = sum(decoder.visited) / len(decoder.visited)
        decoder.visited = None
    return {**row, "backend": backend}


def measure(device: ProbedDevice, tiny: bool) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    rows, failures = [], []
    began, small = time.monotonic(), Small(device)
    decoder, held = None, None
    for model, format, context in RUNS:
        context = 64 if tiny else context
        if held != (model, format):
            decoder = None
            gc.collect()
            device.settle()
            shape = dict(zip(FIELDS, (TINY if tiny else MODELS)[model], strict=True))
            try:
                decoder, held = Verifier(device, small, shape, format), (model, format)
            except REFUSALS as error:
                failures.append({"model": model, "format": format, "reason": first_line(error)})
                continue
        assert decoder is not None
        caches = None
        # The largest batch first: its caches serve the smaller ones.
        for batch in sorted((1, 4) if tiny else BATCHES, reverse=True):
            what = {"model": model, "format": format, "context": context, "batch": batch}
            try:
                caches = caches or decoder.caches(batch, context)
                for queries in QUERIES:
                    if time.monotonic() - began > LATEST_S:
                        raise RuntimeError("out of time")
                    rows.append({**what, "queries": queries, **point(decoder, caches, batch, queries)})
            except REFUSALS as error:
                failures.append({**what, "reason": first_line(error)})
            print(f"{time.monotonic() - began:5.0f} s  {what}", file=sys.stderr, flush=True)
        del caches
        gc.collect()
        device.settle()
    return rows, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    try:
        device = open_device()
        about = describe(device, {})
    except BadInput:
        if not given.tiny:
            raise
        torch = load_torch()
        device, about = ProbedDevice(torch, "cpu", HostTimer(), compiles=False), {"device": "cpu"}
    with warnings.catch_warnings(), device.torch.no_grad():
        warnings.simplefilter("ignore")
        rows, failures = measure(device, given.tiny)
    made = {"tool": "benchmarks/verify_steps.py", "date": datetime.now(UTC).date().isoformat()}
    document = {"made": made, "machine": about, "measurements": rows, "failures": failures}
    write_text(given.out, json_rows(document))
    print(f"{len(rows)} steps, {len(failures)} refused: {given.out}")


if __name__ == "__main__":
    main()
