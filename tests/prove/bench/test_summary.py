"""What runs come to: statistics by hand, intervals that hold what they say, and a client that says when it was slow."""

import math
from typing import Any

import numpy as np
import pytest

from crosstie.core.workload import Target
from crosstie.prove.bench.gpus import GpuUse
from crosstie.prove.bench.loads import BenchLoad
from crosstie.prove.bench.measure import BenchRun, SettledTime, settled_time
from crosstie.prove.bench.summary import of_runs, ratio, statistics_of, student
from crosstie.prove.replay.outcomes import ClassTargets
from crosstie.prove.replay.replay import RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest

TARGETS = ClassTargets(Target(seconds=0.5, percentile=0.5), None)


def outcome(
    due: float, ttft: float, e2e: float, tokens: int = 11, error: str = "", late: float = 0.0
) -> RequestOutcome:
    tpot = (e2e - ttft) / (tokens - 1)
    return RequestOutcome(
        TimedRequest(due, 100, tokens), status=200, error=error, ttft_s=ttft, tpot_s=tpot, input_tokens=100,
        output_tokens=tokens, late_s=late, due_s=due, e2e_s=e2e, longest_gap_s=tpot,
    )  # fmt: skip


def run(outcomes: list[RequestOutcome], lag: float = 0.0, seconds: float = 10.0, **more: Any) -> BenchRun:
    told: dict[str, Any] = {"interrupted": False, "gave_up": False, **more}
    return BenchRun(outcomes, began=0.0, ended=seconds, client_cpu_s=1.0, lags_s=[lag], **told)


def test_statistics_by_hand() -> None:
    some = [outcome(0.0, 0.2, 1.2), outcome(1.0, 0.8, 3.0), outcome(2.0, math.nan, math.nan, error="status 500")]
    found = statistics_of(run(some), TARGETS)
    assert found["seconds"] == 4.0
    assert found["output_tokens_per_s"] == pytest.approx(22 / 4)
    assert found["total_tokens_per_s"] == pytest.approx(222 / 4)
    assert (found["requests_per_s"], found["goodput_requests_per_s"]) == (0.5, 0.25)
    assert found["ttft_s_mean"] == pytest.approx(0.5)
    assert found["tpot_s_p50"] == pytest.approx((0.1 + 0.22) / 2)
    assert statistics_of(run(some[2:]), TARGETS) == {}


def test_what_has_settled_is_measured_while_all_clients_are_at_work() -> None:
    """Two clients with requests of 2 s; the second begins after 1 s. Alone, at either end, a token is twice as fast."""
    some = [outcome(0.0, 0.5, 1.5), *(outcome(1.0 + at, 0.5, 2.0) for at in range(6)), outcome(7.0, 0.5, 1.0)]
    due, starts = [each.due_s for each in some], [0.0, 1.0]
    settled = settled_time([due], [starts])
    assert settled == SettledTime(1.0, 7.0, 5.0)
    one = run(some, seconds=8.5, settled=settled, staggered=True)
    # Neither the first of the first client nor the last of each.
    assert [each.due_s for each in one.settled_outcomes] == [1.0, 2.0, 3.0, 4.0, 5.0]
    found = statistics_of(one, ClassTargets())
    assert found["seconds"] == 6.0
    assert found["e2e_s_mean"] == found["e2e_s_p99"] == 2.0
    # A third of the first lies in it, half of the one that began at 6, and nothing of the last.
    assert found["requests_per_s"] == pytest.approx((0.5 / 1.5 + 5 + 0.5) / 6)
    assert found["output_tokens_per_s"] == pytest.approx(11 * (0.5 / 1.0 + 5 + 0.5 / 1.5) / 6)
    # The GPU is watched meanwhile: the last token came at 8 s of the run, which ended then on this machine's clock.
    assert one.watched(1.0) == (1.5, 7.5)
    point = of_runs(BenchLoad(clients=2), [one], ClassTargets())
    assert (point.arrivals, point.requests) == ("steady", 8)
    # Who began one by one and was never at work together says nothing of either.
    few = run(some[:3], settled=settled_time([due[:3]], [starts]), staggered=True)
    assert of_runs(BenchLoad(clients=2), [few], ClassTargets()).arrivals == "unsettled"
    assert of_runs(BenchLoad(clients=2), [run(some)], ClassTargets()).arrivals == "lockstep"
    assert of_runs(BenchLoad(requests_per_s=2.0), [run(some)], ClassTargets()).arrivals == "by the clock"


