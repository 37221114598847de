"""Units as data files write them, and their SI values. Inside Crosstie every number is SI."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    dimension: str
    si: float


# Bills are written by the year of 365 days and by its twelfth.
HOURS_PER_YEAR = 8760.0
MONTHS_PER_YEAR = 12.0
HOURS_PER_MONTH = HOURS_PER_YEAR / MONTHS_PER_YEAR
SECONDS_PER_HOUR = 3600.0
_YEAR_S = HOURS_PER_YEAR * SECONDS_PER_HOUR

UNITS: dict[str, Unit] = {
    "B": Unit("bytes", 1.0),
    "KiB": Unit("bytes", 1024.0),
    "MiB": Unit("bytes", 1024.0**2),
    "GiB": Unit("bytes", 1024.0**3),
    "KB": Unit("bytes", 1e3),
    "MB": Unit("bytes", 1e6),
    "GB": Unit("bytes", 1e9),
    "GB/s": Unit("bytes_per_s", 1e9),
    "TB/s": Unit("bytes_per_s", 1e12),
    "Gbit/s": Unit("bytes_per_s", 1e9 / 8),
    "TFLOP/s": Unit("flop_per_s", 1e12),
    "PFLOP/s": Unit("flop_per_s", 1e15),
    "TOP/s": Unit("flop_per_s", 1e12),
    "W": Unit("watts", 1.0),
    "kW": Unit("watts", 1e3),
    "s": Unit("seconds", 1.0),
    "ms": Unit("seconds", 1e-3),
    "us": Unit("seconds", 1e-6),
    "fraction": Unit("fraction", 1.0),
    "count": Unit("count", 1.0),
    "tokens": Unit("tokens", 1.0),
    "bits": Unit("bits", 1.0),
    "USD": Unit("usd", 1.0),
    "USD/h": Unit("usd_per_s", 1.0 / 3600),
    "USD/Mtoken": Unit("usd_per_token", 1e-6),
    "ratio": Unit("ratio", 1.0),
    "year": Unit("years_in_s", _YEAR_S),
    "1/year": Unit("share_per_s", 1.0 / _YEAR_S),
    "USD/kWh": Unit("usd_per_joule", 1.0 / 3.6e6),
    "USD/kW-month": Unit("usd_per_watt_s", MONTHS_PER_YEAR / _YEAR_S / 1e3),
    # A person's year: no unit of rent, although it has the same dimension.
    "USD/person-year": Unit("usd_per_person_s", 1.0 / _YEAR_S),
}


def units_of(dimension: str) -> list[str]:
    return [name for name, unit in UNITS.items() if unit.dimension == dimension]
