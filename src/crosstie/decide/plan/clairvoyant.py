"""What no routing could beat on a fleet, whatever it knew: bounds on latencies and on money, by the same step times.

Latency: each request alone on an idle replica of the pool where it would be soonest. Others on the replica never make a
step shorter, so every percentile over these times is at most that of any policy, and the share within targets at least.

Money: a step with n sequences and t prompt tokens takes at least as long as one with the n alone and as one with the t
alone. So a pool's replicas work at least as long as all its answers take at the most efficient batch, and as all its
prompts take at the most efficient chunk, and at least any weighted mean of the two. For one weight in all pools that
splits by request, where each takes its cheapest pool: a sum that no assignment undercuts. The best of several weights
is told.
"""

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import BLOCK_TOKENS
from crosstie.core.fleet import Fleet
from crosstie.decide.plan.traffic import Traffic
from crosstie.perf.hardware import Array
from crosstie.perf.tabulated import StepTimes
from crosstie.route.build import deployment_of, service_of, typical
from crosstie.sim.engine import Engine

# Not the ends: what does not fit a pool costs without end there, and nothing of that is no number.
_WEIGHTS = (0.01, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)


class ClassBound(msgspec.Struct, frozen=True, kw_only=True):
    name: str | None
    # At the percentiles of its targets, or at 0.95 and 0.9 where it has none.
    ttft_s: float
    tpot_s: float
    within: float


class Bound(msgspec.Struct, frozen=True, kw_only=True):
    within: float
    # Of GPU time that this traffic takes in any case, for each hour of it.
    usd_per_hour: float
    classes: list[ClassBound]


@dataclass(frozen=True, slots=True)
class _Alone:
    """By request, on one pool: its latencies alone, and the least USD of its prompt and of its answer."""

    ttft_s: Array
    tpot_s: Array
    prompt_usd: Array
    answer_usd: Array


def clairvoyant_bound(catalog: Catalog, fleet: Fleet, traffic: Traffic) -> Bound:
    cached = _held_at_best(traffic)
    models = np.array([model for _, model in traffic.classes])[traffic.kinds]
    pools = [_alone(catalog, fleet, number, traffic, cached, models) for number in range(len(fleet.pools))]
    targets = {served_class.name: (served_class.ttft, served_class.tpot) for served_class in fleet.classes}
    ttft, tpot = (np.min([getattr(alone, name) for alone in pools], axis=0) for name in ("ttft_s", "tpot_s"))
    good = np.zeros(len(traffic), bool)
    classes = []
    for kind, (name, _) in enumerate(traffic.classes):
        mine = traffic.kinds == kind
        ttft_target, tpot_target = targets.get(name or "", (None, None))
        kept = np.zeros(len(traffic), bool)
        for pool in pools:
            late = pool.ttft_s > (ttft_target.seconds if ttft_target else math.inf)
            slow = pool.tpot_s > (tpot_target.seconds if tpot_target else math.inf)
            kept |= ~late & ~slow & np.isfinite(pool.ttft_s)
        good |= kept & mine
        if not mine.any():
            continue
        several = mine & (traffic.output_tokens > 1)
        classes.append(
            ClassBound(
                name=name,
                ttft_s=_at(ttft[mine], ttft_target.percentile if ttft_target else 0.95),
                tpot_s=_at(tpot[several], tpot_target.percentile if tpot_target else 0.9),
                within=float(kept[mine].mean()),
            )
        )
    usd = max(
        float(np.min([weight * alone.prompt_usd + (1.0 - weight) * alone.answer_usd for alone in pools], axis=0).sum())
        for weight in _WEIGHTS
    )
    return Bound(within=float(good.mean()), usd_per_hour=usd / max(traffic.span_s, 1e-9) * 3600.0, classes=classes)


def _at(seconds: Array, share: float) -> float:
    ordered = np.sort(seconds)
    return float(ordered[min(math.ceil(share * len(ordered)) - 1, len(ordered) - 1)]) if len(ordered) else 0.0


