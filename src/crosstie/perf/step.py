"""What one engine step costs.

A step is some decode sequences and some prefill tokens; prefill, chunked prefill and decode are the
same sum with other numbers. Each operation takes the smooth maximum of its arithmetic and its memory
traffic at achievable rates, plus the time a kernel needs to start and drain:

    t = kernel + (compute^4 + memory^4)^(1/4)

The fourth power is measured, not chosen: over 427 GEMMs on an H200 the best exponent is 4.2 to 4.9.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from crosstie.core.model import Scan, State, Tensor
from crosstie.perf.hardware import Array, Hardware, Mask
from crosstie.perf.work import Operation, Work

# Rows that a grouped GEMM pads each expert's tokens by on average: half of a 16-row tile.
EXPERT_PADDING_ROWS = 8.0
ACTIVATION_BYTES = 2.0
# The fullest rank over the mean one where copies of popular experts even them out, for DeepSeek-R1 at EP32: 2.56
# without, 1.11 with 32 copies (NVIDIA/TensorRT-LLM docs/source/blogs/tech_blog blog04@2c64852c, 2025).
UNEVEN_EXPERTS = 1.11
# An all-to-all over more than eight ranks of one domain, out and back, with nothing to send: 18 and 31 us on GB200. The
# bytes then travel at the links' peak (the same, blog18@22de8b34; measured/all_to_all.csv).
WIDE_EXCHANGE_S = 49e-6
_NARROW_RANKS = 8.0
# Operating points of all deployments up to which several steps are worth evaluating together.
_FEW_POINTS = 20_000


class Shape(NamedTuple):
    """Operating points. Every field broadcasts against (deployments, points).

    decode_sequences   sequences that each produce a token, or verify drafts of several
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
    # What the host adds between passes of a drafter, where nothing hides it.
    draft_host_s: Array
    host_overlapped: Mask = field(repr=False)
    # The GPU's seconds and the ideal ones again, by what they do: "products", "attention", and "bookkeeping", which is
    # norms, activations, routing and whatever else stands between them.
    parts_s: dict[str, Array] = field(default_factory=dict, repr=False)
    ideal_parts_s: dict[str, Array] = field(default_factory=dict, repr=False)

    @property
    def gpu_s(self) -> Array:
        return self.compute_s + self.memory_s + self.interconnect_s

    @property
    def total_s(self) -> Array:
        return _with_host(self.gpu_s, self.host_s, self.host_overlapped) + self.draft_host_s


def smooth_maximum(compute_s: Array, memory_s: Array) -> Array:
    """(compute^4 + memory^4)^(1/4), in place where it can be: this is where the time of large evaluations goes."""
    spent, other = compute_s * compute_s, memory_s * memory_s
    spent *= spent
    other *= other
    spent = spent + other
    np.sqrt(spent, out=spent)
    np.sqrt(spent, out=spent)
    return spent


class _Account:
    """Adds up operations; in detail, each under the resource that bounds it, beside its ideal time."""

    def __init__(self, hardware: Hardware, size: tuple[int, ...], detailed: bool):
        self.hardware, self.detailed = hardware, detailed
        self.total, self.compute, self.ideal = np.zeros(size), np.zeros(size), np.zeros(size)
        self.parts: dict[str, Array] = {}
        self.ideals: dict[str, Array] = {}
        # How often each deployment does what is added: passes of a drafter.
        self.times: Array | None = None

    def add(
        self, count: float, compute_s: Array, memory_s: Array, kernels: Array | float, part: str = "products"
    ) -> None:
        spent = smooth_maximum(compute_s, memory_s)
        spent += self.hardware.kernel_s * kernels
        spent *= count
        if self.times is not None:
            spent = spent * self.times
        self.total += spent
        if self.detailed:
            self.compute += np.where(compute_s > memory_s, spent, 0.0)
            self.parts[part] = self.parts.get(part, 0.0) + spent

    def add_ideal(self, count: float, flop: Array, peak: Array, traffic: Array | float, part: str = "products") -> None:
        if self.detailed:
            ideal = count * np.maximum(flop / peak, traffic / self.hardware.memory_bytes_per_s)
            ideal = ideal if self.times is None else ideal * self.times
            self.ideal += ideal
            self.ideals[part] = self.ideals.get(part, 0.0) + ideal

    def verify(self, verified: "_Account") -> None:
        """From one token of each sequence to several: see `_further`."""
        plain = self.total
        self.total = _further(self.hardware, plain, verified.total)
        grown = self.compute + self.hardware.factors["verify"] * (verified.compute - self.compute)
        self.compute = np.clip(grown, 0.0, self.total)
        self.ideal, self.ideals = verified.ideal, verified.ideals
        self.parts = {name: _further(self.hardware, one, verified.parts[name]) for name, one in self.parts.items()}

    def add_attention(
        self, count: int, flop: Array, traffic: Array, rates: tuple[Array, Array], runs: Array | float
    ) -> None:
        rate, peak = rates
        # Two kernels: the pass itself and the reduction of its parts.
        self.add(count, flop / rate, traffic / self.hardware.cache_bytes_per_s, 2.0 * runs, "attention")
        self.add_ideal(count, flop, peak, traffic, "attention")


