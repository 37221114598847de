"""NVIDIA's aiconfigurator 0.12 over measured serving points: its TTFT and TPOT beside the measured ones, as CSV.

    python3.11 -m venv /tmp/aic && /tmp/aic/bin/pip install aiconfigurator==0.12.0 aiconfigurator-core==0.12.0
    /tmp/aic/bin/python benchmarks/aiconfigurator_accuracy.py RESULTS.csv[.gz] OUT.csv [--every N] [--report]

Enters: a results file in Crosstie's long format (one metric a row); its rows of source `aic_silicon_sample`
are used, those suspected of multi-token prediction or of disaggregated serving left out. Leaves: one row a
point with the prediction or the reason why there is none, and tables of errors. It is written as it goes: a
rerun continues where OUT.csv stops; --report only prints the tables.

Provenance: both the tool (PyPI `aiconfigurator`, `aiconfigurator-core` 0.12.0) and the measured points (its
repository ai-dynamo/aiconfigurator, `silicon_sample.csv`, by way of RESULTS) are NVIDIA's, Apache-2.0. The
tool's own TTFT and step corrections for vLLM say in their source that they were calibrated on "the silicon
corpus", so for it these points are at least partly in-sample.

How a point becomes a call of `aiconfigurator.cli.api.cli_estimate` (aggregated serving), chosen to suit it:
the engine release nearest to the row's among those it ships (all rows are older than its oldest); the batch
is concurrency / attention DP; the context budget its default, one prompt a step, except for SGLang, whose own
default chunk brings the TTFT nearer. Formats: TensorRT-LLM runs NVIDIA's checkpoints, so their formats with an
FP8 KV cache; vLLM and SGLang run the row's stated GEMM and MoE formats with the KV cache in BF16, the engines'
default. gpt-oss is MXFP4 whatever the row's label: with MXFP8 activations on Blackwell, BF16 on Hopper. A
point that its default database (SILICON) cannot answer is tried with the sibling MoE format, then with an FP8
KV cache, and last with the HYBRID database, whose formulas fill gaps; column `attempt` says which one
answered, and the tables count HYBRID apart.
"""

import argparse
import csv
import gzip
import logging
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

SOURCE = "aic_silicon_sample"
IDENTITY = (
    "source_ref",
    "accelerator",
    "engine",
    "engine_version",
    "model",
    "precision",
    "parallelism",
    "num_accelerators",
    "input_len",
    "output_len",
    "concurrency",
    "date",
)
ANSWER = (
    "measured_ttft_s",
    "measured_tpot_s",
    "predicted_ttft_s",
    "predicted_tpot_s",
    "attempt",
    "aiconfigurator_version",
    "gemm",
    "moe",
    "kvcache",
    "fmha",
    "beyond_kv_capacity",
    "cpu_s",
    "reason",
)
METRICS = {"ttft_ms_mean": "measured_ttft_s", "tpot_ms_mean": "measured_tpot_s"}

