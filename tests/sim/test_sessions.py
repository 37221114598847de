"""Sessions in a closed loop: when their turns come, what they find, and where a fleet begins to thrash."""

from itertools import pairwise
from pathlib import Path
from statistics import mean

import msgspec
import pytest
from tests.catalog.test_sessions import helpers, shape
from tests.route.fleets import CATALOG, MODEL, fleet, pool, served

from crosstie.catalog.library import Catalog
from crosstie.catalog.sessions import SessionTurn, session_trace
from crosstie.catalog.workloads import read_workload
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Policy
from crosstie.core.workload import Workload
from crosstie.decide.plan.run_result import Run, SimulatedCase
from crosstie.decide.plan.sweep import RequestSource, one_run
from crosstie.sim.fleet import FleetSimulator, SimulatedAnswer
from crosstie.sim.sessions import ClosedLoop, SessionLoad, shaped

SESSIONS = """
[[class]]
name = "chat"
model = "llama-3.1-8b"
tpot_ms = { p90 = 50 }
[class.sessions]
live = 40
turns = 8
system = 2048
first = 1024
added = 1500
output = 120
pause_s = 4
success_rate = 0.5
"""


def workload() -> Workload:
    return read_workload(Catalog([]), Path("w.toml"), SESSIONS)


def small(replicas: int = 2) -> Fleet:
    return fleet(pool("h", "h100", replicas=replicas, max_context=64_000, usd_per_gpu_hour=3.6, max_in_flight=256),
                 classes=(served(ttft=None),))  # fmt: skip


def run(live: int, policy: Policy = "cheapest-meeting-target", turns: int = 600, seed: int = 0) -> Run:
    case = SimulatedCase(label="x", fleet=small(), policy=policy, seed=seed)
    return one_run(CATALOG, RequestSource(workload(), sessions=live, requests=turns), case)


def test_a_turn_comes_a_pause_after_the_last_answer_and_contains_it() -> None:
    load = SessionLoad("chat", MODEL, live=1, turns=20, turn_s=9.5, make=shaped(shape(system=1024.0), 0))
    answers: list[SimulatedAnswer] = []
    simulator = FleetSimulator(CATALOG, small(1))
    loop = ClosedLoop(simulator, [load], ramp_s=1.0)

    def tell(answer: SimulatedAnswer) -> None:
        answers.append(answer)
        loop.ended(answer)

    simulator.tell = tell
    loop.advance(400.0)
    assert len(answers) > 30
    for before, after in pairwise(answers):
        ended = before.request.arrival_s + before.finished_s
        known = before.request.input_tokens + before.request.output_tokens
        if after.request.input_tokens > before.request.input_tokens:
            assert after.request.arrival_s == pytest.approx(ended + 9.0)
            assert after.request.input_tokens == known + 2000
            # All of it but the engine's last, broken block.
            assert known - 32 <= after.cached_tokens <= known
        else:
            # Another session, which has the system prompt in common.
            assert after.request.arrival_s == pytest.approx(ended)
            assert after.cached_tokens == 1024
    assert loop.sessions_ended == [sum(a.request.input_tokens > b.request.input_tokens
                                       for a, b in pairwise(answers))]  # fmt: skip


def test_sub_agents_work_at_once_and_their_session_waits_for_all_of_them() -> None:
    asked = msgspec.structs.replace(shape(system=1024.0, turns=3), subagents=helpers(pause_s=(20.0,)))
    load = SessionLoad("chat", MODEL, live=1, turns=asked.requests, turn_s=9.5, make=shaped(asked, 0))
    answers: list[SimulatedAnswer] = []
    simulator = FleetSimulator(CATALOG, small(1))
    loop = ClosedLoop(simulator, [load], ramp_s=1.0)

    def tell(answer: SimulatedAnswer) -> None:
        answers.append(answer)
        loop.ended(answer)

    simulator.tell = tell
    loop.advance(300.0)
    calls = [answer for answer in answers if answer.request.output_tokens == 40]
    own = [answer for answer in answers if answer.request.output_tokens == 300]
    assert len(calls) > 12
    begun = sorted(answer.request.arrival_s for answer in calls)
    assert begun[0] == begun[1] == begun[2] < begun[3]
    # They go on from a conversation that is in the cache.
    assert all(answer.cached_tokens >= answer.request.input_tokens - 100 - 40 - 500 - 32 for answer in calls)
    ends = [answer.request.arrival_s + answer.finished_s for answer in calls]
    for before, after in pairwise(own):
        if after.request.input_tokens > before.request.input_tokens:
            left = before.request.arrival_s + before.finished_s
            joined = max(end for end in ends if left < end <= after.request.arrival_s)
            # Two turns with 20 s between, which is longer than its own pause.
            assert after.request.arrival_s == pytest.approx(joined)
            assert after.request.arrival_s > left + 20.0
    assert loop.columns.turn.tolist().count(0) == len(calls)


