"""One session under way, and what sessions of its class have shown."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from typing import Final

from crosstie.core.pauses import comes_back_s
from crosstie.route.load import ReplicaLoad

# Pauses of a class that are kept.
_PAUSES: Final = 256
# From which likelihood of another turn on a class is one of sessions.
LIKELY: Final = 0.5
# Turns after which what they showed is half forgotten.
_MEMORY: Final = 500.0


class _Mean:
    """Of what was seen lately."""

    def __init__(self) -> None:
        self._sum = self._count = 0.0

    def value(self) -> float:
        return self._sum / self._count if self._count else 0.0

    def add(self, seen: float) -> None:
        if self._count >= _MEMORY:
            self._sum, self._count = 0.5 * self._sum, 0.5 * self._count
        self._sum += seen
        self._count += 1.0


class SessionCounts:
    """Of sessions that went on with a second turn: how many, their turns by what these found, and what they cost."""

    def __init__(self) -> None:
        # Most of the last prompt, at home or elsewhere, or hardly anything of it.
        self.turns = {"home": 0, "moved": 0, "evicted": 0}
        self.begun = 0
        self.usd = 0.0


class SessionClass:
    """What sessions of a class have shown."""

    def __init__(self) -> None:
        self.counts = SessionCounts()
        self._last: deque[float] = deque()
        self._sorted: list[float] = []
        # Turns, and how many of them were the first of a session.
        self._turns = self._begun = 0.0
        # Tokens that a session has of its own: at any turn, at its first, and what it grows by from one to the next.
        self._held, self._first, self._growth = _Mean(), _Mean(), _Mean()

    def pause_s(self) -> float:
        """Within which those come back that do."""
        return comes_back_s(self._sorted)

    def returns(self) -> float:
        """How likely another turn follows."""
        return (self._turns - self._begun) / self._turns if self._turns else 0.0

    def mean_tokens(self) -> float:
        """What a session has of its own, on average until its end: those that are young will not stay so."""
        turns = self._turns / self._begun if self._begun else 1.0
        grown = self._first.value() + 0.5 * (turns - 1.0) * self._growth.value()
        held = self._held.value()
        return held if held > grown else grown

    def saw_pause(self, seconds: float) -> None:
        insort(self._sorted, seconds)
        self._last.append(seconds)
        if len(self._last) > _PAUSES:
            del self._sorted[bisect_left(self._sorted, self._last.popleft())]

    def saw_turn(self, tokens: float, growth: float | None) -> None:
        """`growth`: since the turn before; None: there was none."""
        self._held.add(tokens)
        if self._turns >= _MEMORY:
            self._turns, self._begun = 0.5 * self._turns, 0.5 * self._begun
        self._turns += 1.0
        if growth is None:
            self._begun += 1.0
            self._first.add(tokens)
        elif growth > 0.0:
            self._growth.add(growth)


class LiveSession:
    def __init__(self, number: int, kind: SessionClass):
        self.number = number
        self.kind = kind
        # Where its last turn went; None: nowhere yet, or its replica has lost it.
        self.home: ReplicaLoad | None = None
        # Of its last prompt and answer, and of these such as others had before it came.
        self.tokens = self.shared = 0.0
        # Blocks of its last prompt, and its name.
        self.depth = 0
        self.name: str | None = None
        # Last blocks of its prompts, the latest last: what it is found by. Sub-agents go on from an earlier prompt, and
        # so does the session itself when they have ended.
        self.ends: list[int] = []
        self.in_flight = 0
        self.turns = 0
        # By which number the engine of its home was told to keep its cache; 0: it was not.
        self.kept_as = 0
        self.usd = 0.0
        self.ended_at = 0.0
        # Until when it is waited for, and what it counts for on its home.
        self.until = 0.0
        self.weight = self.counted = 0.0

    def goes_on(self, prefix: Sequence[int], held: int) -> bool:
        """Whether a prompt contains the last one, of which so many blocks are held."""
        return held >= self.depth and (not self.depth or prefix[self.depth - 1] == self.ends[-1])
