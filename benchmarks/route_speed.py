"""What routing costs, in microseconds of CPU.

    python benchmarks/route_speed.py [--sizes 2x2,8x4,20x50] [--rounds 5] [--policy cheapest-meeting-target] [--json]

    decision    `decide` alone, nothing having changed since the last one
    prefix      a decision on a prompt of 64 blocks, of which every replica holds half
    served      all that a request costs the router of a gateway that has 500 of them a second: `decide`, `start`,
                `first_token`, `end`, what others change meanwhile, and views that grow old. Prompts have 16 blocks: 8
                that all share, 8 of one of as many conversations as there are replicas
    shared      the decisions of `served` alone, where 11 other gateways have as many and their load is shared: what the
                router reads of the board (its `share`) is in it, what whoever listens to Redis writes there is not
    late        a decision that finds nobody within the target, and waits
    full        a decision that finds nobody with room, and waits

Sizes are pools x replicas of each. Least of the rounds: machines are noisy. Ten million additions in plain Python are
timed before and after: 0.45 s on the quiet machine that docs/notes/internet-scale.md speaks of.
"""

import argparse
import json
import time
from collections import deque
from collections.abc import Callable

from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Fleet, Pool, ServedClass
from crosstie.core.workload import Target
from crosstie.route import cheapest
from crosstie.route.ask import Ask
from crosstie.route.build import live_fleet
from crosstie.route.live import LiveFleet
from crosstie.route.policies import POLICIES, make_policy
from crosstie.route.policy import predict
from crosstie.route.router import Router
from crosstie_gateway.share.board import Board, Cell

MODEL = "llama-3.1-8b"
KINDS = ("mi300x", "h200", "mi325x", "h100-sxm", "b200", "mi355x", "l40s", "b300")
# Of one gateway process: requests a second, and how long each lasts.
RATE, FIRST_S, LAST_S = 500.0, 0.1, 4.0
SIZES = "2x2,8x4,20x5,20x50,20x150"
QUIET_S = 0.45


