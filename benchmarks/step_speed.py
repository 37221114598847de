"""How fast the performance model is: 100,000 configurations, in seconds of CPU and of clock.

    python benchmarks/step_speed.py [--json]

A configuration is one deployment (accelerator, parallelism, stack) at one operating point (requests in
flight, input, output); evaluating it means its steady state under continuous batching: TTFT, TPOT,
throughput and what binds.
"""

import argparse
import json
import time

import numpy as np

import crosstie

POINTS = 1000
DEPLOYMENTS = 100


def deployments(catalog: crosstie.Catalog, name: str, precision: str) -> list[crosstie.Deployment]:
    """A hundred replicas that hold the model: accelerators x parallelism x stacks, repeated to fill."""
    model = catalog.model(name)
    found = []
    for accelerator in catalog.accelerators.values():
        for stack in ("vllm", "sglang"):
            for tp in (1, 2, 4, 8):
                if tp > accelerator.domain:
                    continue
                split = crosstie.Parallelism(tp=tp)
                one = catalog.deployment(model, accelerator, split, precision, stack=stack)
                if crosstie.memory_plan(one).fits:
                    found.append(one)
    return [found[i % len(found)] for i in range(DEPLOYMENTS)]


def measure(catalog: crosstie.Catalog, name: str, precision: str) -> dict[str, object]:
    hardware = crosstie.Hardware(deployments(catalog, name, precision))
    draw = np.random.default_rng(0)
    concurrency = draw.integers(1, 512, POINTS)
    inputs, outputs = draw.integers(16, 16384, POINTS), draw.integers(2, 2048, POINTS)
    clock, cpu = [], []
    for _ in range(3):
        wall, used = time.perf_counter(), time.process_time()
        steady = crosstie.steady_state(hardware, concurrency, inputs, outputs)
        clock.append(time.perf_counter() - wall)
        cpu.append(time.process_time() - used)
    size = int(np.asarray(steady.tpot_s).size)
    return {"model": name, "configurations": size, "seconds": min(clock), "cpu_seconds": min(cpu)}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", action="store_true")
    as_json = arguments.parse_args().json
    catalog = crosstie.Catalog([])
    cases = (
        ("llama-3.1-70b", "fp8"),
        ("qwen3-235b-a22b", "fp8"),
        ("deepseek-v3", "native"),
        ("gpt-oss-120b", "native"),
    )
    rows = [measure(catalog, name, precision) for name, precision in cases]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        size, wall, used = row["configurations"], row["seconds"], row["cpu_seconds"]
        print(f"{row['model']:<18} {size:>8,} configurations  {wall:.2f} s  {used:.2f} CPU s")


if __name__ == "__main__":
    main()
