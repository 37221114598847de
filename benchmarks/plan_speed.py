"""How long a plan takes, beside NVIDIA's aiconfigurator on the nearest question that it answers.

    python benchmarks/plan_speed.py [--aiconfigurator /path/to/venv/bin/aiconfigurator] [--rounds 3] [--json]

CPU seconds, least of the rounds, by closed forms alone (--quick) and confirmed by simulation:
    four classes    the shipped example over the whole catalog, 18 accelerators with a price
    fifty classes   two models, fifty length and latency mixes, 17 accelerators
    one question    Qwen3-32B in FP8, 4,000 tokens in, 500 out, TTFT 1 s, TPOT 30 ms, H200 alone: whole commands,
                    from the shell, ours and theirs (`aiconfigurator cli default`, which also looks at
                    disaggregated serving, and says nothing of price or other accelerators)

The first two are counted after start-up: imports and the reading of the catalog are shown apart. Machines are noisy,
shared ones by a factor of two: a loop of ten million additions is timed beside them, to divide by.
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

_INSIDE = """
import sys, time, json
from pathlib import Path
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.decide.plan.plan import plan as make_plan
import highspy
catalog = Catalog([])
catalog.accelerators, catalog.stacks, catalog.calibration, catalog.prices, catalog.costs, catalog.formats
started = time.process_time()
plan = make_plan(catalog, read_workload(catalog, find_workload(Path(sys.argv[1]))), confirm=sys.argv[2] == "confirmed")
print(json.dumps({
    "start_up": started, "plan": time.process_time() - started, "replicas": plan.replicas_considered,
    "accelerators": len(plan.market.items), "gpus": plan.fleet.gpus if plan.fleet else None,
    "gap": plan.fleet.gap if plan.fleet else None,
}))
"""


def fifty_classes() -> str:
    draw = np.random.default_rng(5)
    lines = ['name = "fifty"', "[traffic]", "requests_per_s = 500", "mean_over_peak = 0.5", "[constraints]"]
    lines.append(
        'accelerators = ["a100-80gb", "b200", "b300", "gb200", "gb300", "gh200", "h100-nvl", "h100-pcie", "h100-sxm", '
        '"h200", "l40s", "mi300x", "mi325x", "mi350x", "mi355x", "rtx-4090", "rtx-pro-6000"]'
    )
    shares = draw.dirichlet(np.ones(50))
    shares[-1] += 1.0 - shares.sum()
    for index, share in enumerate(shares):
        model = ("llama-3.1-70b", "llama-3.1-8b")[index % 2]
        median = int(draw.integers(100, 6000))
        lines += [
            "[[class]]", f'name = "c{index}"', f'model = "{model}"', f"share = {share:.12f}",
            f"input = {{ median = {median}, p95 = {median * int(draw.integers(2, 8))} }}",
            f"output = {int(draw.integers(20, 900))}",
            f"ttft_ms = {{ p95 = {max(int(draw.choice([500, 1000, 2000, 5000])), median)} }}",
            f"tpot_ms = {{ p90 = {int(draw.choice([25, 40, 50, 100]))} }}",
        ]  # fmt: skip
    return "\n".join(lines) + "\n"


ONE_QUESTION = """
name = "one question"
[models."qwen3-32b"]
precisions = ["fp8"]
[constraints]
accelerators = ["h200"]
[[class]]
name = "all"
model = "qwen3-32b"
requests_per_s = 15
input = 4000
output = 500
ttft_ms = { p90 = 1000 }
tpot_ms = { p90 = 30 }
"""


def inside(workload: str, how: str) -> dict[str, object]:
    done = subprocess.run([sys.executable, "-c", _INSIDE, workload, how], capture_output=True, text=True, check=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def command(arguments: list[str]) -> dict[str, float]:
    before, clock = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True, cwd=tempfile.gettempdir()
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu": cpu, "clock": time.perf_counter() - clock}


def plain_loop() -> float:
    started, total = time.process_time(), 0
    for number in range(10_000_000):
        total += number
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--aiconfigurator", default=shutil.which("aiconfigurator"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    os.environ["CROSSTIE_CATALOG"] = tempfile.mkdtemp()
    with tempfile.TemporaryDirectory() as folder:
        fifty, one = Path(folder) / "fifty.toml", Path(folder) / "one.toml"
        fifty.write_text(fifty_classes())
        one.write_text(ONE_QUESTION)
        rounds = range(asked.rounds)
        found = {
            **{
                f"{name}, {how}": min((inside(which, how) for _ in rounds), key=lambda r: float(str(r["plan"])))
                for name, which in (("four classes", "assistant"), ("fifty classes", str(fifty)))
                for how in ("quick", "confirmed")
            },
            "one question": min(
                (command([sys.executable, "-m", "crosstie", "plan", "--quick", str(one)]) for _ in rounds),
                key=lambda r: r["cpu"],
            ),
            "aiconfigurator": None,
        }
        if asked.aiconfigurator:
            theirs = [
                asked.aiconfigurator, "cli", "default", "--model-path", "Qwen/Qwen3-32B-FP8", "--system", "h200_sxm",
                "--total-gpus", "8", "--isl", "4000", "--osl", "500", "--ttft", "1000", "--tpot", "30",
                "--backend", "trtllm",
            ]  # fmt: skip
            found["aiconfigurator"] = min((command(theirs) for _ in rounds), key=lambda r: r["cpu"])
    loop = min(plain_loop() for _ in rounds)
    if asked.json:
        print(json.dumps({**found, "loop": loop}, indent=2))
        return
    print(f"ten million additions: {loop:.2f} s of CPU")
    for name in [name for name in found if "classes" in name]:
        row = found[name] or {}
        print(
            f"{name}: {row['plan']:.2f} s of CPU after {row['start_up']:.2f} s of start-up; {row['replicas']} replicas "
            f"on {row['accelerators']} accelerators; {row['gpus']}, gap {row['gap']:.2%}"
        )
    ours, theirs_took = found["one question"], found["aiconfigurator"]
    assert ours is not None
    print(f"one question, whole command: {ours['cpu']:.2f} s of CPU")
    if theirs_took:
        ratio = float(str(theirs_took["cpu"])) / float(str(ours["cpu"]))
        print(f"aiconfigurator cli default: {theirs_took['cpu']:.2f} s of CPU, {ratio:.1f} times as much")
    else:
        print("aiconfigurator is not installed: pip install aiconfigurator==0.12.0 in its own environment")


if __name__ == "__main__":
    main()
