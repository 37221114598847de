"""Scaling by cost over a day, beside a fleet that stays as it is and Kubernetes' autoscaler by utilisation.

    python benchmarks/autoscale.py [--replicas 12] [--hours 24] [--day m-small:6] [--json FILE]

Days are real ones: requests/s of a language model's and of DeepSeek-R1's clients at Alibaba Cloud by ten minutes
(ServeGen), scaled so that the busiest ten minutes need so many replicas (--replicas). The fixed fleet is the cheapest
mixture for these ten minutes: the smallest that would have done, chosen with hindsight. The scaler knows of the day
what the days before it were like, their median, and nothing where there is none. Requests come at random, with
lengths of benchmarks/autoscale_workload.toml, to the fleet of benchmarks/autoscale.toml through the gateway's own
policy. Engines take the time that the performance model predicts: no GPU runs, AMD's or NVIDIA's. Starts take what
the catalog says, scattered; the scaler's first belief is the same and it learns. "lost" takes all replicas of the
dearer half of the fleet away at the busiest hour, for an hour: nothing starts there until then.

hpa NN   one autoscaler a pool (its documented formula, tolerance and windows: decide/scale/rivals.py) that holds NN% of
         the requests that a replica may have in flight.
"""

import argparse
import csv
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.scaling import ScaleRules, Supply
from crosstie.decide.plan.subject import of_fleet
from crosstie.decide.scale.capacities import capacities
from crosstie.decide.scale.day import Day, DaySimulator, Loss, day_traffic
from crosstie.decide.scale.mixture import Choices
from crosstie.decide.scale.platform import Controller
from crosstie.decide.scale.rivals import ByScaler, Fixed, Hpa
from crosstie.decide.scale.scaler import Capacities, Scaler

HERE = Path(__file__).parent
WINDOWS, WINDOW_S = 144, 600


