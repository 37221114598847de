"""Plans against a search by simulation: what the planner's fleets cost over the best that was found, and do they hold.

    python benchmarks/plan_suite.py [--only N] [--from N] [--out benchmarks/results/plan_suite.jsonl]
    python benchmarks/plan_suite.py --plan-again        # plans anew, beside what the search found before
    python benchmarks/plan_suite.py --report            # the table of what there is, as Markdown

Workloads are drawn with a fixed seed: dense models and experts, prompts of 200 to 100,000 tokens, outputs of 50 to
4,000, loose and tight targets, 0.5 to 500 requests/s; before them the three cases that plans once got absurdly wrong.
Each is planned (confirmed, by the estimates themselves, GPUs one by one), and searched: for the deployments with the
cheapest closed forms the fewest replicas of one pool that hold in simulation, by halving; then two pools of the best
of them, with a part of the first's replicas. Search and plan count with the same step times. A fleet of the search
holds if the misses of each class are no more than its percentiles allow, with two seeds that the planner does not use;
the plan's is then tried with six more. Lines are added one by one: what is there already is not done again. The search
knows nothing of the planner: where only that has changed, `--plan-again` keeps what was searched.
"""

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from crosstie.catalog.lengths import cut, read_lengths
from crosstie.catalog.library import Catalog
from crosstie.core.workload import Constraints, RequestClass, Target, Workload
from crosstie.decide.plan.answer import PoolPlan, fleet_plan
from crosstie.decide.plan.gate import Gate
from crosstie.decide.plan.market import market
from crosstie.decide.plan.optimise import choice
from crosstie.decide.plan.plan import plan
from crosstie.decide.plan.scaling import scaling_of
from crosstie.decide.plan.solver import solve
from crosstie.decide.plan.survey import of_one_stack, offers, peak_of, surveys
from crosstie.decide.plan.trials import Trials

MODELS = ("llama-3.1-8b", "llama-3.3-70b", "qwen3-32b", "gpt-oss-120b", "deepseek-v3", "llama-3.1-405b")
ACCELERATORS = ("mi300x", "mi355x", "h200", "b200")
SINGLE, PAIRS, SPLITS = 4, 1, (0.5,)
SEARCH_SEEDS, FRESH = (22, 41), (401, 402, 403, 404, 405, 406)
CATALOG = Catalog([])
RESULTS = Path(__file__).parent / "results" / "plan_suite.jsonl"


def request_class(
    model: str, rate: float, inputs: tuple[float, float], outputs: tuple[float, float], ttft: Target, tpot: Target
) -> RequestClass:
    """Lengths: a median, and p95 over it."""
    file = Path(__file__)

    def lengths(key: str, pair: tuple[float, float]) -> Any:
        return read_lengths(file, key, {"median": round(pair[0]), "p95": round(pair[0] * pair[1])})

    context = CATALOG.model(model).max_context or 131_072
    slices = cut(
        np.minimum(lengths("input", inputs), context - 8000.0), np.minimum(lengths("output", outputs), 8000.0),
        paired=False, exempt=ttft.longest_exempt, context=context,
    )  # fmt: skip
    return RequestClass(name="all", model=model, requests_per_s=rate, slices=slices, ttft=ttft, tpot=tpot)


def workloads(count: int = 45) -> list[Workload]:
    chance = np.random.default_rng(16)

    def between(low: float, high: float) -> float:
        return float(np.exp(chance.uniform(np.log(low), np.log(high))))

    def named(name: str, one: RequestClass) -> Workload:
        limits = Constraints(accelerators=ACCELERATORS, whole_nodes=False)
        return Workload(name=name, classes=(one,), sizing="likely", constraints=limits, horizon_years=1)

    def target(seconds: float, percentile: float) -> Target:
        return Target(seconds=seconds, percentile=percentile)

    found = [
        named("405b, tight TPOT", request_class(
            "llama-3.1-405b", 10, (900, 7.8), (300, 6), target(4.0, 0.95), target(0.025, 0.9))),
        named("70b, long prompts", request_class(
            "llama-3.3-70b", 30, (8000, 1.75), (150, 2.7), target(2.0, 0.95), target(0.05, 0.9))),
        named("deepseek-v3, agents", request_class(
            "deepseek-v3", 5, (60_000, 1.8), (500, 4), target(15.0, 0.95), target(0.05, 0.9))),
    ]  # fmt: skip
    while len(found) < count:
        model = MODELS[len(found) % len(MODELS)]
        inputs = between(200, 30_000 if model in ("llama-3.1-405b", "deepseek-v3") else 40_000)
        outputs = between(50, 1500)
        # Large models have less traffic; what a request takes bounds the size of a fleet.
        work = (inputs + 8 * outputs) / 2000.0 * (6.0 if model in ("llama-3.1-405b", "deepseek-v3") else 1.0)
        rate = min(between(0.5, 500), 120.0 / work)
        large = 2.0 if model == "llama-3.1-405b" else 1.0
        ttft = target(large * max(between(0.4, 6.0), inputs / 6000.0), float(chance.choice([0.9, 0.95, 0.99])))
        tpot = target(large * between(0.02, 0.12), float(chance.choice([0.9, 0.95])))
        one = request_class(
            model, max(rate, 0.5), (inputs, between(1.5, 6)), (outputs, between(1.5, 4)), ttft, tpot
        )  # fmt: skip
        found.append(named(f"{len(found):02d} {model}", one))
    return found


