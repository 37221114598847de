"""Sessions: who goes on with whom, where their next turn goes, and when new ones wait."""

from math import inf

import pytest
from tests.route.fleets import AMD, NVIDIA, ask, decided, live, load, told

from crosstie.route.ask import Ask
from crosstie.route.live import LiveFleet, Replica
from crosstie.route.policies import make_policy
from crosstie.route.session import SessionClass

POLICY = make_policy("cheapest-meeting-target")
BLOCK = 512


def turn(session: int, blocks: int, **changes: object) -> Ask:
    """A turn whose prompt has so many blocks of its session."""
    prefix = tuple(1000 * session + place for place in range(blocks))
    return ask(prefix=prefix, input_tokens=float(BLOCK * blocks + 10), ttft_s=5.0, **changes)


def took(fleet: LiveFleet, one: Ask, replica: Replica, now: float, lasts_s: float = 1.0) -> None:
    """A turn from then on, on that replica."""
    one.under_way = fleet.sessions.find(one)
    flight = replica.start(one, told(), now)
    flight.first_token(now + 0.1)
    flight.end(now + lasts_s, output_tokens=200, input_tokens=int(one.input_tokens), completed=True)


def coming_back(fleet: LiveFleet, replica: Replica, sessions: range, blocks: int = 20, turns: int = 4) -> float:
    """So many sessions that take turns there every ten seconds; when they have ended their last."""
    for number in range(turns):
        for session in sessions:
            took(fleet, turn(session, blocks + number), replica, 10.0 * number)
    return 10.0 * turns - 5.0


def test_a_prompt_goes_on_with_the_session_whose_last_block_it_has() -> None:
    fleet = live(AMD)
    first, second = fleet.replicas()
    took(fleet, turn(1, 4), first, 0.0)
    took(fleet, turn(2, 4), second, 0.0)
    on = fleet.sessions.find(turn(2, 6))
    assert on is not None
    assert on.home is second
    # The same system prompt, and another task after it.
    assert fleet.sessions.find(ask(prefix=(1000, 1001, 77))) is None
    assert len(fleet.sessions) == 2
    took(fleet, turn(2, 6), second, 9.0)
    assert len(fleet.sessions) == 2


def test_sub_agents_and_what_follows_them_are_of_the_session_that_sent_them_off() -> None:
    fleet = live(AMD)
    first, _ = fleet.replicas()
    took(fleet, turn(1, 4), first, 0.0)
    session = fleet.sessions.find(turn(1, 5))
    assert session is not None
    # Two at once, each with a task of its own behind what the session has.
    flights = []
    for own in (7000, 8000):
        helper = ask(prefix=(*turn(1, 4).prefix, own), input_tokens=2700.0, ttft_s=5.0)
        helper.under_way = fleet.sessions.find(helper)
        assert helper.under_way is session
        flights.append(first.start(helper, told(), 5.0))
    # What the other's answer was is not there for this one, and the session's own next prompt has neither.
    assert first.cached_tokens(turn(1, 6), BLOCK) == 4 * BLOCK
    for flight in flights:
        flight.end(8.0, output_tokens=200, input_tokens=2700, completed=True)
    assert fleet.sessions.find(turn(1, 6)) is session
    assert len(fleet.sessions) == 1
    assert (session.turns, session.in_flight) == (3, 0)
    # Long after it was given up, a session that begins alike is another one.
    took(fleet, turn(1, 6), first, 9.0)
    fleet.sessions.advance(9000.0)
    assert fleet.sessions.find(turn(1, 4)) is None
    assert fleet.sessions.find(turn(1, 7)) is session


def test_only_so_many_prompts_of_a_session_are_remembered() -> None:
    fleet = live(AMD)
    first, _ = fleet.replicas()
    for number in range(70):
        took(fleet, turn(1, 4 + number), first, 2.0 * number)
    assert fleet.sessions.find(turn(1, 8)) is None
    assert fleet.sessions.find(turn(1, 20)) is fleet.sessions.find(turn(1, 80)) is not None


def test_the_next_turn_goes_where_the_cache_is() -> None:
    fleet = live(AMD)
    first, second = fleet.replicas()
    took(fleet, turn(1, 40), first, 0.0)
    load(first, 4)
    assert decided(POLICY, fleet, turn(1, 44), 10.0).replica is first
    assert decided(POLICY, fleet, turn(2, 44), 10.0).replica is second


def test_unless_waiting_there_costs_more_than_computing_it_again() -> None:
    fleet = live(AMD)
    first, second = fleet.replicas()
    took(fleet, turn(1, 40), first, 0.0)
    load(first, 20, now=9.9, decoding=False, input_tokens=20_000.0)
    assert decided(POLICY, fleet, turn(1, 44), 10.0).replica is second


