"""What the page of operators looks back on: each pool's requests of the last minutes and hours, by class.

Workers keep rows of numbers by slots of time that agree, so rows add up: 5 s for half an hour, and 2 min for twelve
hours. Bins of latency grow by 15%, so percentiles are within 7%. 0.5 MB for each pool and class.
"""

from collections.abc import Callable, Sequence
from math import log
from time import time
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from crosstie.core.fleet import Fleet
from crosstie.core.workload import Target
from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.gateway.record import RequestRecord

SHORT_S: Final = 5
# Short slots to a long one.
_PER_LONG: Final = 24
LONG_S: Final = SHORT_S * _PER_LONG
ROWS: Final = 360
# Short slots of a minute.
MINUTE: Final = 60 // SHORT_S
# How far back the page looks: the width of a slot, slots to a point, points.
WINDOWS: Final = {"5m": (SHORT_S, 1, 60), "30m": (SHORT_S, 4, 90), "12h": (LONG_S, 3, 120)}
# Pools times classes that are told apart; the fleet file bounds them, and it may be read again and again.
_MOST_SERIES: Final = 64
# Latencies: bins per decade from the shortest, in the fleet's seconds.
SHORTEST_S, _PER_DECADE, BINS = 0.0005, 16, 80
GROWTH: Final = 10.0 ** (1.0 / _PER_DECADE)
_BIN: Final = _PER_DECADE / log(10.0)
# Columns of a row of requests: these, the bins of TTFT, the bins of TPOT.
COUNTS: Final = ("requests", "unserved", "input_tokens", "output_tokens", "cached_tokens", "charged_usd")
TTFT: Final = len(COUNTS)
TPOT: Final = TTFT + BINS
COLUMNS: Final = TPOT + BINS
# Columns of a row of a pool. The first two add up over workers; the others each worker has of the whole pool.
GAUGES: Final = ("in_flight", "queued", "usd", "looks")

Rows = NDArray[np.float32]


class SeriesRows(msgspec.Struct):
    """Rows of the last slots that have ended, oldest first, without those before the first that is not empty."""

    pool: str
    class_name: str
    rows: bytes


