"""What the caches of a measured fleet had of its prompts, where a row does not say it: from the benchmark's own prompts
and the memory of the deployment."""

from dataclasses import replace
from typing import TYPE_CHECKING

from crosstie.catalog.benchmarks import BenchmarkSettings, PrefixBenchmark, SessionBenchmark
from crosstie.catalog.loading import shipped_loading
from crosstie.core.units import UNITS
from crosstie.perf.memory import cache_sequences, gpu_cache_bytes_per_sequence

if TYPE_CHECKING:
    from crosstie.prove.calibration.cases import MeasuredCase


# By then the requests that fit change by less than one.
_ROUNDS = 8


def with_cached(case: "MeasuredCase", settings: BenchmarkSettings) -> "MeasuredCase":
    """The case with the prompt tokens that its caches have: the GPU's, and the host's beside it."""
    benchmark = case.benchmark
    if benchmark is None:
        return case
    # Prefixes are kept where prompts are computed.
    service = case.service
    keeper, replicas = (service.prefill, float(service.prefill_replicas)) if service else (
        case.deployment, case.replicas)  # fmt: skip
    context = case.input_tokens + case.output_tokens
    bytes_per_token = float(gpu_cache_bytes_per_sequence(keeper, context)) / context
    tokens = float(cache_sequences(keeper, context)) * context * replicas
    caches = replicas * keeper.parallelism.dp
    in_host = (settings.host_gib_per_gpu or 0.0) * UNITS["GiB"].si / bytes_per_token * caches
    share = _share(benchmark, case, tokens, replicas)
    more = max(_share(benchmark, case, in_host, replicas), share) if in_host else share
    loaded = (more - share) * case.input_tokens
    load_s = loaded * bytes_per_token / shipped_loading().link_of(keeper.accelerator.id).si
    cached = min(more * case.input_tokens, case.input_tokens - 1.0)
    shared = min(_held_once(case, tokens / replicas), cached) if isinstance(benchmark, PrefixBenchmark) else 0.0
    return replace(case, cached_tokens=cached, load_s=load_s, shared_tokens=shared)


def _share(
    benchmark: PrefixBenchmark | SessionBenchmark, case: "MeasuredCase", tokens: float, replicas: float
) -> float:
    if isinstance(benchmark, SessionBenchmark):
        # Sessions stay with the replica that has them.
        return benchmark.cached_share(tokens / max(case.clients, 1.0))
    spread = round(max(replicas, 1.0) / _gathers(case, replicas))
    return benchmark.cached_share(tokens / spread, spread)


def held_tokens(case: "MeasuredCase", requests: float) -> float:
    """Tokens of so many requests' prompts in the cache of one replica."""
    if isinstance(case.benchmark, PrefixBenchmark):
        return case.benchmark.held_tokens(requests, _gathers(case, case.replicas))
    return requests * (case.input_tokens - case.shared_tokens)


def _held_once(case: "MeasuredCase", tokens: float) -> float:
    """Tokens of a prompt that cost no memory of its own when as many requests are there as a replica's cache takes."""
    answers, fits = 0.5 * case.output_tokens, 1.0
    for _ in range(_ROUNDS):
        fits = max(tokens / (held_tokens(case, fits) / fits + answers), 1.0)
    return case.input_tokens - held_tokens(case, fits) / fits


def _gathers(case: "MeasuredCase", replicas: float) -> float:
    """Replicas that a group's requests keep to one of: all where the router sends them to who has their prefix."""
    return 1.0 if "round robin" in case.point["scenario"].casefold() else max(replicas, 1.0)
