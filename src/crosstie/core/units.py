"""Units as data files write them, and their SI values. Inside Crosstie every number is SI."""

from typing import NamedTuple


class Unit(NamedTuple):
    dimension: str
    si: float


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
}


def units_of(dimension: str) -> list[str]:
    return [name for name, unit in UNITS.items() if unit.dimension == dimension]
