"""A shared pool of emulated replicas behind a gateway that loads its models, on one loop."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
from tests.run.gateway.fakes import CATALOG, Running, fleet_of, running

from crosstie.core.deployment import Parallelism
from crosstie.core.fleet import Fleet, HostedModel, Pool, Serving
from crosstie_gateway.emulate.fleet import EmulatedFleet, start
from crosstie_gateway.emulate.hosted import EmulatedRouter, HostedEngine
from crosstie_gateway.hosting.hosting import Hosting
from crosstie_gateway.hosting.shared_pool import SharedPool

MODELS = ("llama-3.1-8b", "qwen3-8b", "mistral-7b", "gpt-oss-20b", "qwen3-30b-a3b", "gemma-3-27b")
SPEED = 20.0
# Emulated time, a twentieth of it by the clock: patient enough that nobody is turned away on a busy machine unless a
# test wants it.
PATIENT = Serving(
    connect_timeout_s=600.0, first_byte_timeout_s=2400.0, idle_timeout_s=2400.0, queue_s=600.0, health_every_s=0.2,
    metrics_every_s=0.1, slow_start_s=0.0, drain_s=600.0,
)  # fmt: skip


def shared_pool(*models: str, replicas: int = 2, memory_gib: float = 45.0, pinned: str = "", **changes: Any) -> Pool:
    """Each model takes 20 GiB and two seconds to load: two of them fit on a replica."""
    hosts = tuple(
        HostedModel(
            model=name,
            precision="native" if name.startswith("gpt-oss") else "fp8",
            memory_gib=20.0,
            load_s=2.0,
            max_context=8192,
            pinned=name == pinned,
        )
        for name in models
    )
    values: dict[str, Any] = {
        "name": "shared", "model": models[0], "accelerator": "mi300x", "parallelism": Parallelism(),
        "precision": None, "kv_format": "bf16", "stack": "vllm", "replicas": replicas, "usd_per_gpu_hour": 1.3,
        "max_in_flight": 64, "max_context": 8192, "hosts": hosts, "loading": "vllm-sleep",
        "host_memory_gib": memory_gib,
    }  # fmt: skip
    return Pool(**{**values, **changes})


class Hosted(NamedTuple):
    running: Running
    emulated: EmulatedFleet
    hosting: Hosting

    @property
    def pool(self) -> SharedPool:
        return self.hosting.pools["shared"]

    def engine(self, index: int, model: str) -> HostedEngine:
        """The emulated engine of a model on a machine."""
        for server in self.emulated.replicas:
            for one in server.engines.values() if isinstance(server, EmulatedRouter) else [server]:
                assert isinstance(one, HostedEngine)
                if one.index == index and one.takes.model == model:
                    return one
        raise AssertionError(f"no {model} on machine {index}")

    def state(self, index: int, model: str) -> str:
        presence = self.pool.replicas[index, model].presence
        assert presence is not None
        return presence.state

    def where(self, model: str) -> list[int]:
        return [index for index in range(len(self.pool.slots)) if self.state(index, model) == "resident"]

    def count(self, what: str, model: str | None = None) -> int:
        counts = self.pool.residency.counts
        return sum(getattr(each, what) for each in (counts.values() if model is None else [counts[model]]))


@asynccontextmanager
async def hosted(
    *pools: Pool, serving: Serving = PATIENT, emulated: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[Hosted]:
    fleet = fleet_of(*pools, serving=serving)
    made = await start(CATALOG, fleet, speed=SPEED, **(emulated or {}))
    hosting = Hosting(**{"every_s": 0.02, "verify_s": 0.2, **settings})
    try:
        async with running(made.fleet, components=[hosting], speed=SPEED) as one:
            yield Hosted(one, made, hosting)
            await hosting.stop()
    finally:
        await made.close()


def with_hosts(fleet: Fleet, *models: str) -> Fleet:
    """The fleet with only these models in its first pool."""
    first, *others = fleet.pools
    hosts = tuple(one for one in first.hosts if one.model in models)
    changed = msgspec.structs.replace(first, hosts=hosts, model=hosts[0].model)
    return msgspec.structs.replace(fleet, pools=(changed, *others))
