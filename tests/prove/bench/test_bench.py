"""Benchmarks of emulated replicas: what is asked is sent, what is measured is theirs, an end keeps what there is."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.run.emulate.running import CATALOG, SMALL, emulated_beside, fleet, pool

from crosstie.core.errors import BadInput
from crosstie.core.workload import Target
from crosstie.prove.bench.bench import Bench, Settings, bench, fitted
from crosstie.prove.bench.document import document
from crosstie.prove.bench.endpoint import BenchEndpoint, described, named
from crosstie.prove.bench.loads import BenchLengths, BenchLoad, made
from crosstie.prove.bench.measure import Interrupt
from crosstie.prove.bench.resume import EarlierRun
from crosstie.prove.calibration.results import read_results
from crosstie.prove.replay.outcomes import ClassTargets
from crosstie_gateway.emulate.faults import Fault
from crosstie_gateway.emulate.fleet import EmulatedFleet

SPEED = 20.0
SHORT = Settings(lengths=BenchLengths(200, 12), requests=8, warm_up=0, speed=SPEED)


@pytest.fixture(scope="module")
def running() -> Iterator[EmulatedFleet]:
    with emulated_beside(fleet(pool(replicas=2)), SPEED) as made:
        yield made


def endpoint(running: EmulatedFleet, index: int = 0, **given: str) -> BenchEndpoint:
    url = running.fleet.pools[0].backends[index]
    return described(f"n{index}={url}", None, None, True, {"accelerator": "mi300x", "tp": "1", **given}, CATALOG)


def test_an_endpoint_says_what_it_is(running: EmulatedFleet) -> None:
    found = endpoint(running)
    assert (found.name, found.model, found.emulated, found.longest) == ("n0", SMALL, True, 32_000)
    said = {"model": SMALL, "accelerator": "mi300x", "precision": "fp8", "engine": "vllm", "tp": "1"}
    assert found.conditions == said
    # What is given wins.
    assert endpoint(running, precision="bf16", accelerator="h200").conditions == said | {
        "precision": "bf16", "accelerator": "h200",
    }  # fmt: skip
    url = running.fleet.pools[0].backends[0]
    with pytest.raises(BadInput, match="a first request for other failed: status 404"):
        described(url, "other", None, True, {}, CATALOG)
    with pytest.raises(BadInput, match=r"127\.0\.0\.1:9"):
        described("http://127.0.0.1:9", None, None, True, {}, CATALOG)


def test_names_of_endpoints() -> None:
    assert named("mi300x=http://a:8000/v1") == ("mi300x", "http://a:8000/v1")
    assert named("http://a:8000/x?y=z") == ("a:8000", "http://a:8000/x?y=z")


def test_a_closed_loop_keeps_its_clients_busy_and_no_more(running: EmulatedFleet) -> None:
    found = bench([endpoint(running)], [BenchLoad(clients=1), BenchLoad(clients=4)], SHORT)
    one, four = found.measured[0].points
    assert (one.requests, four.requests, one.failed, four.failed) == (8, 8, 0, 0)
    assert (one.input_tokens, one.output_tokens) == (200, 12)
    assert one.complete
    assert one.client.senders == 1
    assert found.measured[0].sizing.bytes_per_token == pytest.approx(4.0, rel=0.01)
    # Little's law: clients are requests under way.
    for clients, point in ((1, one), (4, four)):
        busy = point.metrics["e2e_s_mean"].value * point.metrics["requests_per_s"].value
        assert 0.5 * clients < busy <= clients * 1.01


def test_a_closed_loop_may_end_by_the_clock(running: EmulatedFleet) -> None:
    found = bench([endpoint(running)], [BenchLoad(clients=2)], replace(SHORT, requests=None, seconds=3.0))
    (point,) = found.measured[0].points
    assert point.complete
    assert point.requests >= 2
    assert point.failed == 0


def test_clients_begin_one_by_one_unless_told_otherwise(running: EmulatedFleet, tmp_path: Path) -> None:
    lengths = BenchLengths(200, 12, vary=0.2)
    settings = replace(SHORT, lengths=lengths, requests=24)
    found = bench([endpoint(running)], [BenchLoad(clients=4), BenchLoad(clients=1)], settings)
    four, one = found.measured[0].points
    assert (four.arrivals, one.arrivals) == ("steady", "steady")
    assert (four.requests, four.failed) == (24, 0)
    # Their time is less than that of the whole run, ends left out.
    assert four.metrics["seconds"].value > 0
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(document(found)))
    first = read_results(file).points[0]
    # On average, since what has settled is predicted by means.
    assert (first["arrivals"], first["input_len"], first["notes"]) == ("steady", "200", "")
    together = bench([endpoint(running)], [BenchLoad(clients=4)], replace(settings, lockstep=True))
    (point,) = together.measured[0].points
    assert point.arrivals == "lockstep"
    # Too few for a middle: all at once then, and the result says so.
    few = bench([endpoint(running)], [BenchLoad(clients=4)], replace(settings, requests=8))
    assert few.measured[0].points[0].arrivals == "lockstep"


def test_lengths_that_vary_stay_within_what_an_endpoint_takes(running: EmulatedFleet) -> None:
    one = endpoint(running)
    tight = replace(SHORT, lengths=BenchLengths(31_000, 500, vary=0.2))
    found = fitted(tight, [one]).lengths
    assert 0.0 < found.vary < 0.02
    assert max(a.input_tokens + a.output_tokens for a in made(BenchLoad(clients=1), found, 200, None, 0)) <= 32_000
    assert fitted(replace(tight, lengths=BenchLengths(100, 10, vary=0.2)), [one]).lengths.vary == 0.2


@pytest.mark.slow
def test_several_processes_send_what_one_would(running: EmulatedFleet) -> None:
    settings = replace(SHORT, requests=12, senders=2)
    found = bench([endpoint(running)], [BenchLoad(requests_per_s=4.0), BenchLoad(clients=3)], settings)
    for point in found.measured[0].points:
        assert (point.requests, point.failed, point.client.senders) == (12, 0, 2)
        assert point.input_tokens == 200


def test_endpoints_side_by_side_and_a_file_that_results_read(tmp_path: Any) -> None:
    lengths = BenchLengths(200, 40, shortest=0.5)
    settings = replace(SHORT, repeats=2, lengths=lengths, speed=1.0, lockstep=True)
    # At their own pace, so that tokens come one by one on a busy machine too: there is no TPOT of those that do not.
    with emulated_beside(fleet(pool(replicas=2)), 1.0) as unhurried:
        ends = [endpoint(unhurried, 0, engine="vllm"), endpoint(unhurried, 1, engine="vllm", accelerator="h200")]
        found = bench(ends, [BenchLoad(clients=2)], settings)
    told: dict[str, Any] = json.loads(json.dumps(document(found)))
    assert [one["name"] for one in told["endpoints"]] == ["n0", "n1"]
    assert told["endpoints"][0]["points"][0]["over_first"] is None
    over = told["endpoints"][1]["points"][0]["over_first"]["output_tokens_per_s"]
    assert over["low"] <= over["value"] <= over["high"]
    # A client on a busy machine may have bent what it saw, which is left out.
    for one in told["endpoints"]:
        one["points"][0]["bent"] = False
    file = tmp_path / "bench.json"
    file.write_text(json.dumps(told))
    results = read_results(file)
    assert results.unusable == []
    first, second = results.points
    assert (first["accelerator"], second["accelerator"]) == ("mi300x", "h200")
    assert (first["concurrency"], first["num_prompts"], first["notes"]) == ("2", "8", "random lengths 50-100%")
    # The most of lengths that vary, so that their mean is what was counted.
    assert float(first["input_len"]) == pytest.approx(200, rel=0.15)
    assert {"ttft", "tpot", "throughput", "e2e"} == {row.metric.kind for row in first.rows}
    # What was cut short says nothing of a configuration.
    told["endpoints"][0]["points"][0]["complete"] = False
    file.write_text(json.dumps(told))
    assert [point["accelerator"] for point in read_results(file).points] == ["h200"]


@pytest.mark.slow
def test_a_limit_lies_between_what_holds_and_what_does_not(running: EmulatedFleet) -> None:
    settings = replace(
        SHORT, requests=None, seconds=2.0, targets=ClassTargets(Target(seconds=100.0, percentile=0.5), None)
    )
    found = bench([endpoint(running)], [BenchLoad(requests_per_s=2.0)], replace(settings, requests=20), limit=True)
    limit = found.measured[0].limit
    assert limit is not None
    # Any rate keeps that target: the search ends all the same.
    assert limit.requests_per_s is not None
    strict = replace(settings, requests=20, targets=ClassTargets(Target(seconds=1e-5, percentile=0.5), None))
    lost = bench([endpoint(running)], [BenchLoad(requests_per_s=0.1)], strict, limit=True).measured[0]
    assert lost.limit is not None
    # Requests one by one miss it already, so no rate is tried.
    assert (lost.limit.requests_per_s, lost.limit.trials) == (None, [])
    with pytest.raises(BadInput, match="a limit needs a target"):
        bench([endpoint(running)], [], SHORT, limit=True)


@pytest.mark.slow
def test_a_limit_goes_on_with_the_trials_that_were_made(running: EmulatedFleet) -> None:
    targets = ClassTargets(Target(seconds=100.0, percentile=0.5), None)
    settings = replace(SHORT, requests=20, targets=targets)
    written: list[dict[str, Any]] = []
    first = BenchLoad(requests_per_s=50.0)

    def on_point(found: Bench) -> None:
        written.append(json.loads(json.dumps(document(found))))
        # Killed after the second trial.
        if len(written) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench([endpoint(running)], [first], settings, limit=True, on_point=on_point)
    seen: list[float] = []
    whole = bench(
        [endpoint(running)], [first], settings, limit=True, earlier=EarlierRun("run.json", written[-1]),
        on_point=lambda found: seen.append(found.measured[0].points[-1].load.requests_per_s or 0.0),
    )  # fmt: skip
    assert whole.measured[0].limit is not None
    rates = [rate for rate, _ in whole.measured[0].limit.trials]
    assert rates[:3] == [50.0, 100.0, 200.0]
    # Told after each trial that was made now, and at the end.
    assert seen[:-1] == rates[2:]


def test_an_interrupt_keeps_what_was_measured(running: EmulatedFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for an end once the second load has begun."""
    asked: list[Interrupt] = []
    begin = Interrupt.__enter__

    def entered(self: Interrupt) -> Interrupt:
        asked.append(self)
        return begin(self)

    monkeypatch.setattr(Interrupt, "__enter__", entered)

    def on_progress(done: int, total: int, what: str) -> None:
        if "3 clients" in what and done >= 1:
            asked[0].asked = True

    settings = replace(SHORT, requests=2000)
    kept: list[int] = []

    def on_point(found: Bench) -> None:
        kept.append(len(found.measured[0].points))

    found = bench(
        [endpoint(running)],
        [BenchLoad(clients=3), BenchLoad(clients=5)],
        settings,
        on_progress=on_progress,
        on_point=on_point,
    )
    assert found.interrupted
    (point,) = found.measured[0].points
    assert 1 <= point.requests < 2000
    assert not point.complete
    assert point.failed == 0
    assert kept == [1]


def test_what_fails_is_counted_with_its_reason(running: EmulatedFleet) -> None:
    one = endpoint(running, 1)
    replica = running.replicas[1]
    replica.loop.call_soon_threadsafe(replica.inject, Fault(kind="error", share=0.25))
    try:
        (point,) = bench([one], [BenchLoad(clients=1)], SHORT).measured[0].points
    finally:
        replica.loop.call_soon_threadsafe(replica.clear)
    assert (point.requests, point.failed) == (8, 2)
    assert point.faults[0][1] == 2
    assert "status 500" in point.faults[0][0]
    assert point.complete
