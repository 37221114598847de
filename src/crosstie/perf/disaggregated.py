"""Steady state of disaggregated prefill and decode, in closed form.

A request waits for a prefill replica, is computed there, has its cache sent over and decodes on a replica that
carries no prompts. With b sequences decoding on each of D replicas, t(b) a step and n steps a request

    X = D b / (n t(b))                                requests per second that this is; drafts make n smaller
    W = u^k t_p / (2 P (1 - r))                       wait of a prompt, k = sqrt(2 (P + 1)) - 1
    T = start + descriptors x c + bytes / bandwidth   transfer, less what hides behind the layers
    C = X (TTFT + the rest of its tokens)             clients

P replicas have the share r of their fullest rate taken, are at work a share u of the time, and t_p is one of their
steps; W is the wait of an M/D/P queue whose steps take every prompt that waits, up to the engine's budget. The b that
gives C clients is looked for.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Disaggregated, Servable
from crosstie.core.errors import BadInput
from crosstie.perf.hardware import Array, Hardware, Mask, peer_bytes_per_s
from crosstie.perf.memory import gpu_cache_bytes_per_sequence
from crosstie.perf.steady_state import HOST_S_PER_CACHED_TOKEN, SteadyState, blend, depths, held_sequences, steady_state
from crosstie.perf.step import Shape, StepCost, shape, step, step_s

_BISECTIONS = 24
# Decode steps are computed at that many numbers of sequences, and interpolated between.
_LANDMARKS = 7
_FEWEST = 1e-5
# A replica cannot be at work more than this share of the time: the wait would have no end.
_FULL = 1.0 - 1e-6
# From this share on it is prefill that clients wait for, whatever else is full.
_NEARLY = 0.99


@dataclass(frozen=True, slots=True)
class DisaggregatedState:
    """Arrays of shape (services, points); rates are the whole service's."""

    ttft_s: Array
    # Mean TTFT if all clients sent their first request at the same moment, as benchmarks do.
    ttft_burst_s: Array
    tpot_s: Array
    requests_per_s: Array
    output_tokens_per_s: Array
    # Of a request.
    transfer_s: Array
    # Share of the prefill pool's fullest rate that is used.
    prefill_busy: Array
    # Sequences that decode in the whole service, and the most that its decode replicas hold.
    decoding: Array
    concurrency_that_fits: Array
    prefill: StepCost
    decode: StepCost
    # Clients wait for memory of the decode side, or for its engine's own limit on sequences.
    capacity_binds: Mask
    engine_binds: Mask


class Sides:
    """Services of one model as columns: the hardware of both sides, and the way between them."""

    def __init__(self, services: Sequence[Disaggregated]):
        self.services = tuple(services)
        self.prefill = Hardware([service.prefill for service in services])
        self.decode = Hardware([service.decode for service in services])

        def column(of: Callable[[Disaggregated], float]) -> Array:
            return np.array([[of(service)] for service in services], dtype=np.float64)

        self.prefill_replicas = column(lambda one: one.prefill_replicas)
        self.decode_replicas = column(lambda one: one.decode_replicas)
        self.gpus = column(lambda one: one.gpus)
        self.start_s = column(lambda one: one.connector.start.si)
        self.descriptor_s = column(lambda one: one.connector.descriptor.si)
        self.sent_bytes_per_s = column(lambda one: _link_bytes_per_s(one, one.prefill))
        self.received_bytes_per_s = column(lambda one: _link_bytes_per_s(one, one.decode))
        self.by_layer = column(lambda one: one.connector.by_layer) > 0
        self.prefill_answers = column(lambda one: one.connector.first_token == "prefill") > 0
        self.decode_answers = column(lambda one: one.connector.first_token == "decode") > 0
        self.recomputes = column(lambda one: one.connector.recomputes) > 0
        self.room_first = column(lambda one: one.connector.room == "before prefill") > 0
        self.layers = float(self.decode.model.layer_count)

    @property
    def sides(self) -> tuple[Hardware, ...]:
        return self.prefill, self.decode

    def correct(self, factors: Mapping[str, Array]) -> None:
        """Multiplies the constants of both sides."""
        self.prefill.correct(factors)
        self.decode.correct(factors)

    def correct_more(self, factors: Mapping[str, Array]) -> None:
        """Multiplies them as each side's own corrections have them."""
        self.prefill.correct_more(factors)
        self.decode.correct_more(factors)


