"""What others charge for the tokens of a model with open weights: one CSV, one provider's price a row."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from crosstie.catalog.reading import cell_number, read_rows
from crosstie.core.errors import BadData
from crosstie.core.fact import Fact

COLUMNS = (
    "model", "provider", "usd_per_million_input", "usd_per_million_output", "basis", "date", "source", "note",
)  # fmt: skip
# USD a million tokens: outside of it somebody wrote a price per token or per thousand.
PLAUSIBLE = (0.001, 100.0)


class ApiPrice(msgspec.Struct, frozen=True, kw_only=True):
    """`input.si` and `output.si` are USD a token."""

    model: str
    provider: str
    input: Fact
    output: Fact


def read_api_prices(file: Path, models: Mapping[str, object]) -> tuple[ApiPrice, ...]:
    """`models`: the ids that a row may name."""
    return tuple(_read_row(file, where, row, models) for where, row in read_rows(file, COLUMNS))


def _read_row(file: Path, where: str, row: dict[str, str], models: Mapping[str, object]) -> ApiPrice:
    if row["model"] not in models:
        raise BadData(file, where, f"model '{row['model']}' is not in the catalog")
    if not row["provider"].strip():
        raise BadData(file, where, "provider is empty")
    facts = {}
    for column in ("usd_per_million_input", "usd_per_million_output"):
        value = cell_number(file, where, row, column)
        if not PLAUSIBLE[0] <= value <= PLAUSIBLE[1]:
            raise BadData(file, where, f"{column} {value:g} is no price of a million tokens; a slip of unit?")
        facts[column] = Fact(
            value=value, unit="USD/Mtoken", basis=row["basis"], source=row["source"],  # type: ignore[arg-type]
            date=row["date"], note=row["note"],
        )  # fmt: skip
    return ApiPrice(
        model=row["model"], provider=row["provider"],
        input=facts["usd_per_million_input"], output=facts["usd_per_million_output"],
    )  # fmt: skip
