"""Keeps the models of shared pools where they are asked for.

Of the workers that serve the same fleet one is the leader, whoever holds a lock: it decides what is loaded where. The
others follow: they report what they are asked for and what they have in flight, and learn from it what is where. A
gateway of one process leads.
"""

import asyncio
import contextlib
import fcntl
import os
from collections import Counter
from collections.abc import Callable, Collection

from crosstie.core.fleet import Fleet
from crosstie.host.hosted import ResidencySettings
from crosstie.route.ask import Ask
from crosstie.route.hosted_sizes import sizes
from crosstie.route.live import Replica
from crosstie.route.load import become
from crosstie.run.gateway.interfaces import HostedModels
from crosstie.run.service.process import Component, GatewayProcess
from crosstie.run.service.shared_pool import SharedPool, families
from crosstie.run.service.worker_link import Done, FollowerLoad, FollowerReport, LeaderState, WorkerAnswer

# How often it is seen who waits for what, and how often replicas are asked what they have.
_EVERY_S, _VERIFY_S = 0.1, 5.0
# A follower that has not been heard of for so long has nothing in flight any more.
_SILENT_S = 3.0


class Role:
    """What a worker does for shared pools: as their `Leader`, or as a `Follower`."""

    def __init__(self, process: GatewayProcess):
        self.process, self.gateway = process, process.gateway

    @property
    def models(self) -> Collection[str]:
        """Those that shared pools host."""
        raise NotImplementedError

    def waiting(self) -> set[str]:
        """Hosted models that somebody waits for because they are not loaded."""
        tickets = [(one.ticket, one.ask.model) for one in self.gateway.exchanges]
        return {model for ticket, model in tickets if ticket is not None and ticket.there and model in self.models}

    def is_loaded(self, model: str) -> bool:
        """In any pool that serves it, shared or not."""
        pools = self.gateway.live.by_model.get(model, ())
        return any(one.presence is None or one.presence.there for pool in pools for one in pool.replicas)


