"""A router brings its fleet up to the moment; a decision itself changes nothing of it."""

from math import inf
from typing import Any, get_args

import pytest
from tests.route.fleets import ask, live, load, pool

from crosstie.core.errors import BadInput
from crosstie.core.fleet import Policy
from crosstie.route.live import LiveFleet, Promise
from crosstie.route.load import SharedLoad
from crosstie.route.policies import POLICIES, make_policy
from crosstie.route.router import Router

_COUNTS = (
    "in_flight", "waiting", "waiting_tokens", "held_tokens", "decoding_tokens", "prompt_rate", "rate_at",
    "last_first_at", "head_started", "head_tokens", "busy_until", "external_running", "external_until", "fresh_until",
    "factors_until", "since", "up", "draining",
)  # fmt: skip
_SEEN = (
    "ahead_tokens", "before_s", "free_tokens", "full_s", "late_s", "limit", "none_s", "room", "step_s", "stretch",
    "strictest_tpot_s", "strictest_ttft_s", "tpot_factor", "ttft_factor",
)  # fmt: skip


class Cell:
    """A place on a board that nobody else uses; it keeps what was written."""

    def __init__(self) -> None:
        self.written: list[SharedLoad] = []
        self.elsewhere: list[SharedLoad] = []
        self.busy_until = float("-inf")
        self.changed = False

    def write(self, load: SharedLoad) -> None:
        self.written.append(load)

    def read(self) -> list[SharedLoad]:
        return self.elsewhere

    def tell(self, **common: float) -> None:
        raise AssertionError("nobody is full")

    def in_flight_elsewhere(self) -> int:
        return sum(int(one[0]) for one in self.elsewhere)


def state(fleet: LiveFleet) -> list[Any]:
    found: list[Any] = []
    for one in fleet.pools:
        found.append((one.name, one.slowness, one.slowness_until, len(one.sessions), one.draining))
        for replica in one.replicas:
            found.append([getattr(replica, name) for name in _COUNTS])
            found.append([getattr(replica.view, name) for name in _SEEN])
            found.append((list(replica.queue), list(replica.silent), dict(replica.targets), len(replica.prefixes)))
    return found


def busy_fleet() -> LiveFleet:
    """With requests that decode, that wait, and whose first token nobody will see."""
    fleet = live(pool("amd", replicas=2), pool("nvidia", "h200", replicas=2))
    for replica in fleet.replicas():
        load(replica, 2)
        load(replica, 1, decoding=False)
        load(replica, 1, decoding=False, streams=False)
    return fleet


@pytest.mark.parametrize("name", get_args(Policy))
def test_deciding_twice_changes_nothing_of_the_fleet(name: Policy) -> None:
    fleet, policy = busy_fleet(), make_policy(name)
    cells = {replica.key: Cell() for replica in fleet.replicas()}
    for replica in fleet.replicas():
        replica.elsewhere.cell = cells[replica.key]
    fleet.advance(0.04, ask().model)
    before = state(fleet)
    # Later than the fleet was advanced to: a decision that advanced it would show.
    first = policy.choose(fleet, ask(session="s", prefix=(1, 2)), 1.0, explain=True)
    assert state(fleet) == before
    second = policy.choose(fleet, ask(session="s", prefix=(1, 2)), 1.0, explain=True)
    assert state(fleet) == before
    assert not any(cell.written for cell in cells.values())
    assert first.outcome == second.outcome == "send"


def test_advancing_moves_flights_and_tells_of_it() -> None:
    fleet = busy_fleet()
    cells = {replica.key: Cell() for replica in fleet.replicas()}
    router = Router(fleet, make_policy("fastest"))
    router.share(dict(cells))
    for cell in cells.values():
        cell.written.clear()
    before = state(fleet)
    router.decide(ask(), 1.0)
    assert state(fleet) != before
    # Those whose first token nobody sees are assumed to decode by now.
    assert [replica.waiting for replica in fleet.replicas()] == [1, 1, 1, 1]
    assert all(len(cell.written) == 1 for cell in cells.values())


def test_only_the_pools_of_the_model_are_advanced() -> None:
    fleet = busy_fleet()
    before = state(fleet)
    fleet.advance(1.0, "another model")
    assert state(fleet) == before


