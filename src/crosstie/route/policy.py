"""What a policy is: a request and the fleet go in, a decision with its reason comes out.

Three steps, as elsewhere: filters drop what cannot serve the request (`route.filters`), a score compares what is left,
a pick decides. A policy reads what is live and changes none of it; whatever it must remember, such as whose turn it is,
is its own. It has two methods to write:

    pick(query)                         the decision among the pools that passed the filters
    score(replica, predicted, ask)      what replicas are compared by, smaller being better, for explanations
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from math import inf
from typing import ClassVar, Final

from crosstie.core.fleet import Policy
from crosstie.route.ask import Ask
from crosstie.route.decision import Considered, Decision
from crosstie.route.filters import available, fitting, pool_dropped, refused, replica_dropped
from crosstie.route.live import LiveFleet, LivePool, Replica
from crosstie.route.speed import Prediction, first_token_s

# Names that are found as quickly one after the other.
_FEW: Final = 8


class Query:
    """A request, and what there is to choose from. The fleet has been advanced to `now`."""

    def __init__(
        self, fleet: LiveFleet, pools: list[LivePool], ask: Ask, now: float, exclude: Collection[str],
        panic: bool = False,
    ):  # fmt: skip
        self.fleet, self.ask, self.now = fleet, ask, now
        # Whether replicas that are only suspected may be chosen.
        self.panic = panic
        # Those of the request's model that could serve it if they had room.
        self.pools = pools
        # Backends that have been tried for it; where they are many, all are compared with each replica.
        self.exclude = exclude if len(exclude) < _FEW else frozenset(exclude)
        # The only replica that is asked for; None: all are.
        self.only: Replica | None = None


class RoutingPolicy(ABC):
    name: ClassVar[Policy]

    def __init__(self, seed: int = 0):
        # Where equals are told apart by turn, the seed says whose turn is first.
        self._turn = seed

    def choose(
        self, fleet: LiveFleet, ask: Ask, now: float, *, exclude: Collection[str] = (), explain: bool = False,
        panic: bool = False,
    ) -> Decision:  # fmt: skip
        """`exclude`: backends that have been tried for this request. `panic`: those that are only suspected may be
        chosen. The fleet must have been advanced to `now`."""
        pools = fleet.by_model.get(ask.model)
        if ask.under_way is None:
            ask.under_way = fleet.sessions.find(ask)
        query = Query(fleet, fitting(pools, ask) if pools else [], ask, now, exclude, panic)
        # Before the decision, which may change whose turn it is.
        considered = self._considered(query) if explain else None
        decision = self.pick(query) if query.pools else refused(fleet, ask)
        if considered is not None:
            decision.considered = considered
        return decision

    @abstractmethod
    def pick(self, query: Query) -> Decision:
        """Where it goes, of pools that could serve it; there is at least one."""

    def may_take(self, query: Query) -> bool:
        """Whether one who waits may be sent to the only replica that is asked for; a policy that does not look so
        closely says yes, and is asked where to."""
        return True

    @abstractmethod
    def score(self, replica: Replica, predicted: Prediction, ask: Ask) -> float:
        """What replicas are compared by, smaller being better."""

    def best(self, query: Query, pool: LivePool) -> Considered | None:
        """The replica that counts for a pool when a decision is explained; None: none has room."""
        least, best = inf, None
        for replica in available(pool, query.now, query.exclude, query.panic):
            predicted = predict(query.fleet, replica, query.ask)
            score = self.score(replica, predicted, query.ask)
            if best is None or score < least:
                least, best = score, Considered(pool.name, replica.key, predicted, None, score)
        return best

    def _considered(self, query: Query) -> list[Considered]:
        """Every pool of the fleet by its best replica, or by what dropped it."""
        pools, ask = [], query.ask
        planned = query.fleet.guide(ask)
        for pool in query.fleet.pools:
            if pool.pool.loading is not None and pool.pool.model != ask.model:
                # Of a pool that hosts many models, only the one that is asked for is of interest.
                continue
            why, joules = pool_dropped(pool, ask, pool in query.pools), None
            best = self.best(query, pool) if why is None else None
            if best is None:
                dropped = {str(replica_dropped(replica, query.now, query.exclude)) for replica in pool.replicas}
                best = Considered(pool.name, None, None, why or "; ".join(sorted(dropped)), None)
            elif best.prediction is not None and pool.watts:
                cached = best.prediction.cached_tokens
                joules = pool.joules(max(ask.input_tokens - cached, 1.0), cached, ask.output_tokens)
            pools.append(best._replace(planned=pool.name in planned, joules=joules))
        return pools


class Around(RoutingPolicy):
    """`own`: who decides of what this one leaves to it."""

    name: ClassVar[Policy] = "cheapest-meeting-target"

    def __init__(self, own: RoutingPolicy):
        super().__init__()
        self.own = own

    def pick(self, query: Query) -> Decision:
        return self.own.pick(query)

    def score(self, replica: Replica, predicted: Prediction, ask: Ask) -> float:
        return self.own.score(replica, predicted, ask)


def predict(fleet: LiveFleet, replica: Replica, ask: Ask) -> Prediction:
    """What a replica would give the request at its present load."""
    pool, view, cached = replica.pool, replica.view, 0.0
    if ask.prefix or ask.tokens is not None or ask.under_way is not None:
        cached = replica.cached_tokens(ask, fleet.lengths.tokens_a_block(ask))
    new, output = max(ask.input_tokens - cached, 1.0), ask.output_tokens
    raw_ttft_s = first_token_s(view, pool.speed, new, cached, output)
    raw_tpot_s = (view.step_s + (ask.input_tokens + 0.5 * output) * pool.speed.per_cached) * view.stretch
    return Prediction(
        ttft_s=raw_ttft_s * view.ttft_factor + view.late_s,
        tpot_s=raw_tpot_s * view.tpot_factor,
        predicted_usd=pool.weighed * pool.request_usd(new, cached, output, ask.tpot_s),
        cached_tokens=cached,
        raw_ttft_s=raw_ttft_s,
        raw_tpot_s=raw_tpot_s,
    )