class Leader(Role):
    """Decides and loads. Before it puts a model away, the followers hear of it and say what they still have."""

    def __init__(
        self, process: GatewayProcess, settings: ResidencySettings | None, load_patience_s: float | None,
        wake: Callable[[], None],
    ):  # fmt: skip
        super().__init__(process)
        self._settings, self._load_patience_s, self._wake = settings, load_patience_s, wake
        self.pools: dict[str, SharedPool] = {}
        # The shared pools of each hosted model.
        self._of_model: dict[str, list[SharedPool]] = {}
        # What followers have in flight on each backend; what each of them waits for, and as of when.
        self._elsewhere: Counter[str] = Counter()
        self._waiting_elsewhere: dict[int, tuple[float, set[str]]] = {}
        self._ending: list[asyncio.Task[None]] = []

    @property
    def models(self) -> Collection[str]:
        return self._of_model.keys()

    def load_s(self, model: str) -> float:
        """How long it takes where it loads quickest."""
        return min(pool.residency.hosted[model].load_s for pool in self._of_model[model])

    def serve(self, fleet: Fleet) -> None:
        """A pool that the file has not changed goes on as it is."""
        before, self.pools, self._of_model = self.pools, {}, {}
        for pool in fleet.pools:
            if not pool.hosts:
                continue
            known = before.get(pool.name)
            if known is not None and known.pool == pool:
                before.pop(pool.name)
                known.bind()
            else:
                known = SharedPool(
                    self.gateway, self.process.catalog, pool, self._elsewhere, settings=self._settings,
                    load_patience_s=self._load_patience_s, before_unload=self._ask_followers,
                )  # fmt: skip
            self.pools[pool.name] = known
            for entry in pool.hosts:
                self._of_model.setdefault(entry.model, []).append(known)
        for name, gone in before.items():
            now = self.pools.get(name)
            if now is None:
                # The engines are somebody else's from here on.
                self._ending += gone.close()
            else:
                leaving = self.gateway.loop.create_task(gone.leave(now.loader.entries))
                now.start_after(leaving)
                self._ending.append(leaving)
        self._ending = [task for task in self._ending if not task.done()]

    def asked(self, model: str, times: int = 1) -> None:
        now = self.gateway.now()
        for pool in self._of_model.get(model, ()):
            for _ in range(times):
                pool.residency.asked(model, now)

    def absent(self, model: str) -> tuple[str, float]:
        """Why a hosted model is loaded nowhere, and after how many seconds to ask again."""
        return min((pool.absent(model) for pool in self._of_model[model]), key=lambda found: found[1])

    def doubted(self, replica: Replica, *, surely: bool) -> None:
        pool = self.pools.get(replica.pool.name)
        if pool is not None:
            pool.doubt(replica, surely)

    def verify(self) -> list[asyncio.Task[None]]:
        """Asks all replicas what they have."""
        return [task for pool in self.pools.values() for task in pool.ask(range(len(pool.slots)))]

    async def step(self, *, verify: bool) -> bool:
        """What is to be done now and again; True, because somebody leads."""
        heard = self.gateway.loop.time() - _SILENT_S
        elsewhere = (models for at, models in self._waiting_elsewhere.values() if at > heard)
        # A follower may not have read the file again yet.
        wanted = self.waiting().union(*elsewhere) & self._of_model.keys()
        if verify:
            self.verify()
        for pool in self.pools.values():
            pool.ask(list(pool.unsure))
            # One load is enough for whoever waits, where several pools host a model.
            others = [slot.loading for other in self.pools.values() if other is not pool for slot in other.slots]
            pool.begin_loads([model for model in wanted if model not in others])
        await self._ask_followers()
        return True

    async def _ask_followers(self) -> None:
        """Tells followers what is where, and hears what they have in flight after they have heard."""
        if self.process.link is None:
            return
        found: Counter[str] = Counter()
        for answer in await self.process.ask_others(self.state()):
            if isinstance(answer, FollowerLoad):
                found.update(answer.in_flight)
        # At once: loads that wait for others to finish read it at any time.
        self._elsewhere.clear()
        self._elsewhere.update(found)

    def hear(self, report: FollowerReport) -> None:
        for model, times in report.asked.items():
            self.asked(model, times)
        waiting = set(report.waiting) & self._of_model.keys()
        self._waiting_elsewhere[report.process] = self.gateway.loop.time(), waiting
        if waiting:
            self._wake()

    def state(self) -> LeaderState:
        presences = {one.key: one.presence for one in self.gateway.live.replicas() if one.presence is not None}
        states = {key: (presence.state, presence.why) for key, presence in presences.items()}
        return LeaderState(states, {model: self.absent(model) for model in self.models if not self.is_loaded(model)})

    def close(self) -> list[asyncio.Task[None]]:
        for pool in self.pools.values():
            self._ending += pool.close()
        return self._ending


class Follower(Role):
    """Reports to the leader, and takes what is where from it."""

    def __init__(self, process: GatewayProcess):
        super().__init__(process)
        self._load_s: dict[str, float] = {}
        # What was asked for and the leader has not heard of yet, and what that one says of models that are not loaded.
        self._asked: Counter[str] = Counter()
        self._absent: dict[str, tuple[str, float]] = {}

    @property
    def models(self) -> Collection[str]:
        return self._load_s.keys()

    def load_s(self, model: str) -> float:
        return self._load_s[model]

    def serve(self, fleet: Fleet) -> None:
        self._load_s = {}
        for pool in fleet.pools:
            for one in sizes(self.process.catalog, pool)[0] if pool.hosts else ():
                self._load_s[one.model] = min(one.load_s, self._load_s.get(one.model, one.load_s))

    def asked(self, model: str) -> None:
        self._asked[model] += 1

    def absent(self, model: str) -> tuple[str, float]:
        return self._absent.get(model, (f"{model} is not loaded", 1.0))

    def doubted(self, replica: Replica, *, surely: bool) -> None:
        if surely and replica.presence is not None:
            # The leader finds out by itself.
            become(replica, "asleep")

    async def step(self, *, verify: bool) -> bool:
        """Whether any leads."""
        report = FollowerReport(os.getpid(), dict(self._asked), sorted(self.waiting()))
        self._asked.clear()
        answers = await self.process.ask_others(report)
        leader = next((one for one in answers if isinstance(one, LeaderState)), None)
        if leader is not None:
            self.obey(leader)
        return leader is not None

    def obey(self, leader: LeaderState) -> None:
        self._absent = leader.absent
        for replica in self.gateway.live.replicas():
            state, why = leader.states.get(replica.key, ("asleep", ""))
            if replica.presence is not None and (replica.presence.state, replica.presence.why) != (state, why):
                become(replica, state, why)


