"""The waiting room: order, deadlines, a bound; and nobody is lost in it."""

from typing import Any

import pytest
from hypothesis import given, strategies as some
from tests.route.fleets import ask, live, load, pool, told

from crosstie.route.admission import Ticket, WaitingRoom
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.policies import make_policy
from crosstie.route.router import Router

FLEET = live(pool(replicas=1, max_in_flight=2))


def anybody(one: Ask, now: float) -> Decision:
    return Decision("send", "")


def nobody(one: Ask, now: float) -> Decision:
    return Decision("wait", "")


def order(room: WaitingRoom, now: float = 0.0) -> list[Any]:
    found = []
    while (taken := room.take(anybody, now)) is not None:
        found.append(taken[0].item)
    return found


def test_priority_first_then_arrival() -> None:
    room = WaitingRoom(10)
    for item, priority in (("a", 1), ("b", 0), ("c", 2), ("d", 1), ("e", 2)):
        assert room.add(ask(priority=priority), 0.0, 5.0, item)[1] is None
    assert len(room) == 5
    assert room.by_class() == {ask().class_name or ask().model: 5}
    assert order(room) == ["c", "e", "a", "d", "b"]
    assert len(room) == 0


def test_those_who_are_late_anyway_come_after_those_who_are_not() -> None:
    room = WaitingRoom(10)
    room.add(ask(ttft_s=1.0), 0.0, 9.0, "old")
    room.add(ask(ttft_s=1.0), 0.9, 9.0, "new")
    room.add(ask(ttft_s=None), 0.95, 9.0, "any time")
    assert order(room, 1.0) == ["new", "any time", "old"]


def test_a_full_room_sheds_the_newest_of_the_lowest_priority() -> None:
    room = WaitingRoom(2)
    low, _ = room.add(ask(priority=0), 0.0, 5.0, "low")
    room.add(ask(priority=1), 0.0, 5.0, "normal")
    _, shed = room.add(ask(priority=2), 0.0, 5.0, "high")
    assert shed is low
    ticket, shed = room.add(ask(priority=1), 0.0, 5.0, "too late")
    assert shed is ticket, "nobody of the same priority is pushed out by a newcomer"
    assert order(room) == ["high", "normal"]


def of(tenant: int, **fields: Any) -> Ask:
    made = ask(**fields)
    made.tenant = tenant
    return made


def test_tenants_take_turns_by_tokens_and_each_one_s_own_go_by_arrival() -> None:
    room = WaitingRoom(1000)
    for index in range(200):
        room.add(of(1, input_tokens=1000.0), 0.0, 5.0, ("hog", index))
    for index in range(3):
        room.add(of(2, input_tokens=1000.0), 0.0, 5.0, ("other", index))
    room.add(of(3, input_tokens=10.0), 0.0, 5.0, ("small", 0))
    room.add(of(3, input_tokens=10.0), 0.0, 5.0, ("small", 1))
    got = order(room)
    assert got[:8] == [
        ("hog", 0), ("other", 0), ("small", 0), ("small", 1), ("hog", 1), ("other", 1), ("hog", 2), ("other", 2)
    ]  # fmt: skip
    assert [index for name, index in got if name == "hog"] == list(range(200))


def test_a_session_that_is_answered_already_waits_for_those_that_are_not() -> None:
    room, fleet = WaitingRoom(1000), live(pool(replicas=1))
    (replica,) = fleet.replicas()
    calls = [ask(session="agent") for _ in range(4)]
    for call in calls[:2]:
        call.under_way = fleet.sessions.find(call)
        replica.start(call, told(), 0.0)
    for index, call in enumerate([*calls[2:], ask(session="other"), ask()]):
        call.under_way = fleet.sessions.find(call)
        room.add(call, 0.0, 5.0, index)
    assert order(room) == [2, 3, 0, 1]


def test_however_many_calls_of_one_session_wait_another_model_s_request_is_found_behind_them() -> None:
    room, fleet = WaitingRoom(1000), live(pool(replicas=1))
    (replica,) = fleet.replicas()
    for index in range(200):
        call = ask(session="agent")
        call.under_way = fleet.sessions.find(call)
        room.add(call, 0.0, 5.0, index)
        if not index:
            replica.start(call, told(), 0.0)
    room.add(ask(model="free"), 0.0, 5.0, "free")
    taken = room.take(lambda one, now: anybody(one, now) if one.model == "free" else nobody(one, now), 1.0)
    assert taken is not None
    assert taken[0].item == "free"


def test_who_comes_later_has_saved_up_no_turns_and_who_left_is_charged_for_nothing() -> None:
    room = WaitingRoom(1000)
    for index in range(20):
        room.add(of(1), 0.0, 5.0, ("first", index))
    for _ in range(10):
        room.take(anybody, 0.0)
    late = [room.add(of(2), 0.0, 5.0, ("second", index))[0] for index in range(20)]
    for ticket in late[5:]:
        room.leave(ticket)
    assert [name for name, _ in order(room)] == ["first", "second"] * 5 + ["first"] * 5


