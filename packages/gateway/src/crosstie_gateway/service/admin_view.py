"""What administrators see: pools and backends as they are now, and the latest decisions, of one worker or of all.

A decision costs one entry in a bounded queue, without body, prompt or key, and is put into words on request.
"""

from collections import deque
from itertools import islice
from time import time
from typing import Literal

import msgspec

from crosstie.core.fleet import Fleet
from crosstie.route.ask import Ask
from crosstie.route.decision import Decision
from crosstie.route.live import LivePool, Replica
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.record import RequestRecord
from crosstie_gateway.service.history import ROWS, seen_times
from crosstie_gateway.service.served_view import (
    DayCounts,
    ServedView,
    SessionsView,
    TargetView,
    TeamView,
    add_rows,
    session_views,
    target_views,
    team_views,
)

MOST_DECISIONS = 500
# Decisions of each short slot of the history whose words are kept as long as the slot, with their alternatives.
_SAMPLED = 4
_PRIORITIES = ("low", "normal", "high")
Source = Literal["file", "admin"]


class ReportedView(msgspec.Struct):
    running: float
    waiting: float
    kv_used_fraction: float | None
    age_s: float


class BackendView(msgspec.Struct, kw_only=True):
    backend: str
    source: Source = msgspec.field(name="from")
    up: bool
    why_down: str
    draining: bool
    breaker: str
    in_flight: int
    connections: int
    share: float
    ttft_correction: float
    tpot_correction: float
    reported: ReportedView | None
    # Of all workers: up, down, draining or drained.
    state: str = ""
    # Of a disaggregated pool: prefill or decode.
    side: str = ""
    # The engine as far as it is known; "emulated" is none: no GPU runs there.
    engine: str = ""
    # Of a model that shares its replica with others: resident, loading, leaving, asleep or failed.
    residency: str = ""


class PoolView(msgspec.Struct, kw_only=True):
    pool: str
    model: str
    accelerator: str | None
    source: Source = msgspec.field(name="from")
    weight: float | None
    max_in_flight: int
    usd_per_gpu_hour: float
    draining: bool
    backends: list[BackendView]
    # Of all its backends, in all workers.
    in_flight: int = 0
    state: str = ""


class LeavingView(msgspec.Struct):
    """A backend that was removed, and still answers."""

    pool: str
    backend: str
    in_flight: int


class FleetView(msgspec.Struct, kw_only=True):
    fleet: str
    policy: str
    queued: int
    exchanges: int
    pools: list[PoolView]
    leaving: list[LeavingView]
    processes: int = 1
    # Backends that are emulated, and how many times as fast as the clock the gateway's own time runs then.
    emulated: int = 0
    speed: float = 1.0
    served: list[ServedView] = []
    teams: list[TeamView] = []
    targets: list[TargetView] = []
    sessions: list[SessionsView] = []
    # Before any decision, by code.
    refused: dict[str, int] = {}


def fleet_view(gateway: Gateway, file: Fleet, day: DayCounts | None = None) -> FleetView:
    """This worker's view. `file`: the fleet of the file, which tells what was added."""
    live = gateway.live
    of_file = {pool.name: {*pool.backends, *pool.led_backends} for pool in file.pools}
    return FleetView(
        fleet=live.fleet.name,
        policy=live.fleet.policy,
        queued=len(gateway.waiting),
        exchanges=len(gateway.exchanges),
        pools=[_pool_view(gateway, pool, of_file.get(pool.name)) for pool in live.pools],
        leaving=[LeavingView(left.pool.name, left.key, left.in_flight) for left in live.leaving if left.in_flight],
        speed=gateway.speed,
        served=day.views() if day is not None else [],
        teams=team_views(gateway),
        targets=target_views(gateway),
        sessions=session_views(gateway),
        refused=dict(gateway.metrics.refused),
    )


def _pool_view(gateway: Gateway, live: LivePool, of_file: set[str] | None) -> PoolView:
    pool, now = live.pool, gateway.now()
    return PoolView(
        pool=pool.name,
        model=pool.model,
        accelerator=pool.accelerator,
        source="admin" if of_file is None else "file",
        weight=pool.weight,
        max_in_flight=pool.max_in_flight,
        usd_per_gpu_hour=pool.usd_per_gpu_hour,
        draining=live.draining,
        backends=[_backend_view(gateway, replica, "file" if replica.key in (of_file or ()) else "admin", now)
                  for replica in live.replicas + (live.prefill.replicas if live.prefill is not None else [])],
    )  # fmt: skip


