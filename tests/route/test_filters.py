"""Every filter drops what it should and says so: what can change is waited for, what cannot is refused."""

from collections.abc import Callable
from typing import Any

import pytest
from tests.route.fleets import AMD, NVIDIA, ask, decided, live, load, pool

from crosstie.core.fleet import Policy
from crosstie.route.decision import Decision
from crosstie.route.live import LiveFleet
from crosstie.route.policies import POLICIES, make_policy

ALL: list[Policy] = list(POLICIES)  # type: ignore[arg-type]


def decide(fleet: LiveFleet, name: Policy = "cheapest-meeting-target", now: float = 0.0, **changes: Any) -> Decision:
    exclude = changes.pop("exclude", ())
    return decided(make_policy(name), fleet, ask(**changes), now, exclude=exclude, explain=True)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("changes", "refusal", "said"),
    [
        ({"model": "qwen3-8b"}, "unknown-model", "no pool serves qwen3-8b; there are llama-3.1-8b"),
        ({"pin": "intel"}, "pin", "no pool intel serves llama-3.1-8b"),
        ({"modalities": frozenset({"image"})}, "modality", "takes image"),
        ({"input_tokens": 60_000.0}, "context", "60200 tokens exceed the 32000"),
        ({"most_output": 40_000}, "context", "41000 tokens exceed"),
    ],
)
def test_what_cannot_change_is_refused(name: Policy, changes: dict[str, Any], refusal: str, said: str) -> None:
    text_only = live(pool(modalities=()), pool("nvidia", "h200", modalities=("audio",)))
    got = decide(text_only, name, **changes)
    assert (got.outcome, got.refusal, got.replica) == ("refuse", refusal, None)
    assert said in got.reason
    assert all(one.dropped for one in got.considered)


def test_a_pool_that_says_nothing_of_modalities_takes_all_and_one_that_does_keeps_to_it() -> None:
    fleet = live(pool(modalities=("image",)), pool("nvidia", "h200"))
    assert decide(fleet, modalities=frozenset({"image"}), pin="amd").outcome == "send"
    assert decide(fleet, modalities=frozenset({"audio"})).replica.pool.name == "nvidia"  # type: ignore[union-attr]
    dropped = {one.pool: one.dropped for one in decide(fleet, modalities=frozenset({"audio"})).considered}
    assert dropped == {"amd": "modality: takes no audio", "nvidia": None}


def test_a_request_goes_to_the_pool_it_is_pinned_to() -> None:
    fleet = live()
    got = decide(fleet, pin="nvidia")
    assert got.replica is not None
    assert got.replica.pool.name == "nvidia"
    assert got.considered[0].dropped == "pin: the request asks for nvidia"


def test_long_requests_go_where_they_fit_and_guesses_refuse_nobody() -> None:
    fleet = live(pool(max_context=8000), pool("nvidia", "h200", max_context=64_000))
    got = decide(fleet, input_tokens=9000.0)
    assert got.replica is not None
    assert got.replica.pool.name == "nvidia"
    assert got.considered[0].dropped == "context: 9200 tokens exceed 8000"
    # The count of tokens is a guess before the engine has counted: the longest pool decides.
    assert decide(fleet, input_tokens=70_000.0).outcome == "send"
    assert decide(fleet, input_tokens=90_000.0).refusal == "context"


Change = Callable[[LiveFleet], None]


def down(fleet: LiveFleet) -> None:
    for replica in fleet.replicas():
        replica.went_down("connection refused")


def draining(fleet: LiveFleet) -> None:
    for replica in fleet.replicas():
        replica.draining = True


def pools_draining(fleet: LiveFleet) -> None:
    for one in fleet.pools:
        one.draining = True


def busy(fleet: LiveFleet) -> None:
    for replica in fleet.replicas():
        replica.full(0.0, 5.0)


def full(fleet: LiveFleet) -> None:
    for replica in fleet.replicas():
        load(replica, 64)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(
    ("change", "outcome", "refusal", "said"),
    [
        (down, "refuse", "unavailable", "up: connection refused"),
        (draining, "refuse", "unavailable", "draining: it is being emptied"),
        (pools_draining, "refuse", "unavailable", "draining: the pool is being emptied"),
        (busy, "wait", None, "busy: its engine is full, asked again in 5.0 s"),
        (full, "wait", None, "room: 64 in flight of 64"),
    ],
)
def test_what_may_change_is_waited_for(
    name: Policy, change: Change, outcome: str, refusal: str | None, said: str
) -> None:
    fleet = live()
    assert decide(fleet, name).outcome == "send"
    change(fleet)
    got = decide(fleet, name)
    assert (got.outcome, got.refusal, got.replica) == (outcome, refusal, None)
    assert [one.dropped for one in got.considered] == [said, said]


@pytest.mark.parametrize("name", ALL)
def test_one_replica_left_is_the_one_that_is_taken(name: Policy) -> None:
    fleet = live()
    first, second, third, fourth = fleet.replicas()
    first.went_down("")
    second.draining = True
    third.full(0.0, 5.0)
    assert all(decide(fleet, name).replica is fourth for _ in range(5))
    assert decide(fleet, name, exclude={fourth.key}).outcome == "wait", "the third is merely busy"
    third.went_down("gone")
    got = decide(fleet, name, exclude={fourth.key})
    assert (got.outcome, got.refusal) == ("refuse", "unavailable")
    assert "3 down or draining, 1 tried" in got.reason
    assert "tried: it has failed this request already" in str(got.considered[1].dropped)


def test_a_busy_engine_is_asked_again_when_its_time_is_over() -> None:
    fleet = live()
    busy(fleet)
    assert decide(fleet, now=4.9).outcome == "wait"
    assert decide(fleet, now=5.0).outcome == "send"


def test_a_replica_that_comes_back_is_brought_up_slowly() -> None:
    fleet = live(pool(replicas=1), slow_start_s=10.0)
    replica = fleet.replicas()[0]
    assert replica.advance(0.0).limit == 64, "a gateway that starts finds its backends warm"
    replica.went_down("probe failed")
    replica.came_up(100.0)
    assert [replica.advance(100.0 + after).limit for after in (0.0, 1.0, 5.0, 10.0)] == [6, 6, 32, 64]
    load(replica, 32, 105.0)
    assert decide(fleet, now=105.0).outcome == "wait"
    assert "room: 32 in flight of 32, 50% of its full share" in str(decide(fleet, now=105.0).considered[0].dropped)
    assert decide(fleet, now=107.0).outcome == "send"
    replica.came_up(108.0)
    assert replica.since == 100.0, "it was up already"


def test_pools_without_backends_are_unavailable() -> None:
    got = decide(live(pool(backends=())))
    assert (got.outcome, got.refusal) == ("refuse", "unavailable")
    assert got.considered[0].dropped == "up: the pool has no backends"


def test_reasons_fit_a_header() -> None:
    fleet = live(AMD, NVIDIA)
    for changes in ({}, {"model": "mistral\n7b é" * 100}, {"pin": "\r\nx: y"}, {"input_tokens": 1e6}):
        reason = decide(fleet, **changes).reason
        assert reason.isascii()
        assert reason.isprintable()
        assert 0 < len(reason) <= 300
