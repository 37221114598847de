"""What a model takes of a shared replica, and how long it takes to come: from weights, caches, links and disks."""

import math
from dataclasses import dataclass

import msgspec

from crosstie.catalog.loading import LoadingFacts
from crosstie.core.deployment import Accelerator, Deployment
from crosstie.core.workload import Sharing
from crosstie.host.hosted import Hosted
from crosstie.perf.memory import gpu_cache_bytes_per_sequence, gpu_weight_bytes, memory_plan


@dataclass(frozen=True, slots=True)
class LoadPath:
    """How weights come: at this rate, after this time, and what an engine keeps of each GPU while it is away."""

    bytes_per_s: float
    # Whether each GPU of a replica has a link of its own, or all read from one disk.
    by_gpu: bool
    fixed_s: float
    asleep_bytes: float

    def load_s(self, weight_bytes: float, gpus: int) -> float:
        """Of weights that are spread over so many GPUs."""
        return self.fixed_s + weight_bytes / (gpus if self.by_gpu else 1) / self.bytes_per_s


def load_path(facts: LoadingFacts, accelerator: Accelerator | None, sharing: Sharing) -> LoadPath:
    """From the host's memory (vLLM's sleep, level 1), from disk into an engine that is asleep (level 2), or anew.
    Without an accelerator the usual link is taken."""
    if sharing.load_from == "host":
        which = "" if accelerator is None else accelerator.id
        link = sharing.host_gb_per_s * 1e9 if sharing.host_gb_per_s else facts.link_of(which).si
        return LoadPath(link, True, facts.wake.si, facts.asleep.si)
    disk = sharing.disk_gb_per_s * 1e9 if sharing.disk_gb_per_s else facts.disk.si
    if sharing.load_from == "disk":
        return LoadPath(disk, False, facts.wake.si, facts.asleep.si)
    return LoadPath(disk, False, facts.start.si if sharing.start_s is None else sharing.start_s, 0.0)


def least_cache_bytes(deployment: Deployment, context: int, sequences: int) -> float:
    """On each GPU: the cache of so many requests of that length, as many as its attention replicas share."""
    each = float(gpu_cache_bytes_per_sequence(deployment, context))
    return each * math.ceil(sequences / deployment.parallelism.dp)


def hosted_model(
    deployment: Deployment,
    path: LoadPath,
    *,
    context: int,
    sequences: int,
    pinned: bool = False,
    weight_bytes: float | None = None,
) -> Hosted:
    """`weight_bytes`: of the whole replica, where they are known better than by model and precision."""
    gpus = deployment.parallelism.gpus
    weights = gpu_weight_bytes(deployment) * gpus if weight_bytes is None else weight_bytes
    # What it keeps while it sleeps is taken off every replica's memory once and for all.
    kept = max(deployment.stack.reserved.si - path.asleep_bytes, 0.0)
    return Hosted(
        deployment.model.id,
        weights + kept * gpus,
        path.load_s(weights, gpus),
        min_kv_bytes=least_cache_bytes(deployment, context, sequences) * gpus,
        pinned=pinned,
    )


def room_bytes(deployment: Deployment, path: LoadPath, models: int) -> float:
    """Of one replica, for those that are awake: the engine's share of memory, less what the sleepers keep."""
    whole = deployment.stack.memory_fraction.value * deployment.accelerator.memory_bytes
    return max(whole - models * path.asleep_bytes, 0.0) * deployment.parallelism.gpus


def with_cache_of(deployment: Deployment, cache_bytes: float) -> Deployment:
    """The same replica with so little memory that this cache is what weights and engine leave of it."""
    plan = memory_plan(deployment)
    more = max(plan.cache_bytes - cache_bytes, 0.0) / deployment.stack.memory_fraction.value
    memory, accelerator = deployment.accelerator.memory, deployment.accelerator
    known = memory.usable or memory.capacity
    less = msgspec.structs.replace(known, value=known.value * (1.0 - more / known.si))
    smaller = msgspec.structs.replace(accelerator, memory=msgspec.structs.replace(memory, usable=less))
    return msgspec.structs.replace(deployment, accelerator=smaller)
