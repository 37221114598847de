"""From a fleet file to a live fleet, and again when the file has changed."""

import math

import pytest
from tests.route.fleets import AMD, CATALOG, MODEL, NVIDIA, ask, fleet, live, load, pool, routed, served, told

from crosstie.core.errors import UnknownName
from crosstie.core.fleet import Route
from crosstie.route.build import live_fleet, typical
from crosstie.route.learnt import LearntSpeed
from crosstie.route.modelled import ModelledSpeed


def test_pools_replicas_and_classes_are_there() -> None:
    found = live(AMD, pool("other", None, replicas=1))
    assert [replica.key for replica in found.replicas()] == ["http://amd-0", "http://amd-1", "http://other-0"]
    assert isinstance(found.pools[0].speed, ModelledSpeed)
    assert isinstance(found.pools[1].speed, LearntSpeed)
    assert list(found.by_model) == [MODEL]
    assert found.deviations["chat"] == pytest.approx((1.645, 1.282), abs=0.01)
    assert all(replica.up for replica in found.replicas())


def test_what_a_pool_mostly_gets_comes_from_its_routes() -> None:
    long = served("documents", input_tokens=20_000.0, output_tokens=500.0, requests_per_s=1.0, routes=routed("nvidia"))
    short = served(routes=routed("amd"))
    both = fleet(classes=(long, short))
    assert typical(both, AMD) == (1000.0, 200.0)
    assert typical(both, NVIDIA) == (20_000.0, 500.0)
    mixed = fleet(classes=(served("a", input_tokens=1000.0), served("b", input_tokens=3000.0)))
    assert typical(mixed, AMD) == (2000.0, 200.0)
    assert typical(fleet(classes=()), AMD) == (1000.0, 250.0)
    assert typical(fleet(classes=()), pool(max_context=100)) == (70.0, 30.0)


def test_a_class_weighs_by_its_requests_however_many_routes_take_them() -> None:
    def routes(*parts: tuple[int | None, float | None]) -> tuple[Route, ...]:
        return tuple(Route(pool="amd", up_to_input=bound, traffic=traffic) for bound, traffic in parts)

    short = served("short", requests_per_s=3.0, routes=routed("amd"))
    for cut in (routes((None, None)), routes((500, None), (None, None)), routes((500, 0.7), (900, 0.2), (None, 0.1))):
        long = served("long", input_tokens=5000.0, requests_per_s=1.0, routes=cut)
        assert typical(fleet(classes=(short, long)), AMD) == pytest.approx((2000.0, 200.0))
    # Of long prompts, which are few, another pool takes all: one in ten of the class and not one in two.
    tail = Route(pool="nvidia", traffic=0.1)
    apart = served("long", input_tokens=5000.0, requests_per_s=1.0, routes=(*routes((500, 0.9)), tail))
    assert typical(fleet(classes=(short, apart)), AMD)[0] == pytest.approx((3.0 * 1000.0 + 0.9 * 5000.0) / 3.9)


def test_a_reload_keeps_what_stays_and_lets_go_of_what_leaves() -> None:
    before = live(AMD, NVIDIA)
    kept, gone = before.pools[0].replicas
    load(kept, 3)
    flight = gone.start(ask(), told(), 0.0)
    for _ in range(10):
        kept.tpot.teach(math.log(3.0), 0.0)
    before.lengths.observe("chat", MODEL, output_tokens=2000)
    expected = before.lengths.expected_output("chat", MODEL, None)
    file = fleet(pool(backends=("http://amd-0", "http://amd-9"), max_in_flight=10), pool("new", "h200"))
    after = live_fleet(CATALOG, file, 50.0, before)
    assert after.pools[0].replicas[0] is kept
    assert kept.in_flight == 3
    assert kept.advance(50.0).limit == 10
    assert kept.tpot.factor(0.0) > 2.0
    assert after.lengths.expected_output("chat", MODEL, None) == expected
    assert gone.draining
    assert after.leaving == [gone], "those of the pool that is gone had nothing to do"
    assert all(replica.draining for replica in before.pools[1].replicas)
    added = after.pools[0].replicas[1]
    assert (added.key, added.since) == ("http://amd-9", 50.0)
    assert added.share_at(50.0) < 1.0, "a newcomer to a running fleet is brought up slowly"
    flight.first_token(51.0)
    assert flight.end(52.0, output_tokens=5, input_tokens=5, completed=True) is not None
    assert live_fleet(CATALOG, file, 60.0, after).leaving == []


def test_another_deployment_under_the_same_name_starts_anew() -> None:
    before = live(AMD)
    old = before.replicas()
    after = live_fleet(CATALOG, fleet(pool(precision="bf16")), 1.0, before)
    assert all(one is not other for one, other in zip(after.replicas(), old, strict=True))
    assert all(replica.draining for replica in old)


def test_what_was_learnt_of_a_pool_without_an_accelerator_stays() -> None:
    before = live(pool("other", None))
    for index in range(50):
        before.pools[0].speed.saw_decode(float(index % 8), 0.2)
    after = live_fleet(CATALOG, fleet(pool("other", None, max_in_flight=5)), 1.0, before)
    assert after.pools[0].speed.idle_s(100.0, 100.0) > 5.0
    assert after.replicas()[0].advance(1.0).limit == 5


def test_a_file_that_fails_leaves_the_old_fleet_as_it_was() -> None:
    before = live(AMD, NVIDIA)
    bad = fleet(pool(max_in_flight=1, backends=()), pool("broken", "h900"))
    with pytest.raises(UnknownName):
        live_fleet(CATALOG, bad, 1.0, before)
    assert len(before.pools[0].replicas) == 2
    assert before.pools[0].pool.max_in_flight == 64
    assert not any(replica.draining for replica in before.replicas())


def test_a_pool_comes_back_from_draining_with_a_reload() -> None:
    before = live(AMD)
    before.pools[0].replicas[0].draining = True
    after = live_fleet(CATALOG, fleet(AMD), 1.0, before)
    assert not after.replicas()[0].draining