class Counted(_Account):
    """An account that also counts what was done, for those who look at few steps closely."""

    def __init__(self, hardware: Hardware, size: tuple[int, ...]):
        super().__init__(hardware, size, detailed=True)
        self.flop, self.moved_bytes = np.zeros(size), np.zeros(size)

    def add_ideal(self, count: float, flop: Array, peak: Array, traffic: Array | float, part: str = "products") -> None:
        super().add_ideal(count, flop, peak, traffic, part)
        self.flop = self.flop + count * flop
        self.moved_bytes = self.moved_bytes + count * traffic


def counted(hardware: Hardware, work: Work, at: Shape) -> Counted:
    """Some of a step's work by itself: its seconds, FLOPs, and the bytes of weights and cache that it reads."""
    busiest = _busiest_replica(hardware, at)
    account = Counted(hardware, np.broadcast_shapes(hardware.tp.shape, *(part.shape for part in at)))
    _pass(account, hardware, work, at, busiest, np.ones(1), np.ones(1))
    return account


def step(hardware: Hardware, at: Shape) -> StepCost:
    """The cost of one step through all layers, for every deployment at every operating point."""
    busiest = _busiest_replica(hardware, at)
    account = _run(hardware, at, busiest, detailed=True)
    zero = np.zeros_like(account.total)
    exchanged = zero + _collectives(hardware, busiest)
    if hardware.crosses.any():
        hidden = account.total + exchanged - _overlapped(hardware, at, busiest, account.total, exchanged)
        exchanged = np.maximum(exchanged - hidden, 0.0)
    return StepCost(
        compute_s=account.compute,
        memory_s=account.total - account.compute,
        interconnect_s=exchanged,
        host_s=zero + _host(hardware, busiest),
        ideal_s=account.ideal,
        host_overlapped=hardware.host_overlapped,
        draft_host_s=zero + _draft_host(hardware, busiest),
        parts_s={name: zero + one for name, one in account.parts.items()},
        ideal_parts_s={name: zero + one for name, one in account.ideals.items()},
    )


def step_s(hardware: Hardware, at: Shape) -> Array:
    """Its seconds alone, for those who evaluate many: the same sums without where they went."""
    busiest = _busiest_replica(hardware, at)
    spent = _with_host(_gpu_s(hardware, at, busiest), _host(hardware, busiest), hardware.host_overlapped)
    return spent + _draft_host(hardware, busiest)


def steps_s(hardware: Hardware, shapes: Sequence[Shape]) -> list[Array]:
    """`step_s` of each. Where they are few points they are evaluated as one array, since what an operation takes
    besides its arithmetic is then most of it."""
    sizes = [np.broadcast_shapes(hardware.tp.shape, *(part.shape for part in at)) for at in shapes]
    if hardware.varies or sum(rows * points for rows, points in sizes) > _FEW_POINTS:
        return [step_s(hardware, at) for at in shapes]
    beside = [[np.broadcast_to(part, size) for part in at] for at, size in zip(shapes, sizes, strict=True)]
    spent = step_s(hardware, Shape(*(np.concatenate(parts, axis=-1) for parts in zip(*beside, strict=True))))
    return np.split(spent, np.cumsum([points for _, points in sizes])[:-1], axis=-1)


