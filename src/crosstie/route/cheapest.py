"""The policies that predict: the cheapest pool that keeps the target, and the fastest one.

Of each pool its best replica counts: the one where a request costs everybody the least time among those that keep the
target. That time is its own until its last token, what its prompt takes from each of those who are there, and what it
pushes out of the cache and others must compute again. So a session goes on where its cache is unless waiting there
costs more than computing it again elsewhere, and no weight says so.

Who begins a session waits where caches are full with sessions that come back and there is no time to compute them
again: past that point each one more makes all of them slower, since what one pushes out another needs.
"""

from math import inf
from typing import ClassVar, Final

from crosstie.core.fleet import Policy
from crosstie.route.ask import Ask
from crosstie.route.corrections import Scatter
from crosstie.route.decision import Considered, Decision, in_words
from crosstie.route.filters import available, without_room
from crosstie.route.live import LivePool, Promise, Replica
from crosstie.route.policy import Query, RoutingPolicy
from crosstie.route.session import LIKELY
from crosstie.route.shortlist import looked_at, most_held
from crosstie.route.speed import Prediction, first_token_s

# Where nothing is asked for: what the fastest pool would take if it were idle, so many times over.
_PATIENCE: Final = 2.0
# A header's target is taken for one of nine requests in ten.
_USUAL_DEVIATIONS: Final = 1.2816
# Prices this close are the same, and the sooner one is taken.
_SAME_PRICE: Final = 1.02
# No further session is let in to push caches out where computing those of all in flight again would take longer than so
# many turns on an idle replica. Where fewer are in flight there is time for it. Simulated at 0.5 to 4 on four kinds of
# agents: above the knee it hardly matters, below it less keeps sessions out that would fit.
_AGAIN: Final = 2.0
# Whoever misses comes after all who do not, however soon they finish.
_AFTER: Final = 1e12


class LatencyLimits:
    """What a request must keep; `finish_s` where it names no target."""

    def __init__(self, ttft_s: float, tpot_s: float, finish_s: float, ttft_deviations: float, tpot_deviations: float):
        self.ttft_s = ttft_s
        self.tpot_s = tpot_s
        self.finish_s = finish_s
        self.ttft_deviations = ttft_deviations
        self.tpot_deviations = tpot_deviations

    def without_ttft(self) -> "LatencyLimits":
        return LatencyLimits(inf, self.tpot_s, self.finish_s, self.ttft_deviations, self.tpot_deviations)


class Best:
    """The best replica of a pool; `miss` is the larger of the two latencies over their limits, up to 1 if both hold.
    `cost_s`: what it takes from everybody, its own time among it."""

    def __init__(self, replica: Replica, prediction: Prediction, finish_s: float, miss: float, cost_s: float):
        self.replica, self.prediction, self.finish_s, self.miss = replica, prediction, finish_s, miss
        self.cost_s = cost_s

    def sent(self, why: str, ask: Ask, *, meets: bool = False) -> Decision:
        """The decision to send it there."""
        return Decision("send", why, replica=self.replica, prediction=self.prediction, meets=meets, told=ask)


def limits_of(query: Query) -> LatencyLimits:
    fleet, ask = query.fleet, query.ask
    if ask.ttft_s is not None or ask.tpot_s is not None:
        deviations = fleet.deviations.get(ask.class_name)
        ttft_z, tpot_z = (_USUAL_DEVIATIONS, _USUAL_DEVIATIONS) if deviations is None else deviations
        ttft_s = max(ask.ttft_s - ask.waited_s, 1e-3) if ask.ttft_s is not None else inf
        return LatencyLimits(ttft_s, ask.tpot_s or inf, inf, ttft_z, tpot_z)
    if fleet.planned.get(ask.class_name or ""):
        # The plan has this class with no target, so its price alone counts.
        return LatencyLimits(inf, inf, inf, 0.0, 0.0)
    idle_s = min(pool.speed.idle_s(ask.input_tokens, ask.output_tokens) for pool in query.pools)
    return LatencyLimits(inf, inf, _PATIENCE * idle_s, 0.0, 0.0)


def _lost(query: Query, limits: LatencyLimits) -> bool:
    """Whether the first token would be late even on an idle replica."""
    return all(pool.idle_ttft_s(query.ask.input_tokens, query.now) >= limits.ttft_s for pool in query.pools)


