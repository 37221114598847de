"""Pairs of questions of which one cannot cost more than the other: more traffic never less, looser targets, one more
accelerator and a price cut never more.

    python benchmarks/plan_laws.py [--pairs 60] [--from 0] [--seed 7]

Workloads are drawn as in `plan_held_out.py`, on two or three accelerators; both plans are confirmed. A pair is the
wrong way where it is so by more than the planner's own tolerance.
"""

import argparse
import json
import time

import msgspec
import numpy as np

from crosstie.core.workload import Target, Workload
from crosstie.decide.plan.market import adjusted
from crosstie.decide.plan.plan import plan
from crosstie.decide.plan.search import TOLERANCE
from plan_held_out import CATALOG, drawn, loop_s

_ACCELERATORS = ("mi300x", "mi355x", "h100-sxm", "h200", "b200", "l40s", "gh200", "rtx-pro-6000")
_replaced = msgspec.structs.replace


def _looser(target: Target | None, times: float) -> Target | None:
    return target and _replaced(target, seconds=target.seconds * times)


def dear_and_cheap(work: Workload, names: list[str], law: int, times: float) -> tuple[str, Workload, Workload]:
    """The law, the workload that cannot cost less, and the other."""
    on = adjusted(work, accelerators=names)
    if law == 0:
        more = tuple(_replaced(one, requests_per_s=one.requests_per_s * times) for one in work.classes)
        return "more traffic", _replaced(on, classes=more), on
    if law == 1:
        loose = tuple(
            _replaced(one, ttft=_looser(one.ttft, times), tpot=_looser(one.tpot, times)) for one in on.classes
        )
        return "looser targets", on, _replaced(on, classes=loose)
    if law == 2:
        return "one more accelerator", adjusted(work, accelerators=names[:-1]), on
    return "a price cut", on, adjusted(on, discount={names[0]: 1.0 - 1.0 / times})


def usd_per_hour(work: Workload) -> float:
    """Without end where no fleet holds."""
    made = plan(CATALOG, work, confirm=True)
    return made.usd_per_hour if made.fleet is not None and made.holds else float("inf")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=7)
    asked = parser.parse_args()
    chance = np.random.default_rng(asked.seed)
    wrong = 0
    for number, work in enumerate(drawn(asked.seed, asked.pairs)):
        names = [str(name) for name in chance.choice(_ACCELERATORS, 3, replace=False)]
        law, dear, cheap = dear_and_cheap(work, names, number % 4, float(chance.uniform(1.05, 1.6)))
        if number < asked.first:
            continue
        started = time.process_time()
        more, less = usd_per_hour(dear), usd_per_hour(cheap)
        holds = less <= more * (1.0 + TOLERANCE)
        wrong += not holds
        loops = round((time.process_time() - started) / loop_s(), 1)
        row = {"law": law, "work": work.name, "on": names, "dear": more, "cheap": less, "holds": holds, "loops": loops}
        print(json.dumps(row), flush=True)
    print(f"{wrong} the wrong way")


if __name__ == "__main__":
    main()
