"""Times as users write and read them: spans such as 30m, moments in UTC."""

import re
from datetime import UTC, date, datetime, timedelta

from crosstie.core.errors import BadInput

_SPAN = re.compile(r"^(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)$")
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
# A thousand years: beyond it a number is a slip, and the calendar ends.
_LONGEST_S = 1000 * 365.25 * 86_400
_FORMS = "%Y-%m-%d", "%Y-%m-%dT%H", "%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S"


def span(option: str, text: str) -> float:
    """Seconds of 90s, 30m, 1h, 7d, 2w."""
    match = _SPAN.match(text.strip().lower())
    if match is None:
        raise BadInput(f"{option}: '{text}' is no time such as 30m, 1h or 7d")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if seconds > _LONGEST_S:
        raise BadInput(f"{option}: '{text}' is more than a thousand years")
    return seconds


def moment(option: str, text: str, *, after: bool = False) -> float:
    """A day or a time in UTC, as seconds since the epoch. `after`: the end of a day that is meant whole."""
    said = text.strip().removesuffix("Z").removesuffix("+00:00").replace(" ", "T")
    for form in _FORMS:
        try:
            moment = datetime.strptime(said, form).replace(tzinfo=UTC)
        except ValueError:
            continue
        # The last day of the calendar has no next.
        whole_day = after and form == _FORMS[0] and moment.date() < date.max
        return (moment + timedelta(days=1) if whole_day else moment).timestamp()
    raise BadInput(f"{option}: '{text}' is no day such as 2026-11-30, nor a time such as 2026-11-30T18:00 (UTC)")


def when(at: float | None) -> str:
    return "-" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M")


def stamp(at: float | None) -> str | None:
    """For JSON."""
    return None if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
