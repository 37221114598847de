"""Pools with prefill and decode apart in the router and in the fleet's simulator."""

import pytest
from tests.route.fleets import CATALOG, ask, fleet, live, load, pool, served

from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Pool, PoolApart, PoolSide
from crosstie.perf.disaggregated import Sides, disaggregated_state
from crosstie.route.apart import ApartSpeed
from crosstie.route.build import live_fleet, service_of
from crosstie.route.live import LiveFleet
from crosstie.route.policy import predict
from crosstie.route.speed import Prediction
from crosstie.sim.fleet import FleetSimulator, SimulatedRequest


def apart(prefill: int = 1, decode: int = 2, **changes: object) -> Pool:
    sides = PoolApart(
        prefill=PoolSide(replicas=prefill, parallelism=Parallelism()),
        decode=PoolSide(replicas=decode, parallelism=Parallelism()),
        connector="vllm-nixl",
    )
    return pool("apart", "h200", 1, apart=sides, **changes)


def predicted(found: LiveFleet) -> Prediction:
    """Of one more request on the first replica."""
    found.pools[0].advance(0.0)
    return predict(found, found.pools[0].replicas[0], ask())


def test_a_request_alone_is_expected_when_the_closed_form_has_it() -> None:
    one = apart()
    found = live(one)
    assert isinstance(found.pools[0].speed, ApartSpeed)
    expected = predicted(found)
    service = service_of(CATALOG, one)
    assert service is not None
    alone = disaggregated_state(Sides([service]), 1, 1000, 200)
    assert expected.raw_ttft_s == pytest.approx(float(alone.ttft_s[0, 0]), rel=0.15)
    assert expected.raw_tpot_s == pytest.approx(float(alone.tpot_s[0, 0]), rel=0.05)


def test_prompts_in_the_queue_delay_the_next_and_leave_decoding_alone() -> None:
    found = live(apart())
    (replica,) = found.pools[0].replicas
    before = predicted(found)
    load(replica, 6, decoding=False, input_tokens=8000.0)
    after = predicted(found)
    assert after.raw_ttft_s > 2 * before.raw_ttft_s
    assert after.raw_tpot_s < 1.5 * before.raw_tpot_s
    more = live(apart(prefill=4))
    load(more.pools[0].replicas[0], 6, decoding=False, input_tokens=8000.0)
    assert predicted(more).raw_ttft_s < 0.7 * after.raw_ttft_s


def test_a_replica_costs_all_its_gpus() -> None:
    one, other = live(apart()), live(pool("plain", "h200", 1))
    assert one.pools[0].usd_per_s == pytest.approx(3 * other.pools[0].usd_per_s, rel=1e-6)


def test_the_fleet_simulator_runs_both_kinds() -> None:
    both = fleet(apart(), pool("plain", "h200", 1), classes=(served(requests_per_s=8.0),))
    simulator = FleetSimulator(CATALOG, both, "round-robin")
    answers = simulator.run(SimulatedRequest(0.1 * k, both.pools[0].model, 1000, 100) for k in range(200))
    pools = {name: [one for one in answers if one.pool == name] for name in ("apart", "plain")}
    assert {name: len(found) for name, found in pools.items()} == {"apart": 100, "plain": 100}
    assert all(one.ttft_s < 2.0 for one in answers)
    # A decode side without prompts keeps its pace.
    assert max(one.tpot_s for one in pools["apart"]) < max(one.tpot_s for one in pools["plain"])


def test_another_number_of_engines_is_another_deployment() -> None:
    first = live(apart())
    again = live_fleet(CATALOG, fleet(apart(prefill=3)), 1.0, first)
    assert again.pools[0] is not first.pools[0]
