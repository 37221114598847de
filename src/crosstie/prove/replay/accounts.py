"""A replay with what it cost: as the gateway attributes it, and as the whole fleet's bill over what was good for it."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass

from crosstie.core.fleet import Fleet
from crosstie.core.histogram import samples_of
from crosstie.core.progress import OnProgress, no_progress
from crosstie.prove.replay.outcomes import ReplayResult
from crosstie.prove.replay.replay import Replay, RequestOutcome
from crosstie.prove.replay.traffic import TimedRequest
from crosstie.wire.address import Address
from crosstie.wire.fetch import fetch_once
from crosstie.wire.files import allow_many_connections
from crosstie.wire.loops import run_on_loop

_MILLION, _SECONDS_PER_HOUR = 1e6, 3600.0


@dataclass(frozen=True)
class Spent:
    """What a gateway has attributed to each pool: USD and tokens."""

    usd: dict[str, float]
    tokens: dict[str, float]

    @classmethod
    def read(cls, page: str) -> "Spent":
        """From its /metrics."""
        usd: dict[str, float] = {}
        tokens: dict[str, float] = {}
        for name, labels, value in samples_of(page):
            counts = {"crosstie_usd_total": usd, "crosstie_tokens_total": tokens}.get(name)
            if counts is not None:
                pool = labels.get("pool", "")
                counts[pool] = counts.get(pool, 0.0) + value
        return cls(usd, tokens)

    def since(self, before: "Spent") -> "Spent":
        return Spent(
            {pool: usd - before.usd.get(pool, 0.0) for pool, usd in self.usd.items()},
            {pool: count - before.tokens.get(pool, 0.0) for pool, count in self.tokens.items()},
        )

    @property
    def usd_per_million(self) -> float:
        """Attributed: each request pays for its share of the replica that served it."""
        tokens = sum(self.tokens.values())
        return sum(self.usd.values()) / tokens * _MILLION if tokens else math.nan


def fleet_usd_per_good_million(fleet: Fleet, result: ReplayResult) -> float:
    """The whole fleet's bill for as long as requests came, over the tokens that were served within their targets."""
    if not result.good_tokens:
        return math.inf
    return fleet.usd_per_hour * result.seconds / _SECONDS_PER_HOUR / result.good_tokens * _MILLION


def replayed(
    url: str,
    model: str,
    requests: Sequence[TimedRequest],
    *,
    speed: float = 1.0,
    api_key: str | None = None,
    on_progress: OnProgress = no_progress,
) -> tuple[list[RequestOutcome], Spent]:
    """Replays on an event loop of its own. What was spent is empty where the server is no Crosstie gateway."""

    allow_many_connections()

    async def run() -> tuple[list[RequestOutcome], Spent]:
        loop = asyncio.get_running_loop()
        before = await spent_so_far(url, api_key)
        outcomes = await Replay(loop, url, model, speed=speed, api_key=api_key, on_progress=on_progress).run(requests)
        return outcomes, (await spent_so_far(url, api_key)).since(before)

    return run_on_loop(run())


async def spent_so_far(url: str, api_key: str | None = None) -> Spent:
    """Empty where the key may not see it, too."""
    at = Address(url)
    headers = [(b"authorization", f"Bearer {api_key}".encode())] if api_key else []
    try:
        answer = await fetch_once(at, "GET", f"{at.root}/metrics", headers=headers)
    except OSError:
        # Whether anybody answers at all is for the replay to find out.
        return Spent({}, {})
    return Spent.read(answer.body.decode("utf-8", "replace")) if answer.status == 200 else Spent({}, {})
