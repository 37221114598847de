"""How many evictions and cold requests to expect of a shared pool, without simulating it.

Che's approximation looks at a cache as if each thing in it had a time of its own to live since it was last asked for,
the same for all under LRU. Here it is as long as the model's remembered demand takes to sink to the worth at which
models are evicted. That worth is found by the memory that there is: the bytes of models, each times the share of time
that it is resident, fill it.

A model with Poisson requests at rate r that lives T after each and loads in L leaves when a gap exceeds T, of which
the chance is p = exp(-r T). So of r L + 1/p requests one begins a load and r L wait for it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from crosstie.host.hosted import Hosted, ResidencySettings

# Halvings of the logarithm of the worth at which models are evicted.
_BISECTIONS = 60
# What is not used of each replica's memory because no model fits there, as a share of the mean size of those that come
# and go; less where little is absent that could use it. By simulation: docs/hosting.md has how far off it is.
_GAP_SHARE = 0.75
# Loads that keep replicas busy for more than this share of the time wait for each other, and then nothing here holds.
MOST_LOADING = 0.5
# Those that pools are served with.
_SETTINGS = ResidencySettings()


@dataclass(frozen=True, slots=True)
class Expectation:
    # Requests a second, of which so many find their model absent or being loaded.
    requests_per_s: float
    cold_per_s: float
    loads_per_s: float
    # Seconds that a cold request waits on average.
    wait_s: float
    # Of a replica's time, the share that it is loading something.
    loading_share: float
    # By model: the share of time that it is resident or being loaded.
    resident: dict[str, float]

    @property
    def cold_share(self) -> float:
        return self.cold_per_s / self.requests_per_s if self.requests_per_s else 0.0

    @property
    def holds(self) -> bool:
        """Whether loads have time: else requests wait for each other's loads, and far more of them are cold."""
        return self.loading_share <= MOST_LOADING

    @property
    def evictions_per_hour(self) -> float:
        """As many go as come, once the memory is full."""
        return self.loads_per_s * 3600.0


def expect(hosted: Sequence[Hosted], requests_per_s: Sequence[float], capacity_bytes: Sequence[float]) -> Expectation:
    # Whom nobody asks for is never loaded, unless it is pinned.
    pairs = [(one, rate) for one, rate in zip(hosted, requests_per_s, strict=True) if rate > 0 or one.pinned]
    total = sum(one.taken_bytes for one, _ in pairs)
    room = total - _absent([one for one, _ in pairs], capacity_bytes)
    low, high = _ends(pairs)
    if _filled(pairs, low) > room:
        for _ in range(_BISECTIONS):
            middle = math.sqrt(low * high)
            low, high = (middle, high) if _filled(pairs, middle) > room else (low, middle)
    cold = loads = waited = loading_s = 0.0
    resident = {one.model: 0.0 for one in hosted}
    for one, rate in pairs:
        gone = _gone(one, rate, low)
        # Of so many requests one begins a load.
        each = rate * one.load_s + 1.0 / gone if gone > 0 else math.inf
        loading = rate / each
        loads += loading
        loading_s += loading * one.load_s
        cold += loading * (1.0 + rate * one.load_s)
        waited += loading * (one.load_s + rate * one.load_s**2 / 2.0)
        resident[one.model] = 1.0 - 1.0 / each
    return Expectation(
        requests_per_s=sum(requests_per_s),
        cold_per_s=cold,
        loads_per_s=loads,
        wait_s=waited / cold if cold else 0.0,
        loading_share=loading_s / len(capacity_bytes),
        resident=resident,
    )


def _absent(hosted: Sequence[Hosted], capacity_bytes: Sequence[float]) -> float:
    """Bytes that are not resident: what a good packing leaves out, and what is unused since models come and go."""
    left_out = _left_out(hosted, capacity_bytes)
    if not left_out:
        return 0.0
    sizes = [one.taken_bytes for one in hosted if not one.pinned] or [0.0]
    mean = sum(sizes) / len(sizes)
    return left_out + _GAP_SHARE * min(len(capacity_bytes) * mean, left_out + mean)


def _left_out(hosted: Sequence[Hosted], capacity_bytes: Sequence[float]) -> float:
    """Bytes of models that find no room when all are put where they fit tightest, the largest first."""
    left = list(capacity_bytes)
    absent = 0.0
    for size in sorted((one.taken_bytes for one in hosted), reverse=True):
        fitting = [place for place, free in enumerate(left) if free >= size]
        if fitting:
            left[min(fitting, key=lambda place: left[place])] -= size
        else:
            absent += size
    return absent


def _ends(pairs: Sequence[tuple[Hosted, float]]) -> tuple[float, float]:
    """A worth at which nobody is evicted, and one at which nobody stays."""
    worths = [_worth(one, rate) for one, rate in pairs] or [1.0]
    return min(worths) * 1e-30, max(worths) * 1e3


def _worth(one: Hosted, rate: float) -> float:
    """What its demand is remembered as right after a request, for each byte."""
    return (rate + 1.0 / _SETTINGS.demand_memory_s) * one.load_s / max(one.taken_bytes, 1.0)


def _gone(one: Hosted, rate: float, floor: float) -> float:
    """The chance that it is evicted before it is asked for again."""
    if one.pinned:
        return 0.0
    lives_s = _SETTINGS.demand_memory_s * math.log(_worth(one, rate) / floor)
    return math.exp(-rate * max(lives_s, _SETTINGS.min_residence_s))


def _filled(pairs: Sequence[tuple[Hosted, float]], floor: float) -> float:
    filled = 0.0
    for one, rate in pairs:
        gone = _gone(one, rate, floor)
        share = 1.0 if gone <= 0 else 1.0 - 1.0 / (rate * one.load_s + 1.0 / gone)
        filled += one.taken_bytes * share
    return filled
