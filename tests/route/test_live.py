"""Transitions: counts come back to nothing whatever happens, and what is completed teaches."""

import pytest
from hypothesis import given, strategies as some
from tests.route.fleets import AMD, ask, decided, live, load, pool, told

from crosstie.core.fleet import Serving
from crosstie.route.live import Replica
from crosstie.route.policies import make_policy

FLEET = live(pool(replicas=1))


def fresh() -> Replica:
    parent = FLEET.pools[0]
    return Replica("http://x", parent, 0.0)


def counts(replica: Replica) -> tuple[float, ...]:
    return (
        replica.in_flight, replica.waiting, replica.waiting_tokens, replica.held_tokens, replica.decoding_tokens,
        len(replica.queue), len(replica.targets),
    )  # fmt: skip


def test_what_came_to_nothing_costs_nothing() -> None:
    """The second part of an answer whose engine broke before its first token, or an engine that counts none."""
    flight = fresh().start(ask(), told(cached=400.0), 1.0)
    assert flight.charge_usd(0.0, 0.0) == 0.0
    assert flight.charge_usd(0.0, 1.0) > 0.0
    assert flight.charge_usd(1.0, 0.0) > 0.0


def test_a_request_goes_from_waiting_to_decoding_to_gone() -> None:
    replica = fresh()
    flight = replica.start(ask(), told(cached=400.0), 1.0)
    assert counts(replica) == (1, 1, 600.0, 1100.0, 0.0, 1, 1)
    flight.first_token(1.2)
    assert counts(replica) == (1, 0, 0.0, 1100.0, 1100.0, 0, 1)
    got = flight.end(3.19, output_tokens=200, input_tokens=1000, completed=True)
    assert got is not None
    assert got.ttft_s == pytest.approx(0.2)
    assert got.tpot_s == pytest.approx(0.01)
    assert got.charged_usd > 0
    assert counts(replica) == (0,) * 7


def test_a_flight_ends_once() -> None:
    replica = fresh()
    flight, other = load(replica, 2, decoding=False)
    assert flight.end(1.0, output_tokens=5, input_tokens=5, completed=True) is not None
    assert flight.end(1.1, output_tokens=5, input_tokens=5, completed=True) is None
    flight.first_token(1.2)
    assert counts(replica)[:2] == (1, 1)
    assert other.end(1.0, output_tokens=None, input_tokens=None, completed=False) is None
    assert counts(replica) == (0,) * 7


def test_a_failed_request_teaches_nothing() -> None:
    fleet = live(pool(replicas=1))
    replica = fleet.replicas()[0]
    for _ in range(20):
        load(replica, 1)[0].end(50.0, output_tokens=10, input_tokens=10, completed=False)
    assert replica.tpot.factor(50.0) == 1.0
    assert fleet.lengths.expected_output("chat", ask().model, None) == 200.0


def test_a_completed_request_teaches_corrections_and_lengths() -> None:
    fleet = live(pool(replicas=1))
    replica = fleet.replicas()[0]
    policy = make_policy("cheapest-meeting-target")
    before = decided(policy, fleet, ask(), 0.0).prediction
    assert before is not None
    for index in range(20):
        now = 0.5 * index
        flight = replica.start(ask(prompt_bytes=6000), before, now)
        flight.first_token(now + 5 * before.raw_ttft_s)
        flight.end(
            now + 5 * (before.raw_ttft_s + 29 * before.raw_tpot_s), output_tokens=30, input_tokens=1000, completed=True
        )  # fmt: skip
    after = decided(policy, fleet, ask(), 10.0).prediction
    assert after is not None
    assert 3 < after.tpot_s / before.tpot_s < 6
    assert 2 < after.ttft_s / before.ttft_s < 6
    assert after.predicted_usd > 2 * before.predicted_usd, "a replica that is slower gives each request more of itself"
    assert fleet.lengths.expected_output("chat", ask().model, None) < 150
    assert fleet.lengths.bytes_per_token(ask().model) > 5


def test_slower_than_predicted_within_the_limit_of_a_replica_is_no_scatter() -> None:
    """It is filled up to that while the request is there."""
    fleet = live(pool(replicas=1))
    replica, scatter = fleet.replicas()[0], fleet.pools[0].tpot_scatter
    expected = told(ttft_s=0.5, tpot_s=0.02)
    expected.tpot_limit_s, start = 0.05, scatter.margin(1.64)

    def answer(tpot_s: float) -> float:
        for _ in range(10):
            flight = replica.start(ask(), expected, 0.0)
            flight.first_token(0.5)
            flight.end(0.5 + 99 * tpot_s, output_tokens=100, input_tokens=1000, completed=True)
        return scatter.margin(1.64)

    assert answer(0.045) == start
    assert answer(0.08) > 1.2 * start


