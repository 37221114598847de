"""What may be scaled and how far, and the day that traffic follows, from a file of the user's: supplies of replicas,
each of one pool at one kind of price, limits and budgets."""

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from crosstie.catalog.days import read_day
from crosstie.catalog.reading import only_keys, read_record, read_toml, read_values, table, text
from crosstie.catalog.traces import Trace, find_trace, read_trace
from crosstie.core.errors import BadData, did_you_mean, near_names
from crosstie_gateway.scaler.learnt import DAY_S

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


# Windows of a day that is learnt from a recording, and how many requests one must have on average to say anything.
_WINDOWS, _FEWEST = 144, 5
_OWN = {"day", "recording", "recording_began"}
_RULES = {
    "budget_usd_per_hour", "budget_usd_per_day", "spot_share", "within", "spare", "every_s", "settle_s", "drain_s",
    "to_zero", "utc_offset_hours",
}  # fmt: skip
_CLOCK = re.compile(r"([01]?\d|2[0-3]):([0-5]\d)", re.ASCII)


@dataclass(frozen=True, slots=True)
class ReadRules:
    rules: ScaleRules
    # The shape of a day: of all classes, and of those that have one of their own.
    day: tuple[float, ...] = ()
    days: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def of(self, class_name: str) -> tuple[float, ...]:
        return self.days.get(class_name, self.day)


def read_rules(file: Path, pools: Collection[str]) -> ReadRules:
    """`pools`: those of the fleet."""
    raw = read_toml(file)
    only_keys(file, "", raw, {"scale", "supply"})
    scale = table(file, "scale", raw.get("scale", {}))
    only_keys(file, "scale", scale, _RULES | _OWN)
    entries = raw.get("supply")
    if not isinstance(entries, list) or not entries:
        raise BadData(file, "supply", "missing: write [[supply]] for each thing that is scaled")
    supplies = tuple(read_record(file, f"supply[{i}]", entry, Supply) for i, entry in enumerate(entries))
    for index, supply in enumerate(supplies):
        if supply.name in [other.name for other in supplies[:index]]:
            raise BadData(file, f"supply[{index}].name", f"'{supply.name}' is there twice")
        if supply.pool not in pools:
            hint = did_you_mean(near_names(supply.pool, pools)) or f" There are {', '.join(pools)}."
            raise BadData(file, f"supply[{index}].pool", f"the fleet has no pool '{supply.pool}'.{hint}")
        if supply.least > supply.most:
            raise BadData(file, f"supply[{index}].least", f"{supply.least} is more than most, which is {supply.most}")
    rules = ScaleRules(supplies=supplies, **read_values(file, "scale", scale, ScaleRules, _RULES & set(scale)))
    return _with_day(file, scale, rules)


def _with_day(file: Path, scale: dict[str, Any], rules: ScaleRules) -> ReadRules:
    if "recording" not in scale:
        if "recording_began" in scale:
            raise BadData(file, "scale.recording_began", "is of a recording, and none is named")
        return ReadRules(rules, read_day(file, "scale.day", scale["day"], None) if "day" in scale else ())
    if "day" in scale:
        raise BadData(file, "scale.day", "and scale.recording say the same: give one of them")
    trace = read_trace(find_trace(text(file, "scale.recording", scale["recording"]), file.parent))
    began_s = time_of_day_s(text(file, "scale.recording_began", scale.get("recording_began", "00:00")))
    if began_s is None:
        raise BadData(file, "scale.recording_began", f"'{scale['recording_began']}' is no time of day such as 08:30")
    try:
        whole, days = day_of(trace, began_s)
    except ValueError as error:
        raise BadData(file, "scale.recording", f"{trace.file}: {error}") from None
    return ReadRules(rules, whole, days)


def time_of_day_s(text: str) -> float | None:
    """Of HH:MM; None: it is none."""
    time = _CLOCK.fullmatch(text)
    return None if time is None else 3600.0 * int(time[1]) + 60.0 * int(time[2])


def day_of(trace: Trace, began_s: float) -> tuple[tuple[float, ...], dict[str, tuple[float, ...]]]:
    """How a recorded day goes, over all requests and by class; `began_s`: the time of day of the first arrival."""
    if trace.arrival_s is None or trace.span_s is None or trace.span_s < 0.98 * DAY_S:
        raise ValueError(f"covers {(trace.span_s or 0.0) / 3600.0:.1f} hours, and a day has 24")
    at = trace.arrival_s + began_s
    names = np.array([name or "" for name in trace.classes]) if trace.classes else np.full(len(at), "")
    width = DAY_S / _WINDOWS
    # How often each window of the day was there; the last one counts as far as it goes.
    edges = np.arange(began_s, at[-1], width)
    there = np.bincount((edges // width).astype(np.int64) % _WINDOWS, minlength=_WINDOWS)

    def shape(chosen: np.ndarray[Any, Any]) -> tuple[float, ...]:
        count = np.bincount((at[chosen] // width).astype(np.int64) % _WINDOWS, minlength=_WINDOWS)
        level = count / np.maximum(there, 1)
        wide = np.concatenate([level[-1:], level, level[:1]])
        smooth = np.convolve(wide, np.full(3, 1 / 3), "valid")
        return tuple((smooth / smooth.max()).tolist())

    many = [str(name) for name in np.unique(names) if name and (names == name).sum() >= _FEWEST * _WINDOWS]
    return shape(np.ones(len(at), bool)), {name: shape(names == name) for name in many}
