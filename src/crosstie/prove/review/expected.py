"""What the fleet should have made of the requests that came, by the plan's own model: simulated behind the gateway's
policy, request by request, and held against the answers that were recorded.

So what traffic changed and what the fleet does not deliver are told apart: a plan is of the traffic that was expected,
this is of the traffic that came.

How much slower a fleet is than its model is asked as follows. If every step took 1/s of its time, a fleet at a load
would do as its model does at 1/s of that load, on a clock that is slower by s. So s is where the seen time of a
request, times s, is the simulated time at 1/s of the load. At the same number of requests in flight s is then also the
throughput seen over the throughput projected.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from crosstie.catalog.library import Catalog
from crosstie.catalog.traces import Floats, Ints, Trace
from crosstie.core.errors import CrosstieError
from crosstie.core.fleet import Fleet
from crosstie.core.progress import OnProgress, no_progress
from crosstie.decide.plan.traffic import recorded
from crosstie.prove.review.figures import MeasuredValue, mean_seen
from crosstie.prove.review.production import Recorded
from crosstie.sim.fleet import FleetSimulator

# Requests that are simulated: those that came in the busiest stretch. Before it the fleet was not empty, and what came
# after it held up its last ones, longer than this share of requests takes.
_MOST = 3000
_WARM_UP, _LAST = 0.1, 0.9
# Simulations at another load, until the speed moves by less than this.
_ROUNDS, _SETTLED = 3, 0.01
_FEWEST = 10


@dataclass(frozen=True)
class Pass:
    """The same requests, as they were answered: seen, or simulated. NaN: turned away, or not seen."""

    ttft_s: Floats
    tpot_s: Floats
    request_s: Floats


@dataclass(frozen=True)
class PoolSpeed:
    """A pool's throughput over its model's at the same number of requests in flight."""

    pool: str
    ratio: MeasuredValue
    # Of one replica, over the stretch: requests in flight, and output tokens a second.
    in_flight: float
    output_tokens_per_s: float

    @property
    def projected_tokens_per_s(self) -> float:
        return self.output_tokens_per_s / self.ratio.value


@dataclass(frozen=True)
class Expected:
    # Which requests of the recording were simulated, and which of these count.
    rows: Ints
    counted: Ints
    classes: tuple[str, ...]
    seen: Pass
    simulated: Pass
    speeds: list[PoolSpeed]
    # What was left out, in words.
    notes: list[str]


def expected(
    catalog: Catalog, fleet: Fleet, production: Recorded, on_progress: OnProgress = no_progress
) -> Expected | str:
    """Or why there is nothing to expect."""
    known = {served_class.name for served_class in fleet.classes}
    longest = max(pool.max_context for pool in fleet.pools)
    lengths = production.trace.input_tokens + production.trace.output_tokens
    fits = np.array([name in known for name in production.classes]) & (lengths <= longest)
    rows = _stretch(production, np.flatnonzero(fits))
    if len(rows) < _FEWEST:
        return f"{len(rows)} recorded requests are of this fleet: too few to simulate"
    trace, classes = _part(production, rows)
    on_progress(0, 0, f"simulating {len(rows):,} recorded requests")
    try:
        simulated = _simulated(catalog, fleet, trace, 1.0)
    except CrosstieError as error:
        return str(error)
    counted = np.arange(int(len(rows) * _WARM_UP) if rows[0] > 0 else 0, len(rows))
    nothing = np.full(len(rows), np.nan)
    seen, speeds = Pass(nothing, nothing, nothing), list[PoolSpeed]()
    left_out = int((~fits).sum())
    notes = [f"{left_out:,} recorded requests are of no class of the fleet, or too long for it"] if left_out else []
    if trace.answers is not None:
        ttft, tpot = trace.answers.ttft_s, trace.answers.tpot_s
        seen = Pass(ttft, tpot, ttft + np.nan_to_num(tpot) * (trace.output_tokens - 1))
        counted = _undisturbed(trace, seen, counted)
        speeds = _speeds(catalog, fleet, trace, seen, simulated, counted, on_progress)
    return Expected(rows, counted, classes, seen, simulated, speeds, notes)


def _undisturbed(trace: Trace, seen: Pass, counted: Ints) -> Ints:
    known = seen.request_s[~np.isnan(seen.request_s)]
    if not len(known) or trace.arrival_s is None:
        return counted
    until = float(trace.arrival_s[-1] - np.quantile(known, _LAST))
    early: Ints = counted[trace.arrival_s[counted] <= until]
    return early


def _stretch(production: Recorded, rows: Ints) -> Ints:
    """The busiest of so many requests that follow one another."""
    if len(rows) <= _MOST:
        return rows
    at = production.arrivals[rows]
    took = at[_MOST - 1 :] - at[: len(at) - _MOST + 1]
    first = int(np.argmin(took))
    return rows[first : first + _MOST]


def _part(production: Recorded, rows: Ints) -> tuple[Trace, tuple[str, ...]]:
    """These requests from their first on, and the class of each."""
    at = production.arrivals[rows]
    classes = tuple(production.classes[row] for row in rows)
    return replace(production.trace.taken(rows), arrival_s=at - at[0], classes=classes), classes


def _simulated(catalog: Catalog, fleet: Fleet, trace: Trace, load: float) -> Pass:
    traffic = recorded(trace, fleet, class_name=None, requests_per_s=None, load=load, count=None, seed=0)
    simulator = FleetSimulator(catalog, fleet, prefixes=traffic.prefixes is not None)
    requests = list(traffic.requests())
    place = {id(request): number for number, request in enumerate(requests)}
    ttft, tpot, took = (np.full(len(requests), np.nan) for _ in range(3))
    for answer in simulator.run(requests):
        row = place[id(answer.request)]
        if answer.pool is not None:
            ttft[row], took[row] = answer.ttft_s, answer.finished_s
            tpot[row] = answer.tpot_s if answer.request.output_tokens > 1 else np.nan
    return Pass(ttft, tpot, took)


def _speeds(
    catalog: Catalog, fleet: Fleet, trace: Trace, seen: Pass, simulated: Pass, counted: Ints, on_progress: OnProgress
) -> list[PoolSpeed]:
    both = counted[~np.isnan(seen.request_s[counted]) & ~np.isnan(simulated.request_s[counted])]
    if len(both) < _FEWEST:
        return []

    def logarithm(of: Pass, rows: Ints) -> float:
        return math.log(max(float(of.request_s[rows].sum()), 1e-9))

    slower, gain = logarithm(seen, both) - logarithm(simulated, both), 0.0
    at, best = 0.0, slower
    for number in range(_ROUNDS):
        if abs(best - at) < _SETTLED:
            break
        on_progress(number + 1, _ROUNDS + 1, f"simulating them at {math.exp(best):.0%} of the load")
        other = _simulated(catalog, fleet, trace, math.exp(best))
        kept = both[~np.isnan(other.request_s[both])]
        gain = (logarithm(other, kept) - logarithm(simulated, kept)) / best
        at, best = best, slower / max(1.0 + gain, 0.5)
    factor = 1.0 / max(1.0 + gain, 0.5)
    assert trace.arrival_s is not None
    assert trace.answers is not None
    span_s = float(trace.arrival_s[counted[-1]] - trace.arrival_s[counted[0]])
    speeds = []
    for pool in fleet.pools:
        mine = both[[trace.answers.pools[row] == pool.name for row in both]]
        if len(mine) < _FEWEST or span_s <= 0.0:
            continue
        took = seen.request_s[mine]
        # Requests are paired: what they are and when they came is the same on both sides.
        ratio = mean_seen(simulated.request_s[mine] / took, took)
        assert ratio is not None
        low, high = (None if end is None else max(end, 1e-3) ** factor for end in (ratio.low, ratio.high))
        busy_s = span_s * pool.replicas
        speeds.append(
            PoolSpeed(
                pool=pool.name,
                ratio=MeasuredValue(ratio.value**factor, low, high, len(mine)),
                in_flight=math.fsum(took.tolist()) / busy_s,
                output_tokens_per_s=float(trace.output_tokens[mine].sum()) / busy_s,
            )
        )
    return speeds
