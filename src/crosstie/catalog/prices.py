"""What an accelerator costs to rent or buy, and what others charge for tokens: a CSV each, one price a row."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from crosstie.catalog.reading import cell_number, read_rows, read_toml
from crosstie.core.errors import BadData
from crosstie.core.fact import Fact
from crosstie.core.units import UNITS

COLUMNS = ("accelerator", "provider", "kind", "value", "unit", "basis", "date", "source", "note")
API_COLUMNS = (
    "model", "provider", "usd_per_million_input", "usd_per_million_output", "basis", "date", "source", "note",
)  # fmt: skip
# USD a million tokens: outside of it somebody wrote a price per token or per thousand.
_API_LOW, _API_HIGH = 0.001, 100.0
KINDS: dict[str, str] = read_toml(Path(__file__).parent / "data" / "price_kinds.toml")


class Price(msgspec.Struct, frozen=True, kw_only=True):
    accelerator: str
    provider: str
    kind: str
    amount: Fact


class ApiPrice(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model with open weights. `input.si` and `output.si` are USD a token."""

    model: str
    provider: str
    input: Fact
    output: Fact


def read_prices(file: Path, accelerators: Mapping[str, object]) -> tuple[Price, ...]:
    """`accelerators`: the ids that a row may name."""
    return tuple(_price(file, where, row, accelerators) for where, row in read_rows(file, COLUMNS))


def read_api_prices(file: Path, models: Mapping[str, object]) -> tuple[ApiPrice, ...]:
    """`models`: the ids that a row may name."""
    return tuple(_api_price(file, where, row, models) for where, row in read_rows(file, API_COLUMNS))


def _price(file: Path, where: str, row: dict[str, str], accelerators: Mapping[str, object]) -> Price:
    if row["accelerator"] not in accelerators:
        raise BadData(file, where, f"accelerator '{row['accelerator']}' is not in the catalog")
    if row["kind"] not in KINDS:
        raise BadData(file, where, f"kind '{row['kind']}' is not one of {', '.join(KINDS)}")
    value, unit = cell_number(file, where, row, "value"), row["unit"]
    wanted = ("usd", 500, 500_000) if row["kind"].startswith("purchase") else ("usd_per_s", 0.05, 100)
    if unit not in UNITS or UNITS[unit].dimension != wanted[0] or not wanted[1] <= value <= wanted[2]:
        raise BadData(file, where, f"{value:g} {unit} is no price of kind {row['kind']}; a slip of unit?")
    kept = {key: row[key] for key in ("accelerator", "provider", "kind")}
    return Price(**kept, amount=_fact(row, value, unit))


def _api_price(file: Path, where: str, row: dict[str, str], models: Mapping[str, object]) -> ApiPrice:
    if row["model"] not in models:
        raise BadData(file, where, f"model '{row['model']}' is not in the catalog")
    if not row["provider"].strip():
        raise BadData(file, where, "provider is empty")
    facts = {}
    for side in ("input", "output"):
        column = f"usd_per_million_{side}"
        value = cell_number(file, where, row, column)
        if not _API_LOW <= value <= _API_HIGH:
            raise BadData(file, where, f"{column} {value:g} is no price of a million tokens; a slip of unit?")
        facts[side] = _fact(row, value, "USD/Mtoken")
    return ApiPrice(model=row["model"], provider=row["provider"], **facts)


def _fact(row: dict[str, str], value: float, unit: str) -> Fact:
    provenance: dict[str, Any] = {key: row[key] for key in ("basis", "source", "date", "note")}
    return Fact(value=value, unit=unit, **provenance)