class _Ring:
    """The counts of now, and rings of rows for both widths of slots."""

    def __init__(self, columns: int):
        self.now = [0.0] * columns
        self._short: Rows = np.zeros((ROWS, columns), np.float32)
        self._long: Rows = np.zeros((ROWS, columns), np.float32)

    def turn(self, slot: int, begins: int) -> None:
        """What was counted is of `slot`; from now on it is of the slot `begins`."""
        self._short[slot % ROWS] = self.now
        self._long[slot // _PER_LONG % ROWS] += self._short[slot % ROWS]
        for gone in range(slot + 1, min(begins, slot + ROWS * _PER_LONG) + 1):
            self._short[gone % ROWS] = 0.0
            if gone % _PER_LONG == 0:
                self._long[gone // _PER_LONG % ROWS] = 0.0
        self.now = [0.0] * len(self.now)

    def rows(self, width_s: int, end: int, count: int) -> bytes:
        """Of the `count` slots of that width before the slot `end`."""
        ring = self._short if width_s == SHORT_S else self._long
        rows = ring[np.arange(end - count, end) % ROWS]
        full = rows.any(axis=1)
        return rows[int(full.argmax()) if full.any() else count :].tobytes()


class History:
    """Told of every request of this worker as it ends. `on_turn`: called as a short slot begins."""

    def __init__(self, gateway: Gateway, on_turn: Callable[[], None]):
        self._gateway, self._on_turn = gateway, on_turn
        self._requests: dict[tuple[str, str], _Ring] = {}
        self._pools: dict[str, _Ring] = {}
        self.slot = int(time() // SHORT_S)
        gateway.listeners.append(self._on_record)
        self._wait()

    def _wait(self) -> None:
        self._timer = self._gateway.loop.call_later((self.slot + 1) * SHORT_S - time() + 0.001, self._tick)

    def _tick(self) -> None:
        self.turn()
        self._wait()

    def close(self) -> None:
        self._timer.cancel()

    def _on_record(self, record: RequestRecord) -> None:
        key = (record.pool, record.class_name)
        ring = self._requests.get(key)
        if ring is None:
            if len(self._requests) >= _MOST_SERIES:
                key = ("", "")
            ring = self._requests.setdefault(key, _Ring(COLUMNS))
        now = ring.now
        now[0] += 1
        now[1] += record.how != "served"
        now[2] += record.input_tokens
        now[3] += record.output_tokens
        now[4] += record.cached_tokens
        now[5] += record.charged_usd
        ttft_s, tpot_s = seen_times(record, self._gateway.speed)
        if ttft_s is not None:
            now[TTFT + _bin(ttft_s)] += 1
        if tpot_s is not None:
            now[TPOT + _bin(tpot_s)] += 1

    def turn(self) -> None:
        """Ends the slots whose time is over."""
        begins = max(int(time() // SHORT_S), self.slot)
        if begins > self.slot:
            self._look()
            for ring in (*self._requests.values(), *self._pools.values()):
                ring.turn(self.slot, begins)
            self.slot = begins
            self._on_turn()

    def _look(self) -> None:
        """Notes what is in flight, queued and paid now."""
        gateway, hours = self._gateway, SHORT_S * self._gateway.speed / 3600.0
        costs = {pool.name: pool.gpus * pool.usd_per_gpu_hour for pool in gateway.live.fleet.pools}
        for name in ("", *costs):
            self._pools.setdefault(name, _Ring(len(GAUGES)))
        self._pools = {name: ring for name, ring in self._pools.items() if name in costs or not name}
        for pool in gateway.live.pools:
            self._pools[pool.pool.name].now[0] += sum(replica.in_flight for replica in pool.replicas)
        self._pools[""].now[1] = len(gateway.waiting)
        for name, ring in self._pools.items():
            ring.now[2:] = [costs.get(name, 0.0) * hours, 1.0]

    def requests(self, width_s: int, end: int, count: int) -> list[SeriesRows]:
        series = [SeriesRows(*key, ring.rows(width_s, end, count)) for key, ring in self._requests.items()]
        return [each for each in series if each.rows]

    def pools(self, width_s: int, end: int, count: int) -> list[SeriesRows]:
        return [SeriesRows(name, "", ring.rows(width_s, end, count)) for name, ring in self._pools.items()]


def seen_times(record: RequestRecord, speed: float) -> tuple[float | None, float | None]:
    """TTFT and TPOT of a request that was served, in the fleet's seconds."""
    if record.how != "served" or record.ttft_s is None:
        return None, None
    return record.ttft_s * speed, record.tpot_s(speed)


def _bin(seconds: float) -> int:
    return min(max(int(log(max(seconds, SHORTEST_S) / SHORTEST_S) * _BIN), 0), BINS - 1)


# As the page draws it: rows of all workers added up, percentiles told from their bins.

# Of classes without a target.
_USUAL_PERCENTILE = 0.95


def _of_workers(series: Sequence[SeriesRows], count: int, columns: int) -> dict[tuple[str, str], list[Rows]]:
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


def _request_series(rows_of: Sequence[SeriesRows], count: int, step: int, fleet: Fleet) -> list[dict[str, Any]]:
    """By pool and class."""
    classes = {served.name: served for served in fleet.classes}
    said = []
    for (pool, name), workers in sorted(_of_workers(rows_of, count, COLUMNS).items()):
        rows = _points(np.sum(workers, axis=0, dtype=np.float32), step)
        asked = classes.get(name)
        ttft_at, tpot_at = (_percentile(asked.ttft), _percentile(asked.tpot)) if asked else (_USUAL_PERCENTILE,) * 2
        said.append({
            "pool": pool, "class": name, **{what: _told(rows[:, n]) for n, what in enumerate(COUNTS)},
            "ttft_s": percentiles(rows[:, TTFT:TPOT], ttft_at), "tpot_s": percentiles(rows[:, TPOT:], tpot_at),
        })  # fmt: skip
    return said


def _pool_series(rows_of: Sequence[SeriesRows], count: int, step: int) -> list[dict[str, Any]]:
    """By pool, and under no name for the gateway: means of requests in flight and queued, dollars (each worker counts
    the whole pool), and how often it was looked at."""
    said = []
    for (pool, _), workers in _of_workers(rows_of, count, len(GAUGES)).items():
        summed, whole = _points(np.sum(workers, axis=0, dtype=np.float32), step), _points(np.max(workers, axis=0), step)
        in_flight, queued = [_told(summed[:, n] / np.maximum(whole[:, 3], 1.0)) for n in (0, 1)]
        looks = whole[:, 3].astype(int).tolist()
        said.append({"pool": pool, "in_flight": in_flight, "queued": queued, "usd": _told(whole[:, 2]), "looks": looks})
    return said


def last_minute(requests: Sequence[SeriesRows], pools: Sequence[SeriesRows], gateway: Gateway) -> dict[str, Any]:
    """One number for the minute, of each series."""

    def alone(series: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {name: value[0] if isinstance(value, list) else value for name, value in said.items()} for said in series
        ]

    looked = alone(_pool_series(pools, MINUTE, MINUTE))
    looks = max((said["looks"] for said in looked), default=0)
    return {
        # Less where the gateway has just begun; in the fleet's seconds.
        "seconds": looks * SHORT_S * gateway.speed,
        "series": alone(_request_series(requests, MINUTE, MINUTE, gateway.live.fleet)),
        "pools": looked,
    }


def history_document(
    requests: Sequence[SeriesRows], pools: Sequence[SeriesRows], window: str, end: int, gateway: Gateway
) -> dict[str, Any]:
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
        "series": _request_series(requests, points * step, step, fleet),
        "pools": _pool_series(pools, points * step, step),
    }
