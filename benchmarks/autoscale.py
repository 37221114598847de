"""Scaling by cost over real days, beside a fleet that stays as it is and Kubernetes' autoscaler by utilisation.

    crosstie plan benchmarks/autoscale_workload.toml --json > plan.json
    python benchmarks/autoscale.py --plan plan.json [--json FILE]          every day, traffic as a fluid
    python benchmarks/autoscale.py --plan plan.json --requests --day m-small:1    a day request by request

Days are all that ServeGen has in ten minutes and 24 hours each: fourteen of a language model's clients at Alibaba Cloud
(m-small) and one of DeepSeek-R1's; none is left out. The fixed fleet is what `crosstie plan` buys for the workload,
confirmed by simulation, and each day is scaled so that its busiest hour is the peak that the plan is for. The scaler
knows of a day what the days before it were like, their median, and nothing where there is none. Beside each result
stands the least that there is: the fewest GPUs that carry each ten minutes, had and given back at once, by someone
who knows the day. Starts take what the catalog says, scattered; the scaler's first belief is the same and it learns.
"lost" takes all replicas of the supply with most of them away at the busiest hour, for an hour: nothing starts there.

--requests sends requests at random moments, with lengths of benchmarks/autoscale_workload.toml, to that fleet through
the gateway's own policy. Engines take the time that the performance model predicts: no GPU runs, AMD's or NVIDIA's.

hpa NN   one autoscaler a pool (its documented formula, tolerance and windows: day_simulator.py) that
         holds NN% of what a replica takes as a fluid; with --requests, of its KV cache.
"""

import argparse
import csv
import json
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.core.fleet import Fleet
from crosstie.decide.plan.subject import read_subject
from crosstie_gateway.scaler.capacities import capacities
from crosstie_gateway.scaler.rules import ScaleRules, Supply
from crosstie_gateway.scaler.scaler import Scaler
from day_simulator import (
    ByScaler,
    Controller,
    Day,
    DaySimulator,
    DayTraffic,
    Fixed,
    Hpa,
    Loss,
    day_traffic,
    fewest_gpus,
    fluid_day,
    replicas_for,
)

HERE = Path(__file__).parent
WINDOWS, WINDOW_S = 144, 600
# How many of a pool can be had, over what the plan buys; none more of accelerators that the workload limits.
MORE = 3


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


def rules_for(fleet: Fleet, limited: Collection[str]) -> ScaleRules:
    supplies = [
        Supply(name=one.name, pool=one.name, most=one.replicas * (1 if one.accelerator in limited else MORE))
        for one in fleet.pools
    ]
    return ScaleRules(supplies=tuple(supplies), every_s=60.0, drain_s=600.0)


def row(label: str, day: Day, fixed: tuple[float, float], least: float, spent_s: float) -> dict[str, Any]:
    """`fixed`: GPU-hours and USD of the fleet that stays as it is."""
    hour, worst = day.worst_hour
    of, usd = fixed
    return {
        "label": label, "requests": day.requests.total(), "within": day.share, "worst_hour": hour,
        "worst_hour_within": worst, "refused": day.refused, "gpu_hours": day.gpu_hours,
        "of_fixed": day.gpu_hours / of, "least_of_fixed": least / of, "usd": day.bill.usd,
        "of_fixed_usd": day.bill.usd / usd, "moves": day.bill.moves, "flaps": day.bill.flaps,
        "cpu_s": spent_s,
    }  # fmt: skip


