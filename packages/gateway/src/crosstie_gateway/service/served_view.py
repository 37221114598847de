"""What a gateway has served, by pool, since it started and today (UTC), and what teams have spent of their budgets."""

from time import time
from typing import TypeVar

import msgspec

from crosstie_gateway.gateway.gateway import Gateway
from crosstie_gateway.ledger.usage import day_end

Row = TypeVar("Row", bound=msgspec.Struct)


class Totals(msgspec.Struct):
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    charged_usd: float = 0.0
    faults: int = 0
    retries: int = 0
    resumed: int = 0

    def plus(self, other: "Totals", sign: int = 1) -> "Totals":
        both = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Totals(*[own + sign * more for own, more in both])


class ServedView(msgspec.Struct, kw_only=True):
    pool: str
    usd_per_hour: float
    # By the token: what it cost is what was charged.
    is_bought: bool
    total: Totals
    today: Totals
    # Since midnight (UTC), or since the gateway started.
    today_s: float
    # What the pool cost in that time, busy or not.
    today_usd: float = 0.0

    def price(self) -> None:
        """Seconds are the gateway's own, which may run faster than the clock where replicas are emulated."""
        self.today_usd = self.today.charged_usd if self.is_bought else self.usd_per_hour * self.today_s / 3600.0


class TeamView(msgspec.Struct):
    team: str
    # Since this gateway started.
    requests: int
    tokens: int
    usd: float
    # 0: no budget. What was spent of one is known only where there is one.
    usd_per_day: float
    usd_per_month: float
    today_usd: float
    month_usd: float
    # Ended here and not yet in the store, which the two above do not have.
    unwritten_usd: float


class TargetView(msgspec.Struct):
    class_name: str = msgspec.field(name="class")
    target: str
    kept: int
    missed: int


class SessionsView(msgspec.Struct, kw_only=True):
    """Of one class. Requests that wait are all of the class; turns are those after a session's first."""

    class_name: str = msgspec.field(name="class")
    answered: int = 0
    warm: int = 0
    waiting: int = 0
    begun: int = 0
    home: int = 0
    moved: int = 0
    evicted: int = 0
    usd: float = 0.0


def totals(gateway: Gateway) -> dict[str, Totals]:
    """By pool, since the gateway started."""
    metrics, by_pool = gateway.metrics, {pool.name: Totals() for pool in gateway.live.fleet.pools}
    for (pool, *_), count in metrics.requests.items():
        if pool in by_pool:
            by_pool[pool].requests += count
    for name, done in by_pool.items():
        done.faults, done.retries, done.resumed = metrics.faults[name], metrics.retries[name], metrics.resumed[name]
        seen = metrics.pools.get(name)
        if seen is not None:
            done.input_tokens, done.output_tokens = seen.input_tokens, seen.output_tokens
            done.charged_usd = seen.charged_usd
    return by_pool


class DayCounts:
    """Remembers what had been served when the day (UTC) began."""

    def __init__(self, gateway: Gateway):
        self._gateway = gateway
        self._before: dict[str, Totals] = {}
        self._since = gateway.now()
        self._wait()

    def _wait(self) -> None:
        at = time()
        self._timer = self._gateway.loop.call_later(max(day_end(at) - at, 1.0), self.begin_day)

    def begin_day(self) -> None:
        self._before, self._since = totals(self._gateway), self._gateway.now()
        self._wait()

    def close(self) -> None:
        self._timer.cancel()

    def views(self) -> list[ServedView]:
        by_pool, today_s = totals(self._gateway), self._gateway.now() - self._since
        return [
            ServedView(
                pool=pool.name,
                usd_per_hour=pool.gpus * pool.usd_per_gpu_hour,
                is_bought=pool.token_price is not None,
                total=by_pool[pool.name],
                today=by_pool[pool.name].plus(self._before.get(pool.name, Totals()), -1),
                today_s=today_s,
            )
            for pool in self._gateway.live.fleet.pools
        ]


def team_views(gateway: Gateway) -> list[TeamView]:
    guard = gateway.context.guard
    return [] if guard is None else [
        TeamView(
            team.name, team.requests, team.tokens, team.usd, team.usd_per_day, team.usd_per_month, team.today_usd,
            team.month_usd, team.own_usd,
        )
        for team in guard.teams
    ]  # fmt: skip


def target_views(gateway: Gateway) -> list[TargetView]:
    counts = gateway.metrics.targets
    named = dict.fromkeys((name, target) for name, target, _ in counts)
    return [TargetView(name, target, counts[name, target, True], counts[name, target, False]) for name, target in named]


def session_views(gateway: Gateway) -> list[SessionsView]:
    sessions, waiting = gateway.live.sessions, gateway.waiting.by_class()
    counts = sessions.counts()
    return [
        SessionsView(
            class_name=name, waiting=waiting.get(name, 0), begun=counts[name].begun, usd=counts[name].usd, **now,
            **counts[name].turns,
        )
        for name, now in sessions.by_state().items()
        if counts[name].begun
    ]  # fmt: skip


def add_rows(rows: list[Row], others: list[Row], keys: int) -> None:
    """What another worker counted: of rows that agree in so many first fields the others add up."""
    known = {msgspec.structs.astuple(row)[:keys]: row for row in rows}
    for other in others:
        own = known.get(msgspec.structs.astuple(other)[:keys])
        if own is None:
            rows.append(other)
            continue
        for name in other.__struct_fields__[keys:]:
            setattr(own, name, getattr(own, name) + getattr(other, name))
