"""One pool that hosts several models: what is loaded where, and the loads under way. `host.residency` decides and is
told what replicas have; its moves are made here."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from typing import Protocol

from crosstie.catalog.library import Catalog
from crosstie.core.fleet import Pool
from crosstie.core.histogram import Family, histogram_samples
from crosstie.host.hosted import Hosted, Move, ResidencySettings, Slot
from crosstie.host.residency import Residency
from crosstie.route.hosted_sizes import sizes
from crosstie.route.live import Replica
from crosstie.route.load import State, become
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.health import probe
from crosstie_gateway.hosting.loaders import LoadFailed, loader_of
from crosstie_gateway.share.peers import known_as

# A load may take so many times as long as it is said to, and so many seconds more.
_LATE, _LATER_S = 5.0, 60.0
# What one load teaches of how long the next will take.
_LEARN = 0.3
_POLL_S = 0.05
_COUNTERS = (
    ("crosstie_model_loads_total", "loads", "Models that were loaded on a replica of a shared pool."),
    ("crosstie_model_evictions_total", "evictions", "Models that were put away to make room for others."),
    ("crosstie_cold_requests_total", "cold_waits", "Requests that found their model loaded nowhere."),
    ("crosstie_load_failures_total", "failed", "Loads that failed."),
)
_LOAD_SECONDS = "crosstie_model_load_seconds"


class LoadGuard(Protocol):
    """Other processes and gateways may have the same replicas: who may change what is loaded there."""

    @property
    def leads(self) -> bool:
        """Whether this process does."""

    def elsewhere(self, key: str) -> int:
        """Requests that other processes and gateways have in flight on a backend."""

    async def before_unload(self) -> None:
        """Returns when all others that are heard of know which models leave, and have said what they still have of
        them."""

    async def claim(self, slots: Collection[str], for_s: float) -> bool:
        """Whether the machine behind these addresses is this gateway's to change for so long."""

    async def release(self, slots: Collection[str]) -> None:
        """Nothing is going on there any more."""


class _NotOurs(LoadFailed):
    """Somebody else may be changing that replica: no fault of the model's or the replica's."""


