"""Each policy does what its name says."""

from collections import Counter
from typing import Any

import pytest
from tests.route.fleets import AMD, NVIDIA, ask, chosen, decided, live, load, pool, routed, served, told

from crosstie.core.errors import BadInput, DoesNotFit
from crosstie.core.fleet import Route
from crosstie.route.live import Promise
from crosstie.route.modelled import ModelledSpeed
from crosstie.route.policies import POLICIES, make_policy


def test_the_cheapest_within_target_is_taken() -> None:
    fleet = live()
    got = decided(make_policy("cheapest-meeting-target"), fleet, ask(), 0.0, explain=True)
    assert got.meets
    assert got.replica is not None
    assert got.replica.pool.name == "amd"
    by_pool = {one.pool: one for one in got.considered}
    amd, nvidia = by_pool["amd"].prediction, by_pool["nvidia"].prediction
    assert amd is not None
    assert nvidia is not None
    assert amd.predicted_usd < nvidia.predicted_usd
    assert amd.ttft_s > nvidia.ttft_s, "cheapest, not fastest"
    assert got.reason.startswith("cheapest within target of 2 pools: $")
    assert " of 1000 ms" in got.reason
    assert chosen(fleet, "fastest") == "nvidia"


def test_a_target_that_the_cheapest_misses_goes_to_the_next() -> None:
    fleet = live()
    for replica in fleet.pools[0].replicas:
        load(replica, 30, decoding=False)
    got = decided(make_policy("cheapest-meeting-target"), fleet, ask(ttft_s=0.2), 0.0, explain=True)
    assert got.replica is not None
    assert got.replica.pool.name == "nvidia"
    assert got.meets
    assert "target: TTFT" in str(got.considered[0].dropped)
    assert "of 200 ms" in str(got.considered[0].dropped)
    assert chosen(fleet, ttft_s=3.0) == "amd"


def test_of_equal_pools_the_one_that_the_plan_has_for_that_length_is_taken() -> None:
    short, long = Route(pool="other", up_to_input=2000), Route(pool="amd")
    fleet = live(AMD, pool("other"), classes=(served(routes=(short, long)),))
    policy = make_policy("cheapest-meeting-target")
    for tokens, wanted in ((1000.0, "other"), (3000.0, "amd")):
        for _ in range(3):
            got = decided(policy, fleet, ask(input_tokens=tokens), 0.0, explain=True)
            assert got.replica is not None
            assert got.replica.pool.name == wanted
            assert {one.pool for one in got.considered if one.planned} == {wanted}
    # A guide is no order: a cheaper pool goes first.
    dear = live(pool("amd", usd_per_gpu_hour=3.0), pool("other"), classes=(served(routes=(long,)),))
    assert chosen(dear, input_tokens=3000.0) == "other"


def test_a_strict_request_costs_as_much_on_a_pool_that_is_meant_for_many() -> None:
    """What a replica can hold for others is no use to whom it must answer soon."""
    few, many = live(pool(max_in_flight=16)).pools[0], live(pool(max_in_flight=256)).pools[0]
    patient = [one.request_usd(1000.0, 0.0, 200.0) for one in (few, many)]
    assert patient[1] < 0.5 * patient[0]
    assert isinstance(few.speed, ModelledSpeed)
    limit_s = 1.0001 * few.speed.decode[16] + 16 * 1100.0 * few.speed.per_cached
    strict = [one.request_usd(1000.0, 0.0, 200.0, limit_s) for one in (few, many)]
    assert strict[1] == pytest.approx(strict[0], rel=0.05)
    assert strict[0] == pytest.approx(patient[0], rel=0.01)


def test_none_within_target_sends_where_it_misses_least_and_low_priority_waits() -> None:
    fleet = live()
    for replica in fleet.replicas():
        load(replica, 2)
    policy = make_policy("cheapest-meeting-target")
    got = decided(policy, fleet, ask(tpot_s=0.001), 0.0)
    assert got.outcome == "send"
    assert not got.meets
    assert got.replica is not None
    assert got.replica.pool.name == "nvidia"
    assert got.reason.startswith("misses least of 2, none within target")
    assert decided(policy, fleet, ask(tpot_s=0.001, priority=0), 0.0).outcome == "wait"
    assert decided(policy, fleet, ask(tpot_s=0.001, patience_s=5.0), 0.0).outcome == "wait"
    assert decided(policy, fleet, ask(tpot_s=0.001, patience_s=5.0, waited_s=5.0), 0.0).outcome == "send"
    assert decided(policy, live(), ask(tpot_s=0.001, priority=0), 0.0).outcome == "send", "nothing to wait for"


