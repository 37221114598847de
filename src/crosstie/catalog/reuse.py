"""What a prefix cache would have had of a trace's prompts, at every size at once.

A cache that drops the least recently used holds a block exactly if the tokens of other blocks that were used since are
fewer than its size: the block's stack distance. So one pass over the trace answers for all sizes. Within a prompt the
end is older than the beginning, as engines free blocks, and only whole blocks are found again.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.traces import Ints, Trace

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
