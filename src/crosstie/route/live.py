"""The fleet as it is now: what each replica has to do, and what it has delivered.

`advance` brings it up to a moment; decisions then read it and change nothing. `view` is a replica's load in the few
numbers that a prediction needs. It is made anew when something has changed, so that a decision over many replicas is a
few multiplications for each.
"""

from collections import deque
from math import inf
from typing import Final

from crosstie.core.fleet import Fleet, Pool, ServedClass
from crosstie.core.workload import Target
from crosstie.route.ask import Ask
from crosstie.route.corrections import Observations, OnlineCorrection, Scatter, log_ratio
from crosstie.route.held import HeldBlocks
from crosstie.route.lengths import Classes, Lengths
from crosstie.route.load import RATE_S, AdapterSlots, EngineLoad, ReplicaLoad
from crosstie.route.prefix import Holders, Prefixes
from crosstie.route.session import LiveSession
from crosstie.route.sessions import LiveSessions
from crosstie.route.speed import ENDLESS, Prediction, Speed, View
from crosstie.route.spending import Spending

# A view is made anew after this long even if nothing happened: rates decay, and prompts move on.
VIEW_S: Final = 0.25
# Corrections fade over much longer, so factors last until something is learnt, or this long.
FACTORS_S: Final = 1.0
# How long a replica's own corrections last in silence, and its pool's.
_REPLICA_MEMORY_S: Final = 45.0
_POOL_MEMORY_S: Final = 60.0
# Differences that do not matter: the network's, and the clock's.
_TTFT_GUARD_S: Final = 0.02
_TPOT_GUARD_S: Final = 0.001
# A cache whose size nobody knows is taken for this large, as that of many replicas is; what is believed to be there
# then takes a megabyte of memory, and 28 of the most.
_UNKNOWN_CACHE_TOKENS: Final = 4e6
_MOST_CACHE_TOKENS: Final = 1e8
# Answers that a pool's price follows: so few as its corrections do would make pools of nearly one price change places.
_MOST_PRICED: Final = 200.0
_NO_POOLS: Final[frozenset[str]] = frozenset()
_NOTHING: Final[list["LivePool"]] = []
# Of its full limit, what a replica that has just come back may take at once.
_FIRST_SHARE: Final = 0.1
# A pool of up to so many replicas is gone through whole; of a larger one a decision looks at some (`route.shortlist`).
WHOLE: Final = 32


class Promise:
    """A latency that a pool is to keep, and the standard deviations that it must hold for."""

    def __init__(self, seconds: float, deviations: float):
        self.seconds, self.deviations = seconds, deviations


