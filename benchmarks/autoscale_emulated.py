"""A day in minutes with real processes: a gateway, emulated replicas, `crosstie scale` with a hook, a client.

    python benchmarks/autoscale_emulated.py [--minutes 4] [--hours 24] [--day servegen-language]

`crosstie serve --emulate` has every replica that there can be; those that were not asked for answer 503, also to health
checks. `crosstie scale` empties replicas through the gateway's administrator's port and runs a shell script for each
change, which lets replicas in after the time of a start, or shuts them at once. `crosstie replay` sends the day. All
clocks run at the same speed.

GPU-hours are of replicas that were asked for, starting ones among them, beside all that there is, all day.
No GPU runs, AMD's or NVIDIA's: engines take the time that the performance model predicts.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from crosstie.catalog.days import shipped_days
from crosstie.catalog.library import Catalog
from crosstie.core.histogram import samples_of
from crosstie.decide.plan.subject import read_subject
from crosstie_gateway.scaler.capacities import capacities
from crosstie_gateway.scaler.learnt import shape_at
from crosstie_gateway.start.start import serve

KEY = "an-administrators-own-key"
SHUT = json.dumps({"kind": "reject", "health": False})
# Replicas of each pool, requests in tokens, and how much of what all take the busiest moment has.
COUNT, INPUT, OUTPUT, BUSIEST = 3, 200, 20_000, 0.9
# Few requests keep such replicas busy: long answers, and a target that only small batches keep.
FLEET = (
    """format = 1
name = "day"
policy = "cheapest-meeting-target"
serve = { health_every_s = 0.1 }
"""
    + "".join(
        f"""
[[pool]]
name = "{name}"
model = "llama-3.3-70b"
accelerator = "{name}"
precision = "fp8"
stack = "vllm"
replicas = {COUNT}
usd_per_gpu_hour = {usd}
max_in_flight = 64
max_context = 32768
"""
        for name, usd in (("mi300x", 2.59), ("h200", 4.45))
    )
    + """
[[class]]
name = "chat"
model = "llama-3.3-70b"
requests_per_s = 0.1
input_tokens = 200
output_tokens = 20000
ttft_ms = { p95 = 60000 }
tpot_ms = { p95 = 80 }
"""
)

RULES = """[scale]
day = "{day}"
every_s = 120
drain_s = 900
utc_offset_hours = {offset}

[[supply]]
name = "mi300x"
pool = "mi300x"
least = 1
most = {most}

[[supply]]
name = "h200"
pool = "h200"
most = {most}
"""
# What a plain script of an operator's would do: starts take their time, and are not waited for.
HOOK = """#!/bin/sh
echo "$(date +%s.%N) $CROSSTIE_SUPPLY $CROSSTIE_REPLICAS ${{CROSSTIE_STOP:--}}" >> {log}
for at in $CROSSTIE_STOP; do curl -s -X POST "${{at%/v1}}/emulate/fault" -d '{shut}' > /dev/null; done
for at in $CROSSTIE_START; do
  (sleep {start_s}; curl -s -X DELETE "${{at%/v1}}/emulate/fault" > /dev/null) > /dev/null 2>&1 &