def fleet_of(catalog: Catalog, pools: int, replicas: int) -> LiveFleet:
    made = tuple(
        Pool(
            name=f"pool-{i}",
            model=MODEL,
            accelerator=KINDS[i % len(KINDS)],
            parallelism=Parallelism(),
            precision="fp8",
            kv_format="bf16",
            stack="vllm",
            replicas=replicas,
            usd_per_gpu_hour=1.0 + i % len(KINDS),
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


def ask(prefix: tuple[int, ...] = (), **more: object) -> Ask:
    said: dict[str, object] = {"ttft_s": 1.0, "tpot_s": 0.05, **more}
    return Ask(model=MODEL, class_name="chat", input_tokens=1000.0, output_tokens=200.0, prefix=prefix, **said)  # type: ignore[arg-type]


def least_us(rounds: int, times: int, work: Callable[[int], object]) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        for index in range(times):
            work(index)
        best = min(best, time.process_time() - began)
    return 1e6 * best / times


def load(live: LiveFleet, each: int, now: float) -> None:
    """Some on every replica, so that all parts of a prediction count."""
    for replica in live.replicas():
        replica.advance(now)
        for _ in range(each):
            replica.start(ask(), predict(live, replica, ask()), now).first_token(now + 0.05)


class Others:
    """What other gateways have on the replicas, on the board: each of their requests changes it three times."""

    def __init__(self, live: LiveFleet, router: Router, gateways: int):
        board, keys = Board(1), [one.key for one in live.replicas()]
        router.share(dict(board.cells(keys, 0)))
        self.board, self.cells, self.at = board, list[Cell](board.cells(keys, 1).values()), 0
        for cell in self.cells:
            self._write(cell, 1.0)
        self.each = 3 * gateways

    def _write(self, cell: Cell, now: float) -> None:
        cell.write(4, 1, 900.0, 4000.0, 3500.0, 3000.0, now, 1.0, 20.0)

    def step(self, now: float) -> None:
        self.board.heard()
        for _ in range(self.each):
            self.at = (self.at + 7919) % len(self.cells)
            self._write(self.cells[self.at], now)


class Traffic:
    """A gateway's requests, each at a moment of its own."""

    def __init__(self, live: LiveFleet, router: Router, now: float):
        self.router, self.now = router, now
        self.others: Others | None = None
        self.spent_s = 0.0
        self.conversations = len(live.replicas())
        self.begun: deque[object] = deque()
        self.decoding: deque[object] = deque()

    def step(self, index: int) -> None:
        self.now += 1.0 / RATE
        now, number = self.now, (index * 7919) % self.conversations
        prefix = (1, 2, 3, 4, 5, 6, 7, 8, *range(100 * number + 1000, 100 * number + 1008))
        one = ask(prefix, session=f"s{number}", patience_s=30.0)
        if self.others is not None:
            self.others.step(now)
        began = time.process_time()
        decision = self.router.decide(one, now)
        self.spent_s += time.process_time() - began
        if decision.replica is not None and decision.prediction is not None:
            self.begun.append(decision.replica.start(one, decision.prediction, now))
        while len(self.begun) > RATE * FIRST_S:
            flight = self.begun.popleft()
            flight.first_token(now)  # type: ignore[attr-defined]
            self.decoding.append(flight)
        while len(self.decoding) > RATE * LAST_S:
            self.decoding.popleft().end(now, output_tokens=200, input_tokens=1000, completed=True)  # type: ignore[attr-defined]


def measure(catalog: Catalog, size: tuple[int, int], policy_name: str, rounds: int, times: int) -> dict[str, float]:
    live = fleet_of(catalog, *size)
    router = Router(live, make_policy(policy_name))  # type: ignore[arg-type]
    load(live, 4, 1.0)
    one, now, found = ask(), 1.0, {}
    router.decide(one, now)
    found["decision"] = least_us(rounds, times, lambda _: router.decide(one, now))
    traffic = Traffic(live, router, now)
    # Until as many have begun as end.
    for index in range(int(RATE * (FIRST_S + LAST_S)) + 100):
        traffic.step(index)
    found["served"] = least_us(rounds, 2 * times, traffic.step)
    traffic.others = Others(live, router, 11)
    found["shared"] = float("inf")
    for _ in range(rounds):
        traffic.spent_s = 0.0
        for index in range(2 * times):
            traffic.step(index)
        found["shared"] = min(found["shared"], 1e6 * traffic.spent_s / (2 * times))
    router.share({})
    now = traffic.now
    blocks = tuple(range(10**9, 10**9 + 64))
    for replica in live.replicas():
        replica.prefixes.add(blocks[:32])
    held = ask(blocks)
    found["prefix"] = least_us(rounds, times, lambda _: router.decide(held, now))
    late = ask(ttft_s=1e-4, tpot_s=1e-4, patience_s=30.0)
    found["late"] = least_us(rounds, times, lambda _: router.decide(late, now))
    for replica in live.replicas():
        replica.busy_until = now + 1e9
    found["full"] = least_us(rounds, times, lambda _: router.decide(one, now))
    return found


def least_s(work: Callable[[], object], rounds: int = 5) -> float:
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        work()
        best = min(best, time.process_time() - began)
    return best


def additions_s() -> float:
    began = time.process_time()
    total = 0
    for index in range(10_000_000):
        total += index
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", default=SIZES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--policy", choices=sorted(POLICIES), default="cheapest-meeting-target")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    catalog = Catalog([])
    compiled = not cheapest.__file__.endswith(".py")
    rows = []
    before = additions_s()
    for size in options.sizes.split(","):
        pools, replicas = (int(part) for part in size.split("x"))
        us = measure(catalog, (pools, replicas), options.policy, options.rounds, options.times)
        after = additions_s()
        slower = 0.5 * (before + after) / QUIET_S
        rows.append(
            {"pools": pools, "replicas": pools * replicas, "us": us, "ten_million_additions_s": [before, after]}
        )
        before = after
        if not options.json:
            made = "compiled" if compiled else "plain Python"
            told = "   ".join(f"{name} {one:.0f} ({one / slower:.0f})" for name, one in us.items())
            print(f"{pools * replicas:>5} in {pools:>2}, {made}, additions {after:.2f} s: {told}", flush=True)
    if options.json:
        print(json.dumps({"policy": options.policy, "compiled": compiled, "rows": rows}))
    else:
        print("us of CPU here (in brackets: divided by how much slower the additions were than on the quiet machine)")


if __name__ == "__main__":
    main()
