"""The history of all workers as the page of operators draws it: rows added up, percentiles told from their bins."""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from crosstie.core.fleet import Fleet
from crosstie.core.workload import Target
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.service.history import (
    BINS,
    COLUMNS,
    COUNTS,
    GAUGES,
    GROWTH,
    MINUTE,
    SHORT_S,
    SHORTEST_S,
    TPOT,
    TTFT,
    WINDOWS,
    Rows,
    SeriesRows,
)
from crosstie_gateway.service.worker_link import HistoryAnswer

# Of classes without a target.
_USUAL_PERCENTILE = 0.95


def _of_workers(series: list[SeriesRows], count: int, columns: int) -> dict[tuple[str, str], list[Rows]]:
    """Of each series, the rows of every worker, as many as were asked for."""
    of_workers: dict[tuple[str, str], list[Rows]] = {}
    for part in series:
        rows = np.frombuffer(part.rows, np.float32).reshape(-1, columns)
        whole = np.zeros((count, columns), np.float32)
        whole[count - len(rows) :] = rows
        of_workers.setdefault((part.pool, part.class_name), []).append(whole)
    return of_workers


def _points(rows: Rows, step: int) -> Rows:
    points: Rows = rows.reshape(-1, step, rows.shape[1]).sum(axis=1)
    return points


def _percentile(target: Target | None) -> float:
    return target.percentile if target is not None else _USUAL_PERCENTILE


def _told(column: NDArray[Any]) -> list[float]:
    told: list[float] = np.round(column.astype(float), 6).tolist()
    return told


def percentiles(bins: Rows, percentile: float) -> list[float | None]:
    """Of each row of bins; None where it has no value. Within a bin values are taken to lie evenly on a log scale."""
    up_to = np.cumsum(bins, axis=1)
    totals = up_to[:, -1]
    wanted = percentile * totals
    index = np.minimum((up_to < wanted[:, None]).sum(axis=1), BINS - 1)
    each = np.arange(len(bins))
    inside = np.maximum(bins[each, index], 1.0)
    part = (wanted - (up_to[each, index] - bins[each, index])) / inside
    seconds = SHORTEST_S * GROWTH ** (index + part)
    return [float(f"{value:.3g}") if total else None for value, total in zip(seconds, totals, strict=True)]


def _request_series(answers: Sequence[HistoryAnswer], count: int, step: int, fleet: Fleet) -> list[dict[str, Any]]:
    """By pool and class."""
    parts, classes = (
        list(chain(*[answer.requests for answer in answers])),
        {served.name: served for served in fleet.classes},
    )
    said = []
    for (pool, name), workers in sorted(_of_workers(parts, count, COLUMNS).items()):
        rows = _points(np.sum(workers, axis=0, dtype=np.float32), step)
        asked = classes.get(name)
        ttft_at, tpot_at = (_percentile(asked.ttft), _percentile(asked.tpot)) if asked else (_USUAL_PERCENTILE,) * 2
        said.append({
            "pool": pool, "class": name, **{what: _told(rows[:, n]) for n, what in enumerate(COUNTS)},
            "ttft_s": percentiles(rows[:, TTFT:TPOT], ttft_at), "tpot_s": percentiles(rows[:, TPOT:], tpot_at),
        })  # fmt: skip
    return said


def _pool_series(answers: Sequence[HistoryAnswer], count: int, step: int) -> list[dict[str, Any]]:
    """By pool, and under no name for the gateway: means of requests in flight and queued, dollars (each worker counts
    the whole pool), and how often it was looked at."""
    parts, said = list(chain(*[answer.pools for answer in answers])), []
    for (pool, _), workers in _of_workers(parts, count, len(GAUGES)).items():
        summed, whole = _points(np.sum(workers, axis=0, dtype=np.float32), step), _points(np.max(workers, axis=0), step)
        in_flight, queued = [_told(summed[:, n] / np.maximum(whole[:, 3], 1.0)) for n in (0, 1)]
        looks = whole[:, 3].astype(int).tolist()
        said.append({"pool": pool, "in_flight": in_flight, "queued": queued, "usd": _told(whole[:, 2]), "looks": looks})
    return said


def last_minute(answers: Sequence[HistoryAnswer], gateway: Gateway) -> dict[str, Any]:
    """One number for the minute, of each series."""

    def alone(series: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {name: value[0] if isinstance(value, list) else value for name, value in said.items()} for said in series
        ]

    pools = alone(_pool_series(answers, MINUTE, MINUTE))
    looks = max((said["looks"] for said in pools), default=0)
    return {
        # Less where the gateway has just begun; in the fleet's seconds.
        "seconds": looks * SHORT_S * gateway.speed,
        "series": alone(_request_series(answers, MINUTE, MINUTE, gateway.live.fleet)),
        "pools": pools,
    }


def history_document(answers: Sequence[HistoryAnswer], window: str, end: int, gateway: Gateway) -> dict[str, Any]:
    """`end`: the point that goes on, which is not told."""
    (width_s, step, points), fleet = WINDOWS[window], gateway.live.fleet
    return {
        "window": window,
        "point_s": width_s * step,
        "points": points,
        "ends_at": end * width_s * step,
        "speed": gateway.speed,
        "classes": [
            {"class": served.name, "model": served.model, "ttft": served.ttft, "tpot": served.tpot}
            for served in fleet.classes
        ],
        "usual_percentile": _USUAL_PERCENTILE,
        "bought": [pool.name for pool in fleet.pools if pool.token_price is not None],
        "series": _request_series(answers, points * step, step, fleet),
        "pools": _pool_series(answers, points * step, step),
    }