def test_a_replica_that_others_have_filled_since_is_passed_over() -> None:
    fleet = live(pool("amd", replicas=2, max_in_flight=4))
    router, cells = Router(fleet, make_policy("least-loaded")), {one.key: Cell() for one in fleet.replicas()}
    router.share(dict(cells))
    assert router.decide(ask(), 0.0).outcome == "send"
    first, second = fleet.replicas()
    cells[first.key].elsewhere = [(4.0, *[0.0] * 8, float("inf"), 0.0, float("-inf"))]
    assert {router.decide(ask(), 0.001).replica for _ in range(4)} == {second}
    cells[second.key].elsewhere = cells[first.key].elsewhere
    assert router.decide(ask(), 0.002).outcome == "wait"


def test_a_replica_that_only_others_use_is_not_idle() -> None:
    """One that misses everywhere waits for a busy replica, and does not wait for an idle one, whoever keeps it busy."""
    fleet = live(pool("amd", replicas=1))
    router = Router(fleet, make_policy("cheapest-meeting-target"))
    (replica,) = fleet.replicas()
    cell = Cell()
    router.share({replica.key: cell})
    hopeless = ask(ttft_s=1e-6, tpot_s=1e-6, patience_s=10.0)
    assert router.decide(hopeless, 0.0).outcome == "send"
    cell.elsewhere, cell.changed = [(3.0, 0.0, 0.0, 900.0, 900.0, 0.0, 0.0, 0.0, 0.0, inf, 0.0, -inf)], True
    assert router.decide(hopeless, 1.0).outcome == "wait"


def test_a_prompt_of_another_s_that_is_nearly_computed_is_hardly_waited_for() -> None:
    def ttft_s(head_at: float) -> float:
        fleet = live(pool("amd", replicas=1))
        (replica,), cell = fleet.replicas(), Cell()
        cell.elsewhere = [(1.0, 1.0, 20_000.0, 20_000.0, 0.0, 0.0, 0.0, 0.0, 0.0, head_at, 20_000.0, -inf)]
        cell.changed = True
        router = Router(fleet, make_policy("fastest"))
        router.share({replica.key: cell})
        found = router.decide(ask(), 100.0).prediction
        assert found is not None
        return found.ttft_s

    assert ttft_s(99.5) < 0.8 * ttft_s(100.0)


def test_a_pool_s_price_follows_its_speed_over_many_answers_and_at_once() -> None:
    """By a few, two pools at nearly one price would change places with every answer, and the traffic go to and fro; by
    the clock, several gateways would each have another price."""
    fleet = live(pool("amd", replicas=1))
    (replica,) = fleet.replicas()
    for index in range(200):
        replica.learn_decode(0.0, 0.0, 4.0, 0.1, 0.01 * index)
    fleet.advance(2.0, ask().model)
    before = fleet.pools[0].slowness
    replica.learn_decode(1.0, 1.0, 4.0, 0.1, 2.0)
    fleet.advance(2.0, ask().model)
    assert before < fleet.pools[0].slowness < 1.01 * before
    for index in range(400):
        replica.learn_decode(1.0, 0.0, 4.0, 0.1, 2.0 + 0.01 * index)
    fleet.advance(6.0, ask().model)
    assert fleet.pools[0].slowness > 2.0


def test_policies_are_registered_once_and_by_the_names_of_the_fleet_file() -> None:
    assert tuple(POLICIES) == get_args(Policy)
    with pytest.raises(BadInput, match="unknown policy 'slowest'; known: cheapest-meeting-target, fastest"):
        make_policy("slowest")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({"ttft_s": 0.5}, False),
        ({"ttft_s": 0.5, "priority": 2}, True),
        # Too long for its TTFT on any idle replica; but what is not urgent at all is never forced.
        ({"input_tokens": 30_000.0, "ttft_s": 0.1}, True),
        ({"input_tokens": 30_000.0, "ttft_s": 0.1, "priority": 0}, False),
        ({"input_tokens": 30_000.0, "ttft_s": None}, False),
    ],
)
def test_who_is_sent_at_the_end_of_its_patience(changes: dict[str, Any], sent: bool) -> None:
    """On replicas where one more breaks what was promised to those who wait there."""
    fleet = live(pool("amd", replicas=2))
    for replica in fleet.replicas():
        load(replica, 40, decoding=False, input_tokens=4000.0, ttft_s=2.0)
    router = Router(fleet, make_policy("cheapest-meeting-target"))
    waiting = ask(patience_s=10.0, **changes)
    assert router.decide(waiting, 0.0).outcome == "wait"
    decision = router.last_chance(waiting, 10.0)
    assert (decision is not None) is sent
    assert decision is None or decision.outcome == "send"


