"""What replicas take is learnt from targets kept and missed."""

from tests.run.scaler.cases import KNOWN, rules, seen

from crosstie_gateway.scaler.learnt import LearntReach
from crosstie_gateway.scaler.scaler import Scaler


def judged(within: float, load: float, hours: int = 4) -> float:
    reach = LearntReach()
    for _ in range(60 * hours):
        reach.see(400, within, 60.0, load, 0.95)
    return reach.factor


def test_targets_kept_at_full_load_let_replicas_take_more_and_missed_ones_less() -> None:
    assert judged(0.999, 0.95) > 1.2
    assert judged(0.97, 0.95) == 1.0
    # A policy that fills the cheapest first stays near what is promised, whatever there is beside it.
    assert judged(0.955, 0.8) == judged(0.92, 0.8) == 1.0
    assert judged(0.85, 0.9) < 0.7


def test_what_a_shortage_taught_fades_while_the_promise_is_kept() -> None:
    reach = LearntReach(factor=0.8)
    for _ in range(60 * 24):
        reach.see(400, 0.96, 60.0, 0.8, 0.95)
    assert reach.factor == 1.0
    reach = LearntReach(factor=0.8)
    for _ in range(60 * 24):
        reach.see(400, 0.94, 60.0, 0.8, 0.95)
    assert reach.factor == 0.8


def test_neither_idle_replicas_nor_missing_ones_say_anything() -> None:
    # Targets that are kept well below the limit do not say where that is.
    assert judged(0.999, 0.85) == 1.0
    assert judged(0.999, 0.3) == judged(0.5, 0.3) == judged(0.5, 1.5) == 1.0


def test_few_requests_are_no_verdict_and_there_are_bounds() -> None:
    reach = LearntReach()
    reach.see(20, 0.0, 3600.0, 0.9, 0.95)
    assert reach.factor == 1.0
    # Nor are many within a minute: misses come in clusters.
    reach.see(5000, 0.0, 60.0, 0.9, 0.95)
    assert reach.factor < 1.0
    sudden = LearntReach()
    sudden.see(5000, 0.0, 60.0, 0.9, 0.95)
    assert sudden.factor == 1.0
    assert judged(1.0, 0.95, 24) == 1.3
    assert judged(0.0, 0.9, 24) == 0.5


def test_replicas_that_take_more_are_fewer() -> None:
    plain, learnt = Scaler(rules(), KNOWN), Scaler(rules(), KNOWN)
    learnt.state.reach["chat"].factor = 1.3
    orders = [one.decide(seen(0.0, 16.0, cheap=(0, 0), dear=(0, 0))).orders["cheap"] for one in (plain, learnt)]
    assert orders[0].replicas > orders[1].replicas