def days() -> dict[str, list[np.ndarray]]:
    """By model: its days in windows of ten minutes; those with a window that nobody recorded are filled from beside."""
    rates: dict[str, dict[int, float]] = {}
    with (HERE / "servegen_days.csv").open() as file:
        for row in csv.DictReader(line for line in file if not line.startswith("#")):
            rates.setdefault(row["model"], {})[int(row["t_s"]) // WINDOW_S] = float(row["requests_per_s"])
    found = {}
    for model, known in rates.items():
        count = (max(known) + 1) // WINDOWS
        filled = np.interp(np.arange(count * WINDOWS), sorted(known), [known[at] for at in sorted(known)])
        found[model] = list(filled.reshape(count, WINDOWS))
    return found


def expected(before: list[np.ndarray]) -> tuple[float, ...]:
    """Of a day, what those before it say: the median of each window over its day's mean, a little smoothed."""
    if not before:
        return ()
    usual = np.median([day / day.mean() for day in before], axis=0)
    wide = np.concatenate([usual[-1:], usual, usual[:1]])
    smooth = np.convolve(wide, np.ones(3) / 3, "valid")
    return tuple((smooth / smooth.max()).tolist())


def choices(rules: ScaleRules, known: Capacities) -> Choices:
    none = np.zeros(len(rules.supplies), np.int64)
    return Choices(
        rate=np.array([known.rate[one.pool] for one in rules.supplies]),
        usd_per_hour=np.array([known.usd_per_gpu_hour[one.pool] * known.gpus[one.pool] for one in rules.supplies]),
        floor=none, have=none, most=np.array([one.most for one in rules.supplies]), starting=none * 1.0,
    )  # fmt: skip


def row(label: str, day: Day, spent_s: float, fixed: Day | None) -> dict[str, Any]:
    hour, worst = day.worst_hour
    return {
        "label": label,
        "requests": day.requests.total(),
        "within": day.share,
        "worst_hour": hour,
        "worst_hour_within": worst,
        "refused": day.refused,
        "gpu_hours": day.gpu_hours,
        "of_fixed_gpu_hours": day.gpu_hours / (fixed or day).gpu_hours,
        "usd": day.bill.usd,
        "of_fixed_usd": day.bill.usd / (fixed or day).bill.usd,
        "moves": day.bill.moves,
        "flaps": day.bill.flaps,
        "most": day.bill.most,
        "cpu_s": spent_s,
    }


def show(one: dict[str, Any]) -> None:
    print(
        f"  {one['label']:<16}{one['within']:8.2%} within{one['worst_hour_within']:8.1%} at {one['worst_hour']:02d} h"
        f"{one['gpu_hours']:8.1f} GPU-h ({one['of_fixed_gpu_hours']:.1%}){one['usd']:8.0f} USD "
        f"({one['of_fixed_usd']:.1%}){one['moves']:5d} moves{one['flaps']:4d} flaps{one['cpu_s']:7.0f} s"
    )
    sys.stdout.flush()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--replicas", type=int, default=12, help="of the fixed fleet")
    asked.add_argument("--hours", type=float, default=24.0)
    asked.add_argument("--begin", type=float, default=0.0, help="hour of the day")
    asked.add_argument("--day", action="append", help="MODEL:NUMBER; several")
    asked.add_argument("--hpa", type=float, action="append", help="targets of the autoscaler, shares")
    asked.add_argument("--every", type=float, default=60.0)
    asked.add_argument("--only", help="labels that begin so")
    asked.add_argument("--json", type=Path)
    given = asked.parse_args()
    catalog = Catalog()
    fleet, work = read_fleet(catalog, HERE / "autoscale.toml"), read_workload(catalog, HERE / "autoscale_workload.toml")
    known = capacities(catalog, replace(of_fleet(fleet), workload=work))
    share = np.array([part.share for part in known.parts])
    # Half of the fixed fleet is of what is cheaper and can be had no further, the rest of the other.
    cheap, dear = (pool.name for pool in fleet.pools)
    half = given.replicas // 2
    rules = ScaleRules(
        supplies=(Supply(name=cheap, pool=cheap, most=half), Supply(name=dear, pool=dear, most=2 * given.replicas)),
        every_s=given.every,
    )
    alone = choices(rules, known)
    most = np.array([half, given.replicas - half])
    every_one = replace(alone, floor=most, most=most)
    peak = 10.0 * given.replicas * every_one.carried(share * 10.0 * given.replicas)
    work = msgspec.structs.replace(
        work, classes=tuple(msgspec.structs.replace(one, requests_per_s=float(peak)) for one in work.classes)
    )
    begin_s, every = 3600.0 * given.begin, days()
    results = []
    for name in given.day or ["m-small:6"]:
        model, _, number = name.partition(":")
        real = every[model][int(number)]
        shape, guess = tuple((real / real.max()).tolist()), expected(every[model][: int(number)])
        traffic = day_traffic(work, shape, 3600.0 * given.hours, seed=1, begin_s=begin_s)
        static = alone.cheapest(share * peak)
        first = alone.cheapest(share * peak * shape[int(begin_s // WINDOW_S) % WINDOWS])
        assert static is not None
        assert first is not None
        counts = [dict(zip((cheap, dear), map(int, some), strict=True)) for some in (static, first)]
        hour = int(np.argmax(real.reshape(24, 6).mean(axis=1)))
        loss = Loss(dear if counts[0][dear] >= half else cheap, 3600.0 * hour + 900.0, 3600.0)
        print(
            f"{name}: {len(traffic):,} requests, at most {peak:.1f}/s, mean {real.mean() / real.max():.0%} of that; "
            f"fixed fleet {counts[0]}; forecast from {number if guess else 'no'} days; lost: {loss.supply} at {hour}:15"
        )
        controllers: list[tuple[str, Controller, dict[str, int], list[Loss]]] = [
            ("fixed", Fixed(counts[0]), counts[0], []),
            ("scale", ByScaler(Scaler(rules, known, {"chat": guess})), counts[1], []),
            ("scale, lost", ByScaler(Scaler(rules, known, {"chat": guess})), counts[1], [loss]),
            *((f"hpa {x:.0%}", Hpa(rules, target=x), counts[1], []) for x in given.hpa or [0.6, 0.8]),
            ("hpa, lost", Hpa(rules, target=(given.hpa or [0.8])[-1]), counts[1], [loss]),
            ("fixed, lost", Fixed(counts[0]), counts[0], [loss]),
        ]
        fixed: Day | None = None
        for label, controller, start, losses in controllers:
            if given.only and not label.startswith((given.only, "fixed")):
                continue
            spent = time.process_time()
            day = DaySimulator(catalog, fleet, rules, known, controller).run(traffic, start, losses)
            results.append({"day": name, **row(label, day, time.process_time() - spent, fixed)})
            show(results[-1])
            fixed = fixed or day
            if given.json:
                given.json.write_text(json.dumps({"arguments": vars(given) | {"json": ""}, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
