"""What a replay comes to: by class the share within its targets, by pool what it served."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import numpy as np

from crosstie.core.fleet import Fleet
from crosstie.core.workload import Target
from crosstie.prove.replay.replay import RequestOutcome

Key = TypeVar("Key")
_PERCENTILES = (0.5, 0.9, 0.95, 0.99)
_MOST_FAULTS = 5
_TOO_MANY = 429
# A request left this much too late, on the server's clock: so do those after it, and their answers come late.
DISTURBED_S = 0.5


@dataclass(frozen=True)
class ClassTargets:
    """What a class was promised; None: nothing."""

    ttft: Target | None = None
    tpot: Target | None = None


@dataclass(frozen=True)
class Percentiles:
    """A latency over requests; not a number where there is none."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles":
        known = np.array([value for value in values if not math.isnan(value)])
        if not len(known):
            return cls(*[math.nan] * 5)
        return cls(float(known.mean()), *map(float, np.quantile(known, _PERCENTILES)))

    def at(self, percentile: float) -> float:
        return float({0.5: self.p50, 0.9: self.p90, 0.95: self.p95, 0.99: self.p99}.get(percentile, math.nan))


@dataclass(frozen=True)
class RequestGroup:
    """Requests of one class, or of one pool."""

    name: str
    requests: int
    failed: int
    input_tokens: int
    output_tokens: int
    ttft_s: Percentiles
    tpot_s: Percentiles
    # As the gateway predicted them, where it said.
    predicted_ttft_s: Percentiles
    predicted_tpot_s: Percentiles


@dataclass(frozen=True)
class ReplayedClass:
    seen: RequestGroup
    targets: ClassTargets
    # Shares of all its requests; one that failed has kept nothing. None without a target.
    ttft_kept: float | None
    tpot_kept: float | None
    # Those that kept all that was promised; all that were served, where nothing was.
    kept: float


@dataclass(frozen=True)
class ReplayResult:
    requests: int
    failed: int
    # Of those that failed, told with status 429 to come again: too many for the server, by its own account.
    turned_away: int
    # From the first arrival to the last, on the server's clock.
    seconds: float
    # Shares of all requests that kept their targets.
    kept: float
    classes: list[ReplayedClass]
    pools: list[RequestGroup]
    tokens: int
    # Of requests that kept their targets.
    good_tokens: int
    # How late the client itself sent requests, and the latest of them.
    late_s: Percentiles
    latest_s: float
    # What went wrong and how often, the most frequent first.
    faults: list[tuple[str, int]]

    @property
    def disturbed(self) -> bool:
        """Whether the client's own machine stood still for long enough to show in what it saw of the server."""
        return self.latest_s > DISTURBED_S


def kept_targets(outcome: RequestOutcome, targets: ClassTargets) -> tuple[bool, bool]:
    """TTFT and TPOT; an answer of one token has no TPOT to miss."""
    if not outcome.served:
        return False, False
    ttft = targets.ttft is None or outcome.ttft_s <= targets.ttft.seconds
    return ttft, targets.tpot is None or math.isnan(outcome.tpot_s) or outcome.tpot_s <= targets.tpot.seconds


def result_of(outcomes: Sequence[RequestOutcome], promised: Mapping[str | None, ClassTargets]) -> ReplayResult:
    """`promised`: targets by class; classes that are not there have none."""
    nothing = ClassTargets()
    arrivals = [outcome.request.arrival_s for outcome in outcomes]
    kept = [all(kept_targets(outcome, promised.get(outcome.request.class_name, nothing))) for outcome in outcomes]
    tokens = [outcome.input_tokens + outcome.output_tokens for outcome in outcomes]
    classes = _grouped(outcomes, lambda outcome: outcome.request.class_name)
    pools = _grouped(outcomes, lambda outcome: outcome.pool)
    faults = Counter(outcome.error for outcome in outcomes if outcome.error)
    return ReplayResult(
        requests=len(outcomes),
        failed=sum(not outcome.served for outcome in outcomes),
        turned_away=sum(outcome.status == _TOO_MANY for outcome in outcomes),
        seconds=max(arrivals) - min(arrivals) if arrivals else 0.0,
        kept=fmean(kept) if kept else math.nan,
        classes=[_class(some, promised.get(name, nothing), name) for name, some in classes.items()],
        pools=[_group(name or "-", some) for name, some in sorted(pools.items())],
        tokens=sum(tokens),
        good_tokens=sum(count for count, well in zip(tokens, kept, strict=True) if well),
        late_s=Percentiles.of(outcome.late_s for outcome in outcomes),
        latest_s=max((outcome.late_s for outcome in outcomes), default=0.0),
        faults=faults.most_common(_MOST_FAULTS),
    )


def _grouped(
    outcomes: Sequence[RequestOutcome], key: Callable[[RequestOutcome], Key]
) -> dict[Key, list[RequestOutcome]]:
    found: dict[Key, list[RequestOutcome]] = {}
    for one in outcomes:
        found.setdefault(key(one), []).append(one)
    return found


def _class(outcomes: list[RequestOutcome], targets: ClassTargets, name: str | None) -> ReplayedClass:
    kept = [kept_targets(outcome, targets) for outcome in outcomes]
    return ReplayedClass(
        seen=_group(name or "all", outcomes),
        targets=targets,
        ttft_kept=fmean(ttft for ttft, _ in kept) if targets.ttft else None,
        tpot_kept=fmean(tpot for _, tpot in kept) if targets.tpot else None,
        kept=fmean(map(all, kept)),
    )


def _group(name: str, outcomes: list[RequestOutcome]) -> RequestGroup:
    predicted_tpot = [outcome.predicted_tpot_s for outcome in outcomes if not math.isnan(outcome.tpot_s)]
    return RequestGroup(
        name=name,
        requests=len(outcomes),
        failed=sum(not outcome.served for outcome in outcomes),
        input_tokens=sum(outcome.input_tokens for outcome in outcomes),
        output_tokens=sum(outcome.output_tokens for outcome in outcomes),
        ttft_s=Percentiles.of(outcome.ttft_s for outcome in outcomes),
        tpot_s=Percentiles.of(outcome.tpot_s for outcome in outcomes),
        predicted_ttft_s=Percentiles.of(outcome.predicted_ttft_s for outcome in outcomes if outcome.served),
        predicted_tpot_s=Percentiles.of(predicted_tpot),
    )


def plain(value: Any) -> Any:
    # JSON has no NaN and no infinity: msgspec writes null for them.
    return msgspec.json.decode(msgspec.json.encode(value))


def targets_of(fleet: Fleet) -> dict[str | None, ClassTargets]:
    return {own.name: ClassTargets(own.ttft, own.tpot) for own in fleet.classes}