BACKENDS = {"TensorRT-LLM": "trtllm", "SGLang": "sglang", "vLLM": "vllm"}
# The older of the two releases that 0.12.0 ships for each engine: the nearest to every row.
RELEASES = {"TensorRT-LLM": "1.3.0rc20", "SGLang": "0.5.14", "vLLM": "0.24.0"}
SYSTEMS = {"H100": "h100_sxm", "H200": "h200_sxm", "B200": "b200_sxm", "B300": "b300_sxm", "GB200": "gb200"}
DENSE = {
    "Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "Qwen3-32B": "Qwen/Qwen3-32B",
}
MIXTURES = {
    "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B",
    "Qwen3.5-397B-A17B": "Qwen/Qwen3.5-397B-A17B",
    "MiniMax-M2.5": "MiniMaxAI/MiniMax-M2.5",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "DeepSeek-R1": "deepseek-ai/DeepSeek-R1",
    "DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
}
# Quantised checkpoints whose configuration it ships; it reads the formats from there.
CHECKPOINTS = {
    ("Llama-3.1-70B", "fp8"): "nvidia/Llama-3.1-70B-Instruct-FP8",
    ("Qwen3-32B", "fp8"): "Qwen/Qwen3-32B-FP8",
    ("Qwen3-235B-A22B", "fp8"): "Qwen/Qwen3-235B-A22B-FP8",
    ("MiniMax-M2.5", "fp8"): "MiniMaxAI/MiniMax-M2.5",
    ("MiniMax-M2.5", "fp4"): "nvidia/MiniMax-M2.5-NVFP4",
    ("Qwen3.5-397B-A17B", "fp4"): "nvidia/Qwen3.5-397B-A17B-NVFP4",
    ("DeepSeek-R1", "fp8"): "deepseek-ai/DeepSeek-R1",
    ("DeepSeek-V3", "fp8"): "deepseek-ai/DeepSeek-V3",
    ("DeepSeek-R1", "fp4"): "nvidia/DeepSeek-V3.1-NVFP4",
    ("DeepSeek-V3", "fp4"): "nvidia/DeepSeek-V3.1-NVFP4",
}
SIBLING_MOE = {"fp8": "fp8_block", "fp8_block": "fp8", "w4a8_mxfp4_mxfp8": "w4a16_mxfp4"}
BLACKWELL = {"B200", "B300", "GB200"}
SGLANG_CHUNK = {True: 16384, False: 8192}  # Blackwell or not: SGLang's default above and below 160 GiB

Row = dict[str, str]
Call = dict[str, Any]


class CannotBeExpressed(Exception):
    """A row that has no counterpart among aiconfigurator's settings."""


def opened(path: Path) -> TextIO:
    return gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="")


def measured_points(path: Path) -> list[Row]:
    """Rows of the source joined to one a point, metrics in seconds, in the order of the file."""
    points: dict[str, Row] = {}
    with opened(path) as file:
        for row in csv.DictReader(file):
            if row["source_id"] != SOURCE or row["spec_decode"] or row["disagg"]:
                continue
            point = points.setdefault(row["source_ref"], {name: row[name] for name in (*IDENTITY, "notes")})
            name = METRICS[row["metric"]]
            if name in point:
                raise SystemExit(f"{path}: {row['source_ref']} has {row['metric']} twice")
            point[name] = f"{float(row['value']) / 1e3:.7g}"
    return list(points.values())


def formats(point: Row) -> Call:
    """Model path and number formats of the first attempt."""
    model, precision = point["model"], point["precision"]
    path = DENSE.get(model) or MIXTURES[model]
    if model == "gpt-oss-120b":
        activations = "w4a8_mxfp4_mxfp8" if point["accelerator"] in BLACKWELL else "w4a16_mxfp4"
        return {"model_path": path, "moe_quant_mode": activations}
    if precision == "bf16":
        return {"model_path": path, "gemm_quant_mode": "bfloat16", "moe_quant_mode": "bfloat16"}
    stated = re.match(r"gemm (\w+) moe (\w+);", point["notes"])
    if stated is None:
        raise CannotBeExpressed(f"no formats stated: {point['notes']}")
    gemm, moe = stated.groups()
    if point["engine"] != "TensorRT-LLM":
        return {"model_path": path, "gemm_quant_mode": gemm, "moe_quant_mode": moe, **both("bfloat16")}
    if (model, precision) in CHECKPOINTS:
        return {"model_path": CHECKPOINTS[model, precision]}
    # NVIDIA's checkpoints it has no configuration of: per-tensor scales fixed beforehand, FP8 KV cache.
    gemm = "fp8_static" if gemm == "fp8" else gemm
    return {"model_path": path, "gemm_quant_mode": gemm, "moe_quant_mode": moe, **both("fp8")}


def both(attention: str) -> Call:
    return {"kvcache_quant_mode": attention, "fmha_quant_mode": attention}