def _with_margin(limit_s: float, deviations: float, promised: Promise, scatter: Scatter, bounded: bool) -> float:
    """The tighter of a request's own limit and what the pool promises to others, each with the margin of whom it is
    for. Where they are the same, as of a pool that is there for one class, the margin is reckoned once."""
    asked_s = limit_s
    if limit_s < inf:
        limit_s /= scatter.margin(deviations, bounded)
    if promised.seconds < inf and not (promised.seconds == asked_s and promised.deviations == deviations):
        promised_s = promised.seconds / scatter.margin(promised.deviations, bounded)
        if promised_s < limit_s:
            return promised_s
    return limit_s


def best_of(query: Query, pool: LivePool, limits: LatencyLimits, turn: int, usd: float | None = None) -> Best | None:
    """The replica that keeps the limits and finishes first; without such, the one that misses least.

    The limits are the request's own, those that the plan promises of the pool, and those of whoever is on the replica
    already: nobody may be sent where it breaks what was promised to others. A margin on TPOT is kept by not filling
    replicas, and is at most half of the way from an empty one's to the target (in logarithms): where an empty one
    hardly has it there is nothing to wait for, and one request at a time would be served.

    `usd`: its price, if known. Of a large pool some replicas are looked at, see `route.shortlist`. This loop is most of
    a decision's cost, so it keeps to local names.
    """
    ask, now, exclude, panic = query.ask, query.now, query.exclude, query.panic
    speed, per_cached = pool.speed, pool.speed.per_cached
    prefix = bool(ask.prefix) or ask.tokens is not None or ask.under_way is not None
    input_tokens, output_tokens = ask.input_tokens, ask.output_tokens
    context, later = input_tokens + 0.5 * output_tokens, max(output_tokens - 1.0, 0.0)
    in_doubt = ask.in_doubt
    ttft_limit = _with_margin(limits.ttft_s, limits.ttft_deviations, pool.promised_ttft, pool.ttft_scatter, in_doubt)
    tpot_limit = _with_margin(limits.tpot_s, limits.tpot_deviations, pool.promised_tpot, pool.tpot_scatter, in_doubt)
    finish_limit = limits.finish_s
    under_way, kind = ask.under_way, query.fleet.sessions.kind_of(ask)
    home = under_way.home if under_way is not None else None
    mean_tokens = kind.mean_tokens()
    # A new session may be kept waiting as long as it is patient.
    is_held = under_way is None and kind.returns() > LIKELY and (ask.waited_s < ask.patience_s or ask.priority < 1)
    best: Replica | None = None
    least, even = inf, turn & 1
    cached = 0.0
    if prefix:
        block_tokens = query.fleet.lengths.tokens_a_block(ask)
    for replica in looked_at(pool, ask, now, exclude, panic, turn) if query.only is None else [query.only]:
        if not replica.up and not (panic and replica.suspected):
            continue
        if replica.draining or replica.busy_until > now or (exclude and replica.key in exclude):
            continue
        view = replica.view
        if replica.in_flight >= view.limit:
            continue
        # What is left out of it only adds to the time: most replicas of a large pool are dropped by this alone.
        raw_tpot_s = (view.step_s + context * per_cached) * view.stretch
        tpot_s = raw_tpot_s * view.tpot_factor
        before_s = view.before_s * view.ttft_factor + view.late_s
        if before_s + tpot_s * later > least:
            continue
        ttft_most = ttft_limit if ttft_limit < view.strictest_ttft_s else view.strictest_ttft_s
        tpot_miss = tpot_s / (tpot_limit if tpot_limit < view.strictest_tpot_s else view.strictest_tpot_s)
        if tpot_miss > 1.0:
            empty_s = (speed.empty_step_s() + context * per_cached) * view.tpot_factor
            bare_s = min(limits.tpot_s, pool.promised_tpot.seconds, view.strictest_tpot_s)
            if tpot_s * tpot_s <= empty_s * bare_s:
                tpot_miss = 1.0
            # Those that miss a limit by more than another does are dropped, too.
            elif under_way is None and _AFTER * tpot_miss > least:
                continue
        if under_way is None and before_s > ttft_most and _AFTER * (before_s / ttft_most) > least:
            continue
        if prefix:
            cached = replica.cached_tokens(ask, block_tokens)
        new = input_tokens - cached
        pushed_out = 0.0
        if replica.warm_sessions > 0.0:
            # Where it is at home, its cache is counted already.
            needs = new if replica is home or mean_tokens < new else mean_tokens
            taken = replica.warm_sessions * mean_tokens
            if replica.warm_tokens > taken:
                taken = replica.warm_tokens
            pushed_out = min(max(taken + needs - speed.cache_tokens, 0.0), needs)
        raw_ttft_s = first_token_s(view, speed, new, cached, output_tokens)
        ttft_s = raw_ttft_s * view.ttft_factor + view.late_s
        finish_s = ttft_s + later * tpot_s
        others, token_s = replica.in_flight + replica.elsewhere.in_flight, view.slope_high * view.ttft_factor
        if is_held and pushed_out > 0.0:
            again_s, idle_s = others * mean_tokens * token_s, speed.idle_s(input_tokens, output_tokens)
            if again_s > _AGAIN * idle_s:
                continue
        cost_s = rank = finish_s + (new * others + pushed_out * (1.0 + others)) * token_s
        miss = ttft_s / ttft_most
        if tpot_miss > miss:
            miss = tpot_miss
        if finish_s > finish_limit * miss:
            miss = finish_s / finish_limit
        if miss > 1.0 and under_way is None:
            rank = _AFTER * miss
        # Equals are told apart by turn.
        if rank < least or (even and rank == least):
            least, best = rank, replica
            chosen = finish_s, miss, ttft_s, tpot_s, cached, raw_ttft_s, raw_tpot_s, cost_s
    if best is None:
        return None
    finish_s, miss, ttft_s, tpot_s, cached, raw_ttft_s, raw_tpot_s, cost_s = chosen
    if usd is None or cached:
        usd = pool.weighed * pool.request_usd(input_tokens - cached, cached, output_tokens, ask.tpot_s)
    predicted = Prediction(
        ttft_s=ttft_s, tpot_s=tpot_s, predicted_usd=usd, cached_tokens=cached, raw_ttft_s=raw_ttft_s,
        raw_tpot_s=raw_tpot_s, ttft_limit_s=ttft_limit, tpot_limit_s=tpot_limit,
    )  # fmt: skip
    return Best(best, predicted, finish_s, miss, cost_s)


