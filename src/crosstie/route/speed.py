"""How fast a replica is: its load in the few numbers that predictions need, what fills them, and TTFT and TPOT of one
more request."""

from abc import ABC, abstractmethod
from typing import Final

from crosstie.route.load import ReplicaLoad

# Tokens where there is no limit.
ENDLESS: Final = 1e15


class View:
    """A replica's load as predictions need it. Seconds are as modelled: factors come last."""

    def __init__(self) -> None:
        # Before the first prompt token is computed; prompt tokens that are computed before one's own are.
        self.before_s = 0.0
        self.ahead_tokens = 0.0
        # A step with no prompt, with an eighth of the prompt tokens that there is room for, and with all of them.
        self.none_s = self.eighth_s = self.full_s = 0.0
        self.room = self.eighth = 1.0
        self.slope_low = self.slope_high = 0.0
        # A token's part of a decode step once everybody in flight and one more decode, less what the one more adds by
        # its context; and what prompts make of it.
        self.step_s = 0.0
        self.stretch = 1.0
        # Tokens that the cache has room for, and how long each missing one takes to become free.
        self.free_tokens = 0.0
        self.per_free_s = 0.0
        # By how much the first in the queue is late already, and the way there and back.
        self.late_s = 0.0
        self.ttft_factor = self.tpot_factor = 1.0
        # In flight at most; and the tightest targets of anybody there.
        self.limit = 1
        self.strictest_ttft_s = self.strictest_tpot_s = float("inf")

    def steps(self, none_s: float, eighth_s: float, full_s: float, room: float) -> None:
        """Steps with no prompt, with an eighth of the prompt tokens that there is room for, and with all of them."""
        self.none_s, self.eighth_s, self.full_s, self.room = none_s, eighth_s, full_s, room
        self.eighth = eighth = 0.125 * room
        self.slope_low = (eighth_s - none_s) / eighth
        self.slope_high = (full_s - eighth_s) / (room - eighth)

    def cache(self, free_tokens: float, held_tokens: float, turnover_s: float) -> None:
        """All that is held now is free again after one answer's time."""
        self.free_tokens = free_tokens
        self.per_free_s = turnover_s / (held_tokens if held_tokens > 1.0 else 1.0)

    def slow_down(self, factor: float) -> None:
        """Everything that the machine computes takes so many times as long."""
        self.before_s *= factor
        self.none_s *= factor
        self.eighth_s *= factor
        self.full_s *= factor
        self.slope_low *= factor
        self.slope_high *= factor
        self.step_s *= factor
        self.per_free_s *= factor


class Speed(ABC):
    """How fast a pool's replicas are, from `perf` or from what they have shown."""

    def __init__(self) -> None:
        # Seconds that each of a sequence's tokens adds to the next, and each pair of a prompt's to its prefill.
        self.per_cached = self.per_attended = 0.0
        # Prompt tokens of a step, at most.
        self.chunk = ENDLESS
        # Of a pipeline; 1 without one.
        self.stages = 1.0
        # Tokens that a replica's cache holds, and the share of an answer that counts against it.
        self.cache_tokens = ENDLESS
        self.held_share = 0.0
        # Lengths of the requests that the pool mostly gets, to reckon with external traffic.
        self.typical_input, self.typical_output = 1000.0, 250.0

    def attended(self, new_tokens: float, cached_tokens: float) -> float:
        """Tokens before each of a prompt's, on average, beyond those of its own chunk."""
        beyond = new_tokens - self.chunk
        return cached_tokens + (0.5 * beyond if beyond > 0.0 else 0.0)

    @abstractmethod
    def fill(self, view: View, load: ReplicaLoad, now: float) -> None:
        """Fills a replica's view from its counts."""

    @abstractmethod
    def replica_s(
        self, new_tokens: float, cached_tokens: float, output_tokens: float, tpot_s: float = float("inf")
    ) -> float:
        """Seconds that a request takes of a replica which it shares with as many like it as the pool is meant for, and
        as leave it a time per token of `tpot_s`."""

    @abstractmethod
    def idle_s(self, input_tokens: float, output_tokens: float) -> float:
        """What a request takes on a replica that has nothing else to do."""

    @abstractmethod
    def empty_step_s(self) -> float:
        """A token of a request that is alone, without what it reads of its own cache."""

    def saw_first(self, tokens: float, ttft_s: float) -> None:  # noqa: B027 (not all of them learn)
        """A first token came so long after its request, which had so many prompt tokens before and in it."""

    def saw_decode(self, in_flight: float, tpot_s: float) -> None:  # noqa: B027 (as above)
        """An answer took so long a token, with so many requests in flight."""


class Prediction:
    """At a replica's present load, corrected by what it has delivered; `raw`: before that correction."""

    def __init__(
        self,
        *,
        ttft_s: float,
        tpot_s: float,
        predicted_usd: float,
        cached_tokens: float,
        raw_ttft_s: float,
        raw_tpot_s: float,
        ttft_limit_s: float = 0.0,
        tpot_limit_s: float = 0.0,
    ):
        self.ttft_s = ttft_s
        self.tpot_s = tpot_s
        self.predicted_usd = predicted_usd
        # Of the prompt, what the replica is believed to hold already.
        self.cached_tokens = cached_tokens
        self.raw_ttft_s = raw_ttft_s
        self.raw_tpot_s = raw_tpot_s
        # What the replica may be filled up to before the request counts as late, margins taken off; 0: nobody looked.
        self.ttft_limit_s = ttft_limit_s
        self.tpot_limit_s = tpot_limit_s

    def finish_s(self, output_tokens: float) -> float:
        return self.ttft_s + max(output_tokens - 1.0, 0.0) * self.tpot_s


def first_token_s(view: View, speed: Speed, new_tokens: float, cached_tokens: float, output_tokens: float) -> float:
    """Raw seconds to the first token.

    Prompts are computed in order, so the first token comes when all tokens ahead and one's own have gone through
    steps with `room` for so many; a step's time is straight between none, an eighth and all of these.
    """
    tokens = view.ahead_tokens + new_tokens
    room = view.room
    last_s = 0.0
    ttft_s = view.before_s
    if tokens > room:
        whole = tokens // room
        last_s = view.full_s
        ttft_s += whole * last_s
        tokens -= whole * room
    if tokens > view.eighth:
        part_s = view.eighth_s + (tokens - view.eighth) * view.slope_high
    elif tokens > 0.0:
        part_s = view.none_s + tokens * view.slope_low
    else:
        part_s = 0.0
    ttft_s += part_s
    if speed.stages > 1.0:
        # A chunk comes out of a pipeline in a part of the time that it takes to go through.
        ttft_s += (speed.stages - 1.0) * max(last_s, part_s)
    if cached_tokens or new_tokens > speed.chunk:
        ttft_s += speed.per_attended * new_tokens * speed.attended(new_tokens, cached_tokens)
    needs = new_tokens + cached_tokens + speed.held_share * output_tokens
    if needs > view.free_tokens:
        # A request longer than the whole cache waits until it is alone, and no longer.
        ttft_s += max(min(needs, speed.cache_tokens) - view.free_tokens, 0.0) * view.per_free_s
    return ttft_s
