"""Who is resident, who goes, who waits: by hand-worked cases. The laws are in test_laws.py."""

from collections.abc import Callable

import pytest

from crosstie.core.errors import BadInput
from crosstie.host.hosted import Hosted, Move, ResidencySettings, Slot
from crosstie.host.residency import Residency

GB = 1e9


def idle(slot: str, model: str) -> int:
    return 0


def busy_with(*pairs: tuple[str, str]) -> Callable[[str, str], int]:
    return lambda slot, model: int((slot, model) in pairs)


def pool(*sizes: float, room: float = 100.0, slots: int = 1, settings: ResidencySettings | None = None) -> Residency:
    """Models a, b, c, ... of so many GB that load in 10 s."""
    hosted = [Hosted(name, size * GB, 10.0) for name, size in zip("abcdefgh", sizes, strict=False)]
    return Residency(hosted, [Slot(f"s{n}", room * GB) for n in range(slots)], 0.0, settings)


def load(residency: Residency, model: str, now: float, busy: Callable[[str, str], int] = idle) -> Move:
    """Asks, loads at once, and says so."""
    residency.asked(model, now)
    move = residency.wanted(model, now, busy)
    assert move is not None, residency.why_waiting(model).why
    residency.began(move, now)
    residency.loaded(move, now + move.load.load_s)
    return move


def total(residency: Residency, what: str) -> int:
    return sum(getattr(counts, what) for counts in residency.counts.values())


def test_free_memory_is_taken_without_eviction_and_the_tightest_first() -> None:
    residency = pool(60, 30, 35, slots=2)
    first = load(residency, "a", 0.0)
    second = load(residency, "b", 10.0)
    assert first.evict == second.evict == ()
    assert first.slot is second.slot
    third = load(residency, "c", 20.0)
    assert third.slot is not first.slot
    assert total(residency, "evictions") == 0
    assert total(residency, "loads") == 3


def test_whom_nobody_asks_for_goes_first() -> None:
    residency = pool(50, 50, 50)
    load(residency, "a", 0.0)
    load(residency, "b", 10.0)
    for now in range(100, 200):
        residency.asked("a", float(now))
    move = load(residency, "c", 300.0)
    assert move.evict == ("b",)
    assert residency.counts["b"].evictions == 1
    assert [slot.key for slot in residency.resident("a")] == ["s0"]
    assert residency.resident("b") == []


def test_no_more_is_evicted_than_is_needed() -> None:
    residency = pool(10, 80, 75)
    load(residency, "a", 0.0)
    load(residency, "b", 10.0)
    # The small one is worth least by byte and would be chosen first; it is not needed once the large one goes.
    residency.asked("b", 30.0)
    assert load(residency, "c", 1000.0).evict == ("b",)


def test_what_was_just_loaded_stays_for_its_least_residence() -> None:
    residency = pool(80, 80, settings=ResidencySettings(min_residence_s=30.0, residence_loads=0.0))
    load(residency, "a", 0.0)
    residency.asked("b", 11.0)
    assert residency.wanted("b", 11.0, idle) is None
    told = residency.why_waiting("b")
    assert "a would have to go" in told.why or "just loaded" in told.why
    assert residency.wanted("b", 39.0, idle) is None
    move = residency.wanted("b", 40.0, idle)
    assert move is not None
    assert move.evict == ("a",)


def test_a_hot_model_is_not_evicted_only_because_the_cold_one_beside_it_has_just_come() -> None:
    for slots in (1, 2):
        hosted = [Hosted(name, 50.0, 1.0) for name in "abcdef"]
        residency = Residency(hosted, [Slot(f"s{n}", 100.0) for n in range(slots)], 0.0)
        hot = "ab"[:slots]
        for n, name in enumerate(hot + "cd"[:slots]):
            load(residency, name, float(n))
        for now in range(50, 100):
            for name in hot:
                residency.asked(name, float(now))
        load(residency, "e", 100.0)
        if slots == 2:
            load(residency, "f", 101.0)
        # All that is cold has its least residence still before it; what is hot has not.
        late = "f" if slots == 1 else "c"
        residency.asked(late, 103.0)
        assert residency.wanted(late, 103.0, idle) is None
        assert "may stay" in residency.why_waiting(late).why
        move = residency.wanted(late, 106.5, idle)
        assert move is not None
        assert move.evict == ("e",)
        assert all(residency.resident(name) for name in hot)