def test_the_answer_is_in_the_cache_as_well() -> None:
    fleet = live(AMD)
    first, _ = fleet.replicas()
    took(fleet, turn(1, 10), first, 0.0)
    got = decided(POLICY, fleet, turn(1, 12), 5.0).prediction
    assert got is not None
    # Ten tokens of the prompt beyond its whole blocks, and 200 of the answer.
    assert got.cached_tokens == 10 * BLOCK + 10 + 200


def test_a_session_under_way_does_not_wait_for_targets_that_are_lost() -> None:
    fleet = live(AMD)
    first, second = fleet.replicas()
    took(fleet, turn(1, 40), first, 0.0)
    for replica in (first, second):
        load(replica, 30, now=9.9, decoding=False, input_tokens=20_000.0)
    assert decided(POLICY, fleet, turn(1, 44, patience_s=10.0), 10.0).outcome == "send"
    assert decided(POLICY, fleet, turn(2, 44, patience_s=10.0), 10.0).outcome == "wait"


def small_fleet(replicas: int = 1) -> LiveFleet:
    """With caches for some 40 sessions of 11,000 tokens each."""
    fleet = live(NVIDIA)
    for pool in fleet.pools:
        pool.speed.cache_tokens = 450_000.0
        pool.staff(pool.replicas[:replicas])
    return fleet


def test_a_new_session_waits_where_the_cache_is_full_and_those_in_flight_need_it() -> None:
    fleet = small_fleet()
    (only,) = fleet.replicas()
    now = coming_back(fleet, only, range(20))
    load(only, 30, now=now)
    new = turn(99, 20, patience_s=10.0)
    assert decided(POLICY, fleet, new, now).outcome == "send", "there is room for twenty more"
    fleet = small_fleet()
    (only,) = fleet.replicas()
    now = coming_back(fleet, only, range(60))
    load(only, 1, now=now)
    assert decided(POLICY, fleet, new, now).outcome == "send", "there is time to compute a few again"
    load(only, 29, now=now)
    got = decided(POLICY, fleet, new, now)
    assert got.outcome == "wait"
    assert "sessions under way" in got.reason
    # Who comes back is served, and who cannot wait any longer is not kept.
    assert decided(POLICY, fleet, turn(7, 24, patience_s=10.0), now).outcome == "send"
    new.waited_s = 10.0
    assert decided(POLICY, fleet, new, now).outcome == "send"


def test_prompts_of_token_ids_have_fewer_tokens_a_block() -> None:
    fleet = live(AMD)
    first, _ = fleet.replicas()
    # A block is so many bytes: of ids written out, hardly more than half the tokens that it has of text.
    ids = ask(prefix=tuple(range(40)), input_tokens=40 * 280.0 + 90.0)
    flight = first.start(ids, told(), 0.0)
    flight.end(1.0, output_tokens=5, input_tokens=int(ids.input_tokens), completed=True)
    shares = ask(prefix=(*range(14), *range(100, 126)), input_tokens=ids.input_tokens)
    assert first.cached_tokens(shares, fleet.lengths.tokens_a_block(shares)) == pytest.approx(14 * 280, rel=0.01)
    text = ask(prefix=tuple(range(40)), input_tokens=40 * 512.0 + 90.0)
    assert fleet.lengths.tokens_a_block(text) == 512.0


def test_who_does_not_come_back_is_no_more_waited_for() -> None:
    fleet = small_fleet()
    (only,) = fleet.replicas()
    now = coming_back(fleet, only, range(60))
    load(only, 1, now=now + 3600.0, decoding=False, input_tokens=4000.0)
    fleet.sessions.advance(now + 3600.0)
    assert decided(POLICY, fleet, turn(99, 20, patience_s=10.0), now + 3600.0).outcome == "send"
    assert only.warm_tokens == pytest.approx(0.0, abs=1e-3)


def test_the_last_turn_of_a_session_leaves_nothing_to_wait_for() -> None:
    fleet = small_fleet()
    (only,) = fleet.replicas()
    now = coming_back(fleet, only, range(60))
    for session in range(60):
        last = turn(session, 24)
        last.pause_s = inf
        took(fleet, last, only, now)
    assert only.warm_tokens == pytest.approx(0.0, abs=1e-3)
    assert len(fleet.sessions) == 0
    load(only, 1, now=now + 2.0, decoding=False, input_tokens=4000.0)
    assert decided(POLICY, fleet, turn(99, 20, patience_s=10.0), now + 2.0).outcome == "send"


def test_a_session_that_says_when_it_comes_back_is_waited_for_that_long() -> None:
    fleet = small_fleet()
    (only,) = fleet.replicas()
    away = turn(1, 20)
    away.pause_s = 600.0
    took(fleet, away, only, 0.0)
    # Nothing of its class has been seen: without its word a minute is waited, and not for the whole of it.
    fleet.sessions.advance(1000.0)
    assert only.warm_tokens == pytest.approx(20 * BLOCK + 10, rel=0.1)
    fleet.sessions.advance(1300.0)
    assert only.warm_tokens == pytest.approx(0.0, abs=1e-3)