class Hosting(HostedModels, Component):
    """The component: it has a role, which it changes for the leader's when nobody leads."""

    role: Leader | Follower

    def __init__(
        self, *, settings: ResidencySettings | None = None, load_patience_s: float | None = None,
        every_s: float = _EVERY_S, verify_s: float = _VERIFY_S,
    ):  # fmt: skip
        self._settings, self._load_patience_s = settings, load_patience_s
        self._every_s, self._verify_s = every_s, verify_s
        self._lock: int | None = None
        self._again = asyncio.Event()
        # What went wrong at last, so that it is reported once.
        self._fault = ""

    async def start(self, process: GatewayProcess) -> None:
        self._process, self.gateway = process, process.gateway
        self.role = self._leader() if self._has_lock() else Follower(process)
        self.role.serve(process.fleet)
        process.on(FollowerReport, self._on_report)
        process.on(LeaderState, self._on_leader_state)
        self.gateway.context.hosted = self
        self.gateway.metrics.sources.append(lambda: families(self.pools.values()))
        if isinstance(self.role, Leader):
            await asyncio.gather(*self.role.verify())
        self._task = self.gateway.loop.create_task(self._run())

    def reloaded(self, fleet: Fleet) -> None:
        self.role.serve(fleet)
        self._again.set()

    async def stop(self) -> None:
        self.gateway.context.hosted = None
        self._task.cancel()
        loads = self.role.close() if isinstance(self.role, Leader) else []
        await asyncio.gather(*loads, self._task, return_exceptions=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @property
    def pools(self) -> dict[str, SharedPool]:
        """A leader's."""
        return self.role.pools if isinstance(self.role, Leader) else {}

    # As what the gateway asks

    def asked(self, ask: Ask) -> tuple[str, float] | None:
        if ask.model not in self.role.models:
            return None
        self.role.asked(ask.model)
        if self.role.is_loaded(ask.model):
            return None
        ask.cold = True
        ask.patience_s += self.role.load_s(ask.model)
        self._again.set()
        why, retry_s = self.role.absent(ask.model)
        return (why, retry_s) if retry_s * self.gateway.speed > ask.patience_s else None

    def absent(self, model: str) -> tuple[str, float] | None:
        hosted = model in self.role.models and not self.role.is_loaded(model)
        return self.role.absent(model) if hosted else None

    def doubted(self, replica: Replica, *, surely: bool = False) -> None:
        self.role.doubted(replica, surely=surely)
        self._again.set()

    # Over time

    async def _run(self) -> None:
        due = self.gateway.loop.time() + self._verify_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s if self.role.models else None):
                    await self._again.wait()
            self._again.clear()
            verify = self.gateway.loop.time() >= due
            if verify:
                due = self.gateway.loop.time() + self._verify_s
            try:
                if not await self.role.step(verify=verify) and self._has_lock():
                    self.role = self._leader()
                    self.role.serve(self.gateway.live.fleet)
            except Exception as error:  # noqa: BLE001 (a loop that ended would load nothing any more)
                # Whatever went wrong once, models are loaded for as long as this serves.
                if self._fault != repr(error):
                    self._fault = repr(error)
                    self.gateway.notify(f"shared pools: {self._fault}")
                await asyncio.sleep(self._every_s)

    # Who leads

    def _leader(self) -> Leader:
        return Leader(self._process, self._settings, self._load_patience_s, self._again.set)

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

    def _on_report(self, report: FollowerReport) -> WorkerAnswer:
        if not isinstance(self.role, Leader):
            return Done()
        self.role.hear(report)
        return self.role.state()

    def _on_leader_state(self, state: LeaderState) -> WorkerAnswer:
        if isinstance(self.role, Follower):
            self.role.obey(state)
        hosted = [one for one in self.gateway.live.replicas() if one.presence is not None]
        return FollowerLoad({one.key: one.in_flight for one in hosted if one.in_flight})
