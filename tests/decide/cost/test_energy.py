"""What owned GPUs draw, predicted at the load that they serve."""

import json
from pathlib import Path

import pytest
from tests.conftest import Command
from tests.small_workload import small

from crosstie.catalog.library import Catalog
from crosstie.catalog.workloads import read_workload
from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.estimate import Estimate
from crosstie.decide.cost.energy import Draw, draw_of, owned_draw
from crosstie.decide.cost.ownership import hourly_usd, running_usd_per_hour
from crosstie.decide.cost.prices import quotes
from crosstie.decide.plan.market import adjusted, market
from crosstie.perf.estimate import estimate


def served(catalog: Catalog, name: str, concurrency: int) -> tuple[Deployment, Estimate]:
    one = catalog.deployment(catalog.model("llama-3.1-8b"), catalog.accelerator(name), Parallelism())
    return one, estimate(one, concurrency=concurrency, input_tokens=1000, output_tokens=500)


def drawn(catalog: Catalog, name: str, concurrency: int, working: float = 1.0) -> Draw:
    found = draw_of(catalog, *served(catalog, name, concurrency), 1000, 500, working)
    assert found
    return found


@pytest.mark.parametrize("name", ["h200", "b200", "mi300x", "mi355x"])
def test_power_grows_with_the_load_from_idle_to_at_most_the_limit(catalog: Catalog, name: str) -> None:
    draw, rated = drawn(catalog, name, 64), catalog.accelerator(name).chip.tdp.si
    watts = [draw.watts(share) for share in (0.05, 0.25, 0.5, 0.75, 1.0)]
    assert watts == sorted(watts)
    assert draw.idle < watts[0]
    assert draw.busy.high <= rated
    assert draw.busy.low < draw.busy.likely
    assert drawn(catalog, name, 2).busy.likely <= draw.busy.likely


def test_one_request_at_a_time_shares_time_between_work_and_waiting(catalog: Catalog) -> None:
    draw = drawn(catalog, "h200", 1)
    assert draw.exponent == 1.0
    assert draw.watts(0.25) == pytest.approx(0.25 * draw.busy.likely + 0.75 * draw.idle)


def test_half_the_load_draws_what_is_predicted_of_half_as_many_in_flight(catalog: Catalog) -> None:
    deployment, whole = served(catalog, "b200", 64)
    _, half = served(catalog, "b200", 32)
    draw = drawn(catalog, "b200", 64)
    share = half.output_tokens_per_s / whole.output_tokens_per_s
    assert draw.watts(share) == pytest.approx(catalog.power.serving_watts(deployment, half))
    assert draw.held(share).watts(0.1) == pytest.approx(draw.watts(share))


def test_gpus_without_a_replica_are_idle(catalog: Catalog) -> None:
    whole, most = drawn(catalog, "h200", 8), drawn(catalog, "h200", 8, working=0.75)
    assert most.busy.likely == pytest.approx(0.75 * whole.busy.likely + 0.25 * whole.idle)


def test_what_was_not_measured_is_not_predicted(catalog: Catalog) -> None:
    unknown = next(a for a in catalog.accelerators.values() if a.id == "mi350x")
    assert not catalog.power.knows(unknown)
    assert draw_of(catalog, *served(catalog, "mi350x", 8), 1000, 500) is None


def test_speculation_counts_every_token_that_is_verified(catalog: Catalog) -> None:
    model, h200 = catalog.model("deepseek-r1"), catalog.accelerator("h200")
    drafts = catalog.speculation(model, "mtp:3")
    one = catalog.deployment(model, h200, Parallelism(tp=8), speculation=drafts)
    found = estimate(one, concurrency=8, input_tokens=1000, output_tokens=500)
    spent = found.gpu_s_per_token
    prefill = sum(s for key, s in spent.items() if key.startswith("prefill"))
    decode = sum(s for key, s in spent.items() if key.startswith("decode"))
    roofline = (prefill * found.prefill_roofline_fraction + decode * found.decode_roofline_fraction) / (
        prefill + decode
    )
    # Eight sequences on eight GPUs, four tokens of each in a step.
    assert catalog.power.serving_watts(one, found) == pytest.approx(catalog.power.watts(h200, roofline, 4.0))


