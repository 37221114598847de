"""Ranges, break-evens, tornado and Monte Carlo."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given as each, strategies as st
from tests.present import present

from crosstie.catalog.costs import Ranged
from crosstie.core.deployment import Accelerator
from crosstie.core.errors import BadInput
from crosstie.decide.cost.assessment import assess, break_even, contest, monte_carlo, saving, service_gap, tornado
from crosstie.decide.cost.ownership import Option, own
from crosstie.decide.cost.prices import Quote, given
from crosstie.decide.cost.ranges import ValueRange, exactly

Costs = dict[str, Ranged]


def cost(option: Option, costs: Costs) -> float:
    return present(own(option, costs, 3.0).usd_per_mtok)


def test_a_span_needs_its_middle_inside() -> None:
    with pytest.raises(BadInput, match="not between"):
        ValueRange(1.0, 3.0, 2.0)


def test_triangular_draws_by_hand() -> None:
    """Between 0 and 4 with the top at 1: a quarter lies below 1, and the middle where half of the area is."""
    drawn = ValueRange(0.0, 1.0, 4.0).draw(np.array([0.0, 0.25, 0.5, 1.0]))
    # Above the top, 1 - F(x) = (4 - x)^2 / (4 * 3), so F(x) = 0.5 at 4 - sqrt(6).
    assert drawn == pytest.approx([0.0, 1.0, 4.0 - np.sqrt(6.0), 4.0])


def test_interval_draws_keep_their_ends() -> None:
    drawn = ValueRange(50.0, 100.0, 120.0, interval=True).draw(np.array([0.1, 0.5, 0.9]))
    assert drawn == pytest.approx([50.0, 100.0, 120.0], rel=1e-4)


def test_exact_spans_draw_themselves() -> None:
    assert set(exactly(3.0).draw(np.linspace(0, 1, 5))) == {3.0}


@each(price=st.floats(1_000, 60_000), engineers=st.floats(0, 3), rate=st.floats(40, 300))
def test_break_evens_break_even(
    h200_fleet: Option, mi300x_fleet: Option, exact_costs: Costs, price: float, engineers: float, rate: float
) -> None:
    """Whatever the figures: put the level back in, and both cost the same."""
    mine = dataclasses.replace(
        mi300x_fleet, price=given("mi300x", price), engineers=engineers, output_tokens_per_s_per_gpu=exactly(rate)
    )
    match = contest([mine, h200_fleet], exact_costs, 3.0)
    wanted = cost(h200_fleet, exact_costs)
    discount = break_even(match, "mi300x", "h200", "discount").at
    if discount is not None and 0 <= discount < 1:
        assert cost(dataclasses.replace(mine, discount=discount), exact_costs) == pytest.approx(wanted)
    if discount is None:
        free = dataclasses.replace(mine, discount=1 - 1e-12)
        assert cost(free, exact_costs) > wanted
    people = break_even(match, "mi300x", "h200", "engineers").at
    if people is not None:
        assert cost(dataclasses.replace(mine, engineers=people), exact_costs) == pytest.approx(wanted)
    else:
        assert cost(dataclasses.replace(mine, engineers=0.0), exact_costs) > wanted
    tokens = present(break_even(match, "mi300x", "h200", "output_tokens_per_s_per_gpu").at)
    faster = dataclasses.replace(mine, output_tokens_per_s_per_gpu=exactly(tokens))
    assert cost(faster, exact_costs) == pytest.approx(wanted)


def test_a_break_even_discount_by_hand(h200_fleet: Option, exact_costs: Costs) -> None:
    """Alike but for the price: 9,000 after 10% off against 10,000 without needs the same 10%."""
    other = dataclasses.replace(h200_fleet, discount=0.0)
    renamed = dataclasses.replace(other, accelerator=_renamed(other))
    match = contest([h200_fleet, renamed], exact_costs, 3.0)
    assert break_even(match, "other", "h200", "discount").at == pytest.approx(0.1)
    assert break_even(match, "h200", "other", "purchase_usd").at == pytest.approx(10_000 / 0.9)


def _renamed(option: Option) -> Accelerator:
    return msgspec.structs.replace(option.accelerator, id="other")


def test_no_discount_helps_what_is_dear_without_its_price(
    h200_fleet: Option, mi300x_fleet: Option, exact_costs: Costs
) -> None:
    staffed = dataclasses.replace(mi300x_fleet, engineers=50.0)
    match = contest([staffed, h200_fleet], exact_costs, 3.0)
    assert break_even(match, "mi300x", "h200", "discount").at is None
    told = assess([staffed, h200_fleet], exact_costs, 3.0).verdicts
    assert any("No discount brings mi300x level" in text for text in told)


def test_a_tornado_by_hand(h200_fleet: Option, wide_costs: Costs) -> None:
    """One option, two years: the bill is 316,340 USD, of which 10% more engineers' pay is 20,000 more."""
    match = contest([h200_fleet], wide_costs, 2.0)
    bars = {bar.key: bar for bar in tornado(match, "h200")}
    tokens = 31_536
    assert bars["engineer_usd_per_year"].outcome_at_low == pytest.approx((316_340 - 20_000) / tokens)
    assert bars["engineer_usd_per_year"].outcome_at_high == pytest.approx((316_340 + 20_000) / tokens)
    assert bars["utilisation"].outcome_at_high == pytest.approx(316_340 / tokens / 1.1)
    swings = [bar.swing for bar in tornado(match, "h200")]
    assert swings == sorted(swings, reverse=True)


