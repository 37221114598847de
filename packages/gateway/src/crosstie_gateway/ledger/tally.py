"""What each key has used in each minute, and what its requests in flight may cost. `LocalTally` is one process's own;
`share` has the same for several processes and machines."""

from typing import Protocol

# Minutes that may still be asked for: the present one, the one before, and one for clocks that differ.
_KEPT = 3


class Tally(Protocol):
    def add(self, key_id: int, minute: int, requests: int, tokens: int) -> None:
        """`minute`: whole minutes since the epoch. What was estimated too high is taken back with a minus."""

    def total(self, key_id: int, minute: int) -> tuple[int, int]:
        """Requests and tokens of that minute, of everybody who shares the tally."""

    def hold(self, key_id: int, usd: float, more_usd: float) -> None:
        """What this process has let in and no store tells of: as announced, and how much more at worst."""

    def held(self, key_id: int) -> tuple[float, float]:
        """The same of everybody else who shares the tally."""


class LocalTally:
    def __init__(self) -> None:
        self._minutes: dict[int, dict[int, tuple[int, int]]] = {}

    def add(self, key_id: int, minute: int, requests: int, tokens: int) -> None:
        keys = self._minutes.get(minute)
        if keys is None:
            keys = self._minutes[minute] = {}
            for old in [known for known in self._minutes if known <= minute - _KEPT]:
                del self._minutes[old]
        before = keys.get(key_id, (0, 0))
        keys[key_id] = (before[0] + requests, before[1] + tokens)

    def total(self, key_id: int, minute: int) -> tuple[int, int]:
        keys = self._minutes.get(minute)
        return (0, 0) if keys is None else keys.get(key_id, (0, 0))

    def hold(self, key_id: int, usd: float, more_usd: float) -> None:
        """There is nobody to tell."""

    def held(self, key_id: int) -> tuple[float, float]:
        return 0.0, 0.0
