"""What a routing decision costs, in microseconds of CPU.

    python benchmarks/route_speed.py [--rounds 40] [--policy cheapest-meeting-target] [--json]

    decision    `decide` alone, nothing having changed since the last one
    life        `decide`, `start`, `first_token` and `end`: all that a request costs the router, and the views of the
                replicas that it changes, which the next decision makes anew
    prefix      a decision on a prompt of 64 blocks, of which every replica holds half

Least of the rounds: machines are noisy, shared ones by a factor of two. A million additions are timed beside them.
"""

import argparse
import json
import time
from collections.abc import Callable

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Fleet, Pool, ServedClass
from crosstie.core.workload import Target
from crosstie.route.ask import Ask
from crosstie.route.build import live_fleet
from crosstie.route.live import LiveFleet
from crosstie.route.policies import POLICIES, make_policy
from crosstie.route.router import Router

MODEL = "llama-3.1-8b"
KINDS = ("mi300x", "h200", "mi325x", "h100-sxm", "b200", "mi355x", "l40s", "b300")


def fleet_of(catalog: Catalog, pools: int, replicas: int) -> LiveFleet:
    made = tuple(
        Pool(
            name=f"pool-{i}",
            model=MODEL,
            accelerator=KINDS[i],
            parallelism=Parallelism(),
            precision="fp8",
            kv_format="bf16",
            stack="vllm",
            replicas=replicas,
            usd_per_gpu_hour=1.0 + i,
            max_in_flight=64,
            max_context=32_768,
            backends=tuple(f"http://pool-{i}-{k}:8000" for k in range(replicas)),
        )
        for i in range(pools)
    )
    chat = ServedClass(
        name="chat",
        model=MODEL,
        requests_per_s=10.0,
        input_tokens=1000.0,
        output_tokens=200.0,
        ttft=Target(seconds=1.0, percentile=0.95),
        tpot=Target(seconds=0.05, percentile=0.9),
        routes=(),
    )
    fleet = Fleet(name="bench", planned="", policy="cheapest-meeting-target", pools=made, classes=(chat,))
    return live_fleet(catalog, fleet, 0.0)


def ask(prefix: tuple[int, ...] = ()) -> Ask:
    return Ask(
        model=MODEL, class_name="chat", input_tokens=1000.0, output_tokens=200.0, ttft_s=1.0, tpot_s=0.05, prefix=prefix
    )  # fmt: skip


def least_us(rounds: int, times: int, work: Callable[[int], object]) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        for index in range(times):
            work(index)
        best = min(best, time.process_time() - began)
    return 1e6 * best / times


def measure(live: LiveFleet, policy_name: str, rounds: int) -> dict[str, float]:
    router = Router(live, make_policy(policy_name))  # type: ignore[arg-type]
    clock = [1.0]
    # Some load on every replica, so that all parts of a prediction count.
    for replica in live.replicas():
        for _ in range(8):
            decision = Router(live, make_policy("round-robin")).decide(ask(), clock[0])
            assert decision.prediction is not None
            replica.start(ask(), decision.prediction, clock[0]).first_token(clock[0] + 0.05)
    one = ask()

    def life(_: int) -> None:
        clock[0] += 0.01
        now = clock[0]
        decision = router.decide(one, now)
        assert decision.replica is not None
        assert decision.prediction is not None
        flight = decision.replica.start(one, decision.prediction, now)
        flight.first_token(now + 0.03)
        flight.end(now + 0.5, output_tokens=200, input_tokens=1000, completed=True)

    blocks = tuple(range(64))
    for replica in live.replicas():
        replica.prefixes.add(blocks[:32])
    held = ask(blocks)
    return {
        "decision": least_us(rounds, 200, lambda _: router.decide(one, clock[0])),
        "life": least_us(rounds, 100, life),
        "prefix": least_us(rounds, 100, lambda _: router.decide(held, clock[0])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="cheapest-meeting-target")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    catalog = Catalog([])
    found: dict[str, dict[str, float]] = {}
    for pools, replicas in ((2, 2), (8, 4)):
        found[f"{pools} x {replicas}"] = measure(fleet_of(catalog, pools, replicas), options.policy, options.rounds)

    def additions(_: int) -> None:
        total = 0
        for index in range(1_000_000):
            total += index

    spent = least_us(options.rounds, 1, additions) / 1e3
    if options.json:
        print(json.dumps({"policy": options.policy, "us": found, "million_additions_ms": spent}))
        return
    print(f"{options.policy}, us of CPU (a million additions took {spent:.0f} ms)")
    for size, row in found.items():
        print(f"  {size}   " + "   ".join(f"{name} {us:.1f}" for name, us in row.items()))


if __name__ == "__main__":
    main()
