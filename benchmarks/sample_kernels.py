"""Samples measured kernel times out of NVIDIA's aiconfigurator-core wheel into the data that `calibrate` reads.

    python benchmarks/sample_kernels.py SITE_PACKAGES/aiconfigurator_core/systems/data OUT.csv.gz

The tables (Apache-2.0) have millions of rows; a few dozen for each accelerator, engine, operation and format,
spread evenly over the logarithm of the work, say what the constants are. Runs in a venv with pandas and pyarrow.
B300's GEMM table of SGLang 0.5.14 is labelled GB300 and is left out.
"""

import csv
import gzip
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

SYSTEMS = {
    "a100_sxm": "a100-80gb", "b200_sxm": "b200", "b300_sxm": "b300", "gb200": "gb200", "gb300": "gb300",
    "h100_sxm": "h100-sxm", "h200_sxm": "h200", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
STACKS = {"trtllm": "tensorrt-llm", "vllm": "vllm", "sglang": "sglang"}
FORMATS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_block": "fp8-block", "nvfp4": "nvfp4", "w4a16_mxfp4": "mxfp4",
           "w4a8_mxfp4_mxfp8": "mxfp4"}  # fmt: skip
COLUMNS = ("accelerator", "stack", "version", "kind", "format", "m", "n", "k", "tokens", "hidden", "inner", "topk",
           "experts", "tp", "ep", "batch", "context", "heads", "kv_heads", "head_dim", "kv_format", "gpus", "bytes",
           "seconds")  # fmt: skip
EACH = 8


def newest(folder: Path, name: str) -> Path | None:
    found = sorted(folder.glob(f"*/{name}"), key=lambda path: [part.zfill(6) for part in path.parent.name.split(".")])
    return found[-1] if found else None


def spread(frame: pd.DataFrame, work: pd.Series, rows: int = EACH) -> pd.DataFrame:
    """Rows at even steps of the logarithm of the work; which of the equals is drawn by a fixed seed."""
    if len(frame) <= rows:
        return frame
    order = np.random.default_rng(7).permutation(len(frame))
    frame, work = frame.iloc[order], work.iloc[order]
    edges = np.quantile(np.log(work), np.linspace(0, 1, rows + 1))
    bins = np.clip(np.searchsorted(edges, np.log(work), side="right") - 1, 0, rows - 1)
    return frame.groupby(bins, group_keys=False).head(1)


def by_format(frame: pd.DataFrame, column: str, work: pd.Series, rows: int) -> pd.DataFrame:
    parts = [spread(part, work.loc[part.index], rows) for _, part in frame.groupby(column)]
    return pd.concat(parts) if parts else frame


def gemms(frame: pd.DataFrame) -> pd.DataFrame:
    used = frame[frame.n.between(1024, 16384) & frame.k.between(1024, 16384) & (frame.m <= 16384)]
    return by_format(used, "gemm_dtype", used.m * 1.0, EACH)


def mixtures(frame: pd.DataFrame) -> pd.DataFrame:
    used = frame[(frame.distribution == "balanced") & (frame.moe_tp_size * frame.moe_ep_size <= 8) & (frame.topk <= 10)]
    used = used[~used.kernel_source.str.contains("nongated") & (used.num_experts >= 8)]
    return by_format(used, "moe_dtype", used.num_tokens * 1.0, 12)


def whole_context(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame.window_size == 0] if "window_size" in frame else frame


def prefills(frame: pd.DataFrame) -> pd.DataFrame:
    frame = whole_context(frame)
    used = frame[(frame.head_dim == 128) & (frame.isl >= 256) & (frame.num_heads >= 4)]
    used = used[used.attn_dtype == "bfloat16"]
    return spread(used, used.batch_size * 1.0 * used.isl * used.isl * used.num_heads)


def decodes(frame: pd.DataFrame) -> pd.DataFrame:
    frame = whole_context(frame)
    used = frame[(frame.head_dim == 128) & (frame.step >= 255) & (frame.num_heads >= 4)]
    used = used[used.num_key_value_heads < used.num_heads]
    rows = used.batch_size * 1.0 * used.step * used.num_key_value_heads
    return by_format(used, "kv_cache_dtype", rows, EACH)


Row = dict[str, object]


class Tables:
    """The newest tables of one accelerator under one engine."""

    def __init__(self, root: Path, system: str, backend: str):
        self.root, self.system, self.backend = root, system, backend

    def rows(self, kind: str, name: str, sample: Callable[[pd.DataFrame], pd.DataFrame]) -> Iterator[tuple[Any, Row]]:
        file = newest(self.root / self.system / kind / self.backend, name)
        if file is None:
            return
        common: Row = {
            "accelerator": SYSTEMS[self.system], "stack": STACKS[self.backend], "version": file.parent.name,
        }  # fmt: skip
        for row in sample(pd.read_parquet(file)).itertuples():
            yield row, {**common, "seconds": row.latency / 1e3}


def sampled(of: Tables) -> Iterator[Row]:
    if (of.system, of.backend) != ("b300_sxm", "sglang"):
        for r, common in of.rows("gemm", "gemm_perf.parquet", gemms):
            if r.gemm_dtype in FORMATS:
                yield {**common, "kind": "gemm", "format": FORMATS[r.gemm_dtype], "m": r.m, "n": r.n, "k": r.k}
    for r, common in of.rows("moe", "moe_perf.parquet", mixtures):
        if r.moe_dtype in FORMATS:
            widths = {"tokens": r.num_tokens, "hidden": r.hidden_size, "inner": r.inter_size, "topk": r.topk}
            split = {"experts": r.num_experts, "tp": r.moe_tp_size, "ep": r.moe_ep_size}
            yield {**common, "kind": "mixture", "format": FORMATS[r.moe_dtype], **widths, **split}
    for r, common in of.rows("attention", "context_attention_perf.parquet", prefills):
        yield {**common, "kind": "attention-prefill", "format": "bf16", "context": r.isl, **heads(r)}
    for r, common in of.rows("attention", "generation_attention_perf.parquet", decodes):
        yield {**common, "kind": "attention-decode", "format": "bf16", "context": r.step + 1, **heads(r)}
    for r, common in of.rows("comm", "custom_allreduce_perf.parquet", all_reduces):
        # Messages are counted in elements of 16 bits.
        yield {**common, "kind": "all-reduce", "format": "bf16", "gpus": r.num_gpus, "bytes": 2 * r.message_size}


def heads(r: Any) -> Row:
    return {
        "batch": r.batch_size, "heads": r.num_heads, "kv_heads": r.num_key_value_heads, "head_dim": r.head_dim,
        "kv_format": FORMATS[r.kv_cache_dtype],
    }  # fmt: skip


def all_reduces(frame: pd.DataFrame) -> pd.DataFrame:
    return spread(frame, frame.message_size * 1.0, 6)


def main() -> None:
    root, target = Path(sys.argv[1]), sys.argv[2]
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="")
    writer.writeheader()
    count = 0
    for system in SYSTEMS:
        for backend in STACKS:
            for row in sampled(Tables(root, system, backend)):
                writer.writerow({**row, "seconds": f"{row['seconds']:.4g}"})
                count += 1
    with open(target, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as stream:
        stream.write(text.getvalue().encode())
    print(f"{count} kernels written to {target}")


if __name__ == "__main__":
    main()