def call_of(point: Row) -> Call:
    split = re.fullmatch(r"gpus(\d+) tp(\d+) attention_dp(\d+) ep(\d+)", point["parallelism"])
    if split is None:
        raise CannotBeExpressed(f"parallelism {point['parallelism']!r}")
    gpus, tp, replicas, experts = map(int, split.groups())
    if tp * replicas != gpus or gpus % experts:
        raise CannotBeExpressed(f"parallelism {point['parallelism']!r}: the widths do not make up the GPUs")
    call: Call = {
        "mode": "agg",
        "system_name": SYSTEMS[point["accelerator"]],
        "backend_name": BACKENDS[point["engine"]],
        "backend_version": RELEASES[point["engine"]],
        "isl": int(point["input_len"]),
        "osl": int(point["output_len"]),
        "batch_size": -(-int(point["concurrency"]) // replicas),
        "tp_size": tp,
        "attention_dp_size": replicas,
        **formats(point),
    }
    if point["engine"] == "SGLang":
        chunk = SGLANG_CHUNK[point["accelerator"] in BLACKWELL]
        call["ctx_tokens"] = min(chunk, call["isl"] * call["batch_size"])
    if point["model"] in MIXTURES:
        call |= {"moe_ep_size": experts, "moe_tp_size": gpus // experts}
    return call


def attempts(point: Row) -> Iterator[tuple[str, Call]]:
    first = call_of(point)
    yield "first", first
    sibling = SIBLING_MOE.get(first.get("moe_quant_mode", ""))
    if point["model"] in MIXTURES and sibling:
        yield "sibling MoE format", first | {"moe_quant_mode": sibling}
    if point["precision"] != "bf16" and first.get("kvcache_quant_mode") != "fp8":
        yield "FP8 KV cache", first | {"kvcache_quant_mode": "fp8"}
    yield "HYBRID", first | {"database_mode": "HYBRID"}


def predict(point: Row, estimate: Callable[..., Any]) -> Row:
    """The point with the first attempt's answer that there is, else with the first attempt's reason."""
    answer = {name: point.get(name, "") for name in (*IDENTITY, *ANSWER)}
    began = time.process_time()
    try:
        for name, call in attempts(point):
            try:
                result = estimate(**call)
            except Exception as why:  # noqa: BLE001 (its errors are its own, RuntimeError and ValueError)
                answer["reason"] = answer["reason"] or kind_of(why)
                continue
            raw = result.raw
            answer |= {
                "predicted_ttft_s": f"{result.ttft / 1e3:.7g}",
                "predicted_tpot_s": f"{result.tpot / 1e3:.7g}",
                "attempt": name,
                "aiconfigurator_version": raw["version"],
                **{kind: raw[kind] for kind in ("gemm", "moe", "kvcache", "fmha")},
                "beyond_kv_capacity": "yes" if result.kv_cache_warning else "",
            }
            break
    except CannotBeExpressed as why:
        answer["reason"] = str(why)
    answer["cpu_s"] = f"{time.process_time() - began:.4f}"
    return answer


def kind_of(why: Exception) -> str:
    """One line without its paths, equal for equal causes."""
    text = " ".join(str(why).split())
    if text.startswith("OOM"):
        return "OOM: weights and KV cache of the batch exceed the memory"
    missing = re.search(r"(\w+) data missing for \w+ \{ quant: \"(\w+)\"", text)
    if missing:
        return f"no {missing[1]} data for {missing[2]}"
    return f"{type(why).__name__}: {re.sub(r'/[^ ]*/', '', text)[:160]}"


def run(points: list[Row], out: Path) -> None:
    # Imported here so that --report needs no aiconfigurator.
    from aiconfigurator.cli.api import cli_estimate

    logging.disable(logging.WARNING)
    done = {row["source_ref"] for row in read_answers(out)} if out.exists() else set()
    # Grouped, so that each of its databases is loaded once.
    todo = sorted(
        (point for point in points if point["source_ref"] not in done),
        key=lambda point: (point["accelerator"], point["engine"], point["model"], point["source_ref"]),
    )
    print(f"{len(done)} of {len(points)} points done before", flush=True)
    began, used = time.perf_counter(), time.process_time()
    with out.open("a", newline="") as file:
        writer = csv.DictWriter(file, (*IDENTITY, *ANSWER), lineterminator="\n")
        if not done:
            writer.writeheader()
        for count, point in enumerate(todo, 1):
            writer.writerow(predict(point, cli_estimate))
            file.flush()
            if count % 50 == 0 or count == len(todo):
                seconds = time.perf_counter() - began
                print(f"{count}/{len(todo)}  {seconds:.0f} s, {seconds / count:.2f} s a point", flush=True)
    if todo:
        print(f"{(time.process_time() - used) / len(todo):.3f} CPU s a point, databases loaded on the way\n")


def read_answers(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def errors(rows: list[Row], metric: str) -> list[float]:
    pairs = [(row[f"predicted_{metric}_s"], row[f"measured_{metric}_s"]) for row in rows]
    return [float(predicted) / float(measured) - 1 for predicted, measured in pairs if predicted and measured]


def line(name: str, rows: list[Row]) -> str:
    covered = sum(bool(row["predicted_tpot_s"]) for row in rows)
    text = f"{name:<28} {covered:>5} / {len(rows):<5} {covered / len(rows):>5.0%}"
    for metric in ("tpot", "ttft"):
        signed = errors(rows, metric)
        if len(signed) < 2:
            text += f"  {'-':>6} {'-':>6} {'-':>7}"
            continue
        sizes = [abs(error) for error in signed]
        p90 = statistics.quantiles(sizes, n=10, method="inclusive")[-1]
        text += f"  {statistics.median(sizes):>6.1%} {p90:>6.0%} {statistics.median(signed):>+7.1%}"
    return text


def report(rows: list[Row]) -> None:
    """Errors are (predicted - measured) / measured: median and p90 of the size, median of the signed (bias)."""
    blank = {"predicted_ttft_s": "", "predicted_tpot_s": ""}
    silicon = [row | blank if row["attempt"] == "HYBRID" else row for row in rows]
    print(f"{'':<28} {'covered':<19}  {'TPOT median, p90, bias':<21}  TTFT median, p90, bias")
    print(line("SILICON (its default)", silicon))
    print(line("  first attempt alone", [row if row["attempt"] == "first" else row | blank for row in rows]))
    print(line("  within KV capacity", [row for row in silicon if not row["beyond_kv_capacity"]]))
    print(line("with HYBRID for the gaps", rows))
    for field in ("accelerator", "engine", "model", "precision", "attempt"):
        print(f"\nby {field}" + (", SILICON" if field != "attempt" else ""))
        among = rows if field == "attempt" else silicon
        for value in sorted({row[field] for row in among}):
            print(line(value or "none", [row for row in among if row[field] == value]))
    print("\nwhy SILICON's first attempt had no answer; the attempt that had one")
    causes = Counter((row["reason"], row["attempt"] or "none") for row in rows if row["reason"])
    for (reason, attempt), count in causes.most_common():
        print(f"{count:>5}  {reason} ({attempt})")
    seconds = [float(row["cpu_s"]) for row in rows]
    print(f"\nCPU s a point: median {statistics.median(seconds):.3f}, mean {statistics.fmean(seconds):.3f}")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("results", type=Path)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--every", type=int, default=1, help="only every N-th point, for a quick look")
    arguments.add_argument("--report", action="store_true", help="print the tables of OUT.csv and predict nothing")
    given = arguments.parse_args()
    if not given.report:
        run(measured_points(given.results)[:: given.every], given.out)
    report(read_answers(given.out))


if __name__ == "__main__":
    main()