class SharedPool:
    def __init__(
        self, gateway: Gateway, catalog: Catalog, pool: Pool, guard: LoadGuard, *,
        settings: ResidencySettings | None = None, load_patience_s: float | None = None,
    ):  # fmt: skip
        self.gateway, self.pool, self.guard = gateway, pool, guard
        # By backend, what whoever leads says of it; empty: this process does, or nobody is heard of.
        self._told: dict[str, tuple[State, str]] = {}
        self.loader = loader_of(gateway, pool)
        self._load_patience_s = load_patience_s
        hosted, capacity = sizes(catalog, pool)
        self.slots = [Slot(f"{pool.name}/{index}", capacity) for index in range(pool.replicas)]
        self.residency = Residency(hosted, self.slots, gateway.now(), settings)
        # Until its engine was asked, nothing is decided about a replica.
        self.unsure = set(range(pool.replicas))
        self._moves: dict[int, asyncio.Task[None]] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        # What this pool was before a reload, while that is still being put away: see `leave`.
        self._before: asyncio.Task[None] | None = None
        # Loads that failed, on which replica, why, and from when on they may be tried there again.
        self._failed: dict[tuple[int, str], tuple[str, float, float]] = {}
        self._was_up: list[bool] = [True] * pool.replicas
        # Why replicas cannot be asked what they have: for the log.
        self._fault = ""
        self.bind()

    def bind(self) -> None:
        """Takes the live replicas, which a reload may have exchanged; what is known of them stays."""
        live = {pool.pool.model: pool for pool in self.gateway.live.pools if pool.name == self.pool.name}
        self.replicas: dict[tuple[int, str], Replica] = {
            (index, model): live[model].replicas[index]
            for model in self.loader.entries
            for index in range(len(self.slots))
        }
        for index, slot in enumerate(self.slots):
            if index not in self._moves:
                presences = {m: self.replicas[index, m].presence for m in self.loader.entries}
                there = [m for m, at in presences.items() if at is not None and at.state in ("resident", "leaving")]
                self.residency.observed(slot.key, there, self.gateway.now())

    def close(self) -> list[asyncio.Task[None]]:
        """Gives loads up; the caller waits for the tasks."""
        tasks = [*self._moves.values(), *self._asking.values()]
        for task in tasks:
            task.cancel()
        return tasks

    async def leave(self, kept: Collection[str]) -> None:
        """Gives loads up where possible; puts away what was half loaded, and models that left the file, after their
        last request."""
        loading = {index: self.slots[index].loading for index in self._moves} if self.loader.gives_up else {}
        tasks = self.close() if self.loader.gives_up else [*self._moves.values(), *self._asking.values()]
        await asyncio.gather(*tasks, return_exceptions=True)
        for index, slot in enumerate(self.slots):
            for model in {*slot.resident, loading.get(index)}:
                if model is not None and (model not in kept or model == loading.get(index)):
                    patience_s = self._patience_s(self.residency.hosted[model])
                    try:
                        async with self._claimed(index, 2.0 * patience_s + self.gateway.serving.drain_s):
                            await self._emptied(index, [model])
                            await self.loader.unload(index, model, patience_s)
                    except LoadFailed as error:
                        self.gateway.notify(f"pool {self.pool.name}: {model} is not put away: {error}")

    def start_after(self, before: asyncio.Task[None]) -> None:
        """Nothing is loaded before `before` has ended."""
        self._before = before

        def ended(task: asyncio.Task[None]) -> None:
            self._before = None
            self.unsure.update(range(len(self.slots)))

        before.add_done_callback(ended)

    # What is asked of it

    def begin_loads(self, waiting: Collection[str]) -> None:
        """Begins what is to be loaded, by who waits for what."""
        now = self.gateway.now()
        self._see_who_is_up(now)
        self.residency.only(waiting)
        for model in waiting:
            if model in self.loader.entries:
                move = self.residency.wanted(model, now, self.busy)
                if move is not None:
                    self._begin(move, now)
        for _ in self.slots:
            move = self.residency.ahead(now, self.busy)
            if move is None:
                break
            self._begin(move, now)
        self.show()

    def busy(self, slot_key: str, model: str) -> int:
        replica = self.replicas[self._index(slot_key), model]
        return replica.in_flight + self.guard.elsewhere(replica.key)

    def follow(self, states: Mapping[str, tuple[State, str]]) -> None:
        """Another process or gateway leads and says what is where; else engines do. Own loads are given up: they stay
        claimed until they must have ended."""
        self._told = dict(states)
        for task in self._moves.values():
            task.cancel()
        # Nobody leaves for what this one will not load.
        self.residency.only(())
        self.show()

    def lead(self) -> None:
        """From now on. What its replicas have is asked first."""
        self._told = {}
        self.unsure.update(range(len(self.slots)))

    def show(self) -> None:
        """Tells the router which models are where."""
        for (index, model), replica in self.replicas.items():
            state, why = self._state(index, model)
            presence = replica.presence
            if presence is not None and (presence.state != state or presence.why != why):
                become(replica, state, why)
            backend = self.gateway.backends.get(replica.key)
            if backend is not None and self.pool.loading == "hook":
                put_away = state != "resident"
                if backend.put_away != put_away:
                    backend.put_away = put_away
                    backend.judge(self.gateway.now())

    def absent(self, model: str) -> tuple[str, float]:
        """Why it is not loaded, and in how many seconds to ask again, in words for clients: addresses and commands are
        in the log."""
        waiting = self.residency.why_waiting(model)
        why = f"the engines of pool {self.pool.name} do not say what they have loaded" if self._fault else waiting.why
        if any(name == model for _, name in self._failed) and "failed" not in why:
            why = f"{why}; loading {model} failed before"
        return why, waiting.retry_s / self.gateway.speed

    def doubt(self, replica: Replica, surely: bool) -> None:
        """Has its machine asked what it has; a surely lost model gets no request until then."""
        for (index, model), other in self.replicas.items():
            if other is replica and index not in self._moves:
                slot = self.slots[index]
                if surely:
                    self._told.pop(replica.key, None)
                    self.residency.observed(slot.key, [m for m in slot.resident if m != model], self.gateway.now())
                self.unsure.add(index)
        self.show()

    def ask(self, indices: Iterable[int]) -> list[asyncio.Task[None]]:
        """Asks replicas what they have, each by itself: one that hangs holds up no other."""
        for index in indices:
            if index not in self._asking:
                task = self._asking[index] = self.gateway.loop.create_task(self._ask(index))
                task.add_done_callback(lambda task, index=index: self._asking.pop(index))  # type: ignore[misc]
        return list(self._asking.values())

    async def _ask(self, index: int) -> None:
        """Asks a replica what it has, unless it is being changed just now."""
        if index in self._moves or self._before is not None:
            return
        try:
            loaded = await self.loader.resident(index)
        except LoadFailed as error:
            if self._fault != str(error):
                self._fault = str(error)
                self.gateway.notify(f"pool {self.pool.name}: {error}")
            return
        if index in self._moves:
            return
        self._fault = ""
        slot, now = self.slots[index], self.gateway.now()
        there = [m for m, has in loaded.items() if has or (has is None and m in slot.resident)]
        if set(there) != set(slot.resident):
            self.residency.observed(slot.key, there, now)
        if any(has is not None for has in loaded.values()):
            self.unsure.discard(index)
        self.show()

    # What it does

    def _see_who_is_up(self, now: float) -> None:
        for index, slot in enumerate(self.slots):
            up = any(self.replicas[index, model].up for model in self.loader.entries)
            if up and not self._was_up[index]:
                # It may have been started anew, and then it has lost what it had.
                self.unsure.add(index)
            self._was_up[index] = up
            slot.usable = up and index not in self.unsure and self._before is None
            slot.unable = {model for model in self.loader.entries if not self._able(index, model, now)}

    def _able(self, index: int, model: str, now: float) -> bool:
        failed = self._failed.get((index, model))
        replica = self.replicas[index, model]
        return replica.up and not replica.draining and (failed is None or now >= failed[1])

    def _begin(self, move: Move, now: float) -> None:
        index = self._index(move.slot.key)
        self.residency.began(move, now)
        self.show()
        task = self._moves[index] = self.gateway.loop.create_task(self._make(move, index))
        task.add_done_callback(lambda task: self._made(task, move, index, now))

    async def _make(self, move: Move, index: int) -> None:
        patience_s = self._patience_s(move.load)
        # Each may be waited for twice, until it is done and until it says so.
        most_s = 2.0 * (len(move.evict) + 1) * patience_s + self.gateway.serving.drain_s
        async with self._claimed(index, most_s):
            await self._emptied(index, move.evict)
            for evicted in move.evict:
                self._check_lead()
                await self.loader.unload(index, evicted, patience_s)
            self._check_lead()
            await self.loader.load(index, move.load.model, patience_s)
        await probe(self.gateway.context, self.loader.backend(index, move.load.model))

    @contextlib.asynccontextmanager
    async def _claimed(self, index: int, for_s: float) -> AsyncIterator[None]:
        """Raises LoadFailed where another gateway may be changing that replica. What cannot be stopped stays claimed
        afterwards."""
        places = sorted(
            {known_as(self.loader.backend(index, m).replica.key.partition("#")[0]) for m in self.loader.entries}
        )
        if not await self.guard.claim(places, for_s):
            raise _NotOurs("another gateway may be loading there, or this one does not lead any more")
        try:
            async with asyncio.timeout(for_s):
                yield
        except TimeoutError:
            raise LoadFailed(f"it was not done within {for_s:g} s") from None
        except LoadFailed:
            if self.loader.gives_up:
                await self.guard.release(places)
            raise
        await self.guard.release(places)

    def _check_lead(self) -> None:
        if not self.guard.leads:
            raise _NotOurs("this gateway does not lead any more")

    def _made(self, task: asyncio.Task[None], move: Move, index: int, began: float) -> None:
        """The load has ended, for good or ill."""
        del self._moves[index]
        now = self.gateway.now()
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or isinstance(error, _NotOurs):
            why = "another gateway may be loading there" if error is not None else "its load was given up"
            self.residency.put_off(move, f"{move.load.model} is not loaded, and {why}", now)
            self.unsure.add(index)
        elif error is not None:
            self._gave_up(move, index, str(error) if isinstance(error, (LoadFailed, OSError)) else repr(error))
        else:
            self._failed.pop((index, move.load.model), None)
            self.residency.loaded(move, now)
            move.load.load_s += _LEARN * (now - began - move.load.load_s)
        self.show()

    def _gave_up(self, move: Move, index: int, why: str) -> None:
        model, now = move.load.model, self.gateway.now()
        self.residency.failed(move, now)
        wait_s = min(2.0 * self._failed.get((index, model), ("", 0.0, 2.5))[2], 300.0)
        self._failed[index, model] = why, now + wait_s, wait_s
        self.unsure.add(index)
        if any(self._able(other, model, now) for other in range(len(self.slots)) if other != index):
            # Another replica need not wait for this one.
            self.residency.retry(model)
        self.gateway.notify(f"pool {self.pool.name}: {model} could not be loaded on replica {index}: {why}")

    async def _emptied(self, index: int, models: Iterable[str]) -> None:
        """Waits until no process has requests for these models there."""
        if not models:
            return
        await self.guard.before_unload()
        slot = self.slots[index]
        deadline = self.gateway.loop.time() + self.gateway.serving.drain_s
        while any(self.busy(slot.key, model) for model in models):
            if self.gateway.loop.time() > deadline:
                raise LoadFailed("those in its way did not finish their requests")
            await asyncio.sleep(_POLL_S)

    def _patience_s(self, load: Hosted) -> float:
        return self._load_patience_s or _LATE * load.load_s / self.gateway.speed + _LATER_S

    def _state(self, index: int, model: str) -> tuple[State, str]:
        state = self._told.get(self.replicas[index, model].key)
        if state is not None:
            return state
        slot = self.slots[index]
        if slot.loading == model:
            return "loading", ""
        if model in slot.resident:
            return ("leaving", "") if model in slot.leaving else ("resident", "")
        failed = self._failed.get((index, model))
        return ("asleep", "") if failed is None else ("failed", failed[0])

    def _index(self, slot_key: str) -> int:
        return int(slot_key.rpartition("/")[2])


def families(pools: Iterable[SharedPool]) -> list[Family]:
    """What shared pools count, as Prometheus reads it."""
    pools = list(pools)
    if not pools:
        return []
    resident = [
        (
            {"pool": pool.pool.name, "backend": replica.key, "model": model},
            float(replica.presence is not None and replica.presence.there),
        )
        for pool in pools
        for (_, model), replica in pool.replicas.items()
    ]
    made: list[Family] = [("crosstie_model_resident", "gauge", "1 where a model of a shared pool is loaded.", resident)]
    tallies = [
        ({"pool": pool.pool.name, "model": model}, tally)
        for pool in pools
        for model, tally in pool.residency.counts.items()
    ]
    for name, field, meaning in _COUNTERS:
        made.append((name, "counter", meaning, [(dict(at), float(getattr(tally, field))) for at, tally in tallies]))
    took = [sample for at, tally in tallies for sample in histogram_samples(_LOAD_SECONDS, at, tally.load_s)]
    made.append((_LOAD_SECONDS, "histogram", "How long loads took, with what they put away.", took))
    return made