LINEAR = [
    "pue",
    "usd_per_kwh",
    "hosting_usd_per_kw_month",
    "support_per_year",
    "capital_per_year",
    "server_usd_per_gpu",
]


def test_a_tornado_is_symmetric_where_the_bill_is_linear(h200_fleet: Option, wide_costs: Costs) -> None:
    middle = cost(h200_fleet, wide_costs)
    for bar in tornado(contest([h200_fleet], wide_costs, 3.0), "h200"):
        if bar.key in LINEAR:
            assert bar.outcome_at_high - middle == pytest.approx(middle - bar.outcome_at_low)
        elif bar.key in ("utilisation", "life_years"):
            assert bar.outcome_at_high - middle != pytest.approx(middle - bar.outcome_at_low, rel=1e-3)


def test_what_both_share_moves_both(h200_fleet: Option, mi300x_fleet: Option, wide_costs: Costs) -> None:
    """Utilisation divides both costs, so the saving does not move; alone overridden, it is one's own."""
    match = contest([mi300x_fleet, h200_fleet], wide_costs, 3.0)
    assert "utilisation" not in {bar.key for bar in tornado(match, "mi300x", "h200")}
    alone = dataclasses.replace(mi300x_fleet, overrides={"utilisation": 0.5})
    owners = {
        bar.option for bar in tornado(contest([alone, h200_fleet], wide_costs, 3.0), "mi300x", "h200")
        if bar.key == "utilisation"
    }  # fmt: skip
    assert owners == {"h200"}


def test_monte_carlo_without_width_is_the_point(h200_fleet: Option, exact_costs: Costs) -> None:
    match = contest([h200_fleet], exact_costs, 3.0)
    spread = monte_carlo(match, samples=100).spreads[0]
    assert (spread.low, spread.middle, spread.high) == pytest.approx((cost(h200_fleet, exact_costs),) * 3)
    assert spread.cheapest == 1.0


def test_samples_use_the_range_of_prices_by_hand(h200_fleet: Option, exact_costs: Costs) -> None:
    """Nothing but the price has a range: triangular from 20,000 over 30,000 to 40,000, so a tenth of the samples is
    below 20,000 + sqrt(0.1 x 20,000 x 10,000) = 24,472, and a tenth as far from the other end."""
    quote = Quote("h200", 30_000, 20_000, 40_000, "purchase", "a", "2026-11", 3)
    option = dataclasses.replace(h200_fleet, price=quote)
    (spread,) = monte_carlo(contest([option], exact_costs, 3.0), samples=200_000).spreads

    def at(usd: float) -> float:
        return cost(dataclasses.replace(option, price=given("h200", usd)), exact_costs)

    ends = at(24_472), at(30_000), at(35_528)
    assert (spread.low, spread.middle, spread.high) == pytest.approx(ends, rel=2e-3)


def test_twins_win_half_each(h200_fleet: Option, exact_costs: Costs) -> None:
    twin = dataclasses.replace(h200_fleet, accelerator=_renamed(h200_fleet))
    found = monte_carlo(contest([h200_fleet, twin], exact_costs, 3.0), samples=100)
    assert [spread.cheapest for spread in found.spreads] == [0.5, 0.5]
    assert found.saving == pytest.approx((0.0, 0.0))


