"""What a scaler learns: the traffic of a class, how long starts take, and whether replicas take what the plan says. No
clock: every moment is given, in seconds since any midnight."""

import math

import msgspec

from crosstie.catalog.loading import LoadingFacts
from crosstie.core.deployment import Deployment
from crosstie.host.sizes import LoadPath
from crosstie.perf.memory import gpu_weight_bytes

DAY_S = 86_400.0
# How long the level that is believed looks back, and the one that it is held against for a trend.
_FAST_S, _SLOW_S = 300.0, 1800.0
# A trend is not believed for longer.
_TREND_S = 900.0
# Differences within so many deviations of counting are chance; a rise that is bought for must be further off.
_SURE, _RISE = 2.0, 3.0
# What forecasts are wrong by before any was checked, as a logarithm's deviation, and how long errors are remembered.
_FIRST_ERROR, _ERROR_S = 0.05, 6 * 3600.0
# Nine in ten forecasts are within the margin, and nine in ten starts take no longer.
_DEVIATIONS = 1.28
_STEP_S = 60.0
# A class that has been silent is expected to send this at most, and no shape is nothing.
_LEAST = 1e-9


def shape_at(shape: tuple[float, ...], at_s: float) -> float:
    """Windows of equal length over a day, between whose middles it goes straight; no window: always 1."""
    if not shape:
        return 1.0
    place = (at_s % DAY_S) / DAY_S * len(shape) - 0.5
    first = math.floor(place)
    part = place - first
    return max(shape[first % len(shape)] * (1.0 - part) + shape[(first + 1) % len(shape)] * part, _LEAST)


class Forecast(msgspec.Struct, kw_only=True):
    """A class now and soon: the shape of its day at the level seen, with a margin for past errors. `shape`: traffic by
    equal windows of a day, over its peak."""

    shape: tuple[float, ...] = ()
    # Of the clock that the shape goes by.
    offset_s: float = 0.0
    # Requests/s over the shape's, as believed and as it was a while ago; None: nothing was seen.
    fast: float | None = None
    slow: float = 0.0
    at_s: float = 0.0
    # The last count by itself: for surges that a mean has not noticed.
    last_per_s: float = 0.0
    last_count: float = 0.0
    # Mean square of the logarithm of what came over what was forecast.
    error: float = _FIRST_ERROR**2
    # Forecasts that are still to be checked: when for, and what.
    open: list[tuple[float, float]] = []

    def see(self, now_s: float, requests_per_s: float, over_s: float) -> None:
        """So many requests a second came within the last `over_s`."""
        level = requests_per_s / self._shape(now_s - 0.5 * over_s)
        self.last_per_s, self.last_count = requests_per_s, requests_per_s * over_s
        if self.fast is None:
            self.fast, self.slow = level, level
        else:
            passed = max(now_s - self.at_s, 0.0)
            self.fast += (level - self.fast) * -math.expm1(-passed / _FAST_S)
            self.slow += (level - self.slow) * -math.expm1(-passed / _SLOW_S)
            self._check(now_s, passed)
        self.at_s = now_s

    def _check(self, now_s: float, passed: float) -> None:
        seen = max(self.now_per_s(now_s), _LEAST)
        weight = -math.expm1(-passed / _ERROR_S)
        while self.open and self.open[0][0] <= now_s:
            _, said = self.open.pop(0)
            if said > _LEAST and seen > _LEAST:
                self.error += (min(math.log(seen / said) ** 2, 1.0) - self.error) * weight

    def _shape(self, at_s: float) -> float:
        return shape_at(self.shape, at_s + self.offset_s)

    def now_per_s(self, now_s: float) -> float:
        return (self.fast or 0.0) * self._shape(now_s)

    def chance(self, now_s: float) -> float:
        """How far chance alone may put the level off, as a share: requests come at random."""
        return _SURE / math.sqrt(max(self.now_per_s(now_s) * 2.0 * _FAST_S, 1.0))

    def at(self, now_s: float, then_s: float) -> float:
        """Requests/s at a later moment, as it looks now."""
        if self.fast is None:
            return 0.0
        level, moved = self.fast, self.fast - self.slow
        if moved > level * self.chance(now_s) * _RISE / _SURE:
            # Both means lag behind a rise, each by its own length.
            level += moved / (_SLOW_S - _FAST_S) * (_FAST_S + min(then_s - now_s, _TREND_S))
        return level * self._shape(then_s)

    def peak(self, now_s: float, until_s: float) -> float:
        """The most between now and then; what surges right now counts as well."""
        moments = max(math.ceil((until_s - now_s) / _STEP_S), 1)
        expected = max(self.at(now_s, now_s + (until_s - now_s) * step / moments) for step in range(moments + 1))
        surging = self.last_per_s * (1.0 - _RISE / math.sqrt(max(self.last_count, 1.0)))
        return max(expected, surging)

    def promise(self, now_s: float, then_s: float) -> None:
        """Notes a forecast, to be compared with what comes; one for each step."""
        if self.fast is not None and (not self.open or then_s - self.open[-1][0] >= _STEP_S):
            self.open.append((then_s, self.at(now_s, then_s)))

    @property
    def margin(self) -> float:
        """What is added for how wrong forecasts have been, as a factor."""
        return math.exp(min(_DEVIATIONS * math.sqrt(self.error), math.log(2.0)))


