"""What is decided: how many, of which, when they go, and what happens when they are lost."""

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.run.scaler.cases import CHEAP, DEAR, KNOWN, rules, seen, watched

from crosstie.catalog.fleets import read_fleet
from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.errors import BadInput
from crosstie.decide.plan.subject import of_fleet
from crosstie_gateway.scaler.capacities import check_inventory, rules_of
from crosstie_gateway.scaler.rules import ScaleRules, Supply
from crosstie_gateway.scaler.scaler import Scaler, ScalerState

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


def test_it_buys_what_is_cheapest_and_then_the_next() -> None:
    first = Scaler(rules(), KNOWN).decide(seen(0.0, 10.0, cheap=(0, 0), dear=(0, 0)))
    assert first.orders["cheap"].replicas == 6
    assert first.orders["dear"].replicas == 0
    many = Scaler(rules(), KNOWN).decide(seen(0.0, 30.0, cheap=(0, 0), dear=(0, 0)))
    assert many.orders["cheap"].replicas == CHEAP.most
    assert many.orders["dear"].replicas >= 5


def test_it_buys_ahead_of_a_rise_that_the_day_has_by_as_much_as_a_start_takes() -> None:
    day = (0.5,) * 12 + (1.0,) * 12
    before = 12 * 3600.0 - 1800.0
    knows, ignorant = Scaler(rules(), KNOWN, {"chat": day}), Scaler(rules(), KNOWN)
    orders = [one.decide(seen(before, 10.0, cheap=(6, 6), dear=(0, 0))).orders["cheap"] for one in (knows, ignorant)]
    assert orders[0].replicas > orders[1].replicas == 6
    assert "serving in about" in orders[0].why


def test_what_is_not_needed_is_emptied_before_it_goes_and_only_after_a_while() -> None:
    scaler = Scaler(rules(), KNOWN)
    at = watched(scaler, 5, 10.0, cheap=(6, 6), dear=(0, 0))
    # What was needed within the last hour counts, whatever comes now.
    soon = scaler.decide(seen(at, 2.0, cheap=(6, 6), dear=(0, 0)))
    assert (soon.orders["cheap"].replicas, soon.orders["cheap"].draining) == (6, 0)
    at = watched(scaler, 75, 2.0, at + 60.0, cheap=(6, 6), dear=(0, 0))
    goes = scaler.decide(seen(at, 2.0, cheap=(6, 6), dear=(0, 0))).orders["cheap"]
    assert goes.draining > 0 or goes.replicas < 6


def test_a_replica_goes_when_it_is_empty_or_has_had_its_time() -> None:
    scaler = Scaler(rules(drain_s=600.0), KNOWN)
    watched(scaler, 1, 2.0, cheap=(4, 4), dear=(0, 0))
    at, order = 60.0, None
    while order is None or not order.draining:
        order = scaler.decide(seen(at, 2.0, cheap=(4, 4), dear=(0, 0))).orders["cheap"]
        at += 60.0
    assert order.replicas == 4
    leaving = order.draining
    still = scaler.decide(seen(at, 2.0, cheap=(4, 4), dear=(0, 0))).orders["cheap"]
    assert still.replicas == 4
    gone = scaler.decide(seen(at + 60.0, 2.0, {"cheap": 1}, cheap=(4, 4), dear=(0, 0))).orders["cheap"]
    assert (gone.replicas, gone.draining) == (3, leaving - 1)
    late = scaler.decide(seen(at + 700.0, 2.0, cheap=(3, 3), dear=(0, 0))).orders["cheap"]
    assert late.draining == 0


def test_the_margin_is_used_before_more_are_bought() -> None:
    # Five carry ten. A margin of 7% over 9.6 is more than that, half of it is not.
    for per_s, bought in ((9.6, 5), (9.8, 6)):
        decision = Scaler(rules(), KNOWN).decide(seen(0.0, per_s, cheap=(5, 5), dear=(0, 0)))
        assert decision.needs["chat"].provided > 10.0
        assert decision.orders["cheap"].replicas == bought
    # All of it where something was given back lately, so that it does not come and go.
    scaler = Scaler(rules(), KNOWN)
    scaler.state.supplies["dear"].shrank_s = -600.0
    assert scaler.decide(seen(0.0, 9.8, cheap=(5, 5), dear=(0, 0))).orders["cheap"].replicas == 5