Columns = Hardware | Sides


def columns_of(several: Sequence[Servable]) -> Columns:
    """Replicas, or disaggregated services, of one model as columns."""
    services = [one for one in several if isinstance(one, Disaggregated)]
    return Sides(services) if services else Hardware([one for one in several if isinstance(one, Deployment)])


def state_of(
    columns: Columns,
    concurrency: ArrayLike,
    input_tokens: ArrayLike,
    output_tokens: ArrayLike,
    cached_tokens: ArrayLike = 0.0,
) -> SteadyState | DisaggregatedState:
    """What `concurrency` closed-loop clients get of either."""
    if isinstance(columns, Sides):
        return disaggregated_state(columns, concurrency, input_tokens, output_tokens, cached_tokens=cached_tokens)
    return steady_state(columns, concurrency, input_tokens, output_tokens, cached_tokens=cached_tokens)


def _link_bytes_per_s(service: Disaggregated, side: Deployment) -> float:
    peak = peer_bytes_per_s(side) if service.link == "fabric" else side.accelerator.scale_out.bandwidth.si
    return peak * service.connector.bandwidth.value


class Transfer(NamedTuple):
    """Seconds that a prompt's cache takes: before anything moves, on the wire, and of each end's links alone."""

    start_s: Array
    wire_s: Array
    sent_s: Array
    received_s: Array


def transfer(sides: Sides, tokens: ArrayLike) -> Transfer:
    """What each GPU of the decode side's attention replica fetches: its share, or a copy where heads are few."""
    wide = np.broadcast_to(np.asarray(tokens, np.float64), np.broadcast_shapes(sides.gpus.shape, np.shape(tokens)))
    own = np.stack([gpu_cache_bytes_per_sequence(one.decode, wide[i]) for i, one in enumerate(sides.services)])
    pieces = np.stack([descriptors(one, wide[i]) for i, one in enumerate(sides.services)])
    received = own / sides.received_bytes_per_s
    # Fewer senders than receivers: the senders' links are shared.
    sent = own * sides.decode.tp / sides.prefill.tp / sides.sent_bytes_per_s
    wire = pieces * sides.descriptor_s + np.maximum(received, sent)
    return Transfer(sides.start_s + 0.0 * wire, wire, sent, received)


def descriptors(service: Disaggregated, tokens: ArrayLike) -> Array:
    """Pieces of memory that one GPU of the decode side asks for: blocks of each layer's rows, and its states."""
    connector, total = service.connector, np.zeros(np.shape(tokens))
    for layer in service.decode.model.layers:
        for scan in (one for one in layer.scans if one.kept):
            kept = np.asarray(tokens, np.float64) if scan.window is None else np.minimum(tokens, scan.window)
            # A latent row has no keys and values apart.
            pieces = connector.pieces.value if scan.kv_heads > 1 else 1.0
            total = total + layer.count * pieces * np.ceil(kept / scan.stride / connector.block_tokens.value)
        total = total + (layer.count if layer.state is not None else 0)
    return np.asarray(total)


class _Load(NamedTuple):
    """Prompt tokens, those of them to compute and those before them, tokens after the first, the steps that these
    take, the mean context."""

    inputs: Array
    fresh: Array
    cached: Array
    later: Array
    steps: Array
    context: Array


class _Prefill(NamedTuple):
    """A prefill replica's steps: with one prompt, with a full budget, and a prompt's share of full ones."""

    least: Array
    budget: Array
    chunks: Array
    least_s: Array
    full_s: Array
    service_s: Array


