"""What routing sessions is worth: policies on the same agents' sessions, as more and more are at work.

    python benchmarks/sessions.py [--only NAME,...] [--policies A,B] [--seeds 2] [--emulated] [--json FILE]

A fleet of three to five replicas gets sessions in a closed loop: each next prompt comes a pause after the last answer
and contains it. `coding` is what the policy was looked at with while it was written; the others have other models,
accelerators, lengths and pauses, and nothing was changed for them.

Beside Crosstie's policies stands `llm-d`: the default scorers of its inference scheduler by their default weights
(prefix cache 3, waiting requests 2, used cache 2; Gateway API inference extension 1.0), the highest sum is taken.
It is told the same of every replica as the others.

A load is sessions at work over those whose mean contexts fit into the fleet's caches. Where a policy begins to thrash
is its first load at which more than a tenth of turns find most of their last prompt gone.

`endless` is the first of them where every replica of a pool finds what any of it computed, in a cache without end that
takes no time: what is left to gain by routing, and by memory.

By default all is simulated, gateway and all. --emulated sends the sessions to a real gateway (`crosstie serve`) over
emulated replicas, at twenty times the clock's pace: prompts and answers are text, sessions are known by it alone, and
hits are the replicas' own counts. No GPU runs in either.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from time import perf_counter, strftime
from typing import Any, ClassVar, NamedTuple, cast

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.sessions import SessionTurn, session_trace
from crosstie.catalog.workloads import read_workload
from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Fleet, Policy, Pool, ServedClass
from crosstie.core.question import USUAL
from crosstie.core.workload import Workload
from crosstie.decide.cost.prices import quote
from crosstie.decide.plan.run_result import SimulatedCase
from crosstie.decide.plan.sweep import RequestSource, one_run
from crosstie.decide.plan.traffic import ClosedTraffic
from crosstie.prove.replay.prompts import Sizing, Wording, text
from crosstie.prove.replay.replay import CHAT, Replay, RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest
from crosstie.route.ask import Ask
from crosstie.route.build import live_fleet
from crosstie.route.decision import Decision
from crosstie.route.filters import available, without_room
from crosstie.route.live import Replica
from crosstie.route.policies import POLICIES
from crosstie.route.policy import Query, RoutingPolicy, predict
from crosstie.route.speed import Prediction
from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie.wire.fetch import fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.start.start import RunningGateway, serve
from routing import Watch

COMPARED = ("cheapest-meeting-target", "least-loaded", "prefix", "llm-d")
ENDLESS = "endless"
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


def asked_of(name: str, policy: str, load: float) -> tuple[Catalog, Fleet, RequestSource, int]:
    catalog = Catalog()
    scenario = SCENARIOS[name]
    workload = workload_of(catalog, scenario)
    fleet = fleet_of(catalog, scenario, workload)
    live = max(round(load * sessions_that_fit(catalog, fleet, workload)), 1)
    if policy == ENDLESS:
        # The quickest that a fleet file may say.
        pools = tuple(msgspec.structs.replace(pool, remote_gib=1e9, remote_gb_per_s=1e4) for pool in fleet.pools)
        fleet = msgspec.structs.replace(fleet, pools=pools)
    return catalog, fleet, RequestSource(workload, sessions=live), live


def measured(name: str, policy: str, load: float, seed: int) -> dict[str, Any]:
    POLICIES.setdefault("llm-d", LlmD)
    catalog, fleet, source, live = asked_of(name, policy, load)
    used = COMPARED[0] if policy == ENDLESS else policy
    run = one_run(catalog, source, SimulatedCase(label=name, fleet=fleet, policy=cast("Policy", used), seed=seed))
    found = run.sessions[0]
    return {
        "scenario": name, "policy": policy, "load": load, "seed": seed, "live": live, "turns_per_s": found.turns_per_s,
        "mean_turn_s": found.mean_turn_s, "p95_turn_s": found.turn_s.p95, "usd_per_session": found.usd_per_session,
        "hit_rate": found.hit_rate, "evicted": found.evicted, "within": run.within, "refused": run.refused,
    }  # fmt: skip


# Through a real gateway

SPEED = 20.0
# Turns that are measured.
TURNS = 600
# What a gateway of its own process has to be told: there `prefix` is llm-d's.
_INSTEAD = """import sys
sys.path.insert(0, {folder!r})
from sessions import LlmD
from crosstie.route.policies import POLICIES
POLICIES["prefix"] = LlmD
open({told!r}, "w").close()
"""


class Agents:
    """Sessions in a closed loop, as `sim.sessions` has them, over HTTP; seconds are emulated ones."""

    def __init__(self, url: str, model: str, traffic: ClosedTraffic, system: float):
        (self.load,) = traffic.loads
        self.url, self.traffic, self.system = url, traffic, round(system)
        self.chance, self.salt = np.random.default_rng(traffic.seed), Random().getrandbits(32)
        self.wording = Wording(model)
        self.numbers = 0
        # When each turn was first asked and answered, of those that were; and when others were asked.
        self.ended: list[tuple[float, float]] = []
        self.asked: dict[int, float] = {}
        self.refused = 0
        self.latest_s = 0.0

    def now(self) -> float:
        return (perf_counter() - self.began) * SPEED

    async def run(self, gateway: RunningGateway) -> tuple[float, dict[str, float]]:
        """The replicas' hit rate while it is measured, and shares of cores."""
        self.began = perf_counter()
        count, ramp_s = self.load.live, self.traffic.ramp_s
        lines = [asyncio.create_task(self._line(ramp_s * (n + self.chance.random()) / count)) for n in range(count)]
        await asyncio.sleep(self.traffic.since_s / SPEED)
        watch, before = Watch(gateway), await cache_counts(gateway)
        await asyncio.sleep(max(self.traffic.span_s - self.now(), 0.0) / SPEED)
        cpu, after = watch.shares(), await cache_counts(gateway)
        for line in lines:
            line.cancel()
        await asyncio.gather(*lines, return_exceptions=True)
        return (after[1] - before[1]) / max(after[0] - before[0], 1.0), cpu

    async def _line(self, at: float) -> None:
        await asyncio.sleep(at / SPEED)
        under_way = True
        while True:
            number = self.numbers = self.numbers + 1
            turns = list(self.load.make(number, self.chance))
            first = int(self.chance.integers(len(turns))) if under_way else 0
            under_way = False
            await self._session(number, turns[first:])

    async def _session(self, number: int, turns: list[SessionTurn]) -> None:
        messages: list[dict[str, str]] = []
        before, conversation = 0, -1
        for place, turn in enumerate(turns):
            await asyncio.sleep(turn.pause_s / SPEED if place else 0.0)
            if turn.conversation != conversation:
                messages = [{"role": "system", "content": self._said(self.system, 0)}]
                before, conversation = self.system, turn.conversation
            own = self._said(max(turn.input_tokens - before, 1), number * 1000 + place + 1)
            messages.append({"role": "user", "content": own})
            messages.append({"role": "assistant", "content": await self._answer(messages, turn)})
            before = turn.input_tokens + turn.output_tokens

    def _said(self, tokens: int, number: int) -> str:
        return text(TimedRequest(0.0, tokens, 1), number, self.salt, Sizing()).decode()

    async def _answer(self, messages: list[dict[str, str]], turn: SessionTurn) -> str:
        part = TimedRequest(0.0, turn.input_tokens, turn.output_tokens, self.load.class_name)
        body, asked, key = self.wording.conversation(messages, turn.output_tokens), self.now(), id(messages)
        self.asked[key] = asked
        while True:
            answers: list[str] = []
            sender = Replay(
                asyncio.get_running_loop(), self.url, self.load.model, speed=SPEED, path=CHAT,
                on_answer=answers.append, body=lambda request, index: body,
            )  # fmt: skip
            outcome: RequestOutcome
            (outcome,) = await sender.run([part])
            self.latest_s = max(self.latest_s, outcome.late_s)
            if outcome.served:
                self.ended.append((self.asked.pop(key), self.now()))
                return answers[0]
            self.refused += 1
            await asyncio.sleep(1.0 / SPEED)


