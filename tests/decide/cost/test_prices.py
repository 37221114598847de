"""Quotes: the middle of providers, between the least and the most of all that was looked at."""

import pytest

from crosstie.catalog.library import Catalog
from crosstie.catalog.prices import Price
from crosstie.core.errors import BadInput
from crosstie.core.fact import Fact
from crosstie.decide.cost.prices import BASES, RENT, behind, given, quote, quotes


def price(
    usd: float, provider: str = "a", date: str = "2026-01", kind: str = "on-demand", accelerator: str = "h200"
) -> Price:
    unit = "USD" if kind == "purchase" else "USD/hour"
    fact = Fact(value=usd, unit=unit, basis="quoted", source="a test", date=date, note="")  # type: ignore[arg-type]
    return Price(accelerator=accelerator, provider=provider, kind=kind, amount=fact)


def test_a_quote_is_the_middle_of_providers_between_the_ends_of_all() -> None:
    got = quote([price(2.0, "a"), price(3.0, "b"), price(9.0, "c"), price(0.1, "d", accelerator="b200")], "h200")
    assert got is not None
    assert (got.usd, got.low, got.high) == (3.0, 2.0, 9.0)
    assert (got.kind, got.prices, got.is_given) == ("on-demand", 3, False)


def test_a_provider_counts_once_by_its_newest_price() -> None:
    """Three old prices of one provider do not outvote another; but they are in the range."""
    old = [price(usd, "a", "2025-06") for usd in (5.0, 5.5, 6.0)]
    got = quote([*old, price(2.0, "a", "2026-02"), price(3.0, "b", "2025-01")], "h200")
    assert got is not None
    assert got.usd == 2.5
    assert (got.low, got.high) == (2.0, 6.0)
    assert (got.oldest, got.newest) == ("2025-01", "2026-02")


def test_of_several_prices_of_one_day_a_provider_counts_by_their_middle() -> None:
    same_day = [price(usd, "a") for usd in (1.0, 2.0, 6.0)]
    for order in (same_day, same_day[::-1]):
        got = quote([*order, price(9.0, "a", "2025-12")], "h200")
        assert got is not None
        assert got.usd == 2.0


def test_the_first_kind_that_has_a_price_decides_and_all_give_the_range() -> None:
    offers = [price(4.0, "a"), price(6.0, "b"), price(2.5, "analyst", kind="rent-3-years"), price(99.0, kind="spot")]
    got = quote(offers, "h200", RENT)
    assert got is not None
    assert (got.kind, got.usd, got.low, got.high) == ("rent-3-years", 2.5, 2.5, 6.0)
    assert behind(offers, got) == [offers[2]]
    without = quote(offers[:2], "h200", RENT)
    assert without is not None
    assert (without.kind, without.usd) == ("on-demand", 5.0)


def test_no_price_is_no_quote_and_an_unknown_kind_is_refused() -> None:
    assert quote([price(2.0)], "b200") is None
    assert quote([price(2.0)], "h200", BASES["spot"]) is None
    with pytest.raises(BadInput, match="'rentt' is no kind of price; known: on-demand"):
        quote([], "h200", ("rentt",))


def test_the_users_own_figures_take_precedence() -> None:
    got = quotes([price(2.0), price(5.0, accelerator="b200")], ["h200", "b200", "mi300x"], RENT, {"h200": 1.5})
    assert set(got) == {"h200", "b200"}
    assert got["h200"] == given("h200", 1.5)
    assert got["h200"].is_given
    assert (got["h200"].low, got["h200"].high) == (1.5, 1.5)
    assert got["b200"].usd == 5.0
    assert behind([price(2.0)], got["h200"]) == []
    # Also for what the catalog has no price for.
    assert quotes([], ["mi300x"], RENT, {"mi300x": 2.0})["mi300x"].usd == 2.0


def test_every_basis_has_kinds_that_exist_and_shipped_quotes_lie_in_their_range(catalog: Catalog) -> None:
    found = 0
    for kinds in BASES.values():
        for one in quotes(catalog.prices, catalog.accelerators, kinds, {}).values():
            assert one.low <= one.usd <= one.high
            assert one.oldest <= one.newest
            assert one.kind in kinds
            assert one.prices >= len(behind(catalog.prices, one)) >= 1
            found += 1
    assert found > 30
