"""What shared pools count, as Prometheus reads it."""

from collections.abc import Iterable
from itertools import accumulate

from crosstie.host.hosted import BUCKETS_S, ModelCounts
from crosstie.run.gateway.metrics import Family
from crosstie.run.service.shared_pool import SharedPool

_COUNTERS = (
    ("crosstie_model_loads_total", "loads", "Models that were loaded on a replica of a shared pool."),
    ("crosstie_model_evictions_total", "evictions", "Models that were put away to make room for others."),
    ("crosstie_cold_requests_total", "cold_waits", "Requests that found their model loaded nowhere."),
    ("crosstie_load_failures_total", "failed", "Loads that failed."),
)
_LOAD_SECONDS = "crosstie_model_load_seconds"


def families(pools: Iterable[SharedPool]) -> list[Family]:
    pools = list(pools)
    if not pools:
        return []
    resident = [
        (
            {"pool": pool.pool.name, "backend": replica.key, "model": model},
            float(replica.presence is not None and replica.presence.there),
        )
        for pool in pools
        for (_, model), replica in pool.replicas.items()
    ]
    found: list[Family] = [
        ("crosstie_model_resident", "gauge", "1 where a model of a shared pool is loaded.", resident)
    ]
    tallies = [
        ({"pool": pool.pool.name, "model": model}, tally)
        for pool in pools
        for model, tally in pool.residency.counts.by_model.items()
    ]
    for name, field, what in _COUNTERS:
        found.append((name, "counter", what, [(dict(at), float(getattr(tally, field))) for at, tally in tallies]))
    took = [sample for at, tally in tallies for sample in _histogram(at, tally)]
    found.append((_LOAD_SECONDS, "histogram", "How long loads took, with what they put away.", took))
    return found


def _histogram(at: dict[str, str], tally: ModelCounts) -> list[tuple[dict[str, str], float]]:
    bounds = (*map(str, BUCKETS_S), "+Inf")
    samples = [
        ({"__name__": f"{_LOAD_SECONDS}_bucket", **at, "le": bound}, float(count))
        for bound, count in zip(bounds, accumulate(tally.load_s.buckets), strict=True)
    ]
    samples.append(({"__name__": f"{_LOAD_SECONDS}_sum", **at}, tally.load_s.total_s))
    samples.append(({"__name__": f"{_LOAD_SECONDS}_count", **at}, float(tally.load_s.count)))
    return samples
