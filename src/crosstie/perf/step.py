"""What one engine step costs.

A step is some decode sequences and some prefill tokens; prefill, chunked prefill and decode are the
same sum with other numbers. Each operation takes the smooth maximum of its arithmetic and its memory
traffic at achievable rates, plus the time a kernel needs to start and drain:

    t = kernel + (compute^4 + memory^4)^(1/4)

The fourth power is measured, not chosen: over 427 GEMMs on an H200 the best exponent is 4.2 to 4.9.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from crosstie.core.formats import Format
from crosstie.core.model import Scan, State
from crosstie.perf.hardware import Array, Hardware, Mask
from crosstie.perf.work import Operation, Work

# Rows that a grouped GEMM pads each expert's tokens by on average: half of a 16-row tile.
_EXPERT_PADDING_ROWS = 8.0
_ACTIVATION_BYTES = 2.0


class Shape(NamedTuple):
    """Operating points. Every field broadcasts against (deployments, points).

    decode_sequences   sequences that each produce one token
    decode_context     tokens that each of them has in the cache
    prefill_tokens     prompt tokens processed in this step
    prefill_start      tokens of the same prompt that are already in the cache
    prefill_span       tokens of one prompt in this step (prefill_tokens / prefill_span prompts)
    """

    decode_sequences: Array
    decode_context: Array
    prefill_tokens: Array
    prefill_start: Array
    prefill_span: Array


def shape(
    decode_sequences: ArrayLike = 0.0,
    decode_context: ArrayLike = 0.0,
    prefill_tokens: ArrayLike = 0.0,
    prefill_start: ArrayLike = 0.0,
    prefill_span: ArrayLike | None = None,
) -> Shape:
    """A Shape from numbers or arrays; by default all prefill tokens belong to one prompt."""
    span = prefill_tokens if prefill_span is None else prefill_span

    def array(value: ArrayLike) -> Array:
        return np.asarray(value, dtype=np.float64)

    return Shape(
        array(decode_sequences), array(decode_context), array(prefill_tokens), array(prefill_start), array(span)
    )


@dataclass
class StepCost:
    """Seconds of a step by what they were spent on; arrays of shape (deployments, points)."""

    compute_s: Array
    memory_s: Array
    interconnect_s: Array
    host_s: Array
    # The same work at peak rates with nothing else in the way.
    ideal_s: Array
    host_overlapped: Mask = field(repr=False)

    @property
    def gpu_s(self) -> Array:
        return self.compute_s + self.memory_s + self.interconnect_s

    @property
    def total_s(self) -> Array:
        """Engines that prepare the next step meanwhile hide the shorter of the two."""
        gpu = self.gpu_s
        return np.where(self.host_overlapped, np.maximum(gpu, self.host_s), gpu + self.host_s)


class _Account:
    """Adds up operations, each under the resource that bounds it."""

    def __init__(self, hardware: Hardware, size: tuple[int, ...]):
        self.hardware = hardware
        self.compute, self.memory, self.ideal = np.zeros(size), np.zeros(size), np.zeros(size)

    def add(self, count: float, compute_s: Array, memory_s: Array, ideal_s: Array, kernels: Array) -> None:
        squared, other = compute_s * compute_s, memory_s * memory_s
        busy = np.sqrt(np.sqrt(squared * squared + other * other))
        total = count * (busy + self.hardware.kernel_s * kernels)
        bound_by_compute = compute_s > memory_s
        self.compute += np.where(bound_by_compute, total, 0.0)
        self.memory += np.where(bound_by_compute, 0.0, total)
        self.ideal += count * ideal_s


def step(hardware: Hardware, at: Shape) -> StepCost:
    """The cost of one step through all layers, for every deployment at every operating point."""
    size = np.broadcast_shapes(hardware.tp.shape, *(part.shape for part in at))
    account = _Account(hardware, size)
    busiest = _busiest_replica(hardware, at)
    rank_tokens = busiest.decode_sequences + busiest.prefill_tokens
    all_tokens = at.decode_sequences + at.prefill_tokens
    work = hardware.work
    for operation, count in work.operations.items():
        if operation.expert:
            _experts(account, hardware, count, operation, all_tokens)
        else:
            _matrix_product(account, hardware, count, operation, rank_tokens)
    for scan, count in work.scans.items():
        _scan(account, hardware, count, scan, busiest)
    for state, count in work.states.items():
        _state(account, hardware, count, state, busiest)
    _elementwise(account, hardware, work, rank_tokens)
    rank_sequences = busiest.decode_sequences + busiest.prefill_tokens / np.maximum(at.prefill_span, 1.0)
    for operation in work.head:
        _matrix_product(account, hardware, 1, operation, rank_sequences)
    zero = np.zeros(size)
    return StepCost(
        compute_s=account.compute,
        memory_s=account.memory,
        interconnect_s=zero + _collectives(hardware, rank_tokens),
        # Each attention replica has its own host; one host feeds all stages of a pipeline in turn.
        host_s=zero + (hardware.host_step_s + hardware.host_sequence_s * rank_sequences) * hardware.pp,
        ideal_s=account.ideal,
        host_overlapped=hardware.host_overlapped,
    )


def _busiest_replica(hardware: Hardware, at: Shape) -> Shape:
    """What the fullest attention replica does: a sequence or a prompt is never split over replicas."""
    sequences = np.maximum(at.decode_sequences / hardware.dp, np.minimum(at.decode_sequences, 1.0))
    tokens = np.maximum(at.prefill_tokens / hardware.dp, np.minimum(at.prefill_tokens, at.prefill_span))
    return at._replace(decode_sequences=sequences, prefill_tokens=tokens)


def _matrix_product(account: _Account, hardware: Hardware, count: int, operation: Operation, tokens: Array) -> None:
    weights: Array | float = 0.0
    stored: Array | float = 0.0
    moved: Array | float = 0.0
    largest = max(operation.tensors, key=lambda t: t.parameters)
    main = hardware.precision[largest.role].main
    for tensor in operation.tensors:
        ranks = np.minimum(hardware.tp, tensor.max_shards) if tensor.shard != "none" else 1.0
        mix = hardware.precision[tensor.role]
        parameters = tensor.parameters / ranks
        weights = weights + parameters
        stored = stored + parameters * (mix.bytes + hardware.unpacked_bytes_per_weight(mix.main))
        inputs = tensor.cols / ranks if tensor.shard == "in" else tensor.cols
        outputs = tensor.rows / ranks if tensor.shard in ("out", "vocab") else tensor.rows
        moved = moved + outputs + (inputs if tensor is largest else 0.0)
    _add_product(account, hardware, count, main, tokens * weights, stored, tokens * moved, tokens > 0)


def _add_product(
    account: _Account, hardware: Hardware, count: int, format: Format, products: Array, stored: Array | float,
    moved_elements: Array, runs: Mask,
) -> None:  # fmt: skip
    rate, peak = hardware.rates(format)
    flop = 2.0 * products
    memory = stored / hardware.stream_bytes_per_s(format) + moved_elements * (
        _ACTIVATION_BYTES / hardware.elementwise_bytes_per_s
    )
    active = runs.astype(np.float64)
    ideal = active * np.maximum(flop / peak, stored / hardware.memory_bytes_per_s)
    account.add(count, flop / rate, active * memory, ideal, active)


def _experts(account: _Account, hardware: Hardware, count: int, operation: Operation, tokens: Array) -> None:
    """Routed experts. A batch reads only the distinct experts that it visits."""
    (tensor,) = operation.tensors
    mix = hardware.precision[tensor.role]
    share = tensor.active / tensor.copies
    local = tensor.copies / hardware.ep
    rows = tokens * tensor.active / hardware.ep
    # The slowest rank sets the pace: about the expected maximum of `ep` random loads.
    crowding = np.minimum(1.0 + np.sqrt(2.0 * np.log(hardware.ep) / np.maximum(rows, 1.0)), hardware.ep)
    rows = rows * crowding
    visited = np.minimum(local * distinct_share(share, tokens) * crowding, np.minimum(local, rows))
    splits = hardware.stage_gpus / hardware.ep
    one = tensor.rows * tensor.cols / splits
    stored = visited * one * (mix.bytes + hardware.unpacked_bytes_per_weight(mix.main))
    products = (rows + _EXPERT_PADDING_ROWS * visited) * one
    # Splitting an expert cuts the width between its two products, not the token's own.
    inner, outer = (tensor.rows, tensor.cols) if tensor.role == "experts" else (tensor.cols, tensor.rows)
    moved = rows * (outer + inner / splits)
    _add_product(account, hardware, count, mix.main, products, stored, moved, tokens > 0)


def distinct_share(share: float, tokens: Array) -> Array:
    """Expected share of experts that at least one of `tokens` visits, each visiting `share` of them."""
    if share >= 1.0:
        return np.minimum(tokens, 1.0)
    return np.asarray(-np.expm1(tokens * np.log1p(-share)))


def _scan(account: _Account, hardware: Hardware, count: int, scan: Scan, at: Shape) -> None:
    row_bytes = scan.row_bytes(hardware.kv_bytes_per_element)
    holders = np.minimum(hardware.tp, scan.kv_heads)
    workers = np.minimum(hardware.tp, scan.query_heads)
    rate, peak = hardware.attention_rates(scan.compute)
    limit = read_limit(scan)

    sequences = at.decode_sequences
    rows = sequences * keys_read(scan, limit, at.decode_context)
    _add_attention(
        account,
        hardware,
        count,
        rows * scan.decode_flop / workers,
        rows * row_bytes / holders,
        rate,
        peak,
        sequences > 0,
    )

    tokens = at.prefill_tokens
    span = np.maximum(at.prefill_span, 1.0)
    end = at.prefill_start + span
    mean_rows = (keys_sum(scan, limit, end) - keys_sum(scan, limit, at.prefill_start)) / span
    prompts = tokens / span
    # Each prompt's cache is read once and its new rows written; queries of a tile share the reads.
    traffic = (prompts * keys_read(scan, limit, end) + tokens / scan.stride) * row_bytes / holders
    _add_attention(
        account, hardware, count, tokens * mean_rows * scan.prefill_flop / workers, traffic, rate, peak, tokens > 0
    )


def _add_attention(
    account: _Account, hardware: Hardware, count: int, flop: Array, traffic: Array, rate: Array, peak: Array,
    runs: Mask,
) -> None:  # fmt: skip
    ideal = np.maximum(flop / peak, traffic / hardware.memory_bytes_per_s)
    # Two kernels: the pass itself and the reduction of its parts.
    account.add(count, flop / rate, traffic / hardware.cache_bytes_per_s, ideal, 2.0 * runs.astype(np.float64))


def read_limit(scan: Scan) -> float:
    """Tokens of context after which a query reads no more rows."""
    limits = [scan.window, scan.top_rows * scan.stride if scan.top_rows is not None else None]
    return float(min((limit for limit in limits if limit is not None), default=np.inf))


def keys_read(scan: Scan, limit: float, context: Array) -> Array:
    """Rows that one query reads at a context."""
    if not np.isfinite(limit):
        return context / scan.stride
    return np.where(context > limit, limit * scan.window_read_fraction, context) / scan.stride


def keys_sum(scan: Scan, limit: float, context: Array) -> Array:
    """Rows that the queries at positions 0 to `context` read together: the integral of keys_read."""
    half = 0.5 * context * context
    if not np.isfinite(limit):
        return half / scan.stride
    past = 0.5 * limit * limit + (context - limit) * limit * scan.window_read_fraction
    return np.where(context > limit, past, half) / scan.stride


def _state(account: _Account, hardware: Hardware, count: int, state: State, at: Shape) -> None:
    workers = np.minimum(hardware.tp, state.heads)
    rate, peak = hardware.attention_rates("bf16")
    sequences, tokens = at.decode_sequences, at.prefill_tokens
    prompts = tokens / np.maximum(at.prefill_span, 1.0)
    flop = (sequences * state.decode_flop + tokens * state.prefill_flop) / workers
    traffic = 2.0 * (sequences + prompts) * state.bytes / workers
    _add_attention(account, hardware, count, flop, traffic, rate, peak, (sequences + tokens) > 0)


def _elementwise(account: _Account, hardware: Hardware, work: Work, tokens: Array) -> None:
    traffic = tokens * (work.elementwise_bytes + work.elementwise_sharded_bytes / hardware.tp)
    zero = np.zeros(1)
    kernels = work.elementwise_kernels * (tokens > 0).astype(np.float64)
    # Fused kernels need no traffic of their own, so the ideal step has none.
    account.add(1, zero, traffic / hardware.elementwise_bytes_per_s, zero, kernels)


def _collectives(hardware: Hardware, tokens: Array) -> Array:
    """All-reduce after attention and feed-forward (TP), all-to-all around experts (DP), hand-over (PP)."""
    model, ranks = hardware.model, hardware.stage_gpus
    message = tokens * model.hidden * _ACTIVATION_BYTES
    reduce = all_reduce_s(hardware, message, hardware.tp)
    expert_layers = sum(layer.count for layer in model.layers if layer.routing_kernels)
    attention = model.layer_count * reduce
    plain_forward = (model.layer_count - expert_layers) * reduce
    # Dispatch sends each token to all ranks that hold its experts in 8 bits, combine brings 16 bits back.
    copies = np.minimum(max(model.experts_per_token, 1), hardware.ep) * ranks / hardware.ep
    exchanged = tokens * copies * hardware.work.expert_width * 3.0 * (ranks - 1) / ranks
    active = (tokens > 0).astype(np.float64)
    spread = active * (2.0 * hardware.collective_s + exchanged / hardware.link_bytes_per_s(ranks))
    experts = expert_layers * np.where(hardware.dp > 1, spread, reduce)
    hand_over = (hardware.pp - 1) * (hardware.collective_s + message / hardware.tp / hardware.stage_bytes_per_s)
    return np.asarray(attention + plain_forward + experts + hand_over * active)


def all_reduce_s(hardware: Hardware, message_bytes: Array, ranks: Array) -> Array:
    """Reduce-scatter then all-gather: each rank sends 2(n-1)/n of the message over its links."""
    sent = 2.0 * (ranks - 1) / ranks * message_bytes
    seconds = hardware.collective_s + sent / hardware.link_bytes_per_s(ranks)
    return np.where((ranks > 1) & (message_bytes > 0), seconds, 0.0)
