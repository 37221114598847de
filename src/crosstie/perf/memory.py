"""How a deployment fills memory: weights, adapters (LoRA), what the engine keeps, and what is left for the cache."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from crosstie.core.deployment import Deployment, Parallelism
from crosstie.core.model import Model, Precision, Tensor
from crosstie.perf.hardware import Array


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the fullest GPU of a replica."""

    capacity_bytes: float
    engine_bytes: float
    weight_bytes: float
    cache_bytes: float

    @property
    def fits(self) -> bool:
        return self.cache_bytes > 0


def weight_bytes_by_format(model: Model, precision: Precision) -> dict[str, float]:
    """Stored bytes of the whole model, by format; scales are counted with their weights."""
    totals: dict[str, float] = {}
    for tensor, layers in model.tensors():
        mix = precision[tensor.role]
        for format, share in zip(mix.formats, mix.fractions, strict=True):
            totals[format.id] = totals.get(format.id, 0.0) + tensor.parameters * layers * share * format.bytes
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def weight_bytes(model: Model, precision: Precision) -> float:
    return sum(weight_bytes_by_format(model, precision).values())


# The same weights are asked for on every accelerator and stack, and adding up their tensors is most of the work of
# sizing a replica. Models are told apart by identity, precisions by what they say.
_KNOWN: dict[tuple[int, str, Parallelism], tuple[Model, Precision, float]] = {}
_MOST_KNOWN = 10_000


def gpu_weight_bytes(deployment: Deployment) -> float:
    """Weights on the fullest GPU: its share of every tensor of the largest stage."""
    model, precision = deployment.model, deployment.precision
    key = id(model), precision.id, deployment.parallelism
    known = _KNOWN.get(key)
    if known is None or known[0] is not model or known[1] != precision:
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        known = _KNOWN[key] = model, precision, _gpu_weight_bytes(model, precision, deployment.parallelism)
    return known[2] + _draft_weight_bytes(deployment)


def _gpu_weight_bytes(model: Model, precision: Precision, split: Parallelism) -> float:
    layers = [(layer.count, sum(_stored_bytes(t, precision, split) for t in layer.tensors)) for layer in model.layers]
    outer = [_stored_bytes(tensor, precision, split) for tensor in model.outer]
    return heaviest_stage(layers, split.pp) + (sum(outer) if split.pp == 1 else max(outer))


def _draft_weight_bytes(deployment: Deployment) -> float:
    """The drafter sits on the last stage, and shares what it can with the model."""
    speculation, own = deployment.speculation, deployment.model.outer
    if speculation is None or speculation.drafter is None:
        return 0.0
    return sum(
        layers * _stored_bytes(tensor, deployment.precision, deployment.parallelism)
        for tensor, layers in speculation.drafter.tensors()
        if tensor not in own
    )


def _stored_bytes(tensor: Tensor, precision: Precision, split: Parallelism) -> float:
    return tensor.parameters * precision[tensor.role].bytes / shards(tensor, split)


def heaviest_stage(layers: list[tuple[int, float]], stages: int) -> float:
    """Bytes of the fullest stage if the heaviest of the (count, bytes) layers fell together."""
    left = math.ceil(sum(count for count, _ in layers) / stages)
    total = 0.0
    for count, size in sorted(layers, key=lambda layer: -layer[1]):
        taken = min(count, left)
        total += taken * size
        left -= taken
    return total


def shards(tensor: Tensor, split: Parallelism) -> float:
    """GPUs of a stage that hold different parts of a tensor."""
    if tensor.role.startswith("experts"):
        copies = split.expert_places(tensor.copies) * split.ep / tensor.copies
        return split.stage_gpus / copies
    if tensor.shard == "none":
        return 1.0
    return float(min(split.tp, tensor.max_shards))


def memory_plan(deployment: Deployment) -> MemoryPlan:
    capacity = deployment.accelerator.memory_bytes
    stack = deployment.stack
    weights, share = gpu_weight_bytes(deployment), stack.memory_fraction.value
    kept = stack.reserved.si + gpu_adapter_bytes(deployment)
    left = share * (capacity - weights - kept) if stack.memory_of == "free" else share * capacity - weights - kept
    return MemoryPlan(
        capacity_bytes=capacity,
        engine_bytes=(1.0 - share) * capacity + kept if left <= 0 else capacity - weights - left,
        weight_bytes=weights,
        cache_bytes=max(left, 0.0),
    )


