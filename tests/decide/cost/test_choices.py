"""Rent, API, or wait: each worked by hand on ten H200 with round assumptions."""

import dataclasses
import json

import msgspec
import pytest
from tests.conftest import Command
from tests.present import present

from crosstie.catalog.costs import Ranged
from crosstie.catalog.library import Catalog
from crosstie.catalog.prices import ApiPrice
from crosstie.core.errors import BadInput
from crosstie.core.fact import Fact
from crosstie.decide.cost.choices import (
    Api,
    Successor,
    api_quote,
    buy_or_wait,
    given_api,
    host_or_api,
    mean_slip_months,
    rent_or_buy,
)
from crosstie.decide.cost.ownership import Option
from crosstie.decide.cost.prices import given, sold_tokens

Costs = dict[str, Ranged]


def test_rent_or_buy_by_hand(h200_fleet: Option, exact_costs: Costs) -> None:
    """Owned for two years: 316,340 USD over 175,200 GPU-hours, of which 249,140 are not hardware."""
    found = rent_or_buy(h200_fleet, exact_costs, 2.0, years=2.0)
    assert found.owned_usd_per_hour == pytest.approx(316_340 / 175_200)
    assert found.break_even_utilisation == pytest.approx(316_340 / 175_200 / 2.0)
    assert found.buy_wins_around_the_clock
    # 12,000 USD for GPU, server and network come back at what rent exceeds running by, 730 hours a month.
    assert found.payback_months == pytest.approx(12_000 / (2.0 - 249_140 / 175_200) / 730)


def test_cheap_rent_never_pays_a_purchase_back(h200_fleet: Option, exact_costs: Costs) -> None:
    found = rent_or_buy(h200_fleet, exact_costs, 1.0, years=2.0)
    assert found.payback_months is None
    assert not found.buy_wins_around_the_clock
    with pytest.raises(BadInput, match=r"from 0\.001 to"):
        rent_or_buy(h200_fleet, exact_costs, 0.0)


def test_host_or_api_by_hand(h200_fleet: Option, exact_costs: Costs) -> None:
    """4,096 tokens in for 1,024 out at 0.50 and 1.50: 3.50 USD per million out. The fleet costs 433 USD a day
    and can do 86.4 million tokens, so it would need 1.43 of them."""
    found = host_or_api(h200_fleet, exact_costs, Api(0.5, 1.5, 4096, 1024).usd_per_mtok, years=2.0)
    assert found.api_usd_per_mtok == pytest.approx(3.5)
    assert found.fleet_usd_per_day == pytest.approx(316_340 / 730)
    assert found.break_even_tokens_per_day == pytest.approx(316_340 / 730 / 3.5 * 1e6)
    assert found.break_even_utilisation == pytest.approx(316_340 / 730 / 3.5 / 86.4)
    assert not found.fleet_wins
    dear = host_or_api(h200_fleet, exact_costs, Api(5.0, 15.0, 4096, 1024).usd_per_mtok, years=2.0)
    assert dear.fleet_wins
    # At the break-even load the API's bill is the fleet's.
    assert dear.break_even_utilisation == pytest.approx(found.break_even_utilisation / 10)


def test_an_api_needs_prices_and_a_fleet_throughput(h200_fleet: Option, exact_costs: Costs) -> None:
    with pytest.raises(BadInput, match="API prices"):
        Api(-0.1, 1.0, 1, 1)
    with pytest.raises(BadInput, match="API prices"):
        Api(0.1, float("nan"), 1, 1)
    silent = dataclasses.replace(h200_fleet, output_tokens_per_s_per_gpu=None)
    with pytest.raises(BadInput, match="throughput"):
        host_or_api(silent, exact_costs, 2.0)


def offer(provider: str, into: float, out: float, date: str = "2026-08") -> ApiPrice:
    def fact(value: float) -> Fact:
        return Fact(value=value, unit="USD/Mtoken", basis="claimed", source="a test", date=date, note="")

    return ApiPrice(model="llama-3.1-8b", provider=provider, input=fact(into), output=fact(out))


