"""What of a slice's prompts a replica has in its caches at each load, and what it costs to have it.

A trace's hits are known by the size of the cache at the trace's own rate. Where conversations stay together, a replica
sees between two turns of one as much of the others as its share of the traffic: a cache of C tokens at x tokens a
second is like one of C l / x at the trace's l. So fuller replicas find less, and compute more for it; load and hits are
settled together.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.catalog.loading import shipped_loading
from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Disaggregated, Servable
from crosstie.core.workload import HitCurve, RequestClass, Slice
from crosstie.perf.hardware import Array, Hardware
from crosstie.perf.memory import cache_sequences, gpu_cache_bytes_per_sequence, tier_tokens
from crosstie.perf.steady_state import SteadyState, prefill_alone, steady_state
from crosstie.perf.vision import encode_s

# By then hits change by less than a tenth of a point.
_ROUNDS = 4
# Of requests that find their conversation held, the share that the gateway's policy sends there; the others it sends
# where they end sooner. Measured on Mooncake's conversations: 10 to 22 replicas of two H200 or MI300X, busy 82 to 95%.
_GATHERED = 0.85


@dataclass(frozen=True, slots=True)
class Loaded:
    """Slices under so many clients each: arrays of shape (deployments, slices x clients), slice by slice."""

    steady: SteadyState
    # Prompt tokens that need not be computed, and the seconds that it takes to load those that other memory has.
    cached_tokens: Array
    load_s: Array


def loaded(hardware: Hardware, slices: Sequence[Slice], clients: Array) -> Loaded:
    """Open traffic: the prompts of attention replicas come when they come."""
    count = len(clients)

    def each(of: str) -> Array:
        return np.repeat([float(getattr(one, of)) for one in slices], count)

    def at(cached: Array) -> SteadyState:
        return steady_state(
            hardware, np.tile(clients, len(slices)), each("input_tokens"), each("output_tokens"),
            cached_tokens=cached, shared_tokens=each("shared_tokens"), encode_s=encoding, in_step=False,
        )  # fmt: skip

    looks = [_encode_s(hardware, one) for one in slices]
    encoding = np.repeat(np.concatenate(looks, axis=1), count, axis=1)
    cached = each("cached_tokens")
    steady = at(cached)
    if all(one.hits is None for one in slices):
        wide = np.broadcast_to(cached, steady.tpot_s.shape)
        return Loaded(steady, wide, np.zeros_like(wide))
    cached = np.broadcast_to(cached, steady.tpot_s.shape).copy()
    load_s = np.zeros_like(cached)
    for turn in range(_ROUNDS):
        for index, one in enumerate(slices):
            mine = slice(index * count, (index + 1) * count)
            if one.hits is not None:
                found, load_s[:, mine] = reused(hardware, one, steady.requests_per_s[:, mine])
                cached[:, mine] = found if not turn else 0.5 * (cached[:, mine] + found)
        steady = at(cached)
    return Loaded(steady, cached, load_s)


def _encode_s(hardware: Hardware, one: Slice) -> Array:
    seen = one.pictures
    return encode_s(hardware, seen.encoder, seen.patches, seen.parts) if seen else np.zeros_like(hardware.tp)


def encoding_tokens(deployment: Deployment, one: Slice) -> float:
    """Prompt tokens that take as long as a request's pictures do, for whoever knows tokens alone."""
    if one.pictures is None:
        return 0.0
    machine = Hardware([deployment])
    chunk = float(machine.chunk_tokens[0, 0])
    return float(_encode_s(machine, one)[0, 0]) / float(prefill_alone(machine, chunk).total_s[0, 0]) * chunk


def reused(hardware: Hardware, one: Slice, requests_per_s: Array) -> tuple[Array, Array]:
    """Cached tokens of a prompt, and seconds of loading, at rates of each replica; shape (deployments, points)."""
    tokens_per_s = np.maximum(requests_per_s, 1e-9) * (one.input_tokens + one.output_tokens)
    found = [_on(d, one, tokens_per_s[i]) for i, d in enumerate(hardware.deployments)]
    return np.stack([cached for cached, _ in found]), np.stack([load_s for _, load_s in found])


def reused_apart(services: Sequence[Disaggregated], one: Slice, requests_per_s: Array) -> tuple[Array, Array]:
    """The same of services, whose prefill replicas alone keep prefixes; rates are each whole service's.

    Its own proxy spreads prompts over them, as it does unless it is told what each holds.
    """
    if one.hits is not None:
        tokens_per_s = np.maximum(requests_per_s, 1e-9) * (one.input_tokens + one.output_tokens)
        found = [_on(s.prefill, one, tokens_per_s[i], s.prefill_replicas) for i, s in enumerate(services)]
        return np.stack([cached for cached, _ in found]), np.stack([load_s for _, load_s in found])
    cached = np.full_like(requests_per_s, one.cached_tokens)
    if one.prefix is not None and one.prefix.idle_s:
        # What does not stay until it is asked for again is no hit.
        room = [float(cache_sequences(s.prefill, one.input_tokens)) * s.prefill_replicas for s in services]
        kept = requests_per_s * one.prefix.idle_s * (one.input_tokens - one.shared_tokens) / one.input_tokens
        stays = np.minimum(np.array(room)[:, None] / np.maximum(kept, 1e-9), 1.0)
        cached = one.shared_tokens + (cached - one.shared_tokens) * stays
    return cached, np.zeros_like(cached)


