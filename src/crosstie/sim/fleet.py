"""A whole fleet in virtual time: requests through a routing policy to engines, the same policy that the gateway runs.

Every replica is an engine of `sim.engine`. The router sees of them what a gateway sees: its own counts, tokens as they
come, and now and then what each engine reports of itself. Answers' lengths are known to the engines alone.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import BLOCK_TOKENS
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Policy
from crosstie.perf.tabulated import StepTimes
from crosstie.route.admission import WaitingRoom
from crosstie.route.ask import Ask
from crosstie.route.build import deployment_of, live_fleet, typical
from crosstie.route.decision import Decision
from crosstie.route.live import Flight, LiveFleet
from crosstie.route.policies import make_policy
from crosstie.route.router import Router
from crosstie.sim.engine import Engine

# How often a gateway reads the engines' own metrics.
_REPORT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True, order=True)
class SimulatedRequest:
    """A request as it will turn out; `prefix` and the rest as in `route.ask`."""

    arrival_s: float
    model: str
    input_tokens: int
    output_tokens: int
    class_name: str | None = None
    prefix: tuple[int, ...] = ()
    session: str | None = None
    priority: int = 1
    # Tokens of the prompt that are in the cache wherever it goes, where no prefix says so.
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SimulatedAnswer:
    """How a request was served; times from its arrival at the gateway. No pool: it was turned away."""

    request: SimulatedRequest
    pool: str | None
    backend: str | None
    ttft_s: float
    tpot_s: float
    finished_s: float
    # Its part of the price of the replica, by the tokens that it turned out to have.
    usd: float


@dataclass(frozen=True, slots=True)
class _Sent:
    request: SimulatedRequest
    flight: Flight


class FleetSimulator:
    """`prefixes`: engines keep what they computed, and requests find it by the blocks of their `prefix`."""

    def __init__(
        self, catalog: Catalog, fleet: Fleet, policy: Policy | None = None, seed: int = 0, *, prefixes: bool = True
    ):
        self.live: LiveFleet = live_fleet(catalog, fleet, 0.0)
        self.router = Router(self.live, make_policy(policy or fleet.policy, seed))
        self.serving = fleet.serving
        self.room = WaitingRoom(fleet.serving.max_queued)
        self.now = 0.0
        self.answered: list[SimulatedAnswer] = []
        self.engines: dict[str, Engine] = {}
        self._sent: dict[int, _Sent] = {}
        self._numbers = 0
        self._next_report = _REPORT_EVERY_S
        # Steps' ends, to know which engine is next.
        self._upcoming: list[tuple[float, str]] = []
        # By engine: when its step under way ends.
        self.planned: dict[str, float] = {}
        for pool in self.live.pools:
            deployment = deployment_of(catalog, pool.pool)
            if deployment is None:
                raise BadInput(f"pool {pool.name} has no accelerator, so there is nothing to simulate")
            inputs, outputs = typical(fleet, pool.pool)
            context = inputs + 0.5 * outputs
            times = StepTimes(deployment, context)
            for replica in pool.replicas:
                if replica.key in self.engines:
                    raise BadInput(f"backend {replica.key} is there twice")
                block_tokens = BLOCK_TOKENS if prefixes else None
                self.engines[replica.key] = Engine(deployment, context, times=times, block_tokens=block_tokens)

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the engines' caches had, of those that they were asked for."""
        caches = [cache for engine in self.engines.values() for cache in engine.caches]
        return sum(cache.hits for cache in caches) / max(sum(cache.queries for cache in caches), 1)

    def run(self, requests: Iterable[SimulatedRequest]) -> list[SimulatedAnswer]:
        """Open traffic: every request arrives by the clock. Answers in the order in which they ended."""
        for request in sorted(requests):
            self.advance(request.arrival_s)
            self.send(request)
        self.advance(inf)
        return self.answered

    def send(self, request: SimulatedRequest) -> None:
        """A request arrives now."""
        ask = self._ask(request)
        decision = self.router.decide(ask, self.now)
        if decision.outcome == "send":
            self._start(request, ask, decision)
        elif decision.outcome == "wait":
            _, shed = self.room.add(ask, self.now, self.now + self.serving.queue_s, request)
            if shed is not None:
                self._turn_away(shed.item)
        else:
            self._turn_away(request)

    def _ask(self, request: SimulatedRequest) -> Ask:
        served = self.live.classes.get(request.class_name or "")
        return Ask(
            model=request.model,
            class_name=request.class_name,
            input_tokens=float(request.input_tokens),
            output_tokens=self.live.lengths.expected_output(request.class_name, request.model, None),
            ttft_s=served.ttft.seconds if served and served.ttft else None,
            tpot_s=served.tpot.seconds if served and served.tpot else None,
            priority=request.priority,
            patience_s=self.serving.queue_s,
            prefix=request.prefix,
            session=request.session,
        )

    def _turn_away(self, request: SimulatedRequest) -> None:
        self.answered.append(SimulatedAnswer(request, None, None, inf, inf, inf, 0.0))

    def _start(self, request: SimulatedRequest, ask: Ask, decision: Decision) -> None:
        replica, prediction = decision.replica, decision.prediction
        assert replica is not None
        assert prediction is not None
        engine = self.engines[replica.key]
        flight = replica.start(ask, prediction, self.now)
        self._numbers += 1
        self._sent[self._numbers] = _Sent(request, flight)
        # What the engine holds is its own affair: the router only believes that it does.
        engine.add(
            self._numbers, request.input_tokens, request.output_tokens, self.now, request.cached_tokens, request.prefix
        )
        self._plan(replica.key)

    def _plan(self, key: str) -> None:
        """Puts an engine's next step into the order of events."""
        moment = self.engines[key].next_event_s()
        if moment is None:
            self.planned.pop(key, None)
        elif self.planned.get(key) != moment:
            self.planned[key] = moment
            heappush(self._upcoming, (moment, key))

    def advance(self, until: float) -> None:
        """All that happens up to then."""
        upcoming = self._upcoming
        while upcoming:
            moment, key = upcoming[0]
            if self.planned.get(key) != moment:
                heappop(upcoming)
                continue
            if moment > until:
                break
            self._report(moment)
            self._expire(moment)
            heappop(upcoming)
            self.now = max(self.now, moment)
            ended = self._tokens(key, moment)
            self._plan(key)
            if ended:
                self._let_in()
        if until < inf:
            self._report(until)
            self._expire(until)
            self.now = max(self.now, until)
            if len(self.room):
                self._let_in()
        else:
            self._expire(inf)

    def _tokens(self, key: str, moment: float) -> bool:
        """An engine's tokens up to then; whether there may be room that there was not before."""
        found = self.engines[key].advance(moment)
        for number, tokens, finished, at in found:
            sent = self._sent[number]
            if tokens == 1:
                sent.flight.first_token(at)
            if finished:
                self._end(number, sent, at)
        return bool(found)

    def _end(self, number: int, sent: _Sent, at: float) -> None:
        del self._sent[number]
        request, flight = sent.request, sent.flight
        served = flight.end(at, output_tokens=request.output_tokens, input_tokens=request.input_tokens, completed=True)
        assert served is not None
        assert flight.first_at is not None
        self.answered.append(
            SimulatedAnswer(
                request,
                flight.replica.pool.name,
                flight.replica.key,
                flight.first_at - request.arrival_s,
                served.tpot_s or 0.0,
                at - request.arrival_s,
                served.charged_usd,
            )
        )

    def _report(self, now: float) -> None:
        """Engines' own metrics, as often as a gateway reads them."""
        while self._next_report <= now:
            at, self._next_report = self._next_report, self._next_report + _REPORT_EVERY_S
            if now - at > 10.0:
                continue
            for replica in self.live.replicas():
                engine = self.engines[replica.key]
                replica.report(engine.running, engine.waiting, engine.kv_used_fraction, at)

    def _expire(self, now: float) -> None:
        for ticket in self.room.expired(now):
            self.now = max(self.now, ticket.deadline)
            ask = ticket.ask
            ask.waited_s = ask.patience_s
            # Only what matters most is then sent at others' expense.
            decision = self.router.decide(ask, self.now) if ask.priority > 1 else None
            if decision is not None and decision.outcome == "send":
                self._start(ticket.item, ask, decision)
            else:
                self._turn_away(ticket.item)

    def _let_in(self) -> None:
        while len(self.room):
            taken = self.room.take(self.router.decide, self.now)
            if taken is None:
                return
            ticket, decision = taken
            if decision.outcome == "send":
                self._start(ticket.item, ticket.ask, decision)
            else:
                self._turn_away(ticket.item)