class Searched:
    """Fleets of one workload by simulation."""

    def __init__(self, catalog: Catalog, work: Workload):
        self.work = work
        priced = market(catalog, work)
        scaling = scaling_of(work)
        everything = surveys(catalog, work, [item.accelerator for item in priced.items], gate=Gate(catalog, work))
        every = offers(of_one_stack(everything, scaling), scaling, peak=peak_of(work))
        self.asked = choice(every, priced, work)
        self.trials = Trials(catalog, work, work.classes[0].model, scaling, self.asked.peak)
        self.simulations = 0

    def pools(self) -> list[PoolPlan]:
        """The deployments whose closed forms are cheapest, one pool each."""
        problem = self.asked.problem
        usd = (problem.per_request(problem.replica_usd_per_hour) * problem.demand).sum(axis=1)
        found: list[PoolPlan] = []
        for column in np.argsort(usd, kind="stable"):
            if not np.isfinite(usd[column]) or len(found) == SINGLE:
                break
            allowed = np.zeros(len(usd), bool)
            allowed[column] = True
            fleet = solve(self.asked.problem, allowed)
            pool = fleet_plan(self.asked, fleet, self.work).pools[0] if fleet else None
            if pool and all(pool.deployment != other.deployment for other in found):
                found.append(replace(pool, name=f"pool-{len(found)}"))
        return found

    def holds(self, pools: list[PoolPlan], seeds: tuple[int, ...] = SEARCH_SEEDS) -> bool:
        """Over all of them together; one that misses as much as all of them may ends it."""
        self.simulations += len(seeds)
        found = []
        for seed in seeds:
            found.append(self.trials.verdict(pools, seed=seed).worst)
            if sum(found) > len(seeds):
                return False
        return True

    def fewest(self, pool: PoolPlan, beside: list[PoolPlan], most: int) -> int | None:
        """The fewest replicas of a pool that hold, beside others; None where as many as `most` do not."""
        low, high = 0 if beside else int(0.4 * pool.replicas), most
        if not self.holds([*beside, sized(pool, high)]):
            return None
        while high - low > max(high // 25, 1):
            middle = (low + high) // 2
            if middle and self.holds([*beside, sized(pool, middle)]):
                high = middle
            else:
                low = middle
        return high

    def best(self) -> tuple[float, str]:
        found: list[tuple[float, int, PoolPlan]] = []
        for pool in self.pools():
            for times in (1.3, 2.2):
                count = self.fewest(pool, [], max(int(times * pool.replicas), 1))
                if count:
                    found.append((count * each_usd(pool), count, pool))
                    break
        if not found:
            return float("inf"), "none"
        found.sort(key=lambda one: one[0])
        usd, count, pool = found[0]
        best = usd, f"{count} x {pool.deployment.label}"
        for other_usd, _, other in found[1 : 1 + PAIRS]:
            for part in SPLITS:
                first = sized(pool, max(round(part * count), 1))
                left = best[0] * 0.999 - first.replicas * each_usd(pool)
                most = int(left / each_usd(other))
                more = self.fewest(other, [first], most) if most >= 1 and other_usd < 2 * usd else None
                if more:
                    total = first.replicas * each_usd(pool) + more * each_usd(other)
                    if total < best[0]:
                        best = total, f"{first.replicas} x {pool.deployment.label}, {more} x {other.deployment.label}"
        return best


def each_usd(pool: PoolPlan) -> float:
    return pool.usd_per_hour / pool.replicas


def sized(pool: PoolPlan, replicas: int) -> PoolPlan:
    return replace(pool, replicas=replicas, usd_per_hour=each_usd(pool) * replicas)


def planned(catalog: Catalog, search: Searched) -> dict[str, Any]:
    """The plan, and whether it holds with seeds that are not its own."""
    work = search.work
    one = work.classes[0]
    row: dict[str, Any] = {
        "name": work.name, "requests_per_s": round(one.requests_per_s, 2), "input": round(one.input_tokens),
        "output": round(one.output_tokens), "ttft_s": one.ttft and one.ttft.seconds,
        "tpot_s": one.tpot and one.tpot.seconds,
    }  # fmt: skip
    started = time.process_time()
    quick = plan(catalog, work, confirm=False)
    row["quick_cpu_s"] = round(time.process_time() - started, 2)
    if quick.fleet is None:
        return {**row, "plan_usd": None}
    started = time.process_time()
    made = plan(catalog, work, confirm=True)
    assert made.fleet is not None
    row |= {
        "quick_usd": round(quick.usd_per_hour, 2), "plan_usd": round(made.usd_per_hour, 2),
        "plan": ", ".join(f"{pool.replicas} x {pool.deployment.label}" for pool in made.fleet.pools),
        "confirmed": made.confirmed is not None and made.holds, "cpu_s": round(time.process_time() - started, 2),
    }  # fmt: skip
    carrying = [pool for pool in made.fleet.pools if pool.carried]
    return {**row, "held": search.holds(carrying, FRESH)}


def searched(search: Searched) -> dict[str, Any]:
    usd, fleet = search.best()
    return {"best_usd": round(usd, 2) if np.isfinite(usd) else None, "best": fleet, "searched": search.simulations}


def report(rows: list[dict[str, Any]]) -> str:
    ratio = {
        row["name"]: row["plan_usd"] / row["best_usd"] for row in rows if row.get("plan_usd") and row.get("best_usd")
    }
    ranked = sorted(ratio.values())
    planned = [row for row in rows if row.get("plan_usd")]
    held = sum(bool(row["held"]) for row in planned)
    lines = [
        "# Plans against a search by simulation",
        "",
        f"`benchmarks/plan_suite.py`, {len(rows)} workloads; {len(rows) - len(planned)} of them no fleet keeps.",
        f"Cost of the plan over the best fleet found: median {median(ranked):.3f}, "
        f"90th percentile {ranked[int(0.9 * (len(ranked) - 1))]:.3f}, worst {ranked[-1]:.3f}; at most 1.10 in "
        f"{sum(one <= 1.1 for one in ranked) / len(ranked):.0%}. Targets held with fresh seeds in "
        f"{held} of {len(planned)} ({held / len(planned):.0%}).",
        f"CPU seconds of a confirmed plan: median {median(row['cpu_s'] for row in planned):.1f}; quick: "
        f"{median(row['quick_cpu_s'] for row in planned):.1f}.",
        "",
        "| workload | requests/s | input | output | TTFT s | TPOT ms | plan $/h | best $/h | ratio | held | plan | "
        "best found |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---|---|---|",
    ]
    for row in rows:
        if not row.get("plan_usd"):
            lines.append(f"| {row['name']} | {row['requests_per_s']} | {row['input']} | {row['output']} | "
                         f"{row['ttft_s']:.2f} | {row['tpot_s'] * 1e3:.0f} | no fleet | | | | | |")  # fmt: skip
            continue
        times = f"{ratio[row['name']]:.3f}" if row["name"] in ratio else ""
        lines.append(
            f"| {row['name']} | {row['requests_per_s']} | {row['input']} | {row['output']} | {row['ttft_s']:.2f} | "
            f"{row['tpot_s'] * 1e3:.0f} | {row['plan_usd']:.2f} | {row['best_usd'] or 'none'} | {times} | "
            f"{'yes' if row['held'] else 'no'} | {row['plan']} | {row['best']} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, default=1000, help="so many workloads")
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--plan-again", action="store_true")
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args()
    rows = [json.loads(line) for line in asked.out.read_text().splitlines()] if asked.out.exists() else []
    if asked.report:
        target = asked.out.with_suffix(".md")
        target.write_text(report(rows))
        print(target)
        return
    done = {row["name"]: row for row in rows}
    for work in workloads()[asked.first : asked.first + asked.only]:
        before = done.get(work.name)
        if asked.plan_again and before:
            again = planned(CATALOG, Searched(CATALOG, work))
            kept = {key: before.get(key) for key in ("best_usd", "best", "searched")}
            rows[rows.index(before)] = {**again, **kept}
            asked.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
            print(json.dumps(again), flush=True)
            continue
        if before:
            continue
        search = Searched(CATALOG, work)
        row = planned(CATALOG, search)
        row |= searched(search) if row["plan_usd"] else {"best_usd": None}
        with asked.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
