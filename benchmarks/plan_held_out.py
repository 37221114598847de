"""Plans of workloads that nothing was tuned on: do they hold for 60,000 requests by another seed, and are they tight?

    python benchmarks/plan_held_out.py [--only N] [--from N] [--seed S]

From 0.02 to 1,000 requests/s; one to twelve classes, long contexts, two models: seven by hand, and seventeen drawn by
`--seed`. Of each plan: its price; whether it holds whole in a long run whose seed the planner does not use (the planner
simulates a part of a large fleet); and the fleets next to it, a step of the price cheaper in one
pool, of which each should miss by that seed (a cheaper neighbour that holds is what the plan costs too much). With a
hundredth more traffic the price should rise by next to nothing. CPU seconds are divided by a loop of ten million
additions on the same machine.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from crosstie.catalog.lengths import cut, read_lengths
from crosstie.catalog.library import Catalog
from crosstie.core.workload import Constraints, RequestClass, Target, Workload
from crosstie.decide.plan.answer import PoolPlan
from crosstie.decide.plan.plan import Plan, plan
from crosstie.decide.plan.scaling import scaling_of
from crosstie.decide.plan.search import resized
from crosstie.decide.plan.survey import peak_of
from crosstie.decide.plan.trials import LONG, Trials

CATALOG = Catalog([])
SEED = 9241


def a_class(
    name: str, model: str, rate: float, inputs: tuple[int, int], outputs: tuple[int, int],
    ttft: tuple[float, float] | None, tpot: tuple[float, float] | None,
) -> RequestClass:  # fmt: skip
    """Lengths: median and p95; targets: seconds and percentile."""
    targets = [Target(seconds=one[0], percentile=one[1]) if one else None for one in (ttft, tpot)]
    drawn = [
        read_lengths(Path(__file__), key, {"median": pair[0], "p95": pair[1]})
        for key, pair in (("input", inputs), ("output", outputs))
    ]
    context = CATALOG.model(model).max_context or 131_072
    slices = cut(
        np.minimum(drawn[0], context - 8000.0), np.minimum(drawn[1], 8000.0), paired=False,
        exempt=targets[0].longest_exempt if targets[0] else None, context=context,
    )  # fmt: skip
    return RequestClass(name=name, model=model, requests_per_s=rate, slices=slices, ttft=targets[0], tpot=targets[1])


def workloads() -> Iterator[Workload]:
    def named(name: str, *classes: RequestClass, whole: bool = True) -> Workload:
        return Workload(name=name, classes=classes, constraints=Constraints(whole_nodes=whole), horizon_years=1)

    chat, tight = (1.0, 0.95), (0.05, 0.9)
    yield named("0.02/s, 8B", a_class("chat", "llama-3.1-8b", 0.02, (800, 3000), (200, 600), chat, tight))
    yield named("0.3/s, 70B", a_class("chat", "llama-3.3-70b", 0.3, (1500, 6000), (250, 700), chat, tight))
    yield named(
        "floor of TTFT, 70B",
        a_class("chat", "llama-3.3-70b", 10.0, (1200, 4000), (250, 700), (6.0, 0.9), tight),
        a_class("documents", "llama-3.3-70b", 0.4, (30_000, 80_000), (400, 900), (6.0, 0.9), (0.1, 0.9)),
    )
    yield named(
        "two models, 25/s",
        a_class("chat", "qwen3-32b", 20.0, (900, 4000), (300, 900), chat, (0.04, 0.9)),
        a_class("code", "llama-3.1-8b", 5.0, (4000, 16_000), (80, 250), (0.5, 0.95), (0.03, 0.9)),
    )
    chance = np.random.default_rng(73)
    twelve = [
        a_class(
            f"c{n}", "llama-3.3-70b", 4.0, (size := int(chance.integers(300, 6000)), 3 * size),
            (answer := int(chance.integers(80, 500)), 3 * answer),
            (float(chance.choice([0.8, 1.5, 4.0])), 0.9), (float(chance.choice([0.04, 0.06, 0.1])), 0.9),
        )
        for n in range(12)
    ]  # fmt: skip
    yield named("twelve classes, 48/s", *twelve)
    yield named("1,000/s, 8B", a_class("chat", "llama-3.1-8b", 1000.0, (900, 3500), (200, 600), chat, (0.04, 0.9)))
    yield named("100/s, 8B", a_class("chat", "llama-3.1-8b", 100.0, (900, 3500), (200, 600), chat, (0.04, 0.9)))


def drawn(seed: int, count: int = 17) -> Iterator[Workload]:
    """One or two classes of a model at a rate from 0.02 to 1,000 requests/s, evenly in its logarithm; of large models
    less, which would cost millions a year."""
    chance = np.random.default_rng(seed)
    most = {"llama-3.1-8b": 1000.0, "qwen3-32b": 300.0, "llama-3.3-70b": 100.0, "gpt-oss-120b": 300.0}
    for number in range(count):
        model = str(chance.choice(sorted(most)))
        rate = float(np.exp(chance.uniform(np.log(0.02), np.log(most[model]))))
        classes = []
        for place in range(count_of := int(chance.integers(1, 3))):
            size, answer = int(chance.integers(200, 4000)), int(chance.integers(50, 600))
            ttft = float(chance.choice([1.0, 2.0, 4.0])) + size / 2000.0
            targets = (ttft, float(chance.choice([0.9, 0.95]))), (float(chance.choice([0.04, 0.06, 0.1])), 0.9)
            lengths = (size, int(size * chance.uniform(2.0, 4.0))), (answer, int(answer * chance.uniform(1.5, 3.0)))
            classes.append(a_class(f"c{place}", model, rate / count_of, *lengths, *targets))
        whole = bool(chance.random() < 0.5)
        name = f"{number}: {model}, {rate:.3g}/s, {len(classes)} classes" + (", whole nodes" if whole else "")
        yield Workload(name=name, classes=tuple(classes), constraints=Constraints(whole_nodes=whole), horizon_years=1)


class Checked:
    """A plan under arrivals that its planner has not seen."""

    def __init__(self, work: Workload, made: Plan):
        assert made.fleet is not None
        self.work, self.made = work, made
        self.pools = [pool for pool in made.fleet.pools if pool.carried]

    def holds(self, pools: list[PoolPlan]) -> bool:
        return all(
            Trials(CATALOG, self.work, model, scaling_of(self.work), peak_of(self.work), whole=True)
            .verdict([pool for pool in pools if pool.deployment.model.id == model], LONG, SEED)
            .holds
            for model in dict.fromkeys(one.model for one in self.work.classes)
        )

    def cheaper(self) -> Iterator[tuple[float, list[PoolPlan]]]:
        """With one pool smaller by the least that saves money."""
        items = {item.id: item for item in self.made.market.items}

        def usd(pools: list[PoolPlan]) -> float:
            gpus: dict[str, int] = {}
            for pool in pools:
                name = pool.deployment.accelerator.id
                gpus[name] = gpus.get(name, 0) + pool.gpus
            return sum(-(-n // items[name].unit) * items[name].unit * items[name].quote.usd for name, n in gpus.items())

        paid = usd(self.pools)
        for place, pool in enumerate(self.pools):
            for number in range(pool.replicas - 1, 0, -1):
                fewer = [resized(one, number) if k == place else one for k, one in enumerate(self.pools)]
                if usd(fewer) < paid - 1e-9:
                    yield usd(fewer), fewer
                    break


def loop_s() -> float:
    started, total = time.process_time(), 0
    for number in range(10_000_000):
        total += number
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, default=1000, help="so many workloads")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=36)
    asked = parser.parse_args()
    for work in [*workloads(), *drawn(asked.seed)][asked.first : asked.first + asked.only]:
        started = time.process_time()
        made = plan(CATALOG, work, confirm=True)
        spent = time.process_time() - started
        row: dict[str, object] = {"name": work.name, "loops": round(spent / loop_s(), 1)}
        if made.fleet is None:
            print(json.dumps({**row, "plan_usd": None}), flush=True)
            continue
        checked = Checked(made.workload, made)
        tight = [round(usd / made.usd_per_hour, 3) for usd, pools in checked.cheaper() if checked.holds(pools)]
        times = [msgspec.structs.replace(one, requests_per_s=1.01 * one.requests_per_s) for one in work.classes]
        again = plan(CATALOG, msgspec.structs.replace(work, classes=tuple(times)), confirm=True)
        row |= {
            "plan_usd": round(made.usd_per_hour, 2), "confirmed": made.confirmed is not None and made.holds,
            "gpus": made.gpus, "held": checked.holds(checked.pools), "cheaper_that_hold": tight,
            "one_percent_more": round(again.usd_per_hour / made.usd_per_hour, 3),
            "alone": {name: one and round(one.usd_per_hour, 2) for name, one in made.single_vendor.items()},
        }  # fmt: skip
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