def test_who_has_gone_holds_up_nobody_and_keeps_its_place() -> None:
    residency = pool(80, 80, 80, settings=ResidencySettings(min_residence_s=30.0, patience_loads=0.0))
    load(residency, "a", 0.0)
    assert residency.wanted("b", 11.0, idle) is None
    assert residency.slots[0].claimed_by == "b"
    # Whoever asked for b has given up; c's client is there.
    residency.only(["c"])
    assert residency.wanted("c", 12.0, idle) is None
    assert residency.slots[0].claimed_by == "c"
    # b's comes again, and was there before.
    residency.only([])
    assert residency.wanted("b", 13.0, idle) is None
    assert residency.wanted("c", 13.0, idle) is None
    assert residency.slots[0].claimed_by == "b"
    assert residency.wanted("b", 40.0, idle) is not None


def test_a_model_that_is_asked_for_stays_for_some_loads() -> None:
    residency = pool(80, 80, settings=ResidencySettings(min_residence_s=0.0, residence_loads=3.0, patience_loads=0.0))
    load(residency, "a", 0.0)
    for now in range(10, 60):
        residency.asked("a", float(now))
        residency.asked("b", float(now))
        move = residency.wanted("b", float(now), idle)
        assert (move is not None) == (now >= 40), now


def test_the_worthless_newcomer_waits_its_patience_and_then_gets_its_turn() -> None:
    residency = pool(80, 80, settings=ResidencySettings(min_residence_s=0.0, residence_loads=0.0, patience_loads=2.0))
    load(residency, "a", 0.0)
    for now in range(10, 100):
        residency.asked("a", float(now))
    residency.asked("b", 100.0)
    assert residency.wanted("b", 100.0, idle) is None
    assert residency.why_waiting("b").retry_s == pytest.approx(20.0)
    assert residency.wanted("b", 119.9, idle) is None
    move = residency.wanted("b", 120.0, idle)
    assert move is not None
    assert move.why == "its turn after waiting"


def test_short_loads_are_not_waited_for() -> None:
    for load_s, waits in ((3.0, False), (3.5, True)):
        hosted = [Hosted(name, 80 * GB, load_s) for name in "ab"]
        settings = ResidencySettings(min_residence_s=0.0, residence_loads=0.0)
        residency = Residency(hosted, [Slot("s0", 100 * GB)], 0.0, settings)
        load(residency, "a", 0.0)
        for now in range(10, 100):
            residency.asked("a", float(now))
        residency.asked("b", 100.0)
        assert (residency.wanted("b", 100.0, idle) is None) == waits


def test_a_worthy_newcomer_does_not_wait() -> None:
    residency = pool(80, 80, settings=ResidencySettings(min_residence_s=0.0, residence_loads=0.0, patience_loads=2.0))
    load(residency, "a", 0.0)
    for now in range(50, 60):
        residency.asked("b", float(now))
    move = residency.wanted("b", 60.0, idle)
    assert move is not None
    assert move.why == "worth more than what it evicts"


def test_the_busy_finish_and_take_no_new_requests() -> None:
    residency = pool(80, 80, settings=ResidencySettings(min_residence_s=0.0, residence_loads=0.0, patience_loads=0.0))
    load(residency, "a", 0.0)
    residency.asked("b", 50.0)
    working = busy_with(("s0", "a"))
    assert residency.wanted("b", 50.0, working) is None
    assert "finish their requests" in residency.why_waiting("b").why
    assert residency.resident("a") == [], "it would never be idle otherwise"
    move = residency.wanted("b", 55.0, idle)
    assert move is not None
    assert move.evict == ("a",)


