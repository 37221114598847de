"""Disaggregated pools in the router and in the fleet's simulator."""

import msgspec
import pytest
from tests.route.fleets import CATALOG, ask, fleet, live, load, pool, served

from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Pool, PoolApart, PoolSide
from crosstie.perf.disaggregated import Sides, disaggregated_state
from crosstie.route.build import live_fleet, service_of
from crosstie.route.disaggregated import ApartSpeed, choose_prefill
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


def led(prefill: int = 2, decode: int = 2) -> Pool:
    """Whose engines the gateway leads from prefill to decode."""
    one = apart(prefill, decode)
    assert one.apart is not None
    at = {side: tuple(f"http://{side}{n}/v1" for n in range(count)) for side, count in (("p", prefill), ("d", decode))}
    sides = msgspec.structs.replace(
        one.apart,
        prefill=msgspec.structs.replace(one.apart.prefill, backends=at["p"]),
        decode=msgspec.structs.replace(one.apart.decode, backends=at["d"]),
    )
    return msgspec.structs.replace(one, apart=sides, backends=())


def test_engines_that_decode_are_the_replicas_and_prompts_wait_at_the_others() -> None:
    found = live_fleet(CATALOG, fleet(led()), 0.0)
    (one,) = found.pools
    assert one.prefill is not None
    assert [replica.key for replica in one.replicas] == ["http://d0/v1", "http://d1/v1"]
    assert {replica.key for replica in found.replicas()} == {f"http://{side}{n}/v1" for side in "pd" for n in (0, 1)}
    before = predicted(found)
    load(one.prefill.replicas[0], 6, decoding=False, input_tokens=8000.0)
    # The other prefill replica has nothing to do.
    one.replicas[0].touch()
    assert predicted(found).raw_ttft_s == before.raw_ttft_s
    load(one.prefill.replicas[1], 6, decoding=False, input_tokens=8000.0)
    one.replicas[0].touch()
    after = predicted(found)
    assert after.raw_ttft_s > 2 * before.raw_ttft_s
    assert after.raw_tpot_s == before.raw_tpot_s
    # The price is that of a whole service, as behind a proxy.
    assert one.usd_per_s == live(apart(2, 2)).pools[0].usd_per_s


def test_a_prompt_goes_to_who_has_least_to_do_before_it_and_a_held_beginning_counts() -> None:
    found = live_fleet(CATALOG, fleet(led()), 0.0)
    side = found.pools[0].prefill
    assert side is not None
    first, second = side.replicas
    wanted = ask(input_tokens=4000.0, prefix=(1, 2, 3))
    chosen = choose_prefill(side, wanted, 0.0, 512.0)
    assert chosen is not None
    assert (chosen[0], chosen[1]) == (first, 0.0)
    second.prefixes.add((1, 2, 3))
    assert choose_prefill(side, wanted, 0.0, 512.0) == (second, 1536.0)
    load(second, 1, decoding=False, input_tokens=8000.0)
    chosen = choose_prefill(side, wanted, 0.0, 512.0)
    assert chosen is not None
    assert chosen[0] is first
    assert choose_prefill(side, wanted, 0.0, 512.0, exclude=(first.key,)) == (second, 1536.0)
    # Who says that he is full, and who is only suspected, come after the others; who is dead not at all.
    first.full(0.0, 5.0)
    chosen = choose_prefill(side, wanted, 0.0, 512.0)
    assert chosen is not None
    assert chosen[0] is second
    second.went_down("broken", suspected=True)
    chosen = choose_prefill(side, wanted, 0.0, 512.0)
    assert chosen is not None
    assert chosen[0] is first
    first.went_down("dead")
    second.went_down("dead")
    assert choose_prefill(side, wanted, 0.0, 512.0) is None
    assert side.why_out() == "dead"


def test_the_rest_of_an_answer_costs_no_prompt() -> None:
    (one,) = live(apart()).pools
    rest, all_of_it = one.request_usd(0.0, 0.0, 100.0), one.request_usd(1000.0, 0.0, 100.0)
    assert 0.0 < rest < all_of_it
