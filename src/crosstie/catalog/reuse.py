"""What a prefix cache has of prompts: of a trace's at every size at once, and the `prefix` of a class.

A cache that drops the least recently used holds a block exactly if the tokens of other blocks that were used since are
fewer than its size: the block's stack distance. So one pass over the trace answers for all sizes. Within a prompt the
end is older than the beginning, as engines free blocks, and only whole blocks are found again.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.lengths import Lengths
from crosstie.catalog.reading import read_record, table
from crosstie.catalog.traces import BLOCKS, Ints, Trace
from crosstie.core.errors import BadData
from crosstie.core.workload import TIERS, HitCurve, PrefixReuse, Slice

Floats = NDArray[np.float64]

# Blocks of an engine, in tokens: what is left of a prompt behind its last whole one is not found again.
ENGINE_BLOCK = 16
# Of where requests go that may go anywhere: the same every time.
_SEED = 7


@dataclass(frozen=True, slots=True)
class Reuse:
    """Blocks of prompts that were there before, in order of the size of cache that still has them."""

    # Which request each belongs to, the tokens that it spares, and the size of the smallest cache that has it.
    request: Ints
    tokens: Floats
    needs: Floats

    def cached_tokens(self, cache_tokens: float) -> float:
        """Prompt tokens of the whole trace that a cache of that size has."""
        return float(self.tokens[: np.searchsorted(self.needs, cache_tokens, side="right")].sum())

    def curve(self, sizes: Floats, requests: NDArray[np.bool_]) -> Floats:
        """Tokens that a cache of each size has of a prompt, on average over some of the requests."""
        mine = requests[self.request]
        total = np.concatenate(([0.0], np.cumsum(self.tokens[mine])))
        return np.asarray(total[np.searchsorted(self.needs[mine], sizes, side="right")] / max(requests.sum(), 1))


def reuse(trace: Trace, replicas: int = 1) -> Reuse:
    """Of a trace that has blocks. With several `replicas` each request goes to any of them, whatever it is about, and
    every one has a cache of the size that is asked for."""
    assert trace.blocks is not None
    count = len(trace)
    lengths = np.fromiter(map(len, trace.blocks), np.int64, count)
    place = np.zeros(count, np.int64) if replicas == 1 else np.random.default_rng(_SEED).integers(0, replicas, count)
    # Each replica's requests follow one another; numbers of blocks are its own.
    order = np.argsort(place, kind="stable")
    request = np.repeat(order, lengths[order])
    ends = np.cumsum(lengths[order])
    at = np.arange(len(request)) - np.repeat(ends - lengths[order], lengths[order])
    flat = np.fromiter((block for row in order for block in trace.blocks[row]), np.int64, len(request))
    named = np.unique(flat, return_inverse=True)[1].ravel()
    keys = place[request] * len(flat) + named
    size = trace.block_tokens
    held = np.minimum(trace.input_tokens[request] - at * size, size).clip(0)
    whole = held // ENGINE_BLOCK * ENGINE_BLOCK
    # The last token of a prompt is computed in any case, and its block with it.
    last = (trace.input_tokens[request] - 1) // ENGINE_BLOCK * ENGINE_BLOCK - at * size
    spared = np.minimum(whole, last.clip(0)).astype(np.float64)
    distance = _distances(request, at, keys, held.astype(np.float64), trace.output_tokens, order, lengths)
    spares = np.isfinite(distance) & (spared > 0)
    needs = distance + held
    by_size = np.flatnonzero(spares)[np.argsort(needs[spares], kind="stable")]
    return Reuse(request[by_size], spared[by_size], needs[by_size])


def _distances(request: Ints, at: Ints, keys: Ints, held: Floats, outputs: Ints, order: Ints, lengths: Ints) -> Floats:
    """Tokens used since a block was last, when its prompt comes; infinite for the first time.

    The history: of every request its blocks from the last to the first, behind them its answer, which nobody asks for
    again. A block's distance is the sum over distinct blocks between its last use and the beginning of its request:
    those whose own last use lies before that of the block.
    """
    count, blocks = len(order), len(request)
    sizes = lengths[order] + 1
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    turn = np.repeat(np.arange(count), lengths[order])
    # The answer first, since it is the end of all.
    where = starts[turn] + lengths[order][turn] - at
    weight = np.zeros(blocks + count)
    weight[starts] = outputs[order]
    weight[where] = held
    name = np.full(blocks + count, -1, np.int64)
    name[where] = keys
    before = _last_use(name)
    begins = starts[turn]
    used = before[where]
    asked = used >= 0
    # Numbers of one replica never meet those of another, but the history of the others is not its own.
    newer = _sum_before(before, weight, begins[asked], used[asked])
    through = np.cumsum(weight)
    distance = np.full(blocks, np.inf)
    distance[asked] = newer - through[used[asked]]
    return _no_sooner_than_before(distance, turn)


def _last_use(name: Ints) -> Ints:
    """Where the same name stood last, -1 for the first time; those called -1 are all different."""
    order = np.argsort(name, kind="stable")
    same = (name[order][1:] == name[order][:-1]) & (name[order][1:] >= 0)
    earlier = np.full(len(name), -1, np.int64)
    earlier[order[1:][same]] = order[:-1][same]
    return earlier


def _sum_before(values: Ints, weight: Floats, ends: Ints, most: Ints) -> Floats:
    """For each query the weights of places before `ends` whose value is at most `most`.

    A place [0, end) is cut into ranges whose lengths are powers of two; within each, values are sorted once.
    """
    size = len(values)
    total = np.zeros(len(ends))
    order = np.arange(size)
    width = 1
    while width <= size:
        # Two sorted ranges become one, which a stable sort does by merging them.
        key = order // width * (size + 1) + values[order] + 1
        merged = np.argsort(key, kind="stable")
        order, key = order[merged], key[merged]
        use = np.flatnonzero(ends & width)
        running = np.concatenate(([0.0], np.cumsum(weight[order])))
        begin = ends[use] // (2 * width) * 2 * width
        upto = np.searchsorted(key, begin // width * (size + 1) + most[use] + 1, side="right")
        total[use] += running[upto] - running[begin]
        width *= 2
    return total


def _no_sooner_than_before(distance: Floats, turn: Ints) -> Floats:
    """A block is of use only if all before it are there."""
    finite = distance[np.isfinite(distance)]
    lift = (finite.max() if len(finite) else 0.0) + 1.0
    capped = np.where(np.isfinite(distance), distance, lift)
    reached = np.maximum.accumulate(capped + turn * 2.0 * lift) - turn * 2.0 * lift
    return np.where(reached >= lift - 0.25, np.inf, reached)


# Replicas over which requests are spread when the curve is measured; between them logarithms are interpolated.
_SPREAD = (1, 4, 16, 64)
# Sizes of caches between which curves are taken as straight.
_SIZES = 40
_OF_MEASURED = ("routing", *TIERS, *TIERS.values())


def read_prefix(file: Path, where: str, raw: object, trace: Trace | None) -> PrefixReuse:
    entry = table(file, where, raw)
    prefix_reuse = read_record(file, where, entry, PrefixReuse)
    if prefix_reuse.measured:
        _check_measurable(file, where, entry, trace)
    else:
        for key in _OF_MEASURED:
            if key in entry:
                raise BadData(file, f"{where}.{key}", "needs measured = true: where hits are is known of a trace alone")
        if prefix_reuse.hit_rate is None and not prefix_reuse.shared_tokens:
            raise BadData(file, where, "give hit_rate, shared_tokens, or measured = true with a trace of hash_ids")
    return prefix_reuse


def _check_measurable(file: Path, where: str, entry: dict[str, object], trace: Trace | None) -> None:
    for key in ("hit_rate", "shared_tokens", "idle_s"):
        if key in entry:
            raise BadData(file, f"{where}.{key}", "is what measured = true finds out: leave one of them out")
    if trace is None:
        raise BadData(file, f"{where}.measured", "the class has no trace to measure it on")
    if trace.blocks is None:
        raise BadData(file, f"{where}.measured", f"the trace has no {BLOCKS}, which tell what prompts have in common")
    if not trace.requests_per_s:
        raise BadData(file, f"{where}.measured", "the trace has no times, so nothing tells how soon prompts come again")


def with_prefixes(
    file: Path,
    where: str,
    prefix: PrefixReuse,
    slices: tuple[Slice, ...],
    inputs: Lengths,
    requests_per_s: float,
    trace: Trace | None,
) -> tuple[Slice, ...]:
    """The slices with what is cached of their prompts; `inputs` are those that they were cut from."""
    if prefix.measured:
        assert trace is not None
        return _measured(prefix, slices, inputs, requests_per_s, trace)
    shared, rate = float(prefix.shared_tokens), prefix.hit_rate
    mean = sum(band.share * band.input_tokens for band in slices)
    if rate is not None and shared > rate * mean:
        raise BadData(
            file, f"{where}.shared_tokens", f"{shared:,.0f} are more than hit_rate, {rate:g} of {mean:,.0f} tokens"
        )
    return tuple(
        _given(prefix, band, inputs[group]) for band, group in zip(slices, _groups(slices, inputs), strict=True)
    )


def _groups(slices: tuple[Slice, ...], inputs: Lengths) -> list[Ints]:
    """Which of the requests each slice is made of."""
    ends = np.rint(np.cumsum([band.share for band in slices]) * len(inputs)).astype(np.int64)
    return np.split(np.argsort(inputs, kind="stable"), ends[:-1])


def _given(prefix: PrefixReuse, band: Slice, inputs: Lengths) -> Slice:
    """A bare rate says nothing of who hits: every prompt is taken to have that share of it in the cache."""

    def cached(lengths: Lengths) -> Lengths:
        if prefix.hit_rate is None:
            return np.minimum(float(prefix.shared_tokens), lengths - 1.0)
        return prefix.hit_rate * lengths

    mean = float(cached(inputs).mean())
    return msgspec.structs.replace(
        band,
        cached_tokens=mean,
        shared_tokens=min(float(prefix.shared_tokens), mean),
        cached_sample=tuple(map(float, cached(np.array([float(tokens) for tokens, _ in band.sample])))),
        prefix=prefix,
    )


def _measured(
    prefix: PrefixReuse, slices: tuple[Slice, ...], inputs: Lengths, requests_per_s: float, trace: Trace
) -> tuple[Slice, ...]:
    # Attention replicas of one engine are spread over as well, so that all rows are needed however requests are routed.
    reuses = [reuse(trace, count) for count in _SPREAD]
    sizes = _sizes(reuses)
    spared = np.bincount(reuses[0].request, reuses[0].tokens, len(trace))
    assert trace.requests_per_s
    tokens = float((trace.input_tokens + trace.output_tokens).mean())
    made = []
    for band, group in zip(slices, _groups(slices, inputs), strict=True):
        mine = np.zeros(len(trace), np.bool_)
        mine[group] = True
        rows = [each.curve(sizes, mine) for each in reuses]
        hits = HitCurve(
            tokens_per_s=trace.requests_per_s * tokens,
            class_tokens_per_s=requests_per_s * tokens,
            cache_tokens=tuple(map(float, sizes)),
            replicas=_SPREAD,
            cached_tokens=tuple(tuple(map(float, row)) for row in rows),
        )
        # The sample is of the trace's own requests.
        known = {(round(float(inputs[row])), int(trace.output_tokens[row])): float(spared[row]) for row in group}
        sample = tuple(known.get(pair, 0.0) for pair in band.sample)
        cached = float(rows[0][-1])
        made.append(msgspec.structs.replace(band, cached_tokens=cached, cached_sample=sample, prefix=prefix, hits=hits))
    return tuple(made)


def _sizes(reuses: list[Reuse]) -> Lengths:
    needs = np.concatenate([trace_reuse.needs for trace_reuse in reuses])
    if not len(needs):
        return np.array([1.0])
    return np.unique(np.quantile(needs, np.linspace(0.0, 1.0, _SIZES)))
