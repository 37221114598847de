"""Pools that are paid by the token: the fleet's own go first, and a provider has what is left over.

The two are compared by what a request adds to the bill. GPUs that are paid whether they work or not add electricity at
most, where that is not in their rent; those that are paid by use add the request's part of their price. A provider adds
its price for the tokens. So it has a request where that is less, or where the fleet is full: nobody would keep the
target, nobody is up, or the request has waited in vain. Low priority is never bought because of a full fleet.
"""

from collections.abc import Collection
from math import inf
from typing import Final

from crosstie.core.fleet import Pool
from crosstie.route.ask import Ask
from crosstie.route.cheapest import Best, LatencyLimits, best_of, limits_of
from crosstie.route.decision import Considered, Decision, a_million
from crosstie.route.lengths import Lengths
from crosstie.route.live import LiveFleet, LivePool
from crosstie.route.policy import Around, Query
from crosstie.route.speed import Speed
from crosstie.route.spending import Spending

_HELD_BACK: Final = "overflow: bought only where the fleet is full or would cost more"
_NO_LIMITS: Final = LatencyLimits(inf, inf, inf, 0.0, 0.0)


class PricedPool(LivePool):
    """A provider's, who is paid by the token."""

    def adopt(
        self, pool: Pool, speed: Speed, lengths: Lengths, typical_input: float = 1000.0, typical_output: float = 250.0,
    ) -> None:  # fmt: skip
        super().adopt(pool, speed, lengths, typical_input, typical_output)
        price = pool.token_price
        if price is None:
            raise ValueError(f"pool {pool.name} is not paid by the token")
        cached = price.usd_per_million_cached_input
        self.input_usd = price.usd_per_million_input / 1e6
        self.cached_usd = self.input_usd if cached is None else cached / 1e6
        self.output_usd = price.usd_per_million_output / 1e6
        spending = self.spending
        if spending is None:
            spending = self.spending = Spending()
        spending.limit(price.max_usd_per_hour, price.max_usd_per_day)

    def request_usd(
        self, new_tokens: float, cached_tokens: float, output_tokens: float, tpot_s: float | None = None
    ) -> float:
        return new_tokens * self.input_usd + cached_tokens * self.cached_usd + output_tokens * self.output_usd

    def refusal(self, ask: Ask, now: float) -> str | None:
        """In words, the spending limit that a request may break; None: none."""
        return None if self.spending is None else self.spending.refusal(self.most_usd(ask), now)


class Overflow(Around):
    def choose(
        self, fleet: LiveFleet, ask: Ask, now: float, *, exclude: Collection[str] = (), explain: bool = False,
        panic: bool = False,
    ) -> Decision:  # fmt: skip
        decision = super().choose(fleet, ask, now, exclude=exclude, explain=explain, panic=panic)
        if decision.replica is not None and decision.considered:
            name = decision.replica.pool.name
            decision.considered = [
                one._replace(dropped=None) if one.pool == name else one for one in decision.considered
            ]
        return decision

    def pick(self, query: Query) -> Decision:
        own, sold = _apart(query.pools)
        if not sold:
            return self.own.pick(query)
        if not own:
            bought = self._bought(query, sold, "nobody else has it", must_meet=False)
            return bought or self._unaffordable(query, sold)
        decision, ask = self.own.pick(_among(query, own)), query.ask
        targets = ask.ttft_s is not None or ask.tpot_s is not None
        if decision.outcome == "send" and (decision.meets or not targets):
            return self._cheaper(query, sold, decision) or decision
        if ask.priority < 1:
            return decision
        # A request that has been elsewhere, or has waited long enough, is not sent back to wait.
        at_the_end = decision.outcome == "refuse" or bool(query.exclude) or ask.waited_s >= ask.patience_s
        if at_the_end and decision.outcome != "send":
            return self._bought(query, sold, "the fleet is full", must_meet=False) or decision
        if targets:
            return self._bought(query, sold, "none of the fleet within target", must_meet=True) or decision
        return decision

    def _bought(
        self, query: Query, sold: list[PricedPool], why: str, *, must_meet: bool, below_usd: float = inf
    ) -> Decision | None:
        """From the cheapest provider that may be sent it; None: there is none."""
        ask = query.ask
        targets = ask.ttft_s is not None or ask.tpot_s is not None
        limits = limits_of(query) if targets else _NO_LIMITS
        chosen: Best | None = None
        for pool in sold:
            if pool.refusal(ask, query.now) is not None:
                continue
            best = best_of(query, pool, limits, self._turn)
            if best is None or (must_meet and best.miss > 1.0) or best.prediction.predicted_usd >= below_usd:
                continue
            if chosen is None or best.prediction.predicted_usd < chosen.prediction.predicted_usd:
                chosen = best
        if chosen is None:
            return None
        return chosen.sent(f"overflow, {why}", ask, meets=chosen.miss <= 1.0)

    def _cheaper(self, query: Query, sold: list[PricedPool], own: Decision) -> Decision | None:
        """Where a provider asks for less than the request would add to the bill of the fleet."""
        if own.replica is None or own.prediction is None:
            return None
        ask, cached, pool = query.ask, own.prediction.cached_tokens, own.replica.pool
        added_usd = pool.added_usd(ask.input_tokens - cached, cached, ask.output_tokens, ask.tpot_s)
        if added_usd <= 0.0:
            return None
        why = f"cheaper than what {pool.name} would add, {a_million(added_usd * 1e6)} a million"
        return self._bought(query, sold, why, must_meet=True, below_usd=added_usd)

    def _unaffordable(self, query: Query, sold: list[PricedPool]) -> Decision:
        """Nobody but providers has it, and none of them may be sent it now."""
        for pool in sold:
            why = pool.refusal(query.ask, query.now)
            if why is not None:
                return Decision("refuse", f"pool {pool.name}: {why}", refusal="unavailable")
        return self.own.pick(query)

    def best(self, query: Query, pool: LivePool) -> Considered | None:
        if not isinstance(pool, PricedPool):
            return self.own.best(_among(query, _apart(query.pools)[0]), pool)
        best = self.own.best(_among(query, [pool]), pool)
        if best is None:
            return None
        return best._replace(dropped=pool.refusal(query.ask, query.now) or best.dropped or _HELD_BACK)


def _apart(pools: list[LivePool]) -> tuple[list[LivePool], list[PricedPool]]:
    """The fleet's own, and those that are paid by the token."""
    own: list[LivePool] = []
    sold: list[PricedPool] = []
    for pool in pools:
        if isinstance(pool, PricedPool):
            sold.append(pool)
        else:
            own.append(pool)
    return own, sold


def _among(query: Query, pools: "list[LivePool]") -> Query:
    return Query(query.fleet, pools, query.ask, query.now, query.exclude, query.panic)
