"""One emulated replica: an engine in virtual time, kept in step with the clock of an event loop.

No timer runs for a step: only for the next first or last token, which the engine can name, and for the next moment at
which streams pass on several tokens at once.
"""

import asyncio
import math
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from crosstie.catalog.tokenizer import Tokenizer
from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Disaggregated
from crosstie.core.histogram import Family, Histogram, exposition, histogram_samples
from crosstie.perf.tabulated import StepTimes
from crosstie.sim.disaggregated import DisaggregatedEngine
from crosstie.sim.engine import Engine, Token
from crosstie.sim.prefix_cache import PrefixCache
from crosstie_gateway.emulate.kv_events import BLOCK_BYTES, ID_BLOCK_BYTES, KvPublisher, TellingCache, block_keys
from crosstie_gateway.emulate.requests import GenerationRequest
from crosstie_gateway.emulate.tokens import filler

_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_ENDINGS = ("stop", "length", "abort", "error")


class ReplicaCounts:
    """Counters and histograms since the replica was started."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        # Of answers that have ended.
        self.generation_tokens = 0
        self.endings = dict.fromkeys(_ENDINGS, 0)
        self.first_token_s = Histogram(_FIRST_TOKEN)
        self.between_tokens_s = Histogram(_BETWEEN_TOKENS)
        self.per_output_token_s = Histogram(_BETWEEN_TOKENS)
        self.whole_request_s = Histogram(_LATENCY)
        self.queue_s = Histogram(_LATENCY)

    def finished(self, ending: str, arrived: float, first: float, last: float, tokens: int, per_step: float) -> None:
        """Tokens between the first and the last are taken to have come evenly, `per_step` of them at a time."""
        self.endings[ending] += 1
        self.generation_tokens += tokens
        self.whole_request_s.add(last - arrived)
        if tokens > 1:
            # With speculation the time between two pieces of an answer is not the time of a token.
            pieces = math.ceil((tokens - 1) / per_step)
            self.between_tokens_s.add((last - first) / pieces, pieces)
            self.per_output_token_s.add((last - first) / (tokens - 1))


def page(
    model: str, label: str, engine: Engine | DisaggregatedEngine, cache_tokens: float, prefixes: PrefixCache,
    seen: ReplicaCounts, under_way: int,
) -> bytes:  # fmt: skip
    """`under_way`: tokens of answers that have not ended."""
    labels = {"engine": "0", "model_name": model}
    families: list[Family] = []

    def add(kind: str, name: str, *values: float, **more: Iterable[object]) -> None:
        """`more`: a label that tells several values apart."""
        apart = [dict(zip(more, map(str, own), strict=True)) for own in zip(*more.values(), strict=True)] or [{}]
        samples = [({**labels, **own}, value) for own, value in zip(apart, values, strict=True)]
        families.append((f"vllm:{name}", kind, "", samples))

    generated = seen.generation_tokens + under_way
    add("gauge", "num_requests_running", engine.running)
    add("gauge", "num_requests_waiting", engine.waiting)
    add("gauge", "engine_sleep_state", 1, sleep_state=["awake"])
    add("gauge", "kv_cache_usage_perc", engine.kv_used_fraction)
    tokens, block = int(cache_tokens), prefixes.block_tokens
    add(
        "gauge", "cache_config_info", 1,
        block_size=[block], kv_cache_size_tokens=[tokens], num_gpu_blocks=[tokens // block],
    )  # fmt: skip
    add("counter", "prefix_cache_queries_total", prefixes.queries)
    add("counter", "prefix_cache_hits_total", prefixes.hits)
    add("counter", "num_preemptions_total", engine.preemptions)
    add("counter", "prompt_tokens_total", seen.prompt_tokens)
    add("counter", "generation_tokens_total", generated)
    if engine.speculation is not None:
        # All but the first token of each answer come of verifying steps, the mean of them evenly.
        drafts = max(generated - seen.first_token_s.count, 0) / engine.speculation.acceptance_length
        kept = [drafts * share for share in engine.speculation.survival]
        add("counter", "spec_decode_num_drafts_total", int(drafts))
        add("counter", "spec_decode_num_draft_tokens_total", int(drafts) * engine.speculation.depth)
        add("counter", "spec_decode_num_accepted_tokens_total", int(sum(kept)))
        add("counter", "spec_decode_num_accepted_tokens_per_pos_total", *map(int, kept), position=range(len(kept)))
    add("counter", "request_success_total", *seen.endings.values(), finished_reason=seen.endings)
    for name, histogram in (
        ("vllm:time_to_first_token_seconds", seen.first_token_s),
        ("vllm:inter_token_latency_seconds", seen.between_tokens_s),
        ("vllm:request_time_per_output_token_seconds", seen.per_output_token_s),
        ("vllm:e2e_request_latency_seconds", seen.whole_request_s),
        ("vllm:request_queue_time_seconds", seen.queue_s),
    ):
        families.append((name, "histogram", "", histogram_samples(name, labels, histogram)))
    return f"# emulated by crosstie: {label}\n{exposition(families)}".encode()


# Real seconds between two pieces of a stream when time runs faster than the clock; at its pace, every step is told.
CHUNK_EVERY_S = 0.02
# Timers of event loops count whole milliseconds; half of one either way is as near as they come.
_TIMER_S = 0.001


class Sequence:
    """A request at a replica, known by identity. It is told how far its answer has come, and nothing after its end."""

    __slots__ = ("arrived", "cached_tokens", "first", "keys", "passed_on", "tail", "wanted")

    def __init__(self, wanted: GenerationRequest):
        self.wanted = wanted
        # For the prefix cache: whole blocks of the prompt, and what is left of it.
        self.keys = block_keys(wanted.prompt, size=wanted.block_bytes)
        self.tail = wanted.prompt[len(self.keys) * wanted.block_bytes :]
        self.cached_tokens = self.passed_on = 0
        self.arrived = self.first = math.nan

    @property
    def slow(self) -> bool:
        raise NotImplementedError

    def on_tokens(self, tokens: int, finished: bool) -> None:
        raise NotImplementedError

    def cut_off(self) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Emulated:
    """What a replica emulates: equal for all replicas of a pool."""

    pool: str
    served_as: str
    deployment: Deployment
    # Tokens that a request holds on average, around which step times are tabulated.
    context: float
    times: StepTimes
    max_context: int
    mean_output_tokens: float
    # A disaggregated service, with all engines of both sides; `deployment` is then the decode side's.
    service: Disaggregated | None = None
    mean_input_tokens: float = 1.0
    # With which prompts are counted and cut into blocks; None: four bytes are a token.
    tokenizer: Tokenizer | None = None
    # Whether requests say which session they are of, so that its cache is kept.
    keeps_sessions: bool = False

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES if self.tokenizer is None else ID_BLOCK_BYTES

    @property
    def label(self) -> str:
        emulates = self.service or self.deployment
        return f"{self.deployment.model.id} on {emulates.label} with {self.deployment.stack.name}"


class EmulatedReplica:
    """`speed`: emulated seconds to each of the clock. `max_waiting`: requests that may wait for the engine."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        emulated: Emulated,
        *,
        speed: float = 1.0,
        max_waiting: int = 1024,
        clock: Callable[[], float] = time.monotonic,
        publisher: KvPublisher | None = None,
    ):
        # Tells others of its cache; None: nobody is told.
        self.publisher = publisher
        self.loop, self.emulated, self.speed, self.max_waiting = loop, emulated, speed, max_waiting
        self._every = CHUNK_EVERY_S * speed if speed > 1.0 else 0.0
        self._clock, self._origin = clock, clock()
        self._slack = 0.5 * _TIMER_S * speed
        self._slower = self._crowd = 1.0
        self._held = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._last_tick = 0.0
        self.restart()

    def restart(self) -> None:
        """Empty, as after a crash: nothing running, nothing cached, nothing counted."""
        self._began: dict[Sequence, float] = {}
        of = self.emulated
        self.engine: Engine | DisaggregatedEngine
        slower = self._slower * self._crowd
        if of.service is not None:
            self.engine = DisaggregatedEngine(of.service, of.mean_input_tokens, of.mean_output_tokens, slower)
            self.cache_tokens = self.engine.cache_tokens
        else:
            self.engine = Engine(of.deployment, of.context, slower, times=of.times, began=self._began)
            self.cache_tokens = self.engine.cache_tokens * of.deployment.parallelism.dp
        self.empty_cache()
        self.metrics = ReplicaCounts()
        self._active: dict[Sequence, None] = {}
        self._streams: dict[Sequence, None] = {}

    def empty_cache(self) -> None:
        self.cache = TellingCache(self.cache_tokens, self.emulated.block_bytes, self.publisher)

    def now(self) -> float:
        return (self._clock() - self._origin) * self.speed

    def pace(self, *, slower: float | None = None, crowd: float | None = None) -> None:
        """`crowd`: engines that share the machine's time, this one among them."""
        self._catch_up()
        self._slower = self._slower if slower is None else slower
        self._crowd = self._crowd if crowd is None else crowd
        self.engine.slower = self._slower * self._crowd
        self._arm()

    @property
    def busy(self) -> bool:
        return bool(self._active)

    @property
    def full(self) -> bool:
        """Whether the queue is full."""
        if self.engine.waiting < self.max_waiting:
            return False
        self._catch_up()
        return self.engine.waiting >= self.max_waiting

    def submit(self, sequence: Sequence, *, handed_over: bool = False) -> None:
        """`handed_over`: another replica has computed the prompt, and its cache is here."""
        wanted, sequence.arrived = sequence.wanted, self.now()
        cached = self.cache.blocks.look_up(sequence.keys, wanted.prompt_tokens)
        sequence.cached_tokens = wanted.prompt_tokens - 1 if handed_over else cached
        self._active[sequence] = None
        tokens = wanted.prompt_tokens, wanted.output_tokens
        self.engine.add(sequence, *tokens, sequence.arrived, sequence.cached_tokens)
        self._arm()

    def cancel(self, sequence: Sequence) -> None:
        """Frees what a request holds; nothing if it has ended."""
        if sequence not in self._active:
            return
        self.metrics.generation_tokens += self.engine.made(sequence)
        self.metrics.endings["abort"] += 1
        self.engine.cancel(sequence)
        self._forget(sequence)
        # Without it, steps are shorter.
        self._arm()

    def drop(self) -> None:
        """Cuts off all its requests."""
        for sequence in list(self._active):
            self.cancel(sequence)
            sequence.cut_off()

    def hold(self) -> None:
        """Tells nobody anything until `release`; the engine goes on."""
        self._held = True
        self._disarm()

    def release(self) -> None:
        self._held = False
        self._wake()

    def close(self) -> None:
        self._disarm()
        self._held = True
        if self.publisher is not None:
            self.publisher.close()
            self.publisher = None

    def exposition(self, label: str) -> bytes:
        self._catch_up()
        label = f"{label}; seconds are emulated, {self.speed:g} to each second of the clock"
        under_way = sum(map(self.engine.made, self._active))
        return page(
            self.emulated.served_as, label, self.engine, self.cache_tokens, self.cache.blocks, self.metrics, under_way
        )

    # Time

    def _wake(self) -> None:
        self._timer = None
        self._timer_at = math.inf
        self._catch_up()
        now = self.now()
        if self._streams and now + self._slack >= self._last_tick + self._every:
            self._last_tick = now
            self._pass_on()
        self._arm()

    def _catch_up(self) -> None:
        if not self._held:
            for token in self.engine.advance(self.now() + self._slack):
                self._tell(token)

    def _arm(self) -> None:
        """Sets the timer for the next moment at which there is something to tell."""
        if self._held:
            return
        at = self.engine.next_answer_s()
        if at is None:
            self._disarm()
            return
        if self._streams:
            # A step is the least there is to tell of.
            at = min(at, max(self._last_tick + self._every, self.engine.clock))
        if self._timer is not None:
            if self._timer_at <= at:
                return
            self._timer.cancel()
        ticks = round((at - self.now()) / self.speed / _TIMER_S)
        self._timer_at = at
        self._timer = self.loop.call_later(max(ticks, 1) * _TIMER_S, self._wake)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, math.inf

    # Tokens

    def _tell(self, token: Token) -> None:
        sequence: Sequence = token.id
        wanted = sequence.wanted
        if token.tokens == 1:
            sequence.first = token.at
            self.metrics.prompt_tokens += wanted.prompt_tokens
            self.metrics.first_token_s.add(token.at - sequence.arrived)
            self.metrics.queue_s.add(max(self._began.pop(sequence, sequence.arrived) - sequence.arrived, 0.0))
            self.cache.keep(sequence.keys, wanted.prompt)
            if wanted.streams and not token.finished:
                if not self._streams:
                    self._last_tick = token.at
                self._streams[sequence] = None
        if token.finished:
            moments, per_step = (sequence.arrived, sequence.first, token.at), self.engine.tokens_per_step
            self.metrics.finished(wanted.ending, *moments, token.tokens, per_step)
            # The next turn of a conversation begins with this answer.
            answer = sequence.tail + self._answer(token.tokens)
            last = sequence.keys[-1] if sequence.keys else 0
            keys = [*sequence.keys, *block_keys(answer, last, self.cache.block_bytes)]
            self.cache.keep(keys, wanted.prompt + answer[len(sequence.tail) :])
            if wanted.session and self.emulated.keeps_sessions:
                self.cache.refer(wanted.session, keys)
            self._forget(sequence)
        if token.finished or wanted.streams:
            sequence.passed_on = token.tokens
            sequence.on_tokens(token.tokens, token.finished)

    def _answer(self, tokens: int) -> bytes:
        """As it will be read when it comes back in a prompt."""
        text, tokenizer = filler(0, tokens), self.emulated.tokenizer
        return text.encode() if tokenizer is None else array("I", tokenizer.encode(text)).tobytes()

    def _pass_on(self) -> None:
        made = self.engine.made
        for sequence in list(self._streams):
            tokens = made(sequence)
            # Slow readers get more at a time.
            if tokens > sequence.passed_on and not sequence.slow:
                sequence.passed_on = tokens
                sequence.on_tokens(tokens, False)

    def _forget(self, sequence: Sequence) -> None:
        self._active.pop(sequence, None)
        self._streams.pop(sequence, None)
        self._began.pop(sequence, None)