def test_whoever_has_lost_its_target_goes_where_it_harms_nobody() -> None:
    fleet = live()
    for replica in fleet.replicas():
        load(replica, 2)
    policy = make_policy("cheapest-meeting-target")
    got = decided(policy, fleet, ask(waited_s=1.0, patience_s=5.0), 0.0)
    assert got.outcome == "send"
    assert not got.meets
    assert "without harm to others" in got.reason


def test_nobody_breaks_what_others_were_promised() -> None:
    # Of those that are on a replica already.
    fleet = live(pool(replicas=1), pool("nvidia", "h200", usd_per_gpu_hour=2.9, replicas=1))
    amd = fleet.pools[0].replicas[0]
    lenient: dict[str, Any] = {"ttft_s": 60.0, "tpot_s": 1.0, "input_tokens": 30_000.0}
    assert chosen(fleet, **lenient) == "amd"
    load(amd, 1, ttft_s=0.3, tpot_s=0.05)
    assert chosen(fleet, **lenient) == "nvidia", "half a second of prefill would stand before the next of those"
    # Of those that the plan sends there, before any has come.
    strict = served(ttft=served().ttft, routes=routed("amd"))
    lax = served("batch", ttft=None, tpot=None, routes=routed("amd", "nvidia"))
    planned = live(AMD, NVIDIA, classes=(strict, lax))
    assert planned.pools[0].promised_ttft.seconds == 1.0
    assert planned.pools[1].promised_ttft.seconds == float("inf")
    batch: dict[str, Any] = {"class_name": "batch", "ttft_s": None, "tpot_s": None}
    assert chosen(planned, **batch) == "amd"
    for replica in planned.pools[0].replicas:
        load(replica, 60, decoding=False, ttft_s=None, tpot_s=None, input_tokens=5000.0)
    assert chosen(planned, **batch) == "nvidia"


def test_a_promise_has_the_margin_of_the_class_that_it_was_made_to() -> None:
    """Whoever asks: batch with no target and no margin would fill the pool to the edge of what others need."""
    strict = served(ttft=served().ttft, routes=routed("amd"))
    lax = served("batch", ttft=None, tpot=None, routes=routed("amd", "nvidia"))
    fleet = live(AMD, NVIDIA, classes=(strict, lax))
    batch: dict[str, Any] = {"class_name": "batch", "ttft_s": None, "tpot_s": None}
    for replica in fleet.pools[0].replicas:
        load(replica, 40, decoding=False, ttft_s=None, tpot_s=None, input_tokens=2000.0)
    seen = decided(make_policy("cheapest-meeting-target"), fleet, ask(pin="amd", **batch), 0.0).prediction
    assert seen is not None
    fleet.pools[0].promised_ttft = Promise(1.3 * seen.ttft_s, 1.64)
    assert chosen(fleet, **batch) == "amd"
    for _ in range(200):
        fleet.pools[0].ttft_scatter.teach(0.5)
    assert chosen(fleet, **batch) == "nvidia"


def test_without_a_target_load_spreads_by_finish() -> None:
    fleet = live(classes=())
    free: dict[str, Any] = {"class_name": None, "ttft_s": None, "tpot_s": None}
    assert chosen(fleet, **free) == "amd", "within twice what the fastest takes if idle, the cheapest"
    for replica in fleet.pools[0].replicas:
        load(replica, 60)
    assert chosen(fleet, **free) == "nvidia"


def test_a_margin_is_kept_for_predictions_that_scatter() -> None:
    fleet = live()
    for replica in fleet.pools[0].replicas:
        load(replica, 20, decoding=False)
    ttft = decided(make_policy("cheapest-meeting-target"), fleet, ask(pin="amd"), 0.0).prediction
    assert ttft is not None
    limit = 1.3 * ttft.ttft_s
    assert chosen(fleet, ttft_s=limit) == "amd"
    for _ in range(200):
        fleet.pools[0].ttft_scatter.teach(0.5)
    assert chosen(fleet, ttft_s=limit) == "nvidia"