def _finish_s(best: Best) -> float:
    return best.finish_s


class _Predicting(RoutingPolicy):
    def _found(self, query: Query, limits: LatencyLimits) -> list[Best]:
        """The best replica of every pool that has room."""
        bests = []
        for pool in query.pools:
            best = best_of(query, pool, limits, self._turn)
            if best is not None:
                bests.append(best)
        return bests

    def best(self, query: Query, pool: LivePool) -> Considered | None:
        limits = limits_of(query)
        best = best_of(query, pool, limits, self._turn + 1)
        if best is None:
            return None
        predicted, missed = best.prediction, self._missed(best, pool, limits)
        score = self.score(best.replica, predicted, query.ask)
        return Considered(pool.name, best.replica.key, predicted, missed, score)

    def _missed(self, best: Best, pool: LivePool, limits: LatencyLimits) -> str | None:
        return None


class CheapestMeetingTarget(_Predicting):
    """A request that misses everywhere may wait for room, as long as its patience lasts, because one that is sent
    regardless slows down those who would have kept their targets. Once its own target is lost, it goes wherever it
    breaks nobody else's; at the end of its patience, where it misses least."""

    name: ClassVar[Policy] = "cheapest-meeting-target"

    def pick(self, query: Query) -> Decision:
        self._turn += 1
        ask, pools, limits = query.ask, query.pools, limits_of(query)
        within, bests = self._until_dearer(query, limits)
        if within:
            return self._cheapest(within, query, meets=True)
        if not bests:
            if any(available(pool, query.now, query.exclude, query.panic) for pool in pools):
                return Decision("wait", "a new session would push those of sessions under way out of every cache")
            return without_room(pools, query.now, query.exclude)
        if ask.under_way is not None:
            return self._going_on(bests, ask)
        if ask.patience_s > 0.0 and limits.ttft_s < inf and _lost(query, limits):
            within = [best for best in self._found(query, limits.without_ttft()) if best.miss <= 1.0]
            if within:
                return self._cheapest(within, query, meets=False)
        return self._missing(bests, ask, limits)

    def may_take(self, query: Query) -> bool:
        best = best_of(query, query.pools[0], limits_of(query), self._turn, 0.0)
        return best is not None and best.miss <= 1.0

    def _until_dearer(self, query: Query, limits: LatencyLimits) -> tuple[list[Best], list[Best]]:
        """Those within the limits that can still be the cheapest, and all that were looked at.

        Pools are gone through from the cheapest on, and none is looked at that is dearer than one that will do, with
        all that it may hold of the prompt.
        """
        ask, pools = query.ask, query.pools
        if len(pools) == 1:
            bests = self._found(query, limits)
            return [one for one in bests if one.miss <= 1.0], bests
        new, output = ask.input_tokens, ask.output_tokens
        prefix = bool(ask.prefix) or ask.tokens is not None
        block_tokens = query.fleet.lengths.tokens_a_block(ask) if prefix else 0.0
        # By pool; and their places in the order of what they may cost at the least, of equals the first before.
        usds: list[float] = []
        least: list[float] = []
        order: list[int] = []
        for index, pool in enumerate(pools):
            usd = least_usd = pool.weighed * pool.request_usd(new, 0.0, output, ask.tpot_s)
            if prefix:
                cached = most_held(pool, ask, block_tokens)
                if cached > 0.0:
                    held = pool.request_usd(new - cached, cached, output, ask.tpot_s)
                    least_usd = min(usd, pool.weighed * held)
            usds.append(usd)
            least.append(least_usd)
            at = index
            while at > 0 and least[order[at - 1]] > least_usd:
                at -= 1
            order.insert(at, index)
        within, bests, most_usd = [], [], inf
        for index in order:
            if least[index] > most_usd:
                break
            best = best_of(query, pools[index], limits, self._turn, usds[index])
            if best is not None:
                bests.append(best)
                if best.miss <= 1.0:
                    within.append(best)
                    most_usd = min(most_usd, best.prediction.predicted_usd * _SAME_PRICE)
        return within, bests

    def _cheapest(self, within: list[Best], query: Query, meets: bool) -> Decision:
        """Of those that cost the same, pools that the plan sends such requests to go first."""
        ask, chosen = query.ask, within[0]
        if len(within) > 1:
            most_usd = min(best.prediction.predicted_usd for best in within) * _SAME_PRICE
            same = [best for best in within if best.prediction.predicted_usd <= most_usd]
            if len(same) > 1:
                guide = query.fleet.guide(ask)
                same = [best for best in same if best.replica.pool.name in guide] or same
            chosen = min(same, key=_finish_s)
        said = "within target" if meets else "without harm to others, its TTFT lost,"
        return chosen.sent(f"cheapest {said} of {len(query.pools)} pools", ask, meets=meets)

    def _going_on(self, bests: list[Best], ask: Ask) -> Decision:
        """A session that was let in is not kept waiting: it comes back in any case."""
        chosen = min(bests, key=lambda best: best.cost_s)
        return chosen.sent(f"least delay to all of {len(bests)}, none within target", ask)

    def _missed(self, best: Best, pool: LivePool, limits: LatencyLimits) -> str | None:
        if best.miss <= 1.0:
            return None
        view = best.replica.view
        kept = [
            ("TTFT", best.prediction.ttft_s, min(limits.ttft_s, pool.promised_ttft.seconds, view.strictest_ttft_s)),
            ("TPOT", best.prediction.tpot_s, min(limits.tpot_s, pool.promised_tpot.seconds, view.strictest_tpot_s)),
            ("finish", best.finish_s, limits.finish_s),
        ]
        name, seconds, limit = max(kept, key=lambda one: one[1] / one[2])
        margin = f", less a margin of {best.miss / (seconds / limit) - 1.0:.0%}" if best.miss > seconds / limit else ""
        return f"target: {name} {seconds * 1e3:.0f} ms of {limit * 1e3:.0f} ms{margin}"

    def _missing(self, bests: list[Best], ask: Ask, limits: LatencyLimits) -> Decision:
        chosen = min(bests, key=lambda best: best.miss)
        prediction, count = chosen.prediction, len(bests)
        # On an idle replica there is nothing to wait for, and who names no target is not to wait for one.
        patient = (ask.in_doubt or ask.waited_s < ask.patience_s) and limits.finish_s == inf
        replica = chosen.replica
        if (replica.in_flight or replica.elsewhere.in_flight) and (ask.priority < 1 or patient):
            return Decision("wait", lambda: f"none of {count} within target: {in_words(prediction, ask)}")
        said = f"misses least of {count}, none within target" if limits.finish_s == inf else f"soonest of {count}"
        return chosen.sent(said, ask)

    def score(self, replica: Replica, predicted: Prediction, ask: Ask) -> float:
        """US dollars."""
        return predicted.predicted_usd


class Fastest(_Predicting):
    name: ClassVar[Policy] = "fastest"

    def pick(self, query: Query) -> Decision:
        self._turn += 1
        bests = self._found(query, limits_of(query))
        if not bests:
            return without_room(query.pools, query.now, query.exclude)
        chosen = min(bests, key=_finish_s)
        return chosen.sent(f"soonest to finish of {len(bests)}", query.ask, meets=chosen.miss <= 1.0)

    def score(self, replica: Replica, predicted: Prediction, ask: Ask) -> float:
        """Seconds until its last token."""
        return predicted.finish_s(ask.output_tokens)