class _Cycle(NamedTuple):
    """What a number of decoding sequences means for everything else."""

    requests_per_s: Array
    step_s: Array
    wait_s: Array
    own_s: Array
    transfer_s: Array
    ttft_s: Array
    rest_s: Array
    busy: Array
    # Sequences that a decode replica has set memory aside for.
    held: Array
    feasible: Mask


def disaggregated_state(
    sides: Sides,
    concurrency: ArrayLike,
    input_tokens: ArrayLike,
    output_tokens: ArrayLike,
    *,
    cached_tokens: ArrayLike = 0.0,
) -> DisaggregatedState:
    """What `concurrency` closed-loop clients get; arguments broadcast against (services, points).

    `cached_tokens`: of a prompt, those that the prefill replica has in its cache; they are sent over all the same.
    """
    clients, inputs, outputs, cached = (
        np.atleast_1d(np.asarray(a, np.float64)) for a in (concurrency, input_tokens, output_tokens, cached_tokens)
    )
    for name, values in (("concurrency", clients), ("input", inputs), ("output", outputs)):
        if np.any(values < 1) or not np.all(np.isfinite(values)):
            raise BadInput(f"{name} must be at least 1")
    if np.any(cached < 0) or not np.all(cached <= inputs):
        raise BadInput("cached tokens must be 0 to the input")
    size = np.broadcast_shapes(sides.gpus.shape, clients.shape, inputs.shape, outputs.shape, cached.shape)
    clients, inputs, outputs, cached = (np.broadcast_to(a, size) for a in (clients, inputs, outputs, cached))
    load, room, fits = _load(sides, inputs, outputs, cached)
    prefill, sent = _prefill(sides, load), transfer(sides, inputs)
    grid, steps = _decode_steps(sides, load, fits)

    def at(sequences: Array) -> _Cycle:
        others = (clients - 1.0) / clients
        return _cycle(sides, sequences, blend(steps, depths(grid, sequences)), load, prefill, sent, others)

    low, high = np.log(_FEWEST) + np.zeros(size), np.log(fits) + np.zeros(size)
    for _ in range(_BISECTIONS):
        middle = 0.5 * (low + high)
        cycle = at(np.exp(middle))
        reached = cycle.requests_per_s * (cycle.ttft_s + cycle.rest_s)
        more = cycle.feasible & (cycle.held <= fits) & (reached < clients)
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    sequences = np.exp(low)
    cycle = at(sequences)
    rate = cycle.requests_per_s
    inside = rate * (cycle.ttft_s + cycle.rest_s)
    # Half a per cent is what bisection may leave.
    short = (clients - inside) / clients > 5e-3
    outside = np.where(short, (clients - inside) / rate, 0.0)
    # Where prefill answers before decode has room, the wait falls between the first token and the second.
    between = sides.prefill_answers & ~sides.room_first & (cycle.busy < _NEARLY)
    ttft = cycle.ttft_s + np.where(between, 0.0, outside)
    rest = cycle.rest_s + np.where(between, outside, 0.0)
    answered = cycle.ttft_s - cycle.wait_s - cycle.own_s
    most = np.minimum(clients, fits * sides.decode_replicas)
    burst_wait = prefill.service_s / sides.prefill_replicas * 0.5 * (most - 1.0)
    return DisaggregatedState(
        ttft_s=ttft,
        ttft_burst_s=answered + prefill.chunks * prefill.least_s + burst_wait + np.where(between, 0.0, outside),
        tpot_s=np.where(load.later > 0, rest / np.maximum(load.later, 1e-9), cycle.step_s),
        requests_per_s=rate,
        output_tokens_per_s=rate * outputs,
        transfer_s=cycle.transfer_s,
        prefill_busy=cycle.busy,
        decoding=sequences * sides.decode_replicas,
        concurrency_that_fits=fits * sides.decode_replicas,
        prefill=step(sides.prefill, _prompt_shape(sides, load, prefill.least)),
        decode=step(sides.decode, shape(np.maximum(sequences, 1.0), load.context)),
        capacity_binds=short & (cycle.busy < _NEARLY) & (room <= sides.decode.max_sequences),
        engine_binds=short & (cycle.busy < _NEARLY) & (room > sides.decode.max_sequences),
    )