def test_a_held_prefix_is_worth_what_it_saves() -> None:
    fleet = live(AMD)
    prefix = tuple(range(10))
    first, second = fleet.replicas()
    second.prefixes.add(prefix)
    policy = make_policy("cheapest-meeting-target")
    long = ask(input_tokens=5500.0, prefix=prefix, ttft_s=5.0)
    got = decided(policy, fleet, long, 0.0)
    assert got.replica is second
    assert got.prediction is not None
    assert got.prediction.cached_tokens == 5120.0
    assert "5120 tokens held" in got.reason
    plain = decided(policy, fleet, ask(input_tokens=5500.0, ttft_s=5.0), 0.0).prediction
    assert plain is not None
    assert got.prediction.predicted_usd < plain.predicted_usd
    assert got.prediction.ttft_s < plain.ttft_s
    load(second, 30, decoding=False)
    assert decided(policy, fleet, long, 0.0).replica is first, "but not more than that"


def test_a_conversation_stays_where_it_was_unless_that_is_much_worse() -> None:
    fleet = live(AMD)
    first, second = fleet.replicas()
    policy = make_policy("cheapest-meeting-target")
    talk = ask(session="s", output_tokens=50.0)
    first.start(talk, told(), 0.0).end(0.1, output_tokens=None, input_tokens=None, completed=False)
    load(first, 1)
    assert {decided(policy, fleet, talk, 0.0).replica for _ in range(4)} == {first}
    assert decided(policy, fleet, ask(output_tokens=50.0), 0.0).replica is second
    load(first, 40)
    assert decided(policy, fleet, talk, 0.0).replica is second


def test_round_robin_takes_turns_over_all_replicas() -> None:
    fleet, policy = live(), make_policy("round-robin")
    keys = [decided(policy, fleet, ask(), 0.0).replica.key for _ in range(8)]  # type: ignore[union-attr]
    assert keys == [replica.key for replica in fleet.replicas()] * 2
    fleet.replicas()[1].went_down("")
    keys = [decided(policy, fleet, ask(), 0.0).replica.key for _ in range(6)]  # type: ignore[union-attr]
    assert keys == ["http://amd-0", "http://nvidia-0", "http://nvidia-1"] * 2
    assert decided(make_policy("round-robin", seed=2), fleet, ask(), 0.0).replica is fleet.replicas()[2]


def test_least_loaded_counts_own_and_others_requests() -> None:
    fleet = live()
    first, second, third, fourth = fleet.replicas()
    for replica, requests in ((first, 3), (second, 2), (third, 1), (fourth, 2)):
        load(replica, requests)
    assert chosen(fleet, "least-loaded") == "nvidia"
    third.report(running=9, waiting=1, kv_used_fraction=None, now=0.0)
    got = decided(make_policy("least-loaded"), fleet, ask(), 0.0)
    assert got.replica in (second, fourth)


def test_weights_are_kept_and_evenly_mixed() -> None:
    fleet = live(pool(weight=3.0), pool("nvidia", "h200", weight=1.0))
    policy = make_policy("weighted")
    names = [decided(policy, fleet, ask(), 0.0).replica.pool.name for _ in range(40)]  # type: ignore[union-attr]
    assert Counter(names) == {"amd": 30, "nvidia": 10}
    assert all("nvidia" in names[i : i + 4] for i in range(0, 40, 4))
    # Without weights, by what each carries.
    fleet = live(pool("slow", "l40s", replicas=1), pool("fast", "h200", replicas=1))
    policy = make_policy("weighted")
    counts = Counter(decided(policy, fleet, ask(), 0.0).replica.pool.name for _ in range(60))  # type: ignore[union-attr]
    assert 3 < counts["fast"] / counts["slow"] < 9


