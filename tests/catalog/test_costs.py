"""costs.toml: every assumption with a range and sources, and a user's own file over it."""

from pathlib import Path

import pytest

from crosstie.catalog.costs import COSTS, read_costs
from crosstie.catalog.library import SHIPPED, Catalog, check_file
from crosstie.core.errors import BadData
from crosstie.core.units import UNITS

SOURCES = '[sources]\nours = { ref = "our contract", date = "2026-11" }\n'


def fact(value: float, unit: str = "ratio") -> str:
    return f'{{ value = {value}, unit = "{unit}", basis = "claimed", source = "ours" }}'


def written(folder: Path, body: str) -> Path:
    file = folder / "costs.toml"
    file.write_text(SOURCES + body)
    return file


def test_the_shipped_file_is_whole_and_sourced(catalog: Catalog) -> None:
    assert {key.removeprefix("workstation.") for key in catalog.costs} == set(COSTS)
    for key, ranged in catalog.costs.items():
        assert ranged.low.value <= ranged.likely.value <= ranged.high.value, key
        assert ranged.low.value < ranged.high.value, key
        for end in (ranged.low, ranged.likely, ranged.high):
            assert end.source, key
            assert end.unit == ranged.likely.unit, key


def test_derived_figures_follow_from_their_notes(catalog: Catalog) -> None:
    costs = catalog.costs
    assert costs["hosting_usd_per_kw_month"].low.value == pytest.approx(1.65e6 / 1000 / 12)
    assert costs["server_usd_per_gpu"].likely.value == (310_000 - 8 * 30_000) / 8
    assert costs["server_usd_per_gpu"].low.value == pytest.approx(32_010 / 8, abs=1)
    assert costs["server_usd_per_gpu"].high.value == 0.4 * 310_000 / 8
    assert costs["network_usd_per_gpu"].likely.value == (1_728_000 + 2_621_440) / 1024
    assert costs["network_usd_per_gpu"].low.value == (288_000 + 675_840) / 512
    assert costs["network_usd_per_gpu"].high.value == (92_160_000 + 124_518_400) / 32_768
    assert costs["server_watts_per_gpu"].low.value == 10_200 / 8 - 700
    assert costs["mean_power_fraction"].likely.value == pytest.approx(7.5 / 10.2, abs=1e-3)
    assert costs["engineer_usd_per_year"].high.value == pytest.approx(260_750 * 1.3)


def test_server_power_is_the_median_of_what_prices_note(catalog: Catalog) -> None:
    """The notes of the price list give all-in power; less each GPU's limit, the middle is 690 W."""
    overheads = {}
    for price in catalog.prices:
        if price.kind == "own-neocloud" and "all-in power" in price.amount.note:
            kilowatts = float(price.amount.note.split("all-in power ")[1].split(" kW")[0])
            overheads[price.accelerator] = kilowatts * 1e3 - catalog.accelerator(price.accelerator).chip.tdp.si
    assert len(overheads) == 9
    assert sorted(overheads.values())[4] == pytest.approx(catalog.costs["server_watts_per_gpu"].likely.value)


def test_a_user_replaces_what_the_file_has(tmp_path: Path) -> None:
    written(tmp_path, f"[costs.pue]\nlikely = {fact(1.2)}\n")
    own = Catalog([tmp_path]).costs
    assert own["pue"].likely.value == own["pue"].low.value == own["pue"].high.value == 1.2
    assert own["usd_per_kwh"] == Catalog([]).costs["usd_per_kwh"]
    assert check_file(tmp_path / "costs.toml") == "costs"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (f"[costs.pue]\nlikely = {fact(0.9)}\n", "outside 1 to 3"),
        (f"[costs.pue]\nlow = {fact(1.2)}\n", "likely: missing"),
        (f"[costs.pue]\nlikely = {fact(1.2)}\nlow = {fact(1.3)}\n", "low <= likely <= high"),
        (f"[costs.pue]\nlikely = {fact(1.2, 'W')}\n", "not a unit of ratio"),
        (f"[costs.puee]\nlikely = {fact(1.2)}\n", "did you mean pue"),
        (f"[costs.pue]\nlikeli = {fact(1.2)}\n", "did you mean likely"),
        ("[costs]\n", "no number cites this source"),
        ("", "costs: missing"),
    ],
)
def test_what_cannot_be_trusted_is_refused(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(BadData, match=said):
        read_costs(written(tmp_path, body), whole=False)


def test_the_shipped_file_may_lack_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadData, match=r"costs.usd_per_kwh: missing: price of electricity"):
        read_costs(written(tmp_path, f"[costs.pue]\nlikely = {fact(1.2)}\n"), whole=True)
    assert (SHIPPED / "costs.toml").exists()


def test_new_units_are_si() -> None:
    assert UNITS["USD/kWh"].si * 3.6e6 == pytest.approx(1.0)
    assert UNITS["year"].si == 365 * 24 * 3600
    # A kW held for a month of 730 hours.
    assert UNITS["USD/kW-month"].si * 1000 * 730 * 3600 == pytest.approx(1.0)
