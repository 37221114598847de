"""Steady state of a replica under continuous batching, in closed form.

`concurrency` clients each send a request, wait for it and send the next. Prefill is a queue that
serves prompts one chunk at a time; decode is a delay that all running sequences share. With

    S   time to prefill one prompt while others decode     Z   time to decode all its other tokens
    C   clients                                            R   time in the prefill queue (TTFT)

mean-value analysis (Schweitzer) gives R = S (1 + (C-1)/C * X R) at throughput X = C / (R + Z), hence

    R = (S C - Z + sqrt((S C - Z)^2 + 4 S Z)) / 2

which is S when the queue is idle and S C - Z when it is the bottleneck. S and Z depend on how many
sequences decode, so the two are iterated; the number of rounds is fixed. A request that arrives while
others run also waits for half a step, and pays what the engine's host takes per request.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from crosstie.core.errors import BadInput
from crosstie.perf.hardware import Array, Hardware, Mask
from crosstie.perf.memory import gpu_cache_bytes_per_sequence, memory_plan
from crosstie.perf.step import StepCost, shape, step

_ROUNDS = 4


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
    decoding = admitted
    for _ in range(_ROUNDS):
        decode, prefill_s, tpot = _round(hardware, decoding, admitted, inputs, later, context)
        delay = later * tpot
        excess = prefill_s * admitted - delay
        waiting = 0.5 * tpot * (1.0 - 1.0 / admitted) + hardware.host_request_s
        ttft = waiting + 0.5 * (excess + np.sqrt(excess * excess + 4.0 * prefill_s * delay))
        rate = admitted / (ttft + delay)
        # Half of the way: the number that decode and the time they take pull on one another.
        decoding = 0.5 * (decoding + np.maximum(rate * delay, np.minimum(admitted, 1.0)))
    # Clients that memory keeps out wait before their prefill.
    ttft = ttft + (clients - admitted) / rate
    burst = hardware.host_request_s + prefill_s * 0.5 * (admitted + 1.0) + (clients - admitted) / rate
    return Steady(
        ttft_s=ttft,
        ttft_burst_s=burst,
        tpot_s=tpot,
        requests_per_s=rate,
        output_tokens_per_s=rate * outputs,
        decoding=decoding,
        concurrency_that_fits=fits,
        prefill=_prefill_alone(hardware, inputs),
        decode=decode,
        capacity_binds=clients > admitted,
    )


def _round(
    hardware: Hardware, decoding: Array, admitted: Array, inputs: Array, later: Array, context: Array
) -> tuple[StepCost, Array, Array]:
    """Cost of a decode step, time to prefill a prompt among decoding sequences, and the TPOT."""
    pp = hardware.pp
    # A pipeline works on that many batches in turn, as long as there are sequences to fill them.
    sequences = np.maximum(decoding / pp, np.minimum(decoding, 1.0))
    decode = step(hardware, shape(decode_sequences=sequences, decode_context=context))
    # Prompt tokens that the other clients bring while every running sequence makes one token.
    others = (admitted - 1.0) / admitted
    demand = others * sequences * inputs / np.maximum(later, 1.0)
    chunk = np.clip(demand, np.minimum(inputs, hardware.chunk_tokens), hardware.chunk_tokens)
    span = np.minimum(chunk, inputs)
    riding = np.where(hardware.prefill_first, 0.0, others * sequences)
    mixed = step(
        hardware,
        # Chunks of a prompt start between its beginning and its end: on average half of what is left.
        shape(riding, context, chunk, 0.5 * (inputs - span), span),
    )
    chunks = inputs / chunk
    chunk_s, decode_s = mixed.total_s, decode.total_s
    # Steps that carry those prompts are longer.
    carrying = demand / chunk
    stretched = np.where(
        hardware.prefill_first,
        decode_s + carrying * chunk_s,
        decode_s + np.minimum(carrying, 1.0) * np.maximum(chunk_s - decode_s, 0.0),
    )
    # In a pipeline the stages work on different chunks at once.
    prefill_s = chunks * chunk_s / np.where(chunks > 1, np.minimum(pp, chunks), 1.0)
    return decode, prefill_s, stretched


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
