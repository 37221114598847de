"""The loop itself: a plan's fleet emulated and served, requests sent to it, and its recording held against the plan."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.conftest import Command

from crosstie.core.fleet import Fleet
from crosstie.core.workload import Workload
from crosstie.decide.plan.traffic import poisson
from crosstie.prove.bench.bench import replayed
from crosstie.prove.replay.traffic import TimedRequest
from crosstie.prove.review.production import read_metrics
from crosstie_gateway.start.start import serve

pytestmark = pytest.mark.slow
_SPEED = 4.0


def test_what_a_gateway_recorded_agrees_with_its_plan(
    crosstie: Command, made: Path, content: dict[str, Any], tmp_path: Path
) -> None:
    """In lengths and mix. How fast it was is this machine's affair: emulated time goes on while it stands still."""
    fleet = msgspec.convert(content["fleet_file"], Fleet)
    workload = msgspec.convert(content["workload"], Workload)
    sent = [
        TimedRequest(one.arrival_s, one.input_tokens, one.output_tokens, one.class_name)
        for one in poisson(workload, 300, None, 1.0, 5).requests()
    ]
    trace = tmp_path / "trace.jsonl"
    with serve(fleet, emulate=True, speed=_SPEED, options=("--record", str(trace))) as gateway:
        answered = replayed(gateway.url, fleet.pools[0].model, sent, fleet, speed=_SPEED)
        counted = read_metrics([gateway.url])
    assert counted.requests == answered.requests
    got = crosstie("review", str(made), str(trace), "--no-plan", "--json", "--today", "2026-08-18")
    assert got.status in (0, 1), got.err
    found = json.loads(got.out)
    assert found["recorded"]["requests"] == answered.requests - answered.failed
    by = {(one["check"], one["of"], one["what"]): one for one in found["figures"]}
    assert {one["verdict"] for (check, *_), one in by.items() if check in ("lengths", "mix")} <= {"holds", "unsure"}
    assert by["lengths", "batch", "prompt tokens, mean"]["seen"] == pytest.approx(2000, rel=0.02)
    assert by["lengths", "batch", "answer tokens, mean"]["seen"] == 100
    # Every streamed answer has its latencies, and so each class its percentiles and each pool its throughput.
    for figure in (("latency", "chat", "TTFT p95"), ("latency", "chat", "TPOT p90")):
        assert by[figure]["seen"] > 0
        assert by[figure]["predicted"] > 0
    assert any(check == "throughput" for check, *_ in by)
