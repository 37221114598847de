"""A whole fleet in virtual time: requests through a routing policy to engines, the same policy that the gateway runs.

Every replica is an engine of `sim.engine`. The router sees of them what a gateway sees: its own counts, and first and
last tokens as they come; what engines report beside that would say the same, because all their requests come from here.
Answers' lengths are known to the engines alone.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from math import inf

from crosstie.catalog.library import Catalog
from crosstie.catalog.loading import shipped_loading
from crosstie.catalog.traces import BLOCK_TOKENS
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet, Policy
from crosstie.route.admission import WaitingRoom
from crosstie.route.ask import Ask
from crosstie.route.build import Tables, deployment_of, live_fleet, service_of, typical
from crosstie.route.decision import Decision
from crosstie.route.live import Flight, LiveFleet, Replica
from crosstie.route.policies import make_policy
from crosstie.route.policy import RoutingPolicy
from crosstie.route.router import Router
from crosstie.sim.disaggregated import DisaggregatedEngine
from crosstie.sim.engine import Engine
from crosstie.sim.prefix_cache import PrefixCache

# Where nothing has ended, who waits is decided for again after so long (choice: a step or two): prompts ahead of it
# move on meanwhile.
_AGAIN_S = 0.05
_STAYS = Decision("wait", "as it was")


@dataclass(frozen=True, slots=True, order=True)
class SimulatedRequest:
    """A request as it will turn out; `prefix` has the blocks of its prompt, as a trace numbers them, and after those of
    its answer where they are known; the rest as in `route.ask`."""

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
    # The sender, which the answer says again and no router is told.
    sender: str | None = None


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
    # Of its prompt, what the engine had in its cache.
    cached_tokens: int = 0


class _Sent:
    """A request on a replica."""

    __slots__ = ("first_at", "flight", "made", "request")

    def __init__(self, request: SimulatedRequest, flight: Flight, made: int, first_at: float):
        self.request, self.flight = request, flight
        # Of an answer that another replica has broken off: the tokens that the client has, and when the first came.
        self.made, self.first_at = made, first_at


class FleetSimulator:
    """`tell` is given every answer as it ends; without one they are kept in `answered`. `prefixes`: engines keep what
    they computed, and requests find it by the blocks of their `prefix`. `knows_lengths`: the router is told how long
    each answer will be, as no gateway is. `tables`: of simulations before this one."""

    def __init__(
        self,
        catalog: Catalog,
        fleet: Fleet,
        policy: Policy | RoutingPolicy | None = None,
        seed: int = 0,
        *,
        prefixes: bool = True,
        knows_lengths: bool = False,
        tell: Callable[[SimulatedAnswer], None] | None = None,
        tables: Tables | None = None,
    ):
        tables = tables or Tables()
        self.live: LiveFleet = live_fleet(catalog, fleet, 0.0, tables=tables)
        chosen = policy if isinstance(policy, RoutingPolicy) else make_policy(policy or fleet.policy, seed)
        self.router = Router(self.live, chosen)
        self.serving = fleet.serving
        self.knows_lengths = knows_lengths
        self.room = WaitingRoom(fleet.serving.max_queued)
        self.now = 0.0
        self.answered: list[SimulatedAnswer] = []
        self.tell: Callable[[SimulatedAnswer], None] = tell or self.answered.append
        self.engines: dict[str, Engine | DisaggregatedEngine] = {}
        # By engine: when it is next to be looked at, and the same in order; entries that have been overtaken stay.
        self.planned: dict[str, float] = {}
        self._upcoming: list[tuple[float, str]] = []
        self._sent: dict[int, _Sent] = {}
        self._numbers = 0
        # When all who wait are next decided for over all replicas.
        self._again_at = -inf
        for pool in self.live.pools:
            deployment = deployment_of(catalog, pool.pool)
            if deployment is None:
                raise BadInput(f"pool {pool.name} has no accelerator, so there is nothing to simulate")
            inputs, outputs = typical(fleet, pool.pool)
            service = service_of(catalog, pool.pool)
            context = inputs + 0.5 * outputs
            times = tables.times(pool.pool, deployment, context)
            tiers = shipped_loading().cache_tiers(pool.pool, deployment.accelerator.id)
            shared: dict[str, PrefixCache] = {}
            for replica in pool.replicas:
                if replica.key in self.engines:
                    raise BadInput(f"backend {replica.key} is there twice")
                prefix_tokens = BLOCK_TOKENS if prefixes else None
                self.engines[replica.key] = (
                    DisaggregatedEngine(service, inputs, outputs, prefix_tokens=prefix_tokens)
                    if service
                    else Engine(
                        deployment, context, times=times, prefix_tokens=prefix_tokens, tiers=tiers, shared=shared
                    )
                )

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens that the engines' caches had, of those that they were asked for."""
        return sum(cache.hits for cache in self._caches) / self._queries

    @property
    def loaded_shares(self) -> dict[str, float]:
        """Of those, what memory beside the GPU's had, by its name."""
        found: dict[str, float] = {}
        for engine in self.engines.values():
            for name, tokens in engine.loaded_tokens.items():
                found[name] = found.get(name, 0.0) + tokens / self._queries
        return found

    @property
    def _caches(self) -> list[PrefixCache]:
        return [cache for engine in self.engines.values() for cache in engine.caches]

    @property
    def _queries(self) -> int:
        return max(sum(cache.queries for cache in self._caches), 1)

    @property
    def inside(self) -> int:
        """Requests that wait or are being answered."""
        return len(self._sent) + len(self.room)

    @property
    def without_first_token(self) -> list[SimulatedRequest]:
        """Those inside that wait for it."""
        unsent = [ticket.item for ticket in self.room.tickets()]
        return [request for request, _, first_at in unsent if first_at == inf] + [
            sent.request for sent in self._sent.values() if sent.first_at == inf and sent.flight.first_at is None
        ]

    @property
    def next_s(self) -> float:
        """When an engine has something to tell next, as far as is known now."""
        upcoming, planned = self._upcoming, self.planned
        while upcoming and planned.get(upcoming[0][1]) != upcoming[0][0]:
            heappop(upcoming)
        return upcoming[0][0] if upcoming else inf

    def run(self, requests: Iterable[SimulatedRequest]) -> list[SimulatedAnswer]:
        """Open traffic: every request arrives by the clock. Answers in the order in which they ended."""
        for request in sorted(requests):
            self.advance(request.arrival_s)
            self.send(request)
        self.advance(inf)
        return self.answered

    def send(self, request: SimulatedRequest) -> None:
        """A request arrives now."""
        self._place(request, self._ask(request), 0, inf)

    def _place(self, request: SimulatedRequest, ask: Ask, made: int, first_at: float) -> None:
        decision = self.router.decide(ask, self.now)
        if decision.outcome == "send":
            self._start(request, ask, decision, made, first_at)
        elif decision.outcome == "wait":
            waiting = (request, made, first_at)
            _, shed = self.room.add(ask, self.now, self.now + self.serving.queue_s, waiting)
            if shed is not None:
                self._turn_away(shed.item[0])
        else:
            self._turn_away(request)

    def _ask(self, request: SimulatedRequest) -> Ask:
        served = self.live.classes.get(request.class_name or "")
        return Ask(
            model=request.model,
            class_name=request.class_name,
            input_tokens=float(request.input_tokens),
            output_tokens=float(request.output_tokens)
            if self.knows_lengths
            else self.live.lengths.expected_output(request.class_name, request.model, None),
            ttft_s=served.ttft.seconds if served and served.ttft else None,
            tpot_s=served.tpot.seconds if served and served.tpot else None,
            priority=request.priority,
            patience_s=self.serving.queue_s,
            # A gateway sees the prompt, and of it whole blocks.
            prefix=request.prefix[: request.input_tokens // BLOCK_TOKENS],
            session=request.session,
        )

    def _turn_away(self, request: SimulatedRequest) -> None:
        self.tell(SimulatedAnswer(request, None, None, inf, inf, inf, 0.0))

    def _start(
        self, request: SimulatedRequest, ask: Ask, decision: Decision, made: int = 0, first_at: float = inf
    ) -> None:
        replica, prediction = decision.replica, decision.prediction
        assert replica is not None
        assert prediction is not None
        engine = self.engines[replica.key]
        flight = replica.start(ask, prediction, self.now)
        self._numbers += 1
        self._sent[self._numbers] = _Sent(request, flight, made, first_at)
        # What the engine holds is its own affair: the router only believes that it does.
        engine.add(
            self._numbers, request.input_tokens + made, request.output_tokens - made, self.now, request.cached_tokens,
            request.prefix,
        )  # fmt: skip
        self._plan(replica.key)

    def _plan(self, key: str) -> None:
        """Puts what an engine does next into the order of events."""
        moment = self.engines[key].next_event_s()
        if moment is None:
            self.planned.pop(key, None)
        elif self.planned.get(key) != moment:
            self.planned[key] = moment
            heappush(self._upcoming, (moment, key))

    def advance(self, until: float) -> None:
        """All that happens up to then."""
        upcoming, planned, room = self._upcoming, self.planned, self.room
        while upcoming and upcoming[0][0] <= until:
            moment, key = heappop(upcoming)
            if planned.get(key) != moment:
                continue
            if len(room):
                self._expire(moment)
            if moment > self.now:
                self.now = moment
            changed = self._tokens(key, moment)
            self._plan(key)
            if changed is not None and len(room):
                self._let_in(changed)
        if len(room):
            self._expire(until)
        if until < inf:
            self.now = max(self.now, until)
            if len(room):
                self._let_in()

    def _tokens(self, key: str, moment: float) -> Replica | None:
        """An engine's tokens up to then; its replica, where there may be room that there was not before."""
        changed, found = None, self.engines[key].advance(moment)
        for number, tokens, finished, at, cached in found:
            sent = self._sent[number]
            changed = sent.flight.replica
            if tokens == 1:
                if sent.made:
                    sent.flight.decode_from(at)
                else:
                    sent.flight.first_token(at)
            if finished:
                self._end(number, sent, at, cached)
        return changed

    def _end(self, number: int, sent: _Sent, at: float, cached: int) -> None:
        del self._sent[number]
        request, flight, first_at = sent.request, sent.flight, sent.first_at
        replica = flight.replica
        if sent.made:
            # An answer in two parts teaches neither lengths nor speed.
            flight.end(at, output_tokens=None, input_tokens=None, completed=False)
            usd = flight.charge_usd(float(request.input_tokens), float(request.output_tokens))
        else:
            assert flight.first_at is not None
            first_at = flight.first_at
            served = flight.end(
                at, output_tokens=request.output_tokens, input_tokens=request.input_tokens, completed=True
            )
            assert served is not None
            usd = served.charged_usd
        later = request.output_tokens - 1
        self.tell(
            SimulatedAnswer(
                request,
                replica.pool.name,
                replica.key,
                first_at - request.arrival_s,
                (at - first_at) / later if later else 0.0,
                at - request.arrival_s,
                usd,
                cached,
            )
        )

    def fail(self, replicas: Sequence[Replica], why: str = "failed") -> int:
        """These are gone now. What they had begun goes on elsewhere, as behind the gateway: what the client has is read
        again there, and the rest is made. How many requests they had."""
        for replica in replicas:
            self.engines[replica.key].advance(self.now)
            replica.went_down(why)
        gone = {replica.key for replica in replicas}
        cut_off = [one for one in self._sent.items() if one[1].flight.replica.key in gone]
        for number, sent in cut_off:
            del self._sent[number]
            flight, request = sent.flight, sent.request
            engine = self.engines[flight.replica.key]
            made = engine.made(number)
            first_at = min(sent.first_at, flight.first_at if flight.first_at is not None else inf)
            engine.cancel(number)
            flight.end(self.now, output_tokens=None, input_tokens=None, completed=False)
            if made and not self.serving.resume:
                self._turn_away(request)
                continue
            ask = self._ask(request)
            ask.input_tokens += sent.made + made
            ask.waited_s = self.now - request.arrival_s
            self._place(request, ask, sent.made + made, first_at)
        for replica in replicas:
            self._plan(replica.key)
        return len(cut_off)

    def restore(self, replicas: Sequence[Replica]) -> None:
        """These are back, with nothing in their caches, and are brought up slowly."""
        for replica in replicas:
            replica.came_up(self.now)
        self._again_at = -inf
        self._let_in()

    def _expire(self, now: float) -> None:
        for ticket in self.room.expired(now):
            self.now = max(self.now, ticket.deadline)
            ask, (request, made, first_at) = ticket.ask, ticket.item
            decision = self.router.last_chance(ask, self.now)
            if decision is not None:
                self._start(request, ask, decision, made, first_at)
            else:
                self._turn_away(request)

    def _let_in(self, changed: Replica | None = None) -> None:
        """Those who wait. `changed`: all other replicas are as they were when it was last decided."""
        decide: Callable[[Ask, float], Decision] = self.router.decide
        if self.now < self._again_at:
            if changed is None:
                return
            decide = partial(self._decide_if_taken, changed)
        else:
            self._again_at = self.now + _AGAIN_S
        while len(self.room):
            taken = self.room.take(decide, self.now)
            if taken is None:
                return
            ticket, decision = taken
            request, made, first_at = ticket.item
            if decision.outcome == "send":
                self._start(request, ticket.ask, decision, made, first_at)
            else:
                self._turn_away(request)

    def _decide_if_taken(self, changed: Replica, ask: Ask, now: float) -> Decision:
        return self.router.decide(ask, now) if self.router.may_take(ask, changed, now) else _STAYS
