"""Sessions in a closed loop over a fleet: each next prompt comes a pause after the last answer, and contains it.

So many are at work at once; where one ends, another begins. A turn that is turned away is asked again, as agents do,
and its latency counts from when it was first asked.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import chain
from math import inf, isfinite

import numpy as np

from crosstie.catalog.sessions import SessionTurn, session_turns
from crosstie.catalog.traces import BLOCK_TOKENS
from crosstie.core.workload import SessionShape
from crosstie.sim.fleet import FleetSimulator, SimulatedAnswer, SimulatedRequest

# Of a block's number: its place in the conversation, that of the conversation in its session, and above the session.
_CONVERSATION_AT, _SESSION_AT = 16, 26
# How soon a turn that was turned away comes again.
_AGAIN_S = 1.0

_Prompt = tuple[SessionTurn, tuple[int, ...]]
# Of a session of this number, its turns with the blocks of prompt and answer.
SessionMaker = Callable[[int, np.random.Generator], Iterator[_Prompt]]


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """Sessions of a class that are at work at once."""

    class_name: str | None
    model: str
    live: int
    # Turns of a session, and seconds from one to the next where answers take what they are allowed: means.
    turns: float
    turn_s: float
    make: SessionMaker
    success_rate: float | None = None


def shaped(shape: SessionShape, class_number: int) -> SessionMaker:
    """Sessions as a class describes them."""
    shared = tuple((class_number << _CONVERSATION_AT) + place for place in range(int(shape.system) // BLOCK_TOKENS))

    def make(number: int, chance: np.random.Generator) -> Iterator[_Prompt]:
        for turn in session_turns(shape, chance):
            begin = (number + 1 << _SESSION_AT) + (turn.conversation << _CONVERSATION_AT)
            count = -(-turn.known // BLOCK_TOKENS)
            yield turn, (*shared, *range(begin + len(shared), begin + count))

    return make


def replayed(sessions: Sequence[Sequence[_Prompt]]) -> SessionMaker:
    """Sessions of a recording, drawn again and again: what only one of them has is new each time."""
    seen: dict[int, int] = {}
    for index, session in enumerate(sessions):
        for block in set(chain.from_iterable(blocks for _, blocks in session)):
            seen[block] = index if block not in seen else -1

    def make(number: int, chance: np.random.Generator) -> Iterator[_Prompt]:
        own = number + 1 << 2 * _SESSION_AT
        for turn, blocks in sessions[int(chance.integers(len(sessions)))]:
            yield turn, tuple(block if seen[block] < 0 else own + block for block in blocks)

    return make


@dataclass(slots=True)
class _Session:
    number: int
    load: SessionLoad
    turns: Iterator[_Prompt]
    turn: int
    # The next request, and when it was first asked.
    due: _Prompt
    asked_s: float
    # Prompt and answer of the turn before, where the next prompt begins with them.
    before: int = 0


@dataclass(slots=True)
class TurnColumns:
    """What became of each turn."""

    load: "array[int]" = field(default_factory=lambda: array("i"))
    # Of its session, from 1 on.
    turn: "array[int]" = field(default_factory=lambda: array("i"))
    asked_s: "array[float]" = field(default_factory=lambda: array("d"))
    ttft_s: "array[float]" = field(default_factory=lambda: array("d"))
    ended_s: "array[float]" = field(default_factory=lambda: array("d"))
    input_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    cached_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    # Of the prompt, what the last turn's prompt and answer were.
    known_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    usd: "array[float]" = field(default_factory=lambda: array("d"))


class ClosedLoop:
    """`others`: requests that come by the clock beside the sessions. Tell it of every answer by `ended`."""

    def __init__(
        self, simulator: FleetSimulator, loads: Sequence[SessionLoad], ramp_s: float, seed: int = 0,
        others: Iterable[SimulatedRequest] = (),
    ):  # fmt: skip
        self.simulator, self.loads = simulator, loads
        self.columns = TurnColumns()
        self.sessions_ended = [0] * len(loads)
        self._chance = np.random.default_rng(seed)
        self._others = iter(others)
        self._other = next(self._others, None)
        self._numbers = 0
        self._due: list[tuple[float, int, _Session]] = []
        self._flying: dict[str, _Session] = {}
        for load in loads:
            for place in range(load.live):
                # One by one, each at another turn, as sessions are under way.
                self._begin(load, ramp_s * (place + self._chance.random()) / load.live, under_way=True)

    def _begin(self, load: SessionLoad, at: float, *, under_way: bool = False) -> None:
        self._numbers += 1
        turns = list(load.make(self._numbers, self._chance))
        first = int(self._chance.integers(len(turns))) if under_way else 0
        left = iter(turns[first:])
        session = _Session(self._numbers, load, left, first + 1, next(left), at)
        heappush(self._due, (at, session.number, session))

    def advance(self, until: float) -> None:
        """All that happens up to then."""
        simulator = self.simulator
        while True:
            other_s = self._other.arrival_s if self._other else inf
            due_s = self._due[0][0] if self._due else inf
            # An answer may make a turn due before anything else that is known now.
            moment = min(other_s, due_s, simulator.next_s)
            if moment > until:
                break
            simulator.advance(moment)
            if self._due and self._due[0][0] <= moment:
                self._send(heappop(self._due)[2])
            elif self._other and other_s <= moment:
                simulator.send(self._other)
                self._other = next(self._others, None)
        simulator.advance(until)

    def _send(self, session: _Session) -> None:
        turn, blocks = session.due
        load = session.load
        name = str(session.number)
        self._flying[name] = session
        # The name comes back with the answer; the router is not told, and knows sessions by their prompts.
        self.simulator.send(
            SimulatedRequest(
                self.simulator.now,
                load.model,
                turn.input_tokens,
                turn.output_tokens,
                load.class_name,
                blocks,
                sender=name,
            )
        )

    def ended(self, answer: SimulatedAnswer) -> None:
        session = self._flying.pop(answer.request.sender or "", None)
        if session is None:
            return
        now = self.simulator.now
        if answer.pool is None:
            again = now + _AGAIN_S + self.simulator.room.retry_after_s(now)
            heappush(self._due, (again, session.number, session))
            return
        self._note(session, answer, now)
        turn, _ = session.due
        session.turn += 1
        following = next(session.turns, None)
        if following is None:
            self.sessions_ended[self.loads.index(session.load)] += 1
            self._begin(session.load, now)
            return
        goes_on = following[0].conversation == turn.conversation
        session.before = turn.input_tokens + turn.output_tokens if goes_on else 0
        session.due, session.asked_s = following, now + following[0].pause_s
        heappush(self._due, (session.asked_s, session.number, session))

    def _note(self, session: _Session, answer: SimulatedAnswer, now: float) -> None:
        columns, turn = self.columns, session.due[0]
        columns.load.append(self.loads.index(session.load))
        columns.turn.append(session.turn)
        columns.asked_s.append(session.asked_s)
        columns.ttft_s.append(answer.request.arrival_s + answer.ttft_s - session.asked_s)
        columns.ended_s.append(now)
        columns.input_tokens.append(turn.input_tokens)
        columns.cached_tokens.append(answer.cached_tokens)
        columns.known_tokens.append(min(session.before, turn.input_tokens))
        columns.usd.append(answer.usd if isfinite(answer.usd) else 0.0)

    def waiting(self) -> list[tuple[int, float]]:
        """Turns that were asked and have no answer yet: whose, and since when."""
        late = [session for at, _, session in self._due if session.asked_s < at]
        return [(self.loads.index(session.load), session.asked_s) for session in (*self._flying.values(), *late)]
