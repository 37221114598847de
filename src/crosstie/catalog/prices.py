"""What an accelerator costs to rent or buy: one CSV, one offer or claim a row."""

import csv
import io
from collections.abc import Mapping
from pathlib import Path

import msgspec

from crosstie.catalog.reading import date
from crosstie.core.errors import BadData
from crosstie.core.fact import BASES, Fact
from crosstie.core.units import UNITS

COLUMNS = ("accelerator", "provider", "kind", "value", "unit", "basis", "date", "source", "note")
KINDS = {
    "on-demand": "rent by the hour, median over the provider's offers",
    "spot": "interruptible rent by the hour, median over the provider's offers",
    "rent-quoted": "rent by the hour as somebody else quotes it",
    "rent-3-years": "rent by the hour under a three-year contract, as an analyst models it",
    "own-hyperscaler": "all-in cost by the hour of a hyperscaler that owns it, as an analyst models it",
    "own-neocloud": "all-in cost by the hour of a GPU cloud that owns it, as an analyst models it",
    "purchase": "price of one accelerator",
}


class Price(msgspec.Struct, frozen=True, kw_only=True):
    accelerator: str
    provider: str
    kind: str
    amount: Fact


def read_prices(file: Path, accelerators: Mapping[str, object]) -> tuple[Price, ...]:
    """`accelerators`: the ids that a row may name."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise BadData(file, "", "not UTF-8 text") from None
    except OSError as error:
        raise BadData(file, "", f"cannot be read: {error.strerror}") from None
    rows = csv.DictReader(io.StringIO(text), strict=True)
    try:
        if tuple(rows.fieldnames or ()) != COLUMNS:
            raise BadData(file, "line 1", f"columns must be {','.join(COLUMNS)}")
        return tuple(_read_row(file, f"line {rows.line_num}", row, accelerators) for row in rows)
    except csv.Error as error:
        raise BadData(file, f"line {rows.line_num}", f"not valid CSV: {error}") from None


def _read_row(file: Path, where: str, row: dict[str, str], accelerators: Mapping[str, object]) -> Price:
    if None in row or None in row.values():
        raise BadData(file, where, f"must have {len(COLUMNS)} fields")
    if row["accelerator"] not in accelerators:
        raise BadData(file, where, f"accelerator '{row['accelerator']}' is not in the catalog")
    if row["kind"] not in KINDS:
        raise BadData(file, where, f"kind '{row['kind']}' is not one of {', '.join(KINDS)}")
    if row["basis"] not in BASES:
        raise BadData(file, where, f"basis '{row['basis']}' is not one of {', '.join(BASES)}")
    if not row["source"].strip():
        raise BadData(file, where, "source is empty")
    try:
        value = float(row["value"])
    except ValueError:
        raise BadData(file, where, f"value '{row['value']}' is not a number") from None
    unit = row["unit"]
    wanted = ("usd", 500, 500_000) if row["kind"] == "purchase" else ("usd_per_s", 0.05, 100)
    if unit not in UNITS or UNITS[unit].dimension != wanted[0] or not wanted[1] <= value <= wanted[2]:
        raise BadData(file, where, f"{value:g} {unit} is no price of kind {row['kind']}; a slip of unit?")
    fact = Fact(
        value=value, unit=unit, basis=row["basis"], source=row["source"],  # type: ignore[arg-type]
        date=date(file, where, row["date"]), note=row["note"] or "",
    )  # fmt: skip
    return Price(accelerator=row["accelerator"], provider=row["provider"], kind=row["kind"], amount=fact)
