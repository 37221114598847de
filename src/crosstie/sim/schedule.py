"""Which steps an engine takes under a closed loop of clients, and who waits for them.

Clients that send, wait and send again make a schedule that does not depend on how long a step takes: a
request ends after so many steps whatever they cost. So the schedule is simulated once, in steps, and
every latency is a weighted sum of step times. The start burst, lock-step waves of equal requests,
chunked prompts, stalls of decode for prefill and queues for memory all come out of it, and a change of
constants costs one evaluation of a few dozen steps.
"""

import heapq
import math
import random
from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from crosstie.perf.hardware import Array

# Steps whose decode batch and prompt tokens differ by less than this ratio are counted together.
_BUCKET = 1.2
_LONGEST_RUN = 6000
# How far the tokens a step of one request's speculation are from the mean of all, as a logarithm's standard deviation.
# A p99 of TPOT is 1.16 to 1.25 medians with speculation and 1.02 to 1.05 without, over 124 published runs of
# DeepSeek-R1 (InferenceMAX, InferenceX): ln(1.2 / 1.03) / 2.33.
_UNEVEN_DRAFTS = 0.065


@dataclass(frozen=True, slots=True)
class Loop:
    """A closed loop on one attention replica, in numbers that make equal schedules compare equal."""

    clients: int
    slots: int
    requests: int
    input_tokens: int
    output_tokens: int
    chunk_tokens: int
    prefill_first: bool
    # Lengths are uniform between this share of the nominal length and the whole of it.
    shortest: float = 1.0
    # Steps between two looks at what has arrived.
    receive_every: int = 1
    # Tokens that a decode step gives a sequence, and those that it computes of it: more with speculation.
    tokens_per_step: float = 1.0
    queries: int = 1
    # Whether the engine makes each step ready during the one before.
    ready_ahead: bool = False


@dataclass(frozen=True, slots=True)
class Schedule:
    """Kinds of steps, and how many of each a quantity is the sum of; all of shape (kinds,)."""

    decode_sequences: Array
    decode_context: Array
    prefill_tokens: Array
    prefill_start: Array
    prefill_span: Array
    # Steps of the whole run.
    run: Array
    # Steps between a request and its first token: mean over all, and at two ranks of those after the start.
    ttft_mean: Array
    ttft_p50: Array
    ttft_p99: Array
    # Steps per output token after the first: mean over the requests after the start, and the slow ones.
    tpot: Array
    tpot_p99: Array
    output_tokens: float
    requests: int


class _Kinds:
    """Steps by kind: sums of what they carry, so that each kind has its mean step."""

    def __init__(self) -> None:
        self.index: dict[tuple[int, int], int] = {}
        self.sums: list[list[float]] = []

    def add(self, sequences: int, context: float, tokens: int, start: float, prompts: int, steps: int) -> int:
        key = (_bucket(sequences), _bucket(tokens))
        found = self.index.get(key)
        if found is None:
            found = self.index[key] = len(self.sums)
            self.sums.append([0.0] * 6)
        row = self.sums[found]
        row[0] += steps
        row[1] += steps * sequences
        row[2] += steps * sequences * context
        row[3] += steps * tokens
        row[4] += steps * start
        row[5] += steps * prompts
        return found


@lru_cache(maxsize=65536)
def _bucket(value: int) -> int:
    return 0 if value <= 0 else 1 + round(math.log(value, _BUCKET))


@dataclass(slots=True)
class _Request:
    input: int
    output: int
    # Stretches of steps that were over when it arrived, had its first token and its last.
    arrived: int
    first: int = 0
    last: int = 0
    computed: int = 0
    # Decode steps of the engine before its own.
    joined: int = 0
    # Its place among all requests, so that equal ends come in the same order on every run.
    number: int = 0


