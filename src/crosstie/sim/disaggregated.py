"""A disaggregated service, stepped like an engine: requests go in, tokens with their moments come out.

Prefill replicas are engines of `sim.engine` that make one token of each request. Its cache then takes the links of
both sides for as long as `perf.disaggregated` says, and a decode replica takes it into its next step. Who has memory
set aside when, and who gives the first token, is the connector's habit.
"""

import math
from collections import deque
from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from typing import ClassVar

from crosstie.core.disaggregated import Disaggregated
from crosstie.core.errors import BadInput
from crosstie.perf.disaggregated import Sides, transfer
from crosstie.perf.memory import cache_sequences
from crosstie.perf.tabulated import StepTimes
from crosstie.sim.engine import Engine, Key, Token
from crosstie.sim.prefix_cache import PrefixCache


class _Job:
    __slots__ = (
        "cached", "decoder", "ends_at_step", "gone", "id", "input", "made", "output", "prefiller", "prefix",
        "since_step",
    )  # fmt: skip

    def __init__(self, id: Key, input_tokens: int, output_tokens: int, cached: int, prefix: Sequence[Hashable]):
        self.id, self.input, self.output = id, input_tokens, output_tokens
        self.cached, self.prefix = cached, prefix
        # Tokens of the answer when its decoding began, and the step at which that was.
        self.made = 0
        self.since_step = self.ends_at_step = -1
        self.prefiller: int | None = None
        self.decoder: _DecodeReplica | None = None
        self.gone = False


