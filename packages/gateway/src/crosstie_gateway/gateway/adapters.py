"""Loads LoRA adapters into engines when a request needs one, and unloads idle ones where room is needed.

One load at a time on each backend. The engine is asked first what it has: other workers load there too, and a restarted
engine has nothing. vLLM's call is `/v1/load_lora_adapter`, SGLang's lies beside its /v1. Not compiled, since it waits
for sockets.
"""

import asyncio
from collections import Counter
from collections.abc import Callable

import msgspec

from crosstie.core.histogram import Family
from crosstie.route.live import Replica
from crosstie_gateway.gateway.backend import Backend
from crosstie_gateway.gateway.errors import without_address
from crosstie_gateway.gateway.fields import decode_models
from crosstie_gateway.gateway.notices import Notice

# How long an adapter that could not be loaded on a replica is not tried there again.
_AGAIN_S = 10.0
_MOST_SAID = 200


class AdapterLoader:
    """`now` is the router's clock, which runs `speed` times as fast as the loop's."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, now: Callable[[], float], speed: float, notify: Callable[[str], None]
    ):
        self._loop, self._now, self._speed, self._notify = loop, now, speed, notify
        # By replica and adapter; what comes of one is why it could not be loaded, None if it could.
        self._loads: dict[tuple[str, str], asyncio.Task[str | None]] = {}
        self._locks: dict[str, asyncio.Lock] = {}
        # By pool and by what came of it: loaded, unloaded, failed.
        self.counts: Counter[tuple[str, str]] = Counter()

    def load(self, backend: Backend, adapter: str, patience_s: float) -> "asyncio.Task[str | None]":
        """One load for all who wait. It goes on without them: the next request has use for it."""
        key = (backend.replica.key, adapter)
        load = self._loads.get(key)
        if load is None:
            load = self._loads[key] = self._loop.create_task(self._run(backend, adapter, patience_s))
            load.add_done_callback(lambda _: self._loads.pop(key))
        return load

    def close(self) -> None:
        for load in self._loads.values():
            load.cancel()

    async def _run(self, backend: Backend, adapter: str, patience_s: float) -> str | None:
        replica, pool = backend.replica, backend.pool
        why: str | None
        try:
            async with asyncio.timeout(patience_s):
                async with self._locks.setdefault(replica.key, asyncio.Lock()):
                    why = await self._loaded(backend, replica, adapter, patience_s)
        except TimeoutError:
            why = f"not within {patience_s:g} s"
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            why = without_address(error)
        if why is not None:
            self.counts[pool.name, "failed"] += 1
            if replica.adapters is not None:
                replica.adapters.failed(adapter, self._now() + _AGAIN_S * self._speed)
            line = f"pool {pool.name}: adapter {adapter} could not be loaded on {backend.origin.address.url}: {why}"
            self._notify(Notice("adapter_failed", "warning", line, pool=pool.name, adapter=adapter, why=why))
        return why

    async def _loaded(self, backend: Backend, replica: Replica, adapter: str, patience_s: float) -> str | None:
        """None: it is there; else why not."""
        slots, pool = replica.adapters, backend.pool
        paths = {known.name: known.path for known in pool.adapters}
        if slots is None or adapter not in paths:
            return "the fleet file has it no longer"
        answer = await backend.ask("GET", f"{backend.base.decode()}/models", patience_s)
        if answer.status == 200:
            listed = decode_models(answer.body).data
            slots.found([model.id for model in listed if model.id in paths])
        if slots.has(adapter):
            return None
        while slots.full:
            idle = slots.idle()
            if idle is None:
                return "all its places are in use"
            # Before it is unloaded, so that nobody is sent there for it meanwhile.
            slots.went(idle)
            await self._unload(backend, idle, patience_s)
        asked = {"lora_name": adapter, "lora_path": paths[adapter]}
        answer = await backend.ask("POST", f"{self._place(backend)}/load_lora_adapter", patience_s, asked)
        if answer.status >= 300 and b"already" not in answer.body:
            return f"its engine answered {answer.status}: {answer.words(_MOST_SAID)}"
        slots.came(adapter)
        self.counts[pool.name, "loaded"] += 1
        return None

    async def _unload(self, backend: Backend, adapter: str, patience_s: float) -> None:
        """An engine that does not have it any more is fine."""
        await backend.ask("POST", f"{self._place(backend)}/unload_lora_adapter", patience_s, {"lora_name": adapter})
        self.counts[backend.pool.name, "unloaded"] += 1

    @staticmethod
    def _place(backend: Backend) -> str:
        return (backend.root if backend.engine == "sglang" else backend.base).decode()

    def families(self) -> list[Family]:
        if not self.counts:
            return []
        counted = [({"pool": pool, "outcome": how}, float(count)) for (pool, how), count in self.counts.items()]
        return [("crosstie_adapter_loads_total", "counter", "LoRA adapters loaded and unloaded.", counted)]