@dataclass(frozen=True, slots=True)
class Score:
    """What a policy gave a class of requests, or all of them."""

    requests: int
    # Share of them whose targets were both kept, and of those that were turned away.
    within: float
    refused: float
    ttft_p95_s: float
    tpot_p90_s: float
    # US dollars that the served ones are charged, per thousand.
    usd_per_thousand: float


def score(live: LiveFleet, answered: Iterable[SimulatedAnswer]) -> Score:
    every = list(answered)
    if not every:
        raise BadInput("no answer to score")
    served = [one for one in every if one.pool is not None]
    ttfts, tpots = sorted(one.ttft_s for one in every), sorted(one.tpot_s for one in every)
    return Score(
        requests=len(every),
        within=sum(_kept(live, one) for one in every) / len(every),
        refused=1.0 - len(served) / len(every),
        ttft_p95_s=ttfts[int(0.95 * (len(ttfts) - 1))],
        tpot_p90_s=tpots[int(0.9 * (len(tpots) - 1))],
        usd_per_thousand=1e3 * sum(one.usd for one in served) / max(len(served), 1),
    )


def _kept(live: LiveFleet, one: SimulatedAnswer) -> bool:
    if one.pool is None:
        return False
    served = live.classes.get(one.request.class_name or "")
    ttft, tpot = (served.ttft, served.tpot) if served else (None, None)
    return (ttft is None or one.ttft_s <= ttft.seconds) and (tpot is None or one.tpot_s <= tpot.seconds)