def test_one_first_token_that_nobody_saw_is_assumed() -> None:
    replica = fresh()
    flight = replica.start(ask(streams=False), told(ttft_s=0.5), 0.0)
    replica.advance(0.4)
    assert replica.waiting == 1
    replica.advance(0.8)
    assert replica.waiting == 0
    got = flight.end(2.5, output_tokens=201, input_tokens=None, completed=True)
    assert got is not None
    assert (got.ttft_s, got.tpot_s) == (None, None), "what was assumed is not told as seen"
    assert counts(replica) == (0,) * 7


def test_others_traffic_is_what_the_engine_reports_beyond_ours() -> None:
    fleet = live(AMD)
    one, two = fleet.replicas()
    load(one, 4)
    load(two, 4)
    policy = make_policy("fastest")
    one.report(running=4, waiting=0, kv_used_fraction=0.01, now=0.0)
    assert (one.external_running, one.external_waiting) == (0, 0)
    one.report(running=34, waiting=10, kv_used_fraction=0.3, now=0.0)
    assert (one.external_running, one.external_waiting) == (30, 10)
    assert decided(policy, fleet, ask(), 0.0).replica is two
    slower = one.advance(0.0).step_s
    # Later nobody knows whether they are still there, unless engines are asked more rarely.
    assert one.advance(10.0).step_s < slower
    one.report(running=34, waiting=10, kv_used_fraction=0.3, now=0.0, lasts_s=15.0)
    assert one.advance(10.0).step_s == slower
    assert Serving(metrics_every_s=5.0).metrics_last_s == 15.0
    one.report(running=1, waiting=0, kv_used_fraction=None, now=11.0)
    assert one.external_running == 0, "what has been sent counts before the engine has seen it"


def test_prefixes_are_forgotten_when_a_replica_goes_down() -> None:
    replica = fresh()
    load(replica, 1, prefix=(1, 2))
    assert replica.prefixes.match((1, 2, 3)) == 2
    replica.went_down("gone")
    assert replica.prefixes.match((1, 2, 3)) == 0


def test_what_a_replica_is_believed_to_hold_is_bounded_also_where_nobody_knows_its_cache() -> None:
    unknown = live(pool(replicas=1, accelerator=None)).pools[0]
    known = fresh()
    assert Replica("http://x", unknown, 0.0).prefixes.most < 10_000
    assert known.prefixes.most == int(known.pool.speed.cache_tokens / 512) < 200_000


def test_whoever_hangs_is_seen_before_it_answers() -> None:
    fleet = live(AMD)
    stuck, well = fleet.replicas()
    load(stuck, 1, decoding=False)
    load(well, 6)
    policy = make_policy("cheapest-meeting-target")
    assert decided(policy, fleet, ask(), 0.01).replica is stuck
    assert decided(policy, fleet, ask(), 3.0).replica is well


steps = some.lists(
    some.tuples(
        some.sampled_from(["start", "first", "end", "fail", "look", "report"]),
        some.integers(0, 30),
        some.floats(0.0, 2.0),
        some.floats(1.0, 30_000.0),
    ),
    max_size=60,
)


@given(done=steps)
def test_counts_never_go_below_nothing_and_come_back_to_it(
    done: list[tuple[str, int, float, float]],
) -> None:
    replica, flights, now = fresh(), [], 0.0
    for what, which, passed, size in done:
        now += passed
        if what == "start":
            flights.append(replica.start(ask(input_tokens=size, streams=which % 3 > 0), told(cached=size / 3), now))
        elif what == "look":
            replica.advance(now)
        elif what == "report":
            replica.report(which, which, min(passed, 1.0), now)
        elif flights:
            flight = flights[which % len(flights)]
            if what == "first":
                flight.first_token(now)
            else:
                flight.end(now, output_tokens=which, input_tokens=int(size), completed=what == "end")
        assert all(count >= 0 for count in counts(replica))
        assert replica.in_flight == sum(not flight.released for flight in flights)
        assert replica.waiting == len(replica.queue) <= replica.in_flight
        view = replica.advance(now)
        assert view.step_s > 0
        assert view.full_s >= view.eighth_s >= view.none_s > 0
    for flight in flights:
        flight.end(now, output_tokens=None, input_tokens=None, completed=False)
    assert counts(replica) == (0,) * 7
