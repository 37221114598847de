"""What a purchase schedule asks for beside the workload: quarters, growth, lead times, deliveries, contracts."""

import re
from typing import Annotated

import msgspec

from crosstie.core.fact import NounName

_QUARTER = re.compile(r"(20\d\d)Q([1-4])")
Months = Annotated[float, msgspec.Meta(ge=0, le=60)]
Gpus = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
# One that may not be sold yet.
_Accelerator = Annotated[str, NounName("announced accelerator")]


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that are ordered and paid, and come in that quarter."""

    accelerator: _Accelerator
    gpus: Gpus
    quarter: str


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """GPUs that are rented until the end of that quarter, used or not."""

    accelerator: _Accelerator
    gpus: Gpus
    usd_per_gpu_hour: Annotated[float, msgspec.Meta(ge=0, le=1000)]
    until: str


class ScheduleRequest(msgspec.Struct, frozen=True, kw_only=True):
    quarters: Annotated[int, msgspec.Meta(ge=2, le=20)] = 12
    # The peak over that of the quarter before, quarter by quarter; the last goes on. Empty: traffic.growth_per_year.
    growth: tuple[Annotated[float, msgspec.Meta(ge=0.1, le=10)], ...] = ()
    # Standard deviation of the logarithm of the peak a year ahead: forecasts of a year are off by a quarter (assumed).
    spread_per_year: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.25
    # From an order to GPUs that serve: a quarter and some weeks (assumed), and otherwise by accelerator.
    lead_months: Months = 4.0
    lead_time_months: dict[_Accelerator, Months] = {}
    # Share of its book value that used hardware fetches before the horizon ends (assumed); at the end it counts whole,
    # as in `tco`.
    resale: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.7
    deliveries: tuple[Delivery, ...] = ()
    contracts: tuple[Contract, ...] = ()


def quarter_number(name: str) -> int | None:
    """2027Q1 as a count of quarters; None: it is written otherwise."""
    match = _QUARTER.fullmatch(name)
    return 4 * int(match[1]) + int(match[2]) - 1 if match else None


def quarter_name(number: int) -> str:
    return f"{number // 4}Q{number % 4 + 1}"


def quarter_of(date: str) -> int:
    """Of YYYY-MM or YYYY-MM-DD."""
    return 4 * int(date[:4]) + (int(date[5:7]) - 1) // 3
