"""Requests that no replica can take just now: who is sent next, who has waited too long, and who is turned away.

Higher priority first, then the order of arrival; those who have used up most of their TTFT target come after all of
their priority who have not, because they will hardly keep it anyway. The room is bounded: when it is full, the newest
of the lowest priority goes, which may be the one that has just come.
"""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from crosstie.route.ask import Ask
from crosstie.route.decision import Decision

# Tickets that are tried for one place: those behind them are not worth the time, as they ask for much the same.
_TRIED = 16
# Who has waited for this share of its TTFT target has too little left of it: simulated at 0.4 to 1 of it, at loads of
# 0.8 to 1.5 of what a fleet was planned for.
_LATE_SHARE = 0.6
# Over how many departures their rate is taken, and how long clients are asked to stay away at least and at most.
_RATE_GAIN = 0.1
_SOONEST_S, _LATEST_S = 1.0, 60.0


class Ticket:
    """A place in the waiting room. `item` is the caller's own, whatever it wakes the client by."""

    def __init__(self, ask: Ask, item: Any, since: float, deadline: float, number: int):
        self.ask = ask
        self.item = item
        self.since = since
        self.deadline = deadline
        self.number = number
        # Those of one kind would all take the same place.
        self.kind = (ask.model, ask.pin, ask.class_name, ask.modalities, ask.tried)
        # Where it waits; None: it has left.
        self.lane: dict[Ticket, None] | None = None

    @property
    def there(self) -> bool:
        return self.lane is not None


class _Lanes:
    """Of one priority, each in the order of arrival: dicts, so that whoever leaves is quickly gone."""

    def __init__(self) -> None:
        self.in_time: dict[Ticket, None] = {}
        self.late: dict[Ticket, None] = {}

    def sort(self, now: float) -> None:
        while self.in_time:
            ticket = next(iter(self.in_time))
            target_s = ticket.ask.ttft_s
            if target_s is None or now - ticket.since < _LATE_SHARE * target_s:
                return
            del self.in_time[ticket]
            self.late[ticket] = None
            ticket.lane = self.late


class WaitingRoom:
    def __init__(self, most: int):
        self.most = most
        self._by_priority: dict[int, _Lanes] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []
        # How many there are of each kind, and in all.
        self._kinds: dict[tuple[object, ...], int] = {}
        self._count = 0
        self._numbers = 0
        self._left_at: float | None = None
        # Mean time between two departures.
        self._gap_s = 1.0

    def __len__(self) -> int:
        return self._count

    def add(self, ask: Ask, now: float, deadline: float, item: Any = None) -> tuple[Ticket, Ticket | None]:
        """The newcomer's ticket, and the one that had to go for it, which may be the same."""
        self._numbers += 1
        ticket = Ticket(ask, item, now, deadline, self._numbers)
        ticket.lane = self._by_priority.setdefault(ask.priority, _Lanes()).in_time
        ticket.lane[ticket] = None
        heappush(self._deadlines, (deadline, ticket.number, ticket))
        self._kinds[ticket.kind] = self._kinds.get(ticket.kind, 0) + 1
        self._count += 1
        if self._count <= self.most:
            return ticket, None
        lowest = self._by_priority[min(p for p, lanes in self._by_priority.items() if lanes.in_time or lanes.late)]
        shed = next(reversed(lowest.in_time or lowest.late))
        self.leave(shed)
        return ticket, shed

    def leave(self, ticket: Ticket) -> bool:
        """Gives a place up, as when the client has gone; whether it was still taken."""
        if ticket.lane is None:
            return False
        del ticket.lane[ticket]
        ticket.lane = None
        self._count -= 1
        left = self._kinds[ticket.kind] - 1
        if left:
            self._kinds[ticket.kind] = left
        else:
            del self._kinds[ticket.kind]
        if len(self._deadlines) > 64 and len(self._deadlines) > 2 * self._count:
            self._deadlines = sorted(entry for entry in self._deadlines if entry[2].there)
        return True

    def expired(self, now: float) -> list[Ticket]:
        """Those whose deadline has come; they have left."""
        found = []
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].there):
            ticket = heappop(self._deadlines)[2]
            if self.leave(ticket):
                found.append(ticket)
        return found

    def take(self, decide: "Decider", now: float) -> tuple[Ticket, Decision] | None:
        """The next whom the policy would not keep waiting, with its decision; it has left.

        A refusal counts as well: what cannot be served any more should not wait for its deadline.
        """
        tried = 0
        # Kinds of which one must wait: whoever comes after it in order would only take its place.
        stuck: set[tuple[object, ...]] = set()
        for priority in sorted(self._by_priority, reverse=True):
            lanes = self._by_priority[priority]
            lanes.sort(now)
            for lane in (lanes.in_time, lanes.late):
                for ticket in lane:
                    if len(stuck) == len(self._kinds):
                        break
                    ask, kind = ticket.ask, ticket.kind
                    if kind in stuck:
                        continue
                    ask.waited_s = now - ticket.since
                    decision = decide(ask, now)
                    if decision.outcome != "wait":
                        self.leave(ticket)
                        self._departed(now)
                        return ticket, decision
                    stuck.add(kind)
                    # Those whose model is still to be loaded are many kinds, and soon decided.
                    tried += decision.refusal != "cold"
                    if tried >= _TRIED:
                        return None
        return None

    def _departed(self, now: float) -> None:
        if self._left_at is not None:
            self._gap_s += _RATE_GAIN * (max(now - self._left_at, 0.0) - self._gap_s)
        self._left_at = now

    def retry_after_s(self, now: float) -> float:
        """When a place is likely to be free again for those who are turned away now."""
        idle = now - self._left_at if self._left_at is not None else 0.0
        gap_s = max(self._gap_s, _RATE_GAIN * idle)
        return min(max(gap_s * (self._count + 1), _SOONEST_S), _LATEST_S)


Decider = Callable[[Ask, float], Decision]
