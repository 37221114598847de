"""Steady state of a replica under continuous batching, in closed form.

`concurrency` clients each send a request, wait for it and send the next. A step takes every waiting
prompt up to the engine's budget of tokens, so prompts queue only once the budget is full; decode is a
delay that all running sequences share. With

    L   time of a prompt's own chunks               S   its share of steps whose budget is full
    Z   time of its decode steps                    C   clients

    TTFT = max(L + half a step + the host's cost, S C - Z)        X = C / (TTFT + Z)

The first is a prompt that finds room; the second is what Little's law leaves when prefill, at its
fullest, is all that the clients wait for (X = 1/S). All of them depend on how many sequences decode,
which is X Z: a root to find.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike

from crosstie.core.errors import BadInput
from crosstie.perf.hardware import Array, Hardware, Mask
from crosstie.perf.memory import cache_sequences
from crosstie.perf.step import Shape, StepCost, shape, step, step_s, steps_s

# From a thousandth of a sequence to a thousand: 13 halvings leave 0.2%.
_BISECTIONS = 13
# Configurations from which on a second thread pays.
_WORTH_SPLITTING = 20_000
# What a host takes for each prompt token that need not be computed: it is tokenised, hashed by blocks and looked up.
# From medians of TTFT of prompts of 133,000 to 305,000 tokens, 96% of them found (ROCm/ATOM@ffdf3bb5dd
# recipes/DeepSeek-V4-Agentic-Benchmark.md, 2026-07): 2.6 to 5.5 us. What is computed has its share in `host_request_s`.
HOST_S_PER_CACHED_TOKEN = 5e-6
# Fewer decoding sequences than this are none: requests of one token never decode.
_FEWEST = 1e-3


@dataclass(frozen=True, slots=True)
class SteadyState:
    """Arrays of shape (deployments, points)."""

    ttft_s: Array
    # Mean TTFT if all clients sent their first request at the same moment, as benchmarks do.
    ttft_burst_s: Array
    tpot_s: Array
    # TTFT of a prompt that finds room in the next step, and its share of steps whose budget is full.
    found_room_s: Array
    service_s: Array
    requests_per_s: Array
    output_tokens_per_s: Array
    decoding: Array
    concurrency_that_fits: Array
    # A decode step, a step that carries prompts as they come, and how many of these one prompt takes.
    decode: StepCost
    mixed: StepCost
    chunks: Array
    # Clients wait for memory, or for the engine's own limit on sequences.
    capacity_binds: Mask
    engine_binds: Mask


def steady_state(
    hardware: Hardware,
    concurrency: ArrayLike,
    input_tokens: ArrayLike,
    output_tokens: ArrayLike,
    *,
    cached_tokens: ArrayLike = 0.0,
    shared_tokens: ArrayLike = 0.0,
    encode_s: ArrayLike = 0.0,
    in_step: bool = True,
) -> SteadyState:
    """What `concurrency` closed-loop clients get; arguments broadcast against (deployments, points).

    `cached_tokens`: tokens of a prompt that are in the cache when it comes, which prefill only reads; of these all
    requests have `shared_tokens` in common, which the cache holds once. `encode_s`: what a prompt's pictures take of an
    attention replica before it is computed (`perf.vision`). `in_step`: whether the prompts of attention replicas come
    in waves, as clients who wait for each other's steps make them; those of open traffic come when they come.
    """
    given = (concurrency, input_tokens, output_tokens, cached_tokens, shared_tokens, encode_s)
    clients, inputs, outputs, cached, shared, encoding = (np.atleast_1d(np.asarray(a, np.float64)) for a in given)
    for name, values in (("concurrency", clients), ("input", inputs), ("output", outputs)):
        if np.any(values < 1) or not np.all(np.isfinite(values)):
            raise BadInput(f"{name} must be at least 1")
    if np.any(cached < 0) or np.any(shared < 0) or not np.all(cached <= inputs) or not np.all(shared <= cached):
        raise BadInput("cached tokens must be 0 to the input, and shared ones 0 to the cached")
    every = (clients, inputs, outputs, cached, shared, encoding)
    size = np.broadcast_shapes(hardware.tp.shape, *(a.shape for a in every))
    loads = [np.broadcast_to(values, (*values.shape[:-1], size[-1])) for values in every]
    if size[0] * size[-1] < _WORTH_SPLITTING or size[-1] < 2 or hardware.varies:
        return _steady_state(hardware, *loads, in_step=in_step)
    # numpy lets go of the interpreter in large array operations, so two threads use two cores.
    halves = slice(None, size[-1] // 2), slice(size[-1] // 2, None)
    with ThreadPoolExecutor(2) as pool:
        left, right = pool.map(
            lambda half: _steady_state(hardware, *(v[..., half] for v in loads), in_step=in_step), halves
        )
    return _joined(left, right)


Joined = TypeVar("Joined", bound="SteadyState | StepCost")


def _joined(left: Joined, right: Joined) -> Joined:
    """Two halves of the points as one: arrays, and costs made of arrays."""
    parts: dict[str, Any] = {}
    for field in fields(left):
        one, other = getattr(left, field.name), getattr(right, field.name)
        # Whether the host is overlapped is a column of the deployments, the same in both halves.
        if field.name == "host_overlapped":
            continue
        if isinstance(one, dict):
            parts[field.name] = {name: np.concatenate((one[name], other[name]), axis=-1) for name in one}
        else:
            parts[field.name] = _joined(one, other) if is_dataclass(one) else np.concatenate((one, other), axis=-1)
    return replace(left, **parts)


def _steady_state(
    hardware: Hardware,
    clients: Array,
    inputs: Array,
    outputs: Array,
    cached: Array,
    shared: Array,
    encode_s: Array,
    *,
    in_step: bool,
) -> SteadyState:
    # Decode steps of a request: with speculation, fewer than its tokens.
    steps = np.maximum((outputs - 1.0) / hardware.tokens_per_step, np.minimum(outputs - 1.0, 1.0))
    steps_per_token = steps / np.maximum(outputs - 1.0, 1.0) if hardware.speculates else 1.0
    context = inputs + outputs / 2.0
    room = held_sequences(hardware, inputs + hardware.held_share * outputs, shared)
    fits = np.minimum(room, hardware.max_sequences)
    # The last token of a prompt is always computed: the first of the answer follows from it.
    cached = np.minimum(cached, inputs - 1.0)
    load = _Load(np.minimum(clients, np.maximum(fits, 1.0)), inputs - cached, steps, context, in_step, cached, encode_s)
    decoding = _settle(hardware, load)
    at = _shapes(hardware, decoding, load)
    decode, mixed = step(hardware, at.decode), step(hardware, at.mixed)
    cycle = _cycle(hardware, decoding, decode.total_s, mixed.total_s, step_s(hardware, at.full), load)
    rate = cycle.requests_per_s
    # Clients that memory keeps out wait before their prefill.
    outside = (clients - load.admitted) / rate
    host = hardware.host_request_s + HOST_S_PER_CACHED_TOKEN * cached
    burst = host + cycle.own_s + cycle.service_s * 0.5 * (load.admitted - 1.0) + outside
    return SteadyState(
        ttft_s=cycle.ttft_s + outside,
        ttft_burst_s=burst,
        tpot_s=cycle.step_s * steps_per_token,
        found_room_s=cycle.found_room_s,
        service_s=cycle.service_s,
        requests_per_s=rate,
        output_tokens_per_s=rate * outputs,
        decoding=cycle.decoding,
        concurrency_that_fits=fits,
        decode=decode,
        mixed=mixed,
        chunks=cycle.chunks,
        capacity_binds=(clients > load.admitted) & (room <= hardware.max_sequences),
        engine_binds=(clients > load.admitted) & (room > hardware.max_sequences),
    )


class _Load(NamedTuple):
    """Clients that memory admits, prompt tokens to compute, decode steps after the first token, the mean context."""

    admitted: Array
    inputs: Array
    steps: Array
    context: Array
    in_step: bool = True
    # Prompt tokens before those that are computed.
    cached: Array | float = 0.0
    encode_s: Array | float = 0.0


class _Shapes(NamedTuple):
    """The steps of a replica: decode alone, with prompts as they come, with a full budget of them."""

    decode: Shape
    mixed: Shape
    full: Shape


class _Cycle(NamedTuple):
    """A client's round trip."""

    own_s: Array
    service_s: Array
    chunks: Array
    # Between two steps of a sequence: with speculation it has several tokens of each.
    step_s: Array
    found_room_s: Array
    ttft_s: Array
    requests_per_s: Array
    # How many sequences then decode.
    decoding: Array


