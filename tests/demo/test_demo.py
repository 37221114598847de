"""The demo in small, and its processes: none is left behind, however the parent ends."""

import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.conftest import Command
from tests.run.emulate.running import fleet, pool
from tests.run.service.processes import gone
from tests.waiting import comes_true

from crosstie.catalog.fleet_text import fleet_text
from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import shipped_traces
from crosstie.core.fleet import Fleet, ServedClass
from crosstie.prove.bench.loads import BenchLoad
from crosstie.prove.bench.measure import BenchRun
from crosstie.prove.bench.summary import of_runs
from crosstie.prove.replay.outcomes import ClassTargets
from crosstie.prove.replay.replay import RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest
from crosstie_gateway.demo.demo import (
    CREDITS,
    TRACES,
    Demo,
    PolicyRun,
    dashboard_address,
    demo_requests,
    run_demo,
    send_on,
)

_STARTS_ONE_AND_WAITS = """
import sys, time
from pathlib import Path
from crosstie_gateway.start.start import serve
with serve(Path(sys.argv[1]), emulate=True, speed=20.0) as child:
    pids = Path(f"/proc/{child.process.pid}/task/{child.process.pid}/children").read_text()
    print(child.process.pid, pids, flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_children_end_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(fleet_text(fleet(pool())))
    parent = subprocess.Popen(
        [sys.executable, "-c", _STARTS_ONE_AND_WAITS, str(file)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(map(gone, pids))
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert comes_true(lambda: all(map(gone, pids)))


@pytest.mark.slow
def test_the_demo_in_small(crosstie: Command) -> None:
    seen = crosstie("demo", "--seconds", "10", "--speed", "10", "--json")
    assert seen.status == 0
    said = json.loads(seen.out)
    assert "no AMD or NVIDIA GPU ran" in said["emulated"]
    # No vendor alone is cheaper than what is called the cheapest.
    alone = [one["usd_per_hour"] for one in said["single_vendor"].values() if one and one["confirmed"]]
    assert alone
    assert min(alone) >= said["usd_per_hour"] - 0.01
    own, rival = said["runs"].values()
    assert list(said["runs"]) == ["cheapest-meeting-target", "round-robin"]
    for run in (own, rival):
        # A machine that stands still makes queues, and those too long are turned away.
        assert (run["requests"], run["failed"]) == (said["requests"], run["turned_away"])
        assert sum(one["requests"] for one in run["pools"]) == said["requests"]
        assert run["attributed_usd_per_million_tokens"] > 0
        assert run["fleet_usd_per_million_tokens_within_target"] > run["attributed_usd_per_million_tokens"]
    # What the gateway predicted came along with its answers.
    assert own["classes"][0]["seen"]["predicted_ttft_s"]["p50"] > 0


@pytest.mark.parametrize(
    ("too_slow_from", "speeds", "policies"),
    [
        (20.0, [10.0], 2),
        (5.0, [10.0, 5.0, 2.5], 2),
        # The rival too must not be seen on a machine that stood still; and the last speed is shown as it was.
        (0.0, [10.0, 5.0, 2.5], 2),
    ],
)
def test_a_machine_too_slow_for_the_demo_gets_half_the_speed(
    monkeypatch: pytest.MonkeyPatch, too_slow_from: float, speeds: list[float], policies: int
) -> None:
    tried = []

    def runs(serving: ExitStack, file: Path, fleet: Fleet, requests: object, speed: float, *rest: object) -> object:
        tried.append(speed)
        outcomes = [RequestOutcome(TimedRequest(0.0, 10, 10), late_s=1.0 if speed >= too_slow_from else 0.0)]
        sent = BenchRun(outcomes, 0.0, 1.0, 0.0, [], interrupted=False, gave_up=False)
        run = PolicyRun(fleet.policy, of_runs(BenchLoad(by_trace=True), [sent], ClassTargets()))
        serving.callback(tried.append, -speed)
        return [run] * policies, f"http://at-{speed:g}"

    small = fleet(pool())
    monkeypatch.setattr("crosstie_gateway.demo.demo._runs", runs)
    monkeypatch.setattr("crosstie_gateway.demo.demo.planned", lambda catalog: (None, small, []))
    monkeypatch.setattr("crosstie_gateway.demo.demo.demo_requests", lambda fleet, seconds: [])
    with ExitStack() as held:
        demo, url = run_demo(Catalog(), held, speed=10.0, seconds=5.0)
        assert (demo.speed, url) == (speeds[-1], f"http://at-{speeds[-1]:g}")
        # Gateways of speeds that were given up are gone, the last one serves on.
        assert tried == [at for speed in speeds for at in (speed, -speed)][:-1]
    assert tried[-1] == -speeds[-1]


def test_with_keep_the_traces_go_on_where_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts again would be in the caches, and show a fleet that is faster than it is."""
    classes = tuple(
        ServedClass(name=name, model="llama-3.1-8b", requests_per_s=rate)
        for name, rate in (("chat", 6.0), ("documents", 0.6))
    )
    small = fleet(pool(), classes=classes)
    first, sent = demo_requests(small, 20.0), list[TimedRequest]()

    def replayed(url: str, model: str, requests: list[TimedRequest], fleet: Fleet, *, speed: float) -> None:
        sent.extend(requests)
        raise KeyboardInterrupt

    monkeypatch.setattr("crosstie_gateway.demo.demo.replayed", replayed)
    demo = Demo(None, small, [], len(first), 20.0, 10.0, [])  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        send_on("http://there", demo)
    assert len(sent) > 10 * len(first)
    lengths = [(one.input_tokens, one.output_tokens) for one in first if one.class_name == "chat"]
    after = [(one.input_tokens, one.output_tokens) for one in sent if one.class_name == "chat"]
    assert after[: len(lengths)] != lengths


def test_the_dashboards_address_signs_in_with_a_key_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSTIE_OPERATOR_KEY", "an-operators-own-key")
    assert dashboard_address("http://there:8080") == "http://there:8080/crosstie/#key=an-operators-own-key"


def test_every_trace_is_credited() -> None:
    assert set(TRACES.values()) <= set(CREDITS)
    assert set(CREDITS) <= set(shipped_traces())