class WithoutQueues(NamedTuple):
    """A service by the sequences that decode on it, as if no prompt had to wait for its turn; prefill's share apart."""

    ttft_s: Array
    tpot_s: Array
    requests_per_s: Array
    # Of the whole prefill side: its fullest rate is one over this.
    service_s: Array
    room: Array


def without_queues(
    sides: Sides,
    sequences: ArrayLike,
    input_tokens: ArrayLike,
    output_tokens: ArrayLike,
    *,
    cached_tokens: ArrayLike = 0.0,
) -> WithoutQueues:
    """For those who reckon with queues themselves; `sequences` of the whole service, arguments broadcast."""
    many, inputs, outputs, cached = (
        np.atleast_1d(np.asarray(a, np.float64)) for a in (sequences, input_tokens, output_tokens, cached_tokens)
    )
    # Neither a prompt's prefill nor its transfer depends on how many decode: they are evaluated once a request.
    size = np.broadcast_shapes(sides.gpus.shape, inputs.shape, outputs.shape, cached.shape)
    inputs, outputs, cached = (np.broadcast_to(a, size) for a in (inputs, outputs, cached))
    size = np.broadcast_shapes(size, many.shape)
    load, _, fits = _load(sides, inputs, outputs, cached)
    prefill, sent = _prefill(sides, load), transfer(sides, inputs)
    each = many / sides.decode_replicas
    cycle = _cycle(sides, each, _step_s(sides, load, np.maximum(each, 1.0)), load, prefill, sent, np.zeros(1))
    # A request that comes during a step of many prompts waits for its end, more than for a prompt's share of it.
    prompts = np.maximum(prefill.budget / np.maximum(load.fresh, 1.0), 1.0)
    step_s = cycle.own_s / prefill.chunks
    residual = 0.5 * step_s * np.minimum(cycle.busy * prompts, 1.0) * (1.0 - 1.0 / prompts)
    later = np.maximum(load.later, 1e-9)
    return WithoutQueues(
        ttft_s=cycle.ttft_s + residual,
        tpot_s=np.where(load.later > 0, cycle.rest_s / later, cycle.step_s),
        requests_per_s=cycle.requests_per_s,
        service_s=prefill.service_s / sides.prefill_replicas + np.zeros(size),
        room=fits * sides.decode_replicas + np.zeros(size),
    )


def _load(sides: Sides, inputs: Array, outputs: Array, cached: Array) -> tuple[_Load, Array, Array]:
    """What a request is, the sequences whose cache a decode replica holds, and those that it may have."""
    # The last token of a prompt is always computed: the first of the answer follows from it.
    cached, later = np.minimum(cached, inputs - 1.0), outputs - 1.0
    load = _Load(inputs, inputs - cached, cached, later, later / sides.decode.tokens_per_step, inputs + outputs / 2.0)
    room = held_sequences(sides.decode, inputs + sides.decode.held_share * outputs, np.zeros(1))
    return load, room, np.maximum(np.minimum(room, sides.decode.max_sequences), 1.0)


def _prompt_shape(sides: Sides, load: _Load, tokens: Array) -> Shape:
    # Chunks of a prompt start between its beginning and its end: on average half of what is left.
    span = np.minimum(np.minimum(tokens, load.fresh), sides.prefill.chunk_tokens)
    return shape(0.0, 0.0, tokens, load.cached + 0.5 * (load.fresh - span), span)


def _prefill(sides: Sides, load: _Load) -> _Prefill:
    chunk = sides.prefill.chunk_tokens
    least, budget = np.minimum(load.fresh, chunk), chunk * sides.prefill.dp + 0.0 * load.fresh
    least_s, full_s = (step_s(sides.prefill, _prompt_shape(sides, load, tokens)) for tokens in (least, budget))
    chunks = np.maximum(load.fresh / chunk, 1.0)
    return _Prefill(least, budget, chunks, least_s, full_s, load.fresh / budget * full_s)