def test_requests_that_nobody_goes_on_with_keep_nobody_waiting() -> None:
    fleet = small_fleet()
    (only,) = fleet.replicas()
    for session in range(100):
        took(fleet, turn(session, 20), only, 0.1 * session)
    load(only, 1, now=12.0, decoding=False, input_tokens=4000.0)
    assert decided(POLICY, fleet, turn(999, 20, patience_s=10.0), 12.0).outcome == "send"


def test_a_replica_that_is_lost_is_nobody_s_home() -> None:
    fleet = live(AMD)
    first, _ = fleet.replicas()
    took(fleet, turn(1, 40), first, 0.0)
    first.went_down("gone")
    first.came_up(5.0)
    on = fleet.sessions.find(turn(1, 44))
    assert on is not None
    assert on.home is None
    assert (first.warm_sessions, first.warm_tokens) == (0.0, 0.0)
    assert decided(POLICY, fleet, turn(1, 44), 6.0).outcome == "send"


def test_how_long_to_wait_is_learnt_from_pauses() -> None:
    kind = SessionClass()
    assert kind.pause_s() == 60.0
    for seconds in range(1, 101):
        kind.saw_pause(float(seconds))
    assert kind.pause_s() == pytest.approx(2 * 96.0, abs=2.0)
    for _ in range(300):
        kind.saw_pause(2.0)
    assert kind.pause_s() == 4.0, "by the last ones"


def test_how_large_sessions_become_is_learnt_before_the_first_has_ended() -> None:
    kind = SessionClass()
    assert (kind.returns(), kind.mean_tokens()) == (0.0, 0.0)
    for _ in range(10):
        kind.saw_turn(1000.0, None)
    assert (kind.returns(), kind.mean_tokens()) == (0.0, 1000.0)
    for number in range(1, 20):
        for _ in range(10):
            kind.saw_turn(1000.0 + 500.0 * number, 500.0)
    assert kind.returns() == pytest.approx(0.95)
    assert kind.mean_tokens() == pytest.approx(1000.0 + 9.5 * 500.0)


def test_turns_are_counted_by_what_they_find() -> None:
    fleet = live(AMD)
    first, second = fleet.replicas()
    took(fleet, turn(1, 10), first, 0.0)
    (counts,) = fleet.sessions.counts().values()
    assert (counts.begun, sum(counts.turns.values())) == (0, 0), "nobody knows yet that it is one"
    for replica, now, cached in ((first, 10.0, 5000.0), (first, 20.0, 0.0), (second, 30.0, 6000.0)):
        again = turn(1, 11)
        again.under_way = fleet.sessions.find(again)
        flight = replica.start(again, told(cached=cached), now)
        assert list(fleet.sessions.by_state().values()) == [{"answered": 1, "warm": 0}]
        flight.end(now + 1.0, output_tokens=200, input_tokens=5642, completed=True)
    assert counts.turns == {"home": 1, "evicted": 1, "moved": 1}
    assert counts.begun == 1
    assert counts.usd > 0.0
    assert list(fleet.sessions.by_state().values()) == [{"answered": 0, "warm": 1}]


def test_engines_keep_the_cache_of_who_is_likely_to_come_back_and_until_it_is_not() -> None:
    fleet = live(AMD)
    first, second = fleet.replicas()
    let_go: list[tuple[str, int]] = []
    fleet.sessions.let_go = lambda replica, number: let_go.append((replica.key, number))
    took(fleet, turn(1, 4), first, 0.0)
    session = fleet.sessions.find(turn(1, 5))
    assert session is not None
    # Nobody knows yet that sessions of this class come back; the client may say so, or that this one does not.
    assert fleet.sessions.keep(session, None) == 0
    assert fleet.sessions.keep(session, inf) == 0
    assert fleet.sessions.keep(session, 30.0) == 1 == fleet.sessions.keep(session, None) + 1
    took(fleet, turn(1, 5), first, 10.0)
    assert (fleet.sessions.keep(session, None), let_go) == (1, [])
    # It moves: its old home need not keep it, and its new one knows it by another number.
    took(fleet, turn(1, 6), second, 20.0)
    assert let_go == [(first.key, 1)]
    assert fleet.sessions.keep(session, None) == 2
    fleet.sessions.advance(1000.0)
    assert let_go[1:] == [(second.key, 2)]
    took(fleet, turn(1, 7), second, 1001.0)
    assert fleet.sessions.keep(session, None) == 3
    last = turn(1, 8)
    last.pause_s = inf
    took(fleet, last, second, 1010.0)
    assert let_go[2:] == [(second.key, 3)]
    # What a lost replica held, nobody has to let go.
    took(fleet, turn(2, 4), first, 1020.0)
    other = fleet.sessions.find(turn(2, 5))
    assert other is not None
    assert fleet.sessions.keep(other, 5.0) == 4
    fleet.sessions.lost(first)
    fleet.sessions.advance(5000.0)
    assert len(let_go) == 3