def test_a_prefix_is_followed_within_a_bound() -> None:
    fleet = live()
    prefix = tuple(range(6))
    holder = fleet.replicas()[2]
    holder.prefixes.add(prefix)
    policy = make_policy("prefix")
    taken = 0
    while decided(policy, fleet, ask(prefix=prefix), 0.0).replica is holder:
        load(holder, 1)
        taken += 1
    assert 1 <= taken <= 4
    for replica in fleet.replicas():
        load(replica, 10)
    assert decided(policy, fleet, ask(prefix=prefix), 0.0).replica is holder
    assert decided(policy, fleet, ask(prefix=(99,)), 0.0).replica is not holder


def test_equal_replicas_share_without_reports() -> None:
    """Requests that come at one moment are spread by what was sent, long before an engine reports it."""
    fleet, policy = live(AMD), make_policy("cheapest-meeting-target")
    for _ in range(40):
        got = decided(policy, fleet, ask(), 0.0)
        assert got.replica is not None
        assert got.prediction is not None
        got.replica.start(ask(), got.prediction, 0.0)
    assert [replica.in_flight for replica in fleet.replicas()] == [20, 20]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_decisions_change_nothing_live_and_repeat_with_their_seed(name: str) -> None:
    fleet = live()
    load(fleet.replicas()[0], 3)

    def counts() -> list[tuple[object, ...]]:
        return [(r.in_flight, r.waiting, r.held_tokens, r.prompt_rate, len(r.prefixes)) for r in fleet.replicas()]

    before = counts()
    runs = []
    for _ in range(2):
        policy = make_policy(name, seed=5)  # type: ignore[arg-type]
        runs.append([decided(policy, fleet, ask(), 0.0, explain=True).replica for _ in range(9)])
    assert counts() == before
    assert runs[0] == runs[1]
    assert None not in runs[0]


def test_unknown_policies_are_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="unknown policy 'best'; known: cheapest-meeting-target"):
        make_policy("best")  # type: ignore[arg-type]


def test_power_is_part_of_the_price_where_the_rent_leaves_it_out() -> None:
    free, paid = live(), live(usd_per_kwh=0.5)
    for without, with_power in zip(free.pools, paid.pools, strict=True):
        assert without.watts == with_power.watts > 500
        assert with_power.usd_per_s - without.usd_per_s == pytest.approx(without.watts / 1000 / 3600 * 0.5)
    # Dear enough, power turns the choice: here the H200 has the same rent, and draws less.
    even = (pool("amd"), pool("nvidia", "h200"))
    thirsty = live(*even, usd_per_kwh=10.0)
    got = decided(make_policy("cheapest-meeting-target"), thirsty, ask(), 0.0, explain=True)
    energy = {one.pool: one.joules for one in got.considered}
    assert got.replica is not None
    assert got.replica.pool.name == min(energy, key=lambda name: energy[name] or 0.0)
    assert chosen(live(pool("any", None)), ttft_s=None) == "any"
    untold = decided(make_policy("fastest"), live(pool("any", None)), ask(), 0.0, explain=True)
    assert untold.considered[0].joules is None


def test_a_hopeless_target_in_flight_closes_no_replica_to_others() -> None:
    fleet = live(pool("amd", replicas=1))
    policy = make_policy("cheapest-meeting-target")
    hopeless = decided(policy, fleet, ask(ttft_s=0.001, tpot_s=1e-6), 0.0)
    assert hopeless.outcome == "send"
    assert hopeless.replica is not None
    assert hopeless.prediction is not None
    assert not hopeless.meets
    hopeless.replica.start(ask(ttft_s=0.001, tpot_s=1e-6), hopeless.prediction, 0.0)
    assert decided(policy, fleet, ask(patience_s=10.0), 0.0).meets


def test_a_pool_that_cannot_hold_its_model_is_refused() -> None:
    with pytest.raises(DoesNotFit, match=r"pool amd: llama-3\.1-405b does not fit on 1 x mi300x"):
        live(pool("amd", model="llama-3.1-405b"), classes=())


def test_who_names_no_target_is_not_told_that_it_misses_one() -> None:
    fleet = live(pool("amd", replicas=1), classes=())
    load(fleet.pools[0].replicas[0], 60, decoding=False)
    got = decided(make_policy("cheapest-meeting-target"), fleet, ask(class_name=None, ttft_s=None, tpot_s=None), 0.0)
    assert got.outcome == "send"
    assert got.reason.startswith("soonest of 1: $")
