"""What routing is worth: policies on the same emulated fleet, with the same recorded requests.

    python benchmarks/routing.py [--quick] [--rounds 3] [--json benchmarks/results/routing.json]

mixed    the fleet that `crosstie plan benchmarks/routing.toml` gives (MI300X and H200), with requests of three public
         traces at 0.5, 0.8 and 1.0 of the rates that it was planned for: share of requests within their targets,
         USD a million tokens as the gateway attributes them, and the fleet's whole bill over the tokens that were
         served within targets. Chat and documents come at their recorded times, stretched to the rate; code comes
         at random ones, because its trace has bursts with sixty times Poisson's variance, for which no fleet is planned
         by a rate. Documents share the beginnings that their trace says they share; their times, recorded in steps of
         three seconds, are spread within those.
pair     two replicas that are alike on paper, one of which takes five times as long. A closed loop of clients:
         requests/s over the best that any split of the clients could reach by the performance model.
prefix   the same pair, every prompt with one long beginning, which the slow one holds first: what it gets to serve.

All replicas are emulated: no AMD or NVIDIA GPU runs. Seconds are emulated ones; CPU shares say whether this machine
kept up (a process near 100% would measure the machine and not the routing). Where the client itself sent requests
late, the machine stood still for a while, which the emulation counts as so many times as long: such a run is repeated,
whatever it showed, and the number of repeats is kept. Runs of the same requests differ even so, by a few points near
full load: what is shown is the median of the rounds, and how far they spread. --quick is one round, and ends before
the pair's slowness has been learnt.
"""

import argparse
import asyncio
import contextlib
import json
import os
import resource
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import find_trace, read_trace
from crosstie.catalog.workloads import read_workload
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.fleet import Fleet, Policy, Pool
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.plan import plan as make_plan
from crosstie.perf.estimate import estimate
from crosstie.prove.bench.bench import replayed
from crosstie.prove.replay.prompts import Sizing, text
from crosstie.prove.replay.replay import Replay, RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest, from_trace, merged
from crosstie.wire.address import Address
from crosstie.wire.client import Origin
from crosstie.wire.fetch import fetch
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.start.start import RunningGateway, serve

POLICIES: tuple[Policy, ...] = ("cheapest-meeting-target", "round-robin", "least-loaded", "prefix")
TRACES = {"chat": "azure-2023-conversation", "code": "azure-2023-code", "documents": "mooncake-conversation"}
MODEL = "llama-3.3-70b"
# The pair: clients, lengths, and how much slower one of the two is.
CLIENTS, INPUT, OUTPUT, SLOWER = 32, 512, 128, 5.0
# One beginning of 4,096 tokens for all, as a system prompt with documents would be.
SHARED = tuple(range(8))
# How often a run is repeated during which this machine stood still.
REPEATS = 3