def _settle(hardware: Hardware, load: _Load) -> Array:
    """The number of decoding sequences that reproduces itself.

    More of them make steps longer and the queue shorter, so the number that follows falls short of a
    large guess and exceeds a small one. Steps are computed at four numbers and interpolated between;
    bisection then costs next to nothing, and the caller computes the steps at the answer.
    """
    grid = _landmarks(hardware, load)
    at = [_shapes(hardware, sequences, load) for sequences in grid]
    # A full step grows evenly with the sequences that ride along, so its two ends are enough.
    ends = [grid[0], grid[-1]]
    decode_s = steps_s(hardware, [shapes.decode for shapes in at])
    carrying_s = steps_s(hardware, [*(shapes.mixed for shapes in at), at[0].full, at[-1].full])
    mixed_s, full_s = carrying_s[: len(grid)], carrying_s[len(grid) :]
    low, high = np.log(_FEWEST) + 0.0 * decode_s[0], np.log(load.admitted) + 0.0 * decode_s[0]
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        sequences = np.exp(middle)
        into = depths(grid, sequences)
        full = blend(full_s, depths(ends, sequences))
        cycle = _cycle(hardware, sequences, blend(decode_s, into), blend(mixed_s, into), full, load)
        exceeds = cycle.decoding > sequences
        low, high = np.where(exceeds, middle, low), np.where(exceeds, high, middle)
    return np.asarray(np.exp(0.5 * (low + high)))


