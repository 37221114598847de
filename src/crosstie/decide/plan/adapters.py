"""Replicas of a model whose requests ask for adapters (LoRA): slots in memory, slower steps, wider intervals."""

import math
from collections.abc import Sequence

import msgspec
import numpy as np

from crosstie.catalog.lora import most_in_flight, popularity_of, shipped_lora, slots_of
from crosstie.core.deployment import Adapters, Deployment, LoraTargets
from crosstie.core.estimate import METRICS, Correction
from crosstie.core.workload import Lora, RequestClass
from crosstie.core.worlds import WORLDS
from crosstie.perf.worlds import two_piece

# What longer steps do to each metric.
_LONGER = [-1.0 if metric == "throughput" else 1.0 for metric in METRICS]


def with_adapters(deployments: Sequence[Deployment], classes: Sequence[RequestClass]) -> list[Deployment]:
    """The same with room for the adapters that the classes of their model ask for."""
    asked = [(request_class.lora, request_class.requests_per_s) for request_class in classes if request_class.lora]
    if not asked:
        return list(deployments)
    popularity = _together([(lora, rate) for lora, rate in asked], sum(one.requests_per_s for one in classes))
    slots = sum(slots_of(lora) for lora, _ in asked)
    rank = max(lora.rank for lora, _ in asked)
    targets: LoraTargets = "all" if any(lora.targets == "all" for lora, _ in asked) else "attention"
    most = most_in_flight(popularity, slots)
    facts = shipped_lora()
    found = []
    for deployment in deployments:
        low, likely, high = facts.speed(deployment.stack.id, moe=deployment.model.is_moe, rank=rank)
        adapters = Adapters(slots=slots, rank=rank, targets=targets, slowdown=1.0 / likely, max_sequences=most)
        correction = _wider(deployment.correction, math.log(likely / low), math.log(high / likely))
        found.append(msgspec.structs.replace(deployment, adapters=adapters, correction=correction))
    return found


def _together(asked: Sequence[tuple[Lora, float]], requests_per_s: float) -> list[float]:
    """Shares of a model's requests by adapter; those that ask for none need no slot."""
    return [share * rate / requests_per_s for lora, rate in asked for share in popularity_of(lora)]


def _wider(correction: Correction, slower: float, faster: float) -> Correction:
    """Nobody has measured this engine with adapters: what they cost is one more thing that differs between worlds."""
    if correction.worlds is None:
        return correction
    one = np.random.default_rng(list(b"adapters")).standard_normal(WORLDS // 2)
    longer = two_piece(np.concatenate([one, -one]), -faster, slower)
    return msgspec.structs.replace(correction, worlds=correction.worlds.off_by(np.outer(longer, _LONGER)))
