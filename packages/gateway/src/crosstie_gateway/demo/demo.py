"""The loop on one machine: a mixed fleet is planned, emulated and served, and recorded requests are sent through it.

The same requests pass twice, routed by the fleet's own policy and in rotation. No accelerator runs: replicas keep the
predicted times, which shows planner, gateway and routing at work and nothing about hardware.
"""

import os
import secrets
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import find_trace, read_trace
from crosstie.catalog.workloads import find_workload, read_workload
from crosstie.catalog.writing import write_text
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Policy
from crosstie.core.progress import OnProgress, no_progress
from crosstie.decide.plan.fleet import fleet_of
from crosstie.decide.plan.plan import Plan, SimulatedClass, plan
from crosstie.prove.bench.bench import replayed
from crosstie.prove.bench.summary import PointResult
from crosstie.prove.replay.outcomes import plain
from crosstie.prove.replay.traffic import TimedRequest, from_trace, merged
from crosstie_gateway.start.start import RunningGateway, serve

WORKLOAD = Path("demo")
# By class of that workload: the trace that its requests are taken from, and whose it is.
TRACES = {"chat": "azure-2023-conversation", "documents": "mooncake-conversation"}
CREDITS = {
    "azure-2023-conversation": "Microsoft Azure, Patel et al., Splitwise, ISCA 2024, CC BY 4.0",
    "mooncake-conversation": "Moonshot AI, Qin et al., Mooncake, FAST 2025, Apache-2.0",
}
RIVAL: Policy = "round-robin"
_OPERATOR_KEY = "CROSSTIE_OPERATOR_KEY"
# Seconds of the traces that go on with --keep, before they begin again.
_ON_S = 1200.0
# How often a machine that is too slow for a speed is given half of it.
_MOST_HALVINGS = 2


@dataclass(frozen=True)
class PolicyRun:
    policy: Policy
    result: PointResult


@dataclass(frozen=True)
class Demo:
    plan: Plan
    fleet: Fleet
    # Classes as the plan expects them, by simulation at their targets' percentiles.
    expected: list[SimulatedClass]
    requests: int
    seconds: float
    speed: float
    # The fleet's own policy, then the rival.
    runs: list[PolicyRun]


def planned(catalog: Catalog) -> tuple[Plan, Fleet, list[SimulatedClass]]:
    made = plan(catalog, read_workload(catalog, find_workload(WORKLOAD)), confirm=True)
    if not made.simulated:
        raise BadInput("with the prices and calibration of your catalog no fleet serves the demo's workload")
    return made, fleet_of(made), made.simulated


def demo_requests(fleet: Fleet, seconds: float, after: float = 0.0) -> list[TimedRequest]:
    """Each class's part of its trace, at the rate that the fleet was planned for; `after` so many seconds of it."""
    longest = min(pool.max_context for pool in fleet.pools)
    parts = []
    for served in fleet.classes:
        trace = read_trace(find_trace(TRACES[served.name], Path()))
        rate = served.requests_per_s
        parts.append(
            from_trace(
                trace,
                class_name=served.name,
                requests_per_s=rate,
                seconds=seconds,
                start=round(after * rate),
                longest=longest,
            )
        )
    return merged(*parts)


def run_demo(
    catalog: Catalog, held: ExitStack, *, speed: float, seconds: float, on_progress: OnProgress = no_progress
) -> tuple[Demo, str]:
    """The demo, and the address of its first gateway, which goes on serving until `held` ends it.

    Emulated time goes on while a machine stands still. So where the client fell behind, the same requests are sent
    again at half the speed, a few times at most.
    """
    # This demo's own, unless there is one.
    os.environ.setdefault(_OPERATOR_KEY, secrets.token_urlsafe(24))
    on_progress(0, 0, "planning the fleet")
    plan, fleet, expected = planned(catalog)
    folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="crosstie-demo-")))
    file = folder / "fleet.toml"
    write_text(file, fleet_text(fleet))
    requests = demo_requests(fleet, seconds)
    for slower in range(_MOST_HALVINGS + 1):
        with ExitStack() as serving:
            last = slower == _MOST_HALVINGS
            runs, url = _runs(serving, file, fleet, requests, speed, on_progress, last)
            if last or not any(run.result.disturbed for run in runs):
                held.push(serving.pop_all())
                break
        speed /= 2
    return Demo(plan, fleet, expected, len(requests), seconds, speed, runs), url


def dashboard_address(url: str) -> str:
    """Where the page of operators is, signed in by the key behind #, which no server and no log sees."""
    return f"{url}/crosstie/#key={os.environ[_OPERATOR_KEY]}"


def send_on(url: str, demo: Demo) -> None:
    """What the traces have next, so that there is something to look at: what was sent before would be in caches."""
    after = demo.seconds if demo.seconds < _ON_S else 0.0
    while True:
        requests = demo_requests(demo.fleet, _ON_S, after)
        replayed(url, demo.fleet.classes[0].model, requests, demo.fleet, speed=demo.speed)


def _runs(
    serving: ExitStack,
    file: Path,
    fleet: Fleet,
    requests: list[TimedRequest],
    speed: float,
    on_progress: OnProgress,
    last: bool,
) -> tuple[list[PolicyRun], str]:
    """The fleet's own policy and the rival's; the first alone where it was disturbed and may be tried again."""

    def started(policy: Policy) -> RunningGateway:
        on_progress(0, 0, f"starting {len(fleet.pools)} pools of emulated replicas and a gateway, {policy}")
        return serve(file, emulate=True, speed=speed, policy=policy, options=("--dashboard",))

    def run(gateway: RunningGateway, policy: Policy) -> PolicyRun:
        result = replayed(
            gateway.url,
            fleet.classes[0].model,
            requests,
            fleet,
            speed=speed,
            on_progress=lambda done, total, doing: on_progress(done, total, f"{policy}, {speed:g}x: {doing}"),
        )
        return PolicyRun(policy, result)

    first = serving.enter_context(started(fleet.policy))
    own = run(first, fleet.policy)
    if own.result.disturbed and not last:
        return [own], first.url
    with started(RIVAL) as second:
        return [own, run(second, RIVAL)], first.url


def demo_document(demo: Demo) -> dict[str, Any]:
    return {
        "emulated": "no AMD or NVIDIA GPU ran: replicas keep the time that the performance model predicts",
        "traces": {name: CREDITS[name] for name in TRACES.values()},
        "fleet": plain(demo.fleet),
        "usd_per_hour": demo.fleet.usd_per_hour,
        "single_vendor": plain(demo.plan.single_vendor),
        "expected": plain(demo.expected),
        "requests": demo.requests,
        "seconds": demo.seconds,
        "speed": demo.speed,
        "runs": {run.policy: plain(run.result) for run in demo.runs},
    }
