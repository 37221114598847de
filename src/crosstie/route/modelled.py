"""How fast a pool is whose deployment is known: step times of `perf`, by the number of sequences, as plain lists.

Lists hold what does not depend on contexts; what a step reads of the cache is added in proportion.
"""

from math import exp
from typing import Final

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.core.fleet import Pool
from crosstie.perf.hardware import Array
from crosstie.perf.memory import cache_sequences
from crosstie.perf.tabulated import StepTimes
from crosstie.route.load import ReplicaLoad
from crosstie.route.speed import Speed, View

_MOST_LISTED: Final = 1024
# Decode is never stretched by more than this, however many prompts come.
_MOST_PREFILL_SHARE: Final = 0.8
# Of the first prompt in the queue, the most that is believed to be done before its first token shows it.
_MOST_DONE: Final = 0.9
_LEAST_S: Final = 1e-6
_FEW_TOKENS: Final = 64.0
# Caches are sized at contexts of powers of two up to this one: windows and fixed states make tokens cheaper later.
_POWERS: Final = 21


def _rising(steps: Array) -> list[float]:
    """More sequences never make a step shorter, whatever rounding does to the tables."""
    found: list[float] = np.maximum.accumulate(steps).tolist()
    return found


class ModelledSpeed(Speed):
    def __init__(self, deployment: Deployment, pool: Pool, context: float, prompt: float, cache_fraction: float = 1.0):
        """`context` and `prompt`: tokens of the requests it mostly gets, where the tables are exact.
        `cache_fraction`: of the memory that weights leave, what this model has for its cache."""
        super().__init__()
        times = StepTimes(deployment, context)
        hardware, split = times.hardware, deployment.parallelism
        self.chunk = float(times.chunk)
        self.dp = float(split.dp)
        # Of one step; with speculation a step gives several tokens, and `per_cached` is of one of them.
        self.per_cached_step = max(times.per_cached, 0.0) / split.pp
        self.steps_per_token = 1.0 / float(hardware.tokens_per_step[0, 0])
        self.queries = float(hardware.queries[0, 0])
        self.per_cached = self.per_cached_step * self.steps_per_token
        self.per_attended = times.per_attended
        self.held_share = deployment.stack.held_share
        self.request_s = float(hardware.host_request_s[0, 0])
        self.most = int(hardware.max_sequences[0, 0])
        # By the pool's own limit, and by the engine's.
        self.most_at_once = float(min(pool.max_in_flight, self.most))
        self.prefill_first = bool(hardware.prefill_first[0, 0])
        self.cache_tokens = cache_fraction * float(cache_sequences(deployment, context)) * context
        powers = 2.0 ** np.arange(_POWERS)
        self._cache_by_power: list[float] = (cache_fraction * cache_sequences(deployment, powers) * powers).tolist()
        self.stages = float(split.pp)
        self._list(times, prompt)
        self._idle(context)

    def _list(self, times: StepTimes, prompt: float) -> None:
        """By sequences: a decode step, and steps with few, an eighth and all of the prompt tokens that fit beside."""
        numbers = np.arange(min(self.most, _MOST_LISTED) + 2, dtype=np.float64)
        self.last = len(numbers) - 1
        stages = self.stages
        # Where prompts go first, nobody decodes beside them.
        beside = np.zeros_like(numbers) if self.prefill_first else numbers
        room = np.maximum(self.chunk - beside * self.queries / self.dp, 0.125 * self.chunk)

        def step(n: Array, tokens: Array, everywhere: float = 1.0) -> Array:
            # A pipeline works on that many parts of the sequences in turn.
            part = n / stages
            spent = times.seconds_at(part, everywhere * tokens, tokens) - part * times.context * times.per_cached
            found: Array = np.maximum(spent, _LEAST_S)
            return found

        def listed(share: float, everywhere: float = 1.0) -> list[float]:
            # All stages of a pipeline have a chunk under way, so that one comes out in a part of the time.
            return _rising(step(beside, np.maximum(share * room, 1.0), everywhere) / stages)

        self.decode: list[float] = _rising(step(np.maximum(numbers, 1.0), np.zeros_like(numbers)))
        self.room: list[float] = room.tolist()
        self.few, self.eighth, self.full_alone = listed(0.0), listed(0.125), listed(1.0)
        # With a queue, every attention replica has its part of a full step.
        self.full = listed(1.0, self.dp) if self.dp > 1.0 else self.full_alone
        # What prompts take from decoding, each token, in steps that carry one such prompt.
        tokens = np.minimum(max(prompt, _FEW_TOKENS), room)
        spent = step(beside, tokens) - (0.0 if self.prefill_first else np.asarray(self.decode))
        self.prompt_token_s: list[float] = (np.maximum(spent, _LEAST_S) / (tokens * stages)).tolist()

    def _idle(self, context: float) -> None:
        self._idle_fixed_s = self.request_s + self.few[0] * self.stages
        self._idle_input_s = max(self.full_alone[0] - self.few[0], _LEAST_S) / self.room[0]
        self._idle_output_s = (self.decode[1] + context * self.per_cached_step) * self.steps_per_token

    def fill(self, view: View, load: ReplicaLoad, now: float) -> None:
        """Counts, with external traffic where the engine reports any, as steps."""
        in_flight, decoding, held, cached, queued = load.total(now, self.typical_input)
        rate = load.prompt_rate * exp((load.rate_at - now) * 0.1)
        if load.elsewhere.prompt_rate:
            rate += load.elsewhere.prompt_rate_at(now)
        if now < load.external_until:
            step_s = self.decode[min(int(decoding), self.last)] + cached * self.per_cached_step
            each_s = self.typical_output * step_s * self.steps_per_token
            rate += load.external_running * self.typical_input / each_s
        last = self.last
        n = int(decoding) if decoding < last else last
        read_s = cached * self.per_cached_step
        decode_s = self.decode[n] + read_s
        beside_s = 0.0 if self.prefill_first else read_s / self.stages
        full_s = (self.full if queued else self.full_alone)[n] + beside_s
        view.steps(self.few[n] + beside_s, self.eighth[n] + beside_s, full_s, self.room[n])
        before_s = self.request_s
        if decoding >= 1.0:
            before_s += 0.5 * decode_s
        if queued:
            queued = max(queued - self._done(load, now, full_s / view.room), 0.0) / self.dp
        view.ahead_tokens = queued
        more = int(in_flight) + 1
        step_s = self.decode[more if more < last else last] + held * self.per_cached_step
        view.step_s = step_s * self.steps_per_token
        share = rate * self.prompt_token_s[n]
        view.stretch = 1.0 / (1.0 - (share if share < _MOST_PREFILL_SHARE else _MOST_PREFILL_SHARE))
        turnover_s = self.typical_output * view.step_s
        view.cache(self.cache_tokens - held, held, turnover_s)
        if in_flight >= self.most:
            before_s += (in_flight + 1.0 - self.most) / self.most * turnover_s
        view.before_s = before_s
        if load.presence is not None:
            # Engines on the same GPUs take turns: each computes as long as before, and waits for the others.
            view.slow_down(load.presence.crowd())

    def _done(self, load: ReplicaLoad, now: float, token_s: float) -> float:
        """Tokens of the first prompt in the queue that are computed by now."""
        elsewhere = load.elsewhere
        head_started, head_tokens, first_at = load.head_started, load.head_tokens, load.last_first_at
        if elsewhere.head_started < head_started:
            head_started, head_tokens = elsewhere.head_started, elsewhere.head_tokens
        if elsewhere.last_first_at > first_at:
            first_at = elsewhere.last_first_at
        began = max(head_started + self.request_s, first_at)
        return min(max(now - began, 0.0) / token_s, _MOST_DONE * head_tokens)

    def replica_s(
        self, new_tokens: float, cached_tokens: float, output_tokens: float, tpot_s: float = float("inf")
    ) -> float:
        """At the pool's design load: as many requests like this one as it may have in flight, as memory holds, and as
        keep the target of this one."""
        context = new_tokens + cached_tokens + 0.5 * output_tokens
        power = int(context).bit_length()
        n = self._cache_by_power[power if power < _POWERS else _POWERS - 1] / context
        if n > self.most_at_once:
            n = self.most_at_once
        if n < 1.0:
            n = 1.0
        index = int(n) if n < self.last else self.last
        token_s = self._token_s(index, n, context)
        if token_s > tpot_s:
            n = self._most_within(tpot_s, n, context)
            index = int(n)
            token_s = self._token_s(index, n, context)
        attention_s = self.per_attended * self.attended(new_tokens, cached_tokens)
        prefill_s = new_tokens * (self.prompt_token_s[index] + attention_s)
        return prefill_s + output_tokens * token_s / n

    def _token_s(self, index: int, sequences: float, context: float) -> float:
        """Of each sequence, in steps of so many with such contexts."""
        return (self.decode[index] + sequences * context * self.per_cached_step) * self.steps_per_token

    def _most_within(self, tpot_s: float, most: float, context: float) -> float:
        """The most requests of such a context, one at least, whose decode step keeps a limit."""
        low, high = 1, int(most) if most < self.last else self.last
        while low < high:
            middle = (low + high + 1) // 2
            if self._token_s(middle, float(middle), context) <= tpot_s:
                low = middle
            else:
                high = middle - 1
        return float(low)

    def empty_step_s(self) -> float:
        return self.decode[1] * self.steps_per_token

    def idle_s(self, input_tokens: float, output_tokens: float) -> float:
        prefill_s = self._idle_input_s + self.per_attended * self.attended(input_tokens, 0.0)
        return self._idle_fixed_s + input_tokens * prefill_s + output_tokens * self._idle_output_s
