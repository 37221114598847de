"""NVIDIA's AISimulate over the points of `aisimulate_points.py`: its TTFT, TPOT and throughput, as CSV.

    python3.11 -m venv /tmp/ais && /tmp/ais/bin/pip install aisimulate==0.13.0.dev202610270000000085
    nice /tmp/ais/bin/python benchmarks/aisimulate_accuracy.py      (seconds of CPU a point; needs no Crosstie)
    make accuracy                                                   (the table of docs/accuracy.md)

Written as it goes: a rerun continues where benchmarks/results/aisimulate-answers.csv stops. The
release 0.13.0 did not install here; the development build of 27 October 2026 does.

How a point becomes a prediction of its built-in engine, chosen to suit it: the benchmark's own closed loop with its
clients, ten requests each (at most 2,560, and three each where clients are more than that allows), lengths between
the shortest and the nominal one by a trace; no prefix caching; the layout of the row; the chunk of the engine and its
most sequences as the benchmark set them; NVIDIA's or the maker's checkpoint of the row's weight format, KV cache as
the benchmark had it; the newest release of the engine that it has full data of (every row is older); drafts and how
many of them are kept as ours are predicted with. Where its own measurements of kernels (SILICON) cannot answer,
attention and KV cache are tried in other formats, and then its HYBRID mode fills the gaps by formulas: column
`attempt`. EAGLE3 is not asked: it wants the configuration of the drafter, which nobody published with the rows.

Licence of the package: Apache-2.0. Its performance tables may hold measurements of the systems that the points were
published of; its wheel ships `silicon_sample.csv`, of which one of the sources (aic_silicon_sample) is a part.
"""

import csv
import json
import logging
import math
import multiprocessing
import random
import re
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
POINTS, OUT = RESULTS / "aisimulate-points.csv", RESULTS / "aisimulate-answers.csv"
COLUMNS = ("point", "ttft_s", "tpot_s", "tokens_per_s", "attempt", "cpu_s", "reason")
SYSTEMS = {"h100-sxm": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm", "gb200": "gb200",
           "gb300": "gb300"}  # fmt: skip
BACKENDS = {"tensorrt-llm": "trtllm", "sglang": "sglang", "vllm": "vllm"}
# By model and weight format; without a format where one checkpoint is all of them.
CHECKPOINTS = {
    "llama-3.1-8b": "meta-llama/Meta-Llama-3.1-8B",
    "llama-3.1-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.1-70b fp8": "nvidia/Llama-3.1-70B-Instruct-FP8",
    "llama-3.3-70b": "meta-llama/Meta-Llama-3.1-70B",
    "llama-3.3-70b fp8": "nvidia/Llama-3.1-70B-Instruct-FP8",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-32b fp8": "Qwen/Qwen3-32B-FP8",
    "qwen3-235b-a22b fp8": "Qwen/Qwen3-235B-A22B-FP8",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
    "qwen3.5-397b-a17b fp4": "nvidia/Qwen3.5-397B-A17B-NVFP4",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "deepseek-r1 fp8": "deepseek-ai/DeepSeek-R1",
    "deepseek-r1 fp4": "nvidia/DeepSeek-V3.1-NVFP4",
    "deepseek-v3 fp8": "deepseek-ai/DeepSeek-V3",
    "deepseek-v3 fp4": "nvidia/DeepSeek-V3.1-NVFP4",
    "deepseek-v4-pro fp4": "deepseek-ai/DeepSeek-V4-Pro",
    "deepseek-v4-pro fp8": "sgl-project/DeepSeek-V4-Pro-FP8",
    "minimax-m2.5 fp8": "MiniMaxAI/MiniMax-M2.5",
    "minimax-m2.5 fp4": "nvidia/MiniMax-M2.5-NVFP4",
    "minimax-m3 fp8": "MiniMaxAI/MiniMax-M3",
    "minimax-m3 fp4": "nvidia/MiniMax-M3-NVFP4",
}
# Weight formats that no checkpoint of its stands for, set by hand.
FORMATS = {"fp8": "fp8", "fp4": "nvfp4"}
REQUESTS, ROUNDS, FEWEST_ROUNDS = 2560, 10, 3
BLOCK = 512
MOST_CPU_S = 60
SEED = 17

