"""Quotes: what the middle one of the sellers asks, between the least and the most of one kind."""

import pytest
from tests.present import present

from crosstie.catalog.library import Catalog
from crosstie.catalog.prices import KINDS, Price
from crosstie.core.errors import BadInput
from crosstie.core.fact import Fact
from crosstie.decide.cost.prices import behind, given, quote, quotes


def price(
    usd: float, provider: str = "a", date: str = "2026-01", kind: str = "on-demand", accelerator: str = "h200"
) -> Price:
    unit = "USD" if kind == "purchase" else "USD/hour"
    fact = Fact(value=usd, unit=unit, basis="quoted", source="a test", date=date, note="")  # type: ignore[arg-type]
    return Price(accelerator=accelerator, provider=provider, kind=kind, amount=fact)


def test_a_quote_is_the_middle_of_providers_between_the_ends_of_all() -> None:
    got = present(
        quote(
            [price(2.0, "a"), price(3.0, "b"), price(9.0, "c"), price(0.1, "d", accelerator="b200")],
            "h200",
            "on-demand",
        )
    )
    assert (got.usd, got.low, got.high) == (3.0, 2.0, 9.0)
    assert (got.kind, got.prices, got.is_given) == ("on-demand", 3, False)
    assert (got.provider, got.date) == ("b", "2026-01")


def test_seller_and_date_are_those_of_the_price_used_not_of_the_newest() -> None:
    """Of two sellers nobody asks the mean: the lower one's is taken, and a newer price of another does not date it."""
    got = present(quote([price(2.0, "a", "2026-03"), price(4.0, "b", "2026-09")], "h200", "on-demand"))
    assert (got.usd, got.provider, got.date, got.high) == (2.0, "a", "2026-03", 4.0)
    assert got.origin == "a, 2026-03; 2 prices from $2.00 to $4.00"


def test_a_provider_counts_once_by_its_newest_price() -> None:
    """Three old prices of one provider do not outvote another; but they are in the range."""
    old = [price(usd, "a", "2025-06") for usd in (5.0, 5.5, 6.0)]
    got = present(quote([*old, price(2.0, "a", "2026-02"), price(3.0, "b", "2025-01")], "h200", "on-demand"))
    assert (got.usd, got.provider, got.date) == (2.0, "a", "2026-02")
    assert (got.low, got.high) == (2.0, 6.0)


def test_of_several_prices_of_one_day_a_provider_counts_by_their_middle() -> None:
    same_day = [price(usd, "a") for usd in (1.0, 2.0, 6.0)]
    for order in (same_day, same_day[::-1]):
        got = present(quote([*order, price(9.0, "a", "2025-12")], "h200", "on-demand"))
        assert got.usd == 2.0


def test_the_first_kind_that_has_a_price_decides_and_no_other_is_in_its_range() -> None:
    offers = [
        price(4.0, "a"),
        price(6.0, "b"),
        price(2.5, "analyst", kind="modelled-3-years"),
        price(99.0, kind="spot"),
    ]
    for kinds, expected in {
        ("modelled-3-years", "on-demand"): ("modelled-3-years", 2.5, 2.5, 2.5),
        ("reserved", "on-demand"): ("on-demand", 4.0, 4.0, 6.0),
    }.items():
        got = quotes(offers, ["h200"], kinds, {})["h200"]
        assert (got.kind, got.usd, got.low, got.high) == expected
        assert behind(offers, got) == [one for one in offers if one.kind == expected[0]]


def test_no_price_is_no_quote_and_an_unknown_kind_is_refused() -> None:
    assert quote([price(2.0)], "b200", "on-demand") is None
    assert quote([price(2.0)], "h200", "spot") is None
    with pytest.raises(BadInput, match="'rentt' is no kind of price; known: on-demand"):
        quote([], "h200", "rentt")


def test_the_users_own_figures_take_precedence() -> None:
    got = quotes([price(2.0), price(5.0, accelerator="b200")], ["h200", "b200", "mi300x"], ["on-demand"], {"h200": 1.5})
    assert set(got) == {"h200", "b200"}
    assert got["h200"] == given("h200", 1.5)
    assert got["h200"].is_given
    assert (got["h200"].low, got["h200"].high) == (1.5, 1.5)
    assert got["b200"].usd == 5.0
    assert behind([price(2.0)], got["h200"]) == []
    # Also for what the catalog has no price for.
    assert quotes([], ["mi300x"], ["on-demand"], {"mi300x": 2.0})["mi300x"].usd == 2.0


def test_a_shipped_quote_is_of_a_seller_of_its_kind_and_as_of_that_sellers_date(catalog: Catalog) -> None:
    found = 0
    for kind in KINDS:
        for one in quotes(catalog.prices, catalog.accelerators, [kind], {}).values():
            assert one.low <= one.usd <= one.high
            rows = behind(catalog.prices, one)
            assert one.prices == len(rows) >= 1
            assert (one.provider, one.date) in [(row.provider, row.amount.date) for row in rows]
            found += 1
    assert found > 30
