"""What became of sessions in a closed loop, by class: turn latency, hits by turn, and what a session costs."""

from collections.abc import Callable

import numpy as np

from crosstie.core.fleet import Fleet
from crosstie.decide.plan.run_result import Latency, SessionsResult, TurnResult
from crosstie.decide.plan.traffic import ClosedTraffic
from crosstie.perf.hardware import Array
from crosstie.route.sessions import CACHED_LEAST
from crosstie.sim.sessions import ClosedLoop

_BY_TURN = (1, 2, 6, 16, 41)


def sessions_result(
    loop: ClosedLoop, fleet: Fleet, traffic: ClosedTraffic, others_usd: float,
    latency_of: Callable[[Array, None], Latency],
) -> list[SessionsResult]:  # fmt: skip
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