# The catalog's word counts as so many starts that were seen, this far apart as a logarithm's deviation.
_WORTH, _APART = 2.0, 0.3
# Later starts weigh more: what was seen twenty starts ago counts little.
_MEMORY = 10.0


class StartTime(msgspec.Struct, kw_only=True):
    """How long a supply's replica takes from being asked for to serving: what the catalog says, corrected by what is
    seen."""

    mean: float
    square: float = _APART**2
    worth: float = _WORTH
    seen: int = 0

    @classmethod
    def of(cls, seconds: float) -> "StartTime":
        return cls(mean=math.log(seconds))

    def see(self, seconds: float) -> None:
        """A replica serves, so long after it was asked for."""
        self.seen += 1
        self.worth = min(self.worth + 1.0, _MEMORY)
        away = math.log(max(seconds, 1.0)) - self.mean
        self.mean += away / self.worth
        self.square += (away * away - self.square) / self.worth

    @property
    def likely_s(self) -> float:
        return math.exp(self.mean)

    @property
    def late_s(self) -> float:
        """Nine of ten starts take no longer."""
        return math.exp(self.mean + _DEVIATIONS * math.sqrt(self.square))


def start_s(facts: LoadingFacts, deployment: Deployment) -> float:
    """An engine that compiles and captures anew, with weights on a disk of its host; without the machine itself."""
    gpus = deployment.parallelism.gpus
    fixed = facts.cold_start.si + (facts.peer_check.si if gpus > 1 else 0.0)
    if deployment.accelerator.vendor == "AMD":
        fixed += facts.first_graphs.si
    return LoadPath(facts.disk.si, False, fixed, 0.0).load_s(gpu_weight_bytes(deployment) * gpus, gpus)


# A verdict takes so many requests and so long: misses come in clusters, and each verdict may move replicas.
_ENOUGH, _LONG_S = 1000, 900.0
# The load from which there is a verdict, from which replicas may be found to take more (latencies rise late and
# steeply), and above which they are simply too few.
_BUSY, _NEARLY, _FULL = 0.75, 0.92, 1.02
# How far the share must be from the promise, over what is left to all: up above the first, down below the second.
# Policies that go for the cheapest use up what targets allow and stay near the promise.
_MORE, _LESS = 0.6, -1.0
_UP, _DOWN = 1.02, 0.97
_LEAST_REACH, _MOST_REACH = 0.5, 1.3


class LearntReach(msgspec.Struct, kw_only=True):
    """Of one class, whether replicas take what the plan says of them, learnt from targets that were kept and missed:
    nearly full ones that keep nearly all targets take more, emptier ones that miss too many take less."""

    # What replicas take over what the plan says.
    factor: float = 1.0
    # Since the last verdict.
    kept: float = 0.0
    ended: float = 0.0
    over_s: float = 0.0
    load_s: float = 0.0

    def see(self, ended: float, within: float, over_s: float, load: float, promised: float) -> None:
        """So many requests ended, this share within targets, with replicas at such a load of what they should take;
        `promised`: the share to be kept."""
        if not _BUSY <= load <= _FULL:
            return
        self.ended += ended
        self.kept += ended * within
        self.over_s += over_s
        self.load_s += load * over_s
        if self.ended < _ENOUGH or self.over_s < _LONG_S:
            return
        share, room, usual = self.kept / self.ended, 1.0 - promised, self.load_s / self.over_s
        self.kept = self.ended = self.over_s = self.load_s = 0.0
        if usual >= _NEARLY and share > promised + _MORE * room:
            self.factor = min(self.factor * _UP, _MOST_REACH)
        elif share < promised + _LESS * room:
            self.factor = max(self.factor * _DOWN, _LEAST_REACH)
        elif share >= promised and self.factor < 1.0:
            # What a shortage taught fades while the promise is kept: such a policy never shows more than that.
            self.factor = min(self.factor * _UP, 1.0)
