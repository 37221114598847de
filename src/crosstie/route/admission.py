"""Requests that no replica can take just now: who is sent next, who has waited too long, and who is turned away.

Higher priority first; those who have used up most of their TTFT target come after all of their priority who have not,
because they will hardly keep it anyway. Among these, tenants take turns by the tokens that they were let through with,
fewest first, as the Virtual Token Counter of fair serving has it; one tenant's own go by arrival, those whose session
is being answered already after the others. Whoever begins to wait is put level with the least served of those who do,
so that nobody saves up turns. The room is bounded: when it is full, of the lowest priority the newest of the tenant who
has most there goes, which may be the one that has just come.
"""

from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from itertools import chain, islice
from typing import Any, Final

from crosstie.route.ask import Ask
from crosstie.route.decision import Decision

# Tickets that are tried for one place: those behind them are not worth the time, as they ask for much the same.
_TRIED: Final = 16
# Of a line, those among whom sessions take turns: what a decision looks at stays bounded.
_LOOKED_AT: Final = 8 * _TRIED
# A request that has waited for this share of its TTFT target has too little left of it: simulated at 0.4 to 1 of it, at
# loads of 0.8 to 1.5 of what a fleet was planned for.
_LATE_SHARE: Final = 0.6
# Over how many departures their rate is taken, and how long clients are asked to stay away at least and at most.
_RATE_GAIN: Final = 0.1
_SOONEST_S: Final = 1.0
_LATEST_S: Final = 60.0


class Ticket:
    """A place in the waiting room. `item` is the caller's own, whatever it wakes the client by."""

    def __init__(self, ask: Ask, item: Any, since: float, deadline: float, number: int):
        self.ask = ask
        self.item = item
        self.since = since
        self.deadline = deadline
        self.number = number
        # Those of one kind would all take the same place.
        self.kind = (ask.model, ask.adapter, ask.pin, ask.class_name, ask.modalities, ask.tried)
        self.tenant = ask.tenant
        # Where it waits; None: it has left.
        self.lane: Lane | None = None

    @property
    def there(self) -> bool:
        return self.lane is not None


# Those who wait of each tenant, in the order of arrival: dicts, so that whoever leaves is quickly gone.
Line = dict[Ticket, None]
Lane = dict[int, Line]


def _stand(lane: Lane, ticket: Ticket) -> None:
    line = lane.get(ticket.tenant)
    if line is None:
        line = lane[ticket.tenant] = {}
    line[ticket] = None
    ticket.lane = lane


def _step_out(lane: Lane, ticket: Ticket) -> None:
    line = lane[ticket.tenant]
    del line[ticket]
    if not line:
        del lane[ticket.tenant]
    ticket.lane = None


class _Lanes:
    """Of one priority."""

    def __init__(self) -> None:
        self.in_time: Lane = {}
        self.late: Lane = {}

    def sort(self, now: float) -> None:
        for tenant in list(self.in_time):
            while tenant in self.in_time:
                ticket = next(iter(self.in_time[tenant]))
                target_s = ticket.ask.ttft_s
                if target_s is None or now - ticket.since < _LATE_SHARE * target_s:
                    break
                _step_out(self.in_time, ticket)
                _stand(self.late, ticket)

    def last(self) -> Ticket:
        """The newest of the tenant who has most here."""
        counts: dict[int, int] = {}
        for lane in (self.in_time, self.late):
            for tenant, line in lane.items():
                counts[tenant] = counts.get(tenant, 0) + len(line)
        most = max(counts.values())
        lines = [self.in_time.get(one) or self.late[one] for one, count in counts.items() if count == most]
        return max([next(reversed(line)) for line in lines], key=lambda ticket: ticket.number)


def _by_session(line: Line) -> Iterable[Ticket]:
    """Of the first who wait: those whose session is answered nothing just now before those of one that is, so that an
    agent with ten calls at once has no ten places."""
    first = list(islice(line, _LOOKED_AT))
    busy = [ticket for ticket in first if _in_flight(ticket)]
    if not busy:
        return line
    idle = [ticket for ticket in first if not _in_flight(ticket)]
    return chain(idle, sorted(busy, key=_in_flight), islice(line, _LOOKED_AT, None))


def _in_flight(ticket: Ticket) -> int:
    session = ticket.ask.under_way
    return session.in_flight if session is not None else 0