def _landmarks(hardware: Hardware, load: _Load) -> list[Array]:
    """One sequence, all of them, and between them where chunks begin to grow and where they are full."""
    one = np.ones_like(load.admitted)
    per_sequence = np.maximum(_demand(hardware, one, load), 1e-12)
    grows = np.minimum(load.inputs, hardware.chunk_tokens) / per_sequence
    full = hardware.chunk_tokens * hardware.dp / per_sequence
    return [one, np.clip(grows, one, load.admitted), np.clip(full, one, load.admitted), load.admitted]


def depths(grid: list[Array], value: Array) -> list[Array]:
    """For each interval of the grid, how far into it the value lies: 0 before it, 1 after it."""
    return [np.clip((value - left) / np.maximum(right - left, 1e-12), 0.0, 1.0) for left, right in pairwise(grid)]


def blend(values: list[Array], into: list[Array]) -> Array:
    total = values[0]
    for (left, right), share in zip(pairwise(values), into, strict=True):
        total = total + share * (right - left)
    return total


def _others(load: _Load) -> Array:
    """Share of the clients that are not oneself."""
    return (load.admitted - 1.0) / load.admitted


def _demand(hardware: Hardware, decoding: Array, load: _Load) -> Array:
    """Prompt tokens that the others bring while every running sequence makes one step."""
    return _others(load) * decoding / hardware.pp * load.inputs / np.maximum(load.steps, 1.0)


def _chunk(hardware: Hardware, demand: Array, load: _Load) -> Array:
    """Prompt tokens of a step that carries any: one prompt's at least, the engine's budget at most.

    Attention replicas step together. While one works through a prompt, the others' clients run dry and
    ask as well, so that prompts come in waves: a step carries one for every replica that has a client.
    """
    least = np.minimum(load.inputs, hardware.chunk_tokens)
    wave = np.where(hardware.dp > 1, np.minimum(load.admitted, hardware.dp) * least, 0.0) if load.in_step else 0.0
    return np.clip(np.maximum(demand, wave), least, hardware.chunk_tokens * hardware.dp)


def _shapes(hardware: Hardware, decoding: Array, load: _Load) -> _Shapes:
    # A pipeline works on that many batches in turn; a step has at least one sequence.
    sequences = decoding / hardware.pp
    riding = np.where(hardware.prefill_first, 0.0, _others(load) * sequences)

    def carrying(tokens: Array) -> Shape:
        # Chunks of a prompt start between its beginning and its end: on average half of what is left.
        span = np.minimum(np.minimum(tokens, load.inputs), hardware.chunk_tokens)
        return shape(riding, load.context, tokens, load.cached + 0.5 * (load.inputs - span), span)

    chunk = _chunk(hardware, _demand(hardware, decoding, load), load)
    return _Shapes(
        decode=shape(np.maximum(sequences, 1.0), load.context),
        mixed=carrying(chunk),
        full=carrying(hardware.chunk_tokens * hardware.dp),
    )


