"""Keeps the models of shared pools where they are asked for.

Among the workers of a gateway one holds a lock and speaks for the machine: it decides what is loaded where. The others
report their requests to it and obey. With Redis, the speaker that holds the fleet's lease (`residents`) decides for all
gateways. The others obey; while they hear of none they go by what engines say, and load nothing.
"""

import asyncio
import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Collection
from time import monotonic

from crosstie.core.fleet import Fleet
from crosstie.core.histogram import Family
from crosstie.host.hosted import ResidencySettings
from crosstie.route.ask import Ask
from crosstie.route.live import Replica
from crosstie.route.load import Presence, State
from crosstie.wire.variables import filled
from crosstie_gateway.gateway.interfaces import HostedModels
from crosstie_gateway.hosting.residents import HOLD_S, HostReport, ResidentShare
from crosstie_gateway.hosting.shared_pool import LoadGuard, SharedPool, families
from crosstie_gateway.service.process import Component, GatewayProcess
from crosstie_gateway.service.worker_link import Done, FollowerLoad, FollowerReport, LeaderState, WorkerAnswer
from crosstie_gateway.share.peers import known_as
from crosstie_gateway.share.redis_share import connected

# How often it is seen who waits for what, and how often replicas are asked what they have.
_EVERY_S, _VERIFY_S = 0.1, 5.0
# How often it is looked whether other gateways have obeyed.
_OBEYED_S = 0.02
# A worker that has not been heard of for so long has nothing in flight any more.
_SILENT_S = 3.0


