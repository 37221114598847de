"""Kubernetes' autoscaler by its documentation, and the bill of a platform."""

from benchmarks.day_simulator import Fixed, Hpa, Platform
from tests.run.scaler.cases import CHEAP, rules

from crosstie_gateway.scaler.scaler import FleetObservation, Order


def looked(hpa: Hpa, at_s: float, busy: float, ready: int, wanted: int) -> int:
    there = FleetObservation(
        at_s=at_s, requests_per_s={}, over_s=15.0, ready={"cheap": ready}, wanted={"cheap": wanted},
        busy={"cheap": busy},
    )  # fmt: skip
    return hpa.orders(there)["cheap"].replicas


def test_replicas_go_in_proportion_and_not_within_a_tenth() -> None:
    assert looked(Hpa(rules(CHEAP), target=0.5), 0.0, 0.9, 5, 5) == 9
    assert looked(Hpa(rules(CHEAP), target=0.5), 0.0, 0.54, 5, 5) == 5
    assert looked(Hpa(rules(CHEAP), target=0.5), 0.0, 0.56, 5, 5) == 6
    assert looked(Hpa(rules(CHEAP), target=0.5), 0.0, 0.2, 5, 5) == 2


def test_it_goes_down_to_the_highest_of_five_minutes() -> None:
    hpa = Hpa(rules(CHEAP), target=0.5)
    assert looked(hpa, 0.0, 0.5, 6, 6) == 6
    assert looked(hpa, 15.0, 0.2, 6, 6) == 6
    assert looked(hpa, 301.0, 0.2, 6, 6) == 3


def test_replicas_that_do_not_serve_yet_are_idle_on_the_way_up() -> None:
    # Two serve at twice the target and four are asked for: two at full load and two idle are what is wanted.
    assert looked(Hpa(rules(CHEAP), target=0.5), 0.0, 1.0, 2, 4) == 4
    assert looked(Hpa(rules(CHEAP), target=0.5), 0.0, 1.5, 2, 4) == 6


def test_a_platform_starts_pays_drains_and_counts() -> None:
    lived: list[str] = []
    platform = Platform(
        rules(CHEAP), {"cheap": 2}, {"cheap": 4.0}, lambda one: 100.0, came=lambda one: lived.append(f"+{one.number}"),
        goes=lambda one: lived.append(f"-{one.number}"),
    )  # fmt: skip
    platform.begin({"cheap": 1})
    platform.obey({"cheap": Order(replicas=2, draining=0, why="")})
    platform.advance(3600.0)
    assert lived == ["+0", "+1"]
    # What starts is paid for as well.
    assert platform.bill.gpu_s == 2 * 2 * 3600.0
    assert platform.bill.usd == 8.0
    platform.obey({"cheap": Order(replicas=2, draining=1, why="")})
    assert platform.seen({}, 1.0, {}).empty == {"cheap": 1}
    platform.obey({"cheap": Order(replicas=1, draining=0, why="")})
    assert lived[-1] == "-1"
    platform.obey({"cheap": Order(replicas=2, draining=0, why="")})
    assert (platform.bill.moves, platform.bill.flaps) == (3, 1)


def test_what_is_lost_is_neither_there_nor_paid_until_it_is_back() -> None:
    platform = Platform(rules(CHEAP), {"cheap": 1}, {"cheap": 1.0}, lambda one: 100.0)
    platform.begin({"cheap": 3})
    platform.lose("cheap", 3600.0)
    platform.obey(Fixed({"cheap": 3}).orders(platform.seen({}, 1.0, {})))
    platform.advance(3600.0)
    assert platform.seen({}, 1.0, {}).ready == {"cheap": 0}
    assert platform.bill.gpu_s == 0.0
    platform.advance(3700.0)
    assert platform.seen({}, 1.0, {}).ready == {"cheap": 3}
