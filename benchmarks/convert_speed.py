"""How fast `crosstie convert` is beside a plain copy of the same files on the same disk.

    python benchmarks/convert_speed.py [--folder DIR] [--gigabytes 8] [--shards 4] [--rounds 5] [--jobs N] [--json]

Makes a synthetic ModelOpt FP8 checkpoint in DIR (the system's temporary folder unless given), then copies (`cp -r`)
and converts it by turns, all in the page cache, and deletes everything. Two policies, the same on both sides:

    flushed    the clock stops when every file is on the disk (`--fsync`): what `crosstie convert` promises is of this
    plain      nothing is flushed: a copy from memory to memory, which tells what it costs in processor time

Source and result should fit into memory together, or the disk decides in both. Least of the rounds: machines are
noisy, shared ones by a factor of two. Memory is an upper bound: the largest resident size of any process of the
conversion, times their number.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from crosstie.port.checkpoint.fp8 import LARGEST, encode
from crosstie.port.checkpoint.headers import encode_header
from crosstie.port.checkpoint.index import INDEX
from crosstie_port.checkpoint.convert import default_jobs

SIDE = 4096
# Of a plain copy's speed, files on the same disk.
PROMISED = 0.8


def make_model(folder: Path, nbytes: int, shards: int) -> None:
    """Weights as a trained model has them: normally distributed, by tensor scaled to 448; minus zero is rare."""
    folder.mkdir()
    # Not all of them at once: what this process holds would be counted as memory of those that it starts.
    drawn = np.random.default_rng(0).standard_normal(SIDE * SIDE // 64)
    codes = np.tile(encode(drawn * (LARGEST["e4m3fn"] / np.abs(drawn).max()), "e4m3fn"), 64)
    weight_map: dict[str, str] = {}
    each = max(1, nbytes // shards // codes.size)
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        entries = []
        for layer in range(shard * each, (shard + 1) * each):
            module = f"model.layers.{layer}.mlp.up_proj"
            entries += [
                (f"{module}.weight", "F8_E4M3", (SIDE, SIDE), codes.size),
                (f"{module}.weight_scale", "F32", (), 4),
                (f"{module}.input_scale", "F32", (), 4),
            ]
        with (folder / name).open("wb") as file:
            file.write(encode_header(entries, {"format": "pt"}))
            for entry in entries:
                file.write(np.roll(codes, len(weight_map)).tobytes() if entry[3] > 4 else np.float32(0.01).tobytes())
                weight_map[entry[0]] = name
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    quantisation = {"quant_method": "modelopt", "quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quantisation}))


def copy(source: Path, out: Path, flushed: bool) -> None:
    subprocess.run(["cp", "-r", str(source), str(out)], check=True)
    if flushed:
        for file in out.iterdir():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())


def convert(source: Path, out: Path, flushed: bool, jobs: int) -> None:
    command = [sys.executable, "-m", "crosstie", "convert", str(source), "-o", str(out), "--to", "e4m3fnuz"]
    command += ["--jobs", str(jobs), "--json"] + (["--fsync"] if flushed else [])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def processor_s() -> float:
    """Of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure(source: Path, out: Path, rounds: int, jobs: int, flushed: bool) -> dict[str, float]:
    wall: dict[str, list[float]] = {"copy": [], "convert": []}
    processor: dict[str, list[float]] = {"copy": [], "convert": []}
    for _ in range(rounds):
        for name in wall:
            shutil.rmtree(out, ignore_errors=True)
            # What an earlier run left to be written is not this one's.
            os.sync()
            began, used = time.monotonic(), processor_s()
            if name == "copy":
                copy(source, out, flushed)
            else:
                convert(source, out, flushed, jobs)
            wall[name].append(time.monotonic() - began)
            processor[name].append(processor_s() - used)
    shutil.rmtree(out)
    found = {f"{name}_s": min(times) for name, times in wall.items()}
    found |= {f"{name}_processor_s": min(times) for name, times in processor.items()}
    return {**found, "ratio": found["copy_s"] / found["convert_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=8.0)
    parser.add_argument("--shards", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as temporary:
        source, out = Path(temporary) / "model", Path(temporary) / "out"
        make_model(source, int(given.gigabytes * 1e9), given.shards)
        nbytes = sum(file.stat().st_size for file in source.iterdir())
        found = {
            policy: measure(source, out, given.rounds, given.jobs, policy == "flushed")
            for policy in ("flushed", "plain")
        }
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    memory = largest * given.jobs
    if given.json:
        print(json.dumps({"nbytes": nbytes, "jobs": given.jobs, "memory_bytes": memory, **found}, indent=2))
        return
    print(f"{nbytes / 1e9:.2f} GB in {given.shards} shards, {given.jobs} processes, best of {given.rounds} rounds")
    for policy, row in found.items():
        rates = ", ".join(f"{name} {nbytes / row[f'{name}_s'] / 1e9:.2f} GB/s" for name in ("copy", "convert"))
        busy = " and ".join(f"{row[f'{name}_processor_s'] / nbytes * 1e9:.2f}" for name in ("copy", "convert"))
        kept = "" if policy == "plain" or row["ratio"] >= PROMISED else f", below the {PROMISED:g} that was promised"
        print(f"{policy:<8} {rates}: {row['ratio']:.2f} of a plain copy's speed{kept}; {busy} s of processor a GB")
    print(f"memory   at most {memory / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
