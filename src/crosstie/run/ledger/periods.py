"""Hours, days and months in UTC, as usage and budgets count them."""

from datetime import UTC, datetime, timedelta

HOUR_S = 3600
DAY_S = 86_400


def hour_of(at: float) -> int:
    """The beginning of its hour, in seconds since the epoch."""
    return int(at // HOUR_S) * HOUR_S


def day_name(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d")


def month_name(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m")


def day_end(at: float) -> float:
    return (int(at // DAY_S) + 1) * float(DAY_S)


def month_end(at: float) -> float:
    first = datetime.fromtimestamp(at, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    # Thirty-two days on is in the next month, whichever it is.
    return (first + timedelta(days=32)).replace(day=1).timestamp()
