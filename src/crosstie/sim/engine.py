"""One replica's engine, stepped by whoever holds the clock: requests go in, tokens with their moments come out.

There is one idea: a step takes every running sequence and, up to its budget of tokens, prompts in the order of their
arrival; memory and the engine's own limit keep requests out. Attention replicas (DP) have queues, budgets and caches
of their own and step together. A request that arrives during a step waits for the next one, so nothing depends on
when the outer clock looks: advancing once to the end or a thousand times on the way gives the same tokens.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeAlias

from crosstie.core.deployment import Deployment
from crosstie.core.errors import BadInput
from crosstie.perf.memory import cache_sequences
from crosstie.perf.tabulated import StepTimes
from crosstie.sim.prefix_cache import PrefixCache

# Whatever the caller tells its requests apart by.
Key: TypeAlias = Any


class Token(NamedTuple):
    """So many tokens of a request's answer are there by that moment."""

    id: Key
    tokens: int
    finished: bool
    at: float


class _Job:
    """A request on its way through the engine."""

    __slots__ = (
        "cached", "ends_at_step", "gone", "id", "input", "made", "output", "prefilled", "prefix", "prompt", "rank",
        "since_step",
    )  # fmt: skip

    def __init__(self, id: Key, input_tokens: int, output_tokens: int, cached: int, prefix: Sequence[Hashable]):
        self.id = id
        # Keys of the prompt's blocks, where the engine has a cache to look them up in.
        self.prefix = prefix
        self.prompt = input_tokens
        # Tokens to prefill: the prompt, and after a preemption those of its own answer, which are computed again.
        self.input = input_tokens
        self.output = output_tokens
        self.cached = cached
        self.prefilled = cached
        # Tokens of the answer when its present run of decode steps began, and the step at which that was.
        self.made = 0
        self.since_step = -1
        self.ends_at_step = -1
        self.rank: _Rank | None = None
        self.gone = False

    @property
    def decoding(self) -> bool:
        return self.since_step >= 0


class _Rank:
    """One attention replica: who waits there for prefill, who decodes, and the tokens that it holds."""

    __slots__ = ("cache", "held", "jobs", "waiting")

    def __init__(self, cache: PrefixCache | None) -> None:
        self.cache = cache
        self.waiting: deque[_Job] = deque()
        # In the order in which they began to decode; a dict for its quick removal.
        self.jobs: dict[_Job, None] = {}
        self.held = 0.0


class _Prefill(NamedTuple):
    """What a step takes of prompts on one replica, and those that it completes; `before` as in `StepTimes`."""

    tokens: int
    before: float
    completed: list[_Job]


