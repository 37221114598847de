"""Steady state of a replica under continuous batching, in closed form.

`concurrency` clients each send a request, wait for it and send the next. Prefill is a queue that
serves prompts one chunk at a time; decode is a delay that all running sequences share. With

    S   time to prefill one prompt while others decode     Z   time to decode all its other tokens
    C   clients                                            R   time in the prefill queue (TTFT)

mean-value analysis (Schweitzer) gives R = S (1 + (C-1)/C * X R) at throughput X = C / (R + Z), hence

    R = (S C - Z + sqrt((S C - Z)^2 + 4 S Z)) / 2

which is S when the queue is idle and S C - Z when it is the bottleneck. S and Z depend on how many
sequences decode, which is X Z: a root to find. A request that arrives while
others run also waits for half a step, and pays what the engine's host takes per request.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from crosstie.core.errors import BadInput
from crosstie.perf.hardware import Array, Hardware, Mask
from crosstie.perf.memory import gpu_cache_bytes_per_sequence, memory_plan
from crosstie.perf.step import StepCost, shape, step

# From a thousandth of a sequence to a thousand: 16 halvings leave 0.02%.
_BISECTIONS = 16
# Fewer decoding sequences than this are none: requests of one token never decode.
_FEWEST = 1e-3


class Steady(NamedTuple):
    """Arrays of shape (deployments, points)."""

    ttft_s: Array
    # Mean TTFT if all clients sent their first request at the same moment, as benchmarks do.
    ttft_burst_s: Array
    tpot_s: Array
    requests_per_s: Array
    output_tokens_per_s: Array
    decoding: Array
    concurrency_that_fits: Array
    # One chunk of a prompt alone, and one decode step at the steady batch: what binds each.
    prefill: StepCost
    decode: StepCost
    capacity_binds: Mask


def serve(hardware: Hardware, concurrency: ArrayLike, input_tokens: ArrayLike, output_tokens: ArrayLike) -> Steady:
    """What `concurrency` closed-loop clients get; arguments broadcast against (deployments, points)."""
    clients, inputs, outputs = (np.asarray(a, dtype=np.float64) for a in (concurrency, input_tokens, output_tokens))
    for name, values, least in (("concurrency", clients, 1), ("input", inputs, 1), ("output", outputs, 1)):
        if np.any(values < least) or not np.all(np.isfinite(values)):
            raise BadInput(f"{name} must be at least {least}")
    later = outputs - 1.0
    context = inputs + outputs / 2.0
    fits = sequence_capacity(hardware, context)
    admitted = np.minimum(clients, np.maximum(fits, 1.0))
    load = _Load(admitted, inputs, later, context)
    decoding = _settle(hardware, load)
    steps = _steps(hardware, decoding, load)
    cycle = _cycle(hardware, decoding, steps.decode.total_s, steps.chunk_s, load)
    rate, tpot = cycle.requests_per_s, cycle.tpot_s
    # Clients that memory keeps out wait before their prefill.
    outside = (clients - admitted) / rate
    burst = hardware.host_request_s + cycle.prefill_s * 0.5 * (admitted + 1.0) + outside
    return Steady(
        ttft_s=cycle.ttft_s + outside,
        ttft_burst_s=burst,
        tpot_s=tpot,
        requests_per_s=rate,
        output_tokens_per_s=rate * outputs,
        decoding=decoding,
        concurrency_that_fits=fits,
        prefill=_prefill_alone(hardware, inputs),
        decode=steps.decode,
        capacity_binds=clients > admitted,
    )


class _Load(NamedTuple):
    """Clients that memory admits, prompt tokens, tokens after the first, and the mean context."""

    admitted: Array
    inputs: Array
    later: Array
    context: Array


class _Steps(NamedTuple):
    decode: StepCost
    chunk_s: Array


class _Cycle(NamedTuple):
    """A client's round trip."""

    prefill_s: Array
    tpot_s: Array
    ttft_s: Array
    requests_per_s: Array
    # How many sequences then decode: X Z.
    decoding: Array


def _settle(hardware: Hardware, load: _Load) -> Array:
    """The number of decoding sequences that reproduces itself.

    More of them make steps longer and the queue shorter, so the number that follows falls short of a
    large guess and exceeds a small one. Steps are computed at four numbers and interpolated between;
    bisection then costs next to nothing, and the caller computes the steps at the answer.
    """
    grid = _landmarks(hardware, load)
    at = [_steps(hardware, sequences, load) for sequences in grid]
    decode_s, chunk_s = [steps.decode.total_s for steps in at], [steps.chunk_s for steps in at]
    low, high = np.log(_FEWEST) + 0.0 * decode_s[0], np.log(load.admitted) + 0.0 * decode_s[0]
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        sequences = np.exp(middle)
        between = _between(grid, sequences)
        cycle = _cycle(hardware, sequences, _blend(decode_s, between), _blend(chunk_s, between), load)
        exceeds = cycle.decoding > sequences
        low, high = np.where(exceeds, middle, low), np.where(exceeds, high, middle)
    return np.asarray(np.exp(0.5 * (low + high)))


