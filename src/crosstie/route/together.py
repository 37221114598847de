"""A policy among gateways that share their load: it looks at what the others have before it decides.

Views of all replicas may be some milliseconds old; of the one that was chosen it is asked at the last moment whether
there is still room, so that a replica's limit holds for all gateways together but for those that decide at once.
"""

from collections.abc import Collection

from crosstie.route.ask import Ask
from crosstie.route.choosing import RoutingPolicy
from crosstie.route.decision import Decision, Prediction
from crosstie.route.live import LiveFleet, LivePool, Replica

# How old what is known of the others may be when nothing depends on it.
READ_S = 0.005
# Replicas that others may fill while one decision is made.
_TRIES = 8


class Together(RoutingPolicy):
    def __init__(self, inner: RoutingPolicy, speed: float = 1.0):
        super().__init__()
        self.inner = inner
        self._every_s = READ_S * speed
        self._read_at = float("-inf")

    def choose(
        self, fleet: LiveFleet, ask: Ask, now: float, *, exclude: Collection[str] = (), explain: bool = False
    ) -> Decision:
        if now - self._read_at >= self._every_s:
            self.refresh(fleet, now)
        for _ in range(_TRIES):
            decision = self.inner.choose(fleet, ask, now, exclude=exclude, explain=explain)
            replica = decision.replica
            if replica is not None:
                if not self._crowded(replica, now):
                    return decision
            elif not self.refresh(fleet, now):
                return decision
        return Decision("wait", "other gateways took every place while this was decided")

    def refresh(self, fleet: LiveFleet, now: float) -> bool:
        """Whether anything has changed."""
        self._read_at = now
        found = False
        for pool in fleet.pools:
            for replica in pool.replicas:
                cell = replica.elsewhere.cell
                if cell is not None and cell.changed:
                    found = self._read(replica, now) or found
        return found

    def _crowded(self, replica: Replica, now: float) -> bool:
        cell = replica.elsewhere.cell
        if cell is None:
            return False
        count: int = cell.in_flight_elsewhere()
        left = replica.view.limit - replica.in_flight
        if count - replica.elsewhere.in_flight < left:
            return False
        self._read(replica, now)
        return replica.in_flight >= replica.view_at(now).limit

    def _read(self, replica: Replica, now: float) -> bool:
        elsewhere = replica.elsewhere
        before = (elsewhere.in_flight, elsewhere.waiting, elsewhere.held_tokens, replica.busy_until)
        elsewhere.read(now)
        replica.busy_until = max(replica.busy_until, elsewhere.busy_until)
        replica.fresh_until = float("-inf")
        return before != (elsewhere.in_flight, elsewhere.waiting, elsewhere.held_tokens, replica.busy_until)

    def _among(
        self, fleet: LiveFleet, pools: list[LivePool], ask: Ask, now: float, exclude: Collection[str]
    ) -> Decision:
        return self.inner._among(fleet, pools, ask, now, exclude)

    def _score(self, replica: Replica, predicted: Prediction, ask: Ask) -> float:
        return self.inner._score(replica, predicted, ask)