class _DecodeReplica:
    """Sequences that all make a step together; those whose cache has come join at the next one."""

    def __init__(self, service: Disaggregated, times: StepTimes, context: float):
        self.times = times
        hardware, dp = times.hardware, service.decode.parallelism.dp
        self.cache_tokens = float(cache_sequences(service.decode, context)) * context
        self.most = int(hardware.max_sequences[0, 0])
        self.whole = service.decode.stack.admission == "whole"
        self.tokens_per_step = float(hardware.tokens_per_step[0, 0])
        self.dp = dp
        self.recomputes = service.connector.recomputes
        self.decode_answers = service.connector.first_token == "decode"
        self.clock = self.busy_s = 0.0
        self.steps = 0
        self.under_way = False
        # Set aside for requests, which have joined or not; joined ones, and those whose cache is there by a moment.
        self.held = 0.0
        self.taken = 0
        self.jobs: dict[_Job, None] = {}
        self.ready: list[tuple[float, int, _Job]] = []
        self.joining: list[_Job] = []
        self.endings: list[tuple[int, int, _Job]] = []
        # Numbers that keep equal ones in order.
        self.expected = 0
        self.cached = 0.0
        self.link_free_s = 0.0

    def busy_by(self, moment: float) -> float:
        return self.busy_s - (max(self.clock - moment, 0.0) if self.under_way else 0.0)

    def needs(self, job: _Job) -> float:
        # Sequences grow as they go; half of an answer is what one holds on average.
        return job.input + (job.output if self.whole else 0.5 * job.output)

    def has_room(self, job: _Job) -> bool:
        if not self.taken:
            return True
        return self.taken < self.most and self.held + self.needs(job) <= self.cache_tokens

    def take(self, job: _Job) -> None:
        job.decoder = self
        self.held += self.needs(job)
        self.taken += 1

    def leave(self, job: _Job) -> None:
        self.held -= self.needs(job)
        self.taken -= 1
        if job in self.jobs:
            since = self.steps - job.since_step
            self.cached -= job.input + job.made + since * self.tokens_per_step
            del self.jobs[job]
            job.ends_at_step = -1

    def next_event_s(self) -> float | None:
        if self.under_way or self.jobs:
            return self.clock
        while self.ready and self.ready[0][2].gone:
            heappop(self.ready)
        return max(self.clock, self.ready[0][0]) if self.ready else None

    def begin(self, slower: float, found: list[Token], start: float) -> list[_Job]:
        """The next step, with those whose cache has come by now; those that have all their tokens already."""
        self.joining, ended = [], []
        while self.ready and self.ready[0][0] <= start:
            job = heappop(self.ready)[2]
            if job.gone:
                continue
            if not job.made and not self.decode_answers:
                if job.output == 1:
                    self.leave(job)
                    ended.append(job)
                    continue
                job.made = 1
                found.append(Token(job.id, 1, False, start))
            self.joining.append(job)
            self.jobs[job] = None
            self.cached += job.input + job.made
            job.since_step = self.steps
            left = job.output - job.made
            job.ends_at_step = self.steps + max(math.ceil(left / self.tokens_per_step - 1e-9), 1)
            self._expect(job)
        if not self.jobs:
            self.clock = start
            return ended
        tokens = len(self.joining) if self.recomputes else 0
        riding = len(self.jobs) - tokens
        before = sum(job.input for job in self.joining) if tokens else 0.0
        largest = -(-tokens // self.dp)
        spent = slower * self.times.seconds(riding, self.cached, tokens, largest, before / self.dp)
        self.clock = start + spent
        self.busy_s += spent
        self.under_way = True
        return ended

    def _expect(self, job: _Job) -> None:
        self.expected += 1
        heappush(self.endings, (job.ends_at_step, self.expected, job))

    def complete(self, tokens: list[Token]) -> list[_Job]:
        """The end of the step; those that end with it."""
        self.under_way = False
        self.steps += 1
        self.cached += len(self.jobs) * self.tokens_per_step
        if self.decode_answers:
            for job in self.joining:
                if not job.gone and not job.made:
                    job.made = 1
                    self.cached += 1 - self.tokens_per_step
                    job.since_step = self.steps
                    left = job.output - 1
                    job.ends_at_step = self.steps + math.ceil(left / self.tokens_per_step - 1e-9)
                    self._expect(job)
                    if left:
                        tokens.append(Token(job.id, 1, False, self.clock))
        ended = []
        while self.endings and self.endings[0][0] <= self.steps:
            ends, _, job = heappop(self.endings)
            if job.ends_at_step == ends and not job.gone and job in self.jobs:
                self.leave(job)
                ended.append(job)
        return ended


class DisaggregatedEngine:
    """What `sim.engine.Engine` is for one replica, for a whole service; `slower` stretches every step from now on."""

    preemptions = 0
    loaded_tokens: ClassVar[dict[str, int]] = {}

    def __init__(
        self, service: Disaggregated, input_tokens: float, output_tokens: float, slower: float = 1.0,
        *, prefix_tokens: int | None = None,
    ):  # fmt: skip
        """`input_tokens` and `output_tokens`: of the requests that it mostly gets, around which steps are tabulated."""
        self.service = service
        context = input_tokens + 0.5 * output_tokens
        prefill_times = StepTimes(service.prefill, max(input_tokens, 1.0))
        decode_times = StepTimes(service.decode, context)
        self.prefillers = [
            Engine(service.prefill, context, slower, times=prefill_times, preempts=False, prefix_tokens=prefix_tokens)
            for _ in range(service.prefill_replicas)
        ]
        self.decoders = [_DecodeReplica(service, decode_times, context) for _ in range(service.decode_replicas)]
        self.request_s = self.prefillers[0].request_s
        self.speculation = service.decode.speculation
        self.tokens_per_step = self.decoders[0].tokens_per_step
        self.cache_tokens = sum(decoder.cache_tokens for decoder in self.decoders)
        self.caches: list[PrefixCache] = [cache for prefiller in self.prefillers for cache in prefiller.caches]
        self.room_first = service.connector.room == "before prefill"
        self.prefill_answers = service.connector.first_token == "prefill"
        self._slower = slower
        self._sides = Sides([service])
        self._links: list[float] = [0.0] * service.prefill_replicas
        self._transfers: dict[int, tuple[float, float, float, float]] = {}
        self._sent = 0
        self._jobs: dict[Key, _Job] = {}
        # Requests that wait for memory of the decode side: before prefill, or with a cache that is computed.
        self._outside: deque[_Job] = deque()
        self._computed: deque[tuple[float, _Job]] = deque()
        self.clock = 0.0

    @property
    def slower(self) -> float:
        return self._slower

    @slower.setter
    def slower(self, factor: float) -> None:
        self._slower = factor
        for prefiller in self.prefillers:
            prefiller.slower = factor

    @property
    def busy_s(self) -> float:
        return self._mean(sum(one.busy_s for one in self.prefillers), sum(decoder.busy_s for decoder in self.decoders))

    def busy_by(self, moment: float) -> float:
        return self._mean(
            sum(one.busy_by(moment) for one in self.prefillers), sum(one.busy_by(moment) for one in self.decoders)
        )

    def _mean(self, prefill_s: float, decode_s: float) -> float:
        """GPU time over GPUs of both sides."""
        service = self.service
        spent = prefill_s * service.prefill.parallelism.gpus + decode_s * service.decode.parallelism.gpus
        return spent / service.gpus

    def add(
        self, id: Key, input_tokens: int, output_tokens: int, now: float, cached_tokens: int = 0,
        prefix: Sequence[Hashable] = (),
    ) -> None:  # fmt: skip
        if id in self._jobs:
            raise BadInput(f"request {id!r} is there already")
        if input_tokens < 1 or output_tokens < 1:
            raise BadInput(f"request {id!r}: {input_tokens} tokens in, {output_tokens} out: must be at least 1")
        job = _Job(id, input_tokens, output_tokens, cached_tokens, prefix)
        self._jobs[id] = job
        if not self.room_first:
            self._prefill(job, now)
        elif self._outside or not self._take(job):
            self._outside.append(job)
        else:
            self._prefill(job, now)

    def cancel(self, id: Key) -> bool:
        job = self._jobs.pop(id, None)
        if job is None:
            return False
        job.gone = True
        if job.prefiller is not None:
            self.prefillers[job.prefiller].cancel(id)
        if job.decoder is not None:
            job.decoder.leave(job)
        return True

    @property
    def running(self) -> int:
        return sum(one.running for one in self.prefillers) + sum(len(decoder.jobs) for decoder in self.decoders)

    @property
    def waiting(self) -> int:
        return len(self._jobs) - self.running

    @property
    def kv_used_fraction(self) -> float:
        return min(sum(decoder.held for decoder in self.decoders) / max(self.cache_tokens, 1.0), 1.0)

    @property
    def idle(self) -> bool:
        return not self._jobs

    def made(self, id: Key) -> int:
        job = self._jobs.get(id)
        if job is None:
            return 0
        since = 0
        if job.decoder is not None and job.since_step >= 0:
            since = int((job.decoder.steps - job.since_step) * job.decoder.tokens_per_step)
        return min(job.made + since, job.output)

    def next_event_s(self) -> float | None:
        moments = [event for event in self._events() if event is not None]
        return min(moments) if moments else None

    def next_answer_s(self) -> float | None:
        return self.next_event_s()

    def _events(self) -> list[float | None]:
        return [*(one.next_event_s() for one in self.prefillers), *(one.next_event_s() for one in self.decoders)]

    def advance(self, now: float) -> list[Token]:
        """All that happens up to and including that moment, in order."""
        tokens: list[Token] = []
        while True:
            moment, side = math.inf, -1
            for index, at in enumerate(self._events()):
                if at is not None and at < moment:
                    moment, side = at, index
            if side < 0 or moment > now:
                return tokens
            self.clock = max(self.clock, moment)
            if side < len(self.prefillers):
                for token in self.prefillers[side].advance(moment):
                    self._prefilled(side, token, tokens)
                continue
            decoder = self.decoders[side - len(self.prefillers)]
            ended = decoder.complete(tokens) if decoder.under_way else decoder.begin(self._slower, tokens, moment)
            for job in ended:
                tokens.append(Token(job.id, job.output, True, moment, job.cached))
                self._jobs.pop(job.id, None)
            if ended:
                self._let_in(moment)

    def _take(self, job: _Job) -> bool:
        """Memory on the decode replica that holds least."""
        decoder = min(self.decoders, key=lambda replica: replica.held)
        if decoder.has_room(job):
            decoder.take(job)
            return True
        return False

    def _prefill(self, job: _Job, now: float) -> None:
        index = min(range(len(self.prefillers)), key=lambda i: self.prefillers[i].in_flight)
        job.prefiller = index
        self.prefillers[index].add(job.id, job.input, 1, now, job.cached, job.prefix)

    def _prefilled(self, index: int, token: Token, tokens: list[Token]) -> None:
        job = self._jobs.get(token.id)
        if job is None:
            return
        job.cached = token.cached
        if self.prefill_answers:
            job.made = 1
            tokens.append(Token(job.id, 1, job.output == 1, token.at, job.cached))
        if job.output == 1 and self.prefill_answers:
            if job.decoder is not None:
                job.decoder.leave(job)
            del self._jobs[job.id]
        elif job.decoder is not None or (not self._computed and self._take(job)):
            self._send(job, token.at)
        else:
            self._computed.append((token.at, job))

    def _send(self, job: _Job, now: float) -> None:
        """The cache takes the links of both sides, one after the other."""
        decoder, sender = job.decoder, job.prefiller
        assert decoder is not None
        assert sender is not None
        job.prefiller = None
        start_s, wire_s, sent_s, received_s = self._transfer(job.input)
        begin = max(now, self._links[sender], decoder.link_free_s)
        self._links[sender] = begin + sent_s
        decoder.link_free_s = begin + received_s
        self._sent += 1
        heappush(decoder.ready, (begin + start_s + wire_s, self._sent, job))

    def _transfer(self, tokens: int) -> tuple[float, float, float, float]:
        if tokens not in self._transfers:
            moved = transfer(self._sides, float(tokens))
            start_s, wire_s, sent_s, received_s = (float(part[0, 0]) for part in moved)
            if self.service.connector.by_layer:
                prefill = self.prefillers[0].times.seconds(0, 0.0, tokens, tokens, 0.5 * tokens * tokens)
                wire_s = max(wire_s / self._sides.layers, wire_s - prefill)
            split = self.service.prefill.parallelism.dp, self.service.decode.parallelism.dp
            self._transfers[tokens] = start_s, wire_s, sent_s / split[0], received_s / split[1]
        return self._transfers[tokens]

    def _let_in(self, now: float) -> None:
        while self._computed:
            if not self._computed[0][1].gone and not self._take(self._computed[0][1]):
                return
            job = self._computed.popleft()[1]
            if not job.gone:
                self._send(job, now)
        while self._outside:
            if not self._outside[0].gone and not self._take(self._outside[0]):
                return
            job = self._outside.popleft()
            if not job.gone:
                self._prefill(job, now - self.request_s)
