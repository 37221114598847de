"""docs/tco.md says what the files and the code say."""

import re
from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.catalog.library import Catalog
from crosstie.decide.cost.published import mi325x_against_h200

PAGE = (Path(__file__).parents[3] / "docs" / "tco.md").read_text()


def test_the_table_of_assumptions_is_the_file_s(catalog: Catalog) -> None:
    rows = {
        row[0]: row for row in re.findall(r"^\| `([\w.]+)` \| (\S+) \| (\S+) \| (\S+) \| (\S+) \|", PAGE, re.MULTILINE)
    }
    assert set(rows) == set(catalog.costs)
    for key, ranged in catalog.costs.items():
        _, low, likely, high, unit = rows[key]
        told = [float(text.replace(",", "")) for text in (low, likely, high)]
        assert told == pytest.approx([ranged.low.value, ranged.likely.value, ranged.high.value]), key
        assert unit == ranged.likely.unit


def test_the_oracle_s_figures_are_the_code_s(catalog: Catalog) -> None:
    modelled = mi325x_against_h200(catalog).modelled
    low, high = modelled.saving_interval
    ratios = modelled.throughput_ratio_interval
    ends = modelled.saving_at_variation
    points = (modelled.saving - modelled.saving_after_engineers) * 100
    by_point = modelled.saving_by_point
    # Saving is 1 - bill ratio / throughput ratio.
    bills = (1 - modelled.saving) * modelled.throughput_ratio
    h200 = modelled.h200
    electricity = (h200.usd["power"] + h200.usd["cooling"]) / h200.total_usd
    hosting = h200.usd["hosting"] / h200.total_usd
    for line in (
        f"| {modelled.throughput_ratio:.2f} (80% ends against each other: {ratios[0]:.2f} to {ratios[1]:.2f}) |",
        f"| saving | {modelled.saving:.0%}, 80% of samples {low:.0%} to {high:.0%} |",
        f"| {modelled.saving_after_engineers:.0%}: {points:.1f} points |",
        f"| {ends[0]:.0%} to {ends[1]:.0%} |",
        f"| {1 - bills:.0%}; 31% needs {bills / 0.69:.2f}x |",
        f"| {electricity:.0%}, with hosting {electricity + hosting:.0%}, not 40% |",
        f"on each GPU it is {by_point['fp8, fewest GPUs, 32 in flight a GPU']:.0%}",
        f"256 in flight {by_point['fp8, TP8 on both, 256 in flight']:.0%}",
        f"costs {-by_point['fp8, TP2 on both, 64 in flight']:.0%} *more*",
        f"in BF16 on the fewest GPUs {by_point['bf16, fewest GPUs, 64 in flight a replica']:.0%} less",
    ):
        assert line in PAGE, line


def test_the_catalog_shows_where_assumptions_come_from(crosstie: Command) -> None:
    got = crosstie("catalog", "show", "costs", "usd_per_kwh")
    assert got.status == 0
    assert "0.0974 USD/kWh" in got.out
    assert "U.S. EIA" in got.out
    assert "industrial customers, Iowa" in got.out
