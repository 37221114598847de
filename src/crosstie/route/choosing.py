"""What all policies share: a request and the fleet go in, a decision with its reason comes out.

A policy looks at what is live and changes none of it; whatever it must remember, such as whose turn it is, is its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import ClassVar, NamedTuple

from crosstie.core.fleet import Policy
from crosstie.route.ask import Ask
from crosstie.route.decision import Considered, Decision, Prediction
from crosstie.route.filters import available, fitting, pool_dropped, refused, replica_dropped
from crosstie.route.live import LiveFleet, LivePool, Replica
from crosstie.route.speed import estimate


class RoutingPolicy(ABC):
    name: ClassVar[Policy]

    def __init__(self, seed: int = 0):
        # Where equals are told apart by turn, the seed says whose turn is first.
        self._turn = seed

    def choose(
        self, fleet: LiveFleet, ask: Ask, now: float, *, exclude: Collection[str] = (), explain: bool = False
    ) -> Decision:
        """`exclude`: backends that have been tried for this request."""
        pools = fleet.by_model.get(ask.model)
        usable = fitting(pools, ask) if pools else None
        for pool in usable or ():
            if now >= pool.slowness_until:
                pool.refresh(now)
        # Before the decision, which may change whose turn it is.
        considered = self._considered(fleet, usable or [], ask, now, exclude) if explain else []
        decision = self._among(fleet, usable, ask, now, exclude) if usable else refused(fleet, ask)
        decision.considered = considered
        return decision

    @abstractmethod
    def _among(
        self, fleet: LiveFleet, pools: list[LivePool], ask: Ask, now: float, exclude: Collection[str]
    ) -> Decision: ...

    @abstractmethod
    def _score(self, replica: Replica, predicted: Prediction, ask: Ask) -> float:
        """What replicas are compared by, smaller being better."""

    def _best(
        self, fleet: LiveFleet, usable: list[LivePool], pool: LivePool, ask: Ask, now: float, exclude: Collection[str]
    ) -> "Rated | None":
        """The replica that counts for a pool when a decision is explained; None: none has room."""
        predicted = [(one, predict(fleet, one, ask, now)) for one in available(pool, now, exclude)]
        rated = [Rated(self._score(one, prediction, ask), one, prediction, None) for one, prediction in predicted]
        return min(rated, key=lambda one: one.score, default=None)

    def _considered(
        self, fleet: LiveFleet, usable: list[LivePool], ask: Ask, now: float, exclude: Collection[str]
    ) -> list[Considered]:
        """Every pool of the fleet by its best replica, or by what dropped it."""
        found = []
        planned = fleet.planned.get(ask.class_name or "", frozenset())
        for pool in fleet.pools:
            if pool.pool.loading is not None and pool.pool.model != ask.model:
                # Of a pool that hosts many models, only the one that is asked for is of interest.
                continue
            why = pool_dropped(pool, ask, pool in usable)
            best = self._best(fleet, usable, pool, ask, now, exclude) if why is None else None
            if why is None and best is None:
                why = "; ".join(sorted({str(replica_dropped(one, now, exclude)) for one in pool.replicas}))
            found.append(
                Considered(
                    pool=pool.name,
                    backend=best.replica.key if best else None,
                    prediction=best.predicted if best else None,
                    dropped=best.dropped if best else why,
                    score=best.score if best else None,
                    planned=pool.name in planned,
                    joules=_joules(pool, best.predicted, ask) if best and pool.watts else None,
                )
            )
        return found


def _joules(pool: LivePool, predicted: Prediction, ask: Ask) -> float:
    cached = predicted.cached_tokens
    return pool.joules(max(ask.input_tokens - cached, 1.0), cached, ask.output_tokens)


class Rated(NamedTuple):
    score: float
    replica: Replica
    predicted: Prediction
    # In words, the target that it misses, where the policy minds.
    dropped: str | None


def cached_tokens(fleet: LiveFleet, replica: Replica, ask: Ask) -> float:
    """Of the prompt, what the replica is believed to hold; its last token is computed in any case."""
    blocks = replica.prefixes.match(ask.prefix)
    if not blocks:
        return 0.0
    return min(blocks * fleet.lengths.block_tokens(ask.model), max(ask.input_tokens - 1.0, 0.0))


def predict(fleet: LiveFleet, replica: Replica, ask: Ask, now: float) -> Prediction:
    """What a replica would give the request at its present load."""
    pool, view = replica.pool, replica.view_at(now)
    cached = cached_tokens(fleet, replica, ask) if ask.prefix else 0.0
    new, output = max(ask.input_tokens - cached, 1.0), ask.output_tokens
    raw_ttft_s, raw_tpot_s = estimate(view, pool.speed, new, cached, ask.input_tokens + 0.5 * output, output)
    return Prediction(
        ttft_s=raw_ttft_s * view.ttft_factor + view.late_s,
        tpot_s=raw_tpot_s * view.tpot_factor,
        predicted_usd=pool.request_usd(new, cached, output),
        cached_tokens=cached,
        raw_ttft_s=raw_ttft_s,
        raw_tpot_s=raw_tpot_s,
    )


def in_words(prediction: Prediction, ask: Ask) -> str:
    """Price and latencies beside their targets; milliseconds because people read them."""
    ttft = f" of {_whole(ask.ttft_s * 1e3)}" if ask.ttft_s is not None else ""
    tpot = f" of {_whole(ask.tpot_s * 1e3)}" if ask.tpot_s is not None else ""
    held = f", {_whole(prediction.cached_tokens)} tokens held" if prediction.cached_tokens else ""
    usd = _whole(prediction.predicted_usd * 1e6)
    return (
        f"${usd} a million such requests, TTFT {_whole(prediction.ttft_s * 1e3)}{ttft} ms, "
        f"TPOT {_whole(prediction.tpot_s * 1e3)}{tpot} ms{held}"
    )


def _whole(value: float) -> int:
    """Every answer says why it came from where it did: whole numbers are written ten times as fast."""
    return int(value + 0.5)
