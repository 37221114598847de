"""One replica under open traffic: requests arrive by the clock, and wait, prefill and decode in steps.

Where `perf.steady_state` gives means in closed form, this gives percentiles; the engine is that of `sim.engine`.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.core.errors import BadInput
from crosstie.perf.hardware import Array
from crosstie.sim.engine import Engine, Token

if TYPE_CHECKING:
    from crosstie.sim.disaggregated import DisaggregatedEngine


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    arrival_s: float
    input_tokens: int
    output_tokens: int
    # Of the prompt, what need not be computed.
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Latencies:
    """By request, in the order of arrival; TPOT is not a number where there is one token."""

    ttft_s: Array
    tpot_s: Array
    # Share of the time in which the replica had anything to do.
    busy: float


def simulate(deployment: Deployment, requests: Sequence[Arrival], slower: float = 1.0) -> Latencies:
    """All requests on one replica; `slower` stretches every step."""
    if deployment.parallelism.pp > 1:
        raise BadInput(f"{deployment.label}: pipelines are not simulated")
    if not requests:
        raise BadInput("no request to simulate")
    ordered = sorted(requests)
    context = sum(r.input_tokens + 0.5 * r.output_tokens for r in ordered) / len(ordered)
    engine = Engine(deployment, context, slower, preempts=False)
    for index, request in enumerate(ordered):
        engine.add(index, request.input_tokens, request.output_tokens, request.arrival_s, request.cached_tokens)
    return latencies_of(engine, ordered, engine.advance(math.inf))


def latencies_of(
    engine: "Engine | DisaggregatedEngine", ordered: Sequence[Arrival], told: Iterable[Token]
) -> Latencies:
    """`told`: of all requests, each by its place among them."""
    first, last = np.full(len(ordered), math.nan), np.full(len(ordered), math.nan)
    for index, count, finished, at, _ in told:
        if count == 1 or math.isnan(first[index]):
            first[index] = at
        if finished:
            last[index] = at
    later = np.array([float(r.output_tokens - 1) for r in ordered])
    tpot = np.divide(last - first, later, out=np.full(len(ordered), np.nan), where=later > 0)
    arrivals = np.array([r.arrival_s for r in ordered])
    span = max(engine.clock - float(arrivals[0]) - engine.request_s, 1e-9)
    return Latencies(first - arrivals, tpot, engine.busy_s / span)
