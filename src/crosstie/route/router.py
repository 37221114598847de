"""A fleet and the policy that decides over it. Before each decision the fleet is brought up to its moment; a decision
itself only reads.

Where workers and peers share their load, what they have may be some milliseconds old; of the replica that was chosen it
is asked at the last moment whether there is still room, so that its limit holds for all of them together but for those
that decide at once.
"""

from collections.abc import Collection
from math import inf
from typing import Final

from crosstie.route.adapters import AdapterAffinity
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.filters import fitting
from crosstie.route.live import LiveFleet, LivePool, Replica
from crosstie.route.load import Cell
from crosstie.route.overflow import Overflow
from crosstie.route.policy import Query, RoutingPolicy

# How old what is known of other workers and peers may be when nothing depends on it.
READ_S: Final = 0.005
# Replicas that others may fill while one decision is made.
_TRIES: Final = 8


class Router:
    def __init__(self, fleet: LiveFleet, policy: RoutingPolicy, speed: float = 1.0):
        """`speed`: seconds of the router's clock in a second."""
        self._read_every_s = READ_S * speed
        self._read_at = float("-inf")
        self.load(fleet, policy)

    def load(self, fleet: LiveFleet, policy: RoutingPolicy) -> None:
        """Decides over this fleet from now on; what is shared has to be said anew."""
        policy = Overflow(policy) if fleet.buys else policy
        self.fleet, self.policy = fleet, AdapterAffinity(policy) if fleet.adapters else policy
        # Whether others use any as well; and those of small pools: of large ones they are read when they are looked at.
        self._is_shared = False
        self._shared: list[Replica] = []

    def share(self, cells: dict[str, Cell]) -> None:
        """Replicas with a cell, by their keys, are shared with other workers or peers."""
        for replica in self.fleet.leaving:
            replica.elsewhere.cell = None
        for replica in self.fleet.replicas():
            replica.elsewhere.cell = cells.get(replica.key)
            replica.elsewhere.every_s = self._read_every_s
            replica.publish()
        shared = [replica for replica in self.fleet.replicas() if replica.key in cells]
        self._is_shared = bool(shared)
        self._shared = [replica for replica in shared if replica.pool.holders is None]

    def decide(self, ask: Ask, now: float, *, exclude: Collection[str] = (), explain: bool = False) -> Decision:
        """`exclude`: backends that have been tried for this request. `explain`: with the pools that were not chosen."""
        fleet = self.fleet
        if self._shared and now - self._read_at >= self._read_every_s:
            self._read_shared(now)
        fleet.sessions.advance(now)
        for _ in range(_TRIES):
            fleet.advance(now, ask.model)
            decision = self.policy.choose(fleet, ask, now, exclude=exclude, explain=explain)
            if decision.outcome != "send" and fleet.panics(ask.model):
                # Those in service first: who is suspected gets what they cannot take.
                decision = self.policy.choose(fleet, ask, now, exclude=exclude, explain=explain, panic=True)
                decision.panic = decision.outcome == "send"
            replica = decision.replica
            if not self._is_shared or (replica is not None and not _is_crowded(replica, now)):
                return decision
            if replica is None and not self._read_shared(now):
                return decision
        return Decision("wait", "other gateways took every place while this was decided")

    def may_take(self, ask: Ask, replica: Replica, now: float) -> bool:
        """Whether a replica that has something less to do may take one who waits: far less work than a decision."""
        if replica.pool not in fitting(self.fleet.by_model.get(ask.model, []), ask):
            return False
        replica.advance(now)
        query = Query(self.fleet, [replica.pool], ask, now, ())
        query.only = replica
        return self.policy.may_take(query)

    def last_chance(self, ask: Ask, now: float) -> Decision | None:
        """At the end of its patience the urgent is sent wherever there is room, and so is a prompt that takes longer on
        any idle replica than its TTFT, or than what its pool promises to others: more replicas would not have helped
        it. After engines have stood still their predictions are trusted so little that nothing would be sent, and
        nothing learnt: then it is sent where it breaks no target with the margin of a fleet that works. None: it has
        waited for nothing."""
        if ask.priority < 1:
            return None
        own = [pool for pool in fitting(self.fleet.by_model.get(ask.model, []), ask) if pool.spending is None]
        if ask.priority == 1 and not _too_long(ask, own, now):
            if not any(pool.tpot_scatter.beyond_belief for pool in own):
                return None
            ask.in_doubt = True
        ask.waited_s = ask.patience_s
        decision = self.decide(ask, now, exclude=ask.tried)
        ask.in_doubt = False
        return decision if decision.outcome == "send" else None

    def bought(self, ask: Ask, now: float) -> Decision | None:
        """For one that would be turned away: to a provider who is paid by the token, if there is one for it."""
        if not self.fleet.buys:
            return None
        ask.waited_s = ask.patience_s
        decision = self.decide(ask, now, exclude=ask.tried)
        replica = decision.replica
        return decision if replica is not None and replica.pool.spending is not None else None

    def _read_shared(self, now: float) -> bool:
        """Whether anything has changed."""
        self._read_at = now
        found = False
        for replica in self._shared:
            cell = replica.elsewhere.cell
            if cell is not None and cell.changed:
                found = replica.read_elsewhere(now) or found
        return found


def _is_crowded(replica: Replica, now: float) -> bool:
    cell = replica.elsewhere.cell
    if cell is None:
        return False
    in_flight: int = cell.in_flight_elsewhere()
    if in_flight - replica.elsewhere.in_flight < replica.view.limit - replica.in_flight:
        return False
    replica.read_elsewhere(now)
    return replica.in_flight >= replica.advance(now).limit


def _too_long(ask: Ask, pools: list[LivePool], now: float) -> bool:
    """Whether its prompt alone, on an idle replica, takes longer than it may wait, or than leaves others of the pool
    their margin, in every pool."""
    ttft_s = inf if ask.ttft_s is None else ask.ttft_s
    for pool in pools:
        promised = pool.promised_ttft
        limit_s = promised.seconds / pool.ttft_scatter.margin(promised.deviations, True)
        if pool.idle_ttft_s(ask.input_tokens, now) < min(ttft_s, limit_s):
            return False
    return bool(pools)