def test_replicas_are_not_exchanged_for_others_that_save_little() -> None:
    # Seven carry what comes; the cheap ones would save a twentieth, or nearly half.
    there = seen(0.0, 11.9, cheap=(0, 0), dear=(6, 6))
    near = msgspec.structs.replace(CHEAP, usd_per_gpu_hour=3.6)
    assert Scaler(rules(near, DEAR), KNOWN).decide(there).orders["dear"].replicas == 6
    assert Scaler(rules(near, DEAR), KNOWN).decide(there).orders["cheap"].replicas == 1
    assert Scaler(rules(CHEAP, DEAR), KNOWN).decide(there).orders["cheap"].replicas == 7


def test_nothing_cheap_is_given_back_that_would_be_bought_again_for_something_dear() -> None:
    # Six cheap ones carry what is provided for, 11.8. To be sure of more the dear one stays; a cheap one could go then.
    large = replace(KNOWN, rate={**KNOWN.rate, "dear": np.array([3.0])})
    scaler = Scaler(rules(msgspec.structs.replace(CHEAP, most=6), DEAR), large)
    for minute in range(240):
        orders = scaler.decide(seen(60.0 * minute, 11.05, cheap=(6, 6), dear=(1, 1))).orders
        assert (orders["cheap"].replicas, orders["cheap"].draining) == (6, 0)
        if orders["dear"].draining:
            break
    assert 0 < minute < 239


def test_waiting_never_goes_below_a_floor_nor_leans_on_spot() -> None:
    kept = Supply(name="kept", pool="cheap", least=7, most=9)
    decision = Scaler(rules(kept), KNOWN).decide(seen(0.0, 9.6, kept=(5, 5)))
    assert decision.orders["kept"].replicas == 7
    spot = Supply(name="spot", pool="cheap", kind="spot", usd_per_gpu_hour=0.5, most=50)
    decision = Scaler(rules(spot, DEAR, spot_share=0.5), KNOWN).decide(seen(0.0, 9.6, spot=(5, 5), dear=(0, 0)))
    assert decision.orders["dear"].replicas == 3


def test_traffic_that_comes_back_keeps_those_that_were_being_emptied() -> None:
    scaler = Scaler(rules(drain_s=3600.0), KNOWN)
    at, order = 0.0, None
    while order is None or not order.draining:
        order = scaler.decide(seen(at, 2.0, cheap=(4, 4), dear=(0, 0))).orders["cheap"]
        at += 60.0
    back = scaler.decide(seen(at, 40.0, cheap=(4, 4), dear=(0, 0))).orders["cheap"]
    assert back.draining == 0
    assert "kept that were being emptied" in back.why