class LivePool:
    def __init__(self, pool: Pool, speed: Speed, lengths: Lengths):
        self.replicas: list[Replica] = []
        # Of a large one: who holds which beginnings of prompts, by the place in `replicas`; None: it is small.
        self.holders: Holders | None = None
        # How many of them may be chosen, and how many are not being emptied; None: to be counted.
        self._in_service: tuple[int, int] | None = None
        # Of one whose replicas only decode: those that compute the prompts, as a pool that no request is decided for.
        self.prefill: LivePool | None = None
        # Which side of such a pool this is: "prefill", "decode" or neither.
        self.side = ""
        self.ttft = OnlineCorrection(_POOL_MEMORY_S)
        self.tpot = OnlineCorrection(_POOL_MEMORY_S)
        # How much slower than modelled it decodes, and so how much more of a replica each request takes.
        self.pace = OnlineCorrection(_POOL_MEMORY_S, most=_MOST_PRICED)
        self.slowness = 1.0
        self.slowness_until = -inf
        # Until when no replica's view is too old.
        self.fresh_until = -inf
        self.ttft_scatter = Scatter()
        self.tpot_scatter = Scatter()
        # Those under way; a fleet's pools have them in common.
        self.sessions = LiveSessions()
        # The tightest targets of the classes that the plan sends here: nobody may be sent here who breaks them.
        self.promised_ttft = self.promised_tpot = Promise(inf, 0.0)
        # Of one that is paid by the token, see `route.overflow`; None: it is the fleet's own.
        self.spending: Spending | None = None
        # What others are to learn from what is seen here; None: there are none.
        self.observations: Observations | None = None
        self.adopt(pool, speed, lengths)

    def adopt(
        self, pool: Pool, speed: Speed, lengths: Lengths, typical_input: float = 1000.0, typical_output: float = 250.0,
    ) -> None:  # fmt: skip
        """What the fleet file says of it; what was learnt stays. `lengths` are the fleet's, which requests teach."""
        self.pool = pool
        self.speed = speed
        self.lengths = lengths
        speed.typical_input, speed.typical_output = typical_input, typical_output
        self.price(0.0, 0.0)
        self.max_context = pool.max_context
        self.modalities = None if pool.modalities is None else frozenset(pool.modalities)
        self.draining = pool.drained
        self.network_s = pool.network_s

    def price(self, watts: float, usd_per_kwh: float) -> None:
        """A replica by the second: its GPUs and, where they do not include it, its power."""
        self.watts = watts
        rent = self.pool.replica_gpus * self.pool.usd_per_gpu_hour / 3600.0
        power = watts * usd_per_kwh / 3.6e6
        self.usd_per_s = rent + power
        # The part that the router weighs: what was paid once for bought GPUs is gone whoever they serve.
        sunk = self.pool.replica_gpus * self.pool.sunk_usd_per_gpu_hour / 3600.0
        self.weighed = max(self.usd_per_s - sunk, 0.0) / self.usd_per_s if self.usd_per_s and sunk else 1.0
        # What it costs more when it works.
        self.added_usd_per_s = power if self.pool.paid_anyway else rent + power

    @property
    def name(self) -> str:
        return self.pool.name

    def advance(self, now: float) -> None:
        """Makes the views of its replicas anew that are too old; in a large pool, whoever looks at one does."""
        if now < self.fresh_until:
            return
        if now >= self.slowness_until:
            # What was learnt of its speed fades even while nobody is sent there.
            self.slowness = self.pace.factor(now)
            self.slowness_until = now + FACTORS_S
        fresh_until = self.slowness_until
        if self.holders is not None:
            self.fresh_until = fresh_until
            return
        for replica in self.replicas:
            if now >= replica.fresh_until:
                replica.advance(now)
            if replica.fresh_until < fresh_until:
                fresh_until = replica.fresh_until
        self.fresh_until = fresh_until

    def joules(self, new_tokens: float, cached_tokens: float, output_tokens: float) -> float:
        """A request's part of the rated power of a replica."""
        return self.watts * self.slowness * self.speed.replica_s(new_tokens, cached_tokens, output_tokens)

    def request_usd(
        self, new_tokens: float, cached_tokens: float, output_tokens: float, tpot_s: float | None = None
    ) -> float:
        """A request's part of the price of a replica, among others like it that keep its target."""
        spent_s = self.speed.replica_s(new_tokens, cached_tokens, output_tokens, tpot_s or inf)
        return self.usd_per_s * self.slowness * spent_s

    def added_usd(
        self, new_tokens: float, cached_tokens: float, output_tokens: float, tpot_s: float | None = None
    ) -> float:
        """What a request adds to what a replica costs in any case."""
        if not self.added_usd_per_s:
            return 0.0
        spent_s = self.speed.replica_s(new_tokens, cached_tokens, output_tokens, tpot_s or inf)
        return self.added_usd_per_s * self.slowness * spent_s

    def start_at(self, slowness: float, now: float) -> None:
        """Begins as though it had learnt how much slower than modelled its replicas are."""
        for correction in (self.ttft, self.tpot, self.pace):
            correction.start(slowness, now)
        self.slowness_until = -inf

    def idle_ttft_s(self, input_tokens: float, now: float) -> float:
        """Of a prompt on a replica that has nothing else to do, corrected by what the pool has delivered."""
        return self.speed.idle_s(input_tokens, 0.0) * self.ttft.factor(now)

    def most_usd(self, ask: Ask) -> float:
        """What a request may come to: as long as it says that its answer may be, or as they usually are."""
        output = ask.output_tokens if ask.most_output is None else float(ask.most_output)
        return self.request_usd(ask.input_tokens, 0.0, ask.copies * output, ask.tpot_s)

    def staff(self, replicas: "list[Replica]") -> None:
        """These are its replicas from now on."""
        if replicas != self.replicas:
            holders = Holders() if len(replicas) > WHOLE else None
            for number, replica in enumerate(replicas):
                replica.prefixes.tell(holders, number)
            self.replicas, self.holders = replicas, holders
        self.recount()

    def recount(self) -> None:
        """One of them went up or down, or is being emptied."""
        self._in_service = None

    def in_service(self) -> tuple[int, int]:
        """Of its replicas, those that may be chosen, and all that are not being emptied."""
        found = self._in_service
        if found is None:
            there = [replica for replica in self.replicas if not replica.draining]
            found = self._in_service = sum([replica.up for replica in there]), len(there)
        return found

    def why_out(self) -> str:
        """Why none of its replicas may be sent anything, in words; empty: one may."""
        if any(replica.up and not replica.draining for replica in self.replicas):
            return ""
        whys = sorted({replica.why_down or "draining" for replica in self.replicas})
        return whys[0] if len(whys) == 1 else "; ".join(whys)


