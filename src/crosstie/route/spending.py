"""What is spent at a provider who is paid by the token, held to so many dollars in any hour and in any day.

It is counted by the moments that `route` is given, in slices of each period. A request is reserved for what it may come
to, and settled at what it was. This process counts what it has sent itself; who shares the limit with it is told, and
asked (`service.spending`).
"""

from collections.abc import Callable
from math import inf
from typing import Final

# A dollar counts until the slice that it fell into has been over for a whole period.
_SLICES: Final = 48


class Period:
    """`name`: hour or day."""

    def __init__(self, name: str, seconds: float):
        self.name, self.words = name, "an hour" if name == "hour" else f"a {name}"
        self.most_usd = inf
        # Other workers and peers: they are told what is spent and reserved here, and asked for theirs.
        self.tell: Callable[[float], None] | None = None
        self.ask: Callable[[], float] | None = None
        self._slice_s = seconds / _SLICES
        self._slices: dict[int, float] = {}

    def add(self, usd: float, now: float) -> None:
        at = int(now // self._slice_s)
        self._slices[at] = self._slices.get(at, 0.0) + usd

    def spent_usd(self, now: float) -> float:
        """Of this process."""
        first = int(now // self._slice_s) - _SLICES
        for old in [at for at in self._slices if at < first]:
            del self._slices[old]
        return sum(self._slices.values())


class Spending:
    def __init__(self) -> None:
        self.periods = [Period("hour", 3600.0), Period("day", 86_400.0)]
        self.reserved_usd = 0.0
        self._in_flight = 0

    def limit(self, usd_per_hour: float | None, usd_per_day: float | None) -> None:
        for period, most_usd in zip(self.periods, (usd_per_hour, usd_per_day), strict=True):
            period.most_usd = inf if most_usd is None else most_usd

    def taken_usd(self, period: Period, now: float) -> float:
        """Spent and reserved, here and elsewhere."""
        elsewhere = 0.0 if period.ask is None else period.ask()
        return period.spent_usd(now) + self.reserved_usd + elsewhere

    def refusal(self, usd: float, now: float) -> str | None:
        """In words, which limit so many dollars more would break; None: none."""
        for period in self.periods:
            if period.most_usd == inf:
                continue
            taken = self.taken_usd(period, now)
            if taken + usd > period.most_usd:
                return f"spending: {taken:.4g} of {period.most_usd:g} USD in {period.words} are spent or reserved"
        return None

    def reserve(self, usd: float, now: float) -> None:
        self._in_flight += 1
        self.reserved_usd += usd
        self.publish(now)

    def settle(self, reserved_usd: float, usd: float, now: float) -> None:
        self._in_flight -= 1
        # Sums of many floats drift; where nothing is in flight nothing is reserved.
        self.reserved_usd = self.reserved_usd - reserved_usd if self._in_flight else 0.0
        for period in self.periods:
            period.add(usd, now)
        self.publish(now)

    def publish(self, now: float) -> None:
        for period in self.periods:
            tell = period.tell
            if tell is not None:
                tell(period.spent_usd(now) + self.reserved_usd)