def gpu_s(hardware: Hardware, at: Shape) -> Array:
    """The GPU's part of them."""
    return _gpu_s(hardware, at, _busiest_replica(hardware, at))


def _gpu_s(hardware: Hardware, at: Shape, busiest: Shape) -> Array:
    computed, exchanged = _run(hardware, at, busiest, detailed=False).total, _collectives(hardware, busiest)
    if not hardware.crosses.any():
        return computed + exchanged
    return _overlapped(hardware, at, busiest, computed, exchanged)


def _overlapped(hardware: Hardware, at: Shape, busiest: Shape, computed: Array, exchanged: Array) -> Array:
    """Engines that reach beyond a node compute one half of a batch while the other travels, where that is quicker:
    each half reads the weights again, and the longer of the two counts."""
    halved = at._replace(decode_sequences=0.5 * at.decode_sequences, prefill_tokens=0.5 * at.prefill_tokens)
    half = busiest._replace(
        decode_sequences=0.5 * busiest.decode_sequences, prefill_tokens=0.5 * busiest.prefill_tokens
    )
    computing, travelling = _run(hardware, halved, half, detailed=False).total, _collectives(hardware, half)
    # The first half has nothing to hide behind, and the last one's results come back alone.
    by_halves = 2.0 * np.maximum(computing, travelling) + np.minimum(computing, travelling) / hardware.work.layers
    together = computed + exchanged
    return np.where(hardware.crosses, np.minimum(together, by_halves), together)


def _with_host(gpu_s: Array, host_s: Array, overlapped: Mask) -> Array:
    """Engines that prepare the next step meanwhile hide the shorter of the two."""
    return np.where(overlapped, np.maximum(gpu_s, host_s), gpu_s + host_s)


def _share(expected: Array) -> Array | float:
    """Share of steps that have anything to do: numbers below one are averages over steps."""
    return 1.0 if (expected >= 1.0).all() else np.minimum(expected, 1.0)


def _run(hardware: Hardware, at: Shape, busiest: Shape, detailed: bool) -> _Account:
    """`at` is the whole replica, which feeds the experts; `busiest` the attention replica that does most."""
    size = np.broadcast_shapes(hardware.tp.shape, *(part.shape for part in at))
    account = _Account(hardware, size, detailed)
    _pass(account, hardware, hardware.work, at, busiest, np.ones(1), np.ones(1))
    if hardware.speculates:
        verified = _Account(hardware, size, detailed)
        _pass(verified, hardware, hardware.work, at, busiest, hardware.queries, hardware.queries)
        account.verify(verified)
    for drafter, passes in hardware.drafters:
        # The first pass brings the drafter's cache up to date with all that the model computes; each further one
        # follows the token before it.
        account.times = np.minimum(passes, 1.0) * hardware.factors["draft"]
        _pass(account, hardware, drafter, at, busiest, hardware.queries, np.ones(1))
        if (passes > 1.0).any():
            account.times = np.maximum(passes - 1.0, 0.0) * hardware.factors["draft"]
            _pass(account, hardware, drafter, _one_each(at), _one_each(busiest), np.ones(1), np.ones(1))
    account.times = None
    if (hardware.slowdown > 1.0).any():
        account.total *= hardware.slowdown
        account.compute *= hardware.slowdown
        account.parts = {name: one * hardware.slowdown for name, one in account.parts.items()}
    return account


def _pass(
    account: _Account, hardware: Hardware, work: Work, at: Shape, busiest: Shape, queries: Array, answers: Array
) -> None:
    """Once through some layers and their head, with `queries` tokens of each sequence and `answers` of them asked."""
    rank_tokens = busiest.decode_sequences * queries + busiest.prefill_tokens
    for operation, count in work.operations.items():
        if operation.expert:
            _experts(account, hardware, count, operation, at.decode_sequences * queries + at.prefill_tokens)
        else:
            _matrix_product(account, hardware, count, operation, rank_tokens)
    for scan, count in work.scans.items():
        _scan(account, hardware, count, scan, busiest, queries)
    for state, count in work.states.items():
        _state(account, hardware, count, state, busiest, queries)
    _elementwise(account, hardware, work, rank_tokens)
    for operation in work.head:
        _matrix_product(account, hardware, 1, operation, busiest.decode_sequences * answers + _prompts(busiest))