Cells = dict[str, str]


class CannotBeAsked(Exception):
    """A point that has no counterpart among its settings."""


def engine_of(point: Cells) -> dict[str, Any]:
    if point["reason"]:
        raise CannotBeAsked(f"not asked: {point['reason']}")
    if point["accelerator"] not in SYSTEMS:
        raise CannotBeAsked(f"no data of {point['accelerator']}")
    if point["engine"] not in BACKENDS:
        raise CannotBeAsked(f"no engine {point['engine']}")
    model, precision = point["model"], point["precision"].replace("mxfp4", "fp4").replace("nvfp4", "fp4")
    exact = CHECKPOINTS.get(f"{model} {precision}")
    path = exact or CHECKPOINTS.get(model)
    if path is None:
        raise CannotBeAsked(f"no configuration of {model} in {precision}")
    engine: dict[str, Any] = {"model": path, "hardware": SYSTEMS[point["accelerator"]]}
    engine["backend"] = BACKENDS[point["engine"]]
    if exact is None and precision in FORMATS and model != "gpt-oss-120b":
        engine["gemm_quant_mode"] = engine["moe_quant_mode"] = FORMATS[precision]
    engine["kvcache_quant_mode"] = {"bf16": "bfloat16"}.get(point["kv_format"], point["kv_format"])
    drafts = point["drafts"]
    if drafts == "mtp":
        engine |= {"nextn": int(point["depth"]), "nextn_accepted": float(point["kept"])}
    elif drafts:
        raise CannotBeAsked(f"drafts by {drafts} need the drafter's configuration and a KV capacity in bytes")
    decode = worker(point, "", int(float(point["replicas"])))
    if point["prefill_tp"]:
        prefill = worker(point, "prefill_", int(point["prefill_replicas"]))
        return engine | {"mode": "disaggregated", "workers": {"prefill": prefill, "decode": decode}}
    return engine | {"mode": "aggregated", "workers": {"aggregated": decode}}