def _on(deployment: Deployment, one: Slice, tokens_per_s: Array, replicas: int = 1) -> tuple[Array, Array]:
    """`replicas`: alike, that whoever routes to them sees as one."""
    hits, prefix = one.hits, one.prefix
    assert hits is not None
    assert prefix is not None
    context = one.input_tokens + one.output_tokens
    split, caches = deployment.parallelism, replicas * deployment.parallelism.dp
    gpu_bytes_per_token = float(gpu_cache_bytes_per_sequence(deployment, context)) / context
    # Requests that are spread come to any of the replicas that the class has.
    among = np.maximum(hits.class_tokens_per_s / tokens_per_s, 1.0)
    together = 0.0 if prefix.routing == "spread" else _GATHERED
    slower = hits.tokens_per_s / tokens_per_s

    def held(cache_tokens: float) -> Array:
        # Attention replicas have caches of their own, and whoever routes to the engine does not see them.
        gathered = tokens_at(hits, cache_tokens * slower, np.full_like(slower, caches))
        spread = tokens_at(hits, cache_tokens * slower / among, among * caches)
        return together * gathered + (1.0 - together) * spread

    found = held(float(cache_sequences(deployment, context)) * context / split.dp)
    load_s = np.zeros_like(found)
    # What another memory has it keeps beside what the ones before it have; the slower one is asked for the rest.
    for tier in shipped_loading().cache_tiers(prefix, deployment.accelerator.id):
        tokens = tier_tokens(deployment, context, tier.size_bytes, shared=tier.shared)
        if tier.shared:
            # Of all replicas, so that nothing is spread there.
            size = np.full_like(found, tokens * hits.tokens_per_s / hits.class_tokens_per_s)
            more = np.maximum(tokens_at(hits, size), found)
        else:
            more = np.maximum(held(tokens), found)
        # A conversation goes from a memory nearly whole: who finds some of it in this one finds most of it there.
        asked = (more - found) / np.maximum(more, 1.0)
        load_s = load_s + (more - found) * gpu_bytes_per_token / tier.bytes_per_s + asked * tier.latency_s
        found = more
    return np.minimum(found, one.input_tokens - 1.0), load_s


def tokens_at(hits: HitCurve, cache_tokens: Array, caches: Array | float = 1.0) -> Array:
    """Cached tokens of a prompt by the size of each cache; between rows by the logarithm of their number."""
    sizes = np.asarray(hits.cache_tokens)
    rows = np.stack([np.interp(cache_tokens, sizes, row, left=0.0) for row in hits.cached_tokens])
    place = np.interp(np.log2(caches), np.log2(hits.replicas), np.arange(len(rows))) * np.ones_like(cache_tokens)
    low = np.minimum(place.astype(int), max(len(rows) - 2, 0))
    share, points = place - low, np.arange(rows.shape[1])
    return np.asarray(rows[low, points] * (1.0 - share) + rows[np.minimum(low + 1, len(rows) - 1), points] * share)


def found_by_memory(request_class: RequestClass) -> tuple[Array, Array]:
    """Of a class with sessions: tokens of cache for each live session, and the share of its prompts that is found."""
    pieces = [piece for piece in request_class.slices if piece.hits is not None]
    first = pieces[0].hits
    assert first is not None
    assert request_class.sessions is not None
    # The trace has so many sessions at work as make its tokens a second.
    live = request_class.sessions.live * first.tokens_per_s / first.class_tokens_per_s
    sizes = np.unique(np.concatenate([[0.0], first.cache_tokens]))
    cached = sum(piece.share * tokens_at(piece.hits, sizes) for piece in pieces if piece.hits is not None)
    return sizes / live, np.asarray(cached) / request_class.input_tokens


def knee(sizes: Array, share: Array) -> int:
    """Where more memory begins to buy little: the point furthest above the line from the first to the last."""
    along, up = (np.asarray((v - v[0]) / max(float(v[-1] - v[0]), 1e-12)) for v in (sizes, share))
    return int(np.argmax(up - along))


def room_beside_idle(hardware: Hardware, one: Slice, fits: Array, loads: Array, requests_per_s: Array) -> Array:
    """Of the requests that fit, as many as leave room for conversations between two turns; a row a deployment.

    A given hit rate has its price: what comes back after `idle_s` must have stayed. `loads` are requests in flight, at
    which a replica has the rates of its row.
    """
    if one.prefix is None or not one.prefix.idle_s:
        return fits
    context = one.input_tokens + one.output_tokens
    room = np.array([[float(cache_sequences(d, context)) * context] for d in hardware.deployments])
    kept = requests_per_s * one.prefix.idle_s * (context - one.shared_tokens)
    left = fits[:, None] * np.maximum(1.0 - kept / np.maximum(room, 1.0), 0.0) - loads
    found = []
    for row, most in zip(left, fits, strict=True):
        short = int(np.argmax(row < 0.0)) if (row < 0.0).any() else len(row)
        if short == len(row):
            found.append(float(most))
        elif short == 0:
            found.append(float(max(row[0] + loads[0], 0.0)))
        else:
            share = row[short - 1] / (row[short - 1] - row[short])
            found.append(float(min(loads[short - 1] + share * (loads[short] - loads[short - 1]), most)))
    return np.array(found)


def hit_rate(deployment: Servable, one: Slice, tokens_per_s: float) -> float:
    """Share of a slice's prompt tokens that a replica finds in its caches at so many tokens a second of all kinds."""
    if isinstance(deployment, Disaggregated):
        rate = np.array([[max(tokens_per_s, 1e-9) / (one.input_tokens + one.output_tokens)]])
        return float(reused_apart([deployment], one, rate)[0][0, 0]) / one.input_tokens
    if one.hits is None:
        return one.cached_tokens / one.input_tokens
    cached, _ = _on(deployment, one, np.array([max(tokens_per_s, 1e-9)]))
    return float(cached[0]) / one.input_tokens