def test_tco_tells_power_and_what_it_rests_on(crosstie: Command) -> None:
    options = ("tco", "llama-3.1-8b", "--on", "h200,mi350x", "--purchase", "mi350x=20000", "--samples", "200")
    found = json.loads(crosstie(*options, "--json").out)
    h200, other = found["options"]
    power = h200["power"]
    assert power["basis"].startswith("predicted from published joules a token")
    assert power["idle_watts"] < power["mean_watts"] < power["serving_watts"] <= 700
    assert power["mean_watts_80"][0] < power["mean_watts"] <= power["mean_watts_80"][1]
    assert h200["mean_watts_per_gpu"] == pytest.approx(power["mean_watts"] + 690 * 0.735)
    hours = 3 * 8760
    assert h200["kwh"] == pytest.approx(8 * h200["mean_watts_per_gpu"] / 1e3 * 1.3 * hours)
    assert h200["usd"]["power"] + h200["usd"]["cooling"] == pytest.approx(h200["kwh"] * 0.0974)
    tokens = h200["total_usd"] / h200["usd_per_mtok"]
    assert h200["kwh_per_mtok"] == pytest.approx(h200["kwh"] / tokens)
    assert "was not measured while it served" in other["power"]["basis"]
    assert other["power"]["mean_watts"] is None
    assert other["mean_watts_per_gpu"] == pytest.approx(other["watts_per_gpu"] * 0.735)
    told = json.loads(crosstie(*options, "--set", "h200:mean_power_fraction=0.5", "--json").out)["options"][0]
    assert told["power"] == {
        "basis": "a share of the rated power, as set", "serving_watts": None, "idle_watts": None,
        "mean_watts": None, "mean_watts_80": None,
    }  # fmt: skip
    assert "power predicted from published joules" in " ".join(crosstie(*options, "-v").out.split())


@pytest.mark.usefixtures("planned_once")
def test_a_plan_tells_the_power_that_it_draws(crosstie: Command, tmp_path: Path) -> None:
    question = str(small(tmp_path))
    told = " ".join(crosstie("plan", question, "--quick", "-v", "--save", str(tmp_path / "plan.json")).out.split())
    assert "kWh per million output tokens, with cooling" in told
    fleet = json.loads((tmp_path / "plan.json").read_text())["fleet"]
    power = fleet["power"]
    assert power["rated"] == fleet["watts"]
    assert power["mean_80"][0] <= power["mean"] <= min(power["mean_80"][1], power["at_peak"])
    assert sum(power["pools"].values()) == pytest.approx(power["at_peak"])
    assert power["not_predicted"] == []
    assert power["kwh_per_million_output_tokens"] > 0


def test_an_owned_hour_of_a_plan_pays_for_what_is_predicted(catalog: Catalog, tmp_path: Path) -> None:
    asked = adjusted(read_workload(catalog, small(tmp_path)), kinds=["buy"], accelerators=["h200", "mi350x"])
    h200, mi350x = (catalog.accelerator(name) for name in ("h200", "mi350x"))
    draw = owned_draw(catalog, asked, h200)
    assert draw
    assert owned_draw(catalog, asked, mi350x) is None
    # What it draws at the mean of the traffic, whatever utilisation the costs assume.
    assert draw.watts(0.1) == draw.watts(1.0)
    assert catalog.power.idle_watts(h200) < draw.watts(1.0) <= 700
    items = {item.id: item for item in market(catalog, asked).items}
    years = float(asked.horizon_years)
    (price,) = quotes(catalog.prices, ["h200"], ["purchase"], {}).values()
    assert items["h200"].quote.usd == pytest.approx(hourly_usd(h200, price.usd, catalog.costs, years, draw))
    assert items["h200"].quote.usd != pytest.approx(hourly_usd(h200, price.usd, catalog.costs, years), rel=1e-6)
    # What is rented has its power in its price.
    rented = market(catalog, adjusted(asked, kinds=["on-demand"]))
    assert rented.items[0].running_usd_per_hour == running_usd_per_hour(h200, catalog.costs)
