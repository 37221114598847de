"""What routing sessions is worth: policies on the same agents' sessions, simulated, as more and more are at work.

    python benchmarks/sessions.py [--only NAME,...] [--policies A,B] [--seeds 2] [--json FILE]

A fleet of three to five replicas gets sessions in a closed loop: each next prompt comes a pause after the last answer
and contains it. `coding` is what the policy was looked at with while it was written; the others have other models,
accelerators, lengths and pauses, and nothing was changed for them.

Beside Crosstie's policies stands `llm-d`: the default scorers of its inference scheduler by their default weights
(prefix cache 3, waiting requests 2, used cache 2; Gateway API inference extension 1.0), the highest sum is taken.
It is told the same of every replica as the others.

A load is sessions at work over those whose mean contexts fit into the fleet's caches. Where a policy begins to thrash
is its first load at which more than a tenth of turns find most of their last prompt gone.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, cast

from crosstie.catalog.library import Catalog
from crosstie.catalog.sessions import session_trace
from crosstie.catalog.workloads import read_workload
from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Fleet, Policy, Pool, ServedClass
from crosstie.core.question import USUAL
from crosstie.core.workload import Workload
from crosstie.decide.cost.prices import quote
from crosstie.decide.plan.run_result import SimulatedCase
from crosstie.decide.plan.sweep import RequestSource, one_run
from crosstie.route.ask import Ask
from crosstie.route.build import live_fleet
from crosstie.route.decision import Decision
from crosstie.route.filters import available, without_room
from crosstie.route.live import Replica
from crosstie.route.policies import POLICIES
from crosstie.route.policy import Query, RoutingPolicy, predict
from crosstie.route.speed import Prediction

COMPARED = ("cheapest-meeting-target", "least-loaded", "prefix", "llm-d")
LOADS = (0.6, 0.8, 1.0, 1.2, 1.5, 2.0)
# Turns that find most of their last prompt gone, from which on a policy is said to thrash.
THRASHING = 0.1


class LlmD(RoutingPolicy):
    """Weighted scores from 0 to 1 of each replica: held share of the prompt, how few wait, how empty its cache is."""

    name: ClassVar[Policy] = cast("Policy", "llm-d")

    def pick(self, query: Query) -> Decision:
        able = [one for pool in query.pools for one in available(pool, query.now, query.exclude, query.panic)]
        if not able:
            return without_room(query.pools, query.now, query.exclude)
        waiting = [one.waiting for one in able]
        least, most = min(waiting), max(waiting)

        def scored(replica: Replica) -> float:
            blocks = len(query.ask.prefix)
            held = replica.prefixes.match(query.ask.prefix) / blocks if blocks else 0.0
            queue = (most - replica.waiting) / (most - least) if most > least else 1.0
            used = min(replica.held_tokens / replica.pool.speed.cache_tokens, 1.0)
            return 3.0 * held + 2.0 * queue + 2.0 * (1.0 - used)

        self._turn += 1
        start = self._turn % len(able)
        chosen = max(able[start:] + able[:start], key=scored)
        return Decision("send", "highest score", replica=chosen, prediction=predict(query.fleet, chosen, query.ask),
                        told=query.ask)  # fmt: skip

    def score(self, replica: Replica, predicted: Prediction, ask: Ask) -> float:
        return 0.0


class Scenario(NamedTuple):
    model: str
    # By accelerator: replicas and GPUs of each.
    pools: dict[str, tuple[int, int]]
    sessions: str
    ttft_ms: float = 5000.0
    tpot_ms: float = 80.0
    max_context: int = 131_072


SCENARIOS = {
    "coding": Scenario(
        "llama-3.3-70b", {"h200": (4, 2)},
        "turns = { mean = 20, p90 = 40 }\nsystem = 6000\nfirst = { mean = 3000, p90 = 6000 }\n"
        "added = { mean = 1800, p90 = 3600 }\noutput = { mean = 300, p90 = 600 }\npause_s = { mean = 10, p90 = 22 }\n"
        "context = 100000\n",
    ),
    "research": Scenario(
        "gpt-oss-120b", {"mi300x": (3, 1)},
        "turns = { mean = 40, p90 = 80 }\nsystem = 12000\nfirst = { mean = 8000, p90 = 15000 }\n"
        "added = { mean = 4000, p90 = 8000 }\noutput = { mean = 600, p90 = 1200 }\npause_s = { mean = 25, p90 = 50 }\n"
        "context = 120000\n",
        max_context=131_072,
    ),
    "mixed": Scenario(
        "llama-3.3-70b", {"mi300x": (2, 2), "h200": (2, 2)},
        "turns = { mean = 30, p90 = 60 }\nsystem = 9000\nfirst = { mean = 5000, p90 = 11000 }\n"
        "added = { mean = 2500, p90 = 5000 }\noutput = { mean = 200, p90 = 400 }\npause_s = { mean = 6, p90 = 13 }\n"
        "context = 120000\n",
    ),
}  # fmt: skip


def workload_of(catalog: Catalog, scenario: Scenario) -> Workload:
    content = (
        f'[[class]]\nname = "agents"\nmodel = "{scenario.model}"\nttft_ms = {{ p95 = {scenario.ttft_ms} }}\n'
        f"tpot_ms = {{ p90 = {scenario.tpot_ms} }}\n[class.sessions]\nlive = 1\n{scenario.sessions}"
    )
    return read_workload(catalog, Path("sessions.toml"), content)


def fleet_of(catalog: Catalog, scenario: Scenario, workload: Workload) -> Fleet:
    one = workload.classes[0]
    prices = {name: quote(catalog.prices, name, USUAL.price) for name in scenario.pools}
    pools = tuple(
        Pool(
            name=name, model=scenario.model, accelerator=name, parallelism=Parallelism(tp=gpus), precision="fp8",
            kv_format="bf16", stack="vllm", replicas=count, max_in_flight=256, max_context=scenario.max_context,
            usd_per_gpu_hour=price.usd,
            backends=tuple(f"http://{name}-{number}" for number in range(count)),
        )
        for name, (count, gpus) in scenario.pools.items()
        if (price := prices[name]) is not None
    )  # fmt: skip
    served = ServedClass(
        name=one.name, model=one.model, requests_per_s=one.requests_per_s, input_tokens=one.input_tokens,
        output_tokens=one.output_tokens, ttft=one.ttft, tpot=one.tpot,
    )  # fmt: skip
    return Fleet(name="sessions", planned="", policy="cheapest-meeting-target", pools=pools, classes=(served,))


def sessions_that_fit(catalog: Catalog, fleet: Fleet, workload: Workload) -> float:
    one = workload.classes[0]
    assert one.sessions is not None
    trace, _ = session_trace(one.name, one.sessions.shape, one.sessions.answer_s)
    shared = one.sessions.shape.system
    each = float((trace.input_tokens + trace.output_tokens).mean()) - shared
    live = live_fleet(catalog, fleet, 0.0)
    return sum((pool.speed.cache_tokens - shared) / each * len(pool.replicas) for pool in live.pools)


def measured(name: str, policy: str, load: float, seed: int) -> dict[str, Any]:
    POLICIES.setdefault("llm-d", LlmD)
    catalog = Catalog()
    scenario = SCENARIOS[name]
    workload = workload_of(catalog, scenario)
    fleet = fleet_of(catalog, scenario, workload)
    live = max(round(load * sessions_that_fit(catalog, fleet, workload)), 1)
    case = SimulatedCase(label=name, fleet=fleet, policy=cast("Policy", policy), seed=seed)
    run = one_run(catalog, RequestSource(workload, sessions=live), case)
    found = run.sessions[0]
    return {
        "scenario": name, "policy": policy, "load": load, "seed": seed, "live": live, "turns_per_s": found.turns_per_s,
        "mean_turn_s": found.mean_turn_s, "p95_turn_s": found.turn_s.p95, "usd_per_session": found.usd_per_session,
        "hit_rate": found.hit_rate, "evicted": found.evicted, "within": run.within, "refused": run.refused,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCENARIOS))
    parser.add_argument("--policies", default=",".join(COMPARED))
    parser.add_argument("--loads", default=",".join(map(str, LOADS)))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    asked = [
        (name, policy, float(load), seed)
        for name in given.only.split(",")
        for load in given.loads.split(",")
        for policy in given.policies.split(",")
        for seed in range(given.seeds)
    ]
    rows = []
    with ProcessPoolExecutor(min(os.cpu_count() or 1, 2)) as pool:
        for row in pool.map(measured, *zip(*asked, strict=True)):
            rows.append(row)
            tell(row)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


def tell(row: dict[str, Any]) -> None:
    print(
        f"{row['scenario']:10} {row['load']:4.1f}x {row['live']:4} {row['policy']:24} {row['turns_per_s']:6.2f} turns/s"
        f"  turn {row['mean_turn_s']:6.2f} s  p95 {row['p95_turn_s'] or 0:6.1f}  ${row['usd_per_session'] or 0:.4f}"
        f"  hit {row['hit_rate']:4.0%}  evicted {row['evicted']:4.0%}  refused {row['refused']}",
    )  # fmt: skip
    sys.stdout.flush()


if __name__ == "__main__":
    main()
