"""What vLLM's /metrics would say of a replica, under vLLM's names; seconds are those of the emulated engine."""

import math
from collections.abc import Iterable

from crosstie.core.histogram import Family, Histogram, exposition, histogram_samples
from crosstie.sim.disaggregated import DisaggregatedEngine
from crosstie.sim.engine import Engine
from crosstie.sim.prefix_cache import PrefixCache

_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_BETWEEN_TOKENS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_ENDINGS = ("stop", "length", "abort", "error")


class ReplicaCounts:
    """Counters and histograms since the replica was started."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        # Of answers that have ended.
        self.generation_tokens = 0
        self.endings = dict.fromkeys(_ENDINGS, 0)
        self.first_token_s = Histogram(_FIRST_TOKEN)
        self.between_tokens_s = Histogram(_BETWEEN_TOKENS)
        self.per_output_token_s = Histogram(_BETWEEN_TOKENS)
        self.whole_request_s = Histogram(_LATENCY)
        self.queue_s = Histogram(_LATENCY)

    def finished(self, ending: str, arrived: float, first: float, last: float, tokens: int, per_step: float) -> None:
        """Tokens between the first and the last are taken to have come evenly, `per_step` of them at a time."""
        self.endings[ending] += 1
        self.generation_tokens += tokens
        self.whole_request_s.add(last - arrived)
        if tokens > 1:
            # With speculation the time between two pieces of an answer is not the time of a token.
            pieces = math.ceil((tokens - 1) / per_step)
            self.between_tokens_s.add((last - first) / pieces, pieces)
            self.per_output_token_s.add((last - first) / (tokens - 1))


def page(
    model: str, label: str, engine: Engine | DisaggregatedEngine, cache_tokens: float, prefixes: PrefixCache,
    seen: ReplicaCounts, under_way: int,
) -> bytes:  # fmt: skip
    """`under_way`: tokens of answers that have not ended."""
    labels = {"engine": "0", "model_name": model}
    families: list[Family] = []

    def add(kind: str, name: str, *values: float, **more: Iterable[object]) -> None:
        """`more`: a label that tells several values apart."""
        apart = [dict(zip(more, map(str, own), strict=True)) for own in zip(*more.values(), strict=True)] or [{}]
        samples = [({**labels, **own}, value) for own, value in zip(apart, values, strict=True)]
        families.append((f"vllm:{name}", kind, "", samples))

    generated = seen.generation_tokens + under_way
    add("gauge", "num_requests_running", engine.running)
    add("gauge", "num_requests_waiting", engine.waiting)
    add("gauge", "engine_sleep_state", 1, sleep_state=["awake"])
    add("gauge", "kv_cache_usage_perc", engine.kv_used_fraction)
    tokens, block = int(cache_tokens), prefixes.block_tokens
    add(
        "gauge", "cache_config_info", 1,
        block_size=[block], kv_cache_size_tokens=[tokens], num_gpu_blocks=[tokens // block],
    )  # fmt: skip
    add("counter", "prefix_cache_queries_total", prefixes.queries)
    add("counter", "prefix_cache_hits_total", prefixes.hits)
    add("counter", "num_preemptions_total", engine.preemptions)
    add("counter", "prompt_tokens_total", seen.prompt_tokens)
    add("counter", "generation_tokens_total", generated)
    if engine.speculation is not None:
        # All but the first token of each answer come of verifying steps, the mean of them evenly.
        drafts = max(generated - seen.first_token_s.count, 0) / engine.speculation.acceptance_length
        kept = [drafts * share for share in engine.speculation.survival]
        add("counter", "spec_decode_num_drafts_total", int(drafts))
        add("counter", "spec_decode_num_draft_tokens_total", int(drafts) * engine.speculation.depth)
        add("counter", "spec_decode_num_accepted_tokens_total", int(sum(kept)))
        add("counter", "spec_decode_num_accepted_tokens_per_pos_total", *map(int, kept), position=range(len(kept)))
    add("counter", "request_success_total", *seen.endings.values(), finished_reason=seen.endings)
    for name, histogram in (
        ("vllm:time_to_first_token_seconds", seen.first_token_s),
        ("vllm:inter_token_latency_seconds", seen.between_tokens_s),
        ("vllm:request_time_per_output_token_seconds", seen.per_output_token_s),
        ("vllm:e2e_request_latency_seconds", seen.whole_request_s),
        ("vllm:request_queue_time_seconds", seen.queue_s),
    ):
        families.append((name, "histogram", "", histogram_samples(name, labels, histogram)))
    return f"# emulated by crosstie: {label}\n{exposition(families)}".encode()
