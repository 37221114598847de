"""A gateway's router and its waiting room in a world's virtual time, for benchmarks that have several of them."""

from typing import Any, Protocol

from crosstie.route.admission import WaitingRoom
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.live import Flight
from crosstie.route.router import Router


class World(Protocol):
    now: float

    def sent(self, item: Any, gateway: Any, flight: Flight) -> None: ...

    def refused(self, item: Any) -> None: ...


class QueueingGateway:
    """`item`: whatever the world knows a request by."""

    world: World
    router: Router
    room: WaitingRoom

    def decide(self, ask: Ask, now: float) -> Decision:
        return self.router.decide(ask, now)

    def place(self, item: Any, ask: Ask, decision: Decision, queue_s: float) -> None:
        if decision.outcome == "send":
            self._start(item, ask, decision)
        elif decision.outcome == "wait":
            _, shed = self.room.add(ask, self.world.now, self.world.now + queue_s, item)
            if shed is not None:
                self.world.refused(shed.item)
        else:
            self.world.refused(item)

    def let_in(self) -> None:
        while len(self.room):
            taken = self.room.take(self.decide, self.world.now)
            if taken is None:
                return
            ticket, decision = taken
            if decision.outcome == "send":
                self._start(ticket.item, ticket.ask, decision)
            else:
                self.world.refused(ticket.item)

    def expire(self) -> None:
        for ticket in self.room.expired(self.world.now):
            decision = self.router.last_chance(ticket.ask, self.world.now)
            if decision is not None:
                self._start(ticket.item, ticket.ask, decision)
            else:
                self.world.refused(ticket.item)

    def _start(self, item: Any, ask: Ask, decision: Decision) -> None:
        assert decision.replica is not None
        assert decision.prediction is not None
        self.world.sent(item, self, decision.replica.start(ask, decision.prediction, self.world.now))
