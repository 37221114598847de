"""Models that share machines, as the router sees them: who may be sent to, what slows whom, and why not."""

import msgspec
import pytest
from tests.route.fleets import decided
from tests.run.gateway.fakes import CATALOG, fleet_of
from tests.run.hosting.shared import MODELS, shared_pool

from crosstie.catalog.loading import shipped_loading
from crosstie.core.fleet import Fleet
from crosstie.route.admission import WaitingRoom
from crosstie.route.ask import Ask
from crosstie.route.build import live_fleet
from crosstie.route.hosted_sizes import sizes
from crosstie.route.live import LiveFleet
from crosstie.route.load import become
from crosstie.route.policies import make_policy
from crosstie.route.router import Router

A, B, C, *_ = MODELS


def shared_fleet(*models: str, replicas: int = 2) -> Fleet:
    pool = shared_pool(*models, replicas=replicas)
    hosts = tuple(
        msgspec.structs.replace(
            host, backends=tuple(f"http://m{index}:{8000 + number}/v1" for index in range(replicas))
        )
        for number, host in enumerate(pool.hosts)
    )
    return fleet_of(msgspec.structs.replace(pool, hosts=hosts))


def ask(model: str, **more: object) -> Ask:
    return Ask(model=model, class_name=None, input_tokens=500.0, output_tokens=100.0, **more)  # type: ignore[arg-type]


def live(*models: str, **more: int) -> LiveFleet:
    return live_fleet(CATALOG, shared_fleet(*models, **more), 0.0)


def test_nothing_is_sent_where_the_model_is_not_loaded() -> None:
    for name in ("cheapest-meeting-target", "fastest", "round-robin", "least-loaded", "weighted", "prefix"):
        found, policy = live(A, B), make_policy(name)
        decision = decided(policy, found, ask(A), 1.0)
        assert (decision.outcome, decision.refusal) == ("wait", "cold")
        there = found.by_model[A][0].replicas[1]
        become(there, "resident")
        assert decided(policy, found, ask(A), 1.0).replica is there
        become(there, "leaving")
        assert decided(policy, found, ask(A), 1.0).outcome == "wait"


def test_a_replica_that_was_tried_may_be_loaded_again() -> None:
    found, policy = live(A, B, replicas=1), make_policy("cheapest-meeting-target")
    replica = found.by_model[A][0].replicas[0]
    decision = decided(policy, found, ask(A), 1.0, exclude=(replica.key,))
    assert (decision.outcome, decision.refusal) == ("wait", "cold")
    become(replica, "resident")
    assert decided(policy, found, ask(A), 1.0, exclude=(replica.key,)).outcome == "refuse"
    replica.went_down("gone")
    become(replica, "asleep")
    assert decided(policy, found, ask(A), 1.0).outcome == "refuse"


def test_models_at_work_on_the_same_machine_slow_each_other_down() -> None:
    found, policy = live(A, B, C, replicas=1), make_policy("cheapest-meeting-target")
    one, other, third = (found.by_model[model][0].replicas[0] for model in (A, B, C))
    for replica in (one, other, third):
        become(replica, "resident")
    alone = decided(policy, found, ask(A), 1.0).prediction
    decision = decided(policy, found, ask(B), 1.0)
    assert alone is not None
    assert decision.prediction is not None
    other.start(ask(B), decision.prediction, 1.0)
    one.touch()
    beside = decided(policy, found, ask(A), 1.0).prediction
    assert beside is not None
    assert 1.8 < beside.tpot_s / alone.tpot_s < 2.05
    assert 1.5 < beside.ttft_s / alone.ttft_s < 2.1


def test_the_cache_of_a_model_is_what_the_file_leaves_it() -> None:
    fleet = shared_fleet(A, B)
    pool = fleet.pools[0]
    bare = msgspec.structs.replace(
        pool, hosts=tuple(msgspec.structs.replace(host, memory_gib=None) for host in pool.hosts)
    )
    whole = live_fleet(CATALOG, msgspec.structs.replace(fleet, pools=(bare,)), 0.0)
    part = live_fleet(CATALOG, fleet, 0.0)
    assert part.by_model[A][0].speed.cache_tokens < 0.2 * whole.by_model[A][0].speed.cache_tokens


def test_a_reload_keeps_what_is_known_and_forgets_what_is_no_longer_shared() -> None:
    fleet = shared_fleet(A, B)
    before = live_fleet(CATALOG, fleet, 0.0)
    replica = before.by_model[A][0].replicas[0]
    become(replica, "resident")
    after = live_fleet(CATALOG, fleet, 1.0, before)
    assert after.by_model[A][0].replicas[0] is replica
    assert replica.presence is not None
    assert replica.presence.there
    alone = fleet.pools[0].by_model()[0]
    alone = msgspec.structs.replace(alone, loading=None, host_memory_gib=None)
    own = live_fleet(CATALOG, msgspec.structs.replace(fleet, pools=(alone,)), 2.0, after)
    for one in own.by_model[A][0].replicas:
        assert one.presence is None
        assert one.busy_until < 0.0


def test_kinds_that_wait_for_loads_do_not_use_up_the_tries() -> None:
    found, policy = live(*MODELS, replicas=1), make_policy("cheapest-meeting-target")
    become(found.by_model[A][0].replicas[0], "resident")
    room = WaitingRoom(100)
    for model in MODELS[1:]:
        for kind in range(5):
            room.add(ask(model, modalities=frozenset({str(kind)})), 0.0, 100.0)
    hot, _ = room.add(ask(A), 0.0, 100.0)
    taken = room.take(Router(found, policy).decide, 1.0)
    assert taken is not None
    assert taken[0] is hot


def test_load_times_come_from_the_catalog_and_from_what_the_file_says_of_weights() -> None:
    facts = shipped_loading()
    pool = shared_fleet(A).pools[0]

    def load_s(**said: float | None) -> float:
        plain = {"weight_gib": None, "memory_gib": None, "load_s": None}
        hosts = tuple(msgspec.structs.replace(host, **{**plain, **said}) for host in pool.hosts)
        return sizes(CATALOG, msgspec.structs.replace(pool, hosts=hosts, **which))[0][0].load_s

    which: dict[str, object] = {}
    assert load_s(weight_gib=20.0) == pytest.approx(facts.wake.si + 20.0 * 2**30 / facts.link_of("mi300x").si)
    assert load_s() < load_s(weight_gib=40.0)
    assert load_s(weight_gib=20.0, load_s=7.0) == 7.0
    # A server of which nothing is known but what it takes: from a disk, if it is started for it.
    unknown = {"accelerator": None, "stack": None, "precision": None}
    which = {**unknown, "loading": "llamacpp-router", "host_memory_gib": 60.0}
    assert load_s(memory_gib=20.0) == pytest.approx(facts.start.si + 20.0 * 2**30 / facts.disk.si)
    assert load_s(memory_gib=20.0, weight_gib=10.0) == pytest.approx(facts.start.si + 10.0 * 2**30 / facts.disk.si)
