"""A circuit breaker for one backend: it counts the backend's own faults, never a client's mistakes."""

from collections import deque

# So many faults in a row open it, or this share of the latest outcomes.
IN_A_ROW = 5
SHARE = 0.5
_LATEST = 20
_FIRST_OPEN_S = 1.0
_LONGEST_OPEN_S = 30.0


class Breaker:
    """closed: all goes through. open: nothing, for a while that doubles. trying: one fault opens it again."""

    __slots__ = ("_in_a_row", "_latest", "_open_s", "_until", "state")

    def __init__(self) -> None:
        self.state = "closed"
        self._in_a_row = 0
        self._latest: deque[bool] = deque(maxlen=_LATEST)
        self._until = 0.0
        self._open_s = _FIRST_OPEN_S

    def succeeded(self) -> None:
        self._in_a_row = 0
        self._latest.append(True)
        if self.state == "trying":
            self.state = "closed"
            self._latest.clear()
            self._open_s = _FIRST_OPEN_S

    def failed(self, now: float) -> bool:
        """Whether this fault opened it."""
        self._in_a_row += 1
        self._latest.append(False)
        if self.state == "open":
            return False
        faults = self._latest.count(False)
        often = len(self._latest) >= _LATEST // 2 and faults >= SHARE * len(self._latest)
        if self.state == "trying" or self._in_a_row >= IN_A_ROW or often:
            self.state = "open"
            self._until = now + self._open_s
            self._open_s = min(2.0 * self._open_s, _LONGEST_OPEN_S)
            return True
        return False

    @property
    def until(self) -> float:
        """When it lets requests through again, where it is open."""
        return self._until

    def open_too(self, until: float) -> None:
        """Another gateway's breaker for the same backend has opened until then."""
        self.state, self._until = "open", until

    def check(self, now: float) -> bool:
        """Whether it has just begun to let requests through again, on trial."""
        if self.state != "open" or now < self._until:
            return False
        self.state = "trying"
        self._in_a_row = 0
        self._latest.clear()
        return True
