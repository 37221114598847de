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

_BY_DIMENSION = {
    "bytes": {"B": 1.0, "KiB": 1024.0, "MiB": 1024.0**2, "GiB": 1024.0**3, "KB": 1e3, "MB": 1e6, "GB": 1e9},
    "bytes_per_s": {"GB/s": 1e9, "TB/s": 1e12, "Gbit/s": 1e9 / 8},
    "flop_per_s": {"TFLOP/s": 1e12, "PFLOP/s": 1e15, "TOP/s": 1e12},
    "watts": {"W": 1.0, "kW": 1e3},
    "seconds": {"s": 1.0, "ms": 1e-3, "us": 1e-6},
    "fraction": {"fraction": 1.0},
    "count": {"count": 1.0},
    "tokens": {"tokens": 1.0},
    "bits": {"bits": 1.0},
    "ratio": {"ratio": 1.0},
    "usd": {"USD": 1.0},
    "usd_per_s": {"USD/h": 1.0 / 3600},
    "usd_per_token": {"USD/Mtoken": 1e-6},
    "usd_per_joule": {"USD/kWh": 1.0 / 3.6e6},
    "usd_per_watt_s": {"USD/kW-month": MONTHS_PER_YEAR / _YEAR_S / 1e3},
    # A person's year: no unit of rent, although it has the same dimension.
    "usd_per_person_s": {"USD/person-year": 1.0 / _YEAR_S},
    "years_in_s": {"year": _YEAR_S, "month": _YEAR_S / MONTHS_PER_YEAR},
    "share_per_s": {"1/year": 1.0 / _YEAR_S},
}
UNITS = {name: Unit(dimension, si) for dimension, units in _BY_DIMENSION.items() for name, si in units.items()}


def units_of(dimension: str) -> list[str]:
    return list(_BY_DIMENSION[dimension])
