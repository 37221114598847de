"""The policies that look at counts alone: turns, loads, weights and held prefixes."""

from abc import abstractmethod
from typing import ClassVar, Final

from crosstie.core.fleet import Policy
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.filters import available, may_take, without_room
from crosstie.route.live import LivePool, Replica
from crosstie.route.policy import Query, RoutingPolicy, predict
from crosstie.route.shortlist import looked_at
from crosstie.route.speed import Prediction

# A replica with a held prefix is passed over once it has this many times the mean load of all, and one request more.
_BOUND: Final = 1.25


class _Counting(RoutingPolicy):
    def pick(self, query: Query) -> Decision:
        able = self._able(query)
        if not able:
            return without_room(query.pools, query.now, query.exclude)
        replica, why = self._of_able(query, able)
        ask = query.ask
        said = predict(query.fleet, replica, ask)
        meets = (ask.ttft_s is None or said.ttft_s <= ask.ttft_s) and (ask.tpot_s is None or said.tpot_s <= ask.tpot_s)
        return Decision("send", why, replica=replica, prediction=said, meets=meets, told=ask)

    def _able(self, query: Query) -> list[Replica]:
        """Those that have room; of large pools, some of them."""
        replicas: list[Replica] = []
        for pool in query.pools:
            if pool.holders is None:
                replicas += available(pool, query.now, query.exclude, query.panic)
            else:
                replicas += looked_at(pool, query.ask, query.now, query.exclude, query.panic, self._turn)
        return replicas

    @abstractmethod
    def _of_able(self, query: Query, able: list[Replica]) -> tuple[Replica, str]:
        """One of those that have room, and why."""

    def _least_loaded(self, able: list[Replica]) -> Replica:
        """Fewest in flight; equals take turns."""
        self._turn += 1
        start = self._turn % len(able)
        return min(able[start:] + able[:start], key=_in_flight)

    def score(self, replica: Replica, predicted: Prediction, ask: Ask) -> float:
        """Requests in flight."""
        return float(_in_flight(replica))


def _in_flight(replica: Replica) -> float:
    return replica.in_flight + replica.elsewhere.in_flight + replica.external_running + replica.external_waiting


class RoundRobin(_Counting):
    """All replicas that serve the model, in rotation; those that may not be sent to are passed over."""

    name: ClassVar[Policy] = "round-robin"

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self._next: dict[str, int] = {}

    def _able(self, query: Query) -> list[Replica]:
        """The one whose turn it is."""
        model, everybody = query.ask.model, self._everybody(query)
        may = set(map(id, query.pools))
        start = self._next.get(model, self._turn)
        for step in range(len(everybody)):
            replica = everybody[(start + step) % len(everybody)]
            if id(replica.pool) in may and may_take(replica, query.now, query.exclude, query.panic):
                self._next[model] = start + step + 1
                return [replica]
        return []

    def _everybody(self, query: Query) -> list[Replica]:
        replicas: list[Replica] = []
        for pool in query.fleet.by_model[query.ask.model]:
            replicas += pool.replicas
        return replicas

    def _of_able(self, query: Query, able: list[Replica]) -> tuple[Replica, str]:
        return able[0], f"its turn of {len(self._everybody(query))}"


class LeastLoaded(_Counting):
    name: ClassVar[Policy] = "least-loaded"

    def _of_able(self, query: Query, able: list[Replica]) -> tuple[Replica, str]:
        replica = self._least_loaded(able)
        return replica, f"fewest in flight of {len(able)}, {replica.in_flight}"


class Weighted(_Counting):
    """Pools take turns in proportion to their weights, as evenly mixed as can be; then the least loaded replica."""

    name: ClassVar[Policy] = "weighted"

    def __init__(self, seed: int = 0):
        super().__init__(seed)
        self._credit: dict[str, float] = {}

    def _of_able(self, query: Query, able: list[Replica]) -> tuple[Replica, str]:
        by_pool: dict[str, list[Replica]] = {}
        for replica in able:
            by_pool.setdefault(replica.pool.name, []).append(replica)
        weights = {name: weight_of(of[0].pool) for name, of in by_pool.items()}
        total = sum(weights.values()) or 1.0
        for name, weight in weights.items():
            self._credit[name] = self._credit.get(name, 0.0) + weight / total
        chosen = max(weights, key=lambda name: self._credit[name])
        self._credit[chosen] -= 1.0
        return self._least_loaded(by_pool[chosen]), f"weight {weights[chosen] / total:.0%} of {len(weights)} pools"

    def score(self, replica: Replica, predicted: Prediction, ask: Ask) -> float:
        """How far the pool is from its next turn."""
        return 1.0 - self._credit.get(replica.pool.name, 0.0)


def weight_of(pool: LivePool) -> float:
    """As the fleet file says, or the requests/s that its replicas carry of its usual requests."""
    if pool.pool.weight is not None:
        return pool.pool.weight
    each_s = pool.speed.replica_s(pool.speed.typical_input, 0.0, pool.speed.typical_output)
    return len(pool.replicas) / max(each_s, 1e-9)


class HeldPrefix(_Counting):
    """The longest held prefix, unless its replica has much more to do than the others: then the least loaded."""

    name: ClassVar[Policy] = "prefix"

    def _of_able(self, query: Query, able: list[Replica]) -> tuple[Replica, str]:
        bound = _BOUND * sum(map(_in_flight, able)) / len(able) + 1.0
        best, most, ask = None, 0.0, query.ask
        block_tokens = query.fleet.lengths.tokens_a_block(ask)
        for replica in able:
            held = (
                replica.prefixes.match(ask.prefix) if ask.tokens is None else replica.cached_tokens(ask, block_tokens)
            )
            if held > most and _in_flight(replica) <= bound:
                best, most = replica, held
        if best is not None:
            known = f"{len(ask.prefix)} blocks" if ask.tokens is None else f"{ask.tokens.count} tokens"
            return best, f"holds {most:.0f} of {known}"
        replica = self._least_loaded(able)
        return replica, f"no prefix held within the bound; fewest in flight of {len(able)}"

    def score(self, replica: Replica, predicted: Prediction, ask: Ask) -> float:
        """Tokens that it does not hold, then requests in flight."""
        return ask.input_tokens - predicted.cached_tokens + 1e-6 * _in_flight(replica)
