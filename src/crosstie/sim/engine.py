"""One replica's engine, stepped by whoever holds the clock: requests go in, tokens with their moments come out.

There is one idea: a step takes every running sequence and, up to its budget of tokens, prompts in the order of their
arrival; free blocks of the cache and the engine's own limit keep requests out. Attention replicas (DP) have queues,
budgets and caches of their own and step together. A request that arrives during a step waits for its end; and where
the engine makes each step ready while the one before it runs, for the end of the next one too, which was ready before
the request came. So nothing depends on when the outer clock looks: advancing once to the end or a thousand times on the
way gives the same tokens.

Steps that only decode follow each other until an answer ends, a request comes or the cache is full. Each is longer than
the one before by what the sequences have added to the cache, so that such a stretch of steps is an arithmetic series,
and is taken at once.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple, TypeAlias

from crosstie.catalog.loading import CacheTier
from crosstie.core.deployment import Deployment
from crosstie.core.errors import BadInput
from crosstie.perf.memory import cache_sequences, gpu_cache_bytes_per_sequence, tier_tokens
from crosstie.perf.tabulated import StepTimes
from crosstie.sim.prefix_cache import PrefixCache, TierCache

# Whatever the caller tells its requests apart by.
Key: TypeAlias = Any


class Token(NamedTuple):
    """So many tokens of a request's answer are there by that moment."""

    id: Key
    tokens: int
    finished: bool
    at: float
    # Of the prompt, those that were in the cache.
    cached: int = 0