class Hosting(HostedModels, LoadGuard, Component):
    """Before it puts a model away, the other workers and gateways hear of it and say what they still have."""

    def __init__(
        self, *, settings: ResidencySettings | None = None, load_patience_s: float | None = None,
        every_s: float = _EVERY_S, verify_s: float = _VERIFY_S, hold_s: float = HOLD_S,
    ):  # fmt: skip
        self._settings, self._load_patience_s, self._hold_s = settings, load_patience_s, hold_s
        self._every_s, self._verify_s = every_s, verify_s
        self._lock: int | None = None
        # Whether it holds the lock of its machine's workers; and whether it decided at its last step.
        self.speaks, self._led = False, True
        # With other gateways, where it speaks; None: there are none.
        self.share: ResidentShare | None = None
        # What was told of states, and how often it has changed; of another gateway's, up to where it is obeyed.
        self._told: dict[str, tuple[State, str]] = {}
        self._revision = 0
        self._obeys = (0, 0)
        # Requests by model: all of them where it speaks, else those that the speaker has not heard of yet.
        self._asked: Counter[str] = Counter()
        # What the speaker says of models that are loaded nowhere.
        self._absent: dict[str, tuple[str, float]] = {}
        # By a backend's key, its name to all gateways.
        self._names: dict[str, str] = {}
        self.pools: dict[str, SharedPool] = {}
        # The shared pools of each hosted model.
        self._of_model: dict[str, list[SharedPool]] = {}
        # What the other workers have in flight on each backend; what each of them waits for, and as of when.
        self._elsewhere: Counter[str] = Counter()
        self._waiting_elsewhere: dict[int, tuple[float, set[str]]] = {}
        self._ending: list[asyncio.Task[None]] = []
        self._again = asyncio.Event()
        # What went wrong at last, so that it is reported once.
        self._fault = ""

    async def start(self, process: GatewayProcess) -> None:
        self._process, self.gateway = process, process.gateway
        self.speaks = self._has_lock()
        self.reloaded(process.fleet)
        process.on(FollowerReport, self._on_report)
        process.on(LeaderState, self._on_leader_state)
        if self.speaks:
            await asyncio.gather(*self._verify())
        self._task = self.gateway.loop.create_task(self._run())

    def reloaded(self, fleet: Fleet) -> None:
        self._join(fleet)
        self._serve(fleet)
        # Offered to the gateway, which asks at every request, only where a pool hosts models.
        self.gateway.context.hosted = self if self._of_model else None
        self._again.set()

    def families(self) -> list[Family]:
        return families(self.pools.values() if self.speaks else ())

    async def stop(self) -> None:
        self.gateway.context.hosted = None
        self._task.cancel()
        loads = [task for pool in self.pools.values() for task in pool.close()]
        await asyncio.gather(*self._ending, *loads, self._task, return_exceptions=True)
        if self.share is not None:
            await self.share.stop()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _join(self, fleet: Fleet) -> None:
        """Joins other gateways, where some may have the same shared pools."""
        redis = fleet.state.redis
        if self.speaks and redis is not None and self.share is None and any(pool.hosts for pool in fleet.pools):
            self.share = ResidentShare(
                connected(filled(redis)), fleet.name, os.urandom(8).hex(), monotonic, self._report, self._note,
                self._again.set, self._hold_s,
            )  # fmt: skip
            self.share.start()

    def _serve(self, fleet: Fleet) -> None:
        """A pool that the file has not changed goes on as it is."""
        before, self.pools, self._of_model = self.pools, {}, {}
        self._names = {key: known_as(key) for key in self._presences()}
        for pool in fleet.pools:
            if not pool.hosts:
                continue
            known = before.get(pool.name)
            if known is not None and known.pool == pool:
                before.pop(pool.name)
                known.bind()
            else:
                known = SharedPool(
                    self.gateway, self._process.catalog, pool, self, settings=self._settings,
                    load_patience_s=self._load_patience_s,
                )  # fmt: skip
            self.pools[pool.name] = known
            for entry in pool.hosts:
                self._of_model.setdefault(entry.model, []).append(known)
        for name, gone in before.items():
            now = self.pools.get(name)
            if now is None or not self.leads:
                # The engines are somebody else's from here on.
                self._ending += gone.close()
            else:
                leaving = self.gateway.loop.create_task(gone.leave(now.loader.entries))
                now.start_after(leaving)
                self._ending.append(leaving)
        self._ending = [task for task in self._ending if not task.done()]

    # As what the gateway asks

    def asked(self, ask: Ask) -> tuple[str, float] | None:
        model = ask.model
        if model not in self._of_model:
            return None
        self._asked[model] += 1
        if self.speaks:
            self._note(model, 1)
        if self.is_loaded(model):
            return None
        ask.cold = True
        ask.patience_s += min(pool.residency.hosted[model].load_s for pool in self._of_model[model])
        self._again.set()
        why, retry_s = self._why_absent(model)
        return (why, retry_s) if retry_s * self.gateway.speed > ask.patience_s else None

    def absent(self, model: str) -> tuple[str, float] | None:
        return self._why_absent(model) if model in self._of_model and not self.is_loaded(model) else None

    def doubted(self, replica: Replica, *, surely: bool = False) -> None:
        pool = self.pools.get(replica.pool.name)
        if pool is not None:
            pool.doubt(replica, surely)
        self._again.set()

    def is_loaded(self, model: str) -> bool:
        """In any pool that serves it, shared or not."""
        pools = self.gateway.live.by_model.get(model, ())
        return any(replica.presence is None or replica.presence.there for pool in pools for replica in pool.replicas)

    def _note(self, model: str, times: int) -> None:
        """Requests for a model, here or elsewhere."""
        now = self.gateway.now()
        for pool in self._of_model.get(model, ()):
            for _ in range(times):
                pool.residency.asked(model, now)

    def _why_absent(self, model: str) -> tuple[str, float]:
        """Why a hosted model is loaded nowhere, and after how many seconds to ask again."""
        unknown = f"{model} is not loaded", 1.0
        if not self.speaks:
            return self._absent.get(model, unknown)
        if self.share is not None and not self.leads:
            leader = self.share.residents.leader()
            if leader is None:
                away = "the gateway that loads models is being found" if self.share.up else "Redis is away"
                return f"{model} is not loaded, and {away}", 1.0
            return leader.absent.get(model, unknown)
        return min((pool.absent(model) for pool in self._of_model[model]), key=lambda absent: absent[1])

    def _waiting(self) -> set[str]:
        """Models that requests wait for until they are loaded."""
        tickets = [(exchange.ticket, exchange.ask.model) for exchange in self.gateway.exchanges]
        return {model for ticket, model in tickets if ticket is not None and ticket.there and model in self._of_model}

    def _presences(self) -> dict[str, tuple[Replica, Presence]]:
        """Replicas that share their machine with others, by key."""
        replicas = [(replica, replica.presence) for replica in self.gateway.live.replicas()]
        return {replica.key: (replica, presence) for replica, presence in replicas if presence is not None}

    # Over time

    async def _run(self) -> None:
        due = self.gateway.loop.time() + self._verify_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s if self._of_model else None):
                    await self._again.wait()
            self._again.clear()
            verify = self.gateway.loop.time() >= due
            if verify:
                due = self.gateway.loop.time() + self._verify_s
            try:
                if not self.speaks:
                    await self._ask_speaker()
                elif self.leads:
                    await self._lead(verify=verify)
                else:
                    await self._follow(verify=verify)
            except Exception as error:  # noqa: BLE001 (a loop that ended would load nothing any more)
                # Whatever went wrong once, models are loaded for as long as this serves.
                if self._fault != repr(error):
                    self._fault = repr(error)
                    self.gateway.notify(f"shared pools: {self._fault}")
                await asyncio.sleep(self._every_s)

    def _verify(self) -> list[asyncio.Task[None]]:
        """Asks all replicas what they have."""
        return [task for pool in self.pools.values() for task in pool.ask(range(len(pool.slots)))]

    async def _lead(self, *, verify: bool) -> None:
        if not self._led:
            for pool in self.pools.values():
                pool.lead()
        self._led = True
        heard = self.gateway.loop.time() - _SILENT_S
        elsewhere = (models for at, models in self._waiting_elsewhere.values() if at > heard)
        # Another gateway may not have read the file again yet.
        beyond = self.share.residents.waiting() if self.share is not None else set()
        wanted = self._waiting().union(beyond, *elsewhere) & self._of_model.keys()
        if verify:
            self._verify()
        for pool in self.pools.values():
            pool.ask(list(pool.unsure))
            # One load is enough where several pools host a model.
            others = [slot.loading for other in self.pools.values() if other is not pool for slot in other.slots]
            pool.begin_loads([model for model in wanted if model not in others])
        await self._ask_workers()

    # Other workers

    async def _ask_speaker(self) -> None:
        """Reports to the worker that speaks for the machine, and obeys it; takes its place where there is none."""
        self._led = False
        report = FollowerReport(os.getpid(), dict(self._asked), sorted(self._waiting()))
        self._asked.clear()
        answers = await self._process.ask_others(report)
        state = next((answer for answer in answers if isinstance(answer, LeaderState)), None)
        if state is not None:
            self._on_leader_state(state)
        elif self._has_lock():
            self.speaks = True
            self._join(self.gateway.live.fleet)

    def _has_lock(self) -> bool:
        """One of the workers holds the lock; it is free as soon as that process ends."""
        if self._process.link is None:
            return True
        if self._lock is None:
            # In their own folder, which goes when the last of them has ended.
            self._lock = os.open(self._process.link.folder / "hosting.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    async def _ask_workers(self) -> None:
        """Tells the other workers what is where, and hears what they then have in flight."""
        if self._process.link is None:
            return
        loads: Counter[str] = Counter()
        for answer in await self._process.ask_others(self._state()):
            if isinstance(answer, FollowerLoad):
                loads.update(answer.in_flight)
        # At once: loads that wait for others to finish read it at any time.
        self._elsewhere.clear()
        self._elsewhere.update(loads)

    def _state(self) -> LeaderState:
        states = {key: (presence.state, presence.why) for key, (_, presence) in self._presences().items()}
        return LeaderState(states, self._all_absent())

    def _all_absent(self) -> dict[str, tuple[str, float]]:
        return {model: self._why_absent(model) for model in self._of_model if not self.is_loaded(model)}

    def _on_report(self, report: FollowerReport) -> WorkerAnswer:
        if not self.speaks:
            return Done()
        for model, times in report.asked.items():
            self._asked[model] += times
            self._note(model, times)
        waiting = set(report.waiting) & self._of_model.keys()
        self._waiting_elsewhere[report.process] = self.gateway.loop.time(), waiting
        if waiting:
            self._again.set()
        return self._state()

    def _on_leader_state(self, state: LeaderState) -> WorkerAnswer:
        if not self.speaks:
            self._absent = state.absent
            for pool in self.pools.values():
                pool.follow(state.states)
        hosted = self._presences().items()
        return FollowerLoad({key: replica.in_flight for key, (replica, _) in hosted if replica.in_flight})

    # Other gateways

    @property
    def leads(self) -> bool:
        return self.speaks and (self.share is None or self.share.lease.held)

    async def _follow(self, *, verify: bool) -> None:
        """Does as the leading gateway says."""
        assert self.share is not None
        self._led = False
        leader = self.share.residents.leader()
        states = {} if leader is None else leader.states
        for pool in self.pools.values():
            pool.ask(range(len(pool.slots)) if verify else list(pool.unsure))
            pool.follow({key: states[name] for key, name in self._names.items() if name in states})
        await self._ask_workers()
        # Only now: what the others here still had is known.
        self._obeys = (0, 0) if leader is None else (leader.number, leader.revision)

    def _report(self) -> HostReport:
        """What other gateways are told."""
        assert self.share is not None
        lease, known = self.share.lease, self._presences()
        shared = [(name, key, *known[key]) for key, name in self._names.items() if key in known]
        loads = {name: replica.in_flight + self._elsewhere.get(key, 0) for name, key, replica, _ in shared}
        in_flight = {name: load for name, load in loads.items() if load}
        waiting = sorted(self._waiting().union(*(models for _, models in self._waiting_elsewhere.values())))
        own = (self.share.residents.machine, self.leads and self._led)
        if not own[1]:
            return HostReport(*own, *self._obeys, dict(self._asked), waiting, in_flight)
        states: dict[str, tuple[State, str]] = {name: (at.state, at.why[:200]) for name, _, _, at in shared}
        if states != self._told:
            self._told, self._revision = states, self._revision + 1
        now = self.share.residents.clock()
        # Those of a lead before this one were told under its number.
        own_claims = {slot: claim for slot, claim in lease.claimed.items() if claim.number == lease.number}
        claims = {slot: claim.until - now for slot, claim in own_claims.items() if claim.until > now}
        absent = self._all_absent().items()
        bounded = {model: (why[:200], min(max(retry_s, 0.0), 3600.0)) for model, (why, retry_s) in absent}
        return HostReport(
            *own, lease.number, self._revision, dict(self._asked), waiting, in_flight, states, bounded, claims
        )

    # As the guard of loads

    def elsewhere(self, key: str) -> int:
        beyond = 0 if self.share is None else self.share.residents.in_flight(self._names.get(key, key))
        return self._elsewhere.get(key, 0) + beyond

    async def claim(self, slots: Collection[str], for_s: float) -> bool:
        return self.share is None or await self.share.claim(slots, for_s)

    async def release(self, slots: Collection[str]) -> None:
        if self.share is not None:
            await self.share.release(slots)

    async def before_unload(self) -> None:
        await self._ask_workers()
        if self.share is None:
            return
        self._report()
        revision = self._revision
        while self.leads and not self.share.residents.all_obey(self.share.lease.number, revision):
            await asyncio.sleep(_OBEYED_S)