def _seconds(target: Target | None) -> float | None:
    return None if target is None else target.seconds


def _guides(served_class: ServedClass) -> list[tuple[float, frozenset[str]]]:
    """The pools of prompts up to so many tokens, the shortest first."""
    pools: dict[float, set[str]] = {}
    for route in served_class.routes:
        pools.setdefault(inf if route.up_to_input is None else float(route.up_to_input), set()).add(route.pool)
    return [(up_to, frozenset(pools[up_to])) for up_to in sorted(pools)]


class LiveFleet:
    def __init__(self, fleet: Fleet, pools: list[LivePool], lengths: Lengths, sessions: LiveSessions | None = None):
        self.fleet = fleet
        self.pools = pools
        self.sessions = LiveSessions() if sessions is None else sessions
        for pool in pools:
            pool.sessions = self.sessions
        self.lengths = lengths
        self.classes: dict[str, ServedClass] = {served_class.name: served_class for served_class in fleet.classes}
        # By class, its targets of TTFT and TPOT.
        self.targets = {one.name: (_seconds(one.ttft), _seconds(one.tpot)) for one in fleet.classes}
        # For requests that name none.
        self.unnamed = Classes(fleet)
        self.by_model: dict[str, list[LivePool]] = {}
        for pool in pools:
            self.by_model.setdefault(pool.pool.model, []).append(pool)
        # What clients may call a model, and what the pools call it.
        served = [pool.pool for pool in pools]
        self.names = {name: pool.model for pool in served for name in (pool.model, pool.served_as) if name}
        self.names |= {name: model for name, model in fleet.aliases.items() if model in self.by_model}
        # Whether a pool is paid by the token.
        self.buys = any(pool.spending is not None for pool in pools)
        # LoRA adapters by name, and the pools that have each; clients ask for them as for a model.
        self.adapters: dict[str, frozenset[str]] = {}
        for one in served:
            for adapter in one.adapters:
                self.adapters[adapter.name] = self.adapters.get(adapter.name, _NO_POOLS) | {one.name}
                self.names[adapter.name] = one.model
        # Standard deviations that a class's targets must hold for: TTFT and TPOT.
        self.deviations: dict[str | None, tuple[float, float]] = {}
        # Pools that the plan sends a class to.
        self.planned = {one.name: frozenset(route.pool for route in one.routes) for one in fleet.classes}
        self._guides = {served_class.name: _guides(served_class) for served_class in fleet.classes}
        # By model, the pools whose engines the gateway leads from prefill to decode.
        self.led: dict[str, list[LivePool]] = {}
        for pool in pools:
            if pool.prefill is not None:
                self.led.setdefault(pool.pool.model, []).append(pool)
        # Those that a reload has left without a place, until their last request ends.
        self.leaving: list[Replica] = []

    def guide(self, ask: Ask) -> frozenset[str]:
        """Pools that the plan sends such requests to; none where it says nothing of them."""
        for up_to, pools in self._guides.get(ask.class_name or "", ()):
            if ask.input_tokens <= up_to:
                return pools
        return _NO_POOLS

    def replicas(self) -> "list[Replica]":
        """Of both sides, where prefill and decode are apart."""
        found = [replica for pool in self.pools for replica in pool.replicas]
        return found + [one for pool in self.pools if pool.prefill is not None for one in pool.prefill.replicas]

    def full_for_s(self, model: str, now: float) -> float:
        """Until the first replica that is up takes requests again, by the word of its engine; 0: one does."""
        least = inf
        for pool in self.by_model.get(model, ()):
            for replica in pool.replicas:
                if replica.up and not replica.draining and replica.busy_until < least:
                    least = replica.busy_until
                    if least <= now:
                        return 0.0
        return least - now if least < inf else 0.0

    def in_service(self, model: str) -> tuple[int, int]:
        """Of a model's replicas, those that may be chosen, and all that are not being emptied."""
        up = there = 0
        for pool in self.by_model.get(model, _NOTHING):
            own_up, own_there = pool.in_service()
            up, there = up + own_up, there + own_there
        return up, there

    def panics(self, model: str) -> bool:
        """Whether so many of a model's replicas are out that those only suspected are to be asked as well."""
        up, there = self.in_service(model)
        return up < self.fleet.serving.panic_threshold * there

    def advance(self, now: float, model: str) -> None:
        """Brings the pools of a model up to this moment, which is due before each decision about it."""
        for pool in self.by_model.get(model, _NOTHING):
            pool.advance(now)