def test_a_seed_gives_the_same_samples(h200_fleet: Option, mi300x_fleet: Option, wide_costs: Costs) -> None:
    match = contest([mi300x_fleet, h200_fleet], wide_costs, 3.0)
    assert monte_carlo(match, 1000, seed=1) == monte_carlo(match, 1000, seed=1)
    assert monte_carlo(match, 1000, seed=1) != monte_carlo(match, 1000, seed=2)
    with pytest.raises(BadInput, match="samples"):
        monte_carlo(match, 10)


def test_shared_noise_does_not_blur_the_winner(h200_fleet: Option, wide_costs: Costs) -> None:
    """Alike but 1% dearer: every sample has the same winner, since what is shared is drawn once."""
    dearer = dataclasses.replace(h200_fleet, accelerator=_renamed(h200_fleet), price=given("other", 10_100.0))
    found = monte_carlo(contest([h200_fleet, dearer], wide_costs, 3.0), samples=500)
    assert found.spreads[0].cheapest == 1.0


def test_varied_replaces_every_range(h200_fleet: Option, mi300x_fleet: Option, wide_costs: Costs) -> None:
    match = contest([mi300x_fleet, h200_fleet], wide_costs, 3.0).varied(0.2)
    spans = match.inputs["mi300x"]
    assert (spans["usd_per_kwh"].low, spans["usd_per_kwh"].high) == pytest.approx((0.08, 0.12))
    # A PUE below 1 does not exist: 1.5 less 20% is 1.2, but 1.1 less 20% would not be.
    assert spans["pue"].low == pytest.approx(1.2)
    near = dataclasses.replace(mi300x_fleet, overrides={"pue": 1.1})
    assert contest([near], wide_costs, 3.0).varied(0.2).inputs["mi300x"]["pue"].low == 1.0
    # Nobody chooses the throughput: it stays as unsure as the estimate is.
    assert spans["output_tokens_per_s_per_gpu"] == mi300x_fleet.output_tokens_per_s_per_gpu
    assert spans["purchase_usd"].is_exact


def test_contests_need_options_with_throughput(h200_fleet: Option, exact_costs: Costs) -> None:
    with pytest.raises(BadInput, match="nothing"):
        contest([], exact_costs, 3.0)
    with pytest.raises(BadInput, match="throughput"):
        contest([dataclasses.replace(h200_fleet, output_tokens_per_s_per_gpu=None)], exact_costs, 3.0)


def test_a_saving_is_a_share_of_the_dearer() -> None:
    assert saving(69.0, 100.0) == pytest.approx(0.31)
    assert saving(110.0, 100.0) == pytest.approx(-0.1)


def test_verdicts_name_winner_and_doubt(h200_fleet: Option, mi300x_fleet: Option, wide_costs: Costs) -> None:
    lean = dataclasses.replace(mi300x_fleet, engineers=0.0)
    told = assess([h200_fleet, lean], wide_costs, 3.0).verdicts
    assert told[0].startswith("mi300x costs")
    assert "fairly sure" in told[0]
    assert any("No single input" in text for text in told)
    # The other way round when the H200 needs nobody either and the MI300X is slow.
    slow = dataclasses.replace(lean, output_tokens_per_s_per_gpu=ValueRange(30.0, 40.0, 50.0, interval=True))
    nobody = dataclasses.replace(h200_fleet, engineers=0.0)
    assert assess([nobody, slow], wide_costs, 3.0).ranking == ["h200", "mi300x"]


def test_near_ties_are_called_ties(h200_fleet: Option, exact_costs: Costs) -> None:
    twin = dataclasses.replace(h200_fleet, accelerator=_renamed(h200_fleet))
    told = assess([h200_fleet, twin], exact_costs, 3.0).verdicts
    assert "cost the same within 3%" in told[0]
    assert "open" in told[0]
    assert told[-1].startswith("Every input is exact")


def test_a_slower_service_is_named() -> None:
    assert service_gap({"a": 0.05, "b": 0.055}) is None
    told = service_gap({"a": 0.05, "b": 0.10})
    assert told
    assert "b takes 2.00x as long" in told