def _cycle(hardware: Hardware, decoding: Array, decode_s: Array, mixed_s: Array, full_s: Array, load: _Load) -> _Cycle:
    demand = _demand(hardware, decoding, load)
    chunk = _chunk(hardware, demand, load)
    # Steps that carry the others' prompts are longer.
    carrying = demand / chunk
    mixing = decode_s + np.minimum(carrying, 1.0) * np.maximum(mixed_s - decode_s, 0.0)
    spent_s = np.where(hardware.prefill_first, decode_s + carrying * mixed_s, mixing)
    # Pictures of the others' prompts are encoded between two steps.
    spent_s = spent_s + demand / load.inputs / hardware.dp * load.encode_s
    # A prompt goes through the stages one after the other, its chunks one behind the other.
    chunks = np.maximum(load.inputs / hardware.chunk_tokens, 1.0)
    own = (chunks + hardware.pp - 1.0) / hardware.pp * mixed_s + load.encode_s
    # When the budget is full, stages work on different chunks at once.
    service = load.inputs / (hardware.chunk_tokens * hardware.dp) * full_s / hardware.pp + load.encode_s / hardware.dp
    delay = load.steps * spent_s
    host = hardware.host_request_s + HOST_S_PER_CACHED_TOKEN * load.cached
    found_room = own + 0.5 * spent_s * _others(load) + host
    next_step = own + _wait_for_steps(hardware, decode_s, mixed_s, spent_s, load) + host
    ttft = np.maximum(next_step, service * load.admitted - delay)
    rate = load.admitted / (ttft + delay)
    return _Cycle(own, service, load.inputs / chunk, spent_s, found_room, ttft, rate, rate * delay)


def _wait_for_steps(hardware: Hardware, decode_s: Array, mixed_s: Array, spent_s: Array, load: _Load) -> Array:
    """From a prompt's arrival to the step that takes it, and what the others' prompts add to that step.

    A client asks again when a step has ended its answer, whatever the step took, so prompts of a step are of Poisson
    and no more come during long steps. The host delays the prompt into some later step, of which half is left, long
    ones being met more often; where the host is quick, it is the very next one. An engine that makes each step ready
    during the one before lets it in a step later. Prompts that came with it go along.
    """
    prompts = 1.0 - np.minimum(decode_s / np.maximum(spent_s, 1e-12), 1.0)
    met_s = spent_s + prompts * np.maximum(mixed_s - decode_s, 0.0)
    rest_s = np.maximum(0.5 * met_s, spent_s - hardware.host_request_s)
    return _others(load) * (rest_s + np.where(hardware.host_overlapped, spent_s, 0.0) + prompts * spent_s)


def prefill_alone(hardware: Hardware, input_tokens: ArrayLike, cached_tokens: ArrayLike = 0.0) -> StepCost:
    """One chunk of a prompt with nothing else in the step: what binds prefill itself."""
    return step(hardware, chunk_alone(hardware, input_tokens, cached_tokens))


def chunk_alone(hardware: Hardware, input_tokens: ArrayLike, cached_tokens: ArrayLike = 0.0) -> Shape:
    inputs, cached = np.asarray(input_tokens, dtype=np.float64), np.asarray(cached_tokens, dtype=np.float64)
    fresh = np.maximum(inputs - cached, 1.0)
    chunk = np.minimum(fresh, hardware.chunk_tokens)
    return shape(prefill_tokens=chunk, prefill_start=inputs - fresh + 0.5 * (fresh - chunk))


def held_sequences(hardware: Hardware, context: Array, shared: Array) -> Array:
    """Sequences of a context whose cache each replica holds, the shared part once; shape (deployments, points)."""
    key = (context.shape, context.tobytes(), shared.tobytes())
    if key not in hardware.held:
        size = np.broadcast_shapes(hardware.tp.shape, context.shape, shared.shape)
        wide, common = np.broadcast_to(context, size), np.broadcast_to(shared, size)
        found = np.stack([cache_sequences(d, wide[i], common[i]) for i, d in enumerate(hardware.deployments)])
        # One load is asked about again and again while constants are fitted; others only once.
        hardware.held = {key: found}
    return hardware.held[key]


def single_stream_ceiling(weight_bytes_read: float, memory_bytes_per_s: float, gpus: int = 1) -> float:
    """Tokens/s that no engine can exceed: every token reads the active weights once."""
    return gpus * memory_bytes_per_s / weight_bytes_read
