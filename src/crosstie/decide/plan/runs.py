"""One run of a simulation: a fleet, a policy, a load and a seed in; percentiles, money, queues and their course out;
of sessions in a closed loop turn latency, hits by turn, and what a session costs.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from crosstie.catalog.library import Catalog
from crosstie.core.errors import BadInput
from crosstie.core.fleet import Fleet
from crosstie.core.workload import Target
from crosstie.decide.plan.run_result import (
    ClassResult,
    Course,
    Latency,
    Outage,
    OutageResult,
    PoolCourse,
    PoolResult,
    Run,
    SessionsResult,
    SimulatedCase,
    TurnResult,
)
from crosstie.decide.plan.scaling import steps_when_sure
from crosstie.decide.plan.traffic import ClosedTraffic, Traffic
from crosstie.perf.hardware import Array
from crosstie.route.build import Tables, deployment_of, service_of, typical
from crosstie.route.live import LivePool
from crosstie.route.sessions import CACHED_LEAST
from crosstie.sim.fleet import FleetSimulator, SimulatedAnswer
from crosstie.sim.sessions import ClosedLoop

_Flags = NDArray[np.bool_]

# Of the requests, so many only fill the fleet before it is measured, where the rate is steady.
WARM_UP = 0.2
# Points of the course of a run.
_POINTS = 240
_PERCENTILES = (0.5, 0.9, 0.95, 0.99)
# A queue is said to grow where more than this is in the system at the end, over what was there before.
_GROWN, _SLACK = 1.3, 20.0
# Turned away by a fleet that is not too small.
_FEW = 0.005
# Turns of sessions from which the next row begins.
_BY_TURN = (1, 2, 6, 16, 41)


class _Tally:
    """What is kept of every answer: a few numbers, so that a day of millions fits into memory."""

    def __init__(self, traffic: Traffic | ClosedTraffic, fleet: Fleet):
        self.kinds = {name: number for number, (name, _) in enumerate(traffic.classes)}
        self.pools = {pool.name: number for number, pool in enumerate(fleet.pools)}
        self.kind, self.pool = array("i"), array("i")
        self.at, self.ttft, self.tpot, self.finish = array("d"), array("d"), array("d"), array("d")
        self.inputs, self.outputs = array("q"), array("q")
        self.usd = array("d")

    def add(self, answer: SimulatedAnswer) -> None:
        request = answer.request
        self.kind.append(self.kinds[request.class_name])
        self.pool.append(-1 if answer.pool is None else self.pools[answer.pool])
        self.at.append(request.arrival_s)
        self.ttft.append(answer.ttft_s)
        # An answer of one token has none, and keeps every target.
        self.tpot.append(answer.tpot_s if request.output_tokens > 1 or answer.pool is None else math.nan)
        self.finish.append(answer.finished_s)
        self.inputs.append(request.input_tokens)
        self.outputs.append(request.output_tokens)
        self.usd.append(answer.usd)


class _Watch:
    """Looks at engines and queues from time to time."""

    def __init__(self, simulator: FleetSimulator):
        self.simulator = simulator
        self.at: list[float] = []
        self.queued: list[int] = []
        self.in_system: list[int] = []
        self.seen: dict[str, list[tuple[float, int, int]]] = {pool.name: [] for pool in simulator.live.pools}

    def sample(self, now: float) -> None:
        simulator = self.simulator
        self.at.append(now)
        self.queued.append(len(simulator.room))
        total = len(simulator.room)
        for pool in simulator.live.pools:
            engines = [simulator.engines[replica.key] for replica in pool.replicas]
            running, waiting = sum(engine.running for engine in engines), sum(engine.waiting for engine in engines)
            self.seen[pool.name].append((sum(engine.busy_by(now) for engine in engines), running, waiting))
            total += running + waiting
        self.in_system.append(total)

    def course(self) -> Course:
        pools = {}
        for pool in self.simulator.live.pools:
            busy, running, waiting = (list(column) for column in zip(*self.seen[pool.name], strict=True))
            spans = np.maximum(np.diff(self.at, prepend=0.0), 1e-9) * max(len(pool.replicas), 1)
            shares = np.clip(np.diff(busy, prepend=0.0) / spans, 0.0, 1.0)
            pools[pool.name] = PoolCourse(busy=shares.tolist(), running=running, waiting=waiting)
        return Course(at_s=self.at, queued=self.queued, pools=pools)


@dataclass(frozen=True, slots=True)
class _Event:
    at_s: float
    what: Callable[[], object]


def checked_outages(outages: Sequence[Outage], fleet: Fleet, span_s: float) -> None:
    names = [pool.name for pool in fleet.pools]
    for outage in outages:
        if outage.pool not in names:
            raise BadInput(f"--kill {outage.pool}: fleet '{fleet.name}' has {', '.join(names)}")
        if not 0 <= outage.at_s < span_s:
            raise BadInput(
                f"--kill {outage.pool}@{outage.at_s:g}: the traffic lasts {span_s:,.0f} s; "
                "name an earlier moment, or more --requests"
            )


class _Clocked:
    """Requests that come by the clock, whatever becomes of those before."""

    def __init__(self, simulator: FleetSimulator, traffic: Traffic):
        self.simulator = simulator
        self._left = traffic.requests()
        self._next = next(self._left, None)

    def advance(self, until: float) -> None:
        while self._next is not None and self._next.arrival_s <= until:
            self.simulator.advance(self._next.arrival_s)
            self.simulator.send(self._next)
            self._next = next(self._left, None)
        self.simulator.advance(until)


def run(catalog: Catalog, case: SimulatedCase, traffic: Traffic | ClosedTraffic, tables: Tables | None = None) -> Run:
    checked_outages(case.outages, case.fleet, traffic.span_s)
    tally = _Tally(traffic, case.fleet)
    simulator = FleetSimulator(
        catalog, case.fleet, case.policy, case.seed, tell=tally.add, knows_lengths=case.knows_lengths, tables=tables,
        prefixes=isinstance(traffic, ClosedTraffic) or traffic.prefixes is not None,
    )  # fmt: skip
    if case.sure is not None:
        _slow_down(catalog, simulator, case.fleet, case.sure)
    watch = _Watch(simulator)
    if isinstance(traffic, Traffic):
        since = float(traffic.arrival_s[int(len(traffic) * WARM_UP)]) if traffic.steady else 0.0
        handed = _play(_Clocked(simulator, traffic), traffic, case.outages, watch, since)
        return _result(case, traffic, simulator, tally, watch, since, handed, [])
    others = traffic.others.requests() if traffic.others is not None else iter(())
    loop = ClosedLoop(simulator, traffic.loads, traffic.ramp_s, traffic.seed, others)
    hear = tally.add

    def tell(answer: SimulatedAnswer) -> None:
        hear(answer)
        loop.ended(answer)

    simulator.tell = tell
    handed = _play(loop, traffic, case.outages, watch, traffic.since_s)
    beside = (np.array(tally.kind) >= len(traffic.loads)) & (np.array(tally.at) >= traffic.since_s)
    sessions_results = _sessions_result(loop, case.fleet, traffic, float(np.array(tally.usd)[beside].sum()))
    return _result(case, traffic, simulator, tally, watch, traffic.since_s, handed, sessions_results)


def _slow_down(catalog: Catalog, simulator: FleetSimulator, fleet: Fleet, sure: float) -> None:
    """Steps as plans count with them that are so sure, and a gateway that has learnt how slow they are."""
    for live in simulator.live.pools:
        deployment = service_of(catalog, live.pool) or deployment_of(catalog, live.pool)
        assert deployment is not None, "the simulator has refused it"
        factor = steps_when_sure(deployment, *typical(fleet, live.pool), sure)
        live.start_at(factor, 0.0)
        for replica in live.replicas:
            simulator.engines[replica.key].slower = factor


def _play(
    sender: _Clocked | ClosedLoop, traffic: Traffic | ClosedTraffic, outages: Sequence[Outage], watch: _Watch,
    since: float,
) -> list[int]:  # fmt: skip
    """Requests and outages by the clock; of each outage, how many requests were handed over."""
    simulator, last = sender.simulator, traffic.span_s
    looks = {*(last * point / _POINTS for point in range(1, _POINTS + 1)), since}
    events = [_Event(at, lambda: watch.sample(simulator.now)) for at in looks if at > 0.0 or traffic.steady]
    pools = {pool.name: pool for pool in simulator.live.pools}
    handed = [0] * len(outages)
    for number, outage in enumerate(outages):
        events.append(_Event(outage.at_s, _failing(simulator, pools[outage.pool], handed, number)))
        if outage.until_s < last:
            events.append(_Event(outage.until_s, _restoring(simulator, pools[outage.pool])))
    for event in sorted(events, key=lambda event: event.at_s):
        sender.advance(event.at_s)
        event.what()
    if isinstance(sender, _Clocked):
        sender.advance(math.inf)
    return handed


def _failing(simulator: FleetSimulator, pool: LivePool, handed: list[int], number: int) -> Callable[[], None]:
    def fail() -> None:
        handed[number] = simulator.fail(pool.replicas)

    return fail


def _restoring(simulator: FleetSimulator, pool: LivePool) -> Callable[[], None]:
    return lambda: simulator.restore(pool.replicas)


def _result(
    case: SimulatedCase, traffic: Traffic | ClosedTraffic, simulator: FleetSimulator, tally: _Tally, watch: _Watch,
    since: float, handed: list[int], sessions: list[SessionsResult],
) -> Run:  # fmt: skip
    fleet, last = case.fleet, traffic.span_s
    at, kind, pool = np.array(tally.at), np.array(tally.kind), np.array(tally.pool)
    ttft, tpot, finish = np.array(tally.ttft), np.array(tally.tpot), np.array(tally.finish)
    inputs, outputs = np.array(tally.inputs), np.array(tally.outputs)
    measured = at >= since
    served = pool >= 0
    targets = {served_class.name: (served_class.ttft, served_class.tpot) for served_class in fleet.classes}
    good = served.copy()
    classes = []
    for number, (name, _) in enumerate(traffic.classes):
        mine = kind == number
        ttft_target, tpot_target = targets.get(name or "", (None, None))
        if ttft_target:
            good &= ~mine | (ttft <= ttft_target.seconds)
        if tpot_target:
            good &= ~mine | np.isnan(tpot) | (tpot <= tpot_target.seconds)
        counted = mine & measured
        count = int(counted.sum())
        classes.append(
            ClassResult(
                name=name,
                requests=count,
                refused=int((counted & ~served).sum()),
                ttft_s=latency_of(ttft[counted], ttft_target),
                tpot_s=latency_of(tpot[counted], tpot_target),
                finish_s=latency_of(finish[counted], None),
                within=float(good[counted].mean()) if count else 0.0,
            )
        )
    span_s = max(last - since, 1e-9)
    tokens, good_tokens = (int((inputs + outputs)[measured & some].sum()) for some in (served, good))
    usd = fleet.usd_per_hour * span_s / 3600.0
    course = watch.course()
    refused = int((measured & ~served).sum())
    return Run(
        label=case.label,
        policy=case.policy,
        load=case.load,
        seed=case.seed,
        knows_lengths=case.knows_lengths,
        requests=int(measured.sum()),
        refused=refused,
        measured_s=span_s,
        filled_s=since if traffic.steady else None,
        requests_per_s=float(measured.sum()) / span_s,
        usd_per_hour=fleet.usd_per_hour,
        usd_per_million_tokens=1e6 * usd / tokens if tokens else None,
        usd_per_million_good_tokens=1e6 * usd / good_tokens if good_tokens else None,
        within=float(good[measured].mean()) if measured.any() else 0.0,
        good_requests_per_s=float((good & measured).sum()) / span_s,
        good_output_tokens_per_s=float(outputs[good & measured].sum()) / span_s,
        prefix_hit_rate=simulator.hit_rate,
        loaded_shares=simulator.loaded_shares,
        classes=classes,
        pools=[_pool_result(number, simulator, traffic, course, since, kind[measured & (pool == number)])
               for number in range(len(fleet.pools))],
        course=course,
        outages=[_outage(outage, count, at, served, good) for outage, count in zip(case.outages, handed, strict=True)],
        unsteady=_unsteady(case, traffic, watch, refused, int(measured.sum()), at + finish, since),
        sessions=sessions,
    )  # fmt: skip


def _pool_result(
    number: int, simulator: FleetSimulator, traffic: Traffic | ClosedTraffic, course: Course, since: float, kinds: Array
) -> PoolResult:
    live = simulator.live.pools[number]
    seen = course.pools[live.name]
    counted = np.array(course.at_s) > since
    spans = np.diff(course.at_s, prepend=0.0)[counted]

    def mean(values: Sequence[float]) -> float:
        return float(np.average(np.array(values)[counted], weights=spans)) if counted.any() else 0.0

    by_kind = Counter(kinds.tolist())
    engines = [simulator.engines[replica.key] for replica in live.replicas]
    return PoolResult(
        name=live.name,
        replicas=len(live.replicas),
        usd_per_hour=live.pool.gpus * live.pool.usd_per_gpu_hour,
        requests={str(name): by_kind[kind] for kind, (name, _) in enumerate(traffic.classes) if by_kind[kind]},
        utilisation=mean(seen.busy),
        mean_in_flight=mean([a + b for a, b in zip(seen.running, seen.waiting, strict=True)]),
        mean_waiting=mean(seen.waiting),
        most_waiting=max(seen.waiting, default=0),
        preemptions=sum(engine.preemptions for engine in engines),
    )


def latency_of(seconds: Array, target: Target | None) -> Latency:
    """Of those that are numbers; a request that was turned away took for ever."""
    known = np.sort(seconds[~np.isnan(seconds)])

    def at(share: float) -> float | None:
        if not len(known):
            return None
        value = float(known[min(math.ceil(share * len(known)) - 1, len(known) - 1)])
        return value if math.isfinite(value) else None

    mean = float(known.mean()) if len(known) and math.isfinite(known[-1]) else None
    reached = at(target.percentile) if target else None
    holds = None if target is None or not len(known) else reached is not None and reached <= target.seconds
    p50, p90, p95, p99 = map(at, _PERCENTILES)
    return Latency(mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, target=target, at_target=reached, holds=holds)


def _outage(outage: Outage, handed: int, at: Array, served: _Flags, good: _Flags) -> OutageResult:
    during = (at >= outage.at_s) & (at < outage.until_s)

    def kept(some: _Flags) -> float | None:
        return float(good[some].mean()) if some.any() else None

    return OutageResult(
        pool=outage.pool,
        at_s=outage.at_s,
        until_s=outage.until_s if math.isfinite(outage.until_s) else None,
        handed_over=handed,
        refused=int((during & ~served).sum()),
        before=kept(at < outage.at_s),
        during=kept(during),
        after=kept(at >= outage.until_s),
    )


def _unsteady(
    case: SimulatedCase, traffic: Traffic | ClosedTraffic, watch: _Watch, refused: int, measured: int, ends: Array,
    since: float,
) -> str | None:  # fmt: skip
    """Where more comes than goes, percentiles say how long somebody looked, and nothing about the fleet."""
    # Sessions wait for their answers: however slow a fleet is, no more comes than goes.
    if not isinstance(traffic, Traffic) or not traffic.steady or case.outages:
        return None
    last, middle = watch.in_system[-1], watch.in_system[len(watch.in_system) * 3 // 5]
    grows = last > _GROWN * middle + _SLACK + 4.0 * math.sqrt(middle)
    if not grows and refused <= _FEW * measured:
        return None
    ended = int(((ends > since) & (ends <= traffic.span_s)).sum())
    rate = measured / max(traffic.span_s - since, 1e-9)
    # While requests came, or until the last of those that were let in was through.
    through = ends[np.isfinite(ends)]
    carried = max(ended / max(traffic.span_s - since, 1e-9), len(through) / float(through.max(initial=1e-9)))
    signs = []
    if refused > _FEW * measured:
        signs.append(f"{refused / measured:.1%} of requests were turned away")
    if grows:
        signs.append(f"{middle:,} requests in the system became {last:,}")
    room = f"about {carried:.3g} of {rate:.3g} requests/s are carried: --load {0.95 * case.load * carried / rate:.2g}"
    return f"no steady state: {' and '.join(signs)}; {room} or more replicas"


def _sessions_result(loop: ClosedLoop, fleet: Fleet, traffic: ClosedTraffic, others_usd: float) -> list[SessionsResult]:
    """`others_usd`: attributed to requests that are of no session."""
    since, until = traffic.since_s, traffic.span_s
    columns = loop.columns
    asked, ended, ttft = np.array(columns.asked_s), np.array(columns.ended_s), np.array(columns.ttft_s)
    kind, turn, usd = np.array(columns.load), np.array(columns.turn), np.array(columns.usd)
    inputs, cached, known = (
        np.array(column) for column in (columns.input_tokens, columns.cached_tokens, columns.known_tokens)
    )
    in_window = (ended > since) & (ended <= until)
    bill = fleet.usd_per_hour * (until - since) / 3600.0
    attributed = max(float(usd[in_window].sum()) + others_usd, 1e-12)
    sessions_results = []
    for number, load in enumerate(loop.loads):
        mine = in_window & (kind == number)
        count = int(mine.sum())
        took = ended[mine] - asked[mine]
        open_s = sum(until - max(at, since) for which, at in loop.waiting() if which == number)
        outstanding_s = float(np.maximum(ended[mine] - np.maximum(asked[mine], since), 0.0).sum()) + open_s
        went_on = mine & (known > 0)
        part = bill * float(usd[mine].sum()) / attributed
        each = part / count * load.turns if count else None
        sessions_results.append(
            SessionsResult(
                name=load.class_name,
                live=load.live,
                turns_per_s=count / (until - since),
                mean_turn_s=outstanding_s / max(count, 1),
                turn_s=latency_of(took, None),
                hit_rate=float(cached[mine].sum() / max(inputs[mine].sum(), 1)),
                evicted=float((cached[went_on] < CACHED_LEAST * known[went_on]).mean()) if went_on.any() else 0.0,
                waiting=outstanding_s / (until - since),
                usd_per_session=each,
                usd_per_solved=each / load.success_rate if each is not None and load.success_rate else None,
                by_turn=_by_turn(turn[mine], ttft[mine], inputs[mine], cached[mine]),
            )
        )
    return sessions_results


def _by_turn(turn: Array, ttft_s: Array, inputs: Array, cached: Array) -> list[TurnResult]:
    turn_results = []
    for place, first in enumerate(_BY_TURN):
        last = _BY_TURN[place + 1] - 1 if place + 1 < len(_BY_TURN) else None
        mine = (turn >= first) & (turn <= (last or turn.max(initial=0)))
        if not mine.any():
            continue
        p50, p95 = np.quantile(ttft_s[mine], (0.5, 0.95))
        turn_results.append(
            TurnResult(
                first=first,
                last=last,
                turns=int(mine.sum()),
                ttft_p50_s=float(p50),
                ttft_p95_s=float(p95),
                hit_rate=float(cached[mine].sum() / inputs[mine].sum()),
            )
        )
    return turn_results
