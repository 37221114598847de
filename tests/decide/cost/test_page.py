"""docs/tco.md says what the files and the code say."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import Command

from crosstie.catalog.costs import COSTS
from crosstie.catalog.library import Catalog
from crosstie.core.deployment import Parallelism
from crosstie.decide.api import compare, tco
from crosstie.decide.cost.assessment import saving
from crosstie.decide.cost.tco import Tco, TcoRequest

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
    """800 of each at the article's prices, 14% off, three years, two engineers more on one side."""
    asked = TcoRequest(
        gpus=800, purchase_usd={"mi325x": 22_000, "h200": 35_000}, discount={"mi325x": 0.14, "h200": 0.14}
    )

    def saved(request: TcoRequest = asked, precision: str = "fp8", tp: int | None = None) -> Tco:
        card = compare(
            "llama-3.1-70b", "mi325x,h200", precision=precision, concurrency=32 * tp if tp else 64,
            layout=Parallelism(tp=tp) if tp else None, catalog=catalog,
        )  # fmt: skip
        return tco(card, request, catalog=catalog)

    def less(found: Tco) -> float:
        return saving(*(found.assessed.usd_per_mtok[name] for name in ("mi325x", "h200")))

    ours = saved()
    rates = [found.estimate.output_tokens_per_s_per_gpu for found in ours.card.entries if found.estimate]
    ratio, whole = rates[0] / rates[1], less(ours)
    low, high = ours.assessed.risk.saving or (0.0, 0.0)
    staffed = less(saved(replace(asked, engineers={"mi325x": 2.0})))
    varied = [bar for bar in saved(replace(asked, vary=0.2)).assessed.tornado if bar.key in COSTS]
    ends = [end for bar in varied for end in (bar.outcome_at_low, bar.outcome_at_high)]
    # Saving is 1 - bill ratio / throughput ratio.
    bills = (1 - whole) * ratio
    h200 = ours.assessed.bills["h200"]
    electricity = (h200.usd["power"] + h200.usd["cooling"]) / h200.total_usd
    hosting = h200.usd["hosting"] / h200.total_usd
    for line in (
        f"| tokens/s of an MI325X over an H200 | {ratio:.2f} |",
        f"| saving | {whole:.0%}, 80% of samples {low:.0%} to {high:.0%} |",
        f"| {staffed:.0%}: {100 * (whole - staffed):.1f} points |",
        f"| {min(ends):.0%} to {max(ends):.0%} |",
        f"| {1 - bills:.0%}; 31% needs {bills / 0.69:.2f}x |",
        f"| {electricity:.0%}, with hosting {electricity + hosting:.0%}, not 40% |",
        f"256 in flight it is {less(saved(tp=8)):.0%}",
        f"costs {-less(saved(tp=2)):.0%} *more*",
        f"in BF16 on the fewest GPUs {less(saved(precision='bf16')):.0%} less",
    ):
        assert line in PAGE, line


def test_the_catalog_shows_where_assumptions_come_from(crosstie: Command) -> None:
    got = crosstie("catalog", "show", "costs", "usd_per_kwh")
    assert got.status == 0
    assert "0.0974 USD/kWh" in got.out
    assert "U.S. EIA" in got.out
    assert "industrial customers, Iowa" in got.out