def _decode_steps(sides: Sides, load: _Load, fits: Array) -> tuple[list[Array], list[Array]]:
    """Seconds of a step at numbers of sequences between one and what fits, with what joining ones add."""
    grid = [fits ** (k / (_LANDMARKS - 1)) for k in range(_LANDMARKS)]
    steps = [_step_s(sides, load, sequences) for sequences in grid]
    return grid, steps


def _step_s(sides: Sides, load: _Load, sequences: Array) -> Array:
    plain = step_s(sides.decode, shape(sequences, load.context))
    if not sides.recomputes.any():
        return plain
    # While every sequence makes one step, this many come in with their last prompt token to compute.
    joining = sequences / np.maximum(load.steps, 1.0)
    tokens = np.maximum(joining, 1.0)
    mixed = step_s(sides.decode, shape(sequences, load.context, tokens, load.inputs - 1.0, np.ones(1)))
    extra = np.minimum(joining, 1.0) * np.maximum(mixed - plain, 0.0)
    return np.asarray(plain + np.where(sides.recomputes, extra, 0.0))


def _cycle(
    sides: Sides, sequences: Array, step_s: Array, load: _Load, prefill: _Prefill, sent: Transfer, others: Array
) -> _Cycle:
    steps = np.maximum(load.steps + np.where(sides.decode_answers, 1.0, 0.0), 1e-3)
    rate = sides.decode_replicas * sequences / (steps * step_s)
    replicas = sides.prefill_replicas
    # A step takes the prompts that came during the one before.
    tokens_per_s = rate * load.fresh / replicas
    slope = (prefill.full_s - prefill.least_s) / np.maximum(prefill.budget - prefill.least, 1e-9)
    slope = np.where(prefill.budget > prefill.least, np.maximum(slope, 0.0), 0.0)
    left = 1.0 - tokens_per_s * slope
    gathered = tokens_per_s * (prefill.least_s - slope * prefill.least) / np.maximum(left, 1e-9)
    tokens = np.clip(np.where(left > 0, gathered, prefill.budget), prefill.least, prefill.budget)
    prompt_s = prefill.least_s + slope * (tokens - prefill.least)
    busy = rate * prefill.service_s / replicas
    at_work = np.minimum(tokens_per_s * prompt_s / tokens, 1.0)
    idle = np.maximum(1.0 - busy, 1.0 - _FULL)
    wait = others * at_work ** (np.sqrt(2.0 * (replicas + 1.0)) - 1.0) * prompt_s / (2.0 * replicas * idle)
    own = prefill.chunks * prompt_s
    # Transfers share the links of the replicas that send and receive them.
    wired = rate * np.maximum(
        sent.sent_s / (replicas * sides.prefill.dp), sent.received_s / (sides.decode_replicas * sides.decode.dp)
    )
    wire = sent.wire_s * (1.0 + 0.5 * wired / np.maximum(1.0 - wired, 1.0 - _FULL))
    # Layer by layer, all but the last layer's part travels while the next ones are computed.
    moved = sent.start_s + np.where(sides.by_layer, np.maximum(wire / sides.layers, wire - own), wire)
    handed = moved + 0.5 * step_s
    answered = np.where(sides.decode_answers, handed + step_s, np.where(sides.prefill_answers, 0.0, handed))
    host = sides.prefill.host_request_s + HOST_S_PER_CACHED_TOKEN * load.cached
    ttft = host + wait + own + answered
    rest = load.steps * step_s + np.where(sides.prefill_answers, handed, 0.0)
    reserved = moved + np.where(sides.room_first, wait + own, 0.0)
    held = sequences + rate * reserved / sides.decode_replicas
    feasible = (busy < _FULL) & (wired < _FULL)
    return _Cycle(rate, step_s, wait, own, moved, ttft, rest, busy, held, feasible)