class Replica(ReplicaLoad):
    """One backend: what is on it, whether it may be sent more, and what it has delivered."""

    def __init__(self, key: str, pool: LivePool, since: float, slow_start_s: float = 0.0, block_tokens: float = 512.0):
        super().__init__(key, since)
        self.pool = pool
        self.up = True
        self.why_down = ""
        # It is down for what it did, and not because it is known to be dead: if too few are left it is asked all the
        # same.
        self.suspected = False
        self.draining = False
        # When it came up, and over how long it is then brought to its full share.
        self.since = since
        self.slow_start_s = slow_start_s
        self.queue: dict[Flight, None] = {}
        # None: its pool has no adapters.
        self.adapters: AdapterSlots | None = None
        # Those whose first token nobody will see, by the moment at which it is assumed.
        self.silent: deque[Flight] = deque()
        self.reported: EngineLoad | None = None
        self.reported_at = -inf
        self.ttft = OnlineCorrection(_REPLICA_MEMORY_S, pool.ttft)
        self.tpot = OnlineCorrection(_REPLICA_MEMORY_S, pool.tpot)
        known = pool.speed.cache_tokens < ENDLESS
        tokens = min(pool.speed.cache_tokens, _MOST_CACHE_TOKENS) if known else _UNKNOWN_CACHE_TOKENS
        self.prefixes = Prefixes(int(tokens / block_tokens))
        # What its engine tells that it holds; None: it tells nothing, and what was sent there is all that is known.
        self.held: HeldBlocks | None = None
        self.view = View()
        self.factors_until = -inf
        self.touch()

    def note_head(self) -> None:
        for head in self.queue:
            self.head_started, self.head_tokens = head.started, head.new_tokens
            return
        self.head_started, self.head_tokens = inf, 0.0

    def touch(self) -> None:
        """Something has changed: the next `advance` makes its view anew."""
        self.fresh_until = self.pool.fresh_until = -inf

    def came_up(self, now: float) -> None:
        """Health or breaker let it back: it is brought up slowly."""
        if not self.up:
            self.since = now
        self.up, self.why_down, self.suspected = True, "", False
        self.pool.recount()
        self.touch()

    def drain(self, draining: bool) -> None:
        """Whether it is being emptied, and sent nothing new."""
        self.draining = draining
        self.pool.recount()

    def went_down(self, why: str, *, suspected: bool = False) -> None:
        self.up, self.why_down, self.suspected = False, why, suspected
        self.pool.recount()
        if self.adapters is not None:
            self.adapters.clear()
        # What it held is likely to be gone when it comes back.
        self.prefixes.clear()
        self.pool.sessions.lost(self)
        self.touch()

    def full(self, now: float, for_s: float) -> None:
        """The engine has refused a request because it has too many."""
        self.busy_until = max(self.busy_until, now + for_s)
        if self.elsewhere.cell is not None:
            self.elsewhere.cell.tell(busy_until=now + for_s)

    def report(
        self, running: float, waiting: float, kv_used_fraction: float | None, now: float, lasts_s: float = 5.0
    ) -> None:
        """From the engine's own metrics: what it has beyond this worker's, other workers' and peers' requests, believed
        for so long."""
        self.reported, self.reported_at = EngineLoad(running, waiting, kv_used_fraction), now
        elsewhere, speed = self.elsewhere, self.pool.speed
        elsewhere.read(now)
        beyond = max(running + waiting - self.in_flight - elsewhere.in_flight, 0.0)
        self.external_waiting = min(max(waiting - self.waiting - elsewhere.waiting, 0.0), beyond)
        self.external_running = beyond - self.external_waiting
        held = self.external_running * (speed.typical_input + 0.5 * speed.typical_output)
        if kv_used_fraction is not None and beyond and speed.cache_tokens < 1e12:
            held = max(kv_used_fraction * speed.cache_tokens - self.held_tokens - elsewhere.held_tokens, 0.0)
        self.external_held = held
        self.external_until = now + lasts_s if beyond else -inf
        self.touch()

    def start(self, ask: Ask, prediction: Prediction, now: float) -> "Flight":
        flight = Flight(self, ask, prediction, now)
        self.in_flight += 1
        self.waiting += 1
        self.waiting_tokens += flight.new_tokens
        self.held_tokens += flight.context
        self.prompt_rate = self.prompt_rate_at(now) + flight.new_tokens / RATE_S
        self.rate_at = now
        self.queue[flight] = None
        self.note_head()
        self.targets[flight.targets] = self.targets.get(flight.targets, 0) + 1
        if ask.prefix:
            self.prefixes.add(ask.prefix)
            if self.pool.observations is not None:
                self.pool.observations.sent.append((self.key, ask.prefix))
        if self.held is not None and ask.tokens is not None:
            self.held.expect(ask.tokens, ask.cache_tenant)
        if (ask.prefix or ask.session is not None) and self.pool.side != "prefill":
            flight.session = self.pool.sessions.start(ask, self, prediction.cached_tokens, now)
        if not ask.streams:
            flight.due = now + prediction.ttft_s
            self.silent.append(flight)
        if ask.adapter is not None and self.adapters is not None:
            flight.slots = self.adapters
            self.adapters.begin(ask.adapter)
        if self.pool.spending is not None:
            flight.reserve(self.pool.spending, now)
        self.touch()
        if self.elsewhere.cell is not None:
            self.publish()
        return flight

    def cached_tokens(self, ask: Ask, block_tokens: float) -> float:
        """Of the prompt, what the replica holds, by its engine's word where that is known, and else by what was sent
        there, in blocks of so many tokens; its last token is computed in any case."""
        held, tokens, found = self.held, ask.tokens, 0.0
        if held is not None and tokens is not None:
            found = float(held.match(tokens, ask.cache_tenant))
        if held is None or tokens is None or not held.complete:
            blocks = self.prefixes.match(ask.prefix)
            sent, session = blocks * block_tokens, ask.under_way
            if session is not None and session.home is self and session.goes_on(ask.prefix, blocks):
                # All of its last prompt is there, and so is the answer to it.
                sent = max(sent, session.tokens)
            found = sent if sent > found else found
        most = ask.input_tokens - 1.0
        return found if found < most else most if most > 0.0 else 0.0

    def share_at(self, now: float) -> float:
        """Of its full limit, what it may take: a replica that has just come is brought up slowly."""
        if self.slow_start_s <= 0.0 or now - self.since >= self.slow_start_s:
            return 1.0
        return max((now - self.since) / self.slow_start_s, _FIRST_SHARE)

    def advance(self, now: float) -> View:
        """The view as of now, where the last is too old: first tokens that nobody sees are assumed to have come."""
        view = self.view
        if now < self.fresh_until:
            return view
        while self.silent and self.silent[0].due <= now:
            flight = self.silent.popleft()
            flight.decode_from(flight.due)
        late_s = 0.0
        for head in self.queue:
            late_s = max(now - head.started - head.prediction.ttft_s, 0.0)
            break
        # Neither is the engine's, and so corrected by what it has delivered.
        view.late_s = late_s + self.pool.network_s
        self.pool.speed.fill(view, self, now)
        if now >= self.factors_until:
            view.ttft_factor = self.ttft.factor(now)
            view.tpot_factor = self.tpot.factor(now)
            self.factors_until = now + FACTORS_S
        share = 1.0 if self.slow_start_s <= 0.0 or self.slow_start_s <= now - self.since else self.share_at(now)
        elsewhere = self.elsewhere
        # What other workers and peers have there is not left for this one.
        view.limit = max(int(self.pool.pool.max_in_flight * share), 1) - elsewhere.in_flight
        ttft_s, tpot_s = self.strictest()
        # Comparisons rather than `min`, here and below: all of this runs at every request.
        other_ttft_s, other_tpot_s = elsewhere.strictest_ttft_s, elsewhere.strictest_tpot_s
        view.strictest_ttft_s = ttft_s if ttft_s < other_ttft_s else other_ttft_s
        view.strictest_tpot_s = tpot_s if tpot_s < other_tpot_s else other_tpot_s
        self.fresh_until = now + VIEW_S
        return view

    def learn_first(self, ratio: float, error: float, tokens: float, ttft_s: float, now: float) -> None:
        """A first token came: observed over raw and over corrected prediction, in logarithms, here or elsewhere."""
        pool = self.pool
        self.factors_until = -inf
        self.touch()
        self.ttft.teach(ratio, now)
        pool.ttft_scatter.teach(error)
        pool.speed.saw_first(tokens, ttft_s)

    def learn_decode(self, ratio: float, error: float, in_flight: float, tpot_s: float, now: float) -> None:
        """An answer ended that took so long a token."""
        pool = self.pool
        self.factors_until = -inf
        pool.slowness_until = -inf
        self.touch()
        self.tpot.teach(ratio, now)
        pool.pace.teach(ratio, now)
        pool.tpot_scatter.teach(error)
        pool.speed.saw_decode(in_flight, tpot_s)

    def read_elsewhere(self, now: float) -> bool:
        """Takes over what other workers and peers have written; whether anything of it has changed."""
        busy_until = self.busy_until
        changed = self.elsewhere.read(now)
        self.busy_until = max(busy_until, self.elsewhere.busy_until)
        self.touch()
        return changed or self.busy_until != busy_until


