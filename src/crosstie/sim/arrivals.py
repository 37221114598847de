"""One replica under open traffic: requests arrive by the clock, and wait, prefill and decode in steps.

Where `perf.serving` gives means in closed form, this gives percentiles. The engine is the same: a step takes
every running sequence and, up to its budget of tokens, prompts in the order of their arrival; memory and the
engine's own limit keep requests out. Attention replicas (DP) have queues, budgets and caches of their own and
step together. Step times come from `perf`, tabulated once over sequences and prompt tokens, with the caches that
they read added in proportion.
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.core.errors import BadInput
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.memory import cache_sequences
from crosstie.perf.step import shape, step_s

_SEQUENCES = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_TOKENS = (0, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class Request(NamedTuple):
    arrival_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Served:
    """By request, in the order of arrival; TPOT is not a number where there is one token."""

    ttft_s: Array
    tpot_s: Array
    # Share of the time in which the replica had anything to do.
    busy: float


class StepTimes:
    """Seconds of a step: tables over sequences and prompt tokens, and slopes for what each reads of the cache.

    Two tables where there are several attention replicas: all prompt tokens on one, and the same on each.
    """

    def __init__(self, deployment: Deployment, context: float):
        self.hardware = Hardware([deployment])
        self.chunk = int(self.hardware.chunk_tokens[0, 0])
        self.sequences = _SEQUENCES
        self.dp = deployment.parallelism.dp
        most = self.chunk * self.dp
        self.tokens = sorted({t for t in _TOKENS if t < most} | {self.chunk, most})
        self.context = context
        self.on_one = self._table(1.0)
        self.on_each = self._table(1.0 / self.dp) if self.dp > 1 else self.on_one
        # A cache twice as long, and a prompt that continues one: what both add to a large step.
        many = 64.0
        longer = self._times([many], [0.0], 2.0 * context, 0.0) - self._times([many], [0.0], context, 0.0)
        self.per_cached = float(longer[0]) / (many * context)
        later = self._times([0.0], [self.chunk], 0.0, context) - self._times([0.0], [self.chunk], 0.0, 0.0)
        self.per_attended = max(float(later[0]), 0.0) / (self.chunk * context)

    def _times(self, sequences: object, tokens: object, context: float, start: float, span: float = 1.0) -> Array:
        n, t = np.asarray(sequences, np.float64), np.asarray(tokens, np.float64)
        at = shape(n, np.where(n > 0, context, 0.0), t, np.where(t > 0, start, 0.0), span * t)
        return np.asarray(step_s(self.hardware, at)[0])

    def _table(self, span: float) -> list[list[float]]:
        n, t = (grid.ravel() for grid in np.meshgrid(self.sequences, self.tokens, indexing="ij"))
        times = self._times(n, t, self.context, 0.0, span)
        found: list[list[float]] = times.reshape(len(self.sequences), len(self.tokens)).tolist()
        return found

    def seconds(self, sequences: int, cached: float, tokens: int, largest: int, before: float) -> float:
        """`cached`: tokens of all the sequences' contexts. Of the attention replica with the most prompt tokens,
        `largest` is their number and `before` the sum of what lies before each of them."""
        spent = self._looked_up(self.on_one, sequences, tokens)
        if self.dp > 1 and tokens:
            even = self._looked_up(self.on_each, sequences, tokens)
            uneven = (largest / tokens - 1.0 / self.dp) / (1.0 - 1.0 / self.dp)
            spent = even + uneven * (spent - even)
        # The tables have a replica's tokens in one prompt, from its beginning.
        attended = before - 0.5 * largest * largest
        extra = (cached - sequences * self.context) * self.per_cached + attended * self.per_attended
        return max(spent + extra, 1e-6)

    def _looked_up(self, table: list[list[float]], sequences: int, tokens: int) -> float:
        i = min(bisect_right(self.sequences, sequences) - 1, len(self.sequences) - 2)
        j = min(bisect_right(self.tokens, tokens) - 1, len(self.tokens) - 2)
        low, high = table[i], table[i + 1]
        a = (sequences - self.sequences[i]) / (self.sequences[i + 1] - self.sequences[i])
        b = (tokens - self.tokens[j]) / (self.tokens[j + 1] - self.tokens[j])
        left = low[j] + a * (high[j] - low[j])
        right = low[j + 1] + a * (high[j + 1] - low[j + 1])
        return left + b * (right - left)


def simulate(deployment: Deployment, requests: Sequence[Request], slower: float = 1.0) -> Served:
    """All requests on one replica; `slower` stretches every step."""
    if deployment.parallelism.pp > 1:
        raise BadInput(f"{deployment.label}: pipelines are not simulated")
    if not requests:
        raise BadInput("no request to simulate")
    context = sum(r.input_tokens + 0.5 * r.output_tokens for r in requests) / len(requests)
    times = StepTimes(deployment, context)
    engine = _Engine(deployment, times, context)
    return engine.run(sorted(requests), slower)


@dataclass
class _Rank:
    """One attention replica: who waits there for prefill, how many decode, and the tokens that it holds."""

    waiting: deque[int] = field(default_factory=deque)
    decoding: int = 0
    held: float = 0.0


class _Prefill(NamedTuple):
    """What a step takes of prompts on one replica, and those that it completes; `before` as in `StepTimes`."""

    tokens: int
    before: float
    completed: list[int]


class _Engine:
    def __init__(self, deployment: Deployment, times: StepTimes, context: float):
        self.times = times
        self.dp = deployment.parallelism.dp
        # Of each attention replica.
        self.cache_tokens = float(cache_sequences(deployment, context)) * context / self.dp
        self.most = int(times.hardware.max_sequences[0, 0]) // self.dp
        self.prefill_first = bool(times.hardware.prefill_first[0, 0])
        self.whole = deployment.stack.admission == "whole"
        self.request_s = float(times.hardware.host_request_s[0, 0])

    def run(self, requests: list[Request], slower: float) -> Served:
        count = len(requests)
        first, last = [math.nan] * count, [math.nan] * count
        ranks = [_Rank() for _ in range(self.dp)]
        rank_of = [ranks[0]] * count
        # Running sequences by the decode step at which they end.
        running: list[tuple[int, int]] = []
        done_tokens = [0] * count
        clock, busy, cached = 0.0, 0.0, 0.0
        steps = arrived = waiting = 0
        while arrived < count or waiting or running:
            if not waiting and not running:
                clock = max(clock, requests[arrived].arrival_s)
            while arrived < count and requests[arrived].arrival_s <= clock:
                rank_of[arrived] = min(ranks, key=lambda rank: len(rank.waiting) + rank.decoding)
                rank_of[arrived].waiting.append(arrived)
                arrived += 1
                waiting += 1
            taken = [self._prefill(requests, rank, done_tokens) for rank in ranks]
            fullest = max(taken, key=lambda one: one.tokens)
            tokens = sum(one.tokens for one in taken)
            riding = 0 if self.prefill_first and tokens else len(running)
            read = cached if riding else 0.0
            spent = slower * self.times.seconds(riding, read, tokens, fullest.tokens, fullest.before)
            clock += spent
            busy += spent
            if riding:
                steps += 1
                cached += riding
                if not self.whole:
                    for rank in ranks:
                        rank.held += rank.decoding
                while running and running[0][0] <= steps:
                    _, ended = heappop(running)
                    last[ended] = clock
                    request = requests[ended]
                    cached -= request.input_tokens + request.output_tokens
                    rank_of[ended].held -= request.input_tokens + request.output_tokens
                    rank_of[ended].decoding -= 1
            for one in (index for part in taken for index in part.completed):
                request = requests[one]
                waiting -= 1
                first[one] = clock
                if request.output_tokens <= 1:
                    last[one] = clock
                    continue
                rank_of[one].held += self._needs(request)
                rank_of[one].decoding += 1
                cached += request.input_tokens + 1
                heappush(running, (steps + request.output_tokens - 1, one))
        arrivals = np.array([r.arrival_s for r in requests])
        later = np.array([float(r.output_tokens - 1) for r in requests])
        tpot = np.divide(np.array(last) - np.array(first), later, out=np.full(count, np.nan), where=later > 0)
        span = max(clock - requests[0].arrival_s, 1e-9)
        return Served(np.array(first) - arrivals + self.request_s, tpot, busy / span)

    def _needs(self, request: Request) -> int:
        """Tokens of the cache that a request must find free."""
        return request.input_tokens + (request.output_tokens if self.whole else 1)

    def _prefill(self, requests: list[Request], rank: _Rank, done: list[int]) -> _Prefill:
        """The prompts of the next step on one attention replica, in the order of their arrival."""
        room = max(self.times.chunk - (0 if self.prefill_first else rank.decoding), 0)
        tokens, before, held = 0, 0.0, rank.held
        completed: list[int] = []
        while rank.waiting and room > 0 and rank.decoding + len(completed) < self.most:
            one = rank.waiting[0]
            request = requests[one]
            # A request that nothing else keeps out is let in, however long it is.
            if held + self._needs(request) > self.cache_tokens and (rank.decoding or completed):
                break
            taken = min(request.input_tokens - done[one], room)
            before += taken * (done[one] + 0.5 * taken)
            done[one] += taken
            tokens += taken
            room -= taken
            if done[one] < request.input_tokens:
                break
            rank.waiting.popleft()
            completed.append(one)
            held += self._needs(request)
        return _Prefill(tokens, before, completed)
