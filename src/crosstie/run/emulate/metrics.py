"""What vLLM's /metrics would say of a replica, under vLLM's names; seconds are those of the emulated engine."""

import math

from crosstie.core.histogram import Histogram
from crosstie.run.emulate.prefix_cache import BLOCK_TOKENS
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


class Metrics:
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


def exposition(
    model: str, what: str, engine: Engine | DisaggregatedEngine, cache_tokens: float, prefixes: PrefixCache,
    seen: Metrics, under_way: int,
) -> bytes:  # fmt: skip
    """`under_way`: tokens of answers that have not ended."""
    labels = f'engine="0",model_name="{_escaped(model)}"'
    lines = [f"# emulated by crosstie: {what}"]

    def simple(name: str, kind: str, value: float, more: str = "") -> None:
        if not lines[-1].startswith(name + "{"):
            lines.append(f"# TYPE {name} {kind}")
        lines.append(f"{name}{{{labels}{more}}} {value:.10g}")

    simple("vllm:num_requests_running", "gauge", engine.running)
    simple("vllm:num_requests_waiting", "gauge", engine.waiting)
    simple("vllm:engine_sleep_state", "gauge", 1.0, ',sleep_state="awake"')
    simple("vllm:kv_cache_usage_perc", "gauge", engine.kv_used_fraction)
    blocks = int(cache_tokens) // BLOCK_TOKENS
    config = f',block_size="{BLOCK_TOKENS}",kv_cache_size_tokens="{int(cache_tokens)}",num_gpu_blocks="{blocks}"'
    simple("vllm:cache_config_info", "gauge", 1.0, config)
    simple("vllm:prefix_cache_queries_total", "counter", prefixes.queries)
    simple("vllm:prefix_cache_hits_total", "counter", prefixes.hits)
    simple("vllm:num_preemptions_total", "counter", engine.preemptions)
    simple("vllm:prompt_tokens_total", "counter", seen.prompt_tokens)
    simple("vllm:generation_tokens_total", "counter", seen.generation_tokens + under_way)
    if engine.speculation is not None:
        # All but the first token of each answer come of verifying steps, the mean of them evenly.
        first = seen.first_token_s.count
        drafts = max(seen.generation_tokens + under_way - first, 0) / engine.speculation.acceptance_length
        kept = [drafts * share for share in engine.speculation.survival]
        simple("vllm:spec_decode_num_drafts_total", "counter", int(drafts))
        simple("vllm:spec_decode_num_draft_tokens_total", "counter", int(drafts) * engine.speculation.depth)
        simple("vllm:spec_decode_num_accepted_tokens_total", "counter", int(sum(kept)))
        for position, tokens in enumerate(kept):
            more = f',position="{position}"'
            simple("vllm:spec_decode_num_accepted_tokens_per_pos_total", "counter", int(tokens), more)
    for ending, times in seen.endings.items():
        simple("vllm:request_success_total", "counter", times, f',finished_reason="{ending}"')
    for name, histogram in (
        ("time_to_first_token_seconds", seen.first_token_s),
        ("inter_token_latency_seconds", seen.between_tokens_s),
        ("request_time_per_output_token_seconds", seen.per_output_token_s),
        ("e2e_request_latency_seconds", seen.whole_request_s),
        ("request_queue_time_seconds", seen.queue_s),
    ):
        lines += _histogram(f"vllm:{name}", labels, histogram)
    return ("\n".join(lines) + "\n").encode()


def _histogram(name: str, labels: str, histogram: Histogram) -> list[str]:
    lines = [f"# TYPE {name} histogram"]
    lines += [f'{name}_bucket{{{labels},le="{bound}"}} {count}' for bound, count in histogram.buckets()]
    return [*lines, f"{name}_sum{{{labels}}} {histogram.total:.10g}", f"{name}_count{{{labels}}} {histogram.count}"]


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