def _further(hardware: Hardware, one: Array, several: Array) -> Array:
    """A step that verifies drafts: what one token of each sequence costs, and what the further ones add to that. How
    much more than by the sums, measured steps of each engine say (the constant `verify`); it is never less than
    nothing, so drafts that are not kept never make a step faster, whatever was measured."""
    return np.asarray(one + hardware.factors["verify"] * np.maximum(several - one, 0.0))


def _one_each(at: Shape) -> Shape:
    """One token of every sequence of a step, prompts among them."""
    return shape(_sequences(at), at.decode_context)


def _sequences(at: Shape) -> Array:
    """Sequences of a step: those that decode, and the prompts."""
    return at.decode_sequences + _prompts(at)


def _prompts(at: Shape) -> Array:
    return at.prefill_tokens / np.maximum(at.prefill_span, 1.0)


def _draft_host(hardware: Hardware, busiest: Shape) -> Array:
    """Between passes, and for each sequence whose drafts are kept or not: the next step waits for that."""
    rounds = hardware.draft_rounds * hardware.host_draft_s * np.minimum(_sequences(busiest), 1.0)
    return np.asarray(rounds + hardware.host_verify_s * busiest.decode_sequences)


def _host(hardware: Hardware, busiest: Shape) -> Array:
    """Each attention replica has its own host; one host feeds all stages of a pipeline in turn."""
    prompts = hardware.host_prompt_s * np.minimum(busiest.prefill_tokens, 1.0)
    return (hardware.host_step_s + prompts + hardware.host_sequence_s * _sequences(busiest)) * hardware.pp


def _busiest_replica(hardware: Hardware, at: Shape) -> Shape:
    """What the fullest attention replica does: a sequence or a prompt is never split over replicas."""
    sequences = np.maximum(at.decode_sequences / hardware.dp, np.minimum(at.decode_sequences, 1.0))
    tokens = np.maximum(at.prefill_tokens / hardware.dp, np.minimum(at.prefill_tokens, at.prefill_span))
    return at._replace(decode_sequences=sequences, prefill_tokens=tokens)


def _product(hardware: Hardware, operation: Operation) -> tuple[Array, Array, Array]:
    """Of each deployment: FLOPs of a token, seconds that its activations take, and bytes of weights of a step."""
    weights: Array | float = 0.0
    stored: Array | float = 0.0
    moved: Array | float = 0.0
    largest = _largest(operation)
    for tensor in operation.tensors:
        ranks = np.minimum(hardware.tp, tensor.max_shards) if tensor.shard != "none" else 1.0
        mix = hardware.precision[tensor.role]
        parameters = tensor.parameters / ranks
        weights = weights + parameters
        stored = stored + parameters * (mix.bytes + hardware.unpacked_bytes_per_weight(mix.main))
        inputs = tensor.cols / ranks if tensor.shard == "in" else tensor.cols
        outputs = tensor.rows / ranks if tensor.shard in ("out", "vocab") else tensor.rows
        moved = moved + outputs + (inputs if tensor is largest else 0.0)
    activations_s = moved * ACTIVATION_BYTES / hardware.elementwise_bytes_per_s
    return np.asarray(2.0 * weights), activations_s, np.asarray(stored)


def _largest(operation: Operation) -> Tensor:
    return max(operation.tensors, key=lambda t: t.parameters)


def _achieved(hardware: Hardware, operation: Operation) -> tuple[Array, ...]:
    """The same at the rates of each deployment: seconds of a token, of its activations and of a step's weights; then
    FLOPs of a token, FLOP/s at peak, and bytes of weights."""
    # The same at every operating point, and points are asked for again and again.
    if operation not in hardware.fixed:
        hardware.fixed[operation] = _product(hardware, operation)
    flop, activations_s, stored = hardware.fixed[operation]
    main = hardware.precision[_largest(operation).role].main
    rate, peak = hardware.rates(main)
    return flop / rate, activations_s, stored / hardware.stream_bytes_per_s(main), flop, peak, stored