class ServedRequest:
    """A completed request as it was delivered; None: not known."""

    def __init__(
        self, ttft_s: float | None, tpot_s: float | None, input_tokens: float, output_tokens: int | None,
        charged_usd: float,
    ):  # fmt: skip
        self.ttft_s, self.tpot_s = ttft_s, tpot_s
        self.input_tokens, self.output_tokens = input_tokens, output_tokens
        self.charged_usd = charged_usd


class Flight:
    """One request on one replica. Its counts are released exactly once, however it ends."""

    def __init__(self, replica: Replica, ask: Ask, prediction: Prediction, now: float):
        self.replica = replica
        self.ask = ask
        self.prediction = prediction
        self.started = now
        # Only what could be kept when it was sent is kept from others: one hopeless target must not close a replica.
        ttft_s, tpot_s = ask.ttft_s, ask.tpot_s
        # A tuple of any length: compiled, one of two floats would be made anew each time that it is looked up.
        self.targets: tuple[float, ...] = (
            ttft_s if ttft_s is not None and prediction.ttft_s <= ttft_s else inf,
            tpot_s if tpot_s is not None and prediction.tpot_s <= tpot_s else inf,
        )
        new_tokens = ask.input_tokens - prediction.cached_tokens
        self.new_tokens = new_tokens if new_tokens > 1.0 else 1.0
        self.context = ask.input_tokens + 0.5 * ask.output_tokens
        self.ahead_tokens = replica.waiting_tokens + replica.elsewhere.waiting_tokens + self.new_tokens
        self.in_flight = replica.in_flight + replica.elsewhere.in_flight + 1
        self.first_at: float | None = None
        # Whether the first token was seen, not assumed; and when it would be.
        self.seen = False
        self.due = inf
        self.released = False
        # Of which it is a turn.
        self.session: LiveSession | None = None
        # Where it uses an adapter.
        self.slots: AdapterSlots | None = None
        # At a provider: what it may come to, and what the bill will have of it as far as that is known.
        self.spending: Spending | None = None
        self.reserved_usd = self.billed_usd = self.told_cached = 0.0
        # What it was last charged, and for which lengths: an answer says what it costs before it is over.
        self._charged_input = self._charged_output = -1.0
        self._charged_usd = 0.0

    def reserve(self, spending: Spending, now: float) -> None:
        """Whatever comes of it, a prompt that was sent is paid for, unless the provider refuses it."""
        pool = self.replica.pool
        self.spending, self.reserved_usd = spending, pool.most_usd(self.ask)
        self.billed_usd = pool.request_usd(self.ask.input_tokens, 0.0, 0.0)
        spending.reserve(self.reserved_usd, now)

    def decode_from(self, now: float) -> None:
        """From waiting to decoding; nothing is learnt from it."""
        if self.released or self.first_at is not None:
            return
        self.first_at = now
        replica = self.replica
        self._leave_queue()
        replica.decoding_tokens += self.context
        replica.last_first_at = max(replica.last_first_at, now)
        replica.touch()
        if replica.elsewhere.cell is not None:
            replica.publish()

    def first_token(self, now: float) -> None:
        if self.released or self.seen:
            return
        self.decode_from(now)
        self.first_at, self.seen = now, True
        replica, whole_s = self.replica, now - self.started
        observed = whole_s - replica.pool.network_s
        ratio = log_ratio(observed, self.prediction.raw_ttft_s, _TTFT_GUARD_S)
        error = log_ratio(whole_s, max(self.prediction.ttft_s, self.prediction.ttft_limit_s), _TTFT_GUARD_S)
        replica.learn_first(ratio, error, self.ahead_tokens, observed, now)
        if replica.pool.observations is not None:
            replica.pool.observations.first.append((replica.key, ratio, error, self.ahead_tokens, observed))

    def end(
        self, now: float, *, output_tokens: int | None, input_tokens: int | None, completed: bool
    ) -> ServedRequest | None:
        """Releases the counts; a completed request teaches what it took. None: it had ended before, or failed."""
        if self.released:
            return None
        self._release()
        if self.spending is not None:
            self.spending.settle(self.reserved_usd, self.billed_usd, now)
        ask, pool, session = self.ask, self.replica.pool, self.session
        if not completed:
            if session is not None:
                pool.sessions.end(session, None, 0.0, now)
            return None
        # The bytes of an image say nothing about those of a token.
        counted = None if ask.modalities else input_tokens
        pool.lengths.observe(
            ask.class_name, ask.model, output_tokens=output_tokens, input_tokens=counted, prompt_bytes=ask.prompt_bytes
        )
        if pool.observations is not None:
            lengths = (ask.class_name, ask.model, output_tokens, counted, ask.prompt_bytes)
            pool.observations.lengths.append(lengths)
        tpot_s = self._teach_tpot(now, output_tokens)
        known_input = float(input_tokens) if input_tokens else ask.input_tokens
        known_output = float(output_tokens) if output_tokens else ask.output_tokens
        charged_usd = self.charge_usd(known_input, known_output)
        if session is not None:
            pool.sessions.end(session, known_input + known_output, charged_usd, now, ask.pause_s)
        ttft_s = self.first_at - self.started if self.seen and self.first_at is not None else None
        return ServedRequest(ttft_s, tpot_s, known_input, output_tokens, charged_usd)

    def charge_usd(self, input_tokens: float, output_tokens: float) -> float:
        """Its part of the price of its replica, at the lengths that it came to: nothing, where nothing came of it."""
        if input_tokens <= 0.0 and output_tokens <= 0.0:
            return 0.0
        # A provider's bill goes by what it says itself.
        cached = self.prediction.cached_tokens if self.spending is None else self.told_cached
        if cached:
            cached = max(min(cached, input_tokens - 1.0), 0.0)
        if self.spending is None and input_tokens == self._charged_input and output_tokens == self._charged_output:
            usd = self._charged_usd
        else:
            usd = self.replica.pool.request_usd(input_tokens - cached, cached, output_tokens, self.ask.tpot_s)
            self._charged_input, self._charged_output, self._charged_usd = input_tokens, output_tokens, usd
        if input_tokens > 0.0:
            self.billed_usd = usd
        return usd

    def _teach_tpot(self, now: float, output_tokens: int | None) -> float | None:
        if output_tokens is None or output_tokens < 2:
            return None
        replica, predicted = self.replica, self.prediction
        first = self.first_at if self.seen and self.first_at is not None else self.started + predicted.ttft_s
        tpot_s = (now - first) / (output_tokens - 1)
        if tpot_s <= 0.0:
            return None
        ratio = log_ratio(tpot_s, predicted.raw_tpot_s, _TPOT_GUARD_S)
        error = log_ratio(tpot_s, max(predicted.tpot_s, predicted.tpot_limit_s), _TPOT_GUARD_S)
        there = 0.5 * (self.in_flight + replica.in_flight + replica.elsewhere.in_flight + 1)
        replica.learn_decode(ratio, error, there, tpot_s, now)
        if replica.pool.observations is not None:
            replica.pool.observations.decoded.append((replica.key, ratio, error, there, tpot_s))
        return tpot_s if self.seen else None

    def _leave_queue(self) -> None:
        replica = self.replica
        replica.waiting -= 1
        replica.waiting_tokens = max(replica.waiting_tokens - self.new_tokens, 0.0) if replica.waiting else 0.0
        del replica.queue[self]
        replica.note_head()

    def _release(self) -> None:
        self.released = True
        replica = self.replica
        if replica.held is not None and self.ask.tokens is not None:
            replica.held.settle(self.ask.tokens)
        if self.first_at is None:
            self._leave_queue()
        else:
            replica.decoding_tokens = max(replica.decoding_tokens - self.context, 0.0)
        replica.in_flight -= 1
        if self.slots is not None and self.ask.adapter is not None:
            self.slots.end(self.ask.adapter)
        # Sums of many floats drift; an empty replica holds nothing.
        replica.held_tokens = max(replica.held_tokens - self.context, 0.0) if replica.in_flight else 0.0
        if replica.in_flight == replica.waiting:
            replica.decoding_tokens = 0.0
        left = replica.targets[self.targets] - 1
        if left:
            replica.targets[self.targets] = left
        else:
            del replica.targets[self.targets]
        replica.touch()
        if replica.elsewhere.cell is not None:
            replica.publish()
