"""Loads: how many requests, when, how long, and who of several senders sends them."""

from pathlib import Path

import numpy as np
import pytest

from crosstie.catalog.traces import find_trace, read_trace
from crosstie.core.errors import BadInput
from crosstie.core.workload import Target
from crosstie.prove.bench.loads import BenchLengths, BenchLoad, made, shares, spread_note
from crosstie.prove.bench.measure import Giving, senders_for
from crosstie.prove.replay.outcomes import ClassTargets
from crosstie.prove.replay.replay import RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest


def test_arrivals_by_chance_have_the_rate_and_no_bursts() -> None:
    asked = made(BenchLoad(requests_per_s=5.0), BenchLengths(100, 10), None, 400.0, seed=1)
    assert len(asked) == 2000
    counts = np.bincount([int(one.arrival_s // 10) for one in asked], minlength=40)[:40]
    assert counts.mean() == pytest.approx(50, rel=0.05)
    assert 0.5 * counts.mean() < counts.var() < 2 * counts.mean()
    assert made(BenchLoad(requests_per_s=5.0), BenchLengths(100, 10), None, 400.0, seed=1) == asked
    assert made(BenchLoad(requests_per_s=5.0), BenchLengths(100, 10), None, 400.0, seed=2) != asked


def test_lengths_are_fixed_or_spread_evenly() -> None:
    fixed = made(BenchLoad(clients=2), BenchLengths(100, 10), 50, None, seed=0)
    assert {(one.input_tokens, one.output_tokens) for one in fixed} == {(100, 10)}
    spread = BenchLengths(1000, 100, shortest=0.8)
    inputs = [one.input_tokens for one in made(BenchLoad(clients=2), spread, 2000, None, seed=0)]
    assert (min(inputs), max(inputs)) == (800, 1000)
    assert np.mean(inputs) == pytest.approx(900, rel=0.01)
    assert spread_note(spread) == "random lengths 80-100%"
    assert spread_note(BenchLengths()) == ""


def test_lengths_vary_around_what_is_asked_for_and_have_its_mean() -> None:
    around = BenchLengths(1000, 100, vary=0.2)
    for seed in (0, 1):
        asked = made(BenchLoad(clients=2), around, 40, None, seed=seed)
        assert np.mean([one.input_tokens for one in asked]) == 1000
        assert np.mean([one.output_tokens for one in asked]) == pytest.approx(100, abs=0.5)
        assert (min(one.input_tokens for one in asked), max(one.input_tokens for one in asked)) == (805, 1195)
    assert [one.input_tokens for one in made(BenchLoad(clients=2), around, 40, None, seed=0)] != [
        one.input_tokens for one in asked
    ]
    # As a share of the most, which is how results have it.
    assert spread_note(around) == "random lengths 67-100%"


def test_a_trace_gives_lengths_prefixes_and_its_times() -> None:
    trace = read_trace(find_trace("mooncake-conversation", Path()))
    own = made(BenchLoad(by_trace=True), BenchLengths(trace=trace), 50, None, seed=0)
    assert own[0].blocks == (trace.blocks or ())[0]
    stretched = made(BenchLoad(requests_per_s=2.0, by_trace=True), BenchLengths(trace=trace), 50, None, seed=0)
    assert stretched[-1].arrival_s == pytest.approx(49 / 2.0)
    by_chance = made(BenchLoad(requests_per_s=2.0), BenchLengths(trace=trace), 50, None, seed=0)
    assert [one.arrival_s for one in by_chance] != [one.arrival_s for one in stretched]
    assert [one.input_tokens for one in by_chance] == [one.input_tokens for one in own]
    # Clients take the lengths in turn, and begin again where they end.
    few = BenchLengths(trace=trace, start=len(trace) - 3)
    assert len({one.input_tokens for one in made(BenchLoad(clients=2), few, 9, None, seed=0)}) <= 3
    short = BenchLengths(trace=trace, longest=4000)
    assert max(one.input_tokens + one.output_tokens for one in made(BenchLoad(clients=1), short, 99, None, 0)) <= 4000
    with pytest.raises(BadInput, match="number of requests"):
        made(BenchLoad(clients=1), BenchLengths(), None, 10.0, seed=0)


def test_several_senders_share_requests_and_clients() -> None:
    asked = made(BenchLoad(clients=7), BenchLengths(), 20, None, seed=0)
    dealt = shares(asked, 3, None)
    assert sorted(number for part in dealt for number, _ in part) == list(range(20))
    assert [BenchLoad(clients=7).part(index, 3).clients for index in range(3)] == [3, 2, 2]
    assert BenchLoad(requests_per_s=5.0).part(1, 3) == BenchLoad(requests_per_s=5.0)


def test_as_many_senders_as_the_stream_needs() -> None:
    def senders(rate: float, tokens: int, processors: int = 16) -> int:
        load = BenchLoad(requests_per_s=rate)
        return senders_for(load, made(load, BenchLengths(100, tokens), None, 20.0, 0), 1.0, processors)

    assert senders(2.0, 100) == 1
    assert senders(500.0, 100) > 2
    assert senders(500.0, 1000) > senders(500.0, 100)
    assert senders(500.0, 1000, processors=4) == 3
    assert senders(500.0, 1000, processors=1) == 1
    assert senders_for(BenchLoad(clients=1000), [TimedRequest(0.0, 1, 1)], 1.0, 16) > 1


def test_a_run_is_given_up_once_its_percentile_is_lost() -> None:
    giving = Giving(ClassTargets(Target(seconds=1.0, percentile=0.9), None), requests=20)

    def ended(count: int, ttft: float, error: str = "") -> list[RequestOutcome]:
        return [RequestOutcome(TimedRequest(0.0, 1, 1), ttft_s=ttft, e2e_s=ttft + 1, error=error) for _ in range(count)]

    under_way = [RequestOutcome(TimedRequest(0.0, 1, 1)) for _ in range(10)]
    assert not giving.up([*ended(2, 2.0), *ended(5, 0.5), *under_way])
    assert giving.up([*ended(3, 2.0), *under_way])
    assert giving.up([*ended(2, 2.0), *ended(1, 0.1, "status 500")])


def test_senders_of_a_closed_loop_have_requests_by_their_clients() -> None:
    """Four clients over three senders are two, one and one: each sends as many as every other does."""
    asked = made(BenchLoad(clients=4), BenchLengths(10, 1), 40, None, 0)
    dealt = shares(asked, 3, 4)
    assert [len(one) for one in dealt] == [20, 10, 10]
    assert [BenchLoad(clients=4).part(index, 3).clients for index in range(3)] == [2, 1, 1]
    assert sorted(number for one in dealt for number, _ in one) == list(range(40))