def test_a_full_room_sheds_the_newest_of_the_tenant_who_has_most_there() -> None:
    room = WaitingRoom(5)
    for index in range(4):
        room.add(of(1, ttft_s=1.0), 0.0, 5.0, ("hog", index))
    room.take(nobody, 0.9)
    for index, shed in ((0, None), (1, ("hog", 3)), (2, ("other", 2))):
        found = room.add(of(2, ttft_s=1.0), 0.9, 5.0, ("other", index))[1]
        assert (found and found.item) == shed
    assert len(room) == 5


def test_deadlines_are_kept_in_their_own_order() -> None:
    room = WaitingRoom(10)
    for item, deadline in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        room.add(ask(), 0.0, deadline, item)
    assert [ticket.item for ticket in room.expired(2.0)] == ["b", "c"]
    assert room.expired(2.9) == []
    assert len(room) == 1


def test_who_leaves_is_gone_once() -> None:
    room = WaitingRoom(10)
    ticket, _ = room.add(ask(), 0.0, 1.0)
    assert room.leave(ticket)
    assert not room.leave(ticket)
    assert room.expired(2.0) == []
    assert room.take(anybody, 0.0) is None
    assert len(room) == 0


def test_the_next_one_that_a_policy_would_send_is_taken() -> None:
    replica = FLEET.replicas()[0]
    flights = load(replica, 2)
    router = Router(FLEET, make_policy("cheapest-meeting-target"))
    room = WaitingRoom(10)
    room.add(ask(), 0.0, 5.0, "waits")
    room.add(ask(model="gone"), 0.0, 5.0, "refused")
    taken = room.take(router.decide, 0.1)
    assert taken is not None
    assert (taken[0].item, taken[1].outcome) == ("refused", "refuse"), "what cannot be served need not wait"
    assert room.take(router.decide, 0.2) is None
    flights[0].end(0.3, output_tokens=None, input_tokens=None, completed=False)
    taken = room.take(router.decide, 0.3)
    assert taken is not None
    assert (taken[0].item, taken[1].replica) == ("waits", replica)
    assert taken[0].ask.waited_s == pytest.approx(0.3)
    flights[1].end(0.3, output_tokens=None, input_tokens=None, completed=False)


def test_one_kind_that_is_stuck_is_tried_once_and_does_not_block_others() -> None:
    asked: list[str | None] = []

    def only_pinned(one: Ask, now: float) -> Decision:
        asked.append(one.pin)
        return Decision("send" if one.pin else "wait", "")

    room = WaitingRoom(100)
    for index in range(50):
        room.add(ask(), 0.0, 5.0, index)
    room.add(ask(pin="amd"), 0.0, 5.0, "pinned")
    taken = room.take(only_pinned, 0.0)
    assert taken is not None
    assert taken[0].item == "pinned"
    assert asked == [None, "amd"]


def test_clients_are_told_when_to_come_again() -> None:
    room = WaitingRoom(10)
    assert room.retry_after_s(0.0) == 1.0
    for index in range(60):
        room.add(ask(), float(index), index + 100.0)
        room.add(ask(), float(index), index + 100.0)
        room.take(anybody, 2.0 * index)
    assert 5.0 < room.retry_after_s(120.0) <= 60.0
    assert room.retry_after_s(1e6) == 60.0


@given(
    done=some.lists(
        some.tuples(some.sampled_from(["add", "take", "leave", "expire"]), some.integers(0, 2), some.floats(0, 3)),
        max_size=80,
    ),
    most=some.integers(1, 8),
)
def test_whoever_comes_leaves_in_exactly_one_way(done: list[tuple[str, int, float]], most: int) -> None:
    room, now = WaitingRoom(most), 0.0
    came: list[Ticket] = []
    left: list[Ticket] = []
    for what, number, passed in done:
        now += passed
        if what == "add":
            ticket, shed = room.add(ask(priority=number), now, now + 2.0)
            came.append(ticket)
            left += [shed] if shed else []
        elif what == "take":
            taken = room.take(anybody if number else nobody, now)
            left += [taken[0]] if taken else []
        elif what == "expire":
            left += room.expired(now)
        elif came and room.leave(came[number % len(came)]):
            left.append(came[number % len(came)])
        assert len(room) == len(came) - len(left) <= most
    left += room.expired(now + 10.0)
    assert len(room) == 0
    assert sorted(ticket.number for ticket in left) == [ticket.number for ticket in came]


def test_of_each_kind_one_is_asked_about() -> None:
    """However many wait: whoever comes after one that must wait would only take its place."""
    room, asked = WaitingRoom(100), []

    def hears(one: Ask, now: float) -> Decision:
        asked.append(one.class_name)
        return Decision("wait", "")

    tickets = [room.add(ask(class_name=name), 0.0, 5.0, name)[0] for name in ["a"] * 40 + ["b"] * 40]
    assert room.take(hears, 1.0) is None
    assert asked == ["a", "b"]
    for ticket in tickets[:40]:
        room.leave(ticket)
    asked.clear()
    assert room.take(hears, 2.0) is None
    assert asked == ["b"]