class Engine:
    """`slower` stretches every step that begins from now on, and may be changed at any time.

    `preempts`: when the answers outgrow the cache, the latest sequence is thrown out and computed again, as vLLM does;
    otherwise the cache gives way. `every_token`: `advance` tells of every token, not just of first and last ones.
    `began`, where one is given, is told when the prefill of each request begins; whoever gave it empties it.
    `block_tokens`: of the blocks that requests give the keys of; each attention replica then keeps a cache of them.
    """

    def __init__(
        self,
        deployment: Deployment,
        context: float,
        slower: float = 1.0,
        *,
        times: StepTimes | None = None,
        preempts: bool = True,
        every_token: bool = False,
        began: dict[Key, float] | None = None,
        block_tokens: int | None = None,
    ):
        self.times = times or StepTimes(deployment, context)
        self.slower = slower
        self.preempts = preempts
        self.every_token = every_token
        self.began = began
        self.pp = deployment.parallelism.pp
        hardware, dp = self.times.hardware, deployment.parallelism.dp
        # Stages work on as many chunks at once.
        self.budget = self.times.chunk * self.pp
        # Of each attention replica.
        self.cache_tokens = float(cache_sequences(deployment, context)) * context / dp
        self.most = max(int(hardware.max_sequences[0, 0]) // dp, 1)
        self.prefill_first = bool(hardware.prefill_first[0, 0])
        self.whole = deployment.stack.admission == "whole"
        # What the host does with a request before the engine sees it.
        self.request_s = float(hardware.host_request_s[0, 0])
        self.preemptions = 0
        self.busy_s = 0.0
        # The end of the step under way, or else of the last one.
        self.clock = 0.0
        self.caches = [PrefixCache(self.cache_tokens, block_tokens) for _ in range(dp)] if block_tokens else []
        self._ranks = [_Rank(self.caches[rank] if self.caches else None) for rank in range(dp)]
        self._jobs: dict[Key, _Job] = {}
        self._arriving: deque[tuple[float, _Job]] = deque()
        # Sequences by the decode step at which they end; the number in the middle keeps equal ones in order.
        self._endings: list[tuple[int, int, _Job]] = []
        self._begun = 0
        self._decoding = 0
        self._waiting = 0
        self._cached = 0.0
        self._steps = 0
        # Of the step under way: what it takes of prompts, and whether sequences ride along.
        self._taken: list[_Prefill] | None = None
        self._rides = False
        self._spent = 0.0

    def add(
        self,
        id: Key,
        input_tokens: int,
        output_tokens: int,
        now: float,
        cached_tokens: int = 0,
        prefix: Sequence[Hashable] = (),
    ) -> None:
        """`now` may not go back. Of the prompt, `cached_tokens` need not be computed; the last token always must.

        `prefix`: keys of the prompt's blocks, which the engine's own cache is asked for when its prefill begins.
        """
        if id in self._jobs:
            raise BadInput(f"request {id!r} is there already")
        if input_tokens < 1 or output_tokens < 1:
            raise BadInput(f"request {id!r}: {input_tokens} tokens in, {output_tokens} out: must be at least 1")
        job = _Job(id, input_tokens, output_tokens, max(min(cached_tokens, input_tokens - 1), 0), prefix)
        self._jobs[id] = job
        self._arriving.append((now + self.request_s, job))

    def cancel(self, id: Key) -> bool:
        """Lets go of a request at once; whether it was there."""
        job = self._jobs.pop(id, None)
        if job is None:
            return False
        job.gone = True
        if job.rank is None:
            self._arriving = deque(one for one in self._arriving if one[1] is not job)
        elif job.decoding:
            self._release(job)
        elif job in job.rank.waiting:
            job.rank.waiting.remove(job)
            self._waiting -= 1
        return True

    @property
    def running(self) -> int:
        """Sequences that decode, and prompts that are part of the step under way or were of the last."""
        heads = (rank.waiting[0] for rank in self._ranks if rank.waiting)
        started = sum(1 for job in heads if job.prefilled > job.cached)
        return self._decoding + started + sum(not job.gone for part in self._taken or () for job in part.completed)

    @property
    def waiting(self) -> int:
        return len(self._jobs) - self.running

    @property
    def kv_used_fraction(self) -> float:
        started = sum(rank.waiting[0].prefilled for rank in self._ranks if rank.waiting)
        used = sum(rank.held for rank in self._ranks) + started
        return min(used / max(self.cache_tokens * len(self._ranks), 1.0), 1.0)

    @property
    def idle(self) -> bool:
        return not self._jobs and self._taken is None

    def next_event_s(self) -> float | None:
        """Nothing happens before that moment, the end of the present step; None: nothing ever will.

        A step may end without a first or a last token; then `advance` returns nothing, and one asks again.
        """
        if self._taken is None and not self._begin(math.inf):
            return None
        return self.clock

    def advance(self, now: float) -> list[Token]:
        """All that happens up to and including that moment, in order."""
        found: list[Token] = []
        while self._taken is not None or self._begin(now):
            if self.clock > now:
                break
            self._complete(found)
        return found

    def next_answer_s(self) -> float | None:
        """No first and no last token comes before that moment, unless a request is added or cancelled, or `slower`
        changes; None: none ever will. Begins nothing, and is early rather than late: then one asks again. (It may be
        late by a preemption on the way, which makes the steps after it a little shorter.)"""
        arriving = self._arriving[0][0] if self._arriving else math.inf
        if self._taken is None:
            soon = self.clock if self._waiting or self._decoding else arriving
            return None if soon == math.inf else soon
        if any(part.tokens for part in self._taken):
            return self.clock
        # Only sequences ride: as caches grow, none of the steps up to the next ending is shorter than this one.
        # Whoever waits is kept out until then, by memory or by the engine's limit, or else arrives on the way.
        while self._endings and self._endings[0][2].ends_at_step != self._endings[0][0]:
            heappop(self._endings)
        steps = self._endings[0][0] - self._steps if self._endings else 1
        return min(self.clock + (steps - 1) * self._spent, max(arriving, self.clock))

    def made(self, id: Key) -> int:
        """Tokens of a request's answer so far; 0 for one that is not there."""
        job = self._jobs.get(id)
        if job is None:
            return 0
        return job.made + (self._steps - job.since_step if job.decoding else 0)

    def _begin(self, before: float) -> bool:
        """Begins the next step, if there is one and it begins before that moment."""
        arriving = self._arriving
        start = self.clock
        if not self._waiting and not self._decoding:
            if not arriving:
                return False
            start = max(start, arriving[0][0])
        # Who looks at the moment at which a step ends may still add a request to the next one.
        if start >= before:
            return False
        while arriving and arriving[0][0] <= start:
            job = arriving.popleft()[1]
            job.rank = min(self._ranks, key=_load) if len(self._ranks) > 1 else self._ranks[0]
            job.rank.waiting.append(job)
            self._waiting += 1
        taken = [self._prefill(rank, start) for rank in self._ranks]
        fullest = taken[0] if len(taken) == 1 else max(taken, key=lambda one: one.tokens)
        tokens = sum(one.tokens for one in taken)
        self._rides = not (self.prefill_first and tokens) and self._decoding > 0
        riding, read = (self._decoding, self._cached) if self._rides else (0, 0.0)
        spent = self.slower * self._seconds(riding, read, tokens, fullest)
        self._taken = taken
        self._spent = spent
        self.clock = start + spent
        self.busy_s += spent
        return True

    def _seconds(self, riding: float, read: float, tokens: int, fullest: _Prefill) -> float:
        if self.pp == 1:
            return self.times.seconds(riding, read, tokens, fullest.tokens, fullest.before)
        # A step is one pass through all stages, in which each works on its part of the sequences and on one chunk.
        part = min(1.0, self.times.chunk / fullest.tokens) if fullest.tokens else 1.0
        largest, before = part * fullest.tokens, part * fullest.before
        return self.times.seconds(riding / self.pp, read / self.pp, part * tokens, largest, before)

    def _complete(self, found: list[Token]) -> None:
        taken = self._taken
        assert taken is not None
        self._taken = None
        if self._rides:
            self._decode(found)
        for part in taken:
            for job in part.completed:
                if not job.gone:
                    self._first(job, found)
        if self.preempts and not self.whole:
            for rank in self._ranks:
                while rank.held > self.cache_tokens and len(rank.jobs) > 1:
                    self._preempt(rank)

    def _decode(self, found: list[Token]) -> None:
        """One more token for every sequence."""
        self._steps += 1
        self._cached += self._decoding
        if not self.whole:
            for rank in self._ranks:
                rank.held += len(rank.jobs)
        endings, steps = self._endings, self._steps
        if self.every_token:
            for rank in self._ranks:
                found.extend(
                    Token(job.id, job.made + steps - job.since_step, False, self.clock)
                    for job in rank.jobs
                    if job.ends_at_step > steps
                )
        while endings and endings[0][0] <= steps:
            ends, _, job = heappop(endings)
            # Whoever was cancelled or preempted has left its entry behind.
            if job.ends_at_step == ends and not job.gone:
                self._release(job)
                self._keep(job, answer=True)
                del self._jobs[job.id]
                found.append(Token(job.id, job.output, True, self.clock))

    def _first(self, job: _Job, found: list[Token]) -> None:
        """The end of a prompt's prefill: the next token of its answer, as a rule the first."""
        job.made += 1
        finished = job.made >= job.output
        if job.made == 1 or finished or self.every_token:
            found.append(Token(job.id, job.made, finished, self.clock))
        self._keep(job, answer=finished)
        if finished:
            del self._jobs[job.id]
            return
        rank = job.rank
        assert rank is not None
        rank.held += self._needs(job)
        rank.jobs[job] = None
        self._decoding += 1
        self._cached += job.input + 1
        job.since_step = self._steps
        job.ends_at_step = self._steps + job.output - job.made
        self._begun += 1
        heappush(self._endings, (job.ends_at_step, self._begun, job))

    def _keep(self, job: _Job, *, answer: bool) -> None:
        """What it has computed can be found from now on; what was used last is dropped last."""
        cache = job.rank.cache if job.rank is not None else None
        if cache is None:
            return
        if answer:
            cache.keep_answer(job.output if job.prefix else job.prompt + job.output)
        cache.keep(job.prefix, job.prompt)

    def _release(self, job: _Job) -> None:
        """Takes a decoding sequence out of the cache."""
        rank = job.rank
        assert rank is not None
        since = self._steps - job.since_step
        self._cached -= job.input + 1 + since
        rank.held -= self._needs(job) + (0 if self.whole else since)
        del rank.jobs[job]
        self._decoding -= 1
        job.ends_at_step = -1

    def _preempt(self, rank: _Rank) -> None:
        """The latest to begin goes back to the head of the queue and computes all it had again."""
        job = next(reversed(rank.jobs))
        self._release(job)
        made = job.made + self._steps - job.since_step
        job.made = made
        job.input = job.prompt + made
        job.prefilled = job.cached
        job.since_step = -1
        rank.waiting.appendleft(job)
        self._waiting += 1
        self.preemptions += 1

    def _needs(self, job: _Job) -> int:
        """Tokens of the cache that a request must find free."""
        return job.input + (job.output if self.whole else 1)

    def _prefill(self, rank: _Rank, start: float) -> _Prefill:
        """The prompts of the next step on one attention replica, in the order of their arrival."""
        waiting, decoding = rank.waiting, len(rank.jobs)
        completed: list[_Job] = []
        if not waiting:
            return _Prefill(0, 0.0, completed)
        room = max(self.budget - (0 if self.prefill_first else decoding), 0)
        tokens, before, held = 0, 0.0, rank.held
        while waiting and room > 0 and decoding + len(completed) < self.most:
            job = waiting[0]
            needs = self._needs(job)
            # A request that nothing else keeps out is let in, however long it is.
            if held + needs > self.cache_tokens and (decoding or completed):
                break
            if self.began is not None:
                self.began.setdefault(job.id, start)
            if rank.cache is not None and job.prefix and not job.prefilled and not job.made:
                job.cached = job.prefilled = rank.cache.look_up(job.prefix, job.prompt)
            taken = min(job.input - job.prefilled, room)
            before += taken * (job.prefilled + 0.5 * taken)
            job.prefilled += taken
            tokens += taken
            room -= taken
            if job.prefilled < job.input:
                break
            waiting.popleft()
            self._waiting -= 1
            completed.append(job)
            held += needs
        return _Prefill(tokens, before, completed)


def _load(rank: _Rank) -> int:
    return len(rank.waiting) + len(rank.jobs)