def test_who_leaves_for_nothing_serves_again() -> None:
    residency = pool(80, 80, settings=ResidencySettings(min_residence_s=0.0, residence_loads=0.0, patience_loads=0.0))
    load(residency, "a", 0.0)
    residency.asked("b", 50.0)
    assert residency.wanted("b", 50.0, busy_with(("s0", "a"))) is None
    residency.forget("b")
    assert [slot.key for slot in residency.resident("a")] == ["s0"]


def test_a_waiting_model_that_nobody_asks_for_any_more_is_forgotten() -> None:
    residency = pool(
        80, 80, 10, settings=ResidencySettings(min_residence_s=0.0, residence_loads=0.0, patience_loads=0.0)
    )
    load(residency, "a", 0.0)
    assert residency.wanted("b", 50.0, busy_with(("s0", "a"))) is None
    assert residency.resident("a") == []
    residency.ahead(100.0, idle)
    assert [slot.key for slot in residency.resident("a")] == ["s0"]


def test_who_has_waited_longest_goes_first() -> None:
    settings = ResidencySettings(min_residence_s=0.0, residence_loads=0.0, patience_loads=1.0)
    residency = pool(80, 80, 80, settings=settings)
    load(residency, "a", 0.0)
    for now in range(10, 100):
        residency.asked("a", float(now))
    residency.asked("b", 100.0)
    residency.asked("c", 105.0)
    assert residency.wanted("b", 100.0, idle) is None
    assert residency.wanted("c", 105.0, idle) is None
    for now in range(105, 120):
        residency.asked("c", float(now))
        residency.asked("a", float(now))
    assert residency.wanted("c", 120.0, idle) is None
    assert "waited longer" in residency.why_waiting("c").why
    move = residency.wanted("b", 120.0, idle)
    assert move is not None
    assert move.load.model == "b"


def test_pinned_models_stay_and_are_loaded_ahead() -> None:
    hosted = [Hosted("a", 60 * GB, 1.0, pinned=True), Hosted("b", 40 * GB, 1.0), Hosted("c", 40 * GB, 1.0)]
    residency = Residency(
        hosted, [Slot("s0", 100 * GB)], 0.0, ResidencySettings(min_residence_s=0.0, residence_loads=0.0)
    )
    move = residency.ahead(0.0, idle)
    assert move is not None
    assert (move.load.model, move.why) == ("a", "pinned")
    residency.began(move, 0.0)
    residency.loaded(move, 1.0)
    load(residency, "b", 2.0)
    assert load(residency, "c", 1000.0).evict == ("b",)


def test_a_crowded_model_gets_another_copy_where_nobody_needs_the_room_more() -> None:
    residency = pool(50, 50, slots=2, settings=ResidencySettings(copy_at_in_flight=4.0))
    load(residency, "a", 0.0)
    assert residency.ahead(20.0, lambda slot, model: 3) is None
    move = residency.ahead(20.0, lambda slot, model: 4 if (slot, model) == ("s0", "a") else 0)
    assert move is not None
    assert (move.load.model, move.slot.key, move.evict) == ("a", "s1", ())


def test_free_memory_is_filled_ahead_of_demand_unless_somebody_waits() -> None:
    residency = pool(80, 60, 30)
    load(residency, "b", 0.0)
    load(residency, "c", 10.0)
    load(residency, "a", 100.0)
    residency.observed("s0", ["b"], 200.0)
    residency.asked("a", 200.0)
    assert residency.wanted("a", 200.0, busy_with(("s0", "b"))) is None
    assert residency.ahead(200.0, busy_with(("s0", "b"))) is None
    residency.forget("a")
    move = residency.ahead(200.0, idle)
    assert move is not None
    assert (move.load.model, move.evict) == ("c", ())


def test_a_copy_goes_before_the_only_one() -> None:
    residency = pool(50, 50, 50, 50, slots=2)
    residency.observed("s0", ["a", "b"], 0.0)
    residency.observed("s1", ["a", "c", "unheard-of"], 0.0)
    for model in "abc":
        residency.asked(model, 30.0)
    # Asked for most, and yet one of its copies is what is missed least.
    residency.asked("a", 31.0)
    assert load(residency, "d", 100.0).evict == ("a",)
    assert len(residency.resident("a")) == 1


