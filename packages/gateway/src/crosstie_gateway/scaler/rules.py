"""What may be scaled and how far: supplies of replicas, each of one pool at one kind of price, limits and budgets."""

from typing import Annotated, Literal

import msgspec

# Reserved replicas are paid for whether they run or not; spot ones may be taken away.
PriceKind = Literal["reserved", "on-demand", "spot"]

_Count = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
_Usd = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Supply(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is scaled, such as a Deployment: replicas of a pool at one kind of price."""

    name: str
    pool: str
    kind: PriceKind = "on-demand"
    # None: the pool's.
    usd_per_gpu_hour: Annotated[float, msgspec.Meta(ge=0, le=1000)] | None = None
    # Floor, and the most that can be had.
    least: _Count = 0
    most: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    # From being asked for to serving; None: what the catalog says of such an engine.
    start_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] | None = None
    # Of its replicas, the share that is taken away in an hour, until that is learnt.
    lost_per_hour: _Share = 0.0
    # What is patched: deployments/NAME, leaderworkersets/NAME, statefulsets/NAME; empty: deployments and its name.
    target: str = ""
    # Its replicas' addresses, where supplies share a pool and no platform knows whose they are.
    backends: tuple[str, ...] = ()


class ScaleRules(msgspec.Struct, frozen=True, kw_only=True):
    supplies: tuple[Supply, ...]
    budget_usd_per_hour: _Usd | None = None
    budget_usd_per_day: _Usd | None = None
    # Of the traffic, the most that may depend on spot replicas.
    spot_share: _Share = 0.5
    # Of the requests, those that are to keep their targets.
    within: Annotated[float, msgspec.Meta(gt=0, lt=1)] = 0.95
    # Capacity beyond what the forecast asks for, as a share of it.
    spare: Annotated[float, msgspec.Meta(ge=0, le=10)] = 0.0
    # How often it decides; how long a need counts before replicas go; how long a replica may take to finish.
    every_s: Annotated[float, msgspec.Meta(ge=1, le=3600)] = 30.0
    settle_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 2700.0
    drain_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 120.0
    # Whether a pool may have no replica while less than one request is expected within settle_s, and half an hour.
    to_zero: bool = False
    # Of the clock that the day's shape goes by.
    utc_offset_hours: Annotated[float, msgspec.Meta(ge=-14, le=14)] = 0.0
