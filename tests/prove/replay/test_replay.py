"""Replays against emulated replicas on loopback: every request ends once, in the replica's own time."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.run.emulate.running import CATALOG, LARGE, SMALL, fleet, pool
from tests.sim.open_traffic import Arrival, simulate

from crosstie.catalog.traces import Trace, find_trace, read_trace
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.core.workload import Target
from crosstie.prove.bench.loads import BenchLoad
from crosstie.prove.bench.measure import BenchRun
from crosstie.prove.bench.server_counts import ServerCounts, server_counts
from crosstie.prove.bench.summary import PointResult, of_runs
from crosstie.prove.replay.outcomes import ClassTargets, kept_targets
from crosstie.prove.replay.replay import Replay, RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest, from_trace, merged
from crosstie.wire.loops import run_on_loop
from crosstie_gateway.emulate.faults import Fault
from crosstie_gateway.emulate.fleet import EmulatedFleet, start


def requests(count: int, gap_s: float = 0.05, tokens: tuple[int, int] = (200, 20)) -> list[TimedRequest]:
    return [TimedRequest(index * gap_s, *tokens) for index in range(count)]


def replay(
    asked: Sequence[TimedRequest], fault: Fault | None = None, *, model: str = SMALL, speed: float = 20.0, **more: Any
) -> list[RequestOutcome]:
    """Against one emulated replica, which may have a fault."""

    async def run() -> list[RequestOutcome]:
        running: EmulatedFleet = await start(CATALOG, fleet(pool(model=model)), speed=speed)
        try:
            if fault is not None:
                running.replicas[0].inject(fault)
            url = running.fleet.pools[0].backends[0]
            return await Replay(asyncio.get_running_loop(), url, model, speed=speed, **more).run(asked)
        finally:
            await running.close()

    return run_on_loop(run())


# Requests


def trace(name: str) -> Trace:
    return read_trace(find_trace(name, Path()))


def test_clients_begin_when_they_are_told_and_go_on_when_they_are_free() -> None:
    starts = [0.0, 0.4, 30.0]
    outcomes = replay(requests(40, tokens=(50, 4)), clients=3, starts_s=starts)
    due = [one.due_s for one in outcomes]
    assert all(one.served for one in outcomes)
    # Whoever is free goes on, whether or not another has begun; a loop that wakes late may mix up neighbours.
    assert due[0] == 0.0
    assert {round(one, 6) for one in due} & set(starts) == {0.0, 0.4} | ({30.0} if max(due) >= 30.0 else set())
    assert sum(one < 30.0 for one in due) > 10


def test_a_part_of_a_trace_at_its_own_pace() -> None:
    conversation = trace("azure-2023-conversation")
    assert conversation.arrival_s is not None
    part = from_trace(conversation, class_name="chat", requests=100, start=50)
    assert len(part) == 100
    assert part[0].arrival_s == 0.0
    assert part[-1].arrival_s == pytest.approx(conversation.arrival_s[149] - conversation.arrival_s[50])
    assert [one.input_tokens for one in part] == conversation.input_tokens[50:150].tolist()
    assert {one.class_name for one in part} == {"chat"}
    short = from_trace(conversation, seconds=30.0)
    assert len(short) == int((conversation.arrival_s < 30.0).sum())


def test_a_rate_stretches_every_gap_alike() -> None:
    conversation = trace("azure-2023-conversation")
    usual, slow = from_trace(conversation, requests=200), from_trace(conversation, requests=200, requests_per_s=2.0)
    assert slow[-1].arrival_s == pytest.approx(199 / 2.0)
    factor = slow[-1].arrival_s / usual[-1].arrival_s
    assert [one.arrival_s for one in slow] == pytest.approx([one.arrival_s * factor for one in usual])
    assert len(from_trace(conversation, seconds=30.0, requests_per_s=2.0)) == 60


def test_times_in_steps_are_spread_within_them() -> None:
    documents, conversation = trace("mooncake-conversation"), trace("azure-2023-conversation")
    assert documents.arrival_s is not None
    assert conversation.arrival_s is not None
    part = from_trace(documents, requests=1000)
    assert len({one.arrival_s for one in part}) == 1000
    assert [one.arrival_s for one in part] == sorted(one.arrival_s for one in part)
    # Nobody is moved by more than a step of three seconds, and a trace with a fine clock stays as it is.
    moved = [one.arrival_s - at for one, at in zip(part, documents.arrival_s, strict=False)]
    assert max(map(abs, moved)) < 3.1
    assert [one.arrival_s for one in from_trace(conversation, requests=50)] == conversation.arrival_s[:50].tolist()


def test_random_times_have_the_rate_and_no_bursts() -> None:
    part = from_trace(trace("azure-2023-code"), requests=2000, requests_per_s=2.0, own_times=False)
    counts = np.bincount([int(one.arrival_s // 10) for one in part])[:-1]
    assert counts.mean() == pytest.approx(20, rel=0.05)
    assert counts.var() < 2 * counts.mean()


def test_what_no_replica_takes_is_left_out() -> None:
    documents = trace("mooncake-conversation")
    part = from_trace(documents, requests=500, longest=8000)
    assert max(one.input_tokens + one.output_tokens for one in part) <= 8000
    with pytest.raises(BadInput, match="more than 10 tokens"):
        from_trace(documents, longest=10)
    with pytest.raises(BadInput, match="none from"):
        from_trace(documents, start=10**6)


def test_lengths_without_times_need_a_rate(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("input_tokens,output_tokens\n10,1\n20,2\n30,3\n")
    with pytest.raises(BadInput, match="rate must be given"):
        from_trace(read_trace(file))
    part = from_trace(read_trace(file), requests_per_s=4.0)
    assert [one.input_tokens for one in part] == [10, 20, 30]
    assert part[-1].arrival_s == pytest.approx(0.5)


def test_streams_of_requests_merge_by_the_clock() -> None:
    both = merged([TimedRequest(0.0, 1, 1, "a"), TimedRequest(2.0, 1, 1, "a")], [TimedRequest(1.0, 1, 1, "b")])
    assert [one.class_name for one in both] == ["a", "b", "a"]


# Replays


def test_every_request_ends_once_with_its_tokens() -> None:
    ends: list[tuple[int, int, str]] = []
    asked = requests(60)
    outcomes = replay(asked, on_progress=lambda *told: ends.append(told))
    assert [one.request for one in outcomes] == asked
    assert {(one.status, one.error) for one in outcomes} == {(200, "")}
    assert {(one.input_tokens, one.output_tokens) for one in outcomes} == {(200, 20)}
    assert all(one.ttft_s > 0 and one.tpot_s >= 0 for one in outcomes)
    assert ends[-1] == (60, 60, "replaying")
    assert ends == sorted(ends)


def test_times_are_those_of_the_emulated_engine() -> None:
    """Seconds of the clock would be ten times less."""
    asked = [TimedRequest(0.0, 2000, 400)]
    found, = replay(asked, model=LARGE, speed=10.0)  # fmt: skip
    deployment = CATALOG.deployment(
        CATALOG.model(LARGE), CATALOG.accelerator("mi300x"), pool().parallelism, "fp8", "bf16", "vllm"
    )
    simulated = simulate(deployment, [Arrival(*asked[0][:3])])
    # A busy machine is late, never early.
    assert 0.9 < found.tpot_s / simulated.tpot_s[0] < 8.0
    assert found.ttft_s > 0.8 * simulated.ttft_s[0]


def test_one_token_has_no_time_between_tokens() -> None:
    found, = replay([TimedRequest(0.0, 50, 1)])  # fmt: skip
    assert found.served
    assert math.isnan(found.tpot_s)


def test_whoever_waits_in_the_client_has_waited_all_the_same() -> None:
    """Both are due at once and only one may be under way: the second counts from when it was due."""
    first, second = replay([TimedRequest(0.0, 200, 300), TimedRequest(0.0, 200, 300)], most_in_flight=1)
    assert second.late_s > 250 * first.tpot_s
    assert second.ttft_s > second.late_s


@pytest.mark.parametrize(
    ("fault", "status", "said"),
    [
        (Fault(kind="error", share=0.5, status=500), 500, "status 500"),
        (Fault(kind="reject", share=0.5), 503, "status 503"),
        (Fault(kind="cut", share=0.5, after_tokens=2, mid_event=True), 200, ""),
        (Fault(kind="cut", share=0.5, after_tokens=2, mid_event=False), 200, ""),
    ],
)
def test_failures_are_counted(fault: Fault, status: int, said: str) -> None:
    outcomes = replay(requests(20), fault)
    failed = [one for one in outcomes if not one.served]
    assert len(outcomes) == 20
    assert len(failed) == 10
    assert {one.status for one in failed} == {status}
    assert all(said in one.error and one.error for one in failed)
    assert all(math.isnan(one.ttft_s) and math.isnan(one.tpot_s) for one in failed)


def test_silence_is_given_up() -> None:
    outcomes = replay(requests(3), Fault(kind="hang"), silence_s=0.3)
    assert ["silent" in one.error for one in outcomes] == [True] * 3


def test_a_server_that_is_not_there_fails_every_request() -> None:
    async def run() -> list[RequestOutcome]:
        return await Replay(asyncio.get_running_loop(), "http://127.0.0.1:9", SMALL).run(requests(3))

    outcomes = run_on_loop(run())
    assert ["no connection" in one.error for one in outcomes] == [True] * 3
    assert {one.status for one in outcomes} == {0}


def test_no_requests_are_no_trouble() -> None:
    assert replay([]) == []


@pytest.mark.parametrize("bad", [{"speed": 0.0}, {"most_in_flight": 0}, {"silence_s": 0.0}])
def test_nonsense_is_refused(bad: dict[str, Any]) -> None:
    loop = asyncio.new_event_loop()
    with pytest.raises(BadInput, match="above zero"):
        Replay(loop, "http://127.0.0.1:9", SMALL, **bad)
    loop.close()


def test_a_class_that_no_header_can_carry_is_refused() -> None:
    with pytest.raises(BadInput, match="header"):
        replay([TimedRequest(0.0, 1, 1, "a\r\nb: c")])


# What it comes to

CHAT = ClassTargets(Target(seconds=1.0, percentile=0.5), Target(seconds=0.05, percentile=0.9))


def outcome(ttft_s: float, tpot_s: float, error: str = "", pool: str = "a", at: float = 0.0) -> RequestOutcome:
    asked = TimedRequest(at, 90, 10, "chat")
    tokens = (0, 0) if error else (90, 10)
    return RequestOutcome(
        asked, pool=pool, status=200, error=error, ttft_s=ttft_s, tpot_s=tpot_s, input_tokens=tokens[0],
        output_tokens=tokens[1],
    )  # fmt: skip


def came_to(
    outcomes: list[RequestOutcome],
    targets: ClassTargets,
    fleet: Fleet | None = None,
    counted: ServerCounts | None = None,
) -> PointResult:
    run = BenchRun(outcomes, 0.0, 1.0, 0.0, [], interrupted=False, gave_up=False, counted=counted)
    return of_runs(BenchLoad(by_trace=True), [run], targets, fleet=fleet)


OF_CHAT = ClassTargets(by_class={"chat": CHAT})


def test_shares_within_targets() -> None:
    seen = [
        outcome(0.5, 0.04),
        outcome(0.5, 0.06, pool="b", at=10.0),
        outcome(2.0, math.nan),
        outcome(math.nan, math.nan, error="cut"),
    ]
    shares = [(True, True), (True, False), (False, True), (False, False)]
    assert [kept_targets(one, CHAT) for one in seen] == [kept_targets(one, OF_CHAT) for one in seen] == shares
    result = came_to(seen, OF_CHAT)
    chat, = result.classes  # fmt: skip
    assert (chat.ttft_kept, chat.tpot_kept, chat.kept) == (0.5, 0.5, 0.25)
    assert (result.requests, result.failed, result.kept) == (4, 1, 0.25)
    # The median TTFT is kept, the ninth of ten TPOTs is not.
    assert not result.holds
    assert came_to(seen, ClassTargets(by_class={"chat": ClassTargets(CHAT.ttft)})).holds
    assert {one.name: one.requests for one in result.pools} == {"a": 3, "b": 1}
    assert result.faults == [("cut", 1)]
    assert chat.seen.ttft_s.p50 == 0.5
    assert not result.disturbed
    assert result.turned_away == 0
    full = RequestOutcome(seen[0].request, status=429, error="come again")
    told = came_to([*seen, full], OF_CHAT)
    assert (told.failed, told.turned_away) == (2, 1)


def test_a_client_that_stood_still_says_so() -> None:
    late = outcome(0.5, 0.04)
    late.late_s = 0.7
    assert came_to([outcome(0.5, 0.04)] * 200 + [late], OF_CHAT).disturbed


def test_without_targets_a_class_keeps_all_that_was_served() -> None:
    result = came_to([outcome(9.0, 9.0), outcome(math.nan, math.nan, error="cut")], ClassTargets())
    assert (result.kept, result.classes[0].kept, result.classes[0].ttft_kept) == (None, 0.5, None)


def test_what_was_spent_is_read_from_the_gateway_s_metrics() -> None:
    page = "\n".join((
        "# TYPE crosstie_usd_total counter",
        'crosstie_usd_total{pool="a"} 0.5',
        'crosstie_usd_total{pool="b"} 1.5',
        'crosstie_tokens_total{pool="a",kind="input"} 1000000',
        'crosstie_tokens_total{pool="a",kind="output"} 3000000',
        'crosstie_in_flight{pool="a",backend="x"} 3',
    ))  # fmt: skip
    spent = ServerCounts.read(page)
    assert spent is not None
    assert (spent.usd, spent.tokens) == (2.0, 4e6)
    since = spent.since(ServerCounts(usd=0.5, tokens=2e6))
    assert came_to([outcome(0.5, 0.04)], CHAT, counted=since).attributed_usd_per_million_tokens == pytest.approx(0.75)
    # An engine keeps no accounts.
    assert ServerCounts(looked_up=1.0).usd_per_million_tokens is None
    assert ServerCounts.read("") is None


def test_the_fleets_bill_over_good_tokens() -> None:
    served = fleet(pool(replicas=2))
    result = came_to([outcome(0.5, 0.01), outcome(0.5, 0.01, at=3600.0)], OF_CHAT, served)
    # Two GPUs at $1.30 for an hour, over 200 tokens.
    assert result.fleet_usd_per_million_tokens_within_target == pytest.approx(2.6 / 200 * 1e6)
    assert came_to([outcome(5.0, 0.01)], OF_CHAT, served).fleet_usd_per_million_tokens_within_target == math.inf


def test_where_nobody_answers_nothing_is_counted() -> None:
    assert server_counts("http://127.0.0.1:9", None) is None