@pytest.mark.parametrize("ttft_s", [20.0, None])
def test_a_prompt_that_would_stand_before_others_on_any_idle_replica_is_sent_at_the_end_of_its_patience(
    ttft_s: float | None,
) -> None:
    """However many replicas there were, it could not come in time without that."""
    fleet = live(pool("amd", replicas=2))
    for replica in fleet.replicas():
        load(replica, 4)
    router = Router(fleet, make_policy("cheapest-meeting-target"))
    # The last by its margin alone.
    for promised_s in (0.1, 1.05 * fleet.pools[0].idle_ttft_s(30_000.0, 0.0)):
        long = ask(patience_s=10.0, input_tokens=30_000.0, ttft_s=ttft_s)
        fleet.pools[0].promised_ttft = Promise(promised_s, 1.64)
        assert router.decide(long, 0.0).outcome == "wait"
        assert router.last_chance(long, 10.0) is not None
    fleet.pools[0].promised_ttft = Promise(5.0, 1.64)
    for replica in fleet.replicas():
        load(replica, 100, decoding=False, input_tokens=8000.0)
    assert router.last_chance(long, 10.0) is None, "others were there before it: it waited for room"


def test_a_margin_that_empty_replicas_hardly_have_is_not_waited_for() -> None:
    """A target a little above an empty replica's TPOT: requests are sent to one up to half of the way there. With the
    whole margin one at a time would be served, and the others turned away."""
    fleet = live(pool("amd", replicas=1))
    router = Router(fleet, make_policy("cheapest-meeting-target"))
    first = router.decide(ask(), 0.0).prediction
    assert first is not None
    near = ask(patience_s=10.0, tpot_s=1.1 * first.tpot_s)
    sent: list[float] = []
    for _ in range(60):
        decision = router.decide(near, 0.0)
        if decision.outcome != "send":
            break
        assert decision.prediction is not None
        sent.append(decision.prediction.tpot_s)
        load(fleet.replicas()[0], 1, tpot_s=near.tpot_s)
    assert decision.outcome == "wait"
    # In logarithms, half of a tenth.
    assert 1.02 * first.tpot_s < max(sent) <= 1.05 * first.tpot_s
    assert len(sent) > 3
    # A target that an empty one does not keep has no such way to it.
    assert router.decide(ask(patience_s=10.0, tpot_s=0.99 * first.tpot_s), 0.0).outcome == "wait"


def test_what_only_the_margin_keeps_out_is_sent_at_the_end_of_its_patience() -> None:
    fleet = live(pool("amd", replicas=2))
    for replica in fleet.replicas():
        load(replica, 50, ttft_s=None, tpot_s=None)
    router = Router(fleet, make_policy("cheapest-meeting-target"))
    now = router.decide(ask(), 0.0).prediction
    assert now is not None
    waiting = ask(patience_s=10.0, tpot_s=1.35 * now.tpot_s)
    assert router.decide(waiting, 0.0).outcome == "send"
    for _ in range(100):
        # As when all of it had stood still.
        fleet.pools[0].tpot_scatter.teach(3.0)
    assert router.decide(waiting, 0.0).outcome == "wait"
    decision = router.last_chance(waiting, 10.0)
    assert decision is not None
    assert not waiting.in_doubt
    # What the prediction itself speaks against is turned away as before.
    assert router.last_chance(ask(patience_s=10.0, tpot_s=0.002), 10.0) is None


def test_one_replica_is_asked_whether_it_may_take_who_waits() -> None:
    """A decision over all of them would say the same of it."""
    fleet = live(pool("amd", replicas=2))
    router = Router(fleet, make_policy("cheapest-meeting-target", 0))
    free, full = fleet.pools[0].replicas
    load(full, full.pool.pool.max_in_flight)
    asked = ask(ttft_s=1.0, tpot_s=0.05)
    assert router.may_take(asked, free, 0.0)
    assert not router.may_take(asked, full, 0.0)
    assert router.decide(asked, 0.0).replica is free
    # Nor one whose model it is not, and a policy that does not look so closely leaves it to the decision.
    assert not router.may_take(ask(model="another"), free, 0.0)
    assert Router(fleet, make_policy("round-robin", 0)).may_take(asked, full, 0.0)