def _backend_view(gateway: Gateway, replica: Replica, source: Source, now: float) -> BackendView:
    reported, backend = replica.reported, gateway.backends[replica.key]
    return BackendView(
        backend=replica.key,
        source=source,
        up=replica.up,
        why_down=replica.why_down,
        draining=replica.draining or replica.pool.draining,
        breaker=backend.breaker.state,
        in_flight=replica.in_flight,
        connections=backend.origin.connections,
        share=replica.share_at(now),
        ttft_correction=replica.ttft.factor(now),
        tpot_correction=replica.tpot.factor(now),
        reported=reported
        and ReportedView(
            reported.running, reported.waiting, reported.kv_used_fraction, (now - replica.reported_at) / gateway.speed
        ),
        side=replica.pool.side,
        engine=backend.engine,
        residency=replica.presence.state if replica.presence is not None else "",
    )


def merged(views: list[FleetView]) -> FleetView:
    """All workers' views in one: counts add up; a backend that one of them cannot reach is down."""
    first, *others = views
    known = {backend.backend: backend for pool in first.pools for backend in pool.backends}
    for other in others:
        first.queued += other.queued
        first.exchanges += other.exchanges
        first.leaving += other.leaving
        _add_counts(first, other)
        for theirs in (backend for pool in other.pools for backend in pool.backends):
            own = known.get(theirs.backend)
            if own is None:
                # A change is on its way there.
                continue
            own.in_flight += theirs.in_flight
            own.connections += theirs.connections
            own.engine = own.engine or theirs.engine
            if own.up and not theirs.up:
                own.up, own.why_down, own.breaker = False, theirs.why_down, theirs.breaker
    for pool in first.pools:
        for backend in pool.backends:
            if backend.draining:
                backend.state = "draining" if backend.in_flight else "drained"
            else:
                backend.state = "up" if backend.up else "down"
        states = {backend.state for backend in pool.backends}
        pool.in_flight = sum(backend.in_flight for backend in pool.backends)
        pool.state = states.pop() if len(states) == 1 else "draining" if pool.draining else "mixed"
    first.processes = len(views)
    first.emulated = sum(backend.engine == "emulated" for pool in first.pools for backend in pool.backends)
    for served in first.served:
        served.price()
    for team in first.teams:
        team.today_usd += team.unwritten_usd
        team.month_usd += team.unwritten_usd
    return first


def _add_counts(first: FleetView, other: FleetView) -> None:
    pools, teams = {served.pool: served for served in other.served}, {team.team: team for team in other.teams}
    for served in first.served:
        if (more := pools.get(served.pool)) is not None:
            served.total, served.today = served.total.plus(more.total), served.today.plus(more.today)
            served.today_s = max(served.today_s, more.today_s)
    for team in first.teams:
        if (too := teams.get(team.team)) is not None:
            team.requests += too.requests
            team.tokens += too.tokens
            team.usd += too.usd
            # All of them read these from one store.
            team.today_usd, team.month_usd = max(team.today_usd, too.today_usd), max(team.month_usd, too.month_usd)
            team.unwritten_usd += too.unwritten_usd
    add_rows(first.targets, other.targets, keys=2)
    add_rows(first.sessions, other.sessions, keys=1)
    for code, count in other.refused.items():
        first.refused[code] = first.refused.get(code, 0) + count


# Decisions


class PredictedView(msgspec.Struct):
    ttft_s: float
    tpot_s: float
    usd: float
    cached_tokens: float


class ConsideredView(msgspec.Struct):
    pool: str
    backend: str | None
    score: float | None
    dropped: str | None


class EndingView(msgspec.Struct):
    """What came of a request, in the fleet's seconds."""

    how: str
    output_tokens: int
    ttft_s: float | None
    tpot_s: float | None


class DecisionView(msgspec.Struct, kw_only=True, omit_defaults=True):
    at: float
    request_id: str
    model: str
    class_name: str | None = msgspec.field(name="class")
    priority: str
    input_tokens: int
    expected_output_tokens: int
    ttft_target_s: float | None
    tpot_target_s: float | None
    attempt: int
    outcome: str
    pool: str | None
    backend: str | None
    predicted: PredictedView | None
    meets_target: bool | None
    reason: str
    considered: list[ConsideredView]
    # Of those that are kept longer, once the request has ended.
    ended: EndingView | None = None


