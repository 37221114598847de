"""How traffic goes over a day: 24 hours, the busiest of them 1. Shipped shapes by name, or the user's own."""

from functools import cache
from pathlib import Path
from statistics import fmean

from crosstie.catalog.reading import number, only_keys, sourced_file, table, text
from crosstie.core.errors import BadData, did_you_mean, near_names

_FILE = Path(__file__).parent / "data" / "days.toml"
HOURS = 24
# What a workload is taken to have that gives its mean alone.
USUAL = "servegen-language"
# A mean that is said beside a list of hours may differ so much from theirs.
_SAME_MEAN = 0.01


@cache
def shipped_days() -> dict[str, tuple[float, ...]]:
    days = {}
    with sourced_file(_FILE) as (raw, sources):
        for name, entry in raw.items():
            entry = table(_FILE, name, entry)
            only_keys(_FILE, name, entry, {"says", "hours", "basis", "source"})
            text(_FILE, f"{name}.says", entry.get("says"))
            sources.cite(name, entry.get("source"))
            days[name] = _hours(_FILE, f"{name}.hours", entry.get("hours"))
    return days


def read_day(file: Path, where: str, raw: object, mean: float | None) -> tuple[float, ...]:
    """Of a workload: a shipped shape, bent to its mean where it gives one, or its own 24 hours."""
    if isinstance(raw, str):
        if raw not in shipped_days():
            hint = did_you_mean(near_names(raw, shipped_days())) or f" Known: {', '.join(shipped_days())}."
            raise BadData(file, where, f"'{raw}' is no shape of a day.{hint}")
        return bent(shipped_days()[raw], mean) if mean else shipped_days()[raw]
    hours = _hours(file, where, raw)
    if mean is not None and abs(fmean(hours) - mean) > _SAME_MEAN:
        raise BadData(file, where, f"its mean is {fmean(hours):.3g} of its peak, but mean_over_peak says {mean:g}")
    return hours


def _hours(file: Path, where: str, raw: object) -> tuple[float, ...]:
    if not isinstance(raw, list) or len(raw) != HOURS:
        raise BadData(file, where, "must be the name of a shape or 24 numbers, one an hour")
    hours = [number(file, f"{where}[{index}]", rate, 0, 1e9) for index, rate in enumerate(raw)]
    if max(hours) <= 0:
        raise BadData(file, where, "has no traffic at all")
    return tuple(hour / max(hours) for hour in hours)


def bent(hours: tuple[float, ...], mean: float) -> tuple[float, ...]:
    """The same hours raised to the power that gives them this mean; the busiest stays 1."""
    low, high = 1e-3, 1e3
    for _ in range(100):
        power = (low * high) ** 0.5
        if fmean(hour**power for hour in hours) > mean:
            low = power
        else:
            high = power
    return tuple(hour**power for hour in hours)