def _matrix_product(account: _Account, hardware: Hardware, count: int, operation: Operation, tokens: Array) -> None:
    if operation not in hardware.kept:
        hardware.kept[operation] = _achieved(hardware, operation)
    compute_s, activations_s, weights_s, flop, peak, stored = hardware.kept[operation]
    active = _share(tokens)
    memory_s = tokens * activations_s + active * weights_s
    account.add(count, tokens * compute_s, memory_s, active)
    account.add_ideal(count, tokens * flop, peak, active * stored)


def _experts(account: _Account, hardware: Hardware, count: int, operation: Operation, tokens: Array) -> None:
    """Routed experts. A batch reads only the distinct experts that it visits."""
    (tensor,) = operation.tensors
    mix = hardware.precision[tensor.role]
    share = tensor.active / tensor.copies
    local = tensor.copies / hardware.ep
    rows = tokens * tensor.active / hardware.ep
    # The slowest rank sets the pace: about the expected maximum of `ep` random loads.
    crowding = np.minimum(1.0 + np.sqrt(2.0 * np.log(hardware.ep) / np.maximum(rows, 1.0)), hardware.ep)
    crowding = np.where(hardware.is_wide, np.maximum(crowding, UNEVEN_EXPERTS), crowding)
    rows = rows * crowding
    visited = np.minimum(local * distinct_share(share, tokens) * crowding, np.minimum(local, rows))
    splits = hardware.stage_gpus / hardware.ep
    one = tensor.rows * tensor.cols / splits
    stored = visited * one * (mix.bytes + hardware.unpacked_bytes_per_weight(mix.main))
    # Splitting an expert cuts the width between its two products, not the token's own.
    inner, outer = (tensor.rows, tensor.cols) if tensor.role == "experts" else (tensor.cols, tensor.rows)
    _, peak = hardware.rates(mix.main)
    activations = rows * ((outer + inner / splits) * ACTIVATION_BYTES / hardware.elementwise_bytes_per_s)
    memory_s = activations + stored / hardware.stream_bytes_per_s(mix.main)
    padded = rows + EXPERT_PADDING_ROWS * visited
    account.add(count, padded * (2.0 * one / hardware.expert_rate(mix.main)), memory_s, _share(tokens))
    account.add_ideal(count, padded * (2.0 * one), peak, stored)


def distinct_share(share: ArrayLike, tokens: Array) -> Array:
    """Expected share of experts that at least one of `tokens` visits, each visiting `share` of them."""
    missed = np.log1p(-np.minimum(share, 1.0 - 1e-12))
    return np.where(np.asarray(share) >= 1.0, np.minimum(tokens, 1.0), -np.expm1(tokens * missed))


def _scan(account: _Account, hardware: Hardware, count: int, scan: Scan, at: Shape, queries: Array) -> None:
    row_bytes = scan.row_bytes(hardware.kv_bytes_per_element)
    holders = np.minimum(hardware.tp, scan.kv_heads)
    workers = np.minimum(hardware.tp, scan.query_heads)
    rates, limit = hardware.attention_rates(scan.compute), read_limit(scan)
    sequences, tokens = at.decode_sequences, at.prefill_tokens

    def add(flop: Array, traffic: Array, runs: Array) -> None:
        account.add_attention(count, flop / workers, traffic / holders, rates, _share(runs))

    if sequences.any():
        rows = keys_read(scan, limit, at.decode_context)
        # The queries of a sequence share one read of its cache, except for the rows that each chooses for itself.
        read = rows if scan.top_rows is None else np.minimum(queries * rows, at.decode_context / scan.stride)
        add(sequences * queries * rows * scan.decode_flop, sequences * np.maximum(read, rows) * row_bytes, sequences)
    if tokens.any():
        span = np.maximum(at.prefill_span, 1.0)
        end = at.prefill_start + span
        mean_rows = (keys_sum(scan, limit, end) - keys_sum(scan, limit, at.prefill_start)) / span
        # Each prompt's cache is read once and its new rows written; queries of a tile share the reads.
        traffic = (tokens / span * keys_read(scan, limit, end) + tokens / scan.stride) * row_bytes
        add(tokens * mean_rows * scan.prefill_flop, traffic, tokens)


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


