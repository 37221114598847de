"""Assumptions with round numbers, so that a bill can be worked by hand."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.planned_once import planned_once as planned_once

from crosstie.catalog.costs import Ranged
from crosstie.catalog.library import SHIPPED, Catalog
from crosstie.catalog.prices import COLUMNS
from crosstie.core.fact import Fact
from crosstie.decide.cost.ownership import Option
from crosstie.decide.cost.prices import given
from crosstie.decide.cost.ranges import ValueRange, exactly

Priced = Callable[..., None]
# A copy of a shipped file under another name may not keep the names that belong to the first.
NO_ALIASES = re.compile(r"^aliases = .*$", re.MULTILINE)
ROUND = {
    "pue": (1.5, "ratio"),
    "usd_per_kwh": (0.1, "USD/kWh"),
    "hosting_usd_per_kw_month": (100.0, "USD/kW-month"),
    "server_usd_per_gpu": (2000.0, "USD"),
    "network_usd_per_gpu": (1000.0, "USD"),
    "support_per_year": (0.05, "1/year"),
    "capital_per_year": (0.1, "1/year"),
    "life_years": (4.0, "year"),
    "residual_fraction": (0.2, "fraction"),
    "server_watts_per_gpu": (300.0, "W"),
    "mean_power_fraction": (0.5, "fraction"),
    "engineer_usd_per_year": (200_000.0, "USD/person-year"),
    "utilisation": (0.5, "fraction"),
}


def ranged(value: float, unit: str, share: float = 0.0) -> Ranged:
    def fact(number: float) -> Fact:
        return Fact(value=number, unit=unit, basis="assumed", source="a test", date="2026-11-15", note="made up")

    return Ranged(likely=fact(value), low=fact(value * (1 - share)), high=fact(value * (1 + share)))


@pytest.fixture(scope="session")
def exact_costs() -> dict[str, Ranged]:
    return {key: ranged(value, unit) for key, (value, unit) in ROUND.items()}


@pytest.fixture(scope="session")
def wide_costs() -> dict[str, Ranged]:
    """A tenth either way."""
    return {key: ranged(value, unit, 0.1) for key, (value, unit) in ROUND.items()}


@pytest.fixture(scope="session")
def h200_fleet(catalog: Catalog) -> Option:
    return Option(
        accelerator=catalog.accelerator("h200"), gpus=10, price=given("h200", 10_000.0), discount=0.1,
        engineers=0.5, output_tokens_per_s_per_gpu=exactly(100.0),
    )  # fmt: skip


@pytest.fixture(scope="session")
def mi300x_fleet(catalog: Catalog) -> Option:
    return Option(
        accelerator=catalog.accelerator("mi300x"), gpus=10, price=given("mi300x", 8_000.0), discount=0.1,
        engineers=1.0, output_tokens_per_s_per_gpu=ValueRange(90.0, 120.0, 150.0, interval=True),
    )  # fmt: skip


@pytest.fixture
def ours(tmp_path: Path) -> Priced:
    """An H200 by the name of `ours` in the user's catalog, at the purchase prices that a test gives it."""
    folder = tmp_path / "user-catalog"
    (folder / "accelerators").mkdir(parents=True)
    shipped = (SHIPPED / "accelerators" / "h200.toml").read_text().replace('id = "h200"', 'id = "ours"')
    file = folder / "accelerators" / "ours.toml"
    file.write_text(NO_ALIASES.sub("aliases = []", shipped))

    def priced(*prices: tuple[str, int, str]) -> None:
        rows = [f"ours,{provider},purchase,{usd},USD,claimed,{date},a test,made up" for provider, usd, date in prices]
        (folder / "prices.csv").write_text("\n".join([",".join(COLUMNS), *rows, ""]))

    return priced