def _held_at_best(traffic: Traffic) -> Array:
    """Prompt tokens that an endless cache on the right replica would have; the last is always computed."""
    held = np.zeros(len(traffic)) if traffic.cached_tokens is None else traffic.cached_tokens.astype(np.float64)
    if traffic.prefixes is not None:
        seen: set[int] = set()
        for row, prefix in enumerate(traffic.prefixes):
            known = next((place for place, block in enumerate(prefix) if block not in seen), len(prefix))
            held[row] = max(held[row], known * BLOCK_TOKENS)
            seen.update(prefix)
    return np.asarray(np.minimum(held, traffic.input_tokens - 1.0))


def _alone(catalog: Catalog, fleet: Fleet, number: int, traffic: Traffic, cached: Array, models: Array) -> _Alone:
    pool = fleet.pools[number]
    deployment, service = deployment_of(catalog, pool), service_of(catalog, pool)
    assert deployment is not None
    inputs, outputs = typical(fleet, pool)
    context = inputs + 0.5 * outputs
    # Where prefill and decode are apart, prompts see the one side and answers the other; what lies between only adds.
    reading, writing = (
        Engine(one, context, times=StepTimes(one, context))
        for one in ((service.prefill, service.decode) if service else (deployment, deployment))
    )
    fits = (models == pool.model) & (traffic.input_tokens + traffic.output_tokens <= pool.max_context)
    prompt, answer = traffic.input_tokens.astype(np.float64), traffic.output_tokens.astype(np.float64)
    never = np.where(fits, 0.0, math.inf)
    usd_per_gpu_s = pool.usd_per_gpu_hour / 3600.0
    reading_gpus = (service.prefill if service else deployment).parallelism.gpus
    # Each decode step, and each chunk, at the batch that makes the most of it; what a sequence reads of the cache is
    # its own whatever the batch.
    most, times = writing.most * deployment.parallelism.dp, writing.times
    step_s = min(times.seconds(n / writing.pp, 0.0, 0, 0, 0.0) / n for n in times.sequences[1:] if n <= most)
    read_s = (prompt + 0.5 * answer) * times.per_cached / writing.pp
    chunk_s = min(_chunk_s(reading.times, float(t)) / t for t in reading.times.tokens[1:]) / reading.pp
    return _Alone(
        ttft_s=reading.request_s + _prefill_s(reading, prompt, cached) + never,
        tpot_s=_decode_s(writing, prompt, answer) + never,
        prompt_usd=usd_per_gpu_s * reading_gpus * chunk_s * (prompt - cached) + never,
        answer_usd=usd_per_gpu_s * deployment.parallelism.gpus * (answer - 1.0) / writing.tokens_per_step
        * (step_s + read_s) + never,
    )  # fmt: skip


def _chunk_s(times: StepTimes, tokens: float) -> float:
    return times.seconds(0, 0.0, tokens, tokens / times.dp, 0.5 * (tokens / times.dp) ** 2)


def _prefill_s(engine: Engine, prompt: Array, cached: Array) -> Array:
    """All steps of a prompt alone: full ones, and the last."""
    times = engine.times
    budget, chunk = float(engine.budget), float(times.chunk)
    new = prompt - cached
    full = np.floor((new - 1.0) / budget)
    rest = new - full * budget
    row = np.array(times.on_one[0])
    part = np.minimum(1.0, chunk / rest)
    # Each token sees those before it; the tables have one chunk from its beginning.
    before = full * (chunk * (cached + 0.5 * full * budget) - 0.5 * chunk * chunk)
    last = part * rest * (cached + full * budget + 0.5 * rest) - 0.5 * (part * rest) ** 2
    whole_s = float(np.interp(chunk, times.tokens, row))
    steps = full * whole_s + np.interp(part * rest, times.tokens, row)
    return np.asarray(steps + times.per_attended * (before + last))


def _decode_s(engine: Engine, prompt: Array, answer: Array) -> Array:
    """Seconds a token after the first, alone."""
    later = np.maximum(answer - 1.0, 1.0)
    steps = np.ceil(later / engine.tokens_per_step)
    read = prompt + 1.0 + 0.5 * (steps - 1.0) * engine.tokens_per_step
    times = engine.times
    alone = times.seconds(1.0 / engine.pp, 0.0, 0, 0, 0.0)
    return np.asarray(np.maximum(alone + read / engine.pp * times.per_cached, 1e-6) * steps / later)
