"""All requests of open traffic on one engine, which is what its tests look at most."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from crosstie.core.deployment import Deployment
from crosstie.core.disaggregated import Disaggregated
from crosstie.perf.hardware import Array
from crosstie.sim.disaggregated import DisaggregatedEngine
from crosstie.sim.engine import Engine, Token


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    arrival_s: float
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Latencies:
    """By request, in the order of arrival; TPOT is not a number where there is one token."""

    ttft_s: Array
    tpot_s: Array
    # Share of the time in which the replica had anything to do.
    busy: float


def simulate(one: Deployment | Disaggregated, requests: Sequence[Arrival], slower: float = 1.0) -> Latencies:
    """On a replica or a disaggregated service; `slower` stretches every step."""
    ordered = sorted(requests)
    inputs = sum(r.input_tokens for r in ordered) / len(ordered)
    outputs = sum(r.output_tokens for r in ordered) / len(ordered)
    engine: Engine | DisaggregatedEngine
    if isinstance(one, Disaggregated):
        engine = DisaggregatedEngine(one, inputs, outputs, slower)
    else:
        engine = Engine(one, inputs + 0.5 * outputs, slower, preempts=False)
    told: list[Token] = []
    for index, request in enumerate(ordered):
        if isinstance(one, Disaggregated):
            told += engine.advance(request.arrival_s)
        engine.add(index, request.input_tokens, request.output_tokens, request.arrival_s)
    first, last = np.full(len(ordered), math.nan), np.full(len(ordered), math.nan)
    for index, count, finished, at, _ in told + engine.advance(math.inf):
        if count == 1 or math.isnan(first[index]):
            first[index] = at
        if finished:
            last[index] = at
    later = np.array([float(r.output_tokens - 1) for r in ordered])
    tpot = np.divide(last - first, later, out=np.full(len(ordered), np.nan), where=later > 0)
    arrivals = np.array([r.arrival_s for r in ordered])
    span = max(engine.clock - float(arrivals[0]) - engine.request_s, 1e-9)
    return Latencies(first - arrivals, tpot, engine.busy_s / span)
