"""What an accelerator costs to rent or buy: one CSV, one offer or claim a row."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from crosstie.catalog.reading import cell_number, read_rows
from crosstie.core.errors import BadData
from crosstie.core.fact import Fact
from crosstie.core.units import UNITS

COLUMNS = ("accelerator", "provider", "kind", "value", "unit", "basis", "date", "source", "note")
KINDS = {
    "on-demand": "rent by the hour as the provider publishes it, the median of its offers",
    "spot": "interruptible rent by the hour as the provider publishes it, the median of its offers",
    "rent-quoted": "rent by the hour as somebody else quotes it",
    "rent-3-years": "rent by the hour under a three-year contract, as an analyst models it",
    "own-hyperscaler": "all-in cost by the hour of a hyperscaler that owns it, as an analyst models it",
    "own-neocloud": "all-in cost by the hour of a GPU cloud that owns it, as an analyst models it",
    "purchase": "price of one accelerator",
    "purchase-with-server": "price of one accelerator with its share of a server: processors, memory, network cards",
}


class Price(msgspec.Struct, frozen=True, kw_only=True):
    accelerator: str
    provider: str
    kind: str
    amount: Fact


def read_prices(file: Path, accelerators: Mapping[str, object]) -> tuple[Price, ...]:
    """`accelerators`: the ids that a row may name."""
    return tuple(_read_row(file, where, row, accelerators) for where, row in read_rows(file, COLUMNS))


def _read_row(file: Path, where: str, row: dict[str, str], accelerators: Mapping[str, object]) -> Price:
    if row["accelerator"] not in accelerators:
        raise BadData(file, where, f"accelerator '{row['accelerator']}' is not in the catalog")
    if row["kind"] not in KINDS:
        raise BadData(file, where, f"kind '{row['kind']}' is not one of {', '.join(KINDS)}")
    value, unit = cell_number(file, where, row, "value"), row["unit"]
    wanted = ("usd", 500, 500_000) if row["kind"].startswith("purchase") else ("usd_per_s", 0.05, 100)
    if unit not in UNITS or UNITS[unit].dimension != wanted[0] or not wanted[1] <= value <= wanted[2]:
        raise BadData(file, where, f"{value:g} {unit} is no price of kind {row['kind']}; a slip of unit?")
    fact = Fact(
        value=value, unit=unit, basis=row["basis"], source=row["source"], date=row["date"],  # type: ignore[arg-type]
        note=row["note"],
    )  # fmt: skip
    return Price(accelerator=row["accelerator"], provider=row["provider"], kind=row["kind"], amount=fact)