def _landmarks(hardware: Hardware, load: _Load) -> list[Array]:
    """One sequence, all of them, and between them where chunks begin to grow and where they are full."""
    per_sequence, _ = _chunk(hardware, np.ones_like(load.admitted), load)
    grows = np.minimum(load.inputs, hardware.chunk_tokens) / np.maximum(per_sequence, 1e-12)
    full = hardware.chunk_tokens / np.maximum(per_sequence, 1e-12)
    one = np.ones_like(load.admitted)
    return [one, np.clip(grows, one, load.admitted), np.clip(full, one, load.admitted), load.admitted]


def _between(grid: list[Array], value: Array) -> list[Array]:
    """For each interval of the grid, how far into it the value lies: 0 before it, 1 after it."""
    return [np.clip((value - left) / np.maximum(right - left, 1e-12), 0.0, 1.0) for left, right in pairwise(grid)]


def _blend(values: list[Array], between: list[Array]) -> Array:
    total = values[0]
    for (left, right), share in zip(pairwise(values), between, strict=True):
        total = total + share * (right - left)
    return total


def _others(load: _Load) -> Array:
    """Share of the clients that are not oneself."""
    return (load.admitted - 1.0) / load.admitted


def _chunk(hardware: Hardware, decoding: Array, load: _Load) -> tuple[Array, Array]:
    """Prompt tokens that the others bring while every running sequence makes one token, and the chunk."""
    demand = _others(load) * decoding / hardware.pp * load.inputs / np.maximum(load.later, 1.0)
    least = np.minimum(load.inputs, hardware.chunk_tokens)
    return demand, np.clip(demand, least, hardware.chunk_tokens)


def _steps(hardware: Hardware, decoding: Array, load: _Load) -> _Steps:
    """A decode step, and the time of a step that carries a chunk of a prompt."""
    # A pipeline works on that many batches in turn; a step has at least one sequence.
    sequences = decoding / hardware.pp
    decode = step(hardware, shape(np.maximum(sequences, 1.0), load.context))
    _, chunk = _chunk(hardware, decoding, load)
    span = np.minimum(chunk, load.inputs)
    riding = np.where(hardware.prefill_first, 0.0, _others(load) * sequences)
    # Chunks of a prompt start between its beginning and its end: on average half of what is left.
    mixed = step(hardware, shape(riding, load.context, chunk, 0.5 * (load.inputs - span), span))
    return _Steps(decode, mixed.total_s)


def _cycle(hardware: Hardware, decoding: Array, decode_s: Array, chunk_s: Array, load: _Load) -> _Cycle:
    demand, chunk = _chunk(hardware, decoding, load)
    # Steps that carry the others' prompts are longer.
    carrying = demand / chunk
    mixing = decode_s + np.minimum(carrying, 1.0) * np.maximum(chunk_s - decode_s, 0.0)
    tpot = np.where(hardware.prefill_first, decode_s + carrying * chunk_s, mixing)
    chunks = load.inputs / chunk
    # In a pipeline the stages work on different chunks at once.
    prefill_s = chunks * chunk_s / np.maximum(np.minimum(hardware.pp, chunks), 1.0)
    delay = load.later * tpot
    excess = prefill_s * load.admitted - delay
    queue = 0.5 * (excess + np.sqrt(excess * excess + 4.0 * prefill_s * delay))
    ttft = queue + 0.5 * tpot * _others(load) + hardware.host_request_s
    rate = load.admitted / (ttft + delay)
    return _Cycle(prefill_s, tpot, ttft, rate, rate * delay)


def _prefill_alone(hardware: Hardware, inputs: Array) -> StepCost:
    chunk = np.minimum(inputs, hardware.chunk_tokens)
    return step(hardware, shape(prefill_tokens=chunk, prefill_start=0.5 * (inputs - chunk)))


def sequence_capacity(hardware: Hardware, context: Array) -> Array:
    """Sequences of a context that each replica can run at once: memory and the engine's own limit."""
    rows = []
    for deployment in hardware.deployments:
        left = memory_plan(deployment).cache_bytes
        per_sequence = np.maximum(gpu_cache_bytes_per_sequence(deployment, context), 1.0)
        held = left / per_sequence * deployment.parallelism.dp
        most = deployment.stack.max_sequences_on(deployment.accelerator.memory_bytes)
        rows.append(np.minimum(np.atleast_1d(np.squeeze(held)), most * deployment.parallelism.dp))
    return np.stack(rows)


def single_stream_ceiling(weight_bytes_read: float, memory_bytes_per_s: float, gpus: int = 1) -> float:
    """Tokens/s that no engine can exceed: every token reads the active weights once."""
    return gpus * memory_bytes_per_s / weight_bytes_read