def test_what_apis_charge_by_hand(h200_fleet: Option, exact_costs: Costs) -> None:
    """Four tokens in for one out. Ann asks 0.10 and 0.60, so 1.00 per million out, and for something faster 2.00
    and 4.00, so 12.00: 6.50 in the middle. Bob asks 1.00 and 2.00, so 6.00; what he asked before is no more than
    an end of the range. Cas asks 0.50 for either, so 2.50. The providers' middle is 6.00.

    The fleet costs 316,340 USD over 730 days, so 433.34 a day. At 6.00 that buys 72.2 million tokens out of 86.4
    that the fleet can do; at 1.00 433, five times that; at 20.00 (Bob's old 4.00 and 4.00) 21.7 million, a quarter.
    """
    offers = [
        offer("ann", 0.1, 0.6), offer("ann", 2, 4), offer("bob", 1, 2), offer("bob", 4, 4, "2025-01"),
        offer("cas", 0.5, 0.5),
    ]  # fmt: skip
    quote = api_quote(offers, 4096, 1024)
    assert quote
    assert quote.providers == pytest.approx({"cas": 2.5, "bob": 6.0, "ann": 6.5})
    assert list(quote.providers) == ["cas", "bob", "ann"]
    assert (quote.low, quote.usd, quote.high) == pytest.approx((1.0, 6.0, 20.0))
    assert (quote.cheapest, quote.dearest) == ("ann", "bob")
    assert (quote.prices, quote.oldest, quote.newest, quote.is_given) == (5, "2025-01", "2026-08", False)
    assert [quote.dearer_than(usd) for usd in (1.0, 6.0, 7.0)] == [3, 1, 0]
    found = [host_or_api(h200_fleet, exact_costs, usd, 2.0) for usd in (quote.low, quote.usd, quote.high)]
    day = 316_340 / 730
    assert [f.break_even_tokens_per_day for f in found] == pytest.approx([day * 1e6, day / 6 * 1e6, day / 20 * 1e6])
    assert [f.break_even_utilisation for f in found] == pytest.approx([day / 86.4, day / 6 / 86.4, day / 20 / 86.4])
    # At half of its tokens, as assumed, the fleet costs 316,340 / 31,536 = 10.03.
    assert [f.fleet_wins for f in found] == [False, False, True]


def test_who_is_cheapest_depends_on_the_load() -> None:
    offers = [offer("prompts", 0.1, 3.0), offer("answers", 1.0, 1.0)]
    long_prompts, long_answers = api_quote(offers, 4096, 1024), api_quote(offers, 128, 1024)
    assert long_prompts
    assert long_answers
    assert (long_prompts.cheapest, long_answers.cheapest) == ("prompts", "answers")
    assert api_quote([], 1, 1) is None


def test_a_price_in_hand_is_its_own_range() -> None:
    quote = given_api(Api(0.5, 1.5, 4096, 1024))
    assert (quote.low, quote.usd, quote.high, quote.is_given) == (3.5, 3.5, 3.5, True)


def test_only_the_very_model_s_prices_count(catalog: Catalog) -> None:
    """A name or an alias of the catalog, with the same layers: nothing is taken for something like it."""
    model = catalog.model("llama-3.1-70b")
    own = sold_tokens(catalog, model)
    assert own
    assert {price.model for price in own} == {"llama-3.1-70b"}
    by_alias = msgspec.structs.replace(model, id="Meta-Llama-3.1-70B", aliases=())
    assert sold_tokens(catalog, by_alias) == own
    # As large and as deep as Llama 3.1 70B, and sold under its own name; a fine-tune is sold by nobody.
    twin = catalog.model("llama-3.3-70b")
    assert {price.model for price in sold_tokens(catalog, twin)} == {"llama-3.3-70b"}
    assert sold_tokens(catalog, msgspec.structs.replace(model, id="our-tune", aliases=())) == []
    other = msgspec.structs.replace(catalog.model("llama-3.1-8b"), id="llama-3.1-70b")
    assert sold_tokens(catalog, other) == []


def successor(catalog: Catalog, months: float, slip: float = 0.0, speedup: float = 2.0) -> Successor:
    return Successor(catalog.accelerator("h200"), months, slip, speedup, purchase_usd=9_000.0)


def test_waiting_by_hand(catalog: Catalog, h200_fleet: Option, exact_costs: Costs) -> None:
    """A year of rent at 2.00 for ten GPUs is 175,200. Then ten successors for a year lose 0.2 of 120,000, tie up
    0.9 of it at 10%, and cost 4,380 + 2,190 + 12,000 + 6,000: 59,370 in all, and half of that at twice the speed.
    Engineers cost 200,000 either way."""
    found = buy_or_wait(h200_fleet, successor(catalog, 12), exact_costs, given("h200", 2.0), years=2.0)
    assert found.buy_now_usd == pytest.approx(316_340)
    assert found.bridge_usd == pytest.approx(175_200)
    assert found.wait_usd == pytest.approx(175_200 + 59_370 / 2 + 200_000)
    assert found.gpus_later == 5
    assert not found.waiting_wins
    # Rent alone costs more than buying now, so no speed-up helps.
    assert found.break_even_speedup is None


