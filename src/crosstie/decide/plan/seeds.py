"""Runs that differ by their seed alone, as one: means, and how far the seeds are apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from crosstie.core.fleet import Policy
from crosstie.core.workload import Target
from crosstie.decide.plan.run_result import ClassResult, Latency, Run


@dataclass(frozen=True, slots=True)
class SeedSpread:
    """Over seeds; None: in at least one there is no such number."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class SeededLatency:
    target: Target | None
    at_target: SeedSpread | None
    p50: SeedSpread | None
    p90: SeedSpread | None
    p95: SeedSpread | None
    p99: SeedSpread | None


@dataclass(frozen=True, slots=True)
class SeededClass:
    name: str
    requests: int
    refused: int
    within: float
    ttft_s: SeededLatency
    tpot_s: SeededLatency
    finish_s: SeededLatency
    # In how many of the seeds its targets hold; None: it has none.
    holding: int | None


@dataclass(frozen=True, slots=True)
class SeededPool:
    name: str
    replicas: int
    usd_per_hour: float
    share: float
    by_class: dict[str, float]
    busy: float
    in_flight_a_replica: float
    mean_waiting: float
    most_waiting: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Seeded:
    """One fleet under one policy and load."""

    label: str
    policy: Policy
    load: float
    knows_lengths: bool
    runs: list[Run]
    requests: int
    refused: float
    measured_s: float
    requests_per_s: float
    within: SeedSpread
    usd_per_hour: float
    usd_per_million: SeedSpread | None
    usd_per_million_good: SeedSpread | None
    good_requests_per_s: float
    good_output_tokens_per_s: float
    prefix_hit_rate: float
    classes: list[SeededClass]
    pools: list[SeededPool]
    holding: int
    # The farthest that any class is over a target, at its percentile; below 1 all hold. None: no end.
    worst: float | None


def over_seeds(runs: Sequence[Run]) -> list[Seeded]:
    """In the order in which the first of each came."""
    groups: dict[tuple[object, ...], list[Run]] = {}
    for one in runs:
        groups.setdefault((one.label, one.load, one.policy, one.knows_lengths), []).append(one)
    return [_seeded(group) for group in groups.values()]


def spread(values: Sequence[float | None]) -> SeedSpread | None:
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    return SeedSpread(fmean(known), min(known), max(known))


def _seeded(runs: list[Run]) -> Seeded:
    first, requests = runs[0], sum(one.requests for one in runs)
    within = spread([one.within for one in runs])
    assert within is not None
    classes = [_class([one.classes[number] for one in runs]) for number in range(len(first.classes))]
    return Seeded(
        label=first.label,
        policy=first.policy,
        load=first.load,
        knows_lengths=first.knows_lengths,
        runs=runs,
        requests=requests,
        refused=sum(one.refused for one in runs) / max(requests, 1),
        measured_s=fmean(one.measured_s for one in runs),
        requests_per_s=fmean(one.requests_per_s for one in runs),
        within=within,
        usd_per_hour=first.usd_per_hour,
        usd_per_million=spread([one.usd_per_million_tokens for one in runs]),
        usd_per_million_good=spread([one.usd_per_million_good_tokens for one in runs]),
        good_requests_per_s=fmean(one.good_requests_per_s for one in runs),
        good_output_tokens_per_s=fmean(one.good_output_tokens_per_s for one in runs),
        prefix_hit_rate=fmean(one.prefix_hit_rate for one in runs),
        classes=classes,
        pools=[_pool(runs, number, requests) for number in range(len(first.pools))],
        holding=sum(one.holds for one in runs),
        worst=_worst(classes),
    )


def _worst(classes: Sequence[SeededClass]) -> float | None:
    ratios = []
    for one in classes:
        for found in (one.ttft_s, one.tpot_s):
            if found.target is not None and one.requests:
                if found.at_target is None:
                    return None
                ratios.append(found.at_target.mean / found.target.seconds)
    return max(ratios, default=0.0)


def _class(seeds: Sequence[ClassResult]) -> SeededClass:
    held = [one.holds for one in seeds if one.holds is not None]
    return SeededClass(
        name=str(seeds[0].name or "no class"),
        requests=sum(one.requests for one in seeds),
        refused=sum(one.refused for one in seeds),
        within=fmean(one.within for one in seeds),
        ttft_s=_latency([one.ttft_s for one in seeds]),
        tpot_s=_latency([one.tpot_s for one in seeds]),
        finish_s=_latency([one.finish_s for one in seeds]),
        holding=sum(held) if held else None,
    )


def _latency(seeds: Sequence[Latency]) -> SeededLatency:
    return SeededLatency(
        target=seeds[0].target,
        at_target=spread([one.at_target for one in seeds]),
        p50=spread([one.p50 for one in seeds]),
        p90=spread([one.p90 for one in seeds]),
        p95=spread([one.p95 for one in seeds]),
        p99=spread([one.p99 for one in seeds]),
    )


def _pool(runs: Sequence[Run], number: int, requests: int) -> SeededPool:
    seeds = [one.pools[number] for one in runs]
    first = seeds[0]
    served = sum(sum(one.requests.values()) for one in seeds)
    kinds = [str(kind.name) for kind in runs[0].classes]
    sent = {name: sum(one.classes[place].requests for one in runs) for place, name in enumerate(kinds)}
    return SeededPool(
        name=first.name,
        replicas=first.replicas,
        usd_per_hour=first.usd_per_hour,
        share=served / max(requests, 1),
        by_class={
            name: share
            for name, all_of_it in sent.items()
            if (share := sum(one.requests.get(name, 0) for one in seeds) / max(all_of_it, 1))
        },
        busy=fmean(one.utilisation for one in seeds),
        in_flight_a_replica=fmean(one.mean_in_flight for one in seeds) / max(first.replicas, 1),
        mean_waiting=fmean(one.mean_waiting for one in seeds),
        most_waiting=max(one.most_waiting for one in seeds),
        preemptions=sum(one.preemptions for one in seeds),
    )