@dataclass
class _Engine:
    """The state of a run. A stretch is a number of equal steps; stretches are what requests wait for."""

    loop: Loop
    total: int
    kinds: _Kinds = field(default_factory=_Kinds)
    stretches: list[tuple[int, int]] = field(default_factory=list)
    waiting: deque[_Request] = field(default_factory=deque)
    coming: list[_Request] = field(default_factory=list)
    running: list[tuple[int, int, _Request]] = field(default_factory=list)
    done: list[_Request] = field(default_factory=list)
    created: int = 0
    # Decode steps so far, and the sum over running sequences of their context less the tokens of those.
    clock: int = 0
    context_base: float = 0.0
    # Steps since the engine last looked at what had arrived.
    unseen: int = 0
    draw: random.Random = field(default_factory=lambda: random.Random(20261115))

    def arrive(self) -> _Request:
        self.created += 1
        lengths = self._length(self.loop.input_tokens), self._length(self.loop.output_tokens)
        return _Request(*lengths, arrived=len(self.stretches), number=self.created)

    def _length(self, nominal: int) -> int:
        if self.loop.shortest >= 1.0:
            return nominal
        return max(round(nominal * (self.loop.shortest + (1.0 - self.loop.shortest) * self.draw.random())), 1)

    def _decode_steps(self, tokens: int) -> int:
        """Of one request; how well a text can be guessed differs from one to the next."""
        if self.loop.queries == 1:
            return tokens
        luck = math.exp(_UNEVEN_DRAFTS * self.draw.gauss(0.0, 1.0))
        per_step = min(max(self.loop.tokens_per_step * luck, 1.0), float(self.loop.queries))
        return max(round(tokens / per_step), 1)

    def prefill(self) -> list[_Request]:
        """One step that takes waiting prompts up to the budget; the prompts that it completes."""
        decoding, loop = len(self.running), self.loop
        riding = 0 if loop.prefill_first else decoding
        budget = max(loop.chunk_tokens - riding * loop.queries, 1)
        tokens, start, prompts = 0, 0.0, 0
        completed: list[_Request] = []
        while self.waiting and budget > 0 and decoding + len(completed) < loop.slots:
            prompt = self.waiting[0]
            taken = min(prompt.input - prompt.computed, budget)
            start += float(prompt.computed) * taken
            tokens += taken
            budget -= taken
            prompt.computed += taken
            prompts += 1
            if prompt.computed == prompt.input:
                completed.append(self.waiting.popleft())
        context = self.context_base / riding + self.clock * loop.tokens_per_step if riding else 0.0
        self.stretches.append((self.kinds.add(riding, context, tokens, start, prompts, 1), 1))
        self.clock += 0 if loop.prefill_first else 1
        self.unseen += 1
        return completed

    def decode(self) -> None:
        """Decode steps until a sequence ends or a prompt is seen."""
        decoding = len(self.running)
        steps = max(self.running[0][0] - self.clock, 1)
        if self.coming:
            steps = min(steps, max(self.loop.receive_every - self.unseen, 1))
        context = self.context_base / decoding + (self.clock + 0.5 * steps) * self.loop.tokens_per_step
        self.stretches.append((self.kinds.add(decoding, context, 0, 0.0, 0, steps), steps))
        self.clock += steps
        self.unseen += steps

    def end(self, request: _Request) -> None:
        request.last = len(self.stretches)
        self.done.append(request)
        if self.created < self.total:
            self.coming.append(self.arrive())

    def run(self) -> None:
        self.waiting.extend(self.arrive() for _ in range(min(self.loop.clients, self.total)))
        arrived = 0
        while len(self.done) < self.total:
            completed = []
            earlier, arrived = arrived, len(self.coming)
            if self.waiting and len(self.running) < self.loop.slots:
                completed = self.prefill()
            elif self.running:
                self.decode()
            if self.unseen >= self.loop.receive_every or not self.running:
                # A request that follows another misses the step that is under way, and one that is made ready.
                seen = earlier if self.loop.ready_ahead and self.running else arrived
                self.waiting.extend(self.coming[:seen])
                del self.coming[:seen]
                arrived -= seen
                self.unseen = 0
            while self.running and self.running[0][0] <= self.clock:
                _, _, ended = heapq.heappop(self.running)
                self.context_base -= ended.input - ended.joined * self.loop.tokens_per_step
                self.end(ended)
            for prompt in completed:
                prompt.first = len(self.stretches)
                if prompt.output == 1:
                    self.end(prompt)
                    continue
                prompt.joined = self.clock
                steps = self._decode_steps(prompt.output - 1)
                heapq.heappush(self.running, (self.clock + steps, prompt.number, prompt))
                self.context_base += prompt.input - prompt.joined * self.loop.tokens_per_step


@lru_cache(maxsize=4096)
def schedule(loop: Loop) -> Schedule:
    engine = _Engine(loop, total=min(loop.requests, max(_LONGEST_RUN, 2 * loop.clients)))
    engine.run()
    sums = np.array(engine.kinds.sums)
    steps, sequences, context, tokens, start, prompts = sums.T
    counts = np.zeros((len(engine.stretches) + 1, len(sums)))
    for position, (kind, count) in enumerate(engine.stretches, start=1):
        counts[position, kind] = count
    so_far = np.cumsum(counts, axis=0)
    requests = engine.done
    arrived, first, last = (np.array([getattr(r, name) for r in requests]) for name in ("arrived", "first", "last"))
    later = np.maximum(np.array([r.output for r in requests]) - 1, 1)
    waited = so_far[first] - so_far[arrived]
    decoded = (so_far[last] - so_far[first]) / later[:, None]
    # Percentiles are those of the run under way: the start burst and the drain at the end are no steady load.
    settled = (arrived > 0) & (np.arange(len(requests)) < len(requests) - loop.clients)
    if not settled.any():
        settled = np.ones(len(requests), dtype=bool)
    cost = 1.0 + sequences / steps / 100.0 + tokens / steps / 400.0
    return Schedule(
        decode_sequences=sequences / steps,
        decode_context=context / np.maximum(sequences, 1.0),
        prefill_tokens=tokens / steps,
        prefill_start=start / np.maximum(tokens, 1.0),
        prefill_span=tokens / np.maximum(prompts, 1.0),
        run=so_far[-1],
        ttft_mean=waited.mean(axis=0),
        ttft_p50=_rank(waited[settled], cost, 0.5),
        ttft_p99=_rank(waited, cost, 0.99),
        tpot=decoded[settled].mean(axis=0),
        tpot_p99=_rank(decoded[settled], cost, 0.99),
        output_tokens=float(sum(r.output for r in requests)),
        requests=len(requests),
    )


def _rank(counts: Array, cost: Array, share: float) -> Array:
    """What the requests near a rank waited for, ranked by a rough cost of their steps."""
    order = np.argsort(counts @ cost, kind="stable")
    middle = round(share * (len(order) - 1))
    width = max(len(order) // 40, 0)
    near = order[max(middle - width, 0) : middle + width + 1]
    return np.asarray(counts[near].mean(axis=0))