def test_of_several_senders_the_first_without_requests_ends_it() -> None:
    first, second = [0.0, 2.0, 4.0, 6.0], [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
    assert settled_time([first, second, []], [[0.0], [1.0], []]) == SettledTime(1.0, 6.0, 4.0)
    assert settled_time([first, [1.0]], [[0.0], [1.0]]) is None


def test_student_s_interval_is_the_textbook_s() -> None:
    found = student([10.0, 12.0, 14.0])
    assert found.value == 12.0
    # 4.303 times 2 over the root of 3.
    assert found.high - found.value == pytest.approx(4.969, abs=1e-3)
    assert math.isnan(student([10.0]).low)
    # Beyond the table it goes over to the normal distribution's.
    many = student([10.0, 12.0] * 500)
    assert many.high - many.value == pytest.approx(1.96 / math.sqrt(1000), rel=0.01)


def test_intervals_over_repeats_hold_the_truth_as_often_as_they_say() -> None:
    draw = np.random.default_rng(7)
    held = 0
    for _ in range(400):
        found = student(draw.normal(5.0, 1.0, 4).tolist())
        held += found.low <= 5.0 <= found.high
    assert 0.92 < held / 400 < 0.98


def test_one_run_has_intervals_by_its_stretches_and_several_by_repeats() -> None:
    draw = np.random.default_rng(3)

    def some(shift: float) -> list[RequestOutcome]:
        ttfts = draw.gamma(4.0, 0.05, 200) + shift
        return [outcome(i * 0.1, float(ttft), float(ttft) + 1.0) for i, ttft in enumerate(ttfts)]

    one = of_runs(BenchLoad(clients=4), [run(some(0.0))], ClassTargets())
    assert one.intervals == "bootstrap"
    assert one.kept is None
    mean = one.metrics["ttft_s_mean"]
    assert mean.low < mean.value < mean.high
    assert 0.5 < (mean.high - mean.low) / (4 * 0.1 / math.sqrt(200)) < 2.0
    assert one.metrics["output_tokens_per_s"].low < one.metrics["output_tokens_per_s"].high
    # What an open loop brings is what it was told to bring.
    assert math.isnan(
        of_runs(BenchLoad(requests_per_s=4.0), [run(some(0.0))], ClassTargets()).metrics["requests_per_s"].low
    )
    apart = of_runs(BenchLoad(clients=4), [run(some(0.0)), run(some(0.3)), run(some(0.6))], TARGETS)
    wide = apart.metrics["ttft_s_mean"]
    assert apart.intervals == "student"
    assert wide.high - wide.low > 4 * (mean.high - mean.low)
    assert (apart.repeats, apart.requests) == (3, 600)
    assert apart.kept is not None
    assert 0.0 < apart.kept < 1.0


def test_targets_hold_at_their_percentile_and_not_where_a_run_was_cut() -> None:
    half = [outcome(0.0, 0.2, 1.0), outcome(1.0, 0.9, 2.0)]
    assert of_runs(BenchLoad(clients=1), [run(half)], TARGETS).holds
    assert not of_runs(BenchLoad(clients=1), [run(half, gave_up=True)], TARGETS).holds
    worse = [*half, outcome(2.0, 0.9, 2.0)]
    assert not of_runs(BenchLoad(clients=1), [run(worse)], TARGETS).holds


def test_endpoints_are_compared_repeat_by_repeat() -> None:
    def point(factor: float) -> object:
        runs = [run([outcome(0.0, 0.1 * factor * wild, 1.0 * factor * wild)]) for wild in (1.0, 1.5, 2.0)]
        return of_runs(BenchLoad(clients=1), runs, ClassTargets())

    # What drifts for both alike is no difference between them.
    found = ratio(point(2.0), point(1.0), "ttft_s_p50")  # type: ignore[arg-type]
    assert found.value == pytest.approx(2.0)
    assert found.high - found.low < 1e-6


def test_a_client_that_was_slow_says_so() -> None:
    some = [outcome(float(i), 0.1, 1.0) for i in range(20)]
    assert not of_runs(BenchLoad(clients=1), [run(some, lag=0.005)], ClassTargets()).bent
    assert of_runs(BenchLoad(clients=1), [run(some, lag=0.02)], ClassTargets()).bent
    # A loop that is late by so much is late by twenty times that on a clock that runs twenty times as fast.
    assert of_runs(BenchLoad(clients=1), [run(some, lag=0.005)], ClassTargets(), speed=20.0).bent
    late = [outcome(float(i), 0.1, 1.0, late=0.05) for i in range(20)]
    found = of_runs(BenchLoad(clients=1), [run(late)], ClassTargets())
    assert found.bent
    assert found.client.cpu_s_per_request == pytest.approx(1.0 / 20)


def test_power_becomes_joules_of_a_token() -> None:
    some = [outcome(float(i), 0.1, 1.0) for i in range(10)]
    use = [GpuUse("0", 5, 300.0, 350.0, 1e9, 0.5), GpuUse("1", 5, 200.0, 250.0, 2e9, 0.7)]
    found = of_runs(BenchLoad(clients=1), [run(some, seconds=11.0, gpus=use)], ClassTargets())
    assert found.metrics["power_w"].value == 500.0
    assert found.metrics["joules_per_output_token"].value == pytest.approx(500.0 * 10.0 / 110)
    assert [one.gpu for one in found.gpus] == ["0", "1"]