def cpu_s(pid: int) -> dict[str, float]:
    """Seconds of CPU that a gateway and its emulation have used; empty where the system does not say."""

    def used(one: str | int) -> float:
        # The name may have spaces and brackets; what follows the last bracket has none.
        fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    found = {}
    with contextlib.suppress(OSError, IndexError, ValueError):
        found["gateway"] = used(pid)
        found["emulation"] = sum(map(used, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return found


class Watch:
    """Shares of a core that client, gateway and emulation use."""

    def __init__(self, gateway: RunningGateway):
        self._gateway = gateway
        self._before, self._began = self._now(), time.monotonic()

    def _now(self) -> dict[str, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return {"client": used.ru_utime + used.ru_stime, **cpu_s(self._gateway.process.pid)}

    def shares(self) -> dict[str, float]:
        wall = time.monotonic() - self._began
        return {name: round((used - self._before[name]) / wall, 3) for name, used in self._now().items()}


def mixed(
    catalog: Catalog, folder: Path, speed: float, seconds: float, loads: tuple[float, ...], rounds: int
) -> dict[str, Any]:
    fleet = fleet_of(make_plan(catalog, read_workload(catalog, Path(__file__).with_name("routing.toml"))))
    file = folder / "mixed.toml"
    file.write_text(fleet_text(fleet))
    rows = []
    # Round by round, so that a busy hour of the machine meets every policy.
    for _ in range(rounds):
        for load in loads:
            requests = recorded(fleet, seconds, load)
            rows += [undisturbed(fleet, file, requests, policy, speed, load) for policy in POLICIES]
    pools = {
        pool.name: f"{pool.replicas} x ({pool.parallelism.gpus} {pool.accelerator})" for pool in fleet.pools
    }  # fmt: skip
    return {"fleet": pools, "usd_per_hour": fleet.usd_per_hour, "seconds": seconds, "rows": rows}


def undisturbed(
    fleet: Fleet, file: Path, requests: list[TimedRequest], policy: Policy, speed: float, load: float
) -> dict[str, Any]:
    repeat = 0
    while True:
        row = {"load": load, **one_run(fleet, file, requests, policy, speed), "repeats": repeat}
        tell_mixed(row)
        if not row["disturbed"] or repeat == REPEATS:
            return row
        repeat += 1


def recorded(fleet: Fleet, seconds: float, load: float) -> list[TimedRequest]:
    longest = min(pool.max_context for pool in fleet.pools)
    return merged(*(
        from_trace(
            read_trace(find_trace(TRACES[one.name], Path())), class_name=one.name, longest=longest,
            requests_per_s=load * one.requests_per_s, seconds=seconds, own_times=one.name != "code",
        )
        for one in fleet.classes
    ))  # fmt: skip


def one_run(fleet: Fleet, file: Path, requests: list[TimedRequest], policy: Policy, speed: float) -> dict[str, Any]:
    with serve(file, emulate=True, speed=speed, policy=policy) as gateway:
        watch = Watch(gateway)
        result = replayed(gateway.url, MODEL, requests, fleet, speed=speed)
        cpu = watch.shares()
    return {
        "policy": policy,
        "requests": result.requests,
        "failed": result.failed,
        "within_target": result.kept,
        "by_class": {one.seen.name: one.kept for one in result.classes},
        "ttft_p95_s": {one.seen.name: one.seen.ttft_s.p95 for one in result.classes},
        "tpot_p90_s": {one.seen.name: one.seen.tpot_s.p90 for one in result.classes},
        "usd_per_million_attributed": result.attributed_usd_per_million_tokens,
        "usd_per_million_good": result.fleet_usd_per_million_tokens_within_target,
        "requests_by_pool": {one.name: one.requests for one in result.pools},
        "client_latest_s": result.client.latest_s,
        "disturbed": result.disturbed,
        "cpu": cpu,
    }


def tell_mixed(row: dict[str, Any]) -> None:
    classes = "  ".join(f"{name} {kept:6.1%}" for name, kept in row["by_class"].items())
    cpu = ", ".join(f"{name} {used:.0%}" for name, used in row["cpu"].items())
    print(
        f"{row['load']:.1f}x  {row['policy']:24} {row['within_target']:6.1%} within target  {classes}"
        f"  ${row['usd_per_million_attributed']:.3f}/M attributed  ${row['usd_per_million_good']:.3f}/M good"
        f"  {row['failed']} failed  (CPU {cpu}; latest request {row['client_latest_s']:.2f} s late)",
        flush=True,
    )


# The pair


def pair_fleet(catalog: Catalog) -> tuple[Fleet, Deployment]:
    usual = Pool(
        name="fast", model=MODEL, accelerator="mi300x", parallelism=Parallelism(), precision="fp8", kv_format="bf16",
        stack="vllm", replicas=1, usd_per_gpu_hour=1.3, max_in_flight=2 * CLIENTS, max_context=32_768,
    )  # fmt: skip
    slow = Pool(**{**{key: getattr(usual, key) for key in usual.__struct_fields__}, "name": "slow"})
    deployment = catalog.deployment(
        catalog.model(MODEL), catalog.accelerator("mi300x"), usual.parallelism, "fp8", "bf16", "vllm"
    )
    return Fleet(name="pair", planned="", policy="round-robin", pools=(usual, slow), classes=()), deployment


def ideal_requests_per_s(deployment: Deployment) -> float:
    """The best split of the clients between the two, by the performance model."""

    def rate(clients: int) -> float:
        if not clients:
            return 0.0
        found = estimate(deployment, concurrency=clients, input_tokens=INPUT, output_tokens=OUTPUT)
        return found.requests_per_s

    return max(rate(fast) + rate(CLIENTS - fast) / SLOWER for fast in range(CLIENTS + 1))


def pair(catalog: Catalog, folder: Path, speed: float, count: int) -> dict[str, Any]:
    fleet, deployment = pair_fleet(catalog)
    file = folder / "pair.toml"
    file.write_text(fleet_text(fleet))
    ideal = ideal_requests_per_s(deployment)
    rows = []
    for shared in (False, True):
        for policy in POLICIES:
            with serve(file, emulate=True, speed=speed, policy=policy) as gateway:
                outcomes, cpu = run_on_loop(closed_loop(gateway, speed, count, shared))
            rows.append({"policy": policy, "shared_prefix": shared, **throughput(outcomes, ideal), "cpu": cpu})
            tell_pair(rows[-1])
    return {"clients": CLIENTS, "slower": SLOWER, "ideal_requests_per_s": ideal, "rows": rows}


async def closed_loop(
    gateway: RunningGateway, speed: float, count: int, shared: bool
) -> tuple[list[RequestOutcome], dict[str, float]]:
    loop = asyncio.get_running_loop()
    slow = Origin(loop, Address(gateway.backends["slow"][0]))
    fault = json.dumps({"kind": "slow", "factor": SLOWER}).encode()
    answer = await fetch(slow, "POST", "/emulate/fault", body=fault)
    slow.close()
    if answer.status != 200:
        raise SystemExit(f"the fault was refused: {answer.body.decode()}")
    blocks, tokens = (SHARED, 512 * len(SHARED) + INPUT) if shared else ((), INPUT)
    asked = TimedRequest(0.0, tokens, OUTPUT, None, blocks)
    if shared:
        await hold_prefix_on_slow(gateway, asked)
    watch = Watch(gateway)
    # All due at once and so many at a time: a closed loop.
    outcomes = await Replay(loop, gateway.url, MODEL, speed=speed, most_in_flight=CLIENTS).run([asked] * count)
    return outcomes, watch.shares()


async def hold_prefix_on_slow(gateway: RunningGateway, asked: TimedRequest) -> None:
    filler = text(asked, 10**6, 0, Sizing()).decode()
    body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": filler}]}
    origin = Origin(asyncio.get_running_loop(), Address(gateway.url))
    headers = [(b"x-crosstie-pool", b"slow"), (b"content-type", b"application/json")]
    answer = await fetch(
        origin, "POST", "/v1/chat/completions", headers=headers, body=json.dumps(body).encode(), timeout_s=30.0
    )
    origin.close()
    if answer.status != 200:
        raise SystemExit(f"the first request failed: {answer.body.decode()}")


def ended_s(outcome: RequestOutcome) -> float:
    return outcome.due_s + outcome.e2e_s


def throughput(outcomes: list[RequestOutcome], ideal: float) -> dict[str, Any]:
    """Over the middle of the run: the first requests find the pair empty and the last leave it so."""
    ends = sorted(ended_s(one) for one in outcomes if one.served)
    first, last = len(ends) // 4, 3 * len(ends) // 4
    rate = (last - first) / (ends[last] - ends[first])
    settled = [one for one in outcomes if ends[first] <= ended_s(one) <= ends[last]]
    return {
        "requests": len(outcomes),
        "failed": sum(not one.served for one in outcomes),
        "requests_per_s": rate,
        "of_ideal": rate / ideal,
        "on_slow": sum(one.pool == "slow" for one in outcomes) / len(outcomes),
        "on_slow_later": sum(one.pool == "slow" for one in settled) / max(len(settled), 1),
    }


def tell_pair(row: dict[str, Any]) -> None:
    print(
        f"pair{', shared prefix' if row['shared_prefix'] else '':16} {row['policy']:24} "
        f"{row['requests_per_s']:.2f} requests/s"
        + ("" if row["shared_prefix"] else f", {row['of_ideal']:.0%} of ideal")
        + f"; {row['on_slow']:.1%} on the slow one ({row['on_slow_later']:.1%} later)  {row['failed']} failed",
        flush=True,
    )


# The table


def table(found: dict[str, Any]) -> str:
    head = (
        "load",
        "policy",
        "within target",
        "rounds",
        "chat",
        "code",
        "documents",
        "$/M attributed",
        "fleet $/M good",
    )
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    rounds: dict[tuple[float, Policy], list[dict[str, Any]]] = {}
    for row in found["mixed"]["rows"]:
        rounds.setdefault((row["load"], row["policy"]), []).append(row)
    for (load, policy), rows in sorted(rounds.items(), key=lambda item: (item[0][0], POLICIES.index(item[0][1]))):
        kept = [row["within_target"] for row in rows]
        cells = [f"{load:.1f}", policy, f"{median(kept):.1%}", f"{len(rows)}: {min(kept):.1%} to {max(kept):.1%}"]
        cells += [f"{median(row['by_class'][name] for row in rows):.1%}" for name in TRACES]
        costs = ("usd_per_million_attributed", "usd_per_million_good")
        cells += [f"{median(row[key] for row in rows):.3f}" for key in costs]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "| policy | of ideal throughput | on the slow one | shared prefix: on the slow one |",
        "|---|---|---|---|",
    ]
    pairs = {(row["policy"], row["shared_prefix"]): row for row in found["pair"]["rows"]}
    for policy in POLICIES:
        plain, shared = pairs[policy, False], pairs[policy, True]
        lines.append(f"| {policy} | {plain['of_ideal']:.0%} | {plain['on_slow']:.1%} | {shared['on_slow']:.1%} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="shorter runs, two minutes in all")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--speed", type=float, default=10.0, help="emulated seconds to each second")
    parser.add_argument("--only", choices=("mixed", "pair"))
    parser.add_argument("--loads", default="", help="of the planned rates, such as 0.8,1.0")
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    catalog = Catalog([])
    found: dict[str, Any] = {
        "emulated": "no AMD or NVIDIA GPU ran",
        "made": time.strftime("%Y-%m-%d"),
        "speed": given.speed,
        "python": sys.version.split()[0],
    }
    with tempfile.TemporaryDirectory() as folder:
        if given.only != "pair":
            loads = tuple(float(one) for one in given.loads.split(",") if one)
            loads = loads or ((0.8, 1.0) if given.quick else (0.5, 0.8, 1.0))
            seconds, rounds = (40.0, 1) if given.quick else (300.0, given.rounds)
            found["mixed"] = mixed(catalog, Path(folder), given.speed, seconds, loads, rounds)
        if given.only != "mixed":
            found["pair"] = pair(catalog, Path(folder), given.speed, 150 if given.quick else 800)
    if given.only is None:
        print(table(found))
    if given.json:
        given.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