@pytest.mark.slow
def test_a_session_ends_when_the_sub_agents_of_its_last_turn_have() -> None:
    """As recordings have them; what a file describes sends none off there."""
    helper = tuple(SessionTurn(5.0 * turn, 600, 20, 620 + turn, 1, (900 + turn,)) for turn in range(2))
    only = SessionTurn(0.0, 2000, 20, 2020, 0, (1, 2, 3), (helper,))
    load = SessionLoad("chat", MODEL, live=1, turns=3, turn_s=9.5, make=lambda _number, _chance: iter([only]))
    answers: list[SimulatedAnswer] = []
    simulator = FleetSimulator(CATALOG, small(1))
    loop = ClosedLoop(simulator, [load], ramp_s=1.0)

    def tell(answer: SimulatedAnswer) -> None:
        answers.append(answer)
        loop.ended(answer)

    simulator.tell = tell
    loop.advance(60.0)
    assert [answer.request.input_tokens for answer in answers[:6]] == [2000, 600, 600] * 2
    ended = answers[2].request.arrival_s + answers[2].finished_s
    assert answers[3].request.arrival_s == pytest.approx(ended)
    assert loop.sessions_ended[0] == len(answers) // 3


def test_what_a_run_says_of_sessions_hangs_together() -> None:
    found = run(40)
    (one,) = found.sessions
    assert (one.name, one.live) == ("chat", 40)
    # Little's law: 40 sessions wait for an answer or pause, 4 s a turn but after the last.
    pauses = one.turns_per_s * 4.0 * 7 / 8
    assert one.waiting + pauses == pytest.approx(40, rel=0.05)
    assert one.mean_turn_s == pytest.approx(one.waiting / one.turns_per_s)
    assert one.turn_s.mean == pytest.approx(one.mean_turn_s, rel=0.1)
    # The fleet's bill over its sessions of eight turns.
    assert one.usd_per_session == pytest.approx(found.usd_per_hour / 3600.0 / one.turns_per_s * 8)
    assert one.usd_per_solved == pytest.approx(2.0 * (one.usd_per_session or 0.0))
    assert one.hit_rate == pytest.approx(0.75, abs=0.1)
    assert [(turn.first, turn.last) for turn in one.by_turn] == [(1, 1), (2, 5), (6, 15)]
    assert one.by_turn[0].hit_rate < one.by_turn[2].hit_rate


@pytest.mark.slow
def test_beyond_what_caches_hold_a_fleet_thrashes_less_where_new_sessions_wait() -> None:
    # Caches of 2 x 490,000 tokens, for some 130 sessions. Past that a run hangs by chance: several are taken together.
    seeds = range(3)
    fits = run(30, "least-loaded", 2000).sessions[0]
    many = [run(180, "least-loaded", 2000, seed=seed).sessions[0] for seed in seeds]
    kept = [run(180, turns=2000, seed=seed).sessions[0] for seed in seeds]
    assert mean(each.evicted for each in many) > fits.evicted + 0.1
    assert mean(each.evicted for each in kept) < 0.8 * mean(each.evicted for each in many)
    assert mean(each.hit_rate for each in kept) > mean(each.hit_rate for each in many) + 0.1


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run() -> None:
    first, again, other = run(20, turns=300), run(20, turns=300), run(20, turns=300, seed=1)
    assert msgspec.json.encode(first) == msgspec.json.encode(again)
    assert first.sessions != other.sessions


def test_sessions_of_a_recording_are_replayed_in_a_closed_loop() -> None:
    trace, _ = session_trace("recorded", shape(turns=6, context=30_000.0), 0.0)
    scaled = msgspec.structs.replace(small(), classes=(served(),))
    trace = type(trace)(trace.file, trace.arrival_s, trace.input_tokens, trace.output_tokens, blocks=trace.blocks)
    case = SimulatedCase(label="x", fleet=scaled, policy="cheapest-meeting-target")
    (one,) = one_run(CATALOG, RequestSource(None, trace, sessions=12, requests=200), case).sessions
    assert one.live == 12
    assert one.turns_per_s > 0
    assert one.hit_rate > 0.3


def test_a_workload_without_sessions_has_none_to_simulate() -> None:
    plain = read_workload(Catalog([]), Path("w.toml"), '[[class]]\nname = "chat"\nmodel = "llama-3.1-8b"\n'
                          "input = 100\noutput = 10\nrequests_per_s = 1\n")  # fmt: skip
    with pytest.raises(BadInput, match="--sessions: no class of"):
        RequestSource(plain, sessions=3).traffic(small(), 1.0, 0)