def test_noise_on_a_level_moves_nothing() -> None:
    scaler = Scaler(rules(), KNOWN)
    watched(scaler, 30, 10.0, cheap=(6, 6), dear=(0, 0))
    moved = []
    for minute in range(60):
        rate = 10.0 * (1.0 + 0.06 * (-1) ** (minute // 3))
        order = scaler.decide(seen(1800.0 + 60.0 * minute, rate, cheap=(6, 6), dear=(0, 0))).orders
        moved.append((order["cheap"].replicas, order["dear"].replicas))
    assert set(moved) == {(6, 0)}


def test_a_pool_that_is_lost_is_replaced_elsewhere_at_once_and_not_counted_on() -> None:
    scaler = Scaler(rules(), KNOWN)
    at = watched(scaler, 30, 10.0, cheap=(6, 6), dear=(0, 0))
    lost = scaler.decide(seen(at, 10.0, cheap=(0, 6), dear=(0, 0))).orders
    assert lost["dear"].replicas >= 5
    assert "lost 6 of 6 at once" in lost["cheap"].why
    # What it was asked for stands, so that it comes back where it can.
    assert lost["cheap"].replicas == 6


def test_one_replica_that_dies_is_expected_back() -> None:
    scaler = Scaler(rules(), KNOWN)
    at = watched(scaler, 30, 10.0, cheap=(6, 6), dear=(0, 0))
    orders = scaler.decide(seen(at, 10.0, cheap=(5, 6), dear=(0, 0))).orders
    assert orders["dear"].replicas == 0
    assert "not counted on" not in orders["cheap"].why


def test_a_supply_that_does_not_deliver_is_passed_over_for_a_while() -> None:
    scaler = Scaler(rules(), KNOWN)
    scaler.decide(seen(0.0, 10.0, cheap=(0, 0), dear=(0, 0)))
    orders = None
    for minute in range(1, 60):
        orders = scaler.decide(seen(60.0 * minute, 10.0, cheap=(0, 6), dear=(0, 0))).orders
        if orders["dear"].replicas:
            break
    assert orders is not None
    assert "have not come" in orders["cheap"].why
    assert scaler.state.supplies["cheap"].start.seen == 0


def test_starts_are_learnt_and_lost_ones_teach_nothing() -> None:
    scaler = Scaler(rules(), KNOWN)
    scaler.decide(seen(0.0, 10.0, cheap=(0, 0), dear=(0, 0)))
    for minute in range(1, 15):
        scaler.decide(seen(60.0 * minute, 10.0, cheap=(0, 6), dear=(0, 0)))
    scaler.decide(seen(900.0, 10.0, cheap=(6, 6), dear=(0, 0)))
    start = scaler.state.supplies["cheap"].start
    assert start.seen == 6
    assert 700.0 < start.likely_s < 900.0
    at = watched(scaler, 5, 10.0, 960.0, cheap=(6, 6), dear=(0, 0))
    scaler.decide(seen(at, 10.0, cheap=(0, 6), dear=(3, 3)))
    scaler.decide(seen(at + 7200.0, 10.0, cheap=(6, 6), dear=(3, 3)))
    assert scaler.state.supplies["cheap"].start.seen == 6


def test_a_shortage_takes_what_starts_soonest() -> None:
    soon = Supply(name="soon", pool="dear", most=20, usd_per_gpu_hour=2.2, start_s=60.0)
    late = Supply(name="late", pool="cheap", most=20, usd_per_gpu_hour=2.0, start_s=1200.0)
    orders = Scaler(rules(late, soon), KNOWN).decide(seen(0.0, 10.0, late=(0, 0), soon=(0, 0))).orders
    assert orders["soon"].replicas == 6


def test_floors_hold_and_reserved_replicas_come_first() -> None:
    kept = Supply(name="kept", pool="dear", least=3, most=5)
    quiet = Scaler(rules(kept), KNOWN).decide(seen(0.0, 0.1, kept=(0, 0)))
    assert quiet.orders["kept"].replicas == 3
    paid = Supply(name="paid", pool="dear", kind="reserved", most=4)
    orders = Scaler(rules(CHEAP, paid), KNOWN).decide(seen(0.0, 10.0, cheap=(0, 0), paid=(0, 0))).orders
    assert (orders["paid"].replicas, orders["cheap"].replicas) == (4, 2)


def test_spot_carries_no_more_than_its_share() -> None:
    spot = Supply(name="spot", pool="cheap", kind="spot", usd_per_gpu_hour=0.5, most=50)
    for share, steady in ((0.0, 6), (0.5, 3), (1.0, 0)):
        scaler = Scaler(rules(spot, DEAR, spot_share=share), KNOWN)
        orders = scaler.decide(seen(0.0, 10.0, spot=(0, 0), dear=(0, 0))).orders
        assert orders["dear"].replicas == steady, share
        assert orders["dear"].replicas + orders["spot"].replicas == 6


def test_spot_that_is_taken_away_again_and_again_is_no_longer_cheap() -> None:
    spot = Supply(name="spot", pool="cheap", kind="spot", usd_per_gpu_hour=3.5, start_s=1800.0, most=50)
    scaler = Scaler(rules(spot, DEAR, spot_share=1.0), KNOWN)
    assert scaler._weighed_usd(spot) < scaler._weighed_usd(DEAR)
    for hour in range(40):
        scaler.decide(seen(3600.0 * hour, 10.0, spot=(6, 6), dear=(0, 0)))
        scaler.decide(seen(3600.0 * hour + 1800.0, 10.0, spot=(4, 6), dear=(0, 0)))
    assert scaler._weighed_usd(spot) > scaler._weighed_usd(DEAR)


def test_a_budget_is_kept_and_said() -> None:
    orders = Scaler(rules(budget_usd_per_hour=7.0), KNOWN).decide(seen(0.0, 10.0, cheap=(0, 0), dear=(0, 0)))
    assert orders.usd_per_hour <= 7.0
    assert "the budget (7.00 USD/h now) carries" in orders.short
    rich = Scaler(rules(budget_usd_per_hour=100.0), KNOWN).decide(seen(0.0, 10.0, cheap=(0, 0), dear=(0, 0)))
    assert rich.short == ""


def test_the_budget_of_a_day_leaves_enough_for_its_peak() -> None:
    day = (0.2,) * 12 + (1.0,) * 12
    scaler = Scaler(rules(budget_usd_per_day=300.0), KNOWN, {"chat": day})
    night = scaler.decide(seen(6 * 3600.0, 2.0, cheap=(2, 2), dear=(0, 0)))
    # What is left over the hours that are left, in proportion to their traffic.
    assert scaler._budget(6 * 3600.0) == pytest.approx(300.0 / 18.0 * 0.2 / (0.2 * 6 / 18 + 12 / 18), rel=0.1)
    assert night.short == ""


def test_more_than_can_be_had_is_said_with_what_to_do() -> None:
    few = Supply(name="few", pool="cheap", most=2)
    decision = Scaler(rules(few), KNOWN).decide(seen(0.0, 10.0, few=(1, 1)))
    assert decision.orders["few"].replicas == 2
    assert "raise `most` of few" in decision.short


def test_its_state_outlives_a_restart() -> None:
    scaler = Scaler(rules(), KNOWN)
    at = watched(scaler, 20, 10.0, cheap=(5, 6), dear=(0, 0))
    kept = msgspec.json.decode(msgspec.json.encode(scaler.state), type=ScalerState)
    other = Scaler(rules(), KNOWN, state=kept)
    now = seen(at, 11.0, cheap=(5, 6), dear=(0, 0))
    assert other.decide(now) == scaler.decide(now)


@pytest.mark.parametrize(
    ("supply", "why"),
    [
        (Supply(name="a", pool="nowhere", most=1), "no pool 'nowhere'"),
        (Supply(name="a", pool="cheap", least=3, most=1), "least 3 is more than most 1"),
    ],
)
def test_rules_that_fit_no_fleet_are_refused(supply: Supply, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        Scaler(ScaleRules(supplies=(supply,)), KNOWN)


def test_no_more_may_be_asked_for_than_the_plan_says_there_are() -> None:
    catalog = Catalog()
    fleet = read_fleet(catalog, BENCHMARKS / "autoscale.toml")
    work = read_workload(catalog, BENCHMARKS / "autoscale_workload.toml")
    subject = replace(of_fleet(fleet), workload=work)
    # Six MI300X are all that there are; of H200 the workload says nothing.
    assert {one.name: one.most for one in rules_of(subject).supplies} == {"chat-h200": 6, "chat-mi300x": 6}
    check_inventory(rules_of(subject), subject)
    asked = ScaleRules(supplies=(Supply(name="amd", pool="chat-mi300x", most=9),))
    with pytest.raises(BadInput, match=r"supply amd: `most` comes to 9 mi300x, and by .*there are 6: lower the one"):
        check_inventory(asked, subject)
