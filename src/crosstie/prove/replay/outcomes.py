"""What requests come to in groups: by class the share within its targets, by pool what it served."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, TypeVar

import msgspec
import numpy as np

from crosstie.core.fleet import Fleet
from crosstie.core.workload import Target
from crosstie.prove.replay.replay import RequestOutcome

Key = TypeVar("Key")
_PERCENTILES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True)
class ClassTargets:
    """What requests were promised; None: nothing. `by_class`: those of classes that have their own."""

    ttft: Target | None = None
    tpot: Target | None = None
    by_class: Mapping[str, "ClassTargets"] = field(default_factory=dict)

    def of(self, class_name: str | None) -> "ClassTargets":
        return self.by_class.get(class_name or "", self)

    @property
    def any(self) -> bool:
        own = (self, *self.by_class.values())
        return any(target is not None for targets in own for target in (targets.ttft, targets.tpot))


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


def kept_targets(outcome: RequestOutcome, targets: ClassTargets) -> tuple[bool, bool]:
    """TTFT and TPOT; an answer of one token has no TPOT to miss."""
    if not outcome.served:
        return False, False
    targets = targets.of(outcome.request.class_name)
    ttft = targets.ttft is None or outcome.ttft_s <= targets.ttft.seconds
    return ttft, targets.tpot is None or math.isnan(outcome.tpot_s) or outcome.tpot_s <= targets.tpot.seconds


def by_class(
    outcomes: Sequence[RequestOutcome], targets: ClassTargets
) -> list[tuple[str | None, ClassTargets, list[RequestOutcome]]]:
    """Each class with what it was promised."""
    groups = grouped(outcomes, lambda outcome: outcome.request.class_name)
    return [(name, targets.of(name), some) for name, some in groups.items()]


def grouped(
    outcomes: Sequence[RequestOutcome], key: Callable[[RequestOutcome], Key]
) -> dict[Key, list[RequestOutcome]]:
    groups: dict[Key, list[RequestOutcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return groups


def classes_of(outcomes: Sequence[RequestOutcome], targets: ClassTargets) -> list[ReplayedClass]:
    """None where no request says its class."""
    classes = by_class(outcomes, targets)
    return [_class(some, own, name) for name, own, some in classes] if {name for name, *_ in classes} - {None} else []


def _class(outcomes: list[RequestOutcome], targets: ClassTargets, name: str | None) -> ReplayedClass:
    kept = [kept_targets(outcome, targets) for outcome in outcomes]
    return ReplayedClass(
        seen=group_of(name or "-", outcomes),
        targets=targets,
        ttft_kept=fmean(ttft for ttft, _ in kept) if targets.ttft else None,
        tpot_kept=fmean(tpot for _, tpot in kept) if targets.tpot else None,
        kept=fmean(map(all, kept)),
    )


def pools_of(outcomes: Sequence[RequestOutcome]) -> list[RequestGroup]:
    """None where the server does not say who answered."""
    pools = grouped(outcomes, lambda outcome: outcome.pool)
    return [group_of(name or "-", some) for name, some in sorted(pools.items())] if set(pools) - {""} else []


def group_of(name: str, outcomes: Sequence[RequestOutcome]) -> RequestGroup:
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


def targets_of(fleet: Fleet) -> ClassTargets:
    return ClassTargets(by_class={own.name: ClassTargets(own.ttft, own.tpot) for own in fleet.classes})
