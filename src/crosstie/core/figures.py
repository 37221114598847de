"""How numbers are written for people: money, times, bytes and rates, to three significant figures, no exponents."""

import math


def significant(value: float, figures: int = 3) -> str:
    """A number to so many figures, with separators and without an exponent; digits before the point all stay."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = figures - 1 - math.floor(math.log10(abs(value)))
    text = f"{value:,.{max(places, 0)}f}"
    return text.rstrip("0").rstrip(".") if places > 0 else text


# Units that go without saying, or that read better another way.
_SPOKEN = {"count": "", "ratio": "", "year": " years", "fraction": "", "1/year": "%/year"}


def with_unit(value: float, unit: str) -> str:
    """A quantity as people write it: `304`, `0.9`, `5.3 TB/s`, `191.98 GiB`."""
    if unit == "B" and value >= 1024:
        power = min(int(math.log2(value) / 10), 3)
        return f"{significant(value / 1024**power, 5)} {('', 'KiB', 'MiB', 'GiB')[power]}"
    spoken = _SPOKEN.get(unit, f" {unit}")
    return significant(100 * value if spoken.startswith("%") else value, 10) + spoken


def number(value: object) -> str:
    """A cell of a list: numbers with separators, nothing as a dash."""
    if value is None:
        return "-"
    return significant(value, 4) if isinstance(value, int | float) else str(value)


def dollars(value: float) -> str:
    """$2.77M, $60,152, $82.40, $0.0531."""
    if not math.isfinite(value):
        return "no price"
    if abs(value) >= 1e6:
        return f"${value / 1e6:,.2f}M"
    if abs(value) >= 1e3:
        return f"${value:,.0f}"
    return f"${value:,.2f}" if abs(value) >= 0.1 or value == 0 else f"${significant(value)}"


def seconds(value: float) -> str:
    if not math.isfinite(value):
        return "never"
    if value < 1e-3:
        return f"{significant(value * 1e6)} us"
    return f"{significant(value * 1e3)} ms" if value < 10 else f"{value:,.0f} s"


def milliseconds(value: float) -> str:
    """Without the unit, which stands above a column."""
    return significant(value * 1e3)


def gigabytes(value: float) -> str:
    return f"{value / 1e9:,.1f} GB" if value >= 1e9 or value == 0 else f"{value / 1e6:,.1f} MB"


def kibibytes(value: float) -> str:
    return f"{value / 1024:,.1f} KiB" if value >= 1024 else f"{value:,.0f} B"


def bandwidth(value: float) -> str:
    """Bytes per second."""
    if value >= 1e12:
        return f"{significant(value / 1e12)} TB/s"
    return f"{significant(value / 1e9)} GB/s" if value >= 1e9 else f"{significant(value / 1e6)} MB/s"


def arithmetic(value: float) -> str:
    """Floating-point operations per second."""
    return f"{significant(value / 1e12)} TFLOP/s"


def share(value: float) -> str:
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def percent(value: float) -> str:
    """An error or a share of requests, where a tenth of a percent matters."""
    return "-" if math.isnan(value) else f"{value:.1%}"


def parameters(value: float) -> str:
    return f"{value / 1e12:,.2f} T" if value >= 1e12 else f"{value / 1e9:,.2f} B"


def many(value: float) -> str:
    """Counts that nobody counts."""
    if value >= 1e9:
        return f"{significant(value / 1e9)} billion"
    return f"{significant(value / 1e6)} million" if value >= 1e6 else f"{value:,.0f}"


def plural(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
