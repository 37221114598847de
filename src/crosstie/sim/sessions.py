"""Sessions in a closed loop over a fleet: each next prompt comes a pause after the last answer, and contains it.

So many are at work at once; where one ends, another begins. Sub-agents work beside each other from an answer of their
session on, which goes on when all have ended. A turn that is turned away is asked again, as agents do, and its latency
counts from when it was first asked.
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

# Above the blocks that a recording numbers: what each replay of a session of it has alone. And places of the blocks
# that all sessions of a class begin with.
_REPLAYED_AT, _CLASS_AT = 52, 16
# How soon a turn that was turned away comes again.
_AGAIN_S = 1.0

# Of a session of this number, its turns.
SessionMaker = Callable[[int, np.random.Generator], Iterator[SessionTurn]]


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """Sessions of a class that are at work at once."""

    class_name: str | None
    model: str
    live: int
    # Requests of a session, its sub-agents' among them; and seconds from one turn to the next where answers take what
    # they are allowed: means.
    turns: float
    turn_s: float
    make: SessionMaker
    success_rate: float | None = None


def shaped(shape: SessionShape, class_number: int) -> SessionMaker:
    """Sessions as a class describes them."""
    shared = tuple((class_number << _CLASS_AT) + place for place in range(int(shape.system) // BLOCK_TOKENS))

    def make(number: int, chance: np.random.Generator) -> Iterator[SessionTurn]:
        return session_turns(shape, chance, number, shared, BLOCK_TOKENS)

    return make


def replayed(sessions: Sequence[Sequence[SessionTurn]]) -> SessionMaker:
    """Sessions of a recording, drawn again and again: what only one of them has is new each time."""
    seen: dict[int, int] = {}
    for index, session in enumerate(sessions):
        for block in set(chain.from_iterable(turn.blocks for turn in session)):
            seen[block] = index if block not in seen else -1

    def make(number: int, chance: np.random.Generator) -> Iterator[SessionTurn]:
        own = number + 1 << _REPLAYED_AT
        for turn in sessions[int(chance.integers(len(sessions)))]:
            yield turn._replace(blocks=tuple(block if seen[block] < 0 else own + block for block in turn.blocks))

    return make


@dataclass(slots=True)
class _Session:
    """Turns one after the other: a session's, or a sub-agent's of the session `of`, whose are all turn 0."""

    number: int
    load: SessionLoad
    turns: Iterator[SessionTurn]
    turn: int
    # The next request, and when it was first asked.
    due: SessionTurn
    asked_s: float
    # Prompt and answer of the turn before, where the next prompt begins with them.
    before: int = 0
    of: "_Session | None" = None
    # Of its sub-agents, those that it waits for; and whether nothing follows them.
    waits_for: int = 0
    over: bool = False


@dataclass(slots=True)
class TurnColumns:
    """What became of each turn."""

    load: "array[int]" = field(default_factory=lambda: array("i"))
    # Of its session, from 1 on; 0: a sub-agent's.
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
        turns = list(load.make(self._numbers, self._chance))
        first = int(self._chance.integers(len(turns))) if under_way else 0
        self._open(load, turns[first:], first + 1, at)

    def _open(
        self, load: SessionLoad, turns: Sequence[SessionTurn], turn: int, at: float, of: _Session | None = None
    ) -> None:
        self._numbers += 1
        left = iter(turns)
        self._ask(_Session(self._numbers, load, left, turn, next(left), at, of=of))

    def _ask(self, session: _Session) -> None:
        heappush(self._due, (session.asked_s, session.number, session))

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
        turn, load = session.due, session.load
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
                turn.blocks,
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
        turn, following = session.due, next(session.turns, None)
        session.waits_for, session.over = len(turn.subagents), following is None
        if following is not None:
            session.turn += 1 if session.of is None else 0
            goes_on = following.conversation == turn.conversation
            session.before = turn.input_tokens + turn.output_tokens if goes_on else 0
            session.due, session.asked_s = following, now + following.pause_s
        for helper in turn.subagents:
            self._open(session.load, helper, 0, now, session)
        if not session.waits_for:
            self._go_on(session, now)

    def _go_on(self, session: _Session, now: float) -> None:
        """Its answer and its sub-agents have ended."""
        if not session.over:
            session.asked_s = max(session.asked_s, now)
            self._ask(session)
        elif session.of is None:
            self.sessions_ended[self.loads.index(session.load)] += 1
            self._begin(session.load, now)
        else:
            session.of.waits_for -= 1
            if not session.of.waits_for:
                self._go_on(session.of, now)

    def _note(self, session: _Session, answer: SimulatedAnswer, now: float) -> None:
        columns, turn = self.columns, session.due
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