def _state(account: _Account, hardware: Hardware, count: int, state: State, at: Shape, queries: Array) -> None:
    workers = np.minimum(hardware.tp, state.heads)
    sequences, tokens = at.decode_sequences, at.prefill_tokens
    flop = (sequences * queries * state.decode_flop + tokens * state.prefill_flop) / workers
    # Read once, and written after every token that may turn out to be the last one kept.
    traffic = ((1.0 + queries) * sequences + 2.0 * _prompts(at)) * state.bytes / workers
    account.add_attention(count, flop, traffic, hardware.attention_rates("bf16"), _share(sequences + tokens))


def _elementwise(account: _Account, hardware: Hardware, work: Work, tokens: Array) -> None:
    traffic = tokens * (work.elementwise_bytes + work.elementwise_sharded_bytes / hardware.tp)
    kernels = (work.elementwise_kernels + work.routing_kernels * hardware.factors["routing"]) * _share(tokens)
    # Fused kernels need no traffic of their own, so the ideal step has none.
    account.add(1, np.zeros(1), traffic / hardware.elementwise_bytes_per_s, kernels, "bookkeeping")


def _collectives(hardware: Hardware, busiest: Shape) -> Array:
    spent = _exchanged(hardware, busiest.decode_sequences + busiest.prefill_tokens)
    if hardware.speculates:
        tokens = busiest.decode_sequences * hardware.queries + busiest.prefill_tokens
        spent = _further(hardware, spent, _exchanged(hardware, tokens))
        for drafter, passes in hardware.drafters:
            first, further = np.minimum(passes, 1.0), np.maximum(passes - 1.0, 0.0)
            drafted = first * _exchanges(hardware, drafter, tokens)
            drafted = drafted + further * _exchanges(hardware, drafter, _sequences(busiest))
            spent = spent + hardware.factors["draft"] * drafted
    return np.asarray(spent)


def _exchanged(hardware: Hardware, tokens: Array) -> Array:
    """What so many tokens cost between the GPUs of a stage, and from stage to stage."""
    message = tokens * hardware.work.hidden * ACTIVATION_BYTES
    hand_over = (hardware.pp - 1) * (hardware.collective_s + message / hardware.tp / hardware.stage_bytes_per_s)
    return _exchanges(hardware, hardware.work, tokens) + hand_over * _share(tokens)


def _exchanges(hardware: Hardware, work: Work, tokens: Array) -> Array:
    """All-reduce after attention and feed-forward (TP), all-to-all around experts (DP)."""
    ranks = hardware.stage_gpus
    reduce = all_reduce_s(hardware, tokens * work.hidden * ACTIVATION_BYTES, hardware.tp)
    attention = work.layers * reduce
    plain_forward = (work.layers - work.expert_layers) * reduce
    # Dispatch sends each token to all ranks that hold its experts in 8 bits, combine brings 16 bits back.
    copies = np.minimum(max(work.experts_per_token, 1), hardware.ep) * ranks / hardware.ep
    sent = tokens * copies * work.expert_width * 3.0
    inside = sent * (ranks - 1) / ranks
    spread = 2.0 * hardware.collective_s + inside / hardware.link_bytes_per_s(ranks)
    if (ranks > _NARROW_RANKS).any():
        wide = WIDE_EXCHANGE_S * hardware.factors["collective"] + inside / hardware.link_peak_bytes_per_s(ranks)
        spread = np.where(ranks > _NARROW_RANKS, wide, spread)
    if hardware.crosses.any():
        # What is for other nodes goes through the network port, and that takes longer than the rest.
        away = 1.0 - hardware.domain / ranks
        between = 2.0 * hardware.exchange_s + sent * away / hardware.port_bytes_per_s
        spread = np.where(hardware.crosses, between, spread)
    spread = _share(tokens) * spread
    experts = work.expert_layers * np.where(hardware.dp > 1, spread, reduce)
    return np.asarray(attention + plain_forward + experts)


def all_reduce_s(hardware: Hardware, message_bytes: Array, ranks: Array) -> Array:
    """Reduce-scatter then all-gather: each rank sends 2(n-1)/n of the message over its links."""
    sent = 2.0 * (ranks - 1) / ranks * message_bytes
    seconds = hardware.collective_s + sent / hardware.link_bytes_per_s(ranks)
    return np.where((ranks > 1) & (message_bytes > 0), seconds, 0.0)