class _Job:
    """A request on its way through the engine."""

    __slots__ = (
        "cached", "ends_at_step", "gone", "held", "id", "input", "made", "output", "prefilled", "prefix", "prompt",
        "rank", "since_step", "uses",
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
        # Blocks that it was let in with; 0: it is still outside.
        self.held = 0
        # Of the keys, the first so many: blocks that it runs with, and shares with whoever has them too.
        self.uses = 0
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
    """One attention replica: who waits there for prefill, who decodes, and the blocks of its cache that are taken."""

    __slots__ = ("blocks", "cache", "jobs", "phases", "tiers", "waiting")

    def __init__(self, block_tokens: int, cache: PrefixCache | None, tiers: Sequence[TierCache]) -> None:
        self.cache = cache
        # What is asked beside it, the quickest first.
        self.tiers = tiers
        # Only its head may have been let in, with a part of its prompt computed.
        self.waiting: deque[_Job] = deque()
        # In the order in which they began to decode; a dict for its quick removal.
        self.jobs: dict[_Job, None] = {}
        self.blocks = 0
        # How many sequences begin a new block at the steps of this number, modulo the tokens of a block.
        self.phases = [0] * block_tokens


class Engine:
    """`slower` stretches every step that begins from now on, and may be changed at any time.

    `preempts`: when the answers outgrow the cache, the latest sequence is thrown out and computed again, as vLLM does;
    otherwise the cache gives way.
    `began`, where one is given, is told when the prefill of each request begins; whoever gave it empties it.
    `prefix_tokens`: of the blocks that requests give the keys of; each attention replica then keeps a cache of them.
    `tiers` keep them as well and longer, the quickest first; `shared` has the caches of those that other replicas have
    too. A request waits for its own to come while others go on, as vLLM's connector and SGLang's hierarchical cache
    have it.
    """

    def __init__(
        self,
        deployment: Deployment,
        context: float,
        slower: float = 1.0,
        *,
        times: StepTimes | None = None,
        preempts: bool = True,
        began: dict[Key, float] | None = None,
        prefix_tokens: int | None = None,
        tiers: Sequence[CacheTier] = (),
        shared: dict[str, PrefixCache] | None = None,
    ):
        self.times = times or StepTimes(deployment, context)
        self._slower = slower
        self.preempts = preempts
        self.began = began
        self.pp = deployment.parallelism.pp
        hardware, dp = self.times.hardware, deployment.parallelism.dp
        # Stages work on as many chunks at once.
        self.budget = self.times.chunk * self.pp
        # Of each attention replica.
        self.cache_tokens = float(cache_sequences(deployment, context)) * context / dp
        self.block_tokens = deployment.stack.block_size
        self.blocks = int(self.cache_tokens) // self.block_tokens
        self.most = max(int(hardware.max_sequences[0, 0]) // dp, 1)
        # With speculation a step verifies several tokens of each sequence, and keeps some of them: on the whole the
        # mean, evenly, as the engines' own simulated acceptance has it.
        self.speculation = deployment.speculation
        self.queries = int(hardware.queries[0, 0])
        self.tokens_per_step = float(hardware.tokens_per_step[0, 0])
        self.prefill_first = bool(hardware.prefill_first[0, 0])
        self.whole = deployment.stack.admission == "whole"
        # vLLM's EngineCore.step_with_batch_queue schedules a batch as soon as the one before it has begun; SGLang's
        # overlap scheduler and TensorRT-LLM's do the same. Seen in steps of vLLM 0.24.0 (docs/notes/measurements.md).
        self.ready_ahead = deployment.stack.host.overlapped
        # What the host does with a request before the engine sees it.
        self.request_s = float(hardware.host_request_s[0, 0])
        self.preemptions = 0
        self.busy_s = 0.0
        self.caches = (
            [PrefixCache(self.cache_tokens, prefix_tokens, self.block_tokens) for _ in range(dp)]
            if prefix_tokens
            else []
        )
        token_bytes = float(gpu_cache_bytes_per_sequence(deployment, context)) / context
        shared = {} if shared is None else shared

        def tier_of(tier: CacheTier) -> TierCache:
            assert prefix_tokens
            tokens = tier_tokens(deployment, context, tier.size_bytes, shared=tier.shared)
            cache = PrefixCache(tokens, prefix_tokens, self.block_tokens)
            if tier.shared:
                cache = shared.setdefault(tier.name, cache)
            return TierCache(tier.name, cache, token_bytes / tier.bytes_per_s, tier.latency_s)

        caches: Sequence[PrefixCache | None] = self.caches or [None] * dp
        self._ranks = [
            _Rank(self.block_tokens, cache, [tier_of(tier) for tier in tiers] if cache is not None else [])
            for cache in caches
        ]
        self._jobs: dict[Key, _Job] = {}
        self._arriving: deque[tuple[float, _Job]] = deque()
        # Sequences by the decode step at which they end; the number in the middle keeps equal ones in order.
        self._endings: list[tuple[int, int, _Job]] = []
        self._begun = 0
        self._decoding = 0
        self._waiting = 0
        self._cached = 0.0
        self._steps = 0
        # The steps under way: how many (0: none), how many of them had ended when somebody last looked, and when that
        # was; their beginning and their end; the seconds of the first, and half of what each adds to the one before.
        self._planned = self._done = 0
        self._looked = -math.inf
        self._start = self._ends = 0.0
        # When the last step began.
        self._began_last = -math.inf
        self._first_s = self._half_more_s = 0.0
        # The prompts that it completes, and whether sequences ride along.
        self._completed: list[_Job] = []
        self._rides = False

    @property
    def slower(self) -> float:
        return self._slower

    @slower.setter
    def slower(self, factor: float) -> None:
        self._cut()
        self._slower = factor

    @property
    def clock(self) -> float:
        """The end of the step under way, or else of the last one."""
        return self._end_of(self._done + 1) if self._done + 1 < self._planned else self._ends

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

        `prefix`: keys of the prompt's blocks, which the engine's own cache is asked for when its prefill begins, and
        of the answer's where they are known.
        """
        if id in self._jobs:
            raise BadInput(f"request {id!r} is there already")
        if input_tokens < 1 or output_tokens < 1:
            raise BadInput(f"request {id!r}: {input_tokens} tokens in, {output_tokens} out: must be at least 1")
        cached = max(min(cached_tokens, input_tokens - 1), 0) if cached_tokens else 0
        job = _Job(id, input_tokens, output_tokens, cached, prefix)
        self._jobs[id] = job
        arrives = now + self.request_s
        self._arrive(arrives, job)
        if self._planned > 1 and self._ends > arrives and self._lets_in():
            self._end_to_let_in(arrives)

    def _arrive(self, at: float, job: _Job) -> None:
        arriving = self._arriving
        place = len(arriving)
        while place and arriving[place - 1][0] > at:
            place -= 1
        arriving.insert(place, (at, job))

    def cancel(self, id: Key) -> bool:
        """Lets go of a request at once; whether it was there."""
        job = self._jobs.pop(id, None)
        if job is None:
            return False
        job.gone = True
        if job.rank is None:
            self._arriving = deque(one for one in self._arriving if one[1] is not job)
            return True
        self._cut()
        self._pass(self._done)
        self._planned, self._done = self._planned - self._done, 0
        if job.decoding:
            self._release(job)
            return True
        self._leave(job, job.held)
        if job in job.rank.waiting:
            job.rank.waiting.remove(job)
            self._waiting -= 1
        else:
            self._arriving = deque(one for one in self._arriving if one[1] is not job)
        return True

    @property
    def running(self) -> int:
        """Sequences that decode, and prompts that are part of the step under way or were of the last."""
        heads = (rank.waiting[0] for rank in self._ranks if rank.waiting)
        return self._decoding + sum(job.held > 0 for job in heads) + sum(not job.gone for job in self._completed)

    @property
    def in_flight(self) -> int:
        return len(self._jobs)

    @property
    def loaded_tokens(self) -> dict[str, int]:
        """Of prompts, by the memory beside the GPU's that they came from."""
        found: dict[str, int] = {}
        for tier in (tier for rank in self._ranks for tier in rank.tiers):
            found[tier.name] = found.get(tier.name, 0) + tier.loaded_tokens
        return found

    @property
    def waiting(self) -> int:
        return len(self._jobs) - self.running

    @property
    def kv_used_fraction(self) -> float:
        grown = 0 if self.whole or not self._rides else self._done
        used = sum(rank.blocks + self._grown(rank, grown) for rank in self._ranks)
        return min(used / max(self.blocks * len(self._ranks), 1), 1.0)

    def busy_by(self, moment: float) -> float:
        """Seconds up to then in which it had anything to do."""
        return self.busy_s + (max(min(moment, self._ends) - self._start, 0.0) if self._planned else 0.0)

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._planned

    def next_event_s(self) -> float | None:
        """Nothing happens before that moment, unless a request is added or cancelled, or `slower` changes; None:
        nothing ever will. There may be no first and no last token then; `advance` returns nothing, and one asks again.
        """
        if not self._planned and not self._begin(math.inf):
            return None
        return self._ends

    def next_answer_s(self) -> float | None:
        """As `next_event_s`, but begins no step."""
        if self._planned:
            return self._ends
        if self._waiting or self._decoding:
            return self._ends
        return max(self._arriving[0][0], self._ends) if self._arriving else None

    def advance(self, now: float) -> list[Token]:
        """All that happens up to and including that moment, in order."""
        tokens: list[Token] = []
        while self._planned or self._begin(now):
            if self._ends > now:
                if self._planned > 1:
                    self._done, self._looked = self._steps_by(now), now
                break
            self._complete(tokens)
        return tokens

    def made(self, id: Key) -> int:
        """Tokens of a request's answer so far; 0 for one that is not there."""
        job = self._jobs.get(id)
        if job is None:
            return 0
        return self._made_by(job, self._steps + self._done) if job.decoding else job.made

    def _made_by(self, job: _Job, step: int) -> int:
        """Tokens of a decoding sequence's answer after that step."""
        return min(job.made + int((step - job.since_step) * self.tokens_per_step), job.output)

    def _held_by(self, job: _Job, step: int) -> int:
        """Tokens of a decoding sequence in the cache, with the one that the next step computes."""
        if self.tokens_per_step == 1.0:
            return job.input + 1 + step - job.since_step
        return job.input + self._made_by(job, step) - job.made + 1

    # Stretches of steps

    def _end_of(self, step: int) -> float:
        """Of so many of the steps under way."""
        return self._start + step * (self._first_s + self._half_more_s * (step - 1))

    def _steps_by(self, moment: float) -> int:
        """How many of the steps under way have ended by that moment."""
        left, more = moment - self._start, self._half_more_s
        if left <= 0.0:
            return 0
        # The root of a quadratic equation, and then to the very step: roots are rounded.
        base = self._first_s - more
        steps = min(int(2.0 * left / (base + math.sqrt(base * base + 4.0 * more * left))), self._planned)
        while steps < self._planned and self._end_of(steps + 1) <= moment:
            steps += 1
        while steps and self._end_of(steps) > moment:
            steps -= 1
        return steps

    def _end_to_let_in(self, arrives: float) -> None:
        """The steps under way end where a request that arrives then can be part of the next one."""
        self._plan_until(arrives, 1 if self.ready_ahead and arrives > self._start else 0)

    def _plan_until(self, moment: float, further: int = 0) -> None:
        """No step under way begins at that moment or later, but so many further ones."""
        steps = self._steps_by(moment)
        if not steps or self._end_of(steps) < moment:
            steps += 1
        steps += further
        if steps < self._planned:
            self._planned, self._ends = steps, self._end_of(steps)

    def _cut(self) -> None:
        """The step that was under way when somebody last looked is the last of its stretch: something changes."""
        if self._planned > 1:
            self._plan_until(max(self._looked, math.nextafter(self._start, math.inf)))

    def _lets_in(self) -> bool:
        """Whether a request that comes may end a stretch: not while others wait for what only an ending gives."""
        return not self._waiting or len(self._ranks) > 1

    def _begin(self, before: float) -> bool:
        """Begins the next step, or stretch of steps, if there is one and it begins before that moment."""
        arriving = self._arriving
        start = self._ends
        # Requests that have arrived by then are part of the step.
        seen_by = self._began_last if self.ready_ahead else start
        if not self._waiting and not self._decoding:
            if not arriving:
                return False
            if arriving[0][0] > start:
                start = arriving[0][0]
            seen_by = start
        # A caller that looks at the moment at which a step ends may still add a request to the next one.
        if start >= before:
            return False
        ranks = self._ranks
        while arriving and arriving[0][0] <= seen_by:
            job = arriving.popleft()[1]
            if job.rank is None:
                job.rank = min(ranks, key=_load) if len(ranks) > 1 else ranks[0]
                job.rank.waiting.append(job)
            else:
                # What other memory had of it has come.
                job.rank.waiting.appendleft(job)
            self._waiting += 1
        tokens = largest = 0
        before_tokens = 0.0
        if self._waiting:
            for rank in ranks:
                taken, attended = self._prefill(rank, start) if rank.waiting else (0, 0.0)
                tokens += taken
                if taken > largest:
                    largest, before_tokens = taken, attended
        if not tokens and not self._decoding:
            # All who were let in wait for what other memory has of them.
            self._ends = self._began_last = max(start, arriving[0][0])
            return self._begin(before)
        self._start = start
        self._done = 0
        self._rides = self._decoding > 0 and not (tokens and self.prefill_first)
        riding, read = (self._decoding, self._cached) if self._rides else (0, 0.0)
        spent = self._slower * self._seconds(riding, read, tokens, largest, before_tokens)
        self._planned = 1
        self._ends = start + spent
        if not tokens:
            self._stretch(spent)
        return True

    def _stretch(self, first_s: float) -> None:
        """As many decode steps as follow each other."""
        endings = self._endings
        while endings[0][2].ends_at_step != endings[0][0]:
            # Whoever was cancelled or preempted has left its entry behind.
            heappop(endings)
        steps = endings[0][0] - self._steps
        if self.preempts and not self.whole:
            for rank in self._ranks:
                if len(rank.jobs) > 1 or (rank.waiting and rank.waiting[0].held):
                    steps = self._steps_until_full(rank, steps)
        if steps <= 1:
            return
        self._planned = steps
        self._first_s = first_s
        self._half_more_s = 0.5 * self._slower * self._decoding * self.tokens_per_step / self.pp * self.times.per_cached
        self._ends = self._end_of(steps)
        if self._arriving and self._arriving[0][0] < self._ends and self._lets_in():
            self._end_to_let_in(self._arriving[0][0])

    def _seconds(self, riding: int, read: float, tokens: int, largest: int, before: float) -> float:
        """`largest` and `before`: of the attention replica with the most tokens of prompts."""
        if self.pp == 1:
            return self.times.seconds(riding, read, tokens, largest, before)
        # A step is one pass through all stages, in which each works on its part of the sequences and on one chunk.
        part = min(1.0, self.times.chunk / largest) if largest else 1.0
        return self.times.seconds(riding / self.pp, read / self.pp, part * tokens, part * largest, part * before)

    def _complete(self, tokens: list[Token]) -> None:
        """The end of the steps under way."""
        steps, completed = self._planned, self._completed
        self._began_last = self._end_of(steps - 1)
        self._pass(steps)
        self._planned = self._done = 0
        if self._rides:
            self._end_answers(tokens)
        if completed:
            self._completed = []
            for job in completed:
                if not job.gone:
                    self._first(job, tokens)
        if self.preempts and not self.whole:
            for rank in self._ranks:
                while rank.blocks > self.blocks and self._preempt(rank):
                    pass

    def _pass(self, steps: int) -> None:
        """So many of the steps under way are over: that many tokens for each sequence that rides."""
        end = self._ends if steps == self._planned else self._end_of(steps)
        self.busy_s += end - self._start
        self._start = end
        if not self._rides or not steps:
            return
        if not self.whole:
            for rank in self._ranks:
                if rank.jobs:
                    rank.blocks += self._grown(rank, steps)
                    if rank.cache is not None:
                        rank.cache.running(rank.blocks * self.block_tokens)
            if self._steps // self.block_tokens < (self._steps + steps) // self.block_tokens:
                self._touch_tiers()
        self._steps += steps
        self._cached += steps * self._decoding * self.tokens_per_step

    def _end_answers(self, tokens: list[Token]) -> None:
        endings, steps = self._endings, self._steps
        while endings and endings[0][0] <= steps:
            ends, _, job = heappop(endings)
            if job.ends_at_step == ends and not job.gone:
                self._release(job)
                self._keep(job, answer=True)
                del self._jobs[job.id]
                tokens.append(Token(job.id, job.output, True, self._ends, job.cached))

    def _first(self, job: _Job, tokens: list[Token]) -> None:
        """The end of a prompt's prefill: the next token of its answer, as a rule the first."""
        job.made += 1
        finished = job.made >= job.output
        if job.made == 1 or finished:
            tokens.append(Token(job.id, job.made, finished, self._ends, job.cached))
        rank = job.rank
        assert rank is not None
        if finished:
            self._leave(job, job.held)
            self._keep(job, answer=True)
            del self._jobs[job.id]
            return
        self._keep(job, answer=False)
        rank.jobs[job] = None
        self._decoding += 1
        self._cached += job.input + 1
        job.since_step = self._steps
        rank.phases[(self._steps - job.input - 1) % self.block_tokens] += 1
        left = job.output - job.made
        job.ends_at_step = self._steps + (
            left if self.tokens_per_step == 1.0 else math.ceil(left / self.tokens_per_step)
        )
        self._begun += 1
        heappush(self._endings, (job.ends_at_step, self._begun, job))

    def _keep(self, job: _Job, *, answer: bool) -> None:
        """What it has computed can be found from now on; what was used last is dropped last."""
        rank = job.rank
        # What nobody can ask for only takes room from what came before it: none, in an empty cache.
        if rank is None or rank.cache is None or not (job.prefix or len(rank.cache)):
            return
        if not answer:
            self._use(rank, rank.cache, job, job.prompt)
            for tier in rank.tiers:
                tier.cache.keep(job.prefix, job.prompt)
            return
        for cache in (rank.cache, *(tier.cache for tier in rank.tiers)):
            # Keys beyond the prompt's are those of its answer, which the next turn begins with; without them nobody
            # can ask for it.
            made = job.prompt + job.output
            named = min(len(job.prefix) * cache.block_tokens, made)
            cache.keep_answer(made - named if named > job.prompt or not job.prefix else job.output)
            cache.keep(job.prefix, max(named, job.prompt))

    def _use(self, rank: _Rank, cache: PrefixCache, job: _Job, tokens: int) -> None:
        """It runs with the blocks of its first so many tokens: none of them goes, and those that others have too are
        taken once."""
        shared = cache.use(job.prefix, job.uses, tokens)
        job.uses = max(job.uses, min(len(job.prefix), -(-tokens // cache.block_tokens)))
        rank.blocks -= shared * cache.block_tokens // self.block_tokens
        cache.running(rank.blocks * self.block_tokens)

    def _spared(self, rank: _Rank, job: _Job, blocks: int) -> bool:
        """Whether so many of its blocks are there already, since others run with them."""
        cache = rank.cache
        return cache is not None and cache.shared(job.prefix) * cache.block_tokens // self.block_tokens >= blocks

    def _touch_tiers(self) -> None:
        """Whoever decodes has stored a new block: in other memory all of its blocks are then the latest used, as
        vLLM's offloading connector has it (0.24.0). So those of sessions that pause go first."""
        for rank in self._ranks:
            for tier in rank.tiers:
                for job in rank.jobs:
                    tier.cache.touch(job.prefix)

    def _leave(self, job: _Job, blocks: int) -> None:
        """So many blocks that it took are free, but for those that others run with."""
        rank = job.rank
        assert rank is not None
        rank.blocks -= blocks
        cache = rank.cache
        if cache is None:
            return
        if job.uses:
            shared = cache.stop_using(job.prefix[: job.uses])
            rank.blocks += shared * cache.block_tokens // self.block_tokens
            job.uses = 0
        cache.running(rank.blocks * self.block_tokens)

    def _release(self, job: _Job) -> None:
        """Takes a decoding sequence out of the cache."""
        rank = job.rank
        assert rank is not None
        self._cached -= job.input + 1 + (self._steps - job.since_step) * self.tokens_per_step
        self._leave(job, job.held if self.whole else self._blocks_of(self._held_by(job, self._steps)))
        rank.phases[(job.since_step - job.input - 1) % self.block_tokens] -= 1
        del rank.jobs[job]
        self._decoding -= 1
        job.ends_at_step = -1

    def _preempt(self, rank: _Rank) -> bool:
        """The latest to be let in goes back to the head of the queue and computes all it had again; whether there was
        anyone beside the first, which stays however long it gets."""
        head = rank.waiting[0] if rank.waiting else None
        if head is not None and head.held and rank.jobs:
            self._leave(head, head.held)
            job = head
        elif len(rank.jobs) > 1:
            job = next(reversed(rank.jobs))
            self._release(job)
            job.made = self._made_by(job, self._steps)
            job.input = job.prompt + job.made
            job.since_step = -1
            rank.waiting.appendleft(job)
            self._waiting += 1
        else:
            return False
        job.prefilled = 0 if rank.cache is not None and job.prefix else job.cached
        job.held = 0
        self.preemptions += 1
        return True

    def _grown(self, rank: _Rank, more: int) -> int:
        """Blocks that so many more decode steps begin."""
        steps, size = self._steps, self.block_tokens
        if self.tokens_per_step != 1.0:
            return sum(
                self._blocks_of(self._held_by(job, steps + more)) - self._blocks_of(self._held_by(job, steps))
                for job in rank.jobs
            )
        whole, left = divmod(more, size)
        found, phases = whole * len(rank.jobs), rank.phases
        for step in range(steps, steps + left):
            found += phases[step % size]
        return found

    def _steps_until_full(self, rank: _Rank, most: int) -> int:
        """Decode steps after which more blocks are taken than there are; at most `most`."""
        count, free = len(rank.jobs), self.blocks - rank.blocks
        if count * (int(most * self.tokens_per_step) // self.block_tokens + 1) <= free:
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self._grown(rank, middle) > free else (middle, high)
        return high

    def _blocks_of(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _prefill(self, rank: _Rank, start: float) -> tuple[int, float]:
        """Takes prompts for the next step on one attention replica, in the order of their arrival: their tokens, and
        the sum of what lies before each of them."""
        waiting, running = rank.waiting, len(rank.jobs)
        room = self.budget - (0 if self.prefill_first else running * self.queries)
        tokens, before = 0, 0.0
        while waiting and room > 0:
            job = waiting[0]
            if not job.held:
                needs = self._blocks_of(job.input + (job.output if self.whole else 1))
                cache, lacking = rank.cache, rank.blocks + needs - self.blocks
                # A request that nothing else keeps out is let in, however long it is.
                if running >= self.most or (running and lacking > 0 and not self._spared(rank, job, lacking)):
                    break
                rank.blocks += needs
                job.held = needs
                if self.began is not None:
                    self.began.setdefault(job.id, start)
                if cache is not None and job.prefix and not job.prefilled:
                    again = job.made > 0 or job.cached > 0
                    found = cache.find(job.prefix, job.prompt) if again else cache.look_up(job.prefix, job.prompt)
                    self._use(rank, cache, job, found // cache.block_tokens * cache.block_tokens)
                    job.prefilled = found
                    if again:
                        continue
                    job.cached = found
                    comes = start
                    for tier in rank.tiers:
                        if more := tier.beyond(job.cached, job.prefix, job.prompt):
                            cache.hits += more
                            job.cached = job.prefilled = job.cached + more
                            comes = max(comes, tier.load(more, start))
                    if comes > start:
                        waiting.popleft()
                        self._waiting -= 1
                        self._arrive(comes, job)
                        continue
            left = job.input - job.prefilled
            taken = left if left < room else room
            before += taken * (job.prefilled + 0.5 * taken)
            job.prefilled += taken
            tokens += taken
            room -= taken
            running += 1
            if job.prefilled < job.input:
                break
            waiting.popleft()
            self._waiting -= 1
            self._completed.append(job)
        return tokens, before


def _load(rank: _Rank) -> int:
    return len(rank.waiting) + len(rank.jobs)
