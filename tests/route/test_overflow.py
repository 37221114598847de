"""What is bought by the token: only where the fleet is full or would cost more, and within its limits."""

from typing import Any

import pytest
from tests.route.fleets import CATALOG, MODEL, ask, chosen, decided, fleet, live, load, pool

from crosstie.core.fleet import Pool, TokenPrice
from crosstie.route.build import live_fleet
from crosstie.route.live import LiveFleet
from crosstie.route.policies import make_policy
from crosstie.route.router import Router
from crosstie.route.spending import Spending

CHEAP = TokenPrice(usd_per_million_input=1e-6, usd_per_million_output=1e-6)
DEAR = TokenPrice(usd_per_million_input=10.0, usd_per_million_output=30.0)


def provider(price: TokenPrice = DEAR, **changes: Any) -> Pool:
    return pool("provider", None, 1, usd_per_gpu_hour=0.0, token_price=price, **changes)


def own(**changes: Any) -> Pool:
    return pool(replicas=1, max_in_flight=8, **changes)


def fill(fleet: LiveFleet, name: str = "amd") -> None:
    for replica in fleet.replicas():
        if replica.pool.name == name:
            load(replica, 8)


def reason(fleet: LiveFleet, policy: str = "cheapest-meeting-target", **changes: Any) -> str:
    return decided(make_policy(policy), fleet, ask(**changes), 0.0).reason  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["cheapest-meeting-target", "fastest", "round-robin", "least-loaded", "prefix"])
@pytest.mark.parametrize("price", [CHEAP, DEAR])
def test_while_gpus_that_are_paid_anyway_have_room_nothing_is_bought(policy: str, price: TokenPrice) -> None:
    assert chosen(live(own(), provider(price)), policy) == "amd"


def test_with_power_that_is_paid_by_use_the_cheaper_of_both_is_taken() -> None:
    assert chosen(live(own(), provider(CHEAP), usd_per_kwh=0.3)) == "provider"
    assert chosen(live(own(), provider(DEAR), usd_per_kwh=0.3)) == "amd"


def test_with_gpus_that_are_paid_by_use_the_cheaper_of_both_is_taken() -> None:
    cheap = live(own(paid_anyway=False), provider(CHEAP))
    assert chosen(cheap) == "provider"
    assert "cheaper than what amd would add, $" in reason(cheap)
    assert chosen(live(own(paid_anyway=False), provider(DEAR))) == "amd"


def test_cheaper_is_no_reason_to_miss_a_target() -> None:
    fleet = live(own(paid_anyway=False), provider(CHEAP))
    assert chosen(fleet, ttft_s=0.2) == "provider"
    provided = fleet.pools[1]
    for _ in range(50):
        provided.speed.saw_first(1000.0, 5.0)
    provided.replicas[0].touch()
    assert chosen(fleet, ttft_s=0.2) == "amd"


def test_a_full_fleet_buys_at_once_for_a_target_and_at_the_end_of_its_patience_without() -> None:
    fleet = live(own(), provider())
    fill(fleet)
    assert chosen(fleet, patience_s=10.0) == "provider"
    assert reason(fleet, patience_s=10.0).startswith("overflow, none of the fleet within target: $16000 a million")
    plain: dict[str, Any] = {"ttft_s": None, "tpot_s": None, "patience_s": 10.0}
    waiting = decided(make_policy("cheapest-meeting-target"), fleet, ask(**plain), 0.0)
    assert waiting.outcome == "wait"
    assert chosen(fleet, **plain, waited_s=10.0) == "provider"
    assert reason(fleet, **plain, waited_s=10.0).startswith("overflow, the fleet is full: ")


def test_low_priority_is_not_bought_because_the_fleet_is_full() -> None:
    fleet = live(own(), provider())
    fill(fleet)
    assert chosen(fleet, priority=0, patience_s=0.0) is None
    assert chosen(live(own(paid_anyway=False), provider(CHEAP)), priority=0) == "provider"


def test_with_nobody_up_or_nobody_else_left_to_try_it_is_bought() -> None:
    fleet = live(own(), provider())
    assert chosen(fleet, ttft_s=None, tpot_s=None, patience_s=10.0) == "amd"
    fleet.pools[0].replicas[0].went_down("gone")
    assert chosen(fleet, ttft_s=None, tpot_s=None, patience_s=10.0) == "provider"
    tried = decided(
        make_policy("round-robin"), live(own(), provider()), ask(ttft_s=None, tpot_s=None, patience_s=10.0), 0.0,
        exclude=("http://amd-0",),
    )  # fmt: skip
    assert tried.replica is not None
    assert tried.replica.pool.name == "provider"


def test_who_would_be_turned_away_is_bought() -> None:
    fleet = live(own(), provider())
    fill(fleet)
    router, plain = Router(fleet, make_policy("cheapest-meeting-target")), ask(ttft_s=None, tpot_s=None, patience_s=9.0)
    bought = router.bought(plain, 0.0)
    assert bought is not None
    assert bought.replica is not None
    assert bought.replica.pool.name == "provider"
    alone = live(own())
    fill(alone)
    assert Router(alone, make_policy("cheapest-meeting-target")).bought(ask(), 0.0) is None


def test_of_two_providers_the_cheaper_is_taken_and_a_model_of_theirs_alone_is_theirs() -> None:
    dearer = pool("dearer", None, 1, usd_per_gpu_hour=0.0, token_price=DEAR)
    fleet = live(dearer, provider(CHEAP))
    assert chosen(fleet) == "provider"
    fleet.pools[1].replicas[0].went_down("gone")
    assert chosen(fleet) == "dearer"


