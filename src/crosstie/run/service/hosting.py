"""The part of a gateway that keeps the models of shared pools where they are asked for.

Of several processes that serve the same fleet one decides, whoever holds a lock; the others tell it what they are asked
for and what they have in flight, and learn from it what is where. Without siblings there is nothing to agree on.
"""

import asyncio
import contextlib
import fcntl
import os
from collections import Counter
from typing import Any

from crosstie.core.fleet import Fleet
from crosstie.host.hosted import ResidencySettings
from crosstie.route.ask import Ask
from crosstie.route.live import Replica
from crosstie.route.load import become
from crosstie.run.gateway.interfaces import HostedModels
from crosstie.run.service.hosting_metrics import families
from crosstie.run.service.process import Serve
from crosstie.run.service.shared_pool import SharedPool

_VERB = "hosting"
# How often it is looked who waits for what, and how often replicas are asked what they have.
_EVERY_S, _VERIFY_S = 0.1, 5.0
# A sibling that has not been heard of for so long has nothing in flight any more.
_SILENT_S = 3.0


class Hosting(HostedModels):
    def __init__(
        self,
        *,
        settings: ResidencySettings | None = None,
        load_patience_s: float | None = None,
        every_s: float = _EVERY_S,
        verify_s: float = _VERIFY_S,
    ):
        self._settings, self._load_patience_s = settings, load_patience_s
        self._every_s, self._verify_s = every_s, verify_s
        self.pools: dict[str, SharedPool] = {}
        # The shared pools of each hosted model.
        self._of_model: dict[str, list[SharedPool]] = {}
        # What siblings have in flight on each backend; what each of them waits for, and as of when.
        self._elsewhere: Counter[str] = Counter()
        self._waiting_elsewhere: dict[int, tuple[float, set[str]]] = {}
        # What this one was asked for and the one that leads has not heard of yet, and what that one says of the absent.
        self._asked: Counter[str] = Counter()
        self._told_cold: dict[str, tuple[str, float]] = {}
        self.leads = True
        self._lock: int | None = None
        self._task: asyncio.Task[None] | None = None
        self._ending: list[asyncio.Task[None]] = []
        self._again = asyncio.Event()
        # What went wrong at last, so that it is told of once.
        self._fault = ""

    # As a part of the gateway

    async def start(self, serve: Serve) -> None:
        self._serve, self.gateway = serve, serve.gateway
        serve.verbs[_VERB] = self._answer
        self._build(serve.fleet)
        self.gateway.context.hosted = self
        self.gateway.metrics.sources.append(lambda: families(self.pools.values()) if self.leads else [])
        self._lead()
        if self.leads:
            asking = [task for pool in self.pools.values() for task in pool.ask(range(len(pool.slots)))]
            await asyncio.gather(*asking)
        self._task = self.gateway.loop.create_task(self._run())

    def reloaded(self, fleet: Fleet) -> None:
        self._build(fleet)
        self._again.set()

    async def stop(self) -> None:
        self.gateway.context.hosted = None
        for pool in self.pools.values():
            self._ending += pool.close()
        if self._task is not None:
            self._task.cancel()
            self._ending.append(self._task)
        await asyncio.gather(*self._ending, return_exceptions=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _build(self, fleet: Fleet) -> None:
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
                    self.gateway, self._serve.catalog, pool, self._elsewhere, settings=self._settings,
                    load_patience_s=self._load_patience_s, before_unload=self._hear_all,
                )  # fmt: skip
            self.pools[pool.name] = known
            for entry in pool.hosts:
                self._of_model.setdefault(entry.model, []).append(known)
        for name, gone in before.items():
            now = self.pools.get(name)
            if now is None or not self.leads:
                # The engines are somebody else's from here on, or the leader's to care for.
                self._ending += gone.close()
            else:
                leaving = self.gateway.loop.create_task(gone.leave(now.loader.entries))
                now.follow(leaving)
                self._ending.append(leaving)
        self._ending = [task for task in self._ending if not task.done()]

    # As what the gateway asks

    def asked(self, ask: Ask) -> tuple[str, float] | None:
        pools = self._of_model.get(ask.model)
        if pools is None:
            return None
        if self.leads:
            now = self.gateway.now()
            for pool in pools:
                pool.residency.asked(ask.model, now)
        else:
            self._asked[ask.model] += 1
        if self._is_there(ask.model):
            return None
        ask.cold = True
        ask.patience_s += min(pool.load_s(ask.model) for pool in pools)
        self._again.set()
        why, retry_s = self.absent(ask.model) or ("", 0.0)
        return (why, retry_s) if retry_s * self.gateway.speed > ask.patience_s else None

    def absent(self, model: str) -> tuple[str, float] | None:
        pools = self._of_model.get(model)
        if pools is None or self._is_there(model):
            return None
        if not self.leads:
            return self._told_cold.get(model, (f"{model} is not loaded", 1.0))
        return min((pool.absent(model) for pool in pools), key=lambda told: told[1])

    def doubted(self, replica: Replica, *, surely: bool = False) -> None:
        pool = self.pools.get(replica.pool.name)
        if pool is not None and self.leads:
            pool.doubt(replica, surely)
        elif surely and replica.presence is not None:
            # The one that leads finds out by itself.
            become(replica, "asleep")
        self._again.set()

    def _is_there(self, model: str) -> bool:
        """In any pool that serves it, shared or not."""
        for pool in self.gateway.live.by_model.get(model, ()):
            for one in pool.replicas:
                if one.presence is None or one.presence.there:
                    return True
        return False

    def _waiting(self) -> set[str]:
        """Models that somebody waits for, and nobody else."""
        found = set()
        for exchange in self.gateway.exchanges:
            ticket = exchange.ticket
            if ticket is not None and ticket.there and exchange.ask.model in self._of_model:
                found.add(exchange.ask.model)
        return found

    # Over time

    async def _run(self) -> None:
        due = self.gateway.loop.time() + self._verify_s
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every_s if self.pools else None):
                    await self._again.wait()
            self._again.clear()
            all_of_them = self.gateway.loop.time() >= due
            if all_of_them:
                due = self.gateway.loop.time() + self._verify_s
            try:
                await (self._lead_on(all_of_them) if self.leads else self._follow())
            except Exception as error:  # noqa: BLE001 (a loop that ended would load nothing any more)
                # Whatever went wrong once, models are loaded for as long as this serves.
                if self._fault != repr(error):
                    self._fault = repr(error)
                    self.gateway.notify(f"shared pools: {self._fault}")
                await asyncio.sleep(self._every_s)

    async def _lead_on(self, all_of_them: bool) -> None:
        """Asks replicas what they have, those in doubt or all, and begins what is to be loaded."""
        # A sibling may not have read the file again yet.
        wanted = self._waiting().union(*self._wanted_elsewhere()) & self._of_model.keys()
        for pool in self.pools.values():
            pool.ask(range(len(pool.slots)) if all_of_them else list(pool.unsure))
            pool.look([model for model in wanted if not self._is_loading_elsewhere(model, pool)])
        if self._serve.siblings is not None:
            await self._hear_all()

    def _is_loading_elsewhere(self, model: str, pool: SharedPool) -> bool:
        """One load is enough for whoever waits, where several pools host a model."""
        return any(other is not pool and other.is_loading(model) for other in self._of_model[model])

    # Among siblings

    def _lead(self) -> None:
        """One of the processes that one parent has started holds the lock; it is free as soon as that process ends."""
        if self._serve.siblings is None:
            return
        if self._lock is None:
            # In their own folder, which goes when the last of them has ended.
            self._lock = os.open(self._serve.siblings.folder / "hosting.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.leads = False
            return
        if not self.leads:
            self.leads = True
            self._build(self.gateway.live.fleet)
            for pool in self.pools.values():
                pool.unsure.update(range(len(pool.slots)))

    async def _follow(self) -> None:
        """Tells the one that leads, and does as it says. Where none does, this one tries to."""
        siblings = self._serve.siblings
        told = {"process": os.getpid(), "asked": dict(self._asked), "waiting": sorted(self._waiting())}
        self._asked.clear()
        answers = await siblings.ask(_VERB, told) if siblings is not None else []
        leader = next((one for one in answers if one.get("leads")), None)
        if leader is None:
            self._lead()
        else:
            self._take(leader)

    async def _hear_all(self) -> None:
        """Tells siblings what is where, and hears what they have in flight after they have heard."""
        siblings = self._serve.siblings
        if siblings is None or not self.leads:
            return
        found: Counter[str] = Counter()
        for answer in await siblings.ask(_VERB, self._known()):
            found.update(answer.get("busy", {}))
        # At once: loads that wait for others to finish look at it at any time.
        self._elsewhere.clear()
        self._elsewhere.update(found)

    def _wanted_elsewhere(self) -> list[set[str]]:
        heard = self.gateway.loop.time() - _SILENT_S
        return [models for at, models in self._waiting_elsewhere.values() if at > heard]

    def _answer(self, what: dict[str, Any]) -> dict[str, Any]:
        """What another process asks: a leader tells what is where, a follower what it has in flight."""
        if what.get("leads"):
            self._take(what)
            return self._own()
        if not self.leads:
            return {}
        now = self.gateway.now()
        for model, times in what.get("asked", {}).items():
            for pool in self._of_model.get(model, ()):
                for _ in range(int(times)):
                    pool.residency.asked(model, now)
        waiting = set(what.get("waiting", ())) & self._of_model.keys()
        self._waiting_elsewhere[int(what.get("process", 0))] = self.gateway.loop.time(), waiting
        if waiting:
            self._again.set()
        return self._known()

    def _own(self) -> dict[str, Any]:
        busy = {one.key: one.in_flight for pool in self.pools.values() for one in pool.replicas.values()}
        return {"busy": {key: count for key, count in busy.items() if count}}

    def _known(self) -> dict[str, Any]:
        states = {
            one.key: [one.presence.state, one.presence.why]
            for pool in self.pools.values()
            for one in pool.replicas.values()
            if one.presence is not None
        }
        cold = {model: self.absent(model) for model in self._of_model}
        return {"leads": True, "states": states, "cold": {model: told for model, told in cold.items() if told}}

    def _take(self, leader: dict[str, Any]) -> None:
        self._told_cold = {model: (str(why), float(s)) for model, (why, s) in leader.get("cold", {}).items()}
        states = leader.get("states", {})
        for pool in self.pools.values():
            for replica in pool.replicas.values():
                state, why = states.get(replica.key, ("asleep", ""))
                if replica.presence is not None and (replica.presence.state, replica.presence.why) != (state, why):
                    become(replica, state, why)