def gpu_cache_bytes_per_sequence(deployment: Deployment, context: ArrayLike) -> Array:
    """Cache that one sequence takes on each GPU of the attention replica that serves it."""
    split, depth, speculation = deployment.parallelism, deployment.model.layer_count, deployment.speculation
    tokens = np.asarray(context, dtype=np.float64)

    def kept(model: Model, states: int) -> Array:
        total = np.zeros_like(tokens)
        for part in model.cache_parts(deployment.kv_bytes_per_element):
            rows = tokens if part.window is None else np.minimum(tokens, part.window)
            total = total + (states * part.fixed_bytes + part.bytes_per_token * rows) / min(split.tp, part.holders)
        return total

    # A draft that is refused takes its state with it, so there is one for every token that is verified.
    own = kept(deployment.model, speculation.queries if speculation else 1) * math.ceil(depth / split.pp) / depth
    return own + kept(speculation.drafter, 1) if speculation and speculation.drafter else own


def tier_tokens(deployment: Deployment, context: float, size_bytes: float, *, shared: bool) -> float:
    """Tokens of cache that other memory holds: what each GPU has of it holds that GPU's part of them, what all
    replicas share the whole."""
    if shared:
        return size_bytes * context / deployment.model.cache_bytes(context, deployment.kv_bytes_per_element)
    return size_bytes * context / float(gpu_cache_bytes_per_sequence(deployment, context))


def cache_sequences(deployment: Deployment, context: ArrayLike, shared: ArrayLike = 0.0) -> Array:
    """Sequences of `context` tokens whose cache a replica holds, over all its attention replicas.

    The first `shared` tokens are the same in all of them and held once by each attention replica.
    """
    left: Array = np.asarray(memory_plan(deployment).cache_bytes)
    per_sequence = gpu_cache_bytes_per_sequence(deployment, context)
    if np.any(shared):
        common = gpu_cache_bytes_per_sequence(deployment, shared) - gpu_cache_bytes_per_sequence(deployment, 0.0)
        left, per_sequence = np.maximum(left - common, 0.0), per_sequence - common
    return np.asarray(left / np.maximum(per_sequence, 1.0) * deployment.parallelism.dp)


def requests_that_fit(deployment: Deployment, input_tokens: int, output_tokens: int) -> int:
    """Whole requests in flight: some of them have just begun to answer, so none holds its whole answer on average."""
    held = input_tokens + deployment.stack.held_share * output_tokens
    return int(float(cache_sequences(deployment, held)) + 1e-9)


def sequences_that_fit(deployment: Deployment, context: int) -> int:
    """Whole sequences: each attention replica holds its own."""
    replicas = deployment.parallelism.dp
    return int(float(cache_sequences(deployment, context)) / replicas + 1e-9) * replicas


_ATTENTION = frozenset(("attention", "key", "value", "output"))
_FORWARD = frozenset(("mlp", "mlp_down", "shared", "shared_down"))
# Two projections of the feed-forward part, which are one product of the model.
_PAIRS = frozenset(("mlp", "shared"))
_BYTES = 2.0


def gpu_adapter_bytes(deployment: Deployment) -> float:
    """On each GPU: every slot has room for the largest rank, in 16 bits, on all layers of a stage.

    Of an adapter's two matrices engines split the one that meets the split side of the weight; experts have none.
    """
    held = deployment.adapters
    if held is None:
        return 0.0
    roles = _ATTENTION if held.targets == "attention" else _ATTENTION | _FORWARD
    sides = sum(layers * _sides(tensor, deployment.parallelism.tp)
                for tensor, layers in deployment.model.tensors() if tensor.role in roles)  # fmt: skip
    return held.slots * held.rank * sides * _BYTES / deployment.parallelism.pp


def _sides(tensor: Tensor, tp: int) -> float:
    """Inputs and outputs that one GPU has of the adapter of a matrix."""
    split = float(min(tp, tensor.max_shards))
    pairs = 2.0 if tensor.role in _PAIRS else 1.0
    if tensor.shard == "in":
        return tensor.cols / split + tensor.rows
    return pairs * tensor.cols + tensor.rows / (split if tensor.shard == "out" else 1.0)