def test_a_request_that_only_a_provider_can_hold_or_that_is_pinned_there_goes_there() -> None:
    fleet = live(own(max_context=2000), provider(max_context=100_000))
    assert chosen(fleet, input_tokens=50_000.0) == "provider"
    assert chosen(fleet, pin="provider") == "provider"
    assert chosen(fleet) == "amd"


def test_no_more_is_spent_than_the_limit_and_what_is_reserved_counts() -> None:
    # A request is 1000 tokens in and 200 out: 16 thousandths of a dollar.
    limited = TokenPrice(usd_per_million_input=10.0, usd_per_million_output=30.0, max_usd_per_hour=0.04)
    fleet = live(own(), provider(limited))
    fill(fleet)
    router = Router(fleet, make_policy("cheapest-meeting-target"))
    flights = []
    for _ in range(2):
        decision = router.decide(ask(), 0.0)
        assert decision.replica is not None
        assert decision.prediction is not None
        flights.append(decision.replica.start(ask(), decision.prediction, 0.0))
    explained = router.decide(ask(), 0.0, explain=True)
    assert explained.outcome == "wait" or explained.replica is not fleet.pools[1].replicas[0]
    assert {one.pool: one.dropped for one in explained.considered}["provider"] == (
        "spending: 0.032 of 0.04 USD in an hour are spent or reserved"
    )
    # Half of what was reserved: an answer of 200 tokens that came to none.
    for flight in flights:
        flight.charge_usd(1000.0, 0.0)
        flight.end(1.0, output_tokens=0, input_tokens=1000, completed=True)
    assert fleet.pools[1].spending is not None
    assert fleet.pools[1].spending.reserved_usd == 0.0
    assert router.decide(ask(), 1.0).replica is fleet.pools[1].replicas[0]


def test_what_a_client_leaves_is_counted_and_what_a_provider_refuses_is_not() -> None:
    fleet = live(provider())
    spending, replica = fleet.pools[0].spending, fleet.pools[0].replicas[0]
    assert spending is not None
    decision = Router(fleet, make_policy("fastest")).decide(ask(), 0.0)
    assert decision.prediction is not None
    left = replica.start(ask(), decision.prediction, 0.0)
    left.end(1.0, output_tokens=None, input_tokens=None, completed=False)
    assert spending.periods[0].spent_usd(1.0) == pytest.approx(0.01)
    refused = replica.start(ask(), decision.prediction, 1.0)
    refused.billed_usd = 0.0
    refused.end(2.0, output_tokens=None, input_tokens=None, completed=False)
    assert spending.periods[0].spent_usd(2.0) == pytest.approx(0.01)


def test_a_limit_is_one_of_any_hour_and_any_day_and_of_all_who_share_it() -> None:
    spending, told = Spending(), list[float]()
    spending.limit(1.0, 1.5)
    for start in (0.0, 3700.0):
        assert spending.refusal(0.8, start) is None
        spending.reserve(0.8, start)
        spending.settle(0.8, 0.7, start)
        assert str(spending.refusal(0.4, start)).endswith("in an hour are spent or reserved")
    assert spending.refusal(0.2, 7500.0) == "spending: 1.4 of 1.5 USD in a day are spent or reserved"
    assert spending.refusal(0.2, 90_000.0) is None
    spending.periods[1].ask, spending.periods[1].tell = lambda: 1.4, told.append
    assert spending.refusal(0.2, 200_000.0) is not None
    spending.reserve(0.25, 200_000.0)
    assert told == [0.25]


def test_a_reload_keeps_what_was_spent_and_takes_the_new_limit() -> None:
    before = live(provider())
    assert before.pools[0].spending is not None
    before.pools[0].spending.settle(0.0, 2.0, 0.0)
    limited = TokenPrice(usd_per_million_input=1.0, usd_per_million_output=1.0, max_usd_per_day=2.0)
    after = live_fleet(CATALOG, fleet(provider(limited)), 1.0, before)
    decision = Router(after, make_policy("fastest")).decide(ask(), 1.0)
    assert (decision.outcome, decision.refusal) == ("refuse", "unavailable")
    assert decision.reason == "pool provider: spending: 2 of 2 USD in a day are spent or reserved"


def test_cached_tokens_have_a_price_of_their_own_where_the_provider_has_one() -> None:
    price = TokenPrice(usd_per_million_input=2.0, usd_per_million_output=4.0, usd_per_million_cached_input=0.5)
    assert live(provider(price)).by_model[MODEL][0].request_usd(1e6, 1e6, 1e6) == pytest.approx(6.5)
    assert live(provider(DEAR)).by_model[MODEL][0].request_usd(1e6, 1e6, 1e6) == pytest.approx(50.0)


def test_an_explanation_says_why_nothing_is_bought_or_why_it_is() -> None:
    fleet = live(own(), provider())
    router = Router(fleet, make_policy("cheapest-meeting-target"))
    said = {one.pool: one for one in router.decide(ask(), 0.0, explain=True).considered}
    assert said["provider"].dropped == "overflow: bought only where the fleet is full or would cost more"
    assert said["amd"].dropped is None
    fill(fleet)
    said = {one.pool: one for one in router.decide(ask(), 0.0, explain=True).considered}
    assert said["provider"].dropped is None