class RecentDecisions:
    def __init__(self, gateway: Gateway):
        # Of all that were ever taken, those from `taken - len` to `taken` are kept.
        self.taken, self._gateway = 0, gateway
        self._kept: deque[tuple[float, bytes, int, Ask, Decision]] = deque(maxlen=MOST_DECISIONS)
        # A few of each short slot, as long as there are slots; and those whose requests go on, by the request's id.
        self._sampled: deque[DecisionView] = deque(maxlen=_SAMPLED * ROWS)
        self._open: dict[bytes, DecisionView] = {}
        self._to_sample = _SAMPLED
        self.is_followed = False
        self._explain_if_wanted()
        gateway.context.on_decision = self._on_decision
        gateway.listeners.append(self._on_record)

    def _on_decision(self, request_id: bytes, attempts: int, ask: Ask, decision: Decision) -> None:
        self.taken += 1
        entry = (time(), request_id, attempts, ask, decision)
        self._kept.append(entry)
        if self._to_sample > 0:
            self._to_sample -= 1
            self._open[request_id] = row = _decision_view(*entry)
            self._sampled.append(row)
            self._explain_if_wanted()

    def _on_record(self, record: RequestRecord) -> None:
        row = self._open.pop(record.request_id, None)
        if row is not None:
            row.ended = EndingView(record.how, record.output_tokens, *seen_times(record, self._gateway.speed))

    def sample(self) -> None:
        """A short slot of the history begins."""
        self._to_sample = _SAMPLED
        self._explain_if_wanted()

    def follow(self, *, wanted: bool) -> None:
        """Whether somebody wants the alternatives of every decision."""
        self.is_followed = wanted
        self._explain_if_wanted()

    def _explain_if_wanted(self) -> None:
        self._gateway.explaining = self.is_followed or self._to_sample > 0

    def of_moment(self, since: float, until: float, most: int) -> list[DecisionView]:
        """Sampled ones of that time, oldest first: of more than `most`, from all of it."""
        return spread([row for row in self._sampled if since <= row.at < until], most)

    def rows(self, after: int, most: int) -> list[DecisionView]:
        """Those taken after the first `after` ones, oldest first; of more than `most`, the latest."""
        wanted = min(max(self.taken - after, 0), len(self._kept), most)
        return [_decision_view(*entry) for entry in islice(self._kept, len(self._kept) - wanted, None)]

    def why(self, request_id: str) -> list[DecisionView]:
        """The latest decision for that request, if it is kept, with each pool's score now."""
        wanted = request_id.encode("latin-1", "replace")
        for at, name, attempts, ask, decision in reversed(self._kept):
            if name == wanted:
                row = _decision_view(at, name, attempts, ask, decision)
                now = self._gateway.router.decide(ask, self._gateway.now(), explain=True)
                row.considered = _considered_views(now)
                return [row]
        return []


def spread(rows: list[DecisionView], most: int) -> list[DecisionView]:
    return rows[:: max(-(-len(rows) // most), 1)]


def _considered_views(decision: Decision) -> list[ConsideredView]:
    return [ConsideredView(pool.pool, pool.backend, pool.score, pool.dropped) for pool in decision.considered]


def _decision_view(at: float, request_id: bytes, attempts: int, ask: Ask, decision: Decision) -> DecisionView:
    replica, predicted = decision.replica, decision.prediction
    return DecisionView(
        at=round(at, 3),
        request_id=request_id.decode("latin-1"),
        model=ask.model,
        class_name=ask.class_name,
        priority=_PRIORITIES[ask.priority],
        input_tokens=round(ask.input_tokens),
        expected_output_tokens=round(ask.output_tokens),
        ttft_target_s=ask.ttft_s,
        tpot_target_s=ask.tpot_s,
        # Backends that had failed it before.
        attempt=attempts + 1,
        outcome=decision.outcome,
        pool=replica.pool.name if replica else None,
        backend=replica.key if replica else None,
        predicted=None
        if predicted is None
        else PredictedView(predicted.ttft_s, predicted.tpot_s, predicted.predicted_usd, predicted.cached_tokens),
        meets_target=decision.meets,
        reason=decision.reason,
        considered=_considered_views(decision),
    )
