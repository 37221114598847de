"""The bill, worked by hand, and the laws that it must keep."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given as each, strategies as st
from tests.decide.cost.conftest import ranged
from tests.present import present

from crosstie.catalog.costs import Ranged, watts
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.core.errors import BadInput
from crosstie.core.estimate import Interval
from crosstie.decide.cost.energy import Draw
from crosstie.decide.cost.ownership import (
    LINES,
    WORDS,
    Option,
    bill,
    check_assumption,
    hourly_usd,
    inputs,
    own,
    price_span,
    running_usd_per_hour,
    throughput,
)
from crosstie.decide.cost.prices import Quote, given
from crosstie.decide.cost.ranges import ValueRange, exactly, likely
from crosstie.perf.estimate import estimate

Costs = dict[str, Ranged]


def changed(option: Option, **fields: object) -> Option:
    return dataclasses.replace(option, **fields)  # type: ignore[arg-type]


def test_the_bill_is_what_was_worked_by_hand(h200_fleet: Option, exact_costs: Costs) -> None:
    """Ten GPUs for two years; one is 9,000 USD after 10% off, with server and network 12,000.

    Hardware falls from 1 to 0.2 over four years: after two it has lost 0.4, and in the mean 0.8 of its
    price were tied up, over two years 1.6. Rated power is 700 + 300 W, so 1 kW.
    """
    found = own(h200_fleet, exact_costs, years=2.0)
    assert found.usd == pytest.approx(
        {
            "accelerators": 10 * 9_000 * 0.4,
            "servers": 10 * 2_000 * 0.4,
            "network": 10 * 1_000 * 0.4,
            "capital": 10 * 12_000 * 0.10 * 1.6,
            "power": 8_760.0,  # 10 kW x 0.5 x 17,520 h x 0.10
            "cooling": 4_380.0,  # half of that again
            "hosting": 24_000.0,  # 10 kW x 100 x 24 months
            "support": 12_000.0,  # 120,000 x 5% x 2
            "engineers": 200_000.0,
        }
    )
    assert found.total_usd == pytest.approx(316_340)
    assert found.usd_per_gpu_hour == pytest.approx(316_340 / 175_200)
    # 10 GPUs x 100 tokens/s x 0.5 x 63,072,000 s are 31,536 million tokens.
    assert found.usd_per_mtok == pytest.approx(316_340 / 31_536)
    assert set(found.usd) == set(LINES)


def test_predicted_power_as_worked_by_hand(h200_fleet: Option, exact_costs: Costs) -> None:
    """500 W while it serves, 100 while it waits. A quarter of the output with an exponent of a half is half of the way
    between: 300 W. Server and network draw half of their 300 W, so a GPU takes 450 W and ten of them 4.5 kW."""
    draw = Draw(ValueRange(400.0, 500.0, 600.0, interval=True), 100.0, 0.5)
    option = changed(h200_fleet, draw=draw, overrides={"utilisation": 0.25})
    found = own(option, exact_costs, years=2.0)
    assert found.mean_watts_per_gpu == pytest.approx(450)
    assert found.usd["power"] == pytest.approx(7_884)  # 4.5 kW x 17,520 h x 0.10
    assert found.usd["cooling"] == pytest.approx(3_942)
    # The meter also counts cooling: 4.5 kW x 1.5 x 17,520 h. 10 GPUs x 100 tokens/s x 0.25 are 15,768 million tokens.
    assert found.kwh == pytest.approx(118_260)
    assert found.kwh_per_mtok == pytest.approx(7.5)
    # Held ready, so by the rated power, as without a prediction.
    assert found.watts_per_gpu == 1000.0
    assert found.usd["hosting"] == own(h200_fleet, exact_costs, years=2.0).usd["hosting"]
    # Ends of the interval: 250 and 350 W of the GPU.
    assert draw.interval(0.25) == pytest.approx((250.0, 350.0))


def test_a_share_of_the_rated_power_that_is_set_stands_over_a_prediction(
    h200_fleet: Option, exact_costs: Costs
) -> None:
    draw = Draw(exactly(500.0), 100.0, 0.5)
    told = changed(h200_fleet, draw=draw, overrides={"mean_power_fraction": 0.9})
    assert own(told, exact_costs).mean_watts_per_gpu == pytest.approx(900)


def test_no_sample_draws_more_than_the_limit(h200_fleet: Option, exact_costs: Costs) -> None:
    values = likely(inputs(changed(h200_fleet, draw=Draw(exactly(600.0), 100.0, 0.0)), exact_costs, 1.0))
    usd = [float(bill(values | {"gpu_busy_watts": np.asarray(watts)})["power"]) for watts in (700.0, 900.0)]
    assert usd[0] == usd[1]


def test_hardware_past_its_life_keeps_its_residual(h200_fleet: Option, exact_costs: Costs) -> None:
    """Six years with a life of four: 0.8 lost; tied up 4 years at 0.6 in the mean, then two at 0.2."""
    found = own(h200_fleet, exact_costs, years=6.0)
    assert found.usd["accelerators"] == pytest.approx(90_000 * 0.8)
    assert found.usd["capital"] == pytest.approx(120_000 * 0.1 * (2.4 + 0.4))


def test_the_three_figures_that_planners_call(catalog: Catalog, exact_costs: Costs) -> None:
    h200 = catalog.accelerator("h200")
    assert watts(h200, exact_costs) == 1000.0
    # An hour of power at 0.5 kW and 0.10 is 0.05, with cooling 0.075; hosting 1,200 a year; support 5% of 3,000.
    assert running_usd_per_hour(h200, exact_costs) == pytest.approx(0.075 + (1_200 + 150) / 8_760)
    assert running_usd_per_hour(h200, exact_costs, 9_000) == pytest.approx(0.075 + (1_200 + 600) / 8_760)
    # Over two years 12,000 USD of hardware lose 4,800 and tie up 1,920 of capital.
    all_in = (4_800 + 1_920 + 2 * (1_200 + 600)) / 17_520 + 0.075
    assert hourly_usd(h200, 9_000, exact_costs, years=2.0) == pytest.approx(all_in)


@pytest.mark.parametrize("name", ["mi300x", "h200", "b200"])
def test_running_leaves_out_what_is_sunk_and_counts_cooling_once(
    catalog: Catalog, exact_costs: Costs, name: str
) -> None:
    """Value lost and capital are spent whether a GPU runs or not; PUE times the electricity is all that cooling
    takes from the meter."""
    accelerator = catalog.accelerator(name)
    running = running_usd_per_hour(accelerator, exact_costs, 20_000)
    for key in ("capital_per_year", "life_years", "residual_fraction", "engineer_usd_per_year", "utilisation"):
        other = exact_costs | {key: ranged(exact_costs[key].likely.value * 1.5, exact_costs[key].likely.unit)}
        assert running_usd_per_hour(accelerator, other, 20_000) == running, key
    # 0.5 of the rated power at 0.10 a kWh; from a PUE of 1.5 to 2.5 that much more, once.
    electricity = watts(accelerator, exact_costs) / 1e3 * 0.5 * 0.1
    dearer = exact_costs | {"pue": ranged(2.5, "ratio")}
    assert running_usd_per_hour(accelerator, dearer, 20_000) - running == pytest.approx(electricity)
    more = hourly_usd(accelerator, 20_000, dearer) - hourly_usd(accelerator, 20_000, exact_costs)
    assert more == pytest.approx(electricity)
    assert watts(accelerator, dearer) == watts(accelerator, exact_costs)
    # Capital and value lost are the whole difference to the all-in hour: 23,000 USD over three of four years.
    sunk = 23_000 * (0.6 + 0.1 * 3 * 0.7) / (3 * 8_760)
    assert hourly_usd(accelerator, 20_000, exact_costs) - running == pytest.approx(sunk)


def test_without_throughput_there_is_no_cost_per_token(h200_fleet: Option, exact_costs: Costs) -> None:
    assert own(changed(h200_fleet, output_tokens_per_s_per_gpu=None), exact_costs).usd_per_mtok is None


UP = ["pue", "usd_per_kwh", "hosting_usd_per_kw_month", "server_usd_per_gpu", "network_usd_per_gpu", "support_per_year",
      "capital_per_year", "server_watts_per_gpu", "mean_power_fraction", "engineer_usd_per_year"]  # fmt: skip
DOWN = ["utilisation", "residual_fraction", "life_years"]


@each(share=st.floats(1.01, 1.9), key=st.sampled_from(UP + DOWN))
def test_cost_moves_with_each_assumption(h200_fleet: Option, exact_costs: Costs, share: float, key: str) -> None:
    before = present(own(h200_fleet, exact_costs).usd_per_mtok)
    value = exact_costs[key].likely.value * share
    after = present(own(changed(h200_fleet, overrides={key: value}), exact_costs).usd_per_mtok)
    assert (after > before) == (key in UP)


@each(price=st.floats(100, 1e5), more=st.floats(1.01, 3), discount=st.floats(0, 0.5), engineers=st.floats(0, 5))
def test_cost_moves_with_price_discount_engineers_and_throughput(
    h200_fleet: Option, exact_costs: Costs, price: float, more: float, discount: float, engineers: float
) -> None:
    base = changed(h200_fleet, price=given("h200", price), discount=discount, engineers=engineers)
    rate = present(base.output_tokens_per_s_per_gpu)

    def cost(option: Option) -> float:
        return present(own(option, exact_costs).usd_per_mtok)

    assert cost(changed(base, price=given("h200", price * more))) > cost(base)
    assert cost(changed(base, discount=discount + 0.3)) < cost(base)
    assert cost(changed(base, engineers=engineers + more)) > cost(base)
    faster = type(rate)(rate.low * more, rate.likely * more, rate.high * more)
    assert cost(changed(base, output_tokens_per_s_per_gpu=faster)) == pytest.approx(cost(base) / more)


def test_an_interval_of_the_estimate_becomes_a_span(catalog: Catalog) -> None:
    replica = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"))
    found = estimate(replica, concurrency=8, input_tokens=512, output_tokens=128)
    assert found.interval
    span = throughput(replica, found, (512, 128))
    assert span.interval
    assert (span.low, span.high) == found.interval.per_gpu(1)
    # In every world: the ends are quantiles of what it may draw.
    drawn = span.draw((np.arange(1000) + 0.5) / 1000)
    assert np.quantile(drawn, [0.1, 0.9]) == pytest.approx([span.low, span.high], rel=0.01)
    assert throughput(replica, msgspec.structs.replace(found, interval=None), (512, 128)).is_exact
    # A biased interval that leaves the estimate out is stretched to hold it.
    rate = found.output_tokens_per_s
    beside = Interval(level=0.8, ttft_s=(1, 2), tpot_s=(1, 2), output_tokens_per_s=(rate * 1.1, rate * 1.2))
    stretched = throughput(replica, msgspec.structs.replace(found, interval=beside), (512, 128))
    assert stretched.low == pytest.approx(rate)


def test_gpus_beside_whole_replicas_give_nothing(catalog: Catalog) -> None:
    """Ten GPUs hold two replicas of four: eight work."""
    replica = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator("h200"), Parallelism(tp=4))
    found = estimate(replica, concurrency=8, input_tokens=512, output_tokens=128)
    whole, cut = (throughput(replica, found, (512, 128), gpus=gpus) for gpus in (8, 10))
    assert whole.likely == found.output_tokens_per_s_per_gpu
    assert (cut.low, cut.likely, cut.high) == pytest.approx((whole.low * 0.8, whole.likely * 0.8, whole.high * 0.8))
    with pytest.raises(BadInput, match="fewer than the 4"):
        throughput(replica, found, (512, 128), gpus=3)


def test_a_lone_price_of_the_catalog_is_no_offer() -> None:
    lone = Quote("h200", 32_000, 32_000, 32_000, "purchase", "a", "2026-08", 1)
    assert (price_span(lone).low, price_span(lone).high) == pytest.approx((25_600, 38_400))
    several = Quote("h200", 32_000, 30_000, 33_000, "purchase", "a", "2026-08", 2)
    assert (price_span(several).low, price_span(several).high) == (30_000, 33_000)
    assert price_span(given("h200", 32_000)).is_exact


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"gpus": 0}, "from 1 to"),
        ({"gpus": 10**9}, "from 1 to"),
        ({"discount": 1.0}, "below 100%"),
        ({"discount": -0.1}, "from 0%"),
        ({"engineers": -1.0}, "from 0 to"),
        ({"price": given("h200", 0.0)}, "from 0.01 to"),
        ({"price": given("h200", 1e300)}, "to 10,000,000"),
        ({"overrides": {"pue": 0.9}}, "from 1 to 3"),
        ({"overrides": {"puee": 1.2}}, "did you mean pue"),
        ({"overrides": {"xyz": 1.2}}, "known: pue"),
    ],
)
def test_nonsense_is_refused(h200_fleet: Option, fields: dict[str, object], said: str) -> None:
    with pytest.raises(BadInput, match=said):
        changed(h200_fleet, **fields)


def test_horizons_are_bounded(h200_fleet: Option, exact_costs: Costs) -> None:
    for years in (0.0, -1.0, 21.0):
        with pytest.raises(BadInput, match="horizon"):
            own(h200_fleet, exact_costs, years)


def test_bounds_are_in_the_unit_of_the_key() -> None:
    check_assumption("usd_per_kwh", 1.0)
    check_assumption("life_years", 15.0)
    with pytest.raises(BadInput, match="USD/kWh"):
        check_assumption("usd_per_kwh", 9.0)


def test_every_input_that_varies_has_words(h200_fleet: Option, exact_costs: Costs) -> None:
    fixed = {"discount", "engineers", "gpus", "years", "gpu_watts", "gpu_idle_watts", "load_exponent"}
    drawing = changed(h200_fleet, draw=Draw(exactly(500.0), 100.0, 0.5))
    assert set(WORDS) == set(inputs(drawing, exact_costs, 3.0)) - fixed