def test_a_failed_load_is_tried_again_later_and_later() -> None:
    residency = pool(50)
    now, pauses = 0.0, []
    for _ in range(9):
        residency.asked("a", now)
        move = residency.wanted("a", now, idle)
        assert move is not None
        residency.began(move, now)
        residency.failed(move, now)
        assert residency.wanted("a", now, idle) is None
        pauses.append(residency.why_waiting("a").retry_s)
        now += pauses[-1]
    assert pauses[:4] == [5.0, 10.0, 20.0, 40.0]
    assert pauses[-1] == 300.0
    assert total(residency, "failed") == 9
    assert total(residency, "loads") == 0
    residency.retry("a")
    assert residency.wanted("a", now - 1.0, idle) is not None


def test_a_load_that_was_put_off_is_no_failure() -> None:
    residency = pool(50)
    for now in (0.0, 5.0, 10.0, 15.0):
        residency.asked("a", now)
        move = residency.wanted("a", now, idle)
        assert move is not None
        residency.began(move, now)
        residency.put_off(move, "another loads there", now)
        assert residency.wanted("a", now + 1.0, idle) is None
        waiting = residency.why_waiting("a")
        assert (waiting.why, waiting.retry_s) == ("another loads there", 4.0), "no longer than the first time"
    assert total(residency, "failed") == 0


def test_nothing_goes_where_nobody_answers_or_the_model_cannot_be_loaded() -> None:
    residency = pool(50, slots=2)
    residency.slots[0].usable = False
    residency.slots[1].unable = {"a"}
    residency.asked("a", 0.0)
    assert residency.wanted("a", 0.0, idle) is None
    residency.slots[1].unable = set()
    move = residency.wanted("a", 1.0, idle)
    assert move is not None
    assert move.slot.key == "s1"


def test_one_load_at_a_time_on_a_replica() -> None:
    residency = pool(40, 40)
    residency.asked("a", 0.0)
    move = residency.wanted("a", 0.0, idle)
    assert move is not None
    residency.began(move, 0.0)
    assert residency.wanted("a", 1.0, idle) is None
    assert residency.why_waiting("a").retry_s == pytest.approx(9.0)
    assert residency.wanted("b", 1.0, idle) is None
    with pytest.raises(ValueError, match="loading a already"):
        residency.began(move, 1.0)
    residency.loaded(move, 10.0)
    assert residency.wanted("b", 10.0, idle) is not None


def test_cold_requests_loads_and_waits_are_counted_by_model() -> None:
    residency = pool(50, 50)
    load(residency, "a", 0.0)
    residency.asked("a", 20.0)
    counts = residency.counts
    assert [total(residency, what) for what in ("asked", "cold_waits", "loads")] == [2, 1, 1]
    mine = counts["a"]
    assert (mine.asked, mine.cold_waits, mine.loads, mine.evictions) == (2, 1, 1, 0)
    assert (mine.load_s.count, mine.load_s.total) == (1, 10.0)
    assert sum(mine.load_s.counts) == 1
    assert counts["b"].asked == 0


def test_what_can_never_be_served_is_refused() -> None:
    with pytest.raises(BadInput, match=r"b takes 111\.8 GiB; no replica of the pool has more than 93\.1 GiB"):
        pool(10, 120)
    pinned = [Hosted("a", 60 * GB, 1.0, pinned=True), Hosted("b", 50 * GB, 1.0)]
    with pytest.raises(BadInput, match="beside the pinned ones"):
        Residency(pinned, [Slot("s0", 100 * GB)], 0.0)
    with pytest.raises(BadInput, match="hosted twice"):
        Residency([Hosted("a", 1.0, 1.0)] * 2, [Slot("s0", 10.0)], 0.0)
    with pytest.raises(BadInput, match="same key"):
        Residency([Hosted("a", 1.0, 1.0)], [Slot("s0", 10.0), Slot("s0", 10.0)], 0.0)