done
"""


@dataclass
class Emulated:
    """What came of a day."""

    # What `crosstie replay` says.
    replay: dict[str, Any]
    gpu_hours: float
    fixed_gpu_hours: float
    # Replicas of each supply from each moment on, in hours since the beginning.
    course: list[tuple[float, str, int]]
    said: str


def run(day: str, minutes: float, begin_h: float, hours: float, folder: Path) -> Emulated:
    """All that there is serves at the beginning, and is the fleet that it is held against."""
    speed = hours * 60.0 / minutes
    fleet, rules, trace = folder / "fleet.toml", folder / "rules.toml", folder / "day.csv"
    fleet.write_text(FLEET)
    catalog = Catalog()
    known = capacities(catalog, read_subject(catalog, fleet))
    peak = BUSIEST * sum(COUNT * float(rate[0]) for rate in known.rate.values())
    shape = shipped_days()[day]
    minutes_of = np.arange(0.0, hours * 3600.0, 60.0)
    due = np.cumsum([peak * shape_at(shape, begin_h * 3600.0 + at) * 60.0 for at in minutes_of])
    # Evenly spaced at the day's rate: so few requests are no fair sample of chance.
    at_s = np.interp(np.arange(1, int(due[-1])), due, minutes_of + 60.0)
    lines = [f"{at:.3f},{INPUT},{OUTPUT}" for at in at_s]
    trace.write_text("\n".join(["timestamp,input_tokens,output_tokens", *lines, ""]))
    log, hook = folder / "hook.log", folder / "hook.sh"
    start_s = max(known.start_s.values()) / speed
    hook.write_text(HOOK.format(log=log, shut=SHUT, start_s=f"{start_s:.3f}"))
    hook.chmod(0o755)
    os.environ["CROSSTIE_ADMIN_KEY"] = KEY
    crosstie = [sys.executable, "-m", "crosstie"]
    with serve(fleet, emulate=True, speed=speed, options=("--admin-port", "0")) as gateway:
        assert gateway.admin_url is not None
        replay = [
            *crosstie, "replay", str(trace), "--url", gateway.url, "--model", "llama-3.3-70b", "--class", "chat",
            "--speed", f"{speed:g}", "--fleet", str(fleet), "--json",
        ]  # fmt: skip
        with subprocess.Popen(replay, stdout=(folder / "replay.json").open("w")) as client:
            # The day begins with its first request: processes take longer to start than hours of it to pass.
            while client.poll() is None and not _came(gateway.url):
                time.sleep(0.05)
            began = time.time()
            offset = (begin_h - began % 86_400.0 / 3600.0 + 12.0) % 24.0 - 12.0
            rules.write_text(RULES.format(day=day, offset=f"{offset:.4f}", most=COUNT))
            scale = [
                *crosstie, "scale", str(fleet), "--rules", str(rules), "--gateway", gateway.url, "--admin",
                gateway.admin_url, "--hook", str(hook), "--speed", f"{speed:g}",
            ]  # fmt: skip
            with subprocess.Popen(scale, stderr=(folder / "scale.log").open("w")) as scaler:
                client.wait(60.0 * minutes + 300.0)
                ended = time.time()
                scaler.terminate()
    lines = log.read_text().splitlines() if log.exists() else []
    changes = [(float(at), name, int(count)) for at, name, count, *_ in map(str.split, lines)]
    gpu_hours, have, last = 0.0, dict.fromkeys(known.gpus, COUNT), began
    for at, name, count in [*changes, (ended, next(iter(have)), 0)]:
        gpu_hours += (at - last) * speed / 3600.0 * sum(known.gpus[one] * n for one, n in have.items())
        have[name], last = count, at
    fixed = (ended - began) * speed / 3600.0 * COUNT * sum(known.gpus.values())
    course = [((at - began) * speed / 3600.0, name, count) for at, name, count in changes]
    document = json.loads((folder / "replay.json").read_text())
    return Emulated(document, gpu_hours, fixed, course, (folder / "scale.log").read_text())


def _came(url: str) -> bool:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        samples = samples_of(answer.read().decode())
    return any(name == "crosstie_requests_total" and value > 0 for name, _, value in samples)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--minutes", type=float, default=4.0)
    asked.add_argument("--begin", type=float, default=0.0, help="hour of the day")
    asked.add_argument("--hours", type=float, default=24.0)
    asked.add_argument("--day", default="servegen-language", choices=tuple(shipped_days()))
    given = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = run(given.day, given.minutes, given.begin, given.hours, Path(folder))
    for at, name, count in found.course:
        print(f"{at:6.2f} h  {name} {count}")
    print(found.said)
    (point,) = found.replay["endpoints"][0]["points"]
    print(
        f"{point['requests']} requests, {point['failed']} failed, {point['turned_away']} turned away, "
        f"{point['kept']:.1%} within targets; "
        f"the client was late by {point['client']['late_p99_s']:.0f} s of the day at p99"
    )
    print(f"{found.gpu_hours:.1f} GPU-hours, {found.gpu_hours / found.fixed_gpu_hours:.0%} of the fixed fleet's")


if __name__ == "__main__":
    main()