class WaitingRoom:
    def __init__(self, most: int):
        self.most = most
        self._by_priority: dict[int, _Lanes] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []
        # How many there are of each kind, and in all, which is asked at every request.
        self._kinds: dict[tuple[object, ...], int] = {}
        self.count = 0
        # How many there are of each tenant, and the tokens that it was let through with since somebody has waited.
        self._tenants: dict[int, int] = {}
        self._served: dict[int, float] = {}
        self._numbers = 0
        self._left_at: float | None = None
        # Mean time between two departures.
        self._gap_s = 1.0

    def __len__(self) -> int:
        return self.count

    def by_class(self) -> dict[str, int]:
        """How many wait of each class, or of a model's requests without one."""
        counts: dict[str, int] = {}
        for (model, _, _, class_name, *_), count in self._kinds.items():
            name = str(class_name or model)
            counts[name] = counts.get(name, 0) + count
        return counts

    def add(self, ask: Ask, now: float, deadline: float, item: Any = None) -> tuple[Ticket, Ticket | None]:
        """The newcomer's ticket, and the one that had to go for it, which may be the same."""
        self._numbers += 1
        ticket = Ticket(ask, item, now, deadline, self._numbers)
        _stand(self._by_priority.setdefault(ask.priority, _Lanes()).in_time, ticket)
        tenant = ticket.tenant
        waits = self._tenants.get(tenant, 0)
        if not waits:
            level = min([self._served[one] for one in self._tenants], default=0.0)
            self._served[tenant] = max(self._served.get(tenant, 0.0), level)
        self._tenants[tenant] = waits + 1
        heappush(self._deadlines, (deadline, ticket.number, ticket))
        self._kinds[ticket.kind] = self._kinds.get(ticket.kind, 0) + 1
        self.count += 1
        if self.count <= self.most:
            return ticket, None
        lowest = self._by_priority[min(p for p, lanes in self._by_priority.items() if lanes.in_time or lanes.late)]
        shed = lowest.last()
        self.leave(shed)
        return ticket, shed

    def leave(self, ticket: Ticket) -> bool:
        """Gives a place up, as when the client has gone; whether it was still taken."""
        if ticket.lane is None:
            return False
        _step_out(ticket.lane, ticket)
        self.count -= 1
        waits = self._tenants[ticket.tenant] - 1
        if waits:
            self._tenants[ticket.tenant] = waits
        else:
            del self._tenants[ticket.tenant]
            if not self.count:
                self._served.clear()
        left = self._kinds[ticket.kind] - 1
        if left:
            self._kinds[ticket.kind] = left
        else:
            del self._kinds[ticket.kind]
        if len(self._deadlines) > 64 and len(self._deadlines) > 2 * self.count:
            self._deadlines = sorted(entry for entry in self._deadlines if entry[2].there)
        return True

    def tickets(self) -> list[Ticket]:
        """Those who wait."""
        return [ticket for _, _, ticket in self._deadlines if ticket.there]

    def expired(self, now: float) -> list[Ticket]:
        """Those whose deadline has come; they have left."""
        tickets = []
        while self._deadlines and (self._deadlines[0][0] <= now or not self._deadlines[0][2].there):
            ticket = heappop(self._deadlines)[2]
            if self.leave(ticket):
                tickets.append(ticket)
        return tickets

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
            for line in (*self._in_turn(lanes.in_time), *self._in_turn(lanes.late)):
                for ticket in _by_session(line):
                    if len(stuck) == len(self._kinds):
                        return None
                    ask, kind = ticket.ask, ticket.kind
                    if kind in stuck:
                        continue
                    ask.waited_s = now - ticket.since
                    decision = decide(ask, now)
                    if decision.outcome != "wait":
                        if decision.outcome == "send":
                            self._served[ticket.tenant] += ask.input_tokens + ask.copies * ask.output_tokens
                        self.leave(ticket)
                        self._departed(now)
                        return ticket, decision
                    stuck.add(kind)
                    # Those whose model is still to be loaded are many kinds, and soon decided.
                    tried += decision.refusal != "cold"
                    if tried >= _TRIED:
                        return None
        return None

    def _in_turn(self, lane: Lane) -> list[Line]:
        if len(lane) < 2:
            return list(lane.values())
        turns = sorted([(self._served[tenant], n, tenant) for n, tenant in enumerate(lane)])
        return [lane[tenant] for _, _, tenant in turns]

    def _departed(self, now: float) -> None:
        if self._left_at is not None:
            self._gap_s += _RATE_GAIN * (max(now - self._left_at, 0.0) - self._gap_s)
        self._left_at = now

    def retry_after_s(self, now: float) -> float:
        """When a place is likely to be free again for those who are turned away now."""
        idle = now - self._left_at if self._left_at is not None else 0.0
        gap_s = max(self._gap_s, _RATE_GAIN * idle)
        return min(max(gap_s * (self.count + 1), _SOONEST_S), _LATEST_S)


Decider = Callable[[Ask, float], Decision]
