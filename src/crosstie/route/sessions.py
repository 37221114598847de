"""Sessions under way: agents and chats whose next prompt contains the last one and its answer.

A prompt goes on with the session that it has the last whole block of a prompt of, or whose name it brings: nobody has
to say anything. So sub-agents that go on from a session's conversation are of that session, several at once.
What a session left on a replica is worth keeping while it is likely to come back. How soon that is, and how likely, is
learnt by class from those that came back and those that did not.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Final

from crosstie.core.pauses import patience_s
from crosstie.route.ask import Ask
from crosstie.route.load import ReplicaLoad
from crosstie.route.session import LIKELY, LiveSession, SessionClass, SessionCounts

# Sessions that are remembered, those that are given up among them: one that comes back late teaches how long to wait.
_MOST_SESSIONS: Final = 50_000
# Prompts of a session by which it is found: between two of its own may lie those of its sub-agents.
_MOST_ENDS: Final = 64
# Of a session's last prompt and answer; who finds less has lost its cache.
CACHED_LEAST: Final = 0.5


class LiveSessions:
    def __init__(self) -> None:
        self._by_end: dict[int, LiveSession] = {}
        self._by_name: dict[str, LiveSession] = {}
        # In the order of their last turns; and the idle ones that are waited for, by the moment at which no more.
        self._all: dict[int, LiveSession] = {}
        self._idle: list[tuple[float, int, LiveSession]] = []
        self._kinds: dict[str, SessionClass] = {}
        self._numbers = self._kept = 0
        # Told where the cache of a session need not be kept any more, and by which number it was.
        self.let_go: Callable[[ReplicaLoad, int], None] | None = None

    def __len__(self) -> int:
        return len(self._all)

    def by_state(self) -> dict[str, dict[str, int]]:
        """By class, how many are being answered, and how many pause and are waited for."""
        states = {kind: {"answered": 0, "warm": 0} for kind in self._kinds.values()}
        for session in self._all.values():
            if session.in_flight or session.weight > 0.0:
                states[session.kind]["answered" if session.in_flight else "warm"] += 1
        return {name: states[kind] for name, kind in self._kinds.items()}

    def counts(self) -> dict[str, SessionCounts]:
        return {name: kind.counts for name, kind in self._kinds.items()}

    def kind_of(self, ask: Ask) -> SessionClass:
        name = ask.class_name or ask.model
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds[name] = SessionClass()
        return kind

    def find(self, ask: Ask) -> LiveSession | None:
        """The session that a request goes on with."""
        if ask.session is not None:
            return self._by_name.get(ask.session)
        ends = self._by_end
        if ends:
            for block in reversed(ask.prefix):
                session = ends.get(block)
                # Whose session is not waited for any more only begins as it once did.
                if session is not None and (session.weight > 0.0 or session.ends[-1] == block):
                    return session
        return None

    def start(self, ask: Ask, replica: ReplicaLoad, cached_tokens: float, now: float) -> LiveSession:
        """A turn was sent to a replica."""
        session = ask.under_way
        if session is None or session.number not in self._all:
            self._numbers += 1
            session = LiveSession(self._numbers, self.kind_of(ask))
            session.shared = cached_tokens
        elif not session.in_flight:
            session.kind.saw_pause(max(now - ask.waited_s - session.ended_at, 0.0))
        if session.turns:
            self._found(session, cached_tokens < CACHED_LEAST * min(session.tokens, ask.input_tokens), replica)
        if session.home is not replica:
            self._let_go(session)
            self._leave(session)
            session.home = replica
        session.turns += 1
        session.in_flight += 1
        before, tokens = session.tokens, ask.input_tokens + ask.output_tokens
        session.tokens = max(before, tokens) if session.in_flight > 1 else tokens
        self._name(session, ask)
        self._all.pop(session.number, None)
        self._all[session.number] = session
        self._count(session, 1.0)
        session.kind.saw_turn(session.tokens - session.shared, session.tokens - before if session.turns > 1 else None)
        while len(self._all) > _MOST_SESSIONS:
            self._drop(next(iter(self._all.values())))
        return session

    def _found(self, session: LiveSession, evicted: bool, replica: ReplicaLoad) -> None:
        found = "evicted" if evicted else "home" if session.home is replica else "moved"
        counts = session.kind.counts
        counts.turns[found] += 1
        if session.turns == 1:
            counts.begun += 1
            counts.usd += session.usd

    def _name(self, session: LiveSession, ask: Ask) -> None:
        if ask.session is not None:
            session.name = ask.session
            self._by_name[ask.session] = session
        session.depth = len(ask.prefix)
        ends = session.ends
        if ask.prefix and not (ends and ends[-1] == ask.prefix[-1]):
            ends.append(ask.prefix[-1])
            self._by_end[ends[-1]] = session
            if len(ends) > _MOST_ENDS:
                self._forget(session, ends.pop(0))

    def _forget(self, session: LiveSession, end: int) -> None:
        if self._by_end.get(end) is session and end not in session.ends:
            del self._by_end[end]

    def end(
        self, session: LiveSession, tokens: float | None, usd: float, now: float, pause_s: float | None = None
    ) -> None:
        """A turn has ended, and its prompt and answer came to so many tokens; None: it failed. `pause_s`: as the client
        says, until its next turn; infinitely: no other follows."""
        session.in_flight -= 1
        session.usd += usd
        if session.turns > 1:
            session.kind.counts.usd += usd
        if tokens is not None:
            session.tokens = tokens
        if session.in_flight:
            return
        session.ended_at = now
        if pause_s == inf:
            self._drop(session)
            return
        kind = session.kind
        session.until = now + (kind.pause_s() if pause_s is None else patience_s(pause_s))
        heappush(self._idle, (session.until, session.number, session))
        # A client that says when it comes back means to.
        self._count(session, kind.returns() if pause_s is None else 1.0)

    def keep(self, session: LiveSession, pause_s: float | None) -> int:
        """By which number the engine of its home is told to keep its cache; 0: another turn is not likely to follow.
        `pause_s`: as the client says."""
        comes_back = session.turns > 1 or pause_s is not None or session.kind.returns() > LIKELY
        if pause_s == inf or not comes_back:
            return 0
        if not session.kept_as:
            # Never one that was let go, which engines do not take again.
            self._kept += 1
            session.kept_as = self._kept
        return session.kept_as

    def _let_go(self, session: LiveSession) -> None:
        if session.kept_as and session.home is not None and self.let_go is not None:
            self.let_go(session.home, session.kept_as)
        session.kept_as = 0

    def advance(self, now: float) -> None:
        """Those who have not come back are no more waited for."""
        idle = self._idle
        while idle and idle[0][0] <= now:
            until, _, session = heappop(idle)
            if until == session.until and not session.in_flight and session.weight > 0.0:
                self._count(session, 0.0)
                self._let_go(session)

    def lost(self, replica: ReplicaLoad) -> None:
        """A replica is gone, and with it what it held."""
        for session in list(self._all.values()):
            if session.home is replica:
                self._leave(session)
                session.home, session.kept_as = None, 0

    def _count(self, session: LiveSession, weight: float) -> None:
        """What it counts for on its home: its own tokens, as likely as it comes back."""
        self._leave(session)
        home = session.home
        if home is not None:
            session.weight = weight
            session.counted = weight * max(session.tokens - session.shared, 0.0)
            home.warm_sessions += weight
            home.warm_tokens += session.counted

    def _leave(self, session: LiveSession) -> None:
        home = session.home
        if home is not None and session.weight:
            home.warm_sessions -= session.weight
            home.warm_tokens -= session.counted
        session.weight = session.counted = 0.0

    def _drop(self, session: LiveSession) -> None:
        self._let_go(session)
        self._leave(session)
        self._all.pop(session.number, None)
        while session.ends:
            self._forget(session, session.ends.pop(0))
        if session.name is not None and self._by_name.get(session.name) is session:
            del self._by_name[session.name]