def worker(point: Cells, side: str, replicas: int) -> dict[str, Any]:
    tp, dp, ep = (int(point[f"{side}{width}"]) for width in ("tp", "dp", "ep"))
    split = {"replicas": replicas, "tensor": tp, "attention_data": dp, "pipeline": int(point["pp"] or 1)}
    if float(point["experts"]):
        split |= {"moe_expert": ep, "moe_tensor": tp * dp // ep}
    sequences = int(float(point["max_sequences"]))
    scheduler = {"max_batched_tokens": int(float(point["chunk_tokens"])), "max_sequences": sequences}
    return {"parallelism": split, "scheduler": scheduler, "kv_cache": {"prefix_caching": False}}


def traffic_of(point: Cells, folder: Path) -> dict[str, Any]:
    clients = int(float(point["clients"]))
    requests = max(min(ROUNDS * clients, REQUESTS), FEWEST_ROUNDS * clients)
    chance, shortest = random.Random(SEED), float(point["shortest"])
    file, hashes = folder / "trace.jsonl", 0
    with file.open("w") as lines:
        for _ in range(requests):
            share = chance.uniform(shortest, 1.0), chance.uniform(shortest, 1.0)
            inputs, outputs = (
                max(round(float(point[name]) * part), 1)
                for name, part in zip(("input_tokens", "output_tokens"), share, strict=True)
            )
            blocks = math.ceil(inputs / BLOCK)
            line = {"timestamp": 0, "input_length": inputs, "output_length": outputs}
            lines.write(json.dumps(line | {"hash_ids": list(range(hashes, hashes + blocks))}) + "\n")
            hashes += blocks
    source = {"type": "trace", "paths": [str(file)], "format": "mooncake", "block_size": BLOCK}
    return {"source": source, "load": {"type": "concurrency", "concurrency": clients}}


def attempts(engine: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """As the row says; then with attention in formats that it may have measured; then by formulas."""
    own = {key: value for key, value in engine.items() if key != "kvcache_quant_mode"}
    yield "measured", engine
    yield "measured, BF16 attention", engine | {"fmha_quant_mode": "bfloat16"}
    yield "measured, its own KV format", own
    yield "measured, BF16 KV cache", own | {"kvcache_quant_mode": "bfloat16", "fmha_quant_mode": "bfloat16"}
    yield "formulas", engine | {"database_mode": "HYBRID"}


def kind_of(why: Exception) -> str:
    """The cause at the end of its chain, without paths, equal for equal causes."""
    return re.sub(r" at /\S+|/\S*/", "", " ".join(str(why).split()).rpartition("failed: ")[2])[:160]


def answer(point: Cells, folder: Path) -> dict[str, Any]:
    from aisimulate.config import CorePredictionConfig
    from aisimulate.predict import run_prediction
    from aisimulate.runner import EngineReplayRunnerFactory

    found: dict[str, Any] = {"point": point["point"], "reason": ""}
    began = time.process_time()
    try:
        engine, traffic = engine_of(point), traffic_of(point, folder) if not point["reason"] else {}
        for name, tried in attempts(engine):
            try:
                config = CorePredictionConfig.model_validate({"traffic": traffic, "engine": tried})
                said = run_prediction(config, stack="engine", runner_factory=EngineReplayRunnerFactory()).summary
                if said.get("completed_requests", 0) == 0:
                    raise CannotBeAsked(str(said.get("diagnostic")))
            except Exception as why:  # noqa: BLE001 (its errors are of many kinds)
                found["reason"] = found["reason"] or kind_of(why)
                continue
            statistic = {"p50": "median"}
            for metric in ("ttft", "tpot"):
                kind = point[f"{metric}_statistic"] or "mean"
                found[f"{metric}_s"] = f"{said[f'{statistic.get(kind, kind)}_{metric}_ms'] / 1e3:.6g}"
            found |= {"tokens_per_s": f"{said['output_throughput_tok_s']:.6g}", "attempt": name}
            break
    except CannotBeAsked as why:
        found["reason"] = str(why)
    return found | {"cpu_s": f"{time.process_time() - began:.2f}"}


def within_limit(point: Cells, workers: list[Pool], folder: Path) -> dict[str, Any]:
    """Asked in a process of its own, since some predictions do not end; `workers` has the one left, if any."""
    import psutil

    if not workers:
        workers.append(multiprocessing.Pool(1))
    (pid,) = (process.pid for process in multiprocessing.active_children())
    process, asked = psutil.Process(pid), workers[0].apply_async(answer, (point, folder))
    began = sum(process.cpu_times()[:2])
    while not asked.ready():
        asked.wait(1)
        if sum(process.cpu_times()[:2]) - began > MOST_CPU_S:
            workers.pop().terminate()
            return {"point": point["point"], "reason": f"no end within {MOST_CPU_S} s of CPU", "cpu_s": MOST_CPU_S}
    found: dict[str, Any] = asked.get()
    return found


def main() -> None:
    logging.disable(logging.WARNING)
    with POINTS.open(newline="") as file:
        points = list(csv.DictReader(file))
    done = set[str]()
    if OUT.exists():
        with OUT.open(newline="") as file:
            done = {row["point"] for row in csv.DictReader(file)}
    workers: list[Pool] = []
    with OUT.open("a", newline="") as file, tempfile.TemporaryDirectory() as folder:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not done:
            writer.writeheader()
        for point in points:
            if point["point"] not in done:
                found = within_limit(point, workers, Path(folder))
                writer.writerow(found)
                file.flush()
                print(point["point"], found.get("attempt") or found["reason"], found["cpu_s"], flush=True)


if __name__ == "__main__":
    main()