def show(one: dict[str, Any]) -> None:
    print(
        f"  {one['label']:<12}{one['within']:8.2%} within{one['worst_hour_within']:8.1%} at {one['worst_hour']:02d} h"
        f"{one['gpu_hours']:8.1f} GPU-h: {one['of_fixed']:6.1%} of fixed, least {one['least_of_fixed']:.1%}"
        f"{one['of_fixed_usd']:8.1%} of its USD{one['moves']:5d} moves{one['flaps']:3d} flaps{one['cpu_s']:6.0f} s"
    )
    sys.stdout.flush()


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--plan", type=Path, default=HERE / "autoscale_workload.toml", help="saved; else it is made")
    asked.add_argument("--requests", action="store_true", help="one by one, not as a fluid")
    asked.add_argument("--day", action="append", help="MODEL:NUMBER; several; all of them without it")
    asked.add_argument("--hpa", type=float, action="append", help="targets of the autoscaler, shares")
    asked.add_argument("--only", action="append", help="labels such as scale, 'scale lost', 'hpa 80%%'")
    asked.add_argument("--json", type=Path)
    given = asked.parse_args()
    catalog, every = Catalog(), days()
    subject = read_subject(catalog, given.plan)
    fleet, work = subject.fleet, subject.workload
    assert work is not None
    known = capacities(catalog, subject)
    rules = rules_for(fleet, work.constraints.at_most)
    static, carried = {pool.name: pool.replicas for pool in fleet.pools}, work.classes[0].requests_per_s
    results = []
    for name in given.day or [f"{model}:{number}" for model, found in every.items() for number in range(len(found))]:
        model, _, number = name.partition(":")
        real = every[model][int(number)]
        hours = real.reshape(24, 6).mean(axis=1)
        shape, guess = tuple((real / real.max()).tolist()), expected(every[model][: int(number)])
        peak = carried * float(real.max() / hours.max())
        flow: DayTraffic = {"chat": (peak, shape)}
        first = replicas_for(rules, known, flow, 0.0)
        least = sum(fewest_gpus(rules, known, flow)) * 24.0 / WINDOWS
        loss = Loss(max(static, key=lambda one: static[one]), 3600.0 * int(np.argmax(hours)) + 900.0, 3600.0)
        traffic = None
        if given.requests:
            sent = tuple(msgspec.structs.replace(one, requests_per_s=peak) for one in work.classes)
            traffic = day_traffic(msgspec.structs.replace(work, classes=sent), shape, 86_400.0, seed=1)
        print(
            f"{name}: {f'{len(traffic):,} requests, ' if traffic else ''}busiest hour {carried:.1f}/s, mean "
            f"{real.mean() / hours.max():.0%} of that; fixed {static}; forecast from {number if guess else 'no'} days; "
            f"lost: {loss.supply} at {int(np.argmax(hours))}:15"
        )
        shares = given.hpa or [0.6, 0.8]
        controllers: list[tuple[str, Controller, dict[str, int], list[Loss]]] = [
            ("fixed", Fixed(static), static, []),
            ("scale", ByScaler(Scaler(rules, known, {"chat": guess})), first, []),
            *((f"hpa {share:.0%}", Hpa(rules, target=share), first, []) for share in shares),
            ("scale lost", ByScaler(Scaler(rules, known, {"chat": guess})), first, [loss]),
            ("fixed lost", Fixed(static), static, [loss]),
            (f"hpa {shares[-1]:.0%} lost", Hpa(rules, target=shares[-1]), first, [loss]),
        ]
        supplies = [(one, 24.0 * static[one.name]) for one in rules.supplies]
        fixed = (
            sum(known.gpus[one.pool] * hours_had for one, hours_had in supplies),
            sum(known.usd_per_hour(one) * hours_had for one, hours_had in supplies),
        )
        for label, controller, begin, losses in controllers:
            if given.only and label not in given.only:
                continue
            spent = time.process_time()
            if traffic is None:
                day = fluid_day(rules, known, controller, flow, begin, losses=losses)
            else:
                day = DaySimulator(catalog, fleet, rules, known, controller).run(traffic, begin, losses)
            results.append({"day": name, **row(label, day, fixed, least, time.process_time() - spent)})
            show(results[-1])
            if given.json:
                asked_for = {key: str(value) for key, value in vars(given).items() if value}
                given.json.write_text(json.dumps({"arguments": asked_for, "runs": results}, indent=1))


if __name__ == "__main__":
    main()