def test_the_speedup_that_breaks_even(catalog: Catalog, h200_fleet: Option, exact_costs: Costs) -> None:
    cheap = given("h200", 0.5)
    found = buy_or_wait(h200_fleet, successor(catalog, 12), exact_costs, cheap, years=2.0)
    assert found.waiting_wins
    assert found.break_even_speedup == pytest.approx(59_370 / (316_340 - 200_000 - 43_800))
    level = successor(catalog, 12, speedup=found.break_even_speedup or 0.0)
    again = buy_or_wait(h200_fleet, level, exact_costs, cheap, years=2.0)
    assert again.wait_usd == pytest.approx(again.buy_now_usd)


@pytest.mark.slow
def test_the_slip_that_breaks_even(catalog: Catalog, h200_fleet: Option, exact_costs: Costs) -> None:
    rent = given("h200", 2.0)
    found = buy_or_wait(h200_fleet, successor(catalog, 0), exact_costs, rent, years=2.0)
    assert found.waiting_wins
    level = successor(catalog, 0, slip=present(found.break_even_slip_months))
    again = buy_or_wait(h200_fleet, level, exact_costs, rent, years=2.0)
    assert again.wait_usd == pytest.approx(again.buy_now_usd, rel=1e-6)
    # Where buying wins without any slip, no slip makes waiting better.
    assert buy_or_wait(h200_fleet, successor(catalog, 20), exact_costs, rent, 2.0).break_even_slip_months is None


def test_a_slip_past_the_horizon_is_all_rent(catalog: Catalog, h200_fleet: Option, exact_costs: Costs) -> None:
    found = buy_or_wait(h200_fleet, successor(catalog, 240), exact_costs, given("h200", 2.0), years=2.0)
    assert found.bridge_usd == pytest.approx(2 * 8_760 * 2.0 * 10)
    assert found.wait_usd == pytest.approx(found.bridge_usd + 200_000)


def test_a_mean_slip_from_a_chance_a_quarter() -> None:
    """One in two each quarter: one quarter late in the mean."""
    assert mean_slip_months(0.5) == pytest.approx(3.0)
    assert mean_slip_months(0.0) == 0.0
    with pytest.raises(BadInput, match="from 0 to below 1"):
        mean_slip_months(1.0)


@pytest.mark.parametrize(
    ("months", "slip", "speedup", "usd"), [(-1, 0, 2, 1), (1, -1, 2, 1), (1, 0, 0, 1), (1, 0, 2, 0), (1e9, 0, 2, 1)]
)
def test_successors_make_sense(
    catalog: Catalog, h200_fleet: Option, exact_costs: Costs, months: float, slip: float, speedup: float, usd: float
) -> None:
    def wait() -> None:
        promised = Successor(catalog.accelerator("h200"), months, slip, speedup, usd)
        buy_or_wait(h200_fleet, promised, exact_costs, given("h200", 2.0), 2.0)

    with pytest.raises(BadInput, match="must be from"):
        wait()


def test_a_speed_up_that_the_figures_deny_is_said(crosstie: Command) -> None:
    asked = ("tco", "llama-3.1-70b", "--precision", "fp8", "--on", "h200", "--json", "--wait")
    promised = json.loads(crosstie(*asked, "b200,months=6,speedup=6,usd=40000").out)
    assert promised["buy_or_wait"]["speedup_denied"] is True
    assert "deny 6x" in " ".join(promised["verdicts"])
    value, low, high = promised["buy_or_wait"]["speedup_by_their_figures"]
    assert low <= value <= high < 6.0
    likely = json.loads(crosstie(*asked, f"b200,months=6,speedup={value:.2f},usd=40000").out)
    assert likely["buy_or_wait"]["speedup_denied"] is False


def test_what_is_announced_brings_its_own_date_price_and_speed(crosstie: Command) -> None:
    asked = ("tco", "llama-3.1-70b", "--precision", "fp8", "--on", "mi355x", "--json", "--wait")
    found = json.loads(crosstie(*asked, "mi455x").out)
    assert found["buy_or_wait"]["speedup"] == pytest.approx(found["buy_or_wait"]["speedup_by_their_figures"][0])
    assert "Nobody has measured it" in " ".join(found["verdicts"])
    unknown = crosstie(*asked, "b200,months=6")
    assert unknown.status == 2
    assert "give usd" in unknown.err
