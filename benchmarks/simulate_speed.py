"""How fast fleets are simulated: CPU seconds with routing, KV blocks and chunked prefill.

    python benchmarks/simulate_speed.py [--blis PROGRAM --blis-source DIR] [--rounds 3] [--day 5000000] [--json]

small   2,000 requests with a million output tokens of an 8B model, 512 prompt tokens, on one H100 and on four behind
        the gateway's policy. With --blis, BLIS (github.com/inference-sim/inference-sim, written in Go; `go build` in
        its sources, which --blis-source names since it reads its tables there) does the same in turns with this, with
        its roofline and its default routing: as many requests and tokens at the same rates.
day     100 replicas (50 H100, 50 MI300X) of an 8B model, a day of 5 million requests: the rate goes through the day as
        a cosine with its peak at 2.5 times its trough, as public traces have it (ServeGen: 2.5 to 2.8). Measured on a
        day of --requests that is as much shorter, at the same rates; --day runs that many for real. Both as a run of
        `crosstie simulate`, with its percentiles and its course, in one process: there is nothing to join.

Least of the rounds, since neighbours on a shared machine only add. A million additions are timed beside it. Modules
that setup.py compiles make it some six times as fast: the answer says whether they were.
"""

import argparse
import json
import resource
import subprocess
import time
from pathlib import Path

import numpy as np

import crosstie.sim.engine as engine_module
from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import Trace
from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Fleet, Pool, ServedClass
from crosstie.core.workload import Target
from crosstie.decide.plan.run_result import SimulatedCase
from crosstie.decide.plan.runs import run
from crosstie.decide.plan.traffic import recorded
from crosstie.sim.fleet import FleetSimulator, SimulatedRequest
from route_speed import least_s

MODEL = "llama-3.1-8b"
DAY_S, DAY_REQUESTS, SWING = 86_400.0, 5_000_000, 2.5


def fleet_of(replicas: int, kinds: tuple[str, ...]) -> Fleet:
    pools = tuple(
        Pool(
            name=kind, model=MODEL, accelerator=kind, parallelism=Parallelism(), precision="fp8", kv_format="bf16",
            stack="vllm", replicas=replicas, usd_per_gpu_hour=2.0 + number, max_in_flight=256, max_context=32_768,
            backends=tuple(f"http://{kind}-{one}" for one in range(replicas)),
        )
        for number, kind in enumerate(kinds)
    )  # fmt: skip
    chat = ServedClass(
        name="chat", model=MODEL, requests_per_s=50.0, input_tokens=1000.0, output_tokens=300.0,
        ttft=Target(seconds=1.0, percentile=0.95), tpot=Target(seconds=0.05, percentile=0.9),
    )  # fmt: skip
    return Fleet(name="bench", planned="", policy="cheapest-meeting-target", pools=pools, classes=(chat,))


def small_requests(rate: float) -> list[SimulatedRequest]:
    at = np.cumsum(np.random.default_rng(1).exponential(1.0 / rate, 2000))
    return [SimulatedRequest(float(moment), MODEL, 512, 500, "chat") for moment in at]


def day(count: int) -> Trace:
    """The same rates as a day of five million requests, for as much of its length."""
    chance, length = np.random.default_rng(2), DAY_S * count / DAY_REQUESTS
    low = 2.0 / (1.0 + SWING)
    drawn = np.sort(chance.uniform(0.0, length, 2 * count))
    rate = 1.0 - (1.0 - low) * np.cos(2.0 * np.pi * drawn / length)
    kept = drawn[chance.uniform(0.0, 2.0 - low, len(drawn)) < rate]
    at = kept[:count] if len(kept) >= count else kept
    inputs = np.clip(chance.lognormal(6.5, 0.9, len(at)), 16, 16_000).astype(np.int64)
    outputs = np.clip(chance.lognormal(5.3, 0.8, len(at)), 2, 4_000).astype(np.int64)
    return Trace("a day", at - at[0], inputs, outputs)


def blis_s(program: Path, source: Path, replicas: int) -> float:
    """CPU seconds of one run of BLIS; an answer that leaves requests out is none."""
    command = [
        str(program.resolve()), "run", "--model", "meta-llama/llama-3.1-8b-instruct", "--latency-model", "roofline",
        "--hardware", "H100", "--tp", "1", "--num-requests", "2000", "--rate", str(10 * replicas),
        "--prompt-tokens", "512", "--prompt-tokens-stdev", "0", "--output-tokens", "500", "--output-tokens-stdev", "0",
        "--num-instances", str(replicas),
    ]  # fmt: skip
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=600)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != 0 or '"total_output_tokens": 1000000' not in done.stdout:
        raise SystemExit(f"{program} did not finish 2,000 requests of 500 tokens:\n{done.stderr[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def small(catalog: Catalog, replicas: int, options: argparse.Namespace) -> dict[str, float]:
    fleet, sent = fleet_of(replicas, ("h100-sxm",)), small_requests(10.0 * replicas)
    ours = theirs = float("inf")
    for _ in range(options.rounds):
        ours = min(ours, least_s(lambda: FleetSimulator(catalog, fleet).run(sent), 1))
        if options.blis:
            theirs = min(theirs, blis_s(options.blis, options.blis_source, replicas))
    return {"cpu_s": ours, **({"blis_cpu_s": theirs, "times_blis": theirs / ours} if options.blis else {})}


def additions() -> None:
    total = 0
    for index in range(1_000_000):
        total += index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blis", type=Path, metavar="PROGRAM", help="run BLIS in turns with this")
    parser.add_argument("--blis-source", type=Path, metavar="DIR", help="the sources that it was built from")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--day", type=int, metavar="N", help="run so many requests of a day for real")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.blis and not options.blis_source:
        parser.error("--blis needs --blis-source: it reads its tables there")
    catalog = Catalog([])
    compiled = not (engine_module.__file__ or "").endswith(".py")
    found: dict[str, object] = {"compiled": compiled, "additions_ms": 1e3 * least_s(additions, options.rounds)}
    large = fleet_of(50, ("h100-sxm", "mi300x"))
    count = options.day or options.requests
    traffic = recorded(day(count), large, class_name="chat", requests_per_s=None, load=1.0, count=None, seed=0)
    case = SimulatedCase(label="day", fleet=large, policy="cheapest-meeting-target")
    if not options.day:
        for replicas in (1, 4):
            found[f"small, {replicas} replicas"] = small(catalog, replicas, options)
    began = time.monotonic()
    spent = least_s(lambda: found.update(run=run(catalog, case, traffic)), 1 if options.day else options.rounds)
    result = found.pop("run")
    found["day"] = {
        "requests": len(traffic),
        "cpu_us_a_request": 1e6 * spent / len(traffic),
        "whole_day_cpu_minutes": spent / len(traffic) * DAY_REQUESTS / 60.0,
        "wall_s": time.monotonic() - began if options.day else None,
        "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "within": result.within,  # type: ignore[attr-defined]
        "ttft_p95_s": result.classes[0].ttft_s.p95,  # type: ignore[attr-defined]
        "tpot_p90_s": result.classes[0].tpot_s.p90,  # type: ignore[attr-defined]
    }
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