async def cache_counts(gateway: RunningGateway) -> tuple[float, float]:
    """Prompt tokens that all replicas' caches were asked for, and had."""
    found = {"vllm:prefix_cache_queries_total": 0.0, "vllm:prefix_cache_hits_total": 0.0}
    for url in (url for urls in gateway.backends.values() for url in urls):
        origin = Origin(asyncio.get_running_loop(), Address(url))
        page = await fetch(origin, "GET", "/metrics")
        origin.close()
        for line in page.body.decode().splitlines():
            name = line.partition("{")[0]
            if name in found:
                found[name] += float(line.rpartition(" ")[2])
    queries, hits = found.values()
    return queries, hits


def emulated(name: str, policy: str, load: float, seed: int) -> dict[str, Any]:
    _, fleet, source, live = asked_of(name, policy, load)
    pools = tuple(msgspec.structs.replace(pool, backends=()) for pool in fleet.pools)
    traffic = RequestSource(source.workload, sessions=live, requests=TURNS).traffic(fleet, 1.0, seed)
    assert isinstance(traffic, ClosedTraffic)
    assert source.workload is not None
    sessions = source.workload.classes[0].sessions
    assert sessions is not None
    with tempfile.TemporaryDirectory() as folder:
        paths = os.environ.get("PYTHONPATH", "")
        if policy == "llm-d":
            instead = _INSTEAD.format(folder=str(Path(__file__).parent), told=f"{folder}/told")
            Path(folder, "sitecustomize.py").write_text(instead)
            os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (folder, paths)))
        used = cast("Policy", "prefix" if policy == "llm-d" else policy)
        try:
            # The gateway keeps to the clock with how long who has no room may wait.
            serving = msgspec.structs.replace(fleet.serving, queue_s=fleet.serving.queue_s / SPEED)
            whole = msgspec.structs.replace(fleet, pools=pools, serving=serving)
            with serve(whole, emulate=True, speed=SPEED, policy=used) as gateway:
                if policy == "llm-d" and not Path(folder, "told").exists():
                    raise SystemExit("the gateway knows nothing of llm-d: another sitecustomize stands before this one")
                agents = Agents(gateway.url, SCENARIOS[name].model, traffic, sessions.shape.system)
                hit_rate, cpu = run_on_loop(agents.run(gateway))
        finally:
            os.environ["PYTHONPATH"] = paths
    since, until = traffic.since_s, traffic.span_s
    took = [(asked, ended) for asked, ended in agents.ended if since < ended <= until]
    waiting_s = sum(ended - max(asked, since) for asked, ended in took)
    waiting_s += sum(until - max(asked, since) for asked in agents.asked.values() if asked < until)
    rate = len(took) / (until - since)
    return {
        "scenario": name, "policy": policy, "load": load, "seed": seed, "live": live, "turns_per_s": rate,
        "mean_turn_s": waiting_s / len(took), "p95_turn_s": float(np.quantile([b - a for a, b in took], 0.95)),
        "usd_per_session": fleet.usd_per_hour / 3600.0 / rate * agents.load.turns, "hit_rate": hit_rate,
        "refused": agents.refused, "latest_s": agents.latest_s, "cpu": cpu,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(SCENARIOS))
    parser.add_argument("--policies", default=",".join(COMPARED))
    parser.add_argument("--loads", default=",".join(map(str, LOADS)))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--emulated", action="store_true")
    given = parser.parse_args()
    asked = [
        (name, policy, float(load), seed)
        for name in given.only.split(",")
        for load in given.loads.split(",")
        for policy in given.policies.split(",")
        for seed in range(given.seeds)
    ]
    rows = []
    # Emulated ones by turns: two at once would measure this machine.
    with ProcessPoolExecutor(1 if given.emulated else min(os.cpu_count() or 1, 2)) as pool:
        for row in pool.map(emulated if given.emulated else measured, *zip(*asked, strict=True)):
            rows.append(row)
            tell(row)
    if given.json:
        how = "emulated" if given.emulated else "simulated"
        made = {how: "no AMD or NVIDIA GPU ran", "made": strftime("%Y-%m-%d"), "rows": rows}
        given.json.write_text(json.dumps(made, indent=1) + "\n")


def tell(row: dict[str, Any]) -> None:
    beside = f"evicted {row['evicted']:4.0%}" if "evicted" in row else f"CPU {row['cpu']}, {row['latest_s']:.1f} s late"
    print(
        f"{row['scenario']:10} {row['load']:4.1f}x {row['live']:4} {row['policy']:24} {row['turns_per_s']:6.2f} turns/s"
        f"  turn {row['mean_turn_s']:6.2f} s  p95 {row['p95_turn_s'] or 0:6.1f}  ${row['usd_per_session'] or 0:.4f}"
        f"  hit {row['hit_rate']:4.0%}  refused {row['refused']}  {beside}",
    )  # fmt: skip
    sys.stdout.flush()


if __name__ == "__main__":
    main()
