"""Runs that differ by their seed alone, as one: means, and how far the seeds are apart."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Generic, TypeVar

from crosstie.decide.plan.run_result import ClassResult, Latency, Run

T = TypeVar("T")
Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class SeedSpread:
    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class OverSeeds(Generic[T]):
    """A run, or a part of it, as each seed has it."""

    each: Sequence[T]

    @property
    def first(self) -> T:
        """For what no seed changes."""
        return self.each[0]

    def part(self, of: Callable[[T], Part]) -> "OverSeeds[Part]":
        return OverSeeds([of(one) for one in self.each])

    def mean(self, of: Callable[[T], float]) -> float:
        return fmean(map(of, self.each))

    def total(self, of: Callable[[T], int]) -> int:
        return sum(map(of, self.each))

    def spread(self, of: Callable[[T], float | None]) -> SeedSpread | None:
        """None: in at least one seed there is no such number."""
        values = [value for value in map(of, self.each) if value is not None]
        return SeedSpread(fmean(values), min(values), max(values)) if len(values) == len(self.each) else None


def over_seeds(runs: Sequence[Run]) -> list[OverSeeds[Run]]:
    """Those of one fleet under one policy and load together, in the order in which the first of each came."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        groups.setdefault((run.label, run.load, run.policy, run.knows_lengths), []).append(run)
    return [OverSeeds(group) for group in groups.values()]


def classes_of(runs: OverSeeds[Run]) -> list[OverSeeds[ClassResult]]:
    return [OverSeeds(classes) for classes in zip(*(run.classes for run in runs.each), strict=True)]


def holding(runs: OverSeeds[Run] | OverSeeds[ClassResult]) -> int:
    """In how many of the seeds the targets hold."""
    return sum(bool(one.holds) for one in runs.each)


def at_target(latency: OverSeeds[Latency]) -> SeedSpread | None:
    return latency.spread(lambda one: one.at_target)


def worst(runs: OverSeeds[Run]) -> float | None:
    """The farthest that any class is over a target, at its percentile; below 1 all hold. None: no end."""
    ratios = [0.0]
    for kind in classes_of(runs):
        for latency in (kind.part(lambda one: one.ttft_s), kind.part(lambda class_result: class_result.tpot_s)):
            target = latency.first.target
            if target is not None and kind.total(lambda class_result: class_result.requests):
                reached = at_target(latency)
                if reached is None:
                    return None
                ratios.append(reached.mean / target.seconds)
    return max(ratios)
