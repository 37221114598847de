"""Which replica a request for a LoRA adapter goes to, and what makes room for another."""

from typing import Any

from tests.route.fleets import MODEL, ask, live, load, pool

from crosstie.core.fleet import Adapter
from crosstie.route.admission import WaitingRoom
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.live import LiveFleet
from crosstie.route.load import AdapterSlots
from crosstie.route.policies import make_policy
from crosstie.route.router import Router

ADAPTERS = (Adapter(name="sql", path="/a/sql"), Adapter(name="legal", path="/a/legal"))


def wanting(adapter: str = "sql", **changes: Any) -> Ask:
    made = ask(ttft_s=None, tpot_s=None, **changes)
    made.adapter = adapter
    return made


def decided(fleet: LiveFleet, wanted: Ask) -> Decision:
    return Router(fleet, make_policy("cheapest-meeting-target")).decide(wanted, 0.0)


def slots(fleet: LiveFleet, index: int) -> AdapterSlots:
    found = fleet.replicas()[index].adapters
    assert found is not None
    return found


def test_a_replica_that_has_it_goes_first_and_another_when_that_is_full() -> None:
    fleet = live(pool(max_in_flight=2, adapters=ADAPTERS))
    slots(fleet, 1).came("sql")
    for _ in range(3):
        assert decided(fleet, wanting()).replica is fleet.replicas()[1]
    load(fleet.replicas()[1], 2)
    other = decided(fleet, wanting())
    assert other.replica is fleet.replicas()[0]
    assert other.reason.endswith("; adapter sql has to be loaded there")


def test_a_pool_that_does_not_list_it_never_has_it() -> None:
    fleet = live(pool("plain", usd_per_gpu_hour=0.1), pool("adapted", adapters=ADAPTERS))
    found = decided(fleet, wanting())
    assert found.replica is not None
    assert found.replica.pool.name == "adapted"
    assert fleet.names == {MODEL: MODEL, "sql": MODEL, "legal": MODEL}


def test_with_every_place_in_use_it_is_waited_for() -> None:
    fleet = live(pool(replicas=1, adapters=ADAPTERS, max_adapters=1))
    slots(fleet, 0).came("legal")
    flight = load(fleet.replicas()[0], 1)[0]
    flight.end(0.0, output_tokens=None, input_tokens=None, completed=False)
    legal = wanting("legal")
    sent = decided(fleet, legal)
    assert sent.prediction is not None
    flight = fleet.replicas()[0].start(legal, sent.prediction, 0.0)
    found = decided(fleet, wanting("sql"))
    assert (found.outcome, found.reason) == ("wait", "no replica has a place for adapter sql: those there are in use")
    flight.end(1.0, output_tokens=None, input_tokens=None, completed=False)
    assert decided(fleet, wanting("sql")).outcome == "send"


def test_places_are_promised_once_though_loads_take_time() -> None:
    places = AdapterSlots(2)
    places.came("a")
    places.begin("b")
    assert places.ready("a")
    assert places.may_take("c", 0.0)
    # Both places are promised to what is being loaded, so "a" is about to make room.
    places.begin("c")
    assert places.has("a")
    assert not places.ready("a")
    assert [name for name in "abcd" if places.may_take(name, 0.0)] == ["b", "c"]
    places.end("b")
    assert places.ready("a")


def test_who_waits_for_an_adapter_keeps_nobody_else_waiting() -> None:
    room = WaitingRoom(10)
    stuck, _ = room.add(wanting(), 0.0, 10.0)
    plain, _ = room.add(ask(ttft_s=None, tpot_s=None), 0.0, 10.0)

    def decide(asked: Ask, now: float) -> Decision:
        return Decision("wait" if asked.adapter else "send", "")

    taken = room.take(decide, 0.0)
    assert taken is not None
    assert taken[0] is plain
    assert stuck.there


def test_an_explanation_looks_at_every_pool() -> None:
    fleet = live(pool("plain"), pool("adapted", adapters=ADAPTERS))
    found = Router(fleet, make_policy("cheapest-meeting-target")).decide(wanting(), 0.0, explain=True)
    assert [(one.pool, one.dropped) for one in found.considered] == [
        ("plain", "adapter: does not have sql"), ("adapted", None),
    ]  # fmt: skip


def test_where_it_could_not_be_loaded_it_is_not_tried_for_a_while() -> None:
    fleet = live(pool(adapters=ADAPTERS))
    slots(fleet, 0).failed("sql", 10.0)
    assert decided(fleet, wanting()).replica is fleet.replicas()[1]
    slots(fleet, 1).failed("sql", 10.0)
    assert decided(fleet, wanting()).outcome == "refuse"
    assert slots(fleet, 0).may_take("sql", 10.0)


def test_the_least_recently_used_that_nobody_uses_makes_room() -> None:
    places = AdapterSlots(2)
    for name in ("a", "b"):
        places.came(name)
    places.begin("a")
    assert places.idle() == "b"
    places.begin("b")
    assert (places.idle(), places.full, places.may_take("c", 0.0)) == (None, True, False)
    places.end("a")
    assert (places.idle(), places.may_take("c", 0.0)) == ("a", True)
    places.found(["b", "x"])
    assert places.loaded == ["x", "b"]
    places.clear()
    assert places.loaded == []
