"""A stage of a benchmark: arrivals by the clock for a while, then silence until the last answer.

Stages of half a minute never settle, so their requests are followed one by one through a replica that gives each of n
running ones a token every TPOT(n): they are admitted in turn as memory and prefill allow.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from crosstie.perf.hardware import Array

# Steps of a stage's arrivals, and stages' lengths after which whoever is not done never will be.
_STEPS = 400
_PATIENCE = 60
_SEED = 7


@dataclass(frozen=True, slots=True)
class StageReplica:
    """By the number of requests that decode, in order: seconds of a token, and of TTFT for who finds room; how often
    prefill can take one more; tokens that the cache holds, and how many the prompts of so many requests are."""

    decoding: Array
    tpot_s: Array
    found_room_s: Array
    service_s: float
    room_tokens: float
    prompt_tokens: Callable[[float], float]
    max_sequences: float


@dataclass(frozen=True, slots=True)
class Stage:
    ttft_mean_s: float
    ttft_p90_s: float
    tpot_s: float
    lasts_s: float


def stage(replica: StageReplica, requests: int, arrivals_s: float, output_tokens: float) -> Stage:
    """`arrivals_s`: the time over which the requests come, by chance, the same every time."""
    came = np.sort(np.random.default_rng(_SEED).random(requests)) * arrivals_s
    tick = arrivals_s / _STEPS
    # Tokens that whoever decodes from the beginning has by now; each request's own are those since it was admitted.
    # Engines admit by what the cache holds now, not by what answers will need.
    tokens, now, prefilled, at_start = 0.0, 0.0, 0.0, 0.0
    running: deque[tuple[float, float]] = deque()
    ttft, tpot = np.zeros(requests), np.zeros(requests)
    admitted = done = 0
    while done < requests and now < _PATIENCE * arrivals_s:
        while admitted < requests and came[admitted] <= now and prefilled <= now:
            held = replica.prompt_tokens(len(running) + 1.0) + len(running) * tokens - at_start
            if running and (held > replica.room_tokens or len(running) >= replica.max_sequences):
                break
            # A request that comes between two ticks waits for neither.
            wait = max(now - tick - came[admitted], 0.0)
            ttft[admitted] = wait + float(np.interp(len(running), replica.decoding, replica.found_room_s))
            running.append((tokens, now))
            at_start += tokens
            prefilled = max(prefilled, now - tick) + replica.service_s
            admitted += 1
        tokens += tick / float(np.interp(len(running), replica.decoding, replica.tpot_s))
        now += tick
        while running and tokens - running[0][0] >= output_tokens - 1.0:
            started, begun = running.popleft()
            at_start -= started
            tpot[done] = (now - begun) / max(output_tokens - 1.0, 1.0)
            done += 1
    ttft[admitted:] = now - came[admitted:]
    tpot[done:] = tpot[:done].mean() if done else replica.tpot_s[-1]
    return Stage(float(ttft.mean()), float(np.quantile(ttft, 0.9)), float(tpot.mean()), now + float(ttft[:1].sum()))
